"""Measure the objects of one camera in 3-D, from depth, calibration and the robot's pose. It runs on the host.

A field is absent if the frame lacks what it needs, or if the mask is doubtful: it would give the position of something
else. Velocities come from a Kalman filter with constant velocity for each object.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ...calibration import Calibration
from ...geometry import (
    Array,
    DepthMap,
    Float,
    cross_matrices,
    matrix_of,
    quaternion_from_rotation,
    transform_points,
)
from ...settings import SpatialSettings
from ...types import ACCELERATION_MPS2, NANOSECONDS, Instance, Mask
from ..objects import Objects
from ..stage import PerObject, Stage
from ..step import BASE, CAMERA, MeasuredSurface, StepFrame, list_doubtful, list_measured
from ..surfaces import TARGET_PIXELS, Surfaces, measure_surfaces

START_SPEED_MPS = 0.5
"""Standard deviation of the speed before the second position."""
MAX_AGE_S = 1.0
"""A velocity is not given, and the filter starts anew, this long after the last position."""
FARTHEST_M = 20.0
"""Largest distance and size of an object at which the unit of depth is not doubted."""
WIDEST = 5.0
"""Largest ratio of an object's longest side to its distance. A camera with a field of view of 136 degrees sees no
larger one."""
LOWEST_M = 3.0
"""Distance below or above the base from which on an object is out of any robot's reach, and the unit of depth is
doubted."""
MIN_POSITIONS = 3
"""Positions that a velocity needs."""
DIGITS = 6
"""Digits of lengths in metres, and of speeds: a micrometre."""
_UPPER = np.triu_indices(3)
"""Elements of a covariance that are given: xx, xy, xz, yy, yz, zz."""
_IDENTITY = np.eye(3)

_Fields = dict[str, Any]
"""Fields of an Instance."""


class MeasuredPoints(NamedTuple):
    """Points of an object's surface."""

    seq: int
    """of the frame"""
    frame: str
    """"camera" or "base\""""
    points_m: Float
    """[n, 3]"""


class _LastFrame(NamedTuple):
    """What `points` needs of the last frame, beside the masks of its objects."""

    seq: int
    depth: DepthMap | None
    base_from_camera: Array | None


