"""Bring tracks and masks to the host in one transfer, with binary masks at frame size made from low-resolution logits.

A pixel belongs to the mask if the bilinear interpolation of the logits at its centre is positive (half-pixel centres,
as torch's align_corners=False). `Axis` and `blend` define its bits: integer weights, and products and sums in float32,
each rounded by itself, rows before columns. IEEE 754 leaves no choice there, so every processor finds the same mask
for the same logits. Only the objects' regions are upsampled, in one of two ways:

- From a CPU model, `rasterize` lets OpenCV interpolate. That is faster, but rounds differently from one processor to
  the next, so pixels whose result is too near to zero to trust are decided again by the definition.
- From a GPU, bits are copied instead of logits: first the level sets that confidence needs. The host then knows each
  object's box, so it knows how many bytes all regions take, and `rasterize_on_device` follows the definition in a
  number of operations that does not depend on the number of objects.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from math import gcd
from typing import Any, Generic, NamedTuple, TypeVar

import cv2
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..geometry import Scaling
from ..resumable import Resumable
from ..tracking import Tracks
from ..tracking.confidence import Evidence
from ..tracking.host_copy import HostCopy, copy_to_device
from ..tracking.track_history import LevelSets, compare_levels, find_level_sets
from ..types import Mask
from .prompts import PromptResult

Values = TypeVar("Values", npt.NDArray[Any], Tensor)
Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

LIMIT = 32768.0
"""Logits are clamped to -LIMIT..LIMIT, and NaN counts as -LIMIT."""
MAX_BYTES = 1 << 19
"""Bytes of masks that are made at once. The intermediate values of one take about 500 bytes of the device."""
MASKS_A_TURN = 8
"""Number of masks that are brought to the frame's size between two frames."""
_ROUNDING = 2.0**-21
"""Bound of the error of a float32 interpolation, as a part of the largest logit and for each pixel of a side.

A coordinate of 24 bits is wrong by its 2^-24th part, which enters two weights on each of two axes: 2^-22. The rest, and
8 pixels more, are for the roundings of the products and sums, and a margin for other builds of OpenCV."""


class Axis(NamedTuple, Generic[Values]):
    """Interpolation along one axis, for each of its `high` pixels: first[i] * near[i] + second[i] * far[i]."""

    first: Values
    """int64, index of the low pixel before"""
    second: Values
    """int64, index of the one after, or of the same at the end"""
    near: Values
    far: Values
    """float32, integer weights; their sum is 2 * high for all pixels"""


@lru_cache(maxsize=64)
def axis(low: int, high: int) -> Axis[npt.NDArray[Any]]:
    """Return the interpolation from `low` pixels to `high` pixels."""
    # half-pixel centres: pixel i lies at (i + 1/2) * low / high - 1/2, here in units of 1 / (2 * high) low pixels
    whole = 2 * high
    position = np.clip((2 * np.arange(high) + 1) * low - high, 0, (low - 1) * whole)
    first, far = np.divmod(position, whole)
    return Axis(
        first, np.minimum(first + 1, low - 1), (whole - far).astype(np.float32), far.astype(np.float32)
    )


def blend(before: Any, after: Any, near: Any, far: Any) -> Any:
    """Return before * near + after * far, all float32. Arrays and tensors give the same bits, if none is compiled."""
    return before * near + after * far


