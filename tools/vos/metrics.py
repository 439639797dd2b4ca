"""Measure masks as the DAVIS benchmark defines it: region similarity J, contour accuracy F, recovery from occlusions.

F. Perazzi et al., "A Benchmark Dataset and Evaluation Methodology for Video Object Segmentation", CVPR 2016, with
the choices of the benchmark's own evaluation of 2017. Masks are bool [h, w]; `void` marks pixels that do not count.

An occlusion is a run of at least HIDDEN_FRAMES frames without a pixel of the object that is followed by at least
SEEN_FRAMES frames with some. Its return is the first frame after the run on which the object covers MIN_AREA of the
image; a run without a return before the object is hidden again is not counted. The object is recovered when within
RECOVERY_FRAMES, counted from its return, its mask reaches an IoU of RECOVERED_IOU with it and holds: the same IoU on
more than half of the following SEEN_FRAMES frames (fewer at the end of a clip). Arrays begin with the frame after the
object's prompt.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import cv2
import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]

BOUND = 0.008  # distance at which contours still match, as a share of the image's diagonal
HIDDEN_FRAMES = 10
SEEN_FRAMES = 5
RECOVERY_FRAMES = 10
RECOVERED_IOU = 0.5
MIN_AREA = 0.001
"""Share of the image that an object must cover to be prompted, or to count as back."""
Floats = npt.NDArray[np.float64]


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
        mask = mask & ~void
        truth = truth & ~void
    radius = int(np.ceil(BOUND * np.linalg.norm(mask.shape)))
    window = _window(mask | truth, radius + 1)
    edge = contour(mask[window])
    true_edge = contour(truth[window])
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
    return cv2.dilate(edge.view(np.uint8), _disk(radius)).view(np.bool_)


@cache
def _disk(radius: int) -> npt.NDArray[np.uint8]:
    steps = np.arange(-radius, radius + 1)
    return (steps[:, None] ** 2 + steps**2 <= radius**2).astype(np.uint8)


class Occlusion(NamedTuple):
    """Frames [begin, end) on which an object is hidden, and the frame of its return."""

    begin: int
    end: int
    back: int


@dataclass(frozen=True, slots=True)
class OcclusionCount:
    """Occlusions and recoveries; hidden frames, and how many had a mask."""

    cases: int = 0
    recovered: int = 0
    hidden_frames: int = 0
    false_frames: int = 0

    def __add__(self, other: OcclusionCount) -> OcclusionCount:
        return OcclusionCount(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    @property
    def recovered_share(self) -> float | None:
        """Recovered share of the occlusions; None if there was none."""
        return self.recovered / self.cases if self.cases else None

    @property
    def false_while_hidden(self) -> float | None:
        """Share of hidden frames on which a mask was published; None if no frame was hidden."""
        return self.false_frames / self.hidden_frames if self.hidden_frames else None


def count(object_shares: Floats, mask_shares: Floats, ious: Floats) -> OcclusionCount:
    """Count for one object from the image shares [n] of the object and its mask, and their IoU [n], by frame."""
    cases = occlusions(object_shares)
    hidden = object_shares == 0
    return OcclusionCount(
        cases=len(cases),
        recovered=sum(is_recovered(ious, case.back) for case in cases),
        hidden_frames=int(hidden.sum()),
        false_frames=int((mask_shares[hidden] > 0).sum()),
    )


def occlusions(object_shares: Floats) -> list[Occlusion]:
    """List the occlusions of an object with these image shares [n] by frame."""
    clip_end = (len(object_shares), len(object_shares))
    cases = []
    for (begin, end), (seen_until, _) in pairwise([*hidden_runs(object_shares), clip_end]):
        large = np.flatnonzero(object_shares[end:seen_until] >= MIN_AREA)
        if end - begin >= HIDDEN_FRAMES and seen_until - end >= SEEN_FRAMES and large.size:
            cases.append(Occlusion(begin, end, end + int(large[0])))
    return cases


def hidden_runs(object_shares: Floats) -> list[tuple[int, int]]:
    """Return the maximal runs [begin, end) of frames without a pixel."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], object_shares == 0, [0]])))
    return [(int(begin), int(end)) for begin, end in edges.reshape(-1, 2)]


def is_recovered(ious: Floats, back: int) -> bool:
    """Return True if the mask is on the object again after its return on frame `back`, and stays; `ious` [n]."""
    good = ious >= RECOVERED_IOU
    reached = np.flatnonzero(good[back : back + RECOVERY_FRAMES])
    return any(good[back + i : back + i + SEEN_FRAMES].mean() > 0.5 for i in reached)
