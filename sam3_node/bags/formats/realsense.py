"""Lenses as RealSense's SDK describes them, as this package's intrinsics.

Recordings of RealSense's SDK, read without it: `.db3` (since 2.58) and `.bag` (before).

The SDK names topics by its sensors: /device_0/sensor_1/Color_0/image/data. They are given here as its ROS driver
names them: /device_0/color/image_raw and camera_info, /device_0/depth/..., /device_0/infra1/..."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import zstandard

from ...errors import BagError, require
from ...types import Closeable, Depth, Intrinsics
from ..messages.ros import RawMessage, Storage, deserialise
from ..messages.ros_images import MILLIMETRE, MessageError, payload_of, stamp_of
from ..samples import Colour, Losses, Sample, Topic
from . import rosbag1, rosbag2_sqlite
from .rosbag1 import Rosbag1
from .rosbag2_sqlite import Rosbag2Sqlite

# what the SDK calls inverse it projects by as it does by the modified: forward, as OpenCV
_KNOWN = ("None", "Brown Conrady", "Modified Brown Conrady", "Inverse Brown Conrady", "Kannala Brandt4")


def lens_of(
    size: tuple[int, int], matrix: Sequence[float], model: str, coeffs: Sequence[float]
) -> Intrinsics | None:
    """Intrinsics of images of `size` (width, height); `matrix` is fx, fy, cx, cy. None where all of these are 0.

    MessageError for figures that are no lens, and for a model that is not known.
    """
    fx, fy, cx, cy = matrix
    if not any(matrix):
        return None
    if not all(map(math.isfinite, (*matrix, *coeffs))) or min(fx, fy, *size) <= 0 or len(coeffs) != 5:
        raise MessageError(
            f"expected a lens of {size[0]} x {size[1]} pixels, found {list(matrix)}, {list(coeffs)}"
        )
    if model not in _KNOWN:
        raise MessageError(f"expected a lens of {', '.join(_KNOWN)}, found {model!r}")
    if model == "None" or not any(coeffs):
        return Intrinsics(fx, fy, cx, cy)
    if model == "Kannala Brandt4":
        return Intrinsics(fx, fy, cx, cy, "fisheye", tuple(coeffs[:4]))
    return Intrinsics(fx, fy, cx, cy, "brown_conrady", tuple(coeffs))


_IMAGE = re.compile(
    r"(/device_\d+)(/sensor_\d+)(/([A-Za-z]+)_(\d+))/image/data(/compressed|/compressedDepth)?"
)
_IMAGE_TYPES = ("/Image", "/CompressedImage")
_INFO_TYPES = ("/String", "/CameraInfo")  # in a .db3, in a .bag
_NAMES = {"Color": "color", "Depth": "depth", "Infrared": "infra", "Fisheye": "fisheye"}
_ENCODINGS = {"YUYV": "yuyv", "UYVY": "uyvy", "Y8": "mono8", "Y16": "mono16", "16UC1": "mono16"}
_PACKED = re.compile(r"(\w+); zstd; (\d+)x(\d+) step=(\d+)")
_MAX_IMAGE = 1 << 30
_UNITS = struct.Struct("<f")
_MILLISECOND = 1e6


@dataclass(frozen=True, slots=True)
class _Stream:
    """One stream of a sensor: the topics of the file that it is in, and the names that it is given by."""

    image: str
    metadata: str
    calibration: str
    units: str
    name: str

    @property
    def is_depth(self) -> bool:
        return self.name.endswith("/depth")

    @property
    def image_name(self) -> str:
        return f"{self.name}/image_raw"

    @property
    def info_name(self) -> str:
        return f"{self.name}/camera_info"


class RealSenseBag(Closeable):
    """A recording of RealSense's SDK: a SampleReader.

    Stamps are the SDK's frame timestamps, on the clock that the recording names: Unix time for its system and global
    clocks. Log times count from the start of the recording. Raises BagError for what is no such recording, and
    MissingExtraError without the extra `bags`.
    """

    def __init__(self, path: Path) -> None:
        require("rosbags.typesys", "bags")
        self.path = path
        self._storage = _storage(path)
        self._losses = Losses()
        self._known: set[str] = set()  # topics that gave something
        self._streams = _streams(self._storage)
        if not self._streams:
            self.close()
            raise BagError(f"expected a recording of RealSense's SDK at {path}, found one without its images")
        self.topics = tuple(
            topic for stream in self._streams for topic in _topics(stream, self._storage.types)
        )

    @staticmethod
    def recognises(path: Path) -> bool:
        """Whether this is a `.bag` or `.db3` whose images are on topics of RealSense's SDK."""
        if not path.is_file() or not (rosbag1.is_rosbag1(path) or rosbag2_sqlite.is_sqlite(path)):
            return False
        try:
            with _storage(path) as storage:
                return bool(_streams(storage))
        except BagError:
            return False

    @property
    def lost(self) -> str | None:
        """After `samples` has ended: what could not be read and why, None where all was."""
        losses = Losses()
        losses.add(self._storage.lost)
        losses.add(self._losses.text())
        return losses.text()

    def samples(self, topics: Collection[str]) -> Iterator[Sample]:
        """The messages on these topics in the order of the recording. Raises BagError for an unknown encoding."""
        self._losses, self._known = Losses(), set()
        reading = _Reading(self._storage, self._streams, topics)
        for raw in self._storage.messages(reading.needed):
            yield from self._told(reading.take(raw), raw.topic)
        for topic in tuple(reading.waiting):
            yield from self._told(reading.without_metadata(topic), topic)

    def _told(self, samples: Iterator[Sample], place: str) -> Iterator[Sample]:
        try:
            for sample in samples:
                self._known.add(place)
                yield sample
        except BagError as error:
            # an encoding that comes amid known ones is damage
            if not isinstance(error, MessageError) and place not in self._known:
                raise
            self._losses.skip(place, error)

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        self._storage.close()


