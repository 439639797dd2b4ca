"""Image encoders: pixels to the three feature maps that the tracker reads, for SAM 3's and SAM 2's backbones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Sam3TrackerVideoModel

from .algebra import fold_convolution, fold_transposed
from .vit import WindowedViT, side, token_grid


def build_encoder(source: Any) -> nn.Module:
    """The encoder stage of a transformers tracker."""
    if isinstance(source, Sam3TrackerVideoModel):
        return Sam3Encoder(source)
    return Sam2Encoder(source)


class Sam3Encoder(nn.Module):
    """SAM 3's plain ViT and its simple feature pyramid.

    Neighbouring linear maps of the pyramid are folded into one (transposed convolution with the 1x1 after it, 3x3
    with the 1x1 that feeds the mask decoder), and the level that the tracker does not use is left out. Exact up to
    rounding, and the two fine levels cost an eighth and a quarter.
    """

    def __init__(self, source: Any) -> None:
        super().__init__()
        vision = source.vision_encoder
        self.backbone = _backbone(vision)
        fine, middle, top = vision.neck.fpn_layers[:3]
        decoder = source.mask_decoder
        first, activation, second = fine.scale_layers
        self.fine = nn.Sequential(
            first,
            activation,
            fold_transposed(second, fine.proj1),
            fold_convolution(fine.proj2, decoder.conv_s0),
        )
        self.middle = nn.Sequential(
            fold_transposed(middle.scale_layers[0], middle.proj1),
            fold_convolution(middle.proj2, decoder.conv_s1),
        )
        self.top = nn.Sequential(top.proj1, top.proj2)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # tokens are channels-last already

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """pixels [1, 3, S, S] -> fine [1, C/8, 4h, 4w], middle [1, C/4, 2h, 2w], top [1, C, h, w]."""
        image = self.backbone(pixels)
        return self.fine(image), self.middle(image), self.top(image)


class ReferenceViT(nn.Module):
    """SAM 3's ViT as transformers runs it, for grids that the windows do not divide (they are padded there)."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.source, self.patch = source, side(source.config.patch_size)

    def forward(self, pixels: Tensor) -> Tensor:
        """pixels [1, 3, S, S] -> feature map [1, C, h, w]."""
        tokens = self.source(pixels).last_hidden_state.transpose(1, 2)
        return tokens.unflatten(2, (pixels.shape[-2] // self.patch, pixels.shape[-1] // self.patch))


def _backbone(vision: Any) -> nn.Module:
    config = vision.backbone.config
    divided = token_grid(config) % config.window_size == 0
    return WindowedViT(vision.backbone) if divided else ReferenceViT(vision.backbone)


class Sam2Encoder(nn.Module):
    """SAM 2's Hiera and its feature pyramid, as transformers runs them."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.vision = source.vision_encoder
        self.conv_s0, self.conv_s1 = source.mask_decoder.conv_s0, source.mask_decoder.conv_s1

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """pixels [1, 3, S, S] -> fine [1, C/8, 4h, 4w], middle [1, C/4, 2h, 2w], top [1, C, h, w]."""
        fine, middle, top = self.vision(pixels, return_dict=True).fpn_hidden_states
        return self.conv_s0(fine), self.conv_s1(middle), top
