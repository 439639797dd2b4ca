"""Topics of messages: `<kind>/<name>` is the first part of each frame, masks and pose message.

Frame messages: `[b"frame/<camera>", header, colour, depth?]`. Pixels are parts of their own and are not copied.

Masks messages: `[b"masks/<camera>", body]`.

Pose messages: `[b"pose/<frame>", body]`. They say where a frame, such as the gripper, lies in its parent's frame.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, get_args

from ..errors import WireError
from ..types import (
    Buffer,
    Clock,
    ColourEncoding,
    Depth,
    DepthEncoding,
    Frame,
    FramePose,
    Instance,
    Intrinsics,
    MaskEncoding,
    MaskFrame,
    Shed,
    TrackState,
)
from .codec import MAX_SIDE, VERSION, Fields, Limits, describe, pack, unpack
from .images import check_colour, check_depth
from .masks import MAX_MASK_PIXELS, decode_mask, encode_mask

# not of dots alone: outputs name files and folders by cameras
_NAME = re.compile(r"(?!\.+\Z)[A-Za-z0-9_.-]{1,64}")

FRAMES_ROOT, MASKS_ROOT = b"frame/", b"masks/"
"""Beginnings of the topics of frames and masks."""
BEAT_TOPIC = b"beat"
"""Topic, and only part, of the message by which a live publisher says that it runs."""


def frame_topic(camera: str) -> bytes:
    """Return the topic of the frames of a camera."""
    return _make_topic("frame", camera)


def masks_topic(camera: str) -> bytes:
    """Return the topic of the masks of a camera."""
    return _make_topic("masks", camera)


def _make_topic(kind: str, camera: str) -> bytes:
    return f"{kind}/{check_name(camera, 'camera')}".encode()


def check_name(name: str, what: str) -> str:
    """Return the name of a camera or a frame. Raises WireError unless it may be part of a topic."""
    if not _NAME.fullmatch(name):
        raise WireError(
            f"expected a {what} name of 1 to 64 letters, digits, '_', '.' or '-', and not of dots alone, found "
            f"{describe(name)}"
        )
    return name


def read_camera(fields: Fields, topic: Buffer) -> str:
    """Return the camera of a map. Raises WireError unless `topic` is the topic of its kind and camera."""
    camera = fields.text("camera")
    expected = _make_topic(fields.text("kind"), camera)
    if topic != expected:
        raise WireError(
            f"{fields.what}: expected the topic {expected.decode()}, found {describe(bytes(topic[:80]))}"
        )
    return camera


MODELS = ("none", "brown_conrady", "fisheye")
MAX_COEFFS = 14
MAX_CAPTURE_NS = 2**62
"""Largest time of capture: in Unix time it is in the year 2116."""
_HEADER_LIMITS = Limits(total_bytes=64 << 10)


def pack_frame(frame: Frame) -> list[Buffer]:
    """Return the parts of the message. Colour and depth are the buffers of the frame, not copies."""
    check_colour(frame.colour, frame.encoding, frame.width, frame.height)
    header: dict[str, Any] = {
        "v": VERSION,
        "kind": "frame",
        "camera": frame.camera,
        "seq": frame.seq,
        "capture_ns": frame.capture_ns,
        "clock": frame.clock,
        "sent_ns": frame.sent_ns,
        "width": frame.width,
        "height": frame.height,
        "encoding": frame.encoding,
    }
    if frame.intrinsics is not None:
        header["intrinsics"] = _pack_intrinsics(frame.intrinsics)
    if frame.depth is not None:
        header["depth"] = _pack_depth(frame.depth)
    if frame.times:
        header["times"] = dict(frame.times)
    parts: list[Buffer] = [frame_topic(frame.camera), pack(header), frame.colour]
    return parts if frame.depth is None else [*parts, frame.depth.data]


def unpack_frame(parts: Sequence[Buffer]) -> Frame:
    """Unpack a frame from the parts of a message without copying pixels. Raises WireError for any other input."""
    if not 3 <= len(parts) <= 4:
        raise WireError(f"frame: expected 3 or 4 parts (topic, header, colour, depth), found {len(parts)}")
    header = Fields(unpack(parts[1], what="frame", limits=_HEADER_LIMITS), "frame")
    header.require_kind("frame")
    if header.has("depth") != (len(parts) == 4):
        raise WireError(
            f"frame: expected a depth part with, and only with, a depth header; found {len(parts)} parts"
        )
    frame = Frame(
        camera=read_camera(header, parts[0]),
        seq=header.integer("seq"),
        capture_ns=header.integer("capture_ns", high=MAX_CAPTURE_NS),
        width=header.integer("width", 1, MAX_SIDE),
        height=header.integer("height", 1, MAX_SIDE),
        encoding=header.choice("encoding", get_args(ColourEncoding)),
        colour=parts[2],
        clock=header.choice("clock", get_args(Clock)),
        sent_ns=header.integer("sent_ns"),
        depth=_unpack_depth(header.fields("depth"), parts[3]) if header.has("depth") else None,
        intrinsics=_unpack_intrinsics(header.fields("intrinsics")) if header.has("intrinsics") else None,
        times=header.fields("times").measures() if header.has("times") else {},
    )
    check_colour(frame.colour, frame.encoding, frame.width, frame.height)
    return frame


def _pack_intrinsics(intrinsics: Intrinsics) -> dict[str, Any]:
    return {
        "fx": intrinsics.fx,
        "fy": intrinsics.fy,
        "cx": intrinsics.cx,
        "cy": intrinsics.cy,
        "model": intrinsics.model,
        "coeffs": intrinsics.coeffs,
    }


def _unpack_intrinsics(fields: Fields) -> Intrinsics:
    return Intrinsics(
        fx=fields.positive("fx"),
        fy=fields.positive("fy"),
        cx=fields.number("cx"),
        cy=fields.number("cy"),
        model=fields.choice("model", MODELS),  # type: ignore[arg-type]
        coeffs=fields.numbers("coeffs", MAX_COEFFS),
    )


def _pack_depth(depth: Depth) -> dict[str, Any]:
    check_depth(depth)
    return {
        "width": depth.width,
        "height": depth.height,
        "encoding": depth.encoding,
        "scale_m": depth.scale_m,
        "aligned": depth.aligned,
    }


def _unpack_depth(fields: Fields, data: Buffer) -> Depth:
    depth = Depth(
        width=fields.integer("width", 1, MAX_SIDE),
        height=fields.integer("height", 1, MAX_SIDE),
        encoding=fields.choice("encoding", get_args(DepthEncoding)),
        scale_m=fields.positive("scale_m"),
        aligned=fields.flag("aligned"),
        data=data,
    )
    check_depth(depth)
    return depth


MAX_EPOCH = 2**53 - 1
"""Largest epoch: every language reads it exactly, also as a float."""
_POSES = ("camera_pose", "robot_pose")
_LIMITS = Limits(total_bytes=64 << 20)


def _read_numbers(count: int) -> Callable[[Fields, str], tuple[float, ...]]:
    def read(fields: Fields, name: str) -> tuple[float, ...]:
        values = fields.numbers(name, count)
        if len(values) != count:
            raise fields.wrong(name, f"{count} finite numbers")
        return values

    return read


def _read_points(fields: Fields, name: str) -> bytes:
    data = fields.blob(name)
    if len(data) % 12:
        raise fields.wrong(name, "bytes of three float32 for each point")
    return data


SPATIAL_FIELDS: dict[str, Callable[[Fields, str], Any]] = {
    "depth_share": lambda fields, name: fields.number(name, 0.0, 1.0),
    "camera_position_m": lambda fields, name: fields.triple(name),
    "covariance_m2": _read_numbers(6),
    "extent_centre_m": lambda fields, name: fields.triple(name),
    "extent_quaternion_xyzw": _read_numbers(4),
    "nearest_m": lambda fields, name: fields.triple(name),
    "velocity_mps": lambda fields, name: fields.triple(name),
    "velocity_age_s": lambda fields, name: fields.number(name, 0.0),
    "points_m": _read_points,
}
"""Optional fields of an instance with depth beside position_m, frame and extent_m: how each is read."""
DEPTH_FIELDS = ("position_m", "frame", "extent_m", *SPATIAL_FIELDS)
"""All fields of an instance that need depth."""


def pack_masks(masks: MaskFrame, encoding: MaskEncoding = "bits+zstd") -> list[bytes]:
    """Return the parts of the message."""
    body = {
        "v": VERSION,
        "kind": "masks",
        "camera": masks.camera,
        "seq": masks.seq,
        "capture_ns": masks.capture_ns,
        **({} if masks.clock == "system" else {"clock": masks.clock}),
        "received_ns": masks.received_ns,
        "published_ns": masks.published_ns,
        "stages_us": dict(masks.stages_us),
        "skipped": masks.skipped,
        "width": masks.width,
        "height": masks.height,
        "model": masks.model,
        "prompts": masks.prompts,
        "instances": [_pack_instance(instance, encoding) for instance in masks.instances],
        **_drop_none(node=masks.node, epoch=masks.epoch, shed=masks.shed and shed_fields(masks.shed)),
        **{name: pose_fields(pose) for name in _POSES if (pose := getattr(masks, name)) is not None},
    }
    return [masks_topic(masks.camera), pack(body)]


def unpack_masks(parts: Sequence[Buffer], lazy: bool = False) -> MaskFrame:
    """Unpack masks from the parts of a message. Raises WireError for any other input.

    With `lazy`, each mask is decoded when its pixels are first used. Damage in them raises WireError only then.
    """
    if len(parts) != 2:
        raise WireError(f"masks: expected 2 parts (topic, body), found {len(parts)}")
    body = Fields(unpack(parts[1], what="masks", limits=_LIMITS), "masks")
    body.require_kind("masks")
    width, height = body.integer("width", 1, MAX_SIDE), body.integer("height", 1, MAX_SIDE)
    return MaskFrame(
        camera=read_camera(body, parts[0]),
        seq=body.integer("seq"),
        capture_ns=body.integer("capture_ns"),
        clock=body.choice("clock", get_args(Clock)) if body.has("clock") else "system",
        received_ns=body.integer("received_ns"),
        published_ns=body.integer("published_ns"),
        stages_us=_unpack_stages(body.fields("stages_us")),
        skipped=body.integer("skipped"),
        width=width,
        height=height,
        model=body.text("model"),
        prompts=body.texts("prompts"),
        instances=_unpack_instances(body.sequence("instances"), (height, width), lazy),
        node=body.text("node") if body.has("node") else None,
        epoch=body.integer("epoch", high=MAX_EPOCH) if body.has("epoch") else None,
        shed=read_shed(body.fields("shed")) if body.has("shed") else None,
        **{name: read_pose(body.fields(name)) for name in _POSES if body.has(name)},
    )


def shed_fields(shed: Shed) -> dict[str, Any]:
    """Return the fields of what was left out on a frame."""
    return {"level": shed.level, "held": shed.held} if shed.held else {"level": shed.level}


def read_shed(fields: Fields) -> Shed:
    """Read what `shed_fields` returned. Raises WireError for other values."""
    held = fields.integers("held", len(fields.sequence("held"))) if fields.has("held") else ()
    return Shed(fields.integer("level", low=1), held)


def _drop_none(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _unpack_stages(stages: Fields) -> dict[str, int]:
    return {stage: stages.integer(stage) for stage in stages.names()}


def _pack_instance(instance: Instance, encoding: MaskEncoding) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "id": instance.id,
        "label": instance.label,
        "score": instance.score,
        "box": instance.box,
        "area": instance.area,
        "state": instance.state,
        "age": instance.age,
        "frames_since_seen": instance.frames_since_seen,
        "mask": encode_mask(instance.mask, encoding),
    }
    return fields | _drop_none(
        position_m=instance.position_m,
        frame=instance.frame,
        extent_m=instance.extent_m,
        confidence=instance.confidence,
        doubtful=instance.doubtful or None,
        name_confidence=instance.name_confidence,
        world_id=instance.world_id,
        **{name: getattr(instance, name) for name in SPATIAL_FIELDS},
    )


def _unpack_instances(values: Sequence[object], size: tuple[int, int], lazy: bool) -> tuple[Instance, ...]:
    instances: dict[int, Instance] = {}
    free_pixels = MAX_MASK_PIXELS
    for index, value in enumerate(values):
        instance = _unpack_instance(Fields(value, f"masks: instance {index}"), size, free_pixels, lazy)
        if instances.setdefault(instance.id, instance) is not instance:
            raise WireError(f"masks: expected each instance's id once, found {instance.id} twice")
        x0, y0, x1, y1 = instance.box
        free_pixels -= (x1 - x0) * (y1 - y0)
    return tuple(instances.values())


def _unpack_instance(fields: Fields, size: tuple[int, int], max_pixels: int, lazy: bool) -> Instance:
    area = fields.integer("area")
    mask = decode_mask(fields.any("mask"), f"{fields.what}: mask", max_pixels, size, area if lazy else None)
    if fields.integers("box", 4) != mask.box or area != mask.area:
        raise WireError(
            f"{fields.what}: expected the box {mask.box} and area {mask.area} of its mask, found others"
        )
    return Instance(
        id=fields.integer("id"),
        label=fields.text("label"),
        score=fields.number("score", 0.0, 1.0),
        state=fields.choice("state", get_args(TrackState)),
        age=fields.integer("age"),
        frames_since_seen=fields.integer("frames_since_seen"),
        mask=mask,
        position_m=fields.triple("position_m") if fields.has("position_m") else None,
        frame=fields.text("frame") if fields.has("frame") else None,
        extent_m=fields.triple("extent_m", low=0.0) if fields.has("extent_m") else None,
        confidence=fields.number("confidence", 0.0, 1.0) if fields.has("confidence") else None,
        doubtful=fields.flag("doubtful") if fields.has("doubtful") else False,
        name_confidence=(
            fields.number("name_confidence", 0.0, 1.0) if fields.has("name_confidence") else None
        ),
        world_id=fields.integer("world_id", low=1) if fields.has("world_id") else None,
        **{name: read(fields, name) for name, read in SPATIAL_FIELDS.items() if fields.has(name)},
    )


POSES_ROOT = b"pose/"
"""Beginning of the topics of all poses."""
_POSE_LIMITS = Limits(total_bytes=64 << 10)
_UNIT_TOLERANCE = 1e-3


def pose_topic(frame: str) -> bytes:
    """Return the topic of the poses of a frame."""
    return POSES_ROOT + check_name(frame, "frame").encode()


def pack_pose(pose: FramePose) -> list[bytes]:
    """Return the parts of the message. Raises WireError for a quaternion that is not of length 1."""
    return [pose_topic(pose.frame), pack({"v": VERSION, "kind": "pose", **pose_fields(pose)})]


def pose_fields(pose: FramePose) -> dict[str, Any]:
    """Return the fields of a pose. Raises WireError for a quaternion that is not of length 1."""
    _check_quaternion(pose.quaternion_xyzw)
    return {
        "frame": check_name(pose.frame, "frame"),
        "parent": check_name(pose.parent, "frame"),
        "stamp_ns": pose.stamp_ns,
        "clock": pose.clock,
        "position": pose.position_m,
        "quaternion": pose.quaternion_xyzw,
    }


def unpack_pose(parts: Sequence[Buffer]) -> FramePose:
    """Unpack a pose from the parts of a message. Raises WireError for any other input."""
    if len(parts) != 2:
        raise WireError(f"pose: expected 2 parts (topic, body), found {len(parts)}")
    body = Fields(unpack(parts[1], what="pose", limits=_POSE_LIMITS), "pose")
    body.require_kind("pose")
    frame = body.text("frame")
    topic = pose_topic(frame)
    if parts[0] != topic:
        raise WireError(f"pose: expected the topic {topic.decode()}, found {describe(bytes(parts[0][:80]))}")
    return read_pose(body)


def read_pose(body: Fields) -> FramePose:
    """Read the fields of a pose. Raises WireError for any other input."""
    quaternion = body.numbers("quaternion", 4)
    if len(quaternion) != 4:
        raise body.wrong("quaternion", "four finite numbers x, y, z, w")
    _check_quaternion(quaternion)
    x, y, z, w = quaternion
    return FramePose(
        frame=check_name(body.text("frame"), "frame"),
        parent=check_name(body.text("parent"), "frame"),
        stamp_ns=body.integer("stamp_ns"),
        position_m=body.triple("position"),
        quaternion_xyzw=(x, y, z, w),
        clock=body.choice("clock", get_args(Clock)),
    )


def _check_quaternion(quaternion: Sequence[float]) -> None:
    length = math.hypot(*quaternion)
    if not abs(length - 1) <= _UNIT_TOLERANCE:
        raise WireError(f"pose: expected a quaternion (x, y, z, w) of length 1, found length {length:.4g}")
