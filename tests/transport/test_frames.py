"""Tests of frames between sockets: live and lossless, from one camera and from several."""

import dataclasses
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import zmq

from sam3_node.transport import FramePublisher, FrameSubscriber, choose_replaced
from sam3_node.transport.control_server import ControlServer, poll
from sam3_node.types import Delivery, Depth, Frame, Intrinsics
from sam3_node.wire import pack_frame, unpack_frame
from tests.support.patience import PATIENCE_MS, PATIENCE_S
from tests.support.refuses import mentions
from tests.support.tables import each_row
from tests.support.transport_peer import TCP, bound_cameras, make_frame, peer, take_frame, wait_until


def send_until(publisher: FramePublisher, subscriber: FrameSubscriber, frame: Frame) -> None:
    """Publish `frame` until the subscription has reached the publisher and the frame waits."""
    wait_until(lambda: publisher.send(frame) and is_waiting(subscriber, 20))


def is_waiting(subscriber: FrameSubscriber, timeout_ms: int = 0) -> bool:
    with ControlServer(TCP) as control:
        return poll(subscriber, control, timeout_ms)


@pytest.mark.parametrize("delivery", ["newest", "every"])
def test_a_frame_arrives_as_it_was_sent(endpoint: str, delivery: Delivery) -> None:
    depth = Depth(4, 3, "z16", 0.001, True, np.arange(12, dtype=np.uint16).tobytes())
    frame = dataclasses.replace(
        make_frame(3), depth=depth, intrinsics=Intrinsics(1.0, 2.0, 3.0, 4.0), times={"device_ms": 1.5}
    )
    before_ns = time.time_ns()
    with (
        FramePublisher(endpoint, delivery) as publisher,
        FrameSubscriber([publisher.endpoint], delivery) as subscriber,
    ):
        send_until(publisher, subscriber, frame)
        received = take_frame(subscriber)
    got = received.frame
    assert bytes(got.colour) == bytes(frame.colour)
    assert bytes(got.depth.data) == depth.data
    assert before_ns < got.sent_ns <= received.received_ns <= time.time_ns()
    same: dict[str, Any] = {"colour": b"", "depth": None, "sent_ns": 0}
    assert dataclasses.replace(got, **same) == dataclasses.replace(frame, **same)


def test_a_given_sent_time_is_not_changed() -> None:
    with FramePublisher(TCP) as publisher, FrameSubscriber([publisher.endpoint]) as subscriber:
        send_until(publisher, subscriber, dataclasses.replace(make_frame(0), sent_ns=5))
        assert take_frame(subscriber).frame.sent_ns == 5


@pytest.mark.parametrize(("interval_ms", "side"), [(1, 16), (20, 1000)], ids=["quick", "large"])
def test_the_newest_frame_wins_and_every_skipped_one_is_counted(interval_ms: int, side: int) -> None:
    with (
        peer("camera", TCP, "cam0", "newest", interval_ms, 100_000, side) as camera,
        FrameSubscriber([camera.next_line()]) as subscriber,
    ):
        fresh = 0
        taken = []
        for _ in range(10):
            asked_ns = time.time_ns()
            time.sleep(0.1)  # a slow consumer: several frames pass
            received = take_frame(subscriber)
            assert set(bytes(received.frame.colour)) == {received.frame.seq % 256}
            fresh += received.frame.capture_ns > asked_ns
            taken.append(received)
    seqs = [received.frame.seq for received in taken]
    assert seqs == sorted(set(seqs))
    assert sum(received.skipped for received in taken) + len(taken) == seqs[-1] - seqs[0] + 1
    assert sum(received.skipped for received in taken) > len(taken)
    # from a queue none would be fresh; on a machine that starves the receiver, now and then one is not
    assert fresh > 5


