"""The commands `sam3-node calibrate board|intrinsics|hand-eye|check`, and the group that has others, too.

Heavy packages are imported when they run.
"""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import CalibrationError, require
from ..processes.signals import print_notice, stop_on_signals
from ..settings import Settings
from . import engine, name_calibration
from .parser import CommandParser, Commands

if TYPE_CHECKING:
    from ..calibration import Calibration
    from ..calibration.boards import Board
    from ..calibration.hand_eye import HandEyeView
    from ..calibration.poses import RobotPose
    from .calibration_views import Views

SOURCES_HELP = "images, folders of images and recordings; live: the frames of the running camera camera.name"
BOARD_HELP = (
    "charuco:7x5:30mm:21mm:4x4_50 (squares, side of a square, side of a marker, dictionary), chessboard:9x6:25mm "
    "(inner corners, side of a square) or apriltag:6x5:22mm:6mm (tags, side of a tag, gap between tags); "
    ":first=100 at the end for markers that begin at id 100"
)
LIVE = "live"
"""Source that means the frames of a running camera."""
EVERY = 5
"""Interval between the frames of a recording that are used. Neighbours show the same view."""
MAX_GAP_MS = 100
"""Longest time between two poses of the robot to interpolate between."""
MAX_CHECK_PX = 1.0
"""Median error of the board's corners, in pixels, up to which a check passes."""
MAX_HAND_EYE_MM = 10.0
"""Leave-one-out error of a hand-eye calibration up to which a check passes."""
_EXTRA = "calibration"


class PairedViews(NamedTuple):
    """Views with the robot's poses, and what was left out."""

    pairs: list[HandEyeView]
    rejected: list[Any]
    inputs: dict[str, str]
    """digests of the files, by name"""
    scaled: bool
    """True if the covariances lack a factor"""
    camera: str
    """of the images; empty if it is not known"""


def add_commands(commands: Commands) -> None:
    """Add the commands `calibrate …`."""
    group = commands.add_group(
        "calibrate", "calibrate a camera and its place on a robot, names of a detector, or FP8 engines"
    )
    # in the order in which a user needs them: a board, the lens, the place on the robot, and a check
    board = group.add("board", calibrate_board)
    board.add("board BOARD", BOARD_HELP)
    board.add_path("-o, --out FILE.pdf", "file to write", required=True)
    board.add("--paper", "a4, a3, a2, letter, or auto for the smallest [auto]", default="auto")
    _add_intrinsics(group)
    _add_hand_eye(group)
    check = group.add("check", calibrate_check)
    check.add_path("file CALIBRATION.toml", "calibration file to check")
    _add_views(check, required=False)
    check.add("--limit PX", "largest error that passes [1.0]", float, MAX_CHECK_PX)
    text = "largest leave-one-out error of the hand-eye calibration that passes [10]"
    check.add("--hand-eye-limit MM", text, float, MAX_HAND_EYE_MM)
    name_calibration.add_names_command(group)
    engine.add_fp8_command(group)


def _add_intrinsics(group: Commands) -> None:
    parser = group.add("intrinsics", calibrate_intrinsics)
    _add_views(parser, required=True)
    _add_live_views(parser)
    parser.add("--model", "lens model [pinhole]", default="pinhole", choices=("pinhole", "fisheye"))
    parser.add(
        "--coefficients N",
        "distortion coefficients of a pinhole lens: 2, 4, 5 or 8; 0 chooses 4 or 5 by held-out error [0]",
        int,
        default=0,
    )
    parser.add(
        "--shape",
        "shape of the board: flat, estimated with the camera, or chosen by held-out error [auto]",
        default="auto",
        choices=("auto", "flat", "estimate"),
    )
    parser.add("--max-views N", "use at most the N most different views [40]", int, default=40)


def _add_hand_eye(group: Commands) -> None:
    parser = group.add("hand-eye", calibrate_hand_eye)
    _add_views(parser, required=False)
    _add_live_views(parser)
    parser.add_path(
        "--calibration FILE.toml",
        "file with the camera's intrinsics; it is completed unless -o names another file",
    )
    mounts = ("eye_in_hand", "eye_to_hand")
    parser.add("--mount", "camera on the gripper, or beside the robot", choices=mounts, required=True)
    parser.add_path("--poses FILE", "file of robot poses: .csv, .json, .toml or .tum")
    parser.add("--pose-stream ENDPOINT", "for live: endpoint of pose messages", default="")
    text = f"longest time between two poses to interpolate between [{MAX_GAP_MS}]"
    parser.add("--max-gap-ms MS", text, float, MAX_GAP_MS)


