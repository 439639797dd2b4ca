"""One forward of training: single frames with prompts and corrections, and clips through the memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .data import Batch
from .losses import EASE, Cost, cost, presence_of
from .network import Decoded, Features, Memory, TrainingTracker, hide, mask_logits
from .prompts import boxes, corrections, points

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
GIVEN = 1  # the candidate whose pointer stands for a mask given as prompt
KINDS = ("box", "point", "mask")


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
    both, labels = torch.cat([where[0], clicked], dim=1), torch.cat([where[1], inside], dim=1)
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
    Through a chain of eight or sixteen masks the median norm of gradients was up to 16 and 54 times that of single
    frames, see tools/train_nano/README.md.
    """
    frames = batch.images.shape[1]
    believed = torch.rand(len(batch.clip), device=batch.clip.device) < trust
    memories: list[Memory] = []
    costs = []
    for frame in range(frames):
        image = features.select(batch.clip * frames + frame)
        target = batch.masks[:, frame].float() / 255
        prompted, guidance = frame in (0, again), batch.images.new_zeros((), dtype=torch.float32)
        if prompted:
            decoded, logits, candidate = _prompted(net, image, batch, frame, kind if frame == 0 else "box")
        else:
            top = net.read(image.top, frame, memories)
            guidance = guide * _difference(net, top, image.top, target) if guide else guidance
            decoded, candidate = net.decode(image._replace(top=top), *net.nothing(len(top))), 0
            logits = decoded.logits[:, 0]
        found = cost(decoded, target, ease)
        costs.append(found._replace(loss=found.loss + len(target) * guidance))
        if not prompted:
            decoded, logits = Decoded(*(value.detach() for value in decoded)), logits.detach()
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
