"""Finds which objects of several calibrated cameras are the same thing, by label, position in the base frame, and size.

It works on masks messages alone and knows no time but theirs, so the same messages in the same order give the same ids.
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from ..schema.state import Count, Id, Label, Position, SavedPart, SavedState, Size, Time
from ..types import NANOSECONDS, Instance, MaskFrame, keep_newest

MAX_GONE = 1024
"""Objects that are tracked no longer, of all cameras, whose things are known."""
BASE = "base"
"""The frame in which positions of several cameras can be compared."""


class CameraObject(NamedTuple):
    """An object of one camera."""

    camera: Label
    id: Id


@dataclass(frozen=True, slots=True)
class LinkRules:
    """Thresholds of links between objects of different cameras."""

    max_distance_m: float
    """Distance between two positions up to which they may belong to one thing."""
    release_factor: float = 2.0
    """A link is doubted where the distance is above `max_distance_m` times this, plus the things' own motion."""
    max_size_ratio: float = 2.5
    """Ratio of the diagonals of two extents up to which they may belong to one thing. Cameras see different sides."""
    max_apart_s: float = 0.5
    """Time between two positions up to which they are compared."""
    confirmations: int = 3
    """Observations in a row that must agree before a link begins."""
    contradictions: int = 5
    """Observations in a row that must disagree before a link ends."""


class Sighting(Struct, frozen=True):
    """The position of an object on the newest frame of its camera, with what tells it from others there."""

    label: Label
    position_m: Position
    diagonal_m: Size | None
    """of its extent; None if the extent is unknown"""
    time_ns: Time
    speed_m_s: Size = 0.0
    """since the sighting before; noise included"""


class Thing(SavedState):
    """One thing in the world, which is at most one object of each camera."""

    id: Id
    members: dict[CameraObject, Sighting | None]
    """its objects, each with its sighting; None if the newest frame of its camera does not say its position"""
    agreed: dict[Id, Count] = field(default_factory=dict)
    """other thing -> observations in a row that took it for the same"""
    contradicted: dict[CameraObject, Count] = field(default_factory=dict)
    """member -> observations in a row that contradict its link"""

    @property
    def cameras(self) -> set[str]:
        return {key.camera for key in self.members}


class LinksState(SavedState):
    """What `WorldLinker` keeps."""

    last_id: Count
    things: dict[Id, Thing]
    gone: dict[CameraObject, Id]


