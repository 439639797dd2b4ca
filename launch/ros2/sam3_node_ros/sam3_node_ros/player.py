"""Node of ROS 2 that plays a recording as a camera. It needs the extra bags of sam3-node.

Topics are `image` or `image/compressed`, as the recording has them, or `image/ffmpeg` with `encoding` h264;
`depth_registered/image_raw` or `depth/image_raw`, and `camera_info`. It begins when the image has a subscriber.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import rclpy
from builtin_interfaces.msg import Time
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.qos import QoSProfile, qos_profile_sensor_data
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import CameraInfo, CompressedImage, Image
from std_msgs.msg import Header

from sam3_node.bags import open_bag
from sam3_node.bags.native.reader import TABLETOP
from sam3_node.errors import Sam3NodeError, SettingsError
from sam3_node.types import NANOSECONDS, Depth, Frame, Intrinsics
from sam3_node.wire import decode_depth, decode_image
from sam3_node.wire.video import VIDEO

from .link import VIDEO_QUEUE
from .messages import pack_pixels
from .parts import import_type
from .process import end_with_context, prepare_for_images

POLL_S = 0.05
MODELS = {"none": "plumb_bob", "brown_conrady": "plumb_bob", "fisheye": "equidistant"}
CHANNELS = {"rgb8": 3, "bgr8": 3, "mono8": 1}
PACKET = "ffmpeg_image_transport_msgs/msg/FFMPEGPacket"
DEFAULT_MBPS = 6.0
"""Rate of a video, in Mbit/s"""
KEY_FLAG = 1
"""Flag of a packet that a decoder can begin with, as ffmpeg has it"""


class Player(Node):
    """Publishes the frames of a recording at its own pace."""

    def __init__(self) -> None:
        super().__init__("sam3_player")
        self.recording = str(self.declare_parameter("recording", "").value) or str(TABLETOP)
        self._camera = str(self.declare_parameter("camera", "").value)
        self._frame_id = str(self.declare_parameter("frame_id", "camera_optical").value)
        self._rate = float(self.declare_parameter("rate", 1.0).value)
        self._is_looping = bool(self.declare_parameter("loop", True).value)
        self._is_as_recorded = bool(self.declare_parameter("stamps_as_recorded", False).value)
        self._encoding = str(self.declare_parameter("encoding", "").value)
        self._mbps = float(self.declare_parameter("bit_rate_mbps", DEFAULT_MBPS).value)
        self._video: VideoPackets | None = None
        self._publishers_by_topic: dict[str, Any] = {}
        # as `ros2 bag play --clock`
        self._clock = (
            self.create_publisher(Clock, "/clock", QoSProfile(depth=1)) if self._is_as_recorded else None
        )

    def play(self, spin: Any) -> None:
        """Publish all frames; `spin` runs callbacks for some seconds.

        Raises SettingsError for an unknown `encoding`, BagError, WireError, and CameraError without an encoder.
        """
        if self._encoding not in ("", VIDEO):
            raise SettingsError(f"encoding: expected {VIDEO} or nothing, found {self._encoding!r}")
        begin_s = begin_ns = None
        for frame, stamp_ns in self._read():
            image = self._find_publisher(*self._choose_topic(frame))
            while not image.get_subscription_count():
                spin(POLL_S)
                begin_s = None
            if begin_s is None or begin_ns is None:
                begin_s = time.monotonic()
                begin_ns = stamp_ns
            while (
                left_s := begin_s + (stamp_ns - begin_ns) / NANOSECONDS / self._rate - time.monotonic()
            ) > 0:
                spin(min(left_s, POLL_S))
            self._publish(image, frame, stamp_ns if self._is_as_recorded else time.time_ns())

    def _choose_topic(self, frame: Frame) -> tuple[str, Any]:
        if self._encoding == VIDEO:
            return "image/ffmpeg", import_type(PACKET)
        return ("image", Image) if frame.encoding in CHANNELS else ("image/compressed", CompressedImage)

    def _read(self) -> Iterator[tuple[Frame, int]]:
        """Yield the frames of one camera, with stamps that go on when the recording begins again."""
        offset_ns = begin_ns = None
        while True:
            stamp_ns = period_ns = 0
            with open_bag(Path(self.recording), [self._camera] if self._camera else ()) as bag:
                for frame in bag:
                    self._camera = self._camera or frame.camera
                    if frame.camera != self._camera:
                        continue
                    if offset_ns is None:  # a stamp of 0 would be none
                        offset_ns = 0 if frame.capture_ns > 0 else NANOSECONDS - frame.capture_ns
                    begin_ns = begin_ns or frame.capture_ns + offset_ns
                    period_ns = frame.capture_ns + offset_ns - stamp_ns
                    stamp_ns = frame.capture_ns + offset_ns
                    yield frame, stamp_ns
            if not self._is_looping or offset_ns is None or begin_ns is None:
                return
            offset_ns = offset_ns + stamp_ns + period_ns - begin_ns
            begin_ns = None

    def _publish(self, image: Any, frame: Frame, stamp_ns: int) -> None:
        sec, nanosec = divmod(stamp_ns, NANOSECONDS)
        stamp = Time(sec=sec, nanosec=nanosec)
        header = Header(stamp=stamp, frame_id=self._frame_id)
        if self._clock is not None:
            self._clock.publish(Clock(clock=stamp))
        if frame.intrinsics is not None:
            info = make_camera_info(frame.intrinsics, frame.width, frame.height, header)
            self._find_publisher("camera_info", CameraInfo).publish(info)
        if frame.depth is not None:
            topic = f"depth{'_registered' * frame.depth.aligned}/image_raw"
            self._find_publisher(topic, Image).publish(make_depth(frame.depth, header))
        if self._encoding == VIDEO:
            self._video = self._video or VideoPackets(self._mbps)
            image.publish(self._video.make_packet(frame, header, stamp_ns))
        else:
            image.publish(make_image(frame, header))

    def _find_publisher(self, topic: str, kind: Any) -> Any:
        if topic not in self._publishers_by_topic:
            # as ffmpeg_image_transport: packets come reliably
            qos = QoSProfile(depth=VIDEO_QUEUE) if topic == "image/ffmpeg" else qos_profile_sensor_data
            self._publishers_by_topic[topic] = self.create_publisher(kind, topic, qos)
        return self._publishers_by_topic[topic]


class VideoPackets:
    """Makes the packets of one camera's video, of about `mbps` Mbit/s. Raises CameraError without an encoder."""

    def __init__(self, mbps: float) -> None:
        self._mbps = mbps
        self._encoder: Any = None
        self._count = 0

    def make_packet(self, frame: Frame, header: Any, stamp_ns: int) -> Any:
        """Return the FFMPEGPacket of the next frame. Stamps grow."""
        from sam3_node.cameras.video_encoder import VideoEncoder  # needs OpenCV

        if self._encoder is None or self._encoder.size != (frame.width, frame.height):
            self._encoder = VideoEncoder(frame.width, frame.height, self._mbps * 1e6, 0.0)
        packet, is_key = self._encoder.encode(decode_image(frame), stamp_ns, False)
        number = self._count
        self._count += 1
        return import_type(PACKET)(
            header=header,
            width=frame.width,
            height=frame.height,
            encoding="h264",
            pts=number,
            flags=KEY_FLAG * is_key,
            data=array("B", packet),
        )


