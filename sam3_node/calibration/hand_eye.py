"""Calibrates hand-eye: the pose of a camera on the gripper, or beside the robot, with its error.

Each view pairs the pose of the gripper, as the robot reports it, with the pose of a board in the camera. The board is
fixed in the base's frame for a camera on the gripper (eye_in_hand), and on the gripper for a fixed camera
(eye_to_hand).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.spatial.transform import Rotation
from scipy.special import stdtrit

from ..errors import CalibrationError
from ..geometry import Array, cross_matrices, invert, project, rigid
from ..types import Intrinsics
from .intrinsics import Rejected
from .rigid_motion import (
    CLOSED_FORMS,
    Observations,
    Refined,
    average,
    bound,
    find_start,
    mahalanobis,
    measure_errors,
    measure_lengths,
    measure_rotations,
    outlier_limit,
    refine,
    scale_positions,
    score_errors,
    solve_closed_form,
    to_motions,
)

Mounting = Literal["eye_in_hand", "eye_to_hand"]
_OTHER = {"eye_in_hand": "eye_to_hand", "eye_to_hand": "eye_in_hand"}

MIN_POSES = 6
"""Number of views that must agree. With fewer, one bad view is not told from a good one."""

REFINED = "joint"
"""Name of the joint refinement in comparisons with OpenCV's methods."""

# angle in radians by which the gripper must turn about two axes
_MIN_ANGLE = np.radians(5)
# share of outliers above which the views do not agree
_MAX_REJECTED_SHARE = 0.4
# median error of translation in metres above which the views do not agree
_MAX_ERROR_M = 0.03
# median error of rotation in radians above which the views do not agree
_MAX_ERROR_RAD = np.radians(3)
# relative error of the board's size above which a report warns
_SUSPECT_SCALE = 0.02
# relative error of the board's size above which the calibration is refused
_MAX_SCALE = 0.05
# standard deviations above which an error of the size is refused although it is below _MAX_SCALE
_SCALE_SIGMAS = 5.0
# smallest and largest plausible standard deviation of the gripper's positions, in metres
_SPREADS_M = (0.01, 3.0)
# standard deviation in metres to which positions outside of _SPREADS_M are scaled, because their unit is unknown
_SPREAD_M = 0.15
# plausible distances of grippers from their base
_REACHES_M = (0.1, 4.0)
# plausible distances of boards from their camera
_DISTANCES_M = (0.02, 10.0)
# metres of each unit that is mistaken for another
_UNITS = {"metres": 1.0, "centimetres": 1e-2, "millimetres": 1e-3, "inches": 0.0254}
# relative difference up to which a scale counts as the ratio of two units
_UNIT_TOLERANCE = 0.04
# least spread of the gripper's positions, as a share of its distance from the base
_MIN_SPREAD = 1e-3
# margin of the image in which corners still count as visible, as a share of its longer side
_IMAGE_MARGIN = 0.05
# share of a board's corners that must be in the image for a camera to have detected it
_MIN_VISIBLE = 0.35
# side in pixels that a square must have for a camera to have detected the board
_MIN_SQUARE_PX = 5.0
# share of a board's corners in the image from which its pose is plausible
_VISIBLE = 0.85
# difference of these shares by which one of two poses of the board is more plausible
_MIN_DIFFERENCE = 0.1
# distance in metres from the gripper below which a camera is mounted on it
_ON_GRIPPER_M = 0.25
# distance in metres from the gripper above which a camera stands beside the robot
_BESIDE_ROBOT_M = 0.5
# translation in metres between two poses below which the gripper has not moved
_SAME_M = 1e-4
# rotation in radians between two poses below which the gripper has not moved
_SAME_RAD = 1e-3
# translation in metres between two poses above which the board has moved relative to the camera
_MOVED_M = 5e-3
# rotation in radians between two poses above which the board has moved relative to the camera
_MOVED_RAD = np.radians(1)


@dataclass(frozen=True, slots=True)
class HandEyeView:
    """One view: base_from_gripper and camera_from_board [4, 4], in metres.

    `covariance` [6, 6] belongs to camera_from_board, as a motion (translation, rotation vector) in the board's frame,
    as `bundle.locate_board` returns it.
    """

    name: str
    base_from_gripper: Array
    camera_from_board: Array
    covariance: Array


