"""The teacher: which masks it keeps, and the shards that a run, killed and started again, leaves."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from sam3_node.errors import CameraError
from tools.train_nano import teach
from tools.train_nano.taught import SIDE, known_names, list_shards
from tools.train_nano.teach import (
    Choice,
    Found,
    Picture,
    Teacher,
    _boxes,
    pairwise_iou,
    stability,
    without_doubles,
    without_specks,
)


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
    whole, again, part = square(0, 0, 40), square(1, 0, 40), square(5, 5, 15)
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
    with pytest.raises(SystemExit, match="error: expected videos"):
        teach.main([str(tmp_path), "--teacher", "nano", "-o", str(tmp_path / "out")])
    with pytest.raises(CameraError, match="expected videos"):
        teach.list_pictures(tmp_path)
