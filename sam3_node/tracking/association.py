"""Match the detections of a frame to the tracked objects, by overlap of masks and boxes and by appearance.

All pairs are assigned at once, so that the sum over all pairs is the greatest possible.
"""

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

from ..models.pixels import box_iou

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class PairwiseScores(NamedTuple):
    """Scores of all pairs of T objects and D detections on one frame, on the host. The best detection comes first."""

    mask_iou: Floats
    """[T, D]: IoU of the tracked mask and the detection's mask; 0 where the object is hidden."""
    box_iou: Floats
    """[T, D]: IoU of the boxes of these masks; 0 where the object is hidden."""
    appearance_similarity: Floats
    """[T, D]: cosine of the detection's object pointer and the most similar pointer of the object's prompted frames."""
    duplicate_tracks: Floats
    """[T, T]: mask IoU among objects."""
    duplicate_detections: Floats
    """[D, D]: mask IoU among detections."""


@dataclass(frozen=True, slots=True)
class AssociationRules:
    """Thresholds of the association. Each applies from its value upward."""

    min_overlap: float = 0.3
    """Overlap (mask IoU, or the mean of mask and box IoU) at which a detection matches an object."""
    label_bonus: float = 0.1
    """Bonus where object and detection have the same label; it decides between two detections that both match."""
    covered_iou: float = 0.5
    """IoU with any object at which a detection starts no new object, even if it is matched to none."""
    min_similarity: float = 0.5
    """Appearance similarity at which a detection recovers a lost object."""
    duplicate_iou: float = 0.8
    """Mask IoU at which two objects, or two detections, are the same thing."""


class Association(NamedTuple):
    """The result of `associate`, as rows of objects and indices of detections."""

    matched: dict[int, int]
    """Object row -> detection that overlaps it."""
    recovered: dict[int, int]
    """Row of a lost object -> detection that resembles it."""
    new: list[int]
    """Detections that belong to no object, the best first."""
    duplicate_tracks: list[tuple[int, int]]
    """Pairs (row, later row) of objects with the same mask."""


def compute_pairwise_scores(
    masks: Tensor, detections: Tensor, boxes: Tensor, appearance: tuple[Tensor, Tensor], pointers: Tensor
) -> PairwiseScores:
    """Compare objects with detections on the device, and copy the result to the host once.

    masks [T, h, w] and detections [D, h, w] are logits. boxes [D, 4] are in pixels of these masks. appearance
    ([T, P, C], bool [T, P]) is the result of `Tracker.appearance`. pointers [D, C] belong to the detections.
    """
    tracked, new = masks > 0, detections > 0
    parts = (
        mask_iou(tracked, new),
        box_iou(mask_boxes(tracked), boxes.to(masks.device)),
        appearance_similarity(*appearance, pointers),
        mask_iou(tracked, tracked),
        mask_iou(new, new),
    )
    flat = torch.cat([part.float().flatten() for part in parts]).cpu().numpy().astype(np.float64)
    ends = np.cumsum([part.numel() for part in parts])[:-1]
    return PairwiseScores(
        *(values.reshape(part.shape) for values, part in zip(np.split(flat, ends), parts, strict=True))
    )


def associate(
    scores: PairwiseScores,
    track_labels: Sequence[str],
    is_lost: Sequence[bool],
    detection_labels: Sequence[str],
    rules: AssociationRules,
) -> Association:
    """Assign D detections to T objects, the older objects first.

    is_lost [T]: True for objects that are out of view or were missed for some time. A detection anywhere in the
    frame may recover such an object.
    """
    unique = _find_unique(scores.duplicate_detections, rules.duplicate_iou)
    # one stray pixel far from the object makes its box large, so a small box IoU alone says little
    overlap = np.maximum(scores.mask_iou, (scores.mask_iou + scores.box_iou) / 2)
    same_label = np.array([[a == b for b in detection_labels] for a in track_labels], bool).reshape(
        overlap.shape
    )
    affinity = np.where((overlap >= rules.min_overlap) & unique, overlap + rules.label_bonus * same_label, 0)
    matched = assign(affinity)
    free = unique & _find_uncovered(scores, set(matched.values()), rules.covered_iou)
    searching = np.array([lost and row not in matched for row, lost in enumerate(is_lost)], bool)
    similar = scores.appearance_similarity >= rules.min_similarity
    allowed = searching[:, None] & free & same_label & similar
    recovered = assign(np.where(allowed, scores.appearance_similarity, 0))
    new = [int(d) for d in np.flatnonzero(free) if d not in recovered.values()]
    pairs = np.argwhere(np.triu(scores.duplicate_tracks, 1) >= rules.duplicate_iou)
    return Association(matched, recovered, new, [(int(i), int(j)) for i, j in pairs])


def assign(affinity: Floats) -> dict[int, int]:
    """Assign rows to columns with the greatest sum of affinity [T, D]. A pair with affinity 0 is not assigned."""
    if not affinity.size:
        return {}
    rows, columns = linear_sum_assignment(affinity, maximize=True)
    return {int(r): int(c) for r, c in zip(rows, columns, strict=True) if affinity[r, c] > 0}


def _find_unique(duplicate_detections: Floats, duplicate_iou: float) -> Bools:
    """Return bool [D]: True for detections with a mask that no better detection has."""
    duplicate = np.tril(duplicate_detections, -1).max(axis=1, initial=0) >= duplicate_iou
    unique: Bools = (np.diag(duplicate_detections) > 0) & ~duplicate
    return unique


def _find_uncovered(scores: PairwiseScores, matched: set[int], max_overlap: float) -> Bools:
    """Return bool [D]: True for detections that are not matched and do not cover any object."""
    overlap = np.maximum(scores.mask_iou, scores.box_iou).max(axis=0, initial=0)
    uncovered: Bools = (overlap < max_overlap) & np.array(
        [d not in matched for d in range(len(overlap))], bool
    )
    return uncovered


def mask_iou(first: Tensor, second: Tensor) -> Tensor:
    """Return the IoU [N, M] of bool masks [N, h, w] and [M, h, w]; 0 where both are empty."""
    a, b = first.flatten(1).float(), second.flatten(1).float()
    shared = a @ b.T
    return shared / (a.sum(dim=1)[:, None] + b.sum(dim=1) - shared).clamp(min=1)


def mask_boxes(masks: Tensor) -> Tensor:
    """Return the tight boxes [N, 4] (x0, y0, x1, y1) of bool masks [N, h, w]; zeros for an empty mask."""
    spans = []
    for axis in (1, 2):  # columns, then rows
        filled = masks.any(dim=axis)
        length = filled.shape[1]
        position = torch.arange(length, device=masks.device)
        low = torch.where(filled, position, length).amin(dim=1)
        high = torch.where(filled, position + 1, 0).amax(dim=1)
        spans.append((torch.minimum(low, high), high))
    (x0, x1), (y0, y1) = spans
    return torch.stack([x0, y0, x1, y1], dim=1).float()


def appearance_similarity(stored: Tensor, valid: Tensor, pointers: Tensor) -> Tensor:
    """Return [T, D]: the greatest cosine of each pointer [D, C] and the stored ones [T, P, C] where valid [T, P]."""
    cosine = F.normalize(stored.float(), dim=2) @ F.normalize(pointers.float(), dim=1).T
    return cosine.masked_fill(~valid[..., None], -1.0).amax(dim=1)
