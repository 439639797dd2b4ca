"""Collects views of a board, pairs robot poses with them, and reports results, for `calibrate`.

Views come from image files, recordings and live frames, with a guide in the terminal. A pose belongs to an image by its
name or its time. Results go to sections of a calibration file and to the terminal.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import cv2
import numpy as np
import numpy.typing as npt

from ..bags.bag import open_bag
from ..bags.samples import natural_order
from ..calibration import Calibration, load_calibration, save_calibration
from ..calibration.boards import Board, explain_absence
from ..calibration.bundle import BoardView, expected_covariance, locate_board
from ..calibration.camera_file import HandEye, HandEyeMeasured, back_up
from ..calibration.hand_eye import HandEyeResult, HandEyeView, LeaveOneOut
from ..calibration.intrinsics import IntrinsicsResult, Rejected, describe_missing, measure_coverage, outline
from ..calibration.poses import PoseTrack, RobotPose
from ..calibration.rigid_motion import to_motions
from ..errors import CalibrationError, SettingsError, WireError
from ..files import ANY_SIZE, explain_os_error, open_regular, read_regular
from ..geometry import Array, invert, quaternion_from_rotation
from ..processes.signals import print_notice
from ..settings import Settings
from ..transport import FrameSubscriber, Security
from ..transport.tap import PoseSubscriber
from ..types import Frame, FramePose, Image
from ..wire import decode_image, pose_topic
from ..wire.images import narrow

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp")
MAX_IMAGE_BYTES = 256 << 20
"""Size of the largest image file of a board. A larger one is refused."""
GUIDE_VIEWS = 15
"""Minimum number of live views before the calibration begins."""
_STILL_SHARE = 0.004
"""Motion of the board between two frames, as a share of the width, below which it is at rest."""
_NEW_SHARE = 0.04
"""Distance from all views so far, as a share of the width, from which on a view is new."""
POSE_WAIT_MS = 500
"""Longest time to wait for the robot's pose after the last image, which is interpolated with it."""
MAX_LEAVE_ONE_OUT_MM = 10.0
"""Largest leave-one-out error of a hand-eye calibration's position that passes a check."""
MAX_LEAVE_ONE_OUT_DEG = 2.0
"""The same for its rotation, in degrees."""


@dataclass(frozen=True, slots=True)
class Picture:
    """One image of a source, with its capture time for recordings and live frames."""

    name: str
    image: Image
    stamp_ns: int | None = None
    digest: str = ""
    camera: str = ""
    """of a recording; empty for an image file, which may be of any camera"""


@dataclass(slots=True)
class Views:
    """Views of a board in images of one size (height, width), in the order of the source."""

    views: list[BoardView] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    inputs: dict[str, str] = field(default_factory=dict)
    poses: list[FramePose] = field(default_factory=list)
    size: tuple[int, int] = (0, 0)
    camera: str = ""
    """of the images; empty if it is not known"""


def collect_views(sources: Sequence[str], board: Board, camera: str, every: int) -> Views:
    """Find the board in images, folders of images and recordings; use every `every`-th frame of a recording.

    Raises CalibrationError if the images differ in size or no image shows the board, with the reason.
    """
    views = Views()
    cameras = set[str]()
    sizes: dict[tuple[int, int], list[str]] = {}  # the images of each size
    advice = ""
    for picture in _open_sources(sources, camera, every, views.inputs):
        cameras.add(picture.camera)
        sizes.setdefault((picture.image.shape[0], picture.image.shape[1]), []).append(picture.name)
        corners = board.detect(picture.image)
        if corners is not None:
            views.views.append(BoardView(picture.name, corners.ids, corners.pixels, picture.stamp_ns))
            continue
        # the first image without the board is explained, while no other has shown it
        if not views.views and not advice:
            advice = explain_absence(board, picture.image) or ""
        # of a recording, frames without the board are usual, and too many to list
        if picture.stamp_ns is None:
            views.rejected.append(Rejected(picture.name, "the board was not found"))
    _require_one_size(sizes)
    if not views.views:
        total = sum(map(len, sizes.values()))
        advice = f": {advice}" if advice else "; check the board's description, light and sharpness"
        raise CalibrationError(f"expected {board} in the images, found it in 0 of {total}{advice}")
    views.size = next(iter(sizes))
    if len(cameras) == 1:
        (views.camera,) = cameras
    return views


