"""What an agent reads of masks, cameras and points: plain values in JSON, rounded to what they can mean."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from ..client import ObjectPlace, SurfacePoints
from ..types import Instance, MaskFrame

MAX_OBJECTS = 100
"""Objects in one answer. More would fill an agent's context; the answer counts the others."""
LENGTH_DIGITS = 4
"""Digits of a length in metres: a tenth of a millimetre."""
SHARE_DIGITS = 3
"""Digits of a score or a probability."""

PLACE_ALWAYS = ("id", "label", "camera", "epoch", "state", "in_view", "age_s")
"""Fields of a place that an answer begins with, also if they are not known"""
PLACE_LEFT_OUT = ("capture_ns", "covariance_m2", "camera_pose", "has_picture", "silent_s")
"""Fields of a place that would tell an agent nothing that it can use"""

Facts = dict[str, Any]
"""A map of plain values, as JSON has them."""


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
    """Return what is known of an object in masks: identity, how sure it is, its box, and its place if it has one."""
    facts: Facts = {
        "id": instance.id,
        "label": instance.label,
        "camera": masks.camera,
        "epoch": masks.epoch,
        "age_ms": round(masks.age_ms),
        "state": instance.state,
        "hidden": instance.state == "occluded",
        "doubtful": instance.doubtful,
        "score": round_share(instance.score),
        "confidence": round_share(instance.confidence),
        "box": list(instance.box) if instance.area else None,
        "area": instance.area,
        "unseen_frames": instance.frames_since_seen,
    }
    # what most nodes do not measure is left out, so that an answer stays short
    optional: Facts = {
        "name_confidence": round_share(instance.name_confidence),
        "hidden_by": instance.hidden_by,
        "world_id": instance.world_id,
        "frame": instance.frame,
        "position_m": round_lengths(instance.position_m),
        "size_m": round_lengths(instance.extent_m),
    }
    facts |= {name: value for name, value in optional.items() if value is not None}
    if instance.held:
        facts["held"] = True
    return facts


def describe_place(masks: MaskFrame, instance: Instance) -> Facts:
    """Return all that masks say of an object in space: positions, boxes, velocity and error."""
    box: Facts | None = None
    if instance.extent_centre_m is not None:
        box = _describe_box(
            instance.extent_centre_m, instance.extent_quaternion_xyzw, instance.extent_m or ()
        )
    upright: Facts | None = None
    if instance.upright_centre_m is not None:
        upright = _describe_box(
            instance.upright_centre_m, instance.upright_quaternion_xyzw, instance.upright_size_m or ()
        )
    optional: Facts = {
        "nearest_m": round_lengths(instance.nearest_m),
        "camera_position_m": round_lengths(instance.camera_position_m),
        "velocity_mps": round_lengths(instance.velocity_mps),
        "heights_m": round_lengths(instance.heights_m),
        "covariance_m2": None
        if instance.covariance_m2 is None
        else list(map(_finite, instance.covariance_m2)),
        "depth_share": round_share(instance.depth_share),
        "box_m": box,
        "upright_box_m": upright,
    }
    facts = describe_object(masks, instance) | {"seq": masks.seq}
    return facts | {name: value for name, value in optional.items() if value is not None}


def describe_last_place(place: ObjectPlace) -> Facts:
    """Return where an object is, or where it was seen last, and how long ago."""
    shown = [name for name in place.__struct_fields__ if name not in PLACE_LEFT_OUT]
    facts: Facts = {name: _round(name, getattr(place, name)) for name in (*PLACE_ALWAYS, *shown)}
    # what is not known is left out, so that an answer stays short
    facts = {
        name: value
        for name, value in facts.items()
        if name in PLACE_ALWAYS or (value is not None and value is not False)
    }
    if "size_m" in facts:
        facts["longest_side_m"] = facts.pop("size_m")
    return facts


def describe_points(surface: SurfacePoints) -> Facts:
    """Return the points of a surface, their coordinate frame and the frame of the camera that they are of."""
    points = [round_lengths(point) for point in surface.points_m.tolist()]
    return {"frame": surface.frame, "points_seq": surface.seq, "points_m": points}


def _describe_box(
    centre: Iterable[float], quaternion: Iterable[float] | None, size: Iterable[float]
) -> Facts:
    box: Facts = {"centre": round_lengths(centre), "size": round_lengths(size)}
    if quaternion is not None:
        box["quaternion_xyzw"] = round_lengths(quaternion)
    return box


def round_lengths(values: Iterable[float] | None) -> list[float | None] | None:
    """Return lengths in metres with LENGTH_DIGITS, None for None and for what JSON cannot have."""
    if values is None:
        return None
    return [None if (value := _finite(length)) is None else round(value, LENGTH_DIGITS) for length in values]


def round_share(value: float | None) -> float | None:
    """Return a number in 0..1 with SHARE_DIGITS."""
    finite = _finite(value)
    return None if finite is None else round(finite, SHARE_DIGITS)


def _round(name: str, value: Any) -> Any:
    """Return a value as JSON has it, with the digits that its name and its unit ask for."""
    if name.endswith("_m"):
        return round_lengths(value) if isinstance(value, tuple) else _round_length(value)
    if name == "confidence":
        return round_share(value)
    return list(value) if isinstance(value, tuple) else value


def _round_length(value: float | None) -> float | None:
    finite = _finite(value)
    return None if finite is None else round(finite, LENGTH_DIGITS)


def _finite(value: float | None) -> float | None:
    """Return a number, None for infinity and NaN, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None
