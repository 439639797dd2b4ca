"""Decompression of recordings within limits: a file of some kilobytes can expand to gigabytes.

No size that a file declares is allocated, and none is exceeded.
"""

from __future__ import annotations

import bz2
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from ..errors import require
from ..types import Buffer
from ..wire.images import MAX_FRAME_PIXELS

_PIECE = 1 << 20
_READ = 1 << 10  # of a packed file at once: zstd may expand it to 32 MiB
_MIB = 1 << 20
_MAX_WINDOW = 1 << 27
_MIN_CONTENT = 32 * _MIB  # a raw image of 11 million pixels
_MIN_FILE = 64 * _MIB
_MAX_FILE_RATIO = 1000
_MIN_RECORDS, _BYTES_PER_RECORD = 10_000, 8
_SPARE_BYTES = 1 << 30  # of a disk, when a file has been decompressed


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
        content, data = frame.decompress(data), b""
        yield content
        if frame.eof:
            frame, data = None, frame.unused_data or b""
    if frame is not None:
        raise EOFError


def _open_zstd() -> Any:
    return _zstd().decompressobj()


def _open_lz4() -> Any:
    return require("lz4.frame", "bags").LZ4FrameDecompressor()


def _zstd() -> zstandard.ZstdDecompressor:
    return zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)


def _read_zstd(data: Buffer) -> Iterator[bytes]:
    reader = _zstd().stream_reader(data)
    while piece := reader.read(_PIECE):
        yield piece


def _read_lz4(data: Buffer) -> Iterator[bytes]:
    return _read_stream(_open_lz4(), data)


def _read_bz2(data: Buffer) -> Iterator[bytes]:
    return _read_stream(bz2.BZ2Decompressor(), data)


def _read_stream(stream: Any, data: Buffer) -> Iterator[bytes]:
    yield stream.decompress(data, _PIECE)
    while not (stream.eof or stream.needs_input):
        yield stream.decompress(b"", _PIECE)


_PIECES: dict[str, Callable[[Buffer], Iterator[bytes]]] = {
    "zstd": _read_zstd,
    "lz4": _read_lz4,
    "bz2": _read_bz2,
}
