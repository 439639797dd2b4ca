"""Tests of frames in shared memory: equal to those of sockets, never torn, and never more than a way to be faster."""

import contextlib
import dataclasses
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from sam3_node.transport import FramePublisher, FrameSubscriber, shared_frames
from sam3_node.transport.shared_frames import (
    MAX_RING_BYTES,
    MAX_SUBSCRIPTIONS,
    SLOTS,
    FrameRing,
    SharedFrameReader,
)
from sam3_node.types import Depth, Frame, FramePlace
from sam3_node.wire import pack_frame, pack_place
from tests.support.patience import PATIENCE_MS
from tests.support.transport_peer import (
    TCP,
    make_frame,
    open_peer,
    peer,
    place_of,
    sockets_of,
    take_frame,
    wait_until,
)
from tests.support.wire_examples import jpeg_frame

RINGS = "sam3-node-frames"
LARGE = 1500
"""Side of frames that a camera process shares: 2.25 MB."""


@pytest.fixture(autouse=True)
def small_frames_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_frames, "MIN_FRAME_BYTES", 1)


def count_rings() -> int:
    """Return the number of mappings of a camera's memory in this process."""
    return Path("/proc/self/maps").read_text().count(RINGS)


def send_and_take(publisher: FramePublisher, subscriber: FrameSubscriber, frame: Frame) -> Frame:
    """Send a frame until it is taken; the first ones are sent before the subscription has arrived."""
    publisher.send(frame)
    while (received := subscriber.take(50)) is None or received.frame.key != frame.key:
        publisher.send(frame)
    return received.frame


@contextlib.contextmanager
def sharing() -> Iterator[tuple[FramePublisher, FrameSubscriber]]:
    """Yield a publisher, and a subscriber that has found its memory."""
    with FramePublisher(TCP) as publisher, FrameSubscriber([publisher.endpoint]) as subscriber:
        wait_until(lambda: publisher.send(make_frame(0)) and subscriber.shared)
        yield publisher, subscriber


def test_a_frame_in_memory_is_the_frame_that_was_sent() -> None:
    depth = Depth(4, 3, "z16", 0.001, True, np.arange(12, dtype=np.uint16).tobytes())
    frames = [
        dataclasses.replace(make_frame(1), depth=depth, sent_ns=1),
        dataclasses.replace(jpeg_frame(), sent_ns=2),
    ]
    with sharing() as (publisher, subscriber):
        for frame in frames:
            got = send_and_take(publisher, subscriber, frame)
            assert bytes(got.colour) == bytes(frame.colour)
            assert (got.depth is None) == (frame.depth is None)
            if got.depth is not None:
                assert bytes(got.depth.data) == depth.data
            same: dict[str, Any] = {"colour": b"", "depth": None}
            assert dataclasses.replace(got, **same) == dataclasses.replace(frame, **same)
        assert subscriber.shared == (publisher.endpoint,)
        assert subscriber.rejected == 0


def test_each_frame_comes_once_while_a_reader_finds_out_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    def take_all(count: int) -> list[int]:
        with FramePublisher(TCP) as publisher, FrameSubscriber([publisher.endpoint]) as subscriber:
            send_and_take(publisher, subscriber, make_frame(0))
            got = []
            for seq in range(1, count):
                assert publisher.send(make_frame(seq))
                # frames of the number 0 were sent until the first arrived
                while not (found := take_frame(subscriber).frame.seq):
                    pass
                got.append(found)
            assert not subscriber.waits
            assert bool(subscriber.shared) == (not refuses)
            return got

    refuses = False
    assert take_all(20) == list(range(1, 20))

    def refuse(_: FramePlace) -> mmap.mmap:
        raise PermissionError("another user's")

    monkeypatch.setattr(shared_frames, "_open_ring", refuse)
    refuses = True
    assert take_all(20) == list(range(1, 20))


def test_only_readers_who_can_use_memory_do_without_pixels_in_messages() -> None:
    with sharing() as (publisher, subscriber), open_peer(zmq.SUB, publisher.endpoint) as plain:
        plain.subscribe(b"frame/cam0")
        frame = make_frame(5)
        wait_until(lambda: publisher.send(frame) and plain.poll(20))
        assert plain.recv_multipart()[2] == bytes(frame.colour)
        assert bytes(take_frame(subscriber).frame.colour) == bytes(frame.colour)


