"""Values that all packages share and messages carry: frames, masks and instances, poses and joints.

A field that messages carry has its type and bounds here; `wire.messages` says in which order they are written.

Pixel coordinates have their origin at the corner of the top-left pixel. Boxes are (x0, y0, x1, y1), with x1 and y1
exclusive. Times are integers in nanoseconds, lengths are in metres.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, make_dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias, TypedDict

import msgspec
from msgspec import NODEFAULT, Meta
from msgspec.structs import replace

from ..palette_png import encode_labels, palette_index
from .fields import (
    MAX_BATCH,
    MAX_ITEMS,
    Epoch,
    Finite,
    FromOne,
    Name,
    Natural,
    NotNegative,
    PixelBox,
    Positive,
    Share,
    Side,
    Size3,
    Text,
    Vector2,
    Vector3,
    Vector4,
    Vector6,
)

if TYPE_CHECKING:
    import numpy


class _Numpy:
    """The module numpy, imported when the first of its names is used: a client starts in half the time."""

    def __getattr__(self, name: str) -> Any:
        import numpy

        value = getattr(numpy, name)
        setattr(self, name, value)  # the next use finds it without this function
        return value


if TYPE_CHECKING:
    lazy_numpy = numpy
else:
    lazy_numpy = _Numpy()
np = lazy_numpy

NANOSECONDS = 1_000_000_000
"""Nanoseconds of one second"""
ACCELERATION_MPS2 = 1.0
"""Standard deviation of an object's acceleration, white noise, where its velocity is measured or used."""
MAX_MOVE_MS = 250.0
"""Milliseconds by which `MaskFrame.moved_to` moves masks at most, unless a caller asks for more."""
MAX_MOTION_S = 0.5
"""Longest time between two captures that show an object's motion."""
KEY_ROLES = ("node", "camera", "robot", "reader", "operator")
"""Roles of keys. node: binds masks and control. camera: binds frames of its own name. robot: binds poses.
reader: receives, and requests status and description. operator: receives, and sends all requests."""
CAMERA_SILENT_S = 3.0
"""Seconds without a frame after which a camera does not count as one that sends."""
NAMED = 8
"""Objects that the text of a MaskFrame names. It counts the others."""
MAX_MISSING_FRAMES = 3600 * 1000
"""An hour at 1000 frames a second. A greater step of `seq` means that the camera started again."""
MAX_SLOTS = 64
"""Frames that the memory of a camera may hold."""
MAX_SLOT_BYTES = 64 << 20
"""Bytes of one of them."""
MAX_COEFFS = 14
"""Coefficients of a model of distortion."""
MAX_CAPTURE_NS = 2**62
"""Largest time of capture: in Unix time it is in the year 2116."""
ROBOT = "robot"
"""Name of a robot that has no other."""

ColourEncoding = Literal["bgr8", "rgb8", "mono8", "jpeg", "png", "h264"]
"""How the pixels of a frame are encoded. A frame in h264 is a packet of its camera's video."""
DepthEncoding = Literal["z16", "z16+zstd", "png16"]
MaskEncoding = Literal["bits+zstd", "rle"]
TrackState = Literal["tentative", "tracked", "occluded"]
Delivery = Literal["newest", "every"]
Clock = Literal["system", "monotonic", "device"]
Priority = Literal["normal", "low"]
"""Priority of an object. Those of low priority are the first not to be tracked on every frame under load."""
Box = tuple[int, int, int, int]
Image: TypeAlias = "np.typing.NDArray[np.uint8]"
"""Pixels uint8 [h, w, 3] in BGR order, or [h, w]."""
DepthImage: TypeAlias = "np.typing.NDArray[np.uint16]"
"""Depth values uint16 [h, w]."""
Unmoved = Literal["too far", "hidden", "doubtful", "no motion"]
"""Why `MaskFrame.moved_to` left an instance as it was."""
Buffer = bytes | bytearray | memoryview
Measures = Annotated[Mapping[Text, int | Finite], Meta(max_length=MAX_ITEMS)]
"""Numbers by their names."""
CaptureTime = Annotated[int, Meta(ge=0, le=MAX_CAPTURE_NS)]


class _DataclassFields:
    """Lets `dataclasses.replace`, `fields` and `asdict` take values, as they take the dataclasses of programs."""

    def __get__(self, value: object, kind: type[Value]) -> dict[str, Field[Any]]:
        return _list_dataclass_fields(kind)


