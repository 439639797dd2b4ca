"""Encoding of one mask as a map {encoding, size [h, w], box [x0, y0, x1, y1], data}.

`bits+zstd` holds the crop inside the box, row by row without padding. Each byte holds eight pixels, with the leftmost
in the highest bit. The bytes are one zstd frame that declares its content size. `rle` holds COCO compressed counts of
the whole image, which is zero outside the box. An empty mask has the box [0, 0, 0, 0], and no data in `bits+zstd`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from ..errors import WireError
from ..types import Box, Mask, MaskEncoding
from . import rle, zstd
from .codec import MAX_SIDE, Fields

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
else:
    from ..types import lazy_numpy as np

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


class EncodedMask(Mask):
    """A mask whose crop is decoded when it is first used; its size, box and area are known before.

    Using `crop` or `full` raises WireError if the data are damaged, or are not a mask of that area. The header of the
    data was checked before. Threads may share it.
    """

    __slots__ = ("_area", "_data", "_encoding", "_what")
    _area: int
    _data: bytes
    _encoding: MaskEncoding
    _what: str

    def __init__(
        self, size: tuple[int, int], box: Box, encoding: MaskEncoding, data: bytes, area: int, what: str
    ) -> None:
        """Create a mask of data whose header is valid."""
        values = {
            "size": size,
            "box": box,
            "_encoding": encoding,
            "_data": data,
            "_area": area,
            "_what": what,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> npt.NDArray[np.bool_]:
        """Decode the crop; called only for what is not set, as the crop is not before."""
        if name != "crop":
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        crop = _decode_crop(self._data, self._encoding, self.size, self.box, self._what)
        if (found := int(np.count_nonzero(crop))) != self._area:
            raise WireError(f"{self._what}: expected an area of {self._area} pixels, found {found}")
        object.__setattr__(self, "crop", crop)
        return crop

    @property
    def area(self) -> int:
        """Number of pixels inside the mask, as the message says."""
        return self._area

    def __reduce__(self) -> tuple[type[Mask], tuple[Any, ...]]:
        return Mask, (self.size, self.box, self.crop)


def decode_mask(
    value: object,
    what: str = "mask",
    max_pixels: int = MAX_MASK_PIXELS,
    frame_size: tuple[int, int] | None = None,
    lazy_area: int | None = None,
) -> Mask:
    """Return the mask of a map. With its area, it is an EncodedMask.

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
    pixels = (x1 - x0) * (y1 - y0)
    if pixels > max_pixels:
        raise WireError(f"{what}: expected a box of at most {max_pixels} pixels, found {box}")
    data = fields.blob("data")
    if lazy_area is None:
        return Mask((height, width), box, _decode_crop(data, encoding, (height, width), box, what))
    if lazy_area > pixels:
        raise WireError(f"{what}: expected an area within the box {box}, found {lazy_area} pixels")
    if encoding == "rle":
        rle.check_length(data, box, what)
    elif pixels or data:
        zstd.check_size(data, (pixels + 7) // 8, what)
    return EncodedMask((height, width), box, encoding, data, lazy_area, what)


def _decode_crop(
    data: bytes, encoding: MaskEncoding, size: tuple[int, int], box: Box, what: str
) -> npt.NDArray[np.bool_]:
    if encoding == "rle":
        return rle.decode(data, size, box, what)
    return _unpack_bits(data, (box[3] - box[1], box[2] - box[0]), what)


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
