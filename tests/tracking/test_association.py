"""Detections matched to objects, and the life of detected objects."""

from typing import Any

import numpy as np
import pytest
import torch

from sam3_node.tracking import association
from sam3_node.tracking.names import MEASURED
from tests.support.saving import reload

RULES = association.AssociationRules()


def make_scores(overlap: Any, **other: Any) -> association.PairwiseScores:
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
    return association.PairwiseScores(
        **{**values, **{name: np.array(value, float) for name, value in other.items()}}
    )


def run_association(
    found: association.PairwiseScores, is_lost: list[bool] | None = None, names: str = "", labels: str = ""
) -> association.Association:
    """Associate with single letters as labels, all equal by default."""
    objects, detections = found.mask_iou.shape
    return association.associate(
        found,
        list(labels or "m" * objects),
        is_lost or [False] * objects,
        list(names or "m" * detections),
        RULES,
    )


@pytest.mark.parametrize(
    ("overlap", "box_iou", "names", "labels", "matched"),
    [
        pytest.param(
            [[0.1, 0.8], [0.7, 0.0]], None, "", "", {0: 1, 1: 0}, id="to the object that it overlaps"
        ),
        pytest.param([[0.9, 0.8], [0.8, 0.0]], None, "", "", {0: 1, 1: 0}, id="best sum, not best pair"),
        pytest.param([[0.4]], [[0.1]], "", "", {0: 0}, id="a speck makes the box large"),
        pytest.param([[0.2]], [[0.5]], "", "", {0: 0}, id="boxes alone"),
        pytest.param([[0.60, 0.62]], None, "mc", "m", {0: 0}, id="of two that fit, the one of the same name"),
        pytest.param([[0.8]], None, "c", "m", {0: 0}, id="another name, yet the same object"),
    ],
)
def test_each_detection_goes_to_an_object(
    overlap: Any, box_iou: Any, names: str, labels: str, matched: dict[int, int]
) -> None:
    found = make_scores(overlap, box_iou=overlap if box_iou is None else box_iou)
    assert run_association(found, names=names, labels=labels).matched == matched


def test_too_little_overlap_is_another_object() -> None:
    found = run_association(make_scores([[0.2, 0.0]]))
    assert found.matched == {}
    assert found.new == [0, 1]


def test_a_detection_on_an_object_that_has_a_better_one_is_nothing_new() -> None:
    found = run_association(make_scores([[0.9, 0.6]]))
    assert (found.matched, found.new) == ({0: 0}, [])


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
    assert association.assign(np.zeros((3, 0))) == {}


def test_mask_iou_counts_pixels() -> None:
    masks = torch.zeros(3, 4, 4, dtype=torch.bool)
    masks[0, :2] = True
    masks[1, 1:3] = True
    expected = torch.tensor([[1, 1 / 3, 0], [1 / 3, 1, 0], [0, 0, 0]])
    assert torch.allclose(association.mask_iou(masks, masks), expected)


def test_likeness_is_the_best_of_what_is_held() -> None:
    remembered = torch.tensor([[[1.0, 0.0], [0.0, 2.0]], [[3.0, 0.0], [0.0, 1.0]]])
    held = torch.tensor([[True, True], [True, False]])
    found = association.appearance_similarity(remembered, held, torch.tensor([[0.0, 5.0]]))
    assert found.tolist() == [[1.0], [0.0]]


def test_compare_brings_all_to_the_host() -> None:
    logits = torch.full((2, 8, 8), -1.0)
    logits[0, 2:6, 2:6] = 1
    appearance = torch.ones(2, 1, 4), torch.ones(2, 1, dtype=torch.bool)
    found = association.compute_pairwise_scores(
        logits, logits[:1], torch.tensor([[2.0, 2, 6, 6]]), appearance, torch.ones(1, 4)
    )
    assert found.mask_iou.tolist() == [[1.0], [0.0]]
    assert found.box_iou.tolist() == [[1.0], [0.0]]
    assert found.appearance_similarity.ravel() == pytest.approx([1, 1])
    assert np.diag(found.duplicate_tracks).tolist() == [1.0, 0.0]
    assert found.duplicate_detections.tolist() == [[1.0]]


