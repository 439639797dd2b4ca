"""Encode and decode one mask as a map {encoding, size [h, w], box [x0, y0, x1, y1], data}.

`bits+zstd` holds the crop inside the box, row by row without padding. Each byte holds eight pixels, with the leftmost
in the highest bit. The bytes are one zstd frame that declares its content size. `rle` holds COCO compressed counts of
the whole image, which is zero outside the box. An empty mask has the box [0, 0, 0, 0], and no data in `bits+zstd`.

COCO's runs follow the columns of the image, zeros first. From the fourth count on, each is stored as its difference
from the count two before it. A count consists of characters of five bits, lowest bits first; 0x20 is set if more
follow. pycocotools is not used, because it would allocate the whole image of an untrusted message.
"""

from __future__ import annotations

from typing import Any, TypeAlias, TypedDict

from ..errors import WireError
from ..schema.fields import MAX_SIDE, convert, describe
from ..schema.values import MaskMap
from ..types import Box, Mask, MaskEncoding
from ..types import lazy_numpy as np
from . import codec
from .codec import Fields

_MAX_CHARACTERS = 7
"""Characters of a count: 35 bits, while an image has at most 2^28 pixels."""
_MAX_BYTES = 8 << 20
"""Compressed counts of one mask. Checked by their length, before anything is allocated for them."""
MAX_PROMPT_BYTES = 1 << 19
"""Compressed counts of a mask in a request. More are refused: the node decodes them between two frames, with 65 times
their memory. The mask of a thing has some thousand."""
MAX_MASK_PIXELS = MAX_SIDE * MAX_SIDE
"""Maximum number of pixels inside the boxes of all masks of a message."""

Integers: TypeAlias = "np.typing.NDArray[np.int64]"


def encode(mask: Mask) -> bytes:
    """Return the compressed counts, equal to pycocotools' own."""
    height, width = mask.size
    starts, lengths = _find_runs(mask)
    # zeros and ones take turns: the zeros before each run of ones, the run, and at last the zeros behind all runs
    counts = np.zeros(2 * starts.size + 1, dtype=np.int64)
    ends = starts + lengths
    counts[0:-1:2] = starts
    counts[1::2] = lengths
    counts[2:-1:2] -= ends[:-1]
    counts[-1] = height * width
    if ends.size:
        counts[-1] -= ends[-1]
    # a count of 0 at the end is left out, as pycocotools does, unless it is the only one
    if counts[-1] == 0 and counts.size > 1:
        counts = counts[:-1]
    return _compress(counts)


def decode(data: bytes, size: tuple[int, int], box: Box, what: str) -> np.typing.NDArray[np.bool_]:
    """Return the crop, bool [y1 - y0, x1 - x0], of counts that cover `size` and are zero outside `box`.

    Raises WireError for any other data.
    """
    rows, columns = check_length(data, box, what)
    counts = _decompress(np.frombuffer(data, dtype=np.uint8), size[0] * size[1], what)
    starts, lengths = _locate_runs(counts, size[0], box, what)
    # the gaps and runs within the crop, written as one row after the other of its columns
    pattern = np.zeros((starts.size, 2), dtype=np.int64)
    ends = starts + lengths
    pattern[:, 0] = starts
    pattern[:, 1] = lengths
    pattern[1:, 0] -= ends[:-1]
    crop = np.zeros(rows * columns, dtype=np.bool_)
    filled = np.repeat(np.tile([False, True], starts.size), pattern.ravel())
    crop[: filled.size] = filled
    return np.ascontiguousarray(crop.reshape(columns, rows).T)


def check_length(data: bytes, box: Box, what: str, max_bytes: int = _MAX_BYTES) -> tuple[int, int]:
    """Return rows and columns of a box. Raises WireError for more data than it can need, or than `max_bytes`."""
    rows = box[3] - box[1]
    columns = box[2] - box[0]
    # the worst mask is a chessboard: a run for every second pixel of each column
    limit = min(_MAX_CHARACTERS * ((rows + 1) * columns + 2), max_bytes)
    if len(data) > limit:
        raise WireError(
            f"{what}: expected at most {limit} bytes of counts for a box of {columns} x {rows} pixels, found "
            f"{len(data)}; send bits+zstd"
        )
    return rows, columns


def _find_runs(mask: Mask) -> tuple[Integers, Integers]:
    """Return the starts, in column-major order of the image, and the lengths of the runs of ones."""
    height = mask.size[0]
    x0, y0, _, _ = mask.box
    rows, columns = mask.crop.shape
    # a zero between columns separates their runs, unless the columns also touch in the image
    stride = rows + 1 if rows != height else rows
    padded = np.zeros(columns * stride + 2, dtype=np.bool_)
    padded[1:-1].reshape(columns, stride)[:, :rows] = mask.crop.T
    # a run is from a change to ones to the next change to zeros
    edges = np.flatnonzero(padded[1:] != padded[:-1])
    starts = edges[::2]
    ends = edges[1::2]
    column, row = np.divmod(starts, max(stride, 1))
    return (x0 + column) * height + y0 + row, ends - starts


