"""Hand-eye calibration: the pose of a camera on the gripper, or beside the robot, with its error.

Each view pairs the pose of the gripper, as the robot reports it, with the pose of a board in the camera. The board is
fixed in the base's frame for a camera on the gripper (eye_in_hand), and on the gripper for a fixed camera
(eye_to_hand).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from ..errors import CalibrationError
from ..geometry import Array, quaternion_from_rotation, rigid, rotation_from_quaternion
from .closed_form import find_start, measure_errors, score_errors, solve_closed_form
from .intrinsics import Rejected
from .refinement import (
    Observations,
    Refined,
    bound,
    estimate_scale,
    mahalanobis,
    outlier_limit,
    refine,
)
from .rigid_motion import average, cross_matrices, invert_all, measure_rotations, to_motions

Mounting = Literal["eye_in_hand", "eye_to_hand"]

MIN_POSES = 6
"""Minimum number of views that agree."""

REFINED = "joint"
"""Name of the joint refinement in comparisons with OpenCV's methods."""

_MIN_ANGLE = np.radians(5)
_MAX_REJECTED_SHARE = 0.4
_MAX_ERROR_M, _MAX_ERROR_RAD = 0.03, np.radians(3)
_MAX_SCALE, _SCALE_SIGMAS = 0.02, 5.0
_SAME_M, _SAME_RAD = 1e-4, 1e-3
_MOVED_M, _MOVED_RAD = 5e-3, np.radians(1)
_DEFAULT_COVARIANCE = np.zeros((6, 6))


@dataclass(frozen=True, slots=True)
class HandEyeView:
    """One view: base_from_gripper and camera_from_board [4, 4], in metres.

    `covariance` [6, 6] is that of camera_from_board as a motion (translation, rotation vector) in the board's frame,
    such as `board_poses.locate_board` gives; None if it is not known.
    """

    name: str
    base_from_gripper: Array
    camera_from_board: Array
    covariance: Array | None = None


@dataclass(frozen=True, slots=True)
class LeaveOneOut:
    """Errors of each view's board, in metres and radians [n], with all other views as the calibration."""

    lengths_m: Array
    angles_rad: Array

    @property
    def rms_mm(self) -> float:
        return float(np.sqrt((self.lengths_m**2).mean()) * 1e3)

    @property
    def rms_deg(self) -> float:
        return float(np.degrees(np.sqrt((self.angles_rad**2).mean())))


@dataclass(frozen=True, slots=True)
class HandEyeResult:
    """The pose `parent_from_camera` [4, 4]: the parent is the gripper (eye_in_hand) or the base (eye_to_hand).

    `other_from_board` is the pose of the board in the other frame. `covariance` [6, 6] is that of a motion
    (translation m, rotation vector rad) in the camera's frame, and `position_95_m`, `rotation_95_rad` are the radii
    that its length stays below with 95 % confidence. `robot_noise` are standard deviations of the gripper's pose (m,
    rad). `scale` is the share by which the board seems larger than described, and its standard deviation.
    """

    mounting: Mounting
    parent_from_camera: Array
    other_from_board: Array
    covariance: Array
    position_95_m: float
    rotation_95_rad: float
    leave_one_out: LeaveOneOut
    robot_noise: tuple[float, float]
    scale: tuple[float, float]
    views: tuple[str, ...]
    rejected: tuple[Rejected, ...]


def calibrate_hand_eye(
    views: Sequence[HandEyeView],
    mounting: Mounting,
    *,
    board_centre_m: Sequence[float] = (0.0, 0.0, 0.0),
    scaled: bool = False,
    rejected: Sequence[Rejected] = (),
) -> HandEyeResult:
    """Estimate the pose of the camera from all views jointly; views that disagree are left out by name.

    Errors are measured at `board_centre_m`, in the frame of the board. With `scaled`, the covariances of the views
    are known but for a factor. Raises CalibrationError for too few views, degenerate motion, repeated poses, and
    poses that do not fit the board, with the reason.
    """
    _check_motion(views, mounting)
    observations = observe(views, mounting, board_centre_m, scaled)
    x, y = find_start(observations.a, observations.b)
    refined, kept, limit = _reject_outliers(observations, x, y)
    errors = measure_errors(observations.a, observations.b, refined.x, refined.y)
    dropped = [
        Rejected(view.name, _describe_error(error, distance, limit))
        for view, error, distance, keep in zip(
            views, errors, mahalanobis(observations, refined), kept, strict=True
        )
        if not keep
    ]
    _check_agreement(observations, kept, errors, dropped, mounting)
    used = observations.select(kept)
    scale = estimate_scale(used, refined)
    _check_scale(scale)
    shift = rigid(np.eye(3), -np.asarray(board_centre_m, np.float64))
    return HandEyeResult(
        mounting,
        refined.x,
        refined.y @ shift,
        refined.covariance[:6, :6],
        bound(refined.covariance[:3, :3], refined.degrees),
        bound(refined.covariance[3:6, 3:6], refined.degrees),
        leave_one_out(used, lambda part: _refit(part, refined)),
        refined.noise[:2],
        scale,
        tuple(view.name for view, keep in zip(views, kept, strict=True) if keep),
        (*rejected, *dropped),
    )


