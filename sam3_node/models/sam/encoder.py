"""Turn pixels into the tracker's three feature maps: the image encoders of SAM 3, SAM 2, EdgeTAM and SAM 1.

SAM 1 (arXiv 2304.02643) equals transformers' `SamModel` on the same weights; its prompt encoder has the interface of
SAM 2's. Its tokens stay in window order, as in `vit`. The relative positions, which the reference adds to all scores as
a bias of tokens x tokens, become further channels of queries and keys. So attention is fused, and no such bias is ever
in memory.
"""

import math
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import ModelError
from .algebra import embed_positions, fold_convolution, fold_upscaling, patch_linear, upscaled_bias
from .repvit import fold_norms
from .sam1_weights import Sam1Weights
from .vit import POOL, Hiera, WindowedViT, WindowEncoder, WindowLayer, token_grid, z_order
from .weights import NO_POINT


def build_encoder(source: Any) -> nn.Module:
    """Build the encoder stage of a tracker, or of what `adapt_sam1` returns."""
    vision = source.vision_encoder
    # SAM 1's is one module, the others have a backbone and a neck
    if not hasattr(vision, "backbone"):
        return Sam1Encoder(source)
    if hasattr(vision.neck, "fpn_layers"):
        return Sam3Encoder(source)
    return EdgeTamEncoder(source) if hasattr(vision.backbone, "timm_model") else Sam2Encoder(source)


class Sam3Pyramid(nn.Module):
    """Levels of SAM 3's feature pyramid, folded with the mask decoder's projections of them."""

    def __init__(self, levels: Iterable[Any], decoder: Any, grid: int) -> None:
        super().__init__()
        fine, middle, top = levels
        first, activation, second = fine.scale_layers
        self.fine = nn.Sequential(first, activation, _Upscaling(second, fine, decoder.conv_s0, 4 * grid))
        self.middle = _Upscaling(middle.scale_layers[0], middle, decoder.conv_s1, 2 * grid)
        self.top = nn.Sequential(top.proj1, top.proj2)

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        """Turn the trunk [1, D, h, w] into fine [1, C/8, 4h, 4w], middle [1, C/4, 2h, 2w] and top [1, C, h, w]."""
        return self.fine(image), self.middle(image), self.top(image)


class Sam3Encoder(Sam3Pyramid):
    """SAM 3's plain ViT and its simple feature pyramid.

    Consecutive linear maps of the two fine levels are folded into one: a transposed convolution, the 1x1 and the 3x3
    after it, and the 1x1 that feeds the mask decoder. The level that the tracker does not use is omitted. This is exact
    up to rounding.
    """

    def __init__(self, source: Any) -> None:
        vision = source.vision_encoder
        backbone = WindowedViT(vision.backbone)
        super().__init__(vision.neck.fpn_layers[:3], source.mask_decoder, backbone.grid)
        self.backbone = backbone
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # the tokens are channels-last already

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        """Encode pixels [1, 3, S, S] into fine [1, C/8, 4h, 4w], middle [1, C/4, 2h, 2w] and top [1, C, h, w].

        The last output is the backbone's own, the trunk [1, D, h, w], which costs nothing.
        """
        image = self.backbone(pixels)
        return *super().forward(image), image


