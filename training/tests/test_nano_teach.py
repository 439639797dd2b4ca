"""Real pictures for training: which are found and held aside, which masks a teacher keeps, and training on them."""

import tarfile
from itertools import islice
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from sam3_node.errors import CameraError
from tests.support.recordings import write_film
from tests.support.refuses import refuses
from training.nano import teach
from training.nano.augment import LOW
from training.nano.data import Clips, Recipe, Sources
from training.nano.network import SIZE
from training.nano.taught import (
    SIDE,
    WINDOW,
    TaughtPictures,
    apart,
    camera_path,
    choose,
    fit,
    known_names,
    list_shards,
    pack_taught,
    parts,
    read_all,
    read_shard,
    shard_path,
    write_shard,
)
from training.nano.teach import (
    HELD_OF,
    LONGEST,
    Choice,
    Found,
    Picture,
    Teacher,
    _boxes,
    is_held,
    list_pictures,
    pairwise_iou,
    shrink,
    spread,
    stability,
    unpack_all,
    without_doubles,
    without_specks,
)
from training.nano.train import picture_stages

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
    write_film(root / "film.mp4", (grey(30 * number) for number in range(FRAMES)), 10)
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
    monkeypatch.setattr("training.nano.teach.is_held", lambda name: name == "film")
    pictures = list_pictures(folder, 2)
    assert [picture.held for picture in pictures] == [True, True, False, False, False, False]


def test_a_folder_without_pictures_is_refused(tmp_path: Path) -> None:
    with refuses(CameraError, field="JPEG"):
        list_pictures(tmp_path)


def test_a_file_that_is_no_picture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken").write_bytes(b"nothing")
    for share in (None, 0.5):
        with refuses(CameraError, field="picture"):
            Picture("broken", tmp_path / "broken", share, False).read()