def _add_views(parser: CommandParser, required: bool) -> None:
    count = "*"
    if required:
        count = "+"
    parser.add("sources SOURCE", SOURCES_HELP, nargs=count)
    parser.add("--board BOARD", BOARD_HELP, required=required)
    parser.add("--topic NAME", "camera of a recording with several", default="")
    parser.add("--every N", f"use every N-th frame of a recording [{EVERY}]", int, EVERY)
    # commands without these options collect views, too
    parser.set_defaults(count=0, pose_stream="")


def _add_live_views(parser: CommandParser) -> None:
    parser.add_path("-o, --out FILE.toml", "calibration file to write")
    parser.add("--count N", "for live: stop after N views [0: when nothing is missing]", int, 0)


def calibrate_board(args: Namespace, settings: Settings) -> None:
    """Write a calibration board as a PDF with true dimensions."""
    from ..calibration.board_pdf import write_board
    from ..calibration.boards import Board

    board = Board.parse(args.board)
    paper = write_board(args.out, board, args.paper)
    print(f"{args.out}: {board} on {paper}; print at 100 %, and check the ruler of 100 mm on the page")


def calibrate_intrinsics(args: Namespace, settings: Settings) -> None:
    """Measure focal length, principal point and distortion."""
    require("scipy", _EXTRA)
    from ..calibration import intrinsics
    from ..calibration.report import draw_intrinsics
    from ..visualization import write_image
    from .calibration_views import make_intrinsics_file, print_result, replace_calibration

    # a mistake in the options must not cost the user the views that were held before the camera
    if args.out is None:
        raise CalibrationError("expected -o FILE.toml for the result, found none")
    board = _parse_board(args.board)
    views = _collect(args, settings, board)
    shape = {"auto": None, "flat": False, "estimate": True}[args.shape]
    result = intrinsics.calibrate_intrinsics(
        views.views,
        board,
        views.size,
        model=args.model,
        coefficients=args.coefficients,
        shape=shape,
        max_views=args.max_views,
        rejected=views.rejected,
        report=print,
    )
    calibration = make_intrinsics_file(result, views.inputs, views.camera or _stated_camera(settings))
    replace_calibration(args.out, calibration)
    write_image(args.out.with_suffix(".intrinsics.png"), draw_intrinsics(result))
    # what was left out, what the file holds now, and which views would help most
    print_result(args.out, calibration, result.rejected)
    for advice in result.advice:
        print(f"better with: {advice}")


def calibrate_hand_eye(args: Namespace, settings: Settings) -> None:
    """Measure the pose of the camera on or beside a robot."""
    require("scipy", _EXTRA)
    from ..calibration import hand_eye, load_calibration
    from ..calibration.report import draw_hand_eye
    from ..visualization import write_image
    from . import calibration_views

    # the file of the intrinsics is completed, unless another one is named
    out = args.out or args.calibration
    if args.calibration is None or out is None:
        raise CalibrationError("expected --calibration FILE.toml with the intrinsics, found none")
    calibration = load_calibration(args.calibration)
    board = _parse_board(args.board)
    paired = _pair(args, settings, board, calibration)
    # what the refinement needs of the board and of the camera
    centre = tuple(map(float, board.points.mean(axis=0)))
    size = (calibration.intrinsics.height_px, calibration.intrinsics.width_px)
    sight = hand_eye.Sight(calibration.intrinsics_for(size), size, board.points, board.pitch_m)
    result = hand_eye.calibrate_hand_eye(
        paired.pairs,
        args.mount,
        board_centre_m=centre,
        scaled=paired.scaled,
        rejected=paired.rejected,
        sight=sight if paired.scaled else None,
    )
    # the result goes to the file and to a picture
    section = calibration_views.make_hand_eye_section(result, board, paired.inputs)
    # a file without a camera's name serves any one camera, perhaps not this one
    camera = calibration.camera or paired.camera or _stated_camera(settings)
    calibration = calibration.model_copy(update={"hand_eye": section, "camera": camera})
    calibration_views.replace_calibration(out, calibration)
    write_image(out.with_suffix(".hand_eye.png"), draw_hand_eye(result))
    # other methods on the same views: a large difference means that the views are poor
    used = [view for view in paired.pairs if view.name in result.views]
    rows = {hand_eye.REFINED: result.leave_one_out} | hand_eye.compare_methods(used, args.mount, centre)
    calibration_views.print_comparison(rows)
    calibration_views.print_result(out, calibration, result.rejected)
    for warning in result.warnings:
        print_notice(f"sam3-node: warning: {warning}")
    if section.measured is not None:
        passed, line = calibration_views.judge_hand_eye(section.measured)
        if not passed:
            print_notice(f"sam3-node: warning: {line}")