class Value(msgspec.Struct, frozen=True):
    """Base of the values. They cannot be changed."""

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    else:
        __dataclass_fields__ = _DataclassFields()


@cache
def _list_dataclass_fields(kind: type[Value]) -> dict[str, Field[Any]]:
    names = kind.__struct_fields__
    defaults = (NODEFAULT,) * (len(names) - len(kind.__struct_defaults__)) + kind.__struct_defaults__
    # all are required, then none: order does not matter to those who only list or copy them
    parts = [
        (name, Any, field(kw_only=True) if default is NODEFAULT else field(default=None, kw_only=True))
        for name, default in zip(names, defaults, strict=True)
    ]
    made: Any = make_dataclass(kind.__name__, parts)
    fields: dict[str, Field[Any]] = made.__dataclass_fields__
    return fields


# Camera frames


class FrameKey(NamedTuple):
    """Identity of a frame. `seq` alone is not enough: it starts again when a camera is restarted."""

    camera: str
    seq: int
    capture_ns: int


def count_missing_frames(earlier_seq: int, later_seq: int) -> int:
    """Return the number of frames between two of a camera; 0 if it started again in between."""
    # a camera that was started again counts from the beginning, or from any other number
    missing = later_seq - earlier_seq - 1
    return missing if 0 <= missing <= MAX_MISSING_FRAMES else 0


class Intrinsics(Value, frozen=True):
    """Pinhole intrinsics in pixels, with the distortion `coeffs` of `model` in OpenCV's order.

    As in OpenCV and ROS, (cx, cy) is measured from the centre of the top-left pixel.
    """

    fx: Positive
    fy: Positive
    cx: Finite
    cy: Finite
    model: Literal["none", "brown_conrady", "fisheye"] = "none"
    coeffs: Annotated[tuple[Finite, ...], Meta(max_length=MAX_COEFFS)] = ()


class FramePose(Value, frozen=True, rename={"position_m": "position", "quaternion_xyzw": "quaternion"}):
    """Pose of the coordinate frame `frame` in its `parent` at `stamp_ns` of `clock`: position and unit quaternion.

    The robot's is frame "gripper" in parent "base". Points of the frame become points of the parent by rotation, then
    translation.
    """

    frame: Name
    parent: Name
    stamp_ns: Natural
    position_m: Vector3
    quaternion_xyzw: tuple[Finite, Finite, Finite, Finite]
    clock: Clock = "system"


class Plane(Value, frozen=True):
    """A plane in the robot's base: the points whose product with `normal` is `offset_m`."""

    normal: Annotated[tuple[Finite, ...], Meta(min_length=3, max_length=3)]
    """of length 1, upward"""
    offset_m: Finite
    rms_m: NotNegative
    """of the distances of the points that it was measured from"""


class JointState(Value, frozen=True):
    """Positions of a robot's joints at one time, by their names: radians, or metres where a joint slides."""

    robot: Name
    stamp_ns: Natural
    positions: Measures
    clock: Clock = "system"


ActionSource = Literal["leader", "command", "policy"]
"""What an action comes from: a leader arm that a person moves, a command of a controller, or a policy."""


class RobotAction(Value, frozen=True):
    """What a robot was told to do at one time: numbers by their names, in the units of its joints."""

    robot: Name
    stamp_ns: Natural
    values: Measures
    source: ActionSource
    clock: Clock = "system"


RobotMessage = FramePose | JointState
"""What a robot publishes about itself."""


class RobotState(NamedTuple):
    """The robot at the capture of a frame: the gripper's pose in the base, and the joints. None: not known."""

    pose: FramePose | None = None
    joints: JointState | None = None


class Depth(Value, frozen=True):
    """An encoded depth image: uint16 in units of `scale_m` metres; 0 marks an unknown depth.

    If `aligned` is true, depth pixel (x, y) and colour pixel (x, y) lie on the same ray.
    """

    width: Side
    height: Side
    encoding: DepthEncoding
    scale_m: Positive
    aligned: bool
    data: Buffer

    def __repr__(self) -> str:
        size = f"{self.width}x{self.height}"
        return f"Depth({size}, {self.encoding}, scale_m={self.scale_m}, aligned={self.aligned})"


