"""Masks messages: `[b"masks/<camera>", body]`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, get_args

from ..errors import WireError
from ..types import Buffer, Clock, Instance, MaskEncoding, MaskFrame, Shed, TrackState
from .codec import MAX_SIDE, VERSION, Fields, Limits, pack, unpack
from .masks import MAX_MASK_PIXELS, decode_mask, encode_mask
from .poses import pose_fields, read_pose
from .topics import masks_topic, read_camera

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
