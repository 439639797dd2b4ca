"""What moves in the training data: pseudo-tracks of real video, and composites that come near, turn, blur and leave."""

import json
from pathlib import Path

import cv2
import numpy as np
import pytest

from sam3_node.errors import CameraError
from tests.support.rectangles import FRAMES, rectangle_clip
from tests.support.refuses import refuses
from tools.scenes.clips import write_clip
from tools.vos.sequences import UNKNOWN
from training.doubt.pseudo import (
    MAX_ENERGY,
    choose_seeds,
    find_stretches,
    flow_between,
    follow,
    measure_way,
    summarise,
)
from training.nano import augment
from training.nano.augment import MOST_GROWN, Path2D, compose, lively_path
from training.nano.data import Clips, Recipe, Sources
from training.nano.tracks import PseudoTracks

SQUARE = (180, 320)


def square_at(left: int, side: int = 40) -> np.ndarray:
    """A textured square over noise, BGR."""
    rng = np.random.default_rng(0)
    image = rng.integers(90, 110, (*SQUARE, 3), np.uint8)
    image[60 : 60 + side, left : left + side] = rng.integers(0, 255, (side, side, 3), np.uint8)
    return cv2.GaussianBlur(image, (5, 5), 0)


def test_the_stretches_of_most_motion_do_not_overlap() -> None:
    still = [square_at(20)] * 12
    moving = [square_at(20 + 6 * number) for number in range(12)]
    (first, second) = find_stretches([*still, *moving], 8, 2)
    assert first.begin >= 8
    assert abs(first.begin - second.begin) >= 8
    assert 0 <= second.energy <= first.energy
    flashes = [np.full((*SQUARE, 3), 200 * (number % 2), np.uint8) for number in range(8)]
    assert MAX_ENERGY < 200
    assert find_stretches(flashes, 8, 2) == []


def test_the_teacher_is_asked_where_pixels_move() -> None:
    flow = flow_between(square_at(100), square_at(105))
    points = choose_seeds(np.linalg.norm(flow, axis=2) >= 1, size=320)
    assert len(points)
    inside = (points[:, 0, 0] > 80) & (points[:, 0, 0] < 170)
    assert inside.float().mean() > 0.85
    assert len(choose_seeds(np.zeros(SQUARE, np.bool_), 320)) == 0


def test_a_way_is_in_sizes_of_the_object_itself() -> None:
    masks = np.zeros((3, 90, 90), np.bool_)
    masks[0, 40:50, 10:20] = True
    masks[2, 40:50, 40:50] = True  # the second frame has none
    way = measure_way(masks, (90, 90))
    assert way.travel == pytest.approx(3)
    assert way.growth == pytest.approx(1)
    wide = measure_way(masks, (90, 180))  # pixels twice as wide as in the square
    assert wide.travel == pytest.approx(3)
    masks[2, 30:60, 30:60] = True
    assert measure_way(masks, (90, 90)).growth == pytest.approx(3)


def test_a_prompt_moves_with_the_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from training.doubt import pseudo

    monkeypatch.setattr(pseudo, "_segment", lambda model, features, logits: logits)
    logits = torch.full((1, 60, 60), -10.0)
    logits[0, 20:30, 20:30] = 10
    flow = np.zeros((60, 60, 2), np.float32)
    flow[15:35, 15:35] = (6, -4)
    first, second = follow(None, [None, None], logits, [flow])  # type: ignore[arg-type, list-item]
    assert torch.equal(first, logits)
    assert torch.equal(second[0, 16:26, 26:36] > 0, torch.ones(10, 10, dtype=torch.bool))
    assert int((second > 0).sum()) == 100


@pytest.fixture
def tracks(tmp_path: Path) -> Path:
    """One clip of two rectangles; object 1 is in doubt on frame 2."""
    clip = rectangle_clip()
    objects = [{"id": number, "travel": 0.6 * number, "growth": 1.5} for number in (1, 2)]
    clip.meta["objects"] = objects  # type: ignore[index]
    write_clip(tmp_path / "tracks", "a", clip)
    (tmp_path / "tracks" / UNKNOWN).write_text(json.dumps({"a": [[2, 1]], "nothing kept": []}))
    return tmp_path / "tracks"


def test_an_object_in_doubt_on_a_frame_is_background_on_all(tracks: Path) -> None:
    rng = np.random.default_rng(0)
    drawn = PseudoTracks(tracks).clip(rng, FRAMES)
    assert drawn is not None
    images, labels = drawn
    assert len(images) == FRAMES
    assert {int(i) for label in labels for i in np.unique(label)} == {0, 2}


def test_tracks_are_trained_on(tracks: Path, scenes: Path, tmp_path: Path) -> None:
    sources = Sources(scenes, tmp_path, tracks=tracks)
    batch = Clips(sources, Recipe(clips=2, frames=4, objects=2, tracks=1.0), 0).batch(
        np.random.default_rng(0)
    )
    assert batch.images.shape[:2] == (2, 4)
    with refuses(CameraError, field=str(tmp_path / "none")):
        (tmp_path / "none" / "JPEGImages").mkdir(parents=True)
        PseudoTracks(tmp_path / "none")


def test_the_report_counts_tracks_and_their_ways(tracks: Path) -> None:
    told = summarise(tracks)
    assert (told["stretches"], told["clips"], told["tracks"]) == (2, 1, 2)
    assert told["frames of all tracks"] == 2 * FRAMES - 1
    assert told["travel in own sizes, median"] == 0.9


def test_lively_cut_outs_grow_or_shrink_up_to_four_times_and_some_leave() -> None:
    rng = np.random.default_rng(0)
    paths = [lively_path(rng) for _ in range(200)]
    grown = np.array([1 + path.growth for path in paths])
    assert 1 / MOST_GROWN <= grown.min() < 0.3
    assert 3.3 < grown.max() <= MOST_GROWN
    ends = np.array([path.start + path.velocity for path in paths])
    left = ((ends < 0) | (ends > 1)).any(axis=1).mean()
    assert 0.2 < left < 0.8
    assert np.std([path.spin for path in paths]) > 1


def test_a_fast_cut_out_is_blurred_along_its_way_and_its_label_has_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sprite = np.full((40, 40, 4), 255, np.uint8)

    def path_of(shutter: float) -> Path2D:
        return Path2D(
            start=np.array([0.3, 0.5]),
            velocity=np.array([0.5, 0.0]),
            sway=np.zeros(2),
            phase=0.0,
            size=0.25,
            growth=0.0,
            angle=0.0,
            spin=0.0,
            shutter=shutter,
        )

    monkeypatch.setattr(augment, "LIVELY", 1.0)
    monkeypatch.setattr(augment, "COVERED", 0.0)
    areas = {}
    for shutter in (0.0, 0.8):
        monkeypatch.setattr(augment, "lively_path", lambda rng, shutter=shutter: path_of(shutter))
        monkeypatch.setattr(augment, "tint", lambda rng, one: one)
        blank = [np.zeros((120, 160, 3), np.uint8) for _ in range(4)]
        labels = [np.zeros((120, 160), np.uint8) for _ in range(4)]
        images, labels = compose(np.random.default_rng(0), blank, labels, [sprite])
        grey = (images[1] > 10) & (images[1] < 245)
        areas[shutter] = (int((labels[1] > 0).sum()), int(grey.sum()))
    sharp = areas[0.0]
    blurred = areas[0.8]
    assert blurred[1] > 3 * sharp[1]
    assert abs(blurred[0] - sharp[0]) < 0.2 * sharp[0]
