"""Boards: their text form, their corners in images, why one is not found, and their true dimensions on paper."""

import re
import shutil
import subprocess
import zlib
from pathlib import Path

import cv2
import numpy as np
import pytest

from sam3_node.calibration.board_pdf import POINTS_PER_MM, write_board
from sam3_node.calibration.boards import Board, Corners, explain_absence
from sam3_node.calibration.bundle import BoardView
from sam3_node.calibration.intrinsics import calibrate_intrinsics
from sam3_node.errors import CalibrationError
from sam3_node.geometry import rigid, rotation_from_vector
from sam3_node.types import Intrinsics
from tests.support.calibration_scenes import (
    DENSITY,
    RIM_MM,
    SIZE,
    draw_charuco,
    draw_kalibr,
    project_board,
    rasterise,
    render,
    render_views,
)
from tests.support.refuses import mentions, refuses
from tests.support.tables import each_row

PINHOLE = Intrinsics(600, 600, 320, 240, "none")
CHARUCO = "charuco:7x5:30mm:21mm:4x4_50"
CHESSBOARD = "chessboard:6x5:25mm"
APRILTAG = "apriltag:5x4:22mm:8mm:36h11"


def detect(board: Board, image: np.ndarray, share: float = 1.0) -> Corners:
    """Find a board, and check that at least this share of its corners is seen."""
    corners = board.detect(np.ascontiguousarray(image))
    assert len(corners.ids) >= share * len(board.points)
    return corners


@pytest.mark.parametrize("text", [CHARUCO, CHESSBOARD, APRILTAG])
def test_a_board_reads_its_own_text(text: str) -> None:
    assert str(Board.parse(text)) == text


@each_row(
    ("text", "named"),
    [
        ("circles:7x5:30mm", "charuco"),
        ("charuco:7x5:30:21:4x4_50", "charuco"),
        ("charuco:7x5:30mm:31mm:4x4_50", ("markers", "smaller")),
        ("charuco:7x5:30mm:21mm:9x9_50", "9x9_50"),
        ("charuco:7x5:30mm:21mm:DICT_4X4_5", "4x4_50"),
        ("charuco:7x5:30mm:21mm:4x4_50:first=40", "needs 57"),
        ("charuco:20x20:30mm:21mm:4x4_50", "needs 200"),
        ("chessboard:2x2:25mm", "3 to 64"),
        ("chessboard:9x6:0mm", ("0", "above")),
        ("apriltag:6x5:22mm:0mm", "gap"),
        ("apriltag:999999x5:22mm:6mm", "1 to 64"),
    ],
)
def test_impossible_boards_are_refused(text: str, named: str | tuple[str, ...]) -> None:
    with refuses(CalibrationError, field=named):
        Board.parse(text)


@each_row("kind", ["charuco:6x5:22mm:14mm", "apriltag:6x5:22mm:6mm"])
@each_row("name", ["36h11", "APRILTAG_36h11", "apriltag_36H11", "DICT_APRILTAG_36h11", "tag36h11"])
def test_a_dictionary_has_the_names_of_others(kind: str, name: str) -> None:
    board = Board.parse(f"{kind}:{name}:first=3")
    assert board.dictionary == "APRILTAG_36h11"
    assert str(board) == f"{kind}:36h11:first=3"


@each_row("name", sorted(name for name in dir(cv2.aruco) if name.startswith("DICT_")))
def test_all_dictionaries_of_opencv_are_read(name: str) -> None:
    board = Board.parse(f"charuco:4x4:30mm:21mm:{name}")
    assert f"DICT_{board.dictionary}".lower() == name.lower()
    assert Board.parse(str(board)) == board
    corners = board.detect(rasterise(board, 3.0))
    assert len(corners.ids) == 9


@pytest.mark.parametrize(("text", "tolerance_px"), [(CHARUCO, 0.1), (CHESSBOARD, 0.1), (APRILTAG, 0.25)])
def test_corners_lie_where_they_are_projected(text: str, tolerance_px: float) -> None:
    board = Board.parse(text)
    for pose, image in render_views(board, PINHOLE, 3):
        corners = detect(board, image)
        errors = corners.pixels - project_board(pose, PINHOLE, board.points)[corners.ids]
        assert np.abs(errors.mean(axis=0)).max() < 0.05
        assert np.sqrt((errors**2).mean()) < tolerance_px


