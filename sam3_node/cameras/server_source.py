"""Reads another project's camera server: tcp://HOST:PORT with camera.dialect (GR00T, lerobot, imagezmq).

The source subscribes to the server and keeps the newest image of each camera. The camera process publishes each camera
under its own name. Stamps, keys, recording, the watchdog and the node work as with every camera. A server's clock may
be another than Unix time.

| dialect | a message |
|---|---|
| groot | one msgpack map `{"timestamps": {camera: s}, "images": {camera: JPEG}}`; JPEG as base64 text, or as bytes |
| lerobot | the same map as JSON; JPEG as base64 text |
| imagezmq | JSON `{"msg": name, "dtype", "shape"}`, then the pixels; or `{"msg": name}`, then a JPEG |
| jpeg | a JPEG or PNG, alone or after a topic that names its camera |

Red and blue: the servers of lerobot and GR00T hand RGB images to OpenCV's JPEG encoder, which takes them for BGR. In
their base64 images red and blue are therefore exchanged. The JPEGs that GR00T's server sends as bytes come from a
camera's own encoder and are right. imagezmq sends OpenCV's BGR. Bare JPEGs are taken as they are.
"""

from __future__ import annotations

import binascii
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from ..errors import CameraError, WireError
from ..processes.signals import WaitingNotice
from ..resources import closed_on_error
from ..schema.fields import MAX_INT, MAX_SIDE, describe
from ..settings import CameraSettings
from ..transport.foreign import ForeignHub, ForeignSubscriber
from ..types import NANOSECONDS, Buffer, Depth, Frame, Image
from ..wire.codec import Limits, unpack
from ..wire.images import (
    MAX_FRAME_PIXELS,
    compressed_size,
    decode_image,
    identify_compressed,
    is_depth_png,
)
from .camera_source import CapturedImage
from .clock_fit import ClockFit
from .live_source import RateLimit

Dialect = Literal["groot", "lerobot", "imagezmq", "jpeg"]

MAX_CAMERAS = 16
"""Number of cameras of one server that are read."""
MAX_IMAGES = 32
"""Number of images that one message may have: colour and depth of MAX_CAMERAS."""
MAX_ITEMS = 4096
"""Number of items that one message of msgpack or JSON may have."""
MAX_HEAD_BYTES = 64 << 10
"""Size of the largest header of imagezmq."""
MAX_TOPIC_BYTES = 256
"""Number of a topic's first bytes that name the camera of a JPEG."""
MAX_LATE_S = 10.0
"""Time before the arrival up to which a stamp counts as Unix time. The image is old then, or the clock is off."""
MAX_EARLY_S = 0.05
"""Time after the arrival up to which a stamp counts as Unix time. The arrival is used instead."""
OLD_S = 1.0
"""Time before the arrival from which on a stamp is warned about."""
ANY_CAMERA = "*"
"""Name in ?camera=* that publishes all images as one camera, whatever the server calls them."""

# depth in a map of GR00T: the end of its name, its encoding, and metres per unit
_DEPTH_SUFFIX = "_depth"
_DEPTH_ENCODING = "uint16_mm_png"
_DEPTH_SCALE_M = 0.001
# stamps from here on do not fit into 63 bits as nanoseconds
_MAX_STAMP_S = 2**62 / NANOSECONDS
# time since its last image during which no other sender takes over a camera's name
_SHARED_S = 2.0
# time without an image after which a camera gives way to a new one
_IDLE_S = 10.0
# time of one wait for an image
_TURN_S = 0.1
# what chooses a camera in an address
_CAMERA = "?camera="
_HUB = "imagezmq-hub"
_HUB_HINT = f"; senders in REQ/REP mode need --dialect {_HUB}"
_SCHEMES = ("tcp://", "ipc://")
_log = logging.getLogger(__name__)
# what raw pixels are with red and blue exchanged
_RAW_SWAPPED = {"bgr8": "rgb8", "rgb8": "bgr8", "mono8": "mono8"}


