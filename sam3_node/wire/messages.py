"""Pack and unpack the messages of frames, masks, poses and joints.

The topic `<kind>/<name>` is the first part of each: `[b"frame/<camera>", header, colour, depth?]`, whose pixels are
parts of their own and are not copied, `[b"shared/<camera>", place, header]`, the same with the place of its pixels in
memory, `[b"masks/<camera>", body]`, `[b"pose/<frame>", body]`, the place of a frame
such as the gripper in its parent's frame, `[b"joints/<robot>", body]`, the positions of a robot's joints, and
`[b"action/<robot>", body]`, what a robot was told to do.
"""

import math
import re
from collections.abc import Sequence
from operator import attrgetter
from typing import Annotated, Any

from msgspec import Meta

from .. import types
from ..errors import WireError
from ..schema.fields import MAX_ITEMS, NAME, Finite, Natural, Plain, convert, describe, to_plain
from ..schema.values import MaskMap
from . import codec
from .body import Body
from .images import check_colour, check_depth
from .masks import MAX_MASK_PIXELS, encode_mask, open_mask

_NAME = re.compile(NAME)

MAX_FRAME_TOPIC_BYTES = 80
"""Bytes of a topic in which a camera is looked for."""
FRAMES_ROOT = b"frame/"
"""Beginning of the topics of frames."""
SHARED_ROOT = b"shared/"
"""Beginning of the topics of frames whose pixels are in shared memory."""
MASKS_ROOT = b"masks/"
"""Beginning of the topics of masks."""
POSES_ROOT = b"pose/"
"""Beginning of the topics of poses."""
JOINTS_ROOT = b"joints/"
"""Beginning of the topics of the joints of robots."""
ACTIONS_ROOT = b"action/"
"""Beginning of the topics of the actions of robots."""
ROBOT_ROOTS = (POSES_ROOT, JOINTS_ROOT)
"""Beginnings of the topics that robots publish about themselves."""
BEAT_TOPIC = b"beat"
"""Topic, and only part, of the message by which a live publisher says that it runs."""
POINT_BYTES = 12
"""Bytes of a point: three float32."""
_HEADER_LIMITS = codec.Limits(total_bytes=64 << 10)
_PLACE_LIMITS = codec.Limits(total_bytes=1 << 10)
_POSE_LIMITS = codec.Limits(total_bytes=64 << 10)
_MASKS_LIMITS = codec.Limits(total_bytes=64 << 20)
_UNIT_TOLERANCE = 1e-3
"""Difference from 1 that the length of a quaternion may have: senders round it."""


def frame_topic(camera: str) -> bytes:
    """Return the topic of the frames of a camera."""
    return _make_topic("frame", camera, "camera")


def find_camera(topic: types.Buffer) -> str | None:
    """Return the camera whose frames or masks have this topic; None for another topic."""
    # names have at most 64 characters; what is longer is cut, and so no name
    root, _, name = bytes(topic[:MAX_FRAME_TOPIC_BYTES]).partition(b"/")
    if root + b"/" not in (FRAMES_ROOT, MASKS_ROOT):
        return None
    text = name.decode("utf-8", "replace")
    return text if _NAME.fullmatch(text) else None


def masks_topic(camera: str) -> bytes:
    """Return the topic of the masks of a camera."""
    return _make_topic("masks", camera, "camera")


def pose_topic(frame: str) -> bytes:
    """Return the topic of the poses of a frame."""
    return _make_topic("pose", frame, "frame")


def joints_topic(robot: str) -> bytes:
    """Return the topic of the joints of a robot."""
    return _make_topic("joints", robot, "robot")


def robot_topic(message: types.RobotMessage) -> bytes:
    """Return the topic of a pose or of joints."""
    if isinstance(message, types.JointState):
        return joints_topic(message.robot)
    return pose_topic(message.frame)


def _make_topic(kind: str, name: str, what: str) -> bytes:
    return f"{kind}/{check_name(name, what)}".encode()


def check_name(name: str, what: str) -> str:
    """Return the name of a camera or a frame. Raises WireError unless it may be part of a topic."""
    if not _NAME.fullmatch(name):
        raise WireError(
            f"expected a {what} name of 1 to 64 letters, digits, '_', '.' or '-', and not of dots alone, found "
            f"{describe(name)}"
        )
    return name


