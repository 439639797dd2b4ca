"""The frame that a pick is looked for on: its points in the robot's base or the camera, and which object each is of.

It is made when a user asks for a pick, from what the last step has measured, so that a step costs nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ...geometry import Array, DepthMap, Float, transform_points
from ...types import Mask, Plane
from ..step import BASE, CAMERA
from ..surfaces import NOISE_PER_M, Bools

CELLS = 80_000
"""Points of the frame that are looked at, about."""
NO_OBJECT = -1
"""Label of what no object's mask has: bin, table, and things that are not tracked."""
UNKNOWN = -2
"""Label of the robot's pixels, which say nothing of what is beneath."""
LEAST_NOISE_M = 0.001
"""Least standard deviation of a depth."""

Labels = npt.NDArray[np.int32]


@dataclass(frozen=True)
class PickView:
    """What the last step knows of the scene. Coordinates are those of `frame`."""

    depth: DepthMap
    base_from_camera: Array | None
    table: Plane | None
    robot: Bools | None
    """[h, w], the robot's pixels"""
    masks: Sequence[Mask]
    """of all objects, also doubtful ones"""

    @property
    def frame(self) -> str:
        """The coordinate frame of all points and directions."""
        return CAMERA if self.base_from_camera is None else BASE

    @cached_property
    def up(self) -> Array:
        """The direction [3] in which things are lifted: the table's normal; without a table, towards the camera."""
        if self.table is not None:
            return np.array(self.table.normal)
        towards = np.array([0.0, 0.0, -1.0])
        return towards if self.base_from_camera is None else self.base_from_camera[:3, :3] @ towards

    @property
    def floor_m(self) -> float | None:
        """Height of the table along `up`; None if it is not known."""
        return None if self.table is None else self.table.offset_m

    def place(self, points_m: npt.ArrayLike) -> Array:
        """Return points [..., 3] of the camera in `frame`."""
        points = np.asarray(points_m, np.float64)
        return points if self.base_from_camera is None else transform_points(self.base_from_camera, points)

    def turn(self, way: Array) -> Array:
        """Return a direction [3] of the camera in `frame`."""
        return way if self.base_from_camera is None else self.base_from_camera[:3, :3] @ way

    @property
    def stride(self) -> int:
        """Pixels from one cell to the next."""
        return max(1, round(math.sqrt(self.depth.image.size / CELLS)))

    @property
    def _thinned(self) -> tuple[slice, slice]:
        return slice(None, None, self.stride), slice(None, None, self.stride)

    @cached_property
    def z_m(self) -> Float:
        """Depths [a, b] of the cells; 0: none."""
        return self.depth.image[self._thinned] * np.float32(self.depth.scale_m)

    @cached_property
    def points_m(self) -> Array:
        """Points [a, b, 3] of the cells; those without depth mean nothing."""
        x, y = self.depth.rays[:, *self._thinned] * self.z_m
        return self.place(np.stack([x, y, self.z_m], axis=-1))

    @cached_property
    def heights_m(self) -> Array:
        """Heights [a, b] of the cells along `up`, from the origin of `frame`."""
        return self.points_m @ self.up

    @cached_property
    def labels(self) -> Labels:
        """The index [a, b] in `masks` of each cell, NO_OBJECT or UNKNOWN. Where masks overlap, the later one counts."""
        labels = np.full(self.depth.image.shape, NO_OBJECT, np.int32)
        for index, mask in enumerate(self.masks):
            mask.paint(labels, index)
        if self.robot is not None:
            labels[self.robot] = UNKNOWN
        return labels[self._thinned]

    @cached_property
    def spacing_m(self) -> float:
        """Distance of two cells beside each other, at the middle depth."""
        known = self.z_m[self.z_m > 0]
        return self.stride * float(np.median(known)) / self.depth.focal_px if known.size else 0.0

    def around(self, index: int, margin_m: float) -> tuple[slice, slice]:
        """Return rows and columns of the cells around a mask, up to about this distance from its box."""
        margin = math.ceil(margin_m / self.spacing_m) if self.spacing_m else 0
        x0, y0, x1, y1 = (side // self.stride for side in self.masks[index].box)
        return slice(max(0, y0 - margin), y1 + 1 + margin), slice(max(0, x0 - margin), x1 + 1 + margin)

    def list_others(self, index: int, margin_m: float) -> tuple[Array, Float]:
        """Return points [n, 3] around a mask that are not in it, with their depths [n]."""
        part = self.around(index, margin_m)
        z_m = self.z_m[part]
        others = (self.labels[part] != index) & (z_m > 0)
        return self.points_m[part][others], z_m[others]


def expect_noise(depth_m: npt.ArrayLike) -> Array:
    """Return the standard deviation of depths, in metres."""
    depths = np.asarray(depth_m, np.float64)
    return np.maximum(LEAST_NOISE_M, NOISE_PER_M * depths * depths)
