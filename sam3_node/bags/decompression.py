"""Decompresses chunks, files and single images within limits: some kilobytes can expand to gigabytes.

A size that a file declares is never allocated, and never exceeded. JPEG and PNG stay encoded, as frames hold them;
WebP, AVIF, TIFF and BMP are decoded by ffmpeg, which refuses too many pixels by the header, before it allocates memory.
"""

import bz2
import io
import re
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import zstandard

from ..errors import require
from ..types import Buffer, Depth
from ..wire import encode_depth
from ..wire.codec import MAX_SIDE
from ..wire.images import MAX_FRAME_PIXELS
from .samples import Colour

_PIECE = 1 << 20
_READ = 1 << 10  # of a packed file at once: zstd may expand it to 32 MiB
_MIB = 1 << 20
_MAX_WINDOW = 1 << 27
_MIN_CONTENT = 32 * _MIB  # a raw image of 11 million pixels
_MIN_FILE = 64 * _MIB
_MAX_FILE_RATIO = 1000
_MIN_RECORDS = 10_000
_BYTES_PER_RECORD = 8
_SPARE_BYTES = 1 << 30  # of a disk, when a file has been decompressed

STILL_SUFFIXES = (".webp", ".avif", ".tiff", ".tif", ".bmp")
MIN_STILL_PIXELS = 1920 * 1200
"""Pixels that a single image may have, whatever its size in bytes."""

_MAX_STILL_RATIO = 1024  # pixels for each byte of a small image
_STILL_BEGINS = {
    "webp": re.compile(rb"RIFF.{4}WEBP", re.DOTALL),
    "avif": re.compile(rb".{4}ftyp(avif|mif1)", re.DOTALL),
    "tiff": re.compile(rb"II\*\0|MM\0\*"),
    "bmp": re.compile(rb"BM.{4}\0\0\0\0", re.DOTALL),
}
_STILL_HEAD = 12  # bytes
_TAG_TYPES = {3: "H", 4: "I"}
_MAX_TAGS = 1 << 14
_WIDTH = 256
_HEIGHT = 257
_STRIPS = 273
_STRIP_BYTES = 279
_FLOAT_TIFF = {258: 32, 259: 1, 277: 1, 339: 3}  # bits, compression, channels, kind of number


class DecompressionError(ValueError):
    """Data that cannot be decompressed, or expands to more than is allowed."""


def max_content(compressed_bytes: int) -> int:
    """Return the most bytes that a chunk or message may expand to: 32 MiB, or 16 times its size up to 1 GiB."""
    return min(1 << 30, max(_MIN_CONTENT, 16 * compressed_bytes))


def max_file_content(file_bytes: int) -> int:
    """Return the most bytes that a file may expand to: 64 MiB, or 1000 times its size."""
    return max(_MIN_FILE, _MAX_FILE_RATIO * file_bytes)


def max_pixels(encoded_bytes: int) -> int:
    """Return the most pixels of a picture in this many bytes: 3840 x 2160, or 128 a byte up to 8192 x 8192."""
    return min(MAX_FRAME_PIXELS, max(1 << 23, 128 * encoded_bytes))


def max_video_pixels(encoded_bytes: int) -> int:
    """Return the most pixels of all pictures of a video: 2^31, or 32768 a byte, more than where nothing moves."""
    return max(1 << 31, 32768 * encoded_bytes)


class Expansion:
    """Limits what all chunks of a file expand to in one pass: to `max_file_content`, and to a number of records.

    A record takes 8 bytes of the file at least, however well the chunks are compressed; 10000 records are allowed to
    any file. Both methods raise DecompressionError beyond the limits.
    """

    def __init__(self, file_bytes: int) -> None:
        self._bytes_left = max_file_content(file_bytes)
        self._records_left = max(_MIN_RECORDS, file_bytes // _BYTES_PER_RECORD)

    def add_bytes(self, count: int) -> None:
        """Count the content of a chunk."""
        self._bytes_left -= count
        if self._bytes_left < 0:
            raise DecompressionError("its chunks expand to 1000 times its size and more")

    def add_record(self) -> None:
        """Count a record in a chunk."""
        self._records_left -= 1
        if self._records_left < 0:
            raise DecompressionError("its chunks have more records than a file of its size can hold")


def decompress(data: Buffer, compression: str, declared: int | None = None) -> bytearray:
    """Decompress one frame of zstd, lz4 or bz2; of data that is cut off, as far as it reaches.

    declared: size that the file declares for the content. Raises DecompressionError for damaged data, a content of more
    than `declared` or `max_content` bytes, and another compression. Raises MissingExtraError without lz4.
    """
    limit = max_content(memoryview(data).nbytes)
    if declared is not None and not 0 <= declared <= limit:
        raise DecompressionError(f"expected at most {limit} bytes, found {declared} declared")
    limit = limit if declared is None else declared
    content = bytearray()
    try:
        for piece in _PIECES[compression](data):
            content += piece
            if len(content) > limit:
                raise DecompressionError(f"expected at most {limit} bytes, found compressed data of more")
    except KeyError:
        raise DecompressionError(f"expected zstd, lz4 or bz2, found {compression!r}") from None
    except (zstandard.ZstdError, OSError, EOFError, RuntimeError) as error:  # lz4 raises RuntimeError
        raise DecompressionError(f"it cannot be decompressed ({error})") from error
    return content


def decompress_file(source: Path, target: Path) -> str | None:
    """Decompress a file of lz4, by its suffix, or of zstd. Return why its end is lost, None if it is whole.

    The target then has what comes before the damage. Raises DecompressionError where that is more than
    `max_file_content`, or would leave less than 1 GiB on the disk, MissingExtraError without lz4, and OSError.
    """
    limit = min(max_file_content(source.stat().st_size), shutil.disk_usage(target.parent).free - _SPARE_BYTES)
    written = 0
    with source.open("rb") as packed, target.open("wb") as file:
        try:
            for piece in _read_frames(packed, _open_lz4 if source.suffix == ".lz4" else _open_zstd):
                written += len(piece)
                if written > limit:
                    raise DecompressionError(
                        f"{source.name}: expected at most {max(limit, 0)} bytes, found compressed data of more; free "
                        "space on the disk of TMPDIR, or decompress it with zstd -d"
                    )
                file.write(piece)
        except (zstandard.ZstdError, EOFError, RuntimeError) as error:  # lz4 raises RuntimeError
            reason = str(error) or "it is cut off"
            return f"{source} is damaged: what follows the first {written} unpacked bytes is lost ({reason})"
    return None


def _read_frames(packed: BinaryIO, open_frame: Callable[[], Any]) -> Iterator[bytes]:
    """Yield the content of all frames of a file, one after the other. Raises EOFError if the last one is cut off."""
    frame: Any = None
    data = b""
    while data := data or packed.read(_READ):
        frame = frame or open_frame()
        content = frame.decompress(data)
        data = b""
        yield content
        if frame.eof:
            frame, data = None, frame.unused_data or b""
    if frame is not None:
        raise EOFError


def _open_lz4() -> Any:
    return require("lz4.frame", "bags").LZ4FrameDecompressor()


def _open_zstd() -> Any:
    return zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).decompressobj()


