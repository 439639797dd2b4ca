"""Run one forward of training: single frames with prompts and corrections, and clips through the memory.

Prompts are drawn from ground-truth masks, as users give them. Losses are cross entropy and dice against the covered
share of each cell, and the losses of the IoU and presence heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .data import Batch
from .network import SIZE, Decoded, Features, Memory, TrainingTracker, hide, mask_logits

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
GIVEN = 1  # the candidate whose pointer stands for a mask given as prompt
KINDS = ("box", "point", "mask")
MIN_CELLS = 1.0  # cells an object covers to count as present; slivers below count neither way
EASE = 0.25  # of the outside's weight; 0.5 left doubtful masks too wide, 0 shrinks them to nothing at first
ABSENT = 6.0  # weight of presence where an object is hidden, which few training frames show
BACKGROUND = 32.0  # cells, so that a small object's cross entropy is not all that matters
INSIDE = 1
CORNERS = (2, 3)
JITTER = 0.05  # of a box's sides
CELL = 4  # px of the model's image a mask logit covers


def normalise(images: Tensor) -> Tensor:
    """uint8 [..., 256, 256, 3] RGB -> float32 [M, 3, 256, 256], as the package prepares frames for SAM 2."""
    pixels = images.flatten(0, -4).permute(0, 3, 1, 2).float() / 255
    mean, std = (pixels.new_tensor(value).view(1, 3, 1, 1) for value in (MEAN, STD))
    return (pixels - mean) / std


def frame_costs(
    net: TrainingTracker,
    features: Features,
    batch: Batch,
    kinds: Sequence[str] = KINDS,
    ease: float = EASE,
    corrected: bool = True,
) -> dict[str, list[Cost]]:
    """Objects on the first frames, whose `features` have a row an object, prompted by each kind.

    A box and a point are then corrected by a click on the mask so far, unless `corrected` is False.
    """
    target = batch.masks[:, 0].float() / 255
    costs = {}
    for kind in kinds:
        if kind == "mask":
            costs[kind] = [cost(net.mask_prompt(features, batch.first.float()), target, ease)]
        else:
            where = boxes(batch.first) if kind == "box" else points(batch.first)
            costs[kind] = _corrected(net, net.without_memory(features), where, target, ease, corrected)
    return costs


def _corrected(
    net: TrainingTracker,
    image: Features,
    where: tuple[Tensor, Tensor],
    target: Tensor,
    ease: float,
    corrected: bool,
) -> list[Cost]:
    first = net.decode(image, *net.prompt(*where))
    if not corrected:
        return [cost(first, target, ease)]
    logits = first.logits[:, 0].detach()
    clicked, inside = corrections(logits, target)
    both = torch.cat([where[0], clicked], dim=1)
    labels = torch.cat([where[1], inside], dim=1)
    second = net.decode(image, *net.prompt(both, labels, logits))
    return [cost(first, target, ease), cost(second, target, ease)]


def clip_cost(
    net: TrainingTracker,
    features: Features,
    batch: Batch,
    kind: str,
    trust: float,
    again: int = 0,
    ease: float = EASE,
    guide: float = 0.0,
) -> list[Cost]:
    """Objects of clips: prompted on the first frame, then followed through the memory; a cost for each frame.

    features: of all frames, [B * T, ...].
    trust: chance that an object is remembered as absent because the model says so, not because it is.
    guide: weight of the difference between what the memory read hands on and what a mask prompt would have: without it
    the memory takes far longer to be of use, as its gradient comes through the decoder alone.
    again: a later frame on which the objects are prompted a second time; 0 for none.

    A frame's loss reaches the writing of memories, but not, through a followed frame's mask, the frames before it.
    Through a chain of eight or sixteen masks the median norm of gradients was up to 16 and 54 times the norm on single
    frames.
    """
    frames = batch.images.shape[1]
    believed = torch.rand(len(batch.clip), device=batch.clip.device) < trust
    memories: list[Memory] = []
    costs = []
    for frame in range(frames):
        image = features.select(batch.clip * frames + frame)
        target = batch.masks[:, frame].float() / 255
        prompted = frame in (0, again)
        guidance = batch.images.new_zeros((), dtype=torch.float32)
        if prompted:
            decoded, logits, candidate = _prompted(net, image, batch, frame, kind if frame == 0 else "box")
        else:
            top = net.read(image.top, frame, memories)
            guidance = guide * _difference(net, top, image.top, target) if guide else guidance
            decoded = net.decode(image._replace(top=top), *net.nothing(len(top)))
            candidate = 0
            logits = decoded.logits[:, 0]
        found = cost(decoded, target, ease)
        costs.append(found._replace(loss=found.loss + len(target) * guidance))
        if not prompted:
            decoded = Decoded(*(value.detach() for value in decoded))
            logits = logits.detach()
        if candidate == GIVEN:
            present = batch.first.flatten(1).any(dim=1)
        else:
            present = torch.where(believed, decoded.presence > 0, presence_of(target)[0])
            logits = hide(logits, present)
        memory = net.remember(image.top, logits, prompted, present)
        memories.append(Memory(frame, prompted, memory, net.pointer(decoded, candidate, present)))
    return costs


def _difference(net: TrainingTracker, read: Tensor, top: Tensor, target: Tensor) -> Tensor:
    """Mean square difference to the features of a mask prompt, in units of what the prompt adds to them."""
    with torch.no_grad():
        wanted = net.as_if_told(top, target)
        scale = (wanted - top).square().mean()
    return (read - wanted).square().mean() / scale


def _prompted(
    net: TrainingTracker, image: Features, batch: Batch, frame: int, kind: str
) -> tuple[Decoded, Tensor, int]:
    """Decode a prompt. Return the output, the mask logits to remember, and the index of their candidate."""
    if kind == "mask":
        return net.mask_prompt(image, batch.first.float()), mask_logits(batch.first), GIVEN
    mask = batch.first if frame == 0 else _enlarged(batch.masks[:, frame])
    where = boxes(mask) if kind == "box" else points(mask)
    decoded = net.decode(net.without_memory(image), *net.prompt(*where))
    return decoded, decoded.logits[:, 0], 0


def _enlarged(masks: Tensor) -> Tensor:
    return (masks > 127).repeat_interleave(4, dim=1).repeat_interleave(4, dim=2)


def second_prompt(batch: Batch, rng: np.random.Generator) -> int:
    """A later frame on which every object of the batch is in view, 0 if there is none."""
    seen = (batch.masks > 127).flatten(2).any(dim=2).all(dim=0)
    frames = [i for i in range(1, len(seen)) if bool(seen[i])]
    return frames[int(rng.integers(len(frames)))] if frames else 0


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
    predicted = logits.detach() > 0
    wanted = (target > 0.5)[:, None]
    union = (predicted | wanted).flatten(2).sum(dim=2)
    return (predicted & wanted).flatten(2).sum(dim=2) / union.clamp(min=1)


def _cross_entropy(logits: Tensor, target: Tensor, ease: float) -> Tensor:
    """Inside and outside weigh alike near the outline.

    With `ease` 1 the outside weighs as much as the inside in all: at first, when everything far from the prompt is
    still wrong, it would otherwise teach that there is nothing anywhere.
    """
    each = F.binary_cross_entropy_with_logits(logits, target[:, None].expand_as(logits), reduction="none")
    area = target.flatten(1).sum(dim=1)[:, None, None, None]
    inside = 1 / (area + BACKGROUND)
    outside = 1 / (target[0].numel() - area + BACKGROUND)
    weight = torch.where(target[:, None] > 0, inside, outside**ease * inside ** (1 - ease))
    return (each * weight).flatten(2).sum(dim=2)


def _dice(logits: Tensor, target: Tensor) -> Tensor:
    chance = logits.sigmoid().flatten(2)
    wanted = target.flatten(1)[:, None]
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


def boxes(masks: Tensor, jitter: float = JITTER) -> tuple[Tensor, Tensor]:
    """Masks bool [N, 256, 256] -> corner points [N, 2, 2] in pixels and their labels int [N, 2]."""
    corners = corners_of(masks)
    sides = (corners[:, 1] - corners[:, 0])[:, None]
    noisy = corners + torch.randn_like(corners) * jitter * sides
    labels = torch.tensor(CORNERS, dtype=torch.int32, device=masks.device).expand(len(masks), 2)
    return noisy.clamp(0, SIZE), labels


def corners_of(masks: Tensor) -> Tensor:
    """Masks bool [N, h, h] -> the corners [N, (low, high), (x, y)] of their tight boxes, in pixels of the masks."""
    side = masks.shape[-1]
    span = torch.arange(side, device=masks.device)
    edges = []
    for line in (masks.any(dim=1), masks.any(dim=2)):
        low = torch.where(line, span, side).amin(dim=1)
        high = torch.where(line, span, -1).amax(dim=1) + 1
        edges.append(torch.stack([low, high], dim=1))
    return torch.stack(edges, dim=2).float()


def points(masks: Tensor) -> tuple[Tensor, Tensor]:
    """Masks bool [N, 256, 256] -> one point inside each [N, 1, 2] and its label int [N, 1].

    Half of them anywhere in the mask, half well inside it.
    """
    depth = _depth(masks)
    deep = masks & (depth >= 0.6 * depth.amax(dim=(1, 2), keepdim=True))
    pick = torch.rand(len(masks), 1, 1, device=masks.device) < 0.5
    chosen = _any_of(torch.where(pick, masks, deep).flatten(1))
    return _place(chosen, SIZE, 1), _labels(masks, INSIDE)


def corrections(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A click where a mask is most wrong: logits [N, 64, 64], target 0..1 -> points [N, 1, 2], labels int [N, 1].

    The click lies deepest in the wrong region; it says inside where the object was missed.
    """
    wrong = (logits > 0) != (target > 0.5)
    depth = _depth(wrong) + 1e-3 * torch.rand_like(target)
    chosen = depth.flatten(1).argmax(dim=1)
    inside = (target > 0.5).flatten(1).gather(1, chosen[:, None]).int()
    return _place(chosen, logits.shape[-1], CELL), inside


