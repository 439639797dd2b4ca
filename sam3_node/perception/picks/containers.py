"""Measure a container, such as a bin: its inside between four walls, and how full it is, from one frame.

Seen from above, the rim is a ring of high places around lower ones. The highest ring that is nearly a rectangle is the
rim, whatever lies inside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

import cv2
import numpy as np
import numpy.typing as npt

from ...geometry import Array, axes_along
from ..surfaces import Bools
from .view import UNKNOWN, PickView

CELL_M = 0.005
"""Side of a cell of the height map."""
MAX_CELLS = 400
"""Cells of a side of the height map, and of an inside. What is wider has larger cells."""
STEP_M = 0.01
"""Distance of the heights at which a rim is looked for."""
LEAST_DEPTH_M = 0.03
"""Least height of a rim above the table."""
MOST_DEPTH_M = 1.0
"""Largest height of a rim above the table."""
LEAST_SIDE_M = 0.08
"""Least side of the inside."""
RECTANGLE_SHARE = 0.85
"""Share of the smallest rectangle around it that the place inside a rim fills at least."""
FLOOR_M = 0.02
"""Thickness of a floor. What is seen lowest inside and lies higher above the table is not the floor."""
LOWEST_PERCENTILE = 5
"""Percentile of the heights inside that is the lowest one."""
KNOWN_SHARE = 0.5
"""Share of the cells inside whose height must be seen to tell how full it is."""


class Inside(NamedTuple):
    """The inside of a container, in the frame of the view."""

    floor_m: Array
    """[3], middle of its floor"""
    axes: Array
    """[3, 3], columns are the directions of its length, its width, and up"""
    size_m: Array
    """[3], length, width, depth"""

    @classmethod
    def of(cls, given: Sequence[float], up: Array) -> Self:
        """Return that of the setting: x, y, z of the floor's middle, yaw in degrees, length, width, depth in metres."""
        x, y, z, yaw_deg, *size = given
        angle = np.radians(yaw_deg)
        turn = np.array([[np.cos(angle), -np.sin(angle), 0], [np.sin(angle), np.cos(angle), 0], [0, 0, 1]])
        # about the base's z, then upright on the table
        ahead = turn[:, 0] - (turn[:, 0] @ up) * up
        ahead /= np.linalg.norm(ahead)
        return cls(np.array([x, y, z]), np.column_stack([ahead, np.cross(up, ahead), up]), np.array(size))


class _HeightMap(NamedTuple):
    """The highest points of a frame on a level grid."""

    heights: Array
    """[a, b], along up; -inf where nothing was seen"""
    origin_m: Array
    """[2], of the middle of the first cell, in level coordinates (x along the second axis)"""
    cell_m: float
    level: Array
    """[3, 2], directions of the level coordinates"""


def find_inside(view: PickView) -> Inside | None:
    """Return the container on a frame with a table; None if there is no rim around a lower place."""
    if view.floor_m is None:
        return None
    heights = _map_heights(view)
    if heights is None:
        return None
    low = view.floor_m + LEAST_DEPTH_M
    seen = heights.heights[heights.heights > low]
    if not seen.size:
        return None
    top = min(float(seen.max()), view.floor_m + MOST_DEPTH_M)
    for height in np.arange(top, low, -STEP_M):
        rectangles = list(_list_holes(heights, float(height)))
        if rectangles:
            hole, rectangle = max(rectangles, key=lambda found: float(np.prod(found[1][1])))
            return _describe(view, heights, hole, rectangle)
    return None


def _list_points(view: PickView) -> Array:
    """Return the points [n, 3] of the view that are not the robot's."""
    points_m: Array = view.points_m[(view.z_m > 0) & (view.labels != UNKNOWN)]
    return points_m


def _map_heights(view: PickView) -> _HeightMap | None:
    points = _list_points(view)
    if len(points) < 100:
        return None
    level = axes_along(view.up)[:, :2]
    flat = points @ level
    low, high = np.percentile(flat, (0.5, 99.5), axis=0)
    cell_m = max(CELL_M, view.spacing_m * 1.5, float((high - low).max()) / MAX_CELLS)
    columns, rows = (int(side) for side in np.ceil((high - low) / cell_m) + 1)
    places = np.floor((flat - low) / cell_m).astype(np.int64)
    is_in = ((places >= 0) & (places < (columns, rows))).all(axis=1)
    heights = np.full((rows, columns), -np.inf)
    np.maximum.at(heights, (places[is_in, 1], places[is_in, 0]), points[is_in] @ view.up)
    return _HeightMap(heights, low + cell_m / 2, cell_m, level)


