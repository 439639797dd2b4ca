"""Masks at the size that a policy takes, by the nearest pixel, and their boxes."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ...types import Mask

Fit = Literal["stretch", "pad"]
"""stretch: the frame fills the size. pad: in proportion, in the middle, with margins."""


class Fitted(NamedTuple):
    """A mask bool [height, width] with at least one pixel, and its box (x0, y0, x1, y1) in pixels, not rounded."""

    mask: npt.NDArray[np.bool_]
    box: tuple[float, float, float, float]


def fit_mask(mask: Mask, size: tuple[int, int], fit: Fit = "stretch") -> Fitted | None:
    """Sample a mask to `size` (height, width). Returns None for an empty one.

    If no sampled pixel is inside, the one nearest to the middle of the mask's pixels is set. "pad" has the margins of
    openpi's `resize_with_pad` and tf.image.resize_with_pad.
    """
    if not mask.area:
        return None
    (top, bottom), (left, right) = _place_frame(mask.size, size, fit)
    x0, y0, x1, y1 = mask.box
    rows, columns = _sample(mask.size[0], bottom - top), _sample(mask.size[1], right - left)
    first, last = np.searchsorted(rows, (y0, y1))
    begin, end = np.searchsorted(columns, (x0, x1))
    image = np.zeros(size, np.bool_)
    inside = mask.crop[np.ix_(rows[first:last] - y0, columns[begin:end] - x0)]
    image[top + first : top + last, left + begin : left + end] = inside
    scale_y, scale_x = (bottom - top) / mask.size[0], (right - left) / mask.size[1]
    if not inside.any():
        pixels = np.argwhere(mask.crop)
        y, x = pixels[len(pixels) // 2]
        image[top + int((y0 + y + 0.5) * scale_y), left + int((x0 + x + 0.5) * scale_x)] = True
    box = (left + x0 * scale_x, top + y0 * scale_y, left + x1 * scale_x, top + y1 * scale_y)
    return Fitted(image, box)


def _place_frame(
    frame: tuple[int, int], size: tuple[int, int], fit: Fit
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (top, bottom) and (left, right) of the frame in an image of `size`."""
    if fit == "stretch":
        return (0, size[0]), (0, size[1])
    ratio = max(frame[0] / size[0], frame[1] / size[1])
    height, width = max(1, int(frame[0] / ratio)), max(1, int(frame[1] / ratio))
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    return (top, top + height), (left, left + width)


def _sample(source: int, target: int) -> npt.NDArray[np.intp]:
    """Return the source pixel at the centre of each target pixel."""
    return ((2 * np.arange(target) + 1) * source // (2 * target)).astype(np.intp)
