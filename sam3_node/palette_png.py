"""Writes images of indices as PNGs with the palette of DAVIS and Pascal VOC, which OpenCV cannot write."""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

SIGNATURE = b"\x89PNG\r\n\x1a\n"
"""First bytes of a PNG file."""
PALETTE_TYPE = 3
"""PNG's number of the colour type of images with a palette."""
INDICES = 254
"""Number of palette indices that objects may have; 0 is the background, and 255 is no object."""


def colours() -> npt.NDArray[np.uint8]:
    """Return the palette, RGB [256, 3].

    The bits of the index are spread over the three channels, from each channel's top bit down.
    """
    import numpy as np  # a client starts without it

    bits = np.arange(256)[:, None] >> np.arange(9) & 1
    split = bits.reshape(256, 3, 3)  # of the index, bit of a channel from its top one, channel
    table: npt.NDArray[np.uint8] = np.einsum("ibc,b->ic", split, [128, 64, 32]).astype(np.uint8)
    return table


def palette_index(object_id: int) -> int:
    """Return the palette index of an object, 1..254. It is the id up to 254; above, indices repeat."""
    return 1 + (object_id - 1) % INDICES


def encode_labels(labels: npt.NDArray[Any]) -> bytes:
    """Encode uint8 [h, w] indices as an 8-bit palette PNG."""
    import numpy as np

    # each row begins with its filter type; 0 is none
    height, width = labels.shape
    rows = np.zeros((height, width + 1), np.uint8)
    rows[:, 1:] = labels
    header = struct.pack(">IIBBBBB", width, height, 8, PALETTE_TYPE, 0, 0, 0)
    chunks = [
        _chunk(b"IHDR", header),
        _chunk(b"PLTE", colours().tobytes()),
        _chunk(b"IDAT", zlib.compress(rows.tobytes(), 6)),
        _chunk(b"IEND", b""),
    ]
    return SIGNATURE + b"".join(chunks)


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
