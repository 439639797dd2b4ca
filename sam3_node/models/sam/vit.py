"""Encode images by SAM 3's plain ViT (arXiv 2511.16719) or SAM 2's Hiera (arXiv 2306.00989), without copies.

The ViT's tokens stay in window order from the first layer to the last. Windowed attention then needs no copies; neither
does global attention, whose result does not depend on the order. Windows that extend past the map's edge are padded as
in the reference, only for the attention.

Hiera's tokens stay in Z order. In this order, every aligned window whose side is a power of two is a run of neighbours,
2x2 pooling takes the maximum of four consecutive tokens, and the pyramid's upsampling repeats each token four times.
Windows of other sizes, and windows that extend past the map's edge, are gathered.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import ModelError
from .algebra import apply_linear, apply_mlp, axial_rotation, join_linear, patch_linear, rotate
from .configuration import side


class WindowEncoder(nn.Module):
    """An encoder whose tokens stay in window `order`, which `inverse` undoes; `grid` tokens are along a side."""

    order: Tensor
    inverse: Tensor

    def keep_order(self, grid: int, window: int, device: torch.device) -> Tensor:
        """Keep the order, and return the windows; see `window_order`."""
        windows = window_order(grid, window).to(device)
        self.grid = grid
        self.register_buffer("order", windows[windows < grid * grid], persistent=False)
        self.register_buffer("inverse", self.order.argsort(), persistent=False)
        return windows


class WindowedViT(WindowEncoder):
    """The backbone of SAM 3."""

    position: Tensor

    def __init__(self, source: Any) -> None:
        super().__init__()
        config = source.config
        self.patch = patch_linear(source.embeddings.patch_embeddings.projection)
        self.patch_size = side(config.patch_size)
        grid = token_grid(config)
        position = _tile(source.embeddings.position_embeddings, grid)
        windows = self.keep_order(grid, config.window_size, position.device)
        self.register_buffer("position", position.detach()[:, self.order].clone(), persistent=False)
        self.norm = source.layer_norm
        self.layers = nn.ModuleList(
            _ViTLayer(layer, windows, self.order, grid, config.window_size) for layer in source.layers
        )

    def use_kernels(self, on: bool) -> None:
        """Rotate queries and keys by our kernel, or by torch.

        The kernel rotates in place, where torch moves queries and keys six times in float32.
        """
        for layer in self.layers:
            assert isinstance(layer, _ViTLayer)
            layer.uses_kernels = on

    def forward(self, pixels: Tensor) -> Tensor:
        """Encode pixels [1, 3, S, S] into the feature map [1, C, h, w], channels last in memory."""
        cells = (self.grid, self.patch_size)
        patches = torch.unflatten(torch.unflatten(pixels, 3, cells), 2, cells)
        x = self.patch(patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)[:, self.order])
        x = self.norm(x + self.position)
        for layer in self.layers:
            x = layer(x)
        return torch.unflatten(x[:, self.inverse].transpose(1, 2), 2, (self.grid, self.grid))


class WindowLayer(nn.Module):
    """A layer whose tokens attend within windows: `gather` puts tokens into windows, `scatter` back; None for runs.

    A subclass has the maps `qkv` and `out`, the number of `heads`, and the `span`: tokens that attend to each other.
    """

    gather: Tensor | None
    scatter: Tensor | None
    qkv: nn.Linear
    out: nn.Linear
    heads: int
    span: int

    def attend(self, x: Tensor) -> Tensor:
        """Attend with tokens [B, n, C]. Windows are padded with zeros, to which the others do attend."""
        batch = x.shape[0]  # `len` would fix it in an export
        if self.gather is not None:
            # padding positions read the added token of zeros
            x = F.pad(x, (0, 0, 0, 1))[:, self.gather]
        qkv = apply_linear(self.qkv, x)
        width = qkv.shape[-1] // (3 * self.heads)
        out = self.attend_within(qkv.view(-1, self.span, 3 * self.heads, width)).transpose(1, 2)
        out = apply_linear(self.out, out.reshape(batch, -1, self.heads * width))
        return out if self.scatter is None else out[:, self.scatter]

    def attend_within(self, qkv: Tensor) -> Tensor:
        """Attend in each of W windows, with qkv [W, span, 3 * heads, D]; return [W, heads, tokens, D]."""
        raise NotImplementedError

    def keep_windows(self, gather: Tensor | None, scatter: Tensor | None) -> None:
        """Register both."""
        self.register_buffer("gather", gather, persistent=False)
        self.register_buffer("scatter", scatter, persistent=False)

    def keep_padded(self, windowed: bool, windows: Tensor, order: Tensor) -> None:
        """Register both where windows extend past the map's edge; elsewhere tokens in window `order` are runs."""
        overhangs = windowed and windows.numel() > order.numel()
        self.keep_windows(*(pad_windows(windows, order) if overhangs else (None, None)))


