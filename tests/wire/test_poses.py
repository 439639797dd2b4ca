"""Pose messages: they survive the wire, and malformed ones are refused."""

from __future__ import annotations

from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sam3_node.errors import WireError
from sam3_node.wire import pack_pose, pose_topic, unpack_pose
from tests.support.refuses import refuses
from tests.support.wire_examples import gripper_pose


def changed(**fields: object) -> list[bytes]:
    topic, body = pack_pose(gripper_pose())
    return [topic, msgpack.packb(msgpack.unpackb(body) | fields)]


def test_the_topic_names_the_frame() -> None:
    assert pack_pose(gripper_pose())[0] == pose_topic("gripper") == b"pose/gripper"


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        (changed(quaternion=[0, 0, 0, 2.0]), ("1", "2", "length")),
        (changed(quaternion=[0, 0, 1]), ("4", "numbers")),
        (changed(quaternion=[0, 0, float("nan"), 1]), "quaternion"),
        (changed(position=[0, 1]), "position"),
        (changed(position=[0, 1, float("inf")]), "position"),
        (changed(frame="tool"), "pose/tool"),
        (changed(frame="a/b"), ("frame", "name")),
        (changed(parent=""), ("frame", "name")),
        (changed(clock="sundial"), "clock"),
        (changed(stamp_ns=-1), "stamp_ns"),
        (changed(kind="frame"), "kind"),
        (changed(v=2), ("wire", "version")),
        (changed()[:1], ("2", "parts")),
        ([], ("2", "parts")),
    ],
)
def test_wrong_poses_are_refused(parts: list[bytes], named: str | tuple[str, ...]) -> None:
    with refuses(WireError, field=named):
        unpack_pose(parts)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        unpack_pose([b"pose/gripper", data])


def test_a_pose_without_a_unit_quaternion_is_not_sent() -> None:
    with pytest.raises(WireError, match="length 1"):
        pack_pose(replace(gripper_pose(), quaternion_xyzw=(0, 0, 0, 0)))


def test_fields_of_later_versions_are_ignored() -> None:
    assert unpack_pose(changed(covariance=[1, 2, 3])) == gripper_pose()
