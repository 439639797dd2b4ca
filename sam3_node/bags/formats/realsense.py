"""Reads recordings of the RealSense SDK, without that SDK: `.db3` (since 2.58) and `.bag` (before).

The SDK names topics by its sensors: /device_0/sensor_1/Color_0/image/data. The reader renames them as the SDK's ROS
driver does: /device_0/color/image_raw and camera_info, /device_0/depth/..., /device_0/infra1/...
"""

import math
import re
import struct
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ...errors import BagError, require
from ...types import Depth, Intrinsics
from ..decompression import decompress
from ..messages.ros import RawMessage, deserialise
from ..messages.ros_images import MILLIMETRE, MessageError, make_lens, naming, read_payload, read_stamp
from ..samples import CameraInfo, Payload, Sample, Topic
from .rosbag import Rosbag1, Rosbag2Sqlite, Storage, StorageReader, is_rosbag1, is_sqlite

_IMAGE = re.compile(
    r"(/device_\d+)(/sensor_\d+)(/([A-Za-z]+)_(\d+))/image/data(/compressed|/compressedDepth)?"
)
_IMAGE_TYPES = ("/Image", "/CompressedImage")
# types of a calibration: in a .db3, in a .bag
_INFO_TYPES = ("/String", "/CameraInfo")
# the ROS driver's names of the SDK's streams
_NAMES = {"Color": "color", "Depth": "depth", "Infrared": "infra", "Fisheye": "fisheye"}
# ROS's names of the SDK's encodings
_ENCODINGS = {"YUYV": "yuyv", "UYVY": "uyvy", "Y8": "mono8", "Y16": "mono16", "16UC1": "mono16"}
# format of an image that the SDK packed by zstd: encoding, width, height, bytes of a row
_PACKED = re.compile(r"(\w+); zstd; (\d+)x(\d+) step=(\d+)")
# bytes of the largest image that is unpacked
_MAX_IMAGE = 1 << 30
# depth units in metres, at the end of an image in a .bag
_UNITS = struct.Struct("<f")
# nanoseconds of the SDK's unit of time
_MILLISECOND = 1e6
# ROS's names of the SDK's lens models; the SDK projects "Inverse" as it does "Modified": forward, as OpenCV does
_LENS_MODELS = {
    "None": "none",
    "Brown Conrady": "plumb_bob",
    "Modified Brown Conrady": "plumb_bob",
    "Inverse Brown Conrady": "plumb_bob",
    "Kannala Brandt4": "equidistant",
}


@dataclass(frozen=True, slots=True)
class _SensorStream:
    """One stream of a sensor: its topics in the file, and the name that the reader gives it."""

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


class RealSenseBag(StorageReader):
    """A recording of the RealSense SDK.

    Stamps are the SDK's frame timestamps, on the clock that the recording names: Unix time for its system and global
    clocks. Log times count from the start of the recording. Raises BagError for another file, and MissingExtraError
    without the extra `bags`.
    """

    def __init__(self, path: Path) -> None:
        require("rosbags.typesys", "bags")
        super().__init__(path, _storage(path))
        self._streams = _streams(self._storage)
        if not self._streams:
            self.close()
            raise BagError(
                f"expected a recording of the RealSense SDK at {path}, found one without its images"
            )
        self.topics = tuple(
            topic for stream in self._streams for topic in _topics(stream, self._storage.types)
        )

    @staticmethod
    def recognises(path: Path) -> bool:
        """Return True if this is a `.bag` or `.db3` with images on topics of the RealSense SDK."""
        if not path.is_file() or not (is_rosbag1(path) or is_sqlite(path)):
            return False
        try:
            with _storage(path) as storage:
                return bool(_streams(storage))
        except BagError:
            return False

    def _read(self, topics: Collection[str], begin_ns: int) -> Iterator[Sample]:
        self._good_topics = set()
        reading = _Reading(self._storage, self._streams, topics)
        for raw in self._storage.messages(reading.needed):
            yield from self._guard(reading.take(raw), raw.topic)
        for topic in tuple(reading.waiting):
            yield from self._guard(reading.without_metadata(topic), topic)
        self.report.add(self._storage.lost)