KALIBR = "apriltag:6x5:24mm:7.2mm"
EVEN = "charuco:8x6:22mm:15mm:4x4_50"


@pytest.mark.verifies(
    "board", "ChArUco, also legacy and of AprilTags", "other implementation", "OpenCV draws"
)
@pytest.mark.verifies(
    "board", "Kalibr's AprilGrid, border of 1 and 2 bits", "layout", "drawn as its PDF", "a printed board"
)
@pytest.mark.parametrize(
    ("text", "printed"),
    [
        (KALIBR, "border 1"),
        (KALIBR, "border 2"),
        (EVEN, "legacy"),
        (EVEN, "new"),
        (EVEN.replace("8x6", "7x6"), "legacy"),
        (EVEN.replace("8x6", "7x5"), "legacy"),
        (EVEN.replace("4x4_50", "36h11"), "legacy"),
        ("charuco:8x6:22mm:15mm:4x4_250:first=100", "new"),
        ("charuco:8x6:22mm:15mm:4x4_250:first=100", "legacy"),
    ],
)
def test_boards_of_others_have_their_own_corners(text: str, printed: str) -> None:
    board = Board.parse(text)
    border = {"border 1": 1, "border 2": 2}.get(printed)
    texture = draw_kalibr(board, border) if border else draw_charuco(board, printed == "legacy")
    for pose, image in render_views(board, PINHOLE, 3, texture=texture):
        for turns in range(4):
            corners = detect(board, np.rot90(image, turns), 0.6)
            true = project_board(pose, PINHOLE, board.points)[corners.ids]
            for turn in range(turns):  # against the clock
                true = np.stack([true[:, 1], SIZE[1 - turn % 2] - 1 - true[:, 0]], axis=1)
            assert np.abs(corners.pixels - true).max() < 0.5


@pytest.mark.parametrize("border", [1, 2])
def test_large_tags_of_kalibr_have_their_outer_corners(border: int) -> None:
    board = Board.parse("apriltag:6x5:24mm:7mm")
    near = Intrinsics(1100.0, 1100.0, 640.0, 480.0, "none", ())
    texture = draw_kalibr(board, border)
    for tilt in (-0.2, 0.1, 0.3):
        turn = rotation_from_vector([tilt, 0.1, 0.05])
        pose = rigid(turn, np.array([0, 0, 0.33]) - turn @ board.points.mean(axis=0))
        corners = detect(board, render(board, pose, near, (960, 1280), texture), 0.8)
        true = project_board(pose, near, board.points)[corners.ids]
        assert np.abs(corners.pixels - true).max() < 0.5


def test_kalibr_rows_and_columns_alone_are_told_by_the_black_squares() -> None:
    board = Board.parse(KALIBR)
    pixels = round((RIM_MM + 28) * DENSITY)
    printed = {"own": rasterise(board, DENSITY, RIM_MM), "Kalibr": draw_kalibr(board, 1)}
    for image in printed.values():
        for place, rows in ((slice(None, pixels), (0, 0.024)), (slice(-pixels, None), (0.1248, 0.1488))):
            corners = board.detect(np.ascontiguousarray(image[place]))
            assert len(corners.ids) == 24
            np.testing.assert_allclose(np.unique(board.points[corners.ids, 1]), rows, atol=1e-9)


def test_a_view_that_fits_both_orders_of_charuco_has_no_corners() -> None:
    """Without its last column, a legacy board is a new one without its first column."""
    board = Board.parse(EVEN.replace("8x6", "7x6"))
    square = round(22 * DENSITY)
    for legacy in (False, True):
        printed = draw_charuco(board, legacy)
        rim = (printed.shape[1] - 7 * square) // 2
        first = 1 - legacy
        seen = printed[:, rim + first * square : rim + (first + 6) * square]
        assert board.detect(np.ascontiguousarray(seen)) is None
        assert mentions(explain_absence(board, np.ascontiguousarray(seen)) or "", "show more")
        assert board.detect(printed) is not None


