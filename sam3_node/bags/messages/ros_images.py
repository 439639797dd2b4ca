"""Reads the content of deserialised messages of ROS 1, ROS 2 and Foxglove: images, video, calibration; ROS's joints.

Foxglove's messages differ from ROS's in a few names.
"""

import base64
import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...errors import BagError, WireError, require
from ...schema.fields import MAX_SIDE
from ...types import NANOSECONDS, Buffer, Depth, Intrinsics
from ...wire import decode_depth, encode_depth
from ...wire.images import CHANNELS, compressed_size, find_compression, is_depth_png
from ..decompression import decode_still_colour, decode_still_depth, max_pixels, recognise_still
from ..samples import (
    CameraInfo,
    Colour,
    Joints,
    Kind,
    MillimetreDepth,
    Payload,
    UnreadableTopicError,
    VideoPacket,
    WideColour,
)

MILLIMETRE = 0.001
"""Metres per depth unit in ROS (REP 118)."""

Bytes = npt.NDArray[np.uint8]

# messages with a packet of a video: of ffmpeg_image_transport_msgs, of foxglove
_PACKETS = ("FFMPEGPacket", "CompressedVideo")
_INFOS = ("CameraInfo", "CameraCalibration")
_KINDS = {
    "Image": "colour",
    "RawImage": "colour",
    "CompressedImage": "colour",
    **dict.fromkeys(_PACKETS, "colour"),
    **dict.fromkeys(_INFOS, "intrinsics"),
    "JointState": "joints",
}
_PACKAGES = ("sensor_msgs", "ffmpeg_image_transport_msgs", "foxglove", "foxglove_msgs")
# names of seconds and nanoseconds in ROS 2, ROS 1, protobuf and JSON
_STAMPS = (
    ("sec", "nanosec"),
    ("secs", "nsecs"),
    ("seconds", "nanos"),
    ("sec", "nsec"),
)
# ffmpeg's decoders, by a part of the names that encoders have
_CODECS = {
    "264": "h264",
    "265": "hevc",
    "hevc": "hevc",
    "avc": "h264",
    "av1": "libdav1d",
    "vp9": "vp9",
    "vp8": "vp8",
    "mpeg4": "mpeg4",
}
# lens models, by the names of ROS and Foxglove
_MODELS = {
    "": "none",
    "none": "none",
    "plumb_bob": "brown_conrady",
    "rational_polynomial": "brown_conrady",
    "thin_prism": "brown_conrady",
    "equidistant": "fisheye",
    "kannala_brandt": "fisheye",
    "fisheye": "fisheye",
}
# numbers of coefficients that OpenCV takes
_COUNTS = {"brown_conrady": (4, 5, 8, 12, 14), "fisheye": (4,)}
# numbers of a camera's matrix or lens above which it is refused
_MAX_NUMBERS = 64
# values of depth above which metres are taken for millimetres
_MAX_METRES = 100.0
# pixels of a depth image that show its unit
_SAMPLES = 4096
_DEPTH_WORD = re.compile(r"depth", re.IGNORECASE)
_COLOUR_WORD = re.compile(
    r"colou?r|rgb|infra|(?<![a-z])(ir|left|right|mono|grey|gray)(?![a-z])", re.IGNORECASE
)
# head of image_transport's compressedDepth: format, two depth parameters
_DEPTH_HEADER = struct.Struct("<iff")
# width and height
_RVL_SIZE = struct.Struct("<II")
# nibbles of one number of RVL, which has 32 bits
_MAX_NIBBLES = 11
# bits by which the nibbles of a word are shifted, the first nibble first
_SHIFTS = np.arange(28, -1, -4, dtype=np.uint32)


class _PixelLayout(NamedTuple):
    """How an encoding of raw images stores a pixel.

    `kind` is the numpy type of a channel. `form` is OpenCV's code of the conversion to BGR, or the colour encoding that
    the pixels have already.
    """

    kind: str
    channels: int
    form: str