class Frame(Value, frozen=True):
    """One camera image as it is sent: `colour` holds the encoded bytes, in `encoding`.

    `capture_ns` is a time of `clock`: "system" (Unix time), "monotonic" (of this host) or "device".
    """

    camera: Name
    seq: Natural
    capture_ns: CaptureTime
    width: Side
    height: Side
    encoding: ColourEncoding
    colour: Buffer
    clock: Clock = "system"
    sent_ns: Natural = 0
    depth: Depth | None = None
    intrinsics: Intrinsics | None = None
    times: Measures = msgspec.field(default_factory=dict)

    def __repr__(self) -> str:
        size = f"{self.width}x{self.height}"
        depth = f", {self.depth!r}" if self.depth else ""
        return f"Frame({self.camera} #{self.seq} at {self.capture_ns} of {self.clock}, {size} {self.encoding}{depth})"

    @property
    def key(self) -> FrameKey:
        """Identity of this frame; its masks have the same key."""
        return FrameKey(self.camera, self.seq, self.capture_ns)


class FramePlace(Value, frozen=True):
    """Where the pixels of a frame lie in the memory of a camera's process, for readers on the same machine."""

    pid: Natural
    """the process"""
    descriptor: Natural
    """of its memory"""
    token: Annotated[bytes, Meta(min_length=16, max_length=16)]
    """random, the same in the memory's head"""
    slots: Annotated[int, Meta(ge=1, le=MAX_SLOTS)]
    """number of frames that the memory holds"""
    slot_bytes: Annotated[int, Meta(ge=1, le=MAX_SLOT_BYTES)]
    """memory of one"""
    number: Natural
    """of the frame, counted from 0; its slot is the rest of division by `slots`"""
    sizes: Annotated[tuple[FromOne, ...], Meta(min_length=1, max_length=2)]
    """bytes of the colour, and of the depth behind it"""


# Masks and tracked objects


@dataclass(frozen=True, slots=True)
class Mask:
    """A binary mask of an image of `size` (height, width), stored as the crop inside its box.

    `crop` is bool [y1 - y0, x1 - x0]. An empty mask has the box (0, 0, 0, 0) and a crop of shape [0, 0].
    """

    size: tuple[int, int]
    box: Box
    crop: np.typing.NDArray[np.bool_] = field(repr=False)

    @classmethod
    def from_full(cls, full: np.typing.NDArray[np.bool_]) -> Mask:
        """Create a mask from a bool image [height, width], cropped to its tight box."""
        height, width = full.shape
        rows = np.flatnonzero(full.any(axis=1))
        columns = np.flatnonzero(full.any(axis=0))
        if rows.size == 0:
            return cls.empty((height, width))
        x0 = int(columns[0])
        y0 = int(rows[0])
        x1 = int(columns[-1]) + 1
        y1 = int(rows[-1]) + 1
        return cls((height, width), (x0, y0, x1, y1), np.ascontiguousarray(full[y0:y1, x0:x1]))

    @classmethod
    def empty(cls, size: tuple[int, int]) -> Mask:
        """Create an empty mask of an image of `size` (height, width)."""
        return cls(size, (0, 0, 0, 0), np.zeros((0, 0), dtype=np.bool_))

    def full(self) -> np.typing.NDArray[np.bool_]:
        """Return the mask as a whole image, bool [height, width]."""
        image = np.zeros(self.size, dtype=np.bool_)
        x0, y0, x1, y1 = self.box
        image[y0:y1, x0:x1] = self.crop
        return image

    def without(self, pixels: np.typing.NDArray[np.bool_]) -> Mask:
        """Return the mask without these pixels of the whole image, bool [height, width]."""
        x0, y0, x1, y1 = self.box
        # what is taken away may leave a smaller box
        kept = Mask.from_full(self.crop & ~pixels[y0:y1, x0:x1])
        # the box of an empty mask has no place, so none may be added to it
        if not kept.crop.size:
            return Mask.empty(self.size)
        left, top, right, bottom = kept.box
        return Mask(self.size, (x0 + left, y0 + top, x0 + right, y0 + bottom), kept.crop)

    def shifted(self, dx: int, dy: int) -> Mask:
        """Return the mask moved by whole pixels to the right and down; what leaves the image is cut off."""
        height, width = self.size
        left = self.box[0] + dx
        top = self.box[1] + dy
        rows = slice(max(0, -top), max(0, height - top))
        kept = Mask.from_full(self.crop[rows, max(0, -left) : max(0, width - left)])
        if not kept.crop.size:
            return Mask.empty(self.size)
        x0, y0, x1, y1 = kept.box
        left = max(0, left)
        top = max(0, top)
        return Mask(self.size, (x0 + left, y0 + top, x1 + left, y1 + top), kept.crop)

    def paint(self, image: np.typing.NDArray[Any], value: object) -> None:
        """Set the pixels inside the mask to `value`, in an image of the mask's size."""
        x0, y0, x1, y1 = self.box
        image[y0:y1, x0:x1][self.crop] = value

    def _repr_png_(self) -> bytes:
        """Return the mask as notebooks draw it, in the first colour of the palette."""
        return encode_labels(self.full())

    @property
    def area(self) -> int:
        """Number of pixels inside the mask."""
        return int(np.count_nonzero(self.crop))


