"""Batches to train on: rendered clips, composites of cut-outs, background videos."""

from itertools import islice
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt
import pytest

from sam3_node.errors import CameraError
from tests.support.rectangles import COLOURS, FRAMES, GREY, HEIGHT, WIDTH, rectangle_clip, write_rectangles
from tests.support.refuses import refuses
from tools.scenes.clips import Clip, write_clip
from training.nano import augment
from training.nano.augment import (
    LOW,
    Augmentation,
    Sprite,
    colour_like,
    compose,
    covering_path,
    load_cutouts,
)
from training.nano.data import (
    RELIST,
    Clips,
    Recipe,
    Sources,
    choose_frames,
    choose_objects,
    load_videos,
    prepare,
)
from training.nano.network import SIZE
from training.nano.steps import second_prompt

GREEN = (20, 200, 20, 255)


@pytest.fixture
def cutouts(tmp_path: Path) -> Path:
    """A folder with one cut-out, and files that are none: broken, without alpha, too small, too thin."""
    folder = tmp_path / "cutouts" / "deeper"
    folder.mkdir(parents=True)
    cv2.imwrite(str(folder / "green.png"), sprite(200, 150))
    (folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    (folder / "empty.png").write_bytes(b"")
    cv2.imwrite(str(folder / "opaque.png"), sprite(60, 60)[..., :3])
    cv2.imwrite(str(folder / "small.png"), sprite(10, 10))
    cv2.imwrite(str(folder / "thin.png"), sprite(30, 300))
    return folder.parent


def sprite(height: int, width: int) -> Sprite:
    return np.full((height, width, 4), GREEN, np.uint8)


def test_batches_have_the_shapes_that_training_takes(scenes: Path, tmp_path: Path) -> None:
    clips = Clips(Sources(scenes, tmp_path), Recipe(clips=3, frames=4, objects=2), seed=0)
    for batch in islice(clips, 3):
        count = len(batch.clip)
        assert batch.images.shape == (3, 4, SIZE, SIZE, 3)
        assert batch.first.shape == (count, SIZE, SIZE)
        assert batch.masks.shape == (count, 4, LOW, LOW)
        assert 3 <= count <= 6
        assert set(batch.clip.tolist()) == {0, 1, 2}
        assert bool(batch.first.flatten(1).any(dim=1).all())


def test_batches_follow_from_the_seed(scenes: Path, tmp_path: Path) -> None:
    def first(seed: int) -> list[np.ndarray]:
        clips = Clips(Sources(scenes, tmp_path), Recipe(clips=2, frames=2, objects=2), seed)
        return [tensor.numpy() for tensor in next(iter(clips))]

    assert all(np.array_equal(a, b) for a, b in zip(first(1), first(1), strict=True))
    assert not np.array_equal(first(1)[0], first(2)[0])


def test_masks_lie_on_the_objects_through_augmentation() -> None:
    """Object 1 is red and object 2 blue, on every frame, whatever crop, flip and tone."""
    clip = rectangle_clip()
    for seed in range(12):
        rng = np.random.default_rng(seed)
        frames = [clip.image(i) for i in (0, 3)], [clip.labels(i) for i in (0, 3)]
        images, first, masks = prepare(rng, *frames, most=1)
        redness = images[..., 0].astype(int) - images[..., 2]
        sign = np.sign(redness[0][first[0]].mean())
        assert abs(redness[0][first[0]].mean()) > 40
        low = cv2.resize(redness[1].astype(np.float32), (LOW, LOW), interpolation=cv2.INTER_AREA)
        solid = masks[0, 1] == 255
        if solid.any():
            assert sign * low[solid].mean() > 40
        assert np.array_equal(masks[0, 0], augment.coverage(first[0]))


def test_an_augmentation_is_the_same_for_all_frames_of_a_clip() -> None:
    clip = rectangle_clip()
    drawn = Augmentation.draw(np.random.default_rng(3), (HEIGHT, WIDTH))
    assert np.array_equal(drawn.image(clip.image(0)), drawn.image(clip.image(0)))
    assert drawn.image(clip.image(0)).shape == (SIZE, SIZE, 3)
    assert set(np.unique(drawn.labels(clip.labels(0)))) <= {0, 1, 2}


def test_a_clip_without_a_large_enough_object_is_refused() -> None:
    labels = [np.zeros((HEIGHT, WIDTH), np.uint8)] * 2
    images = [np.full((HEIGHT, WIDTH, 3), GREY, np.uint8)] * 2
    assert prepare(np.random.default_rng(0), images, labels, most=4) is None


def test_composites_label_exactly_what_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.nano.augment.ALIKE", 0)  # nothing is as grey as the picture
    for seed in range(8):
        before = rectangle_clip()
        images = [np.full((HEIGHT, WIDTH, 3), GREY, np.uint8)] * 3
        labels = [before.labels(i) for i in range(3)]
        drawn, numbers = compose(np.random.default_rng(seed), images, labels, [sprite(30, 40)])
        for image, number, old in zip(drawn, numbers, labels, strict=True):
            laid = number > 2
            assert (image[laid] != GREY).any(axis=-1).all()
            untouched = (image == GREY).all(axis=-1)
            assert np.array_equal(number[untouched], old[untouched])
        assert all((image == GREY).all() for image in images), "the given frames stay as they are"


def test_hidden_objects_are_often_trained_on_first() -> None:
    labels = [np.arange(1, 9, dtype=np.uint8)[None], np.array([[1, 2, 3, 4, 6, 7, 8, 8]], np.uint8)]
    rng = np.random.default_rng(0)
    orders = [choose_objects(rng, list(range(1, 9)), labels) for _ in range(200)]
    assert all(sorted(order) == list(range(1, 9)) for order in orders)
    assert 90 < sum(order[0] == 5 for order in orders) < 140, "half of the clips, and an eighth of the others"
    alone = [choose_objects(rng, [1, 5], labels[:1])[0] for _ in range(200)]
    assert 60 < alone.count(5) < 140


def test_a_covering_path_hides_an_object_that_was_in_view_first() -> None:
    labels = [np.zeros((HEIGHT, WIDTH), np.uint8) for _ in range(5)]
    for label in labels:
        label[20:32, 40:52] = 3
    cover = sprite(40, 40)
    hidden = set()
    for seed in range(20):
        path, number = covering_path(np.random.default_rng(seed), labels)
        assert number == 3
        seen = [_share_left(path.affine(i / 4, cover, (HEIGHT, WIDTH)), labels[i] == 3) for i in range(5)]
        assert seen[0] > 0.9
        assert min(seen[1:]) < 0.1, "a square that is turned may leave corners of one of nearly its size"
        hidden.add(sum(share < 0.1 for share in seen))
    assert hidden >= {1, 2, 3}, "it passes over, or stays"
    assert covering_path(np.random.default_rng(0), [label * 0 for label in labels]) is None


def test_a_cut_out_takes_the_mean_colour_of_an_object_and_keeps_its_pattern_and_its_outline() -> None:
    striped = sprite(40, 40)
    striped[::2, :, :3] += 10
    striped[:, :5, 3] = 0
    pixels = np.array([[100, 110, 120], [120, 130, 140]], np.uint8)
    like = colour_like(striped, pixels)
    assert np.array_equal(like[..., 3], striped[..., 3])
    assert np.allclose(like[:, 5:, :3].mean(axis=(0, 1)), pixels.mean(axis=0), atol=1)
    assert (like[::2, :, :3].astype(int) - like[1::2, :, :3] == 10).all()
    plain = colour_like(striped, pixels, 0.0)
    assert (plain[..., :3] == pixels.mean(axis=0).astype(np.uint8)).all()
    clear = np.zeros_like(striped)
    assert np.array_equal(colour_like(clear, pixels), clear)


def test_three_views_in_ten_are_close_to_an_object_and_hold_it() -> None:
    rng = np.random.default_rng(0)
    shape = (480, 640)
    objects = np.zeros((2, *shape), np.bool_)
    objects[0, 200:260, 300:400] = True
    objects[1, 470:, 630:] = True
    crops = [Augmentation.draw(rng, shape, objects).crop for _ in range(300)]
    for x, y, w, h in crops:
        assert 0 <= x <= x + w <= shape[1]
        assert 0 <= y <= y + h <= shape[0]
    close = [crop for crop in crops if crop[2] < 0.5 * shape[1]]
    assert 60 < len(close) < 120
    for crop in close:
        first, second = (seen_share(crop, mask) for mask in objects)
        assert max(first, second) == 1
    assert min(w for _, _, w, _ in close) < 1.5 * augment.NEAR * 100
    far = [Augmentation.draw(rng, shape, objects[:0]).crop[2] for _ in range(100)]
    assert min(far) > 0.5 * shape[1]


def seen_share(crop: tuple[int, int, int, int], mask: npt.NDArray[np.bool_]) -> float:
    x, y, w, h = crop
    return float(mask[y : y + h, x : x + w].sum() / mask.sum())


def _share_left(affine: npt.NDArray[np.float64], mask: npt.NDArray[np.bool_]) -> float:
    """Return the share of a mask that an opaque 40x40 sprite leaves in view."""
    covered = cv2.warpAffine(np.ones((40, 40), np.uint8), affine, mask.shape[::-1], flags=cv2.INTER_NEAREST)
    return float((mask & (covered == 0)).sum() / mask.sum())


def test_composites_are_drawn_with_objects_of_the_clip_itself(scenes: Path, tmp_path: Path) -> None:
    sources = Sources(scenes, tmp_path)
    rng = np.random.default_rng(0)
    highest = [max(label.max() for label in sources.draw(rng, 2)[1]) for _ in range(30)]
    assert 8 <= sum(number <= max(COLOURS) for number in highest) <= 26
    assert max(highest) > 3


def test_a_cut_out_is_what_a_mask_covers() -> None:
    clip = rectangle_clip()
    found = augment.cut_out(clip.image(0), clip.labels(0) == 1)
    assert found.shape == (18, 18, 4)
    assert (found == (*COLOURS[1], 255)).all()
    assert augment.cut_out(clip.image(0), np.eye(8, dtype=np.bool_)) is None


def test_files_that_are_no_cut_outs_are_left_out(cutouts: Path, tmp_path: Path) -> None:
    (found,) = load_cutouts(cutouts, 10, tmp_path / "cutouts.npz")
    assert found.shape == (160, 120, 4)
    assert (found == GREEN).all()


def test_cut_outs_are_kept_for_the_next_start(cutouts: Path, tmp_path: Path) -> None:
    folders = (cutouts, tmp_path / "absent")
    first, again = (load_cutouts(folder, 10, tmp_path / "cache" / "cutouts.npz") for folder in folders)
    assert [each.tobytes() for each in again] == [each.tobytes() for each in first]


def test_without_cut_outs_there_are_none(tmp_path: Path) -> None:
    assert load_cutouts(tmp_path / "absent", 10, tmp_path / "cutouts.npz") == []


def test_videos_serve_as_backgrounds(scenes: Path, cutouts: Path, tmp_path: Path) -> None:
    video = tmp_path / "videos" / "yellow"
    video.mkdir(parents=True)
    for index in range(3):
        cv2.imwrite(str(video / f"{index}.jpg"), np.full((HEIGHT, WIDTH, 3), (0, 220, 220), np.uint8))
    (frames,) = load_videos(video.parent, tmp_path / "videos.npz")
    assert len(frames) == 3
    sources = Sources(scenes, tmp_path, cutouts=cutouts, videos=video.parent)
    rng = np.random.default_rng(0)
    drawn = [sources.draw(rng, 2)[0][0] for _ in range(30)]
    yellow = [image for image in drawn if image[..., 0].min() < 20 and np.median(image[..., 1]) > 200]
    assert 0 < len(yellow) < 15


def test_frames_of_a_clip_run_forwards_or_backwards() -> None:
    rng = np.random.default_rng(0)
    steps = [np.diff(choose_frames(rng, 20, 4)) for _ in range(400)]
    assert all((step > 0).all() or (step < 0).all() for step in steps)
    even = [int(step[0]) for step in steps if len(set(step)) == 1]
    assert set(even) >= {-3, -2, -1, 1, 2, 3}
    assert 0.5 < len(even) / len(steps) < 0.7  # the others are anywhere


def test_frames_of_a_clip_span_it() -> None:
    rng = np.random.default_rng(0)
    chosen = [choose_frames(rng, 20, 4) for _ in range(200)]
    assert min(min(indices) for indices in chosen) == 0
    assert max(max(indices) for indices in chosen) == 19
    assert max(abs(indices[-1] - indices[0]) for indices in chosen) > 15


def test_a_clip_that_is_too_short_stands_still_at_its_end() -> None:
    rng = np.random.default_rng(0)
    assert {tuple(sorted(choose_frames(rng, 2, 4))) for _ in range(20)} == {(0, 1, 1, 1)}
    assert choose_frames(rng, 1, 1) == [0]


def test_a_second_prompt_comes_when_all_objects_are_in_view(scenes: Path, tmp_path: Path) -> None:
    clips = Clips(Sources(scenes, tmp_path), Recipe(clips=1, frames=4, objects=2), seed=0)
    batch = next(iter(clips))
    batch.masks[:] = 0
    assert second_prompt(batch, np.random.default_rng(0)) == 0
    batch.masks[:, 0] = 255
    batch.masks[:, 2] = 255
    batch.masks[:1, 3] = 255
    expected = {2, 3} if len(batch.masks) == 1 else {2}
    assert {second_prompt(batch, np.random.default_rng(seed)) for seed in range(20)} == expected


def test_a_folder_without_clips_is_refused(tmp_path: Path) -> None:
    with refuses(CameraError, field="folder"):
        Sources(tmp_path, tmp_path)
    (tmp_path / "JPEGImages").mkdir()
    with refuses(CameraError, field="clips"):
        Sources(tmp_path, tmp_path)


def test_renderings_that_are_added_later_are_found(tmp_path: Path) -> None:
    root = write_rectangles(tmp_path)
    sources = Sources(root, tmp_path / "cache")
    rng = np.random.default_rng(0)
    black = [np.zeros((HEIGHT, WIDTH, 3), np.uint8)] * FRAMES
    for name in "cdef":
        write_clip(root, name, Clip(name, black, rectangle_clip().annotations))
    (root / "JPEGImages" / "unfinished").mkdir()
    drawn = [sources.draw(rng, 1)[0][0] for _ in range(RELIST + 30)]
    assert any(np.median(image) < 5 for image in drawn)
