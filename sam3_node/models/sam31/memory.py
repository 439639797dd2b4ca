"""SAM 3.1's memories: one for a group of objects, written from the masks of all slots and read by all of them at once.

A memory joins the tokens of the masks and those of the image that it was written from: [T, 2C]. The read
makes its queries and keys of both. Pointers of all slots are tokens of their own, and a free slot's is zero.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import ModelError
from ..sam.algebra import (
    apply_linear,
    apply_norm,
    join_linear,
    make_linear,
    patch_linear,
    resize_matrix,
    rotate,
)
from ..sam.memory_encoder import MASK_BIAS, MASK_SCALE, _FuserBlock, _MaskDownsample, _to_rows
from ..sam.stages import CompilableStage, ReadLimits
from .source import HEADS, MAX_POINTERS, Source

SCALE = 2.0
"""Factor by which the memory encoder scales mask probabilities, so that 0..1 becomes -1..1 with BIAS."""
BIAS = -1.0
"""Offset added after SCALE: -1 is outside of the mask, 1 is inside."""
POSITION_SHARE = 0.1
"""Factor of the positional encoding that memory attention adds to the image tokens. The value is the reference's."""
THETA = 10000.0
"""Base of the rotary encoding's periods."""


class GroupMemoryAttention(CompilableStage):
    """The memory attention of a group: queries of the image, keys of its memories' masks and images."""

    position: Tensor
    memory_position: Tensor
    rotation: Tensor

    def __init__(self, source: Source) -> None:
        super().__init__()
        sizes = source.sizes
        read = source.read
        dtype = read.time.dtype
        self.hidden = sizes.hidden
        self.slots = sizes.slots
        self.memory_tokens = sizes.grid**2
        position = make_sine(sizes.grid, sizes.hidden, read.time.device)  # [hw, C]
        self.register_buffer("position", (POSITION_SHARE * position).to(dtype), persistent=False)
        # [num_maskmem, hw, C]: position in the image plus age in frames
        encoding = position + read.time.detach().double().flatten(1, 2)
        self.register_buffer("memory_position", encoding.to(dtype), persistent=False)
        rotation = make_rotation(sizes.grid, sizes.hidden // HEADS, read.time.device)
        self.register_buffer("rotation", rotation.to(_exact(dtype)), persistent=False)
        self.pointer_time = read.pointer_time
        self.layers = nn.ModuleList(map(_ReadLayer, read.layers))
        self.norm = read.norm

    @property
    def varying(self) -> tuple[tuple[int, ...], ...]:
        """Groups and memories vary."""
        memories = (0,) if self.takes_whole else (0, 1)
        return ((), memories, memories, (0,), (0,), (0,))

    @property
    def takes_whole(self) -> bool:
        """True on a GPU, where each number of memories would be planned and captured anew."""
        return self.rotation.is_cuda

    @property
    def limits(self) -> ReadLimits:
        """Any number of memories on a CPU; on a GPU full banks without a mask, and others whole with one."""
        return ReadLimits(full_from=1) if self.takes_whole else ReadLimits(any_width=True)

    def runs_compiled(self, *inputs: Any) -> bool:
        """Return False for inputs that are rare or brief: each would be one more graph."""
        _, memory, _, pointers, _, valid = inputs
        if self.takes_whole:
            return True
        return memory.shape[1] > 1 and valid is not None and valid.shape[1] == pointers.shape[1]

    def use_kernels(self, on: bool = True) -> None:
        """Do nothing: torch attends with several heads; our kernels have one."""

    def forward(
        self,
        top: Tensor,
        memory: Tensor,
        offset: Tensor,
        pointers: Tensor,
        pointer_age: Tensor,
        valid: Tensor | None,
    ) -> Tensor:
        """Condition the top feature map on each group's memories.

        top: [1, C, h, w]. memory: [G, M, T, 2C]: the masks' tokens, then the image's. offset: int64 [G, M], rows of the
        temporal table. pointers: [G, P, slots * C]. pointer_age: float32 [G, P], in frames. valid: bool [G, M + P], or
        [G, P] if all memories are valid; None if all are valid. Return [G, C, h, w].
        """
        groups = offset.shape[0]
        image = _to_rows(top)  # [1, hw, C]
        memory = memory.to(top.dtype)
        tokens = pointers.to(top.dtype).unflatten(-1, (self.slots, self.hidden)).flatten(1, 2)
        encoding = self.memory_position[offset].flatten(1, 2)  # [G, M * T, C]
        time = self._encode_pointer_age(pointer_age)
        mask = self._mask(valid, memory.shape[1], pointers.shape[1])
        x = image + self.position
        for layer in self.layers:
            x = layer(x, image, memory, tokens, encoding, time, self.rotation, mask)
        out = apply_norm(self.norm, x).expand(groups, -1, -1)
        return out.transpose(1, 2).unflatten(2, top.shape[-2:])

    def _encode_pointer_age(self, age: Tensor) -> Tensor:
        """Return the temporal encoding [G, P * slots, C] of pointers; all slots of a frame share it."""
        # pairs of channels share a period, as in the reference
        half = self.hidden // 2
        pairs = torch.arange(half, device=age.device).div(2, rounding_mode="floor").to(self.rotation.dtype)
        phase = age[..., None].to(pairs.dtype) / (MAX_POINTERS - 1) / THETA ** (2 * pairs / half)
        waves = torch.cat([phase.sin(), phase.cos()], dim=-1)
        return self.pointer_time(waves.to(self.memory_position.dtype)).repeat_interleave(self.slots, dim=1)

    def _mask(self, valid: Tensor | None, memories: int, pointers: int) -> Tensor | None:
        """Return the mask of all keys, bool [G, 1, 1, M * T + P * slots]: True for those to attend to."""
        if valid is None:
            return None
        pointer = valid[:, valid.shape[1] - pointers :].repeat_interleave(self.slots, dim=1)
        if valid.shape[1] == pointers:
            memory = valid.new_ones(valid.shape[0], memories * self.memory_tokens)
        else:
            memory = valid[:, :memories].repeat_interleave(self.memory_tokens, dim=1)
        return torch.cat([memory, pointer], dim=1)[:, None, None]


class _ReadLayer(nn.Module):
    """One layer: attention to the image itself, attention to the memories, then a perceptron."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.norm1 = source.norm1
        self.norm2 = source.norm2
        self.norm3 = source.norm3
        self.linear1 = source.linear1
        self.linear2 = source.linear2
        self.own = join_linear(source.self_attn_q_proj, source.self_attn_k_proj, source.self_attn_v_proj)
        self.own_out = source.self_attn_out_proj
        self.query = source.cross_attn_q_proj
        self.image_query = source.image_cross_attn_q_proj
        # keys of masks and image are one product; a pointer has no image, but the image's bias
        key = source.cross_attn_k_proj
        image = source.image_cross_attn_k_proj
        joined = torch.cat([key.weight, image.weight], dim=1)
        self.key = make_linear(joined, joined, key.bias + image.bias)
        self.pointer_key = make_linear(key.weight, key.weight, key.bias + image.bias)
        self.value = source.cross_attn_v_proj
        self.out = source.cross_attn_out_proj

    def forward(
        self,
        x: Tensor,
        image: Tensor,
        memory: Tensor,
        pointers: Tensor,
        encoding: Tensor,
        time: Tensor,
        rotation: Tensor,
        mask: Tensor | None,
    ) -> Tensor:
        # x is [1 or G, hw, C]: one row before the first memory attention, then one row per group
        parts = apply_linear(self.own, apply_norm(self.norm1, x)).unflatten(-1, (3, HEADS, -1))
        query, key, value = parts.unbind(-3)  # [1 or G, hw, heads, D]
        rotation = rotation[:, None]
        own = _attend(rotate(query, rotation), rotate(key, rotation), value, None)
        x = apply_linear(self.own_out, own).add_(x)
        query = apply_linear(self.query, apply_norm(self.norm2, x)).add_(
            apply_linear(self.image_query, image)
        )
        query = rotate(query.unflatten(-1, (HEADS, -1)), rotation)
        masks = memory[..., : x.shape[-1]].flatten(1, 2)
        key = apply_linear(self.key, memory.flatten(1, 2)).add_(encoding)
        # a memory's tokens have the same rotation at any age
        spread = key.unflatten(-1, (HEADS, -1)).unflatten(1, (-1, rotation.shape[0]))
        key = torch.cat(
            [
                rotate(spread, rotation).flatten(1, 2),
                apply_linear(self.pointer_key, pointers).add_(time).unflatten(-1, (HEADS, -1)),
            ],
            dim=1,
        )
        value = apply_linear(self.value, torch.cat([masks, pointers], dim=1)).unflatten(-1, (HEADS, -1))
        x = apply_linear(self.out, _attend(query, key, value, mask)) + x
        hidden = apply_linear(self.linear1, apply_norm(self.norm3, x), "gelu")
        return apply_linear(self.linear2, hidden).add_(x)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attend with query [1 or G, L, H, D] to key and value [G, T, H, D]; return [G, L, H * D]."""
    query = query.expand(key.shape[0], -1, -1, -1)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2).flatten(2)