def _read_zstd(data: Buffer) -> Iterator[bytes]:
    reader = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).stream_reader(data)
    while piece := reader.read(_PIECE):
        yield piece


def _read_stream(stream: Any, data: Buffer) -> Iterator[bytes]:
    yield stream.decompress(data, _PIECE)
    while not (stream.eof or stream.needs_input):
        yield stream.decompress(b"", _PIECE)


_PIECES: dict[str, Callable[[Buffer], Iterator[bytes]]] = {
    "zstd": _read_zstd,
    "lz4": lambda data: _read_stream(_open_lz4(), data),
    "bz2": lambda data: _read_stream(bz2.BZ2Decompressor(), data),
}


def recognise_still(data: Buffer) -> str | None:
    """Return `webp`, `avif`, `tiff` or `bmp` by the first bytes, None for others."""
    head = bytes(data[:_STILL_HEAD])
    return next((name for name, begin in _STILL_BEGINS.items() if begin.match(head)), None)


def decode_still(data: Buffer) -> npt.NDArray[Any]:
    """Return a grey image of 16 bits as uint16 [height, width], any other as BGR uint8 [height, width, 3].

    The orientation in the file is ignored, as with JPEG. Raises ValueError for damaged data, for an animation and
    for more pixels than the limit; MissingExtraError without the extra `bags`.
    """
    av = require("av", "bags")
    name = recognise_still(data)
    size = memoryview(data).nbytes
    limit = max(MIN_STILL_PIXELS, min(_MAX_STILL_RATIO * size, max_pixels(size)))
    if name is None:
        raise ValueError(f"expected {', '.join(_STILL_BEGINS)}, found {bytes(data[:4])!r}")
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
    file = io.BytesIO(data)
    options = {"max_pixels": limit}
    with av.open(file, format="mov", options=options, metadata_errors="replace") as container:
        stream = next(iter(container.streams.video), None)
        if stream is None or stream.codec_context is None:  # None: an unknown codec
            return None
        stream.codec_context.thread_count = 1
        stream.codec_context.options = options
        return next(container.decode(stream), None)


def read_tags(data: Buffer) -> dict[int, tuple[int, ...]]:
    """Return the whole numbers of the first directory of a TIFF, or of EXIF, by their tags; as far as it is whole."""
    order = "<" if bytes(data[:2]) == b"II" else ">"
    tags = dict[int, tuple[int, ...]]()
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
    tags = read_tags(data) if recognise_still(data) == "tiff" else {}
    if any(tags.get(tag) != (value,) for tag, value in _FLOAT_TIFF.items()):
        return None
    (width,) = tags.get(_WIDTH, (0,))
    (height,) = tags.get(_HEIGHT, (0,))
    strips = zip(tags.get(_STRIPS, ()), tags.get(_STRIP_BYTES, ()), strict=False)
    pixels = b"".join(bytes(data[begin : begin + count]) for begin, count in strips)
    if not (1 <= width <= MAX_SIDE and 1 <= height <= MAX_SIDE) or len(pixels) != 4 * width * height:
        raise ValueError(f"expected {width} x {height} floats, found {len(pixels)} bytes")
    order = "<" if bytes(data[:2]) == b"II" else ">"
    return np.frombuffer(pixels, f"{order}f4").reshape(height, width).astype(np.float32)


def decode_still_colour(data: Buffer) -> Colour:
    """Return an image in bgr8, of deep grey the high byte. Raises as `decode_still` does."""
    image = decode_still(data)
    if image.ndim == 2:
        image = np.repeat((image >> 8).astype(np.uint8)[:, :, None], 3, axis=2)
    return Colour(image.shape[1], image.shape[0], "bgr8", image.data.cast("B"))


def decode_still_depth(data: Buffer, scale_m: float, aligned: bool) -> Depth:
    """Return depth in units of `scale_m` metres of an image of 16-bit grey.

    Raises as `decode_still` does, and ValueError for other images.
    """
    image = decode_still(data)
    if image.ndim != 2:
        raise ValueError("expected an image of 16-bit grey, found one of 8 bits or of colours")
    return encode_depth(image, "z16", scale_m, aligned)
