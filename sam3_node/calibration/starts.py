"""First guesses of bundle adjustment: camera and poses by OpenCV's own calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import cv2
import numpy as np

from ..errors import CalibrationError
from ..geometry import Array, deproject
from .bundle import Lens, LensModel, Solution, View, adjust, compute_residuals

_FISHEYE_GUESSES = (0.25, 0.35, 0.5, 0.7)  # focal lengths as shares of the image's width
_START_LENS = {"pinhole": Lens("pinhole", (0, 1, 2, 3)), "fisheye": Lens("fisheye", (0, 1, 2, 3))}


def guess_solution(views: Sequence[View], points: Array, size: tuple[int, int], model: LensModel) -> Solution:
    """Calibrate with OpenCV on a flat board with corners [p, 3]; `size` is (height, width) in pixels.

    Raises CalibrationError if OpenCV finds no camera that fits.
    """
    lens = _START_LENS[model]
    try:
        return (
            _guess_fisheye(views, points, size, lens)
            if model == "fisheye"
            else _guess_pinhole(views, points, size)
        )
    except (cv2.error, np.linalg.LinAlgError, CalibrationError) as error:
        raise CalibrationError(
            f"no {model} camera fits these views; check the board's description, and take views from more sides"
        ) from error


def _guess_pinhole(views: Sequence[View], points: Array, size: tuple[int, int]) -> Solution:
    objects = [points[view.ids].astype(np.float32) for view in views]
    pixels = [view.pixels.astype(np.float32)[:, None] for view in views]
    flags = cv2.CALIB_FIX_K3 | cv2.CALIB_ZERO_TANGENT_DIST
    _, matrix, coeffs, rotations, translations = cv2.calibrateCamera(
        objects, pixels, size[::-1], None, None, flags=flags
    )
    camera = np.array([matrix[0, 0], matrix[1, 1], matrix[0, 2], matrix[1, 2]])
    poses = np.concatenate([np.array(rotations), np.array(translations)], axis=1)[..., 0]
    return Solution(_START_LENS["pinhole"], camera, coeffs.ravel()[:5], poses, points)


def _guess_fisheye(views: Sequence[View], points: Array, size: tuple[int, int], lens: Lens) -> Solution:
    """Try rough focal lengths: without one, cv2.fisheye.calibrate often converges to a wrong camera."""
    best: tuple[float, Solution] | None = None
    for share in _FISHEYE_GUESSES:
        camera = np.array([share * size[1], share * size[1], (size[1] - 1) / 2, (size[0] - 1) / 2])
        try:
            start = estimate_poses(views, Solution(lens, camera, np.zeros(4), np.zeros((0, 6)), points))
            found = adjust(views, start, printed=points, pitch_m=1.0, robust=True)
        except (cv2.error, CalibrationError):
            continue
        error = float(np.median(np.abs(np.concatenate(compute_residuals(found, views)))))
        if np.isfinite(error) and found.camera[:2].min() > 0 and (best is None or error < best[0]):
            best = error, found
    if best is None:
        raise np.linalg.LinAlgError("no focal length converged")
    return best[1]


def estimate_poses(views: Sequence[View], solution: Solution) -> Solution:
    """Return the solution with the pose of the board in each view, for a known camera.

    Raises cv2.error for views from which no pose follows.
    """
    return replace(solution, poses=np.array([estimate_pose(view, solution) for view in views]).reshape(-1, 6))


def estimate_pose(view: View, solution: Solution) -> Array:
    """Return the pose [6] of a board for a known camera: the best of the two planar solutions, then refined."""
    points = solution.points[view.ids]
    rays = undistort(view.pixels, solution)
    flat = points * (1, 1, 0)
    count, rotations, translations, _ = cv2.solvePnPGeneric(
        flat[:, None], rays[:, None], np.eye(3), None, flags=cv2.SOLVEPNP_IPPE
    )
    if not count:
        raise cv2.error("no pose")
    errors = []
    for rotation, translation in zip(rotations, translations, strict=True):
        pose = np.concatenate([rotation.ravel(), translation.ravel()])
        seen = points @ cv2.Rodrigues(rotation)[0].T + translation.ravel()
        error = np.linalg.norm(seen[:, :2] / np.maximum(seen[:, 2:], 1e-9) - rays, axis=1).mean()
        errors.append((error + (1e3 if seen[:, 2].min() <= 0 else 0), pose))
    return min(errors, key=lambda item: item[0])[1]


def undistort(pixels: Array, solution: Solution) -> Array:
    """Return normalised image coordinates [n, 2] of pixels."""
    return deproject(pixels, 1.0, solution.intrinsics)[:, :2]
