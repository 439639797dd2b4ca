"""SAM 3's plain ViT (arXiv 2511.16719), arranged for one image at a time.

Tokens stay in window order from the first layer to the last, so that windowed attention needs no copies and global
attention, which does not mind the order, needs none either. Windows that overhang the map are filled up as the
reference fills them, for the attention alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import ModelError
from .algebra import join_linear, patch_linear, rotate


class WindowedViT(nn.Module):
    """The backbone of a transformers `Sam3TrackerVideoModel`."""

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
        """pixels [1, 3, S, S] -> feature map [1, C, h, w]."""
        patches = pixels.unflatten(3, (self.grid, self.patch_size)).unflatten(2, (self.grid, self.patch_size))
        x = self.patch(patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)[:, self.order])
        x = self.norm(x + self.position)
        for layer in self.layers:
            x = layer(x)
        return (
            x[:, self.inverse].transpose(1, 2).unflatten(2, (self.grid, self.grid))
        )  # channels last in memory


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
        self.span = source.window_size**2 if windowed else order.numel()  # tokens that attend to one another
        overhangs = windowed and windows.numel() > order.numel()
        gather, scatter = _places(windows, order) if overhangs else (None, None)
        self.register_buffer("gather", gather, persistent=False)
        self.register_buffer("scatter", scatter, persistent=False)
        filling = self.qkv.bias.detach()[None, None].clone()  # of a place without a token: the map of zeros
        self.register_buffer("filling", filling, persistent=False)
        cos, sin = source.rotary_emb(order, source.position_ids)  # [1, tokens, D], each value twice
        rotation = torch.stack([cos[0, :, ::2], sin[0, :, ::2]], dim=-1)
        if not windowed:
            rotation = rotation[order]
        self.register_buffer("rotation", rotation[:, None].contiguous(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self._attend(self.norm1(x)))
        return x + self.mlp(self.norm2(x))

    def _attend(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)
        if self.gather is not None:
            qkv = torch.cat([qkv, self.filling.expand(len(x), -1, -1)], dim=1)[:, self.gather]
        qkv = qkv.view(-1, self.span, 3 * self.heads, x.shape[-1] // self.heads)
        query, key = rotate(qkv[:, :, : 2 * self.heads], self.rotation).transpose(1, 2).chunk(2, dim=1)
        value = qkv[:, :, 2 * self.heads :].transpose(1, 2)
        out = F.scaled_dot_product_attention(query, key, value)  # [windows, heads, span, D]
        out = out.transpose(1, 2).reshape(len(x), -1, x.shape[-1])
        return out if self.scatter is None else out[:, self.scatter]


def side(size: int | Sequence[int]) -> int:
    """A configured size, which may be given for both axes; ModelError unless they are equal."""
    if isinstance(size, int):
        return size
    if len(set(size)) != 1:
        raise ModelError(f"image and patch size: expected squares, found {list(size)}")
    return size[0]


def token_grid(config: Any) -> int:
    """Tokens along a side of the image."""
    return side(config.image_size) // side(config.patch_size)


def _windows(grid: int, window: int) -> Tensor:
    """Indices of a row-major token grid, window after window; grid * grid for places beyond the map."""
    many = -(-grid // window)
    tokens = torch.full((many * window, many * window), grid * grid)
    tokens[:grid, :grid] = torch.arange(grid * grid).view(grid, grid)
    return tokens.view(many, window, many, window).transpose(1, 2).reshape(-1)


def _places(windows: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Which token, counted in `order`, each place of the windows holds (their number for none), and where each is."""
    held = windows < order.numel()
    gather = torch.full_like(windows, order.numel())
    gather[held] = torch.arange(order.numel(), device=windows.device)
    return gather, held.nonzero()[:, 0]
