"""The gripper's pose at the capture of an image, from poses that arrive over a socket."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
import zmq

from sam3_node.calibration.poses import JointTrack
from sam3_node.errors import CalibrationError, TransportError
from sam3_node.node.cameras import RobotPoses
from sam3_node.settings import SpatialSettings
from sam3_node.transport import PosePublisher
from sam3_node.types import Clock, Frame, FramePose, JointState, RobotState
from tests.support.node_rig import until
from tests.support.refuses import refuses
from tests.support.transport_peer import open_peer, place_of

MS = 1_000_000
TURNED = (0.0, 0.0, 2**-0.5, 2**-0.5)


def pose(stamp_ms: int, clock: Clock = "system", **changes: str) -> FramePose:
    """Return the pose of a gripper that moves at 1 m/s along x."""
    place = (stamp_ms / 1000, 0.2, 0.5)
    return replace(FramePose("gripper", "base", stamp_ms * MS, place, TURNED, clock), **changes)


def frame(capture_ms: float, clock: Clock = "system") -> Frame:
    return Frame("cam0", 0, round(capture_ms * MS), 4, 3, "mono8", bytes(12), clock=clock)


@pytest.fixture
def publisher() -> Iterator[PosePublisher]:
    with PosePublisher("tcp://127.0.0.1:*") as publisher:
        yield publisher


def follow(publisher: PosePublisher, stack: ExitStack, *poses: FramePose) -> RobotPoses:
    """Return a follower that has received these poses: the gripper's in the base are found at their own times.

    A subscription takes effect between any two of them, so they are sent until all have arrived.
    """
    settings = SpatialSettings(poses=publisher.endpoint, max_pose_gap_ms=20, max_pose_ahead_ms=10)
    found = RobotPoses(settings, stack)
    counted = [item for item in poses if (item.frame, item.parent) == ("gripper", "base")]

    def has_arrived() -> bool:
        for item in poses:
            publisher.send(item)
        return all(found.find(frame(item.stamp_ns / MS, item.clock)).pose is not None for item in counted)

    until(has_arrived, "the poses")
    return found


def test_the_pose_is_interpolated_and_extrapolated_within_bounds(publisher: PosePublisher) -> None:
    with ExitStack() as stack:
        poses = follow(publisher, stack, pose(100), pose(110), pose(150), pose(160))
        between = poses.find(frame(104)).pose
        assert (between.frame, between.parent) == ("gripper", "base")
        assert (between.stamp_ns, between.clock) == (104 * MS, "system")
        assert between.position_m == pytest.approx((0.104, 0.2, 0.5))
        assert between.quaternion_xyzw == pytest.approx(TURNED)
        assert poses.problem is None
        ahead = poses.find(frame(169)).pose
        assert ahead.position_m == pytest.approx((0.169, 0.2, 0.5))
        for capture_ms, problem in ((171, "11 ms away"), (99, "1 ms away"), (130, "a gap of 40 ms")):
            assert poses.find(frame(capture_ms)).pose is None
            assert problem in str(poses.problem)
        assert poses.find(frame(105)).pose is not None
        assert poses.problem is None


def test_only_the_grippers_poses_in_the_base_count_and_only_on_the_clock_of_the_image(
    publisher: PosePublisher,
) -> None:
    with ExitStack() as stack:
        others = (pose(101, parent="world"), pose(102, frame="gripper2"), pose(103, frame="tool"))
        poses = follow(publisher, stack, *others, pose(100, "device"), pose(110, "device"))
        assert poses.find(frame(105, "device")).pose is not None
        assert poses.find(frame(105)).pose is None
        assert "clock of the images, system" in str(poses.problem)


def test_joints_are_interpolated_and_extrapolated_within_bounds(publisher: PosePublisher) -> None:
    """A joint without limits may jump from pi to -pi. Those of other robots do not count."""
    settings = SpatialSettings(poses=publisher.endpoint, max_pose_gap_ms=20, max_pose_ahead_ms=10)
    turns = ((100, 3.1), (110, -3.1), (150, 1.0), (160, 2.0))
    states = [JointState("arm", ms * MS, {"elbow": ms / 1000, "wrist": wrist}) for ms, wrist in turns]
    with ExitStack() as stack:
        poses = RobotPoses(settings, stack, robot="arm")

        def have_arrived() -> bool:
            for state in (*states, JointState("arm2", 101 * MS, {"elbow": 9.0, "wrist": 9.0})):
                publisher.send(state)
            return all(poses.find(frame(state.stamp_ns / MS)) == (None, state) for state in states)

        until(have_arrived, "the joints")
        assert "expected poses" in str(poses.problem)  # joints are no poses
        between = poses.find(frame(105)).joints
        assert (between.robot, between.stamp_ns, between.clock) == ("arm", 105 * MS, "system")
        assert between.positions["elbow"] == pytest.approx(0.105)
        assert abs(between.positions["wrist"]) == pytest.approx(np.pi)
        assert poses.find(frame(165)).joints.positions == pytest.approx({"elbow": 0.165, "wrist": 2.5})
        for capture_ms, problem in ((171, "11 ms away"), (99, "1 ms away"), (130, "a gap of 40 ms")):
            assert poses.find(frame(capture_ms)).joints is None
            assert problem in str(poses.problem)
        assert poses.find(frame(105, "device")).joints is None
        assert "joints with the clock of the images, device" in str(poses.problem)
        until(lambda: publisher.send(pose(105)) and poses.find(frame(105)).pose, "the pose")
        assert poses.find(frame(105)) == (pose(105), between)
        assert poses.problem is None


def test_other_joints_begin_the_track_anew() -> None:
    track = JointTrack(capacity=3)
    for ms in (10, 20, 30, 40):
        track.add_joints(JointState("arm", ms, {"a": float(ms), "b": 0.0}))
    assert len(track) == 3
    track.add_joints(JointState("arm", 35, {"b": 1.0, "a": 35.0}))
    assert (track.names, track.at(35, 10).tolist()) == (("a", "b"), [35.0, 1.0])
    track.add_joints(JointState("arm", 50, {"a": 50.0}))
    assert len(track) == 1
    assert (track.names, track.at(50, 10).tolist()) == (("a",), [50.0])
    with refuses(CalibrationError, field="joint states"):
        track.at(40, 10)


def test_without_an_endpoint_there_is_no_pose_and_no_problem() -> None:
    with ExitStack() as stack:
        poses = RobotPoses(SpatialSettings(), stack, robot="arm")
        assert (poses.find(frame(1)), poses.problem) == (RobotState(), None)
        with refuses(TransportError, field="tcp://host:port"):
            RobotPoses(SpatialSettings(poses="http://robot"), stack)


def test_malformed_poses_are_told() -> None:
    with ExitStack() as stack, open_peer(zmq.PUB) as robot:
        poses = RobotPoses(SpatialSettings(poses=place_of(robot)), stack)

        def is_told() -> bool:
            robot.send_multipart([b"pose/gripper", b"\xc1"])
            assert poses.find(frame(1)).pose is None
            return "malformed, the last: pose" in str(poses.problem)

        until(is_told, "the reason")
