"""Measures the intrinsics of a camera from views of a board, and tells which views are missing.

The held-out error chooses the lens model. Bad views are rejected by name.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import cv2
import numpy as np
import numpy.typing as npt

from ..errors import CalibrationError
from ..geometry import Array
from .boards import MIN_CORNERS, Board
from .bundle import (
    BoardView,
    Lens,
    LensModel,
    Solution,
    adjust,
    compute_residuals,
    estimate_pose,
    guess_solution,
)

Report = Callable[[str], None]
Size = tuple[int, int]
"""Height and width of images in pixels."""

GRID = (6, 8)
"""Rows and columns of the coverage grid."""
MIN_VIEWS = 6
"""Number of views that intrinsics need, without the rejected ones."""

# views whose outer corners differ by less than this share of the width count as one
_SAME_SHARE = 0.01
# what views must cover: regions of the image, row by row
_REGIONS = (
    "top left",
    "top centre",
    "top right",
    "middle left",
    "centre",
    "middle right",
    "bottom left",
    "bottom centre",
    "bottom right",
)
# tilt to each side
_MIN_TILT_DEG = 15.0
# share of the image's width above which the board counts as seen from near
_NEAR = 0.45
# share of the image's width below which the board counts as seen from far
_FAR = 0.3
# axis and sign of the board's normal, and the view that has it
_TILTS = (
    (0, 1, "the right edge of the board farther away"),
    (0, -1, "the left edge of the board farther away"),
    (1, 1, "the bottom edge of the board farther away"),
    (1, -1, "the top edge of the board farther away"),
)

# parts into which views are divided for the held-out error
_FOLDS = 5
# factor by which a richer lens model must lower the held-out error
_SIMPLER = 1.005
# factor by which an estimated board shape must lower it
_FLAT = 1.05
# views that the board's shape needs
_MIN_SHAPE_VIEWS = 8
# multiple of the median error above which a view is bad, if the error also exceeds _BAD_PX
_BAD_RATIO = 3.0
# error in pixels above which a view may be bad
_BAD_PX = 0.3
# multiple of the median error above which a view is bad in the first pass, whose intrinsics are a guess
_GROSS_RATIO = 2 * _BAD_RATIO
# error in pixels above which a view may be bad in the first pass
_GROSS_PX = 2.0
# standard deviations above which a single corner is dropped
_OUTLIER_SIGMAS = 6.0
# share of bad views above which the views do not agree
_MAX_BAD_SHARE = 0.5
# standard deviation of the focal length, as a share of it, above which the views do not determine it
_MAX_FOCAL_SD = 0.02
# error as a share of the distance between corners: more is not noise but another board
_MAX_RMS_SHARE = 0.05
# the same before bad views are rejected
_MAX_GUESS_SHARE = 0.2
# numbers of coefficients that a user may ask for, and numbers that are tried otherwise
_COEFFICIENTS: dict[LensModel, tuple[int, ...]] = {"pinhole": (2, 4, 5, 8), "fisheye": (4,)}
_TRIED = (4, 5)


@dataclass(frozen=True, slots=True)
class Rejected:
    """A view that is not used, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class IntrinsicsResult:
    """Intrinsics of a camera with images of `size` (height, width), and how well the views agree with them.

    `residuals` are the measured minus the projected pixels. `errors_px` are their root mean squares over the corners of
    each view. `held_out_px` is the same error on views that did not take part in the fit. `sd` are standard deviations
    of fx, fy, cx and cy in pixels. `flat` is False if the shape of the board was estimated. `bend_mm` is then its
    largest offset.
    """

    size: Size
    board: Board
    solution: Solution
    views: tuple[BoardView, ...]
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
    views: Sequence[BoardView],
    board: Board,
    size: Size,
    *,
    model: LensModel = "pinhole",
    coefficients: int = 0,
    shape: bool | None = None,
    max_views: int = 40,
    rejected: Sequence[Rejected] = (),
    report: Report = lambda line: None,
) -> IntrinsicsResult:
    """Estimate the intrinsics from views of images of one `size` (height, width).

    `coefficients` fixes the number of distortion coefficients (pinhole: 2, 4, 5 or 8); 0 chooses 4 or 5 by the held-out
    error. `shape` says whether the board's shape is estimated; None decides by the held-out error. At most `max_views`
    views take part, the ones that differ most. Raises CalibrationError that names what is missing.
    """
    # views that differ, so that no pose weighs more than others
    steps = _Steps(board, size, report, list(rejected))
    chosen, repeated = choose_views(views, board, size, max_views)
    report(f"{len(chosen)} views take part, {repeated} are too like another one")
    steps.require_views(chosen)

    # a first camera with the richest lens, without the views that are grossly wrong
    lenses = _choose_lenses(model, coefficients)
    start = _with_lens(guess_solution(chosen, board.points, size, model), lenses[-1])
    _check_guess(chosen, start, board)
    kept, start = steps.drop_bad_views(chosen, start, None, gross=True)

    # choose the board's shape and the lens by the error on views that take no part
    is_bent = shape
    if is_bent is None:
        is_bent = steps.prefers_shape(kept, start)
    bent = board if is_bent else None
    lens = steps.choose_lens(kept, start, lenses, bent)

    # then the views and corners that do not fit, and the final fit without robust weights
    kept, solution = steps.drop_bad_views(kept, _with_lens(start, lens), bent)
    kept = _drop_outlying_corners(kept, solution)
    solution = adjust(kept, solution, shape=bent)

    assert solution.covariance is not None
    fx, fy, cx, cy = map(float, np.sqrt(np.diag(solution.covariance)[:4]))
    result = IntrinsicsResult(
        size,
        board,
        solution,
        tuple(kept),
        tuple(compute_residuals(solution, kept)),
        tuple(steps.rejected),
        measure_held_out(kept, solution, bent),
        not is_bent,
        (fx, fy, cx, cy),
        tuple(describe_missing(kept, board, size)),
    )
    _check(result)
    return result


