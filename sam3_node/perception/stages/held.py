"""Notice which objects the gripper holds, and where it has those that are hidden in it.

A held object stands still in the gripper's frame while both rise. A pushed one stands still there, too, but does not
rise. Up is the table's normal, else the base's z; of a base that seems to hang from the ceiling, z may point down.
A held object is released when several frames show that it stays where it is while the gripper moves, or that it is far
from its place in the gripper.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from ...geometry import Array, invert, matrix_of, project, transform_points
from ...types import NANOSECONDS, Instance
from ...wire import GRASPED, RELEASED
from ..objects import Objects
from ..stage import PerObject, Stage
from ..step import BASE, DoubtfulPlace, ObjectEvent, StepFrame

WINDOW_S = 1.5
"""Time over which an object's motion is compared with the gripper's."""
MAX_SIGHTS = 60
"""Frames of that time that are compared at most: the newest."""
STILL_M = 0.02
"""Largest distance of an object from its place in the gripper while it stands still there."""
LIFT_M = 0.03
"""Height by which an object was lifted that counts as held."""
LOOKS_UP = 0.3
"""Least z in the base of a camera's axis from which the base may hang from the ceiling: most cameras look down."""
LEFT_M = 0.05
"""Least way in the gripper of an object that has left it. The part of a surface that is seen changes, and so moves the
position of a held object."""
LEFT_FRAMES = 3
"""Frames in a row that must show that an object has left the gripper."""
SURE_WEIGHT = 3
"""Frames with a doubtful mask that count like one with a sure mask, when they show that an object has left."""
REACH_M = 0.3
"""Largest distance of an object that is held from the origin of the gripper's frame, which may be the flange."""
START_M = 0.05
"""Largest distance, beside half of the object's size, between its place of rest and where its lift begins."""
EMPTY_M = 0.01
"""Depth behind an object's place of rest from which on the place is empty. Thinner objects need a sure mask."""
EMPTY_PX = 3
"""Half the side in pixels of the square at the place of rest whose depth is looked at."""
SLIP_MPS = 0.005
"""Growth of the standard deviation of a hidden object's place in the gripper."""
DIGITS = 6
"""Digits of positions in metres: a micrometre."""


class GripSight(NamedTuple):
    """An object with a position on one frame."""

    stamp_ns: int
    position_m: tuple[float, ...]
    """in the base"""
    place_m: tuple[float, ...]
    """in the gripper"""
    covariance_m2: tuple[float, ...]
    """of the position's error: xx, xy, xz, yy, yz, zz"""


