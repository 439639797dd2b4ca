"""OpenCV's methods of hand-eye calibration, and a start for the joint refinement that outliers do not spoil.

All solve A X B = Y over views: A is base_from_gripper for a camera on the gripper and gripper_from_base for a camera
beside the robot, B is camera_from_board, X is the pose of the camera in its parent's frame, and Y that of the board
in the other frame.
"""

from __future__ import annotations

import cv2
import numpy as np

from ..errors import CalibrationError
from ..geometry import Array, invert, rigid
from .rigid_motion import average, invert_all, scale_positions, to_motions

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
"""OpenCV's methods that solve for X and Y."""

CLOSED_FORMS = (*HAND_EYE_METHODS, *ROBOT_WORLD_METHODS)

_TRIALS, _SAMPLE = 60, 5
_LEVER_M = 0.2  # converts angles to lengths in scores
_SEED = 7


def solve_closed_form(a: Array, b: Array, method: str) -> tuple[Array, Array]:
    """Return X and Y [4, 4] by one of CLOSED_FORMS, from A and B [n, 4, 4].

    Raises CalibrationError if the method finds no finite solution.
    """
    try:
        x, y = _call(a, b, method)
    except cv2.error as error:
        raise CalibrationError(f"{method} found no solution for {len(a)} views") from error
    # some methods return reflections for samples that do not determine the solution
    if not all(np.isfinite(pose).all() and np.linalg.det(pose[:3, :3]) > 0.5 for pose in (x, y)):
        raise CalibrationError(f"{method} found no rigid solution for {len(a)} views")
    return x, y


def _call(a: Array, b: Array, method: str) -> tuple[Array, Array]:
    boards = [part[:3, :3] for part in b], [part[:3, 3] for part in b]
    if method in HAND_EYE_METHODS:
        rotation, translation = cv2.calibrateHandEye(
            [part[:3, :3] for part in a],
            [part[:3, 3] for part in a],
            *boards,
            method=HAND_EYE_METHODS[method],
        )
        x = rigid(rotation, np.ravel(translation))
        rotated = np.isfinite(x).all() and np.linalg.det(x[:3, :3]) > 0.5
        return x, average(a @ x @ b) if rotated else x
    inverse = invert_all(a)
    board_rotation, board_translation, camera_rotation, camera_translation = cv2.calibrateRobotWorldHandEye(
        *boards,
        [part[:3, :3] for part in inverse],
        [part[:3, 3] for part in inverse],
        method=ROBOT_WORLD_METHODS[method],
    )
    board, camera = (
        rigid(board_rotation, np.ravel(board_translation)),
        rigid(camera_rotation, np.ravel(camera_translation)),
    )
    return invert(camera), invert(board)


def measure_errors(a: Array, b: Array, x: Array, y: Array) -> Array:
    """Return translation and rotation vector [n, 6] by which each view's board misses Y, in the board's frame."""
    return to_motions(invert(y) @ a @ x @ b)


def find_start(a: Array, b: Array) -> tuple[Array, Array, float]:
    """Return X, Y and the scale of the board's positions, of the sample of views that fits the median view best.

    Rotations are by PARK, positions and scale by least squares. Raises CalibrationError if no sample has a solution.
    """
    generator = np.random.default_rng(_SEED)
    samples = [np.arange(len(a))]
    if len(a) > _SAMPLE:
        samples += [generator.choice(len(a), _SAMPLE, replace=False) for _ in range(_TRIALS)]
    best: tuple[float, Array, Array, float] | None = None
    for sample in samples:
        try:
            x, _ = solve_closed_form(a[sample], b[sample], "park")
        except (CalibrationError, np.linalg.LinAlgError):
            continue
        position, scale = _solve_positions(a[sample], b[sample], x[:3, :3])
        if scale <= 0:  # no board that is seen has a negative size
            position, scale = x[:3, 3], 1.0
        x, scaled = rigid(x[:3, :3], position), scale_positions(b, scale)
        y = _median_board(a @ x @ scaled)
        score = float(np.median(score_errors(measure_errors(a, scaled, x, y))))
        if best is None or score < best[0]:
            best = score, x, y, scale
    if best is None:
        raise CalibrationError(
            "no hand-eye solution: the poses of robot and board do not agree in any sample of views"
        )
    return best[1:]


def _solve_positions(a: Array, b: Array, rotation: Array) -> tuple[Array, float]:
    """Return the position of X and the scale of B's positions by least squares, for the rotation of X."""
    count = len(a)
    slopes = np.zeros((count, 3, 7))
    slopes[:, :, :3], slopes[:, :, 3:6] = a[:, :3, :3], -np.eye(3)
    slopes[:, :, 6] = (a[:, :3, :3] @ rotation @ b[:, :3, 3:])[..., 0]
    found = np.linalg.lstsq(slopes.reshape(-1, 7), -a[:, :3, 3].ravel(), rcond=None)[0]
    return np.asarray(found[:3], np.float64), float(found[6])


def score_errors(errors: Array) -> Array:
    """Return one length [n] in metres for errors [n, 6]: angles count with a lever of 0.2 m."""
    return np.asarray(
        np.hypot(np.linalg.norm(errors[:, :3], axis=1), _LEVER_M * np.linalg.norm(errors[:, 3:], axis=1))
    )


def _median_board(boards: Array) -> Array:
    """Return the mean of the half of the boards' poses that is nearest to their median position."""
    distances = np.linalg.norm(boards[:, :3, 3] - np.median(boards[:, :3, 3], axis=0), axis=1)
    return average(boards[np.argsort(distances)[: max(len(boards) // 2, 1)]])
