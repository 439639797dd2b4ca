"""Occlusions of an object and recoveries from them: pure functions of one object's numbers per frame.

Arrays begin with the frame after that of the object's prompt, on which it was visible.

An occlusion is a run of at least HIDDEN_FRAMES frames without a pixel of the object that is followed by at least
SEEN_FRAMES frames with some. Its return is the first frame after the run on which the object covers MIN_AREA of the
image; a run without a return before the object is hidden again is not counted. The object is recovered when within
RECOVERY_FRAMES, counted from its return, its mask reaches an IoU of RECOVERED_IOU with it and holds: the same IoU on
more than half of the following SEEN_FRAMES frames (fewer at the end of a clip).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

HIDDEN_FRAMES = 10
SEEN_FRAMES = 5
RECOVERY_FRAMES = 10
RECOVERED_IOU = 0.5
MIN_AREA = 0.001
"""Share of the image that an object must cover to be prompted, or to count as back."""

Floats = npt.NDArray[np.float64]


class Occlusion(NamedTuple):
    """Frames [begin, end) on which an object is hidden, and the frame of its return."""

    begin: int
    end: int
    back: int


@dataclass(frozen=True, slots=True)
class OcclusionCount:
    """Occlusions and recoveries; hidden frames and those of them that had a mask."""

    cases: int = 0
    recovered: int = 0
    hidden_frames: int = 0
    false_frames: int = 0

    def __add__(self, other: OcclusionCount) -> OcclusionCount:
        return OcclusionCount(
            self.cases + other.cases,
            self.recovered + other.recovered,
            self.hidden_frames + other.hidden_frames,
            self.false_frames + other.false_frames,
        )

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
