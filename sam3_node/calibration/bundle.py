"""Adjusts one camera to views of a board: intrinsics, the board's pose in each view and, on request, its shape.

The first guess comes from OpenCV's own calibration. A known camera gives the pose of a board in one image, with its
covariance. The shape consists of small offsets of the board's corners from their printed places: paper is seldom flat.
Estimating them with the camera follows K. H. Strobl and G. Hirzinger, "More accurate pinhole camera calibration with
imperfect planar target", ICCV Workshops 2011. A weak prior on the offsets keeps pose and scale of the board determined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import cv2
import numpy as np
import numpy.typing as npt

from ..errors import CalibrationError
from ..geometry import Array, cross_matrices, deproject, rigid
from ..types import Intrinsics
from .boards import Board

LensModel = Literal["pinhole", "fisheye"]

# standard deviation of a corner's offset that is expected, as a share of the distance between corners
_SHAPE_PRIOR = 0.02
# steps of Levenberg-Marquardt after which it ends
_MAX_ITERATIONS = 60
# robust standard deviations beyond which a residual's weight falls
_HUBER = 2.5
# least noise of a corner in a fit: perfect views would weigh without limit
_MIN_SIGMA_PX = 0.01
# least noise of a corner in one view: few corners may agree by chance
_MIN_POSE_SIGMA_PX = 0.05
# focal lengths of a fisheye lens that are tried, as shares of the image's width
_FISHEYE_GUESSES = (0.25, 0.35, 0.5, 0.7)
# from the median of absolute values to the standard deviation of a normal distribution
_MAD_TO_SIGMA = 1.4826


@dataclass(frozen=True, slots=True)
class BoardView:
    """Corners of the board in one image. `ids` int [n] index the board's points, `pixels` are float64 [n, 2].

    `stamp_ns` is the time of the capture, for recordings and live frames.
    """

    name: str
    ids: npt.NDArray[np.intp]
    pixels: Array
    stamp_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Lens:
    """Lens model, and how many of OpenCV's coefficients are estimated. The others are 0."""

    model: LensModel
    active: int

    @property
    def count(self) -> int:
        """Number of coefficients in OpenCV's form."""
        if self.model == "fisheye":
            return 4
        return 8 if self.active > 5 else 5


