"""Video that a recording holds message by message: foxglove.CompressedVideo, and FFMPEGPacket of ROS."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np
import pytest
from foxglove_schemas_protobuf.CompressedVideo_pb2 import CompressedVideo
from google.protobuf.timestamp_pb2 import Timestamp
from mcap_protobuf.writer import Writer as ProtobufWriter
from rosbags.rosbag1 import Writer as Writer1
from rosbags.rosbag2 import StoragePlugin
from rosbags.rosbag2 import Writer as Writer2
from rosbags.typesys import Stores, get_types_from_msg, get_typestore

from sam3_node.bags.bag import open_bag
from sam3_node.bags.pairing import TimeSpan
from sam3_node.errors import BagError
from sam3_node.types import NANOSECONDS, Frame, Intrinsics
from sam3_node.wire import decode_depth, decode_image
from tests.support.grey_video import encode, level
from tests.support.mcap_files import Moment, write_mcap
from tests.support.paths import SHARED
from tests.support.recordings import read_bag
from tests.support.refuses import mentions
from tests.support.ros_recordings import write_by_rosbags

T0 = 1_700_000_000 * NANOSECONDS
PERIOD_NS = 50_000_000
COUNT = 12
SIZE = (48, 64)
TOPIC = "/cam/image_raw/ffmpeg"
DEFINITION = (
    "std_msgs/Header header\nint32 width\nint32 height\nstring encoding\nuint64 pts\nuint8 flags\n"
    "bool is_bigendian\nuint8[] data"
)
HEADER = (
    "\n" + "=" * 80 + "\nMSG: std_msgs/Header\nbuiltin_interfaces/Time stamp\nstring frame_id\n" + "=" * 80
) + "\nMSG: builtin_interfaces/Time\nint32 sec\nuint32 nanosec"


@cache
def packets(codec: str) -> list[bytes]:
    """Encode the pictures of a grey video that becomes brighter, one packet each.

    Run by root, SVT-AV1 gives its process and all that it starts real-time priority, so it has a process of its own.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(encode, codec, COUNT, SIZE).result()


