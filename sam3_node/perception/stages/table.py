"""Find the table in the robot's base from depth, and describe objects by their place on it. It runs on the host.

The table is the level plane with the most weight among the measured points outside of masks and of the robot: RANSAC
with fixed triples, then least squares on its points. A point's weight is one over the square of its depth's noise, so a
floor behind the table counts little. The same frames give the same plane, bit for bit.

Up is the side of the table that the camera sees, so a base that hangs from the ceiling has a table, too. A base whose z
is not vertical has none, and the step's `problem` says so.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import cv2
import numpy as np

from ...geometry import Array, DepthMap, matrix_of, quaternion_from_rotation, transform_points
from ...schema.state import Number, SavedState, Time
from ...types import NANOSECONDS, FramePose, Instance, Mask, Plane
from ..stage import Stage
from ..step import StepFrame
from ..surfaces import NOISE_PER_M, Bools, trim_ends

PERIOD_S = 1.0
"""Time between two measurements."""
MOVED = 0.01
"""Change of the camera's pose above which the camera has moved: in metres, and in components of the unit quaternion."""
POINTS = 1200
"""Approximate number of depth pixels that are sampled."""
MIN_POINTS = 100
"""Number of points that a plane needs to be a table."""
FAR_M = 2.5
"""Depth in metres beyond which points are ignored."""
TRIES = 60
"""Random triples of points that RANSAC tries. If a third of the points lie on the table, 1 run in 10 finds no triple on
it."""
LEVEL = 0.8
"""Smallest z component of a table's unit normal in the base: a table is tilted by 37 degrees at most."""
NOISE_M = 0.002
"""Least noise of a depth."""
GATE = 3.0
"""Distance from the plane, in standard deviations of depth noise, up to which a point is an inlier."""
REFITS = 3
"""Least-squares fits after RANSAC, each on the inliers of the one before."""
UNSEEN_S = 5.0
"""Seconds without a table in view, after which the one that is kept is doubted."""
TURNED_DEG = 3.0
"""Turn of the table in the base, while the camera's pose stays, from which on the camera seems to have been knocked."""
TILTED_DEG = 5.0
"""Angle between a table and the base's level from which on one of them, or the hand-eye calibration, is doubted."""
TILTED_SHARE = 0.5
"""Share of the points that a plane which is not level needs to be named as the likely table."""
UNIT_TOLERANCE = 1e-3
"""How far the length of a saved normal may be from 1."""
LEAST_SIDE_M = 0.001
"""Least side of an upright box. A flat box is no solid for a planner."""


class FoundPlane(NamedTuple):
    """A plane among points, and the share of them that lie on it."""

    plane: Plane
    share: float

    @property
    def is_level(self) -> bool:
        """True if the base's z is vertical on it, up or down."""
        return abs(self.plane.normal[2]) > LEVEL


def fit_plane(points_m: Array, depths_m: Array, camera_m: Sequence[float] | None = None) -> Plane | None:
    """Return the level plane with the most weight among points [n, 3] with these depths [n]; None if it has too few.

    Its normal points to the side of `camera_m`, the camera's place in the base; without it, along the base's z.
    """
    found = _search_plane(points_m, depths_m, True, camera_m)
    return found.plane if found is not None and found.is_level else None


def _search_plane(
    points_m: Array, depths_m: Array, level: bool, camera_m: Sequence[float] | None
) -> FoundPlane | None:
    """Return the plane with the most weight, with `level` among those that are level at first; None: too few points."""
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
    allowed = np.abs(normals[:, 2]) > LEVEL if level else np.ones(TRIES)
    scores = (weights @ inside) * allowed
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
    # an eigenvector may point down; a camera sees the upper side of a table alone
    upward = normal[2] if camera_m is None else (camera_m - centre) @ normal
    normal *= np.copysign(1.0, upward)
    x, y, z = normal.tolist()
    return FoundPlane(Plane((x, y, z), float(centre @ normal), rms_m), float(np.mean(chosen)))


def describe_on(table: Plane, points_m: Array, is_held: bool = False) -> dict[str, Any]:
    """Return the fields of an object whose measured points [n, 3] are in the base: its heights and its upright box.

    The box reaches down to the table, but not that of an object which is held, or whose points lie below the table.
    """
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
    # what is below an object was not seen to be free, unless the gripper carries it
    if not is_held and table.offset_m < high[2]:
        low[2] = table.offset_m
    low[2] = min(low[2], high[2] - LEAST_SIDE_M)
    # an edge seen along itself, or a line of points
    missing = np.maximum(LEAST_SIDE_M - (high - low), 0)
    low = low - missing / 2
    high = high + missing / 2
    fields = {
        "heights_m": heights,
        "upright_centre_m": axes @ (low + high) / 2,
        "upright_quaternion_xyzw": quaternion_from_rotation(axes),
        "upright_size_m": high - low,
    }
    return {name: tuple(np.round(value, 6).tolist()) for name, value in fields.items()}


class TableState(SavedState):
    """What `FindTable` keeps."""

    plane: tuple[Number, ...]
    camera: tuple[Number, ...]
    stamp_ns: Time
    first_normal: tuple[Number, ...] = ()
    found_ns: Time | None = None

    def __post_init__(self) -> None:
        # a saved state may come from a file
        plane = self.plane
        if plane and (len(plane) != 5 or abs(math.hypot(*plane[:3]) - 1) > UNIT_TOLERANCE or plane[4] < 0):
            raise ValueError("expected a normal of length 1, an offset and an error of at least 0")
        if len(self.camera) not in (0, 7):
            raise ValueError("expected a position and a quaternion")
        if len(self.first_normal) not in (0, 3):
            raise ValueError("expected a normal of three components")