@dataclass(frozen=True, slots=True)
class Sight:
    """Camera and board of poses without images. They tell where the camera can have seen the board.

    `size` is (height, width) of the images. `points_m` [p, 3] are the corners in the frame of the board. `pitch_m` is
    the side of a square.
    """

    intrinsics: Intrinsics
    size: tuple[int, int]
    points_m: Array
    pitch_m: float

    def measure_visible(self, b: Array) -> Array:
        """Return the share [n] of the corners inside the image, for poses camera_from_board [n, 4, 4].

        The frame of another detector may have its origin in the centre of the board. The better place counts.
        """
        # a polynomial distortion is valid inside the image alone; the margin stands for it outside
        lens = self.intrinsics
        if lens.model != "fisheye":
            lens = replace(lens, model="none")
        margin = _IMAGE_MARGIN * max(self.size)
        shares = []
        for points in (self.points_m, self.points_m - self.points_m.mean(axis=0)):
            seen = b[:, None, :3, :3] @ points[..., None] + b[:, None, :3, 3:]
            pixels = project(seen.reshape(-1, 3), lens).reshape(len(b), -1, 2)
            inside = (pixels > -margin) & (pixels < np.array(self.size[::-1]) + margin)
            shares.append(inside.all(axis=2).mean(axis=1))
        return np.asarray(max(shares, key=np.mean), np.float64)

    @property
    def radius_m(self) -> float:
        """Half the diagonal of the corners."""
        return float(np.linalg.norm(np.ptp(self.points_m, axis=0))) / 2

    def can_have_seen(self, b: Array) -> bool:
        """Return True if boards at these poses are large enough in the image, and fit into it."""
        square_px = self.pitch_m * self.intrinsics.fx / max(_measure_distance(b), 1e-12)
        return square_px >= _MIN_SQUARE_PX and float(self.measure_visible(b).mean()) >= _MIN_VISIBLE


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

    `other_from_board` is the pose of the board in the other frame. `covariance` [6, 6] describes a motion (translation
    m, rotation vector rad) in the camera's frame. Its lengths stay below `position_95_m` and `rotation_95_rad` with 95
    % confidence. `robot_noise` are standard deviations of the gripper's pose (m, rad). `scale` is the share by which
    the board seems larger than described, and its standard deviation; both are from a refinement in which the scale of
    the board is free. `warnings` are doubts that do not refuse the result.
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
    warnings: tuple[str, ...] = ()


