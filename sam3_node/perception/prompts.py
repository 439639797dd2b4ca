"""Convert prompts in pixels of a frame to prompts of the tracker, and hold their results."""

from typing import NamedTuple

import cv2
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import RequestError
from ..geometry import Scaling
from ..tracking.tracks import PromptTensors
from ..types import Mask
from ..wire.frame_prompt import FramePrompt


class PromptResult(NamedTuple):
    """The result of a prompt on a frame."""

    seq: int
    """of the frame"""
    mask: Mask
    """at the frame's size"""
    score: float
    """0..1"""


class PromptOutcome(NamedTuple):
    """A new object, and its result."""

    id: int
    result: PromptResult | None
    """its mask if it was prompted on a past frame; None if it enters on the next frame"""


def to_model(
    prompt: FramePrompt, object_id: int, scaling: Scaling, logits: Tensor | None = None
) -> PromptTensors:
    """Convert a prompt to model pixels. Raises RequestError if it does not lie on the frame.

    `logits` [h, w] of the object's current mask make points a correction of this mask. A box is clipped to the frame.
    """
    points, box = prompt.within(scaling.frame_size)
    if prompt.mask is not None:
        return PromptTensors.from_mask(object_id, torch.from_numpy(_scale_mask(prompt.mask, scaling)))
    points, box = (None if given is None else scaling.to_model(given) for given in (points, box))
    # without points there is nothing to correct with: a box begins a new mask
    return PromptTensors.from_points(
        object_id, points, prompt.labels, box, None if points is None else logits
    )


def check_choice(choice: int, prompt: FramePrompt, candidates: int) -> int:
    """Return which of so many masks for a prompt is meant. Raises RequestError if there is no such one."""
    if prompt.mask is not None:
        raise RequestError("choice: expected points or a box beside it, found a mask")
    # weights that were not trained for several masks give a single one
    if choice >= candidates:
        raise RequestError(
            f"choice: these weights give {candidates} to choose from, found {choice}; count from 0"
        )
    return choice


def _scale_mask(mask: Mask, scaling: Scaling) -> npt.NDArray[np.bool_]:
    """Stretch the mask to the model's square, bool [S, S]. Even the thinnest mask keeps a pixel."""
    side = (scaling.model_size, scaling.model_size)
    # the share of each model pixel that is covered: a sample at its centre could miss a thin mask
    covered = cv2.resize(mask.full().astype(np.float32), side, interpolation=cv2.INTER_AREA)
    kept: npt.NDArray[np.bool_] = covered >= min(0.5, float(covered.max()))
    return kept