def _any_of(allowed: Tensor) -> Tensor:
    """The index [N] of one place of each row of bool [N, n], any as likely as another; a row may not be empty."""
    count = allowed.cumsum(dim=1, dtype=torch.int32)
    wanted = torch.rand(len(allowed), 1, device=allowed.device) * count[:, -1:]
    return torch.searchsorted(count, wanted.int() + 1)[:, 0].clamp(max=allowed.shape[1] - 1)


def _depth(masks: Tensor, rounds: int = 6) -> Tensor:
    """Return the depth of each pixel in its mask, in erosions by 3x3, at most `rounds`; masks bool [N, h, w]."""
    depth = masks.float()
    for _ in range(rounds):
        masks = _eroded(masks)
        depth += masks
    return depth


def _eroded(masks: Tensor) -> Tensor:
    """Without the pixels that have a neighbour outside; beyond the image all counts as inside."""
    for axis in (1, 2):
        last = masks.shape[axis] - 1
        kept = masks.clone()
        kept.narrow(axis, 1, last).logical_and_(masks.narrow(axis, 0, last))
        kept.narrow(axis, 0, last).logical_and_(masks.narrow(axis, 1, last))
        masks = kept
    return masks


def _place(flat: Tensor, side: int, cell: int) -> Tensor:
    xy = torch.stack([flat % side, flat // side], dim=-1).float()
    return ((xy + 0.5) * cell)[:, None]


def _labels(masks: Tensor, value: int) -> Tensor:
    return torch.full((len(masks), 1), value, dtype=torch.int32, device=masks.device)
