"""Calibration boards: their geometry, their text form, and their corners in images.

A board's frame lies in its printed plane, in metres: x to the right, y down, z away from the viewer. The origin of a
chessboard is its first inner corner; that of the others is the top-left corner of the printed pattern.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, cast

import cv2
import numpy as np
import numpy.typing as npt

from ..errors import CalibrationError
from ..geometry import Array

BoardKind = Literal["charuco", "chessboard", "apriltag"]
GreyImage = npt.NDArray[np.uint8]

BOARD_FORMS = (
    "charuco:7x5:30mm:21mm:4x4_50 (squares across and down, side of a square, side of a marker, dictionary), "
    "chessboard:9x6:25mm (inner corners across and down, side of a square) or "
    "apriltag:6x5:22mm:6mm[:36h11] (tags across and down, side of a tag, gap between tags, family)"
)
_LENGTH = r"(\d+(?:\.\d+)?)mm"
_FORMS = {
    "charuco": re.compile(rf"(\d+)x(\d+):{_LENGTH}:{_LENGTH}:(\w+)"),
    "chessboard": re.compile(rf"(\d+)x(\d+):{_LENGTH}()()"),
    "apriltag": re.compile(rf"(\d+)x(\d+):{_LENGTH}:{_LENGTH}(?::(\w+))?"),
}
_DICTIONARIES = (
    *(f"{bits}X{bits}_{count}" for bits in (4, 5, 6, 7) for count in (50, 100, 250, 1000)),
    "ARUCO_ORIGINAL",
    "APRILTAG_16h5",
    "APRILTAG_25h9",
    "APRILTAG_36h10",
    "APRILTAG_36h11",
)
MIN_CORNERS = 6
"""Minimum number of corners for a view to count."""
_WINDOW_SHARE = 0.35  # of the smallest distance between corners; a larger window reaches the next corner
_TAG_WINDOW_SHARE = 0.1  # of a tag's side, which is 6 to 10 cells
_MAX_WINDOW_PX = 15
_SUBPIX_CRITERIA = (cv2.TERM_CRITERIA_COUNT + cv2.TERM_CRITERIA_EPS, 60, 1e-4)


@dataclass(frozen=True, slots=True)
class Corners:
    """Corners of a board in one image: `ids` int [n] index `Board.points`, `pixels` are float64 [n, 2]."""

    ids: npt.NDArray[np.intp]
    pixels: Array


@dataclass(frozen=True)
class Board:
    """A printed board of `columns` x `rows` (squares for charuco, inner corners for chessboard, tags for apriltag).

    `pitch_m` is the side of a square or of a tag; `second_m` is the side of a marker, or the gap between tags.
    """

    kind: BoardKind
    columns: int
    rows: int
    pitch_m: float
    second_m: float = 0.0
    dictionary: str = ""

    @classmethod
    def parse(cls, text: str) -> Board:
        """Read a board from its text form, see BOARD_FORMS. Raises CalibrationError."""
        kind, _, rest = text.partition(":")
        match = _FORMS[kind].fullmatch(rest) if kind in _FORMS else None
        if match is None:
            raise CalibrationError(f"board {text!r}: expected {BOARD_FORMS}")
        columns, rows, pitch, second, dictionary = match.groups()
        if kind == "apriltag":
            dictionary = f"APRILTAG_{dictionary or '36h11'}"
        elif kind == "charuco":
            dictionary = dictionary.upper()
        return cls(
            cast(BoardKind, kind),
            int(columns),
            int(rows),
            float(pitch) / 1e3,
            float(second or 0) / 1e3,
            dictionary or "",
        )

    def __post_init__(self) -> None:
        if self.kind != "chessboard" and self.dictionary not in _DICTIONARIES:
            raise CalibrationError(
                f"board: expected a dictionary of {', '.join(_DICTIONARIES)}, found {self.dictionary}"
            )
        smallest = 3 if self.kind != "apriltag" else 1
        if min(self.columns, self.rows) < smallest or max(self.columns, self.rows) > 64 or self.pitch_m <= 0:
            raise CalibrationError(
                f"board {self}: expected {smallest} to 64 columns and rows, and a side above 0"
            )
        if self.kind == "charuco" and not 0 < self.second_m < self.pitch_m:
            raise CalibrationError(f"board {self}: expected markers smaller than the squares")
        if self.kind == "apriltag" and self.second_m <= 0:
            raise CalibrationError(f"board {self}: expected a gap between the tags")
        if self.kind != "chessboard" and self._marker_count > len(self._dictionary.bytesList):
            raise CalibrationError(
                f"board {self}: {self.dictionary} has {len(self._dictionary.bytesList)} markers, the board needs "
                f"{self._marker_count}; choose a larger dictionary"
            )

    def __str__(self) -> str:
        def length(metres: float) -> str:
            return f"{round(metres * 1e3, 6):g}mm"

        parts = [self.kind, f"{self.columns}x{self.rows}", length(self.pitch_m)]
        if self.kind != "chessboard":
            parts += [length(self.second_m), self.dictionary.removeprefix("APRILTAG_").lower()]
        return ":".join(parts)

    @cached_property
    def points(self) -> Array:
        """Corners [p, 3] in the frame of the board, in metres; z is 0."""
        if self.kind == "apriltag":
            corners = np.concatenate([np.asarray(tag, np.float64) for tag in self._aruco.getObjPoints()])
            return corners.reshape(-1, 3)
        inner = (self.columns, self.rows) if self.kind == "chessboard" else (self.columns - 1, self.rows - 1)
        first = 0 if self.kind == "chessboard" else 1
        grid = np.mgrid[first : first + inner[0], first : first + inner[1]].T.reshape(-1, 2) * self.pitch_m
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
        grey = image if image.ndim == 2 else cv2.cvtColor(image, cv2.COLOR_BGR2GRAY)
        find = {
            "charuco": self._find_charuco,
            "chessboard": self._find_chessboard,
            "apriltag": self._find_tags,
        }
        corners = find[self.kind](grey)
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

    def detect_marker_ids(self, grey: GreyImage) -> list[int]:
        """Return the ids of all markers of the board's dictionary in an image."""
        found = cv2.aruco.ArucoDetector(self._dictionary).detectMarkers(grey)[1]
        return [] if found is None else sorted(int(identifier) for identifier in found.ravel())

    @property
    def _marker_count(self) -> int:
        count = self.columns * self.rows
        return count // 2 if self.kind == "charuco" else count

    @cached_property
    def _dictionary(self) -> Any:
        return cv2.aruco.getPredefinedDictionary(getattr(cv2.aruco, f"DICT_{self.dictionary}"))

    @cached_property
    def _aruco(self) -> Any:
        kind = cv2.aruco.CharucoBoard if self.kind == "charuco" else cv2.aruco.GridBoard
        return kind((self.columns, self.rows), self.pitch_m, self.second_m, self._dictionary)

    @cached_property
    def _charuco_detector(self) -> Any:
        return cv2.aruco.CharucoDetector(self._aruco)

    @cached_property
    def _tag_detector(self) -> Any:
        return cv2.aruco.ArucoDetector(self._dictionary)

    def _find_charuco(self, grey: GreyImage) -> Corners | None:
        pixels, ids, _, _ = self._charuco_detector.detectBoard(grey)
        if ids is None:
            return None
        return Corners(np.asarray(ids).ravel().astype(np.intp), np.asarray(pixels, np.float64).reshape(-1, 2))

    def _find_tags(self, grey: GreyImage) -> Corners | None:
        quads, ids, _ = self._tag_detector.detectMarkers(grey)
        pairs = [] if ids is None else list(zip(np.asarray(ids).ravel(), quads, strict=True))
        pairs = [(int(tag), quad) for tag, quad in pairs if tag < self._marker_count]
        if not pairs:
            return None
        indices = np.concatenate([4 * tag + np.arange(4) for tag, _ in pairs]).astype(np.intp)
        pixels = np.concatenate(
            [_refine_tag(np.asarray(quad, np.float32).reshape(4, 2), grey) for _, quad in pairs]
        )
        return Corners(indices, pixels)

    def _find_chessboard(self, grey: GreyImage) -> Corners | None:
        size = (self.columns, self.rows)
        flags = cv2.CALIB_CB_ADAPTIVE_THRESH | cv2.CALIB_CB_NORMALIZE_IMAGE
        # the fast check avoids seconds of search in images without a board
        found, corners = cv2.findChessboardCorners(grey, size, flags=flags | cv2.CALIB_CB_FAST_CHECK)
        if not found:
            found, corners = cv2.findChessboardCornersSB(grey, size, flags=cv2.CALIB_CB_NORMALIZE_IMAGE)
        if not found:
            return None
        grid = np.asarray(corners, np.float32).reshape(self.rows, self.columns, 2)
        spacing = min(np.linalg.norm(np.diff(grid, axis=axis), axis=2).min() for axis in (0, 1))
        window = int(np.clip(_WINDOW_SHARE * spacing, 2, _MAX_WINDOW_PX))
        fine = cv2.cornerSubPix(grey, grid.reshape(-1, 1, 2), (window, window), (-1, -1), _SUBPIX_CRITERIA)
        refined = np.asarray(fine, np.float64).reshape(self.rows, self.columns, 2)
        pixels = _orient(refined, grey, self.has_unique_pose).reshape(-1, 2)
        return Corners(np.arange(len(pixels)), pixels)


