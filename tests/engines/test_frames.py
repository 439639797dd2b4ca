"""Pictures from recordings, folders and videos, spread as they are asked for."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from sam3_node.engines.frames import frames_of
from sam3_node.errors import BagError, CameraError
from tests.support.recordings import frame_at, write_recording

COUNT = 9


def numbered(index: int) -> np.ndarray:
    """A grey picture whose brightness is its number."""
    return np.full((48, 64, 3), 20 * index, np.uint8)


def folder_of(root: Path) -> Path:
    for index in range(COUNT):
        cv2.imwrite(str(root / f"{index}.png"), numbered(index))
    (root / "notes.txt").write_text("not an image")
    return root


def recording_of(root: Path) -> Path:
    frames = [frame_at(2 * seq) for seq in range(COUNT)]  # brightness 20 apart
    other = [frame_at(99, camera="other")]
    return write_recording(root / "frames.mcap", other[:0] + frames + other)


def video_of(root: Path) -> Path:
    path = root / "video.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), 10, (64, 48))
    for index in range(COUNT):
        writer.write(numbered(index))
    writer.release()
    return path


def numbers(source: Path, count: int, step: int | None = None) -> list[int]:
    images = list(frames_of(source, count, step))
    assert all(image.shape == (48, 64, 3) and image.dtype == np.uint8 for image in images)
    return [round(float(image.mean()) / 20) for image in images]


@pytest.mark.parametrize("make", [folder_of, recording_of, video_of])
def test_pictures_are_spread_over_a_source(make, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    source = make(tmp_path)
    assert numbers(source, 3) == [0, 4, 8]
    assert numbers(source, 1) == [0]
    assert numbers(source, 100) == list(range(COUNT))
    assert numbers(source, 3, 2) == [0, 2, 4]
    assert numbers(source, 100, 4) == [0, 4, 8]


def test_what_is_damaged_is_left_out(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (folder / "4.png").write_bytes(b"no image")
    assert numbers(folder, 3) == [0, 8]
    recording = recording_of(tmp_path)
    recording.write_bytes(recording.read_bytes()[:-200])
    assert numbers(recording, 2, 1) == [0, 1]


def test_no_picture_at_all(tmp_path: Path) -> None:
    empty, wrong = tmp_path / "empty", tmp_path / "wrong"
    empty.mkdir()
    wrong.mkdir()
    (wrong / "a.png").write_bytes(b"no image")
    bag, video = tmp_path / "bag.mcap", tmp_path / "video.mp4"
    bag.write_bytes(b"nothing of the kind")
    video.write_bytes(b"nothing of the kind")
    for source, error in ((bag, BagError), (video, CameraError), (wrong, CameraError), (empty, CameraError)):
        with pytest.raises(error):
            list(frames_of(source, 3))
    with pytest.raises(CameraError, match="found nothing at"):
        list(frames_of(tmp_path / "absent", 3))
