"""Links one camera of ROS 2 to sam3-node, without importing ROS: its images go out, its masks come back.

`bridge` connects it to rclpy.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sam3_node.bags.bit_depth import BitDepths
from sam3_node.bags.discovery import Camera, find_cameras
from sam3_node.bags.formats.video import PacketDecoder
from sam3_node.bags.messages.ros_images import MessageError, read_payload, read_stamp
from sam3_node.bags.pairing import Pairing
from sam3_node.bags.samples import CameraInfo, Colour, Joints, Payload, Sample, Topic, VideoPacket
from sam3_node.client import PerceptionClient, Security
from sam3_node.errors import BagError, MissingExtraError, Sam3NodeError, SettingsError
from sam3_node.resources import Closeable
from sam3_node.transport import FramePublisher, PosePublisher
from sam3_node.types import Clock, Depth, FrameKey, Instance, JointState, MaskFrame
from sam3_node.wire import frame_topic, joints_topic
from sam3_node.wire.images import MAX_FRAME_PIXELS
from sam3_node.wire.video import MAX_VIDEO_PIXELS

from .cdr import read_message
from .messages import Picture
from .parts import Header, read_header
from .scene import Change, PlanningScene
from .sent_images import SentImages
from .services import Services

MAX_CLOCK_ERROR_NS = 10_000_000_000
"""Distance of a stamp from this computer's time beyond which it is not a time of a synchronised clock."""
PATIENCE_NS = 100_000_000
"""Longest wait of a colour image for its depth and intrinsics."""
MIN_FRAMES = 30
"""Images after which a warning says that depth does not reach them."""
POLL_MS = 100
SILENCE_S = 5.0
"""Time without masks, or without joints of the robot, after which a warning says so."""
REPEAT_S = 60.0
"""Time in which a warning on one subject is not repeated."""
MAX_POINTS = 5000
"""Points of an object that are requested where masks carry none."""
PROBE_MS = 1000
"""Longest wait for the node's answer where a thread also has other work: points and diagnostics."""
NO_MASKS = "no-masks"
"""Camera of a connection for requests alone: it has no masks, which would be unpacked in vain."""
OK = 0
WARNING = 1
ERROR = 2
"""Levels of diagnostics."""
HEALTH = (
    "fps",
    "latency_p50_ms",
    "latency_p99_ms",
    "masks_age_ms",
    "skipped",
    "objects",
    "spatial_problem",
)
"""Counts of the camera in the node's status that diagnostics show."""
PLAIN_ENCODINGS = ("rgb8", "bgr8", "mono8", "16UC1", "32FC1")
"""Encodings that are not converted by OpenCV."""
TRANSPORTS = {
    "compressed": "sensor_msgs/msg/CompressedImage",
    "compressedDepth": "sensor_msgs/msg/CompressedImage",
    "ffmpeg": "ffmpeg_image_transport_msgs/msg/FFMPEGPacket",
    "foxglove": "foxglove_msgs/msg/CompressedVideo",
}
"""Types of images by the last part of their topic, as image_transport's plugins name it."""
VIDEO_TYPES = (TRANSPORTS["ffmpeg"], TRANSPORTS["foxglove"])
"""Types whose messages need those before them."""
VIDEO_QUEUE = 30
"""Packets of a video that wait. A lost one costs all pictures until the next key frame, so they come reliably."""

_KINDS: dict[str, tuple[type[Payload], str]] = {
    "colour": (Colour, "a colour image"),
    "depth": (Depth, "a depth image"),
    "intrinsics": (CameraInfo, "a CameraInfo"),
    "joints": (Joints, "a JointState"),
}


