"""Losses for similarities, boxes and their distributions, as in YOLO-World (arXiv 2401.17270).

Objects are assigned to anchors by the task (TOOD, arXiv 2108.07755).
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sam3_node.models.yolo.network import STRIDES, Predictions

# weights
SIMILARITY = 0.5
BOX = 7.5
DISTRIBUTION = 1.5
TINY = 1e-7
ALPHA = 0.5  # exponent of the score in the alignment
BETA = 6.0  # exponent of the IoU
CANDIDATES = 10  # anchors an object has at most


def losses(predictions: Predictions, boxes: Tensor, fits: Tensor) -> dict[str, Tensor]:
    """Return the weighted terms, and `iou`, the mean IoU of the assigned boxes; boxes [B, G, 4], fits [B, G, K]."""
    predicted = predictions.boxes()
    scores = predictions.logits.detach().sigmoid()
    chosen = assign(scores, predicted.detach(), predictions.centres, boxes, fits)
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
    low = torch.maximum(predicted[:, :2], true[:, :2])
    high = torch.minimum(predicted[:, 2:], true[:, 2:])
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


class Assignment(NamedTuple):
    """The object that each of A anchors learns in B pictures.

    weight: [B, A], the alignment of an anchor with its object, at most the object's best IoU; 0 without an object.
    boxes: [B, A, 4], the object's, arbitrary without an object. scores: [B, A, K], targets of the similarities.
    """

    weight: Tensor
    boxes: Tensor
    scores: Tensor


@torch.no_grad()
def assign(scores: Tensor, predicted: Tensor, centres: Tensor, boxes: Tensor, fits: Tensor) -> Assignment:
    """Assign objects to anchors.

    scores [B, A, K] and predicted boxes [B, A, 4] are the network's, centres [A, 2] the anchors', boxes [B, G, 4] the
    objects'; fits [B, G, K] marks the phrases that describe an object. Objects that no phrase fits are background. An
    object's score is the mean over the phrases that fit it.
    """
    fitting = fits.float()
    score = fitting @ scores.transpose(1, 2) / fitting.sum(dim=2, keepdim=True).clamp(min=1)  # [B, G, A]
    iou = _iou(boxes, predicted)
    allowed = _inside(boxes, centres) & fits.any(dim=2)[..., None]
    metric = score.pow(ALPHA) * iou.pow(BETA) * allowed
    taken = _best(metric) & allowed
    best_object = torch.where(taken, iou, -1.0).argmax(dim=1)  # [B, A], the object with the best IoU
    taken = taken & torch.zeros_like(taken).scatter_(1, best_object[:, None], True)
    weight = _normalised(metric * taken, iou * taken).amax(dim=1)
    index = best_object[..., None]
    target = fits.gather(1, index.expand(-1, -1, fits.shape[2])) * weight[..., None]
    return Assignment(weight, boxes.gather(1, index.expand(-1, -1, 4)), target)


def _best(metric: Tensor) -> Tensor:
    """Return the best candidates of each object, bool [B, G, A]."""
    index = metric.topk(min(CANDIDATES, metric.shape[2]), dim=2).indices
    return torch.zeros_like(metric, dtype=torch.bool).scatter_(2, index, True)


def _normalised(metric: Tensor, iou: Tensor) -> Tensor:
    """Scale the metric so that an object's best anchor has the object's best IoU."""
    best = metric.amax(dim=2, keepdim=True).clamp(min=torch.finfo(metric.dtype).tiny)
    return metric / best * iou.amax(dim=2, keepdim=True)


def _inside(boxes: Tensor, centres: Tensor) -> Tensor:
    """Return the anchors [B, G, A] inside each box; a box of small sides is widened so that it holds an anchor."""
    middle = (boxes[..., :2] + boxes[..., 2:]) / 2
    size = boxes[..., 2:] - boxes[..., :2]
    reach = (size / 2).clamp(min=STRIDES[0] / 2)
    return ((centres - middle[:, :, None]).abs() <= reach[:, :, None]).all(dim=3)


def _iou(first: Tensor, second: Tensor) -> Tensor:
    """Return the IoU [B, G, A] of boxes [B, G, 4] with boxes [B, A, 4]."""
    low = torch.maximum(first[:, :, None, :2], second[:, None, :, :2])
    high = torch.minimum(first[:, :, None, 2:], second[:, None, :, 2:])
    common = (high - low).clamp(min=0).prod(dim=3)
    areas = [(boxes[..., 2:] - boxes[..., :2]).clamp(min=0).prod(dim=2) for boxes in (first, second)]
    return common / (areas[0][:, :, None] + areas[1][:, None] - common).clamp(min=1e-6)