def rasterize(logits: npt.NDArray[np.float32], frame_size: tuple[int, int]) -> Mask:
    """Return the mask at `frame_size` (height, width) where the interpolation of logits float32 [h, w] is positive."""
    # the interpolation is positive next to positive logits only, so the rest of the frame needs no work
    x0, y0, width, height = _bounding_box(logits > 0)
    if not width:
        return Mask.empty(frame_size)
    rows, top, y_scale = _aligned_span(y0, y0 + height, logits.shape[0], frame_size[0])
    columns, left, x_scale = _aligned_span(x0, x0 + width, logits.shape[1], frame_size[1])
    low = logits[rows, columns]
    largest = float(np.abs(low).max())
    if not largest <= LIMIT:
        low = clamp(low)
        largest = LIMIT
    # with dsize=None cv2 scales by exactly fx and fy; warpAffine would round coordinates to 1/32 pixel
    region = cv2.resize(low, None, fx=x_scale, fy=y_scale, interpolation=cv2.INTER_LINEAR)
    error = largest * (max(low.shape) + 8) * _ROUNDING
    # between the two thresholds, rounding may have decided: these few pixels follow the definition
    inside = region > error
    possible = region > -error
    if _count(inside) != _count(possible):
        y, x = _find(possible ^ inside)
        inside[y, x] = _interpolate_at(logits, frame_size, y + top, x + left) > 0
    return crop_mask(inside, (left, top), frame_size)


def crop_mask(inside: npt.NDArray[np.bool_], corner: tuple[int, int], frame_size: tuple[int, int]) -> Mask:
    """Return the mask of a frame from a region of it, bool [h, w], whose top-left pixel is `corner` (x, y)."""
    x, y, width, height = _bounding_box(inside)
    left, top = corner
    if not width:
        return Mask.empty(frame_size)
    box = (left + x, top + y, left + x + width, top + y + height)
    return Mask(frame_size, box, np.ascontiguousarray(inside[y : y + height, x : x + width]))


