"""Tests of poses between sockets: none is skipped, and malformed ones are counted."""

from __future__ import annotations

from dataclasses import replace

import zmq

from sam3_node.errors import TransportError
from sam3_node.transport import PosePublisher, PoseSubscriber
from sam3_node.types import FramePose
from tests.support.refuses import refuses
from tests.support.transport_peer import wait_until
from tests.support.wire_examples import gripper_pose

TCP = "tcp://127.0.0.1:*"


def connect(publisher: PosePublisher, subscriber: PoseSubscriber) -> None:
    """Publish until a pose arrives, then take all that wait."""
    wait_until(lambda: publisher.send(gripper_pose()) and subscriber.take(50))
    while subscriber.take(100):
        pass


def test_every_pose_arrives_in_order() -> None:
    poses = [replace(gripper_pose(), stamp_ns=stamp) for stamp in range(200)]
    got: list[FramePose] = []
    with PosePublisher(TCP) as publisher, PoseSubscriber(publisher.endpoint) as subscriber:
        connect(publisher, subscriber)
        for pose in poses:
            publisher.send(pose)
        wait_until(lambda: got.extend(subscriber.take(1000)) or len(got) == len(poses))
    assert got == poses


def test_poses_of_other_frames_are_ignored() -> None:
    with PosePublisher(TCP) as publisher, PoseSubscriber(publisher.endpoint, ["gripper"]) as subscriber:
        connect(publisher, subscriber)
        for frame in ("gripper2", "base_link", "gripper"):
            publisher.send(replace(gripper_pose(), frame=frame))
        got: list[FramePose] = []
        wait_until(lambda: got.extend(subscriber.take(1000)) or got)
    assert [pose.frame for pose in got] == ["gripper"]


def test_malformed_poses_are_counted() -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as peer:
        peer.bind(TCP)
        endpoint = peer.getsockopt_string(zmq.LAST_ENDPOINT)
        with PoseSubscriber(endpoint) as subscriber:
            wait_until(lambda: peer.send_multipart([b"pose/gripper", b"\xc1"]) or subscriber.rejected)
            assert "pose" in (subscriber.last_error or "")
            assert subscriber.take(0) == []


def test_take_ends_with_close() -> None:
    subscriber = PoseSubscriber("tcp://127.0.0.1:9")
    subscriber.close()
    subscriber.close()
    assert subscriber.take() == []


def test_a_malformed_endpoint_is_refused() -> None:
    with refuses(TransportError, field="tcp://host:port"):
        PoseSubscriber("http://robot")
