"""Let features of the current frame attend to an object's memories (SAM 2, arXiv 2408.00714, sec. 4).

The arithmetic equals transformers' memory attention on the same weights, rearranged for a bank of fixed shape. All
objects with equally many memories are one batch, so only engines of fixed shape mask memories; pointers may be masked.

`MemoryTokens` chooses the tokens to attend to: all of them, as the weights were trained (exact), or fewer. EdgeTAM's
memories are compressed already, and are read exactly. `attention` says which operation attends.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import ModelError, require
from .algebra import (
    apply_linear,
    apply_mlp,
    apply_norm,
    axial_rotation,
    embed_sine,
    fold_linear,
    join_linear,
    rotate,
)
from .attention import FULL_FROM, Attention, Regions
from .memory_encoder import find_latent_positions
from .stages import CompilableStage, ReadLimits

ReadMethod = Literal["exact", "pooled", "sparse"]
"""exact: all tokens of all memories. The others keep the newest prompted frame's memory whole, and of each other memory

- pooled: averages over 2x2 tokens, as EfficientTAM does with all memories (arXiv 2411.18933).
- sparse: the quarter of the tokens that differ most from their mean.
"""
METHODS = get_args(ReadMethod)
MIN_TOKENS = 1024
"""Tokens of an image from which a model counts as large on a GPU, so that compiling our kernels and planning with cuDNN
pay. nano has 256 tokens, SAM 2 has 4096, SAM 3 has 5184."""
POOL = 2
"""Side in tokens of the squares that `tracker.read` "pooled" averages; "sparse" keeps one token of as many."""


class Tokens(NamedTuple):
    """The T tokens of N objects: of reduced memories, of full ones, and of pointers."""

    keys: Tensor
    """[N, T, 64], before the projection"""
    values: Tensor
    """[N, T, 64]"""
    rows: Tensor
    """int64 [1 or N, reduced], rows of the rotation table"""
    regions: Regions


class MemoryTokens(nn.Module):
    """Makes the tokens of memories and pointers, with their positions in space and time."""

    memory_position: Tensor
    rotation: Tensor
    """Rotation table [R, D / 2, (cos, sin)]: of the hw tokens, none for pointers, of pooled tokens if the grid is even,
    then of compressed tokens."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        config = source.config
        self.height, self.width = source.backbone_feature_sizes[-1]
        self.area = self.height * self.width
        self.compressed = hasattr(source, "spatial_perceiver")
        self.method: ReadMethod = "exact"
        self.hidden = source.hidden_dim
        self.channels = source.mem_dim
        self.pointer_tokens = max(1, self.hidden // self.channels)
        self.max_pointers = config.max_object_pointers_in_encoder
        self.pointer_time: nn.Module | None = (
            source.temporal_positional_encoding_projection_layer
            if config.enable_temporal_pos_encoding_for_object_pointers
            else None
        )
        reference = source.no_memory_embedding
        width = source.memory_attention.layers[0].self_attn.q_proj.out_features
        rotation = self._make_table(axial_rotation(self.height, self.width, width, reference.device))
        if self.compressed:
            latents = find_latent_positions(source, width)
            position = latents.position
            self.memory_rows = range(len(rotation), len(rotation) + len(position))
            rotation = torch.cat([rotation, latents.rotation])
        else:
            position = embed_sine(self.height, self.width, self.channels, reference.device)
            self.memory_rows = range(self.area)
        # [num_maskmem, T, 64]: position in the image plus age in frames; the last row is for conditioning frames
        temporal = source.memory_temporal_positional_encoding.detach().float().reshape(-1, 1, self.channels)
        encoding = position + temporal
        self.register_buffer("memory_position", encoding.to(reference.dtype), persistent=False)
        self.register_buffer("rotation", rotation, persistent=False)

    memory_rows: range
    """Rows of the rotation table that belong to the T tokens of a memory."""

    @property
    def memory_tokens(self) -> int:
        """Number T of tokens of a memory: hw, or fewer if memories are compressed."""
        return len(self.memory_rows)

    def use(self, method: ReadMethod) -> None:
        """Choose what is attended to. Raises ModelError where the weights or the grid do not allow it."""
        if method != "exact" and self.compressed:
            raise ModelError(
                f"tracker.read {method}: expected memories of the whole grid, found EdgeTAM's, which are compressed to "
                f"{self.memory_tokens} tokens already; use --tracker.read exact"
            )
        if method == "pooled" and (self.height % POOL or self.width % POOL):
            raise ModelError(
                f"tracker.read pooled: expected a grid of even sides, found {self.height} x {self.width}; choose "
                "another --model.image_size, or --tracker.read exact"
            )
        self.method = method

    def forward(
        self,
        memory: Tensor,
        offset: Tensor,
        pointers: Tensor,
        pointer_age: Tensor,
        valid: Tensor | None,
        dtype: torch.dtype,
    ) -> Tokens:
        """Make the tokens, in `dtype`, from the arguments of `MemoryAttention`."""
        count, slots = memory.shape[:2]
        # the newest prompted frame comes first, and stays whole
        full = slots if self.method == "exact" else 1
        encoding = self.memory_position[offset]
        encodings = [encoding[:, :full]]
        values = [memory[:, :full]]
        rows = offset.new_empty(1, 0)
        if slots > full:
            reduce = self._pool if self.method == "pooled" else self._choose
            value, reduced, rows = reduce(memory[:, full:].to(dtype), encoding[:, full:])
            encodings = [reduced, *encodings]
            values = [value, *values]
        content = [*(value.flatten(1, 2) for value in values), pointers.reshape(count, -1, self.channels)]
        encoded = [*(each.flatten(1, 2) for each in encodings), self._encode_pointer_age(pointer_age)]
        joined = torch.cat(content, dim=1).to(dtype)
        mask = self._mask(valid, slots - full, full, pointers.shape[1], rows.shape[1])
        # the softmax sees one average for the four tokens that it stands for
        weight = POOL * POOL if self.method == "pooled" else 1
        return Tokens(
            torch.cat(encoded, dim=1).add_(joined),  # keys have position and time, values do not
            joined,
            rows,
            Regions(rows.shape[1], full * self.memory_tokens, weight, mask),
        )

    def _pool(self, memory: Tensor, encoding: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Average memories [N, S, hw, 64] and their positions.

        Return both [N, S, hw / 4, 64], and their rows of the rotation table [1, S * hw / 4].
        """
        pooled = self.area // POOL**2
        # the table holds `area` rows of tokens and the row of pointers before the rows of pooled tokens
        rows = torch.arange(pooled, device=memory.device).add_(self.area + 1).repeat(memory.shape[1])
        return self._average(memory), self._average(encoding), rows[None]

    def _average(self, x: Tensor) -> Tensor:
        """Average x [..., hw, C] over squares of tokens; return [..., hw / 4, C]."""
        square = x.unflatten(-2, (self.height // POOL, POOL, self.width // POOL, POOL))
        return square.mean(dim=(-4, -2)).flatten(-3, -2)

    def _choose(self, memory: Tensor, encoding: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keep the K tokens of each memory [N, S, hw, 64] that differ most from their mean.

        Return them and their positions, [N, S, K, 64], and their rows of the rotation table [N, S * K].
        """
        kept = -(-self.area // POOL**2)
        # tokens of the background are much alike and near the mean, so the others are the object's
        unlike = (memory - memory.mean(dim=2, keepdim=True)).square().sum(dim=-1)
        chosen = unlike.topk(kept, dim=-1).indices  # [N, S, K]
        index = chosen[..., None].expand(-1, -1, -1, memory.shape[-1])
        return memory.gather(2, index), encoding.gather(2, index), chosen.flatten(1)

    def _make_table(self, rotation: Tensor) -> Tensor:
        nothing = rotation.new_tensor([1.0, 0.0]).expand(1, rotation.shape[1], 2)
        table = [rotation, nothing]
        if self.height % POOL == self.width % POOL == 0:
            # an average of keys that differ only by their rotation is rotated by the average
            table.append(self._average(rotation.flatten(1)).unflatten(-1, (-1, 2)))
        return torch.cat(table)

    def _encode_pointer_age(self, age: Tensor) -> Tensor:
        """Return the temporal encoding of pointers, [N, P * tokens, 64]; zeros if the weights have none."""
        count, pointers = age.shape
        if self.pointer_time is None:
            return self.memory_position.new_zeros(count, pointers * self.pointer_tokens, self.channels)
        # a pointer is cut into tokens of a memory's width, which share one age
        phase = _sine_1d(age / (self.max_pointers - 1), self.hidden)
        encoding = self.pointer_time(phase.to(self.memory_position.dtype))
        return encoding.repeat_interleave(self.pointer_tokens, dim=1)

    def _mask(
        self, valid: Tensor | None, reduced: int, full: int, pointers: int, tokens: int
    ) -> Tensor | None:
        """Return the mask of the last tokens, bool [N, 1, all tokens or pointers only]: True for tokens to attend to.

        The first `full` memories are in full, the next `reduced` ones have `tokens` tokens in all.
        """
        if valid is None:
            return None
        pointers_only = valid.shape[1] == pointers
        pointer = (valid if pointers_only else valid[:, full + reduced :]).repeat_interleave(
            self.pointer_tokens, dim=1
        )
        if pointers_only:
            return pointer[:, None]
        masks = [valid[:, :full].repeat_interleave(self.memory_tokens, dim=1), pointer]
        if reduced:
            masks.insert(0, valid[:, full : full + reduced].repeat_interleave(tokens // reduced, dim=1))
        return torch.cat(masks, dim=1)[:, None]


def _sine_1d(position: Tensor, channels: int) -> Tensor:
    """Return the sine encoding [..., channels] of position [...], float32."""
    half = channels // 2
    # pairs of channels share a period, as in the reference
    period = 10000.0 ** (2 * (torch.arange(half, device=position.device, dtype=torch.float32) // 2) / half)
    phase = position.unsqueeze(-1) / period
    return torch.cat([phase.sin(), phase.cos()], dim=-1)


class Attend(Protocol):
    """One read's attention to memories and pointers."""

    def project_own(self, layer: ReadLayer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries and keys of the image, rotated, and its values, of x [1 or N, hw, C], which is normed."""

    def __call__(self, layer: ReadLayer, x: Tensor) -> Tensor:
        """Attend in `layer` with x [1 or N, hw, C], which is normed; return [N, hw, 64]."""


class MemoryAttention(CompilableStage):
    """The memory attention of SAM 3, SAM 2 or EdgeTAM."""

    image_position: Tensor

    def __init__(self, source: Any) -> None:
        super().__init__()
        if source.config.memory_attention_num_attention_heads != 1:
            raise ValueError(
                "the memory read supports one attention head, the number in every SAM 2 and SAM 3 checkpoint"
            )
        self.hidden = source.hidden_dim
        self.tokens = MemoryTokens(source)
        # the reference adds a tenth of the position map to the image's tokens
        reference = source.no_memory_embedding
        height, width = source.backbone_feature_sizes[-1]
        position = embed_sine(height, width, self.hidden, reference.device)
        self.register_buffer("image_position", 0.1 * position[None].to(reference.dtype), persistent=False)
        self.attend = Attention()
        self.layers = nn.ModuleList(ReadLayer(layer, self.attend) for layer in source.memory_attention.layers)
        self.norm = source.memory_attention.layer_norm

    @property
    def varying(self) -> tuple[tuple[int, ...], ...]:
        """Objects and memories vary; with our kernels, banks are full or whole, and have one size each."""
        memories = (0,) if self.attend.uses_kernels or self.takes_whole else (0, 1)
        return ((), memories, memories, (0,), (0,), (0,))

    @property
    def limits(self) -> ReadLimits:
        """Any number of memories; our kernels count what is valid in the whole bank, unless all of it is full.

        On a GPU, a small model takes the whole bank with a mask: one shape costs less than a plan for each.
        """
        if self.attend.uses_kernels:
            return ReadLimits(full_from=FULL_FROM)
        return ReadLimits(any_width=not self.takes_whole)

    @property
    def takes_whole(self) -> bool:
        """True for a small model on a GPU."""
        return self.image_position.is_cuda and self.tokens.area < MIN_TOKENS

    def runs_compiled(self, *inputs: Any) -> bool:
        """Return False for inputs that are rare or brief: each would be one more graph.

        With our kernels these are banks that are not yet full, or not alike, of 2 objects or more. Without them, one
        memory, or one that is reduced, and masks of memories.
        """
        _, memory, _, pointers, _, valid = inputs
        if self.attend.uses_kernels:
            return (valid is None) == (memory.shape[0] >= FULL_FROM)
        if self.takes_whole:
            return True
        fewest = 2 if self.tokens.method == "exact" else 3
        return memory.shape[1] >= fewest and valid is not None and valid.shape[1] == pointers.shape[1]

    def use_kernels(self, on: bool = True) -> None:
        """Project keys and attend by our kernels, or by torch. Raises MissingExtraError without triton."""
        if on:
            require("triton", "triton")
        self.attend.uses_kernels = on

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
        way = _KernelAttend if self.attend.uses_kernels else _PlainAttend
        attend = way(tokens, self.tokens)
        x = top.flatten(2).transpose(1, 2) + self.image_position.to(top.dtype)  # [1, hw, C]
        for layer in self.layers:  # the first memory attention turns the one row of all objects into N rows
            x = layer(x, attend)
        return apply_norm(self.norm, x).transpose(1, 2).reshape(offset.shape[0], self.hidden, *top.shape[-2:])


class ReadLayer(nn.Module):
    """One layer: attention to the image itself, attention to the memories, then a perceptron."""

    def __init__(self, source: Any, attend: Attention) -> None:
        super().__init__()
        self.norm1 = source.layer_norm1
        self.norm2 = source.layer_norm2
        self.norm3 = source.layer_norm3
        if hasattr(source, "mlp"):  # EdgeTAM
            mlp = source.mlp
            self.linear1 = mlp.up_proj
            self.linear2 = mlp.down_proj
            self.activation = mlp.act_fn
        else:
            self.linear1 = source.linear1
            self.linear2 = source.linear2
            self.activation = source.activation
        own = source.self_attn
        cross = source.cross_attn_image
        self.own = join_linear(own.q_proj, own.k_proj, own.v_proj)
        self.own_out = own.o_proj
        self.query = cross.q_proj
        self.key = cross.k_proj
        self.attend = attend
        # exact, because softmax weights sum to one: both projections follow the attention, on 64 channels
        self.value_out = fold_linear(cross.v_proj, cross.o_proj)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        # x is [1 or N, hw, C]: one row before the first memory attention, then one row per object
        query, key, value = attend.project_own(self, apply_norm(self.norm1, x))
        own = F.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None])[:, 0]
        x = apply_linear(self.own_out, own).add_(x)
        x = apply_linear(self.value_out, attend(self, apply_norm(self.norm2, x))).add_(x)
        return apply_mlp(self.linear1, self.activation, self.linear2, apply_norm(self.norm3, x)).add_(x)


class _PlainAttend:
    """Attention of which torch projects and rotates the keys."""

    def __init__(self, tokens: Tokens, maker: MemoryTokens) -> None:
        rotation = maker.rotation
        memory = maker.memory_rows
        self.tokens = tokens
        self.rotation = rotation[: maker.area]
        self.key_rotation = rotation[memory.start : memory.stop]
        # [1 or N, reduced, D / 2, 2]
        self.reduced_rotation = rotation[tokens.rows] if tokens.regions.reduced else None

    def project_own(self, layer: ReadLayer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `Attend`."""
        query, key, value = apply_linear(layer.own, x).unflatten(-1, (3, -1)).unbind(-2)
        return rotate(query, self.rotation), rotate(key, self.rotation), value

    def __call__(self, layer: ReadLayer, x: Tensor) -> Tensor:
        """See `Attend`."""
        tokens = self.tokens
        query = rotate(apply_linear(layer.query, x), self.rotation)
        # keys of all memories are projected at once; a memory's tokens have the same rotation at any age
        # [N, T, D]; the pointers, which come last, are not rotated
        key = apply_linear(layer.key, tokens.keys)
        start, end = tokens.regions.starts
        full = key[:, start:end].unflatten(1, (-1, len(self.key_rotation)))
        rotated = rotate(full, self.key_rotation)
        parts = [rotated.flatten(1, 2), key[:, end:]]
        if self.reduced_rotation is not None:
            parts.insert(0, rotate(key[:, :start], self.reduced_rotation))
        if rotated is not full:  # otherwise it was done in place
            key = torch.cat(parts, dim=1)
        query = query.expand(key.shape[0], -1, -1)  # len() would fix the size in an export
        return layer.attend(query, key, tokens.values, tokens.regions)


class _KernelAttend:
    """Attention whose valid keys our kernels project and rotate."""

    def __init__(self, tokens: Tokens, maker: MemoryTokens) -> None:
        objects, keys = tokens.keys.shape[:2]
        self.tokens = tokens
        self.table = maker.rotation
        self.rotation = maker.rotation[: maker.area]
        self.rows = tokens.rows.to(torch.int32)
        self.layout = [maker.memory_rows.start, maker.memory_tokens, maker.area]
        self.counts = tokens.regions.count_valid(objects, keys, tokens.keys.device)

    def project_own(self, layer: ReadLayer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See `Attend`."""
        parts = apply_linear(layer.own, x).unflatten(-1, (3, -1))  # [1 or N, hw, 3, D]
        query, key = _rotate(parts[:, :, :2], self.rotation[:, None]).unbind(-2)
        return query, key, parts[:, :, 2]

    def __call__(self, layer: ReadLayer, x: Tensor) -> Tensor:
        """See `Attend`."""
        from .kernels import project_keys

        tokens = self.tokens
        project = layer.key
        starts = tokens.regions.starts
        key = project_keys(
            tokens.keys, project.weight, project.bias, self.table, self.rows, self.counts, starts, self.layout
        )
        query = _rotate(apply_linear(layer.query, x), self.rotation)
        query = query.expand(key.shape[0], -1, -1)
        return layer.attend(query, key, tokens.values, tokens.regions, self.counts)


def _rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate x [B, L, ..., D] by rotation [L, ..., D / 2, 2]: by a kernel in place, compiled by its formula.

    A compiler joins the formula with what is around it, which is faster than a kernel of its own.
    """
    if torch.compiler.is_compiling():
        return rotate(x, rotation)
    from .kernels import rotate_in_place

    return rotate_in_place(x, rotation)
