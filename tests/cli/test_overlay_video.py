"""Tests of overlay videos: pairing of frames and masks by seq, drawing in the background, counts of losses."""

import io
import itertools
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from sam3_node.cli import watch
from sam3_node.cli.watch import OverlayVideo, run_watch
from sam3_node.errors import OutputError
from sam3_node.transport import FramePublisher, MaskPublisher, mask_pairing
from sam3_node.types import Frame, MaskFrame
from sam3_node.visualization import Image, overlay
from tests.cli.test_watch import frame_at, masks_at, send_until, settings_for
from tests.support.threads import repeating


def masks_of(frame: Frame) -> MaskFrame:
    return replace(masks_at(frame.seq), capture_ns=frame.capture_ns)


@contextmanager
def open_overlay(path: Path) -> Iterator[tuple[FramePublisher, OverlayVideo]]:
    """Open a publisher of frames and an overlay video that receives them."""
    with FramePublisher("tcp://127.0.0.1:*") as frames:
        video = OverlayVideo(settings_for("tcp://127.0.0.1:9", frames.endpoint), path)
        try:
            first = frame_at(10_000)
            send_until(lambda seq: frames.send(first), lambda: bool(video._pairing.cameras))
            yield frames, video
        finally:
            video.close()


def await_frame(video: OverlayVideo, seq: int) -> None:
    send_until(lambda _: None, lambda: seq in list_seqs(video))


def list_seqs(video: OverlayVideo) -> list[int]:
    """Return the seqs of the frames that the video holds."""
    return list(video._pairing._cameras["cam0"]._frames._frames)


def send_pairs(frames: FramePublisher, video: OverlayVideo, count: int) -> None:
    """Send frames, and draw the masks of each after it has arrived."""
    for seq in range(count):
        frame = frame_at(seq)
        frames.send(frame)
        await_frame(video, seq)
        video.draw(masks_of(frame))


@pytest.mark.parametrize("count", [15, 60])
def test_messages_beyond_the_queue_are_counted_while_one_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    free = threading.Event()

    def draw_when_free(image: Image, masks: MaskFrame) -> Image:
        assert free.wait(20)
        return overlay(image, masks)

    monkeypatch.setattr(watch, "overlay", draw_when_free)
    with open_overlay(tmp_path / "o.mp4") as (frames, video):
        send_pairs(frames, video, count)
        free.set()
        lines = video.close()
    drawn, *dropped = (int(number) for line in lines for number in re.findall(r"(?:: |^)(\d+) ", line))
    assert drawn + sum(dropped) == count
    assert drawn >= min(count, watch.MAX_MESSAGES)


def test_a_frame_may_arrive_after_its_masks(tmp_path: Path) -> None:
    with open_overlay(tmp_path / "o.mp4") as (frames, video):
        frame = frame_at(1)
        video.draw(masks_of(frame))
        frames.send(frame)
        send_until(lambda seq: None, lambda: bool(video._videos))
        assert video.close() == [f"wrote {tmp_path / 'o.mp4'}: 1 frames"]


def test_masks_are_not_drawn_on_a_frame_with_their_seq_of_another_run_of_the_camera(tmp_path: Path) -> None:
    with open_overlay(tmp_path / "o.mp4") as (frames, video):
        frames.send(frame_at(1))
        await_frame(video, 1)
        earlier = replace(masks_at(1), capture_ns=5)
        video.draw(earlier)
        assert video.close() == ["1 messages had no frame to draw on"]


def test_the_buffered_frames_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = memoryview(frame_at(0).colour).nbytes
    monkeypatch.setattr(mask_pairing, "MAX_BYTES", 3 * nbytes)
    with open_overlay(tmp_path / "o.mp4") as (frames, video):
        for seq in range(20):
            frames.send(frame_at(seq))
            await_frame(video, seq)
        assert len(list_seqs(video)) <= 3
        assert video._pairing._cameras["cam0"]._frames._bytes <= 3 * nbytes


def test_a_video_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with open_overlay(tmp_path / "file" / "o.mp4") as (frames, video):
        send_pairs(frames, video, 3)
        video.close()
        with pytest.raises(OutputError, match="file"):
            video.check()


def test_the_watcher_reports_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "o.mp4"
    with FramePublisher("tcp://127.0.0.1:*") as frames, MaskPublisher("tcp://127.0.0.1:*") as publisher:
        settings = settings_for(publisher.endpoint, frames.endpoint)
        seqs = itertools.count()

        def play() -> None:
            frame = frame_at(next(seqs))
            frames.send(frame)
            publisher.send(masks_of(frame))
            time.sleep(0.02)

        with repeating(play), pytest.raises(OutputError, match="file"):
            run_watch(settings, path, 200, threading.Event(), io.StringIO())