def _require_one_size(sizes: dict[tuple[int, int], list[str]]) -> None:
    # the lens is calibrated for one size: another mode of the camera crops or scales in a way of its own
    if len(sizes) > 1:
        listed = "; ".join(f"{len(names)} of {w}x{h} ({names[0]})" for (h, w), names in sizes.items())
        raise CalibrationError(
            f"expected images of one size, found {listed}; calibrate one mode of the camera at a time"
        )


def _open_sources(
    sources: Sequence[str], camera: str, every: int, inputs: dict[str, str]
) -> Iterator[Picture]:
    for source in sources:
        path = Path(source)
        images = [path]
        if path.is_dir():
            images = sorted(path.iterdir(), key=natural_order)
        # a folder of images, or else one that is a recording
        images = [image for image in images if image.suffix.lower() in IMAGE_SUFFIXES]
        if images:
            yield from (_read_image(image, inputs) for image in images)
        else:
            yield from _read_recording(path, camera, every, inputs)


def _read_image(path: Path, inputs: dict[str, str]) -> Picture:
    with explain_os_error(CalibrationError, f"cannot read {path}"):
        data = read_regular(path, MAX_IMAGE_BYTES)
    # the lens is calibrated in the pixels of the sensor: a turned phone picture must not be turned back
    flags = cv2.IMREAD_COLOR | cv2.IMREAD_ANYDEPTH | cv2.IMREAD_IGNORE_ORIENTATION
    image: npt.NDArray[Any] | None = None
    if data:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    if image is not None and image.dtype == np.uint16:
        image = narrow(image)
    if image is None or image.dtype != np.uint8:
        raise CalibrationError(f"{path}: expected an image file of 8 or 16 bits, found other data")
    if path.name in inputs:
        raise CalibrationError(f"expected each image once, found two named {path.name}; rename one")
    inputs[path.name] = hashlib.sha256(data).hexdigest()
    return Picture(path.name, np.asarray(image, np.uint8))


def _read_recording(path: Path, camera: str, every: int, inputs: dict[str, str]) -> Iterator[Picture]:
    cameras = (camera,) if camera else ()
    with open_bag(path, cameras) as bag:
        if len(bag.cameras) > 1:
            raise CalibrationError(
                f"{path} has the cameras {', '.join(bag.cameras)}: choose one with --topic"
            )
        for number, frame in enumerate(bag):
            if number % every == 0 and (image := _decode(frame)) is not None:
                yield Picture(f"{path.name}#{frame.seq}", image, frame.capture_ns, camera=frame.camera)
    # a recording may be a folder of files; the digest of each goes into the result
    files = [path]
    if path.is_dir():
        files = sorted(path.rglob("*"))
    for file in files:
        if file.is_file():
            inputs[str(file.relative_to(path.parent))] = compute_digest(file)


def _decode(frame: Frame) -> Image | None:
    try:
        return decode_image(frame)
    except WireError:
        return None


