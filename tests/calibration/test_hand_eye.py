"""Hand-eye calibration: the truth lies within the predicted error, and input that cannot give it is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from sam3_node.calibration.closed_form import CLOSED_FORMS
from sam3_node.calibration.hand_eye import HandEyeView, Mounting, calibrate_hand_eye, compare_methods
from sam3_node.calibration.report import draw_hand_eye
from sam3_node.calibration.rigid_motion import move, to_motions
from sam3_node.errors import CalibrationError
from sam3_node.geometry import Array, invert, quaternion_from_rotation, rigid, rotation_from_quaternion
from tests.support.calibration_scenes import BASE_FROM_BOARD, CENTRE_M, GRIPPER_FROM_CAMERA, make_hand_eye
from tests.support.repeats import repetitions

MOUNTINGS: tuple[Mounting, ...] = ("eye_in_hand", "eye_to_hand")


def measure_miss(found: Array, truth: Array) -> tuple[float, float]:
    """Return the difference of two poses in metres and radians."""
    motion = to_motions((invert(found) @ truth)[None])[0]
    return float(np.linalg.norm(motion[:3])), float(np.linalg.norm(motion[3:]))


@pytest.mark.parametrize("mounting", MOUNTINGS)
def test_without_noise_the_truth_is_found(mounting: Mounting) -> None:
    truth, views = make_hand_eye(8, mounting, noise_px=0, robot_m=0, robot_rad=0)
    result = calibrate_hand_eye(views, mounting, board_centre_m=CENTRE_M)
    length, angle = measure_miss(result.parent_from_camera, truth)
    assert length < 1e-5
    assert angle < 1e-5
    if mounting == "eye_in_hand":
        assert max(measure_miss(result.other_from_board, BASE_FROM_BOARD)) < 1e-5


@pytest.mark.parametrize("board_poses_only", [False, True])
def test_the_truth_lies_within_the_predicted_error(board_poses_only: bool) -> None:
    count = repetitions(6, 60)
    inside = np.zeros(2)
    for seed in range(count):
        mounting = MOUNTINGS[seed % 2]
        truth, views = make_hand_eye(12, mounting, seed=seed, board_poses_only=board_poses_only)
        result = calibrate_hand_eye(views, mounting, board_centre_m=CENTRE_M, scaled=board_poses_only)
        length, angle = measure_miss(result.parent_from_camera, truth)
        inside += (length <= result.position_95_m, angle <= result.rotation_95_rad)
        assert length < 2.5 * result.position_95_m
        assert angle < 2.5 * result.rotation_95_rad
    # the chance of fewer is below 1 in 1000 where the bounds hold in 95 of 100 draws
    assert inside.min() >= count - (3 if count == 6 else 9)


def test_the_noise_of_the_robot_is_estimated() -> None:
    _, views = make_hand_eye(40, robot_m=1e-3, robot_rad=2e-3)
    result = calibrate_hand_eye(views, "eye_in_hand", board_centre_m=CENTRE_M)
    assert result.robot_noise == pytest.approx((1e-3, 2e-3), rel=0.3)
    assert abs(result.scale[0]) < 4 * result.scale[1] < 0.02


def test_outliers_are_named_and_left_out() -> None:
    truth, views = make_hand_eye(16)
    for number, motion in ((3, [0.02, 0, 0, 0, 0, 0]), (11, [0, 0, 0, 0, 0.05, 0])):
        moved = move(views[number].base_from_gripper, np.array(motion, np.float64))
        views[number] = replace(views[number], base_from_gripper=moved)
    result = calibrate_hand_eye(views, "eye_in_hand", board_centre_m=CENTRE_M)
    assert [item.name for item in result.rejected] == ["view3", "view11"]
    assert "misses the other views" in result.rejected[0].reason
    assert measure_miss(result.parent_from_camera, truth)[0] < 2 * result.position_95_m


def test_the_refinement_is_no_worse_than_every_method() -> None:
    _, views = make_hand_eye(15, noise_px=0.5)
    result = calibrate_hand_eye(views, "eye_in_hand", board_centre_m=CENTRE_M)
    compared = compare_methods(views, "eye_in_hand", CLOSED_FORMS, CENTRE_M)
    assert {"tsai", "park", "horaud", "daniilidis", "robot-world-shah"} <= compared.keys()
    assert result.leave_one_out.rms_mm < 1.05 * min(errors.rms_mm for errors in compared.values())
    assert draw_hand_eye(result).shape[1] == 1280


def stand_still(views: list[HandEyeView]) -> list[HandEyeView]:
    """Give every view the orientation of the first, as a robot that only translates."""
    rotation = views[0].base_from_gripper[:3, :3]
    return [observe(view, rigid(rotation, view.base_from_gripper[:3, 3])) for view in views]


def turn_about_one_axis(views: list[HandEyeView]) -> list[HandEyeView]:
    first = views[0].base_from_gripper
    turned = [move(first, np.array([0.01 * n, 0.02, 0.01, 0, 0, 0.1 * n])) for n in range(len(views))]
    return [observe(view, pose) for view, pose in zip(views, turned, strict=True)]


def observe(view: HandEyeView, base_from_gripper: Array) -> HandEyeView:
    """Return the view from another pose of the robot, without noise."""
    board = invert(base_from_gripper @ GRIPPER_FROM_CAMERA) @ BASE_FROM_BOARD
    return replace(view, base_from_gripper=base_from_gripper, camera_from_board=board)


def change_robot(change: Callable[[Array], Array]) -> Callable[[list[HandEyeView]], list[HandEyeView]]:
    return lambda views: [replace(view, base_from_gripper=change(view.base_from_gripper)) for view in views]


def read_as_wxyz(pose: Array) -> Array:
    x, y, z, w = quaternion_from_rotation(pose[:3, :3])
    return rigid(rotation_from_quaternion([w, x, y, z]), pose[:3, 3])


def mirror(views: list[HandEyeView]) -> list[HandEyeView]:
    flip = np.diag([-1.0, 1, 1, 1])
    return [replace(view, camera_from_board=flip @ view.camera_from_board @ flip) for view in views]


def grow(views: list[HandEyeView]) -> list[HandEyeView]:
    """Make the board 5 % larger than described: its poses come out nearer than they are."""
    scale = np.ones((4, 4))
    scale[:3, 3] = 1 / 1.05
    return [replace(view, camera_from_board=view.camera_from_board * scale) for view in views]


def freeze(views: list[HandEyeView]) -> list[HandEyeView]:
    return [*views[:6], *(replace(view, base_from_gripper=views[5].base_from_gripper) for view in views[6:])]


def shuffle(views: list[HandEyeView]) -> list[HandEyeView]:
    shifted = [*views[5:], *views[:5]]
    return [
        replace(view, base_from_gripper=other.base_from_gripper)
        for view, other in zip(views, shifted, strict=True)
    ]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda views: views[:4], "at least 6 poses"),
        (stand_still, "from translation alone"),
        (turn_about_one_axis, "about one axis only"),
        (change_robot(invert), "fit if inverted: use eye_to_hand"),
        (change_robot(read_as_wxyz), "w x y z"),
        (mirror, "mirrored"),
        (grow, r"4\.[5-9] % larger than described"),
        (freeze, "stale"),
        (shuffle, "do not agree"),
    ],
)
def test_what_cannot_give_a_pose_is_refused(
    change: Callable[[list[HandEyeView]], list[HandEyeView]], named: str
) -> None:
    _, views = make_hand_eye(14, noise_px=0.2, robot_m=2e-4, robot_rad=2e-4)
    with pytest.raises(CalibrationError, match=named):
        calibrate_hand_eye(change(views), "eye_in_hand", board_centre_m=CENTRE_M)
