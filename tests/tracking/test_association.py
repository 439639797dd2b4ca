"""Association of detections with objects, on numbers alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sam3_node.tracking.association import (
    Association,
    AssociationRules,
    PairwiseScores,
    appearance_similarity,
    assign,
    associate,
    compute_pairwise_scores,
    mask_boxes,
    mask_iou,
)

RULES = AssociationRules()


def make_scores(overlap: Any, **other: Any) -> PairwiseScores:
    """Return scores with equal mask and box IoU, no similar appearance, and no duplicates, unless `other` says so."""
    iou = np.array(overlap, float)
    objects, found = iou.shape
    values = {
        "mask_iou": iou,
        "box_iou": iou,
        "appearance_similarity": np.full(iou.shape, -1.0),
        "duplicate_tracks": np.eye(objects),
        "duplicate_detections": np.eye(found),
    }
    return PairwiseScores(**{**values, **{name: np.array(value, float) for name, value in other.items()}})


def run_association(
    found: PairwiseScores, is_lost: list[bool] | None = None, names: str = "", labels: str = ""
) -> Association:
    """Associate with single letters as labels, all equal by default."""
    objects, detections = found.mask_iou.shape
    return associate(
        found,
        list(labels or "m" * objects),
        is_lost or [False] * objects,
        list(names or "m" * detections),
        RULES,
    )


def test_each_detection_goes_to_the_object_that_it_overlaps() -> None:
    assert run_association(make_scores([[0.1, 0.8], [0.7, 0.0]])).matched == {0: 1, 1: 0}


def test_the_best_sum_wins_over_the_best_pair() -> None:
    assert run_association(make_scores([[0.9, 0.8], [0.8, 0.0]])).matched == {0: 1, 1: 0}


def test_too_little_overlap_is_another_object() -> None:
    found = run_association(make_scores([[0.2, 0.0]]))
    assert found.matched == {}
    assert found.new == [0, 1]


def test_a_speck_that_makes_the_box_large_does_not_part_them() -> None:
    assert run_association(make_scores([[0.4]], box_iou=[[0.1]])).matched == {0: 0}
    assert run_association(make_scores([[0.2]], box_iou=[[0.5]])).matched == {0: 0}


def test_a_detection_on_an_object_that_has_a_better_one_is_nothing_new() -> None:
    found = run_association(make_scores([[0.9, 0.6]]))
    assert (found.matched, found.new) == ({0: 0}, [])


def test_of_two_that_fit_the_one_of_the_same_name_wins() -> None:
    assert run_association(make_scores([[0.60, 0.62]]), names="mc", labels="m").matched == {0: 0}


def test_another_name_is_the_same_object_all_the_same() -> None:
    assert run_association(make_scores([[0.8]]), names="c", labels="m").matched == {0: 0}


def test_a_detection_of_the_same_mask_as_a_better_one_is_none() -> None:
    found = run_association(
        make_scores(np.zeros((0, 3)), duplicate_detections=[[1, 0.9, 0], [0.9, 1, 0], [0, 0, 1]])
    )
    assert found.new == [0, 2]


def test_a_detection_without_a_mask_is_none() -> None:
    assert run_association(make_scores(np.zeros((0, 2)), duplicate_detections=[[0, 0], [0, 1]])).new == [1]


def test_an_object_that_was_away_returns_by_its_looks() -> None:
    numbers = make_scores([[0, 0], [0, 0]], appearance_similarity=[[0.6, 0.9], [0.7, 0.8]])
    found = run_association(numbers, is_lost=[True, True])
    assert found.recovered == {0: 1, 1: 0}
    assert found.new == []


@pytest.mark.parametrize(
    ("is_lost", "names", "alike"), [([False], "m", 0.9), ([True], "c", 0.9), ([True], "m", 0.4)]
)
def test_it_does_not_return_in_view_by_another_name_or_unlike(
    is_lost: list[bool], names: str, alike: float
) -> None:
    found = run_association(
        make_scores([[0.0]], appearance_similarity=[[alike]]), is_lost=is_lost, names=names, labels="m"
    )
    assert (found.recovered, found.new) == ({}, [0])


def test_objects_of_one_mask_are_twins() -> None:
    assert run_association(
        make_scores(np.zeros((3, 0)), duplicate_tracks=[[1, 0, 0.9], [0, 1, 0], [0.9, 0, 1]])
    ).duplicate_tracks == [(0, 2)]


def test_nothing_with_nothing() -> None:
    assert run_association(make_scores(np.zeros((0, 0)))) == ({}, {}, [], [])
    assert assign(np.zeros((3, 0))) == {}


def test_boxes_are_tight_and_empty_masks_have_none() -> None:
    masks = torch.zeros(2, 10, 12, dtype=torch.bool)
    masks[0, 2:5, 3:9] = True
    assert mask_boxes(masks).tolist() == [[3, 2, 9, 5], [0, 0, 0, 0]]


def test_mask_iou_counts_pixels() -> None:
    masks = torch.zeros(3, 4, 4, dtype=torch.bool)
    masks[0, :2], masks[1, 1:3] = True, True
    expected = torch.tensor([[1, 1 / 3, 0], [1 / 3, 1, 0], [0, 0, 0]])
    assert torch.allclose(mask_iou(masks, masks), expected)


def test_likeness_is_the_best_of_what_is_held() -> None:
    remembered = torch.tensor([[[1.0, 0.0], [0.0, 2.0]], [[3.0, 0.0], [0.0, 1.0]]])
    held = torch.tensor([[True, True], [True, False]])
    found = appearance_similarity(remembered, held, torch.tensor([[0.0, 5.0]]))
    assert found.tolist() == [[1.0], [0.0]]


def test_compare_brings_all_to_the_host() -> None:
    logits = torch.full((2, 8, 8), -1.0)
    logits[0, 2:6, 2:6] = 1
    appearance = torch.ones(2, 1, 4), torch.ones(2, 1, dtype=torch.bool)
    found = compute_pairwise_scores(
        logits, logits[:1], torch.tensor([[2.0, 2, 6, 6]]), appearance, torch.ones(1, 4)
    )
    assert found.mask_iou.tolist() == [[1.0], [0.0]]
    assert found.box_iou.tolist() == [[1.0], [0.0]]
    assert found.appearance_similarity.ravel() == pytest.approx([1, 1])
    assert np.diag(found.duplicate_tracks).tolist() == [1.0, 0.0]
    assert found.duplicate_detections.tolist() == [[1.0]]
