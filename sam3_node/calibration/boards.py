"""Describes calibration boards, finds their corners in images, and explains why a board is not found.

A board's frame lies in its printed plane, in metres: x to the right, y down, z away from the viewer. The origin of a
chessboard is its first inner corner. The origin of the other boards is the top-left corner of the printed pattern.

Markers may lie in several ways on boards with the same description. Each image tells which of them it shows:
- ChArUco boards of even rows have a marker at the top left if OpenCV before 4.6 or calib.io drew them (legacy).
- Kalibr's AprilGrid counts its tags from the bottom left, turns each by half a turn, and may have a border of two bits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from typing import Any, Literal, NamedTuple, cast

import cv2
import numpy as np
import numpy.typing as npt

from ..errors import CalibrationError
from ..geometry import Array

BoardKind = Literal["charuco", "chessboard", "apriltag"]
GreyImage = npt.NDArray[np.uint8]
Indices = npt.NDArray[np.intp]
Quads = npt.NDArray[np.float32]

MAX_SIDE = 64
"""Largest number of columns and of rows."""
MIN_CORNERS = 6
"""Number of corners that a view needs."""

BOARD_FORMS = (
    "charuco:7x5:30mm:21mm:4x4_50 (squares across and down, side of a square, side of a marker, dictionary), "
    "chessboard:9x6:25mm (inner corners across and down, side of a square) or "
    "apriltag:6x5:22mm:6mm[:36h11] (tags across and down, side of a tag, gap between tags, family); "
    "with markers, :first=100 at the end gives the id of the first one"
)
"""Text forms of boards, for error messages."""

_LENGTH = r"(\d+(?:\.\d+)?)mm"
_FIRST = r"(?::first=(\d{1,6}))?"
_FORMS = {
    "charuco": re.compile(rf"(\d+)x(\d+):{_LENGTH}:{_LENGTH}:(\w+){_FIRST}"),
    "chessboard": re.compile(rf"(\d+)x(\d+):{_LENGTH}()()()"),
    "apriltag": re.compile(rf"(\d+)x(\d+):{_LENGTH}:{_LENGTH}(?::(\w+))??{_FIRST}"),
}
# OpenCV's dictionaries of ArUco: bits across a marker, and numbers of markers
_BITS = (4, 5, 6, 7)
_SIZES = (50, 100, 250, 1000)
_ARUCO = [f"{bits}X{bits}_{count}" for bits in _BITS for count in _SIZES]
_OTHERS = [
    "ARUCO_ORIGINAL",
    "ARUCO_MIP_36h12",
    "APRILTAG_16h5",
    "APRILTAG_25h9",
    "APRILTAG_36h10",
    "APRILTAG_36h11",
]
# OpenCV's names of dictionaries, by the short names of the text form
_DICTIONARIES = {re.sub("^(aruco_mip|apriltag)_", "", name.lower()): name for name in [*_ARUCO, *_OTHERS]}
# the largest dictionaries, which contain the smaller ones of their bits
_FAMILIES = [*(f"{bits}X{bits}_{_SIZES[-1]}" for bits in _BITS), *_OTHERS]
# what other programs write before a dictionary's short name
_NAME_PREFIX = re.compile(r"^(?:dict_)?(?:aruco_mip_|april_?tag_?|tag_?|t)?(?=\d|aruco_)")

# half of the window in which a chessboard's corner is refined, as a share of the smallest distance between corners: a
# larger window reaches the next corner
_WINDOW_SHARE = 0.35
# the same for a tag, as a share of its side, which is 6 to 10 cells
_TAG_WINDOW_SHARE = 0.1
# largest half of a window
_MAX_WINDOW_PX = 15
# when the refinement ends: after 60 steps, or below 0.0001 pixels
_SUBPIX_CRITERIA = (cv2.TERM_CRITERIA_COUNT + cv2.TERM_CRITERIA_EPS, 60, 1e-4)

# largest misfit, in sides of a marker, of a layout that explains an image
_FITS = 0.2
# largest misfit of a layout that is accepted: a wide lens bends straight rows by half of a side
_MAX_MISFIT = 1.0
# misfits of two layouts that an image cannot tell apart differ by less, or by less than a third
_SAME_MISFIT = 0.02
# columns of a board that is guessed from its markers, at most
_MAX_GUESSED_COLUMNS = 20
# longest side of the enlarged image in which tags are searched
_MAX_SEARCHED_PX = 2600


@dataclass(frozen=True, slots=True)
class Corners:
    """Corners of a board in one image. `ids` int [n] index `Board.points`, `pixels` are float64 [n, 2]."""

    ids: Indices
    pixels: Array


class Markers(NamedTuple):
    """Markers in one image. `ids` are int [m], `quads` float32 [m, 4, 2], clockwise from a marker's first corner."""

    ids: Indices
    quads: Quads


