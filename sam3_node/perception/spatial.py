"""Adds 3-D fields to the instances of one camera, from depth, calibration and the robot's pose. Runs on the host.

Fields that need what a frame does not have are absent. Depth is used if it is `aligned` to colour, of colour's size or
of its aspect ratio (then depth is resampled to the nearest pixel). Intrinsics are the calibration's, else the frame's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import cv2
import numpy as np
import numpy.typing as npt

from ..calibration import Calibration
from ..errors import Sam3NodeError
from ..geometry import Array, quaternion_from_rotation, rigid, rotation_from_quaternion, transform_points
from ..settings import SpatialSettings
from ..types import Depth, Frame, FramePose, Instance, Intrinsics, State
from ..wire import decode_depth
from .surfaces import Float, RayMap, Surface, measure_surface
from .velocity import VelocityFilters

log = logging.getLogger(__name__)

CAMERA, BASE, GRIPPER = "camera", "base", "gripper"
_ASPECT_TOLERANCE = 0.01
_DIGITS = 6  # of metres: a micrometre


class SpatialFrame(NamedTuple):
    """The poses that the 3-D fields of one frame refer to."""

    robot_pose: FramePose | None
    """the gripper's pose that was used"""
    camera_pose: FramePose | None
    """the camera's pose in the base; None if fields are in the camera's frame"""


