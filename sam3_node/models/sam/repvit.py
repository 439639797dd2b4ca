"""RepViT (arXiv 2307.09283), the image encoder of EdgeTAM (arXiv 2501.07256), without timm.

It has the tensor names of timm's `repvit_m1`. The layers are as they are trained: convolutions with batch norms, side
by side where they are added. `fold_norms` returns the same network with one convolution for each of these.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import fuse_conv_bn_eval

from .algebra import with_weights

STRIDE = 32
"""Pixels along a side of a cell of the coarsest stage."""
EXPANSION = 2
"""Factor by which a block widens its channels inside."""
SQUEEZED = 4
"""Divisor of the channels within a squeeze-and-excitation module: it has a quarter of them."""
SQUEEZED_MULTIPLE = 8
"""The reduced number of channels is rounded to a multiple of this, as in timm."""


def fold_norms(network: RepVit) -> RepVit:
    """Return a copy of a RepViT in which each convolution includes its batch norm and its neighbours."""
    folded = copy.deepcopy(network)
    _fold_children(folded)
    return folded


def _fold_children(module: nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, _ConvNorm | _TokenMixer):
            setattr(module, name, child.fold())
        else:
            _fold_children(child)


class RepVit(nn.Module):
    """The four stages after a stem of stride 4; each stage halves both sides of the map, except the first."""

    def __init__(self, widths: Sequence[int], depths: Sequence[int]) -> None:
        super().__init__()
        self.stem = _Stem(widths[0])
        before = [None, *widths]
        stages = [_Stage(*sizes) for sizes in zip(before, widths, depths, strict=False)]
        for number, stage in enumerate(stages):
            self.add_module(f"stages_{number}", stage)
        self.count = len(stages)

    def forward(self, pixels: Tensor) -> list[Tensor]:
        """Encode pixels [B, 3, S, S]; return the map [B, width, h, w] of each stage, the finest first."""
        x = self.stem(pixels)
        maps = []
        for number in range(self.count):
            x = self.get_submodule(f"stages_{number}")(x)
            maps.append(x)
        return maps


class _ConvNorm(nn.Sequential):
    """A convolution without bias, then a batch norm."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.c = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
        self.bn = nn.BatchNorm2d(outputs)

    @torch.no_grad()
    def fold(self) -> nn.Conv2d:
        """Return the convolution that equals both. Computed in float64."""
        exact = copy.deepcopy(self).double().eval()
        return fuse_conv_bn_eval(exact.c, exact.bn).to(self.c.weight.dtype)


class _TokenMixer(nn.Module):
    """The sum of a 3x3 and a 1x1 convolution of each channel, and the channel itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = _ConvNorm(width, width, 3, groups=width)
        self.conv1 = _ConvNorm(width, width, groups=width)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) + self.conv1(x) + x

    @torch.no_grad()
    def fold(self) -> nn.Conv2d:
        """Return the 3x3 convolution that equals the sum."""
        large = self.conv.fold()
        small = self.conv1.fold()
        assert large.bias is not None
        assert small.bias is not None
        # the 1 is the channel itself: it is added at the centre of the 3x3 kernel
        centre = F.pad(small.weight.double() + 1, (1, 1, 1, 1))
        return with_weights(large, large.weight.double() + centre, large.bias.double() + small.bias.double())


class _Stem(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = _ConvNorm(3, width // 2, 3, 2)
        self.conv2 = _ConvNorm(width // 2, width, 3, 2)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.conv2(F.gelu(self.conv1(pixels)))


class _ChannelMixer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = _ConvNorm(width, EXPANSION * width)
        self.conv2 = _ConvNorm(EXPANSION * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Add two 1x1 convolutions to x, with GELU between them."""
        return x + self.conv2(F.gelu(self.conv1(x)))


class _Gate(nn.Module):
    """Scales each channel by what the means of all channels say: squeeze and excitation (arXiv 1709.01507)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        eighths = int(width / SQUEEZED + SQUEEZED_MULTIPLE / 2) // SQUEEZED_MULTIPLE
        squeezed = max(1, eighths) * SQUEEZED_MULTIPLE
        self.fc1 = nn.Conv2d(width, squeezed, 1)
        self.fc2 = nn.Conv2d(squeezed, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.fc2(F.relu(self.fc1(x.mean((2, 3), keepdim=True)))).sigmoid()


class _RepVitBlock(nn.Module):
    def __init__(self, width: int, gated: bool) -> None:
        super().__init__()
        self.token_mixer = _TokenMixer(width)
        self.se = _Gate(width) if gated else nn.Identity()
        self.channel_mixer = _ChannelMixer(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.channel_mixer(self.se(self.token_mixer(x)))


class _StageDownsample(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.pre_block = _RepVitBlock(inputs, gated=False)
        self.spatial_downsample = _ConvNorm(inputs, inputs, 3, 2, groups=inputs)
        self.channel_downsample = _ConvNorm(inputs, outputs)
        self.ffn = _ChannelMixer(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.ffn(self.channel_downsample(self.spatial_downsample(self.pre_block(x))))


class _Stage(nn.Module):
    """Blocks, of which every second one has a gate, after a downsampling if there is a stage before."""

    def __init__(self, inputs: int | None, width: int, depth: int) -> None:
        super().__init__()
        self.downsample = nn.Identity() if inputs is None else _StageDownsample(inputs, width)
        self.blocks = nn.Sequential(*(_RepVitBlock(width, gated=number % 2 == 0) for number in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.downsample(x))