class MeasureObjects(Stage):
    """Measures the visible surfaces of the objects, and filters their velocities."""

    name = "spatial"
    timed = "host"
    needs_depth = True
    is_optional = True

    def __init__(self, objects: Objects, settings: SpatialSettings, calibration: Calibration | None) -> None:
        self._points = settings.points
        self._calibration = calibration
        self._velocities = VelocityFilters(objects)
        self._last: _LastFrame | None = None
        self._last_masks = objects.register(PerObject("measured", Mask, saved=False))

    def run(self, step: StepFrame) -> None:
        """Fill `surfaces`, and the 3-D fields of the instances but for those that refer to the table."""
        base_from_camera = None if step.camera_pose is None else matrix_of(step.camera_pose)
        measured = list_measured(step.instances)
        # kept for `points`, which users ask for between two steps
        self._last = _LastFrame(step.frame.seq, step.depth, base_from_camera)
        self._last_masks.clear()
        self._last_masks.update((instance.id, instance.mask) for instance in measured)
        fields: dict[int, _Fields] = {}
        if measured and step.depth is not None:
            fields = self._describe(step, measured, step.depth, base_from_camera)
        doubtful = list_doubtful(step)
        if doubtful and step.depth is not None and base_from_camera is not None:
            step.doubtful = self._measure_doubtful(doubtful, step.depth, base_from_camera)
        step.instances = self._complete(step.instances, fields, step.frame.capture_ns)

    def points(self, object_id: int, count: int) -> MeasuredPoints | None:
        """Return up to `count` measured points of an object's surface on the last frame; None if it has none."""
        last = self._last
        mask = self._last_masks.get(object_id)
        if last is None or last.depth is None or mask is None:
            return None
        # measured again, because a user may ask for more points than a step uses; a few points are no surface
        surfaces = measure_surfaces([mask], last.depth, max(TARGET_PIXELS, count))
        if not surfaces.indices:
            return None
        frame = CAMERA if last.base_from_camera is None else BASE
        points_m = _sample(surfaces.points_m[0], count, last.base_from_camera)
        return MeasuredPoints(last.seq, frame, points_m)

    def _describe(
        self, step: StepFrame, instances: Sequence[Instance], depth: DepthMap, base_from_camera: Array | None
    ) -> dict[int, _Fields]:
        """Return the fields of instances with masks, by id. Their positions enter the filters of velocities."""
        masks = [instance.mask for instance in instances]
        # each point that is sent needs a sample
        surfaces = measure_surfaces(masks, depth, max(TARGET_PIXELS, self._points))
        # a mask without a surface still tells how much of it has depth
        fields: dict[int, _Fields] = {
            instance.id: {"depth_share": round(share, 4)}
            for instance, share in zip(instances, surfaces.shares, strict=True)
        }
        ids = [instances[index].id for index in surfaces.indices]
        if ids:
            step.problem = step.problem or _doubt_sizes(ids, surfaces)
            placed = self._describe_surfaces(ids, surfaces, step.frame.capture_ns, base_from_camera)
            for object_id, surface, points_m in zip(ids, placed, surfaces.points_m, strict=True):
                fields[object_id] |= surface
                step.surfaces[object_id] = points_m
                step.problem = step.problem or _doubt_height(object_id, surface)
        return fields

    def _describe_surfaces(
        self, ids: list[int], surfaces: Surfaces, stamp_ns: int, base_from_camera: Array | None
    ) -> Iterator[_Fields]:
        """Yield the fields of each surface in the base, or in the camera if its pose is not known."""
        frame = CAMERA
        covariances = surfaces.covariances_m2
        axes = surfaces.axes
        points = np.stack([surfaces.positions_m, surfaces.centres_m, surfaces.nearest_m], axis=1)
        if base_from_camera is not None:
            frame = BASE
            rotation = base_from_camera[:3, :3]
            covariances = rotation @ self._add_hand_eye(covariances, surfaces.positions_m) @ rotation.T
            axes = rotation @ axes
            points = transform_points(base_from_camera, points)
        self._velocities.observe(ids, stamp_ns, frame, points[:, 0], covariances)
        # rounded and converted for all objects at once: a call costs more than its numbers
        others = np.stack([surfaces.extents_m, surfaces.positions_m], axis=1)
        rows = np.round(np.concatenate([points, others], axis=1), DIGITS).tolist()
        quaternions = quaternion_from_rotation(axes).tolist()
        upper = covariances[:, *_UPPER].tolist()
        count = self._points
        for points_m, row, quaternion, covariance in zip(
            surfaces.points_m, rows, quaternions, upper, strict=True
        ):
            position, centre, nearest, extent, in_camera = map(tuple, row)
            yield {
                "position_m": position,
                "frame": frame,
                "camera_position_m": in_camera if frame == BASE else None,
                "covariance_m2": tuple(covariance),
                "extent_m": extent,
                "extent_centre_m": centre,
                "extent_quaternion_xyzw": tuple(quaternion),
                "nearest_m": nearest,
                "points_m": _sample(points_m, count, base_from_camera).tobytes() if count else None,
            }

    def _measure_doubtful(
        self, instances: Sequence[Instance], depth: DepthMap, base_from_camera: Array
    ) -> dict[int, MeasuredSurface]:
        """Return where the surfaces under the doubtful masks of these instances are in the base, by id."""
        surfaces = measure_surfaces([instance.mask for instance in instances], depth)
        rotation = base_from_camera[:3, :3]
        positions_m = transform_points(base_from_camera, surfaces.positions_m)
        covariances = self._add_hand_eye(surfaces.covariances_m2, surfaces.positions_m)
        upper = (rotation @ covariances @ rotation.T)[:, *_UPPER]
        measured = zip(positions_m.tolist(), upper.tolist(), surfaces.extents_m.tolist(), strict=True)
        return {
            instances[index].id: MeasuredSurface(*map(tuple, values))
            for index, values in zip(surfaces.indices, measured, strict=True)
        }

    def _add_hand_eye(self, covariances_m2: Array, positions_m: Array) -> Array:
        """Return the covariances [n, 3, 3] with the error of the hand-eye calibration, if the file has one."""
        hand_eye = self._calibration.hand_eye if self._calibration is not None else None
        if hand_eye is None or hand_eye.measured is None:
            return covariances_m2
        # of a point by a translation and a rotation vector
        jacobians = np.concatenate(
            [np.broadcast_to(np.eye(3), (len(positions_m), 3, 3)), -cross_matrices(positions_m)], axis=2
        )
        covariance = np.array(hand_eye.measured.covariance)
        added: Array = jacobians @ covariance @ jacobians.transpose(0, 2, 1)
        return covariances_m2 + added

    def _complete(
        self, instances: Sequence[Instance], fields: Mapping[int, _Fields], stamp_ns: int
    ) -> tuple[Instance, ...]:
        """Return the instances with their fields and velocities."""
        completed = []
        for instance in instances:
            added = dict(fields.get(instance.id, {}))
            # a hidden object keeps its velocity for a while; it must be in the frame of the other fields
            velocity = self._velocities.velocity(instance.id, stamp_ns)
            if velocity is not None and added.setdefault("frame", velocity.frame) == velocity.frame:
                added["velocity_mps"] = tuple(round(value, DIGITS) for value in velocity.mps.tolist())
                added["velocity_age_s"] = round(velocity.age_s, DIGITS)
            completed.append(replace(instance, **added) if added else instance)
        return tuple(completed)


