"""Frame counts and times of each camera, and the memory of the process."""

from __future__ import annotations

import os
import resource
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from ..types import Frame

WINDOW_FRAMES = 1000
RATE_FRAMES = 100


class CameraStats:
    """Counts of one camera's frames (received = stepped + failed + skipped), and times of the last 1000 frames.

    Frames that were `too_old`, or whose clock was ahead of the node's, are among the skipped ones. Frames whose masks
    were `withheld` are among the stepped ones. `epoch` is that of the camera's ids. `silent_s` returns the seconds
    since its last frame arrived.
    `age` is the time from capture to the start of the frame's step. `latency` is the time from capture to the
    publication of the masks. If the camera's clock is not Unix time, both count from the frame's arrival.
    """

    def __init__(self, epoch: int | None = None, silent_s: Callable[[], float | None] = lambda: None) -> None:
        self.stepped = self.failed = self.skipped = 0
        self.too_old = self.clock_ahead = self.withheld = 0
        self._left_out = 0  # since the last step
        self._epoch, self._silent_s = epoch, silent_s
        self.last_seq: int | None = None
        self.last_error: str | None = None
        self._ages_ns: deque[int] = deque(maxlen=WINDOW_FRAMES)
        self._latencies_ns: deque[int] = deque(maxlen=WINDOW_FRAMES)
        self._ends_s: deque[float] = deque(maxlen=RATE_FRAMES)

    @property
    def idle_s(self) -> float:
        """Seconds since the last frame was stepped; infinite before the first."""
        return time.monotonic() - self._ends_s[-1] if self._ends_s else float("inf")

    def begin(self, frame: Frame, received_ns: int, skipped: int) -> None:
        """Record that a frame's step starts, and that `skipped` frames before it were skipped."""
        self.skipped += max(0, skipped - self._left_out)
        self._left_out = 0
        self._ages_ns.append(time.time_ns() - _origin_ns(frame, received_ns))

    def end(self, frame: Frame, received_ns: int) -> None:
        """Record that the frame's masks were published."""
        self.stepped += 1
        self.last_seq = frame.seq
        self._latencies_ns.append(time.time_ns() - _origin_ns(frame, received_ns))
        self._ends_s.append(time.monotonic())

    def leave_out(self, kind: Literal["too_old", "clock_ahead"], reason: str) -> None:
        """Record that a frame was skipped because of its time."""
        self.skipped += 1
        self._left_out += 1
        if kind == "too_old":
            self.too_old += 1
        else:
            self.clock_ahead += 1
        self.last_error = reason

    def withhold(self, reason: str) -> None:
        """Record that a frame was stepped, but its masks were too old to publish."""
        self.stepped += 1
        self.withheld += 1
        self.last_error = reason

    def fail(self, error: Exception) -> None:
        """Record that the frame's step failed."""
        self.failed += 1
        self.last_error = f"{type(error).__name__}: {error}"

    def describe(self) -> dict[str, Any]:
        """Return the counts, frames per second, and percentiles in milliseconds (None before the first frame)."""
        silent_s = self._silent_s()
        return {
            "epoch": self._epoch,
            "silent_s": None if silent_s is None else round(silent_s, 3),
            "received": self.stepped + self.failed + self.skipped,
            "stepped": self.stepped,
            "skipped": self.skipped,
            "failed": self.failed,
            "too_old": self.too_old,
            "clock_ahead": self.clock_ahead,
            "withheld": self.withheld,
            "last_seq": self.last_seq,
            "last_error": self.last_error,
            "fps": self._rate(),
            "age_p50_ms": _percentile_ms(self._ages_ns, 0.50),
            "age_p99_ms": _percentile_ms(self._ages_ns, 0.99),
            "latency_p50_ms": _percentile_ms(self._latencies_ns, 0.50),
            "latency_p99_ms": _percentile_ms(self._latencies_ns, 0.99),
        }

    def _rate(self) -> float:
        if len(self._ends_s) < 2:
            return 0.0
        # measured up to now, so the rate of a stopped camera falls
        return round(len(self._ends_s) / max(time.monotonic() - self._ends_s[0], 1e-9), 2)


def _origin_ns(frame: Frame, received_ns: int) -> int:
    return frame.capture_ns if frame.clock == "system" else received_ns


def _percentile_ms(values_ns: deque[int], fraction: float) -> float | None:
    if not values_ns:
        return None
    return round(sorted(values_ns)[int(fraction * (len(values_ns) - 1))] / 1e6, 3)


def rss_bytes() -> int:
    """Return the resident memory of this process in bytes; its peak if the current value is not available."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
