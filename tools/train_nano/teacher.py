"""The teacher: a trained SAM model that finds objects in a picture without prompts by hand.

Each point of a grid gives three masks: a part, a larger part, the whole. Confident masks that do not depend on the
threshold are kept, duplicates removed. Then the box of each mask is the prompt, because a box gives better outlines
than a point. A mask that its box does not give again is dropped. Parts and wholes both stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from sam3_node.models import Features, TrackerModel, load_tracker

Image = npt.NDArray[np.uint8]  # BGR [h, w, 3]
Bools = npt.NDArray[np.bool_]

SIDE = 256  # of masks as they are kept
CHUNK = 4  # prompts at once: more fall out of the cache
INSIDE, CORNERS = 1, (2, 3)


@dataclass(frozen=True)
class Choice:
    """Thresholds for the masks to keep.

    iou, stable: lowest IoU that the teacher predicts, and lowest share of a mask that stays when the threshold moves by
    a logit to both sides. again: lowest IoU with the mask that the box gives. alike: lowest IoU of
    duplicates. smallest, largest: shares of the picture. most: masks of a picture.
    """

    iou: float = 0.70
    stable: float = 0.80
    again: float = 0.70
    alike: float = 0.75
    smallest: float = 0.0015
    largest: float = 0.7
    most: int = 32


class Found(NamedTuple):
    """Masks bool [N, 256, 256] over the whole picture, as a square, and how good the teacher says they are."""

    masks: Bools
    scores: npt.NDArray[np.float32]


class Teacher:
    """A tracker as a finder of masks; `weights` as `load_tracker` takes them, `size` px a multiple of its step."""

    def __init__(
        self, weights: str | Path, size: int, grid: int = 8, dtype: str = "auto", choice: Choice | None = None
    ) -> None:
        self.model: TrackerModel = load_tracker(weights, dtype=dtype, image_size=size)
        self.choice = choice or Choice()
        self._grid = _grid(grid, size)

    @torch.inference_mode()
    def find(self, image: Image) -> Found:
        """The masks of a BGR picture, the surest first."""
        model, choice = self.model, self.choice
        features = model.encode(model.preprocess(image))
        labels = torch.full((len(self._grid), 1), INSIDE, dtype=torch.int32)
        logits, iou = self._decode(features, self._grid, labels, multimask=True)
        logits, iou = logits.flatten(0, 1), iou.flatten()
        first, kept = self._sure(logits, iou)
        if not len(kept):
            return _nothing()
        corners, labels = _boxes(first, model.image_size)
        logits, iou = (x[:, 0] for x in self._decode(features, corners, labels, multimask=False))
        again = _paired_iou(first, logits > 0) >= choice.again
        _, kept = self._sure(logits[again], iou[again])
        if not len(kept):
            return _nothing()
        return _tidy(logits[again][kept], iou[again][kept])

    def _decode(
        self, features: Features, points: Tensor, labels: Tensor, multimask: bool
    ) -> tuple[Tensor, Tensor]:
        """Points [N, n, 2] in model pixels, labels [N, n] -> logits [N, M, 4h, 4w] and predicted IoU [N, M]."""
        decode = self.model.decode_stage
        image = features.top + decode.no_memory.reshape(1, -1, 1, 1)
        found = []
        for begin in range(0, len(points), CHUNK):
            some, told = points[begin : begin + CHUNK], labels[begin : begin + CHUNK]
            sparse, dense = decode.prompt(some, told)
            top = image.expand(len(some), -1, -1, -1) + dense
            found.append(decode.mask_decoder(top, features.fine, features.middle, sparse, multimask)[:2])
        logits, iou = (torch.cat(parts).float() for parts in zip(*found, strict=True))
        return logits, iou

    def _sure(self, logits: Tensor, iou: Tensor) -> tuple[Tensor, Tensor]:
        """Masks [K, h, w] that are kept of logits [N, h, w] with predicted iou [N], the surest first, and which."""
        choice = self.choice
        masks = logits > 0
        area = masks.flatten(1).float().mean(dim=1)
        stable = stability(logits)
        good = (iou >= choice.iou) & (stable >= choice.stable)
        good &= (area >= choice.smallest) & (area <= choice.largest)
        ranked = torch.nonzero(good)[:, 0]
        ranked = ranked[(iou * stable)[ranked].argsort(descending=True)]
        kept = ranked[without_doubles(masks[ranked], choice.alike)][: choice.most]
        return masks[kept], kept


def stability(logits: Tensor) -> Tensor:
    """Logits [N, h, w] -> the share [N] of each mask at -1 that is left at +1."""
    inner, outer = ((logits > level).flatten(1).float().sum(dim=1) for level in (1.0, -1.0))
    return inner / outer.clamp(min=1)


def without_doubles(masks: Tensor, alike: float) -> Tensor:
    """Indices of masks [N, h, w], in order of merit, that are not like a better one."""
    overlaps = pairwise_iou(masks)
    kept: list[int] = []
    for index in range(len(masks)):
        if not kept or float(overlaps[index, kept].max()) < alike:
            kept.append(index)
    return torch.tensor(kept, dtype=torch.long)


def pairwise_iou(masks: Tensor) -> Tensor:
    """Masks [N, h, w] -> IoU [N, N]."""
    flat = masks.flatten(1).float()
    shared, area = flat @ flat.T, flat.sum(dim=1)
    return shared / (area[:, None] + area - shared).clamp(min=1)


def _paired_iou(one: Tensor, other: Tensor) -> Tensor:
    shared, either = ((x.flatten(1).float().sum(dim=1)) for x in (one & other, one | other))
    return shared / either.clamp(min=1)


def _grid(side: int, size: int) -> Tensor:
    """Points [side * side, 1, 2] in the middle of the cells of a square of `size` px."""
    line = (torch.arange(side) + 0.5) * (size / side)
    y, x = torch.meshgrid(line, line, indexing="ij")
    return torch.stack([x, y], dim=-1).reshape(-1, 1, 2)


def _boxes(masks: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Masks [N, h, h], none of them empty -> corners [N, 2, 2] in pixels of `size`, and their labels [N, 2]."""
    side = masks.shape[-1]
    span = torch.arange(side)
    edges = []
    for line in (masks.any(dim=1), masks.any(dim=2)):
        low = torch.where(line, span, side).amin(dim=1)
        high = torch.where(line, span, -1).amax(dim=1) + 1
        edges.append(torch.stack([low, high], dim=1) * (size / side))
    corners = torch.stack(edges, dim=2).float()
    return corners, torch.tensor(CORNERS, dtype=torch.int32).expand(len(masks), 2)


def _tidy(logits: Tensor, iou: Tensor) -> Found:
    """Masks of full size, without specks; logits [N, h, w]."""
    large = F.interpolate(logits[:, None], size=(SIDE, SIDE), mode="bilinear", align_corners=False)[:, 0]
    masks = np.stack([without_specks(mask) for mask in (large > 0).numpy()])
    return Found(masks, iou.numpy().astype(np.float32))


def without_specks(mask: Bools, share: float = 0.1) -> Bools:
    """Without the pieces of a mask [h, w] that are smaller than `share` of its largest."""
    count, pieces, stats, _ = cv2.connectedComponentsWithStats(mask.astype(np.uint8), connectivity=8)
    if count <= 2:
        return mask
    area = stats[:, cv2.CC_STAT_AREA].copy()
    area[0] = 0
    return np.asarray((area >= share * area.max())[pieces] & mask)


def _nothing() -> Found:
    return Found(np.zeros((0, SIDE, SIDE), np.bool_), np.zeros(0, np.float32))
