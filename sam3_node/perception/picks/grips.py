"""Find how a parallel gripper takes an object from above, from the points of its visible surface.

The fingers come down along the direction against which the object is lifted, and close along one of the two sides of
the smallest rectangle around its upper points.
"""

from __future__ import annotations

from typing import NamedTuple

import cv2
import numpy as np

from ...geometry import Array, Float, axes_along
from ..surfaces import MIN_PIXELS, trim_ends
from .view import PickView, expect_noise

DEPTHS_M = (0.02, 0.013, 0.008)
"""How far below the object's top the fingertips may be. The first one with room is taken."""
FINGER_WIDTH_M = 0.016
"""Width of a finger across the direction in which it closes."""
FINGER_THICK_M = 0.012
"""Room that an open finger needs beside the object."""
FLOOR_GAP_M = 0.003
"""Least height of the fingertips above the table."""
TOP_PERCENTILE = 98
"""Percentile of the heights of an object's points that is its top."""
UPPER_SHARE = 0.05
"""Share of an object's points above the fingertips. Fewer may be wrong depths."""
LEAST_WIDTH_M = 0.003
"""Least width of what is held."""
BLOCKING = 3
"""Cells higher than the fingertips that block a finger."""


class FingerGrip(NamedTuple):
    """Where a parallel gripper closes, in the frame of the view."""

    point_m: Array
    """[3], between the fingertips"""
    rotation: Array
    """[3, 3], columns are the gripper's axes: z ahead, the fingers close along y"""
    width_m: float
    """of the object between the fingers"""
    depth_m: float
    """of the fingertips below the object's top"""


def find_grips(view: PickView, points_m: Array) -> list[FingerGrip]:
    """Return the grips of an object by its points [n, 3]: the deepest first, of each depth the narrower one first."""
    up = view.up
    heights = points_m @ up
    top_m = float(np.percentile(heights, TOP_PERCENTILE))
    level = axes_along(up)[:, :2]
    found = []
    for depth_m in DEPTHS_M:
        upper = points_m[heights > top_m - depth_m]
        is_above = view.floor_m is None or top_m - depth_m > view.floor_m + FLOOR_GAP_M
        if is_above and len(upper) >= max(MIN_PIXELS, UPPER_SHARE * len(points_m)):
            angle = np.radians(cv2.minAreaRect((upper @ level).astype(np.float32))[2])
            cosine = np.cos(angle)
            sine = np.sin(angle)
            sides = level @ np.array([[cosine, -sine], [sine, cosine]])
            found += _close(upper, sides, (top_m - depth_m) * up, depth_m)
    return found


def _close(upper: Array, sides: Array, base_m: Array, depth_m: float) -> list[FingerGrip]:
    """Return the grips of upper points [n, 3] along both sides [3, 2], the narrower one first.

    `base_m` [3] is a point at the height of the fingertips, straight above or below the frame's origin.
    """
    low, high = trim_ends((sides.T @ upper.T).astype(np.float32))
    middle = sides @ ((low + high) / 2).astype(np.float64) + base_m
    up = np.cross(sides[:, 0], sides[:, 1])
    grips = []
    for axis in np.argsort(high - low, kind="stable").tolist():
        y = sides[:, axis]
        rotation = np.column_stack([np.cross(y, -up), y, -up])
        grips.append(FingerGrip(middle, rotation, float(high[axis] - low[axis]), depth_m))
    return [grip for grip in grips if grip.width_m >= LEAST_WIDTH_M]


def has_room(view: PickView, index: int, grip: FingerGrip) -> bool:
    """Return True if nothing else that the camera sees is where the open fingers come down, or above the object."""
    points_m, depths_m = view.list_others(index, grip.width_m / 2 + FINGER_THICK_M)
    across, along, down = ((points_m - grip.point_m) @ grip.rotation).T
    half = grip.width_m / 2
    beside = np.abs(along) > half
    # z leads down, so what is higher than the fingertips has a negative one
    lowest = np.where(beside, 0.0, -grip.depth_m) - 2 * expect_noise(depths_m)
    in_reach = (np.abs(along) < half + FINGER_THICK_M) & (np.abs(across) < FINGER_WIDTH_M / 2)
    return int(np.count_nonzero(in_reach & (down < lowest))) < BLOCKING


def list_upper_points(view: PickView, points_m: Float) -> Array:
    """Return measured points [n, 3] of the camera in the frame of the view, without those that the table may have."""
    placed = view.place(points_m)
    if view.floor_m is None:
        return placed
    limit = np.maximum(0.005, 3 * expect_noise(points_m[:, 2]))
    return placed[placed @ view.up - view.floor_m > limit]
