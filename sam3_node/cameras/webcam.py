"""webcam:INDEX and rtsp://HOST/PATH - cameras of the operating system and of the network, read through OpenCV."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import cv2

from ..errors import CameraError
from ..settings import CameraSettings
from .base import CapturedImage
from .live import LiveSource

STREAM_TIMEOUT_MS = 5000
"""Time after which a stream of the network that cannot be opened, or that gives nothing, counts as lost."""
_FFMPEG_OPTIONS = "OPENCV_FFMPEG_CAPTURE_OPTIONS"


class OpenCvDevice:
    """A device that OpenCV has opened: a LiveDevice. OpenCV does not say which images its driver lost."""

    lost = 0

    def __init__(self, capture: cv2.VideoCapture) -> None:
        self._capture = capture
        self._capture_ns = 0

    def grab(self) -> bool:
        try:
            is_there = self._capture.grab()
        except cv2.error:  # some backends raise on a damaged image
            is_there = False
        if not is_there:
            raise CameraError("no image")
        self._capture_ns = time.time_ns()
        return True

    def retrieve(self) -> CapturedImage | None:
        try:
            is_decoded, image = self._capture.retrieve()
        except cv2.error as error:
            raise CameraError("no image") from error
        if not is_decoded:
            raise CameraError("no image")
        return CapturedImage(image, self._capture_ns)

    def close(self) -> None:
        self._capture.release()


def open_webcam(address: str, settings: CameraSettings, stop: threading.Event) -> LiveSource:
    """Open the device with index `address` at the size and rate of `settings`; CameraError if it is absent."""
    if not (address.isascii() and address.isdigit() and len(address) < 4):
        raise CameraError(f"expected webcam:INDEX with an index from 0, found 'webcam:{address}'")
    return LiveSource(f"webcam:{address}", lambda: _open_index(int(address), settings), settings.fps, stop)


def open_stream(uri: str, settings: CameraSettings, stop: threading.Event) -> LiveSource:
    """Open a stream of the network by its address; CameraError if it gives no image.

    RTSP is received over TCP, so that no packet is lost; OPENCV_FFMPEG_CAPTURE_OPTIONS sets other options of FFmpeg.
    """
    os.environ.setdefault(_FFMPEG_OPTIONS, "rtsp_transport;tcp")
    return LiveSource(_hide_password(uri), lambda: _open_uri(uri), settings.fps, stop)


def _open_uri(uri: str) -> OpenCvDevice:
    timeouts = [
        *(cv2.CAP_PROP_OPEN_TIMEOUT_MSEC, STREAM_TIMEOUT_MS),
        *(cv2.CAP_PROP_READ_TIMEOUT_MSEC, STREAM_TIMEOUT_MS),
    ]
    with quiet():
        capture = cv2.VideoCapture(uri, cv2.CAP_FFMPEG, timeouts)
    if not capture.isOpened():
        raise CameraError(
            f"{_hide_password(uri)}: expected a video stream, found none; check that the camera is on, the address, "
            "the user and the password (rtsp://USER:PASSWORD@HOST/PATH)"
        )
    return OpenCvDevice(capture)


def _hide_password(uri: str) -> str:
    """Return the address without the user and the password, which are for no log."""
    scheme, separator, rest = uri.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}"


def _open_index(index: int, settings: CameraSettings) -> OpenCvDevice:
    with quiet():
        capture = cv2.VideoCapture(index)
        properties = {
            cv2.CAP_PROP_FRAME_WIDTH: settings.width,
            cv2.CAP_PROP_FRAME_HEIGHT: settings.height,
            cv2.CAP_PROP_FPS: settings.fps,
            cv2.CAP_PROP_BUFFERSIZE: 1,
        }
        for property_, value in properties.items():
            if value:
                capture.set(property_, value)
        delivers = capture.isOpened() and capture.grab()
    if not delivers:
        capture.release()
        raise CameraError(
            f"webcam:{index}: expected a camera, found none; check that it is plugged in, that no other program "
            "holds it and that this user may read it"
        )
    return OpenCvDevice(capture)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence OpenCV's log lines, because this package reports the same failures once."""
    level = cv2.utils.logging.getLogLevel()
    cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
    try:
        yield
    finally:
        cv2.utils.logging.setLogLevel(level)
