"""Triton kernels for NVIDIA GPUs: rotary encoding, keys of memory attention, attention to them, norms, and FP8.

The attention is FlashAttention-2 (arXiv 2307.08691) for keys 256 and values 64 wide, which torch's own kernels pad to
256. Each object attends to as many keys as are valid. No shape depends on how many these are, and the main loops have
no masks: only the last block of each region does. With few objects, the keys are split among more blocks
(Flash-Decoding), and the parts are merged by the logarithms of their sums of exponentials.

Norms take many rows a block, where torch's take one.

This module imports triton, so import it only where the kernels are wanted.
"""
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula
from triton.testing import do_bench

from .cudnn import attend_cudnn, has_cudnn
from .probes import relative_error

PROJECT_BLOCK = 64
"""Tokens that one program of the key projection processes."""
PROJECT_WARPS = 8
"""Warps of one program of the key projection."""
PROJECT_PARTS = 4
"""Number of programs that divide the memories of one block of tokens among them. It is used while there are fewer than
PROJECT_FILLED blocks, that is for few objects."""
PROJECT_FILLED = 512
"""Number of programs from which on the GPU is busy without dividing the work further."""
ROTATE_BLOCK = 64
"""Vectors that one program of the rotary encoding processes."""
NORM_VALUES = 4096
"""Values that one program of a normalisation processes: rows times channels."""
QUANTISE_BLOCK = 2048
"""Values that one program of the rounding to FP8 processes."""
MAX_SPLITS = 8
"""Largest number of parts into which the keys are split, so that few objects fill the GPU."""
CUDNN_QUERIES = 128
"""Queries that one block of cuDNN's attention processes. A multiprocessor runs one block at a time."""
MIN_FILLED = 0.8
"""Share of the multiprocessors that cuDNN's blocks must fill to be faster than ours, which split keys instead. On an
H100, 2 or 4 objects fill 0.62, and 3, 6, 8, 12 or 16 fill 0.83 or more."""
SPLIT_COST = 0.02
"""Share of the time that one more part of the keys costs: parts are written in float32, then merged."""


class Launch(NamedTuple):
    """Sizes of the attention kernel."""

    queries: int
    """of a block"""
    keys: int
    """of a block"""
    warps: int
    stages: int
    """of the pipeline that loads keys and values"""


LARGE = (Launch(128, 64, 8, 3), Launch(128, 64, 8, 2), Launch(64, 64, 4, 3), Launch(128, 128, 8, 2))
"""Launch settings for GPUs with 227 KB of shared memory a block, the fastest on an H100 first."""
MIDDLE = (Launch(128, 64, 8, 2), Launch(64, 64, 4, 2), Launch(64, 64, 4, 3), Launch(128, 32, 8, 2))
"""Launch settings for GPUs with 163 KB of shared memory a block. Their order is a guess, not measured."""
SMALL = (Launch(64, 32, 4, 2), Launch(64, 32, 4, 3), Launch(64, 64, 4, 1), Launch(128, 16, 8, 2))
"""Launch settings for GPUs with 99 KB of shared memory a block. Their order is a guess, not measured."""
MIDDLE_MEMORY = ((8, 0), (8, 7))
"""Compute capabilities whose blocks have 163 KB of shared memory."""
SMALL_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))
"""Compute capabilities whose blocks have 99 KB of shared memory."""
_chosen: dict[torch.device, Launch] = {}
"""Launches that `use_launch` has set, by devices that have their numbers."""

# A kernel is compiled for each type of its arguments, and again for integers that 16 divides. Numbers of tokens change
# with the bank, so they are left out of this: a compilation takes seconds, and frames would wait for it.
LENGTHS = ["tokens", "rows_stride", "full_start", "pointer_start", "memory_tokens", "first_row", "no_row"]