class _Reading:
    """One pass over a recording: an image waits for its metadata, which has its stamp and its depth units."""

    def __init__(self, storage: Storage, streams: tuple[_Stream, ...], topics: Collection[str]) -> None:
        self._types, self._is_cdr = storage.types, storage.is_cdr
        images = [stream for stream in streams if stream.image_name in topics]
        infos = [stream for stream in streams if stream.info_name in topics]
        self._images = {stream.image: stream for stream in images}
        self._metadata = {stream.metadata: stream for stream in images if self._is_cdr}
        self._infos = {stream.calibration: stream for stream in infos}
        self._units = {stream.units: MILLIMETRE for stream in images if stream.is_depth}
        self.waiting: dict[str, RawMessage] = {}
        self.needed = {*self._images, *self._metadata, *self._infos, *self._units}

    def take(self, raw: RawMessage) -> Iterator[Sample]:
        """What is complete with this message."""
        if raw.topic in self._units:
            self._units[raw.topic] = _number(self._text(raw)) or MILLIMETRE
        elif raw.topic in self._infos:
            yield from self._intrinsics(raw, self._infos[raw.topic])
        elif raw.topic in self._metadata:
            yield from self._with_metadata(raw, self._metadata[raw.topic])
        elif not self._is_cdr:
            yield self._image(raw, self._images[raw.topic], {})
        else:
            if raw.topic in self.waiting:
                yield from self.without_metadata(raw.topic)
            self.waiting[raw.topic] = raw

    def _with_metadata(self, raw: RawMessage, stream: _Stream) -> Iterator[Sample]:
        image = self.waiting.get(stream.image)
        if image is not None and image.logged_ns == raw.logged_ns:
            del self.waiting[stream.image]
            yield self._image(image, stream, _fields(self._text(raw)))

    def without_metadata(self, topic: str) -> Iterator[Sample]:
        """The image that waits on this topic, whose metadata did not come."""
        yield self._image(self.waiting.pop(topic), self._images[topic], {})

    def _image(self, raw: RawMessage, stream: _Stream, metadata: dict[str, str]) -> Sample:
        type_name = self._types[raw.topic]
        message, units = _with_units(raw, type_name, self._is_cdr)
        units = units or _number(metadata.get("depth_units", ""))
        payload = _payload(message, type_name, stream)
        stamp = round(_number(metadata.get("timestamp", "")) * _MILLISECOND) or stamp_of(message)
        if isinstance(payload, Depth):
            if units > 0:
                self._units[stream.units] = units
            payload = replace(payload, scale_m=self._units[stream.units])
        return Sample(stream.image_name, stamp, raw.logged_ns, payload)

    def _intrinsics(self, raw: RawMessage, stream: _Stream) -> Iterator[Sample]:
        message = deserialise(raw.data, self._types[raw.topic], self._is_cdr)
        lens = _lens_of_text(message.data) if hasattr(message, "data") else _lens_of_info(message)
        if lens is not None:
            yield Sample(stream.info_name, raw.logged_ns, raw.logged_ns, lens)

    def _text(self, raw: RawMessage) -> str:
        # an option is text in a .db3, and a float in a .bag
        return str(getattr(deserialise(raw.data, self._types[raw.topic], self._is_cdr), "data", ""))


