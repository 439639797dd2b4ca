"""Compare calibrations with published ones, with OpenCV's hand-eye methods, and their predicted error with the truth.

python -m tools.bench.accuracy.calibration [--data FOLDER] [--draws N]

FOLDER holds chessboard (OpenCV's left and right sets) and handeye (12 ChArUco images and 31 pairs of robot and board
poses). Synthetic draws have 15 views, 0.3 px of noise on each corner and 0.3 mm and 0.03 degrees on each pose of the
robot; half of them have the camera on the gripper, half beside the robot. A draw counts if the true pose lies within
the 95 % bound.
"""

from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np

from sam3_node.calibration import hand_eye
from sam3_node.calibration.boards import Board
from sam3_node.calibration.bundle import BoardView, expected_covariance
from sam3_node.calibration.intrinsics import IntrinsicsResult, calibrate_intrinsics
from sam3_node.calibration.rigid_motion import to_motions
from sam3_node.cli.calibration_views import collect_views
from sam3_node.geometry import rigid
from tests.support.calibration_scenes import CENTRE_M, make_hand_eye
from tools.bench.common import SHARED, Figures, make_parser

DRAWS = 400
DRAW_VIEWS = 15
CHARUCO = Board.parse("charuco:7x5:30mm:21mm:4x4_50")
CHESSBOARD = Board.parse("chessboard:9x6:25mm")
PUBLISHED_FOCAL = "within 0.5 % of the published"
MOUNTINGS: tuple[hand_eye.Mounting, ...] = ("eye_in_hand", "eye_to_hand")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--data", type=Path, default=SHARED / "data", help="with chessboard and handeye")
    parser.add_argument("--draws", type=int, default=DRAWS, help=f"synthetic draws (default {DRAWS})")
    args = parser.parse_args()
    figures = Figures("accuracy.calibration")
    for side in ("left", "right"):
        measure_chessboard(figures, args.data / "chessboard", side)
    intrinsics = measure_charuco(figures, args.data / "handeye")
    measure_hand_eye(figures, args.data / "handeye", intrinsics)
    measure_draws(figures, args.draws)
    figures.write(args.json)


def measure_chessboard(figures: Figures, folder: Path, side: str) -> None:
    """Calibrate one camera of the chessboard set, and compare its focal length with the published files."""
    files = sorted(str(path) for path in folder.glob(f"{side}[0-9]*.jpg"))
    views = collect_views(files, CHESSBOARD, "", 1)
    result = calibrate_intrinsics(views.views, CHESSBOARD, views.size)
    camera = {"left": "M1", "right": "M2"}[side]
    published = {"intrinsics.yml": read_focal(folder / "intrinsics.yml", camera)}
    if side == "left":
        published["left_intrinsics.yml"] = read_focal(folder / "left_intrinsics.yml", "camera_matrix")
    for name, focal in published.items():
        what = f"chessboard {side}: focal length, difference from {name} ({focal:.2f} px)"
        figures.add(what, 100 * (float(result.solution.camera[0]) / focal - 1), "%", PUBLISHED_FOCAL)
    show_errors(figures, f"chessboard {side}", result, views.views, views.size)


def read_focal(path: Path, name: str) -> float:
    storage = cv2.FileStorage(str(path), cv2.FILE_STORAGE_READ)
    return float(storage.getNode(name).mat()[0, 0])


def show_errors(
    figures: Figures, name: str, result: IntrinsicsResult, views: Sequence[BoardView], size: tuple[int, int]
) -> None:
    flat = calibrate_intrinsics(views, result.board, size, shape=False)
    figures.add(f"{name}: held-out error, board taken as flat", flat.held_out_px, "px")
    figures.add(f"{name}: held-out error, shape of the board estimated", result.held_out_px, "px")


