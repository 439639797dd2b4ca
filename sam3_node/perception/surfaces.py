"""Measure the visible surfaces of objects robustly, from their masks and an aligned depth image, on the host.

1. Each mask is thinned to about TARGET_PIXELS pixels, and eroded: depth at its rim belongs to the object or to what
   lies behind it, or to neither (flying pixels).
2. Depths of the eroded mask are separated into modes where they are sparse over the length of a gap. The largest mode
   stays, and so does each mode at most GAP_SHARE of the object's width away from it: the inner wall of a mug, but not
   the table behind its rim.
3. Rim pixels come back if their depth lies within the range of the inner pixels beside them. Pixels without such a
   depth get the middle of this range, so that erosion and holes of the sensor at edges do not shift the position.

The position is the mean of the visible surface's points, one for each pixel of the mask. All results are in the
camera's frame, in metres. `Samples` lays the masks one below the other in one image, so that each filter is one call
for all objects: with masks of a few hundred samples, a call costs more than its samples.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import cv2
import numpy as np
import numpy.typing as npt

from ..geometry import Array, DepthMap, Float
from ..types import Mask

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.intp]

TARGET_PIXELS = 400
"""Pixels of a mask that are used, about. More would cost time, and hardly move a position."""
MIN_PIXELS = 6
"""Valid depths that a position needs."""
NOISE_PER_M = 0.0036
"""Standard deviation of depth is this times the squared depth: 3.6 mm at 1 m. A D435 at 848x480 has a focal length of
447 px and a baseline of 50 mm; 0.08 px of disparity noise give 0.08 / (447 * 0.05).
https://dev.intelrealsense.com/docs/tuning-depth-cameras-for-best-performance"""
GAP_SHARE = 0.5
"""Share of the object's width up to which a mode of depths may be away from the largest mode and still belong to it."""
_MIN_GAP_M = 0.008
"""Least length of a gap between two modes."""
_GAP_PER_NOISE = 4.0
"""Length of a gap between two modes, in standard deviations of depth."""
_MIN_DENSE = 3
"""Depths over the length of a gap that a mode has at least."""
_SPARSE_SHARE = 0.15
"""Share of the depths in the densest place that a mode has over the length of a gap at least."""
_CORRELATED_PIXELS = 25.0
"""Pixels that count as one measurement, because neighbours share the stereo window."""
_EDGE_ERROR_PX = 0.5
"""Error of a mask's edges, as a whole."""
_TRIMMED = 0.01
"""Share of points beyond each end of the extent."""
_BOX_PIXELS = 10
"""Pixels of a mask's box that are looked at for each used one, at most."""
_IDENTITY = np.eye(3)
_KERNEL = np.ones((3, 3), np.uint8)
"""Neighbours of a sample in a dilation or an erosion: the eight around it."""
_FAR_M = np.float32(1e9)
"""Depth that is farther than any: it never is the nearest of its neighbours."""


