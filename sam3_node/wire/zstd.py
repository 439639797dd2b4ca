"""Zstandard compression of data whose size the receiver knows."""

from __future__ import annotations

import threading

import zstandard

from ..errors import WireError
from ..types import Buffer

# a zstd block has at least 4 bytes and expands to at most 128 KiB
_MAX_RATIO = (128 << 10) // 4


class _Codecs(threading.local):
    # contexts are expensive to create, and threads must not share them
    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=1)
        self.decompressor = zstandard.ZstdDecompressor()


_codecs = _Codecs()


def compress(data: Buffer) -> bytes:
    """Return one zstd frame of level 1 that declares its content size."""
    return _codecs.compressor.compress(data)


def check_size(data: Buffer, size: int, what: str) -> None:
    """Raise WireError for data that are no zstd frame, or one that declares another size. Nothing is decompressed."""
    try:
        declared = zstandard.get_frame_parameters(data).content_size
    except (zstandard.ZstdError, ValueError) as error:
        raise WireError(f"{what}: expected a zstd frame of {size} bytes, found: {error}") from error
    if declared != size or size > memoryview(data).nbytes * _MAX_RATIO:
        raise WireError(f"{what}: expected a zstd frame of {size} bytes, found one that cannot hold them")


def decompress(data: Buffer, size: int, what: str) -> bytes:
    """Return the `size` bytes of one zstd frame.

    Raises WireError for invalid data, and before allocating memory if the frame declares another size.
    """
    check_size(data, size, what)
    try:
        content = _codecs.decompressor.decompress(data, allow_extra_data=False)
    except (zstandard.ZstdError, ValueError) as error:
        raise WireError(f"{what}: expected a zstd frame of {size} bytes, found: {error}") from error
    if len(content) != size:
        raise WireError(f"{what}: expected {size} bytes in the zstd frame, found {len(content)}")
    return content