def test_memory_is_taken_for_readers_alone_and_given_back() -> None:
    with FramePublisher(TCP) as publisher:
        publisher.send(make_frame(0))
        assert count_rings() == 0
        with FrameSubscriber([publisher.endpoint]) as subscriber:
            wait_until(lambda: publisher.send(make_frame(0)) and subscriber.shared)
            assert count_rings() == 2
        wait_until(lambda: publisher.send(make_frame(0)) and count_rings() == 0)


def test_a_lossless_camera_sends_pixels() -> None:
    with (
        FramePublisher(TCP, "every") as publisher,
        FrameSubscriber([publisher.endpoint], "every") as subscriber,
    ):
        for seq in range(5):
            publisher.send(make_frame(seq), PATIENCE_MS)
            assert take_frame(subscriber).frame.seq == seq
        assert subscriber.shared == ()


def test_a_camera_that_is_killed_leaves_no_memory_and_its_successor_is_read(
    new_endpoint: Callable[[], str],
) -> None:
    place = new_endpoint()
    with peer("camera", place, "cam0", "newest", 5, 100_000, LARGE) as camera:
        camera.next_line()
        with FrameSubscriber([place]) as subscriber:
            wait_until(lambda: take_frame(subscriber) and subscriber.shared)
            camera.kill()
            first = subscriber._memory[sockets_of(subscriber)[0]]._rings.copy()
            with peer("camera", place, "cam0", "newest", 5, 100_000, LARGE) as successor:
                successor.next_line()
                wait_until(
                    lambda: (
                        subscriber.take(50) and subscriber._memory[sockets_of(subscriber)[0]]._rings != first
                    )
                )
                take_frame(subscriber)
                assert count_rings() == 1
                assert subscriber.rejected == 0
    assert count_rings() == 0


def test_a_reader_that_is_killed_costs_the_camera_nothing() -> None:
    with FramePublisher(TCP) as publisher:
        for _ in range(3):
            with peer("reader", publisher.endpoint, "newest") as reader:
                wait_until(lambda: publisher.send(make_frame(1)) and count_rings() == 1)
                reader.kill()
            wait_until(lambda: publisher.send(make_frame(1)) and not publisher._shared._rings)
            assert count_rings() == 0


def test_a_larger_frame_gets_larger_memory_and_one_too_large_comes_in_its_message() -> None:
    large = 5000
    assert large * large * SLOTS > MAX_RING_BYTES
    with sharing() as (publisher, subscriber):
        for number, side in enumerate((600, large, 600), start=1):
            frame = make_frame(number, side=side)
            assert bytes(send_and_take(publisher, subscriber, frame).colour) == bytes(frame.colour)
            assert count_rings() == (1 if side == large else 2)


def test_a_reader_of_memory_gets_each_small_frame_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with sharing() as (publisher, subscriber):
        monkeypatch.setattr(shared_frames, "MIN_FRAME_BYTES", 1000)
        send_and_take(publisher, subscriber, make_frame(1))
        for seq in range(2, 12):
            frame = make_frame(seq, side=20 if seq % 2 else 40)
            publisher.send(frame)
            # the first one was sent until it arrived
            while (received := take_frame(subscriber)).frame.seq == 1:
                pass
            assert (received.frame.seq, bytes(received.frame.colour)) == (seq, bytes(frame.colour))
        assert subscriber.shared
        assert not subscriber.waits


def test_a_plain_camera_in_the_place_of_one_with_memory_is_read(new_endpoint: Callable[[], str]) -> None:
    place = new_endpoint()
    with FrameSubscriber([place]) as subscriber:
        with FramePublisher(place) as publisher:
            wait_until(lambda: publisher.send(make_frame(1)) and subscriber.shared)
        with zmq.Context() as context, context.socket(zmq.PUB) as camera:
            camera.linger = 0
            camera.bind(place)

            def receives_plain() -> bool:
                camera.send_multipart(pack_frame(make_frame(2)))
                received = subscriber.take(20)
                return received is not None and received.frame.seq == 2

            wait_until(receives_plain)
            assert not subscriber.shared


@contextlib.contextmanager
def reading() -> Iterator[Callable[[FramePlace], list[memoryview] | None]]:
    """Yield the function of a reader that copies the pixels of a place."""
    with (
        FramePublisher(TCP) as publisher,
        FrameSubscriber([publisher.endpoint]) as subscriber,
        SharedFrameReader(sockets_of(subscriber)[0], [b""]) as reader,
    ):
        yield lambda place: reader._read(b"shared/cam0", place)


