"""The camera process: capture, resize, encode, publish, until the source ends or it is told to stop."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace

import cv2

from ..geometry import scale_intrinsics
from ..settings import CameraSettings, Settings
from ..transport.frames import FramePublisher
from ..types import Depth, Frame
from ..wire.frames import encode_depth, encode_image
from .base import CameraSource, CapturedImage
from .calibration import Calibration, load_calibration
from .sources import open_camera

_SEND_TIMEOUT_MS = 100
_STOP_LINGER_MS = 300  # told to stop, a peer that hangs is not waited for


@dataclass(frozen=True, slots=True)
class CameraSummary:
    """What a camera process did: images captured, those that could not be sent, and the time it took."""

    captured: int
    unsent: int
    seconds: float


def run_camera(settings: Settings, stop: threading.Event) -> CameraSummary:
    """Publish `settings.camera` on the first of `settings.transport.frames` until it ends or `stop` is set.

    Prints one line when ready and one at the end. `seq` counts captured images from 0. Raises CameraError,
    SettingsError (calibration) or TransportError when it cannot start.
    """
    camera, transport = settings.camera, settings.transport
    calibration = load_calibration(camera.calibration) if camera.calibration else None
    source = open_camera(camera.source, camera, stop)
    try:
        with FramePublisher(transport.frames[0], transport.delivery) as publisher:
            details = f"{source.name}, {camera.encoding}, {transport.delivery}"
            print(f"camera {camera.name} publishing on {publisher.endpoint} ({details})", flush=True)
            summary = _publish(source, publisher, camera, calibration, stop)
            if stop.is_set():
                publisher.close(_STOP_LINGER_MS)
    finally:
        source.close()
    print(f"camera {camera.name} {_describe(summary)}", flush=True)
    return summary


def frame_from(
    captured: CapturedImage, seq: int, camera: CameraSettings, calibration: Calibration | None = None
) -> Frame:
    """Resize and encode one captured image; intrinsics come from the calibration, else from the device.

    Raises SettingsError when the calibration is for images of another aspect ratio.
    """
    captured = _resize(_calibrate(captured, calibration), camera)
    height, width = captured.image.shape[:2]
    return Frame(
        camera=camera.name,
        seq=seq,
        capture_ns=captured.capture_ns,
        width=width,
        height=height,
        encoding=camera.encoding,
        colour=encode_image(captured.image, camera.encoding, camera.jpeg_quality),
        depth=_encode_depth(captured),
        intrinsics=captured.intrinsics,
        times=captured.times,
    )


def _describe(summary: CameraSummary) -> str:
    rate = summary.captured / max(summary.seconds, 1e-9)
    return (
        f"captured {summary.captured} frames in {summary.seconds:.1f} s ({rate:.1f} fps), "
        f"{summary.unsent} not sent"
    )


def _publish(
    source: CameraSource,
    publisher: FramePublisher,
    camera: CameraSettings,
    calibration: Calibration | None,
    stop: threading.Event,
) -> CameraSummary:
    start_s = time.monotonic()
    captured = unsent = 0
    for image in source:
        frame = frame_from(image, captured, camera, calibration)
        captured += 1
        unsent += not _send(publisher, frame, stop)
        if captured == camera.frames or stop.is_set():
            break
    return CameraSummary(captured, unsent, time.monotonic() - start_s)


def _send(publisher: FramePublisher, frame: Frame, stop: threading.Event) -> bool:
    """Send with back-pressure where delivery is lossless, yet end when told to."""
    while not publisher.send(frame, timeout_ms=_SEND_TIMEOUT_MS):
        if stop.is_set():
            return False
    return True


def _calibrate(captured: CapturedImage, calibration: Calibration | None) -> CapturedImage:
    if calibration is None:
        return captured
    height, width = captured.image.shape[:2]
    scale_m = calibration.depth.scale_m if calibration.depth else captured.depth_scale_m
    return replace(captured, intrinsics=calibration.intrinsics_for((height, width)), depth_scale_m=scale_m)


def _resize(captured: CapturedImage, camera: CameraSettings) -> CapturedImage:
    """To the width and height asked for; one alone keeps the aspect ratio."""
    height, width = captured.image.shape[:2]
    new_width = camera.width or round(width * (camera.height or height) / height)
    new_height = camera.height or round(height * new_width / width)
    if (new_height, new_width) == (height, width):
        return captured
    shrinks = new_width * new_height < width * height
    image = cv2.resize(
        captured.image, (new_width, new_height), interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
    )
    # depth is never averaged: between two surfaces there is none
    depth = captured.depth
    if depth is not None:
        depth = cv2.resize(depth, (new_width, new_height), interpolation=cv2.INTER_NEAREST_EXACT)
    intrinsics = captured.intrinsics
    if intrinsics is not None:
        intrinsics = scale_intrinsics(intrinsics, (height, width), (new_height, new_width))
    return replace(captured, image=image, depth=depth, intrinsics=intrinsics)


def _encode_depth(captured: CapturedImage) -> Depth | None:
    if captured.depth is None:
        return None
    return encode_depth(captured.depth, "z16+zstd", captured.depth_scale_m, aligned=True)
