"""Encoding and decoding of colour and depth images. OpenCV is imported only for encodings that need it."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ..errors import WireError
from ..types import Buffer, ColourEncoding, Depth, DepthEncoding, DepthImage, Frame, Image
from . import zstd
from .codec import MAX_SIDE

CHANNELS = {"bgr8": 3, "rgb8": 3, "mono8": 1}
"""Bytes per pixel of each raw colour encoding."""


# best compression ratio of deflate: with a byte or more per pixel, even a blank image has at most this many pixels per
# byte of the file
_MAX_RATIO = 1032
_MAX_JPEG_SEGMENTS = 1024
_JPEG_SIZES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # the start-of-frame markers
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
    import cv2

    if encoding == "mono8":
        return _flatten(cv2.cvtColor(image, cv2.COLOR_BGR2GRAY))
    options = [cv2.IMWRITE_JPEG_QUALITY, quality] if encoding == "jpeg" else []
    return _compress(image, encoding, options)


def decode_image(frame: Frame) -> Image:
    """Decode the BGR image uint8 [height, width, 3] of a frame. For `bgr8` it is a read-only view.

    Raises WireError for invalid bytes.
    """
    what, encoding, shape = f"{frame.encoding} image", frame.encoding, (frame.height, frame.width)
    check_colour(frame.colour, encoding, frame.width, frame.height)
    if encoding == "bgr8":
        return _view_read_only(frame.colour, np.uint8, (*shape, 3))
    if encoding == "rgb8":
        return np.ascontiguousarray(_view_read_only(frame.colour, np.uint8, (*shape, 3))[:, :, ::-1])
    import cv2

    if encoding == "mono8":
        return cast(Image, cv2.cvtColor(_view_read_only(frame.colour, np.uint8, shape), cv2.COLOR_GRAY2BGR))
    _check_compressed(frame.colour, encoding, frame.width, frame.height, what)
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


def decode_depth(depth: Depth) -> DepthImage:
    """Decode a depth image to uint16 [height, width]. For `z16` it is a read-only view.

    Raises WireError for invalid bytes.
    """
    what, shape = f"{depth.encoding} depth", (depth.height, depth.width)
    check_depth(depth)
    if depth.encoding == "png16":
        import cv2

        _check_compressed(depth.data, "png", depth.width, depth.height, what)
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


def compressed_size(data: Buffer, encoding: str) -> tuple[int, int] | None:
    """Return the width and height that a complete `jpeg` or `png` declares, or None for other bytes."""
    return _read_png_size(data) if encoding == "png" else _read_jpeg_size(data)


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
    import cv2

    done, data = cv2.imencode(f".{extension}", image, options)
    if not done:
        raise WireError(f"cannot encode {image.dtype} {list(image.shape)} as {extension}")
    return _flatten(data)


def _decompress(data: Buffer, flags: int, shape: tuple[int, ...], dtype: str, what: str) -> npt.NDArray[Any]:
    import cv2

    try:
        image = cv2.imdecode(np.frombuffer(data, dtype=np.uint8), flags)
    except cv2.error as error:
        raise WireError(f"{what}: cannot be decoded: {error.err}") from error
    if image is None or image.shape != shape or image.dtype != dtype:
        actual = "bytes that cannot be decoded" if image is None else f"{image.dtype} {list(image.shape)}"
        raise WireError(f"{what}: expected {dtype} {list(shape)}, found {actual}")
    return cast(npt.NDArray[Any], image)


def _check_compressed(data: Buffer, kind: str, width: int, height: int, what: str) -> None:
    # check before decoding: the decoder allocates the declared size, and fills missing pixels with grey
    size = compressed_size(data, kind)
    if size is None:
        raise WireError(f"{what}: expected a complete {kind}, found other bytes")
    if size != (width, height):
        raise WireError(f"{what}: expected {width} x {height} pixels, found {size[0]} x {size[1]}")
    if memoryview(data).nbytes * _MAX_RATIO < width * height:
        raise WireError(f"{what}: expected the bytes of {width} x {height} pixels, found {len(data)}")


def _read_png_size(data: Buffer) -> tuple[int, int] | None:
    """Return the width and height that a complete PNG declares, or None for other bytes."""
    head = bytes(data[:24])
    if len(head) < 24 or not head.startswith(_PNG_START) or b"IEND" not in bytes(data[-64:]):
        return None
    return int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")


def _read_jpeg_size(data: Buffer) -> tuple[int, int] | None:
    """Return the width and height that a complete JPEG declares, or None for other bytes."""
    if bytes(data[:2]) != b"\xff\xd8" or b"\xff\xd9" not in bytes(data[-1024:]):
        return None
    position = 2
    for _ in range(_MAX_JPEG_SEGMENTS):
        segment = bytes(data[position : position + 9])
        if len(segment) < 9 or segment[0] != 0xFF:
            return None
        if segment[1] in _JPEG_SIZES:
            return int.from_bytes(segment[7:9], "big"), int.from_bytes(segment[5:7], "big")
        position += 2 + int.from_bytes(segment[2:4], "big")
    return None
