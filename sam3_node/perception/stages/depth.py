"""Find where the camera of a frame is, its intrinsics, and its depth at the size of colour.

Depth is used if it is `aligned` to colour, of colour's size or of its aspect ratio (then depth is resampled to the
nearest pixel). Intrinsics are the calibration's, else the frame's.
"""

from collections.abc import Callable

import cv2
import numpy as np

from ...calibration import Calibration
from ...errors import Sam3NodeError
from ...geometry import DepthMap, RayMap, matrix_of, pose_of
from ...types import Depth, DepthImage, Frame, FramePose, Intrinsics, RobotState
from ...wire import decode_depth
from ..stage import Clock, Stage
from ..step import BASE, CAMERA, GRIPPER, StepFrame, list_doubtful, list_measured

ASPECT_TOLERANCE = 0.01
"""Largest difference of the ratio of two aspect ratios from 1 at which one image is the other resized."""
OUTSIDE = 0.95
"""Share of a side beyond which the principal point is that of a larger image."""
MIDDLE_TOLERANCE = 0.15
"""Largest difference of the principal point's shares of the two sides from each other, for the middle of an image."""
FARTHEST_M = 6.0
"""Median depth beyond which the unit of depth is doubted. Depth cameras of robots see less far."""
COARSEST_M = 0.01
"""Largest unit of depth that is not doubted. With a larger one, positions are in steps of it."""
NEAREST_M = 0.02
"""Median depth below which the unit of depth is doubted. Depth cameras see nothing so near."""
UNIT_STRIDE = 16
"""Distance in pixels of the depths whose median is looked at."""


class ReadDepth(Stage):
    """Finds the camera's pose and intrinsics, and reads depth if a later stage needs it.

    The step's `problem` says why depth or positions in the base are missing. `find_robot` returns the robot at a
    frame's capture, where the step does not say it. `early`: this runs before the robot is looked for, which always
    needs depth. Else it runs after the masks, as late as possible, and reads depth only for objects or the table.
    """

    name = "depth"
    timed = "host"
    is_optional = True

    def __init__(
        self,
        calibration: Calibration | None,
        find_robot: Callable[[Frame], RobotState],
        measures_table: bool,
        early: bool,
        uncalibrated: str | None = None,
    ) -> None:
        """`uncalibrated` is the reason for which no calibration file serves this camera, though there are some."""
        self.counts_as = "robot" if early else "spatial"
        self._calibration = calibration
        self._find_robot = find_robot
        self._measures_table = measures_table
        self._early = early
        self._uncalibrated = uncalibrated
        self._rays = RayMap()

    def clock(self, step: StepFrame) -> Clock | None:
        """Return the clock of frames with depth, and of the search for the robot, which needs this on all frames."""
        if step.frame.depth is None and not self._early:
            return None
        return self.timed

    def run(self, step: StepFrame) -> None:
        """Fill `robot_state`, `camera_pose`, `intrinsics`, `depth` and `problem`."""
        # a live node gets poses all the time, so the later it looks, the better it knows the moment of the image
        if step.robot_state is None:
            step.robot_state = self._find_robot(step.frame)
        step.problem = self._uncalibrated
        step.camera_pose = self._locate(step, step.robot_state.pose)
        step.intrinsics = self._find_intrinsics(step)
        fits = step.frame.depth is not None and self._fits(step, step.frame.depth)
        # decoding takes time, so depth is left alone where nothing would be measured
        needed = (
            self._early or self._measures_table or bool(list_measured(step.instances) or list_doubtful(step))
        )
        if step.frame.depth is not None and step.intrinsics is not None and fits and needed:
            step.depth = self._read(step, step.frame.depth, step.intrinsics)

    def _locate(self, step: StepFrame, robot_pose: FramePose | None) -> FramePose | None:
        """Return the camera's pose in the base; None if it is not known."""
        calibration = self._calibration
        if calibration is None or calibration.hand_eye is None:
            return None
        gripper = None
        if calibration.parent == GRIPPER:
            if robot_pose is None:
                # without depth, no positions are missing
                step.lacks_robot = step.frame.depth is not None
                step.problem = (
                    "no pose of the gripper at the time of the image, so positions are in the camera's frame"
                )
                return None
            gripper = matrix_of(robot_pose)
        matrix = calibration.base_from_camera(gripper)
        return pose_of(matrix, CAMERA, BASE, step.frame.capture_ns, step.frame.clock)

    def _find_intrinsics(self, step: StepFrame) -> Intrinsics | None:
        """Return the intrinsics of colour; None if they are not known, with the reason in `problem`."""
        frame = step.frame
        if self._calibration is not None:
            try:
                return self._calibration.intrinsics_for((frame.height, frame.width))
            except Sam3NodeError as error:
                step.problem = str(error)
                return None
        if frame.intrinsics is None and frame.depth is not None:
            step.problem = (
                "depth without intrinsics: expected them in the frames or a file in spatial.calibration"
            )
        if frame.intrinsics is not None and _is_of_larger_image(frame.intrinsics, frame):
            step.problem = (
                f"intrinsics of another size: expected some for {frame.width}x{frame.height}, found the principal "
                f"point ({frame.intrinsics.cx:g}, {frame.intrinsics.cy:g}) outside; scale them as the image was, or "
                "set spatial.calibration"
            )
            return None
        return frame.intrinsics

    def _fits(self, step: StepFrame, depth: Depth) -> bool:
        """Return True if depth can be used; else the reason goes into `problem`."""
        stated = self._calibration.depth if self._calibration is not None else None
        is_aligned = depth.aligned or (stated is not None and stated.aligned)
        refusal = _refuse(depth, step.frame, is_aligned)
        step.problem = refusal or step.problem
        return refusal is None

    def _read(self, step: StepFrame, depth: Depth, intrinsics: Intrinsics) -> DepthMap | None:
        """Return the depth at the size of colour; None if it cannot be decoded, with the reason in `problem`."""
        size = (step.frame.height, step.frame.width)
        try:
            image = decode_depth(depth)
        except Sam3NodeError as error:
            step.problem = str(error)
            return None
        # nothing can be measured then, and the user learns why
        if not image.any():
            step.problem = "depth without any valid value"
        # to the size of colour: the nearest pixel, because the mean of two depths lies on neither surface
        if image.shape != size:
            image = np.asarray(cv2.resize(image, size[::-1], interpolation=cv2.INTER_NEAREST), np.uint16)
        stated = self._calibration.depth if self._calibration is not None else None
        # a scale in the calibration was stated by the user, so it wins
        scale_m = (stated.scale_m if stated is not None else None) or depth.scale_m
        step.problem = step.problem or _doubt_unit(image, scale_m)
        focal_px = (intrinsics.fx * intrinsics.fy) ** 0.5
        return DepthMap(image, scale_m, self._rays.rays(intrinsics, size), focal_px)


