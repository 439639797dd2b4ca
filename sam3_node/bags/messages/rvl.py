"""Decoding of RVL depth, as compressedDepth messages of ROS hold it.

Source: Wilson, "Fast Lossless Depth Image Compression", ISS 2017. The data are 32-bit words of eight nibbles, the first
nibble highest. A nibble holds three bits of a number, the lowest first, and a flag that more follow. The numbers are a
count of zeros, a count of depths, for each of these its difference from the depth before, in zigzag order; and so on.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from ...types import Buffer
from ..decompression import max_pixels

_SIZE = struct.Struct("<II")  # width, height
_MAX_NIBBLES = 11  # of one number: 32 bits
_SHIFTS = np.arange(28, -1, -4, dtype=np.uint32)


def decode_rvl(data: Buffer) -> npt.NDArray[np.uint16]:
    """Return the image [height, width] of width, height and RVL data; ValueError for other data."""
    if memoryview(data).nbytes < _SIZE.size:
        raise ValueError("expected RVL, found fewer bytes than its size has")
    width, height = _SIZE.unpack_from(data)
    limit = max_pixels(memoryview(data).nbytes)
    if not 0 < width * height <= limit:
        raise ValueError(f"expected 1 to {limit} pixels of RVL, found {width} x {height}")
    numbers = _numbers(data)
    place = filled = 0
    depths: list[slice] = []  # pixels
    differences: list[npt.NDArray[np.int64]] = []
    while filled < width * height:
        if place + 2 > len(numbers):
            raise ValueError(f"expected {width} x {height} pixels of RVL, found {filled}")
        zeros, count = int(numbers[place]), int(numbers[place + 1])
        begin, place = place + 2, place + 2 + count
        if zeros + count == 0 or filled + zeros + count > width * height or place > len(numbers):
            raise ValueError(f"expected {width} x {height} pixels of RVL, found a run of {zeros} and {count}")
        depths.append(slice(filled + zeros, filled + zeros + count))
        differences.append(numbers[begin:place])
        filled += zeros + count
    image = np.zeros(width * height, np.uint16)
    zigzag = np.concatenate(differences)
    values = np.cumsum((zigzag >> 1) ^ -(zigzag & 1))
    begin = 0
    for pixels in depths:
        end = begin + pixels.stop - pixels.start
        image[pixels] = values[begin:end]  # modulo 2^16, as the source does
        begin = end
    return image.reshape(height, width)


def _numbers(data: Buffer) -> npt.NDArray[np.int64]:
    """Return all numbers behind the size; the zeros that fill the last word are numbers, too."""
    view = memoryview(data)[_SIZE.size :]
    words = np.frombuffer(view[: view.nbytes // 4 * 4], "<u4")
    nibbles = ((words[:, None] >> _SHIFTS) & 15).ravel().astype(np.int64)
    ends = np.flatnonzero(nibbles < 8)
    starts = np.concatenate(([0], ends[:-1] + 1)) if len(ends) else ends
    lengths = ends - starts + 1
    if len(ends) == 0 or lengths.max() > _MAX_NIBBLES:
        raise ValueError("expected numbers of 32 bits in RVL, found longer ones")
    nibbles = nibbles[: ends[-1] + 1]
    positions = np.arange(len(nibbles)) - np.repeat(starts, lengths)
    return np.add.reduceat((nibbles & 7) << 3 * positions, starts)
