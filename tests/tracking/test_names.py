"""The confidence of names: what detections say of a label, and how it adds up over a track."""

from __future__ import annotations

import pytest

from sam3_node.settings import DetectorSettings
from sam3_node.tracking.confidence_weights import NAME_WEIGHTS, SURE_NAME, USUAL_MARGINS
from sam3_node.tracking.names import (
    FEATURES,
    LOWEST,
    MAX_MARGIN,
    MEMORY,
    NameEvidence,
    estimate_name,
    list_features,
    measure_names,
)
from sam3_node.types import Detection

HERE, NEAR, THERE = (0.0, 0.0, 10.0, 10.0), (1.0, 0.0, 11.0, 10.0), (50.0, 0.0, 60.0, 10.0)
RIGHT = [1.5, 3.7, 3.7, 3.8, 0.7, 1.0]
WRONG = [-1.3, -2.0, 0.9, 0.5, -1.4, 1.0]


def measure(*detections: Detection, with_margins: bool = True) -> list[list[float]]:
    return [[round(value, 3) for value in row] for row in measure_names(detections, with_margins)]


def test_the_features_of_one_detection() -> None:
    assert measure(Detection("mug", 0.5, HERE, (1.0, 9.0))) == [[0.0, -LOWEST, -LOWEST, 1.0, MAX_MARGIN]]
    usual = list(USUAL_MARGINS.values())
    assert measure(Detection("mug", 0.5, HERE))[0][3:] == usual
    assert measure(Detection("mug", 0.5, HERE, (1.0, 1.0)), with_margins=False)[0][3:] == usual
    assert measure(Detection("mug", 0.0, HERE))[0][0] == pytest.approx(-6.907)
    assert measure() == []


def test_the_same_phrase_elsewhere_is_a_rival_and_another_in_the_same_place_an_other() -> None:
    mug, ball, can = Detection("mug", 0.8, HERE), Detection("mug", 0.5, THERE), Detection("can", 0.5, NEAR)
    first, second, third = measure(mug, ball, can)
    assert first[1:3] == [1.386, 1.386]
    assert second[1:3] == [-1.386, -LOWEST]
    assert third[1:3] == [-LOWEST, -1.386]
    assert measure(mug, Detection("mug", 0.5, NEAR))[0][1] == pytest.approx(3.586)  # the same thing twice


def test_no_feature_that_grows_lowers_the_confidence() -> None:
    assert set(NAME_WEIGHTS) <= set(FEATURES)
    assert min(NAME_WEIGHTS.values()) >= 0
    assert estimate_name(WRONG) < 0.5 < SURE_NAME < estimate_name(RIGHT) < 1
    assert DetectorSettings().min_name_confidence == SURE_NAME


def test_the_evidence_is_a_mean_in_which_old_detections_fade() -> None:
    evidence = NameEvidence()
    for value in (1.0, 2.0, 6.0):
        evidence.add([value])
    assert evidence.means == [3.0]
    assert list_features(evidence, 4) == [3.0, 0.75]
    assert list_features(evidence, 2) == [3.0, 1.0]  # never more often than the detector ran
    for _ in range(10 * MEMORY):
        evidence.add([0.0])
    assert evidence.means[0] < 1e-3
