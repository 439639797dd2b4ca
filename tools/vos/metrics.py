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

BOUND = 0.008  # distance at which contours still match, as a share of the image's diagonal


class MaskScore(NamedTuple):
    """J and F of one mask, both in 0..1."""

    j: float
    f: float


def region_similarity(mask: Bools, truth: Bools, void: Bools | None = None) -> float:
    """Return J, the intersection over union; 1 where both are empty."""
    counts = np.True_ if void is None else ~void
    union = np.count_nonzero((mask | truth) & counts)
    return np.count_nonzero(mask & truth & counts) / union if union else 1.0


def contour_accuracy(mask: Bools, truth: Bools, void: Bools | None = None) -> float:
    """Return F, the harmonic mean of contour precision and recall, matched within BOUND of the image's diagonal.

    The result is 0 if only one mask has a contour, and 1 if neither has.
    """
    if void is not None:
        mask, truth = mask & ~void, truth & ~void
    radius = int(np.ceil(BOUND * np.linalg.norm(mask.shape)))
    window = _window(mask | truth, radius + 1)
    edge, true_edge = contour(mask[window]), contour(truth[window])
    if not edge.any() or not true_edge.any():
        return float(edge.any() == true_edge.any())
    precision = np.count_nonzero(edge & _dilated(true_edge, radius)) / np.count_nonzero(edge)
    recall = np.count_nonzero(true_edge & _dilated(edge, radius)) / np.count_nonzero(true_edge)
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def score(mask: Bools, truth: Bools, void: Bools | None = None) -> MaskScore:
    """Return J and F of `mask` against `truth`."""
    return MaskScore(region_similarity(mask, truth, void), contour_accuracy(mask, truth, void))


def contour(mask: Bools) -> Bools:
    """Return the pixels that differ from the one to the right, below, or right below: a contour one pixel wide.

    In the last row and column each pixel has a single neighbour to compare with, and the corner has none.
    """
    edge = np.zeros_like(mask)
    edge[:, :-1] |= mask[:, :-1] ^ mask[:, 1:]
    edge[:-1] |= mask[:-1] ^ mask[1:]
    edge[:-1, :-1] |= mask[:-1, :-1] ^ mask[1:, 1:]
    return edge


def _window(inside: Bools, margin: int) -> tuple[slice, slice]:
    """Return the rows and columns that `inside` spans, widened by `margin`: no contour lies outside them."""
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
