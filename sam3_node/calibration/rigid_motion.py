"""Solves A X B = Y for stacks of rigid transforms [n, 4, 4]: closed forms of OpenCV, then a joint refinement.

A is base_from_gripper for a camera on the gripper, and gripper_from_base for a camera beside the robot. B is
camera_from_board. X is the pose of the camera in its parent's frame. Y is the pose of the board in the other frame. A
small motion is xi = (translation [3] in metres, rotation vector [3] in radians), applied on the right: T exp(xi), that
is, in the frame of the child. The refinement starts from a solution that outliers do not spoil.

The error of a view is E = Y^-1 A X B. Its covariance is the sum of two parts. The corners of the board give the
camera's part. The robot's part consists of independent errors of the gripper's pose, with standard deviations in metres
and radians. These are variance components, estimated by restricted maximum likelihood (H. D. Patterson and R. Thompson,
Biometrika 1971). Views are whitened by the sum. The covariance of X follows from the whitened Jacobian.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares, minimize
from scipy.spatial.transform import Rotation
from scipy.special import chdtri  # scipy.stats takes 0.3 s to import

from ..errors import CalibrationError
from ..geometry import Array, cross_matrices, invert, rigid, rotation_from_vector

HAND_EYE_METHODS = {
    "tsai": cv2.CALIB_HAND_EYE_TSAI,
    "park": cv2.CALIB_HAND_EYE_PARK,
    "horaud": cv2.CALIB_HAND_EYE_HORAUD,
    "andreff": cv2.CALIB_HAND_EYE_ANDREFF,
    "daniilidis": cv2.CALIB_HAND_EYE_DANIILIDIS,
}
"""OpenCV's methods that solve for X alone."""
ROBOT_WORLD_METHODS = {
    "robot-world-shah": cv2.CALIB_ROBOT_WORLD_HAND_EYE_SHAH,
    "robot-world-li": cv2.CALIB_ROBOT_WORLD_HAND_EYE_LI,
}
"""OpenCV's methods that solve for X and Y. X alone is used."""
CLOSED_FORMS = (*HAND_EYE_METHODS, *ROBOT_WORLD_METHODS)
"""Names of all closed forms."""

# number of random samples of views from which the initial solution is chosen, as in RANSAC
_TRIALS = 60
# number of views in each of these samples
_SAMPLE = 5
# seed of these samples, fixed so that a calibration can be repeated
_CHECK_SEED = 7
# length in metres by which an error of rotation is multiplied to be added to one of translation
_LEVER_M = 0.2
# smallest noise of the estimate: metres, radians, factor of the camera's covariance
_MIN_NOISE = np.array([1e-5, 1e-5, 1e-3])
# largest noise, likewise
_MAX_NOISE = np.array([1.0, 1.0, 1e3])
# number of times that the noise is estimated and the solution refined with it
_ROUNDS = 3
# when its search ends; logarithms of the noise need no more digits
_SEARCH = {"xatol": 1e-2, "fatol": 1e-3, "maxiter": 200}
# number of random draws from which a confidence interval is computed
_DRAWS = 100_000
# seed of these draws
_SEED = 11
# median length of a vector of three independent standard normal values: from a median error to a standard deviation
_MEDIAN_LENGTH = 1.54


def scale_positions(transforms: Array, factor: float) -> Array:
    """Return transforms [n, 4, 4] with their translations multiplied by a factor."""
    scaled = transforms.copy()
    scaled[:, :3, 3] *= factor
    return scaled


def move(transform: Array, motion: Array) -> Array:
    """Return transform exp(motion), for a small motion [6]."""
    return transform @ rigid(rotation_from_vector(motion[3:]), motion[:3])


def to_motions(transforms: Array) -> Array:
    """Return translation and rotation vector [n, 6] of transforms [n, 4, 4]."""
    rotations = Rotation.from_matrix(transforms[:, :3, :3]).as_rotvec()
    return np.concatenate([transforms[:, :3, 3], rotations], axis=1)


def adjoints(transforms: Array) -> Array:
    """Return [n, 6, 6] that convert motions xi of the child's frame to the parent's: T exp(xi) = exp(Ad xi) T."""
    matrices = np.zeros((len(transforms), 6, 6))
    rotations = transforms[:, :3, :3]
    matrices[:, :3, :3] = rotations
    matrices[:, 3:, 3:] = rotations
    matrices[:, :3, 3:] = cross_matrices(transforms[:, :3, 3]) @ rotations
    return matrices


def average(transforms: Array) -> Array:
    """Return the mean of transforms [n, 4, 4] that differ little. Rotations have their chordal mean."""
    rotation = Rotation.from_matrix(transforms[:, :3, :3]).mean()
    return rigid(rotation.as_matrix(), transforms[:, :3, 3].mean(0))