def _doubt_sizes(ids: Sequence[int], surfaces: Surfaces) -> str | None:
    """Return which object is too far or too large to be seen by a robot's camera, None if none is."""
    distances_m = np.linalg.norm(surfaces.positions_m, axis=1)
    sizes_m = surfaces.extents_m[:, 0]
    wrong = np.flatnonzero((np.maximum(distances_m, sizes_m) > FARTHEST_M) | (sizes_m > WIDEST * distances_m))
    if not wrong.size:
        return None
    first = int(wrong[0])
    # one digit, because a replay counts each text for itself
    away_m, side_m = (float(f"{each_m[first]:.1g}") for each_m in (distances_m, sizes_m))
    return (
        f"an object too far or too large: expected one within {FARTHEST_M:g} m that the camera can see, found object "
        f"{ids[first]}, about {away_m:g} m away, with a side of {side_m:g} m; are scale_m of depth "
        "and the intrinsics right?"
    )


def _doubt_height(object_id: int, surface: _Fields) -> str | None:
    """Return that an object lies metres below or above the base, None if it does not."""
    height_m = surface["position_m"][2]
    if surface["frame"] != BASE or abs(height_m) <= LOWEST_M:
        return None
    # one digit, because a replay counts each text for itself
    side = "below" if height_m < 0 else "above"
    return (
        f"an object out of reach: expected one within {LOWEST_M:g} m of the base's height, found object {object_id} "
        f"about {float(f'{abs(height_m):.1g}'):g} m {side} it; are scale_m of depth and [hand_eye] right? Depth in 0.1 "
        "mm has scale_m 0.0001"
    )


def _sample(points: Float, count: int, base_from_camera: Array | None) -> Float:
    """Return up to `count` of these points [n, 3], spread evenly, in the base if its pose is known."""
    if len(points) > count:
        points = points[np.linspace(0, len(points) - 1, count).astype(int)]
    placed = points if base_from_camera is None else transform_points(base_from_camera, points)
    return np.ascontiguousarray(placed, "<f4")


class Velocity(NamedTuple):
    """The velocity of an object."""

    frame: str
    mps: Array
    """[3]"""
    age_s: float
    """time since the position that it is from"""


