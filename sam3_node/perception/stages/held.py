"""Notice which objects the gripper holds, and where it has those that are hidden in it.

A held object stands still in the gripper's frame while both rise. A pushed one stands still there, too, but does not
rise. Up is the table's normal, else the base's z; of a base that seems to hang from the ceiling, z may point down.

A doubtful mask in the gripper often shows the object together with fingers and a shadow, so its position says little.
Depth decides instead: the position where the object stood is empty, and a part of the mask is where the object would be
if the gripper had taken it there.

A held object is released when several frames show that it stays where it is while the gripper moves, or that it is far
from its position in the gripper, or, without a sure mask, that this position is empty.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ...geometry import Array, invert, matrix_of, project, transform_points
from ...types import NANOSECONDS, Instance, Mask
from ...wire import GRASPED, RELEASED
from ..objects import Objects
from ..stage import PerObject, Stage
from ..step import BASE, MeasuredSurface, ObjectEvent, StepFrame
from ..surfaces import TARGET_PIXELS

WINDOW_S = 1.5
"""Time over which an object's motion is compared with the gripper's."""
MAX_SIGHTS = 60
"""Frames of that time that are compared at most: the newest."""
STILL_M = 0.02
"""Largest distance of an object from its position in the gripper while it stands still there."""
LIFT_M = 0.03
"""Height by which an object was lifted that counts as held."""
LIFT_SHARE = 0.3
"""Share of its size by which an object with a doubtful mask must be lifted in addition to LIFT_M. It tells a lifted
object from one of which a part stayed behind."""
LOOKS_UP = 0.3
"""z component, in the base, of the camera's viewing direction, above which the base may hang from the ceiling. Most
cameras of an upright base look down."""
LEFT_M = 0.05
"""Distance in metres from its position in the gripper from which an object has left it. The position of a held object
also changes, because the visible part of its surface does."""
LEFT_FRAMES = 3
"""Frames in a row that must show that an object has left the gripper."""
SURE_WEIGHT = 3
"""Weight of a frame with a sure mask, against 1 of a frame with a doubtful one, where frames are counted that show that
the object has left the gripper."""
REACH_M = 0.3
"""Largest distance of an object that is held from the origin of the gripper's frame, which may be the flange."""
SAME_M = 0.005
"""Difference up to which two heights of the gripper are the same."""
MAX_SIZE_M = 0.2
"""Longest side of an object that doubtful masks may show as held. A larger one needs a sure mask."""
NEAR_M = 0.02
"""Distance in metres, in addition to half the object's size, up to which a point counts as at the position where the
gripper would hold the object."""
NEAR_SHARE = 0.2
"""Share of a doubtful mask's points that must be that near for the object to count as held."""
EMPTY_M = 0.01
"""Metres by which measured depth must lie behind the position where an object rested for that position to be empty.
Thinner objects need a sure mask."""
LOOK_PX = 3
"""Half the side in pixels of the square around a location whose median depth is compared."""
SLIP_MPS = 0.005
"""Speed in m/s at which the standard deviation of a held, hidden object's position grows, because it may slip."""
DIGITS = 6
"""Digits of positions in metres: a micrometre."""


Look = Literal["empty", "occupied", "hidden"]
"""What depth shows at a position. hidden: something is in front of it, or its depth is not known."""


class GripSight(NamedTuple):
    """An object with a position on one frame."""

    stamp_ns: int
    position_m: tuple[float, ...]
    """in the base"""
    gripper_position_m: tuple[float, ...]
    """in the gripper"""
    covariance_m2: tuple[float, ...]
    """of the position's error: xx, xy, xz, yy, yz, zz"""
    is_doubtful: bool = False
    """True if it is of a doubtful mask"""
    gripper_rest_m: tuple[float, ...] = ()
    """where the object's position of rest was in the gripper; empty: it was not known"""
    is_rest_empty: bool = False
    """True if depth showed this position empty already"""