class MaskMap(Value, frozen=True):
    """A mask as messages carry it; `wire.masks` says what `data` holds."""

    encoding: MaskEncoding
    size: tuple[Side, Side]
    """height and width of the image"""
    box: PixelBox
    data: bytes


class SolidPrimitive(TypedDict):
    """A body in the shape of shape_msgs/SolidPrimitive; type 1 is a box."""

    type: int
    dimensions: list[float]


class PrimitivePose(TypedDict):
    """A pose in the shape of geometry_msgs/Pose."""

    position: dict[str, float]
    orientation: dict[str, float]


class CollisionObject(TypedDict):
    """A body in the shape of moveit_msgs/CollisionObject."""

    header: dict[str, str | None]
    id: str
    primitives: list[SolidPrimitive]
    primitive_poses: list[PrimitivePose]


class Instance(Value, frozen=True):
    """One tracked object on one frame. `score` is in 0..1. `age` and `frames_since_seen` count frames.

    3-D fields are in metres in the frame `frame`, "camera" or "base". They are None where depth or calibration lack.
    """

    id: Natural
    """counts up from 1; never used again in the same `epoch`"""
    label: Text
    """as given with the object, or the name by which it was found"""
    score: Share
    """0..1: in view, times predicted IoU"""
    state: TrackState
    """`tracked`, `occluded` (no mask) or `tentative` (found by name, not confirmed)"""
    age: Natural
    """frames since the object was added"""
    frames_since_seen: Natural
    """0 while it is tracked"""
    mask: Mask
    """its pixels: `full()` is bool [height, width], `crop` those inside `box`"""
    position_m: Vector3 | None = None
    """mean of the visible surface, in `frame`; where the gripper has it while it is held and hidden"""
    frame: Text | None = None
    """`base` or `camera`: the frame of the 3-D fields"""
    extent_m: Size3 | None = None
    """sides of the oriented box around the visible surface, the longest first"""
    confidence: Share | None = None
    """probability in 0..1 that the mask is right, that its IoU with the object is at least 0.5; None without a mask"""
    doubtful: bool = False
    """True if `confidence` is below the node's tracker.min_confidence, or `name_confidence` below its
    detector.min_name_confidence"""
    world_id: FromOne | None = None
    """the same for the objects of all cameras that the node takes for one thing; None where it does not link them"""
    depth_share: Share | None = None
    """share 0..1 of the mask's pixels with a valid depth; None without depth or intrinsics"""
    camera_position_m: Vector3 | None = None
    """the position in the camera's frame, if `frame` is another"""
    covariance_m2: Vector6 | None = None
    """of the position's error: xx, xy, xz, yy, yz, zz"""
    extent_centre_m: Vector3 | None = None
    """centre of the oriented box around the visible surface, whose sides are `extent_m`"""
    extent_quaternion_xyzw: Vector4 | None = None
    """directions of the box's sides: the rotation from the box's axes to `frame`"""
    nearest_m: Vector3 | None = None
    """the surface's point nearest to the camera"""
    velocity_mps: Vector3 | None = None
    """velocity in `frame`"""
    velocity_age_s: NotNegative | None = None
    """seconds since the last position that the velocity is from"""
    points_m: bytes | None = None
    """points of the surface, float32 [n, 3] little-endian; see spatial.points"""
    name_confidence: Share | None = None
    """probability in 0..1 that the label is right; None if the label was given by a user, or without a mask"""
    hidden_by: Literal["robot"] | None = None
    """what covers an occluded object, if the node knows: the robot"""
    heights_m: Vector2 | None = None
    """of the lowest and the highest measured point above the table, without the outermost 1 %"""
    upright_centre_m: Vector3 | None = None
    """centre of the smallest upright box around the measured points, which reaches down to the table"""
    upright_quaternion_xyzw: Vector4 | None = None
    """rotation from this box's axes to `frame`; its z is the table's normal"""
    upright_size_m: Size3 | None = None
    """sides of the upright box"""
    held: bool = False
    """True if the gripper holds it. While it is hidden, `position_m` is where the gripper has it"""

    def __repr__(self) -> str:
        doubt = ", doubtful" if self.doubtful else ""
        return (
            f"Instance({self.id} {self.label!r}, {self.state}{doubt}, score {self.score:.2f}, box {self.box})"
        )

    @property
    def box(self) -> Box:
        """X0, y0, x1, y1 of the mask; zeros if it is empty."""
        return self.mask.box

    @property
    def area(self) -> int:
        """Pixels inside the mask."""
        return self.mask.area

    def collision_object(self) -> CollisionObject | None:
        """Return the upright box as a map of the shape of MoveIt's moveit_msgs/CollisionObject; None without a box."""
        centre = self.upright_centre_m
        quaternion = self.upright_quaternion_xyzw
        size = self.upright_size_m
        if centre is None or quaternion is None or size is None:
            return None
        position = dict(zip("xyz", centre, strict=True))
        orientation = dict(zip("xyzw", quaternion, strict=True))
        return {
            "header": {"frame_id": self.frame},
            "id": f"object_{self.id}",
            "primitives": [{"type": 1, "dimensions": list(size)}],
            "primitive_poses": [{"position": position, "orientation": orientation}],
        }

    @property
    def is_sure(self) -> bool:
        """True if it is tracked, and neither its mask nor its name is doubtful."""
        return self.state == "tracked" and not self.doubtful

    def _why_unmoved(self, before: Instance | None) -> Unmoved | None:
        """Return why this instance, which was `before`, cannot be moved; None if it can."""
        if self.state == "occluded" or not any(self.box):
            return "hidden"
        if not self.is_sure:
            return "doubtful"
        is_known = (
            before is not None and before.is_sure and any(before.box) and before.mask.size == self.mask.size
        )
        has_velocity = self.position_m is None or self.velocity_mps is not None
        return None if is_known and has_velocity else "no motion"

    def _move(self, before: Instance, gap_s: float, ahead_s: float) -> Instance:
        """Return this instance `ahead_s` later at constant velocity; `before` is the same object, `gap_s` earlier.

        Along each axis, the mask moves as the side of its box that moved less, and not at all if the sides moved in
        opposite directions (the minmod limiter): then its shape has changed. The covariance becomes that of a line
        through two positions with white noise of acceleration, an upper bound, as the node filters velocities.
        """
        ratio = ahead_s / gap_s
        shift = []
        for axis in (0, 1):
            sides = [self.box[side] - before.box[side] for side in (axis, axis + 2)]
            shift.append(round(ratio * min(sides, key=abs)) if sides[0] * sides[1] > 0 else 0)
        # these were measured on the frame, and no velocity says where they are now
        changes: dict[str, object] = dict.fromkeys(("camera_position_m", "points_m", "heights_m"))
        for name in ("position_m", "extent_centre_m", "nearest_m", "upright_centre_m"):
            if (place := getattr(self, name)) is not None:
                changes[name] = tuple(np.add(place, np.multiply(self.velocity_mps or 0, ahead_s)).tolist())
        if self.covariance_m2 is not None:
            noise = ACCELERATION_MPS2**2 * ahead_s**2 * (abs(ahead_s) + gap_s) / 3
            scaled = np.multiply(self.covariance_m2, (1 + ratio) ** 2 + ratio**2)
            changes["covariance_m2"] = tuple((scaled + noise * np.array([1, 0, 0, 1, 0, 1])).tolist())
        return replace(self, mask=self.mask.shifted(*shift), **changes)

    @property
    def paint_order(self) -> tuple[float, int]:
        """Sort key of label images: the best score is painted last; of equal ones, the lower id."""
        return self.score, -self.id


