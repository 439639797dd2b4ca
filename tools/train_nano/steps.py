"""One forward of training: single frames with prompts and corrections, and clips through the memory."""

from __future__ import annotations

import torch
from torch import Tensor

from .data import Batch
from .losses import Cost, cost, presence_of
from .network import Decoded, Features, Memory, TrainingTracker, hide, mask_logits
from .prompts import boxes, corrections, points

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
KINDS = ("box", "point", "mask")


def normalise(images: Tensor) -> Tensor:
    """uint8 [..., 256, 256, 3] RGB -> float32 [M, 3, 256, 256], as the package prepares frames for SAM 2."""
    pixels = images.flatten(0, -4).permute(0, 3, 1, 2).float() / 255
    mean, std = (pixels.new_tensor(value).view(1, 3, 1, 1) for value in (MEAN, STD))
    return (pixels - mean) / std


def frame_cost(net: TrainingTracker, batch: Batch, kind: str, ease: float = 0.0) -> list[Cost]:
    """Objects of single frames: prompted, then corrected by a click on the mask so far."""
    image = net.without_memory(net.encode(normalise(batch.images)).of(batch.clip))
    target = batch.masks[:, 0].float() / 255
    if kind == "mask":
        return [cost(net.mask_prompt(image, batch.first.float()), target, ease)]
    where = boxes(batch.first) if kind == "box" else points(batch.first)
    first = net.decode(image, *net.prompt(*where))
    logits = first.logits[:, 0].detach()
    click, label = corrections(logits, target)
    both = torch.cat([where[0], click], dim=1), torch.cat([where[1], label], dim=1)
    second = net.decode(image, *net.prompt(*both, logits))
    return [cost(first, target, ease), cost(second, target, ease)]


def clip_cost(net: TrainingTracker, batch: Batch, kind: str, trust: float, again: int = 0) -> list[Cost]:
    """Objects of clips: prompted on the first frame, then followed through the memory.

    trust: chance that an object is remembered as absent because the model says so, not because it is.
    again: a later frame on which the objects are prompted a second time; 0 for none.
    """
    frames = batch.images.shape[1]
    features = net.encode(normalise(batch.images))
    believed = torch.rand(len(batch.clip), device=batch.clip.device) < trust
    memories: list[Memory] = []
    costs = []
    for frame in range(frames):
        image = features.of(batch.clip * frames + frame)
        target = batch.masks[:, frame].float() / 255
        prompted = frame in (0, again)
        if prompted:
            decoded, logits, candidate = _prompted(net, image, batch, frame, kind if frame == 0 else "box")
        else:
            top = net.read(image.top, frame, memories)
            decoded, candidate = net.decode(image._replace(top=top), *net.nothing(len(top))), 0
            logits = decoded.logits[:, 0]
        costs.append(cost(decoded, target))
        present = torch.where(believed, decoded.presence > 0, presence_of(target)[0])
        logits = logits if prompted and kind == "mask" else hide(logits, present)
        memory = net.remember(image.top, logits, prompted, present)
        memories.append(Memory(frame, prompted, memory, net.pointer(decoded, candidate, present)))
    return costs


def _prompted(
    net: TrainingTracker, image: Features, batch: Batch, frame: int, kind: str
) -> tuple[Decoded, Tensor, int]:
    """What is decoded for a prompt, the mask logits to remember, and which candidate they are."""
    if kind == "mask":
        return net.mask_prompt(image, batch.first.float()), mask_logits(batch.first), 1
    mask = batch.first if frame == 0 else _enlarged(batch.masks[:, frame])
    where = boxes(mask) if kind == "box" else points(mask)
    decoded = net.decode(net.without_memory(image), *net.prompt(*where))
    return decoded, decoded.logits[:, 0], 0


def _enlarged(masks: Tensor) -> Tensor:
    return (masks > 127).repeat_interleave(4, dim=1).repeat_interleave(4, dim=2)


def second_prompt(batch: Batch, generator: torch.Generator) -> int:
    """A later frame on which every object of the batch is in view, 0 if there is none."""
    seen = (batch.masks > 127).flatten(2).any(dim=2).all(dim=0)
    frames = [i for i in range(1, len(seen)) if bool(seen[i])]
    return frames[int(torch.randint(len(frames), (1,), generator=generator))] if frames else 0
