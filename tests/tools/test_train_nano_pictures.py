"""Real pictures for the teacher: which are found, in which order, and what is held aside; and the shards they go to."""

from __future__ import annotations

import tarfile
from pathlib import Path

import cv2
import numpy as np
import pytest

from sam3_node.errors import CameraError
from tools.train_nano.taught import (
    SIDE,
    known_names,
    list_shards,
    pack_taught,
    read_all,
    read_shard,
    shard_path,
    write_shard,
)
from tools.train_nano.teach import (
    HELD_OF,
    LONGEST,
    Picture,
    is_held,
    list_pictures,
    shrink,
    spread,
    unpack_all,
)

FRAMES = 8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two photos, a sequence of eight frames, and a video of eight frames whose brightness tells them apart."""
    root = tmp_path / "pictures"
    (root / "photos").mkdir(parents=True)
    (root / "sequence").mkdir()
    for name in "ab":
        cv2.imwrite(str(root / "photos" / f"{name}.jpg"), grey(100))
    for number in range(FRAMES):
        cv2.imwrite(str(root / "sequence" / f"{number:05d}.jpg"), grey(30 * number))
    video = cv2.VideoWriter(str(root / "film.mp4"), cv2.VideoWriter.fourcc(*"mp4v"), 10, (64, 48))
    for number in range(FRAMES):
        video.write(grey(30 * number))
    video.release()
    return root


def grey(value: int) -> np.ndarray:
    return np.full((48, 64, 3), value, np.uint8)


def test_rounds_add_frames_and_change_none(folder: Path) -> None:
    first, two = (list_pictures(folder, rounds) for rounds in (1, 2))
    assert len(first) == 4
    assert [picture.name for picture in two[:4]] == [picture.name for picture in first]
    assert len(two) == 6
    assert len({picture.name for picture in two}) == 6


def test_frames_are_spread_over_videos_and_sequences(folder: Path) -> None:
    pictures = list_pictures(folder, 3)
    brightness = {p.name: float(p.read().mean()) / 30 for p in pictures}
    assert sorted(round(v) for n, v in brightness.items() if n.startswith("film")) == [2, 4, 6]
    assert sorted(round(v) for n, v in brightness.items() if n.startswith("sequence")) == [2, 4, 6]


def test_places_spread() -> None:
    assert [spread(number) for number in range(7)] == [0.5, 0.25, 0.75, 0.125, 0.625, 0.375, 0.875]


def test_whole_days_are_held_aside() -> None:
    days = [f"lab_2023_{month:02d}_{day:02d}" for month in range(1, 13) for day in range(1, 29)]
    held = [day for day in days if is_held(f"{day}_Tue_12_00")]
    assert all(is_held(f"{day}_Wed_another_camera") for day in held)
    assert 0.3 < len(held) * HELD_OF / len(days) < 3


def test_what_is_held_aside_comes_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.train_nano.teach.is_held", lambda name: name == "film")
    pictures = list_pictures(folder, 2)
    assert [picture.held for picture in pictures] == [True, True, False, False, False, False]


def test_a_folder_without_pictures_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CameraError, match="expected videos or JPEG files"):
        list_pictures(tmp_path)


def test_a_file_that_is_no_picture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken").write_bytes(b"nothing")
    for share in (None, 0.5):
        with pytest.raises(CameraError, match="expected a picture"):
            Picture("broken", tmp_path / "broken", share, False).read()


def test_large_pictures_are_made_smaller() -> None:
    assert shrink(np.zeros((1024, 512, 3), np.uint8)).shape == (LONGEST, LONGEST // 2, 3)
    assert shrink(np.zeros((40, 50, 3), np.uint8)).shape == (40, 50, 3)


def test_archives_are_unpacked_once(folder: Path, tmp_path: Path) -> None:
    archive, target = tmp_path / "all.tar", tmp_path / "unpacked"
    with tarfile.open(archive, "w") as packed:
        packed.add(folder, "all")
    unpack_all([archive], target)
    assert len(list_pictures(target, 1)) == 4
    (target / "all" / "film.mp4").unlink()
    unpack_all([archive], target)
    assert len(list_pictures(target, 1)) == 3
    (tmp_path / "damaged.tar").write_bytes(b"nothing")
    with pytest.raises(CameraError, match="expected a tar file"):
        unpack_all([tmp_path / "damaged.tar"], target)


def test_shards_hold_pictures_and_masks(tmp_path: Path) -> None:
    masks = np.zeros((2, SIDE, SIDE), np.bool_)
    masks[0, 10:100, 30:50], masks[1, :, :128] = True, True
    scores = np.array([0.9, 0.75], np.float32)
    seen = pack_taught("a", grey(80), masks, scores)
    unseen = pack_taught("b", grey(10), masks[:0], scores[:0])
    write_shard(shard_path(tmp_path, 0), [seen, unseen])
    write_shard(shard_path(tmp_path, 1), [unseen._replace(name="c")])
    (found,) = read_all(list_shards(tmp_path))
    assert found.name == "a"
    assert np.array_equal(found.masks(), masks)
    assert np.abs(found.image().astype(int) - 80).max() < 3
    assert found.scores.tolist() == pytest.approx([0.9, 0.75], abs=1e-3)
    assert known_names(tmp_path) == {"a", "b", "c"}


def test_a_damaged_shard_is_refused(tmp_path: Path) -> None:
    shard_path(tmp_path, 0).write_bytes(b"nothing")
    with pytest.raises(CameraError, match="expected a shard"):
        read_shard(shard_path(tmp_path, 0))