class FindTable(Stage):
    """Measures the table on some frames of one camera, and keeps it while the camera stands still in the base."""

    name = "table"
    timed = "host"
    needs_depth = True
    is_optional = True
    counts_as = "spatial"
    STATE = TableState

    def __init__(self) -> None:
        self._plane: tuple[float, ...] = ()
        """normal, offset and error of the last plane, which is a table only if it is level; empty: none is known"""
        self._camera: tuple[float, ...] = ()
        """the camera's pose when it was measured"""
        self._stamp_ns = -round(PERIOD_S * NANOSECONDS)
        """of the last measurement"""
        self._first_normal: tuple[float, ...] = ()
        """of the first table that was found since the camera's pose last changed; empty: none was"""
        self._found_ns: int | None = None
        """of the last measurement that found a table"""

    def run(self, step: StepFrame) -> None:
        """Fill `table`, or say in `problem` that the base's z is not vertical, or why the table may be wrong."""
        if step.depth is None or step.camera_pose is None:
            return
        masks = [instance.mask for instance in step.instances]
        robot = None if step.robot is None else step.robot.inside
        step.table = self.find(step.camera_pose, step.depth, masks, robot)
        if step.table is None and self._plane:
            step.is_base_tilted = True
            tilt_deg = round(np.degrees(np.arccos(min(1.0, abs(self._plane[2])))), -1)
            step.problem = step.problem or (
                f"no table: expected a level plane in the base, found one that is tilted by about {tilt_deg:.0f} "
                "degrees against the base's z; show the camera the table; for a base on a wall, give poses and "
                "[hand_eye] in a frame whose z is vertical; else check [hand_eye]"
            )
        elif step.table is not None:
            step.problem = step.problem or self._doubt(step.table, step.camera_pose.stamp_ns)

    def _doubt(self, table: Plane, now_ns: int) -> str | None:
        """Return why a table may not be where it is in the base, None if nothing says so.

        A fixed camera that is knocked keeps its pose in the calibration, so only the table tells.
        """
        remedy = (
            "if the camera or the robot's base was moved, calibrate [hand_eye] again and restart the node"
        )
        if self._found_ns is not None and now_ns - self._found_ns > UNSEEN_S * NANOSECONDS:
            return (
                f"table not found: expected it in view, found none for more than {UNSEEN_S:g} s, so heights and "
                f"upright boxes are of the last one; show the camera the table; {remedy}"
            )
        turned_deg = _angle_deg(table.normal, self._first_normal or table.normal)
        if turned_deg > TURNED_DEG:
            return (
                f"table turned: expected it to stay while the camera's pose does, found it turned by about "
                f"{turned_deg:.0f} degrees since it was first measured; {remedy}"
            )
        tilted_deg = _angle_deg(table.normal, (0.0, 0.0, math.copysign(1.0, table.normal[2])))
        if tilted_deg > TILTED_DEG:
            return (
                f"table tilted: expected a level one, found it tilted by about {tilted_deg:.0f} degrees against the "
                f"base's z; if both are level, [hand_eye] is wrong: {remedy}"
            )
        return None

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
            points_m, depths_m = _list_points(camera, depth, masks, robot)
            found = _search_plane(points_m, depths_m, True, camera.position_m)
            # without a table, the plane that most points lie on tells whether the base's z is vertical
            if found is None or not found.is_level:
                other = _search_plane(points_m, depths_m, False, camera.position_m)
                found = other if other is not None and other.share > TILTED_SHARE else None
            if (found is not None and found.is_level) or has_moved or not self._has_table():
                self._plane = (
                    () if found is None else (*found.plane.normal, found.plane.offset_m, found.plane.rms_m)
                )
                self._camera = pose
            if found is not None and found.is_level:
                self._found_ns = camera.stamp_ns
                if has_moved or not self._first_normal:
                    self._first_normal = found.plane.normal
            elif has_moved:
                self._first_normal = ()
            self._stamp_ns = camera.stamp_ns
        return Plane(self._plane[:3], *self._plane[3:]) if self._has_table() else None

    def _has_table(self) -> bool:
        return bool(self._plane) and abs(self._plane[2]) > LEVEL


def _angle_deg(normal: Sequence[float], other: Sequence[float]) -> float:
    """Return the angle between two unit vectors, in degrees."""
    return math.degrees(math.acos(min(1.0, max(-1.0, float(np.dot(normal, other))))))


class DescribeOnTable(Stage):
    """Gives the objects their heights above the table and their upright boxes."""

    name = "on_table"
    timed = "host"
    needs_depth = True
    is_optional = True
    counts_as = "spatial"

    def run(self, step: StepFrame) -> None:
        """Fill the fields of the instances that refer to the table. It runs once it is known what is held."""
        if step.table is None or step.camera_pose is None or not step.surfaces:
            return
        base_from_camera = matrix_of(step.camera_pose)
        described = list[Instance]()
        for instance in step.instances:
            points_m = step.surfaces.get(instance.id)
            if points_m is not None:
                placed_m = transform_points(base_from_camera, points_m)
                described.append(replace(instance, **describe_on(step.table, placed_m, instance.held)))
            else:
                described.append(instance)
        step.instances = described


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
