"""Lenses as RealSense's SDK describes them, as this package's intrinsics."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..types import Intrinsics
from .ros_images import MessageError

_KNOWN = ("None", "Brown Conrady", "Modified Brown Conrady", "Inverse Brown Conrady", "Kannala Brandt4")
_GRID = 25  # lines each way of the pixels that an inverse lens is fitted at

Points = npt.NDArray[np.float64]


def lens_of(
    size: tuple[int, int], matrix: Sequence[float], model: str, coeffs: Sequence[float]
) -> Intrinsics | None:
    """Intrinsics of images of `size` (width, height); `matrix` is fx, fy, cx, cy. None where all of these are 0.

    An inverse model, from distorted to undistorted, becomes the forward one nearest to it over the image.
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
    if model == "Inverse Brown Conrady":
        coeffs = _forward(_rays(size, matrix), coeffs)
    return Intrinsics(fx, fy, cx, cy, "brown_conrady", tuple(coeffs))


def _rays(size: tuple[int, int], matrix: Sequence[float]) -> Points:
    """Rays [count, 2] at depth 1 through pixels all over the image."""
    fx, fy, cx, cy = matrix
    columns, rows = (np.linspace(0, side - 1, _GRID) for side in size)
    x, y = np.meshgrid((columns - cx) / fx, (rows - cy) / fy)
    return np.stack([x.ravel(), y.ravel()], axis=1)


def _forward(distorted: Points, inverse: Sequence[float]) -> tuple[float, ...]:
    """The Brown-Conrady coefficients k1, k2, p1, p2, k3 that undo `inverse`, by least squares."""
    undistorted = distorted + (_terms(distorted) @ np.asarray(inverse)).reshape(-1, 2)
    found = np.linalg.lstsq(_terms(undistorted), (distorted - undistorted).ravel(), rcond=None)[0]
    return tuple(map(float, found))


def _terms(rays: Points) -> Points:
    """What k1, k2, p1, p2 and k3 move rays by, each as if it were 1: [count * 2, 5], x and y by turns."""
    x, y = rays[:, 0], rays[:, 1]
    square = x * x + y * y
    radial = [rays * (square**power)[:, None] for power in (1, 2, 3)]
    p1 = np.stack([2 * x * y, square + 2 * y * y], axis=1)
    p2 = np.stack([square + 2 * x * x, 2 * x * y], axis=1)
    return np.stack([radial[0], radial[1], p1, p2, radial[2]], axis=2).reshape(-1, 5)
