"""Pairs of robot and board poses for hand-eye calibration, by the name or the time of each image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

import numpy as np

from ..calibration import Calibration
from ..calibration.board_poses import expected_covariance, locate_board
from ..calibration.boards import Board
from ..calibration.hand_eye import HandEyeView
from ..calibration.intrinsics import Rejected
from ..calibration.poses import PoseTrack, RobotPose
from ..errors import CalibrationError
from ..geometry import Array
from .calibration_views import Views


def pair_board_poses(poses: Sequence[RobotPose], board: Board, calibration: Calibration) -> list[HandEyeView]:
    """Return views from a file that holds the poses of the board, too. Raises CalibrationError if they are absent.

    The covariances are those of all corners with a noise of 1 px.
    """
    lens = calibration.intrinsics
    intrinsics = calibration.intrinsics_for((lens.height_px, lens.width_px))
    views = []
    for pose in poses:
        if pose.camera_from_board is None:
            raise CalibrationError(
                f"{pose.name} has no pose of the board: give images as SOURCE, or add `board` to it"
            )
        try:
            covariance = expected_covariance(pose.camera_from_board, board, intrinsics)
        except np.linalg.LinAlgError:  # no camera sees a board there, and the calibration says so
            covariance = np.zeros((6, 6))
        views.append(HandEyeView(pose.name, pose.base_from_gripper, pose.camera_from_board, covariance))
    return views


def pair_views(
    views: Views, poses: Sequence[RobotPose], board: Board, calibration: Calibration, max_gap_ms: float
) -> tuple[list[HandEyeView], list[Rejected]]:
    """Return views with the robot's pose at each, and the views without one.

    Raises CalibrationError if no view has a pose.
    """
    intrinsics = calibration.intrinsics_for(views.size)
    if poses and not any(pose.image or pose.stamp_ns is not None for pose in poses):
        raise CalibrationError("expected an image or a stamp_ns for each pose, found poses with neither")
    find = _PoseFinder(views, poses, max_gap_ms)
    rejected: list[Rejected] = []
    located: list[tuple[str, Array, Array, Array]] = []
    sigmas: list[float] = []
    for view, stamp_ns in zip(views.views, views.stamps_ns, strict=True):
        try:
            robot = find(view.name, stamp_ns)
            pose, covariance, sigma = locate_board(view, board, intrinsics)
        except CalibrationError as error:
            rejected.append(Rejected(view.name, str(error)))
            continue
        located.append((view.name, robot, pose, covariance))
        sigmas.append(sigma)
    if not located:
        reasons = "; ".join(f"{item.name}: {item.reason}" for item in rejected[:3])
        raise CalibrationError(f"no view of the board has a pose of the robot: {reasons}")
    noise = float(np.median(sigmas)) ** 2
    return [HandEyeView(name, robot, pose, part * noise) for name, robot, pose, part in located], rejected


class _PoseFinder:
    """The robot's pose for an image: by its name in the file of poses, else by its time."""

    def __init__(self, views: Views, poses: Sequence[RobotPose], max_gap_ms: float) -> None:
        self._by_name = {PurePath(pose.image).name: pose for pose in poses if pose.image}
        self._max_gap_ns = int(max_gap_ms * 1e6)
        self._track = PoseTrack()
        for pose in poses:
            if pose.stamp_ns is not None:
                self._track.add_matrix(pose.stamp_ns, pose.base_from_gripper)
        for message in views.poses:
            self._track.add(message)

    def __call__(self, name: str, stamp_ns: int | None) -> Array:
        if name in self._by_name:
            return self._by_name[name].base_from_gripper
        if stamp_ns is None or not len(self._track):
            named = f"; it names {', '.join(list(self._by_name)[:3])}" if self._by_name else ""
            raise CalibrationError(f"the file of poses names no pose for this image{named}")
        return self._track.at(stamp_ns, self._max_gap_ns)
