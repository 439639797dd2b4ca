"""Keep one camera's objects (id, label, age and state, without memory), and decide what a late step sheds.

The order of shedding is fixed. At level 1 objects are searched for by name at DETECTION_STRETCH times the period. At
level 2, objects of low priority are also tracked on every second step only. What a step sheds depends only on the level
and on the objects, so a replay that knows the level of each step repeats it.
"""

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass

from ..errors import CapacityError, UnknownObjectError
from ..types import Instance, Mask, Priority, Shed, State, TrackState


@dataclass(slots=True)
class ObjectStatus:
    """An object between two frames."""

    id: int
    label: str
    state: TrackState = "tentative"
    """tentative until its first frame; a detected object until it is confirmed"""
    score: float = 0.0
    age: int = 0
    """number of frames that it was tracked on"""
    frames_since_seen: int = 0
    priority: Priority = "normal"


class ObjectRegistry:
    """The objects of one camera. Ids count up from 1 and are never reused."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.id_limit: int | None = None
        """The last id that may be given, as a restart from the saved snapshot would give those after it; None: any."""
        self._objects: dict[int, ObjectStatus] = {}
        self.last_id = 0
        """The last id that was given; 0 if there was none."""

    def __contains__(self, object_id: int) -> bool:
        return object_id in self._objects

    def __iter__(self) -> Iterator[ObjectStatus]:
        return iter(self._objects.values())

    def __len__(self) -> int:
        return len(self._objects)

    @property
    def has_free_id(self) -> bool:
        """True if one more id may be given."""
        return self.id_limit is None or self.last_id < self.id_limit

    def reserve(self) -> int:
        """Return the id of the next object; CapacityError if all slots, or all ids that may be given, are taken."""
        if len(self._objects) >= self.capacity:
            raise CapacityError(
                f"expected a free slot for one more object, found all {self.capacity} slots taken; "
                "remove an object or raise tracker.max_objects"
            )
        if not self.has_free_id:
            raise CapacityError(
                f"expected an id up to {self.id_limit}, the last that the saved snapshot allows, found all given; try "
                "again when the next snapshot is written (snapshot.path; status says why it is not)"
            )
        return self.last_id + 1

    def add(self, object_id: int, label: str, priority: Priority = "normal") -> None:
        """Add the object whose id was reserved."""
        self._objects[object_id] = ObjectStatus(object_id, label, priority=priority)
        self.last_id = object_id

    def require(self, object_id: int) -> None:
        """Raise UnknownObjectError unless there is an object with this id."""
        if object_id not in self._objects:
            raise UnknownObjectError(f"no object {object_id}; there are {sorted(self._objects) or 'none'}")

    def remove(self, object_id: int) -> None:
        """Remove an object; UnknownObjectError for an unknown id."""
        self.require(object_id)
        del self._objects[object_id]

    def label(self, object_id: int) -> str:
        """Return the label of an object."""
        return self._objects[object_id].label

    def rename(self, object_id: int, label: str) -> None:
        """Change the label of an object; UnknownObjectError for an unknown id."""
        self.require(object_id)
        self._objects[object_id].label = label

    def set_priority(self, object_id: int, priority: Priority) -> None:
        """Change the priority of an object."""
        self._objects[object_id].priority = priority

    def catch_up(self, object_id: int, frames: int, hidden: int) -> None:
        """Count `frames` more on which an object was tracked; it was out of view on the last `hidden` of them."""
        status = self._objects[object_id]
        status.age += frames
        status.frames_since_seen = hidden

    def state(self) -> State:
        """Return the state that `restore` takes."""
        return {"last_id": self.last_id, "objects": [asdict(status) for status in self]}

    def restore(self, state: State) -> None:
        """Replace all objects by those that `state` returned."""
        self.last_id = state["last_id"]
        self._objects = {status["id"]: ObjectStatus(**status) for status in state["objects"]}

    def observe(
        self, object_id: int, mask: Mask, score: float, visible: bool, tentative: bool = False
    ) -> Instance:
        """Record an object's mask on the next frame. It is occluded if it is not visible or its mask is empty."""
        status = self._objects[object_id]
        in_view = visible and mask.area > 0
        status.age += 1
        status.score = score
        status.state = "tentative" if tentative else "tracked" if in_view else "occluded"
        status.frames_since_seen = 0 if in_view else status.frames_since_seen + 1
        return Instance(
            object_id, status.label, score, status.state, status.age, status.frames_since_seen, mask
        )


MAX_LEVEL = 2
DETECTION_STRETCH = 4
"""Factor of the period of detection from level 1 on."""
WINDOW = 30
"""Frames that a decision looks at."""
MIN_MISSES = 3
"""Frames of the window that must exceed the budget: a single slow frame changes nothing."""
EASY_SHARE = 0.8
"""Share of the budget that frames must keep before the level falls."""
MAX_PATIENCE = 8 * WINDOW
"""Longest wait, in frames, before a fall is tried again."""


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
    low = (status.id for status in objects if status.priority == "low") if level >= MAX_LEVEL else ()
    return Shed(
        level, tuple(object_id for object_id in low if object_id in tracked and (object_id + step) % 2)
    )
