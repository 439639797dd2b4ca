"""What is known of each object besides its memory: id, label, age and state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from ..errors import CapacityError, UnknownObjectError
from ..types import Instance, Mask, State, TrackState


@dataclass(slots=True)
class ObjectStatus:
    """An object between frames: tentative until its first, and if found by name until it is believed.

    `age` counts the frames that it was tracked on.
    """

    id: int
    label: str
    state: TrackState = "tentative"
    score: float = 0.0
    age: int = 0
    frames_since_seen: int = 0


class ObjectRegistry:
    """The objects of one camera. Ids count up from 1 and are never used again."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._objects: dict[int, ObjectStatus] = {}
        self._last_id = 0

    def __contains__(self, object_id: int) -> bool:
        return object_id in self._objects

    def __iter__(self) -> Iterator[ObjectStatus]:
        return iter(self._objects.values())

    def __len__(self) -> int:
        return len(self._objects)

    def reserve(self) -> int:
        """The id that the next object will have; CapacityError when there is no room for it."""
        if len(self._objects) >= self.capacity:
            raise CapacityError(
                f"expected room for one more, found all {self.capacity} places taken; "
                "remove an object or raise tracker.max_objects"
            )
        return self._last_id + 1

    def add(self, object_id: int, label: str) -> None:
        """Enter the object whose id was reserved."""
        self._objects[object_id] = ObjectStatus(object_id, label)
        self._last_id = object_id

    def require(self, object_id: int) -> None:
        """Raise UnknownObjectError unless there is such an object."""
        if object_id not in self._objects:
            raise UnknownObjectError(f"no object {object_id}; there are {sorted(self._objects) or 'none'}")

    def remove(self, object_id: int) -> None:
        """Forget an object."""
        self.require(object_id)
        del self._objects[object_id]

    def label(self, object_id: int) -> str:
        """What an object is called."""
        return self._objects[object_id].label

    def rename(self, object_id: int, label: str) -> None:
        """Call an object otherwise."""
        self._objects[object_id].label = label

    def state(self) -> State:
        """What `restore` takes."""
        return {"last_id": self._last_id, "objects": [asdict(known) for known in self]}

    def restore(self, state: State) -> None:
        """Know the objects that were known when `state` was asked for, and no others."""
        self._last_id = state["last_id"]
        self._objects = {known["id"]: ObjectStatus(**known) for known in state["objects"]}

    def observe(
        self, object_id: int, mask: Mask, score: float, visible: bool, tentative: bool = False
    ) -> Instance:
        """Take note of an object on the next frame. It is occluded when not visible or without a pixel."""
        known = self._objects[object_id]
        seen = visible and mask.area > 0
        known.age += 1
        known.score = score
        known.state = "tentative" if tentative else "tracked" if seen else "occluded"
        known.frames_since_seen = 0 if seen else known.frames_since_seen + 1
        return Instance(object_id, known.label, score, known.state, known.age, known.frames_since_seen, mask)
