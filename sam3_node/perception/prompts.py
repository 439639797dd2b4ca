"""Prompts as users give them, in frame pixels, checked and converted to prompts of the tracker; and their results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cv2
import numpy as np
import numpy.typing as npt
from torch import Tensor

from ..errors import RequestError
from ..geometry import Scaling
from ..tracking import ObjectPrompt
from ..tracking.tracks import MAX_POINTS, check_box, check_labels, check_parts, check_points
from ..types import Mask

__all__ = ["MAX_POINTS", "AddedObject", "FramePrompt", "PromptResult"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class PromptResult(NamedTuple):
    """The result of a prompt on a frame."""

    seq: int
    """of the frame"""
    mask: Mask
    """at the frame's size"""
    score: float
    """0..1"""


class AddedObject(NamedTuple):
    """A new object."""

    id: int
    result: PromptResult | None
    """its mask if it was prompted on a past frame; None if it enters on the next frame"""


@dataclass(frozen=True, slots=True, eq=False)
class FramePrompt:
    """The place of an object on a frame, in pixels of the frame."""

    points: object = None
    """[n, 2] as (x, y)"""
    labels: object = None
    """[n]: 1 inside, 0 outside; all 1 if None"""
    box: object = None
    """(x0, y0, x1, y1), alone or with points"""
    mask: Mask | None = None
    """of the frame's size, without points and box"""

    def to_model(self, object_id: int, scaling: Scaling, logits: Tensor | None = None) -> ObjectPrompt:
        """Convert the prompt to model pixels; RequestError states what was expected and what was found.

        `logits` [h, w] of the object's current mask make points a correction of this mask. A box is clipped to the
        frame.
        """
        check_parts(self.points, self.box, self.mask)
        if self.mask is not None:
            return ObjectPrompt(object_id, mask=_scale_mask(self.mask, scaling))
        points, labels = self._checked_points(scaling.frame_size)
        box = self._checked_box(scaling.frame_size)
        return ObjectPrompt(
            object_id,
            points=None if points is None else scaling.to_model(points),
            labels=labels,
            box=None if box is None else scaling.to_model(box),
            logits=None if points is None else logits,
        )

    def check(self, size: tuple[int, int]) -> None:
        """Raise RequestError unless the prompt lies on a frame of `size` (height, width) pixels."""
        check_parts(self.points, self.box, self.mask)
        if self.mask is not None:
            _check_mask(self.mask, size)
        self._checked_points(size)
        self._checked_box(size)

    def _checked_points(self, size: tuple[int, int]) -> tuple[Floats | None, Ints | None]:
        if self.points is None:
            if self.labels is not None:
                raise RequestError("labels: expected beside points, found no points")
            return None, None
        points = _to_floats(self.points, "points")
        check_points(points)
        outside = ((points < 0) | (points >= size[::-1])).any(axis=1)
        if outside.any():
            first = points[outside][0].tolist()
            raise RequestError(
                f"points: expected inside the frame of {size[1]} x {size[0]} pixels, found {first}"
            )
        if self.labels is None:
            return points, np.ones(len(points), np.int64)
        labels = _to_floats(self.labels, "labels")
        check_labels(labels, len(points))
        return points, labels.astype(np.int64)

    def _checked_box(self, size: tuple[int, int]) -> Floats | None:
        if self.box is None:
            return None
        box = _to_floats(self.box, "box")
        check_box(box)
        clipped = np.clip(box, 0, (size[1], size[0], size[1], size[0]))
        if not (clipped[:2] < clipped[2:]).all():
            raise RequestError(
                f"box: expected a part inside the frame of {size[1]} x {size[0]} pixels, found {box.tolist()}"
            )
        return clipped


def _to_floats(value: object, name: str) -> Floats:
    try:
        array = np.asarray(value)
    except (ValueError, TypeError) as error:
        raise RequestError(f"{name}: expected numbers, found {value!r:.80}") from error
    if array.dtype.kind not in "iuf":
        raise RequestError(f"{name}: expected numbers, found {value!r:.80}")
    return array.astype(np.float64)


def _scale_mask(mask: Mask, scaling: Scaling) -> npt.NDArray[np.bool_]:
    """Stretch the mask to the model's square, bool [S, S]. Even the thinnest mask keeps a pixel."""
    _check_mask(mask, scaling.frame_size)
    side = (scaling.model_size, scaling.model_size)
    covered = cv2.resize(mask.full().astype(np.float32), side, interpolation=cv2.INTER_AREA)
    kept: npt.NDArray[np.bool_] = covered >= min(0.5, float(covered.max()))
    return kept


def _check_mask(mask: Mask, size: tuple[int, int]) -> None:
    if mask.size != size:
        raise RequestError(f"mask: expected the frame's size {size} (h, w), found {mask.size}")
    if not mask.area:
        raise RequestError("mask: expected at least one pixel, found an empty mask")
