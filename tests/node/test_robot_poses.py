"""The gripper's pose at the capture of an image, from poses that arrive over a socket."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import zmq

from sam3_node.calibration.poses import MAX_SETS, JointTracks
from sam3_node.errors import CalibrationError, TransportError
from sam3_node.node.cameras import CAPACITY, LATE_TOLD_S, MAX_TRACK_VALUES, AgeLimits, RobotPoses, RobotTracks
from sam3_node.settings import SpatialSettings
from sam3_node.transport import PosePublisher
from sam3_node.transport.tap import MAX_JOINTS
from sam3_node.types import Clock, Frame, FramePose, JointState, RobotMessage, RobotState
from tests.support.hostility import limited_memory
from tests.support.node_rig import until
from tests.support.refuses import mentions, refuses
from tests.support.transport_peer import open_peer, place_of

MS = 1_000_000
HOUR_NS = 3600 * 1000 * MS
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


def tell(tracks: JointTracks, ms: int, *names: str) -> None:
    """Send joints that turn by 1 rad/s, one message for each word of `names`: "ab" are the joints a and b."""
    for joints in names:
        tracks.add_joints(JointState("arm", ms * MS, dict.fromkeys(joints, ms / 1000)))


@pytest.mark.parametrize(
    "sets",
    [
        pytest.param(["abcdefghi"], id="all at once"),
        pytest.param(["abcdefg", "hi"], id="arm and gripper"),
        pytest.param([*"abcdefghi"], id="one a message"),
        pytest.param(["abc", "cdefgh", "hia"], id="overlapping"),
    ],
)
def test_each_joint_has_the_times_of_its_own_messages(sets: list[str]) -> None:
    tracks = JointTracks(1000, 100_000)
    for ms in range(0, 200, 10):
        tell(tracks, ms, *sets)
    assert tracks.at(155 * MS, 100 * MS) == pytest.approx(dict.fromkeys("abcdefghi", 0.155))
    # one that is sent no more is stale, whatever the others do
    left = [joints.replace("b", "") for joints in sets]
    for ms in range(200, 600, 10):
        tell(tracks, ms, *filter(None, left))
    assert tracks.at(155 * MS, 100 * MS) == pytest.approx(dict.fromkeys("abcdefghi", 0.155))
    with refuses(CalibrationError, field="joints b,"):
        tracks.at(555 * MS, 100 * MS)
    # it comes again, alone: the others have lost nothing
    for ms in range(600, 700, 10):
        tell(tracks, ms, "b", *filter(None, left))
    assert tracks.at(655 * MS, 100 * MS) == pytest.approx(dict.fromkeys("abcdefghi", 0.655))


def test_a_driver_may_send_those_joints_alone_that_moved() -> None:
    tracks = JointTracks(1000, 100_000)
    for ms in range(0, 500, 5):
        number = ms // 5
        tell(tracks, ms, "".join(name for bit, name in enumerate("abcd") if number % 15 + 1 >> bit & 1))
    assert tracks.at(402 * MS, 100 * MS) == pytest.approx(dict.fromkeys("abcd", 0.402))


def tracks_of(*messages: RobotMessage) -> RobotTracks:
    settings = SpatialSettings(max_pose_gap_ms=100, max_pose_ahead_ms=30)
    tracks = RobotTracks(settings, "arm", CAPACITY)
    for message in messages:
        tracks.add(message)
    return tracks


def in_turn(ms: int, arm: bool = True, shift_ms: int = 0) -> list[JointState]:
    """Return the joints of an arm, whose elbow turns by 1 rad/s, and of a gripper on a clock of its own."""
    sent = [JointState("arm", (ms + 10 + shift_ms) * MS, {"finger": 0.03})]
    if arm:
        sent.insert(0, JointState("arm", ms * MS, {"shoulder": 0.2, "elbow": ms / 1000}))
    return sent


@pytest.mark.parametrize("shift_ms", [0, -40])
def test_an_arm_and_its_gripper_may_send_their_joints_in_turn(shift_ms: int) -> None:
    tracks = tracks_of(*(joints for ms in range(0, 120, 20) for joints in in_turn(ms, shift_ms=shift_ms)))
    found = tracks.find(replace(frame(0), capture_ns=65 * MS)).joints
    assert found is not None
    assert found.positions == pytest.approx({"shoulder": 0.2, "elbow": 0.065, "finger": 0.03})
    # an arm that is silent is not an arm at zero
    for ms in range(120, 400, 20):
        tracks.add(in_turn(ms, arm=False)[0])
    assert tracks.find(replace(frame(0), capture_ns=380 * MS)).joints is None
    assert "shoulder, elbow" in str(tracks.problem)


@pytest.mark.parametrize("stranger_first", [True, False])
def test_joints_of_no_urdf_that_came_once_do_not_take_the_robot_away(stranger_first: bool) -> None:
    settings = SpatialSettings(max_pose_gap_ms=100, max_pose_ahead_ms=30)
    tracks = RobotTracks(settings, "arm", CAPACITY, known_joints=("shoulder", "elbow", "finger"))
    stranger = JointState("arm", 5 * MS, {"wheel": 1.0})
    if stranger_first:
        tracks.add(stranger)
    for ms in range(0, 1000, 20):
        for joints in in_turn(ms):
            tracks.add(joints)
    if not stranger_first:
        tracks.add(stranger)
    found = tracks.find(replace(frame(0), capture_ns=965 * MS)).joints
    assert found is not None
    assert found.positions == pytest.approx({"shoulder": 0.2, "elbow": 0.965, "finger": 0.03})
    # the arm is one that the robot's model needs
    for ms in range(1000, 1400, 20):
        tracks.add(in_turn(ms, arm=False)[0])
        tracks.add(JointState("arm", ms * MS, {"wheel": 1.0}))
    assert tracks.find(replace(frame(0), capture_ns=1380 * MS)).joints is None
    assert "shoulder, elbow" in str(tracks.problem)


def test_many_sets_of_joints_share_the_memory_of_one() -> None:
    tracks = JointTracks(capacity=1000, max_values=4 * MAX_SETS)
    for stamp in range(6):
        for number in range(2 * MAX_SETS):
            tracks.add_joints(JointState("arm", stamp, {f"a{number}": 0.0, f"b{number}": 0.0}))
    assert len(tracks) <= 2 * MAX_SETS + 2


def test_another_set_of_joints_takes_its_share_of_memory_at_once() -> None:
    tracks = JointTracks(capacity=1000, max_values=200)
    for stamp in range(200):
        tracks.add_joints(JointState("arm", stamp, {"elbow": 0.0}))
    assert len(tracks) == 200
    tracks.add_joints(JointState("arm", 200, {"finger": 0.0}))
    assert len(tracks) == 101


@pytest.mark.parametrize("back_ms", [300, 2000, 3_600_000])
def test_a_clock_that_steps_back_begins_the_tracks_anew(back_ms: int) -> None:
    """The poses before the step would lie among those after it."""
    base_ms = 10_000_000
    tracks = tracks_of()
    for ms in range(0, 5000, 20):
        tracks.add(pose_at((base_ms + ms) * MS))
        for joints in in_turn(base_ms + ms):
            tracks.add(joints)
    now_ms = base_ms + 4980 - back_ms
    for step in range(5):
        stamp_ns = (now_ms + 20 * step) * MS + 7 * MS
        tracks.add(replace(pose_at(stamp_ns), position_m=(9.0, 0.0, 0.0)))
        tracks.add(JointState("arm", stamp_ns, {"shoulder": 9.0, "elbow": 9.0}))
        tracks.add(JointState("arm", stamp_ns, {"finger": 9.0}))
    for ahead_ms in (10, 27, 57, 90):
        state = tracks.find(replace(frame(0), capture_ns=(now_ms + ahead_ms) * MS))
        assert state.pose is not None
        assert state.pose.position_m[0] == pytest.approx(9.0)
        assert state.joints is not None
        assert state.joints.positions == pytest.approx({"shoulder": 9.0, "elbow": 9.0, "finger": 9.0})
    assert tracks.restarts == 2


def joints_at(stamp_ns: int, clock: Clock = "system") -> JointState:
    return JointState("arm", stamp_ns, {"elbow": 1.0}, clock)


def pose_at(stamp_ns: int, clock: Clock = "system") -> FramePose:
    return replace(pose(0, clock), stamp_ns=stamp_ns)


Make = Callable[[int, Clock], RobotMessage]


def find_at(poses: RobotPoses, stamp_ns: int, make: Make, clock: Clock = "system") -> RobotMessage | None:
    """Return what is found of the kind that `make` makes."""
    state = poses.find(replace(frame(0, clock), capture_ns=stamp_ns))
    return state.joints if make is joints_at else state.pose


def test_joints_that_come_too_seldom_are_told_with_the_setting() -> None:
    tracks = tracks_of(*(joints_at(ms * MS) for ms in range(0, 2000, 250)))
    assert tracks.find(replace(frame(0), capture_ns=600 * MS)).joints is None
    assert mentions(str(tracks.problem), "a gap of 250 ms", "every 250 ms", "spatial.max_pose_gap_ms")
    # a joint that has ended does not say how often the others come
    ended = [replace(joints_at(ms * MS), positions={"finger": 1.0}) for ms in range(0, 300, 100)]
    tracks = tracks_of(*ended, *(joints_at(ms * MS) for ms in range(300, 2000, 20) if not 800 < ms < 900))
    assert tracks.find(replace(frame(0), capture_ns=850 * MS)).joints is None
    assert not mentions(str(tracks.problem), "they come every")
    # one that was lost is another matter
    tracks = tracks_of(*(joints_at(ms * MS) for ms in range(0, 2000, 20) if not 500 < ms < 700))
    assert tracks.find(replace(frame(0), capture_ns=600 * MS)).joints is None
    assert not mentions(str(tracks.problem), "spatial.max_pose_gap_ms")


@pytest.mark.parametrize("make", [pose_at, joints_at])
def test_a_robot_whose_clock_is_behind_is_told_while_it_sends(
    publisher: PosePublisher, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SpatialSettings(poses=publisher.endpoint)
    with ExitStack() as stack:
        poses = RobotPoses(settings, stack, robot="arm")
        advice = re.compile(r"they come 2\.\d s after their stamps: synchronise the clocks")

        def is_told() -> bool:
            publisher.send(make(time.time_ns() - 2000 * MS, "system"))
            find_at(poses, time.time_ns(), make)
            return bool(advice.search(str(poses.problem)))

        until(is_told, "its clock")
        # a robot that has stopped is another matter; each look at the clock finds it later
        later_s = count(time.monotonic() + 2 * LATE_TOLD_S, 2 * LATE_TOLD_S)
        monkeypatch.setattr(time, "monotonic", lambda: next(later_s))
        assert find_at(poses, time.time_ns(), make) is None
        assert poses.problem
        assert not advice.search(poses.problem)


@pytest.mark.parametrize("make", [pose_at, joints_at])
def test_a_clock_that_was_ahead_once_is_told_and_hinders_no_later_frame(
    publisher: PosePublisher, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    settings = SpatialSettings(poses=publisher.endpoint, max_pose_gap_ms=20, max_pose_ahead_ms=10)
    with ExitStack() as stack:
        poses = RobotPoses(settings, stack, robot="arm")

        def is_refused() -> bool:
            publisher.send(make(time.time_ns() + HOUR_NS, "system"))
            found = find_at(poses, time.time_ns(), make)
            # also a frame whose clock is as far ahead
            return (
                found is None and find_at(poses, time.time_ns() + HOUR_NS, make) is None and poses.ahead > 20
            )

        until(is_refused, "messages that are refused")
        assert re.search(
            r"ahead of the node.s clock, found 3[56]\d\d\.\d s; synchronise clocks", str(poses.problem)
        )
        now_ns = time.time_ns()
        right = [make(now_ns + step_ms * MS, "system") for step_ms in (0, 10)]
        until(
            lambda: all(publisher.send(item) for item in right) and find_at(poses, now_ns, make),
            "the robot",
        )
        until(lambda: find_at(poses, now_ns + 10 * MS, make), "the other")
        for after_ms in (5, 15):
            assert find_at(poses, now_ns + after_ms * MS, make) is not None
        assert sum("ahead of the node's clock" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("make", [pose_at, joints_at])
def test_when_the_nodes_clock_is_set_back_the_robot_is_found_at_once(
    publisher: PosePublisher, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SpatialSettings(poses=publisher.endpoint, max_pose_gap_ms=20, max_pose_ahead_ms=10)
    with ExitStack() as stack:
        poses = RobotPoses(settings, stack, robot="arm")
        now_ns = time.time_ns()
        for index in range(CAPACITY):
            poses.add(make(now_ns - (CAPACITY - 1 - index) * MS, "system"))
        assert find_at(poses, now_ns, make) is not None
        earlier_ns = now_ns - HOUR_NS
        monkeypatch.setattr("sam3_node.node.cameras.time", SimpleNamespace(time_ns=lambda: earlier_ns))
        poses.add(make(earlier_ns - 10 * MS, "system"))
        poses.add(make(earlier_ns, "system"))
        assert find_at(poses, earlier_ns + 5 * MS, make) is not None
        assert find_at(poses, now_ns, make) is None


@pytest.mark.parametrize("make", [pose_at, joints_at])
@pytest.mark.parametrize(("clock", "live"), [("monotonic", True), ("device", True), ("system", False)])
def test_a_clock_that_cannot_be_compared_may_be_ahead_and_may_be_set_back(
    publisher: PosePublisher, make: Make, clock: Clock, live: bool
) -> None:
    """Lossless delivery may bring recorded frames, whose clock may have been ahead."""
    settings = SpatialSettings(poses=publisher.endpoint, max_pose_gap_ms=20, max_pose_ahead_ms=10)
    with ExitStack() as stack:
        poses = RobotPoses(settings, stack, robot="arm", ages=AgeLimits(0.0, live))
        ahead_ns = time.time_ns() + HOUR_NS
        for index in range(CAPACITY + 10):
            poses.add(make(ahead_ns + index * MS, clock))
        assert find_at(poses, ahead_ns + CAPACITY * MS, make, clock) is not None
        for stamp_ms in (100, 110):
            poses.add(make(stamp_ms * MS, clock))
        for capture_ms in (105, 115):
            assert find_at(poses, capture_ms * MS, make, clock) is not None
        assert poses.ahead == 0


def test_joints_of_many_names_take_no_more_memory_than_a_robot_s() -> None:
    tracks = RobotTracks(SpatialSettings(), "arm", CAPACITY, MAX_TRACK_VALUES)
    names = [str(number) for number in range(MAX_JOINTS)]
    with limited_memory(megabytes=1.5 * 8 * MAX_TRACK_VALUES / (1 << 20)):
        for stamp_ns in range(CAPACITY):
            tracks.add(JointState("arm", stamp_ns, dict.fromkeys(names, 0.0)))
    assert len(tracks.joints["system"]) == MAX_TRACK_VALUES // MAX_JOINTS


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