class GripFrame(NamedTuple):
    """The gripper on a frame, and the frame's depth."""

    base_from_gripper: Array
    ups: Array
    """[k, 3], the directions in the base that may be upward"""
    step: StepFrame

    def look_at(self, position_m: Sequence[float], empty_m: float) -> Look:
        """Return what is at a position in the base. It is empty if what is seen there is more than `empty_m` behind."""
        step = self.step
        if step.depth is None or step.intrinsics is None or step.camera_pose is None:
            return "hidden"
        in_camera_m = transform_points(invert(matrix_of(step.camera_pose)), np.array([position_m]))
        column, row = project(in_camera_m, step.intrinsics)[0]
        height, width = step.depth.image.shape
        # also false for what is behind the camera, which has no pixel
        if not (LOOK_PX <= column < width - LOOK_PX and LOOK_PX <= row < height - LOOK_PX):
            return "hidden"
        rows = slice(round(row) - LOOK_PX, round(row) + LOOK_PX + 1)
        columns = slice(round(column) - LOOK_PX, round(column) + LOOK_PX + 1)
        units = step.depth.image[rows, columns]
        units = units[units > 0]
        if not units.size:
            return "hidden"
        behind_m = float(np.median(units)) * step.depth.scale_m - in_camera_m[0, 2]
        # nearer by more than an object's own bulge
        if behind_m < -LEFT_M:
            return "hidden"
        return "empty" if behind_m > empty_m else "occupied"

    def find_share(self, mask: Mask, position_m: Sequence[float], near_m: float) -> float:
        """Return the share of a mask's points that are within a distance of a position in the base."""
        step = self.step
        if step.depth is None or step.camera_pose is None:
            return 0.0
        stride = max(1, round((mask.area / TARGET_PIXELS) ** 0.5))
        x0, y0, x1, y1 = mask.box
        inside = mask.crop[::stride, ::stride]
        z = step.depth.image[y0:y1:stride, x0:x1:stride][inside] * step.depth.scale_m
        x, y = step.depth.rays[:, y0:y1:stride, x0:x1:stride][:, inside] * z
        points_m = np.stack([x, y, z], axis=1)[z > 0]
        if not len(points_m):
            return 0.0
        in_camera_m = transform_points(invert(matrix_of(step.camera_pose)), position_m)
        return float((_measure_ways(points_m, in_camera_m) <= near_m).mean())


