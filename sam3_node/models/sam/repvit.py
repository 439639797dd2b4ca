"""RepViT (arXiv 2307.09283), the image encoder of EdgeTAM, with the tensor names of timm's `repvit_m1`.

The layers are as they are trained: convolutions with batch norms, side by side where they are added. `fold_norms`
returns the same network with one convolution in the place of each of these.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXPANSION = 2  # of the channels, within a block
SQUEEZED, SQUEEZED_MULTIPLE = 4, 8  # the gate has a quarter of the channels, rounded to a multiple of 8


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

    def __init__(self, widths: list[int], depths: list[int]) -> None:
        super().__init__()
        self.stem = _Stem(widths[0])
        before = [None, *widths]
        stages = [_Stage(*sizes) for sizes in zip(before, widths, depths, strict=False)]
        for number, stage in enumerate(stages):
            self.add_module(f"stages_{number}", stage)
        self.count = len(stages)

    def forward(self, pixels: Tensor) -> list[Tensor]:
        """Encode pixels [B, 3, S, S]; return the map [B, width, h, w] of each stage, the finest first."""
        x, maps = self.stem(pixels), []
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
        plain, norm = self.c, self.bn
        assert norm.running_mean is not None
        assert norm.running_var is not None
        scale = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
        return _with_weights(
            plain,
            plain.weight.double() * scale.view(-1, 1, 1, 1),
            norm.bias.double() - norm.running_mean.double() * scale,
        )


class _TokenMixer(nn.Module):
    """The sum of a 3x3 and a 1x1 convolution of each channel, and the channel itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = _ConvNorm(width, width, 3, groups=width)
        self.conv1 = _ConvNorm(width, width, groups=width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x) + self.conv1(x) + x
        return out

    @torch.no_grad()
    def fold(self) -> nn.Conv2d:
        """Return the 3x3 convolution that equals the sum."""
        large, small = self.conv.fold(), self.conv1.fold()
        assert large.bias is not None
        assert small.bias is not None
        centre = F.pad(small.weight.double() + 1, (1, 1, 1, 1))
        return _with_weights(large, large.weight.double() + centre, large.bias.double() + small.bias.double())


def _with_weights(like: nn.Conv2d, weight: Tensor, bias: Tensor) -> nn.Conv2d:
    layer = nn.Conv2d(
        like.in_channels,
        like.out_channels,
        like.kernel_size,  # type: ignore[arg-type]
        like.stride,  # type: ignore[arg-type]
        like.padding,  # type: ignore[arg-type]
        groups=like.groups,
    ).to(like.weight)
    assert layer.bias is not None
    layer.weight.copy_(weight)
    layer.bias.copy_(bias)
    return layer


class _Stem(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = _ConvNorm(3, width // 2, 3, 2), _ConvNorm(width // 2, width, 3, 2)

    def forward(self, pixels: Tensor) -> Tensor:
        out: Tensor = self.conv2(F.gelu(self.conv1(pixels)))
        return out


class _ChannelMixer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = _ConvNorm(width, EXPANSION * width), _ConvNorm(EXPANSION * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Add two 1x1 convolutions to x, with GELU between them."""
        out: Tensor = x + self.conv2(F.gelu(self.conv1(x)))
        return out


class _Gate(nn.Module):
    """Scales each channel by what the means of all channels say: squeeze and excitation (arXiv 1709.01507)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        eighths = int(width / SQUEEZED + SQUEEZED_MULTIPLE / 2) // SQUEEZED_MULTIPLE
        squeezed = max(1, eighths) * SQUEEZED_MULTIPLE
        self.fc1, self.fc2 = nn.Conv2d(width, squeezed, 1), nn.Conv2d(squeezed, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x * self.fc2(F.relu(self.fc1(x.mean((2, 3), keepdim=True)))).sigmoid()
        return out


class _Block(nn.Module):
    def __init__(self, width: int, gated: bool) -> None:
        super().__init__()
        self.token_mixer = _TokenMixer(width)
        self.se = _Gate(width) if gated else nn.Identity()
        self.channel_mixer = _ChannelMixer(width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.channel_mixer(self.se(self.token_mixer(x)))
        return out


class _Downsample(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.pre_block = _Block(inputs, gated=False)
        self.spatial_downsample = _ConvNorm(inputs, inputs, 3, 2, groups=inputs)
        self.channel_downsample = _ConvNorm(inputs, outputs)
        self.ffn = _ChannelMixer(outputs)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.ffn(self.channel_downsample(self.spatial_downsample(self.pre_block(x))))
        return out


class _Stage(nn.Module):
    """Blocks, of which every second one has a gate, after a downsampling if there is a stage before."""

    def __init__(self, inputs: int | None, width: int, depth: int) -> None:
        super().__init__()
        self.downsample = nn.Identity() if inputs is None else _Downsample(inputs, width)
        self.blocks = nn.Sequential(*(_Block(width, gated=number % 2 == 0) for number in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(self.downsample(x))
        return out
