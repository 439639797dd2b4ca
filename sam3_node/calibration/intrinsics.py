"""Intrinsics of a camera from views of a board: lens model by held-out error, bad views left out by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import cv2
import numpy as np

from ..errors import CalibrationError
from ..geometry import Array
from .boards import MIN_CORNERS, Board
from .bundle import Lens, LensModel, Solution, View, adjust, compute_residuals, project_points
from .coverage import choose_views, describe_missing, measure_tilts
from .starts import estimate_pose, guess_solution

MIN_VIEWS = 6
"""Minimum number of views for intrinsics, after bad ones are left out."""

_FOLDS = 5
_SIMPLER = 1.005  # a richer model must lower the held-out error by more than this factor
_FLAT = 1.05  # an estimated board shape must lower it by more than this one
_MIN_SHAPE_VIEWS = 8
_BAD_RATIO, _BAD_PX = (
    3.0,
    0.3,
)  # a view is bad if its error exceeds both this multiple of the median and this distance
_OUTLIER_SIGMAS = 6.0
_MAX_BAD_SHARE = 0.5
_MAX_FOCAL_SD = 0.02  # standard deviation of the focal length, as a share of it
_MAX_RMS_SHARE = 0.05  # of the distance between corners: more is not noise but another board
_MAX_GUESS_SHARE = 0.2  # of the same, before bad views are left out
_LENSES: dict[str, tuple[Lens, ...]] = {
    "pinhole": (Lens("pinhole", (0, 1, 2, 3)), Lens("pinhole", (0, 1, 2, 3, 4))),
    "fisheye": (Lens("fisheye", (0, 1, 2, 3)),),
}
_ON_REQUEST = (Lens("pinhole", (0, 1)), Lens("pinhole", (0, 1, 2, 3, 4, 5, 6, 7)))

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Rejected:
    """A view that was left out, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class IntrinsicsResult:
    """Intrinsics of a camera with images of `size` (height, width), and how well the views agree with them.

    `errors_px` are root mean squares over the corners of each view, `residuals` the measured minus the projected
    pixels. `held_out_px` is the same error on views that did not take part in the fit. `sd` are standard deviations
    of fx, fy, cx and cy in pixels. `flat` is false if the shape of the board was estimated; `bend_mm` is then its
    largest offset.
    """

    size: tuple[int, int]
    board: Board
    solution: Solution
    views: tuple[View, ...]
    residuals: tuple[Array, ...]
    rejected: tuple[Rejected, ...]
    held_out_px: float
    flat: bool
    sd: tuple[float, float, float, float]
    advice: tuple[str, ...] = field(default=())

    @property
    def errors_px(self) -> tuple[float, ...]:
        return tuple(float(np.sqrt((part**2).sum(1).mean())) for part in self.residuals)

    @property
    def rms_px(self) -> float:
        return float(np.sqrt((np.concatenate(self.residuals) ** 2).sum(1).mean()))

    @property
    def bend_mm(self) -> float:
        return float(np.linalg.norm(self.solution.points - self.board.points, axis=1).max() * 1e3)


def calibrate_intrinsics(
    views: Sequence[View],
    board: Board,
    size: tuple[int, int],
    *,
    model: LensModel = "pinhole",
    coefficients: int = 0,
    shape: bool | None = None,
    max_views: int = 40,
    rejected: Sequence[Rejected] = (),
    report: Report = lambda line: None,
) -> IntrinsicsResult:
    """Estimate the intrinsics from views of images of one `size` (height, width).

    `coefficients` fixes the number of distortion coefficients (pinhole: 2, 4, 5 or 8); 0 chooses 4 or 5 by the
    held-out error. `shape` estimates the board's shape, or not; None decides by the held-out error. Of more than
    `max_views` views those that differ most take part. Raises CalibrationError that names what is missing.
    """
    dropped = list(rejected)
    chosen, repeated = choose_views(views, board, size, max_views)
    report(f"{len(chosen)} views take part, {repeated} are too like another one")
    _require_views(chosen, board, size, dropped)
    lenses = _choose_lenses(model, coefficients)
    start = _with_lens(guess_solution(chosen, board.points, size, model), lenses[-1])
    _check_guess(chosen, start, board)
    kept, start = _drop_bad_views(chosen, start, board, False, dropped, gross=True)
    _require_views(kept, board, size, dropped)
    flat = not (shape if shape is not None else _prefers_shape(kept, start, board, report))
    lens, _ = _choose_lens(kept, start, board, lenses, flat, report)
    kept, solution = _drop_bad_views(kept, _with_lens(start, lens), board, not flat, dropped)
    _require_views(kept, board, size, dropped)
    kept = _drop_outlying_corners(kept, solution)
    solution = adjust(kept, solution, printed=board.points, pitch_m=board.pitch_m, shape=not flat)
    result = IntrinsicsResult(
        size,
        board,
        solution,
        tuple(kept),
        tuple(compute_residuals(solution, kept)),
        tuple(dropped),
        measure_held_out(kept, solution, board, shape=not flat),
        flat,
        _standard_deviations(solution),
        tuple(describe_missing(kept, board, size)),
    )
    _check(result)
    return result


