"""SAM 3's plain ViT (arXiv 2511.16719), arranged for one image at a time.

Tokens stay in window order from the first layer to the last. Windowed attention then needs no copies; neither does
global attention, whose result does not depend on the order. Windows that extend past the map's edge are padded as in
the reference, only for the attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import ModelError
from .algebra import apply_linear, apply_mlp, join_linear, patch_linear, rotate


class WindowedViT(nn.Module):
    """The backbone of a transformers `Sam3TrackerVideoModel`."""

    order: Tensor
    inverse: Tensor
    position: Tensor

    def __init__(self, source: Any) -> None:
        super().__init__()
        config = source.config
        self.patch = patch_linear(source.embeddings.patch_embeddings.projection)
        self.patch_size = side(config.patch_size)
        grid = token_grid(config)
        self.grid = grid
        position = source.embeddings._tile_position_embeddings(
            source.embeddings.position_embeddings, grid, grid
        )
        windows = _windows(grid, config.window_size).to(position.device)
        order = windows[windows < grid * grid]
        self.register_buffer("order", order, persistent=False)
        self.register_buffer("inverse", order.argsort(), persistent=False)
        self.register_buffer("position", position.detach()[:, order].clone(), persistent=False)
        self.norm = source.layer_norm
        self.layers = nn.ModuleList(_Layer(layer, windows, order) for layer in source.layers)

    def forward(self, pixels: Tensor) -> Tensor:
        """Encode pixels [1, 3, S, S] into the feature map [1, C, h, w], channels last in memory."""
        cells = (self.grid, self.patch_size)
        patches = torch.unflatten(torch.unflatten(pixels, 3, cells), 2, cells)
        x = self.patch(patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)[:, self.order])
        x = self.norm(x + self.position)
        for layer in self.layers:
            x = layer(x)
        return torch.unflatten(x[:, self.inverse].transpose(1, 2), 2, (self.grid, self.grid))


class _Layer(nn.Module):
    rotation: Tensor
    gather: Tensor | None
    scatter: Tensor | None
    filling: Tensor

    def __init__(self, source: Any, windows: Tensor, order: Tensor) -> None:
        super().__init__()
        attention = source.attention
        self.norm1, self.norm2, self.mlp = source.layer_norm1, source.layer_norm2, source.mlp
        self.heads = attention.num_attention_heads
        self.qkv = join_linear(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = attention.o_proj
        windowed = source.window_size > 0
        self.span = source.window_size**2 if windowed else order.numel()  # tokens that attend to each other
        overhangs = windowed and windows.numel() > order.numel()
        gather, scatter = _pad_windows(windows, order) if overhangs else (None, None)
        self.register_buffer("gather", gather, persistent=False)
        self.register_buffer("scatter", scatter, persistent=False)
        filling = self.qkv.bias.detach()[None, None].clone()  # of a padding position: the projection of zeros
        self.register_buffer("filling", filling, persistent=False)
        cos, sin = source.rotary_emb(order, source.position_ids)  # [1, tokens, D], each value occurs twice
        rotation = torch.stack([cos[0, :, ::2], sin[0, :, ::2]], dim=-1)
        if not windowed:
            rotation = rotation[order]
        self.register_buffer("rotation", rotation[:, None].contiguous(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + apply_linear(self.out, self._attend(self.norm1(x)))
        return x + apply_mlp(self.mlp.fc1, self.mlp.activation_fn, self.mlp.fc2, self.norm2(x))

    def _attend(self, x: Tensor) -> Tensor:
        qkv = apply_linear(self.qkv, x)
        if self.gather is not None:
            qkv = torch.cat([qkv, self.filling.expand(len(x), -1, -1)], dim=1)[:, self.gather]
        qkv = qkv.view(-1, self.span, 3 * self.heads, x.shape[-1] // self.heads)
        query, key = rotate(qkv[:, :, : 2 * self.heads], self.rotation).transpose(1, 2).chunk(2, dim=1)
        value = qkv[:, :, 2 * self.heads :].transpose(1, 2)
        out = F.scaled_dot_product_attention(query, key, value)  # [windows, heads, span, D]
        out = out.transpose(1, 2).reshape(len(x), -1, x.shape[-1])
        return out if self.scatter is None else out[:, self.scatter]


def side(size: int | Sequence[int]) -> int:
    """Return a configured size. It may be given for both axes; ModelError unless both are equal."""
    if isinstance(size, int):
        return size
    if len(set(size)) != 1:
        raise ModelError(f"image and patch size: expected squares, found {list(size)}")
    return size[0]


def token_grid(config: Any) -> int:
    """Return the number of tokens along a side of the image."""
    return side(config.image_size) // side(config.patch_size)


def _windows(grid: int, window: int) -> Tensor:
    """Return the indices of a row-major token grid, window by window; grid * grid for padding."""
    count = -(-grid // window)
    tokens = torch.full((count * window, count * window), grid * grid)
    tokens[:grid, :grid] = torch.arange(grid * grid).view(grid, grid)
    return tokens.view(count, window, count, window).transpose(1, 2).reshape(-1)


def _pad_windows(windows: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Return the token at each position of the windows, counted in `order`, and the position of each token.

    Padding positions hold the number of tokens.
    """
    held = windows < order.numel()
    gather = torch.full_like(windows, order.numel())
    gather[held] = torch.arange(order.numel(), device=windows.device)
    return gather, held.nonzero()[:, 0]