def _open_body(parts: Sequence[types.Buffer], body: Body) -> Any:
    if len(parts) != 2:
        raise WireError(f"{body.what}: expected 2 parts (topic, body), found {len(parts)}")
    return body.unpack(parts[1])


def _check_topic(topic: types.Buffer, expected: bytes, what: str) -> None:
    # a subscription is by the topic, and the receiver's decisions are by the name in the body: both must agree
    if topic != expected:
        raise WireError(
            f"{what}: expected the topic {expected.decode()}, found {describe(bytes(topic[:80]))}"
        )


_INTRINSICS = Body(
    types.Intrinsics,
    "intrinsics",
    forms={"coeffs": Annotated[tuple[Finite, ...], Meta(max_length=types.MAX_COEFFS)] | None},
)
_DEPTH = Body(types.Depth, "depth", forms={"data": None})
_FRAME = Body(
    types.Frame,
    "frame",
    order="camera seq capture_ns clock sent_ns width height encoding",
    required="clock sent_ns",
    limits=_HEADER_LIMITS,
    forms={"colour": None, "depth": _DEPTH.inner | None, "intrinsics": _INTRINSICS.inner | None},
)


def pack_frame(frame: types.Frame) -> list[types.Buffer]:
    """Return the parts of the message. Colour and depth are the buffers of the frame, not copies."""
    check_colour(frame.colour, frame.encoding, frame.width, frame.height)
    header = _FRAME.to_map(frame)
    # the parts come in the order in which wire version 1 has them
    for part in ("intrinsics", "depth", "times"):
        header.pop(part, None)
    if frame.intrinsics is not None:
        header["intrinsics"] = to_plain(frame.intrinsics)
    depth = frame.depth
    if depth is not None:
        check_depth(depth)
        header["depth"] = _DEPTH.to_map(depth)
    if frame.times:
        header["times"] = dict(frame.times)
    parts: list[types.Buffer] = [frame_topic(frame.camera), _FRAME.pack(header), frame.colour]
    if depth is not None:
        parts.append(depth.data)
    return parts


def unpack_frame(parts: Sequence[types.Buffer]) -> types.Frame:
    """Unpack a frame from the parts of a message without copying pixels. Raises WireError for any other input."""
    if not 3 <= len(parts) <= 4:
        raise WireError(f"frame: expected 3 or 4 parts (topic, header, colour, depth), found {len(parts)}")
    # header and parts must agree before anything is read from either
    header = _FRAME.unpack(parts[1])
    if (header.depth is not None) != (len(parts) == 4):
        raise WireError(
            f"frame: expected a depth part with, and only with, a depth header; found {len(parts)} parts"
        )
    _check_topic(parts[0], frame_topic(header.camera), "frame")
    if header.intrinsics is not None:
        header.intrinsics = _read_intrinsics(header.intrinsics)
    if header.depth is not None:
        header.depth = types.Depth(
            **{name: getattr(header.depth, name) for name in _DEPTH.names}, data=parts[3]
        )
        # sizes are checked here, so that nobody behind has to: raw pixels are used without a copy
        check_depth(header.depth)
    frame = types.Frame(**{name: getattr(header, name) for name in _FRAME.names}, colour=parts[2])
    check_colour(frame.colour, frame.encoding, frame.width, frame.height)
    return frame


_PLACE = Body(types.FramePlace, "place", limits=_PLACE_LIMITS)


def pack_place(place: types.FramePlace) -> bytes:
    """Return the second part of the message of a frame in shared memory."""
    return _PLACE.pack(_PLACE.to_map(place))


def unpack_place(data: types.Buffer) -> types.FramePlace:
    """Unpack the second part of the message of a frame in shared memory. Raises WireError for any other input."""
    place: types.FramePlace = _PLACE.build(_PLACE.unpack(data))
    return place


def _read_intrinsics(found: Any) -> types.Intrinsics:
    # a pinhole without distortion has none to send; of a distorted one they must not be forgotten
    if found.coeffs is None and found.model != "none":
        raise WireError(
            f"frame: intrinsics: expected 'coeffs' to be a list of numbers, as the model is {found.model}, found "
            "nothing"
        )
    return types.Intrinsics(found.fx, found.fy, found.cx, found.cy, found.model, found.coeffs or ())


