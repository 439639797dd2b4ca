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
from sam3_node.transport.mask_pairing import MaskPair, MaskPairing
from sam3_node.types import Frame, MaskFrame
from sam3_node.visualization import Image, overlay
from tests.cli.test_watch import frame_at, masks_at, send_until, settings_for
from tests.support.patience import PATIENCE_S
from tests.support.refuses import mentions
from tests.support.threads import repeating


def masks_of(frame: Frame) -> MaskFrame:
    return replace(masks_at(frame.seq), capture_ns=frame.capture_ns)


@pytest.fixture
def arrived(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the seqs of the frames that overlay videos have taken, in their order."""
    seqs: list[int] = []

    class Noting(MaskPairing):
        def add_frame(self, frame: Frame) -> MaskPair | None:
            pair = super().add_frame(frame)
            seqs.append(frame.seq)
            return pair

    monkeypatch.setattr(watch, "MaskPairing", Noting)
    return seqs


@contextmanager
def open_overlay(path: Path, arrived: list[int]) -> Iterator[tuple[FramePublisher, OverlayVideo]]:
    """Open a publisher of frames and an overlay video that receives them."""
    with FramePublisher("tcp://127.0.0.1:*") as frames:
        video = OverlayVideo(settings_for("tcp://127.0.0.1:9", frames.endpoint), path)
        try:
            first = frame_at(10_000)
            send_until(lambda seq: frames.send(first), lambda: bool(arrived))
            yield frames, video
        finally:
            video.close()


def send_frame(frames: FramePublisher, arrived: list[int], frame: Frame) -> Frame:
    """Send a frame, and wait until the video has taken it."""
    frames.send(frame)
    send_until(lambda _: None, lambda: frame.seq in arrived)
    return frame


@pytest.mark.parametrize("count", [15, 60])
def test_messages_beyond_the_queue_are_counted_while_one_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arrived: list[int], count: int
) -> None:
    free = threading.Event()

    def draw_when_free(image: Image, masks: MaskFrame) -> Image:
        assert free.wait(PATIENCE_S)
        return overlay(image, masks)

    monkeypatch.setattr(watch, "overlay", draw_when_free)
    with open_overlay(tmp_path / "o.mp4", arrived) as (frames, video):
        for seq in range(count):
            video.draw(masks_of(send_frame(frames, arrived, frame_at(seq))))
        free.set()
        lines = video.close()
    drawn, *dropped = (int(number) for line in lines for number in re.findall(r"(?:: |^)(\d+) ", line))
    assert drawn + sum(dropped) == count
    assert drawn >= min(count, watch.MAX_MESSAGES)


def test_a_frame_may_arrive_after_its_masks(tmp_path: Path, arrived: list[int]) -> None:
    with open_overlay(tmp_path / "o.mp4", arrived) as (frames, video):
        frame = frame_at(1)
        video.draw(masks_of(frame))
        send_frame(frames, arrived, frame)
        assert video.close() == [f"wrote {tmp_path / 'o.mp4'}: 1 frames"]


def test_masks_are_not_drawn_on_a_frame_with_their_seq_of_another_run_of_the_camera(
    tmp_path: Path, arrived: list[int]
) -> None:
    with open_overlay(tmp_path / "o.mp4", arrived) as (frames, video):
        send_frame(frames, arrived, frame_at(1))
        earlier = replace(masks_at(1), capture_ns=5)
        video.draw(earlier)
        assert video.close() == ["1 messages had no frame to draw on"]


def test_the_buffered_frames_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arrived: list[int]
) -> None:
    nbytes = memoryview(frame_at(0).colour).nbytes
    monkeypatch.setattr(mask_pairing, "MAX_BYTES", 3 * nbytes)
    with open_overlay(tmp_path / "o.mp4", arrived) as (frames, video):
        sent = [send_frame(frames, arrived, frame_at(seq)) for seq in range(20)]
        for frame in sent:  # masks find the frames that are still there
            video.draw(masks_of(frame))
        wrote, unpaired = video.close()
    drawn = int(wrote.split()[-2])
    assert 1 <= drawn <= 3
    assert mentions(unpaired, str(20 - drawn))


def test_a_video_that_cannot_be_written_is_an_error(tmp_path: Path, arrived: list[int]) -> None:
    (tmp_path / "file").write_text("")
    with open_overlay(tmp_path / "file" / "o.mp4", arrived) as (frames, video):
        for seq in range(3):
            video.draw(masks_of(send_frame(frames, arrived, frame_at(seq))))
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