@triton.jit(do_not_specialize=["outer_stride"])
def _rotate(
    x, rotation, vectors, inner, outer_stride, position_stride, inner_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate the channel pairs of vectors [outer, positions, inner, WIDTH] in place."""
    vector = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, WIDTH)
    inside = vector[:, None] < vectors
    position = vector // inner
    start = tl.program_id(1).to(tl.int64) * outer_stride + position * position_stride
    address = x + (start + vector % inner * inner_stride)[:, None] + channel[None, :]
    pairs = tl.reshape(tl.load(address, mask=inside, other=0.0), (BLOCK, WIDTH // 2, 2))
    turn = rotation + position[:, None] * WIDTH + channel[None, :]
    turns = tl.reshape(tl.load(turn, mask=inside, other=0.0), (BLOCK, WIDTH // 2, 2))
    even, odd = tl.split(pairs.to(tl.float32))
    cos, sin = tl.split(turns)
    rotated = tl.join(even * cos - odd * sin, odd * cos + even * sin)
    tl.store(address, tl.reshape(rotated, (BLOCK, WIDTH)).to(x.dtype.element_ty), mask=inside)


@triton.jit
def _project_block(
    x, out, start, token, inside, even_weight, odd_weight, even_bias, odd_bias, cos, sin,
    WIDTH: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Project a block of tokens of an object, which begins at row `start`, and rotate the keys."""
    source = x + (start + token[:, None]) * WIDTH + tl.arange(0, WIDTH)[None, :]
    value = tl.load(source, mask=inside[:, None], other=0.0)
    # even and odd channels are two products, and are joined again when they are stored
    even = tl.dot(value, even_weight) + even_bias[None, :]
    odd = tl.dot(value, odd_weight) + odd_bias[None, :]
    rotated = tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), (BLOCK, 2 * HALF))
    target = out + (start + token[:, None]) * (2 * HALF) + tl.arange(0, 2 * HALF)[None, :]
    tl.store(target, rotated.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=LENGTHS)
