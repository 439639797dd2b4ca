"""Hand-eye calibration: the truth lies within the predicted error, and input that cannot give it is refused."""

import re
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from sam3_node.calibration.hand_eye import HandEyeView, Mounting, Sight, calibrate_hand_eye, compare_methods
from sam3_node.calibration.intrinsics import calibrate_intrinsics
from sam3_node.calibration.report import draw_hand_eye
from sam3_node.calibration.rigid_motion import move, to_motions
from sam3_node.cli.calibration_views import collect_views
from sam3_node.errors import CalibrationError
from sam3_node.geometry import Array, invert, quaternion_from_rotation, rigid, rotation_from_quaternion
from tests.support.calibration_scenes import (
    BASE_FROM_BOARD,
    BOARD,
    CAMERA,
    CENTRE_M,
    GRIPPER_FROM_CAMERA,
    SIZE,
    make_hand_eye,
)
from tests.support.paths import SHARED
from tests.support.refuses import mentions
from tests.support.repeats import repetitions
from tests.support.tables import each_row
from tools.bench.accuracy.calibration import CHARUCO, CHESSBOARD, read_focal, read_pairs

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
    count = repetitions(6, 24)
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
    assert inside.min() >= count - (3 if count == 6 else 6)


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
    assert mentions(result.rejected[0].reason, "views")
    assert measure_miss(result.parent_from_camera, truth)[0] < 2 * result.position_95_m


def test_the_refinement_is_no_worse_than_every_method() -> None:
    _, views = make_hand_eye(15, noise_px=0.5)
    result = calibrate_hand_eye(views, "eye_in_hand", board_centre_m=CENTRE_M)
    compared = compare_methods(views, "eye_in_hand", CENTRE_M)
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
    pairs = zip(views, [*views[5:], *views[:5]], strict=True)
    return [replace(view, base_from_gripper=other.base_from_gripper) for view, other in pairs]