_NO_MARKERS = Markers(np.zeros(0, np.intp), np.zeros((0, 4, 2), np.float32))


class _Layout(NamedTuple):
    """One way in which the markers of a board may lie, in the order of their ids."""

    plane: Array
    """Corners [m, 4, 2] of the markers in metres, in the order of Markers.quads."""
    slots: Indices
    """Index [m, 4] in Board.points of each corner; empty for charuco."""
    legacy: bool = False
    """True if the top-left square of an even ChArUco board has a marker."""
    from_below: bool = False
    """True if the ids of a grid of tags begin at the bottom left."""


@dataclass(frozen=True)
class Board:
    """A printed board of `columns` x `rows` (squares for charuco, inner corners for chessboard, tags for apriltag).

    `pitch_m` is the side of a square or of a tag. `second_m` is the side of a marker, or the gap between tags.
    `dictionary` is OpenCV's name or a part of it, in upper or lower case: DICT_APRILTAG_36h11, 36h11. `first` is the id
    of the first marker.
    """

    kind: BoardKind
    columns: int
    rows: int
    pitch_m: float
    second_m: float = 0.0
    dictionary: str = ""
    first: int = 0

    @classmethod
    def parse(cls, text: str) -> Board:
        """Read a board from its text form, see BOARD_FORMS. Raises CalibrationError."""
        kind, _, rest = text.partition(":")
        match = _FORMS[kind].fullmatch(rest) if kind in _FORMS else None
        if match is None:
            raise CalibrationError(f"board {text!r}: expected {BOARD_FORMS}")
        # lengths are in mm; Kalibr and the AprilTag library print the family 36h11
        columns, rows, pitch, second, dictionary, first = match.groups()
        if kind == "apriltag":
            dictionary = dictionary or "36h11"
        return cls(
            cast(BoardKind, kind),
            int(columns),
            int(rows),
            float(pitch) / 1e3,
            float(second or 0) / 1e3,
            dictionary or "",
            int(first or 0),
        )

    def __post_init__(self) -> None:
        if self.kind != "chessboard":
            object.__setattr__(self, "dictionary", _name_dictionary(self.dictionary))
        # one tag has four corners; squares need three in a row for two inner corners
        smallest = 1 if self.kind == "apriltag" else 3
        fits = smallest <= min(self.columns, self.rows) and max(self.columns, self.rows) <= MAX_SIDE
        if not (fits and self.pitch_m > 0):
            raise self._wrong(f"expected {smallest} to {MAX_SIDE} columns and rows, and a side above 0")
        if self.kind == "charuco" and not 0 < self.second_m < self.pitch_m:
            raise self._wrong("expected markers smaller than the squares")
        if self.kind == "apriltag" and self.second_m <= 0:
            raise self._wrong("expected a gap between the tags")
        if self.kind == "chessboard":
            return
        size = len(self._dictionary.bytesList)
        needed = self.first + self._marker_count
        if needed > size:
            raise self._wrong(
                f"{self.dictionary} has {size} markers, the board needs {needed}; choose a larger dictionary"
            )

    def _wrong(self, text: str) -> CalibrationError:
        return CalibrationError(f"board {self}: {text}")

    def __str__(self) -> str:
        def length(metres: float) -> str:
            return f"{round(metres * 1e3, 6):g}mm"

        parts = [self.kind, f"{self.columns}x{self.rows}", length(self.pitch_m)]
        if self.kind != "chessboard":
            parts += [length(self.second_m), _shorten(self.dictionary)]
        if self.first:
            parts.append(f"first={self.first}")
        return ":".join(parts)

    @cached_property
    def points(self) -> Array:
        """Corners [p, 3] in the frame of the board, in metres; z is 0."""
        if self.kind == "apriltag":
            corners = np.concatenate([np.asarray(tag, np.float64) for tag in self._aruco.getObjPoints()])
            return corners.reshape(-1, 3)
        # a chessboard is described by its inner corners and begins at the first, a ChArUco board by its squares
        first = 0
        columns = self.columns
        rows = self.rows
        if self.kind == "charuco":
            first = 1
            columns -= 1
            rows -= 1
        grid = np.mgrid[first : first + columns, first : first + rows].T.reshape(-1, 2) * self.pitch_m
        return np.concatenate([grid, np.zeros((len(grid), 1))], axis=1)

    @property
    def size_m(self) -> tuple[float, float]:
        """Width and height of the printed pattern."""
        if self.kind == "apriltag":
            step = self.pitch_m + self.second_m
            return self.columns * step - self.second_m, self.rows * step - self.second_m
        extra = 1 if self.kind == "chessboard" else 0
        return (self.columns + extra) * self.pitch_m, (self.rows + extra) * self.pitch_m

    @property
    def has_unique_pose(self) -> bool:
        """False for a chessboard that looks the same after half a turn: its pose has two solutions."""
        return self.kind != "chessboard" or (self.columns + self.rows) % 2 == 1

    def detect(self, image: npt.NDArray[np.uint8]) -> Corners | None:
        """Find the board in an image [h, w] or BGR [h, w, 3]; None with fewer than MIN_CORNERS corners."""
        grey = _to_grey(image)
        if self.kind == "chessboard":
            corners = self._find_chessboard(grey)
        else:
            corners = self._find_marked(grey)
        # corners on one line have no pose
        if corners is None or len(corners.ids) < MIN_CORNERS or _are_collinear(self.points[corners.ids]):
            return None
        return corners

    def markers(self) -> Iterator[tuple[Array, npt.NDArray[np.bool_]]]:
        """Yield the corners [4, 3] in metres of each marker, and its cells [k, k], True where they are black."""
        cells = int(self._dictionary.markerSize) + 2
        tags = zip(self._aruco.getIds().ravel(), self._aruco.getObjPoints(), strict=True)
        for identifier, corners in tags:
            image = cv2.aruco.generateImageMarker(self._dictionary, int(identifier), cells)
            yield np.asarray(corners, np.float64).reshape(4, 3), image < 128

    def detect_markers(self, grey: GreyImage) -> Markers:
        """Return all markers of the board's dictionary in an image.

        Markers are searched with a border of one bit and of two. A tag with a border of two bits is also found with one
        bit, inside its true corners, so the border that fits the board counts. Tags are searched in the enlarged image,
        too: black squares that touch a tag cut two pixels off its corners, which is too much of a small one.
        """
        enlargements = [1]
        if self.kind == "apriltag" and 2 * max(grey.shape) <= _MAX_SEARCHED_PX:
            enlargements.append(2)
        markers_found = _NO_MARKERS
        for enlarge in enlargements:
            other = self._detect_border(grey, enlarge)
            markers_found = max(markers_found, other, key=lambda markers: len(markers.ids))
            # four of five are enough
            if 5 * len(markers_found.ids) >= 4 * self._marker_count:
                break
        return markers_found

    def _detect_border(self, grey: GreyImage, enlarge: int) -> Markers:
        """Return the markers with a border of one bit or of two, whichever finds more or fits the board better."""
        tags = self.kind == "apriltag"
        single = _detect_markers(self._dictionary, grey, 1, enlarge, refined=tags)
        if not tags and 5 * len(single.ids) >= 4 * self._marker_count:
            return single
        double = _detect_markers(self._dictionary, grey, 2, enlarge, refined=tags)

        # about as many tags both ways: the corners of one border fit the board, those of the other do not
        fewer, more = sorted((single, double), key=lambda markers: len(markers.ids))
        alike = tags and 5 * len(fewer.ids) >= 4 * len(more.ids) and self.select(fewer)[1].any()
        if alike and self.select(more)[1].any():
            return min(single, double, key=self.measure_misfit)
        if len(single.ids) == len(double.ids):
            return single
        return more

    def choose_layout(self, markers: Markers, grey: GreyImage) -> _Layout | None:
        """Return the layout in which the markers of the board lie in an image; None if they fit no layout.

        The orders of tags from the top left and from the bottom left are reflections of each other, so two rows and two
        columns tell them apart. If several layouts fit the markers, those lose that expect further markers inside the
        image. If several are left, Kalibr's black squares between the tags decide; a ChArUco board that may be legacy
        or not has no layout then.
        """
        index, on_board = self.select(markers)
        if not on_board.any() or self._is_part_of_another(markers):
            return None
        quads = markers.quads[on_board]
        layouts = self._layouts
        misfits = [_measure_misfit(layout.plane[index], quads) for layout in layouts]
        best = min(misfits)
        if not best < _MAX_MISFIT:
            return None

        # layouts that fit about as well as the best one
        limit = max(1.5 * best, best + _SAME_MISFIT)
        alike = [layout for layout, misfit in zip(layouts, misfits, strict=True) if misfit <= limit]
        if len(alike) > 1:
            missing = [_count_missing(layout.plane, index, quads, grey.shape) for layout in alike]
            alike = [layout for layout, count in zip(alike, missing, strict=True) if count == min(missing)]

        if self.kind == "charuco":
            if len(alike) > 1:
                return None
            return alike[0]
        # only Kalibr counts from below, and prints squares
        below = [layout for layout in alike if layout.from_below]
        if 0 < len(below) < len(alike) and _has_squares(quads, self, grey):
            return below[0]
        return alike[0]

    def select(self, markers: Markers) -> tuple[Indices, npt.NDArray[np.bool_]]:
        """Return the index of each marker that is on the board, and which of the markers these are."""
        index = markers.ids - self.first
        on_board = (index >= 0) & (index < self._marker_count)
        return index[on_board], on_board

    def _is_part_of_another(self, markers: Markers) -> bool:
        """Return True if the markers fit a board with another first id, of which this board has a part."""
        lowest = int(markers.ids.min())
        beyond = markers.ids >= self.first + self._marker_count
        if beyond.sum() < 3 or not lowest <= markers.ids.max() < lowest + self._marker_count:
            return False
        return replace(self, first=lowest).measure_misfit(markers) < _FITS

    def measure_misfit(self, markers: Markers) -> float:
        """Return the misfit of the markers of the board in the layout that fits best, in sides of a marker."""
        index, on_board = self.select(markers)
        return min(_measure_misfit(layout.plane[index], markers.quads[on_board]) for layout in self._layouts)

    @property
    def _marker_count(self) -> int:
        count = self.columns * self.rows
        if self.kind == "charuco":
            return count // 2
        return count

    @cached_property
    def _dictionary(self) -> Any:
        return cv2.aruco.getPredefinedDictionary(getattr(cv2.aruco, f"DICT_{self.dictionary}"))

    @cached_property
    def _aruco(self) -> Any:
        kind = cv2.aruco.CharucoBoard if self.kind == "charuco" else cv2.aruco.GridBoard
        ids = np.arange(self.first, self.first + self._marker_count)
        return kind((self.columns, self.rows), self.pitch_m, self.second_m, self._dictionary, ids)

    @cached_property
    def _legacy(self) -> Any:
        board = replace(self)._aruco
        board.setLegacyPattern(True)
        return board

    @cached_property
    def _layouts(self) -> list[_Layout]:
        """The layouts in which the markers may lie, the one that this package prints first."""
        # boards of odd rows are the same, legacy or not
        if self.kind == "charuco":
            no_slots = np.zeros((0, 4), np.intp)
            layouts = [_Layout(_find_plane(self._aruco), no_slots)]
            if self.rows % 2 == 0:
                layouts.append(_Layout(_find_plane(self._legacy), no_slots, legacy=True))
            return layouts

        # a tag of the AprilTag library equals OpenCV's after half a turn
        places = np.arange(self._marker_count).reshape(self.rows, self.columns)
        layouts = []
        for turn in (0, 2, 1, 3):
            for from_below in (False, True):
                order = places[::-1] if from_below else places
                slots = (4 * order.reshape(-1, 1) + np.roll(np.arange(4), turn)).astype(np.intp)
                layouts.append(_Layout(self.points[slots][..., :2], slots, from_below=from_below))
        return layouts

    @cached_property
    def _charuco_detectors(self) -> tuple[Any, Any]:
        return cv2.aruco.CharucoDetector(self._aruco), cv2.aruco.CharucoDetector(self._legacy)

    def _find_marked(self, grey: GreyImage) -> Corners | None:
        markers = self.detect_markers(grey)
        if not len(markers.ids):
            return None
        layout = self.choose_layout(markers, grey)
        if layout is None:
            return None

        # of a ChArUco board, the corners between the squares
        if self.kind == "charuco":
            detector = self._charuco_detectors[layout.legacy]
            quads = [quad[None] for quad in markers.quads]
            pixels, ids, _, _ = detector.detectBoard(grey, None, None, quads, markers.ids.astype(np.int32))
            if ids is None:
                return None
            corners = np.asarray(pixels, np.float64).reshape(-1, 2)
            return Corners(np.asarray(ids).ravel().astype(np.intp), corners)

        # of tags, their own corners
        index, on_board = self.select(markers)
        refined = [_refine_tag(quad, grey) for quad in markers.quads[on_board]]
        slots = layout.slots[index].ravel()
        order = np.argsort(slots)
        return Corners(slots[order], np.concatenate(refined)[order])

    def _find_chessboard(self, grey: GreyImage) -> Corners | None:
        size = (self.columns, self.rows)
        flags = cv2.CALIB_CB_ADAPTIVE_THRESH | cv2.CALIB_CB_NORMALIZE_IMAGE
        # the fast check avoids seconds of search in images without a board
        is_found, corners = cv2.findChessboardCorners(grey, size, flags=flags | cv2.CALIB_CB_FAST_CHECK)
        if not is_found:
            is_found, corners = cv2.findChessboardCornersSB(grey, size, flags=cv2.CALIB_CB_NORMALIZE_IMAGE)
        if not is_found:
            return None

        # refine the corners in a window that does not reach the next ones
        grid = np.asarray(corners, np.float32).reshape(self.rows, self.columns, 2)
        spacing = min(np.linalg.norm(np.diff(grid, axis=axis), axis=2).min() for axis in (0, 1))
        window = int(np.clip(_WINDOW_SHARE * spacing, 2, _MAX_WINDOW_PX))
        fine = cv2.cornerSubPix(grey, grid.reshape(-1, 1, 2), (window, window), (-1, -1), _SUBPIX_CRITERIA)
        refined = np.asarray(fine, np.float64).reshape(self.rows, self.columns, 2)
        pixels = _orient(refined, grey, self.has_unique_pose).reshape(-1, 2)
        return Corners(np.arange(len(pixels)), pixels)