def test_large_pictures_are_made_smaller() -> None:
    assert shrink(np.zeros((1024, 512, 3), np.uint8)).shape == (LONGEST, LONGEST // 2, 3)
    assert shrink(np.zeros((40, 50, 3), np.uint8)).shape == (40, 50, 3)


def test_archives_are_unpacked_once(folder: Path, tmp_path: Path) -> None:
    archive = tmp_path / "all.tar"
    target = tmp_path / "unpacked"
    with tarfile.open(archive, "w") as packed:
        packed.add(folder, "all")
    unpack_all([archive], target)
    assert len(list_pictures(target, 1)) == 4
    (target / "all" / "film.mp4").unlink()
    unpack_all([archive], target)
    assert len(list_pictures(target, 1)) == 3
    (tmp_path / "damaged.tar").write_bytes(b"nothing")
    with refuses(CameraError, field=("tar", "file")):
        unpack_all([tmp_path / "damaged.tar"], target)


def test_shards_hold_pictures_and_masks(tmp_path: Path) -> None:
    masks = np.zeros((2, SIDE, SIDE), np.bool_)
    masks[0, 10:100, 30:50] = True
    masks[1, :, :128] = True
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
    with refuses(CameraError, field="shard"):
        read_shard(shard_path(tmp_path, 0))


def square(y: int, x: int, side: int, of: int = 64) -> torch.Tensor:
    mask = torch.zeros(of, of, dtype=torch.bool)
    mask[y : y + side, x : x + side] = True
    return mask


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    return Teacher("nano", 0, grid=2, dtype="float32")


def test_what_is_found_has_the_shapes_that_training_takes() -> None:
    lenient = Choice(iou=-9.0, stable=0.0, again=0.0, smallest=0.0001, largest=1.0)
    noise = np.random.default_rng(0).integers(0, 255, (60, 80, 3), np.uint8)
    found = Teacher("nano", 0, grid=4, dtype="float32", choice=lenient).find(noise)
    assert found.masks.shape == (len(found.scores), SIDE, SIDE)
    assert found.masks.dtype == np.bool_


def test_a_mask_that_its_box_gives_again_is_kept(teacher: Teacher, monkeypatch: pytest.MonkeyPatch) -> None:
    """Points find a square, a ring of it, and a thin diagonal; boxes are answered by what fills them."""
    thin = torch.eye(64, dtype=torch.bool)
    shapes = torch.stack([square(16, 16, 32), square(17, 16, 32), thin])

    def decode(features: object, points: torch.Tensor, labels: torch.Tensor, multimask: bool) -> object:
        filled = torch.stack([shapes[0].new_zeros(64, 64)] * len(points))
        for mask, ((left, top), (right, bottom)) in zip(filled, (points / 4).int().tolist(), strict=True):
            mask[top:bottom, left:right] = True
        masks = filled[:, None] if multimask is False else shapes.expand(len(points), -1, -1, -1)
        return torch.where(masks, 9.0, -9.0), torch.full(masks.shape[:2], 0.9)

    def points_then_boxes(
        features: object, points: torch.Tensor, labels: torch.Tensor, multimask: bool
    ) -> object:
        given = torch.zeros(len(points), 2, 2) if multimask else points
        return decode(features, given, labels, multimask)

    monkeypatch.setattr(teacher, "_decode", points_then_boxes)
    monkeypatch.setattr(teacher, "choice", Choice())
    found = teacher.find(np.zeros((48, 64, 3), np.uint8))
    assert len(found.masks) == 1
    solid = np.zeros((SIDE, SIDE), np.bool_)
    solid[64:192, 64:192] = True
    assert (found.masks[0] & solid).sum() / (found.masks[0] | solid).sum() > 0.95


def test_a_teacher_that_is_sure_of_nothing_finds_nothing(
    teacher: Teacher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher, "choice", Choice(iou=9.0))
    found = teacher.find(np.zeros((48, 64, 3), np.uint8))
    assert found.masks.shape == (0, SIDE, SIDE)
    assert found.scores.shape == (0,)


def test_a_mask_that_hangs_on_the_threshold_is_not_stable() -> None:
    sure = torch.where(square(8, 8, 20), 5.0, -5.0)
    doubtful = torch.where(square(8, 8, 20), 0.5, -0.5)
    assert stability(torch.stack([sure, doubtful])).tolist() == [1.0, 0.0]


def test_doubles_go_and_parts_stay() -> None:
    whole = square(0, 0, 40)
    again = square(1, 0, 40)
    part = square(5, 5, 15)
    assert without_doubles(torch.stack([whole, again, part]), 0.75).tolist() == [0, 2]
    assert pairwise_iou(torch.stack([whole, part]))[0, 1] == pytest.approx(225 / 1600)


def test_boxes_are_tight_and_in_pixels_of_the_model() -> None:
    corners, labels = _boxes(torch.stack([square(8, 16, 24)]), 256)
    assert corners.tolist() == [[[64.0, 32.0], [160.0, 128.0]]]
    assert labels.tolist() == [[2, 3]]


def test_specks_go() -> None:
    mask = (square(2, 2, 20) | square(50, 50, 2) | square(40, 2, 10)).numpy()
    assert np.array_equal(without_specks(mask), mask & ~square(50, 50, 2).numpy())


class OneMask:
    """Finds the upper half of every picture, and counts them."""

    def __init__(self) -> None:
        self.asked = 0

    def find(self, image: np.ndarray) -> Found:
        self.asked += 1
        masks = np.zeros((1, SIDE, SIDE), np.bool_)
        masks[0, : SIDE // 2] = True
        return Found(masks, np.ones(1, np.float32))


def test_a_new_start_labels_what_is_left(tmp_path: Path) -> None:
    cv2.imwrite(str(tmp_path / "grey.jpg"), np.full((48, 64, 3), 99, np.uint8))
    pictures = [Picture(f"p{i}", tmp_path / "grey.jpg", None, held=i < 2) for i in range(teach.PER_SHARD + 3)]
    pictures.append(Picture("gone", tmp_path / "absent.jpg", None, False))
    one = OneMask()
    teach.teach(one, pictures[:4], tmp_path)  # type: ignore[arg-type]
    assert one.asked == 4
    teach.teach(one, pictures, tmp_path)  # type: ignore[arg-type]
    assert one.asked == teach.PER_SHARD + 3
    assert known_names(tmp_path / "held") == {"p0", "p1"}
    assert len(known_names(tmp_path / "train")) == teach.PER_SHARD + 1
    assert len(list_shards(tmp_path / "train")) == 2


def test_the_command_tells_what_is_missing(tmp_path: Path) -> None:
    with refuses(SystemExit, field="error"):
        teach.main([str(tmp_path), "--teacher", "nano", "-o", str(tmp_path / "out")])
    with refuses(CameraError, field="videos"):
        teach.list_pictures(tmp_path)


HEIGHT = 96
WIDTH = 128
COLOURS = ((30, 30, 220), (220, 30, 30), (30, 220, 30))  # BGR of the masks below
GREY = 110


def square_mask(y: int, x: int, height: int, width: int) -> np.ndarray:
    mask = np.zeros((SIDE, SIDE), np.bool_)
    mask[y : y + height, x : x + width] = True
    return mask


def masks() -> np.ndarray:
    """A red whole, a blue one, and a green part within the red."""
    return np.stack(
        [square_mask(40, 30, 120, 90), square_mask(60, 150, 100, 80), square_mask(60, 50, 40, 40)]
    )


def picture() -> np.ndarray:
    image = np.full((HEIGHT, WIDTH, 3), GREY, np.uint8)
    for mask, colour in zip(masks(), COLOURS, strict=True):
        image[fit(mask, image) > 0] = colour
    return image


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("taught")
    write_shard(shard_path(root, 0), [pack_taught("a", picture(), masks(), np.ones(3, np.float32))])
    return root


def test_objects_of_a_frame_may_cover_one_another(shards: Path) -> None:
    taught = TaughtPictures(shards)
    rng = np.random.default_rng(0)
    samples = [sample for sample in (taught.frame(rng, 3) for _ in range(20)) if sample]
    assert len(samples) > 15
    for images, first, low in samples:
        assert images.shape == (1, SIZE, SIZE, 3)
        assert first.shape[1:] == (SIZE, SIZE)
        assert low.shape == (len(first), 1, LOW, LOW)
        assert 1 <= len(first) <= 3
    assert any((first.sum(axis=0) > 1).any() for _, first, _ in samples)


def test_masks_lie_on_their_objects(shards: Path) -> None:
    """Whatever crop and flip: within a mask the picture has one colour, but for the green part of the red."""
    taught = TaughtPictures(shards)
    rng = np.random.default_rng(1)
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
    scene = np.stack([square_mask(0, 0, SIDE, SIDE), square_mask(60, 60, 40, 40)])
    assert parts(scene).tolist() == [False, False]


def test_objects_of_a_clip_lie_apart() -> None:
    assert apart(masks(), np.array([0, 1, 2])) == [0, 1]
    assert apart(masks(), np.array([2, 1, 0])) == [2, 1]


@pytest.mark.parametrize("seed", range(4))
def test_a_moving_camera_carries_its_labels_along(shards: Path, seed: int) -> None:
    taught = TaughtPictures(shards)
    rng = np.random.default_rng(seed)
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
        turn = affine[:, :2]
        shift = affine[:, 2]
        centre = np.linalg.solve(turn, np.array([WIDTH, HEIGHT]) / 2 - shift)
        assert (np.abs(centre / [WIDTH, HEIGHT] - 0.5) <= 0.5 - WINDOW[0] / 2 + 1e-9).all()


def test_cut_outs_are_taken_from_pictures(shards: Path) -> None:
    sprites = TaughtPictures(shards).sprites(np.random.default_rng(0), 8)
    assert sprites
    assert all(sprite.shape[2] == 4 for sprite in sprites)


def test_shards_that_are_added_later_are_found(tmp_path: Path) -> None:
    with refuses(CameraError, field=("taught", "pictures")):
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
    taught = TaughtPictures(tmp_path)
    rng = np.random.default_rng(0)
    samples = [sample for sample in (taught.frame(rng, 1) for _ in range(200)) if sample]
    share = np.mean([images.mean() < 100 for images, _, _ in samples])
    assert share == pytest.approx(0.25, abs=0.08)  # a quarter, as 2 beside 6; a tenth of the pictures


def test_batches_mix_pictures_and_scenes(shards: Path, scenes: Path, tmp_path: Path) -> None:
    sources = Sources(scenes, tmp_path, taught=shards)
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