def test_a_flood_is_unpacked_once_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked: list[int] = []
    begun = threading.Event()
    flooded = threading.Event()

    def unpack(parts: Sequence[memoryview]) -> Frame:
        found = unpack_frame(parts)
        unpacked.append(found.seq)
        begun.set()
        assert flooded.wait(PATIENCE_S)
        return found

    monkeypatch.setattr("sam3_node.wire.unpack_frame", unpack)
    with zmq.Context() as context, context.socket(zmq.PUB) as flood, context.socket(zmq.PUB) as quiet:
        endpoints = []
        for socket in (flood, quiet):
            socket.set_hwm(0)
            socket.linger = 0
            endpoints.append(f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}")
        with FrameSubscriber(endpoints) as subscriber:
            wait_until(lambda: flood.send_multipart(pack_frame(make_frame(0, "flood"))) or begun.wait(0.02))
            for seq in range(1, 1001):
                flood.send_multipart(pack_frame(make_frame(seq, "flood")))
            flooded.set()
            last: dict[str, int] = {}

            def take() -> bool:
                quiet.send_multipart(pack_frame(make_frame(0, "quiet")))
                taken = subscriber.take(20)
                if taken is not None:
                    last[taken.frame.camera] = taken.frame.seq
                return last.get("flood") == 1000 and "quiet" in last

            wait_until(take)
    of_flood = [seq for seq in unpacked if seq]
    assert of_flood == sorted(of_flood)
    assert len(of_flood) < 500  # about one in 64, if all have arrived before the turn


def test_cameras_take_turns() -> None:
    with (
        FramePublisher(TCP) as quick,
        FramePublisher(TCP) as slow,
        FrameSubscriber([quick.endpoint, slow.endpoint]) as subscriber,
    ):
        wait_until(lambda: len(subscriber.connected) == 2)
        turns = []
        with ControlServer(TCP) as control:
            for seq in range(6):
                for number in range(10):
                    quick.send(make_frame(seq * 10 + number, "quick"))
                    time.sleep(0.002)
                slow.send(make_frame(seq, "slow"))
                time.sleep(0.05)
                while poll(subscriber, control, 0):
                    turns.append(take_frame(subscriber).frame.camera)
                    if len(turns) % 2:  # the quick one never stops
                        quick.send(make_frame(seq * 10 + 9, "quick"))
    assert turns.count("slow") >= 4
    longest = max(map(len, "".join(name[0] for name in turns).split("s")))
    assert longest <= 3, turns


def test_frames_of_other_cameras_are_ignored() -> None:
    with (
        FramePublisher(TCP) as publisher,
        FrameSubscriber([publisher.endpoint], cameras=["cam1"]) as subscriber,
    ):
        for _ in range(20):
            publisher.send(make_frame(0, "cam10"))  # its topic begins with that of cam1
            time.sleep(0.01)
        send_until(publisher, subscriber, make_frame(4, "cam1"))
        assert take_frame(subscriber).frame.camera == "cam1"
        assert subscriber.rejected == 0


def test_frames_beyond_max_cameras_are_counted() -> None:
    with FramePublisher(TCP) as publisher, FrameSubscriber([publisher.endpoint], max_cameras=2) as subscriber:
        for camera in ("a", "b"):
            send_until(publisher, subscriber, make_frame(0, camera))
            while subscriber.take(50) is not None:
                pass
        wait_until(lambda: publisher.send(make_frame(0, "c")) and subscriber.rejected)
        assert mentions(str(subscriber.last_error), "2", "cameras")
        send_until(publisher, subscriber, make_frame(1, "a"))


def test_a_silent_camera_frees_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    def take_all() -> list[str]:
        return [received.frame.camera for received in iter(lambda: subscriber.take(20), None)]

    with FramePublisher(TCP) as publisher, FrameSubscriber([publisher.endpoint], max_cameras=2) as subscriber:
        send_until(publisher, subscriber, make_frame(0, "a"))
        publisher.send(make_frame(0, "b"))
        wait_until(lambda: publisher.send(make_frame(0, "c")) and subscriber.rejected)
        monkeypatch.setattr("sam3_node.transport.receiver.CAMERA_IDLE_S", 0.05)
        time.sleep(0.1)
        publisher.send(make_frame(0, "c"))  # in the place of a, whose frame nobody took
        time.sleep(0.1)
        assert take_all() == ["b", "c"]
        for seq in range(10):
            time.sleep(0.06)
            publisher.send(make_frame(seq, f"new{seq}"))
            wait_until(lambda name=f"new{seq}": name in take_all())  # type: ignore[misc]
        assert len(subscriber._last_seq) <= 2


