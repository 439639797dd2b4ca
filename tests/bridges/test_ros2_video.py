"""Video on ROS 2 topics: packets become the pictures that ffmpeg makes of them, and none is made of wrong ones."""

import sys
import time
from collections.abc import Iterator
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np
import pytest
from sam3_node_ros.link import TRANSPORTS

from sam3_node.transport import FrameSubscriber
from sam3_node.types import Frame
from sam3_node.wire import decode_image
from tests.support import ros2
from tests.support.patience import PATIENCE_S
from tests.support.processes import until
from tests.support.ros2_site import OpenSite, Site

pytestmark = pytest.mark.verifies(
    "stream",
    "video on ROS 2 topics: FFMPEGPacket, foxglove's CompressedVideo, CompressedImage",
    "other implementation",
    "ffmpeg encodes H.264 and H.265, and decodes them beside",
    "publishers of ffmpeg_image_transport and foxglove_compressed_video_transport",
)

COUNT = 30
GOP = 12
LOST = 16
"""A packet between two key frames"""
SIZE = (240, 320)
PERIOD_NS = 33_333_333
NAMES = {"h264": "libx264", "hevc": "libx265"}
OPTIONS = {
    "h264": {"preset": "ultrafast", "tune": "zerolatency"},
    "hevc": {"preset": "ultrafast", "tune": "zerolatency", "x265-params": "pools=1:log-level=none"},
}


@cache
def encode(codec: str) -> list[bytes]:
    """Return the packets of a picture that moves, with key frames every GOP."""
    context = av.CodecContext.create(NAMES[codec], "w")
    context.height, context.width = SIZE
    context.pix_fmt = "yuv420p"
    context.time_base = Fraction(1, 30)
    context.gop_size = GOP
    context.max_b_frames = 0
    context.options = OPTIONS[codec]
    noise = np.random.default_rng(3).integers(0, 256, (SIZE[0], SIZE[1] + 4 * COUNT, 3), dtype=np.uint8)
    wide = cv2.GaussianBlur(noise, (0, 0), 3)
    found = []
    for index in range(COUNT):
        view = np.ascontiguousarray(wide[:, 4 * index : 4 * index + SIZE[1]])
        picture = av.VideoFrame.from_ndarray(view, format="bgr24")
        picture.pts = index
        found += [bytes(packet) for packet in context.encode(picture)]
    assert len(found) == COUNT
    return found


@cache
def pictures(codec: str) -> list[Any]:
    """Return the pictures BGR [height, width, 3] that ffmpeg makes of all packets."""
    context = av.CodecContext.create(codec, "r")
    context.thread_count = 1
    packets = [av.Packet(packet) for packet in encode(codec)]
    return [
        picture.to_ndarray(format="bgr24")
        for packet in [*packets, None]
        for picture in context.decode(packet)
    ]


def make_message(transport: str, codec: str, index: int, stamp_ns: int) -> Any:
    packet = encode(codec)[index]
    kind = ros2.import_type(TRANSPORTS[transport])
    if transport == "foxglove":
        name = {"hevc": "h265"}.get(codec, codec)
        return kind(timestamp=ros2.make_stamp(stamp_ns), frame_id="optical", data=packet, format=name)
    header = ros2.make_header(stamp_ns)
    if transport == "compressed":
        return kind(header=header, format=codec, data=packet)
    more = {"pts": index, "flags": int(index % GOP == 0), "encoding": NAMES[codec]}
    return kind(header=header, width=SIZE[1], height=SIZE[0], data=packet, **more)


def play(site: Site, topic: str, messages: list[tuple[int, Any]]) -> Iterator[tuple[int, Frame]]:
    """Pass messages on one after another. Yield the frames that arrive, with their places."""
    for index, message in messages:
        site.bridge.take(topic, ros2.serialise(message))
        received = site.frames.take(200)
        if received is not None:
            yield index, received.frame


