"""Tracked objects on one frame: all of them as tensors, and one of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ..models.sam.stages import Decoded


@dataclass(frozen=True, slots=True, eq=False)
class Tracks:
    """All N objects on one frame, in the order in which they were added. Tensors are on the model's device."""

    ids: list[int]
    logits: Tensor
    """[N, h, w] at low resolution, 4 times the feature grid; the object is where logits > 0"""
    scores: Tensor
    """[N] in 0..1: presence probability times predicted IoU"""
    visible: Tensor
    """bool [N]"""
    presence: Tensor
    """[N], the logit that the object is in view"""
    pointers: Tensor
    """[N, C], the object pointers: the decoder's description of each object's appearance"""


class Track(NamedTuple):
    """One object on one frame: logits [h, w], score [], visible [], presence [] and pointer [C]."""

    logits: Tensor
    score: Tensor
    visible: Tensor
    presence: Tensor
    pointer: Tensor


def combine_scores(presence: Tensor, iou: Tensor) -> Tensor:
    """Return scores [N] in 0..1 from presence logits [N] and predicted IoUs [N]."""
    return presence.float().sigmoid() * iou.float()


def split_tracks(decoded: Decoded, count: int) -> list[Track]:
    """Return the tracks of the first `count` objects of a decoder's output."""
    scores, visible = combine_scores(decoded.presence, decoded.iou), decoded.presence > 0
    columns = (decoded.logits, scores, visible, decoded.presence, decoded.pointer)
    return [Track(*(column[i] for column in columns)) for i in range(count)]