def measure_coverage(views: Sequence[BoardView], size: Size) -> npt.NDArray[np.int64]:
    """Return the number of corners in each cell of GRID, for images of `size` (height, width)."""
    counts = np.zeros(GRID, np.int64)
    for view in views:
        rows, columns = _cells(view.pixels, size, GRID)
        np.add.at(counts, (rows, columns), 1)
    return counts


def _cells(pixels: Array, size: Size, grid: Size) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Return the rows [n] and columns [n] of the grid's cells in which pixels lie."""
    places = (pixels + 0.5) / (size[1], size[0]) * (grid[1], grid[0])
    columns, rows = np.clip(places.astype(np.intp), 0, (grid[1] - 1, grid[0] - 1)).T
    return rows, columns


def outline(view: BoardView, board: Board, size: Size) -> Array | None:
    """Return the outer corners [4, 2] of the board in a view, as shares of the width; None if undetermined."""
    homography = None
    if len(view.ids) >= 4:
        homography, _ = cv2.findHomography(board.points[view.ids, :2], view.pixels)
    if homography is None:
        return None

    # where the outer corners of the board would lie without distortion
    low = board.points[:, :2].min(0)
    high = board.points[:, :2].max(0)
    corners = np.array(
        [[low[0], low[1], 1], [high[0], low[1], 1], [high[0], high[1], 1], [low[0], high[1], 1]]
    )
    image = corners @ homography.T
    # a corner at infinity
    if np.abs(image[:, 2]).min() < 1e-9:
        return None
    return np.asarray(image[:, :2] / image[:, 2:] / size[1], np.float64)