def compute_digest(path: Path) -> str:
    """Return the SHA-256 of a file. Raises CalibrationError if it cannot be read."""
    with explain_os_error(CalibrationError, f"cannot read {path}"), open_regular(path, ANY_SIZE) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class CapturedViews:
    """Chooses views among live frames: the board is at rest, and unlike the views so far."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._last: np.ndarray | None = None
        self._outlines: list[np.ndarray] = []
        self.found = Views()

    def is_enough(self, count: int) -> bool:
        """Return True when `count` views are taken. With 0: GUIDE_VIEWS views, and no view is missing."""
        taken = self.found
        if count:
            return len(taken.views) >= count
        return len(taken.views) >= GUIDE_VIEWS and not describe_missing(taken.views, self._board, taken.size)

    def offer(self, picture: Picture) -> bool:
        """Take the view of this image if it is useful. Return True if it was taken.

        Raises CalibrationError for an image of another size than the first.
        """
        size = (picture.image.shape[0], picture.image.shape[1])
        if self.found.size == (0, 0):
            self.found.size = size
        _require_one_size({self.found.size: ["earlier frames"]} | {size: [picture.name]})
        # motion is measured between frames that follow each other: without the board, there is none
        last = self._last
        self._last = None
        corners = self._board.detect(picture.image)
        if corners is None:
            return False
        view = BoardView(picture.name, corners.ids, corners.pixels, picture.stamp_ns)
        place = outline(view, self._board, size)
        self._last = place
        if place is None or last is None or _differ(place, last) >= _STILL_SHARE:
            return False
        # a view like another one adds nothing but weight
        if any(_differ(place, other) < _NEW_SHARE for other in self._outlines):
            return False
        self._outlines.append(place)
        self.found.views.append(view)
        self.found.inputs[picture.name] = picture.digest
        self._print(view)
        return True

    def _print(self, view: BoardView) -> None:
        # what is missing comes first: more views of the usual kind would not help
        missing = describe_missing(self.found.views, self._board, self.found.size)
        more = GUIDE_VIEWS - len(self.found.views)
        if missing:
            text = missing[0]
        elif more > 0:
            text = f"{more} more views, different from the others"
        else:
            text = "complete"
        print_notice(f"view {len(self.found.views)}: {len(view.ids)} corners. Next: {text}")


def _differ(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.sqrt(((first - second) ** 2).mean()))


def collect_live(
    settings: Settings,
    board: Board,
    stop: threading.Event,
    poses: str,
    count: int,
) -> Views:
    """Collect views from live frames of camera `camera.name` until coverage is complete, `count` views, or `stop`.

    With the endpoint `poses`, poses of the gripper are collected beside them. The guide says which view comes next.
    Raises CalibrationError without any view, and TransportError for a malformed endpoint.
    """
    guide = CapturedViews(board)
    guide.found.camera = settings.camera.name
    clock = ""  # of the newest frame
    print_notice(
        f"looking for {board} from camera {settings.camera.name}; hold the board still for each view"
    )
    transport = settings.transport
    cameras = [settings.camera.name]
    security = Security.from_settings(transport)
    with ExitStack() as stack:
        frames = stack.enter_context(FrameSubscriber(transport.frames, cameras=cameras, security=security))
        subscriber: PoseSubscriber | None = None
        if poses:
            subscriber = PoseSubscriber(poses, [pose_topic("gripper")], security)
            stack.enter_context(subscriber)
        while not stop.is_set() and not guide.is_enough(count):
            received = frames.take(200)
            if received is not None and (image := _decode(received.frame)) is not None:
                frame = received.frame
                clock = frame.clock
                digest = hashlib.sha256(frame.colour).hexdigest()
                guide.offer(Picture(f"seq {frame.seq}", image, frame.capture_ns, digest))
            if subscriber is not None:
                guide.found.poses += _take_poses(subscriber, 0)
        if subscriber is not None:  # the pose after the last image
            guide.found.poses += _take_poses(subscriber, POSE_WAIT_MS)
            _require_one_clock(guide.found.poses, clock)
    if not guide.found.views:
        raise CalibrationError(f"expected views of {board} from camera {settings.camera.name}, found none")
    return guide.found


def _take_poses(subscriber: PoseSubscriber, timeout_ms: int) -> list[FramePose]:
    return [pose for pose in subscriber.take(timeout_ms) if isinstance(pose, FramePose)]


def _require_one_clock(poses: Sequence[FramePose], clock: str) -> None:
    # a pose is paired with an image by its time, which means nothing on another clock
    others = {pose.clock for pose in poses} - {clock}
    if others and clock:
        raise CalibrationError(
            f"expected poses stamped by the clock of the frames, {clock}, found {', '.join(sorted(others))}; "
            "publish both on one clock"
        )


def pair_board_poses(poses: Sequence[RobotPose], board: Board, calibration: Calibration) -> list[HandEyeView]:
    """Return views from a file that holds the poses of the board, too. Raises CalibrationError if they are absent.

    The covariances assume that all corners are seen, with a noise of 1 px.
    """
    lens = calibration.intrinsics
    intrinsics = calibration.intrinsics_for((lens.height_px, lens.width_px))
    views = []
    for pose in poses:
        if pose.camera_from_board is None:
            raise CalibrationError(
                f"{pose.name} has no pose of the board: give images as SOURCE, or add `board` to it"
            )
        try:
            covariance = expected_covariance(pose.camera_from_board, board, intrinsics)
        except np.linalg.LinAlgError:  # no camera sees a board there, and the calibration says so
            covariance = np.zeros((6, 6))
        views.append(HandEyeView(pose.name, pose.base_from_gripper, pose.camera_from_board, covariance))
    return views


def pair_views(
    views: Views, poses: Sequence[RobotPose], board: Board, calibration: Calibration, max_gap_ms: float
) -> tuple[list[HandEyeView], list[Rejected]]:
    """Return views with the robot's pose at each, and the views without one.

    Raises CalibrationError if no view has a pose.
    """
    intrinsics = calibration.intrinsics_for(views.size)
    if poses and not any(pose.image or pose.stamp_ns is not None for pose in poses):
        raise CalibrationError("expected an image or a stamp_ns for each pose, found poses with neither")
    find = _PoseFinder(views, poses, max_gap_ms)
    rejected: list[Rejected] = []
    located: list[_LocatedView] = []
    # a view counts if the robot's pose at its time is known, and the board's pose in it can be found
    for view in views.views:
        try:
            robot = find(view.name, view.stamp_ns)
            pose, covariance, sigma = locate_board(view, board, intrinsics)
        except CalibrationError as error:
            rejected.append(Rejected(view.name, str(error)))
            continue
        located.append(_LocatedView(view.name, robot, pose, covariance, sigma))
    if not located:
        reasons = "; ".join(f"{item.name}: {item.reason}" for item in rejected[:3])
        raise CalibrationError(f"no view of the board has a pose of the robot: {reasons}")
    # all views have the noise of the same detector: their median estimates it better than each alone
    noise = float(np.median([view.sigma for view in located])) ** 2
    pairs = [HandEyeView(view.name, view.robot, view.pose, view.covariance * noise) for view in located]
    return pairs, rejected


class _LocatedView(NamedTuple):
    """A view with the robot's pose, and the board's pose in it with its covariance and the noise of its corners."""

    name: str
    robot: Array
    pose: Array
    covariance: Array
    sigma: float


class _PoseFinder:
    """The robot's pose for an image: by its name in the file of poses, else by its time."""

    def __init__(self, views: Views, poses: Sequence[RobotPose], max_gap_ms: float) -> None:
        self._by_name = {PurePath(pose.image).name: pose for pose in poses if pose.image}
        self._max_gap_ns = int(max_gap_ms * 1e6)
        self._track = PoseTrack()
        # poses of the file and of the stream make one track in time
        for pose in poses:
            if pose.stamp_ns is not None:
                self._track.add_matrix(pose.stamp_ns, pose.base_from_gripper)
        for message in views.poses:
            self._track.add(message)

    def __call__(self, name: str, stamp_ns: int | None) -> Array:
        # a name in the file of poses is exact; a time needs poses around it
        if name in self._by_name:
            return self._by_name[name].base_from_gripper
        if stamp_ns is None or not len(self._track):
            named = ""
            if self._by_name:
                named = f"; it names {', '.join(list(self._by_name)[:3])}"
            raise CalibrationError(f"the file of poses names no pose for this image{named}")
        return self._track.at(stamp_ns, self._max_gap_ns)


