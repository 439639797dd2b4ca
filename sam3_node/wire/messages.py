"""Pack and unpack the messages of frames, masks, poses and joints.

The topic `<kind>/<name>` is the first part of each: `[b"frame/<camera>", header, colour, depth?]`, whose pixels are
parts of their own and are not copied, `[b"masks/<camera>", body]`, `[b"pose/<frame>", body]`, the place of a frame
such as the gripper in its parent's frame, `[b"joints/<robot>", body]`, the positions of a robot's joints, and
`[b"action/<robot>", body]`, what a robot was told to do.
"""

import math
import re
from collections.abc import Sequence
from typing import Any, get_args

from .. import types
from ..errors import WireError
from . import codec
from .images import check_colour, check_depth
from .masks import MAX_MASK_PIXELS, encode_mask, read_mask

_NAME = re.compile(
    r"(?!\.+\Z)[A-Za-z0-9_.-]{1,64}"
)  # not of dots alone: outputs name files and folders by cameras

MAX_FRAME_TOPIC_BYTES = 80
"""Bytes of a topic in which a camera is looked for."""
FRAMES_ROOT = b"frame/"
"""Beginning of the topics of frames."""
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
MODELS = ("none", "brown_conrady", "fisheye")
"""Models of distortion."""
MAX_COEFFS = 14
"""Coefficients of a model of distortion."""
MAX_CAPTURE_NS = 2**62
"""Largest time of capture: in Unix time it is in the year 2116."""
MAX_EPOCH = 2**53 - 1
"""Largest epoch: every language reads it exactly, also as a float."""
POINT_BYTES = 12
"""Bytes of a point: three float32."""
_HEADER_LIMITS = codec.Limits(total_bytes=64 << 10)
_POSE_LIMITS = codec.Limits(total_bytes=64 << 10)
_MASKS_LIMITS = codec.Limits(total_bytes=64 << 20)
_UNIT_TOLERANCE = 1e-3
"""Difference from 1 that the length of a quaternion may have: senders round it."""
_SIDE = codec.integer(1, codec.MAX_SIDE)
_CLOCK = codec.choice(get_args(types.Clock))
_TRIPLE = codec.vector(3)


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
            f"{codec.describe(name)}"
        )
    return name


def _open_body(parts: Sequence[types.Buffer], kind: str, limits: codec.Limits) -> codec.Fields:
    if len(parts) != 2:
        raise WireError(f"{kind}: expected 2 parts (topic, body), found {len(parts)}")
    return codec.open_message(parts[1], kind, limits)


def _check_topic(topic: types.Buffer, expected: bytes, what: str) -> None:
    # a subscription is by the topic, and the receiver's decisions are by the name in the body: both must agree
    if topic != expected:
        raise WireError(
            f"{what}: expected the topic {expected.decode()}, found {codec.describe(bytes(topic[:80]))}"
        )


def _name(fields: codec.Fields, name: str) -> str:
    return check_name(fields.text(name), "frame")


_INTRINSICS = codec.Schema(
    {
        "fx": codec.Fields.positive,
        "fy": codec.Fields.positive,
        "cx": codec.Fields.number,
        "cy": codec.Fields.number,
        "model": codec.choice(MODELS),
        "coeffs?": lambda fields, name: fields.numbers(name, MAX_COEFFS),
    }
)


def _read_intrinsics(fields: codec.Fields, name: str) -> types.Intrinsics:
    inner = fields.fields(name)
    values = inner.read(_INTRINSICS)
    # a pinhole without distortion has none to send; of a distorted one they must not be forgotten
    if "coeffs" not in values and values["model"] != "none":
        raise inner.wrong("coeffs", f"a list of numbers, as the model is {values['model']}")
    return types.Intrinsics(**values)


_DEPTH = codec.Schema(
    {
        "width": _SIDE,
        "height": _SIDE,
        "encoding": codec.choice(get_args(types.DepthEncoding)),
        "scale_m": codec.Fields.positive,
        "aligned": codec.Fields.flag,
    }
)
_FRAME = codec.Schema(
    {
        "camera": codec.Fields.text,
        "seq": codec.Fields.integer,
        "capture_ns": codec.integer(high=MAX_CAPTURE_NS),
        "clock": _CLOCK,
        "sent_ns": codec.Fields.integer,
        "width": _SIDE,
        "height": _SIDE,
        "encoding": codec.choice(get_args(types.ColourEncoding)),
        "intrinsics?": _read_intrinsics,
        "depth?": lambda fields, name: fields.fields(name).read(_DEPTH),
        "times?": lambda fields, name: fields.fields(name).measures(),
    }
)