S = 1_000_000_000
LIFE_RULES = association.LifecycleRules(
    min_detections=2, max_missed_rounds=2, duplicate_missed_rounds=4, max_lost_s=3.0, min_evidence_score=0.5
)


@pytest.fixture
def lifecycle() -> association.Lifecycle:
    return association.Lifecycle(LIFE_RULES)


def confirmed(*ids: int, now_ns: int = 0) -> association.Lifecycle:
    lifecycle = association.Lifecycle(LIFE_RULES)
    for object_id in ids:
        for _ in range(2):
            lifecycle.mark_detected(object_id, "mug", 0.8, now_ns)
    return lifecycle


def test_two_sightings_make_it_more_than_tentative(lifecycle: association.Lifecycle) -> None:
    lifecycle.mark_detected(1, "mug", 0.8, 0)
    assert lifecycle.is_tentative(1)
    lifecycle.mark_detected(1, "mug", 0.8, 0)
    assert not lifecycle.is_tentative(1)


def test_a_tentative_one_that_is_missed_goes(lifecycle: association.Lifecycle) -> None:
    lifecycle.mark_detected(1, "mug", 0.8, 0)
    lifecycle.mark_missed(1)
    assert lifecycle.expired(0) == []
    lifecycle.mark_missed(1)
    assert lifecycle.expired(0) == [1]


def test_a_sure_mask_keeps_a_confirmed_one_without_detections() -> None:
    lifecycle = confirmed(1)
    for second in range(1, 10):
        lifecycle.mark_missed(1)
        lifecycle.observe(1, 0.6, True, second * S)
        assert lifecycle.expired(second * S) == []


def test_without_evidence_it_goes_after_the_time() -> None:
    for score, visible in ((0.9, False), (0.4, True)):
        lifecycle = confirmed(1)
        lifecycle.observe(1, score, visible, 3 * S)
        assert lifecycle.expired(3 * S) == []
        assert lifecycle.expired(3 * S + 1) == [1]


def test_a_clock_that_begins_again_keeps_no_one_for_ever() -> None:
    lifecycle = confirmed(1, now_ns=1000 * S)
    lifecycle.observe(1, 0.0, False, 0)
    assert lifecycle.expired(3 * S) == []
    assert lifecycle.expired(3 * S + 1) == [1]


def test_a_tentative_one_lives_by_detections_alone(lifecycle: association.Lifecycle) -> None:
    lifecycle.mark_detected(1, "mug", 0.8, 0)
    lifecycle.observe(1, 0.9, True, 4 * S)
    assert lifecycle.expired(4 * S) == [1]


def test_hidden_or_long_missed_is_away() -> None:
    lifecycle = confirmed(1, 2)
    lifecycle.observe(1, 0.0, False, 0)
    lifecycle.mark_missed(2)
    assert (lifecycle.is_lost(1), lifecycle.is_lost(2)) == (True, False)
    lifecycle.mark_missed(2)
    assert lifecycle.is_lost(2)
    lifecycle.mark_detected(1, "mug", 0.8, 0)
    assert not lifecycle.is_lost(1)


def test_the_name_has_the_most_votes(lifecycle: association.Lifecycle) -> None:
    for label, score in (("cup", 0.5), ("mug", 0.4), ("mug", 0.4)):
        lifecycle.mark_detected(1, label, score, 0)
    assert lifecycle.label(1) == "mug"