class WorldLinker(SavedPart[LinksState]):
    """Gives each object a `world_id` that is the same for the objects of all cameras that are the same thing.

    An object gets a `world_id` with its first position in the frame "base", and keeps it while it is tracked, also
    while it is hidden. Ids count up from 1 and are never given again. When two things turn out to be one, the younger
    object takes the older id. When an object contradicts its link, it gets a new id. Doubtful masks have no say.

    `observe` compares the objects of one camera with those on the newest frames of the others. Things of equal labels,
    near positions and similar sizes are assigned to each other so that the sum of distances is the smallest. A thing
    holds one object of each camera at most.
    """

    STATE = LinksState
    last_id: int
    """the last id that was given; 0 if there was none"""
    _things: dict[int, Thing]
    """by id, in the order of ids"""
    _gone: dict[CameraObject, int]
    """the thing of each object that is tracked no longer, for when it comes back under its id"""
    _ids: dict[CameraObject, int]
    """the thing of each object"""

    def __init__(self, rules: LinkRules) -> None:
        self._rules = rules
        self.last_id = 0
        self.id_limit: int | None = None
        """The last id that may be given; None: any. Things beyond it have no id until it is raised."""
        self._things = {}
        self._gone = {}
        self._ids = {}

    def after_restore(self, state: LinksState) -> None:
        """Find the thing of each object."""
        self._ids = {key: thing.id for thing in self._things.values() for key in thing.members}

    def observe(self, masks: MaskFrame) -> MaskFrame:
        """Return the masks with a `world_id` for each object that has one."""
        # first what is gone, so that its thing is free; then new sightings; then links, which compare them
        self._forget_absent(masks)
        for instance in masks.instances:
            sighting = _make_sighting(instance, masks.age_origin_ns) if _says_position(instance) else None
            self._note(CameraObject(masks.camera, instance.id), sighting)
        seen = [CameraObject(masks.camera, found.id) for found in masks.instances if _says_position(found)]
        for key in seen:
            if key in self._ids:
                self._check_link(key)
        self._join_things(masks.camera, [key for key in seen if key in self._ids])
        instances = tuple(
            replace(instance, world_id=self._ids.get(CameraObject(masks.camera, instance.id)))
            for instance in masks.instances
        )
        return replace(masks, instances=instances)

    def drop(self, camera: str) -> None:
        """Forget all objects of a camera."""
        # a list, because each removal changes the map
        for key in [key for key in self._ids if key.camera == camera]:
            self._remove(key)
        for key in [key for key in self._gone if key.camera == camera]:
            del self._gone[key]

    def join(self, known: CameraObject, other: CameraObject) -> None:
        """Take an object for the same thing as a known one of another camera; their positions may contradict it."""
        if known not in self._ids or other in self._ids:
            return
        thing = self._things[self._ids[known]]
        if other.camera not in thing.cameras:
            thing.members[other] = None
            self._ids[other] = thing.id

    def _note(self, key: CameraObject, sighting: Sighting | None) -> None:
        if key in self._ids:
            members = self._things[self._ids[key]].members
            members[key] = sighting and _with_speed(sighting, members[key])
        # beyond the limit, the object tries again with its next position
        elif sighting is not None and (self.id_limit is None or self.last_id < self.id_limit):
            self._begin(key, sighting)

    def _begin(self, key: CameraObject, sighting: Sighting | None) -> None:
        """Give an object a thing: that which it had before it was lost, unless another object of its camera has it."""
        number = self._gone.pop(key, 0)
        thing = self._things.get(number)
        if number and thing is None:
            self._things[number] = Thing(number, {key: sighting})
        elif thing is not None and key.camera not in thing.cameras:
            thing.members[key] = sighting
        else:
            self.last_id += 1
            number = self.last_id
            self._things[number] = Thing(number, {key: sighting})
        self._ids[key] = number

    def _forget_absent(self, masks: MaskFrame) -> None:
        # a held object was not tracked on this frame, so it is not gone
        held = masks.shed.held if masks.shed else ()
        present = {*held, *(instance.id for instance in masks.instances)}
        for key in [key for key in self._ids if key.camera == masks.camera and key.id not in present]:
            keep_newest(self._gone, key, self._ids[key], MAX_GONE)
            self._remove(key)

    def _remove(self, key: CameraObject) -> None:
        thing = self._things[self._ids.pop(key)]
        del thing.members[key]
        thing.contradicted.pop(key, None)
        if not thing.members:
            self._end(thing)

    def _end(self, thing: Thing) -> None:
        del self._things[thing.id]
        for other in self._things.values():
            other.agreed.pop(thing.id, None)

    def _check_link(self, key: CameraObject) -> None:
        """Count an observation that contradicts the object's link, and end the link after several in a row."""
        thing = self._things[self._ids[key]]
        rules = self._rules
        own = thing.members[key]
        pairs = self._pair([own], [other for member, other in thing.members.items() if member != key])
        # without a sighting to compare, nothing speaks for or against the link
        if not pairs:
            return
        if any(self._may_stay(*pair) for pair in pairs):
            thing.contradicted.pop(key, None)
            return
        thing.contradicted[key] = thing.contradicted.get(key, 0) + 1
        if thing.contradicted[key] >= rules.contradictions:
            self._remove(key)
            self._note(key, own)

    def _join_things(self, camera: str, seen: list[CameraObject]) -> None:
        """Count which things of this camera agree with things of others, and join those that agree several times."""
        own = [self._things[self._ids[key]] for key in seen]
        others = [thing for thing in self._things.values() if camera not in thing.cameras]
        pairs = dict(self._assign(own, others))
        for thing in own:
            other_id = pairs.get(thing.id)
            count = 0 if other_id is None else thing.agreed.get(other_id, 0) + 1
            # only observations in a row count, so what agreed before with another thing is void
            thing.agreed = {} if other_id is None else {other_id: count}
            if other_id is not None and count >= self._rules.confirmations:
                self._join(thing, self._things[other_id])

    def _assign(self, own: list[Thing], others: list[Thing]) -> Iterator[tuple[int, int]]:
        """Yield pairs of ids of things that are probably the same."""
        costs = np.array([[self._cost(thing, other) for other in others] for thing in own])
        if not costs.size:
            return
        from scipy.optimize import (
            linear_sum_assignment,
        )  # here, because it slows the start of a node of one camera

        # no pair costs as much as the worst one, so that a good pair is not given up for two bad ones
        rows, columns = linear_sum_assignment(np.minimum(costs, self._rules.max_distance_m))
        for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
            if math.isfinite(costs[row, column]):
                yield own[row].id, others[column].id

    def _cost(self, thing: Thing, other: Thing) -> float:
        """Return the mean distance in metres between two things, infinite if they cannot be the same."""
        # two objects of one camera are two things
        if thing.cameras & other.cameras:
            return math.inf
        distances_m = [
            _distance_m(*pair, self._rules.max_size_ratio)
            for pair in self._pair(thing.members.values(), other.members.values())
        ]
        if not distances_m or max(distances_m) > self._rules.max_distance_m:
            return math.inf
        return sum(distances_m) / len(distances_m)

    def _pair(
        self, lefts: Iterable[Sighting | None], rights: Iterable[Sighting | None]
    ) -> list[tuple[Sighting, Sighting]]:
        """Return all pairs of sightings of nearly the same time."""
        # positions of different moments also differ by the motion in between
        max_apart_ns = self._rules.max_apart_s * NANOSECONDS
        pairs = itertools.product(filter(None, lefts), filter(None, rights))
        return [(left, right) for left, right in pairs if abs(left.time_ns - right.time_ns) <= max_apart_ns]

    def _may_stay(self, left: Sighting, right: Sighting) -> bool:
        """Return True if two linked sightings do not contradict their link."""
        rules = self._rules
        moved_m = max(left.speed_m_s, right.speed_m_s) * abs(left.time_ns - right.time_ns) / NANOSECONDS
        limit_m = rules.max_distance_m * rules.release_factor + moved_m
        return _distance_m(left, right, rules.max_size_ratio) <= limit_m

    def _join(self, left: Thing, right: Thing) -> None:
        """Make one thing of two. The smaller id stays."""
        if left.cameras & right.cameras:
            return  # another pair of this frame has joined one of them
        older, younger = sorted((left, right), key=lambda thing: thing.id)
        self._end(younger)
        older.members |= younger.members
        # these counts compared other members
        older.contradicted.clear()
        older.agreed.clear()
        self._ids |= dict.fromkeys(younger.members, older.id)


