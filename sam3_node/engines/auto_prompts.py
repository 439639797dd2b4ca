"""Objects to judge engines by, where nobody has pointed at any: what a tracker segments with confidence."""

from __future__ import annotations

import torch
from torch import Tensor

from ..models import TrackerModel
from ..models.sam.stages import Decoded
from ..tracking import ObjectPrompt, Tracker

MOST = 4
CELLS, SIDES = 6, (0.15, 0.3)  # boxes around the centres of 6 x 6 cells, sides as parts of the image's
STABILITY = 1.0  # how far the threshold of a mask is moved, in logits
MIN_AREA, MAX_AREA = 0.002, 0.4  # of the image
SAME_IOU = 0.5


@torch.inference_mode()
def confident_prompts(model: TrackerModel, pixels: Tensor, most: int = MOST) -> list[ObjectPrompt]:
    """A box around each of up to `most` things on one frame, pixels [1, 3, S, S], the surest first.

    A grid of boxes is tried. Sure is what has a high score (presence probability times predicted IoU) and a stable
    mask, one that a moved threshold hardly changes, as SAM's mask generator asks (arXiv 2304.02643, sec. 5). Masks of
    middling size come before others.
    """
    features, tracker = model.encode(pixels), Tracker(model, 1)
    boxes = grid_boxes(model.image_size)
    found = [tracker.propose(features, part) for part in boxes.split(model.batch_size)]
    decoded = Decoded(*(torch.cat(parts).float() for parts in zip(*found, strict=True)))
    masks = decoded.logits > 0
    chosen = _distinct(masks, _sureness(decoded), most)
    scale = model.image_size / masks.shape[-1]
    return [ObjectPrompt(number, box=_box(masks[row], scale)) for number, row in enumerate(chosen, 1)]


def grid_boxes(side: int) -> Tensor:
    """Boxes [D, 4] (x0, y0, x1, y1) over a square of `side` pixels."""
    centre = (torch.arange(CELLS) + 0.5) * side / CELLS
    y, x = torch.meshgrid(centre, centre, indexing="ij")
    middle = torch.stack([x, y], dim=-1).reshape(-1, 2)
    halves = [part * side / 2 for part in SIDES]
    return torch.cat([torch.cat([middle - half, middle + half], dim=1) for half in halves]).clamp(0, side)


def _sureness(decoded: Decoded) -> Tensor:
    """[D]; lower by 1 where the mask is nearly nothing or nearly everything."""
    score = decoded.presence.sigmoid() * decoded.iou
    sizes = [(decoded.logits > moved).flatten(1).sum(1) for moved in (STABILITY, -STABILITY)]
    area = (decoded.logits > 0).flatten(1).float().mean(1)
    unusual = (area < MIN_AREA) | (area > MAX_AREA)
    return score * sizes[0] / sizes[1].clamp(min=1) - unusual.float()


def _distinct(masks: Tensor, sureness: Tensor, most: int) -> list[int]:
    """Rows of the surest masks [D, h, w] that are not empty, each unlike those before it."""
    chosen: list[int] = []
    for row in sureness.argsort(descending=True).tolist():
        fresh = all(mask_iou(masks[row], masks[other]) < SAME_IOU for other in chosen)
        if len(chosen) < most and fresh and masks[row].any():
            chosen.append(row)
    return chosen


def mask_iou(first: Tensor, second: Tensor) -> float:
    """IoU of two bool masks; 1 where both are empty."""
    union = (first | second).sum().item()
    return (first & second).sum().item() / union if union else 1.0


def _box(mask: Tensor, scale: float) -> list[float]:
    """The tight box of a mask [h, w], in pixels that are 1 / scale as large."""
    rows, columns = mask.any(1).nonzero()[:, 0], mask.any(0).nonzero()[:, 0]
    x0, y0, x1, y1 = columns[0], rows[0], columns[-1] + 1, rows[-1] + 1
    return [float(edge) * scale for edge in (x0, y0, x1, y1)]
