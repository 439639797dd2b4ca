"""Training on taught pictures: frames with overlapping objects, clips of a moving camera, and how weights agree."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from sam3_node.errors import CameraError
from tests.support.rectangles import write_rectangles
from tools.train_nano import agree
from tools.train_nano.augment import LOW
from tools.train_nano.config import SIZE
from tools.train_nano.data import Clips, Recipe, Sources
from tools.train_nano.taught import (
    SIDE,
    TaughtPictures,
    apart,
    camera_path,
    choose,
    fit,
    pack_taught,
    parts,
    shard_path,
    write_shard,
)
from tools.train_nano.train import picture_stages

HEIGHT, WIDTH = 96, 128
COLOURS = ((30, 30, 220), (220, 30, 30), (30, 220, 30))  # BGR of the masks below
GREY = 110


def square(y: int, x: int, height: int, width: int) -> np.ndarray:
    mask = np.zeros((SIDE, SIDE), np.bool_)
    mask[y : y + height, x : x + width] = True
    return mask


def masks() -> np.ndarray:
    """A red whole, a blue one, and a green part within the red."""
    return np.stack([square(40, 30, 120, 90), square(60, 150, 100, 80), square(60, 50, 40, 40)])


def picture() -> np.ndarray:
    image = np.full((HEIGHT, WIDTH, 3), GREY, np.uint8)
    for mask, colour in zip(masks(), COLOURS, strict=True):
        image[fit(mask, image) > 0] = colour
    return image


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("taught")
    write_shard(shard_path(root, 0), [pack_taught("a", picture(), masks(), np.ones(3, np.float32))])
    return root


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rectangles(tmp_path_factory.mktemp("scenes"))


def test_objects_of_a_frame_may_cover_one_another(folder: Path) -> None:
    taught, rng = TaughtPictures(folder), np.random.default_rng(0)
    samples = [sample for sample in (taught.frame(rng, 3) for _ in range(20)) if sample]
    assert len(samples) > 15
    for images, first, low in samples:
        assert images.shape == (1, SIZE, SIZE, 3)
        assert first.shape[1:] == (SIZE, SIZE)
        assert low.shape == (len(first), 1, LOW, LOW)
        assert 1 <= len(first) <= 3
    assert any((first.sum(axis=0) > 1).any() for _, first, _ in samples)


def test_masks_lie_on_their_objects(folder: Path) -> None:
    """Whatever crop and flip: within a mask the picture has one colour, but for the green part of the red."""
    taught, rng = TaughtPictures(folder), np.random.default_rng(1)
    for _ in range(20):
        sample = taught.frame(rng, 3)
        if sample is None:
            continue
        images, first, _ = sample
        spread = [images[0][mask].std(axis=0).max() for mask in first if mask.sum() > 400]
        blue = [images[0][mask].mean(axis=0) for mask in first if mask.sum() > 400]
        assert len(spread) == len(blue)
        greyness = [np.ptp(mean) for mean in blue]
        assert all(value > 25 for value in greyness)


def test_wholes_are_drawn_more_often_than_parts() -> None:
    assert parts(masks()).tolist() == [False, False, True]
    rng = np.random.default_rng(0)
    drawn = [int(choose(rng, masks(), 1)[0]) for _ in range(400)]
    assert 0.02 < drawn.count(2) / 400 < 0.15
    assert sorted(choose(rng, masks(), 9).tolist()) == [0, 1, 2]


def test_what_lies_within_a_scene_is_no_part() -> None:
    scene = np.stack([square(0, 0, SIDE, SIDE), square(60, 60, 40, 40)])
    assert parts(scene).tolist() == [False, False]


def test_objects_of_a_clip_lie_apart() -> None:
    assert apart(masks(), np.array([0, 1, 2])) == [0, 1]
    assert apart(masks(), np.array([2, 1, 0])) == [2, 1]


def test_a_moving_camera_carries_its_labels_along(folder: Path) -> None:
    taught, rng = TaughtPictures(folder), np.random.default_rng(0)
    images, labels = taught.clip(rng, 4)
    assert len(images) == len(labels) == 4
    assert all(image.shape == (HEIGHT, WIDTH, 3) for image in images)
    assert not np.array_equal(images[0], images[3])
    for number in np.unique(labels[0])[1:]:
        for image, label in zip(images, labels, strict=True):
            if (label == number).sum() > 200:
                assert np.ptp(np.median(image[label == number], axis=0)) > 100
    ids = {number for label in labels for number in np.unique(label)}
    assert ids <= {0, 1, 2}


def test_the_camera_s_window_stays_in_the_picture_when_it_does_not_turn() -> None:
    rng = np.random.default_rng(0)
    for affine in (camera_path(rng, (HEIGHT, WIDTH), 5)[i] for _ in range(20) for i in (0, 4)):
        turn, shift = affine[:, :2], affine[:, 2]
        centre = np.linalg.solve(turn, np.array([WIDTH, HEIGHT]) / 2 - shift)
        assert (centre > 0.3 * np.array([WIDTH, HEIGHT])).all()
        assert (centre < 0.7 * np.array([WIDTH, HEIGHT])).all()


def test_cut_outs_are_taken_from_pictures(folder: Path) -> None:
    sprites = TaughtPictures(folder).sprites(np.random.default_rng(0), 8)
    assert sprites
    assert all(sprite.shape[2] == 4 for sprite in sprites)


def test_shards_that_are_added_later_are_found(tmp_path: Path) -> None:
    with pytest.raises(CameraError, match="expected taught pictures"):
        TaughtPictures(tmp_path)
    taught = pack_taught("a", picture(), masks(), np.ones(3, np.float32))
    write_shard(shard_path(tmp_path, 0), [taught])
    held = TaughtPictures(tmp_path)
    write_shard(shard_path(tmp_path, 1), [taught._replace(name="b"), taught._replace(name="c")])
    held.look_again()
    assert len(held) == 3


def test_a_large_collection_does_not_drown_a_small_one(tmp_path: Path) -> None:
    white = pack_taught(
        "beside the folders", np.full((HEIGHT, WIDTH, 3), 255, np.uint8), masks(), np.ones(3, np.float32)
    )
    black = white._replace(name="few/0", jpeg=pack_taught("", 0 * picture(), masks(), np.ones(3)).jpeg)
    write_shard(shard_path(tmp_path, 0), [white._replace(name=f"{n}") for n in range(36)])
    write_shard(shard_path(tmp_path, 1), [black._replace(name=f"few/day/{n}") for n in range(4)])
    taught, rng = TaughtPictures(tmp_path), np.random.default_rng(0)
    samples = [sample for sample in (taught.frame(rng, 1) for _ in range(200)) if sample]
    share = np.mean([images.mean() < 100 for images, _, _ in samples])
    assert share == pytest.approx(0.25, abs=0.08)  # a quarter, as 2 beside 6; a tenth of the pictures


def test_batches_mix_pictures_and_scenes(folder: Path, scenes: Path, tmp_path: Path) -> None:
    sources = Sources(scenes, tmp_path, taught=folder)
    for frames, clips in ((1, 8), (3, 3)):
        recipe = Recipe(clips=clips, frames=frames, objects=2, pictures=0.5)
        for batch in islice(Clips(sources, recipe, 0), 2):
            assert batch.images.shape == (clips, frames, SIZE, SIZE, 3)
            assert batch.masks.shape == (len(batch.clip), frames, LOW, LOW)
            assert set(batch.clip.tolist()) == set(range(clips))


def test_clips_are_mixed_into_the_picture_stage() -> None:
    (stage,) = picture_stages(minutes=2)
    recipes = [stage.get_recipe(step) for step in range(12)]
    assert [recipe.frames for recipe in recipes] == 2 * [1, 4, 1, 8, 1, 16]
    assert [recipe.encoder for recipe in recipes] == [recipe.frames < 16 for recipe in recipes]
    assert stage.seconds == 120


def test_agreement_is_told_by_group(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    agree.main(["nano", "--taught", str(folder), "--groups"])
    told = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in told] == ["nano all", "nano a"]
    assert all("3 objects" in line for line in told)


def test_agreement_with_the_labels_of_clips(scenes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    agree.main(["nano", "--clips", str(scenes), "--every", "4"])
    assert "8 objects" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="error: "):
        agree.main(["nano", "--clips", str(scenes / "absent")])


def test_an_overlap_is_shared_over_either() -> None:
    one, other = square(0, 0, 10, 10), square(0, 5, 10, 10)
    assert agree.overlap(one, other) == pytest.approx(50 / 150)
