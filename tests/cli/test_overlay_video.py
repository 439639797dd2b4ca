"""Overlay videos: frames and masks paired by seq, drawn beside the reading, with what is lost counted."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sam3_node.cli import overlay_video as recorder
from sam3_node.cli.overlay_video import OverlayRecorder
from sam3_node.cli.watch import run_watch
from sam3_node.errors import OutputError
from sam3_node.transport import FramePublisher, MaskPublisher
from sam3_node.types import MaskFrame
from sam3_node.visualization import Image, overlay
from tests.cli.test_watch import frame_at, masks_at, send_until, settings_for


@contextmanager
def recording(path: Path) -> Iterator[tuple[FramePublisher, OverlayRecorder]]:
    """A recorder that receives the publisher's frames."""
    with FramePublisher("tcp://127.0.0.1:*") as frames:
        film = OverlayRecorder(settings_for("tcp://127.0.0.1:9", frames.endpoint), path)
        try:
            send_until(lambda seq: frames.send(frame_at(10_000)), lambda: film._frames.pop("cam0", 10_000))
            yield frames, film
        finally:
            film.close()


def send_pairs(frames: FramePublisher, film: OverlayRecorder, count: int) -> None:
    """Frames, each followed by its masks once it has arrived."""
    for seq in range(count):
        frames.send(frame_at(seq))
        send_until(lambda _: None, lambda seq=seq: ("cam0", seq) in film._frames._frames)  # type: ignore[misc]
        film.draw(masks_at(seq))


@pytest.mark.parametrize("count", [15, 60])
def test_while_one_is_drawn_others_wait_and_further_ones_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    free = threading.Event()

    def draw_when_free(image: Image, masks: MaskFrame) -> Image:
        assert free.wait(20)
        return overlay(image, masks)

    monkeypatch.setattr(recorder, "overlay", draw_when_free)
    with recording(tmp_path / "o.mp4") as (frames, film):
        send_pairs(frames, film, count)
        free.set()
        lines = film.close()
    drawn, *dropped = (int(found) for line in lines for found in re.findall(r"(?:: |^)(\d+) ", line))
    assert drawn + sum(dropped) == count
    assert drawn >= min(count, recorder.MESSAGES_KEPT)


def test_a_frame_may_come_after_its_masks(tmp_path: Path) -> None:
    with recording(tmp_path / "o.mp4") as (frames, film):
        film.draw(masks_at(1))
        frames.send(frame_at(1))
        send_until(lambda seq: None, lambda: bool(film._films))
        assert film.close() == [f"wrote {tmp_path / 'o.mp4'}: 1 frames"]


def test_the_frames_that_are_kept_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbytes = memoryview(frame_at(0).colour).nbytes
    monkeypatch.setattr(recorder, "BYTES_KEPT", 3 * nbytes)
    with recording(tmp_path / "o.mp4") as (frames, film):
        for seq in range(20):
            frames.send(frame_at(seq))
            send_until(lambda _: None, lambda seq=seq: ("cam0", seq) in film._frames._frames)  # type: ignore[misc]
        assert len(film._frames._frames) <= 3
        assert film._frames._bytes <= 3 * nbytes


def test_a_video_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with recording(tmp_path / "file" / "o.mp4") as (frames, film):
        send_pairs(frames, film, 3)
        film.close()
        with pytest.raises(OutputError, match="file"):
            film.check()


def test_the_watcher_tells_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "o.mp4"
    with FramePublisher("tcp://127.0.0.1:*") as frames, MaskPublisher("tcp://127.0.0.1:*") as publisher:
        settings = settings_for(publisher.endpoint, frames.endpoint)
        stop = threading.Event()

        def play() -> None:
            for seq in range(10_000):
                if stop.wait(0.02):
                    return
                frames.send(frame_at(seq))
                publisher.send(masks_at(seq))

        player = threading.Thread(target=play)
        player.start()
        try:
            with pytest.raises(OutputError, match="file"):
                run_watch(settings, path, 200, threading.Event(), io.StringIO())
        finally:
            stop.set()
            player.join()
