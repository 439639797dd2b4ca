"""Finds the gripper's pixels on recorded frames, as the node found those of the whole robot."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from ...calibration import Calibration, load_calibration
from ...errors import CalibrationError
from ...geometry import invert, matrix_of
from ...robot.body import Pixels, RobotBody
from ...robot.lens_view import LensView
from ...types import MaskFrame


class GripperFinder:
    """The robot's body and the lenses of its cameras, whose files are read when a mask of the robot first comes."""

    def __init__(self, urdf: Path, base: str, calibrations: Sequence[Path]) -> None:
        self._urdf = urdf
        self._base = base
        self._files = calibrations
        self._views: dict[tuple[str, tuple[int, int]], LensView | None] = {}

    @cached_property
    def _body(self) -> RobotBody:
        return RobotBody(self._urdf, self._base)

    @cached_property
    def _calibrations(self) -> list[Calibration]:
        return [load_calibration(path) for path in self._files]

    def find(self, masks: MaskFrame) -> Pixels | None:
        """Return the gripper's pixels, bool [height, width]; None if joints, pose or lens of the camera lack.

        Raises SettingsError for files that cannot be read, and MissingExtraError without the extra `robot`.
        """
        view = self._find_view(masks)
        if view is None or masks.joints is None or masks.camera_pose is None:
            return None
        try:
            base_from_link = self._body.place(masks.joints.positions)
        except CalibrationError:
            return None
        camera_from_link = invert(matrix_of(masks.camera_pose)) @ base_from_link
        return self._body.draw(camera_from_link, view, links=self._body.gripper)

    def _find_view(self, masks: MaskFrame) -> LensView | None:
        size = (masks.height, masks.width)
        key = (masks.camera, size)
        if key not in self._views:
            named = [item for item in self._calibrations if item.camera == masks.camera]
            found = [*named, *(item for item in self._calibrations if not item.camera)]
            self._views[key] = LensView(found[0].intrinsics_for(size), size) if found else None
        return self._views[key]
