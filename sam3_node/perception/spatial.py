"""Add 3-D fields to the instances of one camera, from depth, calibration and the robot's pose. It runs on the host.

A field is absent if the frame lacks what it needs, or if the mask is doubtful: it would give the position of something
else. Depth is used if it is `aligned` to colour, of colour's size or of its aspect ratio (then depth is resampled to
the nearest pixel). Intrinsics are the calibration's, else the frame's. Velocities come from a Kalman filter with
constant velocity for each object.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cv2
import numpy as np

from ..calibration import Calibration
from ..calibration.rigid_motion import cross_matrices
from ..errors import Sam3NodeError
from ..geometry import Array, matrix_of, pose_of, quaternion_from_rotation, transform_points
from ..settings import SpatialSettings
from ..types import (
    ACCELERATION_MPS2,
    NANOSECONDS,
    Depth,
    Frame,
    FramePose,
    Instance,
    Intrinsics,
    Mask,
    Plane,
    SavedFields,
    State,
)
from ..wire import decode_depth
from .held import HeldObjects
from .surfaces import TARGET_PIXELS, Bools, DepthMap, Float, RayMap, Surfaces, measure_surfaces
from .table import TableFinder, describe_on

log = logging.getLogger(__name__)

CAMERA, BASE, GRIPPER = "camera", "base", "gripper"
_ASPECT_TOLERANCE = 0.01
_OUTSIDE = 0.95  # of a side: the principal point of a smaller image is further in
_MIDDLE_TOLERANCE = 0.15
_DIGITS = 6  # of metres: a micrometre
_UPPER = np.triu_indices(3)

_Fields = dict[str, Any]  # of an Instance


class SpatialFrame(NamedTuple):
    """The poses that the 3-D fields of one frame refer to."""

    robot_pose: FramePose | None
    """the gripper's pose that was used"""
    camera_pose: FramePose | None
    """the camera's pose in the base; None if fields are in the camera's frame"""
    table: Plane | None = None


class MeasuredPoints(NamedTuple):
    """Points of an object's surface."""

    seq: int
    """of the frame"""
    frame: str
    """"camera" or "base\""""
    points_m: Float
    """[n, 3]"""


class CameraView(NamedTuple):
    """The camera on one frame."""

    frame: Frame
    place: SpatialFrame
    intrinsics: Intrinsics | None
    has_depth: bool
    """True if the frame has depth that can be used"""


class _LastFrame(NamedTuple):
    seq: int
    depth: DepthMap | None
    masks: dict[int, Mask]
    """by object"""