class GroupMemoryEncoder(CompilableStage):
    """The memory encoder: writes one memory from the masks of all slots."""

    to_logits: Tensor

    def __init__(self, source: Source) -> None:
        super().__init__()
        sizes = source.sizes
        encoder = source.memory
        self.grid = sizes.grid
        self.image_size = sizes.image_size
        self.slots = sizes.slots
        if sizes.downsample[0] != 2 * sizes.slots:
            raise ModelError(
                f"SAM 3.1: expected two planes of the memory encoder for each of {sizes.slots} slots, found "
                f"{sizes.downsample[0]}"
            )
        self.downsample = nn.ModuleList(map(_MaskDownsample, encoder.downsample))
        self.embed = patch_linear(encoder.embed)
        self.feature_projection = patch_linear(encoder.feature_projection)
        self.fuser = nn.ModuleList(map(_FuserBlock, encoder.fuser))
        self.absent = encoder.absent
        matrix = resize_matrix((sizes.image_size, 4 * sizes.grid))
        self.register_buffer("to_logits", matrix.to(encoder.absent.device), persistent=False)

    @property
    def varying(self) -> tuple[tuple[int, ...], ...]:
        """Groups vary."""
        return ((), (0,), (0,), (0,))

    def weigh(self, logits: Tensor) -> Tensor:
        """Turn logits [G, slots, 4h, 4w] into the memory encoder's masks [G, slots, 16h, 16w], -1 to 1.

        As in the reference, they are probabilities at the image's size before they have their own size: edges between
        two pixels of the image stay soft. At least float32.
        """
        image = _resize(logits.to(_exact(logits.dtype)), self.image_size)
        return self._scale(image.sigmoid())

    def from_mask(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Turn a mask [1, 1, S, S] in 0..1 into logits [1, 4h, 4w] and the encoder's mask [1, 1, 16h, 16w]."""
        high = mask.to(self.to_logits.dtype) * MASK_SCALE + MASK_BIAS
        return (self.to_logits @ high @ self.to_logits.T)[:, 0], self._scale(high.sigmoid())

    def _scale(self, probabilities: Tensor) -> Tensor:
        """Give probabilities [N, M, S, S] the range and the size of the encoder's masks."""
        return _resize(probabilities.mul(SCALE).add_(BIAS), 16 * self.grid)

    def forward(self, top: Tensor, logits: Tensor, presence: Tensor, prompted: Tensor) -> Tensor:
        """Encode the memory [G, T, 2C] of G groups: the masks' tokens, then the image's.

        top [1, C, h, w] is the image's. logits [G, slots, 4h, 4w], presence [G, slots]: a free slot has logits 0 and
        presence -10. prompted: bool [G, slots], True for masks that a prompt gave on this frame.
        """
        return self.encode(top, self.weigh(logits), presence, prompted)

    def encode(self, top: Tensor, masks: Tensor, presence: Tensor, prompted: Tensor) -> Tensor:
        """Do the same as `forward`, from the encoder's masks [G, slots, 16h, 16w], as `weigh` returns them."""
        weight = masks.to(top.dtype)
        flags = prompted.to(weight.dtype)[..., None, None].expand_as(weight)
        x = torch.cat([weight, flags], dim=1)
        for layer in self.downsample:
            x = layer(x)
        image = _to_rows(top)
        rows = apply_linear(self.embed, _to_rows(x)).add_(apply_linear(self.feature_projection, image))
        for block in self.fuser:
            rows = block(rows, top.shape[-2:])
        absent = (presence <= 0).to(rows.dtype) @ self.absent  # also free slots
        rows = rows + absent[:, None]
        return torch.cat([rows, image.expand_as(rows)], dim=-1)


def _resize(maps: Tensor, side: int) -> Tensor:
    """Resize maps [N, M, n, n] to [N, M, side, side]."""
    return F.interpolate(maps, size=(side, side), mode="bilinear", align_corners=False)


def _exact(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of what must not be rounded to half precision: float32, or float64 as given."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def make_sine(grid: int, channels: int, device: torch.device) -> Tensor:
    """Return the sine position map [hw, C] of a grid, float64."""
    half = channels // 2
    positions = torch.arange(1, grid + 1, device=device, dtype=torch.float64)
    # the reference adds this, lest an empty axis divide by 0
    positions = positions / (positions[-1] + 1e-6) * 2 * torch.pi
    pairs = torch.arange(half, device=device, dtype=torch.float64).div(2, rounding_mode="floor")
    phase = positions[:, None] / 10000.0 ** (2 * pairs / half)
    # even channels are sines, odd ones cosines
    waves = torch.stack([phase[:, 0::2].sin(), phase[:, 1::2].cos()], dim=-1).flatten(1)
    rows = waves[:, None].expand(-1, grid, -1)
    columns = waves[None].expand(grid, -1, -1)
    return torch.cat([rows, columns], dim=-1).flatten(0, 1)


def make_rotation(grid: int, channels: int, device: torch.device) -> Tensor:
    """Return the rotary encoding [hw, D / 2, (cos, sin)] of a grid's tokens, float64."""
    steps = torch.arange(0, channels // 2, 2, device=device, dtype=torch.float64)
    frequencies = THETA ** (-steps / (channels // 2))
    tokens = torch.arange(grid * grid, device=device)
    across = (tokens % grid).double()[:, None] * frequencies
    down = tokens.div(grid, rounding_mode="floor").double()[:, None] * frequencies
    phase = torch.cat([across, down], dim=1)
    return torch.stack([phase.cos(), phase.sin()], dim=-1)
