"""Signals that a mask gives of itself: size, place, shape and stability, from low-resolution logits on the host."""

from __future__ import annotations

from typing import Any, NamedTuple

import cv2
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

MAX_GRID = 144  # cells a side; finer logits are sampled


class MaskSignals(NamedTuple):
    """Signals of N masks; lengths are in cells of a grid over the image."""

    inside: Bools
    """[N, h, w], the masks on the grid"""
    area: Floats
    """[N], cells, at least 1"""
    centre: Floats
    """[N, 2] as (x, y)"""
    stability: Floats
    """[N] in 0..1: IoU of the masks at logits -1 and +1"""
    strength: Floats
    """[N]: mean logit inside the mask, each limited to 10"""
    outline: Floats
    """[N]: length of the outline over that of a square with the same area"""
    fragmentation: Floats
    """[N] in 0..1: share of the mask outside its largest component"""
    overlap: Floats
    """[N] in 0..1: share of the mask inside other masks"""


def grid_side(side: int) -> int:
    """Return the cells a side of the grid for logits [side, side]."""
    step = _stride(side)
    return len(range(step // 2, side, step))


def _stride(side: int) -> int:
    return -(-side // MAX_GRID)


def measure(logits: npt.NDArray[np.float32], visible: Bools) -> MaskSignals:
    """Return the signals of logits [N, h, w]; a mask that is not visible counts as empty for the others."""
    step = _stride(logits.shape[1])
    if step > 1:
        logits = np.ascontiguousarray(logits[:, step // 2 :: step, step // 2 :: step])
    count, height, width = logits.shape
    inside = logits > 0
    flat = inside.reshape(count, -1)
    area = _count(flat)
    inner, outer = _count(logits.reshape(count, -1) > 1), _count(logits.reshape(count, -1) > -1)
    limited = np.clip(logits, 0, 10).reshape(count, -1)
    strength = limited.sum(axis=1, dtype=np.float64)
    weights = inside.astype(np.float32)
    columns, rows = weights.sum(axis=1), weights.sum(axis=2)  # whole numbers: exact in any order of summation
    filled = np.maximum(area, 1)
    x = (columns @ (np.arange(width, dtype=np.float32) + np.float32(0.5))) / filled
    y = (rows @ (np.arange(height, dtype=np.float32) + np.float32(0.5))) / filled
    edges = _count((inside[:, 1:] != inside[:, :-1]).reshape(count, -1))
    edges += _count((inside[:, :, 1:] != inside[:, :, :-1]).reshape(count, -1))
    return MaskSignals(
        inside,
        filled,
        np.stack([x, y], axis=1).astype(np.float64),
        inner / np.maximum(outer, 1),
        strength / filled,
        edges / (4 * np.sqrt(filled)),
        np.array([_fragmentation(one, n) for one, n in zip(inside, area, strict=True)], np.float64),
        _overlap(flat & visible[:, None], area) if count > 1 else np.zeros(count),
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


def _count(flat: Bools) -> Floats:
    return np.count_nonzero(flat, axis=1).astype(np.float64)


def _fragmentation(inside: Bools, area: float) -> float:
    if not area:
        return 0.0
    count, _, stats, _ = cv2.connectedComponentsWithStats(inside.view(np.uint8), connectivity=8)
    return float(1 - stats[1:, cv2.CC_STAT_AREA].max() / area) if count > 2 else 0.0


def _overlap(flat: Bools, area: Floats) -> Floats:
    cover = flat.sum(axis=0, dtype=np.int32)
    return _count(flat & (cover > 1)) / np.maximum(area, 1)
