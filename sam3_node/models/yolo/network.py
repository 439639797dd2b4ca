"""YOLO-World version 2 (arXiv 2401.17270): finds objects by name. The names are input vectors beside each image.

A YOLOv8 backbone, the paper's vision-language path-aggregation network as re-parameterised for version 2 (text-guided
layers, no image-pooling attention), and heads that compare every pixel with every phrase.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import ModelError
from .config import STRIDES, YoloWorldConfig
from .layers import ContrastiveHead, ConvNorm, CspLayer, PyramidPooling, TextGuidedCspLayer


class Detections(NamedTuple):
    """The network's float32 output for A anchors and K phrases."""

    boxes: Tensor
    """[B, A, 4], x0 y0 x1 y1 in pixels of the network's input; they may extend past its edges"""
    scores: Tensor
    """[B, A, K] in 0..1"""


class Predictions(NamedTuple):
    """The network's raw float32 output, from which losses are computed."""

    logits: Tensor
    """[B, A, K], before the sigmoid"""
    distributions: Tensor
    """[B, A, 4, bins]: logits of the distances left, up, right and down from the anchor, in strides"""
    centres: Tensor
    """[A, 2]: x and y of the anchors in pixels of the network's input"""
    strides: Tensor
    """[A], pixels"""
    embeddings: Tensor = torch.zeros(0)
    """[B, A, D]: the product with a phrase's vector is its logit, up to a constant of the anchor"""

    def boxes(self) -> Tensor:
        """Return boxes [B, A, 4] x0 y0 x1 y1 in pixels. Each side is at its expected distance (arXiv 2006.04388)."""
        bins = torch.arange(self.distributions.shape[-1], device=self.logits.device, dtype=torch.float32)
        distances = (self.distributions.softmax(dim=-1) @ bins) * self.strides[:, None]
        before, after = distances.chunk(2, dim=-1)
        return torch.cat([self.centres - before, self.centres + after], dim=-1)


class Backbone(nn.Module):
    """YOLOv8's backbone: turns pixels into maps at strides 8, 16 and 32."""

    def __init__(self, config: YoloWorldConfig) -> None:
        super().__init__()
        channels = config.channels
        self.stem = ConvNorm(3, channels[0], 3, 2)
        self.stages = nn.ModuleList(
            nn.Sequential(ConvNorm(fine, coarse, 3, 2), CspLayer(coarse, coarse, depth, residual=True))
            for fine, coarse, depth in zip(channels, channels[1:], config.depths, strict=False)
        )
        self.pooling = PyramidPooling(channels[-1])

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Encode pixels [B, 3, H, W] into maps [B, C, H / s, W / s] for s = 8, 16, 32."""
        fine = self.stages[1](self.stages[0](self.stem(pixels)))
        middle = self.stages[2](fine)
        return fine, middle, self.pooling(self.stages[3](middle))


class Neck(nn.Module):
    """The path-aggregation network: down the pyramid and up again, guided by the text at each level."""

    def __init__(self, config: YoloWorldConfig) -> None:
        super().__init__()
        fine, middle, coarse = config.channels[2:]

        def guided(channels: int, out: int) -> TextGuidedCspLayer:
            return TextGuidedCspLayer(
                channels, out, config.neck_depth, config.text_channels, config.attention_channels
            )

        self.top_down = nn.ModuleList([guided(coarse + middle, middle), guided(middle + fine, fine)])
        self.shrink = nn.ModuleList([ConvNorm(fine, fine, 3, 2), ConvNorm(middle, middle, 3, 2)])
        self.bottom_up = nn.ModuleList([guided(fine + middle, middle), guided(middle + coarse, coarse)])

    def forward(self, maps: tuple[Tensor, Tensor, Tensor], text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Combine the backbone's maps with text [B, K, D]; return maps of the same shapes."""
        fine, middle, coarse = maps
        middle = self.top_down[0](torch.cat([_upsample_twice(coarse), middle], dim=1), text)
        fine = self.top_down[1](torch.cat([_upsample_twice(middle), fine], dim=1), text)
        middle = self.bottom_up[0](torch.cat([self.shrink[0](fine), middle], dim=1), text)
        coarse = self.bottom_up[1](torch.cat([self.shrink[1](middle), coarse], dim=1), text)
        return fine, middle, coarse


