"""Losses for similarities, boxes and their distributions, as in YOLO-World (arXiv 2401.17270)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from sam3_node.models.yolo.network import Predictions

from .assignment import assign

SIMILARITY, BOX, DISTRIBUTION = 0.5, 7.5, 1.5  # weights
TINY = 1e-7


def losses(predictions: Predictions, boxes: Tensor, fits: Tensor) -> dict[str, Tensor]:
    """Return the weighted terms, and `iou`, the mean IoU of the assigned boxes; boxes [B, G, 4], fits [B, G, K]."""
    predicted = predictions.boxes()
    chosen = assign(
        predictions.logits.detach().sigmoid(), predicted.detach(), predictions.centres, boxes, fits
    )
    similarity = F.binary_cross_entropy_with_logits(predictions.logits, chosen.scores, reduction="sum")
    similarity = similarity / chosen.scores.sum().clamp(min=1)
    at = chosen.weight > 0
    weight = chosen.weight[at] / chosen.weight.sum().clamp(min=1)
    overlap, complete = complete_iou(predicted[at], chosen.boxes[at])
    distances = _distances(predictions, chosen.boxes)[at]
    spread = focal(predictions.distributions[at], distances).mean(dim=1)
    return {
        "similarity": SIMILARITY * similarity,
        "box": BOX * ((1 - complete) * weight).sum(),
        "distribution": DISTRIBUTION * (spread * weight).sum(),
        "iou": (overlap.detach() * weight).sum(),
    }


def complete_iou(predicted: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
    """Return IoU and complete IoU (arXiv 1911.08287), [n] each, of boxes [n, 4] with boxes [n, 4]."""
    low, high = torch.maximum(predicted[:, :2], true[:, :2]), torch.minimum(predicted[:, 2:], true[:, 2:])
    common = (high - low).clamp(min=0).prod(dim=1)
    sizes = [boxes[:, 2:] - boxes[:, :2] for boxes in (predicted, true)]
    iou = common / (sizes[0].prod(dim=1) + sizes[1].prod(dim=1) - common + TINY)
    hull = torch.maximum(predicted[:, 2:], true[:, 2:]) - torch.minimum(predicted[:, :2], true[:, :2])
    apart = (predicted[:, :2] + predicted[:, 2:] - true[:, :2] - true[:, 2:]).square().sum(dim=1) / 4
    angles = [torch.atan2(size[:, 0], size[:, 1] + TINY) for size in sizes]
    shape = (4 / math.pi**2) * (angles[1] - angles[0]).square()
    with torch.no_grad():
        trade = shape / (1 - iou + shape + TINY)
    return iou, iou - apart / (hull.square().sum(dim=1) + TINY) - trade * shape


def focal(logits: Tensor, distances: Tensor) -> Tensor:
    """Return the distribution focal loss [n, 4] (arXiv 2006.04388) of logits [n, 4, bins]; distances [n, 4] in bins."""
    below = distances.floor().clamp(max=logits.shape[-1] - 2)
    share = distances - below
    logs = logits.log_softmax(dim=-1)
    left = logs.gather(2, below.long()[..., None])[..., 0]
    right = logs.gather(2, below.long()[..., None] + 1)[..., 0]
    return -(left * (1 - share) + right * share)


def _distances(predictions: Predictions, boxes: Tensor) -> Tensor:
    """Return the distances [B, A, 4] of box sides [B, A, 4] from the anchors in strides, limited to the bins' range."""
    sides = torch.cat([predictions.centres - boxes[..., :2], boxes[..., 2:] - predictions.centres], dim=-1)
    max_bin = predictions.distributions.shape[-1] - 1.01
    return (sides / predictions.strides[:, None]).clamp(0, max_bin)