def calibrate_check(args: Namespace, settings: Settings) -> int:
    """Validate a calibration file, and test it on new images.

    Return 1 if the views of the hand-eye calibration did not agree, or, with images, if the error of the board's
    corners is too large.
    """
    require("scipy", _EXTRA)
    from ..calibration import load_calibration
    from .calibration_views import describe_calibration, judge_hand_eye

    calibration = load_calibration(args.file)
    print(*describe_calibration(calibration), sep="\n")
    # each part of the file is judged for itself; the exit code says whether all of them pass
    results = []
    if calibration.hand_eye is not None and calibration.hand_eye.measured is not None:
        results.append(judge_hand_eye(calibration.hand_eye.measured, args.hand_eye_limit))
    if args.sources:
        results.append(_check_corners(args, settings, calibration))
    for _, line in results:
        print(line)
    return 0 if all(passed for passed, _ in results) else 1


def _check_corners(args: Namespace, settings: Settings, calibration: Calibration) -> tuple[bool, str]:
    from ..calibration.bundle import locate_board

    board = _parse_board(args.board)
    views = _collect(args, settings, board)
    intrinsics = calibration.intrinsics_for(views.size)
    # errors of both coordinates as a distance
    errors = {view.name: locate_board(view, board, intrinsics)[2] * 2**0.5 for view in views.views}
    # the median decides: one bad view among many is no bad calibration
    worst = max(errors, key=lambda name: errors[name])
    middle = sorted(errors.values())[len(errors) // 2]
    passed = middle <= args.limit
    verdict = "FAILED"
    if passed:
        verdict = "passed"
    return passed, (
        f"{verdict}: median error of the corners {middle:.2f} px in {len(errors)} views, "
        f"{errors[worst]:.2f} px in {worst}; the limit is {args.limit:g} px"
    )


def _parse_board(text: str | None) -> Board:
    from ..calibration.boards import BOARD_FORMS, Board

    if text is None:
        raise CalibrationError(f"expected --board {BOARD_FORMS}")
    return Board.parse(text)


def _stated_camera(settings: Settings) -> str:
    """Return the camera's name if a user has set it: images in files may be of any camera."""
    return settings.camera.name if "name" in settings.camera.model_fields_set else ""


def _is_live(args: Namespace) -> bool:
    return list(args.sources) == [LIVE]


def _collect(args: Namespace, settings: Settings, board: Board) -> Views:
    from .calibration_views import collect_live, collect_views

    if not _is_live(args):
        return collect_views(args.sources, board, args.topic, max(args.every, 1))
    return collect_live(settings, board, stop_on_signals(), args.pose_stream, args.count)


def _pair(args: Namespace, settings: Settings, board: Board, calibration: Calibration) -> PairedViews:
    """Pair the views of the board, or its poses in a file, with the robot's poses."""
    from ..calibration.poses import read_poses
    from .calibration_views import compute_digest, pair_board_poses, pair_views

    poses: list[RobotPose] = []
    inputs: dict[str, str] = {}
    if args.poses:
        poses = read_poses(args.poses)
        inputs[args.poses.name] = compute_digest(args.poses)
    # without images, the file of poses must have the board's poses, too
    if not args.sources:
        if not poses:
            raise CalibrationError("expected images, a recording or live, and --poses FILE; found neither")
        return PairedViews(pair_board_poses(poses, board, calibration), [], inputs, scaled=True, camera="")
    # with images, each view needs the robot's pose at that moment
    if not board.has_unique_pose:
        raise CalibrationError(
            f"{board} looks the same after half a turn: hand-eye needs a chessboard with an even number of corners on "
            "one side and an odd one on the other, or a charuco or apriltag board"
        )
    views = _collect(args, settings, board)
    pairs, rejected = pair_views(views, poses, board, calibration, args.max_gap_ms)
    left_out = [*views.rejected, *rejected]
    return PairedViews(pairs, left_out, inputs | views.inputs, scaled=False, camera=views.camera)