# encodings with rows of brightness and, below them, half as many rows of colour
_PLANAR = ("nv12", "nv21")
_DEPTH = {"16UC1": "u2", "32FC1": "f4"}
_ENCODINGS = {
    "rgb8": _PixelLayout("u1", 3, "rgb8"),
    "bgr8": _PixelLayout("u1", 3, "bgr8"),
    "8UC3": _PixelLayout("u1", 3, "bgr8"),
    "mono8": _PixelLayout("u1", 1, "mono8"),
    "8UC1": _PixelLayout("u1", 1, "mono8"),
    "mono16": _PixelLayout("u2", 1, "mono8"),
    "bgra8": _PixelLayout("u1", 4, "BGRA2BGR"),
    "8UC4": _PixelLayout("u1", 4, "BGRA2BGR"),
    "rgba8": _PixelLayout("u1", 4, "RGBA2BGR"),
    "rgb16": _PixelLayout("u2", 3, "RGB2BGR"),
    "bgr16": _PixelLayout("u2", 3, "bgr8"),
    "rgba16": _PixelLayout("u2", 4, "RGBA2BGR"),
    "bgra16": _PixelLayout("u2", 4, "BGRA2BGR"),
    "nv12": _PixelLayout("u1", 1, "YUV2BGR_NV12"),
    "nv21": _PixelLayout("u1", 1, "YUV2BGR_NV21"),
    "uyvy": _PixelLayout("u1", 2, "YUV2BGR_UYVY"),
    "yuv422": _PixelLayout("u1", 2, "YUV2BGR_UYVY"),
    "yuyv": _PixelLayout("u1", 2, "YUV2BGR_YUY2"),
    "yuv422_yuy2": _PixelLayout("u1", 2, "YUV2BGR_YUY2"),
    "bayer_rggb8": _PixelLayout("u1", 1, "BayerRGGB2BGR"),
    "bayer_rggb16": _PixelLayout("u2", 1, "BayerRGGB2BGR"),
    "bayer_bggr8": _PixelLayout("u1", 1, "BayerBGGR2BGR"),
    "bayer_bggr16": _PixelLayout("u2", 1, "BayerBGGR2BGR"),
    "bayer_gbrg8": _PixelLayout("u1", 1, "BayerGBRG2BGR"),
    "bayer_gbrg16": _PixelLayout("u2", 1, "BayerGBRG2BGR"),
    "bayer_grbg8": _PixelLayout("u1", 1, "BayerGRBG2BGR"),
    "bayer_grbg16": _PixelLayout("u2", 1, "BayerGRBG2BGR"),
}


class MessageError(BagError):
    """One message is damaged. Its neighbours may be whole."""


@contextmanager
def naming(place: str) -> Iterator[None]:
    """Turn an error of decoding into a MessageError that begins with `place`, a topic or a file."""
    try:
        yield
    except (ValueError, WireError) as error:
        raise MessageError(f"{place}: {error}") from error


def read_colour(data: Buffer, place: str) -> Colour:
    """Return JPEG and PNG as they are, other still images as bgr8. Raises MessageError for anything else."""
    with naming(place):
        if recognise_still(data) is not None:
            return decode_still_colour(data)
        return Colour.from_compressed(data)


def read_depth(data: Buffer, place: str, scale_m: float, aligned: bool) -> Depth:
    """Return an image of 16-bit grey as depth in units of `scale_m` metres: a PNG as it is, others as z16.

    Raises MessageError for a damaged one, and for other images.
    """
    with naming(f"{place}: expected a PNG or TIFF of 16-bit grey"):
        if not is_depth_png(data):
            return decode_still_depth(data, scale_m, aligned)
        return Depth(*compressed_size(data, "png"), "png16", scale_m, aligned, data)


def find_kind(type_name: str, topic: str) -> Kind:
    """Return the kind of content of a type. An image is depth if the last significant word of the topic says so.

    `type_name` is sensor_msgs/Image (ROS 1), sensor_msgs/msg/Image (ROS 2) or foxglove.RawImage, for example.
    """
    parts = re.split(r"[./]", type_name)
    if parts[0] not in _PACKAGES:
        return "other"
    kind = _KINDS.get(parts[-1], "other")
    if kind == "colour" and parts[-1] not in _PACKETS and _names_depth(topic):
        return "depth"
    return kind  # type: ignore[return-value]


