"""Measures of a confidence: area under the ROC curve, risk at a coverage, and reliability by bins."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class Bin(NamedTuple):
    """Masks whose confidence lies in low..high: their number, mean confidence, and the share that is right."""

    low: float
    high: float
    masks: int
    confidence: float
    right: float


def auroc(values: Floats, right: Bools) -> float:
    """Return the probability that a right mask has a larger value than a wrong one; equal values count half."""
    positive, negative = int(right.sum()), int((~right).sum())
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
