"""Bundle adjustment of one camera: intrinsics, the pose of the board in each view and, on request, the board's shape.

The shape are small offsets of the board's corners from their printed places: paper is seldom flat. Estimating them
with the camera follows K. H. Strobl and G. Hirzinger, "More accurate pinhole camera calibration with imperfect planar
target", ICCV Workshops 2011. A weak prior on the offsets keeps pose and scale of the board determined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import cv2
import numpy as np
import numpy.typing as npt

from ..errors import CalibrationError
from ..geometry import Array
from ..types import Intrinsics

LensModel = Literal["pinhole", "fisheye"]

_SHAPE_PRIOR = 0.02  # standard deviation of a corner's offset, as a share of the distance between corners
_MAX_ITERATIONS = 60
_HUBER = 2.5  # robust standard deviations beyond which a residual's weight falls
_MIN_SIGMA_PX = 0.01


@dataclass(frozen=True, slots=True)
class View:
    """Corners of the board in one image: `ids` int [n] index the board's points, `pixels` are float64 [n, 2]."""

    name: str
    ids: npt.NDArray[np.intp]
    pixels: Array


@dataclass(frozen=True, slots=True)
class Lens:
    """Lens model, and the coefficients that are estimated: `active` are indices into OpenCV's coefficients."""

    model: LensModel
    active: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of coefficients in OpenCV's form."""
        return 4 if self.model == "fisheye" else 8 if max(self.active, default=0) > 4 else 5


@dataclass(frozen=True, slots=True)
class Solution:
    """Fitted camera: `camera` is fx, fy, cx, cy; `points` [p, 3] are the corners on the board as it really is.

    `poses` [v, 6] are rotation vectors and translations, camera from board. `sigma_px` is the noise of one
    coordinate. `covariance` is that of camera and active coefficients.
    """

    lens: Lens
    camera: Array
    coeffs: Array
    poses: Array
    points: Array
    sigma_px: float = 1.0
    covariance: Array | None = None

    @property
    def intrinsics(self) -> Intrinsics:
        model: Literal["fisheye", "brown_conrady"] = (
            "fisheye" if self.lens.model == "fisheye" else "brown_conrady"
        )
        fx, fy, cx, cy = map(float, self.camera)
        return Intrinsics(fx, fy, cx, cy, model, tuple(map(float, self.coeffs)))


@dataclass(frozen=True, slots=True)
class Projection:
    """Pixels [n, 2] and their derivatives [2n, k]: by rotation vector, translation, camera, and coefficients."""

    pixels: Array
    by_rotation: Array
    by_translation: Array
    by_camera: Array
    by_coeffs: Array


def project_points(points: Array, pose: Array, camera: Array, coeffs: Array, model: LensModel) -> Projection:
    """Project board points [n, 3] with the pose [6] (rotation vector, translation), camera from board."""
    matrix = np.array([[camera[0], 0, camera[2]], [0, camera[1], camera[3]], [0, 0, 1.0]])
    rotation, translation = pose[:3].reshape(3, 1), pose[3:].reshape(3, 1)
    if model == "fisheye":
        pixels, jacobian = cv2.fisheye.projectPoints(points[:, None], rotation, translation, matrix, coeffs)
        parts = jacobian[:, 8:11], jacobian[:, 11:14], jacobian[:, 0:4], jacobian[:, 4:8]
    else:
        pixels, jacobian = cv2.projectPoints(points, rotation, translation, matrix, coeffs)
        parts = jacobian[:, 0:3], jacobian[:, 3:6], jacobian[:, 6:10], jacobian[:, 10 : 10 + len(coeffs)]
    return Projection(pixels.reshape(-1, 2), *parts)


def compute_residuals(solution: Solution, views: Sequence[View]) -> list[Array]:
    """Return measured minus projected pixels [n, 2] of each view."""
    return [
        view.pixels
        - project_points(
            solution.points[view.ids], pose, solution.camera, solution.coeffs, solution.lens.model
        ).pixels
        for view, pose in zip(views, solution.poses, strict=True)
    ]


