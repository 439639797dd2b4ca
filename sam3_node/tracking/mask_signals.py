"""Signals that masks give of themselves: size, place, stability and overlap, from low-resolution logits."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

MAX_SIDE = 144  # cells of the grid; finer logits are sampled


class LevelSets(NamedTuple):
    """Points of a grid over the image at which the logits of N masks exceed three levels; the signals need no more."""

    inside: Bools
    """[N, h, w], logits > 0"""
    core: Bools
    """[N, h, w], logits > 1"""
    surroundings: Bools
    """[N, h, w], logits > -1"""
    is_empty: Bools
    """[N], no logit is positive, also beside the points of the grid"""


class MaskSignals(NamedTuple):
    """Signals of N masks; lengths are in cells of a grid over the image."""

    inside: Bools
    """[N, h, w], the masks on the grid"""
    area: Floats
    """[N], at least 1"""
    centre: Floats
    """[N, 2] as (x, y)"""
    stability: Floats
    """[N] in 0..1: IoU of the masks at logits -1 and +1"""
    overlap: Floats
    """[N] in 0..1: share of the mask that other visible masks cover"""

    def select(self, chosen: Bools) -> MaskSignals:
        """Return the signals of the masks where `chosen` [N] is True."""
        return MaskSignals(
            self.inside[chosen],
            self.area[chosen],
            self.centre[chosen],
            self.stability[chosen],
            self.overlap[chosen],
        )


def grid_side(side: int) -> int:
    """Return the cells of the grid for logits [side, side]."""
    step = _stride(side)
    return len(range(step // 2, side, step))


def _stride(side: int) -> int:
    return -(-side // MAX_SIDE)


def compare_levels(logits: Any) -> tuple[Any, Any, Any]:
    """Return the first three fields of the level sets of logits [N, h, w], an array or a tensor."""
    step = _stride(logits.shape[1])
    grid = logits[:, step // 2 :: step, step // 2 :: step]
    return grid > 0, grid > 1, grid > -1


def find_level_sets(logits: npt.NDArray[np.float32]) -> LevelSets:
    """Return the level sets of logits [N, h, w]."""
    is_empty: Bools = np.logical_not((logits > 0).any(axis=(1, 2)))
    return LevelSets(*compare_levels(logits), is_empty)


def measure(levels: LevelSets, visible: Bools) -> MaskSignals:
    """Return the signals of N masks; a mask that is not visible [N] covers no other."""
    count, height, width = levels.inside.shape
    inside, core, surroundings = (level.reshape(count, height * width) for level in levels[:3])
    area = np.maximum(_count(inside), 1)
    # the sums are multiples of 0.5 below 2^22, so float32 is exact in any order of summation
    moments = inside.astype(np.float32) @ _cell_centres(height, width)
    return MaskSignals(
        levels.inside,
        area,
        moments / area[:, None],
        _count(core) / np.maximum(_count(surroundings), 1),
        _overlap(inside, visible) / area if count > 1 else np.zeros(count),
    )


def aligned_iou(mask: Bools, other: Bools, shift: tuple[int, int]) -> float:
    """Return the IoU of masks [h, w], `other` moved by `shift` (x, y) cells; cells moved off the grid do not count."""
    height, width = mask.shape
    x, y = shift
    if abs(x) >= width or abs(y) >= height:
        return 0.0
    here = mask[max(y, 0) : height + min(y, 0), max(x, 0) : width + min(x, 0)]
    there = other[max(-y, 0) : height + min(-y, 0), max(-x, 0) : width + min(-x, 0)]
    either = np.count_nonzero(here | there)
    return np.count_nonzero(here & there) / either if either else 1.0


@cache
def _cell_centres(height: int, width: int) -> npt.NDArray[np.float32]:
    """Return the centres (x, y) of all cells, [h * w, 2]."""
    y, x = np.mgrid[:height, :width].reshape(2, -1)
    return np.stack([x, y], axis=1).astype(np.float32) + np.float32(0.5)


def _count(flat: Bools) -> Floats:
    return np.array([np.count_nonzero(row) for row in flat], np.float64)


def _overlap(flat: Bools, visible: Bools) -> Floats:
    """Return the number of cells of each mask [N, h * w] that other visible masks cover."""
    shown = flat & visible[:, None]
    cover = shown.sum(axis=0, dtype=np.uint16)
    return _count(flat & (cover > shown))