def read_vectors(fields: codec.Fields, name: str) -> bytes:
    """Return the bytes of vectors of three float32."""
    data = fields.blob(name)
    if len(data) % POINT_BYTES:
        raise fields.wrong(name, "bytes of three float32 for each point")
    return data


def check_quaternion(quaternion: Sequence[float]) -> None:
    """Raise WireError for a quaternion that is not of length 1."""
    length = math.hypot(*quaternion)
    if not abs(length - 1) <= _UNIT_TOLERANCE:
        raise WireError(f"pose: expected a quaternion (x, y, z, w) of length 1, found length {length:.4g}")


_POSE = Body(
    types.FramePose, "pose", order="frame parent stamp_ns clock", required="clock", limits=_POSE_LIMITS
)
_JOINTS = Body(
    types.JointState, "joints", order="robot stamp_ns clock", required="clock", limits=_POSE_LIMITS
)
_ACTION = Body(
    types.RobotAction, "action", order="robot stamp_ns clock source", required="clock", limits=_POSE_LIMITS
)


def pose_fields(pose: types.FramePose) -> Plain:
    """Return the fields of a pose. Raises WireError for a quaternion that is not of length 1."""
    check_quaternion(pose.quaternion_xyzw)
    check_name(pose.frame, "frame")
    check_name(pose.parent, "frame")
    return _POSE.to_map(pose)


def read_pose(fields: codec.Fields) -> types.FramePose:
    """Read the fields of a pose. Raises WireError for any other input."""
    pose = convert(fields.whole(), types.FramePose, fields.what)
    check_quaternion(pose.quaternion_xyzw)
    return pose


def joints_fields(joints: types.JointState) -> Plain:
    """Return the fields of a joint state."""
    check_name(joints.robot, "robot")
    return _JOINTS.to_map(joints) | {"positions": dict(joints.positions)}


def read_joints(fields: codec.Fields) -> types.JointState:
    """Read the fields of a joint state. Raises WireError for any other input."""
    return convert(fields.whole(), types.JointState, fields.what)


_INSTANCE = Body(
    types.Instance,
    "instance",
    order="id label score box area state age frames_since_seen mask position_m frame extent_m confidence doubtful "
    "name_confidence hidden_by held world_id depth_share camera_position_m covariance_m2 extent_centre_m "
    "extent_quaternion_xyzw nearest_m velocity_mps velocity_age_s points_m heights_m upright_centre_m "
    "upright_quaternion_xyzw upright_size_m",
    forms={
        "mask": MaskMap,
        # of the mask, so that readers know them without its pixels
        "box": tuple[Natural, Natural, Natural, Natural],
        "area": Natural,
    },
)
_Instances: Any = Annotated[tuple[_INSTANCE.inner, ...], Meta(max_length=MAX_ITEMS)]  # type: ignore[name-defined]
MASKS = Body(
    types.MaskFrame,
    "masks",
    order="camera seq capture_ns clock received_ns published_ns stages_us skipped width height model prompts instances "
    "node epoch shed windows joints robot_mask table camera_pose robot_pose batch",
    required="received_ns published_ns stages_us skipped width height model prompts instances",
    limits=_MASKS_LIMITS,
    forms={
        "instances": _Instances,
        "robot_mask": MaskMap | None,
        "before": None,
    },
)
_take_fields = attrgetter(*types.Instance.__struct_fields__)


def pack_masks(masks: types.MaskFrame, encoding: types.MaskEncoding = "bits+zstd") -> list[bytes]:
    """Return the parts of the message."""
    body = MASKS.to_map(masks)
    # parts of other types than msgpack's
    body["stages_us"] = dict(masks.stages_us)
    body["instances"] = [_pack_instance(instance, encoding) for instance in masks.instances]
    body |= to_plain(masks.decisions)
    if masks.joints is not None:
        body["joints"] = joints_fields(masks.joints)
    if masks.robot_mask is not None:
        body["robot_mask"] = encode_mask(masks.robot_mask, encoding)
    if masks.table is not None:
        body["table"] = to_plain(masks.table)
    if masks.camera_pose is not None:
        body["camera_pose"] = pose_fields(masks.camera_pose)
    if masks.robot_pose is not None:
        body["robot_pose"] = pose_fields(masks.robot_pose)
    return [masks_topic(masks.camera), MASKS.pack(body)]