def choose_views(
    views: Sequence[BoardView], board: Board, size: Size, limit: int
) -> tuple[list[BoardView], int]:
    """Return at most `limit` views that differ most, in their order, and the number that repeat another view.

    Views are compared by the outer corners of the board. The next view is the one farthest from those already chosen.
    """
    outlines = [outline(view, board, size) for view in views]
    usable = [index for index, corners in enumerate(outlines) if corners is not None]
    if not usable:
        return [], 0
    features = np.array([np.ravel(outlines[index]) for index in usable])  # type: ignore[arg-type]
    # begin with the view of the most corners, and always add the one that is farthest from all before
    most = int(np.argmax([len(views[index].ids) for index in usable]))
    chosen = [most]
    distances = _distances(features, most)
    while len(chosen) < limit and distances.max() > _SAME_SHARE:
        chosen.append(int(np.argmax(distances)))
        distances = np.minimum(distances, _distances(features, chosen[-1]))
    repeated = int(np.count_nonzero(distances <= _SAME_SHARE)) - len(chosen)
    return [views[usable[index]] for index in sorted(chosen)], repeated


def _distances(features: Array, index: int) -> Array:
    return np.asarray(np.sqrt(((features - features[index]) ** 2).mean(axis=1)), np.float64)


def _find_normals(views: Sequence[BoardView], board: Board, size: Size) -> list[Array]:
    """Return the board's normals [3], away from the camera, with the image's width as focal length."""
    normals = []
    for view in views:
        rays = (view.pixels - ((size[1] - 1) / 2, (size[0] - 1) / 2)) / float(size[1])
        points = board.points[view.ids]
        with suppress(cv2.error):  # some views have no pose
            is_solved, rotation, _ = cv2.solvePnP(points, rays, np.eye(3), None, flags=cv2.SOLVEPNP_IPPE)
            if is_solved:
                normals.append(np.asarray(cv2.Rodrigues(rotation)[0][:, 2], np.float64))
    return normals


def describe_missing(views: Sequence[BoardView], board: Board, size: Size) -> list[str]:
    """Return what is still missing, the most useful view first; nothing if coverage is complete."""
    # tilts to each side determine the focal length
    missing = []
    normals = _find_normals(views, board, size)
    sine = np.sin(np.radians(_MIN_TILT_DEG))
    for axis, sign, text in _TILTS:
        if not any(-sign * normal[axis] > sine for normal in normals):
            missing.append(f"a view with {text}, by 20 to 45 degrees")

    # corners in all regions determine the distortion: of 5 x 5 parts, those in the corners, sides and centre count
    seen = np.zeros((5, 5), np.bool_)
    for view in views:
        seen[_cells(view.pixels, size, (5, 5))] = True
    for region, is_seen in zip(_REGIONS, seen[::2, ::2].ravel(), strict=True):
        if not is_seen:
            missing.append(f"a view with the board at the {region} of the image")

    # also different distances
    outlines = [outline(view, board, size) for view in views]
    widths = [np.ptp(corners[:, 0]) for corners in outlines if corners is not None]
    if not any(width > _NEAR for width in widths):
        missing.append("a view from near: the board fills half of the width or more")
    if not any(width < _FAR for width in widths):
        missing.append("a view from farther away: the board fills a quarter of the width")
    return missing


def _choose_lenses(model: LensModel, coefficients: int) -> tuple[Lens, ...]:
    """Return the lenses to try, the richest last."""
    allowed = _COEFFICIENTS[model]
    if coefficients not in (0, *allowed):
        expected = "2, 4, 5 or 8" if model == "pinhole" else "4"
        raise CalibrationError(f"expected {expected} coefficients for {model}, found {coefficients}")
    chosen = (coefficients,) if coefficients else _TRIED
    return tuple(Lens(model, count) for count in chosen if count in allowed)


def _with_lens(solution: Solution, lens: Lens) -> Solution:
    coeffs = np.zeros(lens.count)
    known = solution.coeffs[: lens.active]
    coeffs[: len(known)] = known
    return replace(solution, lens=lens, coeffs=coeffs)