def adjust(
    views: Sequence[View],
    start: Solution,
    *,
    printed: Array,
    pitch_m: float,
    shape: bool = False,
    robust: bool = False,
    fixed_camera: bool = False,
) -> Solution:
    """Minimise the reprojection error of all views from a starting solution with one pose for each view.

    `printed` [p, 3] are the board's corners as printed, `pitch_m` their distance. With `shape` the offsets of the
    corners are estimated. `robust` uses Huber weights. With `fixed_camera` only the poses change.
    Raises CalibrationError if the views do not determine the parameters.
    """
    problem = _Problem(views, start, printed, pitch_m, shape, fixed_camera)
    try:
        parameters, normal, sigma = _solve(problem, problem.pack(start), robust)
        inverse = np.asarray(np.linalg.inv(normal), np.float64)
    except (np.linalg.LinAlgError, cv2.error) as error:
        raise CalibrationError(
            f"{len(views)} views do not determine the camera; add tilted views in all parts of the image"
        ) from error
    solution = problem.unpack(parameters, start)
    if fixed_camera:
        return replace(solution, sigma_px=sigma, covariance=None)
    covariance = inverse[: problem.camera_count, : problem.camera_count] * sigma**2
    return replace(solution, sigma_px=sigma, covariance=covariance)


class _Problem:
    """The parameter vector (camera, active coefficients, offsets, poses), residuals and Jacobian."""

    def __init__(
        self, views: Sequence[View], start: Solution, printed: Array, pitch_m: float, shape: bool, fixed: bool
    ) -> None:
        self.views, self.lens, self._start = views, start.lens, start
        self._printed, self._fixed = printed, fixed
        self.camera_count = 0 if fixed else 4 + len(start.lens.active)
        self._shape_count = printed.size if shape and not fixed else 0
        self.first_pose = self.camera_count + self._shape_count
        self.size = self.first_pose + 6 * len(views)
        self._prior_m = _SHAPE_PRIOR * pitch_m
        self.residual_count = sum(2 * len(view.ids) for view in views)

    def pack(self, solution: Solution) -> Array:
        camera = [] if self._fixed else [*solution.camera, *solution.coeffs[list(self.lens.active)]]
        offsets = (solution.points - self._printed).ravel() if self._shape_count else np.zeros(0)
        return np.concatenate([np.asarray(camera, np.float64), offsets, solution.poses.ravel()])

    def unpack(self, parameters: Array, start: Solution) -> Solution:
        camera, coeffs = start.camera, np.zeros(self.lens.count)
        points = start.points
        if self._fixed:
            coeffs = start.coeffs
        else:
            camera = parameters[:4]
            coeffs[list(self.lens.active)] = parameters[4 : self.camera_count]
            points = self._printed
        if self._shape_count:
            points = self._printed + parameters[self.camera_count : self.first_pose].reshape(-1, 3)
        return replace(
            start,
            camera=camera,
            coeffs=coeffs,
            points=points,
            poses=parameters[self.first_pose :].reshape(-1, 6),
        )

    def compute_residuals(self, parameters: Array) -> Array:
        """Return projected minus measured pixels [m] of all views."""
        solution = self.unpack(parameters, self._start)
        return -np.concatenate([part.ravel() for part in compute_residuals(solution, self.views)])

    def evaluate(self, parameters: Array, sigma: float) -> tuple[Array, Array, Array]:
        """Return residuals [m] of all views, their Jacobian [m, size], and the prior's (gradient, weight) [size, 2]."""
        solution = self.unpack(parameters, self._start)
        residuals, jacobian = np.empty(self.residual_count), np.zeros((self.residual_count, self.size))
        row = 0
        for index, (view, pose) in enumerate(zip(self.views, solution.poses, strict=True)):
            rows = slice(row, row + 2 * len(view.ids))
            found = project_points(
                solution.points[view.ids], pose, solution.camera, solution.coeffs, self.lens.model
            )
            residuals[rows] = (found.pixels - view.pixels).ravel()
            self._fill(jacobian[rows], index, view, pose, found)
            row = rows.stop
        prior = np.zeros((self.size, 2))
        if self._shape_count:
            weight = (sigma / self._prior_m) ** 2
            offsets = slice(self.camera_count, self.first_pose)
            prior[offsets, 0], prior[offsets, 1] = weight * parameters[offsets], weight
        return residuals, jacobian, prior

    def _fill(self, rows: Array, index: int, view: View, pose: Array, found: Projection) -> None:
        if not self._fixed:
            rows[:, :4] = found.by_camera
            rows[:, 4 : self.camera_count] = found.by_coeffs[:, list(self.lens.active)]
        if self._shape_count:
            by_point = found.by_translation @ cv2.Rodrigues(pose[:3])[0]
            columns = self.camera_count + 3 * view.ids[:, None] + np.arange(3)
            numbers = 2 * np.arange(len(view.ids))
            for axis in (0, 1):
                rows[(numbers + axis)[:, None], columns] = by_point[axis::2]
        first = self.first_pose + 6 * index
        rows[:, first : first + 3], rows[:, first + 3 : first + 6] = found.by_rotation, found.by_translation