def test_a_restarted_camera_has_skipped_nothing() -> None:
    with FramePublisher(TCP) as publisher, FrameSubscriber([publisher.endpoint]) as subscriber:
        send_until(publisher, subscriber, make_frame(100))
        while subscriber.take(100) is not None:
            pass
        skipped = []
        for seq in (103, 2, 3):
            publisher.send(make_frame(seq))
            skipped.append(take_frame(subscriber).skipped)
    assert skipped == [2, 0, 0]


def test_no_live_frame_is_lost_on_the_way_to_a_consumer_that_keeps_up() -> None:
    with FramePublisher(TCP) as publisher, FrameSubscriber([publisher.endpoint]) as subscriber:
        send_until(publisher, subscriber, make_frame(0))
        while subscriber.take(100) is not None:
            pass
        for seq in range(1, 200):
            publisher.send(make_frame(seq))
            received = take_frame(subscriber)
            assert (received.frame.seq, received.skipped) == (seq, 0)


def test_every_frame_arrives_in_order_through_a_long_stall() -> None:
    count = 40
    with (
        peer("camera", TCP, "cam0", "every", 0, count, 1000) as camera,
        FrameSubscriber([camera.next_line()], "every") as subscriber,
    ):
        assert subscriber.take(PATIENCE_MS) is not None
        time.sleep(2.7)
        sent = camera.seen[1:]
        assert 0 < len(sent) < count - 5, "the publisher must wait for a consumer that stalls"
        seqs = [0]
        while seqs[-1] < count - 1:
            received = take_frame(subscriber)
            assert received.skipped == 0
            seqs.append(received.frame.seq)
        assert seqs == list(range(count))
        assert camera.process.wait(PATIENCE_S) == 0


def test_queued_frames_are_sent_after_close() -> None:
    with (
        peer("camera", TCP, "cam0", "every", 0, 8, 16) as camera,
        FrameSubscriber([camera.next_line()], "every") as subscriber,
    ):
        assert camera.process.wait(PATIENCE_S) == 0
        seqs: list[int] = []
        while len(seqs) < 8:
            seqs.append(take_frame(subscriber).frame.seq)
            time.sleep(0.02)
    assert seqs == list(range(8))


def test_lossless_from_two_cameras_keeps_both_orders() -> None:
    with (
        peer("camera", TCP, "a", "every", 0, 50, 200) as first,
        peer("camera", TCP, "b", "every", 0, 50, 200) as second,
        FrameSubscriber([first.next_line(), second.next_line()], "every") as subscriber,
    ):
        seqs: dict[str, list[int]] = {"a": [], "b": []}
        for _ in range(100):
            received = take_frame(subscriber)
            seqs[received.frame.camera].append(received.frame.seq)
    assert seqs == {"a": list(range(50)), "b": list(range(50))}


def test_lossless_send_waits_for_a_subscriber() -> None:
    with FramePublisher(TCP, "every") as publisher:
        assert not publisher.send(make_frame(0), timeout_ms=20)
        with FrameSubscriber([publisher.endpoint], "every") as subscriber:
            assert publisher.send(make_frame(1), timeout_ms=PATIENCE_MS)
            assert take_frame(subscriber).frame.seq == 1


def test_pixels_stay_valid_after_later_frames_and_close() -> None:
    with FramePublisher(TCP) as publisher, FrameSubscriber([publisher.endpoint]) as subscriber:
        send_until(publisher, subscriber, make_frame(1, side=600))
        first = subscriber.take(PATIENCE_MS)
        for seq in range(2, 40):
            publisher.send(make_frame(seq, side=600))
            subscriber.take(100)
    colour = memoryview(first.frame.colour)
    assert colour.readonly
    assert set(bytes(colour)) == {1}


def test_poll_returns_true_for_a_frame_or_a_request_only() -> None:
    with (
        FramePublisher(TCP) as publisher,
        FrameSubscriber([publisher.endpoint]) as subscriber,
        ControlServer(TCP) as control,
    ):
        assert not poll(subscriber, control, 10)
        send_until(publisher, subscriber, make_frame(0))
        assert poll(subscriber, control, None)
        assert subscriber.take(0) is not None
        wait_until(lambda: subscriber.take(0) is None)
        assert not poll(subscriber, control, 10)