class Samples:
    """The thinned masks with depths and rays, one below the other in one image with an empty row between them."""

    def __init__(self, masks: Sequence[Mask], depth: DepthMap, target: int) -> None:
        boxes = [_thin(mask, target) for mask in masks]
        crops = [mask.crop[box.crop] for mask, box in zip(masks, boxes, strict=True)]
        self.steps = np.array([box.step for box in boxes])
        """[N], distance of samples in pixels"""
        self.offsets_px = np.array([box.offset_px for box in boxes])
        """[N, 2], x and y from the samples' middle to the middle of the mask's box"""
        # the empty row keeps the filters of one mask from reaching the next
        self.heights = np.array([len(crop) + 1 for crop in crops])
        """[N], rows of each mask"""
        self.starts = np.append(0, self.heights.cumsum())
        """[N + 1], first row of each mask"""
        shape = (int(self.starts[-1]), max((crop.shape[1] for crop in crops), default=0))
        self.inside = np.zeros(shape, np.bool_)
        z = np.zeros(shape, np.uint16)
        self.rays = np.zeros((2, *shape), np.float32)
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
        """Return N + 1 positions in sorted flat indices of samples: each mask's samples lie between two positions."""
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
    # a thin mask in a large box would keep a large image around its samples
    box_step = math.ceil(math.sqrt(mask.crop.size / (_BOX_PIXELS * target)))
    step = max(1, box_step, round(math.sqrt(mask.area / target)))
    left = (x1 - x0 - 1) % step
    top = (y1 - y0 - 1) % step
    return _Thinning(
        step,
        (slice(top // 2, None, step), slice(left // 2, None, step)),
        (slice(y0 + top // 2, y1, step), slice(x0 + left // 2, x1, step)),
        (left % 2 / 2, top % 2 / 2),
    )


@dataclass(frozen=True, slots=True)
class Surfaces:
    """The visible surfaces of n objects in the camera's frame, of N masks."""

    shares: list[float]
    """N values: the share of each mask's pixels with a depth"""
    indices: list[int]
    """n values: the mask of each surface"""
    positions_m: Array
    """[n, 3]"""
    centres_m: Array
    """[n, 3], of the oriented boxes around the surfaces"""
    nearest_m: Array
    """[n, 3], the points nearest to the camera, behind the nearest 1 %"""
    extents_m: Array
    """[n, 3], sides of the boxes, the longest first"""
    axes: Array
    """[n, 3, 3], the directions of these sides in columns, right-handed"""
    covariances_m2: Array
    """[n, 3, 3], of the positions' errors"""
    points_m: list[Float]
    """n arrays [points, 3], measured points"""


def measure_surfaces(masks: Sequence[Mask], depth: DepthMap, target: int = TARGET_PIXELS) -> Surfaces:
    """Measure the surface of each mask from about `target` pixels. A mask with too few valid depths has no surface.

    No mask may be empty.
    """
    samples = Samples(masks, depth, target)
    focal_px = depth.focal_px
    # erode, separate by depth, and take the rim back: see the head of this file
    valid = samples.inside & (samples.z > 0)
    counts = samples.count(samples.inside)
    widths_px = np.sqrt(counts) * samples.steps
    core, eroded = _erode(samples, valid, counts)
    _keep_objects(samples, core, widths_px / focal_px)
    filled, reached, measured = _restore_rim(samples, valid, core, eroded)
    measured_counts = samples.count(measured)
    # a mask with too few depths has no surface
    enough = measured_counts >= MIN_PIXELS
    for index in np.flatnonzero(~enough).tolist():
        reached[samples.rows(index)] = measured[samples.rows(index)] = False
    shares = (samples.count(valid) / np.maximum(counts, 1)).tolist()
    indices = np.flatnonzero(enough)
    if not indices.size:
        vectors = np.zeros((0, 3))
        matrices = np.zeros((0, 3, 3))
        return Surfaces(shares, [], vectors, vectors, vectors, vectors, matrices, matrices, [])
    return _describe(
        samples, filled, reached, measured, shares, indices, widths_px, measured_counts, focal_px
    )


def _erode(samples: Samples, valid: Bools, counts: Ints) -> tuple[Bools, Bools]:
    """Return the valid samples of the eroded masks, and which masks [N] were eroded.

    A mask stays as it is if erosion would leave less than a sixth.
    """
    inside = samples.inside.view(np.uint8)
    # beyond the image is outside of the mask: by OpenCV's default, its edge would not erode
    core = cv2.erode(inside, _KERNEL, borderType=cv2.BORDER_CONSTANT, borderValue=0).view(np.bool_) & valid
    eroded: Bools = samples.count(core) * 6 >= counts
    for index in np.flatnonzero(~eroded).tolist():
        core[samples.rows(index)] = valid[samples.rows(index)]
    return core, eroded


def _keep_objects(samples: Samples, core: Bools, widths_per_depth: Array) -> None:
    """Keep the largest depth mode of each mask in `core`, and those near it."""
    used = np.flatnonzero(core)
    if not used.size:
        return
    bounds = samples.find_bounds(used)
    sizes = bounds[1:] - bounds[:-1]
    depths = samples.z.ravel().take(used)
    farthest_m = float(depths.max())
    # sorted together: all depths of the first mask, then all depths of the next, farther apart than any gap is long
    apart = np.repeat(np.arange(len(sizes)) * 2 * (farthest_m + _gap_m(farthest_m)), sizes)
    keys = np.sort(depths + apart)
    depths = keys - apart
    gaps_m = np.maximum(_MIN_GAP_M, _GAP_PER_NOISE * NOISE_PER_M * depths * depths)
    ends = np.searchsorted(keys, keys + gaps_m, side="right")  # of the depths within the length of a gap
    near = ends - np.arange(used.size)
    densest = np.maximum.reduceat(near, bounds[:-1][sizes > 0])
    fewest = np.maximum(_MIN_DENSE, _SPARSE_SHARE * densest)
    # False at both ends, so that each run of dense depths has a begin and an end
    dense = np.zeros(used.size + 2, np.bool_)
    np.greater_equal(near, np.repeat(fewest, sizes[sizes > 0]), out=dense[1:-1])
    changes = np.flatnonzero(dense[1:] != dense[:-1])
    firsts = changes[::2]
    owners = np.searchsorted(bounds, changes[::2], side="right") - 1
    lasts = ends[changes[1::2] - 1] - 1
    modes = zip(depths[firsts].tolist(), depths[lasts].tolist(), (lasts - firsts).tolist(), strict=True)
    # a mask without modes loses no sample here
    limits = np.full((2, len(sizes), 1), [[[-np.inf]], [[np.inf]]], np.float32)
    widths = widths_per_depth.tolist()
    for owner, group in itertools.groupby(zip(owners.tolist(), modes, strict=True), key=lambda item: item[0]):
        low, high = _join_modes([mode for _, mode in group], GAP_SHARE * widths[owner])
        limits[:, owner, 0] = low - _gap_m(high) / 2, high + _gap_m(high) / 2
    low_rows, high_rows = limits.repeat(samples.heights, axis=1)
    core &= (samples.z >= low_rows) & (samples.z <= high_rows)


def _gap_m(depth_m: float) -> float:
    """Return the length of a gap between modes at a depth."""
    return max(_MIN_GAP_M, _GAP_PER_NOISE * NOISE_PER_M * depth_m * depth_m)


def _join_modes(modes: Sequence[tuple[float, float, int]], near_per_depth: float) -> tuple[float, float]:
    """Return the lowest and highest depth of the largest mode and of those near it.

    `modes` are the lowest depth, the highest depth and the size of each mode, sorted by depth.
    """
    # modes are sorted by depth, so the search on each side ends at the first wide gap
    largest = max(range(len(modes)), key=lambda index: modes[index][2])
    low, high, _ = modes[largest]
    near_m = near_per_depth * (low + high) / 2
    for begin, end, _ in reversed(modes[:largest]):
        if low - end > near_m:
            break
        low = begin
    for begin, end, _ in modes[largest + 1 :]:
        if begin - high > near_m:
            break
        high = end
    return low, high


def _restore_rim(samples: Samples, valid: Bools, core: Bools, eroded: Bools) -> tuple[Float, Bools, Bools]:
    """Return depths with the rim restored, which samples have one, and which samples have a depth of their own."""
    z = samples.z
    high = cv2.dilate(z * core, _KERNEL)
    low = cv2.erode(np.where(core, z, _FAR_M), _KERNEL)
    reached = samples.inside & (high > 0)
    # a mask that was not eroded has no rim to restore
    for index in np.flatnonzero(~eroded).tolist():
        reached[samples.rows(index)] = core[samples.rows(index)]
    middle = 0.5 * (high + low)
    slack = 1.5 * NOISE_PER_M * middle * middle + (high - low)
    own = core | (valid & reached & (np.abs(z - middle) <= slack))
    return np.where(own, z, middle), reached, own


def _describe(
    samples: Samples,
    filled: Float,
    reached: Bools,
    measured: Bools,
    shares: list[float],
    indices: Ints,
    widths_px: Array,
    counts: Ints,
    focal_px: float,
) -> Surfaces:
    """Describe the surfaces of the masks `indices` [n]; no other mask has samples in `reached`."""
    used = np.flatnonzero(reached)
    points = np.empty((3, used.size), np.float32)
    filled.ravel().take(used, out=points[2])
    np.multiply(samples.rays.reshape(2, -1).take(used, axis=1), points[2], out=points[:2])
    own = points.compress(measured.ravel().take(used), axis=1)
    bounds = samples.find_bounds(used)
    starts = bounds[indices]
    sizes = (bounds[1:] - bounds[:-1])[indices]
    # in float64, because sums of many float32 values lose digits
    positions = (np.add.reduceat(points, starts, axis=1, dtype=np.float64) / sizes).T
    # the box lies along the principal axes of the surface
    centred = _split(points - np.repeat(positions.T.astype(np.float32), sizes, axis=1), starts)
    scatters = np.array([part @ part.T for part in centred], np.float64) / sizes[:, None, None]
    axes = np.linalg.eigh(scatters)[1]
    ends = [trim_ends(turned.T @ part) for turned, part in zip(axes.astype(np.float32), centred, strict=True)]
    low, high = np.array(ends, np.float64).transpose(1, 0, 2)
    rows = np.arange(len(indices))[:, None]
    order = np.argsort(low - high, axis=1, kind="stable")
    # the nearest point and the points themselves are of measured depths only
    own_starts = samples.find_bounds(np.flatnonzero(measured))[indices]
    covariances = _predict_covariances(positions, scatters, counts[indices], focal_px, widths_px[indices])
    middles = positions + (axes @ ((low + high) / 2)[:, :, None])[:, :, 0]
    # thinning may leave the samples half a pixel from the middle of the mask
    shifts = positions[:, 2:] / focal_px * samples.offsets_px[indices]
    positions[:, :2] += shifts
    middles[:, :2] += shifts
    return Surfaces(
        shares=shares,
        indices=indices.tolist(),
        positions_m=positions,
        centres_m=middles,
        nearest_m=_find_nearest(own, own_starts),
        extents_m=(high - low)[rows, order],
        axes=_orient(axes.transpose(0, 2, 1)[rows, order].transpose(0, 2, 1)),
        covariances_m2=covariances,
        points_m=[part.T for part in _split(own, own_starts)],
    )


def _split(points: Float, starts: Ints) -> list[Float]:
    """Return the points [3, size] of each object."""
    ends = [*starts.tolist(), points.shape[1]]
    return [points[:, start:end] for start, end in itertools.pairwise(ends)]


def trim_ends(along: Float) -> tuple[Float, Float]:
    """Return the ends [3] of points [3, size] along each axis, without the outermost ones. It sorts the points."""
    along.sort(axis=1)
    outermost = int(_TRIMMED * along.shape[1])
    return along[:, outermost], along[:, -1 - outermost]


def _find_nearest(points: Float, starts: Ints) -> Array:
    """Return a point of each object [n, 3], the nearest to the camera behind the outermost ones."""
    squares = np.einsum("ij,ij->j", points, points)
    found = []
    for start, end in itertools.pairwise([*starts.tolist(), squares.size]):
        rank = min(end - start - 1, max(int(_TRIMMED * (end - start)), 2))
        found.append(start + squares[start:end].argpartition(rank)[rank])
    return points[:, found].T.astype(np.float64)


def _orient(axes: Array) -> Array:
    """Return axes [n, 3, 3] right-handed, with the largest component of the first two positive."""
    # the sign of an eigenvector is arbitrary, and would flip the box from frame to frame
    extremes = np.where(axes.max(axis=1) >= -axes.min(axis=1), 1.0, -1.0)
    axes = axes * extremes[:, None, :]
    a, b, c = axes[:, :, 0].T
    d, e, f = axes[:, :, 1].T
    axes[:, 0, 2] = b * f - c * e
    axes[:, 1, 2] = c * d - a * f
    axes[:, 2, 2] = a * e - b * d
    return axes


def _predict_covariances(
    positions: Array, scatters: Array, counts: Ints, focal_px: float, widths_px: Array
) -> Array:
    """Return covariances [n, 3, 3] of positions' errors: noise of depth along the ray, the mask's edges across it.

    An error of an edge moves the mean along the surface, so an inclined surface turns it into an error of depth.
    """
    squares = np.einsum("ij,ij->i", positions, positions)[:, None, None]
    along = positions[:, :, None] * positions[:, None, :] / squares
    noise_m2 = (NOISE_PER_M * squares) ** 2 / np.maximum(1.0, counts / _CORRELATED_PIXELS)[:, None, None]
    edge_m2 = (_EDGE_ERROR_PX / focal_px) ** 2 * squares
    # of the relative size of an edge's error and the object, the same share of the surface's own spread
    share = (_EDGE_ERROR_PX / np.maximum(widths_px, 1.0)) ** 2
    covariances: Array = (noise_m2 - edge_m2) * along + edge_m2 * _IDENTITY + share[:, None, None] * scatters
    return covariances