def _doubt_unit(image: DepthImage, scale_m: float) -> str | None:
    """Return why the unit of a depth image is doubtful, None if it is not."""
    units = image[::UNIT_STRIDE, ::UNIT_STRIDE]
    units = units[units > 0]
    if not units.size:
        return None
    depth_m = float(np.median(units)) * scale_m
    if NEAREST_M <= depth_m <= FARTHEST_M and scale_m > COARSEST_M:
        return (
            f"depth in steps of {scale_m:g} m: expected steps of {COARSEST_M:g} m at most; is scale_m right, or is "
            "depth sent in whole metres? Send millimetres, with scale_m 0.001"
        )
    if NEAREST_M <= depth_m <= FARTHEST_M:
        return None
    # one digit, because a replay counts each text for itself
    return (
        f"depth of {float(f'{depth_m:.1g}'):g} m: expected a median of {NEAREST_M:g} to {FARTHEST_M:g} m; is scale_m "
        f"right, {scale_m:g} m a unit? Depth in millimetres has 0.001; correct it in the camera, or set scale_m under "
        "[depth] of the calibration file"
    )


def _is_of_larger_image(intrinsics: Intrinsics, frame: Frame) -> bool:
    """Return True if the principal point is the middle of an image of about twice the frame's size or more."""
    x = intrinsics.cx / frame.width
    y = intrinsics.cy / frame.height
    return min(x, y) > OUTSIDE and abs(x / y - 1) < MIDDLE_TOLERANCE


def _refuse(depth: Depth, frame: Frame, is_aligned: bool) -> str | None:
    """Return the reason for which depth cannot be used, None if it can."""
    if not is_aligned:
        return (
            f"expected depth that is aligned to colour, found {depth.width}x{depth.height} beside "
            f"{frame.width}x{frame.height} without a word of it; align it in the camera, or state it: depth.aligned = "
            "true in the calibration file, --depth-aligned of a replay"
        )
    aspect = (depth.width / depth.height) / (frame.width / frame.height)
    if abs(aspect - 1) > ASPECT_TOLERANCE:
        return (
            f"expected depth of colour's aspect ratio, {frame.width}x{frame.height}, found "
            f"{depth.width}x{depth.height}; align it in the camera"
        )
    return None