def _choose_lenses(model: LensModel, coefficients: int) -> tuple[Lens, ...]:
    candidates = _LENSES[model]
    if not coefficients:
        return candidates
    for lens in (*candidates, *(_ON_REQUEST if model == "pinhole" else ())):
        if len(lens.active) == coefficients:
            return (lens,)
    expected = "2, 4, 5 or 8" if model == "pinhole" else "4"
    raise CalibrationError(f"expected {expected} coefficients for {model}, found {coefficients}")


def _with_lens(solution: Solution, lens: Lens) -> Solution:
    coeffs = np.zeros(lens.count)
    active = [index for index in lens.active if index < len(solution.coeffs)]
    coeffs[active] = solution.coeffs[active]
    return replace(solution, lens=lens, coeffs=coeffs)


def _require_views(
    views: Sequence[View], board: Board, size: tuple[int, int], rejected: Sequence[Rejected]
) -> None:
    if len(views) >= MIN_VIEWS:
        return
    reasons = "; ".join(f"{view.name}: {view.reason}" for view in rejected[:5])
    raise CalibrationError(
        f"expected at least {MIN_VIEWS} different views of {board}, found {len(views)}"
        + (f" (left out: {reasons})" if reasons else "")
        + f"; add: {'; '.join(describe_missing(views, board, size)[:4])}"
    )


def _drop_bad_views(
    views: Sequence[View],
    start: Solution,
    board: Board,
    shape: bool,
    rejected: list[Rejected],
    gross: bool = False,
) -> tuple[list[View], Solution]:
    """Fit with robust weights and leave out views whose error is far above the median, one after the other."""
    kept, solution = list(views), start
    limit = len(kept) * (1 - _MAX_BAD_SHARE)
    ratio, floor = (2 * _BAD_RATIO, 2.0) if gross else (_BAD_RATIO, _BAD_PX)
    while True:
        solution = adjust(
            kept, solution, printed=board.points, pitch_m=board.pitch_m, shape=shape, robust=True
        )
        errors = [float(np.sqrt((part**2).sum(1).mean())) for part in compute_residuals(solution, kept)]
        median = float(np.median(errors))
        worst = int(np.argmax(errors))
        if errors[worst] <= max(ratio * median, floor):
            return kept, solution
        if len(kept) - 1 < limit:
            raise CalibrationError(
                f"expected most views to agree, found errors up to {errors[worst]:.1f} px with a median of "
                f"{median:.2f} px; check that the board is {board}, rigid and sharp in the images"
            )
        reason = f"error {errors[worst]:.2f} px, median of all {median:.2f} px: blurred, moved or misdetected"
        rejected.append(Rejected(kept[worst].name, reason))
        del kept[worst]
        solution = replace(solution, poses=np.delete(solution.poses, worst, axis=0))


def _drop_outlying_corners(views: Sequence[View], solution: Solution) -> list[View]:
    """Leave out single corners that are far off, such as those beside a reflection."""
    residuals = compute_residuals(solution, views)
    limit = max(_OUTLIER_SIGMAS * solution.sigma_px, _BAD_PX)
    kept = []
    for view, part in zip(views, residuals, strict=True):
        good = np.abs(part).max(axis=1) <= limit
        enough = np.count_nonzero(good) >= MIN_CORNERS
        kept.append(View(view.name, view.ids[good], view.pixels[good]) if enough else view)
    return kept


def _prefers_shape(views: Sequence[View], start: Solution, board: Board, report: Report) -> bool:
    """Return True if estimating the board's shape lowers the error of held-out views."""
    counts = np.bincount(np.concatenate([view.ids for view in views]), minlength=len(board.points))
    if len(views) < _MIN_SHAPE_VIEWS or np.median(counts) < _MIN_SHAPE_VIEWS / 2:
        return False
    flat = measure_held_out(views, start, board, shape=False)
    bent = measure_held_out(views, start, board, shape=True)
    report(f"held-out error {flat:.3f} px with a flat board, {bent:.3f} px with its shape estimated")
    return bent * _FLAT < flat


