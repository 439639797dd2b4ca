"""Samples of the depth under masks: one image with the thinned masks of all objects, one below the other.

Each filter is then one call for all objects. With masks of a few hundred samples, a call costs more than its samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..geometry import deproject
from ..types import Intrinsics, Mask

Float = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.intp]
DepthImage = npt.NDArray[np.uint16]

_BOX_PIXELS = 10  # of a mask's box are looked at for each used one, at most


class DepthMap(NamedTuple):
    """A depth image with what turns it into points."""

    image: DepthImage
    """uint16 [height, width], in units of `scale_m`; 0 is unknown"""
    scale_m: float
    rays: Float
    """[2, height, width], of `RayMap`"""
    focal_px: float


class RayMap:
    """Directions (x / z, y / z) of all pixels, float32 [2, height, width], computed when the intrinsics change."""

    def __init__(self) -> None:
        self._key: tuple[Intrinsics, tuple[int, int]] | None = None
        self._rays: Float = np.empty((2, 0, 0), np.float32)

    def rays(self, intrinsics: Intrinsics, size: tuple[int, int]) -> Float:
        """Return the directions for an image of `size` (height, width)."""
        if self._key != (intrinsics, size):
            rows, columns = np.indices(size)
            pixels = np.stack([columns, rows], axis=-1).reshape(-1, 2)
            rays = deproject(pixels, 1.0, intrinsics)[:, :2]
            self._rays = np.ascontiguousarray(rays.T.reshape(2, *size), np.float32)
            self._key = (intrinsics, size)
        return self._rays


class Samples:
    """The thinned masks with depths and rays, one below the other in one image with an empty row between them."""

    def __init__(self, masks: Sequence[Mask], depth: DepthMap, target: int) -> None:
        boxes = [_thin(mask, target) for mask in masks]
        crops = [mask.crop[box.crop] for mask, box in zip(masks, boxes, strict=True)]
        self.steps = np.array([box.step for box in boxes])
        """[N], distance of samples in pixels"""
        self.offsets_px = np.array([box.offset_px for box in boxes])
        """[N, 2], x and y from the samples' middle to the middle of the mask's box"""
        self.heights = np.array([len(crop) + 1 for crop in crops])
        """[N], rows of each mask"""
        self.starts = np.append(0, self.heights.cumsum())
        """[N + 1], first row of each mask"""
        shape = (int(self.starts[-1]), max((crop.shape[1] for crop in crops), default=0))
        self.inside = np.zeros(shape, np.bool_)
        z, self.rays = np.zeros(shape, np.uint16), np.zeros((2, *shape), np.float32)
        for start, crop, box in zip(self.starts.tolist(), crops, boxes, strict=False):
            height, width = crop.shape
            self.inside[start : start + height, :width] = crop
            z[start : start + height, :width] = depth.image[box.image]
            self.rays[:, start : start + height, :width] = depth.rays[:, *box.image]
        self.z: Float = z * np.float32(depth.scale_m)
        self.bounds = self.starts * shape[1]
        """[N + 1], the first flat index of each mask"""

    def rows(self, index: int) -> slice:
        """Return the rows of a mask."""
        return slice(self.starts[index], self.starts[index + 1])

    def count(self, chosen: Bools) -> Ints:
        """Return the number of chosen samples of each mask, [N]."""
        counts: Ints = np.add.reduceat(chosen.ravel(), self.bounds[:-1], dtype=np.intp)
        return counts

    def find_bounds(self, indices: Ints) -> Ints:
        """Return N + 1 places in sorted flat indices of samples: those of each mask lie between two of them."""
        return np.searchsorted(indices, self.bounds)


class _Thinning(NamedTuple):
    """The samples of a mask: slices of its crop and of the whole image."""

    step: int
    crop: tuple[slice, slice]
    image: tuple[slice, slice]
    offset_px: tuple[float, float]


def _thin(mask: Mask, target: int) -> _Thinning:
    """Take samples symmetrically about the box's middle as far as whole pixels allow."""
    x0, y0, x1, y1 = mask.box
    box_step = math.ceil(math.sqrt(mask.crop.size / (_BOX_PIXELS * target)))
    step = max(1, box_step, round(math.sqrt(mask.area / target)))
    left, top = (x1 - x0 - 1) % step, (y1 - y0 - 1) % step
    return _Thinning(
        step,
        (slice(top // 2, None, step), slice(left // 2, None, step)),
        (slice(y0 + top // 2, y1, step), slice(x0 + left // 2, x1, step)),
        (left % 2 / 2, top % 2 / 2),
    )
