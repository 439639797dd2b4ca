"""Small recordings of ROS 1 and 2, written by rosbags: one camera with colour, depth and intrinsics."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rosbags.rosbag1 import Writer as Writer1
from rosbags.rosbag2 import StoragePlugin
from rosbags.rosbag2 import Writer as Writer2
from rosbags.rosbag2.writer import CompressionFormat, CompressionMode

from sam3_node.bags.bit_depth import BitDepths
from sam3_node.bags.samples import CameraInfo, Colour, Payload, Sample
from sam3_node.types import Depth, Frame, Intrinsics
from sam3_node.wire import decode_depth, decode_image
from tests.support.mcap_files import (
    COLOUR,
    DEPTH,
    HEIGHT,
    INFO,
    LOG_DELAY_NS,
    ROS1,
    ROS2,
    T0,
    WIDTH,
    D,
    Moment,
    raw,
    ros_message,
)

SIZE = (HEIGHT, WIDTH)
TOPICS = frozenset((COLOUR, DEPTH, INFO))
INTRINSICS = Intrinsics(60.0, 61.0, 15.5, 11.5, "brown_conrady", tuple(D))
PERIOD_NS = 40_000_000


class Shot(NamedTuple):
    """Content of one message of a topic."""

    topic: str
    stamp_ns: int
    logged_ns: int
    payload: Any


def bgr(index: int) -> np.ndarray:
    return np.random.default_rng(index).integers(0, 256, (*SIZE, 3), dtype=np.uint8)


def millimetres(index: int) -> np.ndarray:
    return np.random.default_rng(index).integers(0, 9000, SIZE, dtype=np.uint16)


def shots(frames: int) -> Iterator[Shot]:
    """Yield the content of a recording of this many frames, in its order."""
    for index in range(frames):
        stamp_ns = T0 + index * PERIOD_NS
        for topic, payload in ((COLOUR, bgr(index)), (DEPTH, millimetres(index)), (INFO, INTRINSICS)):
            yield Shot(topic, stamp_ns, stamp_ns + LOG_DELAY_NS, payload)


def decode_samples(samples: Iterator[Sample]) -> list[Shot]:
    """Decode samples that were read, to compare them with shots."""
    return [Shot(item.topic, item.stamp_ns, item.logged_ns, decoded(item.payload)) for item in samples]


def decoded(payload: Payload) -> Any:
    if isinstance(payload, CameraInfo):
        return payload.lens
    if isinstance(payload, Colour):
        payload = BitDepths().narrow("", payload)
        return decode_image(Frame("c", 0, 0, payload.width, payload.height, payload.encoding, payload.data))
    return decode_depth(payload) if isinstance(payload, Depth) else payload


def same(actual: list[Shot], expected: list[Shot]) -> bool:
    """Return True if all pixels are equal."""
    return len(actual) == len(expected) and all(
        one[:3] == other[:3] and np.array_equal(one.payload, other.payload)
        if isinstance(one.payload, np.ndarray)
        else one == other
        for one, other in zip(actual, expected, strict=True)
    )


def to_moment(shot: Shot) -> Moment:
    """Return a shot as a message to write."""
    if shot.topic == INFO:
        return Moment(INFO, "info", shot.stamp_ns)
    encoding = "bgr8" if shot.payload.ndim == 3 else "16UC1"
    return raw(shot.payload, encoding, topic=shot.topic, stamp_ns=shot.stamp_ns)


def write_ros1(path: Path, frames: int, compression: str | None = None) -> Path:
    """Write a `.bag`; `compression` is BZ2 or LZ4. Chunks hold about three frames."""
    writer = Writer1(path)
    writer.chunk_threshold = 12_000
    if compression is not None:
        writer.set_compression(Writer1.CompressionFormat[compression])
    moments = map(to_moment, shots(frames))
    messages = ((item.topic, item.logged_ns, ros_message(item, ROS1)) for item in moments)
    return write_by_rosbags(writer, ROS1, messages)


def write_ros2(
    path: Path, frames: int, storage: str = "SQLITE3", compression: str | None = None, delay_ns: int = 0
) -> Path:
    """Write a folder; `storage` is SQLITE3 or MCAP, `compression` FILE, MESSAGE or, for MCAP, STORAGE."""
    writer = Writer2(path, version=9, storage_plugin=StoragePlugin[storage])
    if compression is not None:
        writer.set_compression(CompressionMode[compression], CompressionFormat.ZSTD)
    moments = map(to_moment, shots(frames))
    messages = ((item.topic, item.logged_ns + delay_ns, ros_message(item, ROS2)) for item in moments)
    return write_by_rosbags(writer, ROS2, messages)


def write_by_rosbags(writer: Any, store: Any, messages: Iterable[tuple[str, int, Any]]) -> Path:
    """Write messages of a type store: topic, time of recording, and the message. Return the path."""
    serialise = store.serialize_ros1 if isinstance(writer, Writer1) else store.serialize_cdr
    connections: dict[str, Any] = {}
    with writer:
        for topic, logged_ns, message in messages:
            kind = message.__msgtype__
            if topic not in connections:
                connections[topic] = writer.add_connection(topic, kind, typestore=store)
            writer.write(connections[topic], logged_ns, serialise(message, kind))
    return Path(writer.path)
