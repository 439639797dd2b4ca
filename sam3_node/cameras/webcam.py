"""Reads cameras through OpenCV: webcam:INDEX, rtsp://HOST/PATH, and v4l2:NAME in a chosen mode.

The kernel tells the names and modes of V4L2 cameras (linux/videodev2.h). Their MJPEG is passed on as it comes.
"""

import contextlib
import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from ..errors import CameraError, WireError, did_you_mean
from ..settings import CameraSettings
from ..types import NANOSECONDS, Frame
from ..wire.images import compressed_size
from .camera_source import CapturedImage, Mode, choose_mode, wanted_mode, warn_about_mode
from .live_source import DeviceSource

Ask = Callable[[int, bytearray], object]
"""An ioctl of an open device. It fills the structure of a request. Raises OSError at the end of a list."""

STREAM_TIMEOUT_MS = 5000
"""Time after which a stream of the network that cannot be opened, or that gives nothing, counts as lost."""
DEVICES = Path("/dev")
"""Folder of the devices."""
LINKS = "/dev/v4l/"
"""Folder of udev's links to devices, by their serial numbers (by-id) and ports (by-path)."""

# variable of the environment with options of FFmpeg
_FFMPEG_OPTIONS = "OPENCV_FFMPEG_CAPTURE_OPTIONS"
# requests of V4L2: capabilities, and the lists of formats, sizes and rates
_QUERYCAP = 0x80685600
_ENUM_FMT = 0xC0405602
_ENUM_SIZES = 0xC02C564A
_ENUM_INTERVALS = 0xC034564B
# capabilities: captures video, and has capabilities of its own in addition to those of the whole device
_CAPTURE = 0x1
_HAS_DEVICE_CAPS = 0x80000000
# kind of a size or rate that is a single one, not a range
_DISCRETE = 1
# entries of a list after which reading it ends
_MAX_ENTRIES = 256
# pixel formats, the best first
_JPEG = ("MJPG", "JPEG")
_RAW = ("YUYV", "UYVY", "BGR3", "RGB3", "GREY")
# V4L2_EXPOSURE_MANUAL
_MANUAL_EXPOSURE = 1
# V4L2 counts exposure in 100 us
_EXPOSURES_PER_MS = 10
# delay of an image above which the kernel's stamp is of another clock
_MAX_DELAY_NS = NANOSECONDS


class OpenCvDevice:
    """A LiveDevice that OpenCV has opened. OpenCV does not say which images its driver lost."""

    def __init__(self, capture: cv2.VideoCapture) -> None:
        self._capture = capture
        self._capture_ns = 0
        self.lost = 0

    def grab(self) -> bool:
        self._take(self._capture.grab)
        self._capture_ns = time.time_ns()
        return True

    def retrieve(self) -> CapturedImage | None:
        return CapturedImage(self._take(self._capture.retrieve), self._capture_ns)

    def close(self) -> None:
        self._capture.release()

    def _take(self, method: Callable[[], Any]) -> Any:
        """Call a method of OpenCV and return its image, if it gives one. Raises CameraError if it fails."""
        taken: Any = False
        with contextlib.suppress(cv2.error):  # some backends raise on a damaged image
            taken = method()
        # `grab` returns whether it succeeded, `retrieve` also the image
        succeeded = taken
        image = None
        if isinstance(taken, tuple):
            succeeded, image = taken
        if not succeeded:
            raise CameraError("no image")
        return image


def open_webcam(address: str, settings: CameraSettings, stop: threading.Event) -> DeviceSource:
    """Open the device with index `address` at the size and rate of `settings`. Raises CameraError if it is absent.

    A lost one is opened again at its port, where the system names it: a number may be another camera's then.
    """
    if not (address.isascii() and address.isdigit() and len(address) < 4):
        raise CameraError(f"expected webcam:INDEX with an index from 0, found 'webcam:{address}'")
    index = int(address)
    port = ""

    def open_device() -> OpenCvDevice:
        nonlocal port
        cameras = list_v4l2()  # none on other systems than Linux
        if port:
            find_again(address, port, cameras)
        device = _open_index(index, settings)
        port = next((camera.port for camera in cameras if camera.index == index), "")
        return device

    return DeviceSource(f"webcam:{address}", open_device, settings.fps, stop)


def open_stream(uri: str, settings: CameraSettings, stop: threading.Event) -> DeviceSource:
    """Open a stream of the network by its address. Raises CameraError if it gives no image.

    RTSP is received over TCP, so that no packet is lost. OPENCV_FFMPEG_CAPTURE_OPTIONS sets other options of FFmpeg.
    """
    os.environ.setdefault(_FFMPEG_OPTIONS, "rtsp_transport;tcp")
    return DeviceSource(_hide_password(uri), lambda: _open_uri(uri), settings.fps, stop)


