"""Layers of YOLO-World version 2 (arXiv 2401.17270): cross-stage partial blocks, text-guided ones, contrastive heads.

Maps are [B, C, h, w]; text is [B, K, D], one L2-normalised vector for each of K phrases.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORM_EPSILON, NORM_MOMENTUM = 1e-3, 0.03


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=NORM_EPSILON, momentum=NORM_MOMENTUM)


class ConvNorm(nn.Module):
    """A convolution, batch norm and, unless `linear`, SiLU; padded so that stride 1 keeps the size."""

    def __init__(
        self, channels: int, out: int, kernel: int = 1, stride: int = 1, *, linear: bool = False
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out, kernel, stride, padding=kernel // 2, bias=False)
        self.norm = _norm(out)
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, channels, h, w] to [B, out, h / stride, w / stride]."""
        x = self.norm(self.conv(x))
        return x if self.linear else F.silu(x)


class Bottleneck(nn.Module):
    """Two 3x3 convolutions, with a skip connection around both if `residual`."""

    def __init__(self, channels: int, *, residual: bool) -> None:
        super().__init__()
        self.first, self.second = ConvNorm(channels, channels, 3), ConvNorm(channels, channels, 3)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, h, w] to the same shape."""
        out: Tensor = self.second(self.first(x))
        return x + out if self.residual else out


class CspLayer(nn.Module):
    """Cross-stage partial layer: half of the channels pass through a chain of blocks; all outputs are concatenated."""

    def __init__(self, channels: int, out: int, depth: int, *, residual: bool, extra: int = 0) -> None:
        """Create the layer. extra: number of maps with half the channels that a subclass adds to the chain."""
        super().__init__()
        half = out // 2
        self.enter = ConvNorm(channels, 2 * half)
        self.blocks = nn.ModuleList(Bottleneck(half, residual=residual) for _ in range(depth))
        self.leave = ConvNorm((2 + depth + extra) * half, out)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, channels, h, w] to [B, out, h, w]."""
        out: Tensor = self.leave(torch.cat(self.chain(x), dim=1))
        return out

    def chain(self, x: Tensor) -> list[Tensor]:
        """Return the two halves and the output of each block, [B, out / 2, h, w] each."""
        links = list(self.enter(x).chunk(2, dim=1))
        for block in self.blocks:
            links.append(block(links[-1]))
        return links


class MaxSigmoidAttention(nn.Module):
    """Weights each pixel by its similarity to its best phrase (section 3.3 of the paper).

    The maximum is over phrases, so a duplicate phrase changes nothing, but a vector of zeros does.
    """

    def __init__(self, channels: int, text_channels: int, head_channels: int) -> None:
        super().__init__()
        self.heads = channels // head_channels
        self.guide = nn.Linear(text_channels, channels)
        self.bias = nn.Parameter(torch.zeros(self.heads))
        self.project = ConvNorm(channels, channels, 3, linear=True)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        """Weight the map [B, C, h, w] with text [B, K, D]; return [B, C, h, w]."""
        guide = self.guide(text).unflatten(2, (self.heads, -1)).transpose(1, 2)  # [B, heads, K, C / heads]
        pixels = torch.unflatten(x.flatten(2), 1, (self.heads, -1))  # [B, heads, C / heads, h * w]
        similarity = (guide @ pixels).amax(dim=2) / guide.shape[-1] ** 0.5
        weight = (similarity + self.bias[:, None]).sigmoid().unflatten(2, x.shape[2:])
        out: Tensor = (self.project(x).unflatten(1, (self.heads, -1)) * weight[:, :, None]).flatten(1, 2)
        return out


class TextGuidedCspLayer(CspLayer):
    """A `CspLayer` without skips whose chain ends in max-sigmoid attention to the text."""

    def __init__(self, channels: int, out: int, depth: int, text_channels: int, head_channels: int) -> None:
        super().__init__(channels, out, depth, residual=False, extra=1)
        self.attention = MaxSigmoidAttention(out // 2, text_channels, head_channels)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:  # type: ignore[override]  # takes the text, too
        """Map [B, channels, h, w] and text [B, K, D] to [B, out, h, w]."""
        links = self.chain(x)
        links.append(self.attention(links[-1], text))
        out: Tensor = self.leave(torch.cat(links, dim=1))
        return out


class PyramidPooling(nn.Module):
    """Spatial pyramid pooling: maxima over windows of 5, 9 and 13 pixels, as three poolings of 5 in sequence."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.enter, self.leave = ConvNorm(channels, channels // 2), ConvNorm(channels // 2 * 4, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, h, w] to the same shape."""
        pooled = [self.enter(x)]
        for _ in range(3):
            pooled.append(F.max_pool2d(pooled[-1], 5, stride=1, padding=2))
        out: Tensor = self.leave(torch.cat(pooled, dim=1))
        return out


class ContrastiveHead(nn.Module):
    """Similarity of pixels and phrases: batch-normalised embeddings times text, scaled and shifted."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = _norm(channels)
        self.logit_scale = nn.Parameter(torch.tensor(-1.0))
        self.bias = nn.Parameter(torch.tensor(-10.0))

    def forward(self, embeddings: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        """Compute logits [B, h * w, K] of embeddings [B, D, h, w] and text [B, K, D].

        Return them with vectors [B, h * w, D], whose products with text are the logits without their bias.
        """
        pixels = self.norm(embeddings).flatten(2).transpose(1, 2)
        scale = self.logit_scale.exp()
        return pixels @ text.transpose(1, 2) * scale + self.bias, pixels * scale
