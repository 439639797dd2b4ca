"""webcam:INDEX - a camera of the operating system, read through OpenCV."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import cv2

from ..errors import CameraError
from ..settings import CameraSettings
from .base import CapturedImage
from .pacing import RateLimit

_log = logging.getLogger(__name__)
_FIRST_RETRY_S, _LAST_RETRY_S = 0.25, 4.0
_JOIN_S = 0.5


class WebcamSource:
    """Gives the newest image of a live device. An unplugged device is reopened with growing pauses until it is back.

    `open_device` opens the device again. Raises CameraError if the device does not deliver at the start. A separate
    thread reads, because a driver may block a read for seconds and stopping must not wait for it.
    """

    def __init__(
        self, name: str, open_device: Callable[[], cv2.VideoCapture], fps: float, stop: threading.Event
    ) -> None:
        self.name = name
        self.is_finite = False
        self._open_device = open_device
        self._limit = RateLimit(fps)
        self._stop = stop
        self._closed = threading.Event()
        self._arrived = threading.Condition()
        self._newest: CapturedImage | None = None
        device = open_device()
        with _quiet():
            delivers = device.isOpened() and device.grab()
        if not delivers:
            raise CameraError(
                f"{name}: expected a camera, found none; check that it is plugged in, that no other program "
                "holds it and that this user may read it"
            )
        self._thread = threading.Thread(target=self._read, args=(device,), name=name, daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[CapturedImage]:
        while not self._ended():
            with self._arrived:
                self._arrived.wait_for(lambda: self._newest is not None, timeout=0.1)
                newest, self._newest = self._newest, None
            if newest is not None:
                yield newest

    def close(self) -> None:
        self._closed.set()
        self._thread.join(_JOIN_S)

    def _ended(self) -> bool:
        return self._stop.is_set() or self._closed.is_set()

    def _read(self, device: cv2.VideoCapture) -> None:
        pause_s = _FIRST_RETRY_S
        while not self._ended():
            if self._read_one(device):
                pause_s = _FIRST_RETRY_S
                continue
            _log.warning("%s: no image; opening it again in %.2f s", self.name, pause_s)
            device.release()
            self._closed.wait(pause_s)
            pause_s = min(2 * pause_s, _LAST_RETRY_S)
            device = self._open_device()
        device.release()

    def _read_one(self, device: cv2.VideoCapture) -> bool:
        try:
            if not device.grab():
                return False
            capture_ns = time.time_ns()
            if not self._limit.admits(time.monotonic_ns()):
                return True
            is_decoded, image = device.retrieve()
        except cv2.error:  # some backends raise on a damaged image
            return False
        if is_decoded:
            with self._arrived:
                self._newest = CapturedImage(image, capture_ns)
                self._arrived.notify()
        return is_decoded


def open_webcam(address: str, settings: CameraSettings, stop: threading.Event) -> WebcamSource:
    """Open the device with index `address` at the size and rate of `settings`; CameraError if it is absent."""
    if not (address.isascii() and address.isdigit() and len(address) < 4):
        raise CameraError(f"expected webcam:INDEX with an index from 0, found 'webcam:{address}'")
    return WebcamSource(f"webcam:{address}", lambda: _open_index(int(address), settings), settings.fps, stop)


def _open_index(index: int, settings: CameraSettings) -> cv2.VideoCapture:
    with _quiet():
        device = cv2.VideoCapture(index)
    properties = {
        cv2.CAP_PROP_FRAME_WIDTH: settings.width,
        cv2.CAP_PROP_FRAME_HEIGHT: settings.height,
        cv2.CAP_PROP_FPS: settings.fps,
        cv2.CAP_PROP_BUFFERSIZE: 1,
    }
    for property_, value in properties.items():
        if value:
            device.set(property_, value)
    return device


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence OpenCV's log lines, because this package reports the same failures once."""
    level = cv2.utils.logging.getLogLevel()
    cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
    try:
        yield
    finally:
        cv2.utils.logging.setLogLevel(level)
