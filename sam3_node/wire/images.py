"""Encoding and decoding of colour and depth images. OpenCV is imported only for encodings that need it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, cast

from ..errors import WireError, require
from ..types import Buffer, ColourEncoding, Depth, DepthEncoding, DepthImage, Frame, Image
from . import zstd
from .codec import MAX_SIDE
from .image_headers import ImageHeader, check_png_pixels, read_jpeg_header, read_png_header

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
else:
    from ..types import lazy_numpy as np

CHANNELS = {"bgr8": 3, "rgb8": 3, "mono8": 1}
"""Bytes per pixel of each raw colour encoding."""


MAX_FRAME_PIXELS = 8192 * 8192
"""Default for the maximum number of pixels of an image that is decoded."""
MAX_DEPTH_PIXELS = 1 << 25
"""Maximum number of pixels of a compressed depth image that is decoded for viewers."""

_MAX_SAMPLES = 3  # work of decoding, for each pixel that is allowed: that of a plain image of 8 bits
# pixels for each byte: an even grey has 171 with the best tables, a bit for each block and table of 16 x 16 pixels;
# the decoder of a progressive JPEG holds all its coefficients in memory
_MAX_JPEG_RATIO = 256
_PNG_START = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"
_PNG_GREY16 = b"\x10\x00"


def encode_image(image: Image, encoding: ColourEncoding, quality: int = 90) -> Buffer:
    """Encode a BGR image uint8 [height, width, 3]. `bgr8` gives a view, not a copy. `quality` applies to jpeg."""
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise WireError(f"image: expected uint8 [height, width, 3], found {image.dtype} {list(image.shape)}")
    _check_sides(image.shape[1], image.shape[0], "image")
    if encoding == "bgr8":
        return _flatten(image)
    if encoding == "rgb8":
        return _flatten(image[:, :, ::-1])
    cv2 = require("cv2", "cli")

    if encoding == "mono8":
        return _flatten(cv2.cvtColor(image, cv2.COLOR_BGR2GRAY))
    options = [cv2.IMWRITE_JPEG_QUALITY, quality] if encoding == "jpeg" else []
    return _compress(image, encoding, options)


def decode_image(frame: Frame, max_pixels: int = MAX_FRAME_PIXELS) -> Image:
    """Decode the BGR image uint8 [height, width, 3] of a frame. For `bgr8` it is a read-only view.

    Raises WireError for invalid bytes, for more than `max_pixels`, and for a compressed image that takes more work than
    a plain one of `max_pixels`.
    """
    what, encoding, shape = f"{frame.encoding} image", frame.encoding, (frame.height, frame.width)
    check_colour(frame.colour, encoding, frame.width, frame.height)
    _check_pixels(frame.width, frame.height, max_pixels, what)
    if encoding == "bgr8":
        return _view_read_only(frame.colour, np.uint8, (*shape, 3))
    if encoding == "rgb8":
        return np.ascontiguousarray(_view_read_only(frame.colour, np.uint8, (*shape, 3))[:, :, ::-1])
    cv2 = require("cv2", "cli")

    if encoding == "mono8":
        return cast(Image, cv2.cvtColor(_view_read_only(frame.colour, np.uint8, shape), cv2.COLOR_GRAY2BGR))
    _check_compressed(frame.colour, encoding, frame.width, frame.height, max_pixels, what)
    return _decompress(
        frame.colour, cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION, (*shape, 3), "uint8", what
    )


def check_colour(colour: Buffer, encoding: ColourEncoding, width: int, height: int) -> None:
    """Raise WireError unless `colour` has the size of the raw `encoding`, or is not empty if compressed."""
    _check_sides(width, height, "colour")
    size = memoryview(colour).nbytes
    channels = CHANNELS.get(encoding)
    if channels is None and size == 0:
        raise WireError(f"colour: expected a {encoding} image, found no bytes")
    if channels is not None and size != width * height * channels:
        raise WireError(
            f"colour: expected {width * height * channels} bytes ({width} x {height} {encoding}), "
            f"found {size}"
        )


def encode_depth(image: DepthImage, encoding: DepthEncoding, scale_m: float, aligned: bool) -> Depth:
    """Encode depth uint16 [height, width] in units of `scale_m` metres. `z16` gives a view, not a copy."""
    if image.dtype != np.uint16 or image.ndim != 2:
        raise WireError(f"depth: expected uint16 [height, width], found {image.dtype} {list(image.shape)}")
    height, width = image.shape
    _check_sides(width, height, "depth")
    if encoding == "png16":
        data: Buffer = _compress(image, "png", [])
    else:
        raw = _flatten(image.astype("<u2", copy=False))
        data = zstd.compress(raw) if encoding == "z16+zstd" else raw
    return Depth(width, height, encoding, scale_m, aligned, data)


def decode_depth(depth: Depth, max_pixels: int = MAX_FRAME_PIXELS) -> DepthImage:
    """Decode a depth image to uint16 [height, width]. For `z16` it is a read-only view.

    Raises WireError as `decode_image` does.
    """
    what, shape = f"{depth.encoding} depth", (depth.height, depth.width)
    check_depth(depth)
    _check_pixels(depth.width, depth.height, max_pixels, what)
    if depth.encoding == "png16":
        cv2 = require("cv2", "cli")

        _check_compressed(depth.data, "png", depth.width, depth.height, max_pixels, what)
        if not is_depth_png(depth.data):
            raise WireError(f"{what}: expected a PNG of 16-bit grey, found another kind")
        return _decompress(depth.data, cv2.IMREAD_UNCHANGED, shape, "uint16", what)
    size = depth.width * depth.height * 2
    raw = zstd.decompress(depth.data, size, what) if depth.encoding == "z16+zstd" else depth.data
    return _view_read_only(raw, np.dtype("<u2"), shape)


def check_depth(depth: Depth) -> None:
    """Raise WireError unless `data` has the size of `z16`, or is not empty if compressed."""
    _check_sides(depth.width, depth.height, "depth")
    size, expected = memoryview(depth.data).nbytes, depth.width * depth.height * 2
    if size == 0 or (depth.encoding == "z16" and size != expected):
        raise WireError(
            f"depth: expected {depth.width} x {depth.height} {depth.encoding} ({expected} bytes raw), "
            f"found {size} bytes"
        )


def compressed_size(data: Buffer, encoding: str) -> tuple[int, int]:
    """Return the width and height that a complete `jpeg` or `png` declares. Raises WireError for other bytes."""
    header = _read_header(data, encoding, encoding)
    _check_sides(header.width, header.height, encoding)
    return header.width, header.height


def find_compression(data: Buffer) -> Literal["jpeg", "png"] | None:
    """Return what the bytes start like; None for neither."""
    head = bytes(data[:4])
    return "png" if head == _PNG_START[:4] else "jpeg" if head[:2] == b"\xff\xd8" else None


def identify_compressed(data: Buffer) -> tuple[Literal["jpeg", "png"], int, int]:
    """Return encoding, width and height of a complete JPEG or PNG. Raises WireError for other bytes."""
    encoding = find_compression(data)
    if encoding is None:
        raise WireError(f"expected a JPEG or PNG, found {bytes(data[:4])!r}")
    return encoding, *compressed_size(data, encoding)


def is_depth_png(data: Buffer) -> bool:
    """Return True if the bytes start like a PNG of 16-bit grey."""
    return bytes(data[: len(_PNG_START)]) == _PNG_START and bytes(data[24:26]) == _PNG_GREY16


def _check_sides(width: int, height: int, what: str) -> None:
    if not (1 <= width <= MAX_SIDE and 1 <= height <= MAX_SIDE):
        raise WireError(f"{what}: expected sides of 1 to {MAX_SIDE} pixels, found {width} x {height}")


def _flatten(image: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(image).data.cast("B")


def _view_read_only(data: Buffer, dtype: Any, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    return np.frombuffer(memoryview(data).toreadonly(), dtype=dtype).reshape(shape)


def _compress(image: npt.NDArray[Any], extension: str, options: list[int]) -> memoryview:
    cv2 = require("cv2", "cli")

    done, data = cv2.imencode(f".{extension}", image, options)
    if not done:
        raise WireError(f"cannot encode {image.dtype} {list(image.shape)} as {extension}")
    return _flatten(data)


def _decompress(data: Buffer, flags: int, shape: tuple[int, ...], dtype: str, what: str) -> npt.NDArray[Any]:
    cv2 = require("cv2", "cli")

    try:
        image = cv2.imdecode(np.frombuffer(data, dtype=np.uint8), flags)
    except cv2.error as error:
        raise WireError(f"{what}: cannot be decoded: {error.err}") from error
    if image is None or image.shape != shape or image.dtype != dtype:
        actual = "bytes that cannot be decoded" if image is None else f"{image.dtype} {list(image.shape)}"
        raise WireError(f"{what}: expected {dtype} {list(shape)}, found {actual}")
    return cast("npt.NDArray[Any]", image)


def _check_pixels(width: int, height: int, max_pixels: int, what: str) -> None:
    if width * height > max_pixels:
        raise WireError(
            f"{what}: expected at most {max_pixels} pixels, found {width} x {height}; send smaller images, or raise "
            "tracker.max_frame_pixels"
        )


def _check_compressed(data: Buffer, kind: str, width: int, height: int, max_pixels: int, what: str) -> None:
    # check before decoding: the decoder allocates the declared size, and fills missing pixels with grey
    header = _read_header(data, kind, what)
    if header[:2] != (width, height):
        raise WireError(f"{what}: expected {width} x {height} pixels, found {header.width} x {header.height}")
    if header.samples > max_pixels * _MAX_SAMPLES:
        raise WireError(
            f"{what}: expected one that decodes like {max_pixels} plain pixels, found more work: {width} x {height} "
            "pixels with many scans, interlaced or of 16 bits; send a plain jpeg or png, or raise "
            "tracker.max_frame_pixels"
        )
    if kind == "png":
        check_png_pixels(data, what)


def _read_header(data: Buffer, kind: str, what: str) -> ImageHeader:
    if kind == "png":
        return read_png_header(data, what)
    header = read_jpeg_header(data, what)
    size = memoryview(data).nbytes
    if size * _MAX_JPEG_RATIO < header.width * header.height:
        raise WireError(
            f"{what}: expected the bytes of {header.width} x {header.height} pixels, found {size}"
        )
    return header