def _distance_m(left: Sighting, right: Sighting, max_size_ratio: float) -> float:
    """Return the distance of two sightings in metres, infinite if label or size say that they are of two things."""
    if left.label != right.label:
        return math.inf
    if left.diagonal_m and right.diagonal_m:
        ratio = left.diagonal_m / right.diagonal_m
        if max(ratio, 1 / ratio) > max_size_ratio:
            return math.inf
    return math.dist(left.position_m, right.position_m)


def _with_speed(sighting: Sighting, before: Sighting | None) -> Sighting:
    """Return the sighting with its speed since the one before."""
    # without time in between there is no speed; a clock may also begin again
    if before is None or sighting.time_ns <= before.time_ns:
        return sighting
    passed_s = (sighting.time_ns - before.time_ns) / NANOSECONDS
    return replace(sighting, speed_m_s=math.dist(sighting.position_m, before.position_m) / passed_s)


def _says_position(instance: Instance) -> bool:
    """Return True if a frame says where the object is in the base frame, and no doubt about its mask exists."""
    in_base = instance.frame == BASE and instance.position_m is not None
    return in_base and instance.is_sure


def _make_sighting(instance: Instance, time_ns: int) -> Sighting:
    assert instance.position_m is not None
    diagonal_m = None if instance.extent_m is None else math.hypot(*instance.extent_m)
    return Sighting(instance.label, instance.position_m, diagonal_m, time_ns)
