"""Recordings of the RealSense SDK: what its streams hold, and a `.bag` as the SDK wrote it."""

import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rosbags.rosbag1 import Writer

from sam3_node.types import Intrinsics
from tests.support.mcap_files import ROS1, Moment, ros_message

SIZE = (48, 64)
FRAMES = 6
START_MS = 1_700_000_000_000.0
PERIOD_MS = 33.25
UNITS = 0.0005
COEFFS = (0.1, 0.2, 0.003, 0.004, 0.05)
COLOUR = "/device_0/color/image_raw"
DEPTH = "/device_0/depth/image_raw"
INFRA = "/device_0/infra1/image_raw"
LENS = Intrinsics(60.0, 61.0, 31.5, 23.5, "brown_conrady", COEFFS)


class Stream(NamedTuple):
    """One stream to record: its kind, index and format as the SDK names them."""

    kind: str
    number: int
    form: str
    bytes_per_pixel: int


RGB = Stream("color", 0, "rgb8", 3)
Z16 = Stream("depth", 0, "z16", 2)
Y8 = Stream("infrared", 1, "y8", 1)


def pixels(stream: Stream, index: int) -> np.ndarray:
    rng = np.random.default_rng([index, stream.bytes_per_pixel])
    if stream.form == "z16":
        return rng.integers(0, 9000, SIZE, dtype=np.uint16)
    return rng.integers(0, 256, (*SIZE, stream.bytes_per_pixel), dtype=np.uint8)


def stamp_ns(index: int) -> int:
    return round((START_MS + index * PERIOD_MS) * 1e6)


def write_bag(path: Path, frames: int) -> Path:
    """Write a `.bag` as the SDK did: an Image ends with the depth units, and Z16 is called mono16."""
    store = ROS1
    types = ROS1.types
    header = types["std_msgs/msg/Header"]
    stamp_type = types["builtin_interfaces/msg/Time"]
    image_type = types["sensor_msgs/msg/Image"]
    streams = {
        "/device_0/sensor_0/Depth_0": (Z16, "mono16"),
        "/device_0/sensor_0/Infrared_1": (Stream("infrared", 1, "y16", 2), "16UC1"),
        "/device_0/sensor_1/Color_0": (RGB, "rgb8"),
    }
    with Writer(path) as writer:
        for prefix in streams:
            height, width = SIZE
            moment = Moment("", "info", 0, width=width, height=height, model="Brown Conrady", coeffs=COEFFS)
            message = ros_message(moment, store)
            message.K[[2, 5]] = LENS.cx, LENS.cy
            type_name = "sensor_msgs/msg/CameraInfo"
            connection = writer.add_connection(f"{prefix}/info/camera_info", type_name, typestore=store)
            writer.write(connection, 1, store.serialize_ros1(message, type_name))
        connections = {
            prefix: writer.add_connection(f"{prefix}/image/data", "sensor_msgs/msg/Image", typestore=store)
            for prefix in streams
        }
        for index in range(frames):
            stamp = stamp_type(*divmod(stamp_ns(index), 1_000_000_000))
            for prefix, (stream, encoding) in streams.items():
                data = pixels(stream, index).reshape(-1).view(np.uint8)
                step = data.size // SIZE[0]
                message = image_type(header(index, stamp, "1"), *SIZE, encoding, 0, step, data)
                raw = bytes(store.serialize_ros1(message, "sensor_msgs/msg/Image"))
                units = UNITS if stream is Z16 else 0.0
                writer.write(connections[prefix], 1 + index, raw + struct.pack("<f", units))
    return path