@dataclass(frozen=True, slots=True)
class Ros2Settings:
    """Parameters of the ROS node. An empty topic is not subscribed to."""

    camera: str = "cam0"
    """name of the camera on the wire; each camera has its own ROS node"""
    image_topic: str = "image"
    depth_topic: str = ""
    camera_info_topic: str = ""
    depth_aligned: bool = False
    """depth is registered to colour, though the name of its topic does not say so (aligned, registered)"""
    image_rectified: bool = False
    """images are rectified, though the name of their topic does not say so (rect, rectified)"""
    frames: str = "tcp://127.0.0.1:5550"
    """endpoint that is bound to publish frames: one of the node's transport.frames"""
    masks: str = "tcp://127.0.0.1:5551"
    control: str = "tcp://127.0.0.1:5552"
    base_frame: str = "base_link"
    """frame_id of positions that the node gives in the robot's base"""
    sure_only: bool = False
    """skip doubtful instances"""
    timeout_ms: int = 2000
    """longest wait of a service for the node's answer"""
    object: str = ""
    """object of ~/mask and ~/points: its id or label; empty: the sure one with the best score. May be changed while
    the node is active"""
    publish_tf: bool = True
    """publish a frame for each sure object with a position"""
    joint_states_topic: str = ""
    """JointState of the robot, such as /joint_states; one ROS node sends them for all cameras"""
    joints: str = "tcp://127.0.0.1:5553"
    """endpoint that is bound to publish joints, if there is a topic of them: the node's spatial.poses"""
    robot: str = "robot"
    """name of the robot: the node's robot.name"""
    collision_objects_topic: str = ""
    """topic of the planning scene, such as /collision_object, where MoveIt reads; empty: none"""
    container: bool = False
    """the planning scene has the bin as well: the node's spatial.container, else the first one that an image shows"""


_DEFAULTS = {field.name: field.default for field in fields(Ros2Settings)}
_NEEDED = {
    "depth_aligned": "depth_topic",
    "image_rectified": "camera_info_topic",
    "joints": "joint_states_topic",
    "robot": "joint_states_topic",
    "container": "collision_objects_topic",
}
"""Parameters that have an effect with another one alone."""
CHANGEABLE = ("object",)
"""Parameters that may be changed after the node is configured. The others are read by that transition."""


class Health(NamedTuple):
    """What diagnostics say: a level, one line, and values."""

    level: int
    message: str
    values: dict[str, Any]


class SurfaceOfObject(NamedTuple):
    """Points float32 [n, 3] in metres, in the node's `frame`, and the header of their image."""

    points_m: npt.NDArray[np.float32]
    frame: str | None
    header: Header


class SceneUpdate(NamedTuple):
    """What has changed in the planning scene, and the header of the image that shows it."""

    changes: list[Change]
    header: Header


class Subscription(NamedTuple):
    """A topic to subscribe to, and the full name of its messages' type."""

    topic: str
    type: str


