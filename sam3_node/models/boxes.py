"""Boxes (x0 y0 x1 y1) of detectors: overlap, non-maximum suppression, and conversion to detections."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..types import Detection
from .pixels import Letterbox

MAX_CANDIDATES = 1000  # best boxes that enter the suppression


class Selection(NamedTuple):
    """The selected n boxes, the best first."""

    boxes: Tensor
    """[n, 4]"""
    scores: Tensor
    """[n]"""
    classes: Tensor
    """class indices [n]"""
    anchors: Tensor
    """their indices among all boxes [n]"""


def select(
    boxes: Tensor, scores: Tensor, thresholds: Tensor | float, *, iou: float = 0.7, limit: int = 100
) -> Selection:
    """Suppress all but the best of overlapping boxes [A, 4] with scores [A, K] of one image, on their device.

    The class of a box is the one with its highest score, among those whose threshold it exceeds. `thresholds` is [K],
    or one number for all classes. A box is suppressed if a better box of its class that is kept overlaps it by more
    than `iou`. At most `limit` boxes are kept.
    """
    best, classes = torch.where(scores > thresholds, scores, 0).max(dim=1)
    index = best.nonzero()[:, 0]
    index = index[best[index].argsort(descending=True, stable=True)[:MAX_CANDIDATES]]
    index = index[_survivors(boxes[index], classes[index], iou)][:limit]
    return Selection(boxes[index], best[index], classes[index], index)


def suppress(boxes: Tensor, scores: Tensor, iou: float) -> Tensor:
    """Return the indices of boxes [n, 4] that no better box overlaps by more than `iou`, the best first."""
    order = scores.argsort(descending=True, stable=True)
    return order[_survivors(boxes[order], torch.zeros_like(order), iou)]


def _survivors(boxes: Tensor, classes: Tensor, iou: float) -> Tensor:
    """Return bool [n]: True for boxes, the best first, that greedy suppression keeps (arXiv 2005.03572).

    In each round, the boxes that are kept suppress the boxes after them. The fixed point is the greedy result. All
    boxes are processed at once, so a GPU needs only a few rounds.
    """
    rivals = (box_iou(boxes, boxes) > iou) & (classes[:, None] == classes)
    rivals = rivals.triu(diagonal=1)
    kept = torch.ones_like(classes, dtype=torch.bool)
    while True:
        next_kept = ~(rivals & kept[:, None]).any(dim=0)
        if torch.equal(next_kept, kept):
            return kept
        kept = next_kept


def box_iou(first: Tensor, second: Tensor) -> Tensor:
    """Return the IoU [n, m] of boxes [n, 4] and [m, 4]; 0 where both are empty."""
    low = torch.maximum(first[:, None, :2], second[:, :2])
    high = torch.minimum(first[:, None, 2:], second[:, 2:])
    common = (high - low).clamp(min=0).prod(dim=2)
    union = _area(first)[:, None] + _area(second) - common
    return common / union.clamp(min=torch.finfo(union.dtype).tiny)


def mask_boxes(masks: Tensor) -> Tensor:
    """Return the boxes, float32 [N, 4], around masks bool [N, h, w], in their cells; of an empty mask, all of it."""
    edges = []
    for line in (masks.any(dim=1), masks.any(dim=2)):  # columns, then rows
        line = line | ~line.any(dim=1, keepdim=True)
        marks = line.to(torch.uint8)
        edges.append((marks.argmax(dim=1), line.shape[1] - marks.flip(1).argmax(dim=1)))
    (x0, x1), (y0, y1) = edges
    return torch.stack([x0, y0, x1, y1], dim=1).float()


def _area(boxes: Tensor) -> Tensor:
    return (boxes[:, 2:] - boxes[:, :2]).clamp(min=0).prod(dim=1)


def to_corners(boxes: Tensor) -> Tensor:
    """Convert boxes [..., 4] from centre x, centre y, width and height to x0 y0 x1 y1."""
    centre, half = boxes[..., :2], boxes[..., 2:] / 2
    return torch.cat([centre - half, centre + half], dim=-1)


def to_detections(
    selection: Selection, frame: Letterbox, phrases: Sequence[str], margins: Tensor | None = None
) -> list[Detection]:
    """Convert the selected boxes to detections in pixels of the frame, without empty boxes, in one copy to the host.

    margins: [n, 2], see `Detection`; NaN where there are none.
    """
    columns = [frame.to_frame(selection.boxes), selection.scores[:, None], selection.classes[:, None]]
    if margins is not None:
        columns.append(margins)
    rows = torch.cat(columns, dim=1).tolist()
    return [
        Detection(phrases[int(index)], score, (x0, y0, x1, y1), _finite(margin))
        for x0, y0, x1, y1, score, index, *margin in rows
        if x0 < x1 and y0 < y1
    ]


def _finite(margins: Sequence[float]) -> tuple[float | None, float | None]:
    look, thing = (None if math.isnan(value) else value for value in margins or (math.nan, math.nan))
    return look, thing