def read_stamp(message: Any) -> int:
    """Return the header's stamp, or Foxglove's timestamp, in ns; 0 if there is none."""
    stamp = getattr(getattr(message, "header", None), "stamp", getattr(message, "timestamp", None))
    if isinstance(stamp, Mapping):
        stamp = SimpleNamespace(**stamp)
    for seconds, rest in _STAMPS:
        if hasattr(stamp, seconds) and hasattr(stamp, rest):
            return max(0, int(getattr(stamp, seconds)) * NANOSECONDS + int(getattr(stamp, rest)))
    return 0


def read_payload(message: Any, type_name: str, topic: str) -> Payload | None:
    """Return the content of a deserialised message; None for the CameraInfo of a camera that was never calibrated.

    Depth is uint16 in millimetres, whichever encoding it had. Floats that cannot be metres are a MillimetreDepth. Depth
    counts as aligned to the colour if the topic contains `aligned` or `registered`. Raises MessageError for a damaged
    message, BagError for an unknown encoding.
    """
    # ROS's and Foxglove's messages of a kind have the same fields
    readers: dict[str, Callable[[Any, str], Payload | None]] = {
        "Image": _raw,
        "RawImage": _raw,
        "CompressedImage": _compressed,
        "FFMPEGPacket": _packet,
        "CompressedVideo": _packet,
        "CameraInfo": _camera_info,
        "CameraCalibration": _camera_info,
        "JointState": _joints,
    }
    read = readers.get(re.split(r"[./]", type_name)[-1])
    if read is None:
        raise UnreadableTopicError(topic, f"expected a type of {', '.join(readers)}, found {type_name}")
    with naming(topic):
        return read(message, topic)


def _joints(message: Any, topic: str) -> Joints | None:
    """Return the positions that are known; None for a message without any, such as one of velocities."""
    positions = {}
    for name, value in zip(message.name, message.position, strict=False):
        position = float(value)
        if math.isfinite(position):
            positions[name] = position
    if not positions:
        return None
    return Joints(positions)


def _packet(message: Any, topic: str) -> VideoPacket:
    """Return the packet of a message whose `encoding` names an encoder and formats: libx264, hevc_nvenc;nv12;bgr8."""
    encoding = str(getattr(message, "encoding", "") or message.format)
    codec = _find_codec(encoding)
    if codec is not None:
        number = getattr(message, "pts", None)
        return VideoPacket(codec, _flat(_bytes(message.data)), None if number is None else int(number))
    raise UnreadableTopicError(topic, f"expected a codec of {', '.join(_CODECS)}, found {encoding!r:.80}")


def _find_codec(encoder: str) -> str | None:
    """Return ffmpeg's decoder for the name of an encoder or format; None for other names."""
    name = encoder.lower().split(";")[0]
    for word, codec in _CODECS.items():
        if word in name:
            return codec
    return None


def _names_depth(topic: str) -> bool:
    """Return True if the last part of the topic that names depth or colour names depth."""
    # /camera/color/image_raw/compressedDepth is colour's topic with a transport for depth
    for segment in reversed(topic.split("/")):
        if _DEPTH_WORD.search(segment):
            return True
        if _COLOUR_WORD.search(segment):
            return False
    return False


def _is_aligned(topic: str) -> bool:
    return "aligned" in topic or "registered" in topic


def _camera_info(message: Any, topic: str) -> CameraInfo | None:
    """Return the calibration of a camera; None for one that was never calibrated."""
    projection = _projection(_numbers(message, "p"), topic)
    lens = None
    try:
        lens = _lens(message)
    except ValueError as error:
        if not isinstance(projection, Intrinsics):
            raise
        # rectified images do without the lens
        return _with_size(message, CameraInfo(f"{topic}: {error}", projection))
    if lens is None and projection is None:
        return None
    return _with_size(message, CameraInfo(lens, projection))


def _with_size(message: Any, info: CameraInfo) -> CameraInfo:
    roi = getattr(message, "roi", None)
    x, y, width, height = (int(getattr(roi, side, 0)) for side in ("x_offset", "y_offset", "width", "height"))
    return replace(
        info,
        size=(int(getattr(message, "width", 0)), int(getattr(message, "height", 0))),
        binning=(int(getattr(message, "binning_x", 0)) or 1, int(getattr(message, "binning_y", 0)) or 1),
        roi=(x, y, width, height),
    )