def test_intrinsics_follow_from_a_kalibr_board() -> None:
    board = Board.parse(KALIBR)
    views = []
    for number, (_, image) in enumerate(render_views(board, PINHOLE, 9, texture=draw_kalibr(board, 2))):
        corners = board.detect(image)
        views.append(BoardView(str(number), corners.ids, corners.pixels))
    camera = calibrate_intrinsics(views, board, SIZE, shape=False).solution.camera
    np.testing.assert_allclose(camera[:2], 600, rtol=0.005)
    np.testing.assert_allclose(camera[2:], (320, 240), atol=3)


def test_a_chessboard_has_one_orientation() -> None:
    board = Board.parse(CHESSBOARD)
    assert board.has_unique_pose
    _, image = render_views(board, PINHOLE, 1)[0]
    upright = board.detect(image)
    turned = board.detect(np.ascontiguousarray(image[::-1, ::-1]))
    np.testing.assert_allclose((639, 479) - turned.pixels, upright.pixels, atol=0.05)
    assert not Board.parse("chessboard:6x4:25mm").has_unique_pose


def test_an_image_without_a_board_has_none() -> None:
    noise = np.random.default_rng(1).integers(0, 255, (480, 640, 3), np.uint8)
    for text in (CHARUCO, CHESSBOARD, APRILTAG):
        assert Board.parse(text).detect(noise) is None
        assert explain_absence(Board.parse(text), np.full((480, 640, 3), 90, np.uint8)) is None


@each_row(
    ("described", "change", "named"),
    [
        (CHARUCO, "mirror", "mirrored"),
        (CHARUCO, "invert", "inverted"),
        (CHARUCO.replace("4x4", "5x5"), "", "found 17 of 4X4_50"),
        (CHARUCO.replace("7x5", "5x7"), "", "7 columns and 5 or more rows; columns and rows are swapped"),
        ("apriltag:7x5:21mm:9mm:4x4_50", "", "as on a charuco board of 7 columns"),
        ("chessboard:10x9:25mm", "", "found 17 of 4X4_50"),
        ("apriltag:5x6:24mm:7.2mm", "Kalibr", "6 columns and 5 or more rows; columns and rows are swapped"),
        (KALIBR, "Kalibr mirror", "mirrored"),
        ("charuco:6x5:31mm:24mm:36h11", "Kalibr", "as on an apriltag board of 6 columns"),
        (EVEN.replace("_50", "_250"), "first", "write charuco:8x6:22mm:15mm:4x4_250:first=100"),
        (EVEN, "first", "found 24 of 4X4_250 (ids 100 to 123)"),
        ("charuco:9x8:30mm:21mm:4x4_50", "", "check columns and rows"),
        ("chessboard:7x6:25mm", "chessboard", "found 6x5"),
    ],
)
def test_another_board_is_named(described: str, change: str, named: str) -> None:
    shown = {"chessboard": CHESSBOARD, "first": f"{EVEN[:-2]}250:first=100"}.get(change, CHARUCO)
    printed = rasterise(Board.parse(shown), 3.0)
    if "Kalibr" in change:
        printed = draw_kalibr(Board.parse(KALIBR), 2)
    if "mirror" in change:
        printed = printed[:, ::-1]
    image = np.ascontiguousarray(255 - printed if change == "invert" else printed)
    board = Board.parse(described)
    assert board.detect(image) is None
    assert named in (explain_absence(board, image) or "")


DPI = 150
PRINTED = (
    CHARUCO,
    "charuco:8x6:24mm:17mm:36h11:first=100",
    "chessboard:8x5:20mm",
    "apriltag:5x4:22mm:8mm:36h11",
    "apriltag:5x4:22mm:8mm:25h9:first=10",
)


