"""Task-aligned assignment: which anchors learn which object (TOOD, arXiv 2108.07755)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sam3_node.models.yolo.config import STRIDES

ALPHA, BETA = 0.5, 6.0  # exponents of the score and of the IoU in the alignment
CANDIDATES = 10  # anchors an object has at most


class Assignment(NamedTuple):
    """Which object each of A anchors learns in B pictures.

    weight: [B, A], 0 for anchors that learn none, otherwise how well aligned one is, up to its object's best IoU.
    boxes: [B, A, 4], of the object, anything where there is none. scores: [B, A, K], what the similarities shall be.
    """

    weight: Tensor
    boxes: Tensor
    scores: Tensor


@torch.no_grad()
def assign(scores: Tensor, predicted: Tensor, centres: Tensor, boxes: Tensor, fits: Tensor) -> Assignment:
    """From scores [B, A, K], predicted boxes [B, A, 4], anchors' centres [A, 2], true boxes [B, G, 4], fits [B, G, K].

    Objects that no phrase fits are left to the background. An object's score is the mean over the phrases that fit it.
    """
    asked = fits.float()
    score = asked @ scores.transpose(1, 2) / asked.sum(dim=2, keepdim=True).clamp(min=1)  # [B, G, A]
    iou = _iou(boxes, predicted)
    allowed = _inside(boxes, centres) & fits.any(dim=2)[..., None]
    metric = score.pow(ALPHA) * iou.pow(BETA) * allowed
    taken = _best(metric) & allowed
    object_of = torch.where(taken, iou, -1.0).argmax(dim=1)  # [B, A], the one with the best IoU of several
    taken = taken & torch.zeros_like(taken).scatter_(1, object_of[:, None], True)
    weight = _normalised(metric * taken, iou * taken).amax(dim=1)
    index = object_of[..., None]
    wanted = fits.gather(1, index.expand(-1, -1, fits.shape[2])) * weight[..., None]
    return Assignment(weight, boxes.gather(1, index.expand(-1, -1, 4)), wanted)


def _best(metric: Tensor) -> Tensor:
    """The best candidates of each object, [B, G, A] bool."""
    index = metric.topk(min(CANDIDATES, metric.shape[2]), dim=2).indices
    return torch.zeros_like(metric, dtype=torch.bool).scatter_(2, index, True)


def _normalised(metric: Tensor, iou: Tensor) -> Tensor:
    """Scaled so that an object's best anchor has its best IoU."""
    best = metric.amax(dim=2, keepdim=True).clamp(min=torch.finfo(metric.dtype).tiny)
    return metric / best * iou.amax(dim=2, keepdim=True)


def _inside(boxes: Tensor, centres: Tensor) -> Tensor:
    """Which anchors [B, G, A] lie in a box, one of small sides widened so that it holds an anchor."""
    middle, size = (boxes[..., :2] + boxes[..., 2:]) / 2, boxes[..., 2:] - boxes[..., :2]
    reach = (size / 2).clamp(min=STRIDES[0] / 2)
    return ((centres - middle[:, :, None]).abs() <= reach[:, :, None]).all(dim=3)


def _iou(first: Tensor, second: Tensor) -> Tensor:
    """[B, G, 4] and [B, A, 4] -> [B, G, A]."""
    low = torch.maximum(first[:, :, None, :2], second[:, None, :, :2])
    high = torch.minimum(first[:, :, None, 2:], second[:, None, :, 2:])
    common = (high - low).clamp(min=0).prod(dim=3)
    areas = [(boxes[..., 2:] - boxes[..., :2]).clamp(min=0).prod(dim=2) for boxes in (first, second)]
    return common / (areas[0][:, :, None] + areas[1][:, None] - common).clamp(min=1e-6)