def open_server(
    uri: str, settings: CameraSettings, stop: threading.Event, insecure: bool = False
) -> ServerSource:
    """Open the camera server at `uri`. Raises CameraError for a uri or settings that do not fit, or TransportError."""
    endpoint, _, chosen = uri.partition(_CAMERA)
    dialects = "groot, lerobot, imagezmq, imagezmq-hub or jpeg"
    if settings.dialect == "none":
        raise CameraError(
            f"{uri}: expected the protocol of this camera server: --dialect {dialects}. A camera of sam3-node is read"
            " by the node itself: name it in transport.frames"
        )
    if not uri.startswith(_SCHEMES):
        raise CameraError(f"expected tcp://HOST:PORT with --dialect {settings.dialect}, found {uri!r}")
    # only a hub binds an address, to which the senders connect
    if "*" in endpoint and settings.dialect != _HUB:
        hint = _HUB_HINT if settings.dialect == "imagezmq" else ""
        raise CameraError(
            f"expected the address of the server, such as tcp://robot:5555, found {endpoint!r}{hint}"
        )
    if settings.calibration is not None and not chosen:
        raise CameraError(
            f"camera.calibration belongs to one camera, and {endpoint} may send several: choose one with "
            f"{endpoint}{_CAMERA}NAME"
        )
    return ServerSource(endpoint, chosen, settings, stop, insecure)


