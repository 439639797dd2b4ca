"""Hostile bytes: harms to good ones, images of any header, and what expects a WireError and a limit on memory."""

import gc
import os
import random
import re
import struct
import tracemalloc
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from sam3_node.errors import WireError
from tests.support.resources import clear_peak_memory, peak_memory

MEGABYTE = 1 << 20
RESIDENT_MIB = 64
"""Memory in MiB that a process may take beyond what Python allocates: libraries, arenas, other threads."""
HUGE_BYTES = 1 << 40
"""Size of a sparse file that takes no disk. To read it whole would take all memory."""
TABLES = {32 + (4 << bits) + (2 << bits) // 3 * 16 for bits in range(17, 24)}
"""Bytes of CPython's hash tables of 2^bits places of texts: a head, the places, and entries for two thirds."""
MARKERS = bytes(range(256)) + b"\0\1\x7f\x80\xff" * 20 + b"\xc0\xc1\xc3\xc6\xc9\xcb\xcf\xd9\xdb\xdd\xdf" * 20
"""All values of a byte, those more often at which numbers end, and by which msgpack tells types."""


@contextmanager
def limited_memory(megabytes=2):
    """Fail if Python allocates more memory in the block, or the process takes still RESIDENT_MIB more.

    The garbage collector is off, because it could run finalisers of earlier tests, which allocate memory.
    """
    gc.disable()
    tracemalloc.start()
    resident = clear_peak_memory()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
        if peak >= megabytes * MEGABYTE:
            peak -= measure_new_table()
        assert peak < megabytes * MEGABYTE, f"{peak / MEGABYTE:.1f} MiB"
        taken = peak_memory() - resident
        assert taken < megabytes + RESIDENT_MIB, f"{taken:.1f} MiB are resident"
    finally:
        tracemalloc.stop()
        gc.enable()


def measure_new_table() -> int:
    """Return the bytes of the table of interned strings if it grew since tracing began, otherwise 0.

    msgpack interns the keys of maps. Where a process has interned many strings, one more key may double its table.
    """
    return max(
        (trace.size for trace in tracemalloc.take_snapshot().traces if trace.size in TABLES), default=0
    )


@contextmanager
def refused(match="expected", megabytes=2):
    """Expect a WireError that matches, within a limit of memory."""
    with limited_memory(megabytes), pytest.raises(WireError, match=match):
        yield


def png_chunk(name: bytes, body: bytes = b"") -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png_header(width, height, bits=8, colour=2, methods=(0, 0), interlace=0) -> bytes:
    return png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, *methods, interlace))


def join_png(*chunks: bytes) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def declare_jpeg(jpeg: bytes, width: int, height: int) -> bytes:
    """Return a JPEG, baseline or progressive, that declares another size than it has."""
    place = re.search(rb"\xff[\xc0\xc2]", jpeg).start() + 5
    return jpeg[:place] + struct.pack(">HH", height, width) + jpeg[place + 4 :]


@cache
def large_png(side: int = 8192, colour: int = 2) -> bytes:
    """Return a complete PNG of black pixels, of 3 bytes each (type of colour 2) or 1 (0): 8192 x 8192 take 191 KiB."""
    row = bytes(1 + side * {0: 1, 2: 3}[colour])
    deflate = zlib.compressobj()
    pixels = b"".join(deflate.compress(row) for _ in range(side)) + deflate.flush()
    return join_png(png_header(side, side, colour=colour), png_chunk(b"IDAT", pixels), png_chunk(b"IEND"))


def large_jpeg(jpeg: bytes, side: int = 8192) -> bytes:
    """Return a JPEG that declares this size, with as many bytes of pixels as an even one needs."""
    declared = declare_jpeg(jpeg, side, side)
    return declared[:-2] + bytes(side * side // 200) + declared[-2:]


def make_pipe(path: Path) -> None:
    """Create a pipe that nobody writes to. To read it never ends."""
    os.mkfifo(path)


def link_to_device(path: Path) -> None:
    """Create a link to an endless device. To read it never ends."""
    path.symlink_to("/dev/zero")


def make_huge(path: Path) -> None:
    """Create a file of HUGE_BYTES of zeros."""
    with path.open("wb") as file:
        file.truncate(HUGE_BYTES)


def make_irregular(folder: Path) -> tuple[Path, Path]:
    """Create a pipe that nobody writes to and a link to an endless device. To read either never ends."""
    pipe = folder / "pipe.png"
    make_pipe(pipe)
    endless = folder / "endless.png"
    link_to_device(endless)
    return pipe, endless


def mutations(parts: Sequence[bytes], count: int, seed: object) -> Iterator[list[bytes]]:
    """Yield messages with parts that are damaged, lost, doubled, swapped, nested deeply, or of any bytes."""
    rng = random.Random(seed)
    for _ in range(count):
        mutated = list(parts)
        index = rng.randrange(len(parts))
        kind = rng.randrange(12)
        if kind == 0:
            mutated = [rng.randbytes(rng.randrange(200)) for _ in range(rng.randrange(1, 5))]
        elif kind == 1:
            del mutated[index]
        elif kind == 2:
            mutated += rng.choices(parts, k=rng.randrange(1, 20))
        elif kind == 3:
            rng.shuffle(mutated)
        elif kind == 4:
            mutated[-1] = b"\x91" * rng.randrange(1, 5000)
        else:
            mutated[index] = damage(parts[index], rng)
        yield mutated or [b""]


def damage(data: bytes, rng: random.Random) -> bytes:
    """Return bytes with flipped bits, cuts, splices or wrong numbers."""
    changed = bytearray(data)
    for harm in rng.choices(HARMS, k=rng.choice((1, 1, 2, 4))):
        if changed:
            harm(changed, rng)
    return bytes(changed)


def _flip(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 2, 8, 64))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _flip_head(data: bytearray, rng: random.Random) -> None:
    data[rng.randrange(min(len(data), 200))] = rng.choice(MARKERS)


def _flip_tail(data: bytearray, rng: random.Random) -> None:
    data[-1 - rng.randrange(min(len(data), 2000))] = rng.choice(MARKERS)


def _cut(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(1, len(data) + 1) :]


def _remove(data: bytearray, rng: random.Random) -> None:
    begin = rng.randrange(len(data))
    del data[begin : begin + rng.randint(1, 64)]
    data += b"\0" * (not data)


def _splice(data: bytearray, rng: random.Random) -> None:
    begin = rng.randrange(len(data))
    place = rng.randrange(len(data))
    part = data[begin : begin + rng.randint(1, 500)]
    data[place : place + rng.choice((0, len(part)))] = part


def _lie(data: bytearray, rng: random.Random) -> None:
    """Write an extreme number of 4 or 8 bytes."""
    size = rng.choice((4, 8))
    number = rng.choice(
        (0, 1, 2 ** (8 * size - 1) - 1, 2 ** (8 * size - 1), 2 ** (8 * size) - 1, 2**31, 10**8)
    )
    place = rng.randrange(len(data))
    data[place : place + size] = number.to_bytes(size, rng.choice(("big", "little")))


HARMS = (_flip, _flip, _flip_head, _flip_tail, _cut, _remove, _splice, _lie, _lie)
