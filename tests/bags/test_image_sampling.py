"""Images sampled from recordings, folders and videos, evenly spread or every n-th."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from sam3_node.bags.bag import sample_images
from sam3_node.errors import BagError
from tests.support.recordings import frame_at, write_film, write_recording
from tests.support.refuses import refuses

COUNT = 9


def numbered(index: int) -> np.ndarray:
    """Return a grey image whose brightness is its number."""
    return np.full((48, 64, 3), 20 * index, np.uint8)


def write_folder(root: Path) -> Path:
    for index in range(COUNT):
        cv2.imwrite(str(root / f"{index}.png"), numbered(index))
    (root / "notes.txt").write_text("not an image")
    return root


def write_frames(root: Path) -> Path:
    frames = [frame_at(2 * seq) for seq in range(COUNT)]  # brightness 20 apart
    other = [frame_at(99, camera="other")]
    return write_recording(root / "frames.mcap", other[:0] + frames + other)


def write_video(root: Path) -> Path:
    return write_film(root / "video.avi", map(numbered, range(COUNT)), 10, "MJPG")


def numbers(source: Path, count: int, step: int | None = None) -> list[int]:
    images = list(sample_images(source, count, step))
    assert all(image.shape == (48, 64, 3) and image.dtype == np.uint8 for image in images)
    return [round(float(image.mean()) / 20) for image in images]


@pytest.mark.parametrize("make", [write_folder, write_frames, write_video])
def test_images_are_spread_over_a_source(make, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    source = make(tmp_path)
    assert numbers(source, 3) == [0, 4, 8]
    assert numbers(source, 1) == [0]
    assert numbers(source, 100) == list(range(COUNT))
    assert numbers(source, 3, 2) == [0, 2, 4]
    assert numbers(source, 100, 4) == [0, 4, 8]


def test_what_is_damaged_is_left_out(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    (folder / "4.png").write_bytes(b"no image")
    assert numbers(folder, 3) == [0, 8]
    recording = write_frames(tmp_path)
    recording.write_bytes(recording.read_bytes()[:-200])
    assert numbers(recording, 2, 1) == [0, 1]


def test_images_of_a_folder_may_have_any_sizes(tmp_path: Path) -> None:
    for name, side in (("a.png", 10), ("b.bmp", 20), ("c.webp", 30)):
        cv2.imwrite(str(tmp_path / name), np.zeros((side, side, 3), np.uint8))
    assert [image.shape[0] for image in sample_images(tmp_path, 5)] == [10, 20, 30]


def test_a_source_without_images_is_an_error(tmp_path: Path) -> None:
    empty, wrong = tmp_path / "empty", tmp_path / "wrong"
    empty.mkdir()
    wrong.mkdir()
    (wrong / "a.png").write_bytes(b"no image")
    bag, video = tmp_path / "bag.mcap", tmp_path / "video.mp4"
    bag.write_bytes(b"nothing of the kind")
    video.write_bytes(b"nothing of the kind")
    for source in (bag, video, wrong, empty):
        with pytest.raises(BagError):
            list(sample_images(source, 3))
    with refuses(BagError, field="file"):
        list(sample_images(tmp_path / "absent", 3))
