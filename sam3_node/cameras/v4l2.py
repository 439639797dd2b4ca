"""v4l2:NAME - a camera of Linux by its name, in a chosen mode; MJPEG is passed on as it comes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

import cv2
import numpy as np

from ..errors import CameraError, WireError, did_you_mean
from ..settings import CameraSettings
from ..types import NANOSECONDS, Frame
from ..wire.images import compressed_size
from .base import CapturedImage
from .live import LiveSource
from .modes import Mode, choose_mode
from .v4l2_modes import V4l2Camera, list_v4l2
from .webcam import quiet

DEFAULT_MODE = Mode(640, 480, 30.0, "")
_JPEG = ("MJPG", "JPEG")
_RAW = ("YUYV", "UYVY", "BGR3", "RGB3", "GREY")
_MANUAL_EXPOSURE = 1  # V4L2_EXPOSURE_MANUAL
_EXPOSURES_PER_MS = 10  # V4L2 counts in 100 us
_MAX_DELAY_NS = NANOSECONDS

_log = logging.getLogger(__name__)


class V4l2Device:
    """A LiveDevice of OpenCV's V4L2 backend, in `mode`. The kernel's stamp is used if it is of the monotonic clock."""

    def __init__(self, capture: cv2.VideoCapture, mode: Mode) -> None:
        self._capture, self._mode = capture, mode
        self._capture_ns = 0
        self._stamp_ns = 0
        self.lost = 0

    def grab(self) -> bool:
        try:
            is_grabbed = self._capture.grab()
        except cv2.error:
            is_grabbed = False
        if not is_grabbed:
            raise CameraError("no image")
        unix_ns, monotonic_ns = time.time_ns(), time.monotonic_ns()
        self._stamp_ns = round(self._capture.get(cv2.CAP_PROP_POS_MSEC) * 1e6)
        delay_ns = monotonic_ns - self._stamp_ns
        self._capture_ns = unix_ns - (delay_ns if 0 <= delay_ns <= _MAX_DELAY_NS else 0)
        return True

    def retrieve(self) -> CapturedImage | None:
        try:
            is_read, image = self._capture.retrieve()
        except cv2.error as error:
            raise CameraError("no image") from error
        if not is_read:
            raise CameraError("no image")
        times = {"v4l2_ns": self._stamp_ns}
        if self._mode.form not in _JPEG:
            return CapturedImage(image, self._capture_ns, times=times)
        frame = read_jpeg(np.asarray(image, np.uint8).tobytes())
        self.lost += frame is None
        return None if frame is None else CapturedImage(frame, self._capture_ns, times=times)

    def close(self) -> None:
        self._capture.release()


def read_jpeg(data: bytes) -> Frame | None:
    """Return a JPEG of a camera as an encoded image, without the zeros that fill its buffer; None if it is damaged."""
    end = data.rfind(b"\xff\xd9")
    try:
        if end < 0:
            return None
        data = data[: end + 2]
        width, height = compressed_size(data, "jpeg")
    except WireError:
        return None
    return Frame("", 0, 0, width, height, "jpeg", data)


def find_camera(name: str, cameras: Sequence[V4l2Camera]) -> V4l2Camera:
    """Return the camera with this name, file or number; part of a name is enough if only one has it.

    Raises CameraError that names the cameras for any other name.
    """
    exact = [camera for camera in cameras if name in (camera.name, str(camera.path), str(camera.index))]
    if exact:
        return exact[0]
    partial = [camera for camera in cameras if name and name.casefold() in camera.name.casefold()]
    if len(partial) == 1:
        return partial[0]
    known = ", ".join(f"{camera.path} ({camera.name})" for camera in partial or cameras) or "none"
    near = did_you_mean(name, [camera.name for camera in cameras]) if not partial else ""
    raise CameraError(
        f"v4l2:{name}: expected the name or file of one camera, found {known}{near}; "
        "sam3-node camera list shows them with their modes"
    )


def open_v4l2(address: str, settings: CameraSettings, stop: threading.Event) -> LiveSource:
    """Open the camera with the name or file `address` in the mode nearest to the settings.

    Raises CameraError if it is absent, gives no image, or has no mode that can be read.
    """

    def open_device() -> V4l2Device:
        camera = find_camera(address, list_v4l2())
        return _open(camera, choose_v4l2_mode(camera, settings), settings)

    return LiveSource(f"v4l2:{address}", open_device, settings.fps, stop)


def choose_v4l2_mode(camera: V4l2Camera, settings: CameraSettings) -> Mode:
    """Choose the mode nearest to the settings: JPEG if frames are sent as JPEG, else raw if it is as fast."""
    wanted = Mode(
        settings.width or DEFAULT_MODE.width,
        settings.height or DEFAULT_MODE.height,
        settings.fps or DEFAULT_MODE.fps,
        "",
    )
    forms = (*_JPEG, *_RAW) if settings.encoding == "jpeg" else (*_RAW, *_JPEG)
    mode = choose_mode(camera.modes, wanted, forms)
    if mode is None:
        found = ", ".join(sorted({mode.form for mode in camera.modes})) or "none that can be listed"
        raise CameraError(f"v4l2:{camera.name}: expected one of {', '.join(forms)}, found {found}")
    if mode[:2] != wanted[:2] or mode.fps < wanted.fps - 0.5:
        _log.warning(
            "v4l2:%s: expected %dx%d at %g fps, the camera has %s", *(camera.name, *wanted[:3], mode)
        )
    return mode


def _open(camera: V4l2Camera, mode: Mode, settings: CameraSettings) -> V4l2Device:
    with quiet():
        capture = cv2.VideoCapture(camera.index, cv2.CAP_V4L2)
        for property_, value in _properties(mode, settings).items():
            capture.set(property_, value)
        delivers = capture.isOpened() and capture.grab()
    if not delivers:
        capture.release()
        raise CameraError(
            f"v4l2:{camera.name}: expected images in {mode}, found none; check that no other program holds "
            f"{camera.path} and that this user may read it (group video)"
        )
    return V4l2Device(capture, mode)


def _properties(mode: Mode, settings: CameraSettings) -> dict[int, float]:
    properties: dict[int, float] = {
        cv2.CAP_PROP_FOURCC: cv2.VideoWriter.fourcc(*mode.form),
        cv2.CAP_PROP_FRAME_WIDTH: mode.width,
        cv2.CAP_PROP_FRAME_HEIGHT: mode.height,
        cv2.CAP_PROP_FPS: mode.fps,
        cv2.CAP_PROP_BUFFERSIZE: 1,
        cv2.CAP_PROP_CONVERT_RGB: float(mode.form not in _JPEG),
    }
    if settings.exposure_ms:
        properties[cv2.CAP_PROP_AUTO_EXPOSURE] = _MANUAL_EXPOSURE
        properties[cv2.CAP_PROP_EXPOSURE] = settings.exposure_ms * _EXPOSURES_PER_MS
    return properties