def _project_keys(
    x, weight, bias, rotation, rows, counts, out,
    tokens, rows_stride, full_start, pointer_start, first_row, memory_tokens, no_row,
    WIDTH: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Project tokens to keys and rotate them, where a region has valid ones.

    The first programs take one block of token positions each, of every `num_programs(2)`th whole memory: keys at one
    position have the same rotation. The others take blocks of pooled tokens, then of pointers.
    """
    block = tl.program_id(0)
    item = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    pooled = tl.load(counts + item * 3)
    full = tl.load(counts + item * 3 + 1)
    pointers = tl.load(counts + item * 3 + 2)
    offset = tl.arange(0, BLOCK)
    channel = tl.arange(0, WIDTH)
    half = tl.arange(0, HALF)
    columns = weight + 2 * half[None, :] * WIDTH + channel[:, None]
    even_weight = tl.load(columns)
    odd_weight = tl.load(columns + WIDTH)
    even_bias = tl.load(bias + 2 * half)
    odd_bias = tl.load(bias + 2 * half + 1)

    position_blocks = tl.cdiv(memory_tokens, BLOCK)
    if block < position_blocks:
        position = block * BLOCK + offset
        turn = rotation + (first_row + position[:, None]) * (2 * HALF) + 2 * half[None, :]
        cos = tl.load(turn, mask=position[:, None] < memory_tokens, other=0.0)
        sin = tl.load(turn + 1, mask=position[:, None] < memory_tokens, other=0.0)
        for begin in range(part * memory_tokens, full, tl.num_programs(2) * memory_tokens):
            inside = (position < memory_tokens) & (begin + position < full)
            _project_block(
                x, out, item * tokens, full_start + begin + position, inside,
                even_weight, odd_weight, even_bias, odd_bias, cos, sin, WIDTH, HALF, BLOCK,
            )  # fmt: skip
    elif part == 0:
        pooled_blocks = tl.cdiv(full_start, BLOCK)
        rest = block - position_blocks
        is_pooled = rest < pooled_blocks
        token = tl.where(is_pooled, rest * BLOCK, pointer_start + (rest - pooled_blocks) * BLOCK) + offset
        inside = token < tl.where(is_pooled, pooled, pointer_start + pointers)
        # pooled tokens list their rows of the rotation table; pointers do not turn
        lists = token < tl.where(is_pooled, pooled, 0)
        listed = tl.load(rows + item * rows_stride + token, mask=lists, other=0)
        row = tl.where(is_pooled, listed, no_row)
        turn = rotation + row[:, None] * (2 * HALF) + 2 * half[None, :]
        _project_block(
            x, out, item * tokens, token, inside,
            even_weight, odd_weight, even_bias, odd_bias, tl.load(turn), tl.load(turn + 1), WIDTH, HALF, BLOCK,
        )  # fmt: skip


@triton.jit
def _take_block(query, keys, values, inside, largest, total, sums, scale, bias, MASKED: tl.constexpr):
    """Add a block of keys to the running softmax: the largest score, the sum of exponentials, and sums of values."""
    scores = tl.dot(query, keys)
    if MASKED:
        scores = tl.where(inside[None, :], scores, float("-inf"))
    peak = tl.maximum(largest, tl.max(scores, 1) * scale + bias)
    shrink = tl.exp2(largest - peak)
    weights = tl.exp2(scores * scale - (peak - bias)[:, None])
    sums = tl.dot(weights.to(values.dtype), values, sums * shrink[:, None])
    return peak, total * shrink + tl.sum(weights, 1), sums


@triton.jit
def _take_whole_blocks(
    query, key, value, start, begin, end, largest, total, sums, scale, bias,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Take the blocks from `begin` to `end` of a region that starts at token `start`; all their keys are valid."""
    column = tl.arange(0, BLOCK_N)
    token = start + begin * BLOCK_N + column
    keys = key + token[None, :] * WIDE + tl.arange(0, WIDE)[:, None]
    values = value + token[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    for _ in range(begin, end):
        largest, total, sums = _take_block(
            query, tl.load(keys), tl.load(values), column, largest, total, sums, scale, bias, False
        )
        keys += BLOCK_N * WIDE
        values += BLOCK_N * WIDTH
    return largest, total, sums


@triton.jit
def _locate_rest(
    rest, pooled, full, pointers, full_start, pointer_start, pooled_rest, full_rest, pooled_taken, full_taken,
    BLOCK_N: tl.constexpr, POOLED: tl.constexpr,
):  # fmt: skip
    """Return where a block that needs a mask begins, where the valid keys of its region end, and if it is pooled."""
    is_pooled = rest < pooled_rest
    is_full = (rest >= pooled_rest) & (rest < pooled_rest + full_rest)
    pointer = (rest - pooled_rest - full_rest) * BLOCK_N
    start = tl.where(is_full, full_start + full_taken, pointer_start + pointer)
    limit = tl.where(is_full, full_start + full, pointer_start + pointers)
    if POOLED:
        start = tl.where(is_pooled, pooled_taken, start)
        limit = tl.where(is_pooled, pooled, limit)
    return start, limit, is_pooled


@triton.jit(do_not_specialize=LENGTHS)
def _attend(
    query, key, value, counts, out, log_sum, length, tokens, full_start, pointer_start, scale, pooled_bias,
    WIDTH: tl.constexpr, WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, POOLED: tl.constexpr,
):  # fmt: skip
    """Attend with BLOCK_M queries of an object to one part of its valid keys."""
    position = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    item = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    items = tl.num_programs(1)
    inside = position[:, None] < length
    wide = tl.arange(0, WIDE)
    width = tl.arange(0, WIDTH)
    column = tl.arange(0, BLOCK_N)
    source = query + (item * length + position[:, None]) * WIDE + wide[None, :]
    queries = tl.load(source, mask=inside, other=0.0)
    key += item * tokens * WIDE
    value += item * tokens * WIDTH

    # blocks are counted in this order: whole ones of pooled keys, of full ones, then blocks that need a mask
    pooled = tl.load(counts + item * 3)
    full = tl.load(counts + item * 3 + 1)
    pointers = tl.load(counts + item * 3 + 2)
    whole_pooled = pooled // BLOCK_N if POOLED else 0
    whole_full = full // BLOCK_N
    whole = whole_pooled + whole_full
    pooled_rest = tl.cdiv(pooled, BLOCK_N) - whole_pooled if POOLED else 0
    full_rest = tl.cdiv(full, BLOCK_N) - whole_full
    blocks = whole + pooled_rest + full_rest + tl.cdiv(pointers, BLOCK_N)
    share = tl.cdiv(blocks, splits)
    begin = split * share
    end = tl.minimum(blocks, begin + share)

    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, WIDTH], tl.float32)
    if POOLED:
        largest, total, sums = _take_whole_blocks(
            queries, key, value, 0, begin, tl.minimum(end, whole_pooled),
            largest, total, sums, scale, pooled_bias, WIDTH, WIDE, BLOCK_N,
        )  # fmt: skip
    largest, total, sums = _take_whole_blocks(
        queries, key, value, full_start, tl.maximum(begin - whole_pooled, 0), tl.minimum(end, whole) - whole_pooled,
        largest, total, sums, scale, 0.0, WIDTH, WIDE, BLOCK_N,
    )  # fmt: skip
    for block in range(tl.maximum(begin, whole), end):
        start, limit, is_pooled = _locate_rest(
            block - whole, pooled, full, pointers, full_start, pointer_start, pooled_rest, full_rest,
            whole_pooled * BLOCK_N, whole_full * BLOCK_N, BLOCK_N, POOLED,
        )  # fmt: skip
        token = start + column
        valid = token < limit
        keys = tl.load(key + token[None, :] * WIDE + wide[:, None], mask=valid[None, :], other=0.0)
        values = tl.load(value + token[:, None] * WIDTH + width[None, :], mask=valid[:, None], other=0.0)
        bias = tl.where(is_pooled, pooled_bias, 0.0) if POOLED else 0.0
        largest, total, sums = _take_block(
            queries, keys, values, valid, largest, total, sums, scale, bias, True
        )

    row = (split.to(tl.int64) * items + item) * length + position
    sums = sums / tl.maximum(total, 1e-30)[:, None]  # a part without keys has no sum, and weighs nothing
    tl.store(out + row[:, None] * WIDTH + width[None, :], sums, mask=inside)
    tl.store(log_sum + row, largest + tl.log2(tl.maximum(total, 1e-30)), mask=position < length)