def _numbers(message: Any, name: str) -> list[float]:
    """Return a matrix or the coefficients. ROS 1 has K, D and P where ROS 2 has k, d and p."""
    values: Any = getattr(message, name, None)
    if not hasattr(message, name):
        values = getattr(message, name.upper(), ())
    if len(values) > _MAX_NUMBERS:
        raise ValueError(f"expected a lens, found {name.upper()} of {len(values)} numbers")
    return [float(value) for value in values]


def _projection(matrix: list[float], topic: str) -> Intrinsics | str | None:
    """Return the pinhole of rectified images in P; None if P is not set: all 0, or with 1 as focal lengths."""
    if not any(matrix[:3] + matrix[4:7]) or matrix[:7] == [1, 0, 0, 0, 0, 1, 0]:
        return None
    if len(matrix) != 12 or not all(map(math.isfinite, matrix)) or min(matrix[0], matrix[5]) <= 0:
        return f"{topic}: expected P of 12 numbers with positive focal lengths, found {matrix}"
    return Intrinsics(matrix[0], matrix[5], matrix[2], matrix[6])


def _lens(message: Any) -> Intrinsics | None:
    matrix = _numbers(message, "k")
    coeffs = tuple(_numbers(message, "d"))
    if not matrix:
        return None
    if len(matrix) != 9:
        raise ValueError(f"expected a camera matrix of 9 numbers, found {matrix}")
    return make_lens([matrix[place] for place in (0, 4, 2, 5)], message.distortion_model, coeffs)


def make_lens(matrix: Sequence[float], name: str, coeffs: tuple[float, ...]) -> Intrinsics | None:
    """Return the lens of `matrix` (fx, fy, cx, cy) with ROS's name of its model; None if all of `matrix` is 0.

    Raises ValueError for figures that are no lens, and for an unknown model.
    """
    fx, fy, cx, cy = matrix
    if not any(matrix):
        return None
    if not all(map(math.isfinite, (*matrix, *coeffs))) or min(fx, fy) <= 0:
        raise ValueError(f"expected a lens with positive focal lengths, found {list(matrix)}, {list(coeffs)}")
    # without distortion the model does not matter, even if its name is unknown
    model: str | None = _MODELS.get(name) if any(coeffs) else "none"
    if model is None:
        raise ValueError(f"expected a distortion model of {', '.join(filter(None, _MODELS))}, found {name!r}")
    if model == "none":
        return Intrinsics(fx, fy, cx, cy)
    if len(coeffs) not in _COUNTS[model]:
        expected = ", ".join(map(str, _COUNTS[model]))
        raise ValueError(f"expected {expected} coefficients for {model}, found {len(coeffs)}")
    return Intrinsics(fx, fy, cx, cy, model, coeffs)  # type: ignore[arg-type]


def _raw(message: Any, topic: str) -> Colour | Depth:
    width = int(message.width)
    height = int(message.height)
    encoding = str(message.encoding)
    if not (1 <= width <= MAX_SIDE and 1 <= height <= MAX_SIDE):
        raise ValueError(f"expected sides of 1 to {MAX_SIDE} pixels, found {width} x {height}")
    if encoding in _DEPTH or (encoding == "mono16" and _names_depth(topic)):
        return _make_depth(_pixels(message, _DEPTH.get(encoding, "u2"), 1, height)[:, :, 0], topic)
    if encoding not in _ENCODINGS:
        expected = ", ".join((*_ENCODINGS, *_DEPTH))
        raise UnreadableTopicError(topic, f"expected an encoding of {expected}, found {encoding!r:.80}")
    if encoding in _PLANAR and (width % 2 or height % 2):
        raise ValueError(f"expected even sides, found {width} x {height}")
    layout = _ENCODINGS[encoding]
    rows = height * 3 // 2 if encoding in _PLANAR else height
    image = _pixels(message, layout.kind, layout.channels, rows)

    form = layout.form
    if form not in CHANNELS:
        image = _cvt(image, form)
        form = "bgr8"
    kind = Colour if layout.kind == "u1" else WideColour
    return kind(width, height, form, _flat(image))  # type: ignore[arg-type]


def _cvt(image: npt.NDArray[Any], code: str) -> npt.NDArray[Any]:
    cv2 = require("cv2", "cli")
    try:
        return np.asarray(cv2.cvtColor(image, getattr(cv2, f"COLOR_{code}")), image.dtype)
    except cv2.error as error:
        raise ValueError(f"an image of {list(image.shape)} cannot be converted ({code})") from error


