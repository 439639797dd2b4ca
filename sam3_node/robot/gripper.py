"""Tell which joints and links of a robot are its gripper's, by their names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_GRIPPER = re.compile("grip|finger|thumb|jaw|knuckle|claw|hand(?!le)", re.IGNORECASE)
"""Part of a name by which a joint or link belongs to a gripper."""


def is_gripper(name: str) -> bool:
    """Return True for the name of a joint or link of a gripper."""
    return _GRIPPER.search(name) is not None


def find_gripper(links: Sequence[str], joints: Sequence[Any]) -> frozenset[int]:
    """Return the links of the gripper: those whose name, or whose joint's, says so, and all that they carry.

    `joints` are of yourdfpy, each after the joint of its parent; the joint at `index` moves the link at `index + 1`.
    """
    found = {index for index, name in enumerate(links) if is_gripper(name)}
    for index, joint in enumerate(joints, 1):
        if is_gripper(joint.name) or links.index(joint.parent) in found:
            found.add(index)
    return frozenset(found)
