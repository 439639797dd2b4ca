"""Values that all packages share, under the names that programs import; and small helpers of what is kept.

The values are defined in `schema.values`.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

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
    FrameBatch,
    FrameKey,
    FramePlace,
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
    StepDecisions,
    TrackState,
    Unmoved,
    Value,
    count_missing_frames,
    lazy_numpy,
)

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


def keep_newest(values: dict[K, T], key: K, value: T, most: int) -> None:
    """Set a value, which is the last then. Beyond `most` values, forget the first: the one that was set longest ago."""
    values.pop(key, None)
    values[key] = value
    if len(values) > most:
        del values[next(iter(values))]