def make_image(frame: Frame, header: Any) -> Any:
    """Return the Image or CompressedImage of a frame's colour; its bytes are unchanged."""
    data = pack_pixels(np.frombuffer(frame.colour, np.uint8))
    if frame.encoding not in CHANNELS:
        return CompressedImage(header=header, format=frame.encoding, data=data)
    step = frame.width * CHANNELS[frame.encoding]
    size = {"height": frame.height, "width": frame.width, "step": step}
    return Image(header=header, encoding=frame.encoding, data=data, **size)


def make_depth(depth: Depth, header: Any) -> Any:
    """Return the Image of depth: uint16 in millimetres, or float32 in metres where the unit is another."""
    values = decode_depth(depth)
    is_plain = depth.scale_m == 0.001
    pixels = values.astype("<u2") if is_plain else (values * depth.scale_m).astype("<f4")
    size = {"height": depth.height, "width": depth.width, "step": pixels.strides[0]}
    encoding = "16UC1" if is_plain else "32FC1"
    return Image(header=header, encoding=encoding, data=pack_pixels(pixels), **size)


def make_camera_info(intrinsics: Intrinsics, width: int, height: int, header: Any) -> Any:
    """Return the CameraInfo of intrinsics, of an image that is not rectified."""
    fx = intrinsics.fx
    fy = intrinsics.fy
    cx = intrinsics.cx
    cy = intrinsics.cy
    model = "rational_polynomial" if len(intrinsics.coeffs) > 5 else MODELS[intrinsics.model]
    return CameraInfo(
        header=header,
        width=width,
        height=height,
        distortion_model=model,
        d=list(map(float, intrinsics.coeffs)) or [0.0] * 5,
        k=np.array([fx, 0, cx, 0, fy, cy, 0, 0, 1.0]),
        r=np.eye(3).ravel(),
        p=np.array([fx, 0, cx, 0, 0, fy, cy, 0, 0, 0, 1, 0.0]),
    )


def main() -> None:
    """Play until the recording ends, or Ctrl-C."""
    prepare_for_images()
    rclpy.init()
    player = Player()
    executor = SingleThreadedExecutor()
    executor.add_node(player)
    try:
        with end_with_context():
            player.play(executor.spin_once)
    except Sam3NodeError as error:
        player.get_logger().error(str(error))
        raise SystemExit(2) from error
    finally:
        player.destroy_node()
        if rclpy.ok():
            rclpy.shutdown()
