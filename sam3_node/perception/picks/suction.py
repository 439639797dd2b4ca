"""Find the place of an object's surface that a suction cup fits: the largest flat disc, away from edges.

The inverse depth of a plane is linear in the coordinates of rays, and the noise of a stereo camera is even in it. So
planes are fitted to inverse depths, in square windows of all sizes at all places of a mask at once, by sums over these.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import cv2
import numpy as np

from ...geometry import Array
from ...types import Mask
from ..surfaces import Bools
from .view import NO_OBJECT, PickView, expect_noise

FLAT_M = 0.002
"""Largest distance of the surface from the plane of a disc."""
ENOUGH_M = 0.02
"""Radius from which on a larger disc is no better than one nearer to the object's middle."""
LARGEST_M = 0.05
"""Largest radius that is looked for."""
STEEPEST_DEG = 45.0
"""Largest angle of a surface's normal with the direction in which the object is lifted."""
VALID_SHARE = 0.8
"""Share of a disc's pixels that have a depth."""
TARGET_CELLS = 1500
"""Cells of a mask, about."""
MAX_CELLS = 20 * TARGET_CELLS
"""Cells of the box of a mask, about: a sparse mask has few in a large box."""
LOW_M = 0.005
"""Height above the table up to which a surface is taken to be the table."""
TRIED = 4
"""Places that are looked at for one radius, those nearest to the middle."""
CURVED_M = 0.003
"""Distance from the plane of a disc up to which the surface around it takes part in finding its normal."""
BENT_M = 0.003
"""Bend of this surface from which on it is fitted by a quadric."""
REFITS = 3
"""Fits of the surface around a disc, each on the cells that the one before has found."""
MIN_BENT = 12
"""Cells from which a bend can be told."""
TOOL_M = 0.015
"""Radius of the tool that comes along the normal."""
TOOL_LENGTH_M = 0.1
"""Length of this tool."""
CLEAR_M = 0.01
"""Height above the place up to which neighbours do not count as in its way."""
RING_CELLS = (2, 7)
"""Distances from a mask, in cells of the view, between which its surroundings are looked at."""
GOES_ON_SHARE = 0.25
"""Share of these that may be on the plane of a disc, and in no mask. Beyond it, the disc is of wall, floor or table."""
BLOCKING = 3
"""Cells in the way of a tool that block it."""
_GRAZING = 0.3
"""Least cosine of a ray with a surface's normal. Depth of steeper surfaces is mostly noise."""


class FlatDisc(NamedTuple):
    """A place for a suction cup, in the frame of the view."""

    point_m: Array
    """[3]"""
    normal: Array
    """[3], of length 1, away from the object"""
    radius_m: float


class Cells(NamedTuple):
    """A mask in cells of several pixels."""

    inverse: Array
    """[a, b], mean inverse depth in 1/m; 0: none"""
    x: Array
    """[a, b], of the rays of their middles"""
    y: Array
    inside: Bools
    """[a, b], wholly in the mask, away from its rim, and above the table"""
    step: int
    """pixels of a cell's side"""


def find_flat_disc(view: PickView, mask: Mask, least_m: float) -> FlatDisc | None:
    """Return the largest flat disc of a mask with at least this radius; None if it has none."""
    cells = make_cells(view, mask)
    valid = cells.inside & (cells.inverse > 0)
    if np.count_nonzero(valid) < 9:
        return None
    depth_m = 1 / float(np.median(cells.inverse[valid]))
    cell_m = cells.step * depth_m / view.depth.focal_px
    rows, columns = np.nonzero(cells.inside)
    middle = np.array([rows.mean(), columns.mean()])
    # depths of a hostile camera make cells of any size, so the mask bounds the windows, too
    largest = min(
        math.floor(LARGEST_M / cell_m), max(1, math.ceil(ENOUGH_M / cell_m)), _find_widest(cells.inside)
    )
    for half in (half for half in range(largest, 0, -1) if (half + 0.5) * cell_m >= least_m):
        is_flat = _find_flat(view, cells, valid, half)
        places = np.argwhere(is_flat)
        nearest = np.argsort(((places - middle) ** 2).sum(axis=1), kind="stable")[:TRIED]
        for row, column in places[nearest].tolist():
            disc = _check_disc(view, cells, valid, (row, column), half, cell_m)
            if disc is not None:
                return _grow(view, cells, valid, (row, column), half, cell_m, disc)
    return None


