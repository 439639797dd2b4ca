"""Finds holes in the pixels of a JPEG: bytes that a lost packet or a cut has taken out of its middle.

Decoders then run out of bytes before the image, or a part between two restart markers, is complete. They fill the rest
with a grey of 128, and say nothing to the caller.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..types import Buffer
from ..types import lazy_numpy as np

_FILL = 128
"""Value of all channels of what libjpeg fills in."""
_INSETS = (3, 4, 5, 6)
"""Pixels from the lower right corner of a block to where it is looked at. Upsampling carries the colour of a block up
to 2 pixels into its neighbours."""
_OTHER_PIXELS = bytes(range(1, 250, 3))
"""Bytes that a decoder takes for pixels, if it has not had all of them."""
_RESTART = re.compile(rb"\xff[\xd0-\xd7]")

_SCALE = 8
"""Pixels of the side of a square that a small decoding makes one pixel of."""

DecodeSmall = Callable[[Buffer], Any]
"""Decodes a JPEG to uint8 [h, w, channels] of an eighth of its sides, rounded up."""


class Scan(NamedTuple):
    """The compressed pixels of a JPEG with a single scan of all components."""

    begin: int
    """place of the first byte"""
    end: int
    """place behind the last byte"""
    block: tuple[int, int]
    """height and width in pixels of what is coded together (MCU)"""
    restart: int
    """number of blocks from one restart marker to the next; 0: there are none"""


def has_hole(data: Buffer, scan: Scan, image: np.typing.NDArray[np.uint8], decode_small: DecodeSmall) -> bool:
    """Return True if bytes of the pixels of a JPEG are missing. `image` is what it was decoded to, [h, w, channels].

    A hole of about two blocks or less is not found, nor one after which what is left happens to fill the image.
    """
    height, width = image.shape[:2]
    block_height, block_width = scan.block
    columns = -(-width // block_width)
    count = -(-height // block_height) * columns
    # where each part between restart markers ends: with the last block of the image, or of all parts
    step = scan.restart or count
    lasts = np.minimum(np.arange(step, count + step, step), count) - 1
    if scan.restart and not _has_all_restarts(data, scan, len(lasts)):
        return True
    filled = lasts
    for inset in _INSETS:
        tops = filled // columns * block_height
        lefts = filled % columns * block_width
        ys = np.maximum(np.minimum(tops + block_height, height) - inset, tops)
        xs = np.maximum(np.minimum(lefts + block_width, width) - inset, lefts)
        filled = filled[(image[ys, xs] == _FILL).all(axis=1)]
    if not filled.size:
        return False

    # grey may also be what the camera saw: then the decoder has had all bytes, and more of them change nothing
    is_other = (decode_small(_add_pixels(data, scan)) != decode_small(data)).any(axis=2)
    ys, xs = np.nonzero(is_other)
    others = ys // (block_height // _SCALE) * columns + xs // (block_width // _SCALE)
    # the last block of a part may lack bits that its encoder has left out
    return not np.isin(others, lasts).all()


def _has_all_restarts(data: Buffer, scan: Scan, parts: int) -> bool:
    """Return True if the restart markers count from 0 to 7 and again, as many as the parts of the image need."""
    pixels = np.frombuffer(data, np.uint8)[scan.begin : scan.end]
    seconds = pixels[1:][pixels[:-1] == 0xFF]  # second bytes of markers
    found = seconds[(seconds & 0xF8) == 0xD0] & 7
    return np.array_equal(found[: parts - 1], np.arange(parts - 1) % 8)


def _add_pixels(data: Buffer, scan: Scan) -> bytes:
    """Return the JPEG with more bytes of pixels behind each part."""
    pixels = bytes(memoryview(data)[scan.begin : scan.end])
    parts: Sequence[bytes] = _RESTART.split(pixels)
    markers = [*_RESTART.findall(pixels), b""]
    longer = b"".join(part + _OTHER_PIXELS + marker for part, marker in zip(parts, markers, strict=True))
    view = memoryview(data)
    return bytes(view[: scan.begin]) + longer + bytes(view[scan.end :])
