"""Foxglove's messages of cameras: RawImage, CompressedImage and CameraCalibration, as protobuf or JSON.

They are ROS's image messages but for a few names, and are read as such.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from ...types import NANOSECONDS, Depth, Intrinsics
from ..samples import Colour, Kind
from . import ros_images
from .ros_images import MessageError

_ROS_TYPES = {
    "RawImage": "sensor_msgs/Image",
    "CompressedImage": "sensor_msgs/CompressedImage",
    "CameraCalibration": "sensor_msgs/CameraInfo",
}
_MODELS = {"kannala_brandt": "equidistant"}
_SECONDS = (("seconds", "nanos"), ("sec", "nsec"))  # protobuf, JSON


def kind_of(type_name: str, topic: str) -> Kind:
    """What messages of this type hold, foxglove.RawImage for one."""
    ros_type = _ros_type(type_name)
    return "other" if ros_type is None else ros_images.kind_of(ros_type, topic)


def stamp_of(message: Any) -> int:
    """The timestamp in ns, 0 where there is none."""
    stamp = _attributes(getattr(_attributes(message), "timestamp", None))
    for seconds, rest in _SECONDS:
        if hasattr(stamp, seconds) and hasattr(stamp, rest):
            return max(0, int(getattr(stamp, seconds)) * NANOSECONDS + int(getattr(stamp, rest)))
    return 0


def payload_of(message: Any, type_name: str, topic: str) -> Colour | Depth | Intrinsics | None:
    """What a message holds, deserialised or a dict of JSON (bytes in base64).

    None for the calibration of a camera that has none. Raises MessageError for a message that is damaged, BagError
    for an encoding that is not known.
    """
    ros_type = _ros_type(type_name)
    if ros_type is None:
        raise MessageError(f"{topic}: expected {', '.join(_ROS_TYPES)} of foxglove, found {type_name}")
    return ros_images.payload_of(_as_ros(_attributes(message)), ros_type, topic)


def _ros_type(type_name: str) -> str | None:
    package, _, name = type_name.rpartition(".")
    return _ROS_TYPES.get(name) if package == "foxglove" else None


def _attributes(message: Any) -> Any:
    return SimpleNamespace(**message) if isinstance(message, Mapping) else message


def _as_ros(message: Any) -> SimpleNamespace:
    """With the names that sensor_msgs has; a field that is absent, as JSON allows, is empty."""
    data = getattr(message, "data", b"")
    model = getattr(message, "distortion_model", "")
    return SimpleNamespace(
        width=getattr(message, "width", 0),
        height=getattr(message, "height", 0),
        encoding=getattr(message, "encoding", ""),
        is_bigendian=False,
        step=getattr(message, "step", 0),
        format=getattr(message, "format", ""),
        data=base64.b64decode(data) if isinstance(data, str) else data,
        distortion_model=_MODELS.get(model, model),
        k=getattr(message, "K", ()),
        d=getattr(message, "D", ()),
    )