@dataclass(slots=True)
class Grip:
    """What is known of one object and the gripper."""

    sights: list[GripSight] = field(default_factory=list)
    """of the last frames; while it is held, the first is of the grasp, and those that contradict it are left out"""
    is_held: bool = False
    contradictions: int = 0
    """weight of the frames in a row that contradict that it is held"""
    rest_m: list[float] = field(default_factory=list)
    """in the base, where it last stood still by masks that are not doubtful; empty: not known"""
    size_m: float = 0.0
    """its longest side there"""
    lifted_m: list[float] = field(default_factory=list)
    """in the gripper, where doubtful masks show it lifted while its position of rest is hidden; empty: they do not"""

    def see(self, sight: GripSight, size_m: float, frame: GripFrame) -> None:
        """Take a sight of the object by a mask that is not doubtful. Its longest side is `size_m`."""
        self.lifted_m = []
        # the position of a large object moves more when another part of its surface is seen
        if self.is_held and self._has_left(sight, max(LEFT_M, size_m / 2)):
            self._contradict(SURE_WEIGHT)
            return
        self.contradictions = 0
        self._keep(sight)
        if self.is_held:
            return
        self._note_rest(size_m)
        self._locate_rest(frame)
        if _was_lifted([old for old in self.sights if not old.is_doubtful], frame.ups):
            self._grasp(sight)

    def see_doubtful(self, sight: GripSight, mask: Mask, frame: GripFrame) -> None:
        """Take a sight of the object by a doubtful mask, which may be that of the gripper or of a shadow."""
        if self.is_held:
            self._check_grasp(sight, frame)
            return
        self._keep(sight)
        if not self.rest_m or self.size_m > MAX_SIZE_M:
            return
        self._locate_rest(frame)
        gripper_position_m = self.lifted_m or self._find_lifted(frame)
        self.lifted_m = []
        if not gripper_position_m:
            return
        # a gripper that has left without the object leaves the mask behind, or the object at its position
        position_m = transform_points(frame.base_from_gripper, gripper_position_m).tolist()
        if frame.find_share(mask, position_m, NEAR_M + self.size_m / 2) < NEAR_SHARE:
            return
        rest = frame.look_at(self.rest_m, EMPTY_M)
        if rest == "empty":
            self._grasp(
                sight._replace(position_m=tuple(position_m), gripper_position_m=tuple(gripper_position_m))
            )
        elif rest == "hidden":
            self.lifted_m = gripper_position_m

    def miss(self, frame: GripFrame) -> None:
        """Take a frame on which the object has no position."""
        if self.is_held:
            self._check_grasp(None, frame)

    def predict(self, stamp_ns: int, base_from_gripper: Array) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return the position in the base of the hidden object, and the covariance of its error, which grows."""
        last = self._find_surest()
        slip_m = SLIP_MPS * (stamp_ns - last.stamp_ns) / NANOSECONDS
        # it may slip in any direction, so the diagonal grows alike
        covariance_m2 = np.add(last.covariance_m2, slip_m**2 * np.array([1, 0, 0, 1, 0, 1]))
        position_m = np.round(transform_points(base_from_gripper, last.gripper_position_m), DIGITS)
        return tuple(position_m.tolist()), tuple(covariance_m2.tolist())

    def _check_grasp(self, sight: GripSight | None, frame: GripFrame) -> None:
        """Count a frame without a sure mask for or against that the object is held."""
        gripper_position_m = self._find_surest().gripper_position_m
        position_m = transform_points(frame.base_from_gripper, gripper_position_m).tolist()
        look = frame.look_at(position_m, max(LEFT_M, self.size_m))
        if look == "empty":
            self._contradict(SURE_WEIGHT)
        elif sight is not None and not self._has_left(sight, max(LEFT_M, self.size_m / 2)):
            self.contradictions = 0
            self._keep(sight)
        elif look == "occupied":
            # what is elsewhere is a shadow, or another object
            self.contradictions = 0
        elif sight is not None:
            self._contradict(1)

    def _grasp(self, sight: GripSight) -> None:
        """Begin to hold the object."""
        self.sights = [sight]
        self.is_held = True

    def _contradict(self, weight: int) -> None:
        """Count a frame that contradicts that the object is held. Enough of them in a row release it."""
        self.contradictions += weight
        if self.contradictions >= LEFT_FRAMES * SURE_WEIGHT:
            self._release()

    def _release(self) -> None:
        """Forget the grasp, and all that was seen in it."""
        self.sights = []
        self.rest_m = []
        self.is_held = False
        self.contradictions = 0

    def _keep(self, sight: GripSight) -> None:
        """Add a sight, and forget old ones."""
        # the sight of the grasp stays, others while they are recent; a camera's clock may begin again
        grasp = self.sights[: int(self.is_held)]
        others = self.sights[int(self.is_held) :]
        oldest_ns = sight.stamp_ns - WINDOW_S * NANOSECONDS
        recent = [old for old in others[-MAX_SIGHTS:] if oldest_ns < old.stamp_ns < sight.stamp_ns]
        self.sights = [*grasp, *recent, sight]

    def _note_rest(self, size_m: float) -> None:
        """Keep the object's position if it stood still in the base over the window."""
        newest = self.sights[-1]
        ways_m = _measure_ways([old.position_m for old in self.sights], newest.position_m)
        if ways_m.max() <= STILL_M:
            self.rest_m = list(newest.position_m)
            self.size_m = size_m

    def _locate_rest(self, frame: GripFrame) -> None:
        """Note in the newest sight where the position of rest is in the gripper."""
        if self.rest_m:
            gripper_position_m = transform_points(invert(frame.base_from_gripper), self.rest_m)
            is_empty = frame.look_at(self.rest_m, EMPTY_M) == "empty"
            self.sights[-1] = self.sights[-1]._replace(
                gripper_rest_m=tuple(gripper_position_m.tolist()), is_rest_empty=is_empty
            )

    def _find_lifted(self, frame: GripFrame) -> list[float]:
        """Return where the object is in the gripper if that took it at its position of rest, and has risen since.

        Empty if the gripper has not risen, was never near, or was lowest when the object had left the position already.
        """
        near = [
            old for old in self.sights if old.gripper_rest_m and np.linalg.norm(old.gripper_rest_m) <= REACH_M
        ]
        if not near or not len(frame.ups):
            return []
        ways_m = transform_points(frame.base_from_gripper, [old.gripper_rest_m for old in near]) - self.rest_m
        heights_m = (ways_m @ frame.ups.T).max(axis=1)
        # it took the object where it was lowest, and stood there until it rose
        taken = int(np.flatnonzero(heights_m >= heights_m.max() - SAME_M)[-1])
        if near[taken].is_rest_empty or heights_m[taken] <= LIFT_M + LIFT_SHARE * self.size_m:
            return []
        return list(near[taken].gripper_rest_m)

    def _find_surest(self) -> GripSight:
        """Return the newest sight by a sure mask in the grasp; without one, that of the grasp."""
        sure = [old for old in self.sights if not old.is_doubtful]
        return sure[-1] if sure else self.sights[0]

    def _has_left(self, sight: GripSight, least_m: float) -> bool:
        """Return True if it moved in the gripper but not in the base, or is far from where it was grasped."""
        in_base_m = _measure_ways([old.position_m for old in self.sights], sight.position_m)
        in_gripper_m = _measure_ways(
            [old.gripper_position_m for old in self.sights], sight.gripper_position_m
        )
        stayed = (in_gripper_m > least_m) & (in_base_m < in_gripper_m / 2)
        return bool(stayed.any() or in_gripper_m[0] > 2 * least_m)