def _refine_tag(quad: npt.NDArray[np.float32], grey: GreyImage) -> Array:
    """Refine the corners [4, 2] of a tag in a window that stays inside its border cells.

    OpenCV's own refinements are worse: one takes too large a window, the other is off by half a pixel.
    """
    side = float(np.linalg.norm(quad - np.roll(quad, 1, axis=0), axis=1).min())
    window = int(np.clip(_TAG_WINDOW_SHARE * side, 2, _MAX_WINDOW_PX))
    fine = cv2.cornerSubPix(grey, quad.reshape(-1, 1, 2).copy(), (window, window), (-1, -1), _SUBPIX_CRITERIA)
    return np.asarray(fine, np.float64).reshape(4, 2)


def _are_collinear(points: Array) -> bool:
    spread = np.linalg.svd(points[:, :2] - points[:, :2].mean(0), compute_uv=False)
    return bool(spread[1] < 1e-6 * spread[0]) or len(np.unique(points, axis=0)) < 4


def _orient(grid: Array, grey: GreyImage, unique: bool) -> Array:
    """Order corners [rows, columns, 2] as on the printed board: right-handed, the top-left square inside is black."""
    across, down = grid[0, -1] - grid[0, 0], grid[-1, 0] - grid[0, 0]
    if across[0] * down[1] - across[1] * down[0] < 0:
        grid = grid[:, ::-1]
    if not unique:
        return grid
    first, last = grid[:2, :2].reshape(-1, 2).mean(0), grid[-2:, -2:].reshape(-1, 2).mean(0)
    brightness = cv2.getRectSubPix(grey, (3, 3), tuple(map(float, first))).mean()
    turned = cv2.getRectSubPix(grey, (3, 3), tuple(map(float, last))).mean()
    return grid[::-1, ::-1] if brightness > turned else grid