class _ViTLayer(WindowLayer):
    rotation: Tensor

    def __init__(self, source: Any, windows: Tensor, order: Tensor, grid: int, window: int) -> None:
        super().__init__()
        self.uses_kernels = False
        attention = source.attention
        self.norm1 = source.layer_norm1
        self.norm2 = source.layer_norm2
        self.mlp = source.mlp
        self.heads = attention.num_attention_heads
        self.qkv = join_linear(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = attention.o_proj
        windowed = source.window_size > 0
        self.span = source.window_size**2 if windowed else order.numel()
        self.keep_padded(windowed, windows, order)
        # positions of the whole map are scaled, so that it is as large as a window
        side_tokens = source.window_size if windowed else grid
        channels = attention.q_proj.out_features // self.heads
        rotation = axial_rotation(side_tokens, side_tokens, channels, order.device, window / side_tokens)
        # in a window the tokens are row by row, as in the reference; those of the map are not
        if not windowed:
            rotation = rotation[order]
        self.register_buffer("rotation", rotation[:, None].contiguous(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + apply_mlp(self.mlp.fc1, self.mlp.activation_fn, self.mlp.fc2, self.norm2(x))

    def attend_within(self, qkv: Tensor) -> Tensor:
        turned = qkv[:, :, : 2 * self.heads]
        if (
            self.uses_kernels and not torch.compiler.is_compiling()
        ):  # a compiler joins the formula with its neighbours
            from .kernels import rotate_in_place

            turned = rotate_in_place(turned, self.rotation)
        else:
            turned = rotate(turned, self.rotation)
        query, key = turned.transpose(1, 2).chunk(2, dim=1)
        return F.scaled_dot_product_attention(query, key, qkv[:, :, 2 * self.heads :].transpose(1, 2))


def _tile(position: Tensor, grid: int) -> Tensor:
    """Tile a square position map [1, n, C] over a grid; return [1, grid * grid, C]."""
    own = math.isqrt(position.shape[1])
    times = grid // own + 1
    tiled = position.unflatten(1, (own, own)).repeat(1, times, times, 1)
    return tiled[:, :grid, :grid].flatten(1, 2)


def token_grid(config: Any) -> int:
    """Return the number of tokens along a side of the image."""
    return side(config.image_size) // side(config.patch_size)


def window_order(grid: int, window: int) -> Tensor:
    """Return the indices of a row-major token grid, window by window; grid * grid for padding."""
    count = -(-grid // window)
    tokens = torch.full((count * window, count * window), grid * grid)
    tokens[:grid, :grid] = torch.arange(grid * grid).view(grid, grid)
    return tokens.view(count, window, count, window).transpose(1, 2).reshape(-1)


def pad_windows(windows: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Return the token at each position of the windows, counted in `order`, and the position of each token.

    Padding positions hold the number of tokens.
    """
    held = windows < order.numel()
    gather = torch.full_like(windows, order.numel())
    gather[held] = torch.arange(order.numel(), device=windows.device)
    return gather, held.nonzero()[:, 0]


POOL = 4  # consecutive tokens that pooling joins to their maximum: it halves both sides of the map


class Hiera(nn.Module):
    """The backbone of SAM 2. It uses the source's layers themselves, so training updates them."""

    order: Tensor
    position: Tensor

    def __init__(self, source: Any) -> None:
        super().__init__()
        config = source.config
        if side(config.query_stride) != 2:
            raise ModelError(f"Hiera: expected pooling by 2 x 2, found {config.query_stride}")
        self.patch = source.patch_embed.projection
        self.grid = side(config.image_size) // side(config.patch_stride)
        self.ends = frozenset(source.stage_ends)
        self.register_buffer("order", z_order(self.grid), persistent=False)
        self.register_buffer("position", self.position_map(source).detach().clone(), persistent=False)
        grid = self.grid
        blocks = []
        for block in source.blocks:
            blocks.append(_HieraBlock(block, grid))
            # a block that pools leaves a smaller grid to those after it
            grid //= 2 if block.query_stride else 1
        self.blocks = nn.ModuleList(blocks)

    def position_map(self, source: Any) -> Tensor:
        """Compute the current position map of `source`, [1, N, C] in Z order."""
        # one map is resized to the grid, the other is tiled over it (arXiv 2311.05613)
        position = F.interpolate(source.pos_embed, size=(self.grid, self.grid), mode="bicubic")
        window = source.pos_embed_window
        times = self.grid // window.shape[-1]
        position = position + window.tile(1, 1, times, times)
        return position.permute(0, 2, 3, 1).flatten(1, 2)[:, self.order]

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


class _HieraBlock(WindowLayer):
    def __init__(self, source: Any, grid: int) -> None:
        super().__init__()
        attention = source.attn
        self.norm1 = source.layer_norm1
        self.norm2 = source.layer_norm2
        self.qkv = attention.qkv
        self.out = attention.proj
        self.heads = attention.num_attention_heads
        self.mlp = source.mlp
        self.pools = source.query_stride is not None
        self.widen = source.proj if source.dim != source.dim_out else nn.Identity()
        window = source.window_size or grid
        self.span = window * window
        self.keep_windows(*((None, None) if _is_run(window, grid) else _windows(window, grid, self.pools)))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        # the reference widens the normed tokens where the width changes
        kept = x if isinstance(self.widen, nn.Identity) else self.widen(normed)
        if self.pools:
            kept = torch.unflatten(kept, 1, (-1, POOL)).amax(dim=2)
        x = kept + self.attend(normed)
        mlp = self.mlp
        return x + apply_mlp(mlp.proj_in, mlp.activation, mlp.proj_out, self.norm2(x))

    def attend_within(self, qkv: Tensor) -> Tensor:
        query, key, value = qkv.chunk(3, dim=2)
        if self.pools:
            query = torch.unflatten(query, 1, (-1, POOL)).amax(dim=2)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        return F.scaled_dot_product_attention(query, key, value)


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
    # pooling joins runs of four, so every fourth index, divided by 4, counts the pooled tokens
    held = gather[::POOL] // POOL if pools else gather
    total = grid * grid // POOL if pools else grid * grid
    return gather, held.argsort()[:total]  # padding comes last
