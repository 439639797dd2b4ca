"""Region similarity J and contour accuracy F of a mask, as the DAVIS benchmark defines them.

F. Perazzi et al., "A Benchmark Dataset and Evaluation Methodology for Video Object Segmentation", CVPR 2016, with
the choices of the benchmark's own evaluation of 2017. Masks are bool [h, w]; `void` marks pixels that do not count.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import cv2
import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]

BOUND = 0.008  # how far a contour may be off, as a share of the image's diagonal


class Score(NamedTuple):
    """J and F of one mask, both in 0..1."""

    j: float
    f: float


def region_similarity(mask: Bools, truth: Bools, void: Bools | None = None) -> float:
    """J: intersection over union; 1 where both are empty."""
    counts = np.True_ if void is None else ~void
    union = np.count_nonzero((mask | truth) & counts)
    return np.count_nonzero(mask & truth & counts) / union if union else 1.0


def contour_accuracy(mask: Bools, truth: Bools, void: Bools | None = None) -> float:
    """F: harmonic mean of precision and recall of the contour, matched within BOUND of the image's diagonal.

    One contour without the other is 0, none at all is 1.
    """
    if void is not None:
        mask, truth = mask & ~void, truth & ~void
    radius = int(np.ceil(BOUND * np.linalg.norm(mask.shape)))
    window = _window(mask | truth, radius + 1)
    found, wanted = contour(mask[window]), contour(truth[window])
    if not found.any() or not wanted.any():
        return float(found.any() == wanted.any())
    precision = np.count_nonzero(found & _dilated(wanted, radius)) / np.count_nonzero(found)
    recall = np.count_nonzero(wanted & _dilated(found, radius)) / np.count_nonzero(wanted)
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def score(mask: Bools, truth: Bools, void: Bools | None = None) -> Score:
    """J and F of `mask` against `truth`."""
    return Score(region_similarity(mask, truth, void), contour_accuracy(mask, truth, void))


def contour(mask: Bools) -> Bools:
    """Pixels that differ from the one to the right, below, or right below: a contour one pixel wide.

    In the last row and column there is one neighbour to compare with, and none in the corner.
    """
    edge = np.zeros_like(mask)
    edge[:, :-1] |= mask[:, :-1] ^ mask[:, 1:]
    edge[:-1] |= mask[:-1] ^ mask[1:]
    edge[:-1, :-1] |= mask[:-1, :-1] ^ mask[1:, 1:]
    return edge


def _window(inside: Bools, margin: int) -> tuple[slice, slice]:
    """Rows and columns that `inside` spans, wider by `margin`: nothing beyond them matters to a contour."""
    rows, columns = (np.flatnonzero(inside.any(axis=axis)) for axis in (1, 0))
    return _span(rows, margin), _span(columns, margin)


def _span(places: npt.NDArray[np.intp], margin: int) -> slice:
    if not places.size:
        return slice(0, 1)
    return slice(max(int(places[0]) - margin, 0), int(places[-1]) + 1 + margin)


def _dilated(edge: Bools, radius: int) -> Bools:
    dilated: Bools = cv2.dilate(edge.view(np.uint8), _disk(radius)).view(np.bool_)
    return dilated


@cache
def _disk(radius: int) -> npt.NDArray[np.uint8]:
    steps = np.arange(-radius, radius + 1)
    return (steps[:, None] ** 2 + steps**2 <= radius**2).astype(np.uint8)
