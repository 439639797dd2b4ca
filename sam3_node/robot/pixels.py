"""Say which places and boxes the robot covers on a frame, from its pixels."""

from __future__ import annotations

import math
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ..geometry import Array, invert, vector_from_rotation
from ..schema.state import Count, SavedState
from ..types import JointState, Mask

T = TypeVar("T", bound=np.generic)

COVERED = 0.5
"""Share of an object's last place from which it is hidden, and of a detection's box from which it is dropped."""
MOVED_M = 0.02
"""Metres. A camera that has moved farther looks at another place: what was there may be anywhere in the image."""
MOVED_RAD = math.radians(2)
"""Radians. The same for a camera that has turned farther."""


class Place(SavedState):
    """The place where an object was last: what was in view, and what the robot hides of it."""

    mask: Mask
    whole_px: Count
    """pixels of the object when the robot was not in front of it"""
    camera_from_base: Array
    """[4, 4], when the object was in view"""

    def __post_init__(self) -> None:
        # a saved state may come from a file
        height, width = self.mask.size
        x0, y0, x1, y1 = self.mask.box
        is_inside = 0 <= x0 <= x1 <= width and 0 <= y0 <= y1 <= height
        if not is_inside or self.mask.crop.size != (x1 - x0) * (y1 - y0) or self.mask.crop.ndim != 2:
            raise ValueError(
                f"expected a mask of {height} x {width} pixels, found one with the box {self.mask.box}"
            )
        if self.camera_from_base.shape != (4, 4):
            raise ValueError(f"expected a pose [4, 4], found {list(self.camera_from_base.shape)}")


class RobotPixels(NamedTuple):
    """The robot on a frame."""

    joints: JointState
    inside: npt.NDArray[np.bool_]
    """[height, width]"""
    camera_from_base: Array
    """[4, 4]"""

    def hides(self, place: Place) -> bool:
        """Return True if the robot is in front of most of a place, at which the camera still looks."""
        if not self.looks_at(place):
            return False
        hidden_px = np.count_nonzero(crop_to(self.inside, place.mask) & place.mask.crop)
        return bool(hidden_px > COVERED * place.mask.area)

    def looks_at(self, place: Place) -> bool:
        """Return True if the camera is where it was when it saw the object there."""
        # a mask in pixels says where the object is only while the camera stands still
        motion = self.camera_from_base @ invert(place.camera_from_base)
        turned_rad = float(np.linalg.norm(vector_from_rotation(motion[:3, :3])))
        return float(np.linalg.norm(motion[:3, 3])) <= MOVED_M and turned_rad <= MOVED_RAD

    def covers(self, box: tuple[float, float, float, float]) -> bool:
        """Return True if the robot fills most of a box (x0, y0, x1, y1) in pixels of the frame."""
        x0, y0, x1, y1 = (max(0, round(side)) for side in box)
        crop = self.inside[y0:y1, x0:x1]
        # a box beside the image has no pixels, and so no mean
        return crop.size > 0 and float(crop.mean()) > COVERED


def crop_to(image: npt.NDArray[T], mask: Mask) -> npt.NDArray[T]:
    """Return the part of an image, which is not copied, in the box of a mask."""
    x0, y0, x1, y1 = mask.box
    return image[y0:y1, x0:x1]