def make_intrinsics_file(result: IntrinsicsResult, inputs: dict[str, str], camera: str) -> Calibration:
    """Return the calibration file's content for measured intrinsics."""
    solution = result.solution
    fx, fy, cx, cy = map(float, solution.camera)
    counts = measure_coverage(result.views, result.size)
    shape = "shape of the board estimated"
    if result.flat:
        shape = "flat board"
    record = {
        "method": f"bundle adjustment, {shape}",
        **_describe_views(result, result.board, inputs),
        "rms_px": result.rms_px,
        "held_out_px": result.held_out_px,
        "coverage": float((counts > 0).mean()),
        "board_bend_mm": result.bend_mm,
        "sd_px": result.sd,
    }
    # the layout of the file: numbers of the lens, its distortion, and how they were measured
    distortion = {"model": solution.intrinsics.model, "coeffs": solution.intrinsics.coeffs}
    section: dict[str, Any] = {"width_px": result.size[1], "height_px": result.size[0]}
    section |= {"fx_px": fx, "fy_px": fy, "cx_px": cx, "cy_px": cy}
    fields = {"camera": camera, "intrinsics": section | {"distortion": distortion, "measured": record}}
    return Calibration.model_validate(fields)


def _describe_views(
    result: IntrinsicsResult | HandEyeResult, board: Board, inputs: dict[str, str]
) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).replace(microsecond=0),
        "board": str(board),
        "views": len(result.views),
        "rejected": {item.name: item.reason for item in result.rejected},
        "inputs": inputs,
    }