@pytest.mark.parametrize("lost", [None, LOST])
@pytest.mark.parametrize("codec", NAMES)
@pytest.mark.parametrize("transport", ["ffmpeg", "foxglove", "compressed"])
def test_packets_become_their_pictures(
    open_site: OpenSite, transport: str, codec: str, lost: int | None
) -> None:
    topic = f"/cam/image_raw/{transport}"
    site = open_site(image_topic=topic)
    assert site.bridge.subscriptions == ((topic, TRANSPORTS[transport]),)
    now_ns = time.time_ns()
    site.send((topic, make_message(transport, codec, 0, now_ns - 10**9)))
    stamps = [now_ns + index * PERIOD_NS for index in range(COUNT)]
    messages = [
        (index, make_message(transport, codec, index, stamps[index]))
        for index in range(COUNT)
        if index != lost
    ]
    found = dict(play(site, topic, messages))
    if lost is None:
        assert sorted(found) == list(range(COUNT))
        assert not site.warnings
    elif transport == "ffmpeg" or codec == "hevc":
        # H.264 alone does not show that a packet is missing, its numbers do
        assert sorted(found) == [*range(lost), *range(2 * GOP, COUNT)]
        # the decoder of H.265 says nothing, and is waited for a while
        assert [topic in line for line in site.warnings] == [True] * (codec == "h264")
    for index, frame in found.items():
        assert frame.capture_ns == stamps[index]
        if lost is None or not lost < index < 2 * GOP:
            assert np.array_equal(decode_image(frame), pictures(codec)[index])


def test_a_video_that_is_joined_late_begins_at_its_key_frame(open_site: OpenSite) -> None:
    topic = "/cam/image_raw/ffmpeg"
    site = open_site(image_topic=topic)
    site.send((topic, make_message("ffmpeg", "h264", 0, time.time_ns())))
    site.bridge.close()
    site = open_site(image_topic=topic)
    now_ns = time.time_ns()
    messages = [(index, make_message("ffmpeg", "h264", index, now_ns + index)) for index in range(5, COUNT)]
    # the subscription of this end may come late too, so the same part is played until it is whole
    found = until(
        lambda: (frames := dict(play(site, topic, messages))) and len(frames) == COUNT - GOP and frames,
        "all pictures",
    )
    assert sorted(found) == list(range(GOP, COUNT))
    for index, frame in found.items():
        assert np.array_equal(decode_image(frame), pictures("h264")[index])


def test_an_unknown_codec_is_told(open_site: OpenSite) -> None:
    topic = "/cam/image_raw/ffmpeg"
    site = open_site(image_topic=topic)
    message = make_message("ffmpeg", "h264", 0, time.time_ns())
    message.encoding = "theora"
    site.bridge.take(topic, ros2.serialise(message))
    assert ["theora" in line for line in site.warnings] == [True]


def test_the_player_s_video_comes_as_the_node_gets_it(tmp_path: Path) -> None:
    """The player writes FFMPEGPackets, the bridge reads them, and ffmpeg decodes the same beside."""
    robot = ros2.Robot(tmp_path)
    try:
        topics = {"image_topic": "/image/ffmpeg", "depth_topic": "''", "camera_info_topic": "''"}
        robot.start_bridge("video", **topics)
        assert robot.trigger("configure", name="video")
        assert robot.trigger("activate", name="video")
        kind = ros2.import_type(TRANSPORTS["ffmpeg"])
        packets: list[Any] = []
        robot.ros.create_subscription(kind, "/image/ffmpeg", packets.append, 100)
        options = ("-p", "encoding:=h264", "-p", "loop:=false", "-p", "rate:=0.5")
        player = robot.start(sys.executable, str(ros2.BIN / "player"), "--ros-args", *options)
        arrived: dict[int, Frame] = {}
        with FrameSubscriber([robot.places["frames"]]) as frames:
            while player.process.poll() is None:
                received = frames.take(100)
                if received is not None:
                    arrived[received.frame.capture_ns] = received.frame
        assert player.process.wait(PATIENCE_S) == 0
        assert packets[0].encoding == "h264"
        context = av.CodecContext.create("h264", "r")
        context.thread_count = 1
        equal = 0
        first = next(place for place, packet in enumerate(packets) if packet.flags)
        for packet in packets[first:]:
            (picture,) = context.decode(av.Packet(bytes(packet.data)))
            frame = arrived.get(ros2.stamp_ns(packet))
            if frame is not None:
                assert np.array_equal(decode_image(frame), picture.to_ndarray(format="bgr24"))
                equal += 1
        assert equal > len(robot.clip.frames) // 2
    finally:
        robot.close()