def pack_frame(frame: types.Frame) -> list[types.Buffer]:
    """Return the parts of the message. Colour and depth are the buffers of the frame, not copies."""
    check_colour(frame.colour, frame.encoding, frame.width, frame.height)
    # the fields that each frame has, then those that it may have
    header = {"v": codec.VERSION, "kind": "frame"} | {
        name: getattr(frame, name) for name in _FRAME.readers if name in _FRAME.required
    }
    if frame.intrinsics is not None:
        header["intrinsics"] = {name: getattr(frame.intrinsics, name) for name in _INTRINSICS.readers}
    if frame.depth is not None:
        check_depth(frame.depth)
        header["depth"] = {name: getattr(frame.depth, name) for name in _DEPTH.readers}
    if frame.times:
        header["times"] = dict(frame.times)
    parts: list[types.Buffer] = [frame_topic(frame.camera), codec.pack(header), frame.colour]
    if frame.depth is not None:
        parts.append(frame.depth.data)
    return parts


def unpack_frame(parts: Sequence[types.Buffer]) -> types.Frame:
    """Unpack a frame from the parts of a message without copying pixels. Raises WireError for any other input."""
    if not 3 <= len(parts) <= 4:
        raise WireError(f"frame: expected 3 or 4 parts (topic, header, colour, depth), found {len(parts)}")
    # header and parts must agree before anything is read from either
    header = codec.open_message(parts[1], "frame", _HEADER_LIMITS)
    if header.has("depth") != (len(parts) == 4):
        raise WireError(
            f"frame: expected a depth part with, and only with, a depth header; found {len(parts)} parts"
        )
    values = header.read(_FRAME)
    _check_topic(parts[0], frame_topic(values["camera"]), "frame")
    if "depth" in values:
        values["depth"] = types.Depth(**values["depth"], data=parts[3])
        # sizes are checked here, so that nobody behind has to: raw pixels are used without a copy
        check_depth(values["depth"])
    frame = types.Frame(**values, colour=parts[2])
    check_colour(frame.colour, frame.encoding, frame.width, frame.height)
    return frame


def read_vectors(fields: codec.Fields, name: str) -> bytes:
    """Return the bytes of vectors of three float32."""
    data = fields.blob(name)
    if len(data) % POINT_BYTES:
        raise fields.wrong(name, "bytes of three float32 for each point")
    return data


def shed_fields(shed: types.Shed) -> dict[str, Any]:
    """Return the fields of what was skipped on a frame."""
    fields: dict[str, Any] = {"level": shed.level}
    if shed.held:
        fields["held"] = shed.held
    return fields


def read_shed(fields: codec.Fields) -> types.Shed:
    """Read what `shed_fields` returned. Raises WireError for other values."""
    held: tuple[int, ...] = ()
    if fields.has("held"):
        held = fields.integers("held", len(fields.sequence("held")))
    return types.Shed(fields.integer("level", low=1), held)


def check_quaternion(quaternion: Sequence[float]) -> None:
    length = math.hypot(*quaternion)
    if not abs(length - 1) <= _UNIT_TOLERANCE:
        raise WireError(f"pose: expected a quaternion (x, y, z, w) of length 1, found length {length:.4g}")


def pose_fields(pose: types.FramePose) -> dict[str, Any]:
    """Return the fields of a pose. Raises WireError for a quaternion that is not of length 1."""
    check_quaternion(pose.quaternion_xyzw)
    return {
        "frame": check_name(pose.frame, "frame"),
        "parent": check_name(pose.parent, "frame"),
        "stamp_ns": pose.stamp_ns,
        "clock": pose.clock,
        "position": pose.position_m,
        "quaternion": pose.quaternion_xyzw,
    }


_POSE = codec.Schema(
    {
        "frame": _name,
        "parent": _name,
        "stamp_ns": codec.Fields.integer,
        "clock": _CLOCK,
        "position": _TRIPLE,
        "quaternion": codec.vector(4),
    }
)


def read_pose(body: codec.Fields) -> types.FramePose:
    """Read the fields of a pose. Raises WireError for any other input."""
    values = body.read(_POSE)
    quaternion = values.pop("quaternion")
    check_quaternion(quaternion)
    return types.FramePose(position_m=values.pop("position"), quaternion_xyzw=quaternion, **values)


_JOINTS = codec.Schema(
    {
        "robot": lambda fields, name: check_name(fields.text(name), name),
        "stamp_ns": codec.Fields.integer,
        "clock": _CLOCK,
        "positions": lambda fields, name: fields.fields(name).measures(),
    }
)


