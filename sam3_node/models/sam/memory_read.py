"""The memory read: features of the current frame attend to an object's memories (SAM 2, arXiv 2408.00714, sec. 4).

The arithmetic equals transformers' memory attention on the same weights, rearranged for a bank of fixed shape:

- All objects with equally many memories are one batch. Memories are not masked, except by engines of fixed shape;
  pointers may be.
- Value and output projections are applied after the attention, to its 64-channel result. This is exact because the
  softmax weights sum to one.
- Work before the first memory attention is shared by all objects.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .algebra import Attention, apply_linear, apply_mlp, fold_linear, join_linear, rotate


class MemoryRead(nn.Module):
    """The memory attention of a transformers tracker (`Sam3TrackerVideoModel` or `Sam2VideoModel`)."""

    takes_any_width = True
    """True because it takes any number of memories; an engine takes the whole bank, masked."""
    memory_position: Tensor
    image_position: Tensor
    rotation: Tensor

    def __init__(self, source: Any) -> None:
        super().__init__()
        config = source.config
        attention = source.memory_attention
        if config.memory_attention_num_attention_heads != 1:
            raise ValueError(
                "the memory read supports one attention head, the number in every SAM 2 and SAM 3 checkpoint"
            )
        height, width = source.backbone_feature_sizes[-1]
        self.hidden = source.hidden_dim
        self.memory_channels = source.mem_dim
        self.pointer_tokens = max(1, self.hidden // self.memory_channels)
        self.max_pointers = config.max_object_pointers_in_encoder
        self.pointer_time: nn.Module | None = (
            source.temporal_positional_encoding_projection_layer
            if config.enable_temporal_pos_encoding_for_object_pointers
            else None
        )
        reference = source.no_memory_embedding
        position = source.memory_encoder.position_encoding(
            (1, self.memory_channels, height, width), reference.device, torch.float32
        )
        # [num_maskmem, HW, 64]: position in the image plus age in frames; the last row is for conditioning frames
        temporal = (
            source.memory_temporal_positional_encoding.detach().float().reshape(-1, 1, self.memory_channels)
        )
        place = position.flatten(2).transpose(1, 2) + temporal
        self.register_buffer("memory_position", place.to(reference.dtype), persistent=False)
        self.register_buffer("image_position", 0.1 * _sine(source, (height, width)), persistent=False)
        cos, sin = attention.rotary_emb(
            reference, attention.position_ids
        )  # [1, hw, D], each value occurs twice
        self.register_buffer(
            "rotation", torch.stack([cos[0, :, ::2], sin[0, :, ::2]], dim=-1), persistent=False
        )
        attend = Attention()
        self.layers = nn.ModuleList(_ReadLayer(layer, attend) for layer in attention.layers)
        self.norm = attention.layer_norm

    def forward(
        self,
        top: Tensor,
        memory: Tensor,
        offset: Tensor,
        pointers: Tensor,
        pointer_age: Tensor,
        valid: Tensor | None,
    ) -> Tensor:
        """Condition the top feature map on each object's memories.

        top: [1, C, h, w]. memory: [N, S, hw, 64], any float dtype. offset: int64 [N, S], rows of the temporal table.
        pointers: [N, P, C]. pointer_age: float32 [N, P], in frames. valid: bool [N, S + P], or [N, P] if all memories
        are valid, which is faster; None if all are valid.
        Return [N, C, h, w].
        """
        count, slots, area, channels = memory.shape
        spatial = slots * area
        values = torch.cat([memory.flatten(1, 2), pointers.reshape(count, -1, channels)], dim=1).to(top.dtype)
        place = self.memory_position[offset].flatten(1, 2)
        keys = torch.cat([place, self._pointer_place(pointer_age)], dim=1).add_(values)
        mask = self._mask(valid, slots, pointers.shape[1], area)
        x = top.flatten(2).transpose(1, 2) + self.image_position.to(top.dtype)  # [1, hw, C]
        for layer in self.layers:
            x = layer(x, keys, values, mask, self.rotation, spatial)
        out: Tensor = self.norm(x).transpose(1, 2).reshape(count, self.hidden, *top.shape[-2:])
        return out

    def _pointer_place(self, age: Tensor) -> Tensor:
        """Return the temporal encoding of pointers, [N, P * tokens, 64]; zeros if the weights have none."""
        count, pointers = age.shape
        if self.pointer_time is None:
            return self.memory_position.new_zeros(count, pointers * self.pointer_tokens, self.memory_channels)
        phase = _sine_1d(age / (self.max_pointers - 1), self.hidden)
        place = self.pointer_time(phase.to(self.memory_position.dtype))
        out: Tensor = place.repeat_interleave(self.pointer_tokens, dim=1)
        return out

    def _mask(self, valid: Tensor | None, slots: int, pointers: int, area: int) -> Tensor | None:
        """Return the mask of the last tokens, bool [N, 1, all or those of pointers]: True for tokens to attend to."""
        if valid is None:
            return None
        pointers_only = valid.shape[1] == pointers
        pointer = (valid if pointers_only else valid[:, slots:]).repeat_interleave(self.pointer_tokens, dim=1)
        if pointers_only:
            return pointer[:, None]
        memory = valid[:, :slots].repeat_interleave(area, dim=1)
        return torch.cat([memory, pointer], dim=1)[:, None]


class _ReadLayer(nn.Module):
    def __init__(self, source: Any, attend: Attention) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = source.layer_norm1, source.layer_norm2, source.layer_norm3
        self.linear1, self.linear2, self.activation = source.linear1, source.linear2, source.activation
        own, cross = source.self_attn, source.cross_attn_image
        self.own = join_linear(own.q_proj, own.k_proj, own.v_proj)
        self.own_out = own.o_proj
        self.query, self.key = cross.q_proj, cross.k_proj
        self.attend = attend
        self.value_out = fold_linear(cross.v_proj, cross.o_proj)

    def forward(
        self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, rotation: Tensor, spatial: int
    ) -> Tensor:
        # x is [1 or N, hw, C]: one row before the first memory attention, then one row per object
        x = self._attend_self(self.norm1(x), rotation).add_(x)
        query = rotate(apply_linear(self.query, self.norm2(x)), rotation)
        attended = self._attend_memory(query, keys, values, mask, rotation, spatial)
        x = apply_linear(self.value_out, attended).add_(x)
        return apply_mlp(self.linear1, self.activation, self.linear2, self.norm3(x)).add_(x)

    def _attend_self(self, x: Tensor, rotation: Tensor) -> Tensor:
        query, key, value = apply_linear(self.own, x).unflatten(-1, (3, -1)).unbind(-2)
        query, key = rotate(query, rotation), rotate(key, rotation)
        out = F.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None])[:, 0]
        return apply_linear(self.own_out, out)

    def _attend_memory(
        self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, rotation: Tensor, spatial: int
    ) -> Tensor:
        count, area = keys.shape[0], rotation.shape[0]
        key = apply_linear(self.key, keys)  # [N, tokens, D]; pointers come last and are not rotated
        memory = key[:, :spatial].unflatten(1, (-1, area))
        rotated = rotate(memory, rotation)
        if rotated is not memory:  # otherwise it was done in place
            key = torch.cat([rotated.flatten(1, 2), key[:, spatial:]], dim=1)
        out: Tensor = self.attend(query.expand(count, -1, -1), key, values, mask)
        return out


def _sine_1d(position: Tensor, channels: int) -> Tensor:
    """Return the sine encoding [..., channels] of position [...], float32."""
    half = channels // 2
    period = 10000.0 ** (2 * (torch.arange(half, device=position.device, dtype=torch.float32) // 2) / half)
    phase = position.unsqueeze(-1) / period
    return torch.cat([phase.sin(), phase.cos()], dim=-1)


def _sine(source: Any, size: tuple[int, int]) -> Tensor:
    """Return the sine position map that the vision encoder adds to its top feature map, [1, hw, C]."""
    encoder = source.memory_encoder.position_encoding
    reference = source.no_memory_embedding
    shape = torch.Size((1, source.hidden_dim, *size))
    position = type(encoder)(num_position_features=source.hidden_dim // 2, normalize=True)(
        shape, reference.device, torch.float32
    )
    out: Tensor = position.flatten(2).transpose(1, 2).to(reference.dtype)
    return out