def make_hand_eye_section(result: HandEyeResult, board: Board, inputs: dict[str, str]) -> HandEye:
    """Return the section [hand_eye] of a calibration file for a measured pose."""
    # millimetres and degrees, for the people who read the file
    pose = result.parent_from_camera
    record = {
        "method": "joint refinement of camera and board over all views",
        **_describe_views(result, board, inputs),
        "leave_one_out_mm": result.leave_one_out.rms_mm,
        "leave_one_out_deg": result.leave_one_out.rms_deg,
        "position_95_mm": result.position_95_m * 1e3,
        "rotation_95_deg": float(np.degrees(result.rotation_95_rad)),
        "scale": 1 + result.scale[0],
        "scale_sd": result.scale[1],
        "covariance": result.covariance.tolist(),
    }
    return HandEye.model_validate(
        {
            "kind": result.mounting,
            "translation_m": pose[:3, 3].tolist(),
            "rotation_quaternion_xyzw": quaternion_from_rotation(pose[:3, :3]).tolist(),
            "measured": record,
        }
    )


def describe_calibration(calibration: Calibration) -> list[str]:
    """Return a few lines on what a calibration file holds."""
    # the lens, and how well it was measured
    lens = calibration.intrinsics
    lines = [
        f"intrinsics: {lens.width_px}x{lens.height_px}, fx {lens.fx_px:.2f} fy {lens.fy_px:.2f} cx {lens.cx_px:.2f} "
        f"cy {lens.cy_px:.2f}, {lens.distortion.model}"
    ]
    if (measured := lens.measured) is not None:
        lines.append(
            f"  {measured.date:%Y-%m-%d}, {measured.views} views of {measured.board}: rms {measured.rms_px:.3f} px, "
            f"held out {measured.held_out_px:.3f} px, coverage {100 * measured.coverage:.0f} %"
        )
    # the place on the robot, and how well it was measured
    hand_eye = calibration.hand_eye
    if hand_eye is not None:
        x, y, z = (1e3 * value for value in hand_eye.translation_m)
        lines.append(
            f"hand-eye: {hand_eye.kind}, camera in {calibration.parent} at {x:.1f} {y:.1f} {z:.1f} mm"
        )
        if (pose := hand_eye.measured) is not None:
            scale = ""
            if pose.scale is not None:
                scale = (
                    f", scale of the board by the robot's motion: {pose.scale:.4f} ± {2 * pose.scale_sd:.4f}"
                )
            lines.append(
                f"  {pose.date:%Y-%m-%d}, {pose.views} views: within {pose.position_95_mm:.2f} mm and "
                f"{pose.rotation_95_deg:.3f} degrees (95 %), leave-one-out {pose.leave_one_out_mm:.2f} mm and "
                f"{pose.leave_one_out_deg:.3f} degrees{scale}"
            )
    return lines


