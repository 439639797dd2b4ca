"""From a frame to a detector's square and back, and the choice among overlapping boxes (x0 y0 x1 y1)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from .pixels import resized

GREY = 114 / 255  # what the public weights were trained with around the picture
CANDIDATES = 1000  # boxes that may compete, the best ones


class Letterbox(NamedTuple):
    """Where a frame lies in the network's input: resized by `ratio` (x, y), then moved by `offset` (x, y) pixels."""

    width: int
    height: int
    ratio: tuple[float, float]
    offset: tuple[int, int]

    def to_frame(self, boxes: Tensor) -> Tensor:
        """Boxes [..., 4] in pixels of the network's input -> in pixels of the frame, clipped to it."""
        ratio, offset = boxes.new_tensor(self.ratio * 2), boxes.new_tensor(self.offset * 2)
        edge = boxes.new_tensor((self.width, self.height) * 2)
        return torch.minimum(((boxes - offset) / ratio).clamp(min=0), edge)


def letterbox(
    image: npt.NDArray[np.uint8],
    size: int | tuple[int, int],
    *,
    device: str | torch.device = "cpu",
    rgb: bool = False,
) -> tuple[Tensor, Letterbox]:
    """Fit a BGR (or RGB) uint8 frame [h, w, 3] into (H, W), or a square, its proportions kept, grey around it.

    Returns RGB pixels [1, 3, H, W], float32 in 0..1 on the device, and the way back.
    """
    high, wide = (size, size) if isinstance(size, int) else size
    height, width = image.shape[:2]
    scale = min(high / height, wide / width)
    rows, columns = max(1, round(height * scale)), max(1, round(width * scale))
    top, left = (high - rows) // 2, (wide - columns) // 2
    pixels = resized(image, (rows, columns), device, rgb=rgb)
    pixels = F.pad(pixels, (left, wide - columns - left, top, high - rows - top), value=GREY)
    return pixels, Letterbox(width, height, (columns / width, rows / height), (left, top))


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
    index = index[best[index].argsort(descending=True, stable=True)[:CANDIDATES]]
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
