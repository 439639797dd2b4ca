"""Robots that send too many joints, messages or bytes: the subscriber's work and memory stay bounded."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import msgpack
import pytest
import zmq

from sam3_node.transport import tap
from sam3_node.transport.channels import PosePublisher
from sam3_node.transport.tap import PoseSubscriber
from sam3_node.types import JointState, RobotMessage
from sam3_node.wire import joints_topic, pack_pose, pose_topic
from tests.support.hostility import limited_memory
from tests.support.patience import PATIENCE_S
from tests.support.transport_peer import TCP, place_of, sockets_of, wait_until
from tests.support.wire_examples import gripper_pose

TOPICS = (pose_topic("gripper"), joints_topic("arm"))
MEGABYTE = 1 << 20
HOSTILE_JOINTS = 4096


def make_joints(count: int, stamp_ns: int = 1) -> JointState:
    """Return a joint state whose names and positions are objects of its own, as in a message."""
    return JointState("arm", stamp_ns, {f"j{number}": number + 0.5 for number in range(count)})


@contextmanager
def open_robot() -> Iterator[zmq.Socket[bytes]]:
    """Bind a plain publisher that drops nothing, however much it sends."""
    with zmq.Context() as context, context.socket(zmq.PUB) as robot:
        robot.set_hwm(0)
        robot.linger = 0
        robot.bind("tcp://127.0.0.1:*")
        yield robot


def join(robot: zmq.Socket[bytes], subscriber: PoseSubscriber) -> None:
    """Send poses until one arrives, then take all that wait."""
    wait_until(lambda: robot.send_multipart(pack_pose(gripper_pose())) or subscriber.take(50))
    while subscriber.take(100):
        pass


def take_flood(
    robot: zmq.Socket[bytes], subscriber: PoseSubscriber, flood: Iterable[list[bytes]]
) -> list[list[RobotMessage]]:
    """Send a flood. Return what a loop takes in each turn until a pose that was sent after it has come."""
    end = replace(gripper_pose(), stamp_ns=12345)
    turns: list[list[RobotMessage]] = []
    for parts in flood:
        robot.send_multipart(parts)

    def has_ended() -> bool:
        # again and again, because the flood may have spent the rate of this topic, too
        robot.send_multipart(pack_pose(end))
        turns.append(subscriber.take(0))
        return end in turns[-1]

    wait_until(has_ended, PATIENCE_S)
    return turns


def test_a_joint_state_of_too_many_joints_is_rejected_and_the_robot_goes_on() -> None:
    with PosePublisher(TCP) as publisher, PoseSubscriber(publisher.endpoint, TOPICS) as subscriber:
        wait_until(lambda: publisher.send(make_joints(HOSTILE_JOINTS)) and subscriber.rejected)
        told = f"at most {tap.MAX_JOINTS} joints of a robot, found {HOSTILE_JOINTS}"
        assert told in str(subscriber.last_error)
        got: list[RobotMessage] = []
        most = make_joints(tap.MAX_JOINTS)
        wait_until(lambda: publisher.send(most) and (got.extend(subscriber.take(1000)) or got))
        assert got[0] == most


@pytest.mark.parametrize("topics", [TOPICS, ()])
@pytest.mark.parametrize("size", [7, 1000, HOSTILE_JOINTS])
def test_of_a_flood_no_more_is_unpacked_than_the_rate(size: int, topics: Sequence[bytes]) -> None:
    flood = pack_pose(make_joints(size))
    flood_bytes = sum(map(len, flood))
    count = min(20_000, 30_000_000 // flood_bytes)
    begin_s = time.monotonic()
    with open_robot() as robot, PoseSubscriber(place_of(robot), topics) as subscriber:
        join(robot, subscriber)
        turns = take_flood(robot, subscriber, [flood] * count)
        passed_s = time.monotonic() - begin_s + tap.POSES_BURST_S
        taken = sum(isinstance(message, JointState) for turn in turns for message in turn)
        unpacked = taken + subscriber.rejected
        assert 0 < unpacked <= 1 + passed_s * tap.MAX_POSES_PER_S
        assert unpacked * flood_bytes <= flood_bytes + passed_s * tap.MAX_POSES_BYTES_PER_S
        assert subscriber.skipped > 0
        assert max(map(len, turns)) <= tap.MAX_POSES


def test_too_many_joints_leave_the_rate_of_poses_alone() -> None:
    too_many = [pack_pose(make_joints(1000))] * 20
    with open_robot() as robot, PoseSubscriber(place_of(robot), TOPICS) as subscriber:
        join(robot, subscriber)
        for stamp_ns in range(50):
            pose = replace(gripper_pose(), stamp_ns=stamp_ns)
            for parts in (*too_many, pack_pose(pose)):
                robot.send_multipart(parts)
            # each once: none is skipped
            wait_until(lambda pose=pose: pose in subscriber.take(1000), PATIENCE_S)
        assert subscriber.skipped > 0


def test_a_robot_that_sends_faster_than_it_is_read_is_disconnected_for_a_while() -> None:
    """The subscriber discards what waits, so that it cannot fill the memory."""
    count = 20_000
    flood = pack_pose(make_joints(7))
    with open_robot() as robot, PoseSubscriber(place_of(robot), TOPICS) as subscriber:
        join(robot, subscriber)
        (socket,) = sockets_of(subscriber)
        # the thread cannot store anything meanwhile
        with subscriber._changed:
            for _ in range(count):
                robot.send_multipart(flood)
        turns = take_flood(robot, subscriber, [])
        assert socket.handshakes == 2
        assert sum(map(len, turns)) + subscriber.skipped < count
        assert subscriber.connected


def test_topics_that_a_publisher_invents_share_one_rate() -> None:
    flood = [pack_pose(replace(gripper_pose(), frame=f"frame{number}")) for number in range(20_000)]
    begin_s = time.monotonic()
    with open_robot() as robot, PoseSubscriber(place_of(robot)) as subscriber:
        join(robot, subscriber)
        turns = take_flood(robot, subscriber, flood)
        passed_s = time.monotonic() - begin_s + tap.POSES_BURST_S
        assert 0 < sum(map(len, turns)) <= 1 + passed_s * tap.MAX_POSES_PER_S


def test_what_waits_is_bounded_in_memory_and_the_newest_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of two characters and small values: a message has a twentieth of what they take in memory."""
    monkeypatch.setattr(tap, "MAX_POSES_PER_S", 1e12)
    monkeypatch.setattr(tap, "MAX_POSES_BYTES_PER_S", 1e12)
    positions = {chr(97 + number % 26) + chr(65 + number // 26): 1.0 for number in range(600)}
    body = {
        "v": 1,
        "kind": "joints",
        "robot": "arm",
        "clock": "system",
        "positions": dict.fromkeys(positions, 1),
    }
    count = 1000
    with open_robot() as robot, PoseSubscriber(place_of(robot), TOPICS) as subscriber:
        join(robot, subscriber)
        with limited_memory(megabytes=1.25 * tap.MAX_WAITING_BYTES / MEGABYTE):
            for stamp_ns in range(count):
                robot.send_multipart([TOPICS[1], msgpack.packb(body | {"stamp_ns": stamp_ns})])
            end = replace(gripper_pose(), stamp_ns=count)
            robot.send_multipart(pack_pose(end))
            # taken when all have come: nobody takes meanwhile
            wait_until(lambda: subscriber._poses and subscriber._poses[-1] == end, PATIENCE_S)
        taken = subscriber.take(0)
    assert taken[-1] == end
    assert [message.stamp_ns for message in taken] == list(range(count + 1))[-len(taken) :]
    assert len(taken) < count / 4