def observe(
    views: Sequence[HandEyeView], mounting: Mounting, board_centre_m: Sequence[float], scaled: bool = False
) -> Observations:
    """Return the views as A and B of the equation A X B = Y, with the board's frame moved to its centre."""
    centre = rigid(np.eye(3), board_centre_m)
    a = np.array([view.base_from_gripper for view in views], np.float64)
    b = np.array([view.camera_from_board for view in views], np.float64) @ centre
    # a rotation about the board's origin also moves its centre
    move_to_centre = np.eye(6)
    move_to_centre[:3, 3:] = -cross_matrices(np.array([board_centre_m], np.float64))[0]
    covariances = np.array(
        [
            _DEFAULT_COVARIANCE
            if view.covariance is None
            else move_to_centre @ view.covariance @ move_to_centre.T
            for view in views
        ]
    )
    known = all(view.covariance is not None for view in views)
    left = mounting == "eye_to_hand"
    return Observations(invert_all(a) if left else a, b, covariances, left, scaled and known)


def leave_one_out(
    observations: Observations, fit: Callable[[Observations], tuple[Array, Array]]
) -> LeaveOneOut:
    """Return the error of each view with X and Y from `fit` of all others."""
    count = len(observations.a)
    errors = []
    for index in range(count):
        x, y = fit(observations.select(np.arange(count) != index))
        errors.append(
            measure_errors(observations.a[index : index + 1], observations.b[index : index + 1], x, y)[0]
        )
    stacked = np.array(errors)
    return LeaveOneOut(np.linalg.norm(stacked[:, :3], axis=1), np.linalg.norm(stacked[:, 3:], axis=1))


def compare_methods(
    views: Sequence[HandEyeView],
    mounting: Mounting,
    methods: Sequence[str],
    board_centre_m: Sequence[float] = (0.0, 0.0, 0.0),
) -> dict[str, LeaveOneOut]:
    """Return the leave-one-out errors of OpenCV's methods on the same views; a method that fails is absent."""
    observations = observe(views, mounting, board_centre_m)
    found: dict[str, LeaveOneOut] = {}
    for method in methods:

        def fit(part: Observations, method: str = method) -> tuple[Array, Array]:
            x, _ = solve_closed_form(part.a, part.b, method)
            return x, average(part.a @ x @ part.b)

        try:
            found[method] = leave_one_out(observations, fit)
        except (CalibrationError, np.linalg.LinAlgError):
            continue
    return found


def _refit(part: Observations, refined: Refined) -> tuple[Array, Array]:
    again = refine(part, refined.x, refined.y, refined.noise)
    return again.x, again.y


def _reject_outliers(observations: Observations, x: Array, y: Array) -> tuple[Refined, Array, float]:
    """Refine on the views that agree; return the refinement, the kept views [n] bool, and the limit of disagreement."""
    errors = measure_errors(observations.a, observations.b, x, y)
    scores = score_errors(errors)
    # generous, since the start is from few views
    kept = scores <= np.maximum(6 * np.median(scores), 1e-6)
    limit = outlier_limit(len(kept))
    refined = refine(observations.select(kept), x, y)
    for _ in range(10):
        distances = mahalanobis(observations, refined)
        again = distances <= limit
        if again.sum() < MIN_POSES or np.array_equal(again, kept):
            break
        kept = again
        refined = refine(observations.select(kept), refined.x, refined.y)
    return refined, kept, limit


def _describe_error(error: Array, distance: float, limit: float) -> str:
    return (
        f"misses the other views by {np.linalg.norm(error[:3]) * 1e3:.1f} mm and "
        f"{np.degrees(np.linalg.norm(error[3:])):.2f} degrees, {np.sqrt(distance / limit):.1f} times the allowed error"
    )


