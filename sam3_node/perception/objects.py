"""Keep one camera's objects: their ids, labels and status, and whatever else is known of each.

An object has one home. Every value that is kept for each object is a `PerObject` that is registered here, or belongs to
a part that has registered how it forgets an object. So `Objects.remove` is the only place that forgets.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from ..errors import CapacityError, UnknownObjectError
from ..schema.state import Count, Id, Label, Number, SavedPart, SavedState, from_plain
from ..types import Instance, Priority, TrackState
from .stage import PerObject
from .step import Seen

T = TypeVar("T")


MAX_OBJECTS = 256
"""Objects of a camera in a state, the largest tracker.max_objects."""


class ObjectStatus(SavedState):
    """An object between two frames."""

    id: Id
    label: Label
    state: TrackState = "tentative"
    """tentative until its first frame; a detected object until it is confirmed"""
    score: Number = 0.0
    age: Count = 0
    """number of frames that it was tracked on"""
    frames_since_seen: Count = 0
    priority: Priority = "normal"


class ObjectsState(SavedState):
    """What `Objects` keeps."""

    last_id: Count
    objects: Annotated[dict[Id, ObjectStatus], Meta(max_length=MAX_OBJECTS)]
    values: dict[Label, dict[Id, Any]]
    """by the names of `PerObject`, which knows their types"""


class Objects(SavedPart[ObjectsState]):
    """The objects of one camera. Ids count up from 1 and are never reused."""

    STATE = ObjectsState

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.id_limit: int | None = None
        """The last id that may be given, as a restart from the saved snapshot would give those after it; None: any."""
        self.last_id = 0
        """The last id that was given; 0 if there was none."""
        self._objects: dict[int, ObjectStatus] = {}
        self._registered: list[PerObject[Any]] = []
        self._forgetting: list[Callable[[int], None]] = []
        self._leaving: list[Callable[[int, int], None]] = []

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
        # `add` gives the id, so a prompt that is refused in between uses up none
        return self.last_id + 1

    def add(self, object_id: int, label: str, priority: Priority = "normal") -> None:
        """Add the object whose id was reserved, or one that was lost and comes back under its id."""
        self._objects[object_id] = ObjectStatus(object_id, label, priority=priority)
        self.last_id = max(self.last_id, object_id)

    def require(self, object_id: int) -> None:
        """Raise UnknownObjectError unless there is an object with this id."""
        if object_id not in self._objects:
            raise UnknownObjectError(f"no object {object_id}; there are {sorted(self._objects) or 'none'}")

    def register(self, values: PerObject[T]) -> PerObject[T]:
        """Forget, save and restore these values with the objects that they belong to. Return them."""
        self._registered.append(values)
        return values

    def on_remove(self, forget: Callable[[int], None]) -> None:
        """Call `forget` with the id of each object that is removed. It must accept ids that it does not know."""
        self._forgetting.append(forget)

    def remove(self, object_id: int) -> None:
        """Forget an object, and all that is kept for it; UnknownObjectError for an unknown id."""
        self.require(object_id)
        del self._objects[object_id]
        for values in self._registered:
            values.pop(object_id, None)
        for forget in self._forgetting:
            forget(object_id)

    def on_leave(self, keep: Callable[[int, int], None]) -> None:
        """Call `keep` with the id of each object that is lost and the time, before it is removed."""
        self._leaving.append(keep)

    def leave(self, object_id: int, now_ns: int) -> None:
        """Give up an object that is out of view, at a capture time: remove it, but let it be remembered."""
        self.require(object_id)
        for keep in self._leaving:
            keep(object_id, now_ns)
        self.remove(object_id)

    def get(self, object_id: int) -> ObjectStatus:
        """Return the status of an object; UnknownObjectError for an unknown id."""
        self.require(object_id)
        return self._objects[object_id]

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

    @property
    def values(self) -> dict[str, dict[int, Any]]:
        """The registered values that are saved, by their names and the ids of objects."""
        return {values.name: values for values in self._registered if values.saved}

    @values.setter
    def values(self, saved: Mapping[str, Mapping[int, Any]]) -> None:
        for values in self._registered:
            # filled again, not replaced, because the stages hold these objects
            values.clear()
            # a state from before these values were added lacks them
            kind: Any = dict[Id, values.kind]  # type: ignore[name-defined]
            values.update(from_plain(kind, saved.get(values.name, {}), values.name))

    def observe(self, seen: Seen) -> Instance:
        """Record what is seen of an object on the next frame. It is occluded if it is not in view."""
        status = self._objects[seen.id]
        status.age += 1
        status.score = seen.score
        if seen.tentative:
            status.state = "tentative"
        else:
            status.state = "tracked" if seen.in_view else "occluded"
        status.frames_since_seen = 0 if seen.in_view else status.frames_since_seen + 1
        # without a mask in view there is nothing to be sure of
        return Instance(
            seen.id,
            status.label,
            seen.score,
            status.state,
            status.age,
            status.frames_since_seen,
            seen.mask,
            confidence=seen.confidence if seen.in_view else None,
            doubtful=seen.doubtful,
            name_confidence=seen.name_confidence if seen.in_view else None,
            hidden_by="robot" if seen.covered and not seen.in_view else None,
        )