class StampReader:
    """Maps the stamps of one camera of a server to the Unix time of the capture.

    A stamp in Unix seconds is kept. For another clock (a monotonic one, or one that is off by more than MAX_LATE_S),
    the capture is the arrival less the delay beyond the shortest one, see ClockFit. An image without a usable stamp
    gets the time of its arrival. The times always increase, even if the stamps repeat or go back. Each warning is
    logged once, with `name`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._fit = ClockFit()
        self._last_ns = 0
        self._warned: set[str] = set()

    def read(self, stamp_s: float | None, arrival_ns: int) -> int:
        """Return the time of the capture. `arrival_ns` is a Unix time."""
        capture_ns = self._map(stamp_s, arrival_ns) if stamp_s is not None else arrival_ns
        # two frames of a camera never have one time: it is a part of their key
        if capture_ns <= self._last_ns:
            capture_ns = max(arrival_ns, self._last_ns + 1)
        self._last_ns = capture_ns
        return capture_ns

    def _map(self, stamp_s: float, arrival_ns: int) -> int:
        if not 0 < stamp_s < _MAX_STAMP_S:
            return arrival_ns

        # Unix time, if it is near the arrival
        stamp_ns = round(stamp_s * NANOSECONDS)
        late_s = (arrival_ns - stamp_ns) / NANOSECONDS
        if -MAX_EARLY_S <= late_s <= MAX_LATE_S:
            if late_s > OLD_S:
                self._warn(
                    "old",
                    f"its stamps are {late_s:.1f} s before the arrival: the images are old, or a clock is off; set the "
                    "clocks of both machines, such as with chrony",
                )
            return min(stamp_ns, arrival_ns)
        self._warn(
            "other",
            f"expected stamps in Unix seconds, found {stamp_s:.3f} at {arrival_ns / NANOSECONDS:.3f}; the server's"
            " clock is another, so the capture is taken as the arrival less the delay beyond the shortest one",
        )
        return arrival_ns - self._fit.delay_ns(stamp_ns, arrival_ns)

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            _log.warning("camera %s: %s", self._name, text)


@dataclass(slots=True)
class _ServerCamera:
    """A camera of the server.

    `origin` is who sent it last, and under which name. `last` is its last image if that has a stamp.
    """

    origin: tuple[bytes, str]
    stamps: StampReader
    limit: RateLimit
    heard_s: float = 0.0
    last: ServerImage | None = None


@dataclass(frozen=True, slots=True)
class _Arrived:
    """An image that waits to be taken, with the times of its capture and arrival (Unix)."""

    camera: str
    image: ServerImage
    capture_ns: int
    arrival_ns: int


@dataclass(slots=True)
class _Counts:
    """Counts of images that were received and not yielded, and why messages could not be read."""

    replaced: int = 0
    """Images that gave way to newer ones."""
    repeated: int = 0
    """Images that came again with the same stamp."""
    rejected: int = 0
    """Images and messages that could not be read."""
    last_error: str = ""
    unread: str = ""
    """Why the last message could not be read, if no image came since."""


class ServerSource:
    """Yields the newest image of each camera of a server. A thread receives, and no message can end it.

    URI?camera=NAME chooses one camera, which is published under the name of the settings. `*` stands for all. A server
    that is absent or restarts is connected as soon as it is there. `.counts` says how many images were replaced by
    newer ones, came again with the same stamp, or could not be read. Raises TransportError for an address that cannot
    be used.
    """

    is_finite = False

    def __init__(
        self, endpoint: str, chosen: str, settings: CameraSettings, stop: threading.Event, insecure: bool
    ) -> None:
        self.name = f"{settings.dialect} {endpoint}"
        self.counts = _Counts()
        self._settings = settings
        self._chosen = chosen
        self._stop = stop
        self._dialect: Dialect = "imagezmq"
        if settings.dialect != _HUB:
            self._dialect = cast(Dialect, settings.dialect)
        self._closed = threading.Event()
        self._changed = threading.Condition()
        # the newest image of each camera that waits to be taken; the one that waits longest is first
        self._newest: dict[str, _Arrived] = {}
        self._cameras: dict[str, _ServerCamera] = {}
        # names that the server sends in addition to the chosen one
        self._others: dict[str, None] = {}

        # the receiver's thread begins to deliver at once: it comes last
        self._notice = WaitingNotice(self._explain_silence)
        self._receiver: ForeignHub | ForeignSubscriber
        with closed_on_error(self._notice):
            if settings.dialect == _HUB:
                self._receiver = ForeignHub(endpoint, self._deliver, insecure)
            else:
                self._receiver = ForeignSubscriber(endpoint, self._deliver)

    @property
    def endpoint(self) -> str:
        """Address of the server, or of the hub with * and port 0 resolved."""
        return self._receiver.endpoint

    @property
    def lost(self) -> int:
        """Images that were lost because newer ones came before they were taken, or because they could not be read."""
        return self.counts.replaced + self.counts.rejected + self._receiver.dropped

    def __iter__(self) -> Iterator[CapturedImage]:
        while not (self._stop.is_set() or self._closed.is_set()):
            with self._changed:
                self._changed.wait_for(lambda: bool(self._newest), timeout=_TURN_S)
                arrived = self._newest.pop(next(iter(self._newest), ""), None)
            if arrived is None:
                self._receiver.check()
                continue
            # decode only what is taken
            try:
                captured = self._capture(arrived)
            except WireError as error:
                self._reject(error)
                continue
            yield captured

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._closed.set()
        self._notice.close()
        self._receiver.close()

    def _capture(self, arrived: _Arrived) -> CapturedImage:
        frame = arrived.image.frame
        times: dict[str, int | float] = {"arrival_ns": arrived.arrival_ns}
        if arrived.image.stamp_s is not None:
            times["server_stamp_s"] = arrived.image.stamp_s

        image: Frame | Image = frame
        swap = self._settings.swap_red_blue
        if swap == "yes" or (swap == "auto" and arrived.image.swapped):
            image = exchange_red_blue(frame)
        depth = frame.depth if self._settings.depth else None
        return CapturedImage(image, arrived.capture_ns, depth=depth, times=times, camera=arrived.camera)

    def _deliver(self, parts: list[memoryview], arrival_ns: int, sender: bytes) -> None:
        """Take a message. Runs in the receiver's thread, and raises nothing."""
        # no message may end the thread, however reading fails
        try:
            contents = read_message(self._dialect, parts)
        except Exception as error:
            self._reject(error)
            return
        for reason in contents.rejected:
            self._reject(reason)
        for image in contents.images:
            try:
                self._keep(image, arrival_ns, sender)
            except Exception as error:
                self._reject(error)

    def _keep(self, image: ServerImage, arrival_ns: int, sender: bytes) -> None:
        """Keep an image as the newest of its camera. Raises WireError if its name cannot be used."""
        name = self._choose_name(image.name)
        if name is None:
            return
        # with ?camera=* a camera may have any name at the server
        server_name = "" if self._chosen == ANY_CAMERA else image.name
        camera = self._find_camera(name, (sender, server_name))

        # a server that is faster than its camera sends an image again
        last = camera.last
        camera.last = None if image.stamp_s is None else image
        if last and (last.stamp_s, last.frame.colour) == (image.stamp_s, image.frame.colour):
            self.counts.repeated += 1
            return

        self.counts.unread = ""
        self._notice.progress()
        if not camera.limit.admits(time.monotonic_ns()):
            return
        arrived = _Arrived(name, image, camera.stamps.read(image.stamp_s, arrival_ns), arrival_ns)
        with self._changed:
            self.counts.replaced += name in self._newest
            self._newest[name] = arrived
            self._changed.notify()

    def _choose_name(self, name: str) -> str | None:
        """Return the name to publish under; None for a camera that was not chosen."""
        if self._chosen:
            if self._chosen in (ANY_CAMERA, name):
                return self._settings.name
            if len(self._others) < MAX_CAMERAS:
                self._others[name[:64]] = None
            return None
        # a name of dots alone cannot be a folder's
        allowed = re.sub(r"[^A-Za-z0-9_.-]", "_", name[:64])
        if not allowed.strip("."):
            return self._settings.name
        return allowed

    def _find_camera(self, name: str, origin: tuple[bytes, str]) -> _ServerCamera:
        """Return the camera with this name. Raises WireError for a name of another sender, and for too many names."""
        # two senders of one name would make one camera that jumps between two views
        now_s = time.monotonic()
        camera = self._cameras.get(name)
        if camera is None:
            self._make_place(name, now_s)
            camera = _ServerCamera(origin, StampReader(name), RateLimit(self._settings.fps))
            self._cameras[name] = camera
        elif camera.origin != origin and now_s - camera.heard_s < _SHARED_S:
            raise WireError(
                f"camera {name}: expected images of {describe(camera.origin[1])} of one sender, found "
                f"{describe(origin[1])} or another sender too; give each camera its own name"
            )
        camera.origin = origin
        camera.heard_s = now_s
        return camera

    def _make_place(self, name: str, now_s: float) -> None:
        """Forget the camera that was silent longest, if there are too many. Raises WireError if none was silent."""
        if len(self._cameras) < MAX_CAMERAS:
            return
        oldest = min(self._cameras, key=lambda name: self._cameras[name].heard_s)
        if now_s - self._cameras[oldest].heard_s < _IDLE_S:
            raise WireError(
                f"expected at most {MAX_CAMERAS} cameras, found another, {describe(name)}; ?camera=NAME chooses one, "
                f"?camera={ANY_CAMERA} takes all images for one camera's"
            )
        del self._cameras[oldest]

    def _reject(self, error: Exception) -> None:
        """Count a message or an image that cannot be used, and log why. `logging.limit` bounds the log."""
        counts = self.counts
        reason = str(error) or repr(error)
        with self._changed:  # both threads count
            counts.rejected += 1
            counts.last_error = reason
            counts.unread = reason
        _log.warning("%s: an image cannot be read: %s (%d so far)", self.name, reason, counts.rejected)

    def _explain_silence(self) -> str:
        """Say why no image has come for a while."""
        # images that were not wanted, that cannot be read, or that do not come
        if self._others and not self._cameras:
            names = ", ".join(describe(name) for name in list(self._others))
            return f"camera: {self.endpoint} sends no camera {self._chosen!r}: choose one of {names}, or ?camera=*"
        if self.counts.unread:
            return f"camera: no image of {self.endpoint} can be read: {self.counts.unread}"
        if self._settings.dialect == _HUB:
            return (
                f"camera: no image comes to {self.endpoint}: let imagezmq's ImageSender connect to it, in its default "
                "mode (REQ/REP)"
            )
        if self._receiver.connected:
            return f"camera: {self.endpoint} is connected and sends no new image"
        hint = _HUB_HINT if self._dialect == "imagezmq" else ""
        return (
            f"camera: no server publishes at {self.endpoint}: start it, or correct the address; it is connected as soon"
            f" as it is there{hint}"
        )


