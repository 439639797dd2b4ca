"""Training data in one file: packed within its bytes, and unpacked where it is trained on."""

from __future__ import annotations

import json
from pathlib import Path
from zipfile import ZipFile

import cv2
import numpy as np
import pytest

from sam3_node.errors import CameraError, OutputError
from tools.scenes.clips import Clip, list_clips, read_clip, write_clip
from training.pack.write import Pack, Part, pack, shrink

pytest.importorskip("torch")

from training.nano.augment import read_cutouts
from training.nano.data import Clips, Recipe, Sources
from training.nano.taught import pack_taught, read_shard, shard_path, write_shard
from training.pack.__main__ import main
from training.pack.read import unpack

GEOMETRY = {"intrinsics": {"fx": 1.0}, "camera_poses": [np.eye(4).tolist()]}
ENOUGH = 1_000_000


def drawn(seed: int, frames: int = 3) -> Clip:
    """A disc that moves over noise, 96 x 64."""
    rng = np.random.default_rng(seed)
    labels = [np.zeros((64, 96), np.uint8) for _ in range(frames)]
    for number, each in enumerate(labels):
        cv2.circle(each, (40 + 4 * number, 32), 20, 3, -1)
    noise = rng.integers(0, 256, (64, 96, 3), np.uint8)
    images = [np.where(each[..., None] == 3, np.uint8(200), noise) for each in labels]
    meta = {"fps": 12, "seed": seed, "width": 96, "height": 64, "objects": [{"id": 3}], **GEOMETRY}
    return Clip("", images, labels, [np.ones((64, 96), np.uint16)] * frames, meta)


@pytest.fixture
def scenes(tmp_path: Path) -> Path:
    """Folders train, of six clips, and val, of one."""
    root = tmp_path / "scenes"
    for number in range(6):
        write_clip(root / "train", f"t{number}", drawn(number))
    write_clip(root / "val", "v0", drawn(9))
    return root


@pytest.fixture
def cutouts(tmp_path: Path) -> Path:
    """A folder of one opaque RGBA picture."""
    folder = tmp_path / "cutouts"
    folder.mkdir()
    cv2.imwrite(str(folder / "a.png"), np.full((40, 30, 4), 255, np.uint8))
    return folder


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    """A folder of one video of nine frames."""
    folder = tmp_path / "videos"
    folder.mkdir()
    writer = cv2.VideoWriter(str(folder / "a.mp4"), cv2.VideoWriter.fourcc(*"mp4v"), 10, (64, 48))
    for number in range(9):
        writer.write(np.full((48, 64, 3), 20 * number, np.uint8))
    writer.release()
    return folder


def test_clips_come_out_smaller_without_depth_and_geometry(scenes: Path, tmp_path: Path) -> None:
    said = pack(
        Pack(scenes / "train", ENOUGH, (48, 48), parts=(Part("val", scenes / "val"),)), tmp_path / "a.zip"
    )
    assert said == ["6 of 6 training clips", "1 clips of part val"]
    unpack(tmp_path / "a.zip", tmp_path / "out")
    assert list_clips(tmp_path / "out/train") == [f"t{number}" for number in range(6)]
    clip = read_clip(tmp_path / "out/train", "t1")
    before = read_clip(scenes / "train", "t1")
    assert (len(clip), clip.depth(0)) == (3, None)
    assert clip.meta == {"fps": 12, "seed": 1, "objects": [{"id": 3}], "width": 48, "height": 32}
    for index in range(3):
        assert clip.image(index).shape == (32, 48, 3)
        expected = cv2.resize(before.labels(index), (48, 32), interpolation=cv2.INTER_NEAREST)
        assert np.array_equal(clip.labels(index), expected)
    # what is measured keeps its size up to that of a part
    assert read_clip(tmp_path / "out/parts/val", "v0").image(0).shape == (64, 96, 3)


def test_a_part_has_every_nth_frame_and_its_unknown_pairs_go_along(scenes: Path, tmp_path: Path) -> None:
    (scenes / "val" / "invalid.json").write_text('{"v0": [[1, 3], [2, 3]]}')
    pack(Pack(scenes / "train", ENOUGH, parts=(Part("val", scenes / "val", 2),)), tmp_path / "a.zip")
    unpack(tmp_path / "a.zip", tmp_path / "out")
    clip = read_clip(tmp_path / "out/parts/val", "v0")
    assert len(clip) == 2
    assert np.array_equal(clip.labels(1), read_clip(scenes / "val", "v0").labels(2))
    assert json.loads((tmp_path / "out/parts/val/invalid.json").read_text()) == {"v0": [[1, 3]]}


def test_labelled_pictures_are_packed_smaller_with_their_masks(scenes: Path, tmp_path: Path) -> None:
    masks = np.zeros((1, 256, 256), np.bool_)
    masks[0, 50:90, 50:90] = True
    large = pack_taught("a", np.full((300, 600, 3), 90, np.uint8), masks, np.ones(1, np.float32))
    (tmp_path / "taught").mkdir()
    write_shard(shard_path(tmp_path / "taught", 0), [large])
    pack(Pack(scenes / "train", ENOUGH, taught=tmp_path / "taught"), tmp_path / "a.zip")
    unpack(tmp_path / "a.zip", tmp_path / "out")
    (picture,) = read_shard(shard_path(tmp_path / "out/taught", 0))
    assert picture.image().shape == (192, 384, 3)
    assert np.array_equal(picture.masks(), masks)