class LevelHead(nn.Module):
    """Boxes and similarities at one level of the pyramid."""

    def __init__(self, channels: int, config: YoloWorldConfig) -> None:
        super().__init__()

        def tower(width: int, out: int) -> nn.Sequential:
            return nn.Sequential(
                ConvNorm(channels, width, 3), ConvNorm(width, width, 3), nn.Conv2d(width, out, 1)
            )

        self.boxes = tower(config.box_channels, 4 * config.bins)
        self.embeddings = tower(config.embedding_channels, config.text_channels)
        self.contrast = ContrastiveHead(config.text_channels)

    def forward(self, x: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Turn a map [B, C, h, w] and text [B, K, D] to logits [B, h * w, K] and distributions [B, h * w, 4, bins].

        The third result are embeddings [B, h * w, D]; see `Predictions`.
        """
        distributions = self.boxes(x).flatten(2).transpose(1, 2).unflatten(2, (4, -1))
        logits, embeddings = self.contrast(self.embeddings(x), text)
        return logits, distributions, embeddings


class YoloWorld(nn.Module):
    """The detector. Its weights do not depend on the phrases, so the phrases may change from image to image."""

    def __init__(self, config: YoloWorldConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = Backbone(config)
        self.neck = Neck(config)
        self.heads = nn.ModuleList(LevelHead(channels, config) for channels in config.channels[2:])

    def forward(self, pixels: Tensor, text: Tensor) -> Detections:
        """Detect on RGB pixels [B, 3, H, W] in 0..1 with text [K, D] or [B, K, D]; there are H * W * 21 / 1024 anchors.

        H and W are multiples of 32, and K is at least 1. Text vectors are L2-normalised. To fill a fixed K, repeat a
        vector. Raises ModelError for other shapes.
        """
        predictions = self.predict(pixels, text)
        return Detections(predictions.boxes(), predictions.logits.sigmoid())

    def predict(self, pixels: Tensor, text: Tensor) -> Predictions:
        """Run the network as `forward` does, but return the raw output, before boxes and scores are computed."""
        self._check(pixels, text)
        dtype = self.backbone.stem.conv.weight.dtype
        pixels, text = pixels.to(dtype), text.to(dtype).expand(len(pixels), -1, -1)
        maps = self.neck(self.backbone(pixels), text)
        levels = [head(x, text) for head, x in zip(self.heads, maps, strict=True)]
        logits, distributions, embeddings = (
            torch.cat(parts, dim=1).float() for parts in zip(*levels, strict=True)
        )
        return Predictions(logits, distributions, *anchors(pixels.shape[-2:], pixels.device), embeddings)

    def _check(self, pixels: Tensor, text: Tensor) -> None:
        if pixels.ndim != 4 or pixels.shape[1] != 3 or any(side % STRIDES[-1] for side in pixels.shape[2:]):
            raise ModelError(
                f"pixels: expected [B, 3, H, W], H and W multiples of {STRIDES[-1]}, found {list(pixels.shape)}"
            )
        width = self.config.text_channels
        fits = text.ndim == 2 or (text.ndim == 3 and len(text) == len(pixels))
        if not fits or text.shape[-1] != width or text.shape[-2] == 0:
            raise ModelError(
                f"text: expected [K, {width}], or [B, K, {width}] for as many images, with K of at least 1; "
                f"found {list(text.shape)} for {len(pixels)} images"
            )


def anchors(size: tuple[int, int] | torch.Size, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the centres [A, 2] (x, y) and strides [A] in pixels for an input (H, W), level by level, row by row."""
    centres, strides = [], []
    for stride in STRIDES:
        y, x = (
            (torch.arange(side // stride, device=device, dtype=torch.float32) + 0.5) * stride for side in size
        )
        rows, columns = torch.meshgrid(y, x, indexing="ij")
        centres.append(torch.stack([columns, rows], dim=-1).flatten(0, 1))
        strides.append(torch.full((len(centres[-1]),), float(stride), device=device))
    return torch.cat(centres), torch.cat(strides)


def _upsample_twice(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2.0, mode="nearest")