def exchange_red_blue(frame: Frame) -> Frame | Image:
    """Return the image with red and blue exchanged: raw pixels under another encoding, or decoded as BGR [h, w, 3].

    Raises WireError if it cannot be decoded.
    """
    if frame.encoding in _RAW_SWAPPED:
        return replace(frame, encoding=_RAW_SWAPPED[frame.encoding])  # type: ignore[arg-type]
    return np.ascontiguousarray(decode_image(frame)[:, :, ::-1])


@dataclass(frozen=True, slots=True)
class ServerImage:
    """An image of a server, with the server's name of the camera, and its stamp if it has one.

    `swapped` is True if this kind of server exchanges red and blue. Only sizes and structure are checked so far.
    """

    name: str
    frame: Frame
    stamp_s: float | None = None
    swapped: bool = False


class Contents(NamedTuple):
    """Images of a message, and the errors of its images that cannot be used."""

    images: list[ServerImage]
    rejected: list[WireError]


def read_message(dialect: Dialect, parts: Sequence[memoryview]) -> Contents:
    """Read a message of `dialect`. A map without images gives none.

    Raises WireError for anything else; it names the dialect that the bytes look like.
    """
    try:
        return _read(dialect, parts)
    except WireError as error:
        # the wrong dialect is the most likely mistake: name the right one
        other = detect_dialect(parts)
        if other is None:
            raise
        layout = "frames of a sam3-node camera"
        remedy = "the node reads this endpoint itself: name it in transport.frames"
        if other in _DIALECTS:
            layout = _DIALECTS[other].layout
            remedy = f"use --dialect {other}"
        raise WireError(f"expected {_DIALECTS[dialect].layout}, found {layout}; {remedy}") from error


