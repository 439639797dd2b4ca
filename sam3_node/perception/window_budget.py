"""Decide how many objects of a camera are followed in windows, by the time that its steps take.

A window takes about as long as a frame with one object. A live camera pays for windows that do not fit its period with
frames that are skipped, which costs more than windows bring. So a window is opened only where the last steps leave time
for it. Masks tell the number, so that a replay as recorded repeats it.
"""

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from ..tracking.object_crops import MAX_CROPS

OBSERVED = 15
"""Steps that a decision looks at."""
MIN_MISSES = 3
"""Of these, steps that must be too late before a window is closed. A single slow step changes nothing."""
FULL = 1.0
"""Share of the period from which a step is too late."""
ROOM = 0.8
"""Share of the period in which a step must fit with one more window."""
MAX_PATIENCE = 32 * OBSERVED
"""Steps after which a number of windows that was too large is tried again, at most."""


class StepCost(NamedTuple):
    """What a step has cost, in milliseconds."""

    step_ms: float
    period_ms: float
    """that the step had: the camera's, without the time that other cameras take"""
    window_ms: float
    """that a window takes, or would take"""
    windows: int
    """objects that were followed in windows"""
    objects: int
    """all objects of the camera"""


class WindowBudget:
    """Decides the number of windows of one camera's next step. It has no clock.

    The number rises by one when the steps with one more window would have fitted ROOM of the period. It falls to what
    fits when steps were too late. If that comes soon after a rise, the rise was a mistake, and `patience`, the steps
    before the next one, doubles.
    """

    def __init__(self) -> None:
        self.count = 0
        """of the next step"""
        self._last: deque[StepCost] = deque(maxlen=OBSERVED)
        self._patience = OBSERVED
        self._since_rise = MAX_PATIENCE
        self._waited = 0

    def observe(self, cost: StepCost) -> int:
        """Take what one more step has cost; return the number of windows of the next."""
        self._last.append(cost)
        self._waited += 1
        self._since_rise += 1
        if sum(each.step_ms > FULL * each.period_ms for each in self._last) >= MIN_MISSES:
            if self.count:
                has_failed = self._since_rise <= self._patience
                self._patience = min(2 * self._patience, MAX_PATIENCE) if has_failed else OBSERVED
                self._change(min(self.count - 1, self._find_fitting()))
        elif self.count > cost.objects:
            # the windows of later objects would all open at once
            self._change(cost.objects)
        elif self.count < cost.objects and self._waited >= self._patience and self._has_room():
            self._since_rise = 0
            self._change(self.count + 1)
        return self.count

    def _has_room(self) -> bool:
        """Return True if there may be one more window, and nearly all of the last steps had time for it."""
        return self.count < MAX_CROPS and self._find_fitting() > self.count

    def _find_fitting(self) -> int:
        """Return how many windows would have fitted nearly all of the last steps; 0 if too few are known."""
        if len(self._last) < MIN_MISSES:
            return 0
        fitting = sorted(_count_fitting(each) for each in self._last)
        return fitting[min(MIN_MISSES - 1, len(fitting) - 1)]

    def _change(self, count: int) -> None:
        """Change the number. Steps with another one say nothing about how late these are."""
        self.count = max(0, count)
        self._waited = 0
        self._last.clear()


def _count_fitting(cost: StepCost) -> int:
    rest_ms = cost.step_ms - cost.windows * cost.window_ms
    return int(max(0.0, ROOM * cost.period_ms - rest_ms) / max(cost.window_ms, 1e-3))


def estimate_window_ms(stages_us: Mapping[str, int], windows: int, objects: int) -> float:
    """Return what a window takes, or would take: an encoding, and the tracking of one object."""
    if windows and "window" in stages_us:
        return stages_us["window"] / windows / 1e3
    return (stages_us.get("encode", 0) + stages_us.get("track", 0) / max(1, objects)) / 1e3