@dataclass(frozen=True, slots=True)
class Solution:
    """Fitted camera. `camera` is fx, fy, cx, cy. `points` [p, 3] are the corners on the board as it really is.

    `poses` [v, 6] are rotation vectors and translations, camera from board. `sigma_px` is the noise of one
    coordinate. `covariance` belongs to the camera and the active coefficients.
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
        model: Literal["fisheye", "brown_conrady"] = "brown_conrady"
        if self.lens.model == "fisheye":
            model = "fisheye"
        fx, fy, cx, cy = map(float, self.camera)
        return Intrinsics(fx, fy, cx, cy, model, tuple(map(float, self.coeffs)))

    def project(self, ids: npt.NDArray[np.intp], pose: Array) -> Projection:
        """Project the corners `ids` [n] with the pose [6] (rotation vector, translation), camera from board."""
        points = self.points[ids]
        coeffs = self.coeffs
        fx, fy, cx, cy = self.camera
        matrix = np.array([[fx, 0, cx], [0, fy, cy], [0, 0, 1.0]])
        rotation = pose[:3].reshape(3, 1)
        translation = pose[3:].reshape(3, 1)
        # OpenCV orders the columns of the Jacobian differently for each model
        if self.lens.model == "fisheye":
            pixels, jacobian = cv2.fisheye.projectPoints(
                points[:, None], rotation, translation, matrix, coeffs
            )
            parts = jacobian[:, 8:11], jacobian[:, 11:14], jacobian[:, 0:4], jacobian[:, 4:8]
        else:
            pixels, jacobian = cv2.projectPoints(points, rotation, translation, matrix, coeffs)
            parts = jacobian[:, 0:3], jacobian[:, 3:6], jacobian[:, 6:10], jacobian[:, 10 : 10 + len(coeffs)]
        return Projection(pixels.reshape(-1, 2), *parts)


class Projection(NamedTuple):
    """Pixels [n, 2] and their derivatives [2n, k] by rotation vector, translation, camera, and coefficients."""

    pixels: Array
    by_rotation: Array
    by_translation: Array
    by_camera: Array
    by_coeffs: Array


def compute_residuals(solution: Solution, views: Sequence[BoardView]) -> list[Array]:
    """Return measured minus projected pixels [n, 2] of each view."""
    pairs = zip(views, solution.poses, strict=True)
    return [view.pixels - solution.project(view.ids, pose).pixels for view, pose in pairs]


def adjust(
    views: Sequence[BoardView],
    start: Solution,
    *,
    shape: Board | None = None,
    robust: bool = False,
    fixed_camera: bool = False,
) -> Solution:
    """Minimise the reprojection error of all views from a starting solution with one pose for each view.

    `shape` is a board whose corners' offsets from their printed places are estimated. `robust` uses Huber weights. With
    `fixed_camera` only the poses change. Raises CalibrationError if the views do not determine the parameters.
    """
    problem = _Problem(views, start, shape, fixed_camera)
    try:
        parameters, normal, sigma = _solve(problem, problem.pack(start), robust)
        inverse = np.asarray(np.linalg.inv(normal), np.float64)
    except (np.linalg.LinAlgError, cv2.error) as error:
        raise CalibrationError(
            f"{len(views)} views do not determine the camera; add tilted views in all parts of the image"
        ) from error
    # the inverse of the normal equations, times the noise, is the covariance
    solution = problem.unpack(parameters)
    if fixed_camera:
        return replace(solution, sigma_px=sigma, covariance=None)
    covariance = inverse[: problem.camera_count, : problem.camera_count] * sigma**2
    return replace(solution, sigma_px=sigma, covariance=covariance)


class _Problem:
    """The parameter vector (camera, active coefficients, offsets, poses), residuals and Jacobian."""

    def __init__(self, views: Sequence[BoardView], start: Solution, shape: Board | None, fixed: bool) -> None:
        self.views = views
        self.lens = start.lens
        self.residual_count = sum(2 * len(view.ids) for view in views)
        self._start = start
        self._fixed = fixed

        # what is estimated: the camera unless it is fixed, and the offsets of the corners if a shape is given
        self.camera_count = 0 if fixed else 4 + start.lens.active
        self._printed = start.points
        self._shape_count = 0
        self.prior_m = _SHAPE_PRIOR
        if shape is not None:
            self._printed = shape.points
            self._shape_count = shape.points.size
            self.prior_m = _SHAPE_PRIOR * shape.pitch_m
        self.first_pose = self.camera_count + self._shape_count
        self.size = self.first_pose + 6 * len(views)

    def pack(self, solution: Solution) -> Array:
        """Return a solution as a parameter vector."""
        camera = np.zeros(0)
        if not self._fixed:
            camera = np.array([*solution.camera, *solution.coeffs[: self.lens.active]], np.float64)
        offsets = (solution.points - self._printed).ravel() if self._shape_count else np.zeros(0)
        return np.concatenate([camera, offsets, solution.poses.ravel()])

    def unpack(self, parameters: Array) -> Solution:
        """Return a parameter vector as a solution."""
        solution = replace(self._start, poses=parameters[self.first_pose :].reshape(-1, 6))
        if not self._fixed:
            coeffs = np.zeros(self.lens.count)
            coeffs[: self.lens.active] = parameters[4 : self.camera_count]
            solution = replace(solution, camera=parameters[:4], coeffs=coeffs)
        if self._shape_count:
            offsets = parameters[self.camera_count : self.first_pose].reshape(-1, 3)
            solution = replace(solution, points=self._printed + offsets)
        return solution

    def compute_residuals(self, parameters: Array) -> Array:
        """Return projected minus measured pixels [m] of all views."""
        solution = self.unpack(parameters)
        return -np.concatenate([part.ravel() for part in compute_residuals(solution, self.views)])

    def evaluate(self, parameters: Array, sigma: float) -> tuple[Array, Array, Array]:
        """Return residuals [m] of all views, their Jacobian [m, size], and the prior's (gradient, weight) [size, 2]."""
        # the rows of each view
        solution = self.unpack(parameters)
        residuals = np.empty(self.residual_count)
        jacobian = np.zeros((self.residual_count, self.size))
        row = 0
        for index, (view, pose) in enumerate(zip(self.views, solution.poses, strict=True)):
            rows = slice(row, row + 2 * len(view.ids))
            projection = solution.project(view.ids, pose)
            residuals[rows] = (projection.pixels - view.pixels).ravel()
            self._fill(jacobian[rows], index, view, pose, projection)
            row = rows.stop

        # the prior holds the offsets near 0, as strongly as the corners' noise allows
        prior = np.zeros((self.size, 2))
        if self._shape_count:
            weight = (sigma / self.prior_m) ** 2
            offsets = slice(self.camera_count, self.first_pose)
            prior[offsets, 0] = weight * parameters[offsets]
            prior[offsets, 1] = weight
        return residuals, jacobian, prior

    def _fill(self, rows: Array, index: int, view: BoardView, pose: Array, projection: Projection) -> None:
        """Fill the rows of a view in the Jacobian."""
        if not self._fixed:
            rows[:, :4] = projection.by_camera
            rows[:, 4 : self.camera_count] = projection.by_coeffs[:, : self.lens.active]
        # an offset of a corner moves it as a translation in the board's frame does
        if self._shape_count:
            by_point = projection.by_translation @ cv2.Rodrigues(pose[:3])[0]
            columns = self.camera_count + 3 * view.ids[:, None] + np.arange(3)
            numbers = 2 * np.arange(len(view.ids))
            for axis in (0, 1):
                rows[(numbers + axis)[:, None], columns] = by_point[axis::2]
        first = self.first_pose + 6 * index
        rows[:, first : first + 3] = projection.by_rotation
        rows[:, first + 3 : first + 6] = projection.by_translation