def detect_dialect(parts: Sequence[memoryview]) -> str | None:
    """Return the dialect by which a message can be read, or "sam3-node"; None if there is none."""
    if parts and bytes(parts[0][:6]) in (b"frame/", b"masks/"):
        return "sam3-node"
    for dialect in _DIALECTS:
        with suppress(WireError):
            _read(dialect, parts)
            return dialect
    return None


def _read(dialect: str, parts: Sequence[memoryview]) -> Contents:
    form = _DIALECTS[dialect]
    if len(parts) not in form.part_counts:
        raise WireError(f"expected {form.layout}, found a message of {len(parts)} parts")
    return form.read(parts)


def _read_groot(parts: Sequence[memoryview]) -> Contents:
    data = parts[0]
    limits = Limits(data.nbytes, data.nbytes, MAX_ITEMS, MAX_ITEMS, depth=8)
    message = unpack(data, what="groot message", limits=limits)
    if isinstance(message, dict) and "images" not in message:
        message = _merge_cameras(message)
    return _read_maps(message, "groot")


def _merge_cameras(message: dict[Any, Any]) -> dict[Any, Any]:
    """Return one map of the maps in {camera: {"timestamps", "images"}}, which a server of a single camera sends."""
    inner = [value for value in message.values() if isinstance(value, dict) and "images" in value]
    if not inner:
        return message
    stamps: dict[Any, Any] = {}
    images: dict[Any, Any] = {}
    for part in inner:
        stamps |= _read_map(part, "timestamps", "groot")
        images |= _read_map(part, "images", "groot")
    return {"timestamps": stamps, "images": images}


