"""Serialised ROS messages: where they come from, and what of a camera they hold."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import zstandard

from ...errors import BagError, require
from ...types import Buffer
from ..samples import Sample, Topic
from .ros_images import MessageError, kind_of, payload_of, stamp_of

_ZSTD = b"\x28\xb5\x2f\xfd"  # never the begin of CDR, which is 00 00 or 00 01
_MAX_MESSAGE = 1 << 30


class RawMessage(NamedTuple):
    """One message as a recording holds it; `logged_ns` is when it was recorded."""

    topic: str
    logged_ns: int
    data: Buffer


class Storage(Protocol):
    """A file of serialised messages. Making one raises BagError for what is no such file."""

    types: dict[str, str]
    """The full name of each topic's message type."""
    is_cdr: bool
    """CDR, as in ROS 2, or the serialisation of ROS 1."""

    @property
    def lost(self) -> str | None:
        """After `messages` has ended: what could not be read, None where all was."""

    def messages(self, topics: Collection[str]) -> Iterator[RawMessage]:
        """The whole messages on these topics in the file's order, from the beginning each time; never raises."""

    def close(self) -> None:
        """Let go of the file; more than once does no harm."""


def topics_of(types: dict[str, str]) -> tuple[Topic, ...]:
    """What the topics of a recording hold, by their names and types."""
    return tuple(Topic(name, type_name, kind_of(type_name, name)) for name, type_name in types.items())


def sample_of(raw: RawMessage, type_name: str, is_cdr: bool) -> Sample | None:
    """The sample of one message; None for a CameraInfo that says nothing. Raises as `payload_of`."""
    message = deserialise(raw.data, type_name, is_cdr)
    payload = payload_of(message, type_name, raw.topic)
    if payload is None:
        return None
    return Sample(raw.topic, stamp_of(message) or raw.logged_ns, raw.logged_ns, payload)


def deserialise(data: Buffer, type_name: str, is_cdr: bool) -> Any:
    """A message of a standard type, its attributes as ROS names them; MessageError for bytes that are not one."""
    store = _store(is_cdr)
    package, _, name = type_name.rpartition("/")
    take = store.deserialize_cdr if is_cdr else store.deserialize_ros1
    errors = require("rosbags.serde", "bags").SerdeError
    try:
        return take(memoryview(_unpacked(data) if is_cdr else data), f"{package.split('/')[0]}/msg/{name}")
    except (errors, struct.error, ValueError, LookupError, AssertionError, zstandard.ZstdError) as error:
        raise MessageError(
            f"expected a {type_name}, found {len(data)} bytes that are none ({error})"
        ) from error


def _unpacked(data: Buffer) -> Buffer:
    """A message of ROS 2, which its recorder may have compressed."""
    if bytes(data[: len(_ZSTD)]) != _ZSTD:
        return data
    if not 0 <= zstandard.frame_content_size(data) <= _MAX_MESSAGE:
        raise ValueError("compressed, without its size")
    return zstandard.ZstdDecompressor().decompress(data)


def first_bytes(path: Path, count: int) -> bytes:
    """The begin of a file, by which its format is told; BagError where it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(count)
    except OSError as error:
        raise BagError(f"cannot read {path}: {error.strerror}") from error


@cache
def _store(is_cdr: bool) -> Any:
    # a recording's own definitions are not used: those of the types that are read here never changed
    typesys = require("rosbags.typesys", "bags")
    return typesys.get_typestore(typesys.Stores.ROS2_HUMBLE if is_cdr else typesys.Stores.ROS1_NOETIC)