def make_cells(view: PickView, mask: Mask) -> Cells:
    """Return a mask in about TARGET_CELLS cells."""
    x0, y0, x1, y1 = mask.box
    box_area = (x1 - x0) * (y1 - y0)
    step = max(1, round(math.sqrt(max(mask.area / TARGET_CELLS, box_area / MAX_CELLS))))
    size = ((x1 - x0) // step, (y1 - y0) // step)
    if not min(size):
        nothing = np.zeros((0, 0))
        return Cells(nothing, nothing, nothing, nothing.astype(np.bool_), step)
    part = (slice(y0, y0 + size[1] * step), slice(x0, x0 + size[0] * step))
    z = view.depth.image[part] * np.float64(view.depth.scale_m)
    crop = mask.crop[: size[1] * step, : size[0] * step]
    # mean over the pixels with depth in the mask, because the mean of two surfaces lies on neither
    known = crop & (z > 0)
    weight = _average(known, size)
    inverse = _average(np.divide(1.0, z, out=np.zeros_like(z), where=known), size)
    x, y = (_average(ray, size) for ray in view.depth.rays[:, *part])
    has_depth = weight >= 0.5
    inverse = np.where(has_depth, inverse / np.maximum(weight, 1e-9), 0.0)
    inside = _average(crop, size) > 0.999
    inside = cv2.erode(inside.astype(np.uint8), np.ones((3, 3), np.uint8), borderValue=0).astype(np.bool_)
    if view.floor_m is not None:
        z = np.divide(1.0, inverse, out=np.zeros_like(inverse), where=has_depth)
        heights = view.place(np.stack([x * z, y * z, z], axis=-1)) @ view.up - view.floor_m
        inside &= ~has_depth | (heights > np.maximum(LOW_M, 3 * expect_noise(z)))
    return Cells(inverse, x, y, inside, step)


def _find_widest(inside: Bools) -> int:
    """Return the half side of the largest window that fits into a mask, in cells: 2 for 5 x 5. Less than 0: none."""
    padded = np.pad(inside.astype(np.uint8), 1)
    return round(float(cv2.distanceTransform(padded, cv2.DIST_C, 3).max())) - 1


def _average(values: np.ndarray, size: tuple[int, int]) -> Array:
    return np.asarray(cv2.resize(values.astype(np.float64), size, interpolation=cv2.INTER_AREA), np.float64)


def _find_flat(view: PickView, cells: Cells, valid: Bools, half: int) -> Bools:
    """Fit a plane in the window of each cell; return which cells [a, b] have a flat one that can be reached.

    A plane is (p, q, r): the inverse depth of a ray (x, y) is p x + q y + r.
    """
    size = (2 * half + 1, 2 * half + 1)

    def add(values: Array) -> Array:
        return np.asarray(cv2.boxFilter(values, -1, size, normalize=False, borderType=cv2.BORDER_CONSTANT))

    weight = valid.astype(np.float64)
    x0 = float(cells.x[valid].mean())
    y0 = float(cells.y[valid].mean())
    x, y, d = (
        (values - origin) * weight for values, origin in ((cells.x, x0), (cells.y, y0), (cells.inverse, 0))
    )
    n, sx, sy, sd = map(add, (weight, x, y, d))
    n = np.maximum(n, 1)
    xx, xy, yy, xd, yd, dd = (
        add(a * b) - sa * sb / n
        for a, b, sa, sb in (
            (x, x, sx, sx),
            (x, y, sx, sy),
            (y, y, sy, sy),
            (x, d, sx, sd),
            (y, d, sy, sd),
            (d, d, sd, sd),
        )
    )
    determinant = xx * yy - xy * xy
    solvable = determinant > 1e-9 * np.maximum(xx * yy, 1e-30)
    scale = np.divide(1.0, determinant, out=np.zeros_like(determinant), where=solvable)
    p = (yy * xd - xy * yd) * scale
    q = (xx * yd - xy * xd) * scale
    r = (sd - p * sx - q * sy) / n - p * x0 - q * y0
    rms = np.sqrt(np.maximum(dd - p * xd - q * yd, 0.0) / n)
    planes = np.stack([p, q, r], axis=-1)
    inverse = np.maximum(p * cells.x + q * cells.y + r, 1e-3)
    area = float(size[0] * size[1])
    is_whole = add(cells.inside.astype(np.float64)) > area - 0.5
    normals = _turn_to_camera(planes)
    rays = np.stack([cells.x, cells.y, np.ones_like(cells.x)], axis=-1)
    facing = -(normals * rays).sum(axis=-1) / np.linalg.norm(rays, axis=-1)
    # across the plane, from along the optical axis
    depth = 1 / inverse
    deviation = rms * depth * depth * np.abs(normals[..., 2])
    limit = np.sqrt(expect_noise(depth) ** 2 + (FLAT_M / 2) ** 2)
    up = view.up if view.base_from_camera is None else view.base_from_camera[:3, :3].T @ view.up
    is_flat = solvable & is_whole & (n >= VALID_SHARE * area) & (deviation < limit)
    is_flat &= (facing > _GRAZING) & (normals @ up > math.cos(math.radians(STEEPEST_DEG)))
    return np.asarray(is_flat)


def _turn_to_camera(planes: Array) -> Array:
    """Return the unit normals [..., 3] of planes (p, q, r), towards the camera."""
    # points with inverse depth p x + q y + r fulfil p X + q Y + r Z = 1, so (p, q, r) leads away from the camera
    normals: Array = -planes / np.maximum(np.linalg.norm(planes, axis=-1, keepdims=True), 1e-12)
    return normals


def _check_disc(
    view: PickView, cells: Cells, valid: Bools, place: tuple[int, int], half: int, cell_m: float
) -> FlatDisc | None:
    """Return the disc about a cell, None if its surface bends away from its plane."""
    rows, columns = np.indices(valid.shape)
    away = np.hypot(rows - place[0], columns - place[1]) <= half + 0.5
    chosen = valid & away
    if np.count_nonzero(chosen) < VALID_SHARE * np.count_nonzero(away) or (away & ~cells.inside).any():
        return None
    x0 = cells.x[place]
    y0 = cells.y[place]
    x = cells.x[chosen] - x0
    y = cells.y[chosen] - y0
    d = cells.inverse[chosen]
    flat = np.column_stack([x, y, np.ones_like(x)])
    (p, q, c), *_ = np.linalg.lstsq(flat, d, rcond=None)
    depth = 1 / c
    plane = np.array([p, q, c - p * x0 - q * y0])
    normal = _turn_to_camera(plane)
    if len(x) >= MIN_BENT:
        # the bend alone: the noise of single depths is larger than what matters to a cup
        reach = np.abs(x).max() + 1e-9
        bent = np.column_stack([flat, x * x / reach, x * y / reach, y * y / reach])
        curve = bent @ np.linalg.lstsq(bent, d, rcond=None)[0] - flat @ (p, q, c)
        if np.abs(curve).max() * depth * depth * abs(normal[2]) > FLAT_M:
            return None
    point = view.place(np.array([x0 * depth, y0 * depth, depth]))
    return FlatDisc(point, view.turn(normal), (half + 0.5) * cell_m)


def _grow(
    view: PickView,
    cells: Cells,
    valid: Bools,
    place: tuple[int, int],
    half: int,
    cell_m: float,
    disc: FlatDisc,
) -> FlatDisc:
    """Return the largest flat disc about a cell, with the normal of the surface around it."""
    for larger in range(half + 1, math.floor(LARGEST_M / cell_m) + 1):
        is_flat = _find_flat(view, cells, valid, larger)
        found = _check_disc(view, cells, valid, place, larger, cell_m) if is_flat[place] else None
        if found is None:
            break
        disc = found
        half = larger
    return _refine(view, cells, valid, place, half, disc)


def _refine(
    view: PickView, cells: Cells, valid: Bools, place: tuple[int, int], half: int, disc: FlatDisc
) -> FlatDisc:
    """Return a disc with point and normal from as much of the surface around it as is smooth.

    The noise of depth turns the plane of a small disc by degrees.
    """
    rows, columns = np.indices(valid.shape)
    chosen = valid & (np.hypot(rows - place[0], columns - place[1]) <= half + 0.5)
    x = cells.x - cells.x[place]
    y = cells.y - cells.y[place]
    terms = np.stack([np.ones_like(x), x, y, x * x, x * y, y * y], axis=-1)
    depth = 1 / float(cells.inverse[chosen].mean())
    # from a difference of inverse depths to one of depths
    scale = depth * depth
    noise_m = float(expect_noise(depth))
    fit = np.zeros(6)
    for _ in range(REFITS):
        fit = _fit_surface(terms[chosen], cells.inverse[chosen], BENT_M / scale)
        away_m = np.abs(cells.inverse - terms @ fit) * scale
        bent_m = np.abs(terms[..., 3:] @ fit[3:]) * scale
        near = valid & (away_m < FLAT_M + noise_m) & (bent_m < CURVED_M)
        if not near[place]:
            break
        parts = cv2.connectedComponents(near.astype(np.uint8), connectivity=4)[1]
        chosen = np.asarray(parts == parts[place])
    c, p, q = fit[:3].tolist()
    if c <= 0:
        return disc
    x0 = cells.x[place]
    y0 = cells.y[place]
    normal = _turn_to_camera(np.array([p, q, c - p * x0 - q * y0]))
    point = view.place(np.array([x0, y0, 1.0]) / c)
    return FlatDisc(point, view.turn(normal), disc.radius_m)


def _fit_surface(terms: Array, inverse: Array, bent: float) -> Array:
    """Fit inverse depths [n] by terms [n, 6] of order 0, 1 and 2; return the six factors.

    Those of order 2 are 0 unless they matter by more than `bent` somewhere.
    """
    if len(terms) >= MIN_BENT:
        fit = np.linalg.lstsq(terms, inverse, rcond=None)[0]
        if np.abs(terms[:, 3:] @ fit[3:]).max() > bent:
            return np.asarray(fit)
    return np.append(np.linalg.lstsq(terms[:, :3], inverse, rcond=None)[0], np.zeros(3))


def is_blocked(view: PickView, index: int, disc: FlatDisc) -> bool:
    """Return True if something other than the object is where a tool would come along the normal of a disc."""
    points_m, _ = view.list_others(index, TOOL_LENGTH_M)
    ways = points_m - disc.point_m
    along = ways @ disc.normal
    away = np.linalg.norm(ways - along[:, None] * disc.normal, axis=1)
    return int(np.count_nonzero((along > CLEAR_M) & (along < TOOL_LENGTH_M) & (away < TOOL_M))) >= BLOCKING


def goes_on(view: PickView, index: int, disc: FlatDisc) -> bool:
    """Return True if the plane of a disc goes on beyond the object's mask, where no other mask is.

    Then the mask is likely to have leaked onto a wall, a floor or the table, or lies on it wholly.
    """
    inner, outer = (np.ones((2 * cells + 1, 2 * cells + 1), np.uint8) for cells in RING_CELLS)
    part = view.around(index, RING_CELLS[1] * view.spacing_m)
    labels = view.labels[part]
    z_m = view.z_m[part]
    own = (labels == index).astype(np.uint8)
    ring = (cv2.dilate(own, outer) > cv2.dilate(own, inner)) & (z_m > 0)
    if not ring.any():
        return False
    away_m = np.abs((view.points_m[part][ring] - disc.point_m) @ disc.normal)
    level = away_m < np.maximum(FLAT_M, 2 * expect_noise(z_m[ring]))
    return bool(np.mean(level & (labels[ring] == NO_OBJECT)) > GOES_ON_SHARE)