def _find_plane(board: Any) -> Array:
    """Return the corners [m, 4, 2] of the markers of OpenCV's board."""
    return np.asarray(board.getObjPoints(), np.float64)[..., :2]


def _refine_tag(quad: Quads, grey: GreyImage) -> Array:
    """Refine the corners [4, 2] of a tag in a window that stays inside its border cells.

    OpenCV's own refinements are worse: one takes too large a window, the other is off by half a pixel.
    """
    side = float(np.linalg.norm(quad - np.roll(quad, 1, axis=0), axis=1).min())
    window = int(np.clip(_TAG_WINDOW_SHARE * side, 3, _MAX_WINDOW_PX))
    fine = cv2.cornerSubPix(grey, quad.reshape(-1, 1, 2).copy(), (window, window), (-1, -1), _SUBPIX_CRITERIA)
    return np.asarray(fine, np.float64).reshape(4, 2)


def _are_collinear(points: Array) -> bool:
    spread = np.linalg.svd(points[:, :2] - points[:, :2].mean(0), compute_uv=False)
    return bool(spread[1] < 1e-6 * spread[0]) or len(np.unique(points, axis=0)) < 4


def _orient(grid: Array, grey: GreyImage, unique: bool) -> Array:
    """Order corners [rows, columns, 2] as on the printed board: right-handed, the top-left square inside is black."""
    # OpenCV may begin at any corner
    across = grid[0, -1] - grid[0, 0]
    down = grid[-1, 0] - grid[0, 0]
    if across[0] * down[1] - across[1] * down[0] < 0:
        grid = grid[:, ::-1]
    if not unique:
        return grid

    # compare the squares at both ends
    first = grid[:2, :2].reshape(-1, 2).mean(0)
    last = grid[-2:, -2:].reshape(-1, 2).mean(0)
    brightness = cv2.getRectSubPix(grey, (3, 3), tuple(map(float, first))).mean()
    turned = cv2.getRectSubPix(grey, (3, 3), tuple(map(float, last))).mean()
    if brightness > turned:
        return grid[::-1, ::-1]
    return grid


