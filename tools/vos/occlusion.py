"""What becomes of an object that is wholly hidden for a while. Pure functions of one object's numbers per frame.

Arrays begin with the frame after the one that the object was prompted on, where it was visible.

An occlusion is a run of at least HIDDEN_FRAMES frames without a pixel of the object that is followed by at least
SEEN_FRAMES frames with some. Its return is the first frame after the run on which the object covers MIN_AREA of the
image; a run without a return before the object is hidden again is not counted. The object is recovered when within
RECOVERY_FRAMES, counted from its return, its mask reaches an IoU of RECOVERED_IOU with it and holds: the same IoU on
more than half of the SEEN_FRAMES frames from there on (of those there are, at the end of a clip).
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
    """Occlusions and how many of them were recovered from; hidden frames and how many had a mask nevertheless."""

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
        """None where there was no occlusion."""
        return self.recovered / self.cases if self.cases else None

    @property
    def false_while_hidden(self) -> float | None:
        """Share of hidden frames on which a mask was given though nothing is there; None where none was hidden."""
        return self.false_frames / self.hidden_frames if self.hidden_frames else None


def count(covered: Floats, found: Floats, ious: Floats) -> OcclusionCount:
    """Of one object, by frame [n]: the shares of the image that it and its mask cover, and their IoU."""
    cases = occlusions(covered)
    hidden = covered == 0
    return OcclusionCount(
        cases=len(cases),
        recovered=sum(is_recovered(ious, case.back) for case in cases),
        hidden_frames=int(hidden.sum()),
        false_frames=int((found[hidden] > 0).sum()),
    )


def occlusions(covered: Floats) -> list[Occlusion]:
    """The occlusions of an object that covers these shares of the image, [n] by frame."""
    clip_end = (len(covered), len(covered))
    found = []
    for (begin, end), (seen_until, _) in pairwise([*hidden_runs(covered), clip_end]):
        large = np.flatnonzero(covered[end:seen_until] >= MIN_AREA)
        if end - begin >= HIDDEN_FRAMES and seen_until - end >= SEEN_FRAMES and large.size:
            found.append(Occlusion(begin, end, end + int(large[0])))
    return found


def hidden_runs(covered: Floats) -> list[tuple[int, int]]:
    """Maximal runs [begin, end) of frames without a pixel."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], covered == 0, [0]])))
    return [(int(begin), int(end)) for begin, end in edges.reshape(-1, 2)]


def is_recovered(ious: Floats, back: int) -> bool:
    """Whether the mask is on the object again after its return on frame `back`, and holds; `ious` [n] by frame."""
    good = ious >= RECOVERED_IOU
    reached = np.flatnonzero(good[back : back + RECOVERY_FRAMES])
    return any(good[back + i : back + i + SEEN_FRAMES].mean() > 0.5 for i in reached)
