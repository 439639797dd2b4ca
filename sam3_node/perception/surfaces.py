"""Robust geometry of one object's visible surface, from its mask and an aligned depth image, on the host in numpy.

1. The mask is thinned to about MAX_PIXELS pixels, and eroded: depth at its rim belongs to the object or to what lies
   behind it, or to neither (flying pixels).
2. Depths of the eroded mask are separated into modes, at gaps of the histogram. The largest mode stays, and those at
   most GAP_SHARE of the object's width away from it: the inner wall of a mug, but not the table behind its rim.
3. Rim pixels come back if their depth lies within the range of the inner pixels beside them. Those without such a
   depth get the mean of these inner pixels, so that erosion and holes of the sensor at edges do not shift the position.

The position is the mean of the visible surface's points, one for each pixel of the mask. All results are in the
camera's frame, in metres.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import cv2
import numpy as np
import numpy.typing as npt

from ..geometry import Array, deproject
from ..types import Intrinsics, Mask

Float = npt.NDArray[np.float32]

MAX_PIXELS = 1600
"""Pixels of a mask's box that are used at most, about."""
MIN_PIXELS = 6
"""Valid depths that a position needs."""
NOISE_PER_M = 0.0036
"""Standard deviation of depth is this times the squared depth: 3.6 mm at 1 m. A D435 at 848x480 has a focal length of
447 px and a baseline of 50 mm; 0.08 px of disparity noise give 0.08 / (447 * 0.05).
https://dev.intelrealsense.com/docs/tuning-depth-cameras-for-best-performance"""
GAP_SHARE = 0.5
_CORRELATED_PIXELS = 25.0  # neighbours share the stereo window, so that this many count as one measurement
_EDGE_ERROR_PX = 0.5  # error of a mask's edges, as a whole
_TRIMMED = 0.01  # share of points beyond each end of the extent
_IDENTITY = np.eye(3)
_KERNEL = np.ones((3, 3), np.uint8)


@dataclass(frozen=True, slots=True)
class Surface:
    """The visible surface of an object in the camera's frame."""

    position_m: Array
    """[3]"""
    covariance_m2: Array
    """[3, 3], of the position's error"""
    extent_m: Array
    """[3], sides of the oriented box around the surface, the longest first"""
    centre_m: Array
    """[3], of that box"""
    axes: Array
    """[3, 3], the directions of its sides in columns, right-handed"""
    nearest_m: Array
    """[3], the point nearest to the camera, behind the nearest 1 %"""
    points_m: Float
    """[n, 3], measured points"""


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


