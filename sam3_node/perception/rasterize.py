"""Turn low-resolution logits into a binary mask at frame size. Only the object's region is upsampled."""

from __future__ import annotations

from math import gcd

import cv2
import numpy as np
import numpy.typing as npt

from ..types import Mask


def rasterize(logits: npt.NDArray[np.float32], frame_size: tuple[int, int]) -> Mask:
    """Return the mask at `frame_size` (height, width) where logits float32 [h, w] are positive.

    Equals bilinear upsampling of all logits (torch, align_corners=False), compared with zero.
    """
    positive = Mask.from_full(logits > 0)
    if not positive.crop.size:
        return Mask.empty(frame_size)
    x0, y0, x1, y1 = positive.box
    rows, top, y_scale = _aligned_span(y0, y1, logits.shape[0], frame_size[0])
    columns, left, x_scale = _aligned_span(x0, x1, logits.shape[1], frame_size[1])
    # with dsize=None cv2 scales by exactly fx and fy; warpAffine would round coordinates to 1/32 pixel
    region = cv2.resize(logits[rows, columns], None, fx=x_scale, fy=y_scale, interpolation=cv2.INTER_LINEAR)
    mask = Mask.from_full(region > 0)
    if not mask.crop.size:
        return Mask.empty(frame_size)
    x0, y0, x1, y1 = mask.box
    return Mask(frame_size, (x0 + left, y0 + top, x1 + left, y1 + top), mask.crop)


def _aligned_span(begin: int, end: int, low: int, high: int) -> tuple[slice, int, float]:
    """Return the span of the low axis that [begin, end) needs, its start on the high axis, and the scale.

    The span has one pixel more at each side, because a positive logit reaches that far. At both ends, pixel edges of
    the two axes coincide, so the span scales to a whole number of pixels.
    """
    step = low // gcd(low, high)
    first = max(begin - 1, 0) // step * step
    last = min(-(-(end + 1) // step) * step, low)
    return slice(first, last), first * high // low, high / low