def calibrate_hand_eye(
    views: Sequence[HandEyeView],
    mounting: Mounting,
    *,
    board_centre_m: Sequence[float] = (0.0, 0.0, 0.0),
    scaled: bool = False,
    rejected: Sequence[Rejected] = (),
    sight: Sight | None = None,
) -> HandEyeResult:
    """Estimate the pose of the camera from all views jointly. Views that disagree are rejected by name.

    Errors are measured at `board_centre_m`, in the frame of the board. `scaled` is True for poses of the board that
    come without images. The covariances of their views are known up to a factor, and `sight` says where the camera can
    have seen the board. Raises CalibrationError, with the reason, for too few views, degenerate motion, repeated poses,
    boards that no camera sees there, and poses or lengths that do not fit the board.
    """
    _check_motion(views)
    centre = rigid(np.eye(3), board_centre_m)
    views, hidden = _reject_hidden(views, centre)
    observations = observe(views, mounting, board_centre_m, scaled)
    # in another unit than the centre, positions fit only at the board's own origin
    plain = observe(views, mounting, (0.0, 0.0, 0.0), scaled)
    try:
        # a free scale finds wrong units and a wrong board before they spoil the pose
        free = _fit_with_scale(plain)
        _check_agreement(plain, free, mounting, sight)
        _check_sight(plain.b, mounting, sight)
        scale = free.refined.scale, float(np.sqrt(free.refined.covariance[12, 12])) * free.refined.scale
        warnings = _check_scale(scale, free.refined.degrees, plain, sight)

        # the result has the board's described size
        fit = _reject_outliers(observations, free.refined.x, free.refined.y @ centre)
        _check_agreement(observations, fit, mounting, sight)
        refined = fit.refined
        left_out = leave_one_out(observations.select(fit.kept), partial(_refit, refined=refined))
    except np.linalg.LinAlgError as error:
        raise CalibrationError(
            "the views do not determine the camera's pose: turn the gripper about more axes, and check all units"
        ) from error
    return HandEyeResult(
        mounting,
        refined.x,
        refined.y @ invert(centre),
        refined.covariance[:6, :6],
        bound(refined.covariance[:3, :3], refined.degrees),
        bound(refined.covariance[3:6, 3:6], refined.degrees),
        left_out,
        (float(refined.noise[0]), float(refined.noise[1])),
        (scale[0] - 1, scale[1]),
        tuple(view.name for view, keep in zip(views, fit.kept, strict=True) if keep),
        (*rejected, *hidden, *_name_outliers(views, observations, fit)),
        (*warnings, *_doubt_place(mounting, refined.x, refined.y)),
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
    covariances = np.array([move_to_centre @ view.covariance @ move_to_centre.T for view in views])
    if mounting == "eye_to_hand":
        return Observations(invert(a), b, covariances, True, scaled)
    return Observations(a, b, covariances, False, scaled)


def leave_one_out(
    observations: Observations, fit: Callable[[Observations], tuple[Array, Array]]
) -> LeaveOneOut:
    """Return the error of each view with X and Y from `fit` of all others."""
    views = np.arange(len(observations.a))
    errors = []
    for view in views:
        x, y = fit(observations.select(views != view))
        alone = observations.select(views == view)
        errors.append(measure_errors(alone.a, alone.b, x, y))
    return LeaveOneOut(*measure_lengths(np.concatenate(errors)))


def compare_methods(
    views: Sequence[HandEyeView], mounting: Mounting, board_centre_m: Sequence[float]
) -> dict[str, LeaveOneOut]:
    """Return the leave-one-out errors of OpenCV's methods on the same views. A method that fails is absent."""
    observations = observe(views, mounting, board_centre_m)
    compared: dict[str, LeaveOneOut] = {}
    for method in CLOSED_FORMS:
        with suppress(CalibrationError, np.linalg.LinAlgError):
            compared[method] = leave_one_out(observations, partial(_fit_closed_form, method=method))
    return compared


def _fit_closed_form(part: Observations, method: str) -> tuple[Array, Array]:
    x = solve_closed_form(part.a, part.b, method)
    return x, average(part.a @ x @ part.b)


def _refit(part: Observations, refined: Refined) -> tuple[Array, Array]:
    again = refine(part, refined.x, refined.y, refined.noise)
    return again.x, again.y


@dataclass(frozen=True, slots=True)
class _Fit:
    """A refinement of the views that agree: `kept` [n] bool, and all errors [n, 6]."""

    refined: Refined
    kept: npt.NDArray[np.bool_]
    errors: Array


def _reject_hidden(
    views: Sequence[HandEyeView], centre: Array
) -> tuple[Sequence[HandEyeView], list[Rejected]]:
    """Reject the views whose board lies behind the camera, unless they are too many to be mistakes."""
    poses = np.array([view.camera_from_board for view in views], np.float64)
    # the frame of another detector may have its origin elsewhere on the board
    front = _lie_in_front(poses) | _lie_in_front(poses @ centre)
    if (~front).sum() > _MAX_REJECTED_SHARE * len(views) or front.all():
        return views, []

    hidden = [view.name for view, seen in zip(views, front, strict=True) if not seen]
    reason = "the board lies behind the camera, where it cannot be seen"
    rejected = [Rejected(name, reason) for name in hidden]
    return [view for view in views if view.name not in hidden], rejected


def _fit_with_scale(observations: Observations) -> _Fit:
    """Refine X, Y and the scale of the board's positions together. Lengths may be of any unit."""
    # the limits below are in metres, which a robot in another unit would miss
    robot = _normalise(observations)
    x, y, board = find_start(scale_positions(observations.a, robot), observations.b)
    fit = _reject_outliers(observations.rescale(board, robot), x, y, 1.0)
    refined = replace(
        fit.refined,
        x=scale_positions(fit.refined.x[None], 1 / robot)[0],
        y=scale_positions(fit.refined.y[None], 1 / robot)[0],
        scale=fit.refined.scale * board / robot,
    )
    return replace(fit, refined=refined)


def _normalise(observations: Observations) -> float:
    """Return the factor that brings the gripper's positions to the spread of a robot's, 1 where they have it."""
    poses = observations.a
    if observations.left:
        poses = invert(poses)
    spread = float(np.linalg.norm(np.std(poses[:, :3, 3], axis=0)))
    lowest, highest = _SPREADS_M
    if lowest <= spread <= highest or spread < 1e-9:
        return 1.0
    return _SPREAD_M / spread


def _reject_outliers(observations: Observations, x: Array, y: Array, scale: float | None = None) -> _Fit:
    """Refine on the views that agree, with a free scale of the board from the start `scale` if it is given."""
    scores = score_errors(measure_errors(observations.a, observations.b, x, y))
    # generous, since the start is from few views: of seven, it fits some too well
    enough = np.sort(scores)[min(MIN_POSES, len(scores)) - 1]
    kept = scores <= max(6 * float(np.median(scores)), float(enough), 1e-6)

    # refine and choose in turn, until the choice stays
    limit = outlier_limit(len(kept))
    refined = refine(observations.select(kept), x, y, scale=scale)
    for _ in range(10):
        distances = mahalanobis(observations, refined)
        again = distances <= limit
        if again.sum() < MIN_POSES or np.array_equal(again, kept):
            break
        kept = again
        refined = refine(observations.select(kept), refined.x, refined.y, scale=scale and refined.scale)
    scaled = observations.rescale(refined.scale)
    return _Fit(refined, kept, measure_errors(scaled.a, scaled.b, refined.x, refined.y))


def _name_outliers(views: Sequence[HandEyeView], observations: Observations, fit: _Fit) -> list[Rejected]:
    """Return the rejected views, each with its error as the reason."""
    distances = mahalanobis(observations, fit.refined)
    limit = outlier_limit(len(fit.kept))
    rejected = []
    for view, error, distance, is_kept in zip(views, fit.errors, distances, fit.kept, strict=True):
        if not is_kept:
            rejected.append(Rejected(view.name, _describe_error(error, distance / limit)))
    return rejected


def _describe_error(error: Array, excess: float) -> str:
    return (
        f"misses the other views by {np.linalg.norm(error[:3]) * 1e3:.1f} mm and "
        f"{np.degrees(np.linalg.norm(error[3:])):.2f} degrees, {np.sqrt(excess):.1f} times the allowed error"
    )


def _check_motion(views: Sequence[HandEyeView]) -> None:
    """Raise CalibrationError if the gripper's motion does not determine the camera's pose."""
    if len(views) < MIN_POSES:
        raise CalibrationError(
            f"expected at least {MIN_POSES} poses with a view of the board, found {len(views)}; 12 or more are better"
        )
    poses = np.array([view.base_from_gripper for view in views], np.float64)
    boards = np.array([view.camera_from_board for view in views], np.float64)
    if not (np.isfinite(poses).all() and np.isfinite(boards).all()):
        raise CalibrationError("expected finite poses of robot and board, found NaN or infinity")
    _check_repeats(views, poses, boards)

    # rotations about two axes give the orientation and the position, all of it
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

    # only a length in metres tells the size of the board
    positions = poses[:, :3, 3]
    if np.linalg.norm(np.std(positions, axis=0)) <= _MIN_SPREAD * np.linalg.norm(positions, axis=1).max():
        raise CalibrationError(
            "the gripper turned, but its position did not change: the size of the board does not follow; move it, too"
        )


def _check_repeats(views: Sequence[HandEyeView], poses: Array, boards: Array) -> None:
    """Refuse poses of the robot that stand still while the board moves in the camera."""
    robot_m, robot_rad = measure_lengths(to_motions(invert(poses[:-1]) @ poses[1:]))
    board_m, board_rad = measure_lengths(to_motions(invert(boards[:-1]) @ boards[1:]))
    still = (robot_m < _SAME_M) & (robot_rad < _SAME_RAD)
    moved = (board_m > _MOVED_M) | (board_rad > _MOVED_RAD)
    pairs = zip(views[1:], board_m, still & moved, strict=True)
    stale = [f"{view.name} ({moved_m * 1e3:.0f} mm)" for view, moved_m, is_stale in pairs if is_stale]
    # a single one may be a wrong view of the board, which is rejected as an outlier
    if len(stale) > 1:
        raise CalibrationError(
            f"the robot's pose is stale in {len(stale)} views: it did not change while the board moved in the image: "
            f"{', '.join(stale[:5])}; check the source of the poses"
        )


def _measure_median(errors: Array) -> tuple[float, float]:
    """Return the median lengths of errors [n, 6] in metres and radians."""
    lengths, angles = measure_lengths(errors)
    return float(np.median(lengths)), float(np.median(angles))


def _are_small(errors: Array) -> bool:
    median_m, median_rad = _measure_median(errors)
    return median_m <= _MAX_ERROR_M and median_rad <= _MAX_ERROR_RAD


def _check_agreement(observations: Observations, fit: _Fit, mounting: Mounting, sight: Sight | None) -> None:
    """Refuse views that do not agree, with the change of the input that makes them agree, if one does."""
    agree = fit.kept.sum() >= max(MIN_POSES, (1 - _MAX_REJECTED_SHARE) * len(fit.kept))
    if agree and _are_small(fit.errors):
        return
    median_m, median_rad = _measure_median(fit.errors)
    advice = _explain_disagreement(observations, mounting, sight, float(np.median(score_errors(fit.errors))))
    raise CalibrationError(
        f"the robot's poses and the views of the board do not agree: the median error is {median_m * 1e3:.1f} mm and "
        f"{np.degrees(median_rad):.2f} degrees, and {(~fit.kept).sum()} of {len(fit.kept)} views are outliers; {advice}"
    )


@dataclass(frozen=True, slots=True)
class _Guess:
    """Changed input, and the advice for each change. `inverted` is the advice for its counterpart.

    Poses fit equally well if robot and board are both inverted. Only the place of the board tells the two apart.
    """

    observations: Observations
    changes: tuple[str, ...]
    inverted: tuple[str, ...]


def _explain_disagreement(
    observations: Observations, mounting: Mounting, sight: Sight | None, score: float
) -> str:
    """Return advice for the change of the input that makes it fit, if one does."""
    # try each likely mistake, and keep the change after which the views agree best
    robot = _normalise(observations)
    best: _Guess | None = None
    best_score = np.inf
    best_scale = 1.0
    for guess in _guess_changes(observations.rescale(1.0, robot), mounting):
        a = guess.observations.a
        b = guess.observations.b
        with suppress(CalibrationError):
            x, y, scale = find_start(a, b)
            errors = measure_errors(a, scale_positions(b, scale), x, y)
            guess_score = float(np.median(score_errors(errors)))
            if _are_small(errors) and guess_score < best_score:
                best = guess
                best_score = guess_score
                best_scale = scale / robot

    # a change that helps little explains nothing
    unknown = (
        "check that each pose belongs to its image, that the robot stood still, and that nothing was moved"
    )
    if best is None or 4 * best_score > score:
        return unknown
    changes = _choose_changes(best, sight)
    if abs(best_scale - 1) > _MAX_SCALE:
        unscaled = best.observations.rescale(1.0, 1 / robot)
        changes = (*changes, _explain_scale(best_scale, unscaled, sight))
    if changes:
        return "; and ".join(changes)
    if _can_have_seen(observations.b, sight):
        return unknown
    return "check unit and board_unit"


def _lie_in_front(b: Array) -> npt.NDArray[np.bool_]:
    return np.asarray(b[:, 2, 3] > 0)


def _measure_visible(b: Array, sight: Sight | None) -> Array:
    """Return the share [n] of each board that the camera sees; without `sight`, all or nothing."""
    if sight is None:
        return _lie_in_front(b).astype(np.float64)
    return sight.measure_visible(b)


def _choose_changes(guess: _Guess, sight: Sight | None) -> tuple[str, ...]:
    """Return the changes after which the board lies where the camera sees it."""
    b = guess.observations.b
    upright = _lie_in_front(b).mean()
    turned = _lie_in_front(invert(b)).mean()
    # a board whose z axis points to the camera lies in front of it both ways: look where its corners are
    if min(upright, turned) > 1 - _MAX_REJECTED_SHARE:
        upright = _measure_visible(b, sight).mean()
        turned = _measure_visible(invert(b), sight).mean()
        if abs(upright - turned) < _MIN_DIFFERENCE:
            return (f"{'; and '.join(guess.changes)}; or else {'; and '.join(guess.inverted)}",)
    if upright > turned:
        return guess.changes
    return guess.inverted


def _guess_changes(observations: Observations, mounting: Mounting) -> Iterator[_Guess]:
    """Yield inputs with robot or board inverted, quaternions in another order, and mirrored images."""
    inverted = (
        f"they fit if inverted: use {_OTHER[mounting]}, or give base_from_gripper instead of its inverse"
    )
    board = "they fit if the board is inverted: give camera_from_board instead of board_from_camera"
    order = "they fit if the quaternions are read as w x y z: give them as x y z w"
    board_order = "they fit if the quaternions of the board are read as w x y z: give them as x y z w"
    mirrored = "they fit if the images are mirrored: turn off the camera's mirror image"
    mirror = np.diag([-1.0, 1, 1, 1])

    # the changes that each kind of input may need, and the input after them
    a = observations.a
    b = observations.b
    robots: list[tuple[tuple[str, ...], Array]] = [
        ((), a),
        ((order,), _reorder_quaternions(a)),
        ((order,), invert(_reorder_quaternions(invert(a)))),
    ]
    boards: list[tuple[tuple[str, ...], Array]] = [
        ((), b),
        ((board_order,), _reorder_quaternions(b)),
        ((mirrored,), mirror @ b @ mirror),
    ]
    for robot_changes, poses in robots:
        for board_changes, places in boards:
            changes = (*robot_changes, *board_changes)
            yield _Guess(replace(observations, a=poses, b=places), changes, (*changes, inverted, board))
            yield _Guess(
                replace(observations, a=poses, b=invert(places)), (*changes, board), (*changes, inverted)
            )


def _reorder_quaternions(poses: Array) -> Array:
    """Return poses [n, 4, 4] as if their quaternions had been given as w x y z."""
    again = poses.copy()
    quaternions = Rotation.from_matrix(poses[:, :3, :3]).as_quat()
    again[:, :3, :3] = Rotation.from_quat(np.roll(quaternions, -1, axis=1)).as_matrix()
    return again


def _check_sight(b: Array, mounting: Mounting, sight: Sight | None) -> None:
    """Refuse poses that agree although no camera can see the board there."""
    count = len(b)
    both = (
        "robot and board are both inverted: give camera_from_board instead of board_from_camera, and use "
        f"{_OTHER[mounting]} or give base_from_gripper instead of its inverse"
    )

    behind = ~_lie_in_front(b)
    if behind.mean() > _MAX_REJECTED_SHARE:
        raise CalibrationError(
            f"the board lies behind the camera in {behind.sum()} of {count} views, where it cannot be seen; "
            f"{_explain_axes(b, both)}"
        )
    # a board nearer than its own size is in a wrong unit, of which `_check_scale` tells
    if sight is not None and _measure_distance(b) < sight.radius_m / 2:
        return

    # outside the image, or so much more inside it when inverted that it must be inverted
    shares = _measure_visible(b, sight)
    turned = _measure_visible(invert(b), sight).mean()
    hidden = (shares == 0).mean() > _MAX_REJECTED_SHARE
    if hidden or (shares.mean() < _VISIBLE and turned > max(_VISIBLE, shares.mean() + _MIN_DIFFERENCE)):
        advice = both
        if turned <= _VISIBLE:
            advice = f"{_explain_axes(b, both)}; or take intrinsics of this camera"
        raise CalibrationError(
            f"the board lies at least partly outside the image in {(shares < 1).sum()} of {count} views, where it "
            f"cannot be seen; {advice}"
        )


def _explain_axes(b: Array, both: str) -> str:
    """Return advice for boards that are not in front of the camera by the direction that they lie in."""
    distances = np.linalg.norm(b[:, :3, 3], axis=1)
    if not distances.min() > 0:
        return "the positions of the board are 0: give the board in the frame of the camera"
    direction = (b[:, :3, 3] / distances[:, None]).mean(axis=0)
    axis = int(np.argmax(np.abs(direction)))
    frame = "the board in the optical frame of the camera, x right, y down, z forward"
    if axis == 2:
        return f"{both}; or, if the camera's frame has z backward, give {frame}"
    sign = "+" if direction[axis] > 0 else "-"
    return f"it lies along {sign}{'xyz'[axis]} of the camera: give {frame}"


def _check_scale(
    scale: tuple[float, float], degrees: int, observations: Observations, sight: Sight | None
) -> list[str]:
    """Refuse a board of another size than described, and return warnings.

    `scale` is the board's size as a share of the described one, and its standard deviation.
    """
    factor, deviation = scale
    share = factor - 1
    margin = float(stdtrit(degrees, 0.975)) * deviation
    text = f"the scale of the board is {factor:.4g} ± {margin:.2g} (95 %)"

    # refuse an error that is significant, or that is larger than allowed and than its own uncertainty
    is_significant = abs(share) > max(_SUSPECT_SCALE, _SCALE_SIGMAS * deviation)
    is_large = abs(share) > max(_MAX_SCALE, margin)
    if is_significant or is_large:
        raise CalibrationError(f"{_explain_scale(factor, observations, sight)}; {text}")
    # the size is unknown if a large error lies within the confidence interval
    if abs(share) + margin > _MAX_SCALE:
        raise CalibrationError(
            f"the views do not tell the size of the board: {text}, expected 1 within {_MAX_SCALE:g}; move the gripper "
            "further between views, turn it more, and take more views"
        )
    if sight is not None and not sight.can_have_seen(observations.b):
        raise CalibrationError(
            f"the board lies {_measure_distance(observations.b):.3g} m from the camera, where it cannot be detected: "
            "check unit and board_unit"
        )
    if abs(share) > _SUSPECT_SCALE:
        return [f"{text}: measure its squares and check the intrinsics"]
    return []


def _explain_scale(scale: float, observations: Observations, sight: Sight | None) -> str:
    """Return the reason why all positions of the board fit the robot's after multiplication by `scale`."""
    # a small factor that is no unit: another board, print or lens
    if not _name_unit(scale) and 0.3 < scale < 3:
        side = "larger" if scale > 1 else "smaller"
        return (
            f"by the robot's motion the board is {100 * abs(scale - 1):.1f} % {side} "
            "than described: measure its squares, and correct the board (a printer may have scaled it); intrinsics of "
            "another camera or mode do the same"
        )
    if observations.scaled:
        board = f"the board's positions are {_describe_factor(scale, 'correct board_unit')}"
    else:
        board = f"the board is described {_describe_factor(scale, 'measure a square of it')}"
    robot = f"the robot's positions are {_describe_factor(1 / scale, 'correct unit')}"

    # the board or the robot is in the wrong unit: the corrected lengths of the right one are plausible
    nearest, farthest = _REACHES_M
    reach = float(np.median(np.linalg.norm(observations.a[:, :3, 3], axis=1)))
    b = observations.b
    likely = []
    if nearest <= reach <= farthest and _can_have_seen(scale_positions(b, scale), sight):
        likely.append(board)
    if nearest <= reach / scale <= farthest and _can_have_seen(b, sight):
        likely.append(robot)
    return f"the rotations agree, the positions do not: {', or '.join(likely or [board, robot])}"


def _measure_distance(b: Array) -> float:
    return float(np.median(np.linalg.norm(b[:, :3, 3], axis=1)))


def _can_have_seen(b: Array, sight: Sight | None) -> bool:
    """Return True if boards at these poses are at a distance at which a camera detects them."""
    nearest, farthest = _DISTANCES_M
    if not nearest <= _measure_distance(b) <= farthest:
        return False
    return sight is None or sight.can_have_seen(b)


def _describe_factor(factor: float, remedy: str) -> str:
    """Say how much too small or large lengths are that must be multiplied by `factor`."""
    times = float(f"{max(factor, 1 / factor):.3g}")  # without digits that mean nothing
    side = "small" if factor > 1 else "large"
    return f"{times:g} times too {side}{_name_unit(factor)}: {remedy}"


def _name_unit(factor: float) -> str:
    """Return the mistake of a unit after which lengths must be multiplied by `factor`, "" for other factors."""
    for true, true_m in _UNITS.items():
        for read, read_m in _UNITS.items():
            if true != read and abs(factor * read_m / true_m - 1) < _UNIT_TOLERANCE:
                return f", {true} read as {read}"
    return ""


def _doubt_place(mounting: Mounting, x: Array, y: Array) -> list[str]:
    """Return a warning for a camera at a distance that another mount has. `y` is the board in the other frame."""
    camera = float(np.linalg.norm(x[:3, 3]))
    board = float(np.linalg.norm(y[:3, 3]))
    both = "the mount and the robot's poses are both inverted"
    if mounting == "eye_in_hand" and camera > _BESIDE_ROBOT_M:
        return [f"the camera lies {camera:.2f} m from the gripper: if it is beside the robot, {both}"]
    if mounting == "eye_to_hand" and camera < _ON_GRIPPER_M and board > _BESIDE_ROBOT_M:
        return [
            f"the camera lies {camera:.2f} m from the robot's base, and the board {board:.2f} m from the gripper: if "
            f"the camera is on the gripper, {both}"
        ]
    return []