def test_clips_are_never_enlarged() -> None:
    assert shrink(drawn(0), (400, 400)).image(0).shape == (64, 96, 3)


@pytest.mark.parametrize("most", [15_000, 25_000, 40_000])
def test_a_pack_keeps_to_its_bytes(scenes: Path, tmp_path: Path, most: int) -> None:
    path = tmp_path / "a.zip"
    pack(Pack(scenes / "train", most), path)
    assert most / 3 < path.stat().st_size <= most
    unpack(path, tmp_path / "out")
    assert 0 < len(list_clips(tmp_path / "out/train")) < 6


def test_the_same_input_gives_the_same_bytes(scenes: Path, tmp_path: Path) -> None:
    for name in ("a.zip", "b.zip"):
        pack(Pack(scenes / "train", 25_000), tmp_path / name)
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()


@pytest.mark.parametrize("most", [100, 9_000])
def test_too_few_bytes_leave_no_file(scenes: Path, tmp_path: Path, most: int) -> None:
    with pytest.raises(OutputError, match="bytes: allow more"):
        pack(Pack(scenes / "train", most, parts=(Part("val", scenes / "val"),)), tmp_path / "pack/a.zip")
    assert list((tmp_path / "pack").iterdir()) == []


def test_a_folder_without_clips_is_no_input(tmp_path: Path) -> None:
    with pytest.raises(CameraError, match="no such folder"):
        pack(Pack(tmp_path / "nothing", ENOUGH), tmp_path / "a.zip")
    (tmp_path / "empty/JPEGImages").mkdir(parents=True)
    with pytest.raises(CameraError, match="found none"):
        pack(Pack(tmp_path / "empty", ENOUGH), tmp_path / "a.zip")


def test_a_folder_that_is_named_must_hold_something(scenes: Path, tmp_path: Path) -> None:
    train = scenes / "train"
    nowhere = tmp_path / "nowhere"
    for what in (Pack(train, ENOUGH, cutouts=nowhere), Pack(train, ENOUGH, videos=nowhere)):
        with pytest.raises(CameraError, match=r"expected .* in .*nowhere, found none"):
            pack(what, tmp_path / "a.zip")


def test_the_training_draws_from_a_pack(scenes: Path, cutouts: Path, videos: Path, tmp_path: Path) -> None:
    what = Pack(scenes / "train", ENOUGH, cutouts=cutouts, videos=videos)
    assert pack(what, tmp_path / "a.zip")[1:] == ["1 cut-outs", "1 videos"]
    out = tmp_path / "out"
    unpack(tmp_path / "a.zip", out)
    assert len(list((out / "videos/a").glob("*.jpg"))) == 3  # every fourth of nine
    assert np.array_equal(read_cutouts(out / "cutouts", 9), read_cutouts(cutouts, 9))
    sources = Sources(out / "train", out / "cache", cutouts=out / "cutouts", videos=out / "videos")
    batch = Clips(sources, Recipe(8, 2, 2), 0).batch(np.random.default_rng(0))
    assert batch.images.shape == (8, 2, 256, 256, 3)


def test_a_pack_is_unpacked_once(scenes: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    out = tmp_path / "out"
    pack(Pack(scenes / "train", 25_000), path)
    unpack(path, out)
    (out / "cache").mkdir()
    unpack(path, out)
    assert (out / "cache").is_dir()
    pack(Pack(scenes / "train", ENOUGH), path)
    unpack(path, out)
    assert not (out / "cache").exists()
    assert len(list_clips(out / "train")) == 6


def test_a_damaged_pack_is_an_error_and_existing_files_stay(scenes: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    out = tmp_path / "out"
    pack(Pack(scenes / "train", ENOUGH), path)
    unpack(path, out)
    whole = path.read_bytes()
    for bad in (b"", b"no zip file", whole[: len(whole) // 2], whole[:500] + bytes(200) + whole[700:]):
        path.write_bytes(bad)
        with pytest.raises(CameraError, match=r"expected a zip file of .* copy it again"):
            unpack(path, out)
    assert len(list_clips(out / "train")) == 6
    assert not list(tmp_path.glob(".out*"))


def test_a_zip_file_of_something_else_is_no_pack(tmp_path: Path) -> None:
    with ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("notes.txt", "nothing")
    with pytest.raises(CameraError, match="expected training clips"):
        unpack(tmp_path / "a.zip", tmp_path / "out")
    with pytest.raises(CameraError, match="no pack"):
        unpack(tmp_path / "absent.zip", tmp_path / "out")


def test_the_command_packs_and_trains(
    scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "a.zip")
    options = [
        "--part",
        f"val={scenes / 'val'}",
        "--most",
        "1e6",
        "--size",
        "64x64",
        "--quality",
        "50",
        "-o",
        path,
    ]
    assert main([str(scenes / "train"), *options]) == 0
    assert "6 of 6 training clips, 1 clips of part val, 0.1 MB" in capsys.readouterr().out
    assert main([str(scenes / "absent"), "-o", path]) == 1
    out = tmp_path / "trained"
    assert main([path, "--train", str(out), "--minutes", "1e-6", "1e-6"]) == 0
    assert (out / "export/model.safetensors").is_file()