def _check_motion(views: Sequence[HandEyeView], mounting: Mounting) -> None:
    if len(views) < MIN_POSES:
        raise CalibrationError(
            f"expected at least {MIN_POSES} poses with a view of the board, found {len(views)}; 12 or more are better"
        )
    poses = np.array([view.base_from_gripper for view in views], np.float64)
    _check_repeats(views)
    first, second, _ = measure_rotations(poses)
    if first < _MIN_ANGLE:
        raise CalibrationError(
            f"the gripper turned by only {np.degrees(first):.1f} degrees between views: from translation alone the "
            "camera's pose does not follow; turn the gripper by 20 degrees and more about at least two axes"
        )
    if second < _MIN_ANGLE:
        raise CalibrationError(
            f"the gripper turned about one axis only ({np.degrees(first):.0f} degrees about it, "
            f"{np.degrees(second):.1f} about any other): the camera's position along this axis "
            "does not follow; turn it about a second axis"
        )


def _check_repeats(views: Sequence[HandEyeView]) -> None:
    """Refuse poses of the robot that stand still while the board moves in the camera."""
    stale = []
    for before, after in pairwise(views):
        robot = _distance(before.base_from_gripper, after.base_from_gripper)
        board = _distance(before.camera_from_board, after.camera_from_board)
        if robot[0] < _SAME_M and robot[1] < _SAME_RAD and (board[0] > _MOVED_M or board[1] > _MOVED_RAD):
            stale.append(f"{after.name} ({board[0] * 1e3:.0f} mm)")
    if len(stale) > 1:  # a single one may be a wrong view of the board, which is left out as an outlier
        raise CalibrationError(
            f"the robot's pose is stale in {len(stale)} views: it did not change while the board moved in the image: "
            f"{', '.join(stale[:5])}; check the source of the poses"
        )


def _distance(first: Array, second: Array) -> tuple[float, float]:
    motion = to_motions((np.linalg.inv(first) @ second)[None])[0]
    return float(np.linalg.norm(motion[:3])), float(np.linalg.norm(motion[3:]))


def _check_agreement(
    observations: Observations, kept: Array, errors: Array, rejected: Sequence[Rejected], mounting: Mounting
) -> None:
    median_m = float(np.median(np.linalg.norm(errors[:, :3], axis=1)))
    median_rad = float(np.median(np.linalg.norm(errors[:, 3:], axis=1)))
    agree = kept.sum() >= max(MIN_POSES, (1 - _MAX_REJECTED_SHARE) * len(kept))
    if agree and median_m <= _MAX_ERROR_M and median_rad <= _MAX_ERROR_RAD:
        return
    advice = _explain_disagreement(observations, mounting, float(np.median(score_errors(errors))))
    raise CalibrationError(
        f"the robot's poses and the views of the board do not agree: the median error is {median_m * 1e3:.1f} mm and "
        f"{np.degrees(median_rad):.2f} degrees, and {len(rejected)} of {len(kept)} views are outliers; {advice}"
    )


def _explain_disagreement(observations: Observations, mounting: Mounting, score: float) -> str:
    """Return advice for the change of the input that makes it fit, if one does."""
    other = "eye_to_hand" if mounting == "eye_in_hand" else "eye_in_hand"
    mirror = np.diag([-1.0, 1, 1, 1])
    guesses = {
        f"they fit if inverted: use {other}, or give base_from_gripper instead of its inverse": replace(
            observations, a=invert_all(observations.a)
        ),
        "they fit if the quaternions are read as w x y z: give them as x y z w": replace(
            observations, a=_reorder_quaternions(observations)
        ),
        "they fit if the images are mirrored: turn off the camera's mirror image": replace(
            observations, b=mirror @ observations.b @ mirror
        ),
    }
    for advice, guess in guesses.items():
        try:
            x, y = find_start(guess.a, guess.b)
        except CalibrationError:
            continue
        if 4 * float(np.median(score_errors(measure_errors(guess.a, guess.b, x, y)))) < score:
            return advice
    return "check that each pose belongs to its image, that the robot stood still, and that nothing was moved"


def _reorder_quaternions(observations: Observations) -> Array:
    """Return A as if the file's quaternions had been w x y z."""
    poses = invert_all(observations.a) if observations.left else observations.a
    quaternions = [quaternion_from_rotation(pose[:3, :3]) for pose in poses]
    again = np.array(
        [
            rigid(rotation_from_quaternion([y, z, w, x]), pose[:3, 3])
            for (x, y, z, w), pose in zip(quaternions, poses, strict=True)
        ]
    )
    return invert_all(again) if observations.left else again


def _check_scale(scale: tuple[float, float]) -> None:
    share, deviation = scale
    if abs(share) > max(_MAX_SCALE, _SCALE_SIGMAS * deviation):
        raise CalibrationError(
            f"by the robot's motion the board is {100 * abs(share):.1f} % {'larger' if share > 0 else 'smaller'} than "
            "described: measure its squares, and correct the board (a printer may have scaled it)"
        )
