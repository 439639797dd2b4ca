"""The tap: every message in the order of arrival while there is room, and no more than there is room for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sam3_node.errors import TransportError
from sam3_node.transport import FramePublisher, MaskPublisher, ReceivedMessage, StreamTap
from sam3_node.types import Frame, MaskFrame
from sam3_node.wire import Event, pack_event, unpack_frame
from tests.support.node_rig import until

MEBIBYTE = 1 << 20


def frame(seq: int, camera: str = "cam0", size: int = 100) -> Frame:
    return Frame(camera, seq, seq, 8, 8, "jpeg", bytes(size))


@contextmanager
def tap(
    folder: Path, cameras: tuple[str, ...] = (), max_bytes: int = 64 * MEBIBYTE
) -> Iterator[tuple[FramePublisher, MaskPublisher, StreamTap]]:
    """Publishers, and a tap that hears both; nothing waits in it."""
    frames, masks = f"ipc://{folder}/frames", f"ipc://{folder}/masks"
    with (
        FramePublisher(frames) as camera,
        MaskPublisher(masks) as node,
        StreamTap([frames], masks, cameras, max_bytes) as found,
    ):
        topics = set()

        def heard() -> bool:
            camera.send(frame(0, cameras[0] if cameras else "cam0"))
            node.send_event(Event(0, "pause"))
            arrived = found.take(50)
            if arrived is not None:
                topics.add(bytes(arrived.parts[0]))
            return len(topics) == 2

        until(heard, "both")
        time.sleep(0.1)
        while found.take(0):
            pass
        yield camera, node, found


def taken(found: StreamTap, count: int) -> list[ReceivedMessage]:
    arrived = [found.take(5000) for _ in range(count)]
    return [item for item in arrived if item is not None]


def test_every_message_comes_as_it_was_sent(tmp_path: Path) -> None:
    with tap(tmp_path) as (camera, node, found):
        assert len(found.connected) == 2
        for n in range(50):
            node.send_event(Event(n, "reset", {"camera": "cam0"}))
            node.send(MaskFrame("cam0", n, n, 8, 8))
            (event, masks) = taken(found, 2)
            assert [bytes(part) for part in event.parts] == pack_event(Event(n, "reset", {"camera": "cam0"}))
            assert bytes(masks.parts[0]) == b"masks/cam0"
        camera.send(frame(7))
        (arrived,) = taken(found, 1)
        assert unpack_frame(arrived.parts).seq == 7
        assert abs(arrived.received_ns - time.time_ns()) < 60 * 10**9


def test_what_there_is_no_room_for_is_dropped_and_counted(tmp_path: Path) -> None:
    with tap(tmp_path, max_bytes=MEBIBYTE) as (camera, _, found):
        for seq in range(10):
            camera.send(frame(seq, size=MEBIBYTE // 4))
            until(lambda seq=seq: len(found._waiting) + found.dropped > seq, "the frame")  # type: ignore[misc]
        assert found.dropped == 7
        assert [unpack_frame(item.parts).seq for item in taken(found, 3)] == [0, 1, 2]
        camera.send(frame(10))
        assert len(taken(found, 1)) == 1


def test_one_that_is_too_large_for_the_room_still_comes(tmp_path: Path) -> None:
    with tap(tmp_path, max_bytes=1000) as (camera, _, found):
        camera.send(frame(1, size=5000))
        assert len(taken(found, 1)) == 1


def test_only_the_chosen_cameras_and_all_events_come(tmp_path: Path) -> None:
    with tap(tmp_path, cameras=("cam1",)) as (camera, node, found):
        for name in ("cam10", "cam0", "cam1"):
            camera.send(frame(1, name))
            node.send(MaskFrame(name, 1, 1, 8, 8))
        node.send_event(Event(1, "pause"))
        topics = sorted(bytes(item.parts[0]) for item in taken(found, 3))
        assert topics == [b"events", b"frame/cam1", b"masks/cam1"]
        assert found.take(50) is None


def test_after_the_close_what_waits_can_be_taken(tmp_path: Path) -> None:
    with tap(tmp_path) as (camera, _, found):
        camera.send(frame(1))
        until(lambda: found._waiting, "the frame")
        found.close()
        found.close()
        assert found.take(5000) is not None
        assert found.take(5000) is None


@pytest.mark.parametrize(
    ("frames", "masks"), [((), "ipc://x"), (("nonsense",), "ipc://x"), (("ipc://x",), "no")]
)
def test_malformed_endpoints_are_refused(frames: tuple[str, ...], masks: str) -> None:
    with pytest.raises(TransportError, match="expected"):
        StreamTap(frames, masks, (), 1000)
