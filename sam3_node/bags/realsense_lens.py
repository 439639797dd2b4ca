"""Lenses as RealSense's SDK describes them, as this package's intrinsics."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..types import Intrinsics
from .ros_images import MessageError

# what the SDK calls inverse it projects by as it does by the modified: forward, as OpenCV
_KNOWN = ("None", "Brown Conrady", "Modified Brown Conrady", "Inverse Brown Conrady", "Kannala Brandt4")


def lens_of(
    size: tuple[int, int], matrix: Sequence[float], model: str, coeffs: Sequence[float]
) -> Intrinsics | None:
    """Intrinsics of images of `size` (width, height); `matrix` is fx, fy, cx, cy. None where all of these are 0.

    MessageError for figures that are no lens, and for a model that is not known.
    """
    fx, fy, cx, cy = matrix
    if not any(matrix):
        return None
    if not all(map(math.isfinite, (*matrix, *coeffs))) or min(fx, fy, *size) <= 0 or len(coeffs) != 5:
        raise MessageError(
            f"expected a lens of {size[0]} x {size[1]} pixels, found {list(matrix)}, {list(coeffs)}"
        )
    if model not in _KNOWN:
        raise MessageError(f"expected a lens of {', '.join(_KNOWN)}, found {model!r}")
    if model == "None" or not any(coeffs):
        return Intrinsics(fx, fy, cx, cy)
    if model == "Kannala Brandt4":
        return Intrinsics(fx, fy, cx, cy, "fisheye", tuple(coeffs[:4]))
    return Intrinsics(fx, fy, cx, cy, "brown_conrady", tuple(coeffs))
