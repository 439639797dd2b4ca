"""Boards: their text form, their corners in images, and the reason why one is not found."""

from __future__ import annotations

import numpy as np
import pytest

from sam3_node.calibration.board_pdf import rasterise
from sam3_node.calibration.boards import Board, explain_absence
from sam3_node.errors import CalibrationError
from sam3_node.types import Intrinsics
from tests.support.calibration_scenes import project_board, render_views

PINHOLE = Intrinsics(600, 600, 320, 240, "none")
CHARUCO, CHESSBOARD, APRILTAG = (
    "charuco:7x5:30mm:21mm:4x4_50",
    "chessboard:6x5:25mm",
    "apriltag:5x4:22mm:8mm:36h11",
)


@pytest.mark.parametrize("text", [CHARUCO, CHESSBOARD, APRILTAG])
def test_a_board_reads_its_own_text(text: str) -> None:
    assert str(Board.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("circles:7x5:30mm", "expected charuco"),
        ("charuco:7x5:30:21:4x4_50", "expected charuco"),
        ("charuco:7x5:30mm:31mm:4x4_50", "markers smaller"),
        ("charuco:7x5:30mm:21mm:9x9_50", "dictionary"),
        ("charuco:20x20:30mm:21mm:4x4_50", "needs 200"),
        ("chessboard:2x2:25mm", "3 to 64"),
        ("chessboard:9x6:0mm", "side above 0"),
        ("apriltag:6x5:22mm:0mm", "gap"),
        ("apriltag:999999x5:22mm:6mm", "1 to 64"),
    ],
)
def test_impossible_boards_are_refused(text: str, named: str) -> None:
    with pytest.raises(CalibrationError, match=named):
        Board.parse(text)


@pytest.mark.parametrize(("text", "tolerance_px"), [(CHARUCO, 0.1), (CHESSBOARD, 0.1), (APRILTAG, 0.25)])
def test_corners_lie_where_they_are_projected(text: str, tolerance_px: float) -> None:
    board = Board.parse(text)
    for pose, image in render_views(board, PINHOLE, 3):
        corners = board.detect(image)
        assert corners is not None
        assert len(corners.ids) == len(board.points)
        errors = corners.pixels - project_board(pose, PINHOLE, board.points)[corners.ids]
        assert np.abs(errors.mean(axis=0)).max() < 0.05
        assert np.sqrt((errors**2).mean()) < tolerance_px


def test_a_chessboard_has_one_orientation() -> None:
    board = Board.parse(CHESSBOARD)
    assert board.has_unique_pose
    _, image = render_views(board, PINHOLE, 1)[0]
    upright, turned = board.detect(image), board.detect(np.ascontiguousarray(image[::-1, ::-1]))
    assert upright is not None
    assert turned is not None
    np.testing.assert_allclose((639, 479) - turned.pixels, upright.pixels, atol=0.05)
    assert not Board.parse("chessboard:6x4:25mm").has_unique_pose


def test_an_image_without_a_board_has_none() -> None:
    noise = np.random.default_rng(1).integers(0, 255, (480, 640, 3), np.uint8)
    for text in (CHARUCO, CHESSBOARD, APRILTAG):
        assert Board.parse(text).detect(noise) is None
        assert explain_absence(Board.parse(text), np.full((480, 640, 3), 90, np.uint8)) is None


@pytest.mark.parametrize(
    ("described", "change", "named"),
    [
        (CHARUCO, "mirror", "mirrored"),
        (CHARUCO.replace("4x4", "5x5"), "", "found 17 of 4X4_50"),
        ("charuco:9x8:30mm:21mm:4x4_50", "", "check columns and rows"),
        ("chessboard:7x6:25mm", "chessboard", "found 6x5"),
    ],
)
def test_another_board_is_named(described: str, change: str, named: str) -> None:
    printed = rasterise(Board.parse(CHESSBOARD if change == "chessboard" else CHARUCO), 3.0)
    image = np.ascontiguousarray(printed[:, ::-1]) if change == "mirror" else printed
    board = Board.parse(described)
    assert board.detect(image) is None
    assert named in (explain_absence(board, image) or "")
