"""Published calibrations are found again from their images and poses; skipped where the data are absent."""

from __future__ import annotations

import numpy as np
import pytest

from sam3_node.calibration.hand_eye import calibrate_hand_eye, compare_methods
from sam3_node.calibration.intrinsics import calibrate_intrinsics
from sam3_node.cli.calibration_views import collect_views
from tests.support.paths import SHARED
from tools.bench.accuracy.calibration import CHARUCO, CHESSBOARD, read_focal, read_pairs

CHESSBOARDS, HAND_EYE = SHARED / "data" / "chessboard", SHARED / "data" / "handeye"


@pytest.mark.skipif(not CHESSBOARDS.is_dir(), reason="needs ../shared/data/chessboard")
def test_the_chessboard_set_has_its_published_focal_length() -> None:
    views = collect_views(sorted(map(str, CHESSBOARDS.glob("left[0-9]*.jpg"))), CHESSBOARD, "", 1)
    assert len(views.views) == 13
    result = calibrate_intrinsics(views.views, CHESSBOARD, views.size, shape=True)
    for name, key in (("intrinsics.yml", "M1"), ("left_intrinsics.yml", "camera_matrix")):
        focal = read_focal(CHESSBOARDS / name, key)
        assert result.solution.camera[0] == pytest.approx(focal, rel=0.005)
    assert result.held_out_px < 0.2


@pytest.mark.skipif(not HAND_EYE.is_dir(), reason="needs ../shared/data/handeye")
def test_the_hand_eye_set_has_its_published_camera_and_a_small_error() -> None:
    views = collect_views([str(HAND_EYE / "charuco")], CHARUCO, "", 1)
    intrinsics = calibrate_intrinsics(views.views, CHARUCO, views.size)
    with np.load(HAND_EYE / "camera_intrinsics.npz") as file:
        published = np.diag(file["cameraMatrix"])[:2]
    np.testing.assert_allclose(intrinsics.solution.camera[:2], published, rtol=0.005)
    pairs, centre = read_pairs(HAND_EYE / "poses", intrinsics), tuple(CHARUCO.points.mean(axis=0))
    result = calibrate_hand_eye(pairs, "eye_in_hand", board_centre_m=centre, scaled=True)
    assert result.leave_one_out.rms_mm < 3
    assert result.leave_one_out.rms_deg < 0.5
    others = compare_methods(pairs, "eye_in_hand", centre)
    assert result.leave_one_out.rms_mm < min(errors.rms_mm for errors in others.values())
