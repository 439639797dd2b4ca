"""Tests of the measures of confidence, and of records of tracks and names."""

from pathlib import Path

import numpy as np
import pytest
import torch

from sam3_node.types import Instance, Mask
from tests.support.tiny import tiny_model
from tools.doubt import names
from tools.doubt.measure import auroc, calibration_error, play, reliability, risk_at, risk_coverage
from tools.doubt.record import record
from tools.vos.sequences import LabelledSequence, TrueFrame

RIGHT = np.array([True, True, False, True, False])
VALUES = np.array([0.9, 0.8, 0.7, 0.6, 0.2])


def test_auroc_counts_pairs() -> None:
    assert auroc(VALUES, RIGHT) == pytest.approx(5 / 6)
    assert auroc(np.zeros(5), RIGHT) == 0.5
    assert np.isnan(auroc(VALUES, np.ones(5, np.bool_)))


def test_risk_is_the_share_of_wrong_masks_among_the_surest() -> None:
    coverage, risk = risk_coverage(VALUES, RIGHT)
    assert coverage.tolist() == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert risk.tolist() == [0, 0, 1 / 3, 1 / 4, 2 / 5]
    assert risk_at(VALUES, RIGHT, 0.4) == 0
    assert risk_at(VALUES, RIGHT, 1.0) == 2 / 5


def test_bins_hold_each_value_once() -> None:
    bins = reliability(np.array([0.0, 0.5, 1.0]), np.array([False, True, True]), (0.0, 0.5, 1.0))
    assert [(one.masks, one.right) for one in bins] == [(1, 0), (2, 1)]
    assert calibration_error(bins) == pytest.approx((0 + 2 * 0.25) / 3)


def test_tracks_are_recorded_once_for_each_object_and_frame(tmp_path: Path) -> None:
    def frames():
        for number in range(3):
            full = np.zeros((60, 80), np.bool_)
            full[20:40, 20 + number : 50 + number] = True
            unknown = frozenset({1} if number == 2 else ())
            yield TrueFrame(np.full((60, 80, 3), 90, np.uint8), {1: full}, unknown=unknown)

    torch.manual_seed(0)
    rows = record(LabelledSequence("clip", 3, (1,), 0.001, frames), tiny_model("sam3"), "mask")
    assert (rows.frame, rows.object_id, rows.prompted) == ([0, 1, 2], [1, 1, 1], [True, False, False])
    assert rows.iou[0] > 0.8
    assert np.isnan(rows.iou[2])
    rows.save(tmp_path / "clip.npz")
    assert len(play([tmp_path / "clip.npz"]).iou) <= 1


def test_a_name_is_right_if_the_object_under_most_of_the_mask_has_it() -> None:
    labels = np.zeros((10, 10), np.uint8)
    labels[:, :5] = 1
    labels[:, 5:7] = 2
    objects = [{"id": 1, "name": "red mug", "kind": "mug"}, {"id": 2, "name": "red can", "kind": "can"}]

    def is_right(label: str, columns: slice) -> bool:
        inside = np.zeros((10, 10), np.bool_)
        inside[:, columns] = True
        instance = Instance(1, label, 0.9, "tracked", 1, 0, Mask.from_full(inside))
        return names.is_right(instance, labels, objects)

    assert is_right("red mug", slice(0, 6))
    assert is_right("mug", slice(0, 6))
    assert not is_right("red can", slice(0, 6))
    assert is_right("red can", slice(5, 8))
    assert not is_right("red can", slice(6, 10))  # most of it lies on nothing