def clamp(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return logits in -LIMIT..LIMIT."""
    return np.fmin(np.fmax(logits, np.float32(-LIMIT)), np.float32(LIMIT))


def _bounding_box(inside: npt.NDArray[np.bool_]) -> Sequence[int]:
    """Return x, y, width and height of the pixels that are True; zeros if there are none."""
    box: Sequence[int] = cv2.boundingRect(inside.view(np.uint8))
    return box


def _count(inside: npt.NDArray[np.bool_]) -> int:
    return cv2.countNonZero(inside.view(np.uint8))


def _find(inside: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return y and x of the few pixels that are True; searching in all rows would take longer."""
    rows = np.flatnonzero(cv2.reduce(inside.view(np.uint8), 1, cv2.REDUCE_MAX))
    y, x = np.nonzero(inside[rows])
    return rows[y], x


def _interpolate_at(
    logits: npt.NDArray[np.float32],
    frame_size: tuple[int, int],
    y: npt.NDArray[np.int64],
    x: npt.NDArray[np.int64],
) -> npt.NDArray[np.float32]:
    """Return the interpolation at pixels (y, x) of the frame by the definition, up to a positive factor."""
    rows = axis(logits.shape[0], frame_size[0])
    columns = axis(logits.shape[1], frame_size[1])
    before, after = (
        blend(
            clamp(logits[rows.first[y], column[x]]),
            clamp(logits[rows.second[y], column[x]]),
            rows.near[y],
            rows.far[y],
        )
        for column in (columns.first, columns.second)
    )
    found: npt.NDArray[np.float32] = blend(before, after, columns.near[x], columns.far[x])
    return found


def _aligned_span(begin: int, end: int, low: int, high: int) -> tuple[slice, int, float]:
    """Return the span of the low axis that [begin, end) needs, its start on the high axis, and the scale.

    The span has one pixel more at each side, because a positive logit reaches that far. At both ends, pixel edges of
    the two axes coincide, so the span scales to a whole number of pixels.
    """
    step = low // gcd(low, high)  # low pixels after which the edges of both axes meet again
    first = max(begin - 1, 0) // step * step
    last = min(-(-(end + 1) // step) * step, low)
    return slice(first, last), first * high // low, high / low


class Region(NamedTuple):
    """The part of a frame that contains a mask: [top, bottom) x [left, right) in pixels of the frame."""

    left: int
    top: int
    right: int
    bottom: int

    @property
    def stride(self) -> int:
        """Bytes of one row of bits."""
        return -(-(self.right - self.left) // 8)


def find_edges(positive: Tensor) -> Tensor:
    """Return the edges of masks, bool [N, h, w], as int16 [N, 4] on their device; `read_boxes` makes boxes of them."""
    sides = []
    for dim in (1, 2):  # the dimension that is left out
        hit = positive.any(dim=dim)
        positions = _positions_on(hit.shape[1], hit.device)
        # the last position, counted from either end; 0 for none
        sides.append((hit[:, None] * positions).amax(dim=2))
    return torch.cat(sides, dim=1)


def read_boxes(edges: npt.NDArray[np.int16], low: Sequence[int]) -> Ints:
    """Return the boxes (x0, y0, x1, y1), [N, 4], of masks of size `low` (h, w); zeros if a mask is empty."""
    # the last position from the right, r, is the first from the left, low - r
    x1, from_right, y1, from_below = edges.astype(np.int64).T
    boxes = np.stack([low[1] - from_right, low[0] - from_below, x1, y1], axis=1)
    boxes[x1 == 0] = 0
    return boxes


class PackedMasks(NamedTuple):
    """Masks that a device makes, as the bits of their regions on the way to the host."""

    regions: list[Region]
    copy: HostCopy | None
    """the rows of all regions, each in whole bytes; None if all masks are empty"""
    frame_size: tuple[int, int]

    def read(self) -> list[Mask]:
        """Wait for the bits, and return the masks."""
        if self.copy is None:
            return [Mask.empty(self.frame_size) for _ in self.regions]
        packed = self.copy.read()
        masks = []
        start = 0
        for region in self.regions:
            height = region.bottom - region.top
            width = region.right - region.left
            end = start + height * region.stride
            inside = unpack_bits(packed[start:end].reshape(height, region.stride), width)
            masks.append(crop_mask(inside, (region.left, region.top), self.frame_size))
            start = end
        return masks


def rasterize_on_device(logits: Tensor, boxes: Ints, frame_size: tuple[int, int]) -> PackedMasks:
    """Begin to make the masks of logits [N, h, w] at `frame_size` (height, width), as `rasterize` does.

    boxes: [N, 4], as `read_boxes` returns them. Nothing waits for the device until the masks are read.
    """
    shape = (int(logits.shape[1]), int(logits.shape[2]))
    regions = [_enlarge(box, shape, frame_size) for box in boxes.tolist()]
    rows = _list_rows(regions)
    if not len(rows):
        return PackedMasks(regions, None, frame_size)
    parts = [_pack_rows(logits, part, frame_size) for part in _split(rows)]
    packed = parts[0] if len(parts) == 1 else torch.cat(parts)
    return PackedMasks(regions, HostCopy(packed), frame_size)


def pack_bits(inside: Tensor) -> Tensor:
    """Pack bool [..., n] into uint8 [..., ceil(n / 8)], the first in the highest bit, as np.packbits does."""
    missing = -inside.shape[-1] % 8
    padded = torch.nn.functional.pad(inside, (0, missing)) if missing else inside
    weighted: Tensor = padded.unflatten(-1, (-1, 8)) * _bits_on(inside.device)
    return weighted.sum(dim=-1, dtype=torch.uint8)


def unpack_bits(packed: Bytes, count: int) -> npt.NDArray[np.bool_]:
    """Undo `pack_bits` of [..., count] on the host."""
    return np.unpackbits(packed, axis=-1, count=count).view(np.bool_)


def _enlarge(box: Sequence[int], low: tuple[int, int], high: tuple[int, int]) -> Region:
    """Return the pixels of the frame that any positive logit in a box contributes to."""
    x0, y0, x1, y1 = box
    if not x1:
        return Region(0, 0, 0, 0)
    # from the first pixel whose second neighbour is in the box, to the last whose first neighbour is
    (top, bottom), (left, right) = (
        (int(np.searchsorted(side.second, begin)), int(np.searchsorted(side.first, end)))
        for side, begin, end in ((axis(low[0], high[0]), y0, y1), (axis(low[1], high[1]), x0, x1))
    )
    return Region(left, top, right, bottom)


def _list_rows(regions: Sequence[Region]) -> Ints:
    """Return one line for each row of each region: index of the object, y, left, and bytes."""
    lines = [
        np.column_stack(
            np.broadcast_arrays(index, np.arange(region.top, region.bottom), region.left, region.stride)
        )
        for index, region in enumerate(regions)
    ]
    return np.concatenate(lines) if lines else np.zeros((0, 4), np.int64)


def _split(rows: Ints) -> Iterator[Ints]:
    """Split rows so that each part takes about MAX_BYTES, in order."""
    part = np.cumsum(rows[:, 3]) // MAX_BYTES
    yield from np.split(rows, np.flatnonzero(np.diff(part)) + 1)


def _pack_rows(logits: Tensor, rows: Ints, frame_size: tuple[int, int]) -> Tensor:
    """Return the bits of rows, one after the other, as uint8 on the device."""
    device = logits.device
    count, height, width = logits.shape
    index, y, left, stride = rows.T
    vertical = axis(height, frame_size[0])
    horizontal = _axis_on(width, frame_size[1], device)
    size = int(stride.sum())
    shift = left - 8 * (np.cumsum(stride) - stride)  # from a bit's number among all to its column
    # one row of a region takes two rows of logits, each at its own weight
    lines = [index * height + side[y] for side in (vertical.first, vertical.second)]
    columns = np.stack(
        [*lines, vertical.near[y], vertical.far[y], shift, stride], dtype=np.int64, casting="unsafe"
    )
    table = copy_to_device(columns, device)  # one copy of integers; float32 holds the weights exactly
    above, below = clamp_tensor(logits.reshape(count * height, width)[table[:2]].float())
    near, far = table[2:4, :, None].float()
    values = blend(above, below, near, far).flatten()  # rows before columns, as the definition says
    row = torch.repeat_interleave(table[5], output_size=size)
    bits = torch.arange(8 * size, device=device).view(size, 8)
    # the host cuts off what is beyond a row's end
    x = (bits + table[4][row, None]).clamp(max=frame_size[1] - 1)
    start = (row * width)[:, None]
    before, after = (values[start + side[x]] for side in (horizontal.first, horizontal.second))
    return pack_bits(blend(before, after, horizontal.near[x], horizontal.far[x]) > 0).flatten()


def clamp_tensor(logits: Tensor) -> Tensor:
    """Return logits in -LIMIT..LIMIT."""
    return logits.nan_to_num(nan=-LIMIT).clamp(-LIMIT, LIMIT)


@lru_cache(maxsize=8)
def _bits_on(device: torch.device) -> Tensor:
    return torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device=device)


@lru_cache(maxsize=8)
def _positions_on(size: int, device: torch.device) -> Tensor:
    """Return 1 to `size`, and the same backward, [2, size]."""
    ascending = torch.arange(1, size + 1, dtype=torch.int16, device=device)
    return torch.stack([ascending, ascending.flip(0)])


@lru_cache(maxsize=64)
def _axis_on(low: int, high: int, device: torch.device) -> Axis[Tensor]:
    return Axis(*(torch.from_numpy(values).to(device) for values in axis(low, high)))


class LowMasks(NamedTuple):
    """N masks at low resolution."""

    logits: Tensor
    """[N, h, w] on the model's device"""
    levels: LevelSets
    boxes: npt.NDArray[np.int64] | None
    """[N, 4], if the device rasterises"""

    def rasterize(self, frame_size: tuple[int, int]) -> Callable[[], list[Mask]]:
        """Begin to make the masks at `frame_size` (height, width); return a function that waits for them.

        A GPU makes them meanwhile, the host within that function.
        """
        if self.boxes is not None:
            return rasterize_on_device(self.logits, self.boxes, frame_size).read
        return lambda: [rasterize(logits, frame_size) for logits in self.logits.numpy()]


class HostTracks(NamedTuple):
    """The tracks of N objects on one frame, on the host."""

    evidence: Evidence
    masks: LowMasks


def rasterizes(device: torch.device) -> bool:
    """Return True for devices that rasterise masks; the host does it for a model on a CPU, where OpenCV is faster."""
    return device.type == "cuda"


@torch.inference_mode()
def copy_to_host(tracks: Tracks) -> HostTracks:
    """Copy tracks to the host at once. The copy waits for the work that the device was given so far."""
    masks, (scores, visible, presence, pointers) = copy_masks(
        tracks.logits,
        [tracks.scores.float(), tracks.visible, tracks.presence.float(), tracks.pointers.float()],
    )
    evidence = Evidence(tracks.ids, masks.levels, clamp_scores(scores), visible.tolist(), presence, pointers)
    return HostTracks(evidence, masks)


def to_prompt_results(seq: int, scaling: Scaling, logits: Tensor, scores: Tensor) -> list[PromptResult]:
    """Make K masks of frame `seq`, at the frame's size, from logits [K, h, w] and scores [K], or [] for one."""
    low, (values,) = copy_masks(logits, [scores.reshape(len(logits)).float()])
    masks = low.rasterize(scaling.frame_size)()
    return [PromptResult(seq, *pair) for pair in zip(masks, clamp_scores(values), strict=True)]


def to_results_job(
    seq: int, scaling: Scaling, logits: Tensor, scores: Tensor
) -> Resumable[list[PromptResult]]:
    """Make K masks as `to_prompt_results` does, some a turn, and leave out empty ones."""
    results = []
    for some, their_scores in zip(logits.split(MASKS_A_TURN), scores.split(MASKS_A_TURN), strict=True):
        results += to_prompt_results(seq, scaling, some, their_scores)
        yield
    return [result for result in results if result.mask.area]


def copy_masks(logits: Tensor, columns: Sequence[Tensor] = ()) -> tuple[LowMasks, list[npt.NDArray[Any]]]:
    """Copy what the host needs of logits [N, h, w], and tensors [N, ...] of the same device, in one transfer."""
    if not rasterizes(logits.device):
        logits = logits.float()
        return LowMasks(logits, find_level_sets(logits.numpy()), None), [column.numpy() for column in columns]
    # a bit for each cell and level instead of four bytes of logits
    levels = torch.stack(compare_levels(logits), dim=1)
    bits, edges, *values = columns_to_host([pack_bits(levels.flatten(2)), find_edges(logits > 0), *columns])
    boxes = read_boxes(edges, logits.shape[-2:])
    inside, core, surroundings = (
        unpack_bits(bits, levels.shape[2:].numel()).reshape(levels.shape).swapaxes(0, 1)
    )
    return LowMasks(logits, LevelSets(inside, core, surroundings, boxes[:, 2] == 0), boxes), values


def columns_to_host(columns: Sequence[Tensor]) -> list[npt.NDArray[Any]]:
    """Copy tensors [N, ...] of one device to arrays of the same shapes and dtypes, in one transfer."""
    parts = [
        column.reshape(len(column), column.shape[1:].numel())
        .contiguous()
        .view(torch.uint8)  # bytes of any dtype
        for column in columns
    ]
    rows = HostCopy(torch.cat(parts, dim=1)).read()
    ends = np.cumsum([part.shape[1] for part in parts])
    return [
        np.ascontiguousarray(part).view(str(column.dtype).removeprefix("torch.")).reshape(column.shape)
        for part, column in zip(np.split(rows, ends[:-1], axis=1), columns, strict=True)
    ]


def clamp_scores(scores: npt.NDArray[np.float32]) -> list[float]:
    """Clamp scores to 0..1, and NaN to 0."""
    return [min(max(score, 0.0), 1.0) if score == score else 0.0 for score in scores.tolist()]
