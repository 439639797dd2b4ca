"""Turn the joint positions that a robot sends into a position of each joint of its URDF, and tell what does not fit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import CalibrationError
from ..geometry import Array
from .robot_model import MOVING, list_names

TURNS = 2
"""Full turns by which a joint that turns may be beyond its limits. Drivers count turns, or wrap at half of one."""
FAR_RAD = 0.5
"""Radians beyond its limits at which a joint that turns cannot be. Encoders of real robots are off by less."""
FAR_M = 0.02
"""Metres beyond its limits at which a joint that slides cannot be, or the length of its way if that is more."""
MAX_SHOWN = 3
"""Joints beyond their limits that a message describes."""
PERCENT = 100.0
"""Largest number of a position in percent, or normalised to -100..100."""


class _Mimic(NamedTuple):
    """The joint with a position of its own that a joint follows, as factor * position + offset."""

    name: str
    factor: float
    offset: float


class JointPositions:
    """The joints of a URDF, each after the joint of its parent link."""

    def __init__(self, joints: Sequence[Any]) -> None:
        self._known = {joint.name: joint for joint in joints}
        # a joint that mimics another has no position of its own
        free = [joint for joint in _sort_along_tree(joints) if joint.type in MOVING and joint.mimic is None]
        self.names = tuple(joint.name for joint in free)
        """Names of the joints that a joint state gives, along the tree: joints that move and mimic no other."""
        self._free = free
        self._orders = self.names, tuple(joint.name for joint in free if joint.type != "prismatic")
        self._followed = {joint.name: self._follow(joint) for joint in joints}

    def read(self, positions: Mapping[str, float]) -> Array:
        """Return the position of each joint, radians or metres, in the order of the URDF's tree.

        A joint without a position is at zero. If the URDF has none of the names, the numbers "0", "1" and so on are
        those of all joints, or of all that turn, from the base on. Raises CalibrationError if no joint has a position,
        and for positions far beyond the URDF's limits.
        """
        own = self._find_own(positions)
        if self.names and not own:
            raise CalibrationError(
                f"expected joints {list_names(self.names)} of robot.urdf, "
                f"found {', '.join(positions)[:200] or 'none'}"
            )
        self._check_limits(own)
        followed = self._followed.values()
        return np.array([factor * own.get(name, 0.0) + offset for name, factor, offset in followed])

    def find_lacking(self, positions: Mapping[str, float]) -> list[str]:
        """Return the names of the joints without a position."""
        own = self._find_own(positions)
        return [name for name in self.names if name not in own]

    def find_strangers(self, positions: Mapping[str, float]) -> list[str]:
        """Return the names of positions that are of no joint."""
        if self._number(positions) is not None:
            return []
        return [name for name in positions if name not in self._known]

    def _find_own(self, positions: Mapping[str, float]) -> dict[str, float]:
        """Return the positions of joints that move on their own."""
        numbered = self._number(positions)
        if numbered is not None:
            return numbered
        own = {name: positions[name] for name in self.names if name in positions}
        # a driver may send the joint that follows alone
        for name, value in positions.items():
            mimic = self._followed.get(name)
            if (
                mimic is not None
                and mimic.name in self.names
                and mimic.name not in positions
                and mimic.factor
            ):
                own.setdefault(mimic.name, (value - mimic.offset) / mimic.factor)
        return own

    def _number(self, positions: Mapping[str, float]) -> dict[str, float] | None:
        """Return positions that have numbers as names by the names of their joints; None for other positions."""
        if positions.keys() & self._known.keys():
            return None
        for names in self._orders:
            if names and positions.keys() == set(map(str, range(len(names)))):
                return {name: positions[str(number)] for number, name in enumerate(names)}
        return None

    def _follow(self, joint: Any) -> _Mimic:
        """Return what a joint follows, through all joints that mimic in between."""
        factor = 1.0
        offset = 0.0
        while joint.mimic is not None:
            offset += factor * joint.mimic.offset
            factor *= joint.mimic.multiplier
            joint = self._known[joint.mimic.joint]
        return _Mimic(joint.name, factor, offset)

    def _check_limits(self, own: Mapping[str, float]) -> None:
        """Raise CalibrationError for positions that no robot reaches: their unit is another one."""
        beyond = [joint for joint in self._free if joint.name in own and not _is_near(joint, own[joint.name])]
        if not beyond:
            return
        described = []
        for joint in beyond[:MAX_SHOWN]:
            unit = "m" if joint.type == "prismatic" else "rad"
            described.append(
                f"{joint.name:.80} at {own[joint.name]:.4g} {unit} (limits {joint.limit.lower:.4g} to "
                f"{joint.limit.upper:.4g}{_guess_unit(joint, own[joint.name])})"
            )
        more = f" and {len(beyond) - MAX_SHOWN} more" if len(beyond) > MAX_SHOWN else ""
        raise CalibrationError(
            f"expected joint positions in radians and metres near the limits of robot.urdf, found "
            f"{', '.join(described)}{more}; convert them where they are sent"
        )


def _sort_along_tree(joints: Sequence[Any]) -> list[Any]:
    """Return joints from the base outwards, one branch after the other, as most other software counts them."""
    below: dict[str, list[Any]] = {}
    for joint in joints:
        below.setdefault(joint.parent, []).append(joint)
    found: list[Any] = []
    # the joint of the root comes first
    waiting = below.get(joints[0].parent, [])[::-1] if joints else []
    while waiting:
        joint = waiting.pop()
        found.append(joint)
        waiting += below.get(joint.child, [])[::-1]
    return found


def _is_near(joint: Any, position: float) -> bool:
    """Return True if a joint's position is within its limits, or not far beyond them."""
    limit = joint.limit
    # exporters write no limits, or 0 and 0, where they know none
    has_limits = limit is not None and limit.lower is not None and limit.upper is not None
    if joint.type == "continuous" or not has_limits or not limit.lower < limit.upper:
        return True
    if joint.type == "prismatic":
        far_m = max(FAR_M, limit.upper - limit.lower)
        return bool(limit.lower - far_m <= position <= limit.upper + far_m)
    turned = (position + math.tau * turns for turns in range(-TURNS, TURNS + 1))
    return any(limit.lower - FAR_RAD <= angle <= limit.upper + FAR_RAD for angle in turned)


def _guess_unit(joint: Any, position: float) -> str:
    """Return the unit that a position far beyond the limits may have, for a message."""
    guesses = []
    if joint.type == "prismatic":
        if _is_near(joint, position / 1000):
            guesses.append("millimetres")
    elif _is_near(joint, math.radians(position)):
        guesses.append("degrees")
    if abs(position) <= PERCENT:
        guesses.append("percent or -100..100")
    return f"; is it in {' or in '.join(guesses)}?" if guesses else ""
