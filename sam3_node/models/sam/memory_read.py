"""The memory read: features of the current frame attend to an object's memories (SAM 2, arXiv 2408.00714, sec. 4).

The arithmetic equals transformers' memory attention on the same weights, rearranged for a bank of fixed shape:

- All objects with equally many memories are one batch. Memories are not masked, except by engines of fixed shape;
  pointers may be.
- Value and output projections are applied after the attention, to its 64-channel result. This is exact because the
  softmax weights sum to one.
- Work before the first memory attention is shared by all objects.

`read_tokens` chooses the tokens, also for approximations. On an NVIDIA GPU, the kernels of `read_kernel` may attend.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import require
from .algebra import Attention, apply_linear, apply_mlp, fold_linear, join_linear, rotate
from .read_tokens import MemoryTokens, Tokens

KERNEL_EXTRA = "triton"


class Attend(Protocol):
    """One read's attention to memories and pointers."""

    def __call__(self, layer: ReadLayer, x: Tensor) -> Tensor:
        """Attend in `layer` with x [1 or N, hw, C], which is normed; return [N, hw, 64]."""


class MemoryRead(nn.Module):
    """The memory attention of a transformers tracker: of SAM 3, SAM 2 or EdgeTAM."""

    image_position: Tensor
    split_rotation: Tensor

    def __init__(self, source: Any) -> None:
        super().__init__()
        if source.config.memory_attention_num_attention_heads != 1:
            raise ValueError(
                "the memory read supports one attention head, the number in every SAM 2 and SAM 3 checkpoint"
            )
        self.hidden = source.hidden_dim
        self.tokens = MemoryTokens(source)
        self.register_buffer(
            "image_position", 0.1 * _sine(source, source.backbone_feature_sizes[-1]), persistent=False
        )
        attend = Attention()
        self.layers = nn.ModuleList(ReadLayer(layer, attend) for layer in source.memory_attention.layers)
        self.norm = source.memory_attention.layer_norm
        self.takes_any_width = True
        """True if it takes any number of memories. Engines take a mask, kernels the whole bank."""

    def use_kernels(self) -> None:
        """Attend by the kernels of `read_kernel` from now on, which only read what is valid.

        Raises MissingExtraError without triton.
        """
        require("triton", KERNEL_EXTRA)
        from .read_kernel import split_pairs, split_rotation

        for layer in self.layers:
            assert isinstance(layer, ReadLayer)
            layer.split_query, layer.split_key = split_pairs(layer.query), split_pairs(layer.key)
        self.register_buffer("split_rotation", split_rotation(self.tokens.rotation), persistent=False)
        self.takes_any_width = False

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

        top: [1, C, h, w]. memory: [N, S, T, 64], any float dtype; the first is of a prompted frame. offset: int64
        [N, S], rows of the temporal table. pointers: [N, P, C]. pointer_age: float32 [N, P], in frames. valid: bool
        [N, S + P], or [N, P] if all memories are valid, which is faster; None if all are valid. Valid memories come
        before others, and so do valid pointers.
        Return [N, C, h, w].
        """
        tokens = self.tokens(memory, offset, pointers, pointer_age, valid, top.dtype)
        attend = self._attend(tokens)
        rotation = self.tokens.rotation[: self.tokens.area]
        x = top.flatten(2).transpose(1, 2) + self.image_position.to(top.dtype)  # [1, hw, C]
        for layer in self.layers:
            x = layer(x, rotation, attend)
        out: Tensor = self.norm(x).transpose(1, 2).reshape(memory.shape[0], self.hidden, *top.shape[-2:])
        return out

    def _attend(self, tokens: Tokens) -> Attend:
        if self.takes_any_width:
            return _PlainAttend(tokens, self.tokens)
        from .read_kernel import KernelAttend

        return KernelAttend(tokens, self.split_rotation, self.tokens.area, self.tokens.memory_rows)


class ReadLayer(nn.Module):
    """One layer: attention to the image itself, attention to the memories, then a perceptron."""

    split_query: nn.Linear
    split_key: nn.Linear

    def __init__(self, source: Any, attend: Attention) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = source.layer_norm1, source.layer_norm2, source.layer_norm3
        if hasattr(source, "mlp"):  # EdgeTAM
            mlp = source.mlp
            self.linear1, self.linear2, self.activation = mlp.up_proj, mlp.down_proj, mlp.act_fn
        else:
            self.linear1, self.linear2, self.activation = source.linear1, source.linear2, source.activation
        own, cross = source.self_attn, source.cross_attn_image
        self.own = join_linear(own.q_proj, own.k_proj, own.v_proj)
        self.own_out = own.o_proj
        self.query, self.key = cross.q_proj, cross.k_proj
        self.attend = attend
        self.value_out = fold_linear(cross.v_proj, cross.o_proj)

    def forward(self, x: Tensor, rotation: Tensor, attend: Attend) -> Tensor:
        # x is [1 or N, hw, C]: one row before the first memory attention, then one row per object
        x = self._attend_self(self.norm1(x), rotation).add_(x)
        x = apply_linear(self.value_out, attend(self, self.norm2(x))).add_(x)
        return apply_mlp(self.linear1, self.activation, self.linear2, self.norm3(x)).add_(x)

    def _attend_self(self, x: Tensor, rotation: Tensor) -> Tensor:
        query, key, value = apply_linear(self.own, x).unflatten(-1, (3, -1)).unbind(-2)
        query, key = rotate(query, rotation), rotate(key, rotation)
        out = F.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None])[:, 0]
        return apply_linear(self.own_out, out)


class _PlainAttend:
    """Attention by torch's operations."""

    def __init__(self, tokens: Tokens, maker: MemoryTokens) -> None:
        rotation, memory = maker.rotation, maker.memory_rows
        self.tokens, self.rotation = tokens, rotation[: maker.area]
        self.key_rotation = rotation[memory.start : memory.stop]
        self.reduced_rotation = (
            rotation[tokens.rows] if tokens.reduced else None
        )  # [1 or N, reduced, D / 2, 2]

    def __call__(self, layer: ReadLayer, x: Tensor) -> Tensor:
        tokens = self.tokens
        query = rotate(apply_linear(layer.query, x), self.rotation)
        key = self._rotate_keys(apply_linear(layer.key, tokens.keys))
        query = query.expand(key.shape[0], -1, -1)  # len() would fix the size in an export
        out: Tensor = layer.attend(query, key, tokens.values, tokens.mask, tokens.reduced, tokens.weight)
        return out

    def _rotate_keys(self, key: Tensor) -> Tensor:
        """Rotate keys [N, T, D]; the pointers, which come last, are not rotated."""
        start, end = self.tokens.reduced, self.tokens.reduced + self.tokens.full
        full = key[:, start:end].unflatten(1, (-1, len(self.key_rotation)))
        rotated = rotate(full, self.key_rotation)
        parts = [rotated.flatten(1, 2), key[:, end:]]
        if self.reduced_rotation is not None:
            parts.insert(0, rotate(key[:, :start], self.reduced_rotation))
        return key if rotated is full else torch.cat(parts, dim=1)  # otherwise it was done in place


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