def measure_charuco(figures: Figures, folder: Path) -> IntrinsicsResult:
    """Calibrate the camera of the hand-eye set, and compare it with the published camera."""
    views = collect_views([str(folder / "charuco")], CHARUCO, "", 1)
    result = calibrate_intrinsics(views.views, CHARUCO, views.size)
    with np.load(folder / "camera_intrinsics.npz") as file:
        published = file["cameraMatrix"]
    for name, found, focal in zip(("fx", "fy"), result.solution.camera, np.diag(published), strict=False):
        what = f"hand-eye set: {name}, difference from the published {focal:.2f} px"
        figures.add(what, 100 * (float(found) / float(focal) - 1), "%", PUBLISHED_FOCAL)
    show_errors(figures, "hand-eye set", result, views.views, views.size)
    return result


def measure_hand_eye(figures: Figures, folder: Path, intrinsics: IntrinsicsResult) -> None:
    """Compare the joint refinement with OpenCV's methods on the same pairs of poses, by leave-one-out."""
    views = read_pairs(folder / "poses", intrinsics)
    centre = tuple(map(float, CHARUCO.points.mean(axis=0)))
    result = hand_eye.calibrate_hand_eye(views, "eye_in_hand", board_centre_m=centre, scaled=True)
    used = [view for view in views if view.name in result.views]
    rows = {hand_eye.REFINED: result.leave_one_out} | hand_eye.compare_methods(used, "eye_in_hand", centre)
    for name, errors in rows.items():
        what = f"hand-eye set, {len(used)} poses: leave-one-out error, {name}"
        ours = name == hand_eye.REFINED
        figures.add(f"{what}, position", errors.rms_mm, "mm", "under 3" if ours else "")
        figures.add(f"{what}, orientation", errors.rms_deg, "degrees", "under 0.5" if ours else "")
    figures.add("hand-eye set: predicted 95 % bound of the position", result.position_95_m * 1e3, "mm")
    bound_deg = float(np.degrees(result.rotation_95_rad))
    figures.add("hand-eye set: predicted 95 % bound of the orientation", bound_deg, "degrees")


def read_pairs(folder: Path, intrinsics: IntrinsicsResult) -> list[hand_eye.HandEyeView]:
    """Read the set's poses: 4x4 matrices in millimetres, and the board's rotation vector and translation."""
    views = []
    for path in sorted(folder.glob("pose_*.txt")):
        robot = np.loadtxt(path)
        left, _, right = np.linalg.svd(robot[:3, :3])
        with np.load(folder / f"board{path.stem}.npz") as file:
            board = rigid(cv2.Rodrigues(file["rvec"])[0], file["tvec"].ravel())
        covariance = expected_covariance(board, CHARUCO, intrinsics.solution.intrinsics)
        views.append(
            hand_eye.HandEyeView(path.stem, rigid(left @ right, robot[:3, 3] / 1e3), board, covariance)
        )
    return views


def measure_draws(figures: Figures, draws: int) -> None:
    """Count the synthetic draws whose true pose lies within the predicted bounds."""
    inside = [draw(seed) for seed in range(draws)]
    for name, share in zip(("position", "orientation"), np.mean(inside, axis=0), strict=True):
        what = f"synthetic hand-eye, {draws} draws: {name} within the predicted 95 % bound"
        figures.add(what, 100 * float(share), "of 100", "93 to 97")


def draw(seed: int) -> tuple[bool, bool]:
    """Return if position and orientation of a draw lie within the bounds."""
    mounting = MOUNTINGS[seed % 2]
    truth, views = make_hand_eye(DRAW_VIEWS, mounting, seed=1000 + seed)
    result = hand_eye.calibrate_hand_eye(views, mounting, board_centre_m=CENTRE_M)
    error = to_motions((np.linalg.inv(result.parent_from_camera) @ truth)[None])[0]
    return (
        bool(np.linalg.norm(error[:3]) <= result.position_95_m),
        bool(np.linalg.norm(error[3:]) <= result.rotation_95_rad),
    )


if __name__ == "__main__":
    main()
