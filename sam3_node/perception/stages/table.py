"""Find the table in the robot's base from depth, and describe objects by their place on it. It runs on the host.

The table is the level plane with the most weight among the measured points outside of masks and of the robot: RANSAC
with fixed triples, then least squares on its points. A point's weight is one over the square of its depth's noise, so a
floor behind the table counts little. The same frames give the same plane, bit for bit.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import cv2
import numpy as np

from ...geometry import Array, matrix_of, quaternion_from_rotation, transform_points
from ...types import NANOSECONDS, FramePose, Instance, Mask, Plane
from ..stage import Stage
from ..step import StepFrame
from ..surfaces import NOISE_PER_M, Bools, DepthMap, trim_ends

PERIOD_S = 1.0
"""Time between two measurements."""
MOVED = 0.01
"""Metres, or parts of a unit quaternion, by which a camera must differ to count as moved."""
POINTS = 1200
"""Points of the image that are looked at, about."""
MIN_POINTS = 100
"""Points that a table has at least."""
FAR_M = 2.5
"""Depth up to which points are looked at."""
TRIES = 60
"""Triples of points that are tried. With a third of the points on the table, 1 time in 10 none lies on it."""
LEVEL = 0.8
"""Smallest part of the normal along the base's z: the table is tilted by 37 degrees at most."""
NOISE_M = 0.002
"""Least noise of a depth."""
GATE = 3.0
"""Times of its noise up to which a point belongs to the plane."""
REFITS = 3
"""Least-squares fits, each on the points of the one before."""


def fit_plane(points_m: Array, depths_m: Array) -> Plane | None:
    """Return the level plane with the most weight among points [n, 3] with these depths [n]; None if it has too few."""
    if len(points_m) < MIN_POINTS:
        return None
    # a far point is less certain, so it weighs less, and may lie farther from the plane
    noise_m = np.maximum(NOISE_M, NOISE_PER_M * depths_m * depths_m)
    weights = noise_m**-2.0
    # RANSAC: planes through triples of points; a fixed seed gives the same triples in a replay
    a, b, c = points_m[np.random.default_rng(0).integers(len(points_m), size=(3, TRIES))]
    normals = np.cross(b - a, c - a)
    normals /= np.maximum(np.linalg.norm(normals, axis=1, keepdims=True), 1e-9)
    inside = np.abs(points_m @ normals.T - (a * normals).sum(axis=1)) < GATE * noise_m[:, None]
    # walls and tilted planes are no table
    scores = (weights @ inside) * (np.abs(normals[:, 2]) > LEVEL)
    # least squares on the points of the best plane; each fit finds points that the one before missed
    chosen = inside[:, scores.argmax()]
    for _ in range(REFITS):
        if np.count_nonzero(chosen) < MIN_POINTS:
            return None
        centre = weights[chosen] @ points_m[chosen] / weights[chosen].sum()
        centred = points_m - centre
        near = centred[chosen]
        normal = np.linalg.eigh((near.T * weights[chosen]) @ near)[1][:, 0]
        away_m = centred @ normal
        rms_m = float(np.sqrt(np.mean(away_m[chosen] ** 2)))
        chosen = np.abs(away_m) < GATE * noise_m
    # an eigenvector may point down
    normal *= np.copysign(1.0, normal[2])
    x, y, z = normal.tolist()
    return Plane((x, y, z), float(centre @ normal), rms_m) if z > LEVEL else None


