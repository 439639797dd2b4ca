"""What an agent reads of masks, cameras and replies: plain values in JSON, rounded to what they can mean.

An answer has the fields of the value that it is about. Layouts say what is left out, and what has another name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

import msgspec

from ..client import ObjectPlace, SurfacePoints
from ..schema.describing import list_fields
from ..schema.operations import list_required
from ..schema.replies import OperationReply
from ..schema.values import MaskMap
from ..types import Buffer, Instance, MaskFrame

MAX_OBJECTS = 100
"""Objects in one answer. More would fill an agent's context; the answer counts the others."""
LENGTH_DIGITS = 4
"""Digits of a length in metres: a tenth of a millimetre."""
SHARE_DIGITS = 3
"""Digits of a score or a probability."""

CAMERA_FRAME = "camera"
"""The frame of positions where the camera's place in the robot's base is not known"""
SHARE_LIMITS = "0..1"
"""Limits of a score or a probability"""
UNIT_DIGITS = {"_m": LENGTH_DIGITS, "_mps": LENGTH_DIGITS, "_xyzw": LENGTH_DIGITS}
"""Digits of fields by the ends of their names"""

IN_CAMERA = (
    "positions are in the camera's frame (x right, y down, z ahead), not in the robot's base: a robot needs a "
    "calibration with hand_eye in spatial.calibration to move by them"
)
"""What a note says of an answer with such positions."""

Facts = dict[str, Any]
"""A map of plain values, as JSON has them."""


class Layout(NamedTuple):
    """What of a value's fields an answer has, which is all of them, but for these words."""

    always: tuple[str, ...] = ()
    """Fields that an answer begins with, also if they are not known"""
    left_out: frozenset[str] = frozenset()
    """Fields that would tell an agent nothing that it can use"""
    renamed: Mapping[str, str] = {}
    """Fields that agents know by another name"""


INSTANCE = Layout(
    always=("doubtful", "score", "confidence"),
    left_out=frozenset({"mask", "age", "velocity_age_s", "points_m"}),
    renamed={"frames_since_seen": "unseen_frames", "extent_m": "size_m"},
)
PLACE = Layout(
    always=("id", "label", "camera", "epoch", "state", "in_view", "age_s"),
    left_out=frozenset({"capture_ns", "covariance_m2", "camera_pose", "has_picture", "silent_s"}),
    renamed={"size_m": "longest_side_m"},
)
BOXES = {
    "box_m": ("extent_centre_m", "size_m", "extent_quaternion_xyzw"),
    "upright_box_m": ("upright_centre_m", "upright_size_m", "upright_quaternion_xyzw"),
}
"""Boxes in space: the facts that are centre, size and directions of each"""
IN_BOXES = frozenset(name for parts in BOXES.values() for name in parts) - {"size_m"}
OF_POINTS = frozenset(
    {
        "nearest_m",
        "camera_position_m",
        "velocity_mps",
        "heights_m",
        "covariance_m2",
        "depth_share",
        *BOXES,
    }
)
"""Facts of an object that only the tool `points` tells, so that lists of objects stay short"""


class SeenCamera(NamedTuple):
    """A camera of the node, with its newest masks if any have come."""

    camera: str
    masks: MaskFrame | None
    silent_s: float | None
    """Seconds since the node got its last frame; None if it got none"""
    max_age_ms: float
    """Age above which masks do not count as the present"""

    @property
    def current(self) -> MaskFrame | None:
        """The newest masks, None if they are too old."""
        if self.masks is None or self.masks.is_stale(self.max_age_ms):
            return None
        return self.masks

    def describe(self) -> Facts:
        """Return its name, whether its masks are current, and their age."""
        facts: Facts = {"camera": self.camera, "current": self.current is not None}
        if self.masks is not None:
            facts |= describe_frame(self.masks) | {"width": self.masks.width, "height": self.masks.height}
        if self.silent_s is not None:
            facts["silent_s"] = round(self.silent_s, 1)
        return facts

    @property
    def note(self) -> str:
        """A warning to the agent that its masks are not current; empty if they are."""
        if self.current is not None:
            return ""
        if self.masks is None:
            return f"camera {self.camera}: no masks have come yet"
        return (
            f"camera {self.camera}: its masks are {self.masks.age_ms:.0f} ms old, which is more than "
            f"{self.max_age_ms:.0f}, so its objects are left out; ask again, or with a larger max_age_ms"
        )


