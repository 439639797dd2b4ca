"""Printable boards: true dimensions on the page, and a clear refusal of one that does not fit."""

from __future__ import annotations

import re
import shutil
import subprocess
import zlib
from pathlib import Path

import cv2
import numpy as np
import pytest

from sam3_node.calibration.board_pdf import POINTS_PER_MM, write_board
from sam3_node.calibration.boards import Board
from sam3_node.errors import CalibrationError
from tests.support.refuses import refuses

DPI = 150
BOARDS = (
    "charuco:7x5:30mm:21mm:4x4_50",
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


@pytest.mark.parametrize("text", BOARDS)
def test_the_board_has_its_true_size(text: str, tmp_path: Path) -> None:
    board = Board.parse(text)
    write_board(tmp_path / "board.pdf", board)
    assert_true_size(board, draw_page(tmp_path / "board.pdf"))


@pytest.mark.parametrize("text", BOARDS)
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
    write_board(tmp_path / "board.pdf", Board.parse(BOARDS[0]))
    (width, height), rectangles = read_page(tmp_path / "board.pdf")
    assert (round(width), round(height)) == (297, 210)
    line = rectangles[np.argmax(rectangles[:, 2])]
    ticks = rectangles[np.isclose(rectangles[:, 2], 0.2, atol=1e-3)]
    assert line[2] == pytest.approx(100, abs=1e-3)
    assert len(ticks) == 101
    np.testing.assert_allclose(np.diff(np.sort(ticks[:, 0])), 1, atol=1e-3)


def test_nothing_lies_outside_the_page(tmp_path: Path) -> None:
    for text in BOARDS:
        write_board(tmp_path / "board.pdf", Board.parse(text))
        (width, height), rectangles = read_page(tmp_path / "board.pdf")
        assert rectangles[:, :2].min() > 0
        assert (rectangles[:, 0] + rectangles[:, 2]).max() < width
        assert (rectangles[:, 1] + rectangles[:, 3]).max() < height


@pytest.mark.parametrize(("paper", "named"), [("a4", "a4"), ("a9", "a4")])
def test_a_board_that_does_not_fit_is_refused(paper: str, named: str, tmp_path: Path) -> None:
    with refuses(CalibrationError, field=named):
        write_board(tmp_path / "board.pdf", Board.parse("chessboard:9x6:40mm"), paper)