class _Reading:
    """One pass over a recording.

    An image in a .db3 waits for its metadata, which holds its stamp and its depth units.
    """

    def __init__(self, storage: Storage, streams: tuple[_SensorStream, ...], topics: Collection[str]) -> None:
        self._types = storage.types
        self._is_cdr = storage.is_cdr
        images = [stream for stream in streams if stream.image_name in topics]
        infos = [stream for stream in streams if stream.info_name in topics]
        self._images = {stream.image: stream for stream in images}
        self._metadata = {stream.metadata: stream for stream in images if self._is_cdr}
        self._infos = {stream.calibration: stream for stream in infos}
        self._units = {stream.units: MILLIMETRE for stream in images if stream.is_depth}
        self.waiting: dict[str, RawMessage] = {}
        self.needed = {*self._images, *self._metadata, *self._infos, *self._units}

    def take(self, raw: RawMessage) -> Iterator[Sample]:
        """Take a message. Yield the samples that it completes."""
        if raw.topic in self._units:
            self._units[raw.topic] = _number(self._text(raw)) or MILLIMETRE
        elif raw.topic in self._infos:
            yield from self._intrinsics(raw, self._infos[raw.topic])
        elif raw.topic in self._metadata:
            stream = self._metadata[raw.topic]
            image = self.waiting.get(stream.image)
            if image is not None and image.logged_ns == raw.logged_ns:
                del self.waiting[stream.image]
                yield self._image(image, stream, _fields(self._text(raw)))
        elif not self._is_cdr:
            # an image in a .bag holds its stamp and its units itself
            yield self._image(raw, self._images[raw.topic], {})
        else:
            # the next image of the stream ends the waiting of the previous one
            if raw.topic in self.waiting:
                yield from self.without_metadata(raw.topic)
            self.waiting[raw.topic] = raw

    def without_metadata(self, topic: str) -> Iterator[Sample]:
        """Yield the waiting image of this topic, whose metadata did not come."""
        yield self._image(self.waiting.pop(topic), self._images[topic], {})

    def _image(self, raw: RawMessage, stream: _SensorStream, metadata: dict[str, str]) -> Sample:
        type_name = self._types[raw.topic]
        message, units = _with_units(raw, type_name, self._is_cdr)
        units = units or _number(metadata.get("depth_units", ""))
        payload = _payload(message, type_name, stream)
        stamp = round(_number(metadata.get("timestamp", "")) * _MILLISECOND) or read_stamp(message)
        # units that an image names hold for those after it that name none
        if isinstance(payload, Depth):
            if units > 0:
                self._units[stream.units] = units
            payload = replace(payload, scale_m=self._units[stream.units])
        return Sample(stream.image_name, stamp, raw.logged_ns, payload)

    def _intrinsics(self, raw: RawMessage, stream: _SensorStream) -> Iterator[Sample]:
        message = deserialise(raw.data, self._types[raw.topic], self._is_cdr)
        lens = _read_lens(message)
        if lens is not None:
            yield Sample(stream.info_name, raw.logged_ns, raw.logged_ns, lens)

    def _text(self, raw: RawMessage) -> str:
        # an option is text in a .db3, and a float in a .bag
        return str(getattr(deserialise(raw.data, self._types[raw.topic], self._is_cdr), "data", ""))


def _storage(path: Path) -> Storage:
    return Rosbag1(path) if is_rosbag1(path) else Rosbag2Sqlite(path)


def _streams(storage: Storage) -> tuple[_SensorStream, ...]:
    streams = []
    for match in filter(None, map(_IMAGE.fullmatch, storage.types)):
        if not storage.types[match[0]].endswith(_IMAGE_TYPES):
            continue
        device, sensor, stream, kind, index, _ = match.groups()
        prefix = f"{device}{sensor}{stream}"

        # versions of the SDK name the calibration differently, and some recordings have none
        places = (f"{prefix}/camera_info", f"{prefix}/info/camera_info")
        calibration = next((name for name in places if storage.types.get(name, "").endswith(_INFO_TYPES)), "")

        name = _NAMES.get(kind, kind.lower())
        if index != "0":
            name += index
        units = f"{device}{sensor}/option/Depth_Units/value"
        streams.append(
            _SensorStream(match[0], f"{prefix}/image/metadata", calibration, units, f"{device}/{name}")
        )
    return tuple(streams)