def _name_dictionary(name: str) -> str:
    """Return OpenCV's name of a dictionary without its DICT_. Raises CalibrationError with the nearest names."""
    short = _NAME_PREFIX.sub("", name.lower())
    if short not in _DICTIONARIES:
        near = get_close_matches(short, _DICTIONARIES, 3, 0.5) or ["4x4_50", "5x5_100", "36h11"]
        raise CalibrationError(f"board: expected a dictionary such as {', '.join(near)}, found {name[:30]}")
    return _DICTIONARIES[short]


def _shorten(dictionary: str) -> str:
    return next(short for short, name in _DICTIONARIES.items() if name == dictionary)


def _to_grey(image: npt.NDArray[np.uint8]) -> GreyImage:
    if image.ndim == 2:
        return image
    return np.asarray(cv2.cvtColor(image, cv2.COLOR_BGR2GRAY), np.uint8)


def _detect_markers(
    dictionary: Any, grey: GreyImage, border: int = 1, enlarge: int = 1, refined: bool = False
) -> Markers:
    """Return the markers of a dictionary in an image, enlarged by a factor, with a border of so many bits."""
    parameters = cv2.aruco.DetectorParameters()
    parameters.markerBorderBits = border
    # lines along the sides are half a pixel off, but within the reach of _refine_tag
    if refined:
        parameters.cornerRefinementMethod = cv2.aruco.CORNER_REFINE_CONTOUR
    large = cv2.resize(grey, None, fx=enlarge, fy=enlarge, interpolation=cv2.INTER_CUBIC)
    quads, ids, _ = cv2.aruco.ArucoDetector(dictionary, parameters).detectMarkers(large)
    if ids is None:
        return _NO_MARKERS
    # pixel coordinates are of centres
    pixels = (np.asarray(quads, np.float64).reshape(-1, 4, 2) + 0.5) / enlarge - 0.5
    return Markers(np.asarray(ids).ravel().astype(np.intp), pixels.astype(np.float32))