class FindHeld(Stage):
    """Says which objects the gripper holds, and gives the hidden ones of them a position.

    Without the gripper's pose in the base, nothing is known to be held.
    """

    name = "held"
    timed = "host"
    needs_depth = True
    is_optional = True
    counts_as = "spatial"

    def __init__(self, objects: Objects) -> None:
        self._grips = objects.register(PerObject("grips", Grip))

    def run(self, step: StepFrame) -> None:
        """Set `held` of the instances, and add an event for each object that was grasped or released."""
        gripper = None if step.robot_state is None else step.robot_state.pose
        # without either pose, the two positions of an object cannot be compared
        if gripper is None or step.camera_pose is None:
            return
        base_from_gripper = matrix_of(gripper)
        frame = GripFrame(base_from_gripper, _list_ups(step, matrix_of(step.camera_pose)), step)
        held = list[Instance]()
        for instance in step.instances:
            grip = self._grips.get(instance.id)
            was_held = grip is not None and grip.is_held
            surface = _find_surface(instance, step)
            if surface is not None:
                grip = self._grips.setdefault(instance.id, Grip())
                sight = _make_sight(surface, gripper.stamp_ns, base_from_gripper, instance.doubtful)
                if instance.doubtful:
                    grip.see_doubtful(sight, instance.mask, frame)
                else:
                    grip.see(sight, max(surface.extent_m), frame)
            elif grip is not None:
                grip.miss(frame)
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


def _find_surface(instance: Instance, step: StepFrame) -> MeasuredSurface | None:
    """Return where an instance is in the base, by its fields or by a doubtful mask; None if it is not known."""
    if instance.position_m is None or instance.covariance_m2 is None or instance.extent_m is None:
        return step.doubtful.get(instance.id)
    return MeasuredSurface(instance.position_m, instance.covariance_m2, instance.extent_m)


def _make_sight(
    surface: MeasuredSurface, stamp_ns: int, base_from_gripper: Array, is_doubtful: bool
) -> GripSight:
    """Return the sight of an object at a position in the base."""
    gripper_position_m = transform_points(invert(base_from_gripper), surface.position_m)
    return GripSight(
        stamp_ns, surface.position_m, tuple(gripper_position_m.tolist()), surface.covariance_m2, is_doubtful
    )


def _was_lifted(sights: Sequence[GripSight], ups: Array) -> bool:
    """Return True if an object was lifted along one of `ups` [k, 3] while it stood still in the gripper."""
    if not sights:
        return False
    positions_m = np.array([sight.gripper_position_m for sight in sights])
    moved = np.flatnonzero(np.linalg.norm(positions_m - positions_m[-1], axis=1) > STILL_M)
    # from the first sight on since which it has stood still
    first = int(moved[-1]) + 1 if moved.size else 0
    positions_m = np.array([sight.position_m for sight in sights[first:]])
    heights_m = positions_m @ ups.T
    return bool((heights_m[-1] - heights_m.min(axis=0) > LIFT_M).any())


def _complete(instance: Instance, grip: Grip | None, stamp_ns: int, base_from_gripper: Array) -> Instance:
    """Return an instance with `held`, and if it is hidden in the grip, with its position."""
    # what is measured is better than what the grip predicts
    if grip is None or instance.position_m is not None:
        return replace(instance, held=grip is not None)
    (x, y, z), covariance_m2 = grip.predict(stamp_ns, base_from_gripper)
    return replace(instance, held=True, frame=BASE, position_m=(x, y, z), covariance_m2=covariance_m2)


def _measure_ways(points_m: npt.ArrayLike, target_m: npt.ArrayLike) -> Array:
    """Return the distances [n] of points to a target."""
    ways_m: Array = np.linalg.norm(np.subtract(points_m, target_m), axis=1)
    return ways_m
