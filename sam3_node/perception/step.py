"""The record that travels through the stages of a step.

The caller fills the first fields. Each stage reads what the stages before it have filled, and fills its own. A field
without a default raises AttributeError until a stage has filled it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from ..geometry import DepthMap, Float, Scaling
from ..models import Features
from ..robot.pixels import RobotPixels
from ..tracking import Tracks
from ..tracking.tracks import Cover
from ..types import (
    Frame,
    FramePose,
    Image,
    Instance,
    Intrinsics,
    Mask,
    Plane,
    RobotState,
    Shed,
    StepDecisions,
)
from .joint_encoding import JointEncoding
from .output_masks import HostTracks
from .preparing import PreparedFrame

CAMERA = "camera"
"""Frame of coordinates whose origin is the camera."""
BASE = "base"
"""Frame of coordinates whose origin is the robot's base."""
GRIPPER = "gripper"
"""Frame of coordinates whose origin is the robot's gripper."""


class ObjectEvent(NamedTuple):
    """What has happened to an object on a frame."""

    op: str
    """the event's name on the wire"""
    id: int
    details: Mapping[str, Any] = {}
    """further arguments of the event"""


class MeasuredSurface(NamedTuple):
    """The position in the base of the surface under a mask."""

    position_m: tuple[float, ...]
    covariance_m2: tuple[float, ...]
    """of the position's error: xx, xy, xz, yy, yz, zz"""
    extent_m: tuple[float, ...]


@dataclass(slots=True, eq=False)
class Seen:
    """An object on a frame, from its mask until its status is known."""

    id: int
    mask: Mask
    score: float
    visible: bool
    confidence: float
    """probability in 0..1 that the mask is right"""
    in_view: bool = False
    """True if it is visible and its mask is not empty"""
    covered: bool = False
    """True if the robot is in front of it"""
    tentative: bool = False
    """True if the detector has not confirmed it yet"""
    name_confidence: float | None = None
    """probability in 0..1 that the label is right; None if a user gave it"""
    doubtful: bool = False


@dataclass(slots=True, eq=False, repr=False)
class StepFrame:
    """A frame on its way through a step."""

    frame: Frame
    received_ns: int = 0
    """Unix time"""
    skipped: int = 0
    """number of frames of this camera since the one before"""
    decisions: StepDecisions = field(default_factory=StepDecisions)
    """what was decided for this step; encode fills the batch"""
    robot_state: RobotState | None = None
    """the robot at the frame's capture; None: the first stage that needs it looks it up"""
    prepared: PreparedFrame | None = None
    """this frame, if a thread has decoded it already"""
    encoding: JointEncoding | None = None
    """what encodes this frame with others, or has encoded it ahead; None: its own step encodes it alone"""

    finishes: bool = True
    """False: the caller publishes the masks, and then calls `Pipeline.finish` before anything else"""

    failures: list[str] = field(default_factory=list)
    """which optional stages have failed on this frame, and why"""

    # filled by encode
    image: Image = field(init=False)
    scaling: Scaling = field(init=False)
    pixels: Tensor = field(init=False)
    features: Features = field(init=False)

    # filled by depth
    intrinsics: Intrinsics | None = None
    camera_pose: FramePose | None = None
    """in the base; None: 3-D fields are in the camera's frame"""
    depth: DepthMap | None = None
    """at the size of colour"""
    problem: str | None = None
    """what is wrong with the 3-D fields: why they are missing or not in the base, or why they may be wrong; None if
    nothing is"""
    lacks_robot: bool = False
    """True if that is because the gripper's pose or the joints are not known"""

    # filled by robot
    robot: RobotPixels | None = None
    cover: Cover | None = None
    """the robot before the objects; None also where the settings do not exclude it"""

    # filled by track and detect
    detects: bool = False
    """True if the detector runs on this frame"""
    shed: Shed | None = None
    frame_number: int = field(init=False)
    """the tracker's step"""
    tracks: Tracks = field(init=False)

    # filled by choose
    described_id: int | None = None
    """the object whose appearance is compared on this frame"""

    # filled by window
    followed_in_windows: int = 0
    """objects that were followed in windows"""
    crop_masks: dict[int, Mask] = field(default_factory=dict)
    """by object: masks at the frame's size that are finer than those of `tracks`"""

    # filled by masks, doubt and status
    host: HostTracks = field(init=False)
    seen: list[Seen] = field(init=False)
    instances: Sequence[Instance] = ()

    # filled by spatial, table and held
    surfaces: dict[int, Float] = field(default_factory=dict)
    """by object: measured points [n, 3] in the camera's frame"""
    doubtful: dict[int, MeasuredSurface] = field(default_factory=dict)
    """by object: where the surface under a doubtful mask is; it may be that of something else"""
    table: Plane | None = None
    is_base_tilted: bool = False
    """True if the base's z seems not to be vertical, so that nothing is known of up"""
    events: list[ObjectEvent] = field(default_factory=list)


def list_doubtful(step: StepFrame) -> list[Instance]:
    """Return the instances with a doubtful mask, if the gripper is known: it may hold them."""
    if step.camera_pose is None or step.robot_state is None or step.robot_state.pose is None:
        return []
    return [seen for seen in step.instances if seen.mask.crop.size and seen.doubtful]


def list_measured(instances: Sequence[Instance]) -> list[Instance]:
    """Return the instances that are measured in 3-D: those with a mask that is not doubtful."""
    return [seen for seen in instances if seen.mask.crop.size and not seen.doubtful]