def _solve(problem: _Problem, parameters: Array, robust: bool) -> tuple[Array, Array, float]:
    """Run Levenberg-Marquardt. Return the parameters, the matrix of the normal equations, and sigma in pixels."""
    damping = 1e-4
    sigma = _estimate_sigma(problem.compute_residuals(parameters), robust, problem.size)
    # robust fits only choose views: they need not be exact
    tolerance = 1e-3 if robust else 1e-5
    normal: Array = np.eye(problem.size)

    def measure_cost(at: Array, residuals: Array) -> float:
        offsets = at[problem.camera_count : problem.first_pose]
        prior = float(offsets @ offsets) * (sigma / problem.prior_m) ** 2
        return float(residuals @ (weights * residuals)) + prior

    for _ in range(_MAX_ITERATIONS):
        # the normal equations at the parameters so far
        residuals, jacobian, prior = problem.evaluate(parameters, sigma)
        weights = _weigh(residuals, sigma) if robust else np.ones_like(residuals)
        normal = np.asarray(jacobian.T @ (weights[:, None] * jacobian), np.float64) + np.diag(prior[:, 1])
        gradient = jacobian.T @ (weights * residuals) + prior[:, 0]
        cost = measure_cost(parameters, residuals)

        # shorten the step until it lowers the cost
        moved = False
        while damping < 1e10:
            step = -np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
            trial = problem.compute_residuals(parameters + step)
            if measure_cost(parameters + step, trial) < cost:
                moved = True
                break
            damping *= 10
        if not moved:
            break
        parameters = parameters + step
        damping = max(damping / 10, 1e-12)

        # end when neither the parameters nor the noise change any more
        previous = sigma
        sigma = _estimate_sigma(trial, robust, problem.size)
        scaled = np.abs(step) * np.sqrt(np.diag(normal))
        if scaled.max() < tolerance * sigma and abs(sigma / previous - 1) < tolerance:
            break
    return parameters, normal, sigma


def _weigh(residuals: Array, sigma: float) -> Array:
    """Return Huber's weights: 1, less for residuals beyond _HUBER standard deviations."""
    return np.minimum(1.0, _HUBER * sigma / np.maximum(np.abs(residuals), 1e-12))


