"""EdgeTAM's 2D spatial perceiver (arXiv 2501.07256, sec. 3.2): it compresses a memory to a few latent tokens.

It equals transformers' resampler on the same weights. Half of the latents attend to the whole memory, the others each
to one window of it, so these keep a place in the image. Both use the same layers, so all rows run through them
together, and keys and values are projected once for both. A window's latent attends to itself alone, so its
self-attention is its value.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import ModelError
from .algebra import apply_linear


class Perceiver(nn.Module):
    """The `spatial_perceiver` of a transformers EdgeTAM, for memories of the model's grid."""

    latents: Tensor
    position: Tensor

    def __init__(self, source: Any) -> None:
        super().__init__()
        perceiver, config = source.spatial_perceiver, source.config
        if config.perceiver_resampler_num_attention_heads != 1:
            raise ModelError(
                "EdgeTAM: expected one attention head of the perceiver, found "
                f"{config.perceiver_resampler_num_attention_heads}"
            )
        self.height, self.width = source.backbone_feature_sizes[-1]
        self.free, self.windows = perceiver.num_latents_1d, math.isqrt(perceiver.num_latents_2d)
        if self.height % self.windows or self.width % self.windows:
            raise ModelError(
                f"EdgeTAM: expected a feature grid that divides into {self.windows} x {self.windows} windows, found "
                f"{self.height} x {self.width}; choose another --model.image_size"
            )
        latents = torch.cat([perceiver.latents_1d, perceiver.latents_2d]).detach()
        self.register_buffer("latents", latents, persistent=False)
        position = _sine(perceiver, self.height, self.width, latents.device).to(latents.dtype)
        self.register_buffer("position", position, persistent=False)
        self.layers = nn.ModuleList(map(_Layer, perceiver.layers))
        self.norm = perceiver.layer_norm

    def forward(self, memory: Tensor) -> Tensor:
        """Compress memories [N, hw, 64] to [N, T, 64]: first the latents without a place, then those of the windows."""
        x = self.latents.expand(memory.shape[0], -1, -1)  # len() would fix the size in an export
        for layer in self.layers:
            x = layer(x, memory, self.position, self.free, self._cut)
        out: Tensor = self.norm(x)
        return out

    def _cut(self, rows: Tensor) -> Tensor:
        """Turn rows [N, hw, C] into those of each window, [N * windows, rows of a window, C]."""
        grid = (self.windows, self.height // self.windows, self.windows, self.width // self.windows)
        return torch.unflatten(rows, 1, grid).transpose(2, 3).flatten(3, 4).flatten(0, 2)


class _Layer(nn.Module):
    def __init__(self, source: Any) -> None:
        super().__init__()
        self.cross, self.own = source.cross_attention, source.self_attention
        self.cross_mlp, self.own_mlp = source.mlp, source.self_mlp
        self.norm_input, self.norm_latents = source.layer_norm_input, source.layer_norm_latents
        self.norm_own = source.layer_norm_self

    def forward(self, x: Tensor, memory: Tensor, position: Tensor, free: int, cut: Any) -> Tensor:
        x = x + self._attend_memory(self.norm_latents(x), self.norm_input(memory), position, free, cut)
        x = x + _apply_mlp(self.cross_mlp, x)
        x = x + self._attend_latents(self.norm_own(x), free)
        return x + _apply_mlp(self.own_mlp, x)

    def _attend_memory(self, x: Tensor, memory: Tensor, position: Tensor, free: int, cut: Any) -> Tensor:
        layer = self.cross
        query = apply_linear(layer.q_proj, x)
        key, value = apply_linear(layer.k_proj, memory), apply_linear(layer.v_proj, memory)
        whole = _attend(query[:, :free], key + position, value + position)
        placed = query[:, free:]
        local = _attend(placed.flatten(0, 1)[:, None], cut(key), cut(value)).view_as(placed)
        return apply_linear(layer.o_proj, torch.cat([whole, local], dim=1))

    def _attend_latents(self, x: Tensor, free: int) -> Tensor:
        layer, first = self.own, x[:, :free]
        value = apply_linear(layer.v_proj, x)
        whole = _attend(apply_linear(layer.q_proj, first), apply_linear(layer.k_proj, first), value[:, :free])
        return apply_linear(layer.o_proj, torch.cat([whole, value[:, free:]], dim=1))


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None])[:, 0]


def _apply_mlp(mlp: Any, x: Tensor) -> Tensor:
    return apply_linear(mlp.down_proj, apply_linear(mlp.up_proj, mlp.layer_norm(x), "gelu"))


class LatentPlaces(NamedTuple):
    """Positions and rotations of the tokens of a compressed memory, for the memory read."""

    position: Tensor
    """float32 [T, 64], added to the keys"""
    rotation: Tensor
    """float32 [T, D / 2, (cos, sin)], of the projected keys"""


def find_latent_places(source: Any, rotation: Tensor) -> LatentPlaces:
    """Return the places of the tokens that `Perceiver` returns.

    rotation: [W, D / 2, (cos, sin)], of the W windows. Latents without a place have no position, and are not rotated.
    Raises ModelError where the configuration has another number of windows.
    """
    perceiver = source.spatial_perceiver
    free, placed = perceiver.num_latents_1d, perceiver.num_latents_2d
    side = math.isqrt(placed)
    if not free or side * side != placed or len(rotation) != placed:
        raise ModelError(
            f"EdgeTAM: expected latents without a place, and as many with one as keys are rotated ({len(rotation)}, "
            f"in a square); found {free} and {placed}"
        )
    position = _sine(perceiver, side, side, rotation.device)
    return LatentPlaces(
        torch.cat([position.new_zeros(free, position.shape[1]), position]),
        torch.cat([rotation.new_tensor([1.0, 0.0]).expand(free, rotation.shape[1], 2), rotation]),
    )


def _sine(perceiver: Any, height: int, width: int, device: torch.device) -> Tensor:
    """Return the perceiver's position encoding of a grid, float32 [hw, C]."""
    shape = torch.Size((1, perceiver.hidden_size, height, width))
    position: Tensor = perceiver.positional_encoding(shape, device, torch.float32)
    return position[0].flatten(1).T