def _pixels(message: Any, kind: str, channels: int, height: int) -> npt.NDArray[Any]:
    """Return the pixels [height, width, channels] of an Image, without row padding, in this machine's byte order."""
    order = ">" if getattr(message, "is_bigendian", False) else "<"
    dtype = np.dtype(order + kind)
    width = int(message.width)
    data = _bytes(message.data)

    # the last row may lack its padding
    row = width * channels * dtype.itemsize
    step = int(message.step) or row
    if step < row or data.size < step * (height - 1) + row:
        raise ValueError(
            f"expected {width} x {height} {message.encoding} in rows of {row} bytes or more, found "
            f"rows of {step} and {data.size} bytes in all"
        )
    lines = np.lib.stride_tricks.as_strided(data, (height, row), (step, 1), writeable=False)
    pixels = np.ascontiguousarray(lines).view(dtype).reshape(height, width, channels)
    return pixels.astype(dtype.newbyteorder("="), copy=False)


def _make_depth(image: npt.NDArray[Any], topic: str) -> Depth:
    """Return the depth of an image [height, width] of uint16 in mm, or of float in m.

    Floats whose values can only be millimetres become a MillimetreDepth.
    """
    if image.dtype == np.uint16:
        return encode_depth(image, "z16", MILLIMETRE, _is_aligned(topic))
    if not _has_millimetres(image):
        return encode_depth(to_millimetres(image), "z16", MILLIMETRE, _is_aligned(topic))
    millimetres = to_millimetres(image * np.float32(MILLIMETRE))
    depth = encode_depth(millimetres, "z16", MILLIMETRE, _is_aligned(topic))
    return MillimetreDepth(
        depth.width, depth.height, depth.encoding, depth.scale_m, depth.aligned, depth.data
    )