def read_page(path: Path) -> tuple[tuple[float, float], np.ndarray]:
    """Return the size of the page in mm, and its rectangles [n, 4] (left, bottom, width, height) in mm."""
    data = path.read_bytes()
    box = re.search(rb"/MediaBox \[0 0 ([\d.]+) ([\d.]+)\]", data)
    stream = re.search(rb"stream\n(.*)\nendstream", data, re.DOTALL)
    content = zlib.decompress(stream[1]).decode()
    rectangles = [line.split()[:4] for line in content.splitlines() if line.endswith(" re f")]
    size = (float(box[1]) / POINTS_PER_MM, float(box[2]) / POINTS_PER_MM)
    return size, np.array(rectangles, float) / POINTS_PER_MM


def draw_page(path: Path) -> np.ndarray:
    """Rasterise the page's rectangles as a viewer would, at DPI."""
    (width, height), rectangles = read_page(path)
    scale = DPI / 25.4
    image = np.full((round(height * scale), round(width * scale)), 255, np.uint8)
    for left, bottom, wide, high in rectangles:
        first = np.round(np.array([left, height - bottom - high]) * scale).astype(int)
        last = np.round(np.array([left + wide, height - bottom]) * scale).astype(int) - 1
        cv2.rectangle(image, first.tolist(), np.maximum(first, last).tolist(), 0, cv2.FILLED)
    return image


def assert_true_size(board: Board, image: np.ndarray) -> None:
    corners = board.detect(image)
    assert len(corners.ids) == len(board.points)
    flat = np.column_stack([board.points[corners.ids, :2], np.ones(len(corners.ids))])
    scale = np.linalg.lstsq(flat, corners.pixels, rcond=None)[0] / DPI * 25.4e-3
    np.testing.assert_allclose(scale[:2], np.eye(2), atol=2e-3)


@pytest.mark.parametrize("text", PRINTED)
def test_the_board_has_its_true_size(text: str, tmp_path: Path) -> None:
    board = Board.parse(text)
    write_board(tmp_path / "board.pdf", board)
    assert_true_size(board, draw_page(tmp_path / "board.pdf"))


@pytest.mark.parametrize("text", PRINTED)
def test_a_viewer_renders_the_same(text: str, tmp_path: Path) -> None:
    if shutil.which("pdftoppm") is None:
        pytest.skip("needs pdftoppm (poppler-utils)")
    board = Board.parse(text)
    write_board(tmp_path / "board.pdf", board)
    command = ["pdftoppm", "-r", str(DPI), "-gray", "-singlefile", "board.pdf", "page"]
    subprocess.run(command, cwd=tmp_path, check=True)
    image = cv2.imread(str(tmp_path / "page.pgm"), cv2.IMREAD_GRAYSCALE)
    assert_true_size(board, image)


def test_the_page_has_a_ruler_of_100_mm(tmp_path: Path) -> None:
    write_board(tmp_path / "board.pdf", Board.parse(PRINTED[0]))
    (width, height), rectangles = read_page(tmp_path / "board.pdf")
    assert (round(width), round(height)) == (297, 210)
    line = rectangles[np.argmax(rectangles[:, 2])]
    ticks = rectangles[np.isclose(rectangles[:, 2], 0.2, atol=1e-3)]
    assert line[2] == pytest.approx(100, abs=1e-3)
    assert len(ticks) == 101
    np.testing.assert_allclose(np.diff(np.sort(ticks[:, 0])), 1, atol=1e-3)


def test_nothing_lies_outside_the_page(tmp_path: Path) -> None:
    for text in PRINTED:
        write_board(tmp_path / "board.pdf", Board.parse(text))
        (width, height), rectangles = read_page(tmp_path / "board.pdf")
        assert rectangles[:, :2].min() > 0
        assert (rectangles[:, 0] + rectangles[:, 2]).max() < width
        assert (rectangles[:, 1] + rectangles[:, 3]).max() < height


@pytest.mark.parametrize(("paper", "named"), [("a4", "a4"), ("a9", "a4")])
def test_a_board_that_does_not_fit_is_refused(paper: str, named: str, tmp_path: Path) -> None:
    with refuses(CalibrationError, field=named):
        write_board(tmp_path / "board.pdf", Board.parse("chessboard:9x6:40mm"), paper)
