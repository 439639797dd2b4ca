"""Decompresses chunks, files and single images within limits. Some kilobytes can expand to gigabytes.

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
from ..files import ANY_SIZE, open_regular
from ..schema.fields import MAX_SIDE
from ..types import Buffer, Depth
from ..wire import encode_depth
from ..wire.images import MAX_FRAME_PIXELS
from ..wire.video import read_pixels
from .samples import Colour, WideColour

STILL_SUFFIXES = (".webp", ".avif", ".tiff", ".tif", ".bmp")
"""Endings, in lower case, of the single images that `decode_still` decodes."""

MIN_STILL_PIXELS = 1920 * 1200
"""Pixels that a single image may have, whatever its size in bytes."""

_MIB = 1 << 20
# unpacked bytes that one step of a decompressor returns
_PIECE = 1 << 20
# packed bytes of a file that one step reads: zstd may expand them to 32 MiB
_READ = 1 << 10
# window of zstd above which its data is refused: the decompressor allocates the window
_MAX_WINDOW = 1 << 27
# bytes that any chunk may expand to: a raw image of 11 million pixels
_MIN_CONTENT = 32 * _MIB
# bytes that any file may expand to
_MIN_FILE = 64 * _MIB
# times its own size that a file may expand to
_MAX_FILE_RATIO = 1000
# records that the chunks of any file may have
_MIN_RECORDS = 10_000
# bytes of a file that each record needs
_BYTES_PER_RECORD = 8
# bytes that stay free on the disk after a file has been decompressed
_SPARE_BYTES = 1 << 30

# pixels that a small single image may have for each of its bytes
_MAX_STILL_RATIO = 1024
# first bytes of the single images, by ffmpeg's names of their codecs
_STILL_BEGINS = {
    "webp": re.compile(rb"RIFF.{4}WEBP", re.DOTALL),
    "avif": re.compile(rb".{4}ftyp(avif|mif1)", re.DOTALL),
    "tiff": re.compile(rb"II\*\0|MM\0\*"),
    "bmp": re.compile(rb"BM.{4}\0\0\0\0", re.DOTALL),
}
# bytes that show the kind of a single image
_STILL_HEAD = 12

# types of whole numbers in TIFF: SHORT and LONG
_TAG_TYPES = {3: "H", 4: "I"}
# tags of a directory that are read, and values of a tag
_MAX_TAGS = 1 << 14
# numbers of the tags that place the pixels
_WIDTH = 256
_HEIGHT = 257
_STRIPS = 273
_STRIP_BYTES = 279
# tags of an image of plain 32-bit floats: bits, compression, channels, kind of number
_FLOAT_TIFF = {258: 32, 259: 1, 277: 1, 339: 3}


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
    """Return the most pixels of all pictures of a video: 2^31, or 32768 a byte, more than a still scene has."""
    return max(1 << 31, 32768 * encoded_bytes)


class Expansion:
    """Limits of what all chunks of a file expand to in one pass: `max_file_content` bytes, and a number of records.

    Each record needs 8 bytes of the file, however well the chunks are compressed. Any file may have 10000 records. Both
    methods raise DecompressionError beyond the limits.
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
    """Decompress one frame of zstd, lz4 or bz2. Data that is cut off is decompressed as far as it reaches.

    `declared` is the size that the file declares for the content. Raises DecompressionError for damaged data, a content
    of more than `declared` or `max_content` bytes, and another compression. Raises MissingExtraError without lz4.
    """
    limit = max_content(memoryview(data).nbytes)
    if declared is not None:
        if not 0 <= declared <= limit:
            raise DecompressionError(f"expected at most {limit} bytes, found {declared} declared")
        limit = declared

    # piece by piece, so that no more than the limit is ever in memory
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

    The target of a damaged file has what comes before the damage. Raises DecompressionError for a content that is
    larger than `max_file_content`, or would leave less than 1 GiB on the disk, MissingExtraError without lz4, and
    OSError.
    """
    limit = min(max_file_content(source.stat().st_size), shutil.disk_usage(target.parent).free - _SPARE_BYTES)
    open_frame = _open_lz4 if source.suffix == ".lz4" else _open_zstd
    written = 0
    with open_regular(source, ANY_SIZE) as packed, target.open("xb") as file:
        try:
            for piece in _read_frames(packed, open_frame):
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
    rest = b""  # what came with the end of a frame and belongs to the next one
    while data := rest or packed.read(_READ):
        rest = b""
        if frame is None:
            frame = open_frame()
        yield frame.decompress(data)
        if frame.eof:
            rest = frame.unused_data or b""
            frame = None
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
    for name, begin in _STILL_BEGINS.items():
        if begin.match(head):
            return name
    return None


def make_bgr(image: npt.NDArray[Any]) -> Colour:
    """Return an image BGR uint8 or uint16 [height, width, 3] as colour in bgr8."""
    if image.dtype != np.uint8:
        return WideColour.from_pixels(image.astype(np.uint16, copy=False))
    return Colour(image.shape[1], image.shape[0], "bgr8", np.ascontiguousarray(image).data.cast("B"))


def decode_still(data: Buffer) -> npt.NDArray[Any]:
    """Return a grey image of 16 bits as uint16 [height, width], any other as `read_pixels` does.

    The orientation in the file is ignored, as with JPEG. Raises ValueError for damaged data, for an animation and
    for more pixels than the limit; MissingExtraError without the extra `bags`.
    """
    av = require("av", "bags")
    name = recognise_still(data)
    size = memoryview(data).nbytes
    limit = max(MIN_STILL_PIXELS, min(_MAX_STILL_RATIO * size, max_pixels(size)))
    if name is None:
        raise ValueError(f"expected {', '.join(_STILL_BEGINS)}, found {bytes(data[:4])!r}")

    # ffmpeg compares the header with the limit before it allocates memory
    decode = _decode_avif if name == "avif" else _decode_packet
    try:
        frame = decode(av, name, bytes(data), str(limit))
    except (av.error.FFmpegError, EOFError, OSError, ValueError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"expected a {name} image of at most {limit} pixels, found one that cannot be decoded ({reason})"
        ) from error
    if frame is None or max(frame.width, frame.height) > MAX_SIDE or frame.width * frame.height > limit:
        raise ValueError(
            f"expected a {name} image of at most {limit} pixels and {MAX_SIDE} on a side, found another one"
        )

    # grey of 16 bits may be depth: keep all its bits
    if frame.format.name in ("gray16le", "gray16be"):
        return np.ascontiguousarray(frame.to_ndarray(format="gray16le"))
    return np.ascontiguousarray(read_pixels(frame))


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
    """Return the whole numbers of the first directory of a TIFF, or of EXIF, by their tags.

    Of data that is cut off, return the complete ones.
    """
    order = _read_byte_order(data)
    tags = dict[int, tuple[int, ...]]()
    with suppress(struct.error):
        (place,) = struct.unpack_from(f"{order}I", data, 4)
        (count,) = struct.unpack_from(f"{order}H", data, place)
        for at in range(place + 2, place + 2 + 12 * min(count, _MAX_TAGS), 12):
            tag, kind, number = struct.unpack_from(f"{order}HHI", data, at)
            if kind not in _TAG_TYPES or number > _MAX_TAGS:
                continue
            # up to four bytes of values stand in the entry itself, more at the place that it names
            values = struct.Struct(f"{order}{number}{_TAG_TYPES[kind]}")
            begin = at + 8
            if values.size > 4:
                (begin,) = struct.unpack_from(f"{order}I", data, at + 8)
            tags[tag] = values.unpack_from(data, begin)
    return tags


def _read_byte_order(data: Buffer) -> str:
    """Return the byte order of a TIFF, as `struct` spells it."""
    return "<" if bytes(data[:2]) == b"II" else ">"


def decode_float_tiff(data: Buffer) -> npt.NDArray[np.float32] | None:
    """Return a TIFF of 32-bit floats that is not compressed, [height, width]; None for any other image.

    ffmpeg has no decoder for these. Raises ValueError for a damaged one.
    """
    if recognise_still(data) != "tiff":
        return None
    tags = read_tags(data)
    if any(tags.get(tag) != (value,) for tag, value in _FLOAT_TIFF.items()):
        return None
    (width,) = tags.get(_WIDTH, (0,))
    (height,) = tags.get(_HEIGHT, (0,))

    # the pixels lie in strips of rows, one after the other
    strips = zip(tags.get(_STRIPS, ()), tags.get(_STRIP_BYTES, ()), strict=False)
    pixels = b"".join(bytes(data[begin : begin + count]) for begin, count in strips)
    if not (1 <= width <= MAX_SIDE and 1 <= height <= MAX_SIDE) or len(pixels) != 4 * width * height:
        raise ValueError(f"expected {width} x {height} floats, found {len(pixels)} bytes")
    order = _read_byte_order(data)
    return np.frombuffer(pixels, f"{order}f4").reshape(height, width).astype(np.float32)


def decode_still_colour(data: Buffer) -> Colour:
    """Return an image in bgr8; of 16 bits a channel, as WideColour. Raises as `decode_still` does."""
    image = decode_still(data)
    if image.ndim == 2:
        image = np.repeat(image[:, :, None], 3, axis=2)
    return make_bgr(image)


def decode_still_depth(data: Buffer, scale_m: float, aligned: bool) -> Depth:
    """Return depth in units of `scale_m` metres of an image of 16-bit grey.

    Raises as `decode_still` does, and ValueError for other images.
    """
    image = decode_still(data)
    if image.ndim != 2:
        raise ValueError("expected an image of 16-bit grey, found one of 8 bits or of colours")
    return encode_depth(image, "z16", scale_m, aligned)
