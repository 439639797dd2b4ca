"""Values that all packages share, under the names that programs import; and small helpers of what is kept.

The values are defined in `schema.values`.
"""

from __future__ import annotations

from collections.abc import Hashable
from copy import copy
from typing import Any, ClassVar, TypeVar

from .schema.values import (  # noqa: F401
    ACCELERATION_MPS2,
    CAMERA_SILENT_S,
    KEY_ROLES,
    MAX_CAPTURE_NS,
    MAX_COEFFS,
    MAX_MISSING_FRAMES,
    MAX_MOTION_S,
    MAX_MOVE_MS,
    NAMED,
    NANOSECONDS,
    ROBOT,
    ActionSource,
    Box,
    Buffer,
    CaptureTime,
    Clock,
    ColourEncoding,
    Delivery,
    Depth,
    DepthEncoding,
    DepthImage,
    Detection,
    Frame,
    FrameKey,
    FramePose,
    Image,
    Instance,
    Intrinsics,
    JointState,
    Mask,
    MaskEncoding,
    MaskFrame,
    Measures,
    MovedMasks,
    Plane,
    Priority,
    RobotAction,
    RobotMessage,
    RobotState,
    Shed,
    TrackState,
    Unmoved,
    Value,
    count_missing_frames,
    lazy_numpy,
)

State = dict[str, Any]
"""Saved state of an object: maps with str keys, and lists, of int, float, str, bool, None and tensors on the host.

A state and the tensors in it are never modified."""


class SavedFields:
    """Saves and restores the attributes that `SAVED` names, in this order.

    The saved name of an attribute has no underscore in front. A set is saved as a sorted list. A part that has a state
    of its own saves and restores itself.
    """

    SAVED: ClassVar[tuple[str, ...]] = ()

    def state(self) -> State:
        """Return the state that `restore` takes."""
        return {name.lstrip("_"): _save(getattr(self, name)) for name in self.SAVED}

    def restore(self, state: State) -> None:
        """Continue from the moment at which `state` was called."""
        for name in self.SAVED:
            saved = state[name.lstrip("_")]
            part = getattr(self, name)
            if hasattr(part, "restore"):
                part.restore(saved)
            else:
                setattr(self, name, type(part)(saved))


def _save(value: Any) -> Any:
    if hasattr(value, "state"):
        return value.state()
    # a set has no order, but equal states are saved alike; the rest is copied, because a saved state never changes
    return sorted(value) if isinstance(value, set) else copy(value)


T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


def keep_newest(values: dict[K, T], key: K, value: T, most: int) -> None:
    """Set a value, which is the last then. Beyond `most` values, forget the first: the one that was set longest ago."""
    values.pop(key, None)
    values[key] = value
    if len(values) > most:
        del values[next(iter(values))]