def _measure_misfit(plane: Array, quads: Quads) -> float:
    """Return the median distance of markers [m, 4, 2] from their places in a plane, in sides of a marker.

    The places are mapped by the homography that fits best.
    """
    placed = _place(plane, quads, plane)
    side = np.median(np.linalg.norm(quads - np.roll(quads, 1, axis=1), axis=2))
    misfit = float(np.median(np.linalg.norm(placed - quads.reshape(-1, 2), axis=1)) / side)
    if not np.isfinite(misfit):
        return float("inf")
    return misfit


def _place(plane: Array, quads: Quads, places: Array) -> Array:
    """Map places [n, 4, 2] as markers [m, 4, 2] of a plane lie in the image. Return pixels [4 n, 2], nan for no map."""
    homography, _ = cv2.findHomography(plane.reshape(-1, 1, 2), quads.reshape(-1, 1, 2))
    if homography is None or not np.isfinite(homography).all():
        return np.full((4 * len(places), 2), np.nan)
    pixels = cv2.perspectiveTransform(places.reshape(-1, 1, 2), homography)
    return np.asarray(pixels, np.float64).reshape(-1, 2)


def _count_missing(plane: Array, index: Indices, quads: Quads, shape: tuple[int, ...]) -> int:
    """Return how many markers are not among `index`, although a layout has them inside the image."""
    pixels = _place(plane[index], quads, plane).reshape(-1, 4, 2)
    inside = np.all((pixels > 0) & (pixels < (shape[1] - 1, shape[0] - 1)), axis=(1, 2))
    return int(np.delete(inside, index).sum())


