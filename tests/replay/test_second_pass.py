"""Frames buffered on disk for the second pass."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path

import numpy as np

from sam3_node.errors import OutputError
from sam3_node.replay.second_pass import ReverseFrameBuffer, Span, buffer_frames, index_frames
from sam3_node.types import Frame, Instance, Mask, MaskFrame
from tests.support.recordings import frame_at
from tests.support.refuses import refuses

KNOWN = Instance(1, "thing", 0.9, "tracked", 1, 0, Mask.from_full(np.ones((4, 4), np.bool_)))


def masks_on(frame: Frame) -> MaskFrame:
    return MaskFrame(frame.camera, frame.seq, frame.capture_ns, frame.width, frame.height)


def span(camera: str, first: int, last: int) -> Span:
    return Span.from_instance(first, last, camera, KNOWN)


def test_frames_come_back_from_the_last_to_the_first(tmp_path: Path) -> None:
    frames = [frame_at(seq) for seq in range(5)]
    with ReverseFrameBuffer(tmp_path) as spool:
        for place, frame in enumerate(frames):
            spool.append(10 * place, frame)
        assert len(spool) == 5
        expected = [(10 * seq, replace(frames[seq], depth=None)) for seq in reversed(range(5))]
        assert [tuple(placed) for placed in spool.read_backward()] == expected
        assert [tuple(placed) for placed in spool.read_backward()] == expected


def test_an_empty_buffer_has_no_frames(tmp_path: Path) -> None:
    with ReverseFrameBuffer(tmp_path) as spool:
        assert not list(spool.read_backward())


def test_the_buffer_leaves_no_file(tmp_path: Path) -> None:
    with ReverseFrameBuffer(tmp_path) as spool:
        spool.append(0, frame_at(0))
        assert not list(tmp_path.iterdir())
    spool.close()
    assert not list(tmp_path.iterdir())


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with refuses(OutputError, field=("buffer", "frames")):
        ReverseFrameBuffer(tmp_path / "absent")


def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with (
            ReverseFrameBuffer(tmp_path) as spool,
            refuses(OutputError, field=("buffer", "frames")),
        ):
            spool.append(0, frame_at(0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_frames_without_masks_are_left_out() -> None:
    frames = [frame_at(seq, camera) for seq in range(4) for camera in ("left", "right")]
    kept = [frame for number, frame in enumerate(frames) if number not in (2, 3, 7)]
    placed = list(index_frames(map(masks_on, kept), frames))
    assert [place for place, _ in placed] == list(range(5))
    assert [frame for _, frame in placed] == kept


def test_only_frames_of_spans_are_buffered(tmp_path: Path) -> None:
    frames = [frame_at(seq, camera) for seq in range(8) for camera in ("left", "right")]
    spans = [span("left", 2, 6), span("left", 4, 8), span("right", 9, 11), span("left", 12, 12)]
    with ReverseFrameBuffer(tmp_path) as spool:
        placed = list(index_frames(map(masks_on, frames), frames))
        assert list(buffer_frames(spool, spans, placed)) == list(range(1, 14))
        assert [place for place, _ in spool.read_backward()] == [12, 11, 9, 8, 6, 4, 2]
