"""Load EdgeTAM (arXiv 2501.07256) with its image encoder RepViT (arXiv 2307.09283), without timm.

RepViT has the tensor names of timm's `repvit_m1`, which the published configuration names as the backbone;
`EdgeTamConfig` reads it as a `RepVitConfig`. The layers are as they are trained: convolutions with batch norms, side by
side where they are added. `fold_norms` returns the same network with one convolution for each of these.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import fuse_conv_bn_eval
from transformers import AutoModel, EdgeTamVideoConfig, EdgeTamVideoModel, PreTrainedConfig, PreTrainedModel

from ...errors import ModelError
from .algebra import with_weights

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


TIMM = "timm_wrapper"
ARCHITECTURE = "repvit_m1"
WIDTHS = (48, 96, 192, 384)
DEPTHS = (2, 2, 14, 2)
STRIDE = 32  # of the coarsest stage
_FIXED = {"in_chans": 3, "features_only": True, "out_indices": [0, 1, 2, 3]}


class RepVitConfig(PreTrainedConfig):  # type: ignore[misc]
    """Channels and numbers of blocks of a RepViT's four stages."""

    model_type = "sam3_node_repvit"

    def __init__(self, widths: Any = WIDTHS, depths: Any = DEPTHS, **options: Any) -> None:
        super().__init__(**options)
        for name, values in (("embed_dim", widths), ("depth", depths)):
            if len(values) != len(WIDTHS) or not all(
                isinstance(value, int) and value > 0 for value in values
            ):
                raise ModelError(
                    f"EdgeTAM: expected {len(WIDTHS)} positive numbers as the backbone's {name}, found {values!r:.100}"
                )
        self.widths = list(widths)
        self.depths = list(depths)

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration of timm's network, as transformers reads it."""
        options = super().to_dict()
        sizes = {"embed_dim": options.pop("widths"), "depth": options.pop("depths")}
        return {**options, "model_type": TIMM, "architecture": ARCHITECTURE, "model_args": _FIXED | sizes}


class RepVitBackbone(PreTrainedModel):  # type: ignore[misc]
    """Holds a RepViT under the name that transformers gives to timm's networks."""

    config_class = RepVitConfig
    base_model_prefix = "timm_model"
    main_input_name = "pixel_values"

    def __init__(self, config: RepVitConfig) -> None:
        super().__init__(config)
        self.timm_model = RepVit(config.widths, config.depths)
        self.post_init()

    def forward(self, pixel_values: Tensor, **_: Any) -> SimpleNamespace:
        """Return the maps [B, width, h, w] of the four stages as `last_hidden_state`, the finest first."""
        return SimpleNamespace(last_hidden_state=self.timm_model(pixel_values), hidden_states=None)


class EdgeTamConfig(EdgeTamVideoConfig):  # type: ignore[misc]
    """The configuration of EdgeTAM, for videos or single images, that needs no timm."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Return the configuration. Raises ModelError for a backbone other than RepViT M1."""
        vision = config_dict.get("vision_config")
        if isinstance(vision, dict) and vision.get("model_type") == "edgetam_vision_model":
            # for the published backbone, transformers would import timm
            backbone = _read_backbone(vision.get("backbone_config") or {})
            config_dict = config_dict | {"vision_config": vision | {"backbone_config": backbone}}
        return super().from_dict(config_dict, **kwargs)


class EdgeTam(EdgeTamVideoModel):  # type: ignore[misc]
    """transformers' model with our backbone."""

    def fold_norms(self) -> None:
        """Fold the backbone's batch norms into its convolutions. A cast before it would round both."""
        backbone = self.vision_encoder.backbone
        if isinstance(backbone, RepVitBackbone):
            backbone.timm_model = fold_norms(backbone.timm_model)

    config_class = EdgeTamConfig
    config: EdgeTamConfig


def _read_backbone(found: dict[str, Any]) -> RepVitConfig:
    name = str(found.get("architecture", ARCHITECTURE))
    options = dict(found.get("model_args") or {})
    widths = options.pop("embed_dim", WIDTHS)
    depths = options.pop("depth", DEPTHS)
    unknown = {key: value for key, value in options.items() if value != _FIXED.get(key)}
    # a name of timm may end in a tag of the weights, after a dot
    if found.get("model_type", TIMM) != TIMM or name.split(".")[0] != ARCHITECTURE or unknown:
        raise ModelError(
            f"EdgeTAM: expected timm's {ARCHITECTURE} as the backbone, found {found.get('model_type')} {name} "
            f"{unknown or ''}".rstrip()
        )
    return RepVitConfig(widths, depths)


AutoModel.register(RepVitConfig, RepVitBackbone, exist_ok=True)
