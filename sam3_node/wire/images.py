"""Pixels to bytes and back, for colour and depth. OpenCV is imported only where an encoding needs it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import WireError
from ..types import Buffer, ColourEncoding, Depth, DepthEncoding, Frame
from . import zstd
from .codec import MAX_SIDE

CHANNELS = {"bgr8": 3, "rgb8": 3, "mono8": 1}
"""Bytes of a pixel in each raw colour encoding."""

Image = npt.NDArray[np.uint8]
DepthImage = npt.NDArray[np.uint16]

# deflate's best: at a byte or more per pixel not even a blank image has more pixels per byte of file
_MAX_RATIO = 1032
_MAX_JPEG_SEGMENTS = 1024
_JPEG_SIZES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # the start-of-frame markers
_PNG_START = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"
_PNG_GREY16 = b"\x10\x00"


def encode_image(image: Image, encoding: ColourEncoding, quality: int = 90) -> Buffer:
    """Encode BGR uint8 [height, width, 3]; `bgr8` is a view of it, not a copy. `quality` is that of jpeg."""
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise WireError(f"image: expected uint8 [height, width, 3], found {image.dtype} {list(image.shape)}")
    _check_sides(image.shape[1], image.shape[0], "image")
    if encoding == "bgr8":
        return _flat(image)
    if encoding == "rgb8":
        return _flat(image[:, :, ::-1])
    import cv2

    if encoding == "mono8":
        return _flat(cv2.cvtColor(image, cv2.COLOR_BGR2GRAY))
    options = [cv2.IMWRITE_JPEG_QUALITY, quality] if encoding == "jpeg" else []
    return _compressed(image, encoding, options)


def decode_image(frame: Frame) -> Image:
    """The BGR uint8 [height, width, 3] of a frame; of `bgr8` a read-only view. WireError for wrong bytes."""
    what, encoding, shape = f"{frame.encoding} image", frame.encoding, (frame.height, frame.width)
    check_colour(frame.colour, encoding, frame.width, frame.height)
    if encoding == "bgr8":
        return _read_only(frame.colour, np.uint8, (*shape, 3))
    if encoding == "rgb8":
        return np.ascontiguousarray(_read_only(frame.colour, np.uint8, (*shape, 3))[:, :, ::-1])
    import cv2

    if encoding == "mono8":
        return cv2.cvtColor(_read_only(frame.colour, np.uint8, shape), cv2.COLOR_GRAY2BGR)
    _check_compressed(frame.colour, encoding, frame.width, frame.height, what)
    return _decompressed(
        frame.colour, cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION, (*shape, 3), "uint8", what
    )


def check_colour(colour: Buffer, encoding: ColourEncoding, width: int, height: int) -> None:
    """WireError unless `colour` has the bytes that a raw `encoding` needs, or any if it is compressed."""
    _check_sides(width, height, "colour")
    found = memoryview(colour).nbytes
    channels = CHANNELS.get(encoding)
    if channels is None and found == 0:
        raise WireError(f"colour: expected a {encoding} image, found no bytes")
    if channels is not None and found != width * height * channels:
        raise WireError(
            f"colour: expected {width * height * channels} bytes ({width} x {height} {encoding}), "
            f"found {found}"
        )


def encode_depth(image: DepthImage, encoding: DepthEncoding, scale_m: float, aligned: bool) -> Depth:
    """Encode uint16 [height, width] in units of `scale_m` metres; `z16` is a view of it, not a copy."""
    if image.dtype != np.uint16 or image.ndim != 2:
        raise WireError(f"depth: expected uint16 [height, width], found {image.dtype} {list(image.shape)}")
    height, width = image.shape
    _check_sides(width, height, "depth")
    if encoding == "png16":
        data: Buffer = _compressed(image, "png", [])
    else:
        raw = _flat(image.astype("<u2", copy=False))
        data = zstd.compress(raw) if encoding == "z16+zstd" else raw
    return Depth(width, height, encoding, scale_m, aligned, data)


def decode_depth(depth: Depth) -> DepthImage:
    """The uint16 [height, width] of an encoded depth image; of `z16` a read-only view."""
    what, shape = f"{depth.encoding} depth", (depth.height, depth.width)
    check_depth(depth)
    if depth.encoding == "png16":
        import cv2

        _check_compressed(depth.data, "png", depth.width, depth.height, what)
        if not is_depth_png(depth.data):
            raise WireError(f"{what}: expected a PNG of 16-bit grey, found another kind")
        return _decompressed(depth.data, cv2.IMREAD_UNCHANGED, shape, "uint16", what)
    size = depth.width * depth.height * 2
    raw = zstd.decompress(depth.data, size, what) if depth.encoding == "z16+zstd" else depth.data
    return _read_only(raw, np.dtype("<u2"), shape)


def check_depth(depth: Depth) -> None:
    """WireError unless `data` has the number of bytes that `z16` needs, or any where it is compressed."""
    _check_sides(depth.width, depth.height, "depth")
    found, expected = memoryview(depth.data).nbytes, depth.width * depth.height * 2
    if found == 0 or (depth.encoding == "z16" and found != expected):
        raise WireError(
            f"depth: expected {depth.width} x {depth.height} {depth.encoding} ({expected} bytes raw), "
            f"found {found} bytes"
        )


def compressed_size(data: Buffer, encoding: str) -> tuple[int, int] | None:
    """Width and height that a complete `jpeg` or `png` declares, None where it is not one."""
    return _png_size(data) if encoding == "png" else _jpeg_size(data)


def is_depth_png(data: Buffer) -> bool:
    """Whether these bytes begin as a PNG of 16-bit grey does."""
    return bytes(data[: len(_PNG_START)]) == _PNG_START and bytes(data[24:26]) == _PNG_GREY16


def _check_sides(width: int, height: int, what: str) -> None:
    if not (1 <= width <= MAX_SIDE and 1 <= height <= MAX_SIDE):
        raise WireError(f"{what}: expected sides of 1 to {MAX_SIDE} pixels, found {width} x {height}")


def _flat(image: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(image).data.cast("B")


def _read_only(data: Buffer, dtype: Any, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    return np.frombuffer(memoryview(data).toreadonly(), dtype=dtype).reshape(shape)


def _compressed(image: npt.NDArray[Any], extension: str, options: list[int]) -> memoryview:
    import cv2

    done, data = cv2.imencode(f".{extension}", image, options)
    if not done:
        raise WireError(f"cannot encode {image.dtype} {list(image.shape)} as {extension}")
    return _flat(data)


def _decompressed(
    data: Buffer, flags: int, shape: tuple[int, ...], dtype: str, what: str
) -> npt.NDArray[Any]:
    import cv2

    try:
        image = cv2.imdecode(np.frombuffer(data, dtype=np.uint8), flags)
    except cv2.error as error:
        raise WireError(f"{what}: cannot be decoded: {error.err}") from error
    if image is None or image.shape != shape or image.dtype != dtype:
        found = "bytes that cannot be decoded" if image is None else f"{image.dtype} {list(image.shape)}"
        raise WireError(f"{what}: expected {dtype} {list(shape)}, found {found}")
    return image


def _check_compressed(data: Buffer, kind: str, width: int, height: int, what: str) -> None:
    # before the decoder sees it: it allocates what the image declares, and fills what is missing with grey
    found = compressed_size(data, kind)
    if found is None:
        raise WireError(f"{what}: expected a complete {kind}, found bytes that are not")
    if found != (width, height):
        raise WireError(f"{what}: expected {width} x {height} pixels, found {found[0]} x {found[1]}")
    if memoryview(data).nbytes * _MAX_RATIO < width * height:
        raise WireError(f"{what}: expected the bytes of {width} x {height} pixels, found {len(data)}")


def _png_size(data: Buffer) -> tuple[int, int] | None:
    """Width and height that a complete PNG declares, None where it is not one."""
    head = bytes(data[:24])
    if len(head) < 24 or not head.startswith(_PNG_START) or b"IEND" not in bytes(data[-64:]):
        return None
    return int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big")


def _jpeg_size(data: Buffer) -> tuple[int, int] | None:
    """Width and height that a complete JPEG declares, None where it is not one."""
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
