"""Project convex bodies onto images: their outlines, also across the image's edge and beside the camera."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import cv2
import numpy as np
import numpy.typing as npt

from ..geometry import Array, Float, deproject, project
from ..types import Intrinsics

Ints = npt.NDArray[np.int64]

NEAR_M = 0.02
"""Parts are cut off at this distance in front of the camera."""
EDGE_POINTS = 12
"""Points of each edge of an outline that a lens bends."""
SHIFT = 4
"""Bits of a part of a pixel, in OpenCV's drawing."""


class LensView:
    """The projection of a camera onto images of `size` (height, width)."""

    def __init__(self, intrinsics: Intrinsics, size: tuple[int, int]) -> None:
        self.intrinsics = intrinsics
        self.size = size
        height, width = size
        rim = np.array([(x, y) for x in np.linspace(0, width - 1, 9) for y in np.linspace(0, height - 1, 9)])
        rays = deproject(rim, 1.0, intrinsics)[:, :2]
        edge = 0.1 * (rays.max(axis=0) - rays.min(axis=0))
        self._low = rays.min(axis=0) - edge
        self._high = rays.max(axis=0) + edge
        """directions (x / z, y / z) a little beyond the image, where a lens model still holds"""

    def outlines(
        self, points_m: Array, starts: Ints, edges: Sequence[Ints]
    ) -> Iterator[npt.NDArray[np.int32] | None]:
        """Yield the outline [n, 2] of each body, the convex hull of its points, in OpenCV's shifted pixels.

        points_m [n, 3] are in the camera; the bodies begin at `starts`, and have `edges` [m, 2] between their points.
        None for a body that is out of the image.
        """
        z = points_m[:, 2]
        nearest = np.minimum.reduceat(z, starts)
        # a body that comes nearer is cut below; here it must only not divide by zero
        rays = (points_m[:, :2] / np.maximum(z, NEAR_M)[:, None]).astype(np.float32)
        low = np.minimum.reduceat(rays, starts)
        high = np.maximum.reduceat(rays, starts)
        outside = ((high < self._low) | (low > self._high)).any(axis=1)
        across = ((low < self._low) | (high > self._high)).any(axis=1)
        for index, (start, end) in enumerate(pairwise([*starts.tolist(), len(z)])):
            if nearest[index] < NEAR_M:
                yield self._close(_cut_near(points_m[start:end], edges[index]), True)
            else:
                yield None if outside[index] else self._close(rays[start:end], bool(across[index]))

    def _close(self, rays: Float, may_leave: bool) -> npt.NDArray[np.int32] | None:
        if not len(rays):
            return None
        corners = cv2.convexHull(rays).reshape(-1, 2).astype(float)
        # beyond this field a lens model may fold back into the image
        if may_leave:
            corners = _clip(corners, self._low, self._high)
            if not len(corners):
                return None
        lens = self.intrinsics
        if lens.model == "none":
            pixels = corners * (lens.fx, lens.fy) + (lens.cx, lens.cy)
        else:
            # a lens bends straight edges, so points between the corners are also projected
            steps = np.linspace(0, 1, EDGE_POINTS, endpoint=False)[:, None]
            edges = (corners[:, None] + steps * (np.roll(corners, -1, axis=0) - corners)[:, None]).reshape(
                -1, 2
            )
            pixels = project(np.insert(edges, 2, 1.0, axis=1), lens)
        outline: npt.NDArray[np.int32] = np.rint(pixels * (1 << SHIFT)).astype(np.int32)
        return outline


def _clip(corners: Array, low: Array, high: Array) -> Array:
    """Return the part of a convex outline [n, 2] between two corners of a box, by Sutherland and Hodgman.

    OpenCV's intersection of convex outlines gives the whole box for some thin outlines of many corners.
    """
    for axis, bound, sign in ((0, low, 1), (0, high, -1), (1, low, 1), (1, high, -1)):
        depth = sign * (corners[:, axis] - bound[axis])
        inside = depth >= 0
        if inside.all():
            continue
        following = np.roll(depth, -1)
        crosses = inside != (following >= 0)
        share = np.zeros(len(corners))
        share[crosses] = depth[crosses] / (depth - following)[crosses]
        met = corners + share[:, None] * (np.roll(corners, -1, axis=0) - corners)
        # each corner that is inside, then the point where the edge after it meets the bound
        corners = np.stack([corners, met], axis=1)[np.column_stack([inside, crosses])]
    return corners


def _cut_near(points_m: Array, edges: Ints) -> Float:
    """Return directions (x / z, y / z) whose hull is the visible part of a convex body, by its edges [m, 2]."""
    ahead = points_m[:, 2] >= NEAR_M
    # where edges meet the plane are the corners of the cut through the body
    crossing = edges[ahead[edges[:, 0]] != ahead[edges[:, 1]]]
    one = points_m[crossing[:, 0]]
    other = points_m[crossing[:, 1]]
    share = (one[:, 2:] - NEAR_M) / (one[:, 2:] - other[:, 2:])
    kept = np.concatenate([points_m[ahead], one + share * (other - one)])
    rays: Float = (kept[:, :2] / kept[:, 2:]).astype(np.float32)
    return rays
