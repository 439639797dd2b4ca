"""Notice which objects the gripper holds, and where it has those that are hidden in it.

A held object stands still in the gripper's frame while both rise. A pushed one stands still there, too, but does not
rise. A held object is released when several frames show that it stays where it is while the gripper moves, or that it
is far from its place in the gripper.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..geometry import Array, invert, matrix_of, transform_points
from ..types import NANOSECONDS, FramePose, Instance, SavedFields
from ..wire import GRASPED, RELEASED

WINDOW_S, MAX_SIGHTS = 1.5, 60
"""Time, and number of frames, over which an object's motion is compared with the gripper's."""
STILL_M = 0.02
"""Largest distance of an object from its place in the gripper while it stands still there."""
LIFT_M = 0.03
"""Height by which a held object was lifted, along the base's z."""
LEFT_M, LEFT_FRAMES = 0.05, 3
"""Least way in the gripper of an object that has left it, and frames in a row that must show it. The part of a surface
that is seen changes, and so moves the position of a held object."""
SLIP_MPS = 0.005
"""Growth of the standard deviation of a hidden object's place in the gripper."""


class HeldObjects(SavedFields):
    """The objects of one camera that the gripper may hold."""

    SAVED = ("_sights", "_left")

    def __init__(self) -> None:
        self.changes: list[tuple[str, int]] = []
        """the events of the last frame, GRASPED or RELEASED, and the objects' ids"""
        self._sights: dict[str, list[list[float]]] = {}
        """by id: stamp in ns, position in the base, place in the gripper, and the position's covariance, of the last
        frames; of a held object, the first is of the grasp, and those that contradict it are left out"""
        self._left: dict[str, int] = {}
        """of each held object, the frames in a row that contradict it"""

    def observe(self, instances: Sequence[Instance], gripper: FramePose | None) -> tuple[Instance, ...]:
        """Return the instances of a frame: `held` where they are held, also with a position if they are hidden.

        `gripper` is its pose in the base at the capture. Without it, nothing is known to be held.
        """
        self.changes = []
        if gripper is None:
            return tuple(instances)
        return tuple(self._observe(each, gripper.stamp_ns, matrix_of(gripper)) for each in instances)

    def _observe(self, instance: Instance, stamp_ns: int, base_from_gripper: Array) -> Instance:
        key, position_m = str(instance.id), instance.position_m
        was_held = key in self._left
        if position_m is not None and instance.extent_m is not None and instance.covariance_m2 is not None:
            place_m = transform_points(invert(base_from_gripper), position_m).tolist()
            self._see(key, [stamp_ns, *position_m, *place_m, *instance.covariance_m2], max(instance.extent_m))
        is_held = key in self._left
        if is_held != was_held:
            self.changes.append((GRASPED if is_held else RELEASED, instance.id))
        if not is_held or position_m is not None:
            return replace(instance, held=is_held)
        last = self._sights[key][-1]
        slip_m = SLIP_MPS * (stamp_ns - last[0]) / NANOSECONDS
        covariance_m2 = np.add(last[7:], slip_m**2 * np.array([1, 0, 0, 1, 0, 1])).tolist()
        x, y, z = np.round(transform_points(base_from_gripper, last[4:7]), 6).tolist()
        return replace(
            instance, held=True, frame="base", position_m=(x, y, z), covariance_m2=tuple(covariance_m2)
        )

    def _see(self, key: str, sight: list[float], size_m: float) -> None:
        """Take the newest sight of an object with this longest side."""
        sights, grasp = self._sights.get(key, []), list[list[float]]()
        if key in self._left:
            grasp, sights = sights[:1], sights[1:]
            if _has_left([*grasp, *sights], sight, max(LEFT_M, size_m / 2)):
                self._left[key] += 1
                if self._left[key] == LEFT_FRAMES:
                    self.remove(int(key))
                return
            self._left[key] = 0
        oldest_ns = sight[0] - WINDOW_S * NANOSECONDS
        recent = [old for old in sights[-MAX_SIGHTS:] if oldest_ns < old[0] < sight[0]]
        self._sights[key] = [*grasp, *recent, sight]
        if not grasp and _is_lifted(self._sights[key]):
            self._sights[key], self._left[key] = [sight], 0

    def remove(self, object_id: int) -> None:
        """Forget an object."""
        self._sights.pop(str(object_id), None)
        self._left.pop(str(object_id), None)


def _is_lifted(sights: list[list[float]]) -> bool:
    """Return True if an object was lifted while it stood still in the gripper."""
    rows = np.array(sights)
    moved = np.flatnonzero(np.linalg.norm(rows[:, 4:7] - rows[-1, 4:7], axis=1) > STILL_M)
    heights = rows[moved[-1] + 1 if moved.size else 0 :, 3]
    return bool(heights[-1] - heights.min() > LIFT_M)


def _has_left(sights: list[list[float]], sight: list[float], least_m: float) -> bool:
    """Return True if an object moved in the gripper but not in the base, or is far from where it was grasped."""
    ways = np.subtract(sights, sight)[:, 1:7].reshape(-1, 2, 3)
    in_base, in_gripper = np.linalg.norm(ways, axis=2).T
    stayed = (in_gripper > least_m) & (in_base < in_gripper / 2)
    return bool(stayed.any() or in_gripper[0] > 2 * least_m)