@dataclass(slots=True)
class Grip:
    """What is known of one object and the gripper."""

    sights: list[GripSight] = field(default_factory=list)
    """of the last frames; while it is held, the first is of the grasp, and those that contradict it are left out"""
    is_held: bool = False
    contradictions: int = 0
    """weight of the frames in a row that contradict that it is held"""
    doubtful_ns: list[int] = field(default_factory=list)
    """stamps of those sights that are of a doubtful mask"""
    rest_m: list[float] = field(default_factory=list)
    """in the base, where it last stood still by masks that are not doubtful; empty: not known"""
    is_lifted_in_doubt: bool = False
    """True while doubtful masks show it lifted, and its place of rest was not seen since"""

    def see(
        self, sight: GripSight, size_m: float, ups: Array, has_left_rest: Callable[[], bool | None] | None
    ) -> None:
        """Take the newest sight of the object, whose longest side is `size_m`. `ups` [k, 3] may be upward.

        The sight is of a doubtful mask if `has_left_rest` is given. It says whether the object's place of rest is empty
        by the frame's depth; None: the place is hidden.
        """
        is_doubtful = has_left_rest is not None
        # the position of a large object moves more when another part of its surface is seen
        if self.is_held and self._has_left(sight, max(LEFT_M, size_m / 2)):
            self.contradictions += 1 if is_doubtful else SURE_WEIGHT
            if self.contradictions >= LEFT_FRAMES * SURE_WEIGHT:
                self._release()
            return
        self.contradictions = 0
        self._keep(sight, is_doubtful)
        if self.is_held:
            return
        if not is_doubtful:
            self._note_rest()
        sure = [old for old in self.sights if old.stamp_ns not in self.doubtful_ns]
        is_held = _was_lifted(sure, ups, None, 0.0)
        # a doubtful mask may be that of the gripper itself: then the object is still where it was
        if not is_held and has_left_rest is not None and self.rest_m:
            near_m = START_M + size_m / 2
            self.is_lifted_in_doubt |= _was_lifted(self.sights, ups, self.rest_m, near_m)
            if self.is_lifted_in_doubt:
                has_left = has_left_rest()
                is_held = has_left is True
                self.is_lifted_in_doubt = has_left is None
        if is_held:
            self.sights = [sight]
            self.doubtful_ns = [sight.stamp_ns] * is_doubtful
            self.is_held = True
            self.is_lifted_in_doubt = False

    def _release(self) -> None:
        """Forget the grasp, and all that was seen in it."""
        self.sights = []
        self.doubtful_ns = []
        self.rest_m = []
        self.is_held = False
        self.contradictions = 0

    def _keep(self, sight: GripSight, is_doubtful: bool) -> None:
        """Add a sight, and forget old ones."""
        # the sight of the grasp stays, others while they are recent; a camera's clock may begin again
        grasp = self.sights[: int(self.is_held)]
        others = self.sights[int(self.is_held) :]
        oldest_ns = sight.stamp_ns - WINDOW_S * NANOSECONDS
        recent = [old for old in others[-MAX_SIGHTS:] if oldest_ns < old.stamp_ns < sight.stamp_ns]
        # what was lifted in doubt must go on standing still in the gripper
        if recent and np.linalg.norm(np.subtract(recent[-1].place_m, sight.place_m)) > STILL_M:
            self.is_lifted_in_doubt = False
        self.sights = [*grasp, *recent, sight]
        kept_ns = {old.stamp_ns for old in self.sights}
        doubtful_ns = [*self.doubtful_ns, sight.stamp_ns] if is_doubtful else self.doubtful_ns
        self.doubtful_ns = [stamp_ns for stamp_ns in doubtful_ns if stamp_ns in kept_ns]

    def _note_rest(self) -> None:
        """Keep the object's place if it stood still in the base over the window."""
        newest = self.sights[-1]
        ways_m = _measure_ways([old.position_m for old in self.sights], newest.position_m)
        if ways_m.max() <= STILL_M:
            self.rest_m = list(newest.position_m)

    def _has_left(self, sight: GripSight, least_m: float) -> bool:
        """Return True if it moved in the gripper but not in the base, or is far from where it was grasped."""
        in_base_m = _measure_ways([old.position_m for old in self.sights], sight.position_m)
        in_gripper_m = _measure_ways([old.place_m for old in self.sights], sight.place_m)
        stayed = (in_gripper_m > least_m) & (in_base_m < in_gripper_m / 2)
        return bool(stayed.any() or in_gripper_m[0] > 2 * least_m)

    def predict(self, stamp_ns: int, base_from_gripper: Array) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the position in the base of the hidden object, and the covariance of its error, which grows."""
        last = self.sights[-1]
        slip_m = SLIP_MPS * (stamp_ns - last.stamp_ns) / NANOSECONDS
        # it may slip in any direction, so the diagonal grows alike
        covariance_m2 = np.add(last.covariance_m2, slip_m**2 * np.array([1, 0, 0, 1, 0, 1]))
        position_m = np.round(transform_points(base_from_gripper, last.place_m), DIGITS)
        return tuple(position_m.tolist()), tuple(covariance_m2.tolist())


class FindHeld(Stage):
    """Says which objects the gripper holds, and gives the hidden ones of them a position.

    Without the gripper's pose in the base, nothing is known to be held.
    """

    name = "held"
    timed = "host"
    needs_depth = True
    counts_as = "spatial"

    def __init__(self, objects: Objects) -> None:
        self._grips = objects.register(PerObject("grips", Grip))

    def run(self, step: StepFrame) -> None:
        """Set `held` of the instances, and add an event for each object that was grasped or released."""
        gripper = None if step.robot_state is None else step.robot_state.pose
        # without either pose, the two places of an object cannot be compared
        if gripper is None or step.camera_pose is None:
            return
        base_from_gripper = matrix_of(gripper)
        ups = _list_ups(step, matrix_of(step.camera_pose))
        held = list[Instance]()
        for instance in step.instances:
            grip = self._grips.get(instance.id)
            was_held = grip is not None and grip.is_held
            place = _find_place(instance, step)
            if place is not None:
                grip = self._grips.setdefault(instance.id, Grip())
                sight = _make_sight(place, gripper.stamp_ns, base_from_gripper)
                # what is far from the gripper is not in it, whatever the mask shows
                if not instance.doubtful:
                    grip.see(sight, max(place.extent_m), ups, None)
                elif np.linalg.norm(sight.place_m) <= REACH_M or grip.is_held:
                    grip.see(sight, max(place.extent_m), ups, partial(_is_empty, grip, step))
            is_held = grip is not None and grip.is_held
            if is_held != was_held:
                step.events.append(ObjectEvent(GRASPED if is_held else RELEASED, instance.id))
            held.append(_complete(instance, grip if is_held else None, gripper.stamp_ns, base_from_gripper))
        step.instances = held


def _list_ups(step: StepFrame, base_from_camera: Array) -> Array:
    """Return the directions [k, 3] in the base that may be upward. None: nothing can be known to be lifted."""
    if step.table is not None:
        return np.array([step.table.normal])
    if step.is_base_tilted:
        return np.zeros((0, 3))
    up = np.array([0.0, 0.0, 1.0])
    if base_from_camera[2, 2] > LOOKS_UP:
        return np.array([up, -up])
    return up[None]


def _find_place(instance: Instance, step: StepFrame) -> DoubtfulPlace | None:
    """Return where an instance is in the base, by its fields or by a doubtful mask; None if it is not known."""
    if instance.position_m is None or instance.covariance_m2 is None or instance.extent_m is None:
        return step.doubtful.get(instance.id)
    return DoubtfulPlace(instance.position_m, instance.covariance_m2, instance.extent_m)


def _make_sight(place: DoubtfulPlace, stamp_ns: int, base_from_gripper: Array) -> GripSight:
    """Return the sight of an object at a place in the base."""
    place_m = transform_points(invert(base_from_gripper), place.position_m)
    return GripSight(stamp_ns, place.position_m, tuple(place_m.tolist()), place.covariance_m2)


def _was_lifted(
    sights: Sequence[GripSight], ups: Array, rest_m: Sequence[float] | None, near_m: float
) -> bool:
    """Return True if an object was lifted along one of `ups` [k, 3] while it stood still in the gripper.

    With `rest_m`, the lift must begin within `near_m` of it.
    """
    if not sights:
        return False
    places_m = np.array([sight.place_m for sight in sights])
    moved = np.flatnonzero(np.linalg.norm(places_m - places_m[-1], axis=1) > STILL_M)
    # from the first sight on since which it has stood still
    first = int(moved[-1]) + 1 if moved.size else 0
    positions_m = np.array([sight.position_m for sight in sights[first:]])
    if rest_m is not None and np.linalg.norm(positions_m[0] - rest_m) > near_m:
        return False
    heights_m = positions_m @ ups.T
    return bool((heights_m[-1] - heights_m.min(axis=0) > LIFT_M).any())


def _is_empty(grip: Grip, step: StepFrame) -> bool | None:
    """Return True if depth shows something behind an object's place of rest, None if the place is not seen."""
    if step.depth is None or step.intrinsics is None or step.camera_pose is None:
        return None
    in_camera_m = transform_points(invert(matrix_of(step.camera_pose)), np.array([grip.rest_m]))
    column, row = project(in_camera_m, step.intrinsics)[0]
    height, width = step.depth.image.shape
    # also false for what is behind the camera, which has no pixel
    if not (EMPTY_PX <= column < width - EMPTY_PX and EMPTY_PX <= row < height - EMPTY_PX):
        return None
    rows = slice(round(row) - EMPTY_PX, round(row) + EMPTY_PX + 1)
    columns = slice(round(column) - EMPTY_PX, round(column) + EMPTY_PX + 1)
    units = step.depth.image[rows, columns]
    units = units[units > 0]
    if not units.size:
        return None
    behind_m = float(np.median(units)) * step.depth.scale_m - in_camera_m[0, 2]
    # nearer by more than an object's own bulge: something is in front of the place
    if behind_m < -LEFT_M:
        return None
    return bool(behind_m > EMPTY_M)


def _complete(instance: Instance, grip: Grip | None, stamp_ns: int, base_from_gripper: Array) -> Instance:
    """Return an instance with `held`, and if it is hidden in the grip, with its position."""
    # what is measured is better than what the grip predicts
    if grip is None or instance.position_m is not None:
        return replace(instance, held=grip is not None)
    (x, y, z), covariance_m2 = grip.predict(stamp_ns, base_from_gripper)
    return replace(instance, held=True, frame=BASE, position_m=(x, y, z), covariance_m2=covariance_m2)


def _measure_ways(points_m: Sequence[Sequence[float]], target_m: Sequence[float]) -> Array:
    """Return the distances [n] of points to a target."""
    ways_m: Array = np.linalg.norm(np.subtract(points_m, target_m), axis=1)
    return ways_m