def _has_millimetres(image: npt.NDArray[np.float32]) -> bool:
    """Return True if hardly any value is below 100. No depth camera measures 100 m, and each measures above 100 mm."""
    step = math.isqrt(image.size // _SAMPLES) + 1
    sample = image[::step, ::step]
    sample = sample[np.isfinite(sample) & (sample > 0)]
    return bool(sample.size and np.quantile(sample, 0.02) > _MAX_METRES)


def to_millimetres(metres: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return uint16 mm; a value that is not finite, not positive or over 65.535 m becomes 0, which is unknown."""
    millimetres = metres / np.float32(MILLIMETRE)
    with np.errstate(invalid="ignore"):
        is_valid = (millimetres > 0) & (millimetres < np.iinfo(np.uint16).max + 0.5)
    return np.rint(np.where(is_valid, millimetres, 0)).astype(np.uint16)


def _compressed(message: Any, topic: str) -> Colour | Depth | VideoPacket:
    # the bytes tell the kind of image; the format and the topic tell depth from colour
    data = _flat(_bytes(message.data))
    format_ = str(message.format)
    if "compressedDepth" in format_ or topic.endswith("/compressedDepth"):
        return _compressed_depth(data, format_, topic)
    is_depth = "16UC1" in format_ or _names_depth(topic)
    if is_depth and (recognise_still(data) is not None or is_depth_png(data)):
        return read_depth(data, topic, MILLIMETRE, _is_aligned(topic))
    # video encoders also write this type
    if recognise_still(data) is None and find_compression(data) is None:
        codec = _find_codec(format_)
        if codec is None:
            raise ValueError(
                f"expected a jpeg, png, webp, avif, tiff, bmp or a video format such as h264, found "
                f"{bytes(data[:4])!r}... ({format_!r:.80})"
            )
        if is_depth:
            raise UnreadableTopicError(
                topic, f"expected depth as 16-bit images, found video of {format_!r:.80}"
            )
        return VideoPacket(codec, data)
    return read_colour(data, topic)


def _compressed_depth(data: memoryview, format_: str, topic: str) -> Depth:
    """Read an image of compressed_depth_image_transport: a PNG or RVL behind a head."""
    image = data[_DEPTH_HEADER.size :]
    # floats were stored as quantised inverse depth
    is_inverse = format_.startswith("32FC1")
    if "rvl" in format_.lower():
        quantised = decode_rvl(image)
    elif not is_depth_png(image):
        raise ValueError(
            f"expected a PNG of 16-bit grey behind {_DEPTH_HEADER.size} bytes, found {format_!r} of {len(data)} bytes"
        )
    else:
        depth = read_depth(image, topic, MILLIMETRE, _is_aligned(topic))
        if not is_inverse:
            return depth
        quantised = decode_depth(depth)
    if is_inverse:
        return _make_depth(_from_inverse(quantised, data), topic)
    return _make_depth(quantised, topic)


def _from_inverse(quantised: npt.NDArray[np.uint16], header: Buffer) -> npt.NDArray[np.float32]:
    """Return metres from the quantised inverse depth q of compressed_depth_image_transport: z = a / (q - b)."""
    _, a, b = _DEPTH_HEADER.unpack_from(header)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(quantised > 0, np.float32(a) / (quantised - np.float32(b)), np.float32(0))


def _bytes(data: Any) -> Bytes:
    # JSON holds bytes as text
    if isinstance(data, str):
        data = base64.b64decode(data)
    if not len(data):
        return np.empty(0, np.uint8)
    return np.frombuffer(data, np.uint8)


def _flat(image: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(image).data.cast("B")


def decode_rvl(data: Buffer) -> npt.NDArray[np.uint16]:
    """Return the image [height, width] of width, height and RVL data. Raises ValueError for other data.

    Source: Wilson, "Fast Lossless Depth Image Compression", ISS 2017. The data are 32-bit words of eight nibbles, the
    first nibble highest. A nibble holds three bits of a number, the lowest first, and a flag that more follow. The
    numbers are a count of zeros, a count of depths, then for each depth its difference from the one before in zigzag
    order; and so on.
    """
    if memoryview(data).nbytes < _RVL_SIZE.size:
        raise ValueError("expected RVL, found fewer bytes than its size has")
    width, height = _RVL_SIZE.unpack_from(data)
    limit = max_pixels(memoryview(data).nbytes)
    if not 0 < width * height <= limit:
        raise ValueError(f"expected 1 to {limit} pixels of RVL, found {width} x {height}")
    numbers = _read_rvl_numbers(data)

    # collect the runs: where depths lie, and their differences
    place = 0
    filled = 0
    is_depth = np.zeros(width * height, np.bool_)
    differences: list[npt.NDArray[np.int64]] = []
    while filled < width * height:
        if place + 2 > len(numbers):
            raise ValueError(f"expected {width} x {height} pixels of RVL, found {filled}")
        zeros = int(numbers[place])
        count = int(numbers[place + 1])
        begin = place + 2
        place = begin + count
        if zeros + count == 0 or filled + zeros + count > width * height or place > len(numbers):
            raise ValueError(f"expected {width} x {height} pixels of RVL, found a run of {zeros} and {count}")
        is_depth[filled + zeros : filled + zeros + count] = True
        differences.append(numbers[begin:place])
        filled += zeros + count

    # undo zigzag and differences of all depths at once
    image = np.zeros(width * height, np.uint16)
    zigzag = np.concatenate(differences)
    image[is_depth] = np.cumsum((zigzag >> 1) ^ -(zigzag & 1))  # modulo 2^16, as the source does
    return image.reshape(height, width)


def _read_rvl_numbers(data: Buffer) -> npt.NDArray[np.int64]:
    """Return all numbers behind the size. The zeros that fill the last word also count as numbers."""
    view = memoryview(data)[_RVL_SIZE.size :]
    words = np.frombuffer(view[: view.nbytes // 4 * 4], "<u4")
    nibbles = ((words[:, None] >> _SHIFTS) & 15).ravel().astype(np.int64)

    # a nibble without the flag ends a number
    ends = np.flatnonzero(nibbles < 8)
    too_long = "expected numbers of 32 bits in RVL, found longer ones"
    if len(ends) == 0:
        raise ValueError(too_long)
    starts = np.concatenate(([0], ends[:-1] + 1))
    lengths = ends - starts + 1
    if lengths.max() > _MAX_NIBBLES:
        raise ValueError(too_long)

    # add the three bits of each nibble, shifted by its place in the number
    nibbles = nibbles[: ends[-1] + 1]
    positions = np.arange(len(nibbles)) - np.repeat(starts, lengths)
    return np.add.reduceat((nibbles & 7) << 3 * positions, starts)