def joints_fields(joints: types.JointState) -> dict[str, Any]:
    """Return the fields of a joint state."""
    check_name(joints.robot, "robot")
    return {name: getattr(joints, name) for name in _JOINTS.readers} | {"positions": dict(joints.positions)}


def read_joints(body: codec.Fields) -> types.JointState:
    """Read the fields of a joint state. Raises WireError for any other input."""
    return types.JointState(**body.read(_JOINTS))


_ACTION = codec.Schema(
    {
        "robot": lambda fields, name: check_name(fields.text(name), name),
        "stamp_ns": codec.Fields.integer,
        "clock": _CLOCK,
        "source": codec.choice(get_args(types.ActionSource)),
        "values": lambda fields, name: fields.fields(name).measures(),
    }
)


def _read_stages(fields: codec.Fields, name: str) -> dict[str, int]:
    stages = fields.fields(name)
    return {stage: stages.integer(stage) for stage in stages.names()}


# fields of an instance that are measured with depth, beside its position, frame and extent
_SHARE = codec.number(0.0, 1.0)
_SPATIAL: dict[str, codec.Read] = {
    "depth_share": _SHARE,
    "camera_position_m": _TRIPLE,
    "covariance_m2": codec.vector(6),
    "extent_centre_m": _TRIPLE,
    "extent_quaternion_xyzw": codec.vector(4),
    "nearest_m": _TRIPLE,
    "velocity_mps": _TRIPLE,
    "velocity_age_s": codec.number(0.0),
    "points_m": read_vectors,
    "heights_m": codec.vector(2),
    "upright_centre_m": _TRIPLE,
    "upright_quaternion_xyzw": codec.vector(4),
    "upright_size_m": codec.vector(3, low=0.0),
}
DEPTH_FIELDS = ("position_m", "frame", "extent_m", *_SPATIAL)
"""All fields of an instance that need depth."""
_INSTANCE = codec.Schema(
    {
        "id": codec.Fields.integer,
        "label": codec.Fields.text,
        "score": _SHARE,
        "box": lambda fields, name: fields.integers(name, 4),
        "area": codec.Fields.integer,
        "state": codec.choice(get_args(types.TrackState)),
        "age": codec.Fields.integer,
        "frames_since_seen": codec.Fields.integer,
        "mask": codec.Fields.fields,
        "position_m?": _TRIPLE,
        "frame?": codec.Fields.text,
        "extent_m?": codec.vector(3, low=0.0),
        "confidence?": _SHARE,
        "doubtful?": codec.Fields.flag,
        "name_confidence?": _SHARE,
        "hidden_by?": codec.choice(("robot",)),
        "held?": codec.Fields.flag,
        "world_id?": codec.integer(1),
        **{f"{name}?": read for name, read in _SPATIAL.items()},
    }
)
_PLANE = codec.Schema({"normal": _TRIPLE, "offset_m": codec.Fields.number, "rms_m": codec.number(0.0)})
_POSES = ("camera_pose", "robot_pose")
_MASKS = codec.Schema(
    {
        "camera": codec.Fields.text,
        "seq": codec.Fields.integer,
        "capture_ns": codec.Fields.integer,
        "clock?": _CLOCK,
        "received_ns": codec.Fields.integer,
        "published_ns": codec.Fields.integer,
        "stages_us": _read_stages,
        "skipped": codec.Fields.integer,
        "width": _SIDE,
        "height": _SIDE,
        "model": codec.Fields.text,
        "prompts": codec.Fields.texts,
        "instances": codec.Fields.sequence,
        "node?": codec.Fields.text,
        "epoch?": codec.integer(high=MAX_EPOCH),
        "shed?": lambda fields, name: read_shed(fields.fields(name)),
        "joints?": lambda fields, name: read_joints(fields.fields(name)),
        "robot_mask?": codec.Fields.fields,
        "table?": lambda fields, name: types.Plane(**fields.fields(name).read(_PLANE)),
        **{f"{name}?": lambda fields, name: read_pose(fields.fields(name)) for name in _POSES},
    }
)


def pack_masks(masks: types.MaskFrame, encoding: types.MaskEncoding = "bits+zstd") -> list[bytes]:
    """Return the parts of the message."""
    body = {"v": codec.VERSION, "kind": "masks"} | {name: getattr(masks, name) for name in _MASKS.readers}
    # fields of other types than msgpack's; what is None is left out below
    body |= {
        "clock": None if masks.clock == "system" else masks.clock,
        "stages_us": dict(masks.stages_us),
        "instances": [_pack_instance(instance, encoding) for instance in masks.instances],
        "shed": masks.shed and shed_fields(masks.shed),
        "joints": masks.joints and joints_fields(masks.joints),
        "robot_mask": masks.robot_mask and encode_mask(masks.robot_mask, encoding),
        "table": masks.table and masks.table._asdict(),
    }
    for name in _POSES:
        pose = getattr(masks, name)
        if pose is not None:
            body[name] = pose_fields(pose)
    return [masks_topic(masks.camera), codec.pack(_drop_none(body))]


