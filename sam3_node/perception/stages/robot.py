"""Find the robot's pixels on each frame, and keep the objects that it covers from being lost."""

from __future__ import annotations

import logging

import cv2
import numpy as np

from ...errors import CalibrationError
from ...geometry import DepthMap, invert, matrix_of
from ...models import TrackerModel
from ...robot.body import RobotBody
from ...robot.lens_view import LensView
from ...robot.pixels import COVERED, Place, RobotPixels, crop_to
from ...settings import RobotSettings
from ...tracking.host_copy import copy_to_device
from ...tracking.tracks import Cover
from ...types import Mask
from ..objects import Objects
from ..stage import PerObject, Stage
from ..step import StepFrame
from ..surfaces import NOISE_PER_M

log = logging.getLogger(__name__)

GROWTH = 1.2
"""Factor by which the visible and the covered part together may exceed the area of the whole object. Above it, the
object has moved, and the covered part is dropped from its last location."""
MAX_REPORTED = 16
"""Lines about joints that do not fit which are logged at most. A robot may send other names each time."""
FAR_PERCENTILE = 90
"""Percentile of the depths under an object's mask that counts as its far side: masks leak onto what is behind."""
BEHIND_M = 0.02
"""Metres behind an object's far side from which on a point does not belong to it, in addition to three times the depth
noise."""
OPEN_SHARE = 0.2
"""Share of an object's last location that the robot must leave uncovered for depth there to show that the object is
gone."""
COVERED_VALUE = 127
"""Value of 0..255 above which the robot covers most of a pixel in a mask of low resolution."""


class Places:
    """Where each object was last, and what the robot has hidden of it since."""

    def __init__(self, objects: Objects) -> None:
        self._places = objects.register(PerObject("places", Place))
        self._far_m = objects.register(PerObject("place_depths", float))
        """depth of the far side of each object, where depth is known"""

    def find_covered(self, robot: RobotPixels, depth: DepthMap | None = None) -> frozenset[int]:
        """Return the objects whose last place is mostly under the robot, unless depth says that they are not there."""
        hidden = [object_id for object_id, place in self._places.items() if robot.hides(place)]
        return frozenset(object_id for object_id in hidden if not self._is_refuted(object_id, robot, depth))

    def _is_refuted(self, object_id: int, robot: RobotPixels, depth: DepthMap | None) -> bool:
        """Return True if depth shows that the robot is behind an object's place, or that the object has left it."""
        place = self._places[object_id]
        far_m = self._far_m.get(object_id)
        if depth is None or far_m is None or depth.image.shape != place.mask.size:
            return False
        z = crop_to(depth.image, place.mask) * np.float64(depth.scale_m)
        is_behind = z > far_m + BEHIND_M + 3 * NOISE_PER_M * far_m**2
        under_robot = crop_to(robot.inside, place.mask)
        # a robot behind the place hides nothing of it
        in_front = place.mask.crop & under_robot & ~is_behind
        if np.count_nonzero(in_front) <= COVERED * place.mask.area:
            return True
        # where the robot leaves the place open, there is what was behind the object
        is_open = place.mask.crop & ~under_robot & (z > 0)
        open_px = np.count_nonzero(is_open)
        is_gone = np.count_nonzero(is_open & is_behind) > open_px / 2
        return bool(open_px >= OPEN_SHARE * place.mask.area and is_gone)

    def observe(
        self, object_id: int, mask: Mask, robot: RobotPixels | None, depth: DepthMap | None = None
    ) -> None:
        """Take an object's mask in view, without pixels of the robot.

        Its place is the mask, and what it was before where the robot is now: an arm that comes slowly hides it little
        by little. A place that so becomes larger than the object is one that the object has left. Without the robot,
        its place is forgotten.
        """
        before = self._places.pop(object_id, None)
        self._far_m.pop(object_id, None)
        if robot is None:
            return
        if depth is not None and depth.image.shape == mask.size:
            units = crop_to(depth.image, mask)[mask.crop]
            units = units[units > 0]
            if units.size:
                self._far_m[object_id] = float(np.percentile(units, FAR_PERCENTILE)) * depth.scale_m
        place = Place(mask, mask.area, robot.camera_from_base)
        if before is not None and before.mask.size == mask.size and robot.looks_at(before):
            # what the robot hides now was the object's place before, so it probably still is
            hidden = before.mask.crop & crop_to(robot.inside, before.mask)
            hidden_px = np.count_nonzero(hidden)
            if hidden_px:
                # the whole was seen before the robot came, not now
                place.whole_px = before.whole_px
                if mask.area + hidden_px <= GROWTH * before.whole_px:
                    both = mask.full()
                    crop_to(both, before.mask)[hidden] = True
                    place.mask = Mask.from_full(both)
        self._places[object_id] = place