def test_a_frame_is_whole_or_told_to_be_overwritten() -> None:
    pixels = [bytes([number]) * 1000 for number in range(2 * SLOTS)]
    with FrameRing(1000) as ring, reading() as read:
        places = [ring.write([data]) for data in pixels]
        found = [read(place) for place in places]
        # one slot lies between the oldest that is read and the next that is written
        kept = len(pixels) - (SLOTS - 1)
        assert found[:kept] == [None] * kept
        assert [bytes(views[0]) for views in found[kept:] if views] == pixels[kept:]


def test_no_picture_is_torn_while_a_camera_writes_as_fast_as_it_can() -> None:
    # frames of one value each: a torn one has two
    with (
        peer("camera", TCP, "cam0", "newest", 0, 100_000, LARGE) as camera,
        FrameSubscriber([camera.next_line()]) as subscriber,
    ):
        wait_until(lambda: take_frame(subscriber) and subscriber.shared)
        for _ in range(150):
            frame = take_frame(subscriber).frame
            assert np.all(np.frombuffer(frame.colour, np.uint8) == frame.seq % 256)
        assert subscriber.shared


def test_a_reader_cannot_write_and_a_camera_cannot_shrink() -> None:
    with FrameRing(1000) as ring:
        place = ring.write([b"1"])
        path = f"/proc/{place.pid}/fd/{place.descriptor}"
        opened = os.open(path, os.O_RDWR)
        try:
            with pytest.raises(PermissionError):
                mmap.mmap(opened, mmap.PAGESIZE)
            with pytest.raises(PermissionError):
                os.write(opened, b"0")
            with pytest.raises(PermissionError):
                os.ftruncate(opened, 0)
        finally:
            os.close(opened)


def test_places_of_another_kind_send_the_reader_to_the_socket(tmp_path: Path) -> None:
    pipe, other_end = os.pipe()
    unsealed = os.memfd_create(RINGS, os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, mmap.PAGESIZE + 6 * mmap.PAGESIZE)
    foreign = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    os.ftruncate(foreign, mmap.PAGESIZE + 6 * mmap.PAGESIZE)
    with FrameRing(1000) as ring, FrameRing(1000) as second:
        place = ring.write([b"1"])
        other = second.write([b"1"])
        wrong = {
            "a pipe": dataclasses.replace(place, descriptor=pipe),
            "a file": dataclasses.replace(place, descriptor=foreign),
            "unsealed memory": dataclasses.replace(place, descriptor=unsealed),
            "no descriptor": dataclasses.replace(place, descriptor=10**6),
            "no process": dataclasses.replace(place, pid=2**40),
            "the first process": dataclasses.replace(place, pid=1),
            "another ring": dataclasses.replace(place, descriptor=other.descriptor),
            "another token": dataclasses.replace(place, token=bytes(16)),
            "more slots": dataclasses.replace(place, slots=60),
            "other slots": dataclasses.replace(place, slots=1, slot_bytes=6 * mmap.PAGESIZE),
            "huge slots": dataclasses.replace(place, slots=64, slot_bytes=64 << 20),
            "pixels beyond the slot": dataclasses.replace(place, sizes=(5000,)),
            "pixels beyond all": dataclasses.replace(place, sizes=(2**62, 2**62)),
        }
        refused = {name for name, one in wrong.items() if is_refused(one)}
        # the slots' number is checked against the size of the memory alone
        assert refused == set(wrong) - {"other slots"}
        ahead = dataclasses.replace(place, number=place.number + 1)
        with reading() as read:
            assert read(ahead) is None
    for descriptor in (pipe, other_end, unsealed, foreign):
        os.close(descriptor)


def is_refused(place: FramePlace) -> bool:
    with reading() as read:
        try:
            read(place)
        except (OSError, ValueError):
            return True
    return False


@pytest.mark.parametrize("damage", [b"junk", b"\x80", bytes(2000), b"\xc1"])
def test_a_damaged_place_costs_nothing_but_itself(damage: bytes) -> None:
    frame = make_frame(3)
    with open_peer(zmq.PUB) as camera, FrameSubscriber([place_of(camera)]) as subscriber:
        topic, header, colour = pack_frame(frame)

        def send() -> bool:
            camera.send_multipart([b"shared/cam0", damage, header])
            camera.send_multipart([b"shared/cam0", damage])
            camera.send_multipart([b"shared/"])
            camera.send_multipart([topic, header, colour])
            return subscriber.waits

        wait_until(send)
        assert bytes(take_frame(subscriber).frame.colour) == bytes(frame.colour)
        assert subscriber.shared == ()


