"""Masks and poses between sockets: no pose is skipped, and malformed ones are counted."""

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zmq

from sam3_node.errors import TransportError
from sam3_node.transport import MaskPublisher, MaskSubscriber, PosePublisher
from sam3_node.transport.receiver import Inbox
from sam3_node.transport.tap import PoseSubscriber
from sam3_node.types import Delivery, MaskEncoding, MaskFrame, RobotMessage
from sam3_node.wire import pose_topic
from tests.support.patience import PATIENCE_MS
from tests.support.refuses import refuses
from tests.support.transport_peer import TCP, make_masks, open_peer, place_of, wait_until
from tests.support.wire_examples import gripper_pose, joint_state


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
    mask = got.instances[0].mask
    sent = masks.instances[0].mask
    assert np.array_equal(mask.full(), sent.full())
    assert dataclasses.replace(got, published_ns=0, instances=()) == dataclasses.replace(masks, instances=())


def test_the_newest_masks_win() -> None:
    with MaskPublisher(TCP) as publisher, MaskSubscriber(publisher.endpoint) as subscriber:
        send_until_received(publisher, subscriber, make_masks(0))
        for seq in range(1, 50):
            publisher.send(make_masks(seq))
            time.sleep(0.002)

        def is_last() -> bool:
            got = subscriber.take(1000)
            return got is not None and got.seq == 49

        wait_until(is_last)
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
        got = [both.take(PATIENCE_MS), both.take(PATIENCE_MS)]
        assert {masks.camera for masks in got if masks} == {"left", "right"}
        assert (masks := left.take(PATIENCE_MS)) is not None
        assert masks.camera == "left"
        assert left.take(50) is None


def connect(publisher: PosePublisher, subscriber: PoseSubscriber) -> None:
    """Publish until a pose arrives, then take all that wait."""
    wait_until(lambda: publisher.send(gripper_pose()) and subscriber.take(50))
    while subscriber.take(100):
        pass


def test_every_pose_and_all_joints_arrive_in_order() -> None:
    poses = [replace((gripper_pose, joint_state)[stamp % 2](), stamp_ns=stamp) for stamp in range(200)]
    got: list[RobotMessage] = []
    with PosePublisher(TCP) as publisher, PoseSubscriber(publisher.endpoint) as subscriber:
        connect(publisher, subscriber)
        for pose in poses:
            publisher.send(pose)
        wait_until(lambda: got.extend(subscriber.take(1000)) or len(got) == len(poses))
    assert got == poses


def test_poses_of_other_frames_are_ignored() -> None:
    with (
        PosePublisher(TCP) as publisher,
        PoseSubscriber(publisher.endpoint, [pose_topic("gripper")]) as subscriber,
    ):
        connect(publisher, subscriber)
        publisher.send(joint_state())
        for frame in ("gripper2", "base_link", "gripper"):
            publisher.send(replace(gripper_pose(), frame=frame))
        got: list[RobotMessage] = []
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


@contextmanager
def open_inbox(capacity: int) -> Iterator[Inbox[Any]]:
    inbox: Inbox[Any] = Inbox(capacity)
    yield inbox
    inbox.close()
    assert inbox.peek(lambda item: True, timeout_ms=1000) is None
    inbox.release()


def run(script: str) -> str:
    """Return the cameras in the order of their turns. A letter is a frame of that camera, a dot takes the next one."""
    turns = []
    with open_inbox(8) as inbox:
        for step in script.replace(" ", ""):
            if step == ".":
                turns.append(inbox.take(timeout_ms=0) or "-")
            else:
                assert inbox.put(step, step, timeout_ms=0)
    return "".join(turns)


