"""Triton kernels of the memory read on NVIDIA GPUs: keys projected and rotated at once, then attention over them.

The attention is FlashAttention-2 (arXiv 2307.08691) for keys 256 and values 64 wide, which torch's own kernels pad to
256. Each object attends to as many keys as it has, so nothing is masked and no shape depends on the number of memories.
With few objects, the keys are split among more blocks (Flash-Decoding), and the parts are merged by the logarithms of
their sums of exponentials.

Channels of queries and keys are in split order: first the even ones, then the odd ones. A rotary pair is then in two
tensors, and no channel moves; products of queries with keys are the same in any order.

This module imports triton, so import it only where the kernels are wanted.
"""
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula
from triton.testing import do_bench

from .algebra import make_linear
from .memory_read import Tokens

if TYPE_CHECKING:
    from .memory_read import ReadLayer

PROJECT_BLOCK, PROJECT_WARPS = 64, 8
ROTATE_BLOCK = 32
MAX_SPLITS = 8
SPLIT_COST = 0.02
"""Part of the time that one more part of the keys takes: parts are written in float32, then merged."""


class Launch(NamedTuple):
    """Sizes of the attention kernel: queries and keys of a block, warps, and stages of its pipeline."""

    queries: int
    keys: int
    warps: int
    stages: int


LARGE = Launch(128, 64, 8, 3), Launch(128, 64, 8, 2), Launch(64, 64, 4, 3), Launch(128, 32, 8, 3)
SMALL = Launch(64, 64, 4, 2), Launch(128, 32, 8, 2), Launch(64, 32, 4, 2), Launch(64, 32, 4, 3)
"""Launches to choose from by time; the first where none is timed."""
SMALL_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))
"""Compute capabilities whose blocks have 99 KB of shared memory; a LARGE launch takes up to 184."""
_fastest: dict[torch.device, Launch] = {}


# A kernel is compiled for each type of its arguments, and again for integers that 16 divides. Lengths change with each
# new pointer, so they are left out of this: a compilation takes seconds, and frames would wait for it.
LENGTHS = ["tokens", "rows_stride", "full_start", "pointer_start", "query_stride"]


