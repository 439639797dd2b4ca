"""Image encoders: pixels to the three feature maps that the tracker reads, for SAM 3's and SAM 2's backbones."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Sam3TrackerVideoModel


def build_encoder(source: nn.Module) -> nn.Module:
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

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        vision = source.vision_encoder
        self.backbone = vision.backbone
        self.patch = vision.config.backbone_config.patch_size
        fine, middle, top = vision.neck.fpn_layers[:3]
        decoder = source.mask_decoder
        first, activation, second = fine.scale_layers
        self.fine = nn.Sequential(
            first, activation, _fold_transposed(second, fine.proj1), _fold(fine.proj2, decoder.conv_s0)
        )
        self.middle = nn.Sequential(
            _fold_transposed(middle.scale_layers[0], middle.proj1), _fold(middle.proj2, decoder.conv_s1)
        )
        self.top = nn.Sequential(top.proj1, top.proj2)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """pixels [1, 3, S, S] -> fine [1, C/8, 4h, 4w], middle [1, C/4, 2h, 2w], top [1, C, h, w]."""
        tokens = self.backbone(pixels).last_hidden_state
        height, width = pixels.shape[-2] // self.patch, pixels.shape[-1] // self.patch
        image = tokens.view(1, height, width, -1).permute(0, 3, 1, 2)
        return self.fine(image), self.middle(image), self.top(image)


class Sam2Encoder(nn.Module):
    """SAM 2's Hiera and its feature pyramid, as transformers runs them."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.vision = source.vision_encoder
        self.conv_s0, self.conv_s1 = source.mask_decoder.conv_s0, source.mask_decoder.conv_s1

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """pixels [1, 3, S, S] -> fine [1, C/8, 4h, 4w], middle [1, C/4, 2h, 2w], top [1, C, h, w]."""
        fine, middle, top = self.vision(pixels, return_dict=True).fpn_hidden_states
        return self.conv_s0(fine), self.conv_s1(middle), top


@torch.no_grad()
def _fold(first: nn.Conv2d, second: nn.Conv2d) -> nn.Conv2d:
    """One convolution equal to `second` (1x1) after `first`."""
    pointwise = second.weight[:, :, 0, 0].double()
    folded = nn.Conv2d(first.in_channels, second.out_channels, first.kernel_size, padding=first.padding)
    folded.to(first.weight)
    folded.weight.copy_(torch.einsum("om,mikl->oikl", pointwise, first.weight.double()))
    folded.bias.copy_(pointwise @ first.bias.double() + second.bias.double())
    return folded


@torch.no_grad()
def _fold_transposed(first: nn.ConvTranspose2d, second: nn.Conv2d) -> nn.ConvTranspose2d:
    """One transposed convolution equal to `second` (1x1) after `first`."""
    pointwise = second.weight[:, :, 0, 0].double()
    folded = nn.ConvTranspose2d(first.in_channels, second.out_channels, first.kernel_size, stride=first.stride)
    folded.to(first.weight)
    folded.weight.copy_(torch.einsum("om,imkl->iokl", pointwise, first.weight.double()))
    folded.bias.copy_(pointwise @ first.bias.double() + second.bias.double())
    return folded


def resize_matrix(sizes: tuple[int, ...]) -> Tensor:
    """The matrix [sizes[-1], sizes[0]] of bilinear resizing along one axis, size after size (antialiased as needed)."""
    matrix = torch.eye(sizes[0])[None, None]
    for size in sizes[1:]:
        matrix = F.interpolate(
            matrix, size=(size, sizes[0]), mode="bilinear", align_corners=False, antialias=size < matrix.shape[-2]
        )
    return matrix[0, 0]