class Ros2Bridge(Closeable):
    """One camera's way to a node and back. `warn` gets lines for the log, each at most once in REPEAT_S.

    One thread at a time may call `take`, others the services. Node and camera may come and go. The environment names
    the keys. `resolve` returns the name that a topic is remapped to: names tell of rectified images and aligned depth.
    `now_ns` is the time of arrival of an image without a stamp. Raises SettingsError, WireError (name of the camera)
    or TransportError.
    """

    def __init__(
        self,
        settings: Ros2Settings,
        warn: Callable[[str], object],
        resolve: Callable[[str], str] = lambda topic: topic,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._settings = settings
        self._now_ns = now_ns
        self._warnings = _Warnings(warn)
        self._kinds = _list_topics(settings)
        self._pairing = Pairing([_make_camera(settings, self._kinds, resolve)], PATIENCE_NS)
        self._decoder: PacketDecoder | None = None
        self._codec = ""
        self._depths = BitDepths()
        self._told: set[str] = set()
        self._count = 0
        self._images = SentImages(settings.image_topic)
        self.scene = PlanningScene(settings.camera)
        self._heard_s = -math.inf
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.subscriptions = tuple(
            Subscription(topic, _name_type(topic, kind)) for topic, kind in self._kinds.items()
        )
        self._joints_s = time.monotonic()  # when joints came last, else when this began to wait for them
        frame_topic(settings.camera)
        joints_topic(settings.robot)
        security = Security.from_environment()
        self._frames = FramePublisher(settings.frames, "newest", security.for_camera(settings.camera))
        self._joints: PosePublisher | None = None
        try:
            if settings.joint_states_topic:
                self._joints = PosePublisher(settings.joints, security)
            self._client = self._connect(security, settings.timeout_ms, settings.camera)
            # connections of their own, because each carries one request at a time, and a search takes seconds
            self._probe = self._connect(security, min(settings.timeout_ms, PROBE_MS), NO_MASKS)
            self._searcher = self._connect(security, settings.timeout_ms, NO_MASKS)
        except BaseException:
            self._close_publishers()
            raise
        self.endpoint = self._frames.endpoint
        served = Services(settings.camera, settings.base_frame, self._client, self._searcher, self._images)
        self.services = served.list_by_name()
        """By name: functions that fill the response to a request, and return it. They wait for the node's answer."""

    def _connect(self, security: Security, timeout_ms: int, camera: str) -> PerceptionClient:
        return PerceptionClient(
            self._settings.masks,
            self._settings.control,
            cameras=[camera],
            timeout_ms=timeout_ms,
            on_restart=lambda restart: self._warnings.add("restart", str(restart)),
            sure_only=self._settings.sure_only,
            security=security,
        )

    def take(self, topic: str, message: Any) -> None:
        """Take a message of a subscription, and send what is complete now. It does not wait for the network.

        The message is serialised, or has ROS's attributes. One that is refused causes a warning, never an error.
        """
        try:
            if isinstance(message, bytes):
                message = self._deserialise(topic, message)
            sample = self._read(topic, message)
            if sample is None:
                return
            if isinstance(sample.payload, VideoPacket):
                for picture in self._decode(sample, sample.payload):
                    self._pass_on(picture)
            else:
                self._pass_on(sample)
        except MissingExtraError as error:  # an extra of this package may replace the numpy of ROS
            is_opencv = isinstance(error.__cause__, ImportError) and error.__cause__.name == "cv2"
            library = "OpenCV (Ubuntu's python3-opencv)" if is_opencv else "PyAV (pip install --no-deps av)"
            form = getattr(message, "encoding", None) or getattr(message, "format", "")
            self._warnings.add(
                topic,
                f"{topic}: expected {library} to convert {form!r}, found none: install it, or send "
                f"{', '.join(PLAIN_ENCODINGS)}, jpeg or png",
            )
        except Sam3NodeError as error:
            self._warnings.add(topic, str(error))
        except Exception as error:  # no message may end the process
            self._warnings.add(topic, f"{topic}: {type(error).__name__}: {error}")

    def _decode(self, sample: Sample, packet: VideoPacket) -> Iterator[Sample]:
        """Yield the pictures that a packet of the camera's video completes."""
        if self._decoder is None or self._codec != packet.codec:
            self._codec = packet.codec
            self._decoder = PacketDecoder(
                packet.codec,
                lambda reason: self._warnings.add("video", f"{sample.topic}: {reason}"),
                MAX_VIDEO_PIXELS,
            )
        return self._decoder.decode(sample, packet)

    def _pass_on(self, sample: Sample) -> None:
        """Send what a sample completes."""
        payload = sample.payload
        if self._joints is not None and isinstance(payload, Joints):
            self._joints_s = time.monotonic()
            clock = _choose_clock(sample.stamp_ns)
            positions = dict(payload.positions)
            self._joints.send(JointState(self._settings.robot, sample.stamp_ns, positions, clock))
            return
        if isinstance(payload, Colour) and sample.number is not None:
            sample = sample._replace(payload=self._keep(sample.topic, sample.number, payload))
        for frame in self._pairing.add(sample):
            if frame.depth is not None and self._settings.depth_aligned:
                # a camera's own word, also for depth of another size: what comes of it is the node's to say
                frame = replace(frame, depth=replace(frame.depth, aligned=True))
            self._frames.send(replace(frame, clock=_choose_clock(frame.capture_ns)))
            if losses := self._pairing.describe_losses(MIN_FRAMES):
                self._warnings.add("pairing", losses)
                self._pairing.forget_losses()  # what is past is told once

    def _keep(self, topic: str, number: int, colour: Colour) -> Colour:
        """Return an image in 8 bits, and keep it for those who ask for the newest."""
        colour = self._depths.narrow(topic, colour)
        header = self._images.find_header(number)
        if header is not None:
            self._images.keep(number, Picture(colour, header))
        for note in self._depths.describe():
            if note not in self._told:  # bits grow a few times at most
                self._told.add(note)
                self._warnings.add(note, note)
        return colour

    def start(self, publish: Callable[[MaskFrame, Header], object]) -> None:
        """Begin to pass the newest masks, with the header of their image, to `publish` in a thread.

        Masks of images that this object has not sent, or sent long ago, are skipped.
        """
        self._stopping.clear()
        self._joints_s = time.monotonic()
        self._thread = threading.Thread(
            target=self._publish_all, args=(publish,), name="ros2 masks", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End what `start` began; `publish` is not called afterwards. Idempotent."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """End the thread, and close all connections. Idempotent."""
        self.stop()
        self._client.close()
        self._probe.close()
        self._searcher.close()
        self._close_publishers()

    def _close_publishers(self) -> None:
        self._frames.close(0)
        if self._joints is not None:
            self._joints.close(0)

    def find_points(self, masks: MaskFrame, header: Header, instance: Instance) -> SurfaceOfObject | None:
        """Return the points of an object's visible surface: those of its masks, else the node's for a later image.

        None without depth. It waits for the node's answer.
        """
        if instance.points_m:
            points_m = np.frombuffer(instance.points_m, "<f4").reshape(-1, 3)
            return SurfaceOfObject(points_m, instance.frame, header)
        try:
            surface = self._probe.points(
                instance.id, count=MAX_POINTS, camera=masks.camera, epoch=masks.epoch
            )
        except Sam3NodeError as error:
            self._warnings.add("points", f"{error}")
            return None
        sent = self._images.find_header(surface.seq)
        return None if sent is None else SurfaceOfObject(surface.points_m, surface.frame, sent)

    def update_scene(self) -> SceneUpdate | None:
        """Ask for the planning scene. None if there is nothing new to tell. It waits for the node's answer."""
        settings = self._settings
        try:
            reply = self._probe.planning_scene(container=settings.container, camera=settings.camera)
        except Sam3NodeError as error:
            self._warnings.add("scene", f"{settings.collision_objects_topic}: {error}")
            return None
        if reply.frame is None:
            self._warnings.add(
                "scene",
                f"{settings.collision_objects_topic}: expected a table to stand objects on, found none: "
                f"{reply.problem or 'start sam3-node with --spatial.table true, and a calibration with hand_eye'}",
            )
        elif settings.container and reply.container is None and not self.scene.container_text:
            self._warnings.add(
                "container",
                f"{settings.collision_objects_topic}: expected a bin with a rectangular rim above the table, found "
                "none; show all of its rim, or set sam3-node's spatial.container",
            )
        header = self._images.find_header(reply.seq)
        # an image of another process: its stamp is not known, and the next one is soon here
        return None if header is None else SceneUpdate(self.scene.update(reply), header)

    def check_health(self) -> Health:
        """Return whether masks come, and the node's counts for the camera. It waits for the node's answer."""
        camera = self._settings.camera
        try:
            status = self._probe.status()
            counts = status["cameras"].get(camera, {})
            values = {name: counts[name] for name in HEALTH if counts.get(name) is not None}
            if status.get("paused"):
                return Health(WARNING, "sam3-node is paused", values)
            if time.monotonic() - self._heard_s < SILENCE_S:
                # masks without what the robot's state gives are not what was asked for
                problem = self._describe_silent_robot() or counts.get("spatial_problem")
                if problem:
                    return Health(WARNING, f"masks come, but {problem}", values)
                return Health(OK, "masks come", values)
            return Health(WARNING, f"no masks: {self._client.diagnosis()}", values)
        except Sam3NodeError as error:
            return Health(ERROR, str(error), {})
        except Exception as error:  # no answer may end the process
            return Health(ERROR, f"{type(error).__name__}: {error}", {})

    def _describe_silent_robot(self) -> str | None:
        """Say that no joints come, and what that costs; None if they come, or have no topic."""
        silent_s = time.monotonic() - self._joints_s
        if self._joints is None or silent_s < SILENCE_S:
            return None
        topic = self._settings.joint_states_topic
        return (
            f"no JointState with positions came on {topic} for {silent_s:.0f} s: the robot's pixels and positions in "
            f"its base are not known; does its driver run? see ros2 topic hz {topic}"
        )

    def _publish_all(self, publish: Callable[[MaskFrame, Header], object]) -> None:
        with suppress(Sam3NodeError):
            self._client.latest(0)  # masks from before a stop
        heard_s = time.monotonic()
        while not self._stopping.is_set():
            try:
                if problem := self._describe_silent_robot():
                    self._warnings.add("joints", problem)
                masks = self._client.latest(POLL_MS)
                if masks is not None:
                    heard_s = self._heard_s = time.monotonic()
                    header = self._images.get(masks.key)
                    if header is not None:
                        publish(masks, header)
                elif time.monotonic() - heard_s > SILENCE_S:
                    self._warnings.add("silence", f"no masks: {self._client.diagnosis()}")
                    heard_s = time.monotonic()
            except Exception as error:  # neither a message nor a publisher may end the thread
                self._warnings.add("masks", f"masks: {type(error).__name__}: {error}")
                self._stopping.wait(POLL_MS / 1000)

    def _deserialise(self, topic: str, data: bytes) -> Any:
        try:
            return read_message(data, _name_type(topic, self._kinds[topic]))
        except MessageError as error:
            raise MessageError(f"{topic}: {error}") from error

    def _read(self, topic: str, message: Any) -> Sample | None:
        kind = self._kinds[topic]
        if (
            kind != "intrinsics"
            and getattr(message, "width", 0) * getattr(message, "height", 0) > MAX_FRAME_PIXELS
        ):
            raise MessageError(
                f"{topic}: expected at most {MAX_FRAME_PIXELS} pixels, found {message.width} x {message.height}"
            )
        payload = read_payload(message, _name_type(topic, kind), topic)
        if payload is None:
            return None
        expected, name = _KINDS[kind]
        if not isinstance(payload, (expected, VideoPacket) if kind == "colour" else expected):
            form = getattr(message, "encoding", "") or getattr(message, "format", "")
            raise BagError(f"{topic}: expected {name}, found encoding {form!r}")
        header = read_header(message)
        stamp_ns = read_stamp(message)
        if stamp_ns <= 0:
            stamp_ns = self._now_ns()
            self._warnings.add("stamp", f"{topic}: expected stamps, found 0: the time of arrival is used")
        number = None
        if kind == "colour":
            number = self._count
            self._count += 1
            self._images.add(FrameKey(self._settings.camera, number, stamp_ns), header)
        return Sample(topic, stamp_ns, time.monotonic_ns(), payload, number)


class _Warnings:
    """Passes on a warning on each subject at most once in REPEAT_S, with the number of those before it."""

    def __init__(self, warn: Callable[[str], object]) -> None:
        self._warn = warn
        self._subjects: dict[str, tuple[float, int]] = {}
        self._lock = threading.Lock()

    def add(self, subject: str, text: str) -> None:
        with self._lock:
            now_s = time.monotonic()
            told_s, left_out = self._subjects.get(subject, (-math.inf, 0))
            if now_s - told_s < REPEAT_S:
                self._subjects[subject] = told_s, left_out + 1
                return
            self._subjects[subject] = now_s, 0
        self._warn(text + (f" ({left_out} more since the last warning)" if left_out else ""))


def _list_topics(settings: Ros2Settings) -> dict[str, str]:
    """Return the kind of each topic. Raises SettingsError if the image's is missing, or two are equal."""
    topics = (
        settings.image_topic,
        settings.depth_topic,
        settings.camera_info_topic,
        settings.joint_states_topic,
    )
    kinds = {topic: kind for topic, kind in zip(topics, _KINDS, strict=True) if topic}
    if not settings.image_topic or len(kinds) < sum(map(bool, topics)):
        raise SettingsError(
            "expected image_topic, and different depth_topic, camera_info_topic and joint_states_topic, found "
            f"{', '.join(map(repr, topics))}"
        )
    for name, other in _NEEDED.items():
        if getattr(settings, name) != _DEFAULTS[name] and not getattr(settings, other):
            raise SettingsError(
                f"{name}: expected {other} beside it, found none: without it, {name} has no effect; set {other}, or "
                f"leave {name} away"
            )
    if settings.timeout_ms < 1:
        raise SettingsError(f"timeout_ms: expected 1 or more, found {settings.timeout_ms}")
    return kinds


def _make_camera(settings: Ros2Settings, kinds: dict[str, str], resolve: Callable[[str], str]) -> Camera:
    names = {topic: resolve(topic) for topic in kinds}
    topics = [Topic(names[topic], _name_type(topic, kind), kind) for topic, kind in kinds.items()]  # type: ignore[arg-type]
    (camera,) = find_cameras(topics)
    return replace(
        camera,
        name=settings.camera,
        colour=settings.image_topic,
        depth=settings.depth_topic or None,
        intrinsics=settings.camera_info_topic or None,
        aligned=camera.aligned or settings.depth_aligned,
        rectified=camera.rectified or settings.image_rectified,
    )


def _name_type(topic: str, kind: str) -> str:
    if kind in ("intrinsics", "joints"):
        return f"sensor_msgs/msg/{'CameraInfo' if kind == 'intrinsics' else 'JointState'}"
    return TRANSPORTS.get(topic.rpartition("/")[2], "sensor_msgs/msg/Image")


def _choose_clock(stamp_ns: int) -> Clock:
    """Return "system" for a stamp near this computer's time; stamps of a simulation or a recording are "device"."""
    return "system" if abs(time.time_ns() - stamp_ns) < MAX_CLOCK_ERROR_NS else "device"