class FindRobot(Stage):
    """Finds the robot's pixels, and if the settings exclude it, which objects are behind them.

    If joints or a calibration are missing, the step's `problem` says so, and nothing is excluded.
    """

    name = "robot"
    timed = "host"
    is_optional = True

    def __init__(
        self, body: RobotBody, settings: RobotSettings, model: TrackerModel, places: Places, exclude: bool
    ) -> None:
        self._body = body
        self._margin_m = settings.depth_margin_m
        self._model = model
        self._places = places
        self._exclude = exclude
        self._view: LensView | None = None
        self._reported: set[str] = set()
        """What the log has reported of names that do not fit."""

    def run(self, step: StepFrame) -> None:
        """Fill `robot` and `cover`."""
        try:
            step.robot = self.see(step)
        except CalibrationError as error:
            # an earlier problem may be the cause of this one
            step.problem = step.problem or f"no mask of the robot: {error}"
            step.lacks_robot |= step.robot_state is None or step.robot_state.joints is None
            return
        self._tell_names(step)
        if self._exclude:
            # the tracker needs the robot at the size of its own masks: pixels that it fills by more than half
            bright = step.robot.inside.view(np.uint8) * np.uint8(255)
            low = (
                cv2.resize(bright, self._model.mask_size[::-1], interpolation=cv2.INTER_AREA) > COVERED_VALUE
            )
            pixels = copy_to_device(low, self._model.device)
            step.cover = Cover(pixels, self._places.find_covered(step.robot, step.depth))

    def _tell_names(self, step: StepFrame) -> None:
        """Tell which joints have no position, as the step's problem, and which names the URDF lacks, in the log."""
        positions = step.robot.joints.positions if step.robot is not None else {}
        lacking = self._body.describe_lacking(positions)
        step.problem = step.problem or lacking
        for text in (lacking, self._body.describe_strangers(positions)):
            # once: each frame would log a line
            if text is not None and text not in self._reported and len(self._reported) < MAX_REPORTED:
                self._reported.add(text)
                log.warning("%s", text)

    def see(self, step: StepFrame) -> RobotPixels:
        """Return the robot's pixels on a frame. Raises CalibrationError if something is missing."""
        joints = None if step.robot_state is None else step.robot_state.joints
        if joints is None:
            raise CalibrationError("expected joints at the time of the image, found none")
        if step.intrinsics is None or step.camera_pose is None:
            raise CalibrationError("expected a calibration with hand_eye in spatial.calibration, found none")
        size = (step.frame.height, step.frame.width)
        # what a lens can show is computed again only when the lens or the size changes
        if self._view is None or (self._view.intrinsics, self._view.size) != (step.intrinsics, size):
            self._view = LensView(step.intrinsics, size)
        camera_from_base = invert(matrix_of(step.camera_pose))
        camera_from_link = camera_from_base @ self._body.place(joints.positions)
        inside = self._body.draw(camera_from_link, self._view, step.depth, self._margin_m)
        return RobotPixels(joints, inside, camera_from_base)


class CutRobot(Stage):
    """Takes the robot's pixels out of the masks, and marks the objects that it covers."""

    name = "cover"
    timed = "host"
    counts_as = "masks"

    def __init__(self, places: Places) -> None:
        self._places = places

    def run(self, step: StepFrame) -> None:
        """Change the masks of what is seen, if the robot is excluded. Objects in view get a new place."""
        cover = step.cover
        excluded = None if cover is None else step.robot
        for seen in step.seen:
            if cover is not None and excluded is not None:
                seen.mask = seen.mask.without(excluded.inside)
                # a detection may have found it elsewhere
                seen.covered = seen.id in cover.ids and not seen.visible
                if seen.covered:
                    seen.mask = Mask.empty(seen.mask.size)
                # the robot may have taken all that was left of the mask
                seen.in_view = seen.visible and seen.mask.area > 0
            if seen.in_view:
                self._places.observe(seen.id, seen.mask, excluded, step.depth)
