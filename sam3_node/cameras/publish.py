"""Runs a camera process: captures, resizes, encodes and publishes images until the source ends or a stop."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace

import cv2

from ..calibration import Calibration, load_calibration
from ..errors import TransportError, WireError
from ..geometry import scale_intrinsics
from ..processes.logs import announce, log_subject
from ..processes.notify import Watchdog
from ..processes.signals import WaitingNotice
from ..settings import CameraSettings, Settings
from ..transport import FramePublisher, PosePublisher, Security
from ..transport.channels import MAX_FRAMES_CAMERAS
from ..transport.sockets import JOIN_S
from ..types import Buffer, Delivery, Depth, Frame, keep_newest
from ..wire import decode_depth, encode_depth, encode_image
from ..wire.video import VIDEO
from .camera_source import CameraSource, CapturedImage
from .sources import open_camera
from .video_encoder import VideoEncoder

# time of one wait for a slow receiver, between two ticks of the watchdog
_SEND_TIMEOUT_MS = 100
# time between two reports of the rate
_REPORT_S = 60.0
# cameras of one source whose numbers are kept: they come and go
_MAX_NUMBERS = 256
# a stop does not wait longer for a peer that hangs
_STOP_LINGER_MS = 300
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CameraSummary:
    """Result of a camera process: images captured, lost before capture, and not sent after it, and the run time."""

    captured: int
    lost: int
    unsent: int
    seconds: float


def run_camera(settings: Settings, stop: threading.Event, watchdog: Watchdog | None = None) -> CameraSummary:
    """Publish `settings.camera` on the first of `settings.transport.frames` until it ends or `stop` is set.

    The first image is sent JOIN_S after the sockets are bound, or later, so that all that wait for it have connected.
    A source that ends waits for its first receiver, unless `camera.wait` is false. The process prints one line when it
    is ready and one at the end, and on stderr what it waits for. `seq` counts the captured images of each camera from
    0. Raises CameraError, BagError, SettingsError (calibration) or TransportError if it cannot start.
    """
    camera = settings.camera
    transport = settings.transport
    watchdog = watchdog or Watchdog()
    security = Security.from_settings(transport).for_camera(camera.name)
    calibration = load_calibration(camera.calibration) if camera.calibration else None
    begin_s = time.monotonic()
    with (
        FramePublisher(transport.frames[0], transport.delivery, security) as publisher,
        PosePublisher(camera.robot, security) if camera.robot else nullcontext() as robot,
        # after both sockets: while a device opens, those that wait connect
        closing(open_camera(camera.source, camera, stop, transport.insecure)) as source,
        WaitingNotice(lambda: _explain_wait(publisher, transport.delivery)),
    ):
        details = f"{source.name}, {camera.encoding}, {transport.delivery}"
        announce(f"camera {camera.name} publishing on {publisher.endpoint} ({details})")

        # frames of a source that ends do not come again
        if source.is_finite and camera.wait:
            while not publisher.wait_for_peer(_SEND_TIMEOUT_MS) and not stop.is_set():
                pass
            begin_s = time.monotonic()
        # a node and a recorder that have waited for this camera both get its first frame, which may be a key frame
        stop.wait(max(0.0, begin_s + JOIN_S - time.monotonic()))
        try:
            summary = _publish(source, publisher, robot, camera, calibration, stop, watchdog)
        finally:
            watchdog.begin_close()
        if stop.is_set():
            publisher.close(_STOP_LINGER_MS)
    announce(f"camera {camera.name} {_describe(summary)}")
    return summary


def _explain_wait(publisher: FramePublisher, delivery: Delivery) -> str:
    """Say why no node receives frames; "" if one does, or if the camera ends meanwhile."""
    try:
        if publisher.wait_for_peer(0):
            return ""
    except TransportError:  # closed by the thread that publishes
        return ""
    return (
        f"camera: no node receives frames from {publisher.endpoint}: start the node with sam3-node run, or correct "
        f"transport.frames or transport.delivery (here {delivery!r}) of the camera or the node"
    )


def frame_from(
    captured: CapturedImage,
    seq: int,
    camera: CameraSettings,
    calibration: Calibration | None = None,
    videos: VideoStreams | None = None,
) -> Frame:
    """Resize and encode one captured image; intrinsics come from the calibration, else from the device.

    A recorded image that has the requested encoding and size is passed on unchanged. `videos` encode the packets of
    h264. Raises SettingsError if the calibration is for images of another aspect ratio, WireError for damaged pixels.
    """
    # the calibration is for the camera's own size, so it comes before resizing
    captured = _resize(_calibrate(captured, calibration), camera)
    height, width = captured.size
    return Frame(
        camera=captured.camera or camera.name,
        seq=seq,
        capture_ns=captured.capture_ns,
        width=width,
        height=height,
        encoding=camera.encoding,
        colour=videos.encode(captured) if videos is not None else _encode_colour(captured, camera),
        depth=captured.depth,
        intrinsics=captured.intrinsics,
        times=captured.times,
    )


def _describe(summary: CameraSummary) -> str:
    rate = summary.captured / max(summary.seconds, 1e-9)
    return (
        f"captured {summary.captured} frames in {summary.seconds:.1f} s ({rate:.1f} fps), "
        f"{summary.lost} lost, {summary.unsent} not sent"
    )


def _publish(
    source: CameraSource,
    publisher: FramePublisher,
    robot: PosePublisher | None,
    camera: CameraSettings,
    calibration: Calibration | None,
    stop: threading.Event,
    watchdog: Watchdog,
) -> CameraSummary:
    videos = VideoStreams(publisher, camera) if camera.encoding == VIDEO else None
    start_s = time.monotonic()
    captured = 0
    unsent = 0
    # the next seq of each camera
    numbers: dict[str, int] = {}
    report = _RateReport(source)
    watchdog.tick()
    watchdog.wait()
    for image in source:
        watchdog.tick()
        name = image.camera or camera.name
        seq = numbers.get(name, 0)
        keep_newest(numbers, name, seq + 1, _MAX_NUMBERS)

        # poses go before the image, which needs them
        if robot is not None:
            for move in image.robot:
                robot.send(move)
        with log_subject(name, seq):
            try:
                frame = frame_from(image, seq, camera, calibration, videos)
                unsent += not _send(publisher, frame, stop, watchdog)
            except WireError as error:
                unsent += 1
                _log.warning("%s: skipped image %d of %s: %s", source.name, seq, name, error)
        captured += 1
        report.count(unsent)
        # `camera.frames` 0 is never reached
        if captured == camera.frames or stop.is_set():
            break
        watchdog.wait()
    return CameraSummary(captured, source.lost, unsent, time.monotonic() - start_s)


class VideoStreams:
    """The videos of a camera process, one for each of its cameras."""

    def __init__(self, publisher: FramePublisher, camera: CameraSettings) -> None:
        self._publisher = publisher
        self._camera = camera
        self._streams: dict[str, _CameraVideo] = {}

    def encode(self, captured: CapturedImage) -> bytes:
        """Return the packet of an image, a key frame if a reader has come. Raises as VideoEncoder does."""
        image = captured.pixels()
        height, width = image.shape[:2]
        stream = self._streams.get(captured.camera)
        if stream is None or stream.encoder.size != (width, height):
            stream = _CameraVideo(
                VideoEncoder(width, height, 1e6 * self._camera.bit_rate_mbps, self._camera.fps)
            )
        keep_newest(self._streams, captured.camera, stream, MAX_FRAMES_CAMERAS)
        # each reader that has come, or has lost a packet, needs a key frame
        wanted = self._publisher.subscriptions
        packet, is_key = stream.encoder.encode(image, captured.capture_ns, wanted != stream.subscriptions)
        if is_key:
            stream.subscriptions = wanted
        return packet


@dataclass
class _CameraVideo:
    """The encoder of one camera, and the subscriptions that have been answered by a key frame."""

    encoder: VideoEncoder
    subscriptions: int = 0


class _RateReport:
    """Logs the rate of a live camera every minute, as a warning if images were lost or not sent meanwhile."""

    def __init__(self, source: CameraSource) -> None:
        self._source = source
        self._start_s = time.monotonic()
        # the images since the last report, and the totals until it
        self._images = 0
        self._lost = 0
        self._unsent = 0

    def count(self, unsent: int) -> None:
        """Count an image. `unsent` is the number of images not sent since the start."""
        self._images += 1
        seconds = time.monotonic() - self._start_s
        if seconds < _REPORT_S or self._source.is_finite:
            return

        total_lost = self._source.lost
        lost = total_lost - self._lost
        new_unsent = unsent - self._unsent
        level = logging.WARNING if lost or new_unsent > 0 else logging.INFO
        _log.log(
            level,
            "%s: %.1f fps, %d lost, %d not sent in %.0f s",
            self._source.name,
            self._images / seconds,
            lost,
            new_unsent,
            seconds,
        )
        self._start_s += seconds
        self._images = 0
        self._lost = total_lost
        self._unsent = unsent


def _send(publisher: FramePublisher, frame: Frame, stop: threading.Event, watchdog: Watchdog) -> bool:
    """Send a frame, waiting for slow receivers if delivery is lossless. Return False if `stop` was set meanwhile."""
    while not publisher.send(frame, timeout_ms=_SEND_TIMEOUT_MS):
        watchdog.tick()
        if stop.is_set():
            return False
    return True


def _calibrate(captured: CapturedImage, calibration: Calibration | None) -> CapturedImage:
    """Give an image the intrinsics of the calibration, and its depth what the calibration states of it."""
    if calibration is None:
        return captured
    captured = replace(captured, intrinsics=calibration.intrinsics_for(captured.size))
    stated = calibration.depth
    depth = captured.depth
    if stated is None or depth is None:
        return captured
    scale_m = stated.scale_m or depth.scale_m
    aligned = stated.aligned or depth.aligned
    return replace(captured, depth=replace(depth, scale_m=scale_m, aligned=aligned))


def _resize(captured: CapturedImage, camera: CameraSettings) -> CapturedImage:
    """Resize to the camera's width and height. If only one is set, keep the aspect ratio."""
    height, width = captured.size
    new_width = camera.width or max(1, round(width * (camera.height or height) / height))
    new_height = camera.height or max(1, round(height * new_width / width))
    if (new_height, new_width) == (height, width):
        return captured
    # averaging avoids patterns in a smaller image
    interpolation = cv2.INTER_AREA if new_width * new_height < width * height else cv2.INTER_LINEAR
    image = cv2.resize(captured.pixels(), (new_width, new_height), interpolation=interpolation)
    depth = _resize_depth(captured.depth, (new_width, new_height))
    intrinsics = captured.intrinsics
    if intrinsics is not None:
        intrinsics = scale_intrinsics(intrinsics, (height, width), (new_height, new_width))
    return replace(captured, image=image, depth=depth, intrinsics=intrinsics)


def _resize_depth(depth: Depth | None, size: tuple[int, int]) -> Depth | None:
    """Resize the depth to the image's (width, height). A depth that is not aligned to the image keeps its size."""
    if depth is None or not depth.aligned:
        return depth
    # depth is never averaged: the mean of two surfaces lies on neither
    resized = cv2.resize(decode_depth(depth), size, interpolation=cv2.INTER_NEAREST_EXACT)
    return encode_depth(resized, "z16+zstd", depth.scale_m, aligned=True)


def _encode_colour(captured: CapturedImage, camera: CameraSettings) -> Buffer:
    # encoding again would cost quality and time
    if isinstance(captured.image, Frame) and captured.image.encoding == camera.encoding:
        return captured.image.colour
    return encode_image(captured.pixels(), camera.encoding, camera.jpeg_quality)
