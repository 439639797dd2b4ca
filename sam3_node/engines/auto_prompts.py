"""Prompts for the gate's clip where nobody has prompted: the objects that a tracker segments with confidence."""

from __future__ import annotations

import torch
from torch import Tensor

from ..models import TrackerModel
from ..models.sam.stages import Decoded
from ..tracking import ObjectPrompt, Tracker
from ..tracking.association import mask_iou

MAX_PROMPTS = 4
CELLS = 6  # boxes lie around the centres of 6 x 6 cells
BOX_SIDES = (0.15, 0.3)  # as fractions of the image's side
THRESHOLD_SHIFT = 1.0  # logits by which a mask's threshold moves to test its stability
MIN_AREA, MAX_AREA = 0.002, 0.4  # as fractions of the image
SAME_IOU = 0.5


@torch.inference_mode()
def find_confident_prompts(
    model: TrackerModel, pixels: Tensor, max_prompts: int = MAX_PROMPTS
) -> list[ObjectPrompt]:
    """Return a box prompt for each of up to `max_prompts` objects on one frame, pixels [1, 3, S, S], the surest first.

    The function tries a grid of boxes. An object is sure if it has a high score (presence probability times predicted
    IoU) and a stable mask, which hardly changes if its threshold moves; SAM's mask generator uses the same test (arXiv
    2304.02643, sec. 5). Masks of medium size come before others.
    """
    features, tracker = model.encode(pixels), Tracker(model, 1)
    batches = torch.split(grid_boxes(model.image_size), model.batch_size)
    proposals = [tracker.propose(features, boxes) for boxes in batches]
    decoded = Decoded(*(torch.cat(parts).float() for parts in zip(*proposals, strict=True)))
    masks = decoded.logits > 0
    rows = _select_distinct(masks, _compute_sureness(decoded), max_prompts)
    scale = model.image_size / masks.shape[-1]
    return [ObjectPrompt(number, box=_bound_mask(masks[row], scale)) for number, row in enumerate(rows, 1)]


def grid_boxes(side: int) -> Tensor:
    """Make boxes [D, 4] (x0, y0, x1, y1) over a square of `side` pixels."""
    centre = (torch.arange(CELLS) + 0.5) * side / CELLS
    y, x = torch.meshgrid(centre, centre, indexing="ij")
    middle = torch.stack([x, y], dim=-1).reshape(-1, 2)
    halves = [fraction * side / 2 for fraction in BOX_SIDES]
    return torch.cat([torch.cat([middle - half, middle + half], dim=1) for half in halves]).clamp(0, side)


def _compute_sureness(decoded: Decoded) -> Tensor:
    """Return how sure each mask is [D]: score times stability, less 1 for very small and very large masks."""
    score = decoded.presence.sigmoid() * decoded.iou
    sizes = [(decoded.logits > shift).flatten(1).sum(1) for shift in (THRESHOLD_SHIFT, -THRESHOLD_SHIFT)]
    area = (decoded.logits > 0).flatten(1).float().mean(1)
    unusual = (area < MIN_AREA) | (area > MAX_AREA)
    return score * sizes[0] / sizes[1].clamp(min=1) - unusual.float()


def _select_distinct(masks: Tensor, sureness: Tensor, max_count: int) -> list[int]:
    """Return rows of the surest masks [D, h, w] that are not empty and differ from those selected before."""
    selected: list[int] = []
    for row in sureness.argsort(descending=True).tolist():
        if len(selected) == max_count:
            break
        overlap = mask_iou(masks[row : row + 1], masks[selected])
        if masks[row].any() and bool((overlap < SAME_IOU).all()):
            selected.append(row)
    return selected


def _bound_mask(mask: Tensor, scale: float) -> list[float]:
    """Return the tight box of a mask [h, w], its coordinates multiplied by `scale`."""
    rows, columns = mask.any(1).nonzero()[:, 0], mask.any(0).nonzero()[:, 0]
    x0, y0, x1, y1 = columns[0], rows[0], columns[-1] + 1, rows[-1] + 1
    return [float(edge) * scale for edge in (x0, y0, x1, y1)]