def unpack_masks(parts: Sequence[types.Buffer], lazy: bool = False) -> types.MaskFrame:
    """Unpack masks from the parts of a message. Raises WireError for any other input.

    With `lazy`, each mask is decoded when its pixels are first used. Damage in them raises WireError only then.
    """
    message = _open_body(parts, MASKS)
    _check_topic(parts[0], masks_topic(message.camera), "masks")
    for pose in (message.camera_pose, message.robot_pose):
        if pose is not None:
            check_quaternion(pose.quaternion_xyzw)
    size = message.height, message.width
    # the masks share one budget of pixels, so that many large ones cannot fill the memory
    message.instances = _read_instances(message.instances, size, lazy)
    if message.robot_mask is not None:
        message.robot_mask = open_mask(message.robot_mask, "masks: robot_mask", frame_size=size)
    masks: types.MaskFrame = MASKS.build(message)
    return masks


def _pack_instance(instance: types.Instance, encoding: types.MaskEncoding) -> Plain:
    fields = _INSTANCE.to_map(instance)
    fields["mask"] = encode_mask(instance.mask, encoding)
    return fields


def _read_instances(messages: Sequence[Any], size: tuple[int, int], lazy: bool) -> tuple[types.Instance, ...]:
    instances: dict[int, types.Instance] = {}
    free_pixels = MAX_MASK_PIXELS
    for index, message in enumerate(messages):
        what = f"masks: instances[{index}]"
        box = message.box
        area = message.area
        # a lazy mask trusts the area until it is decoded
        mask = open_mask(message.mask, f"{what}: mask", free_pixels, size, area if lazy else None)
        if box != mask.box or area != mask.area:
            raise WireError(
                f"{what}: expected the box {mask.box} and area {mask.area} of its mask, found others"
            )
        if message.id in instances:
            raise WireError(f"masks: expected each instance's id once, found {message.id} twice")
        if message.points_m is not None and len(message.points_m) % POINT_BYTES:
            raise WireError(
                f"{what}: expected 'points_m' to be bytes of three float32 for each point, found "
                f"{len(message.points_m)} bytes"
            )
        message.mask = mask
        instances[message.id] = types.Instance(*_take_fields(message))
        # what this mask takes is gone for those behind it
        free_pixels -= (box[2] - box[0]) * (box[3] - box[1])
    return tuple(instances.values())


def pack_pose(pose: types.RobotMessage) -> list[bytes]:
    """Return the parts of the message of a pose or of joints.

    Raises WireError for a quaternion that is not of length 1, and for a name that cannot be a topic.
    """
    if isinstance(pose, types.JointState):
        return [robot_topic(pose), _JOINTS.pack(joints_fields(pose))]
    return [robot_topic(pose), _POSE.pack(pose_fields(pose))]


def pack_action(action: types.RobotAction) -> list[bytes]:
    """Return the parts of the message of an action. Raises WireError for a name that cannot be a topic."""
    topic = _make_topic("action", action.robot, "robot")
    return [topic, _ACTION.pack(_ACTION.to_map(action) | {"values": dict(action.values)})]


def unpack_action(parts: Sequence[types.Buffer]) -> types.RobotAction:
    """Unpack an action from the parts of a message. Raises WireError for any other input."""
    action: types.RobotAction = _ACTION.build(_open_body(parts, _ACTION))
    _check_topic(parts[0], _make_topic("action", action.robot, "robot"), "action")
    return action


def unpack_pose(parts: Sequence[types.Buffer]) -> types.RobotMessage:
    """Unpack a pose or joints from the parts of a message, by its topic. Raises WireError for any other input."""
    # by the topic, because both kinds share one endpoint
    is_joints = bool(parts) and parts[0][: len(JOINTS_ROOT)] == JOINTS_ROOT
    body = _JOINTS if is_joints else _POSE
    message: types.RobotMessage = body.build(_open_body(parts, body))
    if isinstance(message, types.FramePose):
        check_quaternion(message.quaternion_xyzw)
    _check_topic(parts[0], robot_topic(message), body.what)
    return message
