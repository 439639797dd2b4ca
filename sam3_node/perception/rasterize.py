"""Turn low-resolution logits into binary masks at frame size. Only the objects' regions are upsampled.

A pixel belongs to the mask if the bilinear interpolation of the logits at its centre is positive (half-pixel centres,
as torch's align_corners=False). `Axis` and `blend` define its bits: integer weights, and products and sums in float32,
each rounded by itself, rows before columns. IEEE 754 leaves no choice there, so every processor finds the same mask
for the same logits. On a CPU, `rasterize` lets OpenCV interpolate. That is faster, but rounds differently from one
processor to the next, so `rasterize` decides again by the definition where the result is too near to zero to trust.
`perception.device_masks` follows the definition on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd
from typing import Any, NamedTuple

import cv2
import numpy as np
import numpy.typing as npt

from ..types import Mask

LIMIT = 32768.0
"""Logits are clamped to -LIMIT..LIMIT, and NaN counts as -LIMIT."""
_ROUNDING = 2.0**-21
"""Bound of the error of a float32 interpolation, as a part of the largest logit and for each pixel of a side.

A coordinate of 24 bits is wrong by its 2^-24th part, which enters two weights on each of two axes: 2^-22. The rest, and
8 pixels more, are for the roundings of the products and sums, and a margin for other builds of OpenCV."""


class Axis(NamedTuple):
    """Interpolation along one axis, for each of its `high` pixels: first[i] * near[i] + second[i] * far[i]."""

    first: npt.NDArray[np.int64]
    """index of the low pixel before"""
    second: npt.NDArray[np.int64]
    """index of the one after, or of the same at the end"""
    near: npt.NDArray[np.float32]
    far: npt.NDArray[np.float32]
    """integer weights; their sum is 2 * high for all pixels"""


@lru_cache(maxsize=64)
def axis(low: int, high: int) -> Axis:
    """Return the interpolation from `low` pixels to `high` pixels."""
    whole = 2 * high
    place = np.clip((2 * np.arange(high) + 1) * low - high, 0, (low - 1) * whole)
    first, far = np.divmod(place, whole)
    return Axis(
        first, np.minimum(first + 1, low - 1), (whole - far).astype(np.float32), far.astype(np.float32)
    )


def blend(before: Any, after: Any, near: Any, far: Any) -> Any:
    """Return before * near + after * far, all float32. Arrays and tensors give the same bits, if none is compiled."""
    return before * near + after * far


def rasterize(logits: npt.NDArray[np.float32], frame_size: tuple[int, int]) -> Mask:
    """Return the mask at `frame_size` (height, width) where the interpolation of logits float32 [h, w] is positive."""
    x0, y0, width, height = _bounding_box(logits > 0)
    if not width:
        return Mask.empty(frame_size)
    rows, top, y_scale = _aligned_span(y0, y0 + height, logits.shape[0], frame_size[0])
    columns, left, x_scale = _aligned_span(x0, x0 + width, logits.shape[1], frame_size[1])
    low = logits[rows, columns]
    largest = float(np.abs(low).max())
    if not largest <= LIMIT:
        low, largest = clamp(low), LIMIT
    # with dsize=None cv2 scales by exactly fx and fy; warpAffine would round coordinates to 1/32 pixel
    region = cv2.resize(low, None, fx=x_scale, fy=y_scale, interpolation=cv2.INTER_LINEAR)
    error = largest * (max(low.shape) + 8) * _ROUNDING
    inside, possible = region > error, region > -error
    if _count(inside) != _count(possible):
        y, x = _find(possible ^ inside)
        inside[y, x] = _interpolate_at(logits, frame_size, y + top, x + left) > 0
    return crop_mask(inside, (left, top), frame_size)


def crop_mask(inside: npt.NDArray[np.bool_], corner: tuple[int, int], frame_size: tuple[int, int]) -> Mask:
    """Return the mask of a frame from a region of it, bool [h, w], whose top-left pixel is `corner` (x, y)."""
    (x, y, width, height), (left, top) = _bounding_box(inside), corner
    if not width:
        return Mask.empty(frame_size)
    box = (left + x, top + y, left + x + width, top + y + height)
    return Mask(frame_size, box, np.ascontiguousarray(inside[y : y + height, x : x + width]))


def clamp(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return logits in -LIMIT..LIMIT."""
    return np.fmin(np.fmax(logits, np.float32(-LIMIT)), np.float32(LIMIT))


def _bounding_box(inside: npt.NDArray[np.bool_]) -> Sequence[int]:
    """Return x, y, width and height of the pixels that are True; zeros if there are none."""
    box: Sequence[int] = cv2.boundingRect(inside.view(np.uint8))
    return box


def _count(inside: npt.NDArray[np.bool_]) -> int:
    return cv2.countNonZero(inside.view(np.uint8))


def _find(inside: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return y and x of the few pixels that are True; searching in all rows would take longer."""
    rows = np.flatnonzero(cv2.reduce(inside.view(np.uint8), 1, cv2.REDUCE_MAX))
    y, x = np.nonzero(inside[rows])
    return rows[y], x


def _interpolate_at(
    logits: npt.NDArray[np.float32],
    frame_size: tuple[int, int],
    y: npt.NDArray[np.int64],
    x: npt.NDArray[np.int64],
) -> npt.NDArray[np.float32]:
    """Return the interpolation at pixels (y, x) of the frame by the definition, up to a positive factor."""
    rows, columns = axis(logits.shape[0], frame_size[0]), axis(logits.shape[1], frame_size[1])
    before, after = (
        blend(
            clamp(logits[rows.first[y], column[x]]),
            clamp(logits[rows.second[y], column[x]]),
            rows.near[y],
            rows.far[y],
        )
        for column in (columns.first, columns.second)
    )
    found: npt.NDArray[np.float32] = blend(before, after, columns.near[x], columns.far[x])
    return found


def _aligned_span(begin: int, end: int, low: int, high: int) -> tuple[slice, int, float]:
    """Return the span of the low axis that [begin, end) needs, its start on the high axis, and the scale.

    The span has one pixel more at each side, because a positive logit reaches that far. At both ends, pixel edges of
    the two axes coincide, so the span scales to a whole number of pixels.
    """
    step = low // gcd(low, high)
    first = max(begin - 1, 0) // step * step
    last = min(-(-(end + 1) // step) * step, low)
    return slice(first, last), first * high // low, high / low