def _list_holes(
    heights: _HeightMap, height: float
) -> Iterator[tuple[npt.NDArray[np.int32], cv2.typing.RotatedRect]]:
    """Yield the nearly rectangular places that are enclosed by what is higher, with their smallest rectangles."""
    high = (heights.heights >= height).astype(np.uint8)
    # a rim is one or two cells wide, and depth lacks here and there
    closed = cv2.morphologyEx(high, cv2.MORPH_CLOSE, np.ones((3, 3), np.uint8))
    contours, tree = cv2.findContours(closed, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_NONE)
    for contour, parent in zip(contours, () if tree is None else tree[0, :, 3], strict=True):
        if parent < 0:
            continue
        rectangle = cv2.minAreaRect(contour)
        area = float(np.prod(rectangle[1]))
        is_large = min(rectangle[1]) * heights.cell_m >= LEAST_SIDE_M
        if is_large and cv2.contourArea(contour) >= RECTANGLE_SHARE * area:
            yield np.asarray(contour, np.int32), rectangle


def _describe(
    view: PickView,
    heights: _HeightMap,
    hole: npt.NDArray[np.int32],
    rectangle: cv2.typing.RotatedRect,
) -> Inside:
    """Return the inside whose rim encloses a hole."""
    middle, sides, angle_deg = rectangle
    inside = np.zeros(heights.heights.shape, np.uint8)
    cv2.drawContours(inside, [hole], -1, 1, cv2.FILLED)
    # the contour itself lies on the rim
    rim = cv2.dilate(inside, np.ones((3, 3), np.uint8)) > 0
    inner = cv2.erode(inside, np.ones((5, 5), np.uint8)) > 0
    rim &= ~inner & np.isfinite(heights.heights)
    rim_m = float(np.percentile(heights.heights[rim], 75))
    assert view.floor_m is not None
    seen = heights.heights[inner & np.isfinite(heights.heights)]
    lowest_m = float(np.percentile(seen, LOWEST_PERCENTILE)) if seen.size else view.floor_m
    floor_m = lowest_m if lowest_m < view.floor_m + FLOOR_M else view.floor_m
    angle = np.radians(angle_deg)
    ahead = heights.level @ (np.cos(angle), np.sin(angle))
    aside = np.cross(view.up, ahead)
    # from the middles of the rim's cells to their inner edges
    length, width = (side * heights.cell_m - heights.cell_m for side in sides)
    if width > length:
        length, width = width, length
        ahead, aside = aside, -ahead
    place = heights.level @ (heights.origin_m + np.array(middle) * heights.cell_m) + floor_m * view.up
    return Inside(place, np.column_stack([ahead, aside, view.up]), np.array([length, width, rim_m - floor_m]))


def measure_fill(view: PickView, inside: Inside) -> float | None:
    """Return the share 0..1 of the inside that lies under what is seen; None if too little of it is seen."""
    length, width, depth = inside.size_m
    x, y, z = ((_list_points(view) - inside.floor_m) @ inside.axes).T
    cell_m = max(CELL_M, 2 * view.spacing_m)
    shape = [min(MAX_CELLS, max(1, int(side // cell_m))) for side in (length, width)]
    rows = np.floor((x / length + 0.5) * shape[0]).astype(np.int64)
    columns = np.floor((y / width + 0.5) * shape[1]).astype(np.int64)
    is_in: Bools = (rows >= 0) & (rows < shape[0]) & (columns >= 0) & (columns < shape[1])
    # what hangs above the rim, such as a gripper, fills nothing
    is_in &= z < 1.5 * depth
    places = rows[is_in] * shape[1] + columns[is_in]
    count = np.bincount(places, minlength=shape[0] * shape[1])
    if np.count_nonzero(count) < KNOWN_SHARE * count.size:
        return None
    heights = np.bincount(places, z[is_in], count.size)[count > 0] / count[count > 0]
    return float(np.clip(heights / depth, 0, 1).mean())
