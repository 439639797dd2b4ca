"""Pacing of images on an absolute time grid, so that waiting errors never add up."""

from __future__ import annotations

import threading
import time

from ..types import NANOSECONDS

_FALLBACK_GAP_NS = NANOSECONDS // 30
_MAX_GAP_NS = 10 * NANOSECONDS


class Pacer:
    """Ticks `fps` times a second, starting with the first wait. Missed ticks are skipped, not caught up."""

    def __init__(self, fps: float, stop: threading.Event) -> None:
        self._period_ns = NANOSECONDS / fps
        self._stop = stop
        self._start_ns: int | None = None
        self._tick = 0

    def wait(self) -> bool:
        """Wait for the next tick; return False if stopped. Return at once if that tick is past."""
        now = time.monotonic_ns()
        if self._start_ns is None:
            self._start_ns = now
        due = self._start_ns + self._tick * self._period_ns
        stopped = self._stop.wait(max(0.0, due - now) / NANOSECONDS)
        passed = int((time.monotonic_ns() - self._start_ns) // self._period_ns)
        self._tick = max(self._tick, passed) + 1
        return not stopped


class StampPacer:
    """Spaces images by the differences of their stamps. Delays are not caught up.

    If a stamp is not later than the previous one, because a recording started again, the previous gap is repeated. Gaps
    are limited to 10 s.
    """

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._stamp_ns: int | None = None
        self._due_ns = 0
        self._gap_ns = _FALLBACK_GAP_NS

    def wait(self, stamp_ns: int) -> bool:
        """Wait until the image with this stamp is due; return False if stopped."""
        now = time.monotonic_ns()
        if self._stamp_ns is None:
            self._due_ns = now
        else:
            if stamp_ns > self._stamp_ns:
                self._gap_ns = min(stamp_ns - self._stamp_ns, _MAX_GAP_NS)
            self._due_ns = max(self._due_ns + self._gap_ns, now)
        self._stamp_ns = stamp_ns
        return not self._stop.wait((self._due_ns - now) / NANOSECONDS)


class RateLimit:
    """Limits a faster camera to `fps` images a second, evenly spaced; 0 admits all."""

    def __init__(self, fps: float) -> None:
        self._period_ns = NANOSECONDS / fps if fps else 0.0
        self._due_ns = 0.0

    def admits(self, monotonic_ns: int) -> bool:
        """Return True if the image taken at this time of the monotonic clock is to be passed on."""
        # a quarter of a period early counts as on time, else jitter would halve the rate of an equally fast camera
        if monotonic_ns < self._due_ns - self._period_ns / 4:
            return False
        late = monotonic_ns - self._due_ns > self._period_ns
        self._due_ns = (monotonic_ns if late else self._due_ns) + self._period_ns
        return True