@each_row(
    ("change", "named"),
    [
        (lambda views: views[:4], "at least 6 poses"),
        (stand_still, "from translation alone"),
        (turn_about_one_axis, "about one axis only"),
        (change_robot(invert), "fit if inverted: use eye_to_hand"),
        (change_robot(read_as_wxyz), "w x y z"),
        (mirror, "mirrored"),
        (grow, r"(4\.[5-9]|5\.[0-5]) % larger than described"),
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


OTHER: dict[Mounting, Mounting] = {"eye_in_hand": "eye_to_hand", "eye_to_hand": "eye_in_hand"}
SIGHT = Sight(CAMERA, SIZE, BOARD.points, BOARD.pitch_m)
TOWARDS_VIEWER = rigid(np.diag([1.0, -1, -1]), [0, 0.15, 0])
"""Frame at the board's lower left corner with y up and z towards the viewer, as some detectors have it."""


def invert_robot(view: HandEyeView) -> HandEyeView:
    return replace(view, base_from_gripper=invert(view.base_from_gripper))


def invert_board(view: HandEyeView) -> HandEyeView:
    return replace(view, camera_from_board=invert(view.camera_from_board))


def turn_board(view: HandEyeView) -> HandEyeView:
    return replace(view, camera_from_board=view.camera_from_board @ TOWARDS_VIEWER)


def refuse(views: list[HandEyeView], mounting: Mounting, scaled: bool = True) -> str:
    sight = SIGHT if scaled else None
    with pytest.raises(CalibrationError) as caught:
        calibrate_hand_eye(views, mounting, board_centre_m=CENTRE_M, scaled=scaled, sight=sight)
    assert "\n" not in str(caught.value)
    return str(caught.value)


FRAMES: tuple[tuple[Mounting, str], ...] = (
    ("eye_in_hand", "z towards the viewer"),
    ("eye_to_hand", "z away"),
    ("eye_in_hand", "z away"),
    ("eye_to_hand", "z towards the viewer"),
)


@pytest.mark.parametrize(("mounting", "axes"), FRAMES[: repetitions(2, 4)])
def test_inverted_frames_are_named(mounting: Mounting, axes: str) -> None:
    _, views = make_hand_eye(14, mounting, board_poses_only=True)
    views = [turn_board(view) for view in views] if axes == "z towards the viewer" else views
    accepted = calibrate_hand_eye(views, mounting, board_centre_m=CENTRE_M, scaled=True, sight=SIGHT)
    assert len(accepted.views) >= 13
    board = [invert_board(view) for view in views]
    robot = [invert_robot(view) for view in views]
    assert mentions(refuse(board, mounting), "board_from_camera")
    for message in (refuse(robot, mounting), refuse(views, OTHER[mounting])):
        assert mentions(message, "base_from_gripper", "inverse")
        assert "board_from_camera" not in message
    for message in (refuse(board, OTHER[mounting]), refuse(list(map(invert_robot, board)), mounting)):
        assert mentions(message, "robot", "board", "inverted")


def test_other_frames_of_the_camera_are_named() -> None:
    _, views = make_hand_eye(14, board_poses_only=True)
    forward = np.array([[0.0, 0, 1, 0], [-1, 0, 0, 0], [0, -1, 0, 0], [0, 0, 0, 1]])  # x forward, z up
    for frame, named in ((np.diag([1.0, -1, -1, 1]), "z backward"), (forward, r"along +x of the camera")):
        moved = [replace(view, camera_from_board=frame @ view.camera_from_board) for view in views]
        message = refuse(moved, "eye_in_hand")
        assert named in message
        assert mentions(message, "x right", "y down", "z forward")


def test_a_few_boards_behind_the_camera_are_left_out() -> None:
    truth, views = make_hand_eye(14, board_poses_only=True)
    views[2:4] = [invert_board(view) for view in views[2:4]]
    result = calibrate_hand_eye(views, "eye_in_hand", board_centre_m=CENTRE_M, scaled=True, sight=SIGHT)
    assert [item.name for item in result.rejected][:2] == ["view2", "view3"]
    assert mentions(result.rejected[0].reason, "behind", "camera")
    assert measure_miss(result.parent_from_camera, truth)[0] < 3e-3


def scale(views: list[HandEyeView], robot: float = 1.0, board: float = 1.0) -> list[HandEyeView]:
    def multiply(pose: Array, factor: float) -> Array:
        return rigid(pose[:3, :3], pose[:3, 3] * factor)

    def change(view: HandEyeView) -> HandEyeView:
        moved = replace(view, base_from_gripper=multiply(view.base_from_gripper, robot))
        return replace(moved, camera_from_board=multiply(view.camera_from_board, board))

    return list(map(change, views))


@each_row(
    ("robot", "board", "named"),
    [
        (1, 1e3, "too large, millimetres read as metres: correct board_unit"),
        (1, 1e-3, "metres read as millimetres: correct board_unit"),
        (1, 100, "centimetres read as metres: correct board_unit"),
        (1, 0.1, "centimetres read as millimetres: correct board_unit"),
        (1, 39.37, "inches read as metres: correct board_unit"),
        (1e3, 1, "too large, millimetres read as metres: correct unit"),
        (1e-3, 1, "too small, metres read as millimetres: correct unit"),
        (0.1, 1, "centimetres read as millimetres: correct unit"),
        (1e-3, 1e-3, "check unit and board_unit"),
        (0.1, 0.1, "check unit and board_unit"),
        (10, 10, "check unit and board_unit"),
        (1, 0, "behind the camera|positions of the board are 0|do not determine"),
        (0, 1, "position did not change"),
        (1, 0.8, r"(24|25)\.\d % larger than described"),
        (1, 1.25, r"(19|20)\.\d % smaller than described"),
    ],
)
def test_units_are_named(robot: float, board: float, named: str) -> None:
    _, views = make_hand_eye(14, "eye_in_hand", board_poses_only=True)
    assert re.search(named, refuse(scale(views, robot, board), "eye_in_hand"))


@each_row(
    ("robot", "board", "named"),
    [
        (1, 1e-3, "metres read as millimetres: correct board_unit"),
        (1e3, 1, "too large, millimetres read as metres: correct unit"),
        (0.1, 0.1, "check unit and board_unit"),
        (1, 1.25, r"(19|20)\.\d % smaller than described"),
    ],
)
def test_units_are_named_for_a_camera_beside_the_robot(robot: float, board: float, named: str) -> None:
    _, views = make_hand_eye(14, "eye_to_hand", board_poses_only=True)
    assert re.search(named, refuse(scale(views, robot, board), "eye_to_hand"))


def test_the_order_of_the_boards_quaternions_is_named_and_its_unit() -> None:
    _, views = make_hand_eye(14, board_poses_only=True)
    swapped = [replace(view, camera_from_board=read_as_wxyz(view.camera_from_board)) for view in views]
    assert mentions(refuse(swapped, "eye_in_hand"), "quaternions of the board", "w x y z")
    message = refuse(scale(swapped, board=1e3), "eye_in_hand")
    assert mentions(message, "quaternions of the board", "w x y z")
    assert "correct board_unit" in message


WRONG_SIZES_MM = (20, 25, 30, 35, 38, 42, 45, 50, 60, 70, 80)
"""Sizes that are stated for a board of 40 mm."""
SHARES = repetitions(2, 3)
"""Parts of them, of which each set of views meets one."""


@pytest.mark.parametrize("mounting", MOUNTINGS)
def test_seven_views_tell_the_size_of_the_board(mounting: Mounting) -> None:
    accepted = 0
    for seed in range(repetitions(1, 10)):
        noise = {"noise_px": 0.2, "robot_m": 5e-4, "robot_rad": np.radians(0.1)}
        _, views = make_hand_eye(7, mounting, **noise, seed=seed)
        result = calibrate_hand_eye(views, mounting, board_centre_m=CENTRE_M)
        accepted += 1
        assert abs(result.scale[0]) < 0.02
        assert result.scale[1] < 0.01
        # each size is refused for some views
        sizes = WRONG_SIZES_MM[(seed + MOUNTINGS.index(mounting)) % SHARES :: SHARES]
        for size in sizes:
            wrong = scale(views, board=size / 40)
            assert "than described" in refuse(wrong, mounting, scaled=False)
    assert accepted == repetitions(1, 10)


def test_a_size_that_is_wrong_by_three_percent_is_at_least_warned_about() -> None:
    _, views = make_hand_eye(7, noise_px=0.2, robot_m=2.5e-3, robot_rad=np.radians(0.1), seed=3)
    shares = []
    refusals = []
    for factor in np.linspace(0.94, 1.06, 7):
        try:
            result = calibrate_hand_eye(scale(views, board=factor), "eye_in_hand", board_centre_m=CENTRE_M)
        except CalibrationError as error:
            refusals.append(str(error))
            continue
        shares.append(result.scale[0])
        assert bool(result.warnings) == (abs(result.scale[0]) > 0.02)
    assert max(map(abs, shares), default=0) < 0.05
    assert all(mentions(text, "size", "board") or "than described" in text for text in refusals)


def test_views_that_do_not_tell_the_size_are_refused() -> None:
    _, views = make_hand_eye(7, robot_m=2e-2, robot_rad=2e-2)
    assert mentions(refuse(views, "eye_in_hand", scaled=False), "size of the board")


def test_a_camera_at_the_place_of_another_mount_is_doubted() -> None:
    for mounting in MOUNTINGS:
        _, views = make_hand_eye(14, mounting)
        assert not calibrate_hand_eye(views, mounting, board_centre_m=CENTRE_M).warnings
        swapped = [invert_robot(view) for view in views]
        (warning,) = calibrate_hand_eye(swapped, OTHER[mounting], board_centre_m=CENTRE_M).warnings
        assert "both inverted" in warning


CHESSBOARDS = SHARED / "data" / "chessboard"
HAND_EYE = SHARED / "data" / "handeye"


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
    pairs = read_pairs(HAND_EYE / "poses", intrinsics)
    centre = tuple(CHARUCO.points.mean(axis=0))
    result = calibrate_hand_eye(pairs, "eye_in_hand", board_centre_m=centre, scaled=True)
    assert result.leave_one_out.rms_mm < 3
    assert result.leave_one_out.rms_deg < 0.5
    others = compare_methods(pairs, "eye_in_hand", centre)
    assert result.leave_one_out.rms_mm < min(errors.rms_mm for errors in others.values())
