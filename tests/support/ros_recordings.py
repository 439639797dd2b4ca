"""Small recordings of ROS 1 and 2, written by rosbags: one camera with colour, depth and intrinsics."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rosbags.rosbag1 import Writer as Writer1
from rosbags.rosbag2 import StoragePlugin
from rosbags.rosbag2 import Writer as Writer2
from rosbags.rosbag2.writer import CompressionFormat, CompressionMode
from rosbags.typesys import Stores, get_typestore

from sam3_node.bags.samples import CameraInfo, Colour, Payload, Sample
from sam3_node.types import Depth, Frame, Intrinsics
from sam3_node.wire import decode_depth, decode_image

SIZE = (24, 32)
COLOUR, DEPTH = "/camera/color/image_raw", "/camera/aligned_depth_to_color/image_raw"
INFO = "/camera/color/camera_info"
TYPES = {COLOUR: "Image", DEPTH: "Image", INFO: "CameraInfo"}
INTRINSICS = Intrinsics(60.0, 61.0, 15.5, 11.5, "brown_conrady", (0.1, 0.2, 0.003, 0.004, 0.05))
START_NS = 1_700_000_000_000_000_000
PERIOD_NS = 40_000_000
DELAY_NS = 3_000_000

STORES = {1: get_typestore(Stores.ROS1_NOETIC), 2: get_typestore(Stores.ROS2_HUMBLE)}


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
        stamp_ns = START_NS + index * PERIOD_NS
        for topic, payload in ((COLOUR, bgr(index)), (DEPTH, millimetres(index)), (INFO, INTRINSICS)):
            yield Shot(topic, stamp_ns, stamp_ns + DELAY_NS, payload)


def decode_samples(samples: Iterator[Sample]) -> list[Shot]:
    """Decode samples that were read, to compare them with shots."""
    return [Shot(item.topic, item.stamp_ns, item.logged_ns, decoded(item.payload)) for item in samples]


def decoded(payload: Payload) -> Any:
    if isinstance(payload, CameraInfo):
        return payload.lens
    if isinstance(payload, Colour):
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


def make_message(shot: Shot, ros: int) -> Any:
    """Return the sensor_msgs message with this content."""
    types = STORES[ros].types
    seconds, nanoseconds = divmod(shot.stamp_ns, 1_000_000_000)
    stamp = types["builtin_interfaces/msg/Time"](seconds, nanoseconds)
    header = types["std_msgs/msg/Header"](*([0] if ros == 1 else []), stamp, "camera")
    if isinstance(shot.payload, Intrinsics):
        lens, zeros = shot.payload, np.zeros(9)
        matrix = np.array([lens.fx, 0, lens.cx, 0, lens.fy, lens.cy, 0, 0, 1])
        region = types["sensor_msgs/msg/RegionOfInterest"](0, 0, 0, 0, False)
        figures = (np.array(lens.coeffs), matrix, zeros, np.zeros(12), 0, 0, region)
        return types["sensor_msgs/msg/CameraInfo"](header, *SIZE, "plumb_bob", *figures)
    pixels = shot.payload
    encoding = "bgr8" if pixels.ndim == 3 else "16UC1"
    data = pixels.reshape(-1).view(np.uint8)
    return types["sensor_msgs/msg/Image"](header, *SIZE, encoding, 0, data.size // SIZE[0], data)


def write_ros1(path: Path, frames: int, compression: str | None = None) -> Path:
    """Write a `.bag`; `compression` is BZ2 or LZ4. Chunks hold about three frames."""
    writer = Writer1(path)
    writer.chunk_threshold = 12_000
    if compression is not None:
        writer.set_compression(Writer1.CompressionFormat[compression])
    _write(writer, 1, STORES[1].serialize_ros1, frames)
    return path


def write_ros2(
    path: Path, frames: int, storage: str = "SQLITE3", compression: str | None = None, delay_ns: int = 0
) -> Path:
    """Write a folder; `storage` is SQLITE3 or MCAP, `compression` FILE, MESSAGE or, for MCAP, STORAGE."""
    writer = Writer2(path, version=9, storage_plugin=StoragePlugin[storage])
    if compression is not None:
        writer.set_compression(CompressionMode[compression], CompressionFormat.ZSTD)
    _write(writer, 2, STORES[2].serialize_cdr, frames, delay_ns)
    return path


def _write(writer: Any, ros: int, serialize: Any, frames: int, delay_ns: int = 0) -> None:
    kinds = {topic: f"sensor_msgs/msg/{name}" for topic, name in TYPES.items()}
    with writer:
        connections = {
            topic: writer.add_connection(topic, kind, typestore=STORES[ros]) for topic, kind in kinds.items()
        }
        for shot in shots(frames):
            data = serialize(make_message(shot, ros), kinds[shot.topic])
            writer.write(connections[shot.topic], shot.logged_ns + delay_ns, data)