def _choose_lens(
    views: Sequence[View], start: Solution, board: Board, lenses: Sequence[Lens], flat: bool, report: Report
) -> tuple[Lens, float]:
    """Return the simplest lens whose held-out error is near the lowest, and that error."""
    errors = []
    for lens in lenses:
        error = measure_held_out(views, _with_lens(start, lens), board, shape=not flat)
        errors.append((error, lens))
        report(f"held-out error {error:.4f} px with {len(lens.active)} coefficients")
    lowest = min(error for error, _ in errors)
    return next((lens, error) for error, lens in errors if error <= lowest * _SIMPLER)


def measure_held_out(views: Sequence[View], start: Solution, board: Board, *, shape: bool) -> float:
    """Return the root mean square error in pixels on views that take no part in the fit, by cross-validation.

    The pose of a held-out view comes from half of its corners, and the error from the other half, both ways.
    """
    folds = min(_FOLDS, len(views))
    squares: list[Array] = []
    for fold in range(folds):
        held = [index for index in range(len(views)) if index % folds == fold]
        fitted = [index for index in range(len(views)) if index % folds != fold]
        trained = adjust(
            [views[index] for index in fitted],
            replace(start, poses=start.poses[fitted]),
            printed=board.points,
            pitch_m=board.pitch_m,
            shape=shape,
            robust=True,
        )
        squares += [_square_errors(views[index], trained) for index in held]
    return float(np.sqrt(np.concatenate(squares).mean()))


def _square_errors(view: View, solution: Solution) -> Array:
    """Return the square errors [n] of the corners, each half with a pose from the other half."""
    squares = []
    for half in (0, 1):
        fitted = np.arange(len(view.ids)) % 2 == half
        part = View(view.name, view.ids[fitted], view.pixels[fitted])
        try:
            pose = estimate_pose(part, solution)
            single = replace(solution, poses=pose[None])
            pose = adjust([part], single, printed=solution.points, pitch_m=1.0, fixed_camera=True).poses[0]
        except (cv2.error, CalibrationError):
            continue  # half of a few corners may lie on one line
        ids = view.ids[~fitted]
        found = project_points(
            solution.points[ids], pose, solution.camera, solution.coeffs, solution.lens.model
        )
        squares.append(((found.pixels - view.pixels[~fitted]) ** 2).sum(1))
    return np.concatenate(squares) if squares else np.zeros(0)


def _check_guess(views: Sequence[View], start: Solution, board: Board) -> None:
    """Raise CalibrationError if most views fit no camera at all."""
    errors = [float(np.median(np.abs(part))) for part in compute_residuals(start, views)]
    spacing = float(np.median([_corner_distance(view) for view in views]))
    if float(np.median(errors)) > max(_MAX_GUESS_SHARE * spacing, 1.0):
        raise CalibrationError(
            f"expected views of {board}, found corners {np.median(errors):.0f} px from where it would have them; check "
            "the board's description, and that all views are of one camera and one board"
        )


def _standard_deviations(solution: Solution) -> tuple[float, float, float, float]:
    assert solution.covariance is not None
    fx, fy, cx, cy = np.sqrt(np.diag(solution.covariance)[:4])
    return float(fx), float(fy), float(cx), float(cy)


def _check(result: IntrinsicsResult) -> None:
    """Raise CalibrationError if the views do not determine the camera, or fit no camera."""
    solution = result.solution
    height, width = result.size
    spacing = float(np.median([_corner_distance(view) for view in result.views]))
    if result.rms_px > max(_MAX_RMS_SHARE * spacing, 1.0):
        raise CalibrationError(
            f"expected errors of a fraction of a pixel, found {result.rms_px:.1f} px; the board is not {result.board}, "
            "or the views are of several cameras"
        )
    share = max(result.sd[0], result.sd[1]) / float(solution.camera[:2].min())
    if not np.isfinite(share) or share > _MAX_FOCAL_SD:
        tilts = measure_tilts(result.views, result.board, result.size)
        raise CalibrationError(
            f"the focal length is determined to only {100 * share:.1f} % (one standard deviation); the board is tilted "
            f"by at most {max(tilts):.0f} degrees: add views tilted by 30 degrees and more, to each side"
        )
    if not (0 <= solution.camera[2] < width and 0 <= solution.camera[3] < height):
        raise CalibrationError(
            f"expected a principal point inside the image, found ({solution.camera[2]:.0f}, {solution.camera[3]:.0f}); "
            "add tilted views in all parts of the image"
        )


def _corner_distance(view: View) -> float:
    return float(np.sort(np.linalg.norm(view.pixels - view.pixels[0], axis=1))[1])
