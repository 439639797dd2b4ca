"""Serialised ROS messages: the interface of their storages, and their deserialisation into samples."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import zstandard

from ...errors import BagError, require
from ...types import Buffer
from ..decompression import decompress
from ..samples import Sample, Topic
from . import foxglove, ros_images
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
_FOXGLOVE = {  # of the package foxglove_msgs, in ROS 1 and 2; the fields of a calibration are those of protobuf
    "RawImage": "uint32 width\nuint32 height\nstring encoding\nuint32 step\nuint8[] data\n",
    "CompressedImage": "uint8[] data\nstring format\n",
    "CompressedVideo": "uint8[] data\nstring format\n",
    "CameraCalibration": "uint32 width\nuint32 height\nstring distortion_model\n"
    "float64[] D\nfloat64[9] K\nfloat64[9] R\nfloat64[12] P\n",
}
_ZSTD = b"\x28\xb5\x2f\xfd"  # CDR begins with 00 00 or 00 01, never with this


class RawMessage(NamedTuple):
    """One message as a recording holds it; `logged_ns` is the time of recording."""

    topic: str
    logged_ns: int
    data: Buffer


class Storage(Protocol):
    """A file of serialised messages. The constructor raises BagError for another file."""

    types: dict[str, str]
    """The full name of each topic's message type."""
    is_cdr: bool
    """True for CDR, as in ROS 2; False for the serialisation of ROS 1."""

    @property
    def lost(self) -> str | None:
        """Description of what could not be read, once `messages` has ended; None if nothing was lost."""

    def messages(self, topics: Collection[str]) -> Iterator[RawMessage]:
        """Yield the whole messages on these topics in the file's order, from the beginning each time; never raises."""

    def close(self) -> None:
        """Close the file. Idempotent."""


def list_topics(types: dict[str, str]) -> tuple[Topic, ...]:
    """Return the topics of a recording from their names and types."""
    return tuple(
        Topic(name, type_name, content_of(type_name).find_kind(type_name, name))
        for name, type_name in types.items()
    )


def content_of(type_name: str) -> Any:
    """Return the module that reads messages of this type: `foxglove`, also in ROS's spelling, or `ros_images`."""
    is_ros = "/" in type_name and type_name.split("/")[0] != foxglove.ROS_PACKAGE
    return ros_images if is_ros else foxglove


def read_sample(raw: RawMessage, type_name: str, is_cdr: bool) -> Sample | None:
    """Return the sample of one message; None for an empty CameraInfo. Raises as `read_payload`."""
    message = deserialise(raw.data, type_name, is_cdr)
    content = content_of(type_name)
    payload = content.read_payload(message, type_name, raw.topic)
    if payload is None:
        return None
    return Sample(raw.topic, content.read_stamp(message) or raw.logged_ns, raw.logged_ns, payload)


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
    """Return the first bytes of a file, which identify its format; BagError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(count)
    except OSError as error:
        raise BagError(f"cannot read {path}: {error.strerror}") from error


@cache
def _store(is_cdr: bool) -> Any:
    # the definitions in a recording are not needed: those of the types that are read here never changed
    typesys = require("rosbags.typesys", "bags")
    store = typesys.get_typestore(typesys.Stores.ROS2_HUMBLE if is_cdr else typesys.Stores.ROS1_NOETIC)
    store.register(typesys.get_types_from_msg(_FFMPEG_PACKET, "ffmpeg_image_transport_msgs/msg/FFMPEGPacket"))
    for name, fields in _FOXGLOVE.items():
        store.register(typesys.get_types_from_msg(_STAMPED + fields, f"foxglove_msgs/msg/{name}"))
    return store
