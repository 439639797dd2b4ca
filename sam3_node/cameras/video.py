"""video:FILE - a recorded video, played at its own rate."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import cv2

from ..errors import CameraError
from .base import CapturedImage
from .pacing import Pacer

_log = logging.getLogger(__name__)
_FALLBACK_FPS = 30.0


class VideoSource:
    """The frames of a file, in order; `times` carries `media_ns`, the frame's time in the file.

    `fps` 0 keeps the file's own rate. Raises CameraError for a file without a readable frame.
    """

    def __init__(self, path: str, fps: float, loop: bool, stop: threading.Event) -> None:
        self.name = f"video:{path}"
        self._path = Path(path).expanduser()
        self._capture = self._open()
        self._loop = loop
        self._pacer = Pacer(fps or _own_fps(self._capture), stop)

    def __iter__(self) -> Iterator[CapturedImage]:
        yield from self._play()
        while self._loop:
            self._capture.release()
            self._capture = self._open()
            yield from self._play()

    def close(self) -> None:
        self._loop = False
        self._capture.release()

    def _play(self) -> Iterator[CapturedImage]:
        """The frames from the one that is grabbed to the last; decoding is done before the wait."""
        count = 0
        while self._capture.isOpened():
            media_ns = round(self._capture.get(cv2.CAP_PROP_POS_MSEC) * 1e6)
            found, image = self._capture.retrieve()
            if not found or not self._pacer.wait():
                return self.close()
            yield CapturedImage(image, time.time_ns(), times={"media_ns": media_ns})
            count += 1
            if not self._capture.grab():
                return self._warn_if_short(count)
        return None

    def _open(self) -> cv2.VideoCapture:
        """The file with its first frame grabbed, which proves that it has one."""
        if not self._path.is_file():
            raise CameraError(f"expected a video file, found no file at {self._path}")
        capture = cv2.VideoCapture(str(self._path))
        if not (capture.isOpened() and capture.grab()):
            raise CameraError(f"{self._path} holds no readable video: damaged, or of an unknown format")
        return capture

    def _warn_if_short(self, count: int) -> None:
        declared = int(self._capture.get(cv2.CAP_PROP_FRAME_COUNT))
        if count < declared:
            _log.warning("%s ended after %d of its %d frames: damaged?", self._path, count, declared)


def _own_fps(capture: cv2.VideoCapture) -> float:
    fps = capture.get(cv2.CAP_PROP_FPS)
    return fps if math.isfinite(fps) and 0 < fps <= 1000 else _FALLBACK_FPS