class _Upscaling(nn.Module):
    """A pyramid level's last transposed convolution, its two projections, and the decoder's 1x1, as one linear map."""

    bias: Tensor

    def __init__(self, upscale: nn.ConvTranspose2d, level: Any, last: nn.Conv2d, size: int) -> None:
        super().__init__()
        first = fold_convolution(upscale, level.proj1)
        second = fold_convolution(level.proj2, last)
        self.map = fold_upscaling(first, second)
        self.register_buffer("bias", upscaled_bias(first, second, size), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Upscale [1, C, n, n] to [1, O, 2n, 2n]."""
        if torch.onnx.is_in_onnx_export():  # TensorRT has no transposed convolution in bfloat16
            phases = F.conv2d(x, self._phase_weight(), padding=1)
            return F.pixel_shuffle(phases, 2) + self.bias
        return self.map(x) + self.bias

    def _phase_weight(self) -> Tensor:
        """Return the 3x3 convolution [4 O, C, 3, 3] whose outputs are the 2 x 2 pixels below each input pixel."""
        weight = F.pad(self.map.weight, (0, 1, 0, 1))  # index 4 is 0
        taps = torch.tensor([3, 1, 4, 4, 2, 0], device=weight.device)  # of phase 0, then of phase 1
        kernel = weight.index_select(2, taps).index_select(3, taps)
        phases: Tensor = kernel.unflatten(3, (2, 3)).unflatten(2, (2, 3)).permute(1, 2, 4, 0, 3, 5)
        return phases.flatten(0, 2)


class Sam2Encoder(nn.Module):
    """SAM 2's Hiera and its feature pyramid.

    The 1x1 convolutions of the two fine levels are folded into the ones that feed the mask decoder. The position maps,
    which the tracker does not use, are omitted. This is exact up to rounding.
    """

    fine_rows: Tensor
    middle_rows: Tensor
    top_rows: Tensor

    def __init__(self, source: Any) -> None:
        super().__init__()
        vision = source.vision_encoder
        decoder = source.mask_decoder
        _check_pyramid(vision.neck)
        self.backbone = Hiera(vision.backbone)
        coarse, top, middle, fine = vision.neck.convs
        self.fine = patch_linear(fold_convolution(fine, decoder.conv_s0))
        self.middle = patch_linear(fold_convolution(middle, decoder.conv_s1))
        self.top = patch_linear(top)
        self.coarse = patch_linear(coarse)
        for level, name in enumerate(("fine_rows", "middle_rows", "top_rows")):
            self.register_buffer(name, z_order(self.backbone.grid >> level).argsort(), persistent=False)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Encode pixels [1, 3, S, S] into fine [1, C/8, 4h, 4w], middle [1, C/4, 2h, 2w] and top [1, C, h, w]."""
        fine, middle, top, coarse = self.backbone(pixels)
        # in Z order, the four pixels below a token are neighbours
        top = self.top(top) + self.coarse(coarse).repeat_interleave(POOL, dim=1)
        return (
            _map(self.fine(fine), self.fine_rows),
            _map(self.middle(middle), self.middle_rows),
            _map(top, self.top_rows),
        )


class EdgeTamEncoder(nn.Module):
    """EdgeTAM's RepViT, with its batch norms folded, and SAM 2's feature pyramid as in `Sam2Encoder`."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        vision = source.vision_encoder
        decoder = source.mask_decoder
        _check_pyramid(vision.neck)
        self.backbone = fold_norms(vision.backbone.timm_model)
        self.coarse, self.top, middle, fine = vision.neck.convs
        self.fine = fold_convolution(fine, decoder.conv_s0)
        self.middle = fold_convolution(middle, decoder.conv_s1)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Encode pixels [1, 3, S, S] into fine [1, C/8, 4h, 4w], middle [1, C/4, 2h, 2w] and top [1, C, h, w]."""
        # pixels have to be channels-last, because the weights are
        pixels = pixels.contiguous(memory_format=torch.channels_last)
        fine, middle, top, coarse = self.backbone(pixels)
        top = self.top(top) + F.interpolate(self.coarse(coarse), scale_factor=2.0)
        return self.fine(fine), self.middle(middle), top


def _check_pyramid(neck: Any) -> None:
    if sorted(neck.fpn_top_down_levels) != [2, 3]:
        raise ModelError(
            f"SAM 2: expected a pyramid whose two coarse levels meet, found {neck.fpn_top_down_levels}"
        )


def _map(tokens: Tensor, rows: Tensor) -> Tensor:
    """Turn tokens [B, n, C] in Z order into a map [B, C, h, w], channels last in memory. `rows` undoes the order."""
    return torch.unflatten(tokens[:, rows].transpose(1, 2), 2, (math.isqrt(len(rows)), -1))


CORNER = 2  # labels from here on are corners of a box


def adapt_sam1(source: Sam1Weights) -> SimpleNamespace:
    """Return SAM 1 with the attributes of a SAM 2 model that `TrackerModel` reads."""
    grid = source.config.vision_config.grid
    weight = source.mask_decoder.iou_token.weight
    return SimpleNamespace(
        config=SimpleNamespace(
            multimask_output_in_sam=True,
            multimask_output_for_tracking=False,
            multimask_min_pt_num=0,
            multimask_max_pt_num=1,
        ),
        vision_encoder=source.vision_encoder,
        prompt_encoder=Sam1PromptEncoder(source),
        mask_decoder=source.mask_decoder,
        backbone_feature_sizes=[(grid, grid)],
        hidden_dim=weight.shape[-1],
        # SAM 1 adds nothing to an image without memory
        no_memory_embedding=nn.Parameter(weight.new_zeros(1, 1, weight.shape[-1])),
        shared_image_embedding=source.shared_image_embedding,
    )


class Sam1PromptEncoder(nn.Module):
    """SAM's prompt encoder. Corners of boxes are points with the labels 2 and 3, as in SAM 2's."""

    def __init__(self, source: Sam1Weights) -> None:
        super().__init__()
        prompts = source.prompt_encoder
        self.input_image_size = prompts.input_image_size
        self.mask_input_size = tuple(4 * size for size in prompts.image_embedding_size)
        self.frequencies = source.shared_image_embedding
        self.mask_embed = prompts.mask_embed
        self.no_mask_embed = prompts.no_mask_embed
        # labels index this table, and NO_POINT, which is -1, takes its last row
        tables = (*prompts.point_embed, prompts.not_a_point_embed)
        labels = torch.cat([table.weight for table in tables])
        self.labels = nn.Parameter(labels.detach(), requires_grad=False)

    def forward(self, points: Tensor, labels: Tensor, boxes: None, masks: None) -> tuple[Tensor, None]:
        """Embed points [1, N, n, 2] in model pixels with labels [1, N, n], as [1, N, n or n + 1, C].

        Without a box, a position without a point follows, as in the reference. In an export, which has no branches, it
        must be there already.
        """
        if not torch.onnx.is_in_onnx_export() and not ((labels >= CORNER) | (labels == NO_POINT)).any():
            points = F.pad(points, (0, 0, 0, 1))
            labels = F.pad(labels, (0, 1), value=NO_POINT)
        # the reference moves points to the centres of pixels
        position = embed_positions(
            self.frequencies.positional_embedding, (points + 0.5) / self.input_image_size
        )
        embedded = position.masked_fill(labels[..., None] == NO_POINT, 0) + self.labels[labels.long()]
        return embedded, None


class Sam1Encoder(WindowEncoder):
    """SAM's ViT with its neck. SAM has no finer feature maps: those two are zeros, which take no memory."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        vision = source.vision_encoder
        decoder = source.mask_decoder
        config = vision.config
        self.patch = vision.patch_embed.projection
        self.neck = vision.neck
        windows = self.keep_order(token_grid(config), config.window_size, self.patch.weight.device)
        order = self.order
        position = self.patch.weight.new_zeros(1, 1, 1) if vision.pos_embed is None else vision.pos_embed
        position = position.detach().flatten(1, -2)
        self.register_buffer(
            "position", position[:, order].clone() if position.shape[1] > 1 else position, persistent=False
        )
        self.layers = nn.ModuleList(_Sam1Layer(layer, windows, order, self.grid) for layer in vision.layers)
        for name, conv in (("no_fine", decoder.upscale_conv2), ("no_middle", decoder.upscale_conv1)):
            self.register_buffer(name, conv.weight.new_zeros(1, conv.out_channels, 1, 1), persistent=False)

    position: Tensor
    no_fine: Tensor
    no_middle: Tensor

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Encode pixels [1, 3, S, S] into fine [1, C/8, 4h, 4w], middle [1, C/4, 2h, 2w] and top [1, C, h, w]."""
        x = self.patch(pixels).flatten(2).transpose(1, 2)[:, self.order] + self.position
        for layer in self.layers:
            x = layer(x)
        top = self.neck(x[:, self.inverse].unflatten(1, (self.grid, self.grid)))
        fine, middle = (
            zero.expand(pixels.shape[0], -1, scale * self.grid, scale * self.grid)
            for zero, scale in ((self.no_fine, 4), (self.no_middle, 2))
        )
        return fine, middle, top


class _Sam1Layer(WindowLayer):
    rows: Tensor
    columns: Tensor
    key_marks: Tensor

    def __init__(self, source: Any, windows: Tensor, order: Tensor, grid: int) -> None:
        super().__init__()
        attention = source.attn
        self.norm1 = source.layer_norm1
        self.norm2 = source.layer_norm2
        self.mlp = source.mlp
        self.qkv = attention.qkv
        self.out = attention.proj
        self.heads = attention.num_attention_heads
        windowed = source.window_size > 0
        width = source.window_size if windowed else grid
        cells = torch.arange(width * width, device=order.device) if windowed else order
        self.span = len(cells)
        self.keep_padded(windowed, windows, order)
        self.tables = nn.ParameterList(
            [attention.rel_pos_h, attention.rel_pos_w] if attention.use_rel_pos else []
        )
        rows = cells // width
        columns = cells % width
        positions = torch.arange(width, device=order.device)
        for name, index in (("rows", rows), ("columns", columns)):
            # row p - q + width - 1 of a table belongs to the relative position p - q
            self.register_buffer(name, index[:, None] - positions + width - 1, persistent=False)
        # the marks of a key pick the query's products with the relative positions of its row and column
        marks = torch.cat([rows[:, None] == positions, columns[:, None] == positions], dim=1)
        self.register_buffer("key_marks", marks.to(self.qkv.weight.dtype), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))

    def attend_within(self, qkv: Tensor) -> Tensor:
        query, key, value = qkv.transpose(1, 2).chunk(3, dim=1)
        width = query.shape[-1]
        scale = width**-0.5
        if len(self.tables):
            relative = [
                (query @ table.T).gather(-1, index.expand(*query.shape[:2], -1, -1))
                for table, index in zip(self.tables, (self.rows, self.columns), strict=True)
            ]
            query = torch.cat([query * scale, *relative], dim=-1)
            key = torch.cat([key, self.key_marks.expand(*key.shape[:2], -1, -1)], dim=-1)
            # most fused operations want values as wide as keys
            value = F.pad(value, (0, query.shape[-1] - value.shape[-1]))
            # the queries are scaled already, and the relative positions have no scale
            scale = 1.0
        return F.scaled_dot_product_attention(query, key, value, scale=scale)[..., :width]
