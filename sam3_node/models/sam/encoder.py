"""Image encoders of SAM 3, SAM 2 and EdgeTAM: they turn pixels into the tracker's three feature maps."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Sam3TrackerVideoModel
from transformers.models.sam.modeling_sam import SamVisionEncoder

from ...errors import ModelError
from .algebra import fold_convolution, fold_transposed, fold_upscaling, patch_linear, upscaled_bias
from .edgetam import RepVitBackbone
from .hiera import POOL, Hiera, z_order
from .repvit import fold_norms
from .sam1 import Sam1Encoder
from .vit import WindowedViT


def build_encoder(source: Any) -> nn.Module:
    """Build the encoder stage of a transformers tracker, or of what `adapt_sam1` returns."""
    if isinstance(source, Sam3TrackerVideoModel):
        return Sam3Encoder(source)
    if isinstance(source.vision_encoder, SamVisionEncoder):
        return Sam1Encoder(source)
    if isinstance(source.vision_encoder.backbone, RepVitBackbone):
        return EdgeTamEncoder(source)
    return Sam2Encoder(source)


class Sam3Encoder(nn.Module):
    """SAM 3's plain ViT and its simple feature pyramid.

    Consecutive linear maps of the two fine levels are folded into one: a transposed convolution, the 1x1 and the 3x3
    after it, and the 1x1 that feeds the mask decoder. The level that the tracker does not use is omitted. This is exact
    up to rounding.
    """

    def __init__(self, source: Any) -> None:
        super().__init__()
        vision = source.vision_encoder
        self.shares_trunk = False
        self.backbone = WindowedViT(vision.backbone)
        fine, middle, top = vision.neck.fpn_layers[:3]
        decoder = source.mask_decoder
        first, activation, second = fine.scale_layers
        grid = self.backbone.grid
        self.fine = nn.Sequential(first, activation, _Upscaling(second, fine, decoder.conv_s0, 4 * grid))
        self.middle = _Upscaling(middle.scale_layers[0], middle, decoder.conv_s1, 2 * grid)
        self.top = nn.Sequential(top.proj1, top.proj2)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # the tokens are channels-last already

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        """Encode pixels [1, 3, S, S] into fine [1, C/8, 4h, 4w], middle [1, C/4, 2h, 2w] and top [1, C, h, w].

        With `shares_trunk`, also return the backbone's output [1, D, h, w].
        """
        image = self.backbone(pixels)
        levels = self.fine(image), self.middle(image), self.top(image)
        return (*levels, image) if self.shares_trunk else levels


class _Upscaling(nn.Module):
    """A pyramid level's last transposed convolution, its two projections, and the decoder's 1x1, as one linear map."""

    bias: Tensor

    def __init__(self, upscale: nn.ConvTranspose2d, level: Any, last: nn.Conv2d, size: int) -> None:
        super().__init__()
        first, second = fold_transposed(upscale, level.proj1), fold_convolution(level.proj2, last)
        self.map = fold_upscaling(first, second)
        self.register_buffer("bias", upscaled_bias(first, second, size), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Upscale [1, C, n, n] to [1, O, 2n, 2n]."""
        if torch.onnx.is_in_onnx_export():  # TensorRT has no transposed convolution in bfloat16
            phases = F.conv2d(x, self._phase_weight(), padding=1)
            return F.pixel_shuffle(phases, 2) + self.bias
        out: Tensor = self.map(x) + self.bias
        return out

    def _phase_weight(self) -> Tensor:
        """Return the 3x3 convolution [4 O, C, 3, 3] whose outputs are the 2 x 2 pixels below each input pixel."""
        weight = F.pad(self.map.weight, (0, 1, 0, 1))  # place 4 is 0
        places = torch.tensor([3, 1, 4, 4, 2, 0], device=weight.device)  # of phase 0, then of phase 1
        kernel = weight.index_select(2, places).index_select(3, places)
        phases: Tensor = kernel.unflatten(3, (2, 3)).unflatten(2, (2, 3)).permute(1, 2, 4, 0, 3, 5)
        return phases.flatten(0, 2)


class Sam2Encoder(nn.Module):
    """SAM 2's Hiera and its feature pyramid.

    The 1x1 convolutions of the two fine levels are folded with those that feed the mask decoder. The position maps,
    which the tracker does not use, are omitted. This is exact up to rounding.
    """

    fine_rows: Tensor
    middle_rows: Tensor
    top_rows: Tensor

    def __init__(self, source: Any) -> None:
        super().__init__()
        vision, decoder = source.vision_encoder, source.mask_decoder
        _check_pyramid(vision.neck)
        self.backbone = Hiera(vision.backbone)
        coarse, top, middle, fine = vision.neck.convs
        self.fine = patch_linear(fold_convolution(fine, decoder.conv_s0))
        self.middle = patch_linear(fold_convolution(middle, decoder.conv_s1))
        self.top, self.coarse = patch_linear(top), patch_linear(coarse)
        for level, name in enumerate(("fine_rows", "middle_rows", "top_rows")):
            self.register_buffer(name, z_order(self.backbone.grid >> level).argsort(), persistent=False)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Encode pixels [1, 3, S, S] into fine [1, C/8, 4h, 4w], middle [1, C/4, 2h, 2w] and top [1, C, h, w]."""
        fine, middle, top, coarse = self.backbone(pixels)
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
        vision, decoder = source.vision_encoder, source.mask_decoder
        _check_pyramid(vision.neck)
        self.backbone = fold_norms(vision.backbone.timm_model)
        self.coarse, self.top, middle, fine = vision.neck.convs
        self.fine = fold_convolution(fine, decoder.conv_s0)
        self.middle = fold_convolution(middle, decoder.conv_s1)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Encode pixels [1, 3, S, S] into fine [1, C/8, 4h, 4w], middle [1, C/4, 2h, 2w] and top [1, C, h, w]."""
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