def _storage(path: Path) -> Rosbag1 | Rosbag2Sqlite:
    return Rosbag1(path) if rosbag1.is_rosbag1(path) else Rosbag2Sqlite(path)


def _streams(storage: Storage) -> tuple[_Stream, ...]:
    found = []
    for match in filter(None, map(_IMAGE.fullmatch, storage.types)):
        if not storage.types[match[0]].endswith(_IMAGE_TYPES):
            continue
        device, sensor, stream, kind, index, _ = match.groups()
        prefix = f"{device}{sensor}{stream}"
        places = (f"{prefix}/camera_info", f"{prefix}/info/camera_info")
        calibration = next((name for name in places if storage.types.get(name, "").endswith(_INFO_TYPES)), "")
        name = _NAMES.get(kind, kind.lower()) + (index if index != "0" else "")
        units = f"{device}{sensor}/option/Depth_Units/value"
        found.append(_Stream(match[0], f"{prefix}/image/metadata", calibration, units, f"{device}/{name}"))
    return tuple(found)


def _topics(stream: _Stream, types: dict[str, str]) -> Iterator[Topic]:
    yield Topic(stream.image_name, types[stream.image], "depth" if stream.is_depth else "colour")
    if stream.calibration:
        yield Topic(stream.info_name, types[stream.calibration], "intrinsics")


def _with_units(raw: RawMessage, type_name: str, is_cdr: bool) -> tuple[Any, float]:
    """An image's message and its depth units in metres, 0 where it does not tell."""
    try:
        return deserialise(raw.data, type_name, is_cdr), 0.0
    except MessageError:
        if is_cdr or len(raw.data) < _UNITS.size:
            raise
    # the SDK's Image has one field more than ROS's
    message = deserialise(raw.data[: -_UNITS.size], type_name, is_cdr)
    return message, round(float(_UNITS.unpack(raw.data[-_UNITS.size :])[0]), 9)


def _payload(message: Any, type_name: str, stream: _Stream) -> Colour | Depth | Intrinsics:
    """Images in the SDK's own encodings, too, and packed as its `.db3` has those that PNG cannot hold."""
    if type_name.endswith("CompressedImage"):
        packed = _PACKED.fullmatch(message.format)
        if packed is None:
            return _known(payload_of(message, type_name, stream.image_name))
        message = _unpacked(message.data, packed, stream)
    if message.encoding == "MJPEG":
        jpeg = SimpleNamespace(format="jpeg", data=message.data)
        return _known(payload_of(jpeg, "sensor_msgs/CompressedImage", stream.image_name))
    if not stream.is_depth:
        message.encoding = _ENCODINGS.get(message.encoding, message.encoding)
    return _known(payload_of(message, "sensor_msgs/Image", stream.image_name))


def _known(payload: Colour | Depth | Intrinsics | None) -> Colour | Depth | Intrinsics:
    assert payload is not None  # images always hold something
    return payload


def _unpacked(data: Any, packed: re.Match[str], stream: _Stream) -> SimpleNamespace:
    width, height, step = map(int, packed.groups()[1:])
    try:
        if step * height > _MAX_IMAGE:
            raise MessageError(f"{stream.image}: expected an image, found {step * height} bytes declared")
        content = zstandard.ZstdDecompressor().decompress(bytes(data), max_output_size=step * height)
    except zstandard.ZstdError as error:
        raise MessageError(f"{stream.image}: an image cannot be decompressed ({error})") from error
    return SimpleNamespace(
        width=width, height=height, step=step, encoding=packed[1], is_bigendian=0, data=content
    )


def _lens_of_text(text: str) -> Intrinsics | None:
    fields = _fields(text)
    size = (round(_number(fields.get("width", ""))), round(_number(fields.get("height", ""))))
    matrix = [_number(fields.get(key, "")) for key in ("fx", "fy", "ppx", "ppy")]
    coeffs = [_number(value) for value in fields.get("coeffs", "").split(",")]
    return lens_of(size, matrix, fields.get("model", ""), coeffs)


def _lens_of_info(message: Any) -> Intrinsics | None:
    matrix = [float(message.K[place]) for place in (0, 4, 2, 5)]
    return lens_of(
        (message.width, message.height), matrix, message.distortion_model, list(map(float, message.D))
    )


def _fields(text: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in text.split(";") if "=" in part)


def _number(text: str) -> float:
    """0 for what is no number."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0
