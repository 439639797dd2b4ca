"""Coverage of the image by views of a board: which views differ, and which are still missing."""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np
import numpy.typing as npt

from ..geometry import Array
from .boards import Board
from .bundle import View

GRID = (6, 8)
"""Rows and columns of the coverage grid."""

_SAME_SHARE = 0.01  # views whose outer corners differ by less than this share of the width count as one
_REGION_NAMES = (
    ("top left", "top centre", "top right"),
    ("middle left", "centre", "middle right"),
    ("bottom left", "bottom centre", "bottom right"),
)
_MIN_TILT_DEG = 15.0
_NEAR, _FAR = 0.45, 0.3  # shares of the image's width that the board takes
_TILTS = (
    (0, 1, "the right edge of the board farther away"),
    (0, -1, "the left edge of the board farther away"),
    (1, 1, "the bottom edge of the board farther away"),
    (1, -1, "the top edge of the board farther away"),
)


def measure_coverage(views: Sequence[View], size: tuple[int, int]) -> npt.NDArray[np.int64]:
    """Return the number of corners in each cell of GRID, for images of `size` (height, width)."""
    counts = np.zeros(GRID, np.int64)
    for view in views:
        rows, columns = _cells(view.pixels, size, GRID)
        np.add.at(counts, (rows, columns), 1)
    return counts


def _cells(
    pixels: Array, size: tuple[int, int], grid: tuple[int, int]
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    places = (pixels + 0.5) / (size[1], size[0]) * (grid[1], grid[0])
    columns, rows = np.clip(places.astype(np.intp), 0, (grid[1] - 1, grid[0] - 1)).T
    return rows, columns


def outline(view: View, board: Board, size: tuple[int, int]) -> Array | None:
    """Return the outer corners [4, 2] of the board in a view, as shares of the width; None if undetermined."""
    homography = _fit_homography(view, board)
    if homography is None:
        return None
    low, high = board.points[:, :2].min(0), board.points[:, :2].max(0)
    corners = np.array(
        [[low[0], low[1], 1], [high[0], low[1], 1], [high[0], high[1], 1], [low[0], high[1], 1]]
    )
    image = corners @ homography.T
    if np.abs(image[:, 2]).min() < 1e-9:
        return None
    return np.asarray(image[:, :2] / image[:, 2:] / size[1], np.float64)


def _fit_homography(view: View, board: Board) -> Array | None:
    if len(view.ids) < 4:
        return None
    homography, _ = cv2.findHomography(board.points[view.ids, :2], view.pixels)
    return None if homography is None else np.asarray(homography, np.float64)


def choose_views(
    views: Sequence[View], board: Board, size: tuple[int, int], limit: int
) -> tuple[list[View], int]:
    """Return at most `limit` views that differ most, in their order, and the number that repeat another view.

    Views are compared by the outer corners of the board. The next view is the one farthest from those already chosen.
    """
    outlines = [outline(view, board, size) for view in views]
    usable = [index for index, corners in enumerate(outlines) if corners is not None]
    if not usable:
        return [], 0
    features = np.array([np.ravel(outlines[index]) for index in usable])  # type: ignore[arg-type]
    most = int(np.argmax([len(views[index].ids) for index in usable]))
    chosen, distances = [most], _distances(features, most)
    while len(chosen) < limit and distances.max() > _SAME_SHARE:
        chosen.append(int(np.argmax(distances)))
        distances = np.minimum(distances, _distances(features, chosen[-1]))
    repeated = int(np.count_nonzero(distances <= _SAME_SHARE)) - len(chosen)
    return [views[usable[index]] for index in sorted(chosen)], repeated


def _distances(features: Array, index: int) -> Array:
    return np.asarray(np.sqrt(((features - features[index]) ** 2).mean(axis=1)), np.float64)


def measure_tilts(views: Sequence[View], board: Board, size: tuple[int, int]) -> list[float]:
    """Return the angle in degrees between board and image plane in each view, with a rough focal length."""
    normals = [_find_normal(view, board, size) for view in views]
    return [
        float(np.degrees(np.arccos(np.clip(normal[2], -1, 1)))) for normal in normals if normal is not None
    ] or [0.0]


def _find_normal(view: View, board: Board, size: tuple[int, int]) -> Array | None:
    """Return the normal [3] of the board, away from the camera, with the image's width as focal length."""
    focal = float(size[1])
    rays = (view.pixels - ((size[1] - 1) / 2, (size[0] - 1) / 2)) / focal
    try:
        found, rotation, _ = cv2.solvePnP(
            board.points[view.ids], rays, np.eye(3), None, flags=cv2.SOLVEPNP_IPPE
        )
    except cv2.error:
        return None
    return np.asarray(cv2.Rodrigues(rotation)[0][:, 2], np.float64) if found else None


def _see_regions(views: Sequence[View], size: tuple[int, int]) -> npt.NDArray[np.bool_]:
    """Return [5, 5] bool: True for each part of the image that holds a corner."""
    seen = np.zeros((5, 5), np.bool_)
    for view in views:
        seen[_cells(view.pixels, size, (5, 5))] = True
    return seen


def describe_missing(views: Sequence[View], board: Board, size: tuple[int, int]) -> list[str]:
    """Return what is still missing, the most useful view first; nothing if coverage is complete."""
    missing = []
    normals = [normal for view in views if (normal := _find_normal(view, board, size)) is not None]
    sine = np.sin(np.radians(_MIN_TILT_DEG))
    for axis, sign, text in _TILTS:
        if not any(-sign * normal[axis] > sine for normal in normals):
            missing.append(f"a view with {text}, by 20 to 45 degrees")
    seen = _see_regions(views, size)
    for row, names in enumerate(_REGION_NAMES):
        for column, name in enumerate(names):
            if not seen[2 * row, 2 * column]:
                missing.append(f"a view with the board at the {name} of the image")
    widths = [np.ptp(corners[:, 0]) for view in views if (corners := outline(view, board, size)) is not None]
    if not any(width > _NEAR for width in widths):
        missing.append("a view from near: the board fills half of the width or more")
    if not any(width < _FAR for width in widths):
        missing.append("a view from farther away: the board fills a quarter of the width")
    return missing
