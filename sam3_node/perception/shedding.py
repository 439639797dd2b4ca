"""Decide what a late step of one camera sheds.

The order of shedding is fixed. At level 1 objects are searched for by name at DETECTION_STRETCH times the period. At
level 2, objects of low priority are also tracked on every second step only. What a step sheds depends only on the level
and on the objects, so a replay that knows the level of each step repeats it.
"""

import math
from collections import deque
from collections.abc import Collection, Iterable

from ..types import Shed
from .objects import ObjectStatus

MAX_LEVEL = 2
"""Highest level of shedding."""
DETECTION_STRETCH = 4
"""Factor of the period of detection from level 1 on."""
WINDOW = 30
"""Frames that a decision looks at."""
MIN_MISSES = 3
"""Frames of the window that must exceed the budget before the level rises. A single slow frame changes nothing."""
EASY_SHARE = 0.8
"""Share of the budget that frames must stay below before the level falls. 1.0 would let it rise again at once."""
MAX_PATIENCE = 8 * WINDOW
"""Frames to wait at most before the level is lowered again."""


class LoadShedder:
    """Decides the level of shedding of one camera, from the time that each frame took. It has no clock.

    The level rises by one when MIN_MISSES frames of the last WINDOW exceeded the budget. It falls by one when fewer
    than that exceeded EASY_SHARE of the budget for `patience` frames in a row: at first WINDOW. If it has to rise again
    within that number of frames, the fall was a mistake, and `patience` doubles. So a load that is just too much for
    the lower level makes the level change ever less often, and the level never stays up for good.
    """

    def __init__(self, budget_ms: float) -> None:
        """`budget_ms` is the limit of the time of a frame; 0 sheds nothing."""
        self.level = 0
        self.over_budget = 0
        """number of frames that exceeded the budget"""
        self._budget_ms = budget_ms
        self._recent_ms: deque[float] = deque(maxlen=WINDOW)
        self._patience = WINDOW
        self._calm = 0
        self._frames_since_fall = math.inf  # of a fall that may still turn out to be a mistake

    def observe(self, load_ms: float) -> int:
        """Take the time of one more frame, and return the level of the next."""
        if not self._budget_ms:
            return 0
        self._recent_ms.append(load_ms)
        self.over_budget += load_ms > self._budget_ms
        self._frames_since_fall += 1
        self._calm = 0 if self._has_misses(EASY_SHARE * self._budget_ms) else self._calm + 1
        if self.level < MAX_LEVEL and self._has_misses(self._budget_ms):
            has_failed = self._frames_since_fall <= self._patience
            self._patience = min(2 * self._patience, MAX_PATIENCE) if has_failed else WINDOW
            # this rise has judged the fall: the next rise must not judge it again
            self._frames_since_fall = math.inf
            self._change(1)
        elif self.level and self._calm >= self._patience:
            self._frames_since_fall = 0
            self._change(-1)
        return self.level

    def _has_misses(self, limit_ms: float) -> bool:
        return sum(load_ms > limit_ms for load_ms in self._recent_ms) >= MIN_MISSES

    def _change(self, by: int) -> None:
        """Change the level. Frames of the old level say nothing about the new one."""
        self.level += by
        self._calm = 0
        self._recent_ms.clear()


def stretch_detection(level: int) -> int:
    """Return the factor of the period of detection."""
    return DETECTION_STRETCH if level >= 1 else 1


def choose_shed(
    level: int, objects: Iterable[ObjectStatus], tracked: Collection[int], step: int
) -> Shed | None:
    """Return what step number `step` leaves out, None at level 0.

    `tracked` objects of low priority are held on every second step: even and odd ids in turn, so that no
    object is held twice in a row.
    """
    if not level:
        return None
    held = list[int]()
    if level >= MAX_LEVEL:
        low = [status.id for status in objects if status.priority == "low"]
        # an object that is not tracked yet has nothing to hold
        held = [object_id for object_id in low if object_id in tracked and (object_id + step) % 2]
    return Shed(level, tuple(held))
