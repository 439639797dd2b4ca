"""Tests of the tap: it keeps every message in the order of arrival, up to its limit of bytes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sam3_node.errors import TransportError
from sam3_node.transport import FramePublisher, MaskPublisher
from sam3_node.transport.tap import ReceivedMessage, StreamTap
from sam3_node.types import Frame, MaskFrame
from sam3_node.wire import Event, pack_event, unpack_frame
from tests.support.node_rig import until
from tests.support.patience import PATIENCE_MS
from tests.support.transport_peer import count_waiting

MEBIBYTE = 1 << 20


def frame(seq: int, camera: str = "cam0", size: int = 100) -> Frame:
    return Frame(camera, seq, seq, 8, 8, "jpeg", bytes(size))


@contextmanager
def tap(
    folder: Path, cameras: tuple[str, ...] = (), max_bytes: int = 64 * MEBIBYTE
) -> Iterator[tuple[FramePublisher, MaskPublisher, StreamTap]]:
    """Open publishers, and an empty tap that is connected to both."""
    frames = f"ipc://{folder}/frames"
    masks = f"ipc://{folder}/masks"
    with (
        FramePublisher(frames) as camera,
        MaskPublisher(masks) as node,
        StreamTap([frames], masks, cameras, max_bytes) as stream_tap,
    ):
        topics = set()

        def is_connected() -> bool:
            camera.send(frame(0, cameras[0] if cameras else "cam0"))
            node.send_event(Event(0, "pause"))
            arrived = stream_tap.take(50)
            if arrived is not None:
                topics.add(bytes(arrived.parts[0]))
            return len(topics) == 2

        until(is_connected, "both")
        time.sleep(0.1)
        while stream_tap.take(0):
            pass
        yield camera, node, stream_tap


def take_messages(stream_tap: StreamTap, count: int) -> list[ReceivedMessage]:
    arrived = [stream_tap.take(PATIENCE_MS) for _ in range(count)]
    return [item for item in arrived if item is not None]


def test_every_message_arrives_as_it_was_sent(tmp_path: Path) -> None:
    with tap(tmp_path) as (camera, node, stream_tap):
        assert len(stream_tap.connected) == 2
        for n in range(50):
            node.send_event(Event(n, "reset", {"camera": "cam0"}))
            node.send(MaskFrame("cam0", n, n, 8, 8))
            (event, masks) = take_messages(stream_tap, 2)
            assert [bytes(part) for part in event.parts] == pack_event(Event(n, "reset", {"camera": "cam0"}))
            assert bytes(masks.parts[0]) == b"masks/cam0"
        camera.send(frame(7))
        (arrived,) = take_messages(stream_tap, 1)
        assert unpack_frame(arrived.parts).seq == 7
        assert abs(arrived.received_ns - time.time_ns()) < 60 * 10**9


def test_messages_beyond_the_limit_are_dropped_and_counted(tmp_path: Path) -> None:
    with tap(tmp_path, max_bytes=MEBIBYTE) as (camera, _, stream_tap):
        for seq in range(10):
            camera.send(frame(seq, size=MEBIBYTE // 4))
            until(lambda seq=seq: count_waiting(stream_tap) + stream_tap.dropped > seq, "the frame")  # type: ignore[misc]
        assert stream_tap.dropped == 7
        assert [unpack_frame(item.parts).seq for item in take_messages(stream_tap, 3)] == [0, 1, 2]
        camera.send(frame(10))
        assert len(take_messages(stream_tap, 1)) == 1


def test_a_single_message_above_the_limit_is_kept(tmp_path: Path) -> None:
    with tap(tmp_path, max_bytes=1000) as (camera, _, stream_tap):
        camera.send(frame(1, size=5000))
        assert len(take_messages(stream_tap, 1)) == 1


def test_only_the_chosen_cameras_and_all_events_arrive(tmp_path: Path) -> None:
    with tap(tmp_path, cameras=("cam1",)) as (camera, node, stream_tap):
        for name in ("cam10", "cam0", "cam1"):
            camera.send(frame(1, name))
            node.send(MaskFrame(name, 1, 1, 8, 8))
        node.send_event(Event(1, "pause"))
        topics = sorted(bytes(item.parts[0]) for item in take_messages(stream_tap, 3))
        assert topics == [b"events", b"frame/cam1", b"masks/cam1"]
        assert stream_tap.take(50) is None


def test_waiting_messages_can_be_taken_after_close(tmp_path: Path) -> None:
    with tap(tmp_path) as (camera, _, stream_tap):
        camera.send(frame(1))
        until(lambda: count_waiting(stream_tap), "the frame")
        stream_tap.close()
        stream_tap.close()
        assert stream_tap.take(PATIENCE_MS) is not None
        assert stream_tap.take(5000) is None


@pytest.mark.parametrize(
    ("frames", "masks"), [((), "ipc://x"), (("nonsense",), "ipc://x"), (("ipc://x",), "no")]
)
def test_malformed_endpoints_are_refused(frames: tuple[str, ...], masks: str) -> None:
    with pytest.raises(TransportError, match="expected"):
        StreamTap(frames, masks, (), 1000)
