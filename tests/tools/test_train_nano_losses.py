"""The losses of masks in training, and the prompts that are drawn from true masks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tools.train_nano.config import SIZE
from tools.train_nano.network import Decoded
from tools.train_nano.steps import (
    ABSENT,
    BACKGROUND,
    CELL,
    boxes,
    corrections,
    cost,
    overlap,
    points,
    presence_of,
    total,
)

SIDE = 64


def square(y: int, x: int, side: int, of: int = SIDE) -> Tensor:
    """A mask, float [of, of]."""
    mask = torch.zeros(of, of)
    mask[y : y + side, x : x + side] = 1
    return mask


def decoded(logits: Tensor, iou: float = 1.0, presence: float = 20.0) -> Decoded:
    """Make the decoder's output from logits [N, K, 64, 64]."""
    count, candidates = logits.shape[:2]
    return Decoded(
        logits,
        torch.full((count, candidates), iou),
        torch.zeros(count, candidates, 8),
        torch.full((count,), presence),
    )


def sure(target: Tensor) -> Tensor:
    """Logits [N, 2, 64, 64] that say a target [N, 64, 64] without doubt."""
    return ((target * 2 - 1) * 20)[:, None].expand(-1, 2, -1, -1)


def test_a_perfect_mask_costs_nothing() -> None:
    target = torch.stack([square(10, 10, 20), square(0, 40, 5)])
    found = cost(decoded(sure(target)), target)
    assert float(found.loss) < 1e-3
    assert (float(found.iou), float(found.visible), float(found.right), found.objects) == (2, 2, 2, 2)


def test_a_wrong_mask_costs_more_than_one_that_is_half_right() -> None:
    target = square(10, 10, 20)[None]
    half, wrong = square(10, 20, 20)[None], square(40, 40, 20)[None]
    costs = [float(cost(decoded(sure(mask)), target).loss) for mask in (target, half, wrong)]
    assert costs == sorted(costs)
    assert costs[0] + 0.3 < costs[1] < costs[2] - 0.3


@pytest.mark.parametrize("presence", [-2.0, 3.0])
def test_of_an_object_out_of_view_only_presence_counts(presence: float) -> None:
    target = torch.zeros(1, SIDE, SIDE)
    for mask in (target, square(5, 5, 30)[None]):
        found = cost(decoded(sure(mask), iou=0.3, presence=presence), target)
        assert float(found.loss) == pytest.approx(ABSENT * math.log1p(math.exp(presence)))
        assert float(found.right) == (presence < 0)
        assert float(found.visible) == float(found.iou) == 0


def test_a_sliver_is_neither_present_nor_absent() -> None:
    target = square(5, 5, 1)[None] * 0.5
    present, absent = presence_of(target)
    assert not bool(present)
    assert not bool(absent)
    found = cost(decoded(sure(square(0, 0, 9)[None]), presence=-9.0), target)
    assert float(found.loss) == 0
    assert float(found.right) == 1


def test_ease_says_how_much_the_outside_weighs() -> None:
    """In doubt everywhere, each cell costs ln 2 times its weight; dice costs the same with any ease."""
    target, area = square(10, 10, 20)[None], 400
    doubt = decoded(torch.zeros(1, 1, SIDE, SIDE))
    outside = SIDE * SIDE - area
    near, far = 1 / (area + BACKGROUND), 1 / (outside + BACKGROUND)
    loss = {ease: float(cost(doubt, target, ease).loss) for ease in (0.0, 0.5, 1.0)}
    assert loss[0.0] - loss[1.0] == pytest.approx(math.log(2) * outside * (near - far), rel=1e-4)
    assert loss[0.5] - loss[1.0] == pytest.approx(
        math.log(2) * outside * (math.sqrt(near * far) - far), rel=1e-4
    )


def test_ease_leaves_the_inside_as_it_is() -> None:
    target = square(10, 10, 20)[None]
    missed = decoded(sure(torch.zeros_like(target)))
    assert float(cost(missed, target, 0.0).loss) == pytest.approx(
        float(cost(missed, target, 1.0).loss), abs=1e-4
    )


def test_intersection_over_union_by_hand() -> None:
    target = torch.stack([square(0, 0, 4), square(0, 0, 4), torch.zeros(SIDE, SIDE)])
    predicted = torch.stack([square(0, 2, 4), square(0, 0, 8), torch.zeros(SIDE, SIDE)])
    logits = torch.stack([predicted, target], dim=1) - 0.5
    expected = torch.tensor([[8 / 24, 1.0], [16 / 64, 1.0], [0.0, 0.0]])
    assert torch.allclose(overlap(logits, target), expected)


def test_the_total_is_a_mean_over_object_frames_and_iou_one_over_visible_ones() -> None:
    seen, empty = square(0, 0, 4)[None], torch.zeros(1, SIDE, SIDE)
    half = torch.zeros(1, SIDE, SIDE)
    half[0, :4, :2] = 1
    costs = [cost(decoded(sure(half)), seen), cost(decoded(sure(empty), presence=1.0), empty)]
    loss, figures = total(costs)
    assert float(loss) == pytest.approx(float(costs[0].loss + costs[1].loss) / 2)
    assert figures == {"loss": pytest.approx(float(loss)), "iou": 0.5, "presence": 0.5}


def test_boxes_are_the_outermost_edges_of_a_mask() -> None:
    masks = torch.zeros(2, SIZE, SIZE, dtype=torch.bool)
    masks[0, 10:20, 30:50] = True
    masks[1, 0, 255] = True
    corners, labels = boxes(masks, jitter=0)
    assert corners.tolist() == [[[30, 10], [50, 20]], [[255, 0], [256, 1]]]
    assert labels.tolist() == [[2, 3], [2, 3]]
    assert labels.dtype == torch.int32


def test_jitter_moves_a_box_by_a_share_of_its_sides_within_the_image() -> None:
    torch.manual_seed(0)
    masks = torch.zeros(200, SIZE, SIZE, dtype=torch.bool)
    masks[:, 0:40, 100:200] = True
    corners, _ = boxes(masks, jitter=0.05)
    away = corners - torch.tensor([[100.0, 0.0], [200.0, 40.0]])
    assert 3 < float(away[..., 0].std()) < 7
    assert 1 < float(away[:, 1, 1].std()) < 3
    assert float(corners.min()) >= 0
    assert float(corners.max()) <= SIZE


def test_points_lie_inside_their_masks() -> None:
    torch.manual_seed(0)
    masks = torch.zeros(40, SIZE, SIZE, dtype=torch.bool)
    for index, mask in enumerate(masks):
        mask[2 * index : 2 * index + 1 + index, 100 : 103 + index] = True
    where, labels = points(masks)
    x, y = where[:, 0].long().unbind(dim=1)
    assert bool(masks[torch.arange(40), y, x].all())
    assert labels.tolist() == [[1]] * 40


def test_a_correction_clicks_into_what_was_missed() -> None:
    target = square(20, 20, 11)[None]
    where, labels = corrections(torch.full((1, SIDE, SIDE), -5.0), target)
    assert labels.tolist() == [[1]]
    assert (where[0, 0] / CELL - 25.5).abs().max() <= 1  # the middle of the square


def test_a_correction_clicks_out_what_is_too_much() -> None:
    target = square(20, 20, 11)[None]
    spilled = target + square(40, 4, 9)[None] - 0.5
    where, labels = corrections(spilled, target)
    assert labels.tolist() == [[0]]
    assert where[0, 0].tolist() == pytest.approx([8.5 * CELL, 44.5 * CELL], abs=CELL)