def _has_squares(quads: Quads, board: Board, grey: GreyImage) -> bool:
    """Return True if black squares touch the corners of tags [m, 4, 2], as on Kalibr's AprilGrid."""
    # spots in the frame of a tag whose side is 1: where squares would be, on white paper, and in the black border
    gap = board.second_m / board.pitch_m
    low = -gap / 2
    high = 1 + gap / 2
    squares = [[low, low], [high, low], [high, high], [low, high]]
    paper = [[0.5, low], [high, 0.5], [0.5, high], [low, 0.5]]
    ink = [[0.5, 0.05], [0.95, 0.5], [0.5, 0.95], [0.05, 0.5]]
    unit = np.array([[0, 0], [1, 0], [1, 1], [0, 1]], np.float32)
    spots = np.array([squares + paper + ink], np.float32)

    # compare the median brightness of the squares with that of white and black
    places = [cv2.perspectiveTransform(spots, cv2.getPerspectiveTransform(unit, quad)) for quad in quads]
    seen = cv2.remap(grey, np.concatenate(places).astype(np.float32), None, cv2.INTER_LINEAR)
    square, white, black = np.median(seen.reshape(-1, 3, 4), axis=(0, 2))
    return bool(square < (white + black) / 2)


def explain_absence(board: Board, image: npt.NDArray[np.uint8]) -> str | None:
    """Return why a board is not found in an image that shows another one; None if nothing is recognised.

    It recognises mirrored and inverted images, markers of other dictionaries, other ids, other arrangements, and
    chessboards of another size.
    """
    grey = _to_grey(image)
    if board.kind == "chessboard":
        return _explain_chessboard(board, grey) or _explain_dictionary(board, grey)
    # markers of the board's dictionary, in the image as it is or changed
    markers = board.detect_markers(grey)
    if len(board.detect_markers(grey[:, ::-1]).ids) > max(2, len(markers.ids)):
        return f"the board is mirrored: expected {board} as printed; turn off the camera's mirror image"
    if len(board.detect_markers(255 - grey).ids) > max(2, len(markers.ids)):
        return f"its black and white are inverted: expected {board} as printed, in black on white"
    if len(markers.ids) >= 3:
        return _explain_arrangement(board, markers, grey)
    return _explain_dictionary(board, grey)