def _locate_runs(counts: Integers, height: int, box: Box, what: str) -> tuple[Integers, Integers]:
    """Return the starts, in column-major order of the crop, and the lengths of the runs of ones.

    It is the inverse of `_find_runs`.
    """
    x0, y0, x1, y1 = box
    rows = y1 - y0
    edges = np.cumsum(counts)
    lengths = counts[1::2]
    column, row = np.divmod(edges[: 2 * lengths.size : 2][lengths > 0], height)
    lengths = lengths[lengths > 0]
    starts = (column - x0) * rows + row - y0
    # a run may continue in the next column only if the box has the full height
    if rows < height:
        below = row + lengths > y1
    else:
        below = starts + lengths > rows * (x1 - x0)
    if np.any((column < x0) | (column >= x1) | (row < y0) | below):
        raise WireError(f"{what}: expected no pixel outside the box {box}, found some")
    return starts, lengths


def _compress(counts: Integers) -> bytes:
    values = counts.copy()
    # from the fourth on, each count is stored as its difference from the count two before it
    values[3:] -= counts[1:-2]
    shifts = 5 * np.arange(_MAX_CHARACTERS)
    # all characters that a count could have; those behind its last significant one are left out
    digits = (values[:, None] >> shifts) & 31  # [counts, characters]
    rest = values[:, None] >> (shifts + 5)
    more = rest != np.where(digits & 16, -1, 0)
    kept = np.ones_like(more)
    kept[:, 1:] = np.logical_and.accumulate(more[:, :-1], axis=1)
    characters: np.typing.NDArray[np.uint8] = ((digits | more << 5) + 48)[kept].astype(np.uint8)
    return characters.tobytes()


def _decompress(characters: np.typing.NDArray[np.uint8], pixels: int, what: str) -> Integers:
    """Return the counts, the inverse of `_compress`. They are not negative, and their sum is `pixels`."""
    # characters from 48 on; one without the bit 0x20 is the last of its count
    codes = characters - np.uint8(48)
    last = np.flatnonzero(codes < 32)
    if not codes.size or codes.max() > 63 or codes[-1] >= 32:
        raise WireError(
            f"{what}: expected compressed counts, found {describe(characters.tobytes())} of other data"
        )
    first = np.concatenate(([0], last[:-1] + 1))
    lengths = last - first + 1
    if lengths.max() > _MAX_CHARACTERS:
        raise WireError(
            f"{what}: expected counts of at most {_MAX_CHARACTERS} characters, found a longer one"
        )
    # the digits of each count, lowest first, then its sign, then the sums of the differences
    shifts = 5 * (np.arange(codes.size) - np.repeat(first, lengths))
    values = np.add.reduceat((codes & 31).astype(np.int64) << shifts, first)
    values -= np.where(codes[last] & 16, 1 << 5 * lengths, 0)
    values[1::2] = np.cumsum(values[1::2])
    values[2::2] = np.cumsum(values[2::2])
    if values.min() < 0 or values.max() > pixels or values.sum() != pixels:
        raise WireError(f"{what}: expected counts that add up to {pixels} pixels, found others")
    return values


class PackedMask(TypedDict):
    """The map of a mask in a message, which is read as `MaskMap`."""

    encoding: MaskEncoding
    size: list[int]
    box: list[int]
    data: bytes


def encode_mask(mask: Mask, encoding: MaskEncoding = "bits+zstd") -> PackedMask:
    """Return the map of a mask. Its sides may have at most MAX_SIDE pixels."""
    what = "mask"
    # a wrong mask of the node would be refused by every receiver: better here, with its name
    _check_box(mask.box, mask.size, what)
    x0, y0, x1, y1 = mask.box
    if mask.crop.shape != (y1 - y0, x1 - x0) or mask.crop.dtype != np.bool_:
        raise WireError(
            f"{what}: expected a bool crop of the box {mask.box}, found {mask.crop.dtype} {mask.crop.shape}"
        )
    if encoding == "rle":
        data = encode(mask)
    else:
        data = _pack_bits(mask.crop)
    return {
        "encoding": encoding,
        "size": list(mask.size),
        "box": list(mask.box),
        "data": data,
    }


_put = object.__setattr__