def _read_lerobot(parts: Sequence[memoryview]) -> Contents:
    return _read_maps(_parse_json(parts[0], "lerobot message", parts[0].nbytes), "lerobot")


def _read_maps(message: object, dialect: Dialect) -> Contents:
    """Read the maps of images and stamps of GR00T and lerobot. An image that cannot be used costs no other."""
    if not isinstance(message, dict) or "images" not in message:
        raise WireError(f"expected {_DIALECTS[dialect].layout}, found {describe(message)} without 'images'")
    images = _read_map(message, "images", dialect)
    stamps = _read_map(message, "timestamps", dialect)
    if len(images) > MAX_IMAGES:
        raise WireError(f"{dialect} message: expected at most {MAX_IMAGES} images, found {len(images)}")
    contents = Contents([], [])
    for name, value in images.items():
        # depth comes with its colour image
        if not isinstance(name, str) or _is_depth(value) or _names_depth(name, images):
            continue
        try:
            image = _read_entry(name, value, stamps.get(name))
            contents.images.append(image)
            # colour stays if its depth is damaged
            depth = images.get(f"{name}{_DEPTH_SUFFIX}")
            if _is_depth(depth):
                contents.images[-1] = replace(image, frame=_add_depth(image.frame, depth))
        except WireError as error:
            contents.rejected.append(error)
    return contents


def _read_map(message: Mapping[Any, Any], key: str, dialect: str) -> Mapping[Any, Any]:
    value = message.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise WireError(
            f"{dialect} message: expected '{key}' to be a map of cameras, found {describe(value)}"
        )
    return value


def _read_entry(name: str, value: object, stamp: object) -> ServerImage:
    what = f"image of {describe(name)}"
    if isinstance(value, str):
        data = _decode_base64(value, what)
    elif isinstance(value, bytes):
        data = value
    else:
        raise WireError(f"{what}: expected a JPEG as base64 text or bytes, found {describe(value)}")
    frame = _read_compressed(data)
    stamp_s = None
    if type(stamp) in (int, float) and abs(stamp) < MAX_INT:  # type: ignore[arg-type]
        stamp_s = float(stamp)  # type: ignore[arg-type]
    # only base64 comes from an encoder that took RGB for BGR
    return ServerImage(name, frame, stamp_s, swapped=isinstance(value, str))


def _names_depth(name: str, images: Mapping[Any, Any]) -> bool:
    """Return True for depth that comes with its colour image. Older servers send a JPEG, whose 8 bits saturate."""
    return name.endswith(_DEPTH_SUFFIX) and name.removesuffix(_DEPTH_SUFFIX) in images


def _is_depth(value: object) -> bool:
    return isinstance(value, dict) and value.get("encoding") == _DEPTH_ENCODING


def _add_depth(frame: Frame, value: Any) -> Frame:
    """Return the frame with its depth in millimetres. GR00T's server aligns it to colour: both have one size then."""
    data = _decode_base64(value.get("data"), "depth image")
    size = compressed_size(data, "png")
    _check_size(*size)
    if not is_depth_png(data):
        raise WireError("depth image: expected a PNG of 16-bit grey, found another kind")
    is_aligned = size == (frame.width, frame.height)
    return replace(frame, depth=Depth(*size, "png16", _DEPTH_SCALE_M, is_aligned, data))


def _decode_base64(text: object, what: str) -> bytes:
    try:
        return binascii.a2b_base64(text, strict_mode=True)  # type: ignore[arg-type]
    except (ValueError, TypeError) as error:
        raise WireError(f"{what}: expected base64, found {describe(text)}: {error}") from error