def describe_on(table: Plane, points_m: Array) -> dict[str, Any]:
    """Return the fields of an object whose measured points [n, 3] are in the base: its heights and its upright box."""
    # axes in the table's plane: first any, then along the smallest rectangle around the points
    normal = np.array(table.normal)
    x = np.cross((0.0, 1.0, 0.0), normal)
    x /= np.linalg.norm(x)
    flat = points_m @ np.column_stack([x, np.cross(normal, x)])
    angle = np.radians(cv2.minAreaRect(flat.astype(np.float32))[2])
    x = np.cos(angle) * x + np.sin(angle) * np.cross(normal, x)
    axes = np.column_stack([x, np.cross(normal, x), normal])
    low, high = trim_ends((axes.T @ points_m.T).astype(np.float32))
    heights = low[2] - table.offset_m, high[2] - table.offset_m
    low[2] = min(table.offset_m, high[2])  # what is below an object was not seen to be free
    fields = {
        "heights_m": heights,
        "upright_centre_m": axes @ (low + high) / 2,
        "upright_quaternion_xyzw": quaternion_from_rotation(axes),
        "upright_size_m": high - low,
    }
    return {name: tuple(np.round(value, 6).tolist()) for name, value in fields.items()}


class FindTable(Stage):
    """Measures the table on some frames of one camera, and keeps it while the camera stands still in the base."""

    name = "table"
    timed = "host"
    needs_depth = True
    counts_as = "spatial"
    SAVED = ("_plane", "_camera", "_stamp_ns")

    def __init__(self) -> None:
        self._plane: tuple[float, ...] = ()
        """normal, offset and error of the last plane; empty: none is known"""
        self._camera: tuple[float, ...] = ()
        """the camera's pose when it was measured"""
        self._stamp_ns = -round(PERIOD_S * NANOSECONDS)
        """of the last measurement"""

    def run(self, step: StepFrame) -> None:
        """Fill `table`, and the fields of the instances that refer to it."""
        if step.depth is None or step.camera_pose is None:
            return
        masks = [instance.mask for instance in step.instances]
        robot = None if step.robot is None else step.robot.inside
        step.table = self.find(step.camera_pose, step.depth, masks, robot)
        if step.table is None or not step.surfaces:
            return
        base_from_camera = matrix_of(step.camera_pose)
        described = list[Instance]()
        for instance in step.instances:
            points_m = step.surfaces.get(instance.id)
            if points_m is not None:
                on_table = describe_on(step.table, transform_points(base_from_camera, points_m))
                described.append(replace(instance, **on_table))
            else:
                described.append(instance)
        step.instances = described

    def find(
        self, camera: FramePose, depth: DepthMap, masks: Iterable[Mask], robot: Bools | None
    ) -> Plane | None:
        """Return the table in the base; None if it is not known. Measure it if it is time to.

        `camera` is its pose in the base. If the camera has not moved and no table is found, the last one stays.
        """
        pose = (*camera.position_m, *camera.quaternion_xyzw)
        # also when the camera's clock has begun again
        if not 0 <= camera.stamp_ns - self._stamp_ns < PERIOD_S * NANOSECONDS:
            has_moved = not self._camera or np.abs(np.subtract(pose, self._camera)).max() > MOVED
            found = fit_plane(*_list_points(camera, depth, masks, robot))
            if found is not None or has_moved:
                self._plane = () if found is None else (*found.normal, found.offset_m, found.rms_m)
                self._camera = pose
            self._stamp_ns = camera.stamp_ns
        return Plane(self._plane[:3], *self._plane[3:]) if self._plane else None


def _list_points(
    camera: FramePose, depth: DepthMap, masks: Iterable[Mask], robot: Bools | None
) -> tuple[Array, Array]:
    """Return points in the base [n, 3] outside of masks and robot, with their depths [n]."""
    # a copy, because masks are painted into it, and the message needs the robot's pixels alone
    taken = np.zeros(depth.image.shape, np.bool_) if robot is None else robot.copy()
    for mask in masks:
        mask.paint(taken, True)
    step = max(1, round((taken.size / POINTS) ** 0.5))
    z = depth.image[::step, ::step] * np.float64(depth.scale_m)
    free = (z > 0) & (z < FAR_M) & ~taken[::step, ::step]
    x, y = depth.rays[:, ::step, ::step][:, free] * z[free]
    return transform_points(matrix_of(camera), np.column_stack([x, y, z[free]])), z[free]
