"""MCAP files of an RGB-D camera as other programs write them, made by the libraries of the four formats."""

import base64
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from foxglove_schemas_protobuf.CameraCalibration_pb2 import CameraCalibration
from foxglove_schemas_protobuf.CompressedImage_pb2 import CompressedImage
from foxglove_schemas_protobuf.RawImage_pb2 import RawImage
from google.protobuf.timestamp_pb2 import Timestamp
from mcap.writer import CompressionType, Writer
from mcap_protobuf.writer import Writer as ProtobufWriter
from mcap_ros2.writer import Writer as Ros2Writer
from rosbags.typesys import Stores, get_typestore

T0 = 1_700_000_000_000_000_000
PERIOD_NS = 33_000_000
LOG_DELAY_NS = 2_000_000
HEIGHT = 24
WIDTH = 32
K = [60.0, 0.0, 15.5, 0.0, 61.0, 11.5, 0.0, 0.0, 1.0]
D = [0.1, -0.2, 0.001, 0.002, 0.3]
COLOUR = "/camera/color/image_raw"
DEPTH = "/camera/aligned_depth_to_color/image_raw"
INFO = "/camera/color/camera_info"

ROS1 = get_typestore(Stores.ROS1_NOETIC)
ROS2 = get_typestore(Stores.ROS2_HUMBLE)


@dataclass(frozen=True)
class Moment:
    """One message before serialisation: `kind` is raw, compressed, info or joints."""

    topic: str
    kind: str
    stamp_ns: int
    data: bytes = b""
    encoding: str = ""
    width: int = WIDTH
    height: int = HEIGHT
    step: int = 0
    big_endian: bool = False
    model: str = "plumb_bob"
    coeffs: tuple[float, ...] = tuple(D)
    p: tuple[float, ...] = ()
    joints: tuple[tuple[str, ...], tuple[float, ...], tuple[float, ...]] = ((), (), ())
    """names, positions and velocities"""

    @property
    def logged_ns(self) -> int:
        return (self.stamp_ns or T0) + LOG_DELAY_NS


def colour_pixels(index: int) -> np.ndarray:
    """Return BGR uint8 [HEIGHT, WIDTH, 3], different for each index."""
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    return np.stack([rows * 3 + index, columns * 3, np.full_like(rows, 10 * index % 256)], -1).astype(
        np.uint8
    )


def depth_pixels(index: int) -> np.ndarray:
    return (np.arange(HEIGHT * WIDTH, dtype=np.uint16).reshape(HEIGHT, WIDTH) + 500 + index).astype("<u2")


def jpeg(index: int) -> bytes:
    return cv2.imencode(".jpg", colour_pixels(index))[1].tobytes()


def rgbd(count: int, compressed: bool = False) -> Iterator[Moment]:
    """Yield colour, depth and intrinsics of `count` frames; depth and colour have the same stamp."""
    for index in range(count):
        stamp = T0 + index * PERIOD_NS
        if compressed:
            yield Moment(f"{COLOUR}/compressed", "compressed", stamp, jpeg(index), "jpeg")
        else:
            yield Moment(COLOUR, "raw", stamp, colour_pixels(index).tobytes(), "bgr8", step=3 * WIDTH)
        yield Moment(DEPTH, "raw", stamp, depth_pixels(index).tobytes(), "16UC1", step=2 * WIDTH)
        yield Moment(INFO, "info", stamp)


def write_ros2(path: Path, moments: Iterator[Moment] | list[Moment], **options: Any) -> Path:
    """Write as rosbag2 and Foxglove's bridge do: CDR, with schemas in ros2msg."""
    with path.open("wb") as file, Ros2Writer(file, **options) as writer:
        schemas: dict[str, Any] = {}
        for moment in moments:
            message = ros_message(moment, ROS2)
            name = message.__msgtype__
            if name not in schemas:
                schemas[name] = writer.register_msgdef(name, ROS2.generate_msgdef(name, ros_version=2)[0])
            writer.write_message(
                moment.topic, schemas[name], _fields(message), moment.logged_ns, moment.logged_ns
            )
    return path


def write_ros1(path: Path, moments: Iterator[Moment] | list[Moment], **options: Any) -> Path:
    def encode(moment: Moment) -> tuple[str, bytes, bytes]:
        message = ros_message(moment, ROS1)
        name = message.__msgtype__
        definition = ROS1.generate_msgdef(name, ros_version=1)[0]
        return name.replace("/msg/", "/"), definition.encode(), bytes(ROS1.serialize_ros1(message, name))

    return write_mcap(path, moments, "ros1", "ros1msg", encode, **options)