def measure_rotations(transforms: Array) -> Array:
    """Return the root mean square angles [3] in radians, largest first, by which pairs turn about their main axes."""
    # the rotations between all pairs, and their scatter about each axis
    first, second = np.triu_indices(len(transforms), 1)
    turned = np.swapaxes(transforms[first, :3, :3], 1, 2) @ transforms[second, :3, :3]
    vectors = Rotation.from_matrix(turned).as_rotvec()
    scatter = vectors.T @ vectors / max(len(vectors), 1)
    return np.asarray(np.sqrt(np.maximum(np.linalg.eigvalsh(scatter)[::-1], 0)), np.float64)


def solve_closed_form(a: Array, b: Array, method: str) -> Array:
    """Return X [4, 4] by one of CLOSED_FORMS, from A and B [n, 4, 4].

    Raises CalibrationError if the method finds no finite solution.
    """
    try:
        x = _call(a, b, method)
    except cv2.error as error:
        raise CalibrationError(f"{method} found no solution for {len(a)} views") from error
    # some methods return reflections for samples that do not determine the solution
    if not np.isfinite(x).all() or np.linalg.det(x[:3, :3]) <= 0.5:
        raise CalibrationError(f"{method} found no rigid solution for {len(a)} views")
    return x


def _call(a: Array, b: Array, method: str) -> Array:
    if method in HAND_EYE_METHODS:
        rotation, translation = cv2.calibrateHandEye(*_split(a), *_split(b), method=HAND_EYE_METHODS[method])
        return rigid(rotation, translation.ravel())
    solved = cv2.calibrateRobotWorldHandEye(
        *_split(b), *_split(invert(a)), method=ROBOT_WORLD_METHODS[method]
    )
    return invert(rigid(solved[2], solved[3].ravel()))


def _split(transforms: Array) -> tuple[list[Array], list[Array]]:
    """Return the rotations and the translations, as OpenCV takes them."""
    return list(transforms[:, :3, :3]), list(transforms[:, :3, 3])


def measure_errors(a: Array, b: Array, x: Array, y: Array) -> Array:
    """Return translation and rotation vector [n, 6] by which each view's board misses Y, in the board's frame."""
    return to_motions(invert(y) @ a @ x @ b)


def find_start(a: Array, b: Array) -> tuple[Array, Array, float]:
    """Return X, Y and the scale of the board's positions from the sample of views that fits the median view best.

    Rotations are by PARK, positions and scale by least squares. Raises CalibrationError if no sample has a solution.
    """
    # all views first: without outliers they are the best sample
    generator = np.random.default_rng(_CHECK_SEED)
    samples = [np.arange(len(a))]
    if len(a) > _SAMPLE:
        samples += [generator.choice(len(a), _SAMPLE, replace=False) for _ in range(_TRIALS)]
    best: tuple[Array, Array, float] | None = None
    best_score = np.inf
    for sample in samples:
        try:
            x = solve_closed_form(a[sample], b[sample], "park")
        except (CalibrationError, np.linalg.LinAlgError):
            continue
        position, scale = _solve_positions(a[sample], b[sample], x[:3, :3])
        # no board that is seen has a negative size
        if scale <= 0:
            position = x[:3, 3]
            scale = 1.0

        # compare samples on all views, by the median, which outliers do not move
        x = rigid(x[:3, :3], position)
        scaled = scale_positions(b, scale)
        y = _median_board(a @ x @ scaled)
        score = float(np.median(score_errors(measure_errors(a, scaled, x, y))))
        if best is None or score < best_score:
            best = x, y, scale
            best_score = score
    if best is None:
        raise CalibrationError(
            "no hand-eye solution: the poses of robot and board do not agree in any sample of views"
        )
    return best


def _solve_positions(a: Array, b: Array, rotation: Array) -> tuple[Array, float]:
    """Return the position of X and the scale of B's positions by least squares, for the rotation of X."""
    # with rotations known, the positions of X and Y and the scale enter linearly
    count = len(a)
    slopes = np.zeros((count, 3, 7))
    slopes[:, :, :3] = a[:, :3, :3]
    slopes[:, :, 3:6] = -np.eye(3)
    slopes[:, :, 6] = (a[:, :3, :3] @ rotation @ b[:, :3, 3:])[..., 0]
    solved = np.linalg.lstsq(slopes.reshape(-1, 7), -a[:, :3, 3].ravel(), rcond=None)[0]
    return np.asarray(solved[:3], np.float64), float(solved[6])


def measure_lengths(errors: Array) -> tuple[Array, Array]:
    """Return the lengths [n] in metres and the angles [n] in radians of errors [n, 6]."""
    return np.linalg.norm(errors[:, :3], axis=1), np.linalg.norm(errors[:, 3:], axis=1)