def judge_hand_eye(measured: HandEyeMeasured, limit_mm: float = MAX_LEAVE_ONE_OUT_MM) -> tuple[bool, str]:
    """Return whether the record of a hand-eye calibration passes, and a line that says why."""
    # both errors count: a turn of a degree moves a far object by centimetres
    passed = measured.leave_one_out_mm <= limit_mm and measured.leave_one_out_deg <= MAX_LEAVE_ONE_OUT_DEG
    verdict = "FAILED"
    if passed:
        verdict = "passed"
    return passed, (
        f"{verdict}: leave-one-out error of the hand-eye calibration "
        f"{measured.leave_one_out_mm:.2f} mm and {measured.leave_one_out_deg:.3f} degrees; the limits are "
        f"{limit_mm:g} mm and {MAX_LEAVE_ONE_OUT_DEG:g} degrees"
    )


def replace_calibration(path: Path, calibration: Calibration) -> None:
    """Write a calibration file, keep an older one whose hand-eye calibration it replaces, and print the difference.

    Raises OutputError.
    """
    # a hand-eye calibration takes an hour with a robot: it is never overwritten without a copy
    if path.exists():
        # a file of another kind is replaced, too, but kept beside
        try:
            before: Calibration | None = load_calibration(path)
        except SettingsError:
            before = None
        if before is None:
            lost = f"{path} was no calibration file"
        else:
            lost = _describe_change(before, calibration)
        if lost:
            print(f"{lost}; the old file is kept as {back_up(path)}")
    save_calibration(path, calibration)


def _describe_change(before: Calibration, after: Calibration) -> str:
    """Return what is lost of the hand-eye calibration and the depth scale in a file, "" for nothing."""
    old = before.hand_eye
    new = after.hand_eye
    # a section that the new file does not have at all
    if old is None or new is None:
        lost = [name for name in ("hand_eye", "depth") if getattr(before, name) and not getattr(after, name)]
        if not lost:
            return ""
        return f"{' and '.join(lost)} of the file before are not in the new one: measure them again"
    if old.kind != new.kind:
        return f"the hand-eye calibration is replaced: it was {old.kind}, and is {new.kind}"
    # the camera's motion between both results, as one turn and one shift
    motion = to_motions((invert(old.parent_from_camera) @ new.parent_from_camera)[None])[0]
    moved_mm = 1e3 * np.linalg.norm(motion[:3])
    moved_deg = np.degrees(np.linalg.norm(motion[3:]))
    if moved_mm < 1e-3 and moved_deg < 1e-4:
        return ""
    date = ""
    if old.measured is not None:
        date = f" of {old.measured.date:%Y-%m-%d}"
    moved = f"the camera moved by {moved_mm:.2f} mm and {moved_deg:.3f} degrees"
    return f"the hand-eye calibration{date} is replaced: {moved}"


def print_result(path: Path, calibration: Calibration, rejected: Sequence[Rejected]) -> None:
    """Print the rejected views, and what the calibration file holds now."""
    for item in rejected:
        print(f"rejected {item.name}: {item.reason}")
    print(f"{path}:", *describe_calibration(calibration), sep="\n")


def print_comparison(rows: Mapping[str, LeaveOneOut]) -> None:
    """Print the leave-one-out errors of methods on the same views as a table."""
    print(f"{'method':<20} {'mm':>8} {'degrees':>8}   leave-one-out error, root mean square")
    for name, errors in rows.items():
        print(f"{name:<20} {errors.rms_mm:8.2f} {errors.rms_deg:8.3f}")