class Detection(NamedTuple):
    """One object that the detector found on a frame; `label` is the prompt that it matches.

    `box` (x0, y0, x1, y1) is in frame pixels, not rounded. `score` is in 0..1. `margins` say by how much the label fits
    better, as differences of logits, than the same thing of the best other look ("blue mug" for "red mug"), and than
    the best other thing of the same look ("red can"); None where the detector does not compare.
    """

    label: str
    score: float
    box: tuple[float, float, float, float]
    margins: tuple[float | None, float | None] = (None, None)


class Shed(Value, frozen=True, omit_defaults=True):
    """The work that the node skipped on a frame, because its steps exceeded the latency budget."""

    level: FromOne
    """1: objects are searched for by name less often; 2: low-priority objects are also tracked less often"""
    held: Annotated[tuple[Natural, ...], Meta(max_length=MAX_ITEMS)] = ()
    """ids of the objects that were not tracked on this frame; they have no instance, and come back on the next"""


class FrameBatch(Value, frozen=True):
    """The batch in which a frame was encoded, with frames of other cameras. It decides how the features are rounded."""

    size: Annotated[int, Meta(ge=2, le=MAX_BATCH)]
    """number of frames"""
    index: Annotated[int, Meta(ge=0, lt=MAX_BATCH)]
    """of this frame, from 0"""

    def __post_init__(self) -> None:
        if self.index >= self.size:
            raise ValueError(f"batch: expected an index below the size {self.size}, found {self.index}")