@pytest.mark.parametrize(
    ("script", "turns"),
    [
        pytest.param("abc...", "abc", id="new cameras in the order of their arrival"),
        pytest.param("abc. abc. abc. abc.", "abca", id="saturated cameras take turns"),
        # s was taken longest ago: its frame does not wait behind frames that arrived before it
        pytest.param(
            "sabc.... abc s.... ", "sabcsabc", id="a slow camera is next as soon as its frame arrives"
        ),
        pytest.param("abcs.... abc. abc. abc. abcs.", "abcsabcs", id="also after turns that it did not use"),
        pytest.param("abab.. bab. bab. bab. bab.", "ababab", id="a repeated frame gains no turn"),
        # a camera that paused has one turn, not those that it missed
        pytest.param("sa.. a. a. a. a. sa. sa. sa. sa.", "saaaaasasa", id="missed turns are not made up for"),
        pytest.param("ab. n. .", "abn", id="a new name does not overtake a waiting camera"),
        pytest.param("ab.. abn.", "aba", id="nor one that was taken before it arrived"),
        pytest.param("a. . b.", "a-b", id="nothing waits"),
    ],
)
def test_the_camera_that_was_taken_longest_ago_is_next(script: str, turns: str) -> None:
    assert run(script) == turns


@pytest.mark.parametrize("flood", [1, 10, 1000])
def test_a_flooding_camera_takes_no_turn_from_the_others(flood: int) -> None:
    turns = run(("f" * flood + "abc" + ".") * 400)
    assert {camera: turns.count(camera) for camera in "fabc"} == dict.fromkeys("fabc", 100)


def test_a_camera_at_a_tenth_of_the_rate_never_waits_for_more_than_the_present_step() -> None:
    # three cameras have a frame before every turn, s before every tenth
    turns = run("".join("abc" + ("s" if turn % 10 == 5 else "") + "." for turn in range(200)))
    assert [turn for turn, camera in enumerate(turns) if camera == "s" and turn > 10] == list(
        range(15, 200, 10)
    )
    rates = [turns.count(camera) for camera in "abc"]
    assert max(rates) - min(rates) <= 1


def test_each_turn_gives_the_newest_frame() -> None:
    with open_inbox(4) as inbox:
        for seq in range(5):
            inbox.put("a", seq, timeout_ms=0)
        assert inbox.take(timeout_ms=0) == 4
        assert inbox.take(timeout_ms=0) is None


def test_keys_that_are_used_once_keep_their_order_and_leave_nothing_behind() -> None:
    with open_inbox(4) as inbox:
        taken = []
        for number in range(1000):
            assert inbox.put(number, number, timeout_ms=0)
            if number % 4 == 3:
                assert not inbox.put("more", 0, timeout_ms=0)
                taken += [inbox.take(timeout_ms=0) for _ in range(4)]
        assert taken == list(range(1000))
        assert len(inbox._turns) <= 4


def test_a_discarded_camera_begins_again_as_a_new_one() -> None:
    with open_inbox(2) as inbox:
        for camera in "ab":
            inbox.put(camera, camera, timeout_ms=0)
        inbox.discard("a")
        assert inbox.put("c", "c", timeout_ms=0)
        assert [inbox.take(timeout_ms=0) for _ in range(3)] == ["b", "c", None]


def test_an_endpoint_with_many_names_takes_one_turn_in_each_round() -> None:
    with open_inbox(16) as inbox:
        turns = []
        for _ in range(40):
            for number in range(8):
                inbox.put(f"evil{number}", f"evil{number}", 0, "second")
            inbox.put("cam0", "cam0", 0, "first")
            turns.append(inbox.take(timeout_ms=0))
    assert turns.count("cam0") == 20
    assert {turns.count(f"evil{number}") for number in range(8)} == {2, 3}


def test_a_look_at_the_next_item_leaves_it_and_its_turn() -> None:
    with open_inbox(8) as inbox:
        assert inbox.peek(lambda item: True, timeout_ms=0) is None
        for camera in "ab":
            inbox.put(camera, camera, timeout_ms=0)
        assert [inbox.peek(lambda item: True, timeout_ms=0) for _ in range(2)] == ["a", "a"]
        assert inbox.peek(lambda item: item != "a", timeout_ms=0) is None  # only the next one is looked at
        assert [inbox.take(timeout_ms=0) for _ in range(2)] == ["a", "b"]
