"""Masks and poses between sockets: no pose is skipped, and malformed ones are counted."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import replace

import numpy as np
import pytest
import zmq

from sam3_node.errors import TransportError
from sam3_node.transport import MaskPublisher, MaskSubscriber, PosePublisher, PoseSubscriber
from sam3_node.types import Delivery, FramePose, MaskEncoding, MaskFrame
from tests.support.refuses import refuses
from tests.support.transport_peer import make_masks, open_peer, place_of, wait_until
from tests.support.wire_examples import gripper_pose

TCP = "tcp://127.0.0.1:*"


def send_until_received(publisher: MaskPublisher, subscriber: MaskSubscriber, masks: MaskFrame) -> MaskFrame:
    """Publish `masks` until they arrive, take every copy, and return the last."""
    received: list[MaskFrame] = []

    def arrived() -> bool:
        publisher.send(masks)
        while (more := subscriber.take(50)) is not None:
            received.append(more)
        return bool(received)

    wait_until(arrived)
    return received[-1]


@pytest.mark.parametrize("encoding", ["bits+zstd", "rle"])
@pytest.mark.parametrize("delivery", ["newest", "every"])
def test_masks_arrive_as_they_were_sent(delivery: Delivery, encoding: MaskEncoding) -> None:
    masks = make_masks(5)
    before_ns = time.time_ns()
    with (
        MaskPublisher(TCP, delivery, encoding) as publisher,
        MaskSubscriber(publisher.endpoint, delivery) as subscriber,
    ):
        got = send_until_received(publisher, subscriber, masks)
    assert before_ns < got.published_ns < time.time_ns()
    mask, sent = got.instances[0].mask, masks.instances[0].mask
    assert np.array_equal(mask.full(), sent.full())
    assert dataclasses.replace(got, published_ns=0, instances=()) == dataclasses.replace(masks, instances=())


def test_the_newest_masks_win() -> None:
    with MaskPublisher(TCP) as publisher, MaskSubscriber(publisher.endpoint) as subscriber:
        send_until_received(publisher, subscriber, make_masks(0))
        for seq in range(1, 50):
            publisher.send(make_masks(seq))
            time.sleep(0.002)
        wait_until(lambda: (got := subscriber.take(1000)) and got.seq == 49)
        assert subscriber.take(50) is None


def test_every_mask_arrives_in_order() -> None:
    with MaskPublisher(TCP, "every") as publisher, MaskSubscriber(publisher.endpoint, "every") as subscriber:
        seqs: list[int] = []
        sent = 0
        while len(seqs) < 300:
            while sent < 300 and publisher.send(make_masks(sent), timeout_ms=0):
                sent += 1
            got = subscriber.take(1000)
            if got is not None:
                seqs.append(got.seq)
    assert seqs == list(range(300))


def test_masks_of_other_cameras_are_ignored() -> None:
    with (
        MaskPublisher(TCP) as publisher,
        MaskSubscriber(publisher.endpoint, cameras=["left"]) as left,
        MaskSubscriber(publisher.endpoint) as both,
    ):
        send_until_received(publisher, left, make_masks(0, "left"))
        send_until_received(publisher, both, make_masks(0, "right"))
        publisher.send(make_masks(1, "left"))
        publisher.send(make_masks(1, "right"))
        got = [both.take(5000), both.take(5000)]
        assert {masks.camera for masks in got if masks} == {"left", "right"}
        assert (masks := left.take(5000)) is not None
        assert masks.camera == "left"
        assert left.take(50) is None


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
    with open_peer(zmq.PUB) as peer, PoseSubscriber(place_of(peer)) as subscriber:
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