def _open_uri(uri: str) -> OpenCvDevice:
    # OpenCV takes names and values in turn
    timeouts = [
        cv2.CAP_PROP_OPEN_TIMEOUT_MSEC,
        STREAM_TIMEOUT_MS,
        cv2.CAP_PROP_READ_TIMEOUT_MSEC,
        STREAM_TIMEOUT_MS,
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
    properties = {
        cv2.CAP_PROP_FRAME_WIDTH: settings.width,
        cv2.CAP_PROP_FRAME_HEIGHT: settings.height,
        cv2.CAP_PROP_FPS: settings.fps,
        cv2.CAP_PROP_BUFFERSIZE: 1,
    }
    # 0 keeps what the camera has
    chosen = {name: value for name, value in properties.items() if value}
    absent = (
        f"webcam:{index}: expected a camera, found none; check that it is plugged in, that no other program "
        "holds it and that this user may read it"
    )
    return OpenCvDevice(_open_capture(index, cv2.CAP_ANY, chosen, absent))


def _open_capture(index: int, backend: int, properties: Mapping[int, float], absent: str) -> cv2.VideoCapture:
    """Open a device with these properties. Raises CameraError with the text `absent` if it gives no image."""
    with quiet():
        capture = cv2.VideoCapture(index, backend)
        for name, value in properties.items():
            capture.set(name, value)
        delivers = capture.isOpened() and capture.grab()
    if not delivers:
        capture.release()
        raise CameraError(absent)
    return capture


@contextmanager
def quiet() -> Iterator[None]:
    """Silence OpenCV's log lines, because this package reports the same failures once."""
    level = cv2.utils.logging.getLogLevel()
    cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
    try:
        yield
    finally:
        cv2.utils.logging.setLogLevel(level)


@dataclass(frozen=True, slots=True)
class V4l2Camera:
    """A device that captures video: its file, its name, its modes, and the port that it is plugged into."""

    path: Path
    name: str
    modes: tuple[Mode, ...]
    port: str = ""
    """As the kernel names it, such as usb-0000:00:14.0-1; "" if it does not."""

    @property
    def index(self) -> int:
        """N of /dev/videoN."""
        return int(self.path.name.removeprefix("video"))


def list_v4l2(folder: Path = DEVICES) -> list[V4l2Camera]:
    """Return the cameras of this machine, in the order of their files. One that cannot be opened has no modes."""
    paths = [path for path in folder.glob("video*") if path.name.removeprefix("video").isdecimal()]
    cameras: list[V4l2Camera | None] = []
    for path in sorted(paths, key=lambda path: int(path.name.removeprefix("video"))):
        try:
            device = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        except OSError as error:
            cameras.append(V4l2Camera(path, f"({error.strerror})", ()))
            continue
        with contextlib.suppress(OSError):  # of another kind of device
            cameras.append(read_camera(path, partial(fcntl.ioctl, device)))
        os.close(device)
    return [camera for camera in cameras if camera is not None]


def read_camera(path: Path, ask: Ask) -> V4l2Camera | None:
    """Return the camera at `path`; None if it captures no video, such as the metadata of a camera."""
    data = bytearray(104)
    ask(_QUERYCAP, data)
    _, card, bus, _, capabilities, device_caps = struct.unpack_from("=16s32s32sIII", data)
    # the whole device may have several files, one of which captures
    if capabilities & _HAS_DEVICE_CAPS:
        capabilities = device_caps
    if not capabilities & _CAPTURE:
        return None
    name, port = (text.split(b"\0")[0].decode("utf-8", "replace") for text in (card, bus))
    return V4l2Camera(path, name, tuple(_list_modes(ask)), port)


def _list_modes(ask: Ask) -> Iterator[Mode]:
    # an entry of a list is asked by its index, which lies before what it depends on; formats are of kind 1, capture
    for (code,) in _enumerate(ask, _ENUM_FMT, 64, struct.pack("=I", 1), "=I", 44):
        form = struct.pack("=I", code).decode("ascii", "replace").strip()
        for kind, width, height in _enumerate(ask, _ENUM_SIZES, 44, struct.pack("=I", code), "=III", 8):
            # the smallest size of a range says little
            if kind != _DISCRETE:
                continue
            size = struct.pack("=III", code, width, height)
            for rate_kind, seconds, images in _enumerate(ask, _ENUM_INTERVALS, 52, size, "=III", 16):
                if rate_kind == _DISCRETE and seconds:
                    yield Mode(width, height, round(images / seconds, 3), form)


def _enumerate(
    ask: Ask, request: int, size: int, key: bytes, fields: str, offset: int
) -> Iterator[tuple[int, ...]]:
    """Yield the fields at `offset` of each entry of a list, until the device says that there is no more."""
    with contextlib.suppress(OSError):
        for index in range(_MAX_ENTRIES):
            data = bytearray(struct.pack("=I", index) + key)
            data.extend(bytes(size - len(data)))
            ask(request, data)
            yield struct.unpack_from(fields, data, offset)


class V4l2Device(OpenCvDevice):
    """A device of OpenCV's V4L2 backend, in `mode`. The kernel's stamp is used if it is of the monotonic clock."""

    def __init__(self, capture: cv2.VideoCapture, mode: Mode) -> None:
        super().__init__(capture)
        self._mode = mode
        self._stamp_ns = 0

    def grab(self) -> bool:
        super().grab()
        monotonic_ns = time.monotonic_ns()
        self._stamp_ns = round(self._capture.get(cv2.CAP_PROP_POS_MSEC) * 1e6)
        delay_ns = monotonic_ns - self._stamp_ns
        if 0 <= delay_ns <= _MAX_DELAY_NS:
            self._capture_ns -= delay_ns
        return True

    def retrieve(self) -> CapturedImage | None:
        image = self._take(self._capture.retrieve)
        times = {"v4l2_ns": self._stamp_ns}
        if self._mode.form not in _JPEG:
            return CapturedImage(image, self._capture_ns, times=times)
        frame = read_jpeg(np.asarray(image, np.uint8).tobytes())
        if frame is None:
            self.lost += 1
            return None
        return CapturedImage(frame, self._capture_ns, times=times)


def read_jpeg(data: bytes) -> Frame | None:
    """Return a JPEG of a camera as an encoded image, without the zeros that fill its buffer; None if it is damaged."""
    data = data[: data.rfind(b"\xff\xd9") + 2]
    try:
        width, height = compressed_size(data, "jpeg")
    except WireError:
        return None
    return Frame("", 0, 0, width, height, "jpeg", data)


def find_camera(name: str, cameras: Sequence[V4l2Camera]) -> V4l2Camera:
    """Return the camera with this name, file, link to a file, or number. A part of a name is enough if one has it.

    Raises CameraError that names the cameras for any other name, and for one that several have.
    """
    # the whole name wins, because it may be a part of another camera's
    file = str(Path(name).resolve()) if name.startswith("/") else ""
    matching = [
        camera
        for camera in cameras
        if name in (camera.name, str(camera.path), str(camera.index)) or file == str(camera.path)
    ]
    if not matching:
        matching = [camera for camera in cameras if name and name.casefold() in camera.name.casefold()]
    # one camera may have several files
    if len({(camera.name, camera.port or camera.path) for camera in matching}) == 1:
        return matching[0]
    listed = ", ".join(_describe(camera) for camera in matching or cameras) or "none"
    near = "" if matching else did_you_mean(name, [camera.name for camera in cameras])
    raise CameraError(
        f"v4l2:{name}: expected the name or file of one camera, found {listed}{near}; "
        f"sam3-node camera list shows them with their modes; links in {LINKS}by-path and by-id tell cameras of one "
        "name apart"
    )


def find_again(name: str, port: str, cameras: Sequence[V4l2Camera]) -> V4l2Camera:
    """Return the camera of `find_camera` that was at a port and is there again.

    Raises CameraError if it is not: one of its name, number or file at another port may be another camera.
    """
    at_port = [camera for camera in cameras if camera.port == port]
    if not at_port:
        listed = ", ".join(map(_describe, cameras)) or "none"
        raise CameraError(
            f"v4l2:{name}: expected the camera at {port} again, found {listed}; plug it in there, or start this "
            f"process again, or name the camera by its link in {LINKS}by-id, which is the same at any port"
        )
    return find_camera(name, at_port)


def _describe(camera: V4l2Camera) -> str:
    return f"{camera.path} ({camera.name}{f' at {camera.port}' if camera.port else ''})"


def open_v4l2(address: str, settings: CameraSettings, stop: threading.Event) -> DeviceSource:
    """Open the camera with the name or file `address` in the mode nearest to the settings.

    A lost camera is opened again at its port, or where its link leads. Raises CameraError if it is absent, gives no
    image, or has no mode that can be read.
    """
    port = ""

    def open_device() -> V4l2Device:
        nonlocal port
        cameras = list_v4l2()
        camera = find_again(address, port, cameras) if port else find_camera(address, cameras)
        # a link tells by itself which camera it is
        port = "" if address.startswith(LINKS) else camera.port
        mode = choose_v4l2_mode(camera, settings)
        absent = (
            f"v4l2:{camera.name}: expected images in {mode}, found none; check that no other program holds "
            f"{camera.path} and that this user may read it (group video)"
        )
        capture = _open_capture(camera.index, cv2.CAP_V4L2, _properties(mode, settings), absent)
        return V4l2Device(capture, mode)

    return DeviceSource(f"v4l2:{address}", open_device, settings.fps, stop)


def choose_v4l2_mode(camera: V4l2Camera, settings: CameraSettings) -> Mode:
    """Choose the mode nearest to the settings: JPEG if frames are sent as JPEG, else raw if it is as fast."""
    wanted = wanted_mode(settings)
    # a JPEG that is passed on costs neither time nor quality
    forms = (*_JPEG, *_RAW) if settings.encoding == "jpeg" else (*_RAW, *_JPEG)
    mode = choose_mode(camera.modes, wanted, forms)
    if mode is None:
        forms_found = ", ".join(sorted({mode.form for mode in camera.modes})) or "none that can be listed"
        raise CameraError(f"v4l2:{camera.name}: expected one of {', '.join(forms)}, found {forms_found}")
    warn_about_mode(f"v4l2:{camera.name}", mode, wanted)
    return mode


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