def score_errors(errors: Array) -> Array:
    """Return one length [n] in metres for errors [n, 6]: angles count with a lever of 0.2 m."""
    lengths, angles = measure_lengths(errors)
    return np.asarray(np.hypot(lengths, _LEVER_M * angles))


def _median_board(boards: Array) -> Array:
    """Return the mean of the half of the boards' poses that is nearest to their median position."""
    distances = np.linalg.norm(boards[:, :3, 3] - np.median(boards[:, :3, 3], axis=0), axis=1)
    return average(boards[np.argsort(distances)[: max(len(boards) // 2, 1)]])


@dataclass(frozen=True, slots=True)
class Observations:
    """Views [n]: A and B [n, 4, 4], and the covariance [n, 6, 6] of B as a motion in the frame of the board.

    `left` is True if A is the inverse of the gripper's pose. The noise of this pose lies on the left of A then.
    `scaled` is True if the scale of `covariances` is unknown, and also estimated.
    """

    a: Array
    b: Array
    covariances: Array
    left: bool
    scaled: bool = False

    def select(self, kept: npt.NDArray[Any]) -> Observations:
        """Return the observations of some views."""
        return replace(self, a=self.a[kept], b=self.b[kept], covariances=self.covariances[kept])

    def rescale(self, board: float, robot: float = 1.0) -> Observations:
        """Return the observations with all positions of the board and of the robot multiplied by these factors."""
        factors = np.repeat([board, 1.0], 3)
        return replace(
            self,
            a=scale_positions(self.a, robot),
            b=scale_positions(self.b, board),
            covariances=self.covariances * np.outer(factors, factors),
        )


@dataclass(frozen=True, slots=True)
class Refined:
    """X and Y [4, 4], the noise [3] of the robot (m, rad) and the camera's factor, and the covariance of X and Y.

    The covariance [12, 12] describes motions on the right. `degrees` are the degrees of freedom behind it. `scale`
    multiplies the positions of the board. If it was free, it is the 13th parameter of the covariance [13, 13].
    """

    x: Array
    y: Array
    noise: Array
    covariance: Array
    degrees: int
    scale: float = 1.0


def refine(
    observations: Observations,
    x: Array,
    y: Array,
    noise: Array | None = None,
    scale: float | None = None,
) -> Refined:
    """Minimise the whitened errors of all views from a start. Components of a given `noise` are not estimated.

    A given `scale` is the start of the scale of the board's positions, which is free then.
    """
    free = scale is not None
    scale = scale or 1.0
    scaled = observations.rescale(scale)
    rounds = 0
    if noise is None:
        rounds = _ROUNDS
        noise = _guess_noise(scaled, x, y)

    # the noise weighs the errors, and the errors tell the noise: in turn
    for number in range(rounds + 1):
        x, y, change = _minimise(scaled, x, y, noise, free)
        scale *= change
        scaled = observations.rescale(scale)
        if number < rounds:
            noise = _estimate_noise(scaled, x, y, noise, free)

    # the covariance of the parameters, from the whitened Jacobian at the result
    slopes = _whiteners(scaled, x, noise) @ jacobians(scaled, free)
    jacobian = slopes.reshape(-1, slopes.shape[2])
    covariance = np.asarray(np.linalg.inv(jacobian.T @ jacobian), np.float64)
    degrees = 3 * len(scaled.a) - 6 - free
    return Refined(x, y, noise, covariance, max(degrees, 3), scale)


def _minimise(
    observations: Observations, x: Array, y: Array, noise: Array, free: bool
) -> tuple[Array, Array, float]:
    """Return X, Y and the factor of the board's positions, which is 1 unless it is `free`."""
    roots = _whiteners(observations, x, noise)
    # the Jacobian for small errors: it differs from the exact one by as much as the errors, a percent or less
    slopes = roots @ jacobians(observations, free)
    slopes = slopes.reshape(-1, slopes.shape[2])

    def whitened(step: Array) -> Array:
        b = observations.b
        if free:
            b = scale_positions(b, 1 + step[12])
        errors = measure_errors(observations.a, b, move(x, step[:6]), move(y, step[6:12]))
        return np.asarray((roots @ errors[..., None]).ravel(), np.float64)

    start = np.zeros(slopes.shape[1])
    step = least_squares(
        whitened, start, jac=lambda _: slopes, method="lm", x_scale=np.full(len(start), 1e-3)
    ).x
    factor = float(np.clip(1 + step[12], 0.1, 10)) if free else 1.0
    return move(x, step[:6]), move(y, step[6:12]), factor


def _add_noise(spread: Array, camera: Array, noise: Array) -> Array:
    """Return the covariance [n, 6, 6] of each view's error, from _noise_maps and the camera's covariance."""
    # the robot's errors are independent along each axis, of one size for positions and one for rotations
    robot = (spread * np.repeat(noise[:2] ** 2, 3)) @ np.swapaxes(spread, 1, 2)
    return np.asarray(robot + noise[2] ** 2 * camera, np.float64)


def _noise_maps(observations: Observations, x: Array) -> Array:
    """Return [n, 6, 6] that convert an error of the gripper's pose, in its frame, to one of the board."""
    chain = x @ observations.b
    if observations.left:
        chain = observations.a @ chain
    return adjoints(invert(chain))


def _whiteners(observations: Observations, x: Array, noise: Array) -> Array:
    """Return [n, 6, 6] that make the errors of ordinary views independent, with a variance of 1."""
    covariances = _add_noise(_noise_maps(observations, x), observations.covariances, noise)
    return np.asarray(np.linalg.inv(np.linalg.cholesky(covariances)), np.float64)


def jacobians(observations: Observations, free: bool) -> Array:
    """Return the derivatives [n, 6, 12] of the errors by motions of X and Y, for small errors.

    With `free`, the 13th column is by the relative change of the board's positions.
    """
    inverses = invert(observations.b)
    by_x = adjoints(inverses)
    by_y = np.broadcast_to(-np.eye(6), by_x.shape)
    by_scale = np.zeros((len(by_x), 6, 1))
    by_scale[:, :3] = -inverses[:, :3, 3:]
    return np.concatenate([by_x, by_y, by_scale], axis=2)[:, :, : 12 + free]


def _guess_noise(observations: Observations, x: Array, y: Array) -> Array:
    """Return the noise that explains the median errors alone."""
    lengths, angles = measure_lengths(measure_errors(observations.a, observations.b, x, y))
    guess = [np.median(lengths) / _MEDIAN_LENGTH, np.median(angles) / _MEDIAN_LENGTH, 1.0]
    return np.clip(guess, _MIN_NOISE, _MAX_NOISE)


def _estimate_noise(observations: Observations, x: Array, y: Array, noise: Array, free: bool) -> Array:
    """Return the noise with the highest restricted likelihood of the errors."""
    errors = measure_errors(observations.a, observations.b, x, y)
    spread = _noise_maps(observations, x)
    camera = observations.covariances
    slopes = jacobians(observations, free)
    # the camera's factor is known where images gave the covariances
    count = 3 if observations.scaled else 2

    def to_noise(logarithms: Array) -> Array:
        return np.concatenate([np.exp(logarithms), noise[count:]])

    def cost(logarithms: Array) -> float:
        total = _add_noise(spread, camera, to_noise(logarithms))
        inverse = np.linalg.inv(total)
        normal = (np.swapaxes(slopes, 1, 2) @ inverse @ slopes).sum(0)
        product = np.einsum("ni,nij,nj->", errors, inverse, errors)
        # the errors come from another weighting: project out what X and Y could still explain
        gradient = np.einsum("nik,nij,nj->k", slopes, inverse, errors)
        explained = gradient @ np.linalg.solve(normal, gradient)
        return float(np.linalg.slogdet(total)[1].sum() + np.linalg.slogdet(normal)[1] + product - explained)

    # logarithms keep the noise positive
    low = np.log(_MIN_NOISE[:count])
    high = np.log(_MAX_NOISE[:count])
    start = np.log(noise[:count])
    bounds = list(zip(low, high, strict=True))
    search = minimize(cost, np.clip(start, low, high), method="Nelder-Mead", bounds=bounds, options=_SEARCH)
    return to_noise(search.x)


def bound(covariance: Array, degrees: int) -> float:
    """Return the radius that the length of an error [3] of this covariance stays below with 95 % confidence.

    `degrees` are the degrees of freedom of the estimate of the covariance. A fixed sample of normal numbers makes the
    quantile the same each time.
    """
    generator = np.random.default_rng(_SEED)
    lengths = (generator.standard_normal((_DRAWS, 3)) ** 2) @ np.linalg.eigvalsh(covariance)
    ratio = generator.chisquare(degrees, _DRAWS) / degrees
    return float(np.sqrt(np.quantile(lengths / ratio, 0.95)))


def mahalanobis(observations: Observations, refined: Refined) -> Array:
    """Return the squared whitened length [n] of each view's error; about 6 for an ordinary view."""
    scaled = observations.rescale(refined.scale)
    errors = measure_errors(scaled.a, scaled.b, refined.x, refined.y)
    roots = _whiteners(scaled, refined.x, refined.noise)
    return np.asarray(((roots @ errors[..., None]) ** 2).sum(axis=(1, 2)), np.float64)


def outlier_limit(count: int) -> float:
    """Return the squared whitened length that no view of `count` good ones exceeds, but in one of 200 calibrations."""
    return float(chdtri(6, 0.005 / max(count, 1)))