@contextmanager
def two_cameras(max_cameras: int = 16) -> Iterator[tuple[FramePublisher, FramePublisher, FrameSubscriber]]:
    """Open two publishers, and a subscriber that is connected to both and has heard cam0 of the first."""
    with (
        FramePublisher(TCP) as first,
        FramePublisher(TCP) as second,
        FrameSubscriber([first.endpoint, second.endpoint], max_cameras=max_cameras) as subscriber,
    ):
        wait_until(lambda: len(subscriber.connected) == 2)
        wait_until(lambda: first.send(make_frame(0)) and subscriber.take(20))
        take_cameras(subscriber)
        yield first, second, subscriber


def take_cameras(subscriber: FrameSubscriber) -> list[tuple[str, str]]:
    """Take all that wait. Return camera and endpoint of each."""
    taken = iter(lambda: subscriber.take(100), None)
    return [(received.frame.camera, received.endpoint) for received in taken]


def test_a_second_camera_of_a_name_is_refused_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), two_cameras() as (first, second, subscriber):
        wait_until(lambda: second.send(make_frame(5)) and subscriber.rejected > 3)
        first.send(make_frame(9))
        assert take_cameras(subscriber) == [("cam0", first.endpoint)]
        assert f"camera cam0 of {second.endpoint} is refused" in str(subscriber.last_error)
        assert f"{first.endpoint} has sent it first" in str(subscriber.last_error)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_name_is_free_when_its_endpoint_has_gone_and_was_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sam3_node.transport.receiver.CAMERA_IDLE_S", 0.3)
    with two_cameras() as (first, second, subscriber):
        time.sleep(0.4)
        # the first is silent, but there
        wait_until(lambda: second.send(make_frame(5)) and subscriber.rejected)
        first.close()
        wait_until(lambda: second.send(make_frame(6)) and subscriber.take(20))
        assert take_cameras(subscriber) in ([], [("cam0", second.endpoint)])


def test_an_endpoint_with_many_names_takes_nothing_from_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sam3_node.transport.receiver.CAMERA_IDLE_S", 0.01)
    with two_cameras(max_cameras=4) as (first, second, subscriber):
        for number in range(100):
            second.send(make_frame(number, f"new{number}"))
            time.sleep(0.02)
        take_cameras(subscriber)
        assert "cam0" in bound_cameras(subscriber)
        first.send(make_frame(1))
        second.send(make_frame(1))
        assert take_cameras(subscriber) == [("cam0", first.endpoint)]


def test_an_endpoint_that_comes_late_gets_its_share() -> None:
    with two_cameras(max_cameras=4) as (first, second, subscriber):
        for number in range(100):
            first.send(make_frame(number, f"cam{number % 8}"))
            time.sleep(0.005)
        take_cameras(subscriber)
        for name in ("a", "b"):
            second.send(make_frame(0, name))
            assert take_cameras(subscriber) == [(name, second.endpoint)]
        second.send(make_frame(0, "c"))
        wait_until(lambda: mentions(subscriber.last_error or "", "4", "cameras", "c"))
        first.send(make_frame(0, "cam0"))
        assert take_cameras(subscriber) in ([], [("cam0", first.endpoint)])
        assert len(bound_cameras(subscriber)) == 4


def test_expected_cameras_get_their_places_before_others() -> None:
    with two_cameras(max_cameras=2) as (_, second, subscriber):
        subscriber.names.expect(["left", "right"])  # as after a restart
        assert not subscriber.names.has_place("cam0")
        assert [subscriber.names.silent_s(name) for name in ("left", "right")] == [None, None]
        wait_until(lambda: second.send(make_frame(0, "left")) and subscriber.take(20))
        assert subscriber.names.silent_s("left") is not None


A = "tcp://a:1"
B = "tcp://b:1"


@each_row(
    ("cameras", "expected"),
    [
        ({"one": (A, False), "two": (B, False)}, None),
        ({"one": (A, True), "two": (B, False)}, None),  # B has its share: it may replace only its own
        ({"one": (A, True), "two": (B, True)}, "two"),
        ({"one": (A, False), "two": (A, False)}, "one"),  # B has less than its share, and A has more
        ({"one": (A, False), "two": (A, True)}, "two"),
        ({"one": (A, True)}, "one"),  # a single place goes to who sends
        ({"one": (A, False)}, None),
    ],
)
def test_places_are_shared_by_endpoint(cameras: dict[str, tuple[str, bool]], expected: str | None) -> None:
    assert choose_replaced(cameras, B, 1) == expected
