"""Pose messages: `[b"pose/<frame>", body]`. They say where a frame, such as the gripper, lies in its parent's frame."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, get_args

from ..errors import WireError
from ..types import Buffer, Clock, FramePose
from .codec import VERSION, Fields, Limits, describe, pack, unpack
from .topics import check_name

POSES_ROOT = b"pose/"
"""Beginning of the topics of all poses."""
_LIMITS = Limits(total_bytes=64 << 10)
_UNIT_TOLERANCE = 1e-3


def pose_topic(frame: str) -> bytes:
    """Return the topic of the poses of a frame."""
    return POSES_ROOT + check_name(frame, "frame").encode()


def pack_pose(pose: FramePose) -> list[bytes]:
    """Return the parts of the message. Raises WireError for a quaternion that is not of length 1."""
    return [pose_topic(pose.frame), pack({"v": VERSION, "kind": "pose", **pose_fields(pose)})]


def pose_fields(pose: FramePose) -> dict[str, Any]:
    """Return the fields of a pose. Raises WireError for a quaternion that is not of length 1."""
    _check_quaternion(pose.quaternion_xyzw)
    return {
        "frame": check_name(pose.frame, "frame"),
        "parent": check_name(pose.parent, "frame"),
        "stamp_ns": pose.stamp_ns,
        "clock": pose.clock,
        "position": pose.position_m,
        "quaternion": pose.quaternion_xyzw,
    }


def unpack_pose(parts: Sequence[Buffer]) -> FramePose:
    """Unpack a pose from the parts of a message. Raises WireError for any other input."""
    if len(parts) != 2:
        raise WireError(f"pose: expected 2 parts (topic, body), found {len(parts)}")
    body = Fields(unpack(parts[1], what="pose", limits=_LIMITS), "pose")
    body.require_kind("pose")
    frame = body.text("frame")
    topic = pose_topic(frame)
    if parts[0] != topic:
        raise WireError(f"pose: expected the topic {topic.decode()}, found {describe(bytes(parts[0][:80]))}")
    return read_pose(body)


def read_pose(body: Fields) -> FramePose:
    """Read the fields of a pose. Raises WireError for any other input."""
    quaternion = body.numbers("quaternion", 4)
    if len(quaternion) != 4:
        raise body.wrong("quaternion", "four finite numbers x, y, z, w")
    _check_quaternion(quaternion)
    x, y, z, w = quaternion
    return FramePose(
        frame=check_name(body.text("frame"), "frame"),
        parent=check_name(body.text("parent"), "frame"),
        stamp_ns=body.integer("stamp_ns"),
        position_m=body.triple("position"),
        quaternion_xyzw=(x, y, z, w),
        clock=body.choice("clock", get_args(Clock)),
    )


def _check_quaternion(quaternion: Sequence[float]) -> None:
    length = math.hypot(*quaternion)
    if not abs(length - 1) <= _UNIT_TOLERANCE:
        raise WireError(f"pose: expected a quaternion (x, y, z, w) of length 1, found length {length:.4g}")