@dataclass(slots=True)
class _Filter:
    """The Kalman filter of one object."""

    frame: str
    stamp_ns: int
    mean: Array
    """[6], position and velocity"""
    covariance: Array
    """[6, 6]"""
    count: int = 1
    """number of positions that it was given"""


class VelocityFilters:
    """The filters of all objects of one camera. Positions of another frame, or older ones, start a filter anew."""

    def __init__(self, objects: Objects) -> None:
        self._filters = objects.register(PerObject("velocities", _Filter))

    def observe(
        self, ids: Sequence[int], stamp_ns: int, frame: str, positions_m: Array, covariances_m2: Array
    ) -> None:
        """Take positions [n, 3] of objects at one time, with the covariances [n, 3, 3] of their errors."""
        updated: dict[int, _Filter] = {}
        for row, object_id in enumerate(ids):
            kept = self._filters.get(object_id)
            # a filter goes on while positions come in time, in the same frame, and forward
            if kept and kept.frame == frame and 0 < stamp_ns - kept.stamp_ns <= MAX_AGE_S * NANOSECONDS:
                updated[row] = kept
                continue
            covariance = np.zeros((6, 6))
            covariance[:3, :3] = covariances_m2[row]
            covariance[3:, 3:] = START_SPEED_MPS**2 * _IDENTITY
            mean = np.append(positions_m[row], np.zeros(3))
            self._filters[object_id] = _Filter(frame, stamp_ns, mean, covariance)
        if updated:
            rows = list(updated)
            _update([*updated.values()], stamp_ns, positions_m[rows], covariances_m2[rows])

    def velocity(self, object_id: int, stamp_ns: int) -> Velocity | None:
        """Return the velocity of an object; None if it is unknown or too old."""
        kept = self._filters.get(object_id)
        if kept is None or kept.count < MIN_POSITIONS:
            return None
        age_s = (stamp_ns - kept.stamp_ns) / NANOSECONDS
        # a camera's clock may begin again, so an age may be negative
        return Velocity(kept.frame, kept.mean[3:], age_s) if 0 <= age_s <= MAX_AGE_S else None


def _update(filters: Sequence[_Filter], stamp_ns: int, positions_m: Array, covariances_m2: Array) -> None:
    """Predict n filters at a time, and correct them by positions [n, 3] with covariances [n, 3, 3]."""
    stamps_ns = np.array([each.stamp_ns for each in filters])
    dt = ((stamp_ns - stamps_ns) / NANOSECONDS)[:, None, None]
    means = np.array([each.mean for each in filters])[:, :, None]
    old = np.array([each.covariance for each in filters])
    noise = ACCELERATION_MPS2**2 * dt * _IDENTITY
    # blocks of the covariances [n, 6, 6]: of position, of position and velocity, of velocity
    old_cross = old[:, :3, 3:]
    speed = old[:, 3:, 3:]
    position = old[:, :3, :3] + dt * (old_cross + old_cross.transpose(0, 2, 1) + dt * (speed + noise / 3))
    cross = old_cross + dt * (speed + noise / 2)
    predicted = np.concatenate([position, cross.transpose(0, 2, 1)], axis=1)  # [n, 6, 3], with the position
    gain = predicted @ np.linalg.inv(position + covariances_m2)
    means[:, :3] += dt * means[:, 3:]
    means += gain @ (positions_m[:, :, None] - means[:, :3])
    covariances = np.empty_like(old)
    covariances[:, :3, :3] = position
    covariances[:, :3, 3:] = cross
    covariances[:, 3:, :3] = cross.transpose(0, 2, 1)
    covariances[:, 3:, 3:] = speed + noise
    covariances -= gain @ predicted.transpose(0, 2, 1)
    # rounding makes a covariance less symmetric with each update
    covariances = (covariances + covariances.transpose(0, 2, 1)) / 2
    for each, mean, covariance in zip(filters, means[:, :, 0], covariances, strict=True):
        each.mean = mean
        each.covariance = covariance
        each.stamp_ns = stamp_ns
        each.count += 1
