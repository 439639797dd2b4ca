"""Measure a confidence: area under the ROC curve, risk at a coverage, and reliability by bins.

Records of tracks are played through the confidence estimator, as the pipeline does with live tracks.
"""

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sam3_node.tracking.confidence import ConfidenceEstimator, Evidence
from sam3_node.tracking.track_history import MaskSignals, find_level_sets

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
RIGHT_IOU = 0.5
"""IoU from which a mask is right."""


class Bin(NamedTuple):
    """Masks whose confidence lies in low..high: their number, mean confidence, and the share that is right."""

    low: float
    high: float
    masks: int
    confidence: float
    right: float


def auroc(values: Floats, right: Bools) -> float:
    """Return the probability that a right mask has a larger value than a wrong one; equal values count half."""
    positive = int(right.sum())
    negative = int((~right).sum())
    if not positive or not negative:
        return float("nan")
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2
    return float((ranks[inverse][right].sum() - positive * (positive + 1) / 2) / (positive * negative))


def risk_coverage(values: Floats, right: Bools) -> tuple[Floats, Floats]:
    """Return coverages and the share of wrong masks among the masks with the largest values, at each coverage."""
    order = np.argsort(-values, kind="stable")
    wrong = np.cumsum(~right[order])
    count = np.arange(1, len(values) + 1)
    return count / len(values), wrong / count


def risk_at(values: Floats, right: Bools, coverage: float) -> float:
    """Return the share of wrong masks among the share `coverage` of masks with the largest values."""
    _, risk = risk_coverage(values, right)
    return float(risk[max(0, round(coverage * len(risk)) - 1)])


def reliability(values: Floats, right: Bools, edges: tuple[float, ...]) -> list[Bin]:
    """Return a bin for each pair of neighbouring edges; the last includes its upper edge. Empty bins are left out."""
    bins = []
    for low, high in pairwise(edges):
        inside = (values >= low) & ((values < high) | (high == edges[-1]) & (values <= high))
        if inside.any():
            bins.append(
                Bin(low, high, int(inside.sum()), float(values[inside].mean()), float(right[inside].mean()))
            )
    return bins


def calibration_error(bins: list[Bin]) -> float:
    """Return the mean difference of confidence and share of right masks, weighted by the bins' numbers."""
    total = sum(one.masks for one in bins)
    return sum(one.masks * abs(one.confidence - one.right) for one in bins) / max(1, total)


class Played(NamedTuple):
    """All masks that have a known truth, without prompted frames."""

    features: Floats
    """[N, F], see `confidence.FEATURES`"""
    confidence: Floats
    """[N]"""
    iou: Floats
    """[N]"""
    score: Floats
    """[N]"""
    jumped: npt.NDArray[np.bool_]
    """[N], True if the mask has jumped and has not come back"""

    @property
    def right(self) -> npt.NDArray[np.bool_]:
        return self.iou >= RIGHT_IOU


class Probe(ConfidenceEstimator):
    """An estimator that keeps the features of its last frame; weights may be replaced."""

    features: Floats
    jumped: npt.NDArray[np.bool_]

    def use(self, weights: Floats, bias: float, jumped: float) -> None:
        """Use these weights, bias and confidence of jumped masks instead of the package's."""
        self._weights = weights
        self._bias = bias
        self._jumped = jumped

    def _conclude(
        self,
        rows: npt.NDArray[np.int64],
        signals: MaskSignals,
        features: Floats,
        shown: npt.NDArray[np.bool_],
        jumped: npt.NDArray[np.bool_],
    ) -> list[float]:
        self.features = features
        self.jumped = jumped
        return super()._conclude(rows, signals, features, shown, jumped)


def play(paths: Iterable[Path], weights: tuple[Floats, float, float] | None = None) -> Played:
    """Play the records in these files; `weights`, as `Probe.use` takes them, replace the package's."""
    columns: list[list[npt.NDArray[np.generic]]] = [[] for _ in Played._fields]
    for path in sorted(paths):
        with np.load(path) as stored:
            rows = {key: stored[key] for key in stored.files}
        if not len(rows["frame"]):
            continue
        logits = rows["logits"].astype(np.float32)
        pointers = rows["pointer"].astype(np.float32)
        probe = Probe(len(np.unique(rows["object_id"])), logits.shape[-1], pointers.shape[-1])
        if weights is not None:
            probe.use(*weights)
        for frame in np.unique(rows["frame"]):
            at = rows["frame"] == frame
            evidence = Evidence(
                rows["object_id"][at].tolist(),
                find_level_sets(logits[at]),
                np.clip(rows["score"][at], 0, 1).tolist(),
                (rows["presence"][at] > 0).tolist(),
                rows["presence"][at],
                pointers[at],
            )
            confidence = np.array(probe.observe(evidence))
            counted = np.isfinite(rows["iou"][at]) & ~rows["prompted"][at]
            found = (probe.features, confidence, rows["iou"][at], rows["score"][at], probe.jumped)
            for column, values in zip(columns, found, strict=True):
                column.append(values[counted])
    return Played(*(np.concatenate(column) for column in columns))
