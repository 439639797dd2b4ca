"""Which detection is which object: overlap of masks and boxes, appearance, and the best assignment of all at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from ..models.boxes import box_iou

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class Comparison(NamedTuple):
    """T objects and D detections, the best first, on one frame; on the host.

    mask_iou and box_iou [T, D]: of an object's mask as tracked, and its box, with those of a detection; 0 where the
    object is hidden. likeness [T, D]: the cosine, at most 1, of the detection's object pointer and the most similar one
    that the object was prompted with. twins [T, T] and repeats [D, D]: mask IoU among objects and among detections.
    """

    mask_iou: Floats
    box_iou: Floats
    likeness: Floats
    twins: Floats
    repeats: Floats


@dataclass(frozen=True, slots=True)
class Rules:
    """same: IoU of masks, or the mean of it and that of boxes, from which on a detection is what is tracked there.
    label: what is added where both go by the same name, so that of two that fit, that one wins.
    covered: IoU with an object's mask from which on a detection is nothing new, though it be nobody's.
    alike: likeness from which on it is a hidden object that comes back.
    twin: mask IoU from which on two objects are one.
    """

    same: float = 0.3
    label: float = 0.1
    covered: float = 0.5
    alike: float = 0.5
    twin: float = 0.8


class Association(NamedTuple):
    """Rows of objects and detections that belong together.

    seen: object row -> detection that overlaps it. returned: row of an object that was away -> detection that looks
    like it. fresh: detections that are of no object, the best first. twins: (row, later row) of the same mask.
    """

    seen: dict[int, int]
    returned: dict[int, int]
    fresh: list[int]
    twins: list[tuple[int, int]]


def compare(
    masks: Tensor, found: Tensor, boxes: Tensor, appearance: tuple[Tensor, Tensor], pointers: Tensor
) -> Comparison:
    """Compare on the device, with one copy to the host at the end.

    masks [T, h, w] and found [D, h, w] are logits of objects as tracked and of detections; boxes [D, 4] in pixels of
    those; appearance ([T, P, C], bool [T, P]) as `Tracker.appearance` gives it; pointers [D, C].
    """
    tracked, new = masks > 0, found > 0
    parts = (
        mask_iou(tracked, new),
        box_iou(mask_boxes(tracked), boxes.to(masks.device)),
        likeness(*appearance, pointers),
        mask_iou(tracked, tracked),
        mask_iou(new, new),
    )
    flat = torch.cat([part.float().flatten() for part in parts]).cpu().numpy().astype(np.float64)
    ends = np.cumsum([part.numel() for part in parts])[:-1]
    return Comparison(
        *(values.reshape(part.shape) for values, part in zip(np.split(flat, ends), parts, strict=True))
    )


def associate(
    comparison: Comparison, labels: Sequence[str], away: Sequence[bool], names: Sequence[str], rules: Rules
) -> Association:
    """Give detections, called `names` [D], to objects, called `labels` [T], the older first.

    away [T]: which objects may come back anywhere, since they are out of sight or were not detected for some time.
    """
    single = _single(comparison.repeats, rules.twin)
    # a speck far from the object makes the box of its mask large, and says little
    overlap = np.maximum(comparison.mask_iou, (comparison.mask_iou + comparison.box_iou) / 2)
    same_name = np.array([[label == name for name in names] for label in labels], bool).reshape(overlap.shape)
    seen = assign(np.where((overlap >= rules.same) & single, overlap + rules.label * same_name, 0))
    free = single & _uncovered(comparison, set(seen.values()), rules.covered)
    gone = np.array([absent and row not in seen for row, absent in enumerate(away)], bool)
    may = gone[:, None] & free & same_name & (comparison.likeness >= rules.alike)
    returned = assign(np.where(may, comparison.likeness, 0))
    fresh = [int(d) for d in np.flatnonzero(free) if d not in returned.values()]
    twins = [(int(i), int(j)) for i, j in np.argwhere(np.triu(comparison.twins, 1) >= rules.twin)]
    return Association(seen, returned, fresh, twins)


def assign(affinity: Floats) -> dict[int, int]:
    """Rows to columns with the greatest sum of affinity [T, D]; a pair of 0 is none."""
    if not affinity.size:
        return {}
    rows, columns = linear_sum_assignment(affinity, maximize=True)
    return {int(r): int(c) for r, c in zip(rows, columns, strict=True) if affinity[r, c] > 0}


def _single(repeats: Floats, twin: float) -> Bools:
    """Which detections [D] have a mask, and not that of a better one."""
    better = np.tril(repeats, -1).max(axis=1, initial=0) >= twin
    return (np.diag(repeats) > 0) & ~better


def _uncovered(comparison: Comparison, taken: set[int], least: float) -> Bools:
    """Which detections [D] are neither given away nor on an object that another one was given to."""
    overlap = np.maximum(comparison.mask_iou, comparison.box_iou).max(axis=0, initial=0)
    return (overlap < least) & np.array([d not in taken for d in range(len(overlap))], bool)


def mask_iou(first: Tensor, second: Tensor) -> Tensor:
    """IoU of bool [N, h, w] and [M, h, w] -> [N, M]; 0 where both are empty."""
    a, b = first.flatten(1).float(), second.flatten(1).float()
    shared = a @ b.T
    return shared / (a.sum(dim=1)[:, None] + b.sum(dim=1) - shared).clamp(min=1)


def mask_boxes(masks: Tensor) -> Tensor:
    """Tight boxes [N, 4] (x0, y0, x1, y1) of bool [N, h, w]; zeros where empty."""
    spans = []
    for axis in (1, 2):  # columns, then rows
        filled = masks.any(dim=axis)
        length = filled.shape[1]
        place = torch.arange(length, device=masks.device)
        low = torch.where(filled, place, length).amin(dim=1)
        high = torch.where(filled, place + 1, 0).amax(dim=1)
        spans.append((torch.minimum(low, high), high))
    (x0, x1), (y0, y1) = spans
    return torch.stack([x0, y0, x1, y1], dim=1).float()


def likeness(remembered: Tensor, held: Tensor, pointers: Tensor) -> Tensor:
    """Cosine of pointers [D, C] with the most similar of those remembered [T, P, C] where held [T, P] -> [T, D]."""
    cosine = F.normalize(remembered.float(), dim=2) @ F.normalize(pointers.float(), dim=1).T
    return cosine.masked_fill(~held[..., None], -1.0).amax(dim=1)