@triton.jit
def _layer_norm(
    x, weight, bias, out, rows, eps, WIDTH: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Normalise BLOCK rows of WIDTH values; WIDE is the next power of two."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, WIDE)
    inside = (row[:, None] < rows) & (column[None, :] < WIDTH)
    offset = row[:, None] * WIDTH + column[None, :]
    values = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(values, 1) / WIDTH
    centred = tl.where(column[None, :] < WIDTH, values - mean[:, None], 0.0)
    inverse = tl.rsqrt(tl.sum(centred * centred, 1) / WIDTH + eps)
    scale = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    normed = centred * inverse[:, None] * scale[None, :] + shift[None, :]
    tl.store(out + offset, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _normalise_channels(
    x, weight, bias, out, pixels, eps, CHANNELS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Divide pixels of maps [N, CHANNELS, pixels] by their root mean square, scale, shift, and apply GELU."""
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channel = tl.arange(0, CHANNELS)
    start = tl.program_id(1).to(tl.int64) * CHANNELS * pixels
    offset = start + channel[:, None] * pixels + pixel[None, :]
    inside = pixel[None, :] < pixels
    values = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, 0) / CHANNELS + eps)
    scale = tl.load(weight + channel).to(tl.float32)
    shift = tl.load(bias + channel).to(tl.float32)
    normed = values * inverse[None, :] * scale[:, None] + shift[:, None]
    active = 0.5 * normed * (1.0 + tl.erf(normed * 0.7071067811865476))
    tl.store(out + offset, active.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _quantise(x, inverse, out, total, GELU: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """Multiply BLOCK values, after the GELU if asked for, by the inverse scale, and round them to FP8."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < total
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        values = 0.5 * values * (1.0 + tl.erf(values * 0.7071067811865476))
    scaled = values * tl.load(inverse)
    clipped = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
    tl.store(out + place, clipped.to(out.dtype.element_ty), mask=inside)


@torch.library.custom_op("sam3_node::quantise", mutates_args=())
def quantise(x: Tensor, inverse: Tensor, gelu: bool) -> Tensor:
    """Round x times `inverse` [] to FP8 (E4M3), after the exact GELU if `gelu`; larger values saturate."""
    x = x.contiguous()
    out = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    total = x.numel()
    _quantise[(triton.cdiv(total, QUANTISE_BLOCK),)](
        x, inverse, out, total, GELU=gelu, LARGEST=torch.finfo(out.dtype).max, BLOCK=QUANTISE_BLOCK
    )
    return out


@quantise.register_fake
def _(x: Tensor, inverse: Tensor, gelu: bool) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn)


@torch.library.custom_op("sam3_node::layer_norm", mutates_args=())
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalise x [..., C] over its last axis, then scale and shift by weight [C] and bias [C]."""
    x = x.contiguous()
    out = torch.empty_like(x)
    width = x.shape[-1]
    rows = x.numel() // width
    wide = triton.next_power_of_2(width)
    block = max(1, NORM_VALUES // wide)
    _layer_norm[(triton.cdiv(rows, block),)](
        x, weight, bias, out, rows, eps, WIDTH=width, WIDE=wide, BLOCK=block
    )
    return out


@layer_norm.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("sam3_node::normalise_channels", mutates_args=())
def normalise_channels(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Divide each pixel of x [N, C, h, w] by its root mean square over C, scale, shift, and apply the exact GELU.

    C is a power of two.
    """
    x = x.contiguous()
    out = torch.empty_like(x)
    count = x.shape[0]
    channels = x.shape[1]
    pixels = x.shape[2] * x.shape[3]
    block = max(16, NORM_VALUES // channels)
    _normalise_channels[(triton.cdiv(pixels, block), count)](
        x, weight, bias, out, pixels, eps, CHANNELS=channels, BLOCK=block
    )
    return out


@normalise_channels.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


def rotate_in_place(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate the channel pairs of x [B, L, ..., D] by rotation float32 [L, ..., D / 2, 2]; return x.

    Between L and D there is at most one axis, whose vectors turn alike. D is a power of two, and x is contiguous along
    it.
    """
    rotate_pairs(x, rotation)
    return x


@torch.library.custom_op("sam3_node::rotate_pairs", mutates_args=("x",))
def rotate_pairs(x: Tensor, rotation: Tensor) -> None:
    """Do what `rotate_in_place` does, as an operation that can be traced."""
    outer = x.shape[0]
    length = x.shape[1]
    width = x.shape[-1]
    inner = x.shape[2] if x.ndim == 4 else 1
    vectors = length * inner
    _rotate[(triton.cdiv(vectors, ROTATE_BLOCK), outer)](
        x, rotation, vectors, inner, x.stride(0), x.stride(1), x.stride(2) if x.ndim == 4 else 0,
        WIDTH=width, BLOCK=ROTATE_BLOCK,
    )  # fmt: skip


@rotate_pairs.register_fake
def _(x: Tensor, rotation: Tensor) -> None:
    return None


@torch.library.custom_op("sam3_node::project_keys", mutates_args=())
def project_keys(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    rotation: Tensor,
    rows: Tensor,
    counts: Tensor,
    starts: list[int],
    table: list[int],
) -> Tensor:
    """Project tokens x [N, T, W] to keys [N, T, D], rotated; keys that are not valid stay undefined.

    weight [D, W], bias [D]. rotation: float32 [R, D / 2, (cos, sin)]. rows: int32 [1 or N, reduced], the row of the
    rotation table of each token of the first region. table: the row of a memory's first token, the number of its
    tokens, and the row that turns nothing. counts and starts: see `attend`.
    """
    count, tokens, width = x.shape
    out = x.new_empty(count, tokens, len(weight))
    stride = 0 if len(rows) == 1 else rows.stride(0)
    pooled = starts[0]
    pointers = tokens - starts[1]
    blocks = sum(triton.cdiv(part, PROJECT_BLOCK) for part in (table[1], pooled, pointers))
    parts = PROJECT_PARTS if count * blocks < PROJECT_FILLED else 1
    _project_keys[(blocks, count, parts)](
        x, weight, bias, rotation, rows, counts, out, tokens, stride, *starts, *table,
        WIDTH=width, HALF=len(weight) // 2, BLOCK=PROJECT_BLOCK, num_warps=PROJECT_WARPS,
    )  # fmt: skip
    return out


# Implementations for tracing read sizes by `shape`: len() would turn a size that varies into a constant.
@project_keys.register_fake
def _(x: Tensor, weight: Tensor, *rest: object) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1], weight.shape[0])


@torch.library.custom_op("sam3_node::attend", mutates_args=())
def attend(
    query: Tensor, key: Tensor, value: Tensor, counts: Tensor, starts: list[int], pooled: int, alike: bool
) -> Tensor:
    """Attend with query [N, L, D] to key [N, T, D] and value [N, T, W]; return [N, L, W].

    Keys are in three regions: pooled ones, of which each weighs as `pooled` keys, full ones, and pointers. starts:
    where the second and the third begin. counts: int32 [N, 3], valid keys at the beginning of each region, at least
    one in all. alike: all keys are valid, and weigh alike. cuDNN attends then, if its blocks fill the GPU.
    """
    (count, tokens, wide) = key.shape
    length = query.shape[1]
    if alike and fills(count, length, key.device) and has_cudnn(key.device, key.dtype):
        return attend_cudnn(query, key, value).out
    launch = choose_launch(key.device)
    tiles = triton.cdiv(length, launch.queries)
    splits = choose_splits(tiles * count, count_processors(key.device))
    out = value.new_empty(splits, count, length, value.shape[2], dtype=torch.float32)
    log_sum = value.new_empty(splits, count, length, dtype=torch.float32)
    _attend[(tiles, count, splits)](
        query.contiguous(), key, value, counts, out, log_sum, length, tokens, *starts,
        wide**-0.5 * math.log2(math.e), math.log2(pooled),
        WIDTH=value.shape[2], WIDE=wide, BLOCK_M=launch.queries, BLOCK_N=launch.keys, POOLED=starts[0] > 0,
        num_warps=launch.warps, num_stages=launch.stages,
    )  # fmt: skip
    if splits == 1:
        return out[0].to(query.dtype)
    weights = torch.softmax(log_sum * math.log(2), dim=0)
    return torch.einsum("snlw,snl->nlw", out, weights).to(query.dtype)


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: object) -> Tensor:
    return value.new_empty(key.shape[0], query.shape[1], value.shape[2], dtype=query.dtype)


@register_flop_formula([torch.ops.sam3_node.project_keys])
def _count_projection(x: torch.Size, weight: torch.Size, *rest: object, **_: object) -> int:
    return 2 * x.numel() * weight[0]


@register_flop_formula([torch.ops.sam3_node.attend])
def _count_attention(
    query: torch.Size, key: torch.Size, value: torch.Size, *rest: object, **_: object
) -> int:
    return 2 * query[1] * (key.numel() + value.numel())


def _measure_norms(x: Tensor, weight: Tensor, bias: Tensor) -> Iterator[float]:
    """Yield the relative errors of both norms, on x [B, L, D]."""
    weight = weight * 1.5
    right = F.layer_norm(x.float(), weight.shape, weight.float(), bias.float(), 1e-6)
    yield relative_error(layer_norm(x, weight, bias, 1e-6), right)
    maps = x[..., :64].transpose(1, 2).unflatten(2, (-1, 8)).contiguous()  # [B, 64, L / 8, 8]
    some = weight[:64, None, None].float(), bias[:64, None, None].float()
    inverse = (maps.float().square().mean(dim=1, keepdim=True) + 1e-6).rsqrt()
    found = normalise_channels(maps, weight[:64], bias[:64], 1e-6)
    yield relative_error(found, F.gelu(maps.float() * inverse * some[0] + some[1]))


def fills(count: int, queries: int, device: torch.device) -> bool:
    """Return True if cuDNN's blocks for so many queries of each object leave few multiprocessors of a GPU idle."""
    blocks = count * triton.cdiv(queries, CUDNN_QUERIES)
    processors = count_processors(device)
    waves = triton.cdiv(blocks, processors)
    return blocks / (waves * processors) >= MIN_FILLED


def choose_launch(device: torch.device) -> Launch:
    """Return the launch that `use_launch` has set for a device, else the first of its list."""
    return _chosen.get(_number(device)) or list_launches(device)[0]


def list_launches(device: torch.device) -> tuple[Launch, ...]:
    """Return the launches that fit into a GPU's shared memory."""
    if device.type != "cuda":
        return LARGE
    capability = torch.cuda.get_device_capability(device)
    if capability in SMALL_MEMORY:
        return SMALL
    return MIDDLE if capability in MIDDLE_MEMORY else LARGE


def use_launch(device: torch.device, launch: Launch) -> None:
    """Launch the attention on a device in this way from now on."""
    _chosen[_number(device)] = launch


def _number(device: torch.device) -> torch.device:
    """Return a device as its tensors name it: "cuda" means the current GPU, "cuda:0" as a rule."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def time_launches(device: torch.device) -> dict[Launch, float]:
    """Return the milliseconds in which each launch reads full banks of four objects of SAM 3, on random values.

    A launch that the GPU cannot run is left out. Raises what the last one raises if none runs.
    """
    objects = 4
    area = 72 * 72
    memories = 7
    generator = torch.Generator(device).manual_seed(0)
    query, key, value = (
        torch.randn(objects, length, wide, device=device, generator=generator).bfloat16()
        for length, wide in ((area, 256), (memories * area, 256), (memories * area, 64))
    )
    counts = torch.tensor([[0, memories * area, 0]] * objects, dtype=torch.int32, device=device)
    before = choose_launch(device)
    times: dict[Launch, float] = {}
    failed: Exception | None = None
    for launch in list_launches(device):
        use_launch(device, launch)
        try:
            times[launch] = do_bench(
                lambda: attend(query, key, value, counts, [0, memories * area], 1, False),
                return_mode="median",
            )
        except Exception as error:  # triton has errors of its own, such as for a GPU without the memory
            failed = error
    use_launch(device, before)
    if failed is not None and not times:
        raise failed
    return times


@functools.cache
def measure_error(device: torch.device, dtype: torch.dtype, launch: Launch) -> float:
    """Return the largest relative error of the kernels on this device, on random values.

    launch: what the attention runs with on this device. The first call with it compiles the kernels. Raises what triton
    raises where it cannot.
    """
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator).to(dtype)

    count = 2
    length = 320
    tokens = 700
    wide = 256
    width = 64
    full_end = 650
    starts = [0, full_end]
    rotation = torch.nn.functional.normalize(draw(length, wide // 2, 2).float(), dim=-1)
    weight = draw(wide, width) / 8
    x = draw(count, tokens, width)
    counts = torch.tensor([[0, full_end, 50], [0, 130, 3]], dtype=torch.int32, device=device)
    rows = torch.zeros(1, 0, dtype=torch.int32, device=device)
    with torch.inference_mode():
        still = torch.tensor([1.0, 0.0], device=device).expand(1, wide // 2, 2)
        table = torch.cat([rotation, still])
        bias = draw(wide)
        key = project_keys(x, weight, bias, table, rows, counts, starts, [0, length, length])
        query = rotate_in_place(draw(count, length, wide), rotation)
        errors = list(_measure_norms(draw(count, length, wide), weight.new_ones(wide), bias))
        out = attend(query, key, x, counts, starts, 1, False)
        for item, (_, full, pointers) in enumerate(counts.tolist()):
            used = torch.cat([torch.arange(full), torch.arange(full_end, full_end + pointers)]).to(device)
            turns = table[
                torch.cat([torch.arange(full) % length, torch.full((pointers,), length)]).to(device)
            ]
            plain = x[item, used].float() @ weight.float().T + bias.float()
            pairs = torch.view_as_complex(plain.unflatten(-1, (-1, 2)).contiguous())
            turned = pairs * torch.view_as_complex(turns.contiguous())
            right = torch.view_as_real(turned).flatten(-2)
            errors.append(relative_error(key[item, used], right))
            scores = query[item].float() @ key[item, used].float().T * wide**-0.5
            errors.append(relative_error(out[item], scores.softmax(-1) @ x[item, used].float()))
        errors += _measure_pooled(query, key, x, full_end)
    return max(errors)


def _measure_pooled(query: Tensor, key: Tensor, value: Tensor, full_end: int) -> Iterator[float]:
    """Yield the relative errors of attention to two objects' keys, of which the first ones are pooled.

    Keys are valid to the end for the first object, and up to 130 for the second.
    """
    weight = 4
    pooled_end = 100
    counts = [[pooled_end, full_end - pooled_end, 50], [20, 30, 3]]
    starts = [pooled_end, full_end]
    valid = torch.tensor(counts, dtype=torch.int32, device=key.device)
    out = attend(query, key, value, valid, starts, weight, False)
    for item, lengths in enumerate(counts):
        regions = zip((0, *starts), lengths, strict=True)
        used = torch.cat([torch.arange(start, start + length) for start, length in regions]).to(key.device)
        scores = query[item].float() @ key[item, used].float().T * key.shape[-1] ** -0.5
        # a key that counts w times adds log w to its score
        scores[:, : lengths[0]] += math.log(weight)
        yield relative_error(out[item], scores.softmax(-1) @ value[item, used].float())


def choose_splits(tiles: int, processors: int) -> int:
    """Return into how many parts to split the keys, so that blocks fill the GPU: the number that takes least time."""

    def cost(splits: int) -> float:
        waves = -(-tiles * splits // processors) / splits
        return waves * (1 + SPLIT_COST * (splits - 1))

    return min(range(1, MAX_SPLITS + 1), key=cost)


def count_processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 1 for a CPU, where Triton's interpreter runs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
