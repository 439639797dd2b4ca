"""The registry of one camera's objects: id, label, age and state of each, without its memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from ..errors import CapacityError, UnknownObjectError
from ..types import Instance, Mask, Priority, State, TrackState


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
        """Remove an object; UnknownObjectError if there is none with this id."""
        self.require(object_id)
        del self._objects[object_id]

    def label(self, object_id: int) -> str:
        """Return the label of an object."""
        return self._objects[object_id].label

    def rename(self, object_id: int, label: str) -> None:
        """Change the label of an object; UnknownObjectError if there is none with this id."""
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
