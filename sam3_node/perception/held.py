"""Notice which objects the gripper holds, and where it has those that are hidden in it.

A held object stands still in the gripper's frame while both rise. A pushed one stands still there, too, but does not
rise. A held object is released when several frames show that it stays where it is while the gripper moves, or that it
is far from its place in the gripper.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..geometry import Array, invert, matrix_of, transform_points
from ..types import NANOSECONDS, FramePose, Instance, SavedFields, State
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


class Grip(SavedFields):
    """One object, and whether the gripper holds it."""

    SAVED = ("sights", "is_held", "left")

    def __init__(self) -> None:
        self.sights: list[list[float]] = []
        """stamp in ns, position in the base, place in the gripper, and the position's covariance; of a held object, the
        first is of the grasp, and those that contradict it are left out"""
        self.is_held, self.left = False, 0

    def see(self, sight: list[float], size_m: float) -> None:
        """Take the newest sight of an object with this longest side."""
        oldest_ns = sight[0] - WINDOW_S * NANOSECONDS
        recent = [old for old in self.sights[1 - MAX_SIGHTS :] if oldest_ns < old[0] < sight[0]]
        if not self.is_held:
            self.sights = [*recent, sight]
            if self._is_lifted():
                self.sights, self.is_held = [sight], True
        elif not self._has_left(sight, max(LEFT_M, size_m / 2)):
            self.sights, self.left = [self.sights[0], *recent, sight], 0
        else:
            self.left += 1
            if self.left == LEFT_FRAMES:
                self.sights, self.is_held, self.left = [], False, 0

    def _is_lifted(self) -> bool:
        """Return True if the object was lifted while it stood still in the gripper."""
        sights = np.array(self.sights)
        moved = np.flatnonzero(np.linalg.norm(sights[:, 4:7] - sights[-1, 4:7], axis=1) > STILL_M)
        heights = sights[moved[-1] + 1 if moved.size else 0 :, 3]
        return bool(heights[-1] - heights.min() > LIFT_M)

    def _has_left(self, sight: list[float], least_m: float) -> bool:
        """Return True if the object moved in the gripper, but not in the base, or far in both."""
        ways = np.subtract(self.sights, sight)[:, 1:7].reshape(-1, 2, 3)
        in_base, in_gripper = np.linalg.norm(ways, axis=2).T
        stayed = (in_gripper > least_m) & (in_base < in_gripper / 2)
        return bool(stayed.any() or in_gripper.min() > 2 * least_m)


class HeldObjects:
    """The objects of one camera that the gripper may hold."""

    def __init__(self) -> None:
        self.changes: list[tuple[str, int]] = []
        """the events of the last frame, GRASPED or RELEASED, and the objects' ids"""
        self._grips: dict[int, Grip] = {}

    def observe(self, instances: Sequence[Instance], gripper: FramePose | None) -> tuple[Instance, ...]:
        """Return the instances of a frame: `held` where they are held, also with a position if they are hidden.

        `gripper` is its pose in the base at the capture. Without it, nothing is known to be held.
        """
        self.changes = []
        if gripper is None:
            return tuple(instances)
        base_from_gripper = matrix_of(gripper)
        return tuple(self._observe(each, gripper.stamp_ns, base_from_gripper) for each in instances)

    def _observe(self, instance: Instance, stamp_ns: int, base_from_gripper: Array) -> Instance:
        grip = self._grips.setdefault(instance.id, Grip())
        was_held, position_m = grip.is_held, instance.position_m
        if position_m is not None and instance.extent_m is not None and instance.covariance_m2 is not None:
            place_m = transform_points(invert(base_from_gripper), position_m).tolist()
            grip.see([stamp_ns, *position_m, *place_m, *instance.covariance_m2], max(instance.extent_m))
        if grip.is_held != was_held:
            self.changes.append((GRASPED if grip.is_held else RELEASED, instance.id))
        if not grip.is_held or position_m is not None:
            return replace(instance, held=True) if grip.is_held else instance
        last = grip.sights[-1]
        slip_m = SLIP_MPS * (stamp_ns - last[0]) / NANOSECONDS
        covariance_m2 = np.add(last[7:], slip_m**2 * np.array([1, 0, 0, 1, 0, 1]))
        carried_m = np.round(transform_points(base_from_gripper, last[4:7]), 6)
        x, y, z = carried_m.tolist()
        return replace(
            instance,
            held=True,
            frame="base",
            position_m=(x, y, z),
            covariance_m2=tuple(covariance_m2.tolist()),
        )

    def remove(self, object_id: int) -> None:
        """Forget an object."""
        self._grips.pop(object_id, None)

    def state(self) -> State:
        """Return the state that `restore` takes."""
        return {str(object_id): grip.state() for object_id, grip in self._grips.items()}

    def restore(self, state: State) -> None:
        """Continue from the moment at which `state` was called."""
        self._grips = {int(object_id): Grip() for object_id in state}
        for object_id, grip in self._grips.items():
            grip.restore(state[str(object_id)])
