"""The limits on the age of frames and masks, so that no policy acts on what is long past."""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import Literal, NamedTuple

from ..transport import ReceivedFrame
from ..types import MaskFrame

MAX_AHEAD_S = 1.0
"""Largest time by which a camera's clock may be ahead of the node's."""
MEDIAN_STEPS = 3
"""Masks may be older than frames by this many median steps."""
STEPS = 100


class Refusal(NamedTuple):
    """A reason not to step a frame."""

    kind: Literal["too_old", "clock_ahead"]
    reason: str


class AgeLimits:
    """Decides which frames are too old to step, and which masks too old to publish. 0 for `max_age_ms` is no limit.

    With lossless delivery (`live` is False) frames wait in queues and may be recorded ones, so there is no limit.
    """

    def __init__(self, max_age_ms: float, live: bool) -> None:
        self._max_age_ns = int(max_age_ms * 1e6) if live else 0
        self._live = live
        self._steps_ns: deque[int] = deque(maxlen=STEPS)

    def check_frame(self, received: ReceivedFrame) -> Refusal | None:
        """Return the reason not to step a frame, None if it is to be stepped now."""
        frame = received.frame
        origin_ns = frame.capture_ns if frame.clock == "system" else received.received_ns
        age_ns = time.time_ns() - origin_ns
        if self._live and frame.clock == "system" and age_ns < -MAX_AHEAD_S * 1e9:
            return Refusal(
                "clock_ahead",
                f"its clock is {-age_ns / 1e9:.1f} s ahead; synchronise clocks (chrony/PTP) or send clock=monotonic",
            )
        if 0 < self._max_age_ns < age_ns:
            return Refusal(
                "too_old",
                f"frame {frame.seq} is {age_ns / 1e9:.1f} s old, expected at most {self._max_age_ns / 1e6:g} ms "
                "(tracker.max_age_ms); if every frame is, synchronise clocks (chrony/PTP) or send clock=monotonic",
            )
        return None

    def check_masks(self, masks: MaskFrame, step_ns: int) -> str | None:
        """Return the reason to withhold masks that a step of `step_ns` gave, None if they are to be published."""
        limit_ns = self._max_age_ns + MEDIAN_STEPS * self._median_step_ns()
        self._steps_ns.append(step_ns)
        age_ns = time.time_ns() - masks.age_origin_ns
        if not self._max_age_ns or age_ns <= limit_ns:
            return None
        return f"masks withheld: they were {age_ns / 1e9:.1f} s old, expected at most {limit_ns / 1e9:.1f} s"

    def _median_step_ns(self) -> int:
        """Return the median of the steps so far. Before the first, there is none to compare with: 0."""
        return int(statistics.median(self._steps_ns)) if self._steps_ns else 0