class SpatialStage:
    """Measures the objects of one camera in 3-D, and keeps the filters of their velocities.

    `problem` says why the last frame with depth has no 3-D fields, or none in the base; None if nothing is missing.
    """

    def __init__(self, settings: SpatialSettings, calibration: Calibration | None) -> None:
        self.problem: str | None = None
        self._settings, self._calibration = settings, calibration
        self._rays = RayMap()
        self._velocities = VelocityFilters()
        self._points: dict[int, Float] = {}
        self._place: Array | None = None

    def measure(
        self, frame: Frame, instances: Sequence[Instance], robot_pose: FramePose | None
    ) -> tuple[tuple[Instance, ...], SpatialFrame]:
        """Return the instances with their 3-D fields, and the poses that were used.

        `robot_pose` is the gripper's in the base at the frame's capture; None if it is not known.
        """
        self.problem, self._points = None, {}
        place = SpatialFrame(robot_pose, self._locate(frame, robot_pose))
        camera_pose = place.camera_pose
        self._place = (
            None
            if camera_pose is None
            else rigid(rotation_from_quaternion(camera_pose.quaternion_xyzw), camera_pose.position_m)
        )
        intrinsics = self._intrinsics(frame)
        depth = self._depth(frame) if intrinsics is not None and instances else None
        if depth is None or intrinsics is None:
            measured = [self._add_velocity(instance, frame.capture_ns) for instance in instances]
            return tuple(measured), place
        scale_m = self._scale_m(frame)
        rays = self._rays.rays(intrinsics, (frame.height, frame.width))
        focal_px = (intrinsics.fx * intrinsics.fy) ** 0.5
        measured = [
            self._measure_one(frame, instance, depth, scale_m, rays, focal_px) for instance in instances
        ]
        return tuple(measured), place

    def points(self, object_id: int, count: int) -> tuple[str, Float] | None:
        """Return the frame and up to `count` measured points [n, 3] of an object on the last frame; None without."""
        found = self._points.get(object_id)
        if found is None:
            return None
        return (CAMERA if self._place is None else BASE), self._sample(found, count)

    def remove(self, object_id: int) -> None:
        """Forget an object."""
        self._velocities.remove(object_id)
        self._points.pop(object_id, None)

    def state(self) -> State:
        """Return the state that `restore` takes."""
        return self._velocities.state()

    def restore(self, state: State) -> None:
        """Continue from the moment at which `state` was called."""
        self._velocities.restore(state)

    def _measure_one(
        self,
        frame: Frame,
        instance: Instance,
        depth: npt.NDArray[np.uint16],
        scale_m: float,
        rays: Float,
        focal_px: float,
    ) -> Instance:
        if instance.mask.area == 0:
            return self._add_velocity(instance, frame.capture_ns)
        share, surface = measure_surface(instance.mask, depth, scale_m, rays, focal_px)
        if surface is None:
            instance = replace(instance, depth_share=round(share, 4))
            return self._add_velocity(instance, frame.capture_ns)
        self._points[instance.id] = surface.points_m
        name, placed, covariance = self._place_surface(surface)
        self._velocities.observe(instance.id, frame.capture_ns, name, placed.position_m, covariance)
        count = self._settings.points
        instance = replace(
            instance,
            depth_share=round(share, 4),
            position_m=_triple(placed.position_m),
            frame=name,
            camera_position_m=_triple(surface.position_m) if name == BASE else None,
            covariance_m2=tuple(covariance[np.triu_indices(3)].tolist()),
            extent_m=_triple(surface.extent_m),
            extent_centre_m=_triple(placed.centre_m),
            extent_quaternion_xyzw=tuple(quaternion_from_rotation(placed.axes).tolist()),
            nearest_m=_triple(placed.nearest_m),
            points_m=self._sample(surface.points_m, count).tobytes() if count else None,
        )
        return self._add_velocity(instance, frame.capture_ns)

    def _place_surface(self, surface: Surface) -> tuple[str, Surface, Array]:
        """Return the frame, the surface in it (without points), and its covariance with the hand-eye's error."""
        if self._place is None:
            return CAMERA, surface, surface.covariance_m2
        rotation = self._place[:3, :3]
        hand_eye = self._calibration.hand_eye if self._calibration is not None else None
        covariance = surface.covariance_m2
        if hand_eye is not None and hand_eye.measured is not None:
            x, y, z = surface.position_m
            turn = np.array([[0.0, z, -y], [-z, 0.0, x], [y, -x, 0.0]])  # of a point by a rotation vector
            jacobian = np.hstack([np.eye(3), turn])
            covariance = covariance + jacobian @ np.array(hand_eye.measured.covariance) @ jacobian.T
        placed = replace(
            surface,
            position_m=transform_points(self._place, surface.position_m),
            centre_m=transform_points(self._place, surface.centre_m),
            nearest_m=transform_points(self._place, surface.nearest_m),
            axes=rotation @ surface.axes,
        )
        return BASE, placed, rotation @ covariance @ rotation.T

    def _add_velocity(self, instance: Instance, stamp_ns: int) -> Instance:
        found = self._velocities.velocity(instance.id, stamp_ns)
        if found is None or instance.frame not in (None, found[0]):
            return instance
        frame, velocity, age_s = found
        return replace(
            instance, frame=frame, velocity_mps=_triple(velocity), velocity_age_s=round(age_s, _DIGITS)
        )

    def _sample(self, points: Float, count: int) -> npt.NDArray[np.float32]:
        chosen = (
            points if len(points) <= count else points[np.linspace(0, len(points) - 1, count).astype(int)]
        )
        if self._place is not None:
            chosen = transform_points(self._place, chosen)
        return np.ascontiguousarray(chosen, "<f4")

    def _locate(self, frame: Frame, robot_pose: FramePose | None) -> FramePose | None:
        calibration = self._calibration
        if calibration is None or calibration.hand_eye is None:
            return None
        gripper = None
        if calibration.parent == GRIPPER:
            if robot_pose is None:
                self.problem = (
                    "no pose of the gripper at the time of the image, so positions are in the camera's frame"
                )
                return None
            gripper = rigid(rotation_from_quaternion(robot_pose.quaternion_xyzw), robot_pose.position_m)
        matrix = calibration.base_from_camera(gripper)
        x, y, z, w = quaternion_from_rotation(matrix[:3, :3]).tolist()
        return FramePose(CAMERA, BASE, frame.capture_ns, _exact(matrix[:3, 3]), (x, y, z, w), frame.clock)

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
        return frame.intrinsics

    def _scale_m(self, frame: Frame) -> float:
        if self._calibration is not None and self._calibration.depth is not None:
            return self._calibration.depth.scale_m
        assert frame.depth is not None
        return frame.depth.scale_m

    def _depth(self, frame: Frame) -> npt.NDArray[np.uint16] | None:
        """Return the depth at the size of colour; None if there is none that fits, with the reason in `problem`."""
        depth = frame.depth
        if depth is None:
            return None
        self.problem = _refuse(depth, frame) or self.problem
        if _refuse(depth, frame) is not None:
            return None
        try:
            image = decode_depth(depth)
        except Sam3NodeError as error:
            self.problem = f"{error}"
            return None
        if image.shape == (frame.height, frame.width):
            return image
        return np.asarray(
            cv2.resize(image, (frame.width, frame.height), interpolation=cv2.INTER_NEAREST), np.uint16
        )


def _refuse(depth: Depth, frame: Frame) -> str | None:
    """Return the reason for which depth cannot be used, None if it can."""
    if not depth.aligned:
        return "expected depth that is aligned to colour, found another; align it in the camera"
    aspect = (depth.width / depth.height) / (frame.width / frame.height)
    if abs(aspect - 1) > _ASPECT_TOLERANCE:
        return (
            f"expected depth of colour's aspect ratio, {frame.width}x{frame.height}, found "
            f"{depth.width}x{depth.height}; align it in the camera"
        )
    return None


def _triple(values: Array) -> tuple[float, float, float]:
    x, y, z = (round(value, _DIGITS) for value in values.tolist())
    return x, y, z


def _exact(values: Array) -> tuple[float, float, float]:
    x, y, z = values.tolist()
    return x, y, z