@dataclass(frozen=True, slots=True)
class _Steps:
    """The steps of one calibration that reject views, or choose by the held-out error."""

    board: Board
    size: Size
    report: Report
    rejected: list[Rejected]

    def require_views(self, views: Sequence[BoardView]) -> None:
        """Raise CalibrationError if there are too few views."""
        if len(views) >= MIN_VIEWS:
            return
        found = str(len(views))
        if self.rejected:
            reasons = "; ".join(f"{view.name}: {view.reason}" for view in self.rejected[:5])
            found += f" (rejected: {reasons})"
        missing = "; ".join(describe_missing(views, self.board, self.size)[:4])
        raise CalibrationError(
            f"expected at least {MIN_VIEWS} different views of {self.board}, found {found}; add: {missing}"
        )

    def drop_bad_views(
        self, views: Sequence[BoardView], start: Solution, shape: Board | None, gross: bool = False
    ) -> tuple[list[BoardView], Solution]:
        """Fit with robust weights, and reject views whose error is far above the median, one after the other."""
        kept = list(views)
        solution = start
        limit = len(kept) * (1 - _MAX_BAD_SHARE)
        ratio = _BAD_RATIO
        floor = _BAD_PX
        if gross:
            ratio = _GROSS_RATIO
            floor = _GROSS_PX
        # one at a time, because a bad view raises the errors of good ones
        while True:
            solution = adjust(kept, solution, shape=shape, robust=True)
            errors = [float(np.sqrt((part**2).sum(1).mean())) for part in compute_residuals(solution, kept)]
            median = float(np.median(errors))
            worst = int(np.argmax(errors))
            if errors[worst] <= max(ratio * median, floor):
                self.require_views(kept)
                return kept, solution
            if len(kept) - 1 < limit:
                raise CalibrationError(
                    f"expected most views to agree, found errors up to {errors[worst]:.1f} px with a median of "
                    f"{median:.2f} px; check that the board is {self.board}, rigid and sharp in the images"
                )
            reason = (
                f"error {errors[worst]:.2f} px, median of all {median:.2f} px: blurred, moved or misdetected"
            )
            self.rejected.append(Rejected(kept[worst].name, reason))
            del kept[worst]
            solution = replace(solution, poses=np.delete(solution.poses, worst, axis=0))

    def prefers_shape(self, views: Sequence[BoardView], start: Solution) -> bool:
        """Return True if estimating the board's shape lowers the error of held-out views."""
        # an offset that few views see is noise
        counts = np.bincount(np.concatenate([view.ids for view in views]), minlength=len(self.board.points))
        if len(views) < _MIN_SHAPE_VIEWS or np.median(counts) < _MIN_SHAPE_VIEWS / 2:
            return False
        flat = measure_held_out(views, start, None)
        bent = measure_held_out(views, start, self.board)
        self.report(f"held-out error {flat:.3f} px with a flat board, {bent:.3f} px with its shape estimated")
        return bent * _FLAT < flat

    def choose_lens(
        self, views: Sequence[BoardView], start: Solution, lenses: Sequence[Lens], shape: Board | None
    ) -> Lens:
        """Return the simplest lens whose held-out error is near the lowest."""
        errors = []
        for lens in lenses:
            error = measure_held_out(views, _with_lens(start, lens), shape)
            errors.append((error, lens))
            self.report(f"held-out error {error:.4f} px with {lens.active} coefficients")
        lowest = min(error for error, _ in errors)
        return next(lens for error, lens in errors if error <= lowest * _SIMPLER)


def _drop_outlying_corners(views: Sequence[BoardView], solution: Solution) -> list[BoardView]:
    """Drop single corners that are far off, such as those beside a reflection."""
    residuals = compute_residuals(solution, views)
    limit = max(_OUTLIER_SIGMAS * solution.sigma_px, _BAD_PX)
    kept = []
    for view, part in zip(views, residuals, strict=True):
        good = np.abs(part).max(axis=1) <= limit
        # a view that would lose too many stays whole
        if np.count_nonzero(good) >= MIN_CORNERS:
            view = BoardView(view.name, view.ids[good], view.pixels[good])
        kept.append(view)
    return kept