def test_a_place_does_not_let_a_camera_take_anothers_name() -> None:
    with (
        FrameRing(1000) as ring,
        open_peer(zmq.PUB) as camera,
        FrameSubscriber([place_of(camera)]) as subscriber,
    ):
        frame = make_frame(3)
        _, header, colour = pack_frame(frame)

        def send() -> bool:
            camera.send_multipart([b"shared/cam1", pack_place(ring.write([colour])), header])
            return bool(subscriber.rejected)

        wait_until(send)
        assert not subscriber.waits
        assert "cam0" in str(subscriber.last_error)


def test_sealed_memory_of_another_kind_is_no_ring() -> None:
    # all that a file can have but the head: its slots would be read as they are
    size = mmap.PAGESIZE + 6 * mmap.PAGESIZE
    descriptor = os.memfd_create(RINGS, os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    place = FramePlace(
        pid=os.getpid(),
        descriptor=descriptor,
        token=bytes(16),
        slots=6,
        slot_bytes=mmap.PAGESIZE,
        number=0,
        sizes=(1,),
    )
    assert is_refused(place)
    os.close(descriptor)


def test_pixels_are_not_sent_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    with sharing() as (publisher, subscriber):
        hand_over = shared_frames.SharedFrames.is_wanted

        def note(shared: shared_frames.SharedFrames, topic: bytes) -> bool:
            is_wanted = hand_over(shared, topic)
            if is_wanted:
                sent.append(topic)
            return is_wanted

        def is_sent_without_pixels() -> bool:
            sent.clear()
            send_and_take(publisher, subscriber, make_frame(7))
            return not sent

        monkeypatch.setattr(shared_frames.SharedFrames, "is_wanted", note)
        # the camera hears a moment later that its reader needs memory alone
        wait_until(is_sent_without_pixels)
        with open_peer(zmq.SUB, publisher.endpoint) as plain:
            plain.subscribe(b"")
            wait_until(lambda: publisher.send(make_frame(8)) and plain.poll(20))
        assert sent


def test_a_flood_of_topics_costs_no_reader_its_frames() -> None:
    with sharing() as (publisher, subscriber), open_peer(zmq.SUB, publisher.endpoint) as flood:
        for number in range(3 * MAX_SUBSCRIPTIONS):
            flood.subscribe(b"frame/%d" % number)
        with open_peer(zmq.SUB, publisher.endpoint) as plain:
            plain.subscribe(b"frame/cam0")
            wait_until(lambda: publisher.send(make_frame(8)) and plain.poll(20))
        assert send_and_take(publisher, subscriber, make_frame(9)).seq == 9
        assert len(publisher._shared._topics) <= MAX_SUBSCRIPTIONS


def test_a_reader_that_is_always_too_late_goes_back_to_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    with sharing() as (publisher, subscriber):
        monkeypatch.setattr(shared_frames, "_is_whole", lambda *_: False)
        wait_until(lambda: publisher.send(make_frame(1)) and not subscriber.shared)
        assert send_and_take(publisher, subscriber, make_frame(2)).seq == 2


def test_more_cameras_than_rings_come_in_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_frames, "MAX_RINGS", 2)
    with sharing() as (publisher, subscriber):
        rings = publisher._shared._rings
        send_and_take(publisher, subscriber, make_frame(1, "cam1"))
        send_and_take(publisher, subscriber, make_frame(1, "cam2"))
        assert list(rings) == [b"shared/cam0", b"shared/cam1"]
        # a camera that has gone gives its place to another
        monkeypatch.setattr(shared_frames, "RING_IDLE_S", 0.0)
        send_and_take(publisher, subscriber, make_frame(2, "cam2"))
        assert list(rings) == [b"shared/cam1", b"shared/cam2"]


def test_a_system_without_such_memory_sends_through_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with FramePublisher(TCP) as publisher, FrameSubscriber([publisher.endpoint]) as subscriber:
        for seq in range(3):
            assert send_and_take(publisher, subscriber, make_frame(seq)).seq == seq
        assert not subscriber.shared
