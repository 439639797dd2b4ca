"""Copies of tracks and of masks of prompts on the host, in one transfer.

From a GPU, bits are copied instead of logits: the level sets that confidence needs, and, once the host knows the boxes,
the masks at frame size (`device_masks`). All copies go through pinned memory and wait for an event, not for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..geometry import Scaling
from ..tracking import Tracks
from ..tracking.confidence import Evidence
from ..tracking.host_copy import HostCopy
from ..tracking.track_history import LevelSets, compare_levels, find_level_sets
from ..types import Mask, Turns
from .device_masks import find_edges, pack_bits, rasterize_on_device, read_boxes, unpack_bits
from .prompts import PromptResult
from .rasterize import rasterize

MASKS_A_TURN = 8
"""Number of masks that are brought to the frame's size between two frames."""


class LowMasks(NamedTuple):
    """N masks at low resolution."""

    logits: Tensor
    """[N, h, w] on the model's device"""
    levels: LevelSets
    boxes: npt.NDArray[np.int64] | None
    """[N, 4], if the device rasterises"""

    def rasterize(self, frame_size: tuple[int, int]) -> Callable[[], list[Mask]]:
        """Begin to make the masks at `frame_size` (height, width); return a function that waits for them.

        A GPU makes them meanwhile, the host within that function.
        """
        if self.boxes is not None:
            return rasterize_on_device(self.logits, self.boxes, frame_size).read
        return lambda: [rasterize(logits, frame_size) for logits in self.logits.numpy()]


class HostTracks(NamedTuple):
    """The tracks of N objects on one frame, on the host."""

    evidence: Evidence
    masks: LowMasks


def rasterizes(device: torch.device) -> bool:
    """Return True for devices that rasterise masks; the host does it for a model on a CPU, where OpenCV is faster."""
    return device.type == "cuda"


@torch.inference_mode()
def copy_to_host(tracks: Tracks) -> HostTracks:
    """Copy tracks to the host at once. The copy waits for the work that the device was given so far."""
    masks, (scores, visible, presence, pointers) = copy_masks(
        tracks.logits,
        [tracks.scores.float(), tracks.visible, tracks.presence.float(), tracks.pointers.float()],
    )
    evidence = Evidence(tracks.ids, masks.levels, clamp_scores(scores), visible.tolist(), presence, pointers)
    return HostTracks(evidence, masks)


def to_prompt_results(seq: int, scaling: Scaling, logits: Tensor, scores: Tensor) -> list[PromptResult]:
    """Make K masks of frame `seq`, at the frame's size, from logits [K, h, w] and scores [K], or [] for one."""
    low, (values,) = copy_masks(logits, [scores.reshape(len(logits)).float()])
    masks = low.rasterize(scaling.frame_size)()
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


def copy_masks(logits: Tensor, columns: Sequence[Tensor] = ()) -> tuple[LowMasks, list[npt.NDArray[Any]]]:
    """Copy what the host needs of logits [N, h, w], and tensors [N, ...] of the same device, in one transfer."""
    if not rasterizes(logits.device):
        logits = logits.float()
        return LowMasks(logits, find_level_sets(logits.numpy()), None), [column.numpy() for column in columns]
    levels = torch.stack(compare_levels(logits), dim=1)
    bits, edges, *values = columns_to_host([pack_bits(levels.flatten(2)), find_edges(logits > 0), *columns])
    boxes = read_boxes(edges, logits.shape[-2:])
    inside, core, surroundings = (
        unpack_bits(bits, levels.shape[2:].numel()).reshape(levels.shape).swapaxes(0, 1)
    )
    return LowMasks(logits, LevelSets(inside, core, surroundings, boxes[:, 2] == 0), boxes), values


def columns_to_host(columns: Sequence[Tensor]) -> list[npt.NDArray[Any]]:
    """Copy tensors [N, ...] of one device to arrays of the same shapes and dtypes, in one transfer."""
    parts = [
        column.reshape(len(column), column.shape[1:].numel()).contiguous().view(torch.uint8)
        for column in columns
    ]
    rows = HostCopy(torch.cat(parts, dim=1)).read()
    ends = np.cumsum([part.shape[1] for part in parts])
    return [
        np.ascontiguousarray(part).view(str(column.dtype).removeprefix("torch.")).reshape(column.shape)
        for part, column in zip(np.split(rows, ends[:-1], axis=1), columns, strict=True)
    ]


def clamp_scores(scores: npt.NDArray[np.float32]) -> list[float]:
    """Clamp scores to 0..1, and NaN to 0."""
    return [min(max(score, 0.0), 1.0) if score == score else 0.0 for score in scores.tolist()]
