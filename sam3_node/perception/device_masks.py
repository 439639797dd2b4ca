"""Masks at frame size made on the model's device: only the bits of the objects' regions come to the host.

The host knows each object's box at low resolution, so it knows how many bytes all regions take. The device interpolates
the logits by the definition in `perception.rasterize`, in operations that round one by one, so the masks equal those of
`rasterize` bit for bit. The number of operations does not depend on the number of objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..tracking.host_copy import HostCopy, copy_to_device
from ..types import Mask
from .rasterize import LIMIT, axis, blend, crop_mask

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

MAX_BYTES = 1 << 19
"""Bytes of masks that are made at once. The intermediate values of one take about 500 bytes of the device."""


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
        places = _places_on(hit.shape[1], hit.device)
        sides.append((hit[:, None] * places).amax(dim=2))
    return torch.cat(sides, dim=1)


def read_boxes(edges: npt.NDArray[np.int16], low: Sequence[int]) -> Ints:
    """Return the boxes (x0, y0, x1, y1), [N, 4], of masks of size `low` (h, w); zeros if a mask is empty."""
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
        packed, masks, start = self.copy.read(), [], 0
        for region in self.regions:
            height, width = region.bottom - region.top, region.right - region.left
            end = start + height * region.stride
            inside = unpack_bits(packed[start:end].reshape(height, region.stride), width)
            masks.append(crop_mask(inside, (region.left, region.top), self.frame_size))
            start = end
        return masks


def rasterize_on_device(logits: Tensor, boxes: Ints, frame_size: tuple[int, int]) -> PackedMasks:
    """Begin to make the masks of logits [N, h, w] at `frame_size` (height, width), as `rasterize` does.

    boxes: those of `read_boxes`, [N, 4]. Nothing waits for the device until the masks are read.
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
    device, (count, height, width) = logits.device, logits.shape
    index, y, left, stride = rows.T
    vertical, horizontal = axis(height, frame_size[0]), _axis_on(width, frame_size[1], device)
    size = int(stride.sum())
    shift = left - 8 * (np.cumsum(stride) - stride)  # from a bit's number among all to its column
    lines = [index * height + side[y] for side in (vertical.first, vertical.second)]
    columns = np.stack(
        [*lines, vertical.near[y], vertical.far[y], shift, stride], dtype=np.int64, casting="unsafe"
    )
    table = copy_to_device(columns, device)
    above, below = clamp(logits.reshape(count * height, width)[table[:2]].float())
    near, far = table[2:4, :, None].float()
    values = blend(above, below, near, far).flatten()
    row = torch.repeat_interleave(table[5], output_size=size)
    bits = torch.arange(8 * size, device=device).view(size, 8)
    x = (bits + table[4][row, None]).clamp(
        max=frame_size[1] - 1
    )  # the host cuts off what is beyond a row's end
    start = (row * width)[:, None]
    before, after = (values[start + side[x]] for side in (horizontal.first, horizontal.second))
    return pack_bits(blend(before, after, horizontal.near[x], horizontal.far[x]) > 0).flatten()


def clamp(logits: Tensor) -> Tensor:
    """Return logits in -LIMIT..LIMIT."""
    return logits.nan_to_num(nan=-LIMIT).clamp(-LIMIT, LIMIT)


class _DeviceAxis(NamedTuple):
    """An `Axis` on a device."""

    first: Tensor
    second: Tensor
    near: Tensor
    far: Tensor


@lru_cache(maxsize=8)
def _bits_on(device: torch.device) -> Tensor:
    return torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device=device)


@lru_cache(maxsize=8)
def _places_on(size: int, device: torch.device) -> Tensor:
    """Return 1 to `size`, and the same backward, [2, size]."""
    ascending = torch.arange(1, size + 1, dtype=torch.int16, device=device)
    return torch.stack([ascending, ascending.flip(0)])


@lru_cache(maxsize=64)
def _axis_on(low: int, high: int, device: torch.device) -> _DeviceAxis:
    return _DeviceAxis(*(torch.from_numpy(values).to(device) for values in axis(low, high)))
