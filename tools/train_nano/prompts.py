"""Prompts drawn from ground-truth masks, as users give them: a box, a point, a mask, a correcting click."""

from __future__ import annotations

import torch
from torch import Tensor

from .config import SIZE

INSIDE, CORNERS = 1, (2, 3)
JITTER = 0.05  # of a box's sides
CELL = 4  # px of the model's image a mask logit covers


def boxes(masks: Tensor, jitter: float = JITTER) -> tuple[Tensor, Tensor]:
    """Masks bool [N, 256, 256] -> corner points [N, 2, 2] in pixels and their labels int [N, 2]."""
    rows, columns = masks.any(dim=2), masks.any(dim=1)
    edges = []
    for line in (columns, rows):
        span = torch.arange(SIZE, device=masks.device)
        low = torch.where(line, span, SIZE).amin(dim=1)
        high = torch.where(line, span, -1).amax(dim=1) + 1
        edges.append(torch.stack([low, high], dim=1).float())
    corners = torch.stack(edges, dim=2)  # [N, (low, high), (x, y)]
    sides = (corners[:, 1] - corners[:, 0])[:, None]
    noisy = corners + torch.randn_like(corners) * jitter * sides
    labels = torch.tensor(CORNERS, dtype=torch.int32, device=masks.device).expand(len(masks), 2)
    return noisy.clamp(0, SIZE), labels


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