def unpack_masks(parts: Sequence[types.Buffer], lazy: bool = False) -> types.MaskFrame:
    """Unpack masks from the parts of a message. Raises WireError for any other input.

    With `lazy`, each mask is decoded when its pixels are first used. Damage in them raises WireError only then.
    """
    values = _open_body(parts, "masks", _MASKS_LIMITS).read(_MASKS)
    _check_topic(parts[0], masks_topic(values["camera"]), "masks")
    size = values["height"], values["width"]
    # the masks share one budget of pixels, so that many large ones cannot fill the memory
    values["instances"] = _unpack_instances(values["instances"], size, lazy)
    if "robot_mask" in values:
        values["robot_mask"] = read_mask(values["robot_mask"], MAX_MASK_PIXELS, size)
    return types.MaskFrame(**values)


def _drop_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _pack_instance(instance: types.Instance, encoding: types.MaskEncoding) -> dict[str, Any]:
    fields = {name: getattr(instance, name) for name in _INSTANCE.readers}
    # a flag that is false is left out, as a value that is not known
    fields["mask"] = encode_mask(instance.mask, encoding)
    return {name: value for name, value in fields.items() if value is not None and value is not False}


def _unpack_instances(
    values: Sequence[object], size: tuple[int, int], lazy: bool
) -> tuple[types.Instance, ...]:
    instances: dict[int, types.Instance] = {}
    free_pixels = MAX_MASK_PIXELS
    for index, value in enumerate(values):
        instance = _unpack_instance(codec.Fields(value, f"masks: instance {index}"), size, free_pixels, lazy)
        if instances.setdefault(instance.id, instance) is not instance:
            raise WireError(f"masks: expected each instance's id once, found {instance.id} twice")
        # what this mask takes is gone for those behind it
        x0, y0, x1, y1 = instance.mask.box
        free_pixels -= (x1 - x0) * (y1 - y0)
    return tuple(instances.values())


def _unpack_instance(
    fields: codec.Fields, size: tuple[int, int], max_pixels: int, lazy: bool
) -> types.Instance:
    values = fields.read(_INSTANCE)
    box = values.pop("box")
    area = values.pop("area")
    # a lazy mask trusts the area until it is decoded
    mask = read_mask(values["mask"], max_pixels, size, area if lazy else None)
    values["mask"] = mask
    if box != mask.box or area != mask.area:
        raise WireError(
            f"{fields.what}: expected the box {mask.box} and area {mask.area} of its mask, found others"
        )
    return types.Instance(**values)


def pack_pose(pose: types.RobotMessage) -> list[bytes]:
    """Return the parts of the message of a pose or of joints.

    Raises WireError for a quaternion that is not of length 1, and for a name that cannot be a topic.
    """
    if isinstance(pose, types.JointState):
        fields = {"kind": "joints", **joints_fields(pose)}
    else:
        fields = {"kind": "pose", **pose_fields(pose)}
    return [robot_topic(pose), codec.pack({"v": codec.VERSION, **fields})]


def pack_action(action: types.RobotAction) -> list[bytes]:
    """Return the parts of the message of an action. Raises WireError for a name that cannot be a topic."""
    fields = {name: getattr(action, name) for name in _ACTION.readers} | {"values": dict(action.values)}
    topic = _make_topic("action", action.robot, "robot")
    return [topic, codec.pack({"v": codec.VERSION, "kind": "action", **fields})]


def unpack_action(parts: Sequence[types.Buffer]) -> types.RobotAction:
    """Unpack an action from the parts of a message. Raises WireError for any other input."""
    action = types.RobotAction(**_open_body(parts, "action", _POSE_LIMITS).read(_ACTION))
    _check_topic(parts[0], _make_topic("action", action.robot, "robot"), "action")
    return action


def unpack_pose(parts: Sequence[types.Buffer]) -> types.RobotMessage:
    """Unpack a pose or joints from the parts of a message, by its topic. Raises WireError for any other input."""
    # by the topic, because both kinds share one endpoint
    if parts and parts[0][: len(JOINTS_ROOT)] == JOINTS_ROOT:
        body = _open_body(parts, "joints", _POSE_LIMITS)
        message: types.RobotMessage = read_joints(body)
    else:
        body = _open_body(parts, "pose", _POSE_LIMITS)
        message = read_pose(body)
    _check_topic(parts[0], robot_topic(message), body.what)
    return message
