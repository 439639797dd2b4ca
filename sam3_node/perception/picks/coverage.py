"""Tell which objects have nothing on them, from the outlines of their masks and depth.

What lies on an object rises beside the visible part of it. So pairs of cells are compared across the outline of each
mask: one inside, one outside. Where the outer one is higher and near, it may lie on the object. A taller neighbour that
touches the object looks the same, and counts, too: an object is rather told to be covered than to be free.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cv2
import numpy as np
import numpy.typing as npt

from ...geometry import Array
from ..surfaces import Bools
from .view import NO_OBJECT, UNKNOWN, PickView, expect_noise

STEP_M = 0.006
"""Least height by which what lies on an object rises above it."""
NOISES = 3.0
"""The same in standard deviations of depth."""
NEAR_M = 0.015
"""Level distance up to which what is higher may lie on an object, beside that of the cells from each other."""
FREE_SHARE = 0.03
"""Share of the outline that may have something higher beside it: noise, and lumps of the object itself."""
KNOWN_SHARE = 0.5
"""Share of the outline whose height is known on both sides, below which nothing is told."""
LEAST_SHARE = 0.02
"""Share of the outline from which on a neighbour is told to be higher."""
STEEP = 1.7
"""Slope from which on a surface is a wall: 60 degrees."""
_REACH = 3
"""Cells from the inner one of a pair to the outer one. Those between them may have a depth of both sides."""


class Coverage(NamedTuple):
    """What is beside the outline of an object."""

    known: float
    """share of the outline beside which heights are known"""
    free: float
    """share of that beside which nothing higher is"""
    by: tuple[int, ...]
    """indices of the higher neighbours, NO_OBJECT for one that is not tracked; those that take most of it first"""
    visible: float
    """largest share of the object that is visible, if it is convex"""

    @property
    def is_free(self) -> bool | None:
        """True if nothing lies on it; None if it cannot be told."""
        if self.known < KNOWN_SHARE:
            return None
        return self.free >= 1 - FREE_SHARE


def find_coverage(view: PickView) -> list[Coverage]:
    """Return what is beside the outline of each mask."""
    count = len(view.masks)
    outline = np.zeros(count)
    known = np.zeros(count)
    higher = np.zeros((count, count + 1))
    for across in (False, True):
        for backward in (False, True):
            parts: list[npt.NDArray[Any]] = [view.labels, view.z_m, view.heights_m, view.points_m]
            cells = [_orient(part, across, backward) for part in parts]
            _compare(cells, view.up, view.spacing_m, outline, known, higher)
    found = []
    for index in range(count):
        all_higher = higher[index].sum()
        shares = higher[index] / max(1.0, known[index])
        order = np.argsort(-shares, kind="stable")
        by = tuple(int(one) if one < count else NO_OBJECT for one in order if shares[one] >= LEAST_SHARE)
        found.append(
            Coverage(
                float(known[index] / max(1.0, outline[index])),
                float(1 - all_higher / max(1.0, known[index])),
                by,
                _bound_visible(view, index, by),
            )
        )
    return found


def _orient(cells: npt.NDArray[Any], across: bool, backward: bool) -> npt.NDArray[Any]:
    """Return cells [a, b, ...] so that the first axis leads down, up, right or left."""
    turned = cells.swapaxes(0, 1) if across else cells
    return turned[::-1] if backward else turned


def _compare(
    cells: list[npt.NDArray[Any]],
    up: npt.NDArray[Any],
    spacing_m: float,
    outline: npt.NDArray[Any],
    known: npt.NDArray[Any],
    higher: npt.NDArray[Any],
) -> None:
    """Count pairs along the first axis: of each object all, those with heights, and those with a higher neighbour."""
    labels, z_m, heights_m, points_m = cells
    # what goes on beyond the image is unknown
    cut = labels[-1][labels[-1] >= 0]
    np.add.at(outline, cut, 1)
    first, second, third, fourth = (labels[start : len(labels) - _REACH + start] for start in range(4))
    is_outline = (first >= 0) & (first == second) & (third != first)
    np.add.at(outline, first[is_outline], 1)
    inner = slice(None, -_REACH)
    outer = slice(_REACH, None)
    has_both = is_outline & (third == fourth) & (third != UNKNOWN) & (z_m[inner] > 0) & (z_m[outer] > 0)
    rows, columns = np.nonzero(has_both)
    own = first[rows, columns]
    other = third[rows, columns]
    np.add.at(known, own, 1)
    depths = np.maximum(z_m[rows, columns], z_m[rows + _REACH, columns])
    noise_m = expect_noise(depths)

    def climb(begin: npt.NDArray[np.intp], end: npt.NDArray[np.intp]) -> tuple[Array, Array]:
        """Return by how much the cells of rows `end` are higher than those of rows `begin`, and how far they are."""
        rise = heights_m[end, columns] - heights_m[begin, columns]
        way = points_m[end, columns] - points_m[begin, columns]
        return rise, np.linalg.norm(way - rise[:, None] * up, axis=1)

    rise_m, level_m = climb(rows, rows + _REACH)
    is_higher = (rise_m > np.maximum(STEP_M, NOISES * noise_m)) & (level_m < NEAR_M + _REACH * spacing_m)
    # a wall beside an object does not lie on it, so what is not tracked must go on more level than a wall
    beyond = np.minimum(rows + 2 * _REACH, len(labels) - 1)
    rise_m, level_m = climb(rows + _REACH, beyond)
    is_wall = (np.abs(rise_m) > STEEP * level_m + NOISES * noise_m) | (z_m[beyond, columns] <= 0)
    is_higher &= (other != NO_OBJECT) | ~is_wall
    np.add.at(higher, (own[is_higher], other[is_higher]), 1)


def _bound_visible(view: PickView, index: int, by: tuple[int, ...]) -> float:
    """Return the area of a mask in that of it with what higher neighbours hide of its convex hull."""
    labels = view.labels[view.around(index, 0.0)]
    own: Bools = labels == index
    rows, columns = np.nonzero(own)
    if not by or len(rows) < 3:
        return 1.0
    hull = cv2.convexHull(np.column_stack([columns, rows]).astype(np.int32))
    inside = np.zeros(own.shape, np.uint8)
    cv2.fillConvexPoly(inside, hull, 1)
    hidden = np.count_nonzero(inside.view(np.bool_) & np.isin(labels, by))
    return float(len(rows) / (len(rows) + hidden))