def _explain_dictionary(board: Board, grey: GreyImage) -> str | None:
    """Name the dictionary that has the most markers in the image, and their ids."""
    markers = _NO_MARKERS
    family = ""
    for name in _FAMILIES:
        dictionary = cv2.aruco.getPredefinedDictionary(getattr(cv2.aruco, f"DICT_{name}"))
        for border in (1, 2):
            other = _detect_markers(dictionary, grey, border)
            if len(other.ids) > len(markers.ids):
                markers = other
                family = name
    # a few are chance
    if len(markers.ids) < 4:
        return None

    # of the dictionaries with these markers, name the smallest
    if family.endswith(f"_{_SIZES[-1]}"):
        size = next(size for size in _SIZES if markers.ids.max() < size)
        family = family.replace(f"_{_SIZES[-1]}", f"_{size}")
    seen = f"found {len(markers.ids)} of {family} (ids {markers.ids.min()} to {markers.ids.max()})"
    if board.kind == "chessboard":
        return f"expected a chessboard without markers, {seen}; describe a charuco or an apriltag board"
    return f"expected markers of {board.dictionary}, {seen}; correct the dictionary to {_shorten(family)}"


def _explain_arrangement(board: Board, markers: Markers, grey: GreyImage) -> str:
    """Say how the markers of the board's dictionary lie, and how to describe that."""
    lowest = int(markers.ids.min())
    listed = ", ".join(map(str, sorted(markers.ids)[:12]))
    _, on_board = board.select(markers)
    if on_board.all() and board.measure_misfit(markers) < _FITS:
        return f"found markers {listed} of {board}, too few to tell its corners; show more of the board, and sharper"

    # find the boards on which the markers would lie as they do
    said = f"found markers {listed} of its dictionary, but not the arrangement of {board}"
    fits = sorted(_fit_boards(board, markers), key=lambda fit: fit[0])
    if not fits or fits[0][0] > _FITS:
        advice = "check columns and rows"
        if not on_board.all():
            advice += f", and the first id: the lowest here is {lowest}"
        return f"{said}; {advice}"

    # of equally good ones, name the one that differs least from the description
    alike = [other for misfit, other in fits if misfit < fits[0][0] + _SAME_MISFIT]
    other = min(alike, key=lambda fit: _rank(fit, board))
    if (other.kind, other.columns) == (board.kind, board.columns) and other.first != board.first:
        return f"{said}; if {other.first} is the id of its first marker, write {replace(board, first=other.first)}"
    article = "an" if other.kind == "apriltag" else "a"
    shape = f"{other.kind} board of {other.columns} columns and {other.rows} or more rows"
    if other.columns == board.rows != board.columns:
        shape += "; columns and rows are swapped"
    return f"{said}: they lie as on {article} {shape}; check columns and rows"


