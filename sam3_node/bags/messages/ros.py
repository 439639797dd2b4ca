"""Turns serialised messages of ROS and Foxglove into samples.

Foxglove's messages (protobuf, JSON, or `foxglove_msgs` of ROS) differ from ROS's in a few names, so they are renamed
and read as those.
"""

import base64
import re
import struct
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import zstandard

from ...errors import require
from ...types import NANOSECONDS, Buffer
from ..decompression import decompress
from ..samples import Kind, Sample, Topic, reading
from . import ros_images
from .ros_images import MessageError

_FFMPEG_PACKET = """
std_msgs/Header header
int32 width
int32 height
string encoding
uint64 pts
uint8 flags
bool is_bigendian
uint8[] data
"""
_STAMPED = "builtin_interfaces/Time timestamp\nstring frame_id\n"
_FOXGLOVE = {  # of the package foxglove_msgs, in ROS 1 and 2; a calibration has the fields of protobuf
    "RawImage": "uint32 width\nuint32 height\nstring encoding\nuint32 step\nuint8[] data\n",
    "CompressedImage": "uint8[] data\nstring format\n",
    "CompressedVideo": "uint8[] data\nstring format\n",
    "CameraCalibration": "uint32 width\nuint32 height\nstring distortion_model\n"
    "float64[] D\nfloat64[9] K\nfloat64[9] R\nfloat64[12] P\n",
}
_ZSTD = b"\x28\xb5\x2f\xfd"  # CDR begins with 00 00 or 00 01, never with this
_ROS_TYPES = {
    "RawImage": "sensor_msgs/Image",
    "CompressedImage": "sensor_msgs/CompressedImage",
    "CompressedVideo": "ffmpeg_image_transport_msgs/FFMPEGPacket",
    "CameraCalibration": "sensor_msgs/CameraInfo",
}
_MODELS = {"kannala_brandt": "equidistant"}
_EMPTY: dict[str, Any] = {
    **dict.fromkeys(("width", "height", "step"), 0),
    **dict.fromkeys(("encoding", "format", "distortion_model"), ""),
    **dict.fromkeys(("data", "K", "D", "P"), b""),
}
_SECONDS = (("seconds", "nanos"), ("sec", "nsec"), ("sec", "nanosec"))  # protobuf, JSON, ROS


class RawMessage(NamedTuple):
    """One message as a recording holds it; `logged_ns` is the time of recording."""

    topic: str
    logged_ns: int
    data: Buffer


def list_topics(types: dict[str, str]) -> tuple[Topic, ...]:
    """Return the topics of a recording from their names and types."""
    return tuple(Topic(name, type_name, find_kind(type_name, name)) for name, type_name in types.items())


def find_kind(type_name: str, topic: str) -> Kind:
    """Return the kind of content of a message type: sensor_msgs/Image or foxglove.RawImage, for example."""
    ros_type = _find_ros_type(type_name)
    return "other" if ros_type is None else ros_images.find_kind(ros_type, topic)


def read_sample(message: Any, type_name: str, topic: str, logged_ns: int) -> Sample | None:
    """Return the sample of a deserialised message, or of a dict of JSON; None for an empty calibration.

    Raises MessageError for a damaged message, BagError for an unknown encoding.
    """
    ros_type = _find_ros_type(type_name)
    if ros_type is None:
        raise MessageError(f"{topic}: expected {', '.join(_ROS_TYPES)} of foxglove, found {type_name}")
    if ros_type == type_name:
        payload = ros_images.read_payload(message, type_name, topic)
        stamp_ns = ros_images.read_stamp(message)
    else:
        message = _with_attributes(message)
        payload = ros_images.read_payload(_rename_fields(message), ros_type, topic)
        stamp_ns = _read_foxglove_stamp(message)
    return None if payload is None else Sample(topic, stamp_ns or logged_ns, logged_ns, payload)


def _find_ros_type(type_name: str) -> str | None:
    """Return a type of ROS as it is, and for a type of Foxglove the type of ROS that corresponds to it."""
    package, *rest = re.split(r"[./]", type_name)
    if package in ("foxglove", "foxglove_msgs"):
        return _ROS_TYPES.get(rest[-1]) if len(rest) in (1, 2) else None
    return type_name if "/" in type_name else None


def _with_attributes(message: Any) -> Any:
    return SimpleNamespace(**message) if isinstance(message, Mapping) else message


def _read_foxglove_stamp(message: Any) -> int:
    """Return the timestamp in ns; 0 if there is none."""
    stamp = _with_attributes(getattr(message, "timestamp", None))
    for seconds, rest in _SECONDS:
        if hasattr(stamp, seconds) and hasattr(stamp, rest):
            return max(0, int(getattr(stamp, seconds)) * NANOSECONDS + int(getattr(stamp, rest)))
    return 0


def _rename_fields(message: Any) -> SimpleNamespace:
    """Name the fields as sensor_msgs does; a field that is absent, as JSON allows, becomes empty."""
    fields = {name: getattr(message, name, empty) for name, empty in _EMPTY.items()}
    data, model = fields["data"], fields["distortion_model"]
    fields["data"] = base64.b64decode(data) if isinstance(data, str) else data
    fields["encoding"] = fields["encoding"] or fields["format"]
    fields["distortion_model"] = _MODELS.get(model, model)
    return SimpleNamespace(is_bigendian=False, **fields)


def deserialise(data: Buffer, type_name: str, is_cdr: bool) -> Any:
    """Return a message of a standard type with ROS's attribute names; MessageError for other bytes."""
    store = _store(is_cdr)
    package, _, name = type_name.rpartition("/")
    take = store.deserialize_cdr if is_cdr else store.deserialize_ros1
    errors = require("rosbags.serde", "bags").SerdeError
    try:
        return take(memoryview(_decompress(data) if is_cdr else data), f"{package.split('/')[0]}/msg/{name}")
    except (errors, struct.error, ValueError, LookupError, AssertionError, zstandard.ZstdError) as error:
        raise MessageError(f"expected a {type_name}, found {len(data)} other bytes ({error})") from error


def _decompress(data: Buffer) -> Buffer:
    """Return a message of ROS 2, decompressed if its recorder compressed it."""
    if bytes(data[: len(_ZSTD)]) != _ZSTD:
        return data
    size = zstandard.frame_content_size(data)
    content = decompress(data, "zstd", size)
    if len(content) != size:
        raise ValueError(f"compressed, {len(content)} bytes of {size}")
    return memoryview(content).toreadonly()


def first_bytes(path: Path, count: int) -> bytes:
    """Return the first bytes of a file, which identify its format. Raises BagError if it cannot be read."""
    with reading(path), path.open("rb") as file:
        return file.read(count)


@cache
def _store(is_cdr: bool) -> Any:
    # the definitions in a recording are not needed: the types that are read here never changed
    typesys = require("rosbags.typesys", "bags")
    store = typesys.get_typestore(typesys.Stores.ROS2_HUMBLE if is_cdr else typesys.Stores.ROS1_NOETIC)
    store.register(typesys.get_types_from_msg(_FFMPEG_PACKET, "ffmpeg_image_transport_msgs/msg/FFMPEGPacket"))
    for name, fields in _FOXGLOVE.items():
        store.register(typesys.get_types_from_msg(_STAMPED + fields, f"foxglove_msgs/msg/{name}"))
    return store