def write_json(path: Path, moments: Iterator[Moment] | list[Moment], **options: Any) -> Path:
    def encode(moment: Moment) -> tuple[str, bytes, bytes]:
        name, fields = _foxglove_fields(moment)
        seconds, rest = divmod(moment.stamp_ns, 10**9)
        fields["timestamp"] = {"sec": seconds, "nsec": rest}
        if "data" in fields:
            fields["data"] = base64.b64encode(fields["data"]).decode()
        return f"foxglove.{name}", b'{"type": "object"}', json.dumps(fields).encode()

    return write_mcap(path, moments, "json", "jsonschema", encode, **options)


def write_protobuf(path: Path, moments: Iterator[Moment] | list[Moment], **options: Any) -> Path:
    kinds = {"RawImage": RawImage, "CompressedImage": CompressedImage, "CameraCalibration": CameraCalibration}
    with path.open("wb") as file, ProtobufWriter(file, **options) as writer:
        for moment in moments:
            name, fields = _foxglove_fields(moment)
            seconds, rest = divmod(moment.stamp_ns, 10**9)
            message = kinds[name](timestamp=Timestamp(seconds=seconds, nanos=rest), **fields)
            writer.write_message(moment.topic, message, moment.logged_ns, moment.logged_ns)
    return path


WRITERS: dict[str, Callable[..., Path]] = {
    "ros2": write_ros2,
    "ros1": write_ros1,
    "json": write_json,
    "protobuf": write_protobuf,
}


def write_mcap(
    path: Path,
    moments: Iterator[Moment] | list[Moment],
    encoding: str,
    schema_encoding: str,
    encode: Callable[[Moment], tuple[str, bytes, bytes]],
    **options: Any,
) -> Path:
    """Write with mcap's own writer; `encode` returns a message's type, the type's schema and the message."""
    schemas: dict[str, int] = {}
    channels: dict[str, int] = {}
    with path.open("wb") as file:
        writer = Writer(file, **options)
        writer.start()
        for moment in moments:
            name, schema, data = encode(moment)
            if name not in schemas:
                schemas[name] = writer.register_schema(name, schema_encoding, schema)
            if moment.topic not in channels:
                channels[moment.topic] = writer.register_channel(moment.topic, encoding, schemas[name])
            writer.add_message(channels[moment.topic], moment.logged_ns, data, moment.logged_ns)
        writer.finish()
    return path


def uncompressed(chunk_size: int = 1 << 20) -> dict[str, Any]:
    return {"compression": CompressionType.NONE, "chunk_size": chunk_size}


def ros_message(moment: Moment, store: Any) -> Any:
    seconds, rest = divmod(moment.stamp_ns, 10**9)
    time = store.types["builtin_interfaces/msg/Time"](seconds, rest)
    count = {"seq": 0} if store is ROS1 else {}
    header = store.types["std_msgs/msg/Header"](stamp=time, frame_id="camera", **count)
    data = np.frombuffer(moment.data, np.uint8)
    if moment.kind == "compressed":
        return store.types["sensor_msgs/msg/CompressedImage"](header, moment.encoding, data)
    if moment.kind == "raw":
        return store.types["sensor_msgs/msg/Image"](
            header, moment.height, moment.width, moment.encoding, int(moment.big_endian), moment.step, data
        )
    if moment.kind == "joints":
        names, *rates = moment.joints
        return store.types["sensor_msgs/msg/JointState"](
            header, list(names), *(np.array(values, np.float64) for values in (*rates, ()))
        )
    region = store.types["sensor_msgs/msg/RegionOfInterest"](0, 0, 0, 0, False)
    numbers = [
        np.array(values, np.float64)
        for values in (moment.coeffs, K, np.eye(3).ravel(), moment.p or [0.0] * 12)
    ]
    return store.types["sensor_msgs/msg/CameraInfo"](
        header, moment.height, moment.width, moment.model, *numbers, 0, 0, region
    )


def _fields(value: Any) -> Any:
    """Convert a message of rosbags to maps and lists."""
    if isinstance(value, np.ndarray):
        return value.tobytes() if value.dtype == np.uint8 else value.tolist()
    if hasattr(value, "__msgtype__"):
        return {name: _fields(getattr(value, name)) for name in value.__dataclass_fields__ if name[0] != "_"}
    return value


def _foxglove_fields(moment: Moment) -> tuple[str, dict[str, Any]]:
    size = {"width": moment.width, "height": moment.height}
    if moment.kind == "compressed":
        return "CompressedImage", {"data": moment.data, "format": moment.encoding}
    if moment.kind == "raw":
        fields = {"data": moment.data, "encoding": moment.encoding, "step": moment.step}
        return "RawImage", {**size, **fields}
    lens = {"K": K, "D": list(moment.coeffs), "P": list(moment.p), "distortion_model": moment.model}
    return "CameraCalibration", {**size, **lens}


def raw(image: np.ndarray, encoding: str, **changes: object) -> Moment:
    step = image[0].nbytes
    return replace(Moment("/cam/image_raw", "raw", T0, image.tobytes(), encoding, step=step), **changes)  # type: ignore[arg-type]