def test_names_that_are_withdrawn_leave_the_other_votes(lifecycle: association.Lifecycle) -> None:
    lifecycle.mark_detected(1, "cup", 0.5, 0)
    lifecycle.mark_detected(1, "mug", 0.9, 0)
    lifecycle.mark_detected(2, "mug", 0.9, 0)
    assert lifecycle.keep_labels(["cup"]) == [2]
    assert lifecycle.label(1) == "cup"


def test_a_repeat_goes_once_its_detections_go_to_another() -> None:
    lifecycle = confirmed(1)
    lifecycle.mark_detected(2, "mug", 0.5, 0)
    lifecycle.mark_missed(2)
    assert lifecycle.is_duplicate(2), "a tentative one at once"
    for _ in range(3):
        lifecycle.mark_missed(1)
    assert not lifecycle.is_duplicate(1)
    lifecycle.mark_missed(1)
    assert lifecycle.is_duplicate(1)


def test_who_makes_room() -> None:
    lifecycle = confirmed(1, 2, 3)
    assert lifecycle.eviction_candidate(0.99) is None, "confirmed and in view"
    lifecycle.mark_detected(4, "mug", 0.4, 0)
    assert lifecycle.eviction_candidate(0.5) == 4
    assert lifecycle.eviction_candidate(0.3) is None
    lifecycle.observe(2, 0.9, True, 1 * S)
    for hidden in (2, 3):
        lifecycle.observe(hidden, 0.0, False, 2 * S)
    assert lifecycle.eviction_candidate(0.1) == 3, "out of view for longest"


def test_what_is_forgotten_is_not_there() -> None:
    lifecycle = confirmed(1)
    lifecycle.forget(1)
    lifecycle.forget(1)
    assert 1 not in lifecycle
    assert lifecycle.ids == []


def measured(*first: float) -> list[float]:
    """Features of a detection of which the first ones matter."""
    return [*first, *[0.0] * (MEASURED - len(first))]


def test_what_detections_say_of_each_name(lifecycle: association.Lifecycle) -> None:
    lifecycle.mark_detected(1, "mug", 0.9, 0, measured(1.0, 2.0))
    lifecycle.mark_detected(1, "cup", 0.5, 0, measured(5.0, 6.0))
    lifecycle.mark_missed(1)
    assert lifecycle.name_features(1, "mug") == [*measured(1.0, 2.0), 1 / 3]
    assert lifecycle.name_features(1, "cup") == [*measured(5.0, 6.0), 1 / 3]
    assert lifecycle.name_features(1, "jar") is None
    lifecycle.keep_labels(["mug"])
    assert lifecycle.name_features(1, "cup") is None
    lifecycle.observe(1, 0.0, False, 0)
    assert lifecycle.name_features(1, "mug") == [*measured(1.0, 2.0), 1 / 3]
    lifecycle.mark_missed(1)  # out of view in a round of the detector: what comes back may be another thing
    assert lifecycle.name_features(1, "mug") is None
    lifecycle.mark_detected(1, "mug", 0.9, 0, measured(7.0, 8.0))
    assert lifecycle.name_features(1, "mug") == [*measured(7.0, 8.0), 1.0]


def test_a_detection_elsewhere_voids_what_was_known_of_the_name(lifecycle: association.Lifecycle) -> None:
    for _ in range(3):
        lifecycle.mark_detected(1, "mug", 0.9, 0, measured(4.0))
    lifecycle.mark_detected(1, "mug", 0.3, 0, measured(-1.0), anew=True)
    assert lifecycle.name_features(1, "mug") == [*measured(-1.0), 1.0]


def test_a_state_holds_the_names(lifecycle: association.Lifecycle) -> None:
    lifecycle.mark_detected(1, "mug", 0.9, 0, measured(1.0))
    again = association.Lifecycle(LIFE_RULES)
    again.restore(reload(lifecycle.state()))
    for each in (lifecycle, again):
        each.mark_detected(1, "mug", 0.9, 0, measured(2.0))
        assert each.name_features(1, "mug") == [*measured(1.5), 1.0]