def explain_absence(board: Board, image: npt.NDArray[np.uint8]) -> str | None:
    """Return the reason why a board is not found in an image that shows another one, or None if nothing is
    recognised.

    It recognises mirrored boards, markers of other dictionaries, and chessboards of another size.
    """
    grey = image if image.ndim == 2 else cv2.cvtColor(image, cv2.COLOR_BGR2GRAY)
    if board.kind == "chessboard":
        return _explain_chessboard(board, grey)
    if len(board.detect_marker_ids(np.ascontiguousarray(grey[:, ::-1]))) > max(
        2, len(board.detect_marker_ids(grey))
    ):
        return f"the board is mirrored: expected {board} as printed; turn off the camera's mirror image"
    if len(found := board.detect_marker_ids(grey)) >= 3:
        ids = ", ".join(map(str, found[:12]))
        return f"found markers {ids} of its dictionary, but not the arrangement of {board}; check columns and rows"
    for name in _DICTIONARIES:
        other = Board(board.kind, 3, 3, board.pitch_m, board.second_m, name)
        if name != board.dictionary and len(ids_of := other.detect_marker_ids(grey)) >= 4:
            return f"expected markers of {board.dictionary}, found {len(ids_of)} of {name}; correct the dictionary"
    return None


def _explain_chessboard(board: Board, grey: GreyImage) -> str | None:
    for delta_columns, delta_rows in ((1, 1), (-1, -1), (0, 1), (1, 0), (0, -1), (-1, 0)):
        size = (board.columns + delta_columns, board.rows + delta_rows)
        if min(size) >= 3 and cv2.findChessboardCorners(grey, size, flags=cv2.CALIB_CB_FAST_CHECK)[0]:
            return f"expected {board.columns}x{board.rows} inner corners, found {size[0]}x{size[1]}; correct them"
    return None
