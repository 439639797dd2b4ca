"""Intrinsics from views of a board: the truth is found, bad views are named, and too little is refused."""

import dataclasses

import numpy as np
import pytest

from sam3_node.calibration.bundle import BoardView
from sam3_node.calibration.intrinsics import (
    IntrinsicsResult,
    calibrate_intrinsics,
    choose_views,
    describe_missing,
    measure_coverage,
)
from sam3_node.calibration.report import draw_intrinsics
from sam3_node.errors import CalibrationError
from sam3_node.geometry import rigid, rotation_from_vector
from sam3_node.types import Intrinsics
from tests.support.calibration_scenes import BOARD, CAMERA, FISHEYE, SIZE, make_views, project_board
from tests.support.refuses import mentions, refuses


def assert_within(result: IntrinsicsResult, truth: Intrinsics, sigmas: float = 4.0) -> None:
    errors = result.solution.camera - (truth.fx, truth.fy, truth.cx, truth.cy)
    assert np.all(np.abs(errors) < sigmas * np.array(result.sd))


@pytest.fixture(scope="module")
def result() -> IntrinsicsResult:
    return calibrate_intrinsics(make_views(15), BOARD, SIZE)


def test_a_pinhole_camera_is_found(result: IntrinsicsResult) -> None:
    assert_within(result, CAMERA)
    assert max(result.sd[:2]) < 2
    assert result.flat
    assert result.rms_px == pytest.approx(0.1 * 2**0.5, rel=0.15)
    assert result.rms_px < result.held_out_px < 2 * result.rms_px
    assert not result.rejected


def test_a_fisheye_camera_is_found() -> None:
    result = calibrate_intrinsics(make_views(12, FISHEYE), BOARD, SIZE, model="fisheye", shape=False)
    assert result.solution.intrinsics.model == "fisheye"
    assert len(result.solution.intrinsics.coeffs) == 4
    assert_within(result, FISHEYE)


def test_a_bent_board_is_noticed() -> None:
    bend = 0.15 * (BOARD.points[:, 0] - 0.105) ** 2  # 0.8 mm at the rim
    points = BOARD.points + bend[:, None] * (0, 0, 1)
    views = make_views(15, points=points)
    result = calibrate_intrinsics(views, BOARD, SIZE, coefficients=4)
    flat = calibrate_intrinsics(views, BOARD, SIZE, shape=False, coefficients=4)
    assert not result.flat
    assert result.bend_mm > 0.2
    assert result.held_out_px < 0.8 * flat.held_out_px
    assert_within(result, CAMERA)
    assert abs(flat.solution.camera[0] - CAMERA.fx) > 5 * abs(result.solution.camera[0] - CAMERA.fx)


def test_bad_views_are_named_and_left_out() -> None:
    views = make_views(14)
    noise = np.random.default_rng(5).normal(0, 3.0, views[4].pixels.shape)
    views[4] = dataclasses.replace(views[4], pixels=views[4].pixels + noise)
    shifted = views[9].pixels.copy()
    shifted[3] += 8
    views[9] = dataclasses.replace(views[9], pixels=shifted)
    result = calibrate_intrinsics(views, BOARD, SIZE, shape=False, coefficients=4)
    assert "view4" in [item.name for item in result.rejected]
    assert mentions(result.rejected[0].reason, "median")
    assert_within(result, CAMERA)


def test_too_few_views_are_refused_with_what_is_missing() -> None:
    with refuses(CalibrationError, field=("6", "3", "view")):
        calibrate_intrinsics(make_views(3), BOARD, SIZE)


def test_the_same_view_again_and_again_is_one_view() -> None:
    (view,) = make_views(1)
    repeated = [dataclasses.replace(view, name=str(number)) for number in range(30)]
    assert choose_views(repeated, BOARD, SIZE, 40)[1] == 29
    with pytest.raises(CalibrationError, match="found 1"):
        calibrate_intrinsics(repeated, BOARD, SIZE)


def test_views_without_tilt_are_refused() -> None:
    with pytest.raises(CalibrationError, match="tilted"):
        calibrate_intrinsics(make_views(8, tilt=0.01, noise_px=0.2), BOARD, SIZE, shape=False, coefficients=4)


def test_views_of_another_board_are_refused() -> None:
    generator = np.random.default_rng(1)
    shuffled = [BoardView(view.name, generator.permutation(view.ids), view.pixels) for view in make_views(10)]
    with pytest.raises(CalibrationError, match=r"board|camera"):
        calibrate_intrinsics(shuffled, BOARD, SIZE)


def test_the_number_of_coefficients_can_be_chosen() -> None:
    views = make_views(8)
    for count, stored in ((2, 5), (5, 5), (8, 8)):
        result = calibrate_intrinsics(views, BOARD, SIZE, coefficients=count, shape=False)
        assert len(result.solution.intrinsics.coeffs) == stored
    with pytest.raises(CalibrationError, match="2, 4, 5 or 8"):
        calibrate_intrinsics(views, BOARD, SIZE, coefficients=3)
    with refuses(CalibrationError, field=("4", "fisheye")):
        calibrate_intrinsics(views, BOARD, SIZE, model="fisheye", coefficients=5)


def test_the_guide_asks_for_what_is_missing() -> None:
    missing = " ".join(describe_missing([], BOARD, SIZE))
    for word in ("right edge", "left edge", "top edge", "bottom edge", "top left", "near", "farther away"):
        assert word in missing
    assert len(describe_missing(make_views(60), BOARD, SIZE)) < 6
    assert measure_coverage(make_views(60), SIZE).shape == (6, 8)


def test_a_tilt_is_recognised() -> None:
    turn = rotation_from_vector([0, -0.5, 0])  # the right edge goes away from the camera
    pose = rigid(turn, np.array([0, 0, 0.5]) - turn @ (0.105, 0.075, 0))
    assert pose[2, 0] > 0
    view = BoardView("tilted", np.arange(24), project_board(pose, CAMERA, BOARD.points))
    missing = " ".join(describe_missing([view], BOARD, SIZE))
    assert "right edge" not in missing
    assert "left edge" in missing


def test_the_picture_shows_every_view(result: IntrinsicsResult) -> None:
    picture = draw_intrinsics(result)
    assert picture.shape[1] == 1280
    assert picture.shape[0] > 4 * 200
    assert np.ptp(picture) > 200


def test_a_board_with_few_corners_per_view_is_calibrated() -> None:
    generator = np.random.default_rng(2)
    choices = ((view, np.sort(generator.choice(24, 14, replace=False))) for view in make_views(20))
    views = [BoardView(view.name, view.ids[kept], view.pixels[kept]) for view, kept in choices]
    assert_within(calibrate_intrinsics(views, BOARD, SIZE, shape=False, coefficients=4), CAMERA)
