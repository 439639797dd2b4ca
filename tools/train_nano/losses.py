"""Losses of decoded masks: cross entropy and dice against the covered share of each cell, IoU and presence heads."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .network import Decoded

MIN_CELLS = 1.0  # cells an object covers to count as present; slivers below count neither way
EASE = (
    0.25  # of the outside's weight; 0.5 left masks in doubt too wide, 0 lets them shrink to nothing at first
)
ABSENT = (
    6.0  # weight of presence where an object is hidden: of the frames that are trained on few are without it
)
BACKGROUND = 32.0  # cells, so that a small object's cross entropy is not all that matters


class Cost(NamedTuple):
    """Sums over objects: loss (a scalar with gradient), IoU of the first candidate, visible objects, presence right."""

    loss: Tensor
    iou: Tensor
    visible: Tensor
    right: Tensor
    objects: int


def presence_of(target: Tensor) -> tuple[Tensor, Tensor]:
    """Masks [N, 64, 64] in 0..1 -> present bool [N], absent bool [N]; a sliver is neither."""
    area = target.flatten(1).sum(dim=1)
    return area >= MIN_CELLS, area == 0


def cost(decoded: Decoded, target: Tensor, ease: float = EASE) -> Cost:
    """The cost of N decoded objects, target [N, 64, 64] in 0..1."""
    present, absent = presence_of(target)
    weight = present.float()
    masks = (_cross_entropy(decoded.logits, target, ease) + _dice(decoded.logits, target)).mean(dim=1)
    iou = overlap(decoded.logits, target)
    quality = F.mse_loss(decoded.iou, iou, reduction="none").mean(dim=1)
    told = F.binary_cross_entropy_with_logits(decoded.presence, weight, reduction="none")
    known = (present | absent).float()
    loss = (weight * (masks + quality)).sum() + ((weight + ABSENT * absent.float()) * told).sum()
    right = (known * ((decoded.presence > 0) == present)).sum() + (1 - known).sum()
    return Cost(loss, (weight * iou[:, 0]).sum().detach(), weight.sum(), right, len(target))


def overlap(logits: Tensor, target: Tensor) -> Tensor:
    """IoU [N, K] of masks [N, K, 64, 64] with target [N, 64, 64], at one half."""
    predicted, wanted = logits.detach() > 0, (target > 0.5)[:, None]
    union = (predicted | wanted).flatten(2).sum(dim=2)
    return (predicted & wanted).flatten(2).sum(dim=2) / union.clamp(min=1)


def _cross_entropy(logits: Tensor, target: Tensor, ease: float) -> Tensor:
    """Inside and outside weigh alike near the outline.

    With `ease` 1 the outside weighs as much as the inside in all: at first, when everything far from the prompt is
    still wrong, it would otherwise teach that there is nothing anywhere.
    """
    each = F.binary_cross_entropy_with_logits(logits, target[:, None].expand_as(logits), reduction="none")
    area = target.flatten(1).sum(dim=1)[:, None, None, None]
    inside, outside = 1 / (area + BACKGROUND), 1 / (target[0].numel() - area + BACKGROUND)
    weight = torch.where(target[:, None] > 0, inside, outside**ease * inside ** (1 - ease))
    return (each * weight).flatten(2).sum(dim=2)


def _dice(logits: Tensor, target: Tensor) -> Tensor:
    chance, wanted = logits.sigmoid().flatten(2), target.flatten(1)[:, None]
    shared = (chance * wanted).sum(dim=2)
    return 1 - (2 * shared + 1) / (chance.sum(dim=2) + wanted.sum(dim=2) + 1)


def total(costs: list[Cost]) -> tuple[Tensor, dict[str, float]]:
    """The mean loss over object-frames, and the mean IoU and share of right presence for the log."""
    objects = sum(item.objects for item in costs)
    loss = torch.stack([item.loss for item in costs]).sum() / objects
    visible = sum(float(item.visible) for item in costs)
    iou = sum(float(item.iou) for item in costs) / max(1.0, visible)
    return loss, {
        "loss": float(loss.detach()),
        "iou": iou,
        "presence": sum(float(c.right) for c in costs) / objects,
    }
