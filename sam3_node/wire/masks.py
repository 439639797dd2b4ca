"""Encoding of one mask as a map {encoding, size [h, w], box [x0, y0, x1, y1], data}.

`bits+zstd` holds the crop inside the box, row by row without padding. Each byte holds eight pixels, with the leftmost
in the highest bit. The bytes are one zstd frame that declares its content size. `rle` holds COCO compressed counts of
the whole image, which is zero outside the box. An empty mask has the box [0, 0, 0, 0], and no data in `bits+zstd`.
"""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from ..errors import WireError
from ..types import Box, Mask, MaskEncoding
from . import rle, zstd
from .codec import MAX_SIDE, Fields

MAX_MASK_PIXELS = MAX_SIDE * MAX_SIDE
"""Maximum number of pixels inside the boxes of all masks of a message."""


def encode_mask(mask: Mask, encoding: MaskEncoding = "bits+zstd") -> dict[str, Any]:
    """Return the map of a mask. Its sides may have at most MAX_SIDE pixels."""
    what = "mask"
    _check_box(mask.box, mask.size, what)
    x0, y0, x1, y1 = mask.box
    if mask.crop.shape != (y1 - y0, x1 - x0) or mask.crop.dtype != np.bool_:
        raise WireError(
            f"{what}: expected a bool crop of the box {mask.box}, found {mask.crop.dtype} {mask.crop.shape}"
        )
    return {
        "encoding": encoding,
        "size": list(mask.size),
        "box": list(mask.box),
        "data": rle.encode(mask) if encoding == "rle" else _pack_bits(mask.crop),
    }


def decode_mask(
    value: object,
    what: str = "mask",
    max_pixels: int = MAX_MASK_PIXELS,
    frame_size: tuple[int, int] | None = None,
) -> Mask:
    """Return the mask of a map.

    Raises WireError for invalid maps, boxes of more than `max_pixels`, and images that are not of `frame_size`
    (height, width), if it is given. Nothing is decoded then.
    """
    fields = Fields(value, what)
    encoding = fields.choice("encoding", get_args(MaskEncoding))
    height, width = fields.integers("size", 2, low=1, high=MAX_SIDE)
    if frame_size not in (None, (height, width)):
        raise WireError(f"{what}: expected the frame's size {frame_size} (h, w), found {(height, width)}")
    x0, y0, x1, y1 = fields.integers("box", 4, high=MAX_SIDE)
    box = (x0, y0, x1, y1)
    _check_box(box, (height, width), what)
    if (x1 - x0) * (y1 - y0) > max_pixels:
        raise WireError(f"{what}: expected a box of at most {max_pixels} pixels, found {box}")
    data = fields.blob("data")
    if encoding == "rle":
        crop = rle.decode(data, (height, width), box, what)
    else:
        crop = _unpack_bits(data, (y1 - y0, x1 - x0), what)
    return Mask((height, width), box, crop)


def _check_box(box: Box, size: tuple[int, int], what: str) -> None:
    height, width = size
    x0, y0, x1, y1 = box
    inside = 0 <= x0 < x1 <= width <= MAX_SIDE and 0 <= y0 < y1 <= height <= MAX_SIDE
    if not inside and any(box):
        raise WireError(
            f"{what}: expected a box of zeros, or inside {width} x {height} (at most {MAX_SIDE}), found {box}"
        )


def _pack_bits(crop: npt.NDArray[np.bool_]) -> bytes:
    return zstd.compress(np.packbits(crop).data) if crop.size else b""


def _unpack_bits(data: bytes, shape: tuple[int, int], what: str) -> npt.NDArray[np.bool_]:
    area = shape[0] * shape[1]
    if not area and not data:
        return np.zeros(shape, dtype=np.bool_)
    bits = np.frombuffer(zstd.decompress(data, (area + 7) // 8, what), dtype=np.uint8)
    return np.unpackbits(bits, count=area).view(np.bool_).reshape(shape)