class SpatialStage(SavedFields):
    """Measures the objects of one camera in 3-D, and keeps the filters of their velocities.

    `problem` says why the last frame with depth has no 3-D fields, or none in the base; None if nothing is missing.
    `lacks_robot` is True if that is because the gripper's pose was not given.
    """

    SAVED = ("_velocities", "_table", "held")

    def __init__(self, settings: SpatialSettings, calibration: Calibration | None) -> None:
        self.problem: str | None = None
        self.lacks_robot = False
        self._settings, self._calibration = settings, calibration
        self._rays = RayMap()
        self._velocities = VelocityFilters()
        self._table = TableFinder()
        self.held = HeldObjects()
        self._last: _LastFrame | None = None
        self._place: Array | None = None
        self._plane: Plane | None = None
        self._view: CameraView | None = None
        self._depth: tuple[Frame, DepthMap | None] | None = None

    def measure(
        self,
        frame: Frame,
        instances: Sequence[Instance],
        robot_pose: FramePose | None,
        robot: Bools | None = None,
    ) -> tuple[tuple[Instance, ...], SpatialFrame]:
        """Return the instances with their 3-D fields, and the poses that were used.

        `robot_pose` is the gripper's in the base at the frame's capture; None if it is not known. `robot` are its
        pixels [height, width], which are not of the table.
        """
        view, self._view = self._view, None
        if view is None or view.frame is not frame:
            view = self._look(frame, robot_pose)
        place = view.place
        self._place = None if place.camera_pose is None else matrix_of(place.camera_pose)
        shown = [seen for seen in instances if seen.mask.crop.size and not seen.doubtful]
        depth = self.read_depth(view) if shown or self._settings.table else None
        if depth is not None and self._settings.table and place.camera_pose is not None:
            masks = [instance.mask for instance in instances]
            place = place._replace(table=self._table.find(place.camera_pose, depth, masks, robot))
        self._plane = place.table
        self._depth = None
        self._last = _LastFrame(frame.seq, depth, {instance.id: instance.mask for instance in shown})
        fields = self._describe(frame, shown, depth) if shown and depth is not None else {}
        completed = self._complete(instances, fields, frame.capture_ns)
        gripper = place.robot_pose if place.camera_pose is not None else None
        return self.held.observe(completed, gripper), place

    def look(self, frame: Frame, robot_pose: FramePose | None) -> CameraView:
        """Return what is known of the camera on a frame. The next call of `measure` for this frame uses the same."""
        self._view = self._look(frame, robot_pose)
        return self._view

    def read_depth(self, view: CameraView) -> DepthMap | None:
        """Return the depth of a frame at the size of colour; None if it has none that can be used."""
        if view.intrinsics is None or not view.has_depth:
            return None
        if self._depth is None or self._depth[0] is not view.frame:
            self._depth = view.frame, self._depth_map(view.frame, view.intrinsics)
        return self._depth[1]

    def points(self, object_id: int, count: int) -> MeasuredPoints | None:
        """Return up to `count` measured points of an object's surface on the last frame; None if it has none."""
        last = self._last
        mask = last.masks.get(object_id) if last is not None else None
        if last is None or last.depth is None or mask is None:
            return None
        surfaces = measure_surfaces([mask], last.depth, count)
        if not surfaces.indices:
            return None
        frame = CAMERA if self._place is None else BASE
        return MeasuredPoints(last.seq, frame, self._sample(surfaces.points_m[0], count))

    def remove(self, object_id: int) -> None:
        """Forget an object."""
        self._velocities.remove(object_id)
        self.held.remove(object_id)
        if self._last is not None:
            self._last.masks.pop(object_id, None)

    def restore(self, state: State) -> None:
        """Continue from the moment at which `state` was called. There are no points before the next frame."""
        self._last = None
        super().restore(state)

    def _look(self, frame: Frame, robot_pose: FramePose | None) -> CameraView:
        self.problem, self.lacks_robot = None, False
        place = SpatialFrame(robot_pose, self._locate(frame, robot_pose))
        intrinsics = self._intrinsics(frame)
        fits = frame.depth is not None and self._fits(frame.depth, frame)
        return CameraView(frame, place, intrinsics, fits)

    def _describe(self, frame: Frame, instances: Sequence[Instance], depth: DepthMap) -> dict[int, _Fields]:
        """Return the fields of instances with masks, by id. Their positions enter the filters of velocities."""
        masks = [instance.mask for instance in instances]
        surfaces = measure_surfaces(masks, depth, max(TARGET_PIXELS, self._settings.points))
        fields: dict[int, _Fields] = {
            instance.id: {"depth_share": round(share, 4)}
            for instance, share in zip(instances, surfaces.shares, strict=True)
        }
        ids = [instances[index].id for index in surfaces.indices]
        if ids:
            placed = self._place_surfaces(ids, surfaces, frame.capture_ns)
            for object_id, surface, points_m in zip(ids, placed, surfaces.points_m, strict=True):
                fields[object_id] |= surface
                if self._plane is not None and self._place is not None:
                    fields[object_id] |= describe_on(self._plane, transform_points(self._place, points_m))
        return fields

    def _place_surfaces(self, ids: list[int], surfaces: Surfaces, stamp_ns: int) -> Iterator[_Fields]:
        """Yield the fields of each surface in the base, or in the camera if its place is not known."""
        name, covariances, axes = CAMERA, surfaces.covariances_m2, surfaces.axes
        points = np.stack([surfaces.positions_m, surfaces.centres_m, surfaces.nearest_m], axis=1)
        if self._place is not None:
            name, rotation = BASE, self._place[:3, :3]
            covariances = rotation @ self._add_hand_eye(covariances, surfaces.positions_m) @ rotation.T
            axes, points = rotation @ axes, transform_points(self._place, points)
        self._velocities.observe(ids, stamp_ns, name, points[:, 0], covariances)
        others = np.stack([surfaces.extents_m, surfaces.positions_m], axis=1)
        rows = np.round(np.concatenate([points, others], axis=1), _DIGITS).tolist()
        quaternions, upper = quaternion_from_rotation(axes).tolist(), covariances[:, *_UPPER].tolist()
        count = self._settings.points
        for points_m, row, quaternion, covariance in zip(
            surfaces.points_m, rows, quaternions, upper, strict=True
        ):
            position, centre, nearest, extent, in_camera = map(tuple, row)
            yield {
                "position_m": position,
                "frame": name,
                "camera_position_m": in_camera if name == BASE else None,
                "covariance_m2": tuple(covariance),
                "extent_m": extent,
                "extent_centre_m": centre,
                "extent_quaternion_xyzw": tuple(quaternion),
                "nearest_m": nearest,
                "points_m": self._sample(points_m, count).tobytes() if count else None,
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
            velocity = self._velocities.velocity(instance.id, stamp_ns)
            if velocity is not None and added.setdefault("frame", velocity.frame) == velocity.frame:
                added["velocity_mps"] = tuple(round(value, _DIGITS) for value in velocity.mps.tolist())
                added["velocity_age_s"] = round(velocity.age_s, _DIGITS)
            completed.append(replace(instance, **added) if added else instance)
        return tuple(completed)

    def _sample(self, points: Float, count: int) -> Float:
        if len(points) > count:
            points = points[np.linspace(0, len(points) - 1, count).astype(int)]
        placed = points if self._place is None else transform_points(self._place, points)
        return np.ascontiguousarray(placed, "<f4")

    def _locate(self, frame: Frame, robot_pose: FramePose | None) -> FramePose | None:
        calibration = self._calibration
        if calibration is None or calibration.hand_eye is None:
            return None
        gripper = None
        if calibration.parent == GRIPPER:
            if robot_pose is None:
                self.lacks_robot = frame.depth is not None
                self.problem = (
                    "no pose of the gripper at the time of the image, so positions are in the camera's frame"
                )
                return None
            gripper = matrix_of(robot_pose)
        matrix = calibration.base_from_camera(gripper)
        return pose_of(matrix, CAMERA, BASE, frame.capture_ns, frame.clock)

    def _intrinsics(self, frame: Frame) -> Intrinsics | None:
        if self._calibration is not None:
            try:
                return self._calibration.intrinsics_for((frame.height, frame.width))
            except Sam3NodeError as error:
                self.problem = f"{error}"
                return None
        if frame.intrinsics is None and frame.depth is not None:
            self.problem = (
                "depth without intrinsics: expected them in the frames or a file in spatial.calibration"
            )
        if frame.intrinsics is not None and _is_of_larger_image(frame.intrinsics, frame):
            self.problem = (
                f"intrinsics of another size: expected some for {frame.width}x{frame.height}, found the principal "
                f"point ({frame.intrinsics.cx:g}, {frame.intrinsics.cy:g}) outside; scale them as the image was, or "
                "set spatial.calibration"
            )
            return None
        return frame.intrinsics

    def _fits(self, depth: Depth, frame: Frame) -> bool:
        """Return True if depth can be used; else the reason goes into `problem`."""
        stated = self._calibration.depth if self._calibration is not None else None
        refusal = _refuse(depth, frame, depth.aligned or (stated is not None and stated.aligned))
        self.problem = refusal or self.problem
        return refusal is None

    def _depth_map(self, frame: Frame, intrinsics: Intrinsics) -> DepthMap | None:
        """Return the depth at the size of colour; None if it cannot be decoded, with the reason in `problem`."""
        depth, size = frame.depth, (frame.height, frame.width)
        assert depth is not None
        try:
            image = decode_depth(depth)
        except Sam3NodeError as error:
            self.problem = f"{error}"
            return None
        if not image.any():
            self.problem = "depth without any valid value"
        if image.shape != size:
            image = np.asarray(cv2.resize(image, size[::-1], interpolation=cv2.INTER_NEAREST), np.uint16)
        stated = self._calibration.depth if self._calibration is not None else None
        scale_m = (stated.scale_m if stated is not None else None) or depth.scale_m
        focal_px = (intrinsics.fx * intrinsics.fy) ** 0.5
        return DepthMap(image, scale_m, self._rays.rays(intrinsics, size), focal_px)


def _is_of_larger_image(intrinsics: Intrinsics, frame: Frame) -> bool:
    """Return True if the principal point is the middle of an image of about twice the frame's size or more."""
    x, y = intrinsics.cx / frame.width, intrinsics.cy / frame.height
    return min(x, y) > _OUTSIDE and abs(x / y - 1) < _MIDDLE_TOLERANCE


def _refuse(depth: Depth, frame: Frame, is_aligned: bool) -> str | None:
    """Return the reason for which depth cannot be used, None if it can."""
    if not is_aligned:
        return (
            f"expected depth that is aligned to colour, found {depth.width}x{depth.height} beside "
            f"{frame.width}x{frame.height} without a word of it; align it in the camera, or state it: depth.aligned = "
            "true in the calibration file, --depth-aligned of a replay"
        )
    aspect = (depth.width / depth.height) / (frame.width / frame.height)
    if abs(aspect - 1) > _ASPECT_TOLERANCE:
        return (
            f"expected depth of colour's aspect ratio, {frame.width}x{frame.height}, found "
            f"{depth.width}x{depth.height}; align it in the camera"
        )
    return None


START_SPEED_MPS = 0.5
"""Standard deviation of the speed before the second position."""
MAX_AGE_S = 1.0
"""A velocity is not given, and the filter starts anew, this long after the last position."""
MIN_POSITIONS = 3
"""Positions that a velocity needs."""
_IDENTITY = np.eye(3)


class Velocity(NamedTuple):
    """The velocity of an object."""

    frame: str
    mps: Array
    """[3]"""
    age_s: float
    """time since the position that it is from"""


@dataclass(slots=True)
class _Filter:
    frame: str
    stamp_ns: int
    mean: Array
    """[6], position and velocity"""
    covariance: Array
    """[6, 6]"""
    count: int = 1


class VelocityFilters:
    """The filters of all objects of one camera. Positions of another frame, or older ones, start a filter anew."""

    def __init__(self) -> None:
        self._filters: dict[int, _Filter] = {}

    def observe(
        self, ids: Sequence[int], stamp_ns: int, frame: str, positions_m: Array, covariances_m2: Array
    ) -> None:
        """Take positions [n, 3] of objects at one time, with the covariances [n, 3, 3] of their errors."""
        updated: dict[int, _Filter] = {}
        for row, object_id in enumerate(ids):
            kept = self._filters.get(object_id)
            if kept and kept.frame == frame and 0 < stamp_ns - kept.stamp_ns <= MAX_AGE_S * NANOSECONDS:
                updated[row] = kept
                continue
            covariance = np.zeros((6, 6))
            covariance[:3, :3], covariance[3:, 3:] = covariances_m2[row], START_SPEED_MPS**2 * _IDENTITY
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
        return Velocity(kept.frame, kept.mean[3:], age_s) if 0 <= age_s <= MAX_AGE_S else None

    def remove(self, object_id: int) -> None:
        """Forget an object."""
        self._filters.pop(object_id, None)

    def state(self) -> State:
        """Return the state that `restore` takes."""
        return {
            str(object_id): [
                kept.frame,
                kept.stamp_ns,
                kept.mean.tolist(),
                kept.covariance.tolist(),
                kept.count,
            ]
            for object_id, kept in self._filters.items()
        }

    def restore(self, state: State) -> None:
        """Continue from the moment at which `state` was called."""
        self._filters = {
            int(object_id): _Filter(frame, stamp_ns, np.array(mean), np.array(covariance), count)
            for object_id, (frame, stamp_ns, mean, covariance, count) in state.items()
        }


def _update(filters: Sequence[_Filter], stamp_ns: int, positions_m: Array, covariances_m2: Array) -> None:
    """Predict n filters at a time, and correct them by positions [n, 3] with covariances [n, 3, 3]."""
    stamps_ns = np.array([each.stamp_ns for each in filters])
    dt = ((stamp_ns - stamps_ns) / NANOSECONDS)[:, None, None]
    means = np.array([each.mean for each in filters])[:, :, None]
    old = np.array([each.covariance for each in filters])
    noise = ACCELERATION_MPS2**2 * dt * _IDENTITY
    # blocks of the covariances [n, 6, 6]: of position, of position and velocity, of velocity
    old_cross, speed = old[:, :3, 3:], old[:, 3:, 3:]
    place = old[:, :3, :3] + dt * (old_cross + old_cross.transpose(0, 2, 1) + dt * (speed + noise / 3))
    cross = old_cross + dt * (speed + noise / 2)
    predicted = np.concatenate([place, cross.transpose(0, 2, 1)], axis=1)  # [n, 6, 3], with the position
    gain = predicted @ np.linalg.inv(place + covariances_m2)
    means[:, :3] += dt * means[:, 3:]
    means += gain @ (positions_m[:, :, None] - means[:, :3])
    covariances = np.empty_like(old)
    covariances[:, :3, :3], covariances[:, :3, 3:] = place, cross
    covariances[:, 3:, :3], covariances[:, 3:, 3:] = cross.transpose(0, 2, 1), speed + noise
    covariances -= gain @ predicted.transpose(0, 2, 1)
    covariances = (covariances + covariances.transpose(0, 2, 1)) / 2
    for each, mean, covariance in zip(filters, means[:, :, 0], covariances, strict=True):
        each.mean, each.covariance, each.stamp_ns, each.count = mean, covariance, stamp_ns, each.count + 1