def _topics(stream: _SensorStream, types: dict[str, str]) -> Iterator[Topic]:
    yield Topic(stream.image_name, types[stream.image], "depth" if stream.is_depth else "colour")
    if stream.calibration:
        yield Topic(stream.info_name, types[stream.calibration], "intrinsics")


def _with_units(raw: RawMessage, type_name: str, is_cdr: bool) -> tuple[Any, float]:
    """Return an image's message and its depth units in metres; 0 if the message has none."""
    try:
        return deserialise(raw.data, type_name, is_cdr), 0.0
    except MessageError:
        if is_cdr or len(raw.data) < _UNITS.size:
            raise
    # the SDK's Image ends with a field that ROS's Image lacks
    message = deserialise(raw.data[: -_UNITS.size], type_name, is_cdr)
    return message, round(float(_UNITS.unpack(raw.data[-_UNITS.size :])[0]), 9)


def _payload(message: Any, type_name: str, stream: _SensorStream) -> Payload:
    """Read an image, also in the SDK's own encodings, and packed by zstd as a `.db3` has what PNG cannot hold."""
    kind = type_name
    if type_name.endswith("CompressedImage"):
        packed = _PACKED.fullmatch(message.format)
        if packed is not None:
            message = _unpack(message.data, packed, stream)
            kind = "sensor_msgs/Image"
    if getattr(message, "encoding", "") == "MJPEG":
        message = SimpleNamespace(format="jpeg", data=message.data)
        kind = "sensor_msgs/CompressedImage"
    elif hasattr(message, "encoding") and not stream.is_depth:
        message.encoding = _ENCODINGS.get(message.encoding, message.encoding)
    payload = read_payload(message, kind, stream.image_name)
    assert payload is not None  # images always hold something
    return payload


def _unpack(data: Any, packed: re.Match[str], stream: _SensorStream) -> SimpleNamespace:
    width, height, step = map(int, packed.groups()[1:])
    with naming(stream.image):
        if step * height > _MAX_IMAGE:
            raise ValueError(f"expected an image, found {step * height} bytes declared")
        content = bytes(decompress(bytes(data), "zstd", step * height))
    return SimpleNamespace(
        width=width, height=height, step=step, encoding=packed[1], is_bigendian=0, data=content
    )


def _read_lens(message: Any) -> CameraInfo | None:
    """Return the lens in the text of a .db3, or in the CameraInfo of a .bag; None if it was never calibrated."""
    # a text of key=value; or a message of ROS, whose K is the matrix row by row
    if hasattr(message, "data"):
        fields = _fields(message.data)
        model = fields.get("model", "")
        width = _number(fields.get("width", ""))
        height = _number(fields.get("height", ""))
        matrix = [_number(fields.get(key, "")) for key in ("fx", "fy", "ppx", "ppy")]
        coeffs = [_number(value) for value in fields.get("coeffs", "").split(",")]
    else:
        model = message.distortion_model
        width = message.width
        height = message.height
        matrix = [float(message.K[place]) for place in (0, 4, 2, 5)]
        coeffs = list(map(float, message.D))
    size = (round(width), round(height))
    lens = make_intrinsics(size, matrix, model, coeffs)
    if lens is None:
        return None
    return CameraInfo(lens, size=size)


def _fields(text: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in text.split(";") if "=" in part)


def _number(text: str) -> float:
    """Return a finite number; 0 for other text."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0


def make_intrinsics(
    size: tuple[int, int], matrix: Sequence[float], model: str, coeffs: Sequence[float]
) -> Intrinsics | None:
    """Return the intrinsics of images of `size` (width, height) from the SDK's figures; `matrix` is fx, fy, cx, cy.

    Return None if all of `matrix` is 0. Raises MessageError for figures that are no lens, and for an unknown model.
    """
    if model not in _LENS_MODELS or min(size) <= 0:
        raise MessageError(
            f"expected a lens of {', '.join(_LENS_MODELS)}, found {model!r} of {size[0]} x {size[1]} pixels"
        )
    kept = {"None": 0, "Kannala Brandt4": 4}.get(model)
    with naming("a lens of the SDK"):
        return make_lens(matrix, _LENS_MODELS[model], tuple(coeffs[:kept]))