def measure_held_out(views: Sequence[BoardView], start: Solution, shape: Board | None) -> float:
    """Return the root mean square error in pixels on views that take no part in the fit, by cross-validation.

    The pose of a held-out view comes from half of its corners, and the error from the other half, both ways.
    """
    folds = min(_FOLDS, len(views))
    squares: list[Array] = []
    for fold in range(folds):
        held = [index for index in range(len(views)) if index % folds == fold]
        fitted = [index for index in range(len(views)) if index % folds != fold]
        part = replace(start, poses=start.poses[fitted])
        trained = adjust([views[index] for index in fitted], part, shape=shape, robust=True)
        squares += [_square_errors(views[index], trained) for index in held]
    return float(np.sqrt(np.concatenate(squares).mean()))


def _square_errors(view: BoardView, solution: Solution) -> Array:
    """Return the square errors [n] of the corners, each half with a pose from the other half."""
    squares = []
    for half in (0, 1):
        fitted = np.arange(len(view.ids)) % 2 == half
        part = BoardView(view.name, view.ids[fitted], view.pixels[fitted])
        try:
            pose = estimate_pose(part, solution)
            single = replace(solution, poses=pose[None])
            pose = adjust([part], single, fixed_camera=True).poses[0]
        except (cv2.error, CalibrationError):
            continue  # half of a few corners may lie on one line
        ids = view.ids[~fitted]
        squares.append(((solution.project(ids, pose).pixels - view.pixels[~fitted]) ** 2).sum(1))
    if not squares:
        return np.zeros(0)
    return np.concatenate(squares)


def _check_guess(views: Sequence[BoardView], start: Solution, board: Board) -> None:
    """Raise CalibrationError if most views fit no camera at all."""
    errors = [float(np.median(np.abs(part))) for part in compute_residuals(start, views)]
    spacing = _measure_spacing(views)
    if float(np.median(errors)) > max(_MAX_GUESS_SHARE * spacing, 1.0):
        raise CalibrationError(
            f"expected views of {board}, found corners {np.median(errors):.0f} px from where it would have them; check "
            "the board's description, and that all views are of one camera and one board"
        )


def _check(result: IntrinsicsResult) -> None:
    """Raise CalibrationError if the views do not determine the camera, or fit no camera."""
    solution = result.solution
    height, width = result.size
    spacing = _measure_spacing(result.views)
    if result.rms_px > max(_MAX_RMS_SHARE * spacing, 1.0):
        raise CalibrationError(
            f"expected errors of a fraction of a pixel, found {result.rms_px:.1f} px; the board is not {result.board}, "
            "or the views are of several cameras"
        )

    # views from the front alone fit any focal length
    share = max(result.sd[0], result.sd[1]) / float(solution.camera[:2].min())
    if not np.isfinite(share) or share > _MAX_FOCAL_SD:
        normals = _find_normals(result.views, result.board, result.size)
        tilt = max((np.degrees(np.arccos(np.clip(normal[2], -1, 1))) for normal in normals), default=0.0)
        raise CalibrationError(
            f"the focal length is determined to only {100 * share:.1f} % (one standard deviation); the board is tilted "
            f"by at most {tilt:.0f} degrees: add views tilted by 30 degrees and more, to each side"
        )
    if not (0 <= solution.camera[2] < width and 0 <= solution.camera[3] < height):
        raise CalibrationError(
            f"expected a principal point inside the image, found ({solution.camera[2]:.0f}, {solution.camera[3]:.0f}); "
            "add tilted views in all parts of the image"
        )


def _measure_spacing(views: Sequence[BoardView]) -> float:
    """Return the median distance in pixels from the first corner of a view to the nearest one."""
    spacings = []
    for view in views:
        distances = np.linalg.norm(view.pixels - view.pixels[0], axis=1)
        spacings.append(np.sort(distances)[1])  # the first is 0, its own
    return float(np.median(spacings))
