"""Turns serialised messages of ROS and Foxglove (protobuf, JSON, or `foxglove_msgs` of ROS) into samples."""

import struct
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import zstandard

from ...errors import require
from ...files import ANY_SIZE, open_regular
from ...types import Buffer
from ..decompression import decompress
from ..samples import Sample, Topic, reading
from .ros_images import MessageError, find_kind, read_payload, read_stamp

# definition of ffmpeg_image_transport_msgs/FFMPEGPacket
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
# definitions of the package foxglove_msgs, in ROS 1 and 2; a calibration has the fields of protobuf
_FOXGLOVE = {
    "RawImage": "uint32 width\nuint32 height\nstring encoding\nuint32 step\nuint8[] data\n",
    "CompressedImage": "uint8[] data\nstring format\n",
    "CompressedVideo": "uint8[] data\nstring format\n",
    "CameraCalibration": "uint32 width\nuint32 height\nstring distortion_model\n"
    "float64[] D\nfloat64[9] K\nfloat64[9] R\nfloat64[12] P\n",
}
# first bytes of zstd; CDR begins with 00 00 or 00 01, never with this
_ZSTD = b"\x28\xb5\x2f\xfd"
# values of fields that JSON may lack because they are empty
_EMPTY = {"step": 0, "data": b"", "encoding": "", "format": "", "distortion_model": ""}


class RawMessage(NamedTuple):
    """One message as a recording holds it. `logged_ns` is the time of recording."""

    topic: str
    logged_ns: int
    data: Buffer


def list_topics(types: dict[str, str]) -> tuple[Topic, ...]:
    """Return the topics of a recording from their names and types."""
    return tuple(Topic(name, type_name, find_kind(type_name, name)) for name, type_name in types.items())


def read_sample(message: Any, type_name: str, topic: str, logged_ns: int) -> Sample | None:
    """Return the sample of a deserialised message, or of a dict of JSON; None for an empty calibration.

    Raises MessageError for a damaged message, BagError for an unknown encoding.
    """
    if isinstance(message, Mapping):
        message = SimpleNamespace(**{**_EMPTY, **message})
    payload = read_payload(message, type_name, topic)
    stamp_ns = read_stamp(message)
    if payload is None:
        return None
    return Sample(topic, stamp_ns or logged_ns, logged_ns, payload)


def deserialise(data: Buffer, type_name: str, is_cdr: bool) -> Any:
    """Return a message of a standard type with ROS's attribute names; MessageError for other bytes."""
    store = _store(is_cdr)
    package, _, name = type_name.rpartition("/")
    full_name = f"{package.split('/')[0]}/msg/{name}"
    errors = require("rosbags.serde", "bags").SerdeError
    try:
        if is_cdr:
            return store.deserialize_cdr(memoryview(_decompress(data)), full_name)
        return store.deserialize_ros1(memoryview(data), full_name)
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
    with reading(path), open_regular(path, ANY_SIZE) as file:
        return file.read(count)


@cache
def _store(is_cdr: bool) -> Any:
    # the definitions in a recording are not needed: the types that are read here never changed
    typesys = require("rosbags.typesys", "bags")
    stores = typesys.Stores
    store = typesys.get_typestore(stores.ROS2_HUMBLE if is_cdr else stores.ROS1_NOETIC)
    store.register(typesys.get_types_from_msg(_FFMPEG_PACKET, "ffmpeg_image_transport_msgs/msg/FFMPEGPacket"))
    for name, fields in _FOXGLOVE.items():
        store.register(typesys.get_types_from_msg(_STAMPED + fields, f"foxglove_msgs/msg/{name}"))
    return store
