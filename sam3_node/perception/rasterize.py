"""Low-resolution logits to a binary mask at frame size, touching the object's region alone."""

from __future__ import annotations

from math import gcd

import cv2
import numpy as np
import numpy.typing as npt

from ..types import Mask


def rasterize(logits: npt.NDArray[np.float32], frame_size: tuple[int, int]) -> Mask:
    """Logits float32 [h, w] -> the mask, at `frame_size` (height, width), of where they are positive.

    Equals a bilinear upsampling of the whole (torch, align_corners=False) compared with zero.
    """
    positive = Mask.from_full(logits > 0)
    if not positive.crop.size:
        return Mask.empty(frame_size)
    x0, y0, x1, y1 = positive.box
    rows, top, y_scale = _aligned_span(y0, y1, logits.shape[0], frame_size[0])
    columns, left, x_scale = _aligned_span(x0, x1, logits.shape[1], frame_size[1])
    # dsize=None: cv2 then scales by exactly fx, fy; warpAffine would round coordinates to 1/32 pixel
    region = cv2.resize(logits[rows, columns], None, fx=x_scale, fy=y_scale, interpolation=cv2.INTER_LINEAR)
    mask = Mask.from_full(region > 0)
    if not mask.crop.size:
        return Mask.empty(frame_size)
    x0, y0, x1, y1 = mask.box
    return Mask(frame_size, (x0 + left, y0 + top, x1 + left, y1 + top), mask.crop)


def _aligned_span(begin: int, end: int, low: int, high: int) -> tuple[slice, int, float]:
    """The span of the low axis that [begin, end) needs, where on the high axis it starts, and the scale.

    One pixel more at each side, as far as a positive logit reaches. Both ends lie where a pixel edge of one
    axis falls on a pixel edge of the other, so that the span scales to a whole number of pixels.
    """
    step = low // gcd(low, high)
    first = max(begin - 1, 0) // step * step
    last = min(-(-(end + 1) // step) * step, low)
    return slice(first, last), first * high // low, high / low
