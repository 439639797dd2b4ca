"""From a frame to a detector's square and back, and the choice among overlapping boxes (x0 y0 x1 y1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..types import Detection
from .pixels import Letterbox

MAX_CANDIDATES = 1000  # boxes that may compete, the best ones


class Selection(NamedTuple):
    """Boxes [n, 4] that were chosen, the best first, their scores [n] and class indices [n]."""

    boxes: Tensor
    scores: Tensor
    classes: Tensor


def select(
    boxes: Tensor, scores: Tensor, thresholds: Tensor | float, *, iou: float = 0.7, limit: int = 100
) -> Selection:
    """Non-maximum suppression among boxes [A, 4] of one image with scores [A, K], on their device.

    A box counts for the one class that it scores highest in, of those whose threshold ([K], or one for all) it exceeds.
    A box goes when a better one of its class, itself not gone, overlaps it by more than `iou`. At most `limit` stay.
    """
    best, classes = torch.where(scores > thresholds, scores, 0).max(dim=1)
    index = best.nonzero()[:, 0]
    index = index[best[index].argsort(descending=True, stable=True)[:MAX_CANDIDATES]]
    index = index[_survivors(boxes[index], classes[index], iou)][:limit]
    return Selection(boxes[index], best[index], classes[index])


def _survivors(boxes: Tensor, classes: Tensor, iou: float) -> Tensor:
    """Which boxes, the best first, greedy suppression keeps, [n] bool; the fixed point of arXiv 2005.03572.

    In each round, those that are kept suppress those after them; what does not change any more is the greedy answer.
    """
    rivals = (box_iou(boxes, boxes) > iou) & (classes[:, None] == classes)
    rivals = rivals.triu(diagonal=1)
    kept = torch.ones_like(classes, dtype=torch.bool)
    while True:
        again = ~(rivals & kept[:, None]).any(dim=0)
        if torch.equal(again, kept):
            return kept
        kept = again


def box_iou(first: Tensor, second: Tensor) -> Tensor:
    """Intersection over union of each of [n, 4] with each of [m, 4] -> [n, m]; 0 where both are empty."""
    low = torch.maximum(first[:, None, :2], second[:, :2])
    high = torch.minimum(first[:, None, 2:], second[:, 2:])
    common = (high - low).clamp(min=0).prod(dim=2)
    union = _area(first)[:, None] + _area(second) - common
    return common / union.clamp(min=torch.finfo(union.dtype).tiny)


def _area(boxes: Tensor) -> Tensor:
    return (boxes[:, 2:] - boxes[:, :2]).clamp(min=0).prod(dim=1)


def to_corners(boxes: Tensor) -> Tensor:
    """Boxes [..., 4] as centre x, centre y, width and height -> x0 y0 x1 y1."""
    centre, half = boxes[..., :2], boxes[..., 2:] / 2
    return torch.cat([centre - half, centre + half], dim=-1)


def to_detections(chosen: Selection, frame: Letterbox, phrases: Sequence[str]) -> list[Detection]:
    """The boxes on the frame that they were found on, in one copy from the device; those of no area are left out."""
    columns = [frame.to_frame(chosen.boxes), chosen.scores[:, None], chosen.classes[:, None]]
    rows = torch.cat(columns, dim=1).tolist()
    return [
        Detection(phrases[int(index)], score, (x0, y0, x1, y1))
        for x0, y0, x1, y1, score, index in rows
        if x0 < x1 and y0 < y1
    ]
