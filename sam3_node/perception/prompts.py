"""Prompts as a user gives them, in frame pixels: checked, and turned into those of the tracker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
from torch import Tensor

from ..errors import RequestError
from ..geometry import Scaling
from ..tracking import ObjectPrompt
from ..types import Mask

MAX_POINTS = 64


@dataclass(frozen=True, slots=True, eq=False)
class FramePrompt:
    """Where an object is on a frame.

    `points` [n, 2] as (x, y) with `labels` [n] (1 inside, 0 outside; all 1 when absent), and/or a `box`
    (x0, y0, x1, y1); or a `mask` of the frame's size, alone.
    """

    points: object = None
    labels: object = None
    box: object = None
    mask: Mask | None = None

    def to_model(self, object_id: int, scaling: Scaling, logits: Tensor | None = None) -> ObjectPrompt:
        """The same prompt in model pixels; RequestError says what was expected and what was found.

        `logits` [h, w] of the object's mask so far make points a correction of it. A box is clipped to the
        frame.
        """
        if self.mask is not None:
            if self.points is not None or self.box is not None:
                raise RequestError("prompt: expected a mask alone, found points or a box beside it")
            return ObjectPrompt(object_id, mask=_scale_mask(self.mask, scaling))
        if self.points is None and self.box is None:
            raise RequestError("prompt: expected points, a box or a mask, found none of them")
        points, labels = self._checked_points(scaling.frame_size)
        box = self._checked_box(scaling.frame_size)
        return ObjectPrompt(
            object_id,
            points=None if points is None else scaling.to_model(points),
            labels=labels,
            box=None if box is None else scaling.to_model(box),
            logits=None if points is None else logits,
        )

    def _checked_points(
        self, size: tuple[int, int]
    ) -> tuple[npt.NDArray[Any] | None, npt.NDArray[Any] | None]:
        if self.points is None:
            if self.labels is not None:
                raise RequestError("labels: expected beside points, found no points")
            return None, None
        points = _numbers(self.points, "points")
        if points.ndim != 2 or points.shape[1] != 2 or not 1 <= len(points) <= MAX_POINTS:
            raise RequestError(
                f"points: expected 1 to {MAX_POINTS} pairs (x, y), found shape {list(points.shape)}"
            )
        outside = ((points < 0) | (points >= size[::-1])).any(axis=1)
        if outside.any():
            found = points[outside][0].tolist()
            raise RequestError(
                f"points: expected inside the frame of {size[1]} x {size[0]} pixels, found {found}"
            )
        return points, self._checked_labels(len(points))

    def _checked_labels(self, count: int) -> npt.NDArray[Any]:
        if self.labels is None:
            return np.ones(count, np.int64)
        labels = _numbers(self.labels, "labels")
        if labels.shape != (count,) or not np.isin(labels, (0, 1)).all():
            raise RequestError(
                f"labels: expected {count} of 1 (inside) or 0 (outside), one for each point, "
                f"found {labels.tolist()}"
            )
        return labels.astype(np.int64)

    def _checked_box(self, size: tuple[int, int]) -> npt.NDArray[Any] | None:
        if self.box is None:
            return None
        box = _numbers(self.box, "box")
        if box.shape != (4,):
            raise RequestError(f"box: expected (x0, y0, x1, y1), found shape {list(box.shape)}")
        clipped = np.clip(box, 0, (size[1], size[0], size[1], size[0]))
        if not (clipped[:2] < clipped[2:]).all():
            raise RequestError(
                f"box: expected x0 < x1, y0 < y1 and a part inside the frame of {size[1]} x {size[0]}, "
                f"found {box.tolist()}"
            )
        return clipped


def _numbers(value: object, name: str) -> npt.NDArray[Any]:
    try:
        array = np.asarray(value)
    except (ValueError, TypeError) as error:
        raise RequestError(f"{name}: expected numbers, found {value!r:.80}") from error
    if array.dtype.kind not in "iuf" or not np.isfinite(array).all():
        raise RequestError(f"{name}: expected finite numbers, found {value!r:.80}")
    return array.astype(np.float64)


def _scale_mask(mask: Mask, scaling: Scaling) -> npt.NDArray[np.bool_]:
    """The mask stretched to the model's square, bool [S, S]; the thinnest mask keeps a pixel."""
    if mask.size != scaling.frame_size:
        raise RequestError(f"mask: expected the frame's size {scaling.frame_size} (h, w), found {mask.size}")
    if not mask.area:
        raise RequestError("mask: expected at least one pixel, found an empty mask")
    side = (scaling.model_size, scaling.model_size)
    covered = cv2.resize(mask.full().astype(np.float32), side, interpolation=cv2.INTER_AREA)
    return covered >= min(0.5, float(covered.max()))
