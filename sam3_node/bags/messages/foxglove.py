"""Decoding of Foxglove's camera messages, images, video and calibration, as protobuf, JSON or `foxglove_msgs` of ROS.

They differ from ROS's image messages in a few names, so they are renamed and read as those.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from ...types import NANOSECONDS
from ..samples import Kind, Payload
from . import ros_images
from .ros_images import MessageError

ROS_PACKAGE = "foxglove_msgs"
"""Package of these messages in ROS."""

_ROS_TYPES = {
    "RawImage": "sensor_msgs/Image",
    "CompressedImage": "sensor_msgs/CompressedImage",
    "CompressedVideo": "ffmpeg_image_transport_msgs/FFMPEGPacket",
    "CameraCalibration": "sensor_msgs/CameraInfo",
}
_MODELS = {"kannala_brandt": "equidistant"}
_SECONDS = (("seconds", "nanos"), ("sec", "nsec"), ("sec", "nanosec"))  # protobuf, JSON, ROS


def find_kind(type_name: str, topic: str) -> Kind:
    """Return the kind of content of a message type, foxglove.RawImage or foxglove_msgs/msg/RawImage for example."""
    ros_type = _ros_type(type_name)
    return "other" if ros_type is None else ros_images.find_kind(ros_type, topic)


def read_stamp(message: Any) -> int:
    """Return the timestamp in ns; 0 if there is none."""
    stamp = _attributes(getattr(_attributes(message), "timestamp", None))
    for seconds, rest in _SECONDS:
        if hasattr(stamp, seconds) and hasattr(stamp, rest):
            return max(0, int(getattr(stamp, seconds)) * NANOSECONDS + int(getattr(stamp, rest)))
    return 0


def read_payload(message: Any, type_name: str, topic: str) -> Payload | None:
    """Return the content of a message, which is deserialised or a dict of JSON (bytes in base64).

    Return None for an empty calibration. Raises MessageError for a damaged message, BagError for an unknown encoding.
    """
    ros_type = _ros_type(type_name)
    if ros_type is None:
        raise MessageError(f"{topic}: expected {', '.join(_ROS_TYPES)} of foxglove, found {type_name}")
    return ros_images.read_payload(_as_ros(_attributes(message)), ros_type, topic)


def _ros_type(type_name: str) -> str | None:
    package, *rest = re.split(r"[./]", type_name)
    is_known = package in ("foxglove", ROS_PACKAGE) and len(rest) in (1, 2)
    return _ROS_TYPES.get(rest[-1]) if is_known else None


def _attributes(message: Any) -> Any:
    return SimpleNamespace(**message) if isinstance(message, Mapping) else message


def _as_ros(message: Any) -> SimpleNamespace:
    """Rename the fields as in sensor_msgs; a field that is absent, as JSON allows, becomes empty."""
    data = getattr(message, "data", b"")
    model = getattr(message, "distortion_model", "")
    return SimpleNamespace(
        width=getattr(message, "width", 0),
        height=getattr(message, "height", 0),
        encoding=getattr(message, "encoding", "") or getattr(message, "format", ""),
        is_bigendian=False,
        step=getattr(message, "step", 0),
        format=getattr(message, "format", ""),
        data=base64.b64decode(data) if isinstance(data, str) else data,
        distortion_model=_MODELS.get(model, model),
        k=getattr(message, "K", ()),
        d=getattr(message, "D", ()),
        p=getattr(message, "P", getattr(message, "p", ())),
    )