def _rank(fit: Board, board: Board) -> tuple[bool, bool, bool, int]:
    """Order boards that explain an image equally well: first the ones that differ least from the description."""
    return fit.kind != board.kind, fit.columns != board.columns, fit.rows > board.rows, fit.first


def _fit_boards(board: Board, markers: Markers) -> Iterator[tuple[float, Board]]:
    """Yield boards of other kinds, columns and first ids, with the misfit of the markers."""
    # a board of the other kind whose markers have the same sizes and distances
    pitches = {board.kind: (board.pitch_m, board.second_m)}
    if board.kind == "charuco":
        pitches["apriltag"] = (board.second_m, board.pitch_m - board.second_m)
    else:
        pitches["charuco"] = (board.pitch_m + board.second_m, board.pitch_m)
    lowest = int(markers.ids.min())
    for kind, (pitch, second) in pitches.items():
        for first in sorted({board.first, lowest}):
            if lowest < first:
                continue
            count = int(markers.ids.max()) - first + 1
            for columns, rows in _list_shapes(kind, count):
                if rows <= MAX_SIDE:
                    with suppress(CalibrationError):  # the dictionary has fewer markers
                        other = Board(kind, columns, rows, pitch, second, board.dictionary, first)
                        yield other.measure_misfit(markers), other


def _list_shapes(kind: BoardKind, count: int) -> Iterator[tuple[int, int]]:
    """Yield columns and rows of boards with at least `count` markers: as few rows as possible."""
    for columns in range(3 if kind == "charuco" else 1, _MAX_GUESSED_COLUMNS + 1):
        if kind == "apriltag":
            yield columns, math.ceil(count / columns)
            continue
        # every second square has a marker; even and odd rows place them differently
        rows = max(3, math.ceil(2 * count / columns))
        yield columns, rows
        yield columns, rows + 1


def _explain_chessboard(board: Board, grey: GreyImage) -> str | None:
    """Say which size a chessboard has that is described by its squares, or off by one."""
    for delta_columns, delta_rows in ((1, 1), (-1, -1), (0, 1), (1, 0), (0, -1), (-1, 0)):
        size = (board.columns + delta_columns, board.rows + delta_rows)
        if min(size) >= 3 and cv2.findChessboardCorners(grey, size, flags=cv2.CALIB_CB_FAST_CHECK)[0]:
            return f"expected {board.columns}x{board.rows} inner corners, found {size[0]}x{size[1]}; correct them"
    return None