@triton.jit(do_not_specialize=LENGTHS)
def _project_keys(
    x, weight, bias, rotation, rows, counts, out, tokens, rows_stride, full_start, pointer_start,
    WIDTH: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    item = tl.program_id(1).to(tl.int64)
    start = tl.where(token >= pointer_start, pointer_start, tl.where(token >= full_start, full_start, 0))
    region = (token >= full_start).to(tl.int32) + (token >= pointer_start).to(tl.int32)
    inside = (token < tokens) & (token - start < tl.load(counts + item * 3 + region))
    if tl.max(inside.to(tl.int32), 0) == 0:
        return  # no key of the block is attended to
    channel, half = tl.arange(0, WIDTH), tl.arange(0, HALF)
    row = tl.load(rows + item * rows_stride + token, mask=inside, other=0)
    turn = rotation + row[:, None] * (2 * HALF) + half[None, :]
    cos, sin = tl.load(turn), tl.load(turn + HALF)
    source = x + (item * tokens + token[:, None]) * WIDTH + channel[None, :]
    value = tl.load(source, mask=inside[:, None], other=0.0)
    columns = weight + half[None, :] * WIDTH + channel[:, None]
    even = tl.dot(value, tl.load(columns)) + tl.load(bias + half)[None, :]
    odd = tl.dot(value, tl.load(columns + HALF * WIDTH)) + tl.load(bias + HALF + half)[None, :]
    target = out + (item * tokens + token[:, None]) * (2 * HALF) + half[None, :]
    kind = out.dtype.element_ty
    tl.store(target, (even * cos - odd * sin).to(kind), mask=inside[:, None])
    tl.store(target + HALF, (odd * cos + even * sin).to(kind), mask=inside[:, None])


@triton.jit
def _locate_block(block, pooled, full, pointers, full_start, pointer_start, BLOCK_N: tl.constexpr):
    """Return where a block of valid keys begins, where the valid keys of its region end, and if it is pooled."""
    pooled_blocks = tl.cdiv(pooled, BLOCK_N)
    other_blocks = pooled_blocks + tl.cdiv(full, BLOCK_N)
    is_pooled, is_pointer = block < pooled_blocks, block >= other_blocks
    start = tl.where(is_pooled, 0, tl.where(is_pointer, pointer_start, full_start))
    valid = tl.where(is_pooled, pooled, tl.where(is_pointer, pointers, full))
    before = tl.where(is_pooled, 0, tl.where(is_pointer, other_blocks, pooled_blocks))
    return start + (block - before) * BLOCK_N, start + valid, is_pooled


@triton.jit(do_not_specialize=["item_stride"])
def _rotate_pairs(
    x, rotation, out, length, item_stride, row_stride, HALF: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    item, part, parts = tl.program_id(1).to(tl.int64), tl.program_id(2), tl.num_programs(2)
    inside, half = position[:, None] < length, tl.arange(0, HALF)
    source = x + item * item_stride + position[:, None] * row_stride + part * (2 * HALF) + half[None, :]
    turn = rotation + position[:, None] * (2 * HALF) + half[None, :]
    even, odd = tl.load(source, mask=inside, other=0.0), tl.load(source + HALF, mask=inside, other=0.0)
    cos, sin = tl.load(turn, mask=inside, other=0.0), tl.load(turn + HALF, mask=inside, other=0.0)
    target = out + ((item * length + position[:, None]) * parts + part) * (2 * HALF) + half[None, :]
    kind = out.dtype.element_ty
    tl.store(target, (even * cos - odd * sin).to(kind), mask=inside)
    tl.store(target + HALF, (odd * cos + even * sin).to(kind), mask=inside)


@triton.jit(do_not_specialize=LENGTHS)
def _attend(
    query, key, value, counts, rotation, out, log_sum,
    length, tokens, full_start, pointer_start, query_stride, scale, pooled_bias,
    WIDTH: tl.constexpr, HALF: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    position = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    item = tl.program_id(1).to(tl.int64)
    split, splits, items = tl.program_id(2), tl.num_programs(2), tl.num_programs(1)
    inside = position[:, None] < length
    half, width, column = tl.arange(0, HALF), tl.arange(0, WIDTH), tl.arange(0, BLOCK_N)
    kind = key.dtype.element_ty

    source = query + item * query_stride + position[:, None] * (2 * HALF) + half[None, :]
    turn = rotation + position[:, None] * (2 * HALF) + half[None, :]
    even, odd = tl.load(source, mask=inside, other=0.0), tl.load(source + HALF, mask=inside, other=0.0)
    cos, sin = tl.load(turn, mask=inside, other=0.0), tl.load(turn + HALF, mask=inside, other=0.0)
    first, second = (even * cos - odd * sin).to(kind), (odd * cos + even * sin).to(kind)

    pooled, full = tl.load(counts + item * 3), tl.load(counts + item * 3 + 1)
    pointers = tl.load(counts + item * 3 + 2)
    blocks = tl.cdiv(pooled, BLOCK_N) + tl.cdiv(full, BLOCK_N) + tl.cdiv(pointers, BLOCK_N)
    share = tl.cdiv(blocks, splits)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    for block in range(split * share, tl.minimum(blocks, (split + 1) * share)):
        begin, limit, weighted = _locate_block(
            block, pooled, full, pointers, full_start, pointer_start, BLOCK_N
        )
        token = begin + column
        valid = token < limit
        places = key + (item * tokens + token[None, :]) * (2 * HALF) + half[:, None]
        scores = tl.dot(first, tl.load(places, mask=valid[None, :], other=0.0))
        scores = tl.dot(second, tl.load(places + HALF, mask=valid[None, :], other=0.0), scores)
        scores = scores * scale + tl.where(weighted, pooled_bias, 0.0)  # in powers of 2
        scores = tl.where(valid[None, :], scores, float("-inf"))
        peak = tl.maximum(largest, tl.max(scores, 1))
        shrink, weights = tl.exp2(largest - peak), tl.exp2(scores - peak[:, None])
        values = value + (item * tokens + token[:, None]) * WIDTH + width[None, :]
        content = tl.load(values, mask=valid[:, None], other=0.0)
        sums = tl.dot(weights.to(kind), content, sums * shrink[:, None])
        total = total * shrink + tl.sum(weights, 1)
        largest = peak

    row = (split.to(tl.int64) * items + item) * length + position
    sums = sums / tl.maximum(total, 1e-30)[:, None]  # a part without keys has no sum, and weighs nothing
    tl.store(out + row[:, None] * WIDTH + width[None, :], sums, mask=inside)
    tl.store(log_sum + row, largest + tl.log2(tl.maximum(total, 1e-30)), mask=position < length)


class KernelAttend:
    """Attention of one read by the kernels; see `memory_read.Attend`."""

    def __init__(self, tokens: Tokens, rotation: Tensor, area: int, memory: range) -> None:
        """Prepare the read.

        rotation: a table of `split_rotation`; row `area` rotates nothing, rows `memory` rotate a memory's tokens.
        """
        count, total = tokens.keys.shape[:2]
        device, full = rotation.device, tokens.full
        self.tokens, self.starts, self.rotation = tokens, [tokens.reduced, tokens.reduced + full], rotation
        rows = torch.full((len(tokens.rows), total), area, dtype=torch.int32, device=device)
        rows[:, : tokens.reduced] = tokens.rows
        rows[:, tokens.reduced : tokens.reduced + full] = torch.arange(
            memory.start, memory.stop, device=device
        ).repeat(full // len(memory))
        self.rows = rows
        valid = torch.ones(count, total, dtype=torch.bool, device=device)
        if tokens.mask is not None:
            valid[:, total - tokens.mask.shape[-1] :] = tokens.mask[:, 0]
        regions = valid.tensor_split(self.starts, dim=1)
        self.counts = torch.stack([region.sum(dim=1, dtype=torch.int32) for region in regions], dim=1)

    def project_own(self, layer: ReadLayer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `memory_read.Attend`."""
        joined, wide = layer.split_own(x), x.shape[-1]
        query, key = rotate_pairs(joined[..., : 2 * wide], self.rotation).unbind(-2)
        return query, key, joined[..., 2 * wide :]

    def __call__(self, layer: ReadLayer, x: Tensor) -> Tensor:
        project, tokens = layer.split_key, self.tokens
        key = project_keys(
            tokens.keys, project.weight, project.bias, self.rotation, self.rows, self.counts, self.starts
        )
        query = layer.split_query(x)
        return attend(query, key, tokens.values, self.counts, self.rotation, self.starts, tokens.weight)


def split_order(channels: int) -> Tensor:
    """Return the even channels, then the odd ones."""
    return torch.cat([torch.arange(0, channels, 2), torch.arange(1, channels, 2)])


def split_rotation(rotation: Tensor) -> Tensor:
    """Return a rotation table [R, D / 2, (cos, sin)] as float32 [R, 2, D / 2]."""
    return rotation.float().transpose(1, 2).contiguous()


def split_pairs(layer: nn.Linear, parts: int = 1, others: int = 0) -> nn.Linear:
    """Return a linear map with the outputs of `layer`: of each of its first `parts` equal parts, the even ones first.

    The `others` after them keep their order.
    """
    wide = layer.out_features // (parts + others)
    order = [split_order(wide) + part * wide for part in range(parts)]
    rows = torch.cat([*order, torch.arange(parts * wide, layer.out_features)])
    return make_linear(layer.weight, layer.weight[rows], layer.bias[rows])


@torch.library.custom_op("sam3_node::rotate_pairs", mutates_args=())
def rotate_pairs(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate x [N, L, P * D], P vectors in split order, by rotation float32 [R >= L, 2, D / 2]; return [N, L, P, D]."""
    count, length, channels = x.shape
    wide = 2 * rotation.shape[2]
    x = x if x.stride(2) == 1 else x.contiguous()
    out = x.new_empty(count, length, channels // wide, wide)
    _rotate_pairs[(triton.cdiv(length, ROTATE_BLOCK), count, channels // wide)](
        x, rotation, out, length, x.stride(0), x.stride(1), HALF=wide // 2, BLOCK=ROTATE_BLOCK
    )  # fmt: skip
    return out


@rotate_pairs.register_fake
def _(x: Tensor, rotation: Tensor) -> Tensor:
    wide = 2 * rotation.shape[2]
    return x.new_empty(*x.shape[:2], x.shape[2] // wide, wide)


@torch.library.custom_op("sam3_node::project_keys", mutates_args=())
def project_keys(
    x: Tensor, weight: Tensor, bias: Tensor, rotation: Tensor, rows: Tensor, counts: Tensor, starts: list[int]
) -> Tensor:
    """Project tokens x [N, T, W] to keys [N, T, D], rotated; those that are not valid stay undefined.

    weight [D, W] and bias [D] are in split order. rotation float32 [R, 2, D / 2]; rows int32 [1 or N, T] names the row
    of each token. counts and starts: see `attend`.
    """
    count, tokens, width = x.shape
    out = x.new_empty(count, tokens, len(weight))
    stride = 0 if len(rows) == 1 else tokens
    _project_keys[(triton.cdiv(tokens, PROJECT_BLOCK), count)](
        x, weight, bias, rotation, rows, counts, out, tokens, stride, *starts,
        WIDTH=width, HALF=len(weight) // 2, BLOCK=PROJECT_BLOCK, num_warps=PROJECT_WARPS,
    )  # fmt: skip
    return out


@project_keys.register_fake
def _(x: Tensor, weight: Tensor, *rest: object) -> Tensor:
    return x.new_empty(*x.shape[:2], len(weight))


@torch.library.custom_op("sam3_node::attend", mutates_args=())
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    counts: Tensor,
    rotation: Tensor,
    starts: list[int],
    pooled: int,
) -> Tensor:
    """Attend with query [1 or N, L, D], not yet rotated, to key [N, T, D] and value [N, T, W]; return [N, L, W].

    Keys are in three regions: pooled ones, of which each weighs as `pooled` keys, full ones, and pointers. starts:
    where the second and the third begin. counts: int32 [N, 3], valid keys at the beginning of each region, at least
    one in all. rotation: float32 [R >= L, 2, D / 2], a row for each query.
    """
    (count, tokens, wide), length = key.shape, query.shape[1]
    launch = choose_launch(key.device)
    tiles = triton.cdiv(length, launch.queries)
    splits = choose_splits(tiles * count, count_processors(key.device))
    out = value.new_empty(splits, count, length, value.shape[2], dtype=torch.float32)
    log_sum = value.new_empty(splits, count, length, dtype=torch.float32)
    _attend[(tiles, count, splits)](
        query.contiguous(), key, value, counts, rotation, out, log_sum,
        length, tokens, starts[0], starts[1], 0 if len(query) == 1 else length * wide,
        wide**-0.5 * math.log2(math.e), math.log2(pooled),
        WIDTH=value.shape[2], HALF=wide // 2, BLOCK_M=launch.queries, BLOCK_N=launch.keys,
        num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    if splits == 1:
        return out[0].to(query.dtype)
    weights = torch.softmax(log_sum * math.log(2), dim=0)
    return torch.einsum("snlw,snl->nlw", out, weights).to(query.dtype)


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: object) -> Tensor:
    return value.new_empty(len(key), query.shape[1], value.shape[2], dtype=query.dtype)


@register_flop_formula([torch.ops.sam3_node.project_keys])
def _count_projection(x: torch.Size, weight: torch.Size, *rest: object, **_: object) -> int:
    return 2 * x.numel() * weight[0]


@register_flop_formula([torch.ops.sam3_node.attend])
def _count_attention(
    query: torch.Size, key: torch.Size, value: torch.Size, *rest: object, **_: object
) -> int:
    return 2 * query[1] * (key.numel() + value.numel())


def choose_launch(device: torch.device) -> Launch:
    """Return the fastest launch, as far as it was timed."""
    return _fastest.get(device) or list_launches(device)[0]


def list_launches(device: torch.device) -> tuple[Launch, ...]:
    """Return the launches that fit into a GPU's shared memory."""
    is_small = device.type == "cuda" and torch.cuda.get_device_capability(device) in SMALL_MEMORY
    return SMALL if is_small else LARGE


def use_launch(device: torch.device, launch: Launch) -> None:
    """Launch the attention in this way from now on."""
    _fastest[device] = launch


def time_launches(device: torch.device) -> Launch:
    """Return the launch that reads full banks of SAM 3 in the least time.

    A launch that a GPU cannot run is left out. Raises what the last one raises if none runs.
    """
    area, objects = 72 * 72, 4
    query, key, value = (
        torch.zeros(objects, length, wide, dtype=torch.bfloat16, device=device)
        for length, wide in ((area, 256), (7 * area, 256), (7 * area, 64))
    )
    counts = torch.tensor([[0, 7 * area, 0]] * objects, dtype=torch.int32, device=device)
    rotation = torch.ones(area, 2, 128, device=device)
    times, failed = dict[Launch, float](), None
    for launch in list_launches(device):
        use_launch(device, launch)
        try:
            times[launch] = do_bench(lambda: attend(query, key, value, counts, rotation, [0, 7 * area], 1))
        except Exception as error:  # triton has errors of its own, such as for a GPU without the memory
            failed = error
    if failed and not times:
        raise failed
    return min(times, key=lambda launch: times[launch])


def choose_splits(tiles: int, processors: int) -> int:
    """Return into how many parts to split the keys, so that blocks fill the GPU: the number that takes least time."""

    def cost(splits: int) -> float:
        waves = -(-tiles * splits // processors) / splits
        return waves * (1 + SPLIT_COST * (splits - 1))

    return min(range(1, MAX_SPLITS + 1), key=cost)


def count_processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 1 for a CPU, where Triton's interpreter runs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
