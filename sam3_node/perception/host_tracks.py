"""Copies of tracks and of masks of prompts on the host, in one transfer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..geometry import Scaling
from ..tracking import Tracks
from ..types import Turns
from .prompts import PromptResult
from .rasterize import rasterize

MASKS_A_TURN = 8
"""Number of masks that are brought to the frame's size between two frames."""


class HostTracks(NamedTuple):
    """The tracks of N objects on one frame, on the host."""

    ids: list[int]
    logits: npt.NDArray[np.float32]
    """[N, h, w]"""
    scores: list[float]
    """N values in 0..1"""
    visible: list[bool]
    """N values"""
    presence: npt.NDArray[np.float32]
    """[N], logits"""
    pointers: npt.NDArray[np.float32]
    """[N, C]"""


def copy_to_host(tracks: Tracks) -> HostTracks:
    """Copy tracks to the host at once. The copy synchronises with the device."""
    logits, scores, visible, presence, pointers = columns_to_host(
        [tracks.logits, tracks.scores, tracks.visible, tracks.presence, tracks.pointers]
    )
    return HostTracks(tracks.ids, logits, clamp_scores(scores), (visible > 0).tolist(), presence, pointers)


def to_prompt_results(seq: int, scaling: Scaling, logits: Tensor, scores: Tensor) -> list[PromptResult]:
    """Make K masks of frame `seq`, at the frame's size, from logits [K, h, w] and scores [K], or [] for one."""
    low, values = columns_to_host([logits, scores.reshape(len(logits))])
    masks = (rasterize(one, scaling.frame_size) for one in low)
    return [PromptResult(seq, *pair) for pair in zip(masks, clamp_scores(values), strict=True)]


def to_results_in_turns(
    seq: int, scaling: Scaling, logits: Tensor, scores: Tensor
) -> Turns[list[PromptResult]]:
    """Make K masks as `to_prompt_results` does, some a turn, and leave out empty ones."""
    results = []
    for some, their_scores in zip(logits.split(MASKS_A_TURN), scores.split(MASKS_A_TURN), strict=True):
        results += to_prompt_results(seq, scaling, some, their_scores)
        yield
    return [result for result in results if result.mask.area]


def columns_to_host(columns: Sequence[Tensor]) -> list[npt.NDArray[np.float32]]:
    """Copy tensors [N, ...] of one device to float32 arrays of the same shapes, in one transfer."""
    tensors = [column.float() for column in columns]
    if tensors[0].device.type == "cpu":
        return [tensor.numpy() for tensor in tensors]
    flat = [tensor.reshape(tensor.shape[0], tensor.shape[1:].numel()) for tensor in tensors]
    rows = torch.cat(flat, dim=1).cpu().numpy()
    ends = np.cumsum([part.shape[1] for part in flat])
    parts = np.split(rows, ends[:-1], axis=1)
    return [part.reshape(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def clamp_scores(scores: npt.NDArray[np.float32]) -> list[float]:
    """Clamp scores to 0..1, and NaN to 0."""
    return [min(max(score, 0.0), 1.0) if score == score else 0.0 for score in scores.tolist()]
