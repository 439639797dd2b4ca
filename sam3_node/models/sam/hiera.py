"""Hiera (arXiv 2306.00989), the image encoder of SAM 2 (arXiv 2408.00714), with its feature pyramid.

Tokens stay in Z order from the first block to the last. In this order, every aligned window whose side is a power of
two is a run of neighbours, 2x2 pooling takes the maximum of four consecutive tokens, and the pyramid's upsampling
repeats each token four times, so nothing is copied between blocks. Windows of other sizes, and windows that extend past
the map's edge, are gathered.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import ModelError
from .algebra import apply_linear, apply_mlp
from .vit import side

POOL = 4  # tokens that pooling joins: it halves both sides of the map


class Hiera(nn.Module):
    """The backbone of a transformers SAM 2 model. It uses the source's layers themselves, so training updates them."""

    order: Tensor
    position: Tensor

    def __init__(self, source: Any) -> None:
        super().__init__()
        config = source.config
        if tuple(config.query_stride) != (2, 2):
            raise ModelError(f"Hiera: expected pooling by 2 x 2, found {tuple(config.query_stride)}")
        self.patch = source.patch_embed.projection
        self.grid = side(config.image_size) // side(config.patch_stride)
        self.ends = frozenset(source.stage_ends)
        self.register_buffer("order", z_order(self.grid), persistent=False)
        self.register_buffer("position", self.position_map(source).detach().clone(), persistent=False)
        grid, blocks = self.grid, []
        for block in source.blocks:
            blocks.append(_Block(block, grid))
            grid //= 2 if block.query_stride else 1
        self.blocks = nn.ModuleList(blocks)

    def position_map(self, source: Any) -> Tensor:
        """Compute the current position map of `source`, [1, N, C] in Z order."""
        position: Tensor = source._get_pos_embed((self.grid, self.grid))
        return position.flatten(1, 2)[:, self.order]

    def forward(self, pixels: Tensor, position: Tensor | None = None) -> list[Tensor]:
        """Encode pixels [B, 3, S, S]; return the tokens [B, n, C] of each stage in Z order, the finest first.

        position: the position map to use instead of the one at construction.
        """
        x = self.patch(pixels).flatten(2).transpose(1, 2)[:, self.order]
        x = x + (self.position if position is None else position)
        stages = []
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index in self.ends:
                stages.append(x)
        return stages


class _Block(nn.Module):
    gather: Tensor | None
    scatter: Tensor | None

    def __init__(self, source: Any, grid: int) -> None:
        super().__init__()
        attention = source.attn
        self.norm1, self.norm2 = source.layer_norm1, source.layer_norm2
        self.qkv, self.out, self.heads = attention.qkv, attention.proj, attention.num_attention_heads
        self.mlp, self.pools = source.mlp, source.query_stride is not None
        self.widen = source.proj if source.dim != source.dim_out else nn.Identity()
        window = source.window_size or grid
        self.span = window * window  # tokens that attend to each other
        gather, scatter = (None, None) if _is_run(window, grid) else _windows(window, grid, self.pools)
        self.register_buffer("gather", gather, persistent=False)
        self.register_buffer("scatter", scatter, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        kept = x if isinstance(self.widen, nn.Identity) else self.widen(normed)
        x = (_pooled(kept) if self.pools else kept) + self._attend(normed)
        mlp = self.mlp
        return x + apply_mlp(mlp.proj_in, mlp.activation, mlp.proj_out, self.norm2(x))

    def _attend(self, x: Tensor) -> Tensor:
        batch = len(x)
        if self.gather is not None:
            x = F.pad(x, (0, 0, 0, 1))[:, self.gather]
        qkv = apply_linear(self.qkv, x)
        qkv = qkv.view(-1, self.span, 3, self.heads, qkv.shape[-1] // (3 * self.heads))
        query, key, value = qkv.unbind(2)
        if self.pools:
            query = _pooled(query)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value)
        out = apply_linear(self.out, out.transpose(1, 2).reshape(batch, -1, out.shape[1] * out.shape[3]))
        return out if self.scatter is None else out[:, self.scatter]


def _pooled(x: Tensor) -> Tensor:
    """Return the maximum of each four consecutive tokens along axis 1."""
    return torch.unflatten(x, 1, (-1, POOL)).amax(dim=2)


def z_order(grid: int) -> Tensor:
    """Return the row-major indices int64 [grid * grid] of a square map in Z order.

    If the grid is not a power of two, the Z order covers blocks of the largest power of two that divides it.
    """
    rows = torch.arange(grid * grid).view(grid, grid)
    block = grid & -grid  # the largest power of two that divides it
    order = rows.view(grid // block, block, grid // block, block).transpose(1, 2)
    while block > 1:
        block //= 2
        order = torch.unflatten(torch.unflatten(order, -2, (2, block)), -1, (2, block)).transpose(-3, -2)
    return order.reshape(-1)


def _is_run(window: int, grid: int) -> bool:
    """Return True if each window is a run of neighbours in Z order."""
    return window == grid or (window & (window - 1) == 0 and (grid & -grid) % window == 0)


def _windows(window: int, grid: int, pools: bool) -> tuple[Tensor, Tensor]:
    """Return the token at each position of the windows (grid * grid for padding), and the position of each token.

    Both are counted in Z order, in the map and within each window. If the block pools, the positions are those after
    pooling.
    """
    count = -(-grid // window)
    tokens = torch.full((count * window, count * window), grid * grid)
    tokens[:grid, :grid] = z_order(grid).argsort().view(grid, grid)
    cut = tokens.view(count, window, count, window).transpose(1, 2).reshape(count * count, -1)
    gather = cut[:, z_order(window)].reshape(-1)
    held = gather[::POOL] // POOL if pools else gather
    total = grid * grid // POOL if pools else grid * grid
    return gather, held.argsort()[:total]  # padding comes last
