"""Decoding of single WebP, AVIF, TIFF and BMP images. JPEG and PNG stay encoded, as frames hold them.

ffmpeg's decoders refuse an image of too many pixels by its own header, before they allocate memory for it. The limit
grows with the file, so that some kilobytes cannot fill the memory.
"""

from __future__ import annotations

import io
import re
import struct
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import require
from ..types import Buffer, Depth
from ..wire import encode_depth
from ..wire.codec import MAX_SIDE
from .decompression import max_pixels
from .samples import Colour

SUFFIXES = (".webp", ".avif", ".tiff", ".tif", ".bmp")

MIN_PIXELS = 1920 * 1200
"""Pixels that an image may have, whatever its size in bytes."""

_MAX_RATIO = 1024  # pixels for each byte of a small image

_BEGINS = {
    "webp": re.compile(rb"RIFF.{4}WEBP", re.DOTALL),
    "avif": re.compile(rb".{4}ftyp(avif|mif1)", re.DOTALL),
    "tiff": re.compile(rb"II\*\0|MM\0\*"),
    "bmp": re.compile(rb"BM.{4}\0\0\0\0", re.DOTALL),
}
_HEAD = 12  # bytes
_TAG_TYPES, _MAX_TAGS = {3: "H", 4: "I"}, 1 << 14
_WIDTH, _HEIGHT, _STRIPS, _STRIP_BYTES = 256, 257, 273, 279
_FLOAT_TIFF = {258: 32, 259: 1, 277: 1, 339: 3}  # bits, compression, channels, kind of number


def recognise(data: Buffer) -> str | None:
    """Return `webp`, `avif`, `tiff` or `bmp` by the first bytes, None for others."""
    head = bytes(data[:_HEAD])
    return next((name for name, begin in _BEGINS.items() if begin.match(head)), None)


def decode_still(data: Buffer) -> npt.NDArray[Any]:
    """Return a grey image of 16 bits as uint16 [height, width], any other as BGR uint8 [height, width, 3].

    Turns that the file asks for are not made, as with JPEG. Raises ValueError for damaged data, for an animation and
    for more pixels than the limit; MissingExtraError without the extra `bags`.
    """
    av = require("av", "bags")
    name = recognise(data)
    size = memoryview(data).nbytes
    limit = max(MIN_PIXELS, min(_MAX_RATIO * size, max_pixels(size)))
    if name is None:
        raise ValueError(f"expected {', '.join(_BEGINS)}, found {bytes(data[:4])!r}")
    try:
        frame = (_decode_avif if name == "avif" else _decode_packet)(av, name, bytes(data), str(limit))
    except (av.error.FFmpegError, EOFError, OSError, ValueError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"expected a {name} image of at most {limit} pixels, found one that cannot be decoded ({reason})"
        ) from error
    if frame is None or max(frame.width, frame.height) > MAX_SIDE or frame.width * frame.height > limit:
        raise ValueError(
            f"expected a {name} image of at most {limit} pixels and {MAX_SIDE} on a side, found another one"
        )
    is_deep_grey = frame.format.name in ("gray16le", "gray16be")
    image = frame.to_ndarray(format="gray16le" if is_deep_grey else "bgr24")
    return np.ascontiguousarray(image)


def _decode_packet(av: Any, name: str, data: bytes, limit: str) -> Any:
    """Return the frame of a file that is one packet of its codec; None if there is none."""
    context = av.CodecContext.create(name, "r")
    context.thread_count = 1
    context.options = {"max_pixels": limit}
    return next(iter(context.decode(av.Packet(data))), None)


def _decode_avif(av: Any, name: str, data: bytes, limit: str) -> Any:
    """Return the first image of an AVIF file; None if there is none."""
    file, options = io.BytesIO(data), {"max_pixels": limit}
    with av.open(file, format="mov", options=options, metadata_errors="replace") as container:
        stream = next(iter(container.streams.video), None)
        if stream is None or stream.codec_context is None:  # None: an unknown codec
            return None
        stream.codec_context.thread_count = 1
        stream.codec_context.options = options
        return next(container.decode(stream), None)


def read_tags(data: Buffer) -> dict[int, tuple[int, ...]]:
    """Return the whole numbers of the first directory of a TIFF, or of EXIF, by their tags; as far as it is whole."""
    order, tags = "<" if bytes(data[:2]) == b"II" else ">", dict[int, tuple[int, ...]]()
    with suppress(struct.error):
        (place,) = struct.unpack_from(f"{order}I", data, 4)
        (count,) = struct.unpack_from(f"{order}H", data, place)
        for at in range(place + 2, place + 2 + 12 * min(count, _MAX_TAGS), 12):
            tag, kind, number = struct.unpack_from(f"{order}HHI", data, at)
            if kind not in _TAG_TYPES or number > _MAX_TAGS:
                continue
            values = struct.Struct(f"{order}{number}{_TAG_TYPES[kind]}")
            begin = at + 8 if values.size <= 4 else struct.unpack_from(f"{order}I", data, at + 8)[0]
            tags[tag] = values.unpack_from(data, begin)
    return tags


def decode_float_tiff(data: Buffer) -> npt.NDArray[np.float32] | None:
    """Return a TIFF of 32-bit floats that is not compressed, [height, width]; None for any other image.

    ffmpeg has no decoder for these. Raises ValueError for a damaged one.
    """
    tags = read_tags(data) if recognise(data) == "tiff" else {}
    if any(tags.get(tag) != (value,) for tag, value in _FLOAT_TIFF.items()):
        return None
    (width,), (height,) = tags.get(_WIDTH, (0,)), tags.get(_HEIGHT, (0,))
    strips = zip(tags.get(_STRIPS, ()), tags.get(_STRIP_BYTES, ()), strict=False)
    pixels = b"".join(bytes(data[begin : begin + count]) for begin, count in strips)
    if not (1 <= width <= MAX_SIDE and 1 <= height <= MAX_SIDE) or len(pixels) != 4 * width * height:
        raise ValueError(f"expected {width} x {height} floats, found {len(pixels)} bytes")
    order = "<" if bytes(data[:2]) == b"II" else ">"
    return np.frombuffer(pixels, f"{order}f4").reshape(height, width).astype(np.float32)


def decode_colour(data: Buffer) -> Colour:
    """Return an image in bgr8, of deep grey the high byte. Raises as `decode_still` does."""
    image = decode_still(data)
    if image.ndim == 2:
        image = np.repeat((image >> 8).astype(np.uint8)[:, :, None], 3, axis=2)
    return Colour(image.shape[1], image.shape[0], "bgr8", image.data.cast("B"))


def decode_depth(data: Buffer, scale_m: float, aligned: bool) -> Depth:
    """Return depth in units of `scale_m` metres of an image of 16-bit grey.

    Raises as `decode_still` does, and ValueError for other images.
    """
    image = decode_still(data)
    if image.ndim != 2:
        raise ValueError("expected an image of 16-bit grey, found one of 8 bits or of colours")
    return encode_depth(image, "z16", scale_m, aligned)