def _estimate_sigma(residuals: Array, robust: bool, size: int) -> float:
    """Return the noise of one coordinate in pixels, from the residuals of a fit of `size` parameters."""
    if robust:
        sigma = _MAD_TO_SIGMA * float(np.median(np.abs(residuals)))
    else:
        free = max(len(residuals) - size, len(residuals) // 4, 1)
        sigma = float(np.sqrt(residuals @ residuals / free))
    return max(sigma, _MIN_SIGMA_PX)


def guess_solution(
    views: Sequence[BoardView], points: Array, size: tuple[int, int], model: LensModel
) -> Solution:
    """Calibrate with OpenCV on a flat board with corners [p, 3]. `size` is (height, width) in pixels.

    Raises CalibrationError if OpenCV finds no camera that fits.
    """
    guess = _guess_fisheye if model == "fisheye" else _guess_pinhole
    try:
        return guess(views, points, size)
    except (cv2.error, np.linalg.LinAlgError, CalibrationError) as error:
        raise CalibrationError(
            f"no {model} camera fits these views; check the board's description, and take views from more sides"
        ) from error


def _guess_pinhole(views: Sequence[BoardView], points: Array, size: tuple[int, int]) -> Solution:
    objects = [points[view.ids].astype(np.float32) for view in views]
    pixels = [view.pixels.astype(np.float32)[:, None] for view in views]
    flags = cv2.CALIB_FIX_K3 | cv2.CALIB_ZERO_TANGENT_DIST
    _, matrix, coeffs, rotations, translations = cv2.calibrateCamera(
        objects, pixels, size[::-1], None, None, flags=flags
    )
    camera = np.array([matrix[0, 0], matrix[1, 1], matrix[0, 2], matrix[1, 2]])
    poses = np.concatenate([np.array(rotations), np.array(translations)], axis=1)[..., 0]
    return Solution(Lens("pinhole", 4), camera, coeffs.ravel()[:5], poses, points)


def _guess_fisheye(views: Sequence[BoardView], points: Array, size: tuple[int, int]) -> Solution:
    """Try rough focal lengths. Without one, cv2.fisheye.calibrate often converges to a wrong camera."""
    best: Solution | None = None
    lowest = np.inf
    for share in _FISHEYE_GUESSES:
        camera = np.array([share * size[1], share * size[1], (size[1] - 1) / 2, (size[0] - 1) / 2])
        try:
            start = Solution(Lens("fisheye", 4), camera, np.zeros(4), np.zeros((0, 6)), points)
            poses = np.array([estimate_pose(view, start) for view in views])
            solution = adjust(views, replace(start, poses=poses), robust=True)
        except (cv2.error, CalibrationError):
            continue
        # wrong intrinsics may also converge: the median error tells
        error = float(np.median(np.abs(np.concatenate(compute_residuals(solution, views)))))
        if error < lowest and solution.camera[:2].min() > 0:
            best = solution
            lowest = error
    if best is None:
        raise np.linalg.LinAlgError("no focal length converged")
    return best


def estimate_pose(view: BoardView, solution: Solution) -> Array:
    """Return the pose [6] of a board for a known camera: the best of the two planar solutions.

    Raises cv2.error for a view from which no pose follows.
    """
    points = solution.points[view.ids]
    rays = deproject(view.pixels, 1.0, solution.intrinsics)[:, :2]  # normalised image coordinates
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
        # a board behind the camera cannot be seen
        if seen[:, 2].min() <= 0:
            error += 1e3
        errors.append((error, pose))
    return min(errors, key=lambda item: item[0])[1]


def to_solution(intrinsics: Intrinsics, points: Array) -> Solution:
    """Return known intrinsics in the form of a fit, with corners [p, 3] of a board."""
    model: LensModel = "fisheye" if intrinsics.model == "fisheye" else "pinhole"
    lens = Lens(model, len(intrinsics.coeffs))
    coeffs = np.array(intrinsics.coeffs) if intrinsics.coeffs else np.zeros(5)
    camera = np.array([intrinsics.fx, intrinsics.fy, intrinsics.cx, intrinsics.cy])
    return Solution(lens, camera, coeffs, np.zeros((0, 6)), points)


def locate_board(view: BoardView, board: Board, intrinsics: Intrinsics) -> tuple[Array, Array, float]:
    """Return camera_from_board [4, 4], its covariance [6, 6] for a noise of 1 px, and the error of the corners in px.

    The covariance describes a motion (translation m, rotation vector rad) in the board's frame. The error is the
    standard deviation of one coordinate. Raises CalibrationError if no pose follows.
    """
    # estimate the pose alone: the camera is known
    solution = to_solution(intrinsics, board.points)
    try:
        start = replace(solution, poses=estimate_pose(view, solution)[None])
        located = adjust([view], start, fixed_camera=True)
        covariance = pose_covariance(view.ids, located.poses[0], located)
    except (cv2.error, np.linalg.LinAlgError, CalibrationError) as error:
        raise CalibrationError(
            f"{view.name}: no pose of the board follows from its {len(view.ids)} corners"
        ) from error

    # six parameters of the pose take as many degrees of freedom
    residuals = compute_residuals(located, [view])[0]
    sigma = float(np.sqrt((residuals**2).sum() / max(residuals.size - 6, 1)))
    pose = located.poses[0]
    return rigid(cv2.Rodrigues(pose[:3])[0], pose[3:]), covariance, max(sigma, _MIN_POSE_SIGMA_PX)


def pose_covariance(ids: npt.NDArray[np.intp], pose: Array, solution: Solution) -> Array:
    """Return the covariance [6, 6] of a pose [6], a motion in the board's frame, for corners with a noise of 1 px."""
    points = solution.points[ids]
    projection = solution.project(ids, pose)
    by_point = (projection.by_translation @ cv2.Rodrigues(pose[:3])[0]).reshape(-1, 2, 3)
    slopes = np.concatenate([by_point, -by_point @ cross_matrices(points)], axis=2).reshape(-1, 6)
    return np.asarray(np.linalg.inv(slopes.T @ slopes), np.float64)


def expected_covariance(camera_from_board: Array, board: Board, intrinsics: Intrinsics) -> Array:
    """Return the covariance [6, 6] of a pose that is known without its image, as if all corners had a noise of 1 px."""
    rotation = cv2.Rodrigues(camera_from_board[:3, :3])[0].ravel()
    pose = np.concatenate([rotation, camera_from_board[:3, 3]])
    return pose_covariance(np.arange(len(board.points)), pose, to_solution(intrinsics, board.points))