class EncodedMask(Mask):
    """A mask whose crop is decoded when it is first used; its size, box and area are known before.

    Using `crop` or `full` raises WireError if the data are damaged, or are not a mask of that area. The header of the
    data was checked before. Threads may share it.
    """

    __slots__ = ("_area", "_encoded", "_what")
    _area: int | None
    _encoded: MaskMap
    _what: str

    def __init__(self, encoded: MaskMap, area: int | None, what: str) -> None:
        """Create a mask of data whose header is valid. None as `area`: it is counted when it is asked for."""
        _put(self, "size", encoded.size)  # the base class is frozen
        _put(self, "box", encoded.box)
        _put(self, "_encoded", encoded)
        _put(self, "_area", area)
        _put(self, "_what", what)

    def __getattr__(self, name: str) -> np.typing.NDArray[np.bool_]:
        """Decode the crop; called only for what is not set, as the crop is not before."""
        if name != "crop":
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        encoded = self._encoded
        crop = _decode_crop(encoded.data, encoded.encoding, encoded.size, encoded.box, self._what)
        if self._area is not None:
            found = int(np.count_nonzero(crop))
            if found != self._area:
                raise WireError(f"{self._what}: expected an area of {self._area} pixels, found {found}")
        # set without a lock: two threads that decode at once set the same crop
        _put(self, "crop", crop)
        return crop

    @property
    def area(self) -> int:
        """Number of pixels inside the mask; as the message says, if it says so."""
        if self._area is None:
            return int(np.count_nonzero(self.crop))
        return self._area

    def __reduce__(self) -> tuple[type[Mask], tuple[Any, ...]]:
        return Mask, (self.size, self.box, self.crop)


def decode_mask(value: object, what: str = "mask") -> Mask:
    """Return the mask of a map. Raises WireError for any other value."""
    return open_mask(convert(value, MaskMap, what), what)


def read_mask(
    fields: Fields,
    max_pixels: int = MAX_MASK_PIXELS,
    frame_size: tuple[int, int] | None = None,
    area: int | None = None,
    is_lazy: bool = False,
    max_bytes: int = _MAX_BYTES,
) -> Mask:
    """Return the mask of a map, as `open_mask` does. Also raises WireError for invalid maps."""
    encoded = convert(fields.whole(), MaskMap, fields.what)
    return open_mask(encoded, fields.what, max_pixels, frame_size, area, is_lazy, max_bytes)


def open_mask(
    encoded: MaskMap,
    what: str,
    max_pixels: int = MAX_MASK_PIXELS,
    frame_size: tuple[int, int] | None = None,
    area: int | None = None,
    is_lazy: bool = False,
    max_bytes: int = _MAX_BYTES,
) -> Mask:
    """Return an encoded mask. With its area, or `is_lazy`, it is an EncodedMask: nothing is decoded yet.

    Raises WireError for boxes of more than `max_pixels`, `rle` of more than `max_bytes`, and images that are not of
    `frame_size` (height, width), if it is given.
    """
    # all that the map says of the mask is checked, whether its pixels are decoded now or later
    size = encoded.size
    box = encoded.box
    data = encoded.data
    if frame_size is not None and frame_size != size:
        raise WireError(f"{what}: expected the frame's size {frame_size} (h, w), found {size}")
    _check_box(box, size, what)
    pixels = (box[2] - box[0]) * (box[3] - box[1])
    if pixels > max_pixels:
        raise WireError(f"{what}: expected a box of at most {max_pixels} pixels, found {box}")
    if encoded.encoding == "rle":
        check_length(data, box, what, max_bytes)
    if area is None and not is_lazy:
        return Mask(size, box, _decode_crop(data, encoded.encoding, size, box, what))
    if area is not None and area > pixels:
        raise WireError(f"{what}: expected an area within the box {box}, found {area} pixels")
    # lazy: is the header of the data valid, and can they hold this box?
    if encoded.encoding != "rle" and (pixels or data):
        codec.check_size(data, (pixels + 7) // 8, what)
    return EncodedMask(encoded, area, what)


def _decode_crop(
    data: bytes, encoding: MaskEncoding, size: tuple[int, int], box: Box, what: str
) -> np.typing.NDArray[np.bool_]:
    if encoding == "rle":
        return decode(data, size, box, what)
    return _unpack_bits(data, (box[3] - box[1], box[2] - box[0]), what)


def _check_box(box: Box, size: tuple[int, int], what: str) -> None:
    height, width = size
    x0, y0, x1, y1 = box
    # an empty mask has a box of zeros
    inside = 0 <= x0 < x1 <= width <= MAX_SIDE and 0 <= y0 < y1 <= height <= MAX_SIDE
    if not inside and any(box):
        raise WireError(
            f"{what}: expected a box of zeros, or inside {width} x {height} (at most {MAX_SIDE}), found {box}"
        )


def _pack_bits(crop: np.typing.NDArray[np.bool_]) -> bytes:
    if not crop.size:
        return b""
    return codec.compress(np.packbits(crop).data)


def _unpack_bits(data: bytes, shape: tuple[int, int], what: str) -> np.typing.NDArray[np.bool_]:
    area = shape[0] * shape[1]
    if not area and not data:
        return np.zeros(shape, dtype=np.bool_)
    bits = np.frombuffer(codec.decompress(data, (area + 7) // 8, what), dtype=np.uint8)
    return np.unpackbits(bits, count=area).view(np.bool_).reshape(shape)