class StepDecisions(Value, frozen=True, kw_only=True, omit_defaults=True):
    """What a node decides live for the step of a frame. A replay that is given the same repeats the step.

    Masks carry these fields, and of a frame without masks the event `failed`.
    """

    shed: Shed | None = None
    """What the node skipped on this frame to keep `deadline.budget_ms`; None if nothing."""
    batch: FrameBatch | None = None
    """The batch of cameras' frames in which the node encoded this one; None if it was encoded alone."""
    windows: Natural | None = None
    """How many objects were followed in windows on this frame, at most; None if their number is not limited."""

    @property
    def shed_level(self) -> int:
        """The level of `shed`, 0 if nothing was skipped."""
        return 0 if self.shed is None else self.shed.level

    @property
    def decisions(self) -> StepDecisions:
        """These fields alone."""
        return StepDecisions(**{name: getattr(self, name) for name in StepDecisions.__struct_fields__})


class MovedMasks(NamedTuple):
    """Masks moved to another time, and by id why instances were left as they were."""

    masks: MaskFrame
    unmoved: Mapping[int, Unmoved]


class MaskFrame(StepDecisions, frozen=True, omit_defaults=False):
    """All instances of one frame, with the identity of the frame and the duration of each stage.

    `capture_ns` is a time of `clock`, copied from the frame. The other times are Unix times of the node. `skipped` is
    the number of frames of this camera that were skipped since the previous MaskFrame.
    """

    camera: Name
    """name of the camera"""
    seq: Natural
    """number of the frame, as the camera gave it"""
    capture_ns: Natural
    """time at which the image was taken, of `clock`"""
    width: Side
    """of the frame, in pixels"""
    height: Side
    """of the frame, in pixels"""
    received_ns: Natural = 0
    """Unix time at which the frame reached the node"""
    published_ns: Natural = 0
    """Unix time of publishing"""
    skipped: Natural = 0
    """frames of this camera skipped since the previous masks"""
    model: Text = ""
    """name of the weights"""
    stages_us: Annotated[Mapping[Text, Natural], Meta(max_length=MAX_ITEMS)] = msgspec.field(
        default_factory=dict
    )
    """microseconds of each stage"""

    prompts: Annotated[tuple[Text, ...], Meta(max_length=MAX_ITEMS)] = ()
    """names that the node looks for"""
    instances: Annotated[tuple[Instance, ...], Meta(max_length=MAX_ITEMS)] = ()
    """the objects"""
    clock: Clock = "system"
    """of `capture_ns`, as the camera gave it"""
    node: Text | None = None
    """The node's name for its present run, 16 random hex digits; None in results of a replay."""
    epoch: Epoch | None = None
    """Random number of the camera's ids. An id of another epoch names another object. None in a replay."""
    camera_pose: FramePose | None = None
    """The camera's pose in the robot's base at the capture, if it is known."""
    robot_pose: FramePose | None = None
    """The gripper's pose in the base at the capture, interpolated, if the node gets poses."""
    joints: JointState | None = None
    """The robot's joints at the capture, interpolated, if the node has `robot.urdf` and gets them."""
    robot_mask: Mask | None = None
    """The pixels of the robot, from its joints."""
    table: Plane | None = None
    """The table, if the node measures it (`spatial.table`)."""
    before: MaskFrame | None = None
    """The masks of this camera that a subscriber received before these. They are not on the wire."""

    def __eq__(self, other: object) -> bool:
        # the masks before these are no part of them
        if not isinstance(other, MaskFrame):
            return NotImplemented
        return all(
            getattr(self, name) == getattr(other, name) for name in self.__struct_fields__ if name != "before"
        )

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        named = [f"{instance.id} {instance.label!r}" for instance in self.instances]
        more = [f"{len(named) - NAMED} more"] if len(named) > NAMED else []
        objects = ", ".join(named[:NAMED] + more) or "no objects"
        return f"MaskFrame({self.camera} #{self.seq}, {self.width}x{self.height}: {objects})"

    def _repr_png_(self) -> bytes:
        """Return the masks as notebooks draw them, each object in the colour of its index."""
        return encode_labels(self.paint_indices())

    def paint_indices(self) -> np.typing.NDArray[np.uint8]:
        """Draw all masks as one image of palette indices, uint8 [height, width]. The highest score is on top."""
        # painter's order: the last one is on top
        image = np.zeros((self.height, self.width), np.uint8)
        for instance in sorted(self.instances, key=lambda instance: instance.paint_order):
            instance.mask.paint(image, palette_index(instance.id))
        return image

    @property
    def key(self) -> FrameKey:
        """Identity of the frame that these masks belong to."""
        return FrameKey(self.camera, self.seq, self.capture_ns)

    def without_doubtful(self) -> MaskFrame:
        """Return these masks without the doubtful instances."""
        kept = tuple(instance for instance in self.instances if not instance.doubtful)
        return self if len(kept) == len(self.instances) else replace(self, instances=kept)

    def moved_to(self, now_ns: int | None = None, max_ms: float = MAX_MOVE_MS) -> MovedMasks:
        """Return these masks with their objects where they would be at a Unix time (default: now).

        Each mask moves in the image by whole pixels, as its object moved since `before`. With depth, `position_m`,
        `extent_centre_m`, `nearest_m` and `upright_centre_m` move by `velocity_mps`, in `frame`; `covariance_m2` grows;
        `camera_position_m`, `points_m` and `heights_m` become None. The key and the age stay those of the frame.

        An instance is left as it was, and `unmoved` says why: "too far" (`now_ns` is more than `max_ms` from the time
        of the masks), "hidden" (occluded or without a mask), "doubtful" (or tentative), or "no motion": `before` has no
        sure mask of it, is of another epoch or more than MAX_MOTION_S earlier, or it has a position without a velocity.
        """
        now_ns = time.time_ns() if now_ns is None else now_ns
        ahead_s = (now_ns - self.age_origin_ns) / NANOSECONDS
        before = self.before or self
        gap_s = (self.capture_ns - before.capture_ns) / NANOSECONDS
        # an id of another epoch names another object
        is_close = 0 < gap_s <= MAX_MOTION_S and before.epoch == self.epoch
        earlier = {instance.id: instance for instance in before.instances if is_close}
        moved = list(self.instances)
        unmoved = dict[int, Unmoved]()
        for index, instance in enumerate(moved):
            then = earlier.get(instance.id)
            why = "too far" if abs(ahead_s) * 1000 > max_ms else instance._why_unmoved(then)
            if why is None and then is not None:
                moved[index] = instance._move(then, gap_s, ahead_s)
            else:
                unmoved[instance.id] = why or "no motion"
        return MovedMasks(replace(self, instances=tuple(moved)), unmoved)

    @property
    def age_ms(self) -> float:
        """Milliseconds since the capture, now. See `age_origin_ns`; differences of the hosts' clocks are included."""
        return (time.time_ns() - self.age_origin_ns) / 1e6

    def is_stale(self, max_age_ms: float) -> bool:
        """Return True if these masks are now older than `max_age_ms`."""
        return self.age_ms > max_age_ms

    @property
    def age_origin_ns(self) -> int:
        """Unix time from which ages are measured: of the capture if `clock` is "system", else of the arrival."""
        return self.capture_ns if self.clock == "system" else self.received_ns