def write_foxglove(path: Path, data: list[bytes], format_: str) -> Path:
    with path.open("wb") as file, ProtobufWriter(file) as writer:
        for index, packet in enumerate(data):
            time = T0 + index * PERIOD_NS
            stamp = Timestamp(seconds=time // NANOSECONDS, nanos=time % NANOSECONDS)
            message = CompressedVideo(timestamp=stamp, frame_id="cam", data=packet, format=format_)
            writer.write_message(TOPIC, message, time, time)
    return path


def write_ros(path: Path, data: Sequence[bytes | None], encoding: str) -> Path:
    """Write packets, numbered by their places. None is a packet that was lost."""
    store = get_typestore(Stores.ROS2_HUMBLE)
    name = "ffmpeg_image_transport_msgs/msg/FFMPEGPacket"
    store.register(get_types_from_msg(DEFINITION, name))

    def pack(moment: Moment) -> tuple[str, bytes, bytes]:
        stamp = store.types["builtin_interfaces/msg/Time"](*divmod(moment.stamp_ns, NANOSECONDS))
        header = store.types["std_msgs/msg/Header"](stamp=stamp, frame_id="cam")
        index = (moment.stamp_ns - T0) // PERIOD_NS
        packet = np.frombuffer(moment.data, np.uint8)
        message = store.types[name](header, SIZE[1], SIZE[0], encoding, index, 0, False, packet)
        return name, (DEFINITION + HEADER).encode(), bytes(store.serialize_cdr(message, name))

    moments = [
        Moment(TOPIC, "video", T0 + index * PERIOD_NS, packet)
        for index, packet in enumerate(data)
        if packet is not None
    ]
    return write_mcap(path, moments, "cdr", "ros2msg", pack)


def levels(frames: list[Frame]) -> Iterator[float]:
    return (float(decode_image(frame).mean()) for frame in frames)


@pytest.mark.verifies(
    "recording",
    "`foxglove.CompressedVideo` and `FFMPEGPacket`",
    "other implementation",
    "ffmpeg encodes H.264, H.265, AV1, VP8, VP9, MPEG-4; foxglove-schemas-protobuf and rosbags write the messages",
    "a recording of ffmpeg_image_transport",
)
@pytest.mark.parametrize(
    ("codec", "name"),
    [
        ("libx264", "h264"),
        ("libx265", "h265"),
        ("libvpx-vp9", "vp9"),
        ("libsvtav1", "av1"),
        ("libvpx", "vp8"),
        ("mpeg4", "mpeg4"),
    ],
)
@pytest.mark.parametrize("write", [write_foxglove, write_ros])
def test_every_packet_becomes_its_image(tmp_path: Path, codec: str, name: str, write: Any) -> None:
    data = packets(codec)
    assert len(data) == COUNT
    frames, lost = read_bag(write(tmp_path / "r.mcap", data, name))
    assert lost is None
    assert [frame.capture_ns for frame in frames] == [T0 + index * PERIOD_NS for index in range(COUNT)]
    assert all(abs(found - level(index)) < 12 for index, found in enumerate(levels(frames)))
    assert {frame.camera for frame in frames} == {"cam"}


def test_what_comes_before_a_key_frame_and_damaged_packets_are_told(tmp_path: Path) -> None:
    data = packets("libvpx-vp9")[3:]
    data[5] = b"\x00" * 20
    frames, lost = read_bag(write_foxglove(tmp_path / "r.mcap", data, "vp9"))
    assert frames
    assert frames[0].capture_ns == T0 + 3 * PERIOD_NS  # the key frame
    assert f"of {TOPIC} (first" in str(lost)


@pytest.mark.parametrize("codec", ["libx264", "libvpx-vp9"])
def test_after_a_missing_packet_there_is_no_picture_until_a_key_frame(tmp_path: Path, codec: str) -> None:
    data = packets(codec)
    whole, _ = read_bag(write_ros(tmp_path / "whole.mcap", data, codec))
    frames, lost = read_bag(write_ros(tmp_path / "part.mcap", [*data[:3], None, *data[4:]], codec))
    left = [*range(3), *range(6, COUNT)]  # a key frame every 6
    assert [bytes(frame.colour) for frame in frames] == [bytes(whole[index].colour) for index in left]
    assert mentions(str(lost), "2", TOPIC)


def test_a_part_is_decoded_from_what_was_before_it(tmp_path: Path) -> None:
    path = write_foxglove(tmp_path / "r.mcap", packets("libvpx-vp9"), "vp9")
    whole, _ = read_bag(path)
    part, _ = read_bag(path, span=TimeSpan(3 * PERIOD_NS, 8 * PERIOD_NS))
    assert [frame.seq for frame in part] == [3, 4, 5, 6, 7]
    assert [bytes(frame.colour) for frame in part] == [bytes(frame.colour) for frame in whole[3:8]]


def test_an_unknown_codec_is_named(tmp_path: Path) -> None:
    path = write_foxglove(tmp_path / "r.mcap", [b"data"], "cinepak")
    with pytest.raises(BagError, match=r"expected a codec of .*h|264.*found 'cinepak'"):
        open_bag(path)


@pytest.mark.verifies(
    "recording", "`foxglove.CompressedVideo` and `FFMPEGPacket`", "real data", "H.264 of a camera"
)
def test_real_h264_is_what_ffmpeg_decodes(tmp_path: Path) -> None:
    source = SHARED / "data" / "video" / "16_robotarm.mp4"
    if not source.is_file():
        pytest.skip("the shared videos are not here")
    with av.open(str(source)) as container:
        annexb = av.BitStreamFilterContext("h264_mp4toannexb", container.streams.video[0])
        units = [unit for packet in container.demux(video=0) for unit in annexb.filter(packet) if unit.size][
            :40
        ]
    with av.open(str(source)) as container:
        expected = {
            image.pts: image.to_ndarray(format="bgr24")
            for _, image in zip(range(30), container.decode(video=0), strict=False)
        }
    path = write_ros(tmp_path / "r.mcap", [bytes(unit) for unit in units], "h264_nvenc;nv12;bgr8;bgr8")
    frames, lost = read_bag(path)
    assert lost is None
    by_packet = {frame.capture_ns: frame for frame in frames}
    for index, unit in enumerate(units):
        if unit.pts in expected:
            found = by_packet[T0 + index * PERIOD_NS]  # an image with B-frames has its own packet's stamp
            assert np.array_equal(decode_image(found), expected[unit.pts])


FOXGLOVE = "builtin_interfaces/Time timestamp\nstring frame_id\n"
DEFINITIONS = {
    "foxglove_msgs/msg/CompressedVideo": FOXGLOVE + "uint8[] data\nstring format\n",
    "foxglove_msgs/msg/CompressedImage": FOXGLOVE + "uint8[] data\nstring format\n",
    "foxglove_msgs/msg/RawImage": FOXGLOVE
    + "uint32 width\nuint32 height\nstring encoding\nuint32 step\nuint8[] data\n",
    "foxglove_msgs/msg/CameraCalibration": FOXGLOVE
    + "uint32 width\nuint32 height\nstring distortion_model\nfloat64[] d\nfloat64[9] k\nfloat64[9] r\nfloat64[12] p\n",
}
WRITERS = ["MCAP", "SQLITE3", "ROS1"]


def write_messages(
    path: Path, plugin: str, messages: list[tuple[str, str, dict[str, Any]]], period_ns: int = PERIOD_NS
) -> Path:
    """Write a bag of ROS 2, or of ROS 1; messages are topic, type, and fields without stamp, one every `period_ns`."""
    is_ros1 = plugin == "ROS1"
    store = get_typestore(Stores.ROS1_NOETIC if is_ros1 else Stores.ROS2_HUMBLE)
    for name, definition in DEFINITIONS.items():
        store.register(get_types_from_msg(definition, name))
    writer: Any = Writer1(path) if is_ros1 else Writer2(path, version=9, storage_plugin=StoragePlugin[plugin])

    def make(time: int, kind: str, fields: dict[str, Any]) -> Any:
        stamp = store.types["builtin_interfaces/msg/Time"](*divmod(time, NANOSECONDS))
        first: dict[str, Any] = {"timestamp": stamp, "frame_id": "cam"}
        if kind.startswith("sensor_msgs"):
            first = {"header": store.types["std_msgs/msg/Header"](*([0] if is_ros1 else []), stamp, "cam")}
        return store.types[kind](**first, **fields)

    timed = enumerate(messages)
    made = ((topic, T0 + n * period_ns, make(T0 + n * period_ns, *rest)) for n, (topic, *rest) in timed)
    return write_by_rosbags(writer, store, made)


def as_video(data: list[bytes], kind: str, format_: str) -> list[tuple[str, str, dict[str, Any]]]:
    return [
        ("/cam/image/compressed", kind, {"data": np.frombuffer(packet, np.uint8), "format": format_})
        for packet in data
    ]


@pytest.mark.verifies(
    "recording",
    "H.264, H.265 and AV1 in `sensor_msgs/CompressedImage` and `foxglove_msgs/CompressedVideo`",
    "other implementation",
    "ffmpeg encodes, rosbags writes MCAP, `.db3` and `.bag`",
    "a recording of a robot",
)
@pytest.mark.parametrize("plugin", WRITERS)
@pytest.mark.parametrize(
    ("kind", "codec", "format_"),
    [
        ("sensor_msgs/msg/CompressedImage", "libx264", "h264"),
        ("sensor_msgs/msg/CompressedImage", "libx264", "video/H264"),
        ("sensor_msgs/msg/CompressedImage", "libx265", "hevc"),
        ("sensor_msgs/msg/CompressedImage", "libsvtav1", "av1"),
        ("foxglove_msgs/msg/CompressedVideo", "libx264", "h264"),
        ("foxglove_msgs/msg/CompressedVideo", "libx265", "h265"),
    ],
)
def test_video_in_other_messages_of_ros_becomes_images(
    tmp_path: Path, plugin: str, kind: str, codec: str, format_: str
) -> None:
    data = packets(codec)
    path = write_messages(tmp_path / "bag.bag", plugin, as_video(data, kind, format_))
    frames, lost = read_bag(path)
    assert lost is None
    assert [frame.capture_ns for frame in frames] == [T0 + index * PERIOD_NS for index in range(COUNT)]
    assert all(abs(found - level(index)) < 12 for index, found in enumerate(levels(frames)))
    part, _ = read_bag(path, span=TimeSpan(3 * PERIOD_NS, 8 * PERIOD_NS))
    assert [frame.seq for frame in part] == [3, 4, 5, 6, 7]


def test_a_stream_that_begins_within_a_group_of_pictures_begins_at_its_key_frame(tmp_path: Path) -> None:
    data = [*packets("libx264")[3:], b"", *packets("libx264")[:2]]
    kind = "sensor_msgs/msg/CompressedImage"
    frames, lost = read_bag(write_messages(tmp_path / "bag", "MCAP", as_video(data, kind, "h264")))
    assert frames[0].capture_ns == T0 + 3 * PERIOD_NS
    assert len(frames) == len(data) - 4  # three before the key frame, and an empty one
    assert mentions(str(lost), "4", "/cam/image/compressed")


def test_images_of_other_formats_stay_images_and_unknown_ones_are_named(tmp_path: Path) -> None:
    kind = "sensor_msgs/msg/CompressedImage"
    jpeg = cv2.imencode(".jpg", np.zeros((*SIZE, 3), np.uint8))[1].tobytes()
    frames, _ = read_bag(write_messages(tmp_path / "jpeg", "MCAP", as_video([jpeg], kind, "h264; jpeg")))
    assert [frame.encoding for frame in frames] == ["jpeg"]
    frames, lost = read_bag(write_messages(tmp_path / "other", "MCAP", as_video([b"data"], kind, "theora")))
    assert not frames
    assert mentions(str(lost), "h264", "theora")


@pytest.mark.verifies(
    "recording",
    "`foxglove_msgs` of ROS: RawImage, CompressedImage, CompressedVideo, CameraCalibration",
    "other implementation",
    "rosbags writes MCAP, `.db3` and `.bag`",
)
@pytest.mark.parametrize("plugin", WRITERS)
def test_images_and_calibration_of_foxglove_msgs_are_read(tmp_path: Path, plugin: str) -> None:
    height, width = SIZE
    picture = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    matrix = np.array([60.0, 0, 30, 0, 61, 20, 0, 0, 1])
    projection = np.array([60.0, 0, 30, 0, 0, 61, 20, 0, 0, 0, 1, 0])
    size = {"width": width, "height": height}
    calibration = {"distortion_model": "plumb_bob", "d": np.zeros(5), "k": matrix, "r": np.eye(3).ravel()}
    raw = {"encoding": "bgr8", "step": 3 * width, "data": picture.ravel()}
    depth = {
        "encoding": "16UC1",
        "step": 2 * width,
        "data": np.full(SIZE, 1234, "<u2").ravel().view(np.uint8),
    }
    png = {"data": cv2.imencode(".png", picture)[1].ravel(), "format": "png"}
    messages: list[tuple[str, str, dict[str, Any]]] = [
        ("/a/camera_info", "CameraCalibration", size | calibration | {"p": projection}),
        ("/a/depth/image", "RawImage", size | depth),
        ("/a/image", "RawImage", size | raw),
        ("/b/image/compressed", "CompressedImage", png),
    ]
    messages = [(topic, f"foxglove_msgs/msg/{kind}", fields) for topic, kind, fields in messages]
    near_ns = 10_000_000  # depth belongs to the image after it
    frames, lost = read_bag(write_messages(tmp_path / "bag.bag", plugin, messages, near_ns))
    assert lost is None
    assert {frame.camera for frame in frames} == {"a", "b"}
    assert all(np.array_equal(decode_image(frame), picture) for frame in frames)
    (frame,) = (frame for frame in frames if frame.camera == "a")
    assert (decode_depth(frame.depth) == 1234).all()
    assert frame.intrinsics == Intrinsics(60.0, 61.0, 30.0, 20.0)