def describe_frame(masks: MaskFrame) -> Facts:
    """Return which frame masks are of, how old they are now, and the epoch of their ids."""
    return {"seq": masks.seq, "age_ms": round(masks.age_ms), "epoch": masks.epoch}


def describe_object(masks: MaskFrame, instance: Instance) -> Facts:
    """Return what is known of an object in masks, but what only the tool `points` tells."""
    facts = describe_instance(masks, instance)
    return {name: value for name, value in facts.items() if name not in OF_POINTS}


def describe_place(masks: MaskFrame, instance: Instance) -> Facts:
    """Return all that masks say of an object, also in space: positions, boxes, velocity and error."""
    return describe_instance(masks, instance) | {"seq": masks.seq}


def describe_instance(masks: MaskFrame, instance: Instance) -> Facts:
    """Return the fields of an instance, with the frame and the age of its masks."""
    facts = describe_fields(instance, INSTANCE)
    named = {"id": instance.id, "label": instance.label, "camera": masks.camera, "epoch": masks.epoch}
    mask = {"box": list(instance.box) if instance.area else None, "area": instance.area}
    facts = {
        **named,
        "age_ms": round(masks.age_ms),
        "state": instance.state,
        "hidden": instance.state == "occluded",
        **mask,
        **facts,
    }
    for name, (centre, size, quaternion) in BOXES.items():
        if centre in facts:
            parts = {"centre": centre, "size": size, "quaternion_xyzw": quaternion}
            facts[name] = {part: facts[field] for part, field in parts.items() if field in facts}
    return {name: value for name, value in facts.items() if name not in IN_BOXES}


def describe_last_place(place: ObjectPlace) -> Facts:
    """Return where an object is, or where it was seen last, and how long ago."""
    return describe_fields(place, PLACE)


def describe_reply(reply: OperationReply) -> Facts:
    """Return the fields of a reply. Masks are told by their boxes, and bytes are left out."""
    return describe_fields(reply, Layout())


def describe_fields(value: msgspec.Struct, layout: Layout) -> Facts:
    """Return the fields of a value, so that JSON can have them.

    What is not known, or is false as by default, is left out unless the layout says otherwise, so that an answer stays
    short.
    """
    kind = type(value)
    required = list_required(kind)
    facts: Facts = dict.fromkeys(layout.always)
    for name in kind.__struct_fields__:
        if name in layout.left_out:
            continue
        shown = to_shown(getattr(value, name), find_digits(kind).get(name))
        is_usual = shown is None or (shown is False and name not in required)
        if name in layout.always or not is_usual:
            facts[layout.renamed.get(name, name)] = shown
    return facts


def to_shown(value: object, digits: int | None = None) -> Any:
    """Return a value as JSON has it; None for what JSON cannot have."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return value if digits is None else round(value, digits)
    if isinstance(value, MaskMap):
        return {"box": list(value.box)}
    if isinstance(value, msgspec.Struct):
        return describe_fields(value, Layout())
    if isinstance(value, tuple | list):
        return [to_shown(part, digits) for part in value]
    if isinstance(value, Mapping):
        return {str(key): to_shown(part, digits) for key, part in value.items()}
    return None if isinstance(value, Buffer) else value


@cache
def find_digits(kind: type[msgspec.Struct]) -> Mapping[str, int]:
    """Return the digits of the fields whose unit or bounds say how exact they can be."""
    digits = {}
    for field in list_fields(kind):
        if field.limits == SHARE_LIMITS:
            digits[field.name] = SHARE_DIGITS
        for unit, exact in UNIT_DIGITS.items():
            if field.name.endswith(unit):
                digits[field.name] = exact
    return digits


def note_camera_frame(facts: Facts) -> list[str]:
    """Return a note if an answer, or an object in it, has places in the frame of a camera alone."""
    told = (facts, *facts.get("objects", ()))
    return [IN_CAMERA] if any(each.get("frame") == CAMERA_FRAME for each in told) else []


def describe_points(surface: SurfacePoints) -> Facts:
    """Return the points of a surface, their coordinate frame and the frame of the camera that they are of."""
    points = [round_lengths(point) for point in surface.points_m.tolist()]
    return {"frame": surface.frame, "points_seq": surface.seq, "points_m": points}


def round_lengths(values: Iterable[float]) -> list[float | None]:
    """Return lengths in metres with LENGTH_DIGITS, None for what JSON cannot have."""
    return [to_shown(length, LENGTH_DIGITS) for length in values]
