"""The pose of a board in one image, for a camera with known intrinsics, and its covariance."""

from __future__ import annotations

from dataclasses import replace

import cv2
import numpy as np
import numpy.typing as npt

from ..errors import CalibrationError
from ..geometry import Array, rigid
from ..types import Intrinsics
from .boards import Board
from .bundle import Lens, Solution, View, adjust, compute_residuals, project_points
from .rigid_motion import cross_matrices
from .starts import estimate_pose

_MIN_SIGMA_PX = 0.05
"""Minimum noise of a corner: few corners may agree by chance."""


def to_solution(intrinsics: Intrinsics, points: Array) -> Solution:
    """Return known intrinsics in the form of a fit, with corners [p, 3] of a board."""
    fisheye = intrinsics.model == "fisheye"
    lens = Lens("fisheye" if fisheye else "pinhole", tuple(range(len(intrinsics.coeffs))))
    coeffs = np.array(intrinsics.coeffs) if intrinsics.coeffs else np.zeros(5)
    camera = np.array([intrinsics.fx, intrinsics.fy, intrinsics.cx, intrinsics.cy])
    return Solution(lens, camera, coeffs, np.zeros((0, 6)), points)


def locate_board(view: View, board: Board, intrinsics: Intrinsics) -> tuple[Array, Array, float]:
    """Return camera_from_board [4, 4], its covariance [6, 6] for a noise of 1 px, and the error of the corners in px.

    The covariance is that of a motion (translation m, rotation vector rad) in the board's frame. The error is the
    standard deviation of one coordinate. Raises CalibrationError if no pose follows.
    """
    solution = to_solution(intrinsics, board.points)
    try:
        start = replace(solution, poses=estimate_pose(view, solution)[None])
        found = adjust([view], start, printed=board.points, pitch_m=board.pitch_m, fixed_camera=True)
        covariance = pose_covariance(view.ids, found.poses[0], found)
    except (cv2.error, np.linalg.LinAlgError, CalibrationError) as error:
        raise CalibrationError(
            f"{view.name}: no pose of the board follows from its {len(view.ids)} corners"
        ) from error
    residuals = compute_residuals(found, [view])[0]
    sigma = float(np.sqrt((residuals**2).sum() / max(residuals.size - 6, 1)))
    pose = found.poses[0]
    return rigid(cv2.Rodrigues(pose[:3])[0], pose[3:]), covariance, max(sigma, _MIN_SIGMA_PX)


def pose_covariance(ids: npt.NDArray[np.intp], pose: Array, solution: Solution) -> Array:
    """Return the covariance [6, 6] of a pose [6], a motion in the board's frame, for corners with a noise of 1 px."""
    points = solution.points[ids]
    found = project_points(points, pose, solution.camera, solution.coeffs, solution.lens.model)
    by_point = (found.by_translation @ cv2.Rodrigues(pose[:3])[0]).reshape(-1, 2, 3)
    slopes = np.concatenate([by_point, -by_point @ cross_matrices(points)], axis=2).reshape(-1, 6)
    return np.asarray(np.linalg.inv(slopes.T @ slopes), np.float64)


def expected_covariance(camera_from_board: Array, board: Board, intrinsics: Intrinsics) -> Array:
    """Return the covariance [6, 6] of a pose that is known without its image, as if all corners had a noise of 1 px."""
    rotation = cv2.Rodrigues(camera_from_board[:3, :3])[0].ravel()
    pose = np.concatenate([rotation, camera_from_board[:3, 3]])
    return pose_covariance(np.arange(len(board.points)), pose, to_solution(intrinsics, board.points))