def _read_imagezmq(parts: Sequence[memoryview]) -> Contents:
    header = _parse_json(parts[0], "imagezmq header", MAX_HEAD_BYTES)
    if not isinstance(header, dict) or "msg" not in header:
        raise WireError(f"imagezmq header: expected a map with 'msg', found {describe(header)}")
    # pixels have a type and a shape, a JPEG has none
    if header.get("dtype") is None:
        frame = _read_compressed(parts[1])
    else:
        frame = _read_array(parts[1], header.get("dtype"), header.get("shape"))
    name = header["msg"]
    if not isinstance(name, str):
        name = ""
    return Contents([ServerImage(name, frame)], [])


def _read_jpeg(parts: Sequence[memoryview]) -> Contents:
    topic = ""
    if len(parts) == 2:
        topic = bytes(parts[0][:MAX_TOPIC_BYTES]).decode(errors="replace").strip()
    return Contents([ServerImage(topic, _read_compressed(parts[-1]))], [])


def _read_array(data: memoryview, dtype: object, shape: object) -> Frame:
    """Return a raw image: uint8 [h, w], or [h, w, channels] with 1, 3 (BGR) or 4 (BGR and alpha) channels."""
    sides: list[int] = []
    if isinstance(shape, list) and all(type(side) is int for side in shape):
        sides = shape
    channels = sides[2] if len(sides) == 3 else 1
    if dtype != "uint8" or len(sides) not in (2, 3) or channels not in (1, 3, 4):
        raise WireError(
            f"imagezmq image: expected uint8 of shape [h, w], [h, w, 3] or [h, w, 4], found {describe(dtype)} of "
            f"{str(shape)[:60]}"
        )
    height, width = sides[:2]
    _check_size(width, height)
    if data.nbytes != width * height * channels:
        raise WireError(f"imagezmq image: expected {width * height * channels} bytes, found {data.nbytes}")
    # alpha has no place in a frame
    if channels == 4:
        pixels = np.frombuffer(data, np.uint8).reshape(height, width, 4)
        data = np.ascontiguousarray(pixels[:, :, :3]).data.cast("B")
    return Frame("", 0, 0, width, height, "mono8" if channels == 1 else "bgr8", data)


def _read_compressed(data: Buffer) -> Frame:
    encoding, width, height = identify_compressed(data)
    _check_size(width, height)
    return Frame("", 0, 0, width, height, encoding, data)


def _check_size(width: int, height: int) -> None:
    if not (1 <= width <= MAX_SIDE and 1 <= height <= MAX_SIDE) or width * height > MAX_FRAME_PIXELS:
        raise WireError(
            f"expected sides of 1 to {MAX_SIDE} and at most {MAX_FRAME_PIXELS} pixels, found {width} x {height}"
        )


def _parse_json(data: memoryview, what: str, max_bytes: int) -> Any:
    """Parse JSON of at most MAX_ITEMS items. They are counted first, because empty lists take 30 times their bytes."""
    if data.nbytes > max_bytes:
        raise WireError(f"{what}: expected at most {max_bytes} bytes, found {data.nbytes}")
    raw = bytes(data)
    if sum(map(raw.count, (b",", b"[", b"{"))) > MAX_ITEMS:
        raise WireError(f"{what}: expected at most {MAX_ITEMS} items, found more")
    try:
        return json.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        raise WireError(f"{what}: expected JSON, found {describe(raw[:40])}: {str(error)[:80]}") from error


class _Dialect(NamedTuple):
    """The messages of a protocol: what they are, how many parts they have, and the function that reads them."""

    layout: str
    part_counts: tuple[int, ...]
    read: Callable[[Sequence[memoryview]], Contents]


_DIALECTS = {
    "groot": _Dialect("a msgpack map of timestamps and images (GR00T's camera server)", (1,), _read_groot),
    "lerobot": _Dialect("JSON of timestamps and images (lerobot's ImageServer)", (1,), _read_lerobot),
    "imagezmq": _Dialect(
        "a JSON header with 'msg' and an image in a second part (imagezmq)", (2,), _read_imagezmq
    ),
    "jpeg": _Dialect("a JPEG or PNG, alone or after a topic (jpeg)", (1, 2), _read_jpeg),
}