def measure_surface(
    mask: Mask, depth: npt.NDArray[np.uint16], scale_m: float, rays: Float, focal_px: float
) -> tuple[float, Surface | None]:
    """Return the share of the mask's pixels with a depth, and the surface; None if too few depths are valid.

    depth: uint16 [height, width] of the mask's size, in units of `scale_m`; 0 is unknown. rays: of `RayMap`.
    """
    x0, y0, x1, y1 = mask.box
    step = max(1, math.ceil(math.sqrt(mask.crop.size / MAX_PIXELS)))
    if (x1 - x0) < 8 * step or (y1 - y0) < 8 * step:  # a thin object keeps its pixels across
        step = max(1, min(x1 - x0, y1 - y0) // 8)
    # pixels are taken symmetrically about the box's centre, so that thinning does not shift the position
    left, top = (x1 - x0 - 1) % step, (y1 - y0 - 1) % step
    rows, columns = slice(top // 2, None, step), slice(left // 2, None, step)
    inside = np.ascontiguousarray(mask.crop[rows, columns])
    z = depth[y0:y1, x0:x1][rows, columns].astype(np.float32) * np.float32(scale_m)
    rays = rays[:, y0:y1, x0:x1][:, rows, columns]
    valid = inside & (z > 0)
    count = np.count_nonzero(inside)
    share = float(np.count_nonzero(valid) / count) if count else 0.0
    core, radius = _erode(inside, valid)
    if np.count_nonzero(core) < MIN_PIXELS:
        return share, None
    width_px = math.sqrt(count) * step
    core = _keep_object(z, core, width_px / focal_px)
    filled, measured = _restore_rim(z, inside, valid, core, radius)
    if np.count_nonzero(measured) < MIN_PIXELS:
        return share, None
    surface = _describe(filled, measured, rays, focal_px, width_px)
    surface.position_m[:2] += surface.position_m[2] / focal_px * 0.5 * np.array([left % 2, top % 2])
    return share, surface


def _erode(inside: npt.NDArray[np.bool_], valid: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.bool_], int]:
    """Return the valid pixels of the eroded mask, and the radius in pixels.

    The radius is 0 if erosion leaves less than a sixth of the mask.
    """
    mask = inside.view(np.uint8)
    count = np.count_nonzero(inside)
    radius = 2 if count >= 400 else 1
    for tried in range(radius, 0, -1):
        eroded = cv2.erode(mask, _KERNEL, iterations=tried, borderType=cv2.BORDER_CONSTANT, borderValue=0)
        core = (eroded > 0) & valid
        if np.count_nonzero(core) * 6 >= count:
            return core, tried
    return valid, 0


def _keep_object(z: Float, core: npt.NDArray[np.bool_], width_per_depth: float) -> npt.NDArray[np.bool_]:
    """Return the pixels of the largest depth mode, and of those near it."""
    depths = z[core]
    middle = float(np.partition(depths, depths.size // 2)[depths.size // 2])
    low, high = float(depths.min()), float(depths.max())
    bin_m = max(0.004, 2 * NOISE_PER_M * middle * middle)
    if high - low <= 2 * bin_m:
        return core
    bin_m = max(bin_m, (high - low) / 4096)  # bounds the histogram
    counts = np.bincount(((depths - low) / bin_m).astype(np.int64))
    occupied = np.flatnonzero(counts >= max(2, depths.size // 200))
    if occupied.size == 0:
        return core
    gaps = np.flatnonzero(occupied[1:] - occupied[:-1] > 2)  # one empty bin does not separate
    if gaps.size == 0:
        return core
    firsts, lasts = occupied[np.append(0, gaps + 1)], occupied[np.append(gaps, occupied.size - 1)]
    totals = np.append(0, np.cumsum(counts))
    largest = int(np.argmax(totals[lasts + 1] - totals[firsts]))
    first, last = firsts[largest], lasts[largest]
    near_bins = GAP_SHARE * width_per_depth * middle / bin_m
    for index in range(largest - 1, -1, -1):
        if first - lasts[index] > near_bins:
            break
        first = firsts[index]
    for index in range(largest + 1, firsts.size):
        if firsts[index] - last > near_bins:
            break
        last = lasts[index]
    kept: npt.NDArray[np.bool_] = core & (z >= low + bin_m * (first - 1)) & (z <= low + bin_m * (last + 2))
    return kept


def _restore_rim(
    z: Float,
    inside: npt.NDArray[np.bool_],
    valid: npt.NDArray[np.bool_],
    core: npt.NDArray[np.bool_],
    radius: int,
) -> tuple[Float, npt.NDArray[np.bool_]]:
    """Return depths with the rim restored (0 outside the object), and which pixels have a depth of their own."""
    if radius == 0:
        return np.where(core, z, np.float32(0)), core
    weight = core.astype(np.float32)
    known = z * weight
    size = (2 * radius + 1, 2 * radius + 1)
    border = cv2.BORDER_CONSTANT
    mass = cv2.boxFilter(weight, -1, size, normalize=False, borderType=border)
    near = cv2.boxFilter(known, -1, size, normalize=False, borderType=border)
    reached = inside & (mass > 0.5)
    mean = near / np.maximum(mass, 1.0)
    high = cv2.dilate(known, _KERNEL, iterations=radius)
    low = cv2.erode(np.where(core, z, np.float32(1e9)), _KERNEL, iterations=radius)
    slack = 1.5 * NOISE_PER_M * mean * mean + 0.5 * (high - low)
    own = core | (valid & reached & (z <= high + slack) & (z >= low - slack))
    return np.where(own, z, np.where(reached, mean, np.float32(0))), own


def _describe(
    z: Float, measured: npt.NDArray[np.bool_], rays: Float, focal_px: float, width_px: float
) -> Surface:
    used = np.flatnonzero(z > 0)
    points = np.empty((3, used.size), np.float32)
    points[2] = z.ravel()[used]
    points[:2] = rays.reshape(2, -1)[:, used] * points[2]
    own = points[:, measured.ravel()[used]]
    position = points.mean(axis=1, dtype=np.float64)
    centred = points - position.astype(np.float32)[:, None]
    scatter = (centred @ centred.T).astype(np.float64) / used.size
    axes = np.linalg.eigh(scatter)[1]
    along = axes.T.astype(np.float32) @ centred
    first, last = int(_TRIMMED * used.size), used.size - 1 - int(_TRIMMED * used.size)
    along.partition((first, last), axis=1)
    low, high = along[:, first].astype(np.float64), along[:, last].astype(np.float64)
    order = np.argsort(low - high, kind="stable")
    ranges = np.einsum("ij,ij->j", own, own)
    rank = min(own.shape[1] - 1, max(first, 2))
    return Surface(
        position_m=position,
        covariance_m2=_predict_covariance(position, scatter, own.shape[1], focal_px, width_px),
        extent_m=(high - low)[order],
        centre_m=position + axes @ (low + high) / 2,
        axes=_orient(axes[:, order]),
        nearest_m=own[:, np.argpartition(ranges, rank)[rank]].astype(np.float64),
        points_m=own.T,
    )


def _orient(axes: Array) -> Array:
    """Return the axes [3, 3] right-handed, with the largest component of the first two positive."""
    first, second = (
        axis * (1.0 if axis[np.argmax(np.abs(axis))] > 0 else -1.0) for axis in (axes[:, 0], axes[:, 1])
    )
    (a, b, c), (d, e, f) = first.tolist(), second.tolist()
    return np.array([[a, d, b * f - c * e], [b, e, c * d - a * f], [c, f, a * e - b * d]])


def _predict_covariance(
    position: Array, scatter: Array, count: int, focal_px: float, width_px: float
) -> Array:
    """Return the covariance [3, 3] of a position's error: noise of depth along the ray, the mask's edges across it.

    An error of an edge moves the mean along the surface, so an inclined surface turns it into an error of depth.
    """
    distance = math.sqrt(float(position @ position))
    along = np.multiply.outer(position, position) / distance**2
    noise_m2 = (NOISE_PER_M * distance * distance) ** 2 / max(1.0, count / _CORRELATED_PIXELS)
    edge_m2 = (_EDGE_ERROR_PX * distance / focal_px) ** 2
    # of the relative size of an edge's error and the object, the same share of the surface's own spread
    share = (_EDGE_ERROR_PX / max(width_px, 1.0)) ** 2
    return (noise_m2 - edge_m2) * along + edge_m2 * _IDENTITY + share * scatter