def _solve(problem: _Problem, parameters: Array, robust: bool) -> tuple[Array, Array, float]:
    """Run Levenberg-Marquardt. Return the parameters, the matrix of the normal equations, and sigma in pixels."""
    damping, sigma = 1e-4, 1.0
    sigma = _estimate_sigma(problem.compute_residuals(parameters), robust, problem.size)
    tolerance = 1e-3 if robust else 1e-5
    normal: Array = np.eye(problem.size)
    for _ in range(_MAX_ITERATIONS):
        residuals, jacobian, prior = problem.evaluate(parameters, sigma)
        weights = _weigh(residuals, sigma) if robust else np.ones_like(residuals)
        normal = np.asarray(jacobian.T @ (weights[:, None] * jacobian), np.float64) + np.diag(prior[:, 1])
        gradient = jacobian.T @ (weights * residuals) + prior[:, 0]
        cost = _compute_cost(problem, parameters, residuals, weights, sigma)
        moved = False
        while damping < 1e10:
            step = np.asarray(
                -np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient), np.float64
            )
            trial = problem.compute_residuals(parameters + step)
            if _compute_cost(problem, parameters + step, trial, weights, sigma) < cost:
                moved = True
                break
            damping *= 10
        if not moved:
            break
        parameters, damping = parameters + step, max(damping / 10, 1e-12)
        previous, sigma = sigma, _estimate_sigma(trial, robust, problem.size)
        scaled = np.abs(step) * np.sqrt(np.diag(normal))
        if scaled.max() < tolerance * sigma and abs(sigma / previous - 1) < tolerance:
            break
    return parameters, normal, sigma


def _compute_cost(
    problem: _Problem, parameters: Array, residuals: Array, weights: Array, sigma: float
) -> float:
    offsets = parameters[problem.camera_count : problem.first_pose]
    prior = float(offsets @ offsets) * (sigma / problem._prior_m) ** 2
    return float(residuals @ (weights * residuals)) + prior


def _weigh(residuals: Array, sigma: float) -> Array:
    return np.minimum(1.0, _HUBER * sigma / np.maximum(np.abs(residuals), 1e-12))


def _estimate_sigma(residuals: Array, robust: bool, size: int) -> float:
    if robust:
        sigma = 1.4826 * float(np.median(np.abs(residuals)))
    else:
        free = max(len(residuals) - size, len(residuals) // 4, 1)
        sigma = float(np.sqrt(residuals @ residuals / free))
    return max(sigma, _MIN_SIGMA_PX)
