"""Segment everything on a frame without prompts: a grid of points, whose masks are filtered and merged.

The method is SAM's automatic mask generation (arXiv 2304.02643, section B of the appendix) on the whole image. Each
point gives three masks: a part, a larger part, the whole. A mask is kept if the decoder is sure of it, and if it does
not depend on the threshold. Only the best of masks with nearly the same box is kept.

How sure a decoder says it is differs from model to model, so each kind has its own limits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import RequestError
from ..models import Features, TrackerModel
from ..models.pixels import mask_boxes, suppress
from ..models.sam.tracker_model import MaskLimits
from ..resumable import Resumable

DEFAULT_GRID = 16
"""Points along each side of the grid, if nothing else is asked for."""
MAX_GRID = 32
"""Largest number of points along each side of the grid. The time of a search grows with its square."""
DEFAULT_OVERLAP = 0.7
"""IoU of two boxes above which only the better mask is kept, if nothing else is asked for."""
DEFAULT_MASKS = 100
"""Masks that are kept, if nothing else is asked for."""
MAX_MASKS = 256
"""Largest number of masks that a request may ask for."""
MAX_CANDIDATES = 512
"""Candidates whose logits are in memory at once. More would not fit a small GPU beside the tracker."""


MEASURED = {"nano": MaskLimits(0.5, 0.5)}  # on rendered scenes: docs/running.md
"""Limits of weights, by their name, that are not those of their family."""


@dataclass(frozen=True, slots=True)
class EverythingOptions:
    """Options of the search. Raises RequestError for values out of range."""

    grid: int = DEFAULT_GRID
    """points along each side, 1 to 32"""
    min_iou: float | None = None
    """lowest IoU that the decoder predicts for a mask, 0 to 1; None for the model's own limit"""
    min_stability: float | None = None
    """lowest IoU of the masks at logits -1 and +1, 0 to 1; None for the model's own limit"""
    max_overlap: float = DEFAULT_OVERLAP
    """largest IoU of the boxes of two masks that are both kept, 0 to 1"""
    most: int = DEFAULT_MASKS
    """largest number of masks, 1 to 256"""

    def __post_init__(self) -> None:
        for name, value, limit in (("grid", self.grid, MAX_GRID), ("most", self.most, MAX_MASKS)):
            if not 1 <= value <= limit:
                raise RequestError(f"{name}: expected 1 to {limit}, found {value}")
        for name in ("min_iou", "min_stability", "max_overlap"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise RequestError(f"{name}: expected a number in 0..1, found {value}")

    def complete(self, model: TrackerModel) -> EverythingOptions:
        """Return the options with the model's own limits where none were given."""
        own = MEASURED.get(model.name, model.mask_limits)
        missing = {name: limit for name, limit in own._asdict().items() if getattr(self, name) is None}
        return replace(self, **missing)


class Everything(NamedTuple):
    """K masks, the surest first."""

    logits: Tensor
    """float32 [K, h, w] at low resolution"""
    iou: Tensor
    """[K], predicted"""

    def select(self, chosen: Tensor) -> Everything:
        """Return the masks at these indices, or where a mask of bools is True."""
        return Everything(self.logits[chosen], self.iou[chosen])


@dataclass(slots=True)
class FilterStatistics:
    """Number of candidates of a search, and how many passed each limit."""

    candidates: int = 0
    sure: int = 0
    """of them, above min_iou"""
    stable: int = 0
    """of these, above min_stability"""
    best_iou: float = 0.0
    """highest predicted IoU"""
    best_stability: float = 0.0
    """highest stability of those above min_iou"""

    def explain(self, options: EverythingOptions) -> str:
        """Say which limit left nothing over, and what to do."""
        said = f"nothing was found: of {self.candidates} candidates, {self.sure} had a predicted IoU above min_iou "
        if not self.sure:
            said += f"{options.min_iou:g} (the best {self.best_iou:.2f})"
        else:
            said += (
                f"{options.min_iou:g}, and {self.stable} of them a stability above min_stability "
                f"{options.min_stability:g} (the best {self.best_stability:.2f})"
            )
        return f"{said}; lower that limit, or take a larger grid than {options.grid}"


@torch.inference_mode()
def segment_everything(
    model: TrackerModel,
    features: Features,
    options: EverythingOptions,
    statistics: FilterStatistics | None = None,
) -> Resumable[Everything]:
    """Find the masks of everything on one frame, from features = model.encode(pixels), a batch of points a turn.

    `statistics` is filled with the number of candidates.
    The masks do not depend on what happens between the turns, as long as the features stay as they are.
    """
    options = options.complete(model)
    statistics = statistics or FilterStatistics()
    # `complete` has left nothing open; the zeros are for the type checker
    limits = MaskLimits(options.min_iou or 0.0, options.min_stability or 0.0)
    masks = Everything(
        torch.zeros(0, *model.mask_size, device=model.device), torch.zeros(0, device=model.device)
    )
    for points in grid_points(options.grid, model).split(model.batch_size):
        sure = _filter(_decode(model, features, points), limits, statistics)
        masks = Everything(*(torch.cat(pair) for pair in zip(masks, sure, strict=True)))
        if len(masks.iou) > MAX_CANDIDATES:
            masks = masks.select(masks.iou.topk(MAX_CANDIDATES).indices)
        yield
    boxes = mask_boxes(masks.logits > 0)
    return masks.select(suppress(boxes, masks.iou, options.max_overlap)[: options.most])


def grid_points(side: int, model: TrackerModel) -> Tensor:
    """Return points [side * side, 1, 2] at the centres of the cells of a grid, in model pixels."""
    line = (torch.arange(side, device=model.device) + 0.5) * (model.image_size / side)
    y, x = torch.meshgrid(line, line, indexing="ij")
    return torch.stack([x, y], dim=-1).reshape(-1, 1, 2)


def _decode(model: TrackerModel, features: Features, points: Tensor) -> Everything:
    """Return the three masks of each of N points [N, 1, 2]."""
    labels = torch.ones(len(points), 1, dtype=torch.int32, device=points.device)
    top, fine, middle, sparse, dense = model.decode_stage.embed(features, points, labels)
    # the decoder's own `forward` would keep only one of the three masks
    logits, iou, _, _ = model.decode_stage.mask_decoder(top + dense, fine, middle, sparse, True)
    return Everything(logits.flatten(0, 1).float(), iou.flatten().float())


def _filter(candidates: Everything, limits: MaskLimits, statistics: FilterStatistics) -> Everything:
    """Return the masks that the decoder is sure of and that do not depend on the threshold; count them."""
    sure = candidates.select(candidates.iou > limits.min_iou)
    inner, outer = ((sure.logits > level).flatten(1).sum(dim=1) for level in (1.0, -1.0))
    stable = sure.select((inner > limits.min_stability * outer) & (sure.logits > 0).flatten(1).any(dim=1))
    statistics.candidates += len(candidates.iou)
    statistics.sure += len(sure.iou)
    statistics.stable += len(stable.iou)
    statistics.best_iou = max(statistics.best_iou, float(candidates.iou.max()))
    if len(sure.iou):
        statistics.best_stability = max(statistics.best_stability, float((inner / outer.clamp(min=1)).max()))
    return stable
