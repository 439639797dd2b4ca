"""Find objects by name with YOLO-World version 2 (arXiv 2401.17270), from an image and vectors of the names.

A YOLOv8 backbone, the paper's vision-language path-aggregation network as re-parameterised for version 2 (text-guided
layers, no image-pooling attention), and heads that compare every pixel with every phrase. Maps are [B, C, h, w]; text
is [B, K, D], one L2-normalised vector for each of K phrases. A folder holds config.json, model.safetensors and,
optionally, its digest.
"""

from __future__ import annotations

import json
import os
import typing
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NamedTuple, Self

import torch
import torch.nn.functional as F
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass
from safetensors.torch import load_file, save
from torch import Tensor, nn

from ...errors import ModelError, OutputError
from ...files import make_folder, read_regular, write_atomically
from ...settings import describe_faults
from .. import weight_files
from ..pixels import Resize

STRIDES = (8, 16, 32)  # of the heads' input maps, in pixels of the network's input


MAX_WIDTH = 65_536
"""Largest number of channels, pixels of a side or bins in a configuration."""
Count = Annotated[int, Field(gt=0, le=MAX_WIDTH, strict=True)]
Depth = Annotated[int, Field(gt=0, le=weight_files.MAX_LAYERS, strict=True)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class YoloWorldConfig:
    """Widths in channels, depths in blocks. Raises pydantic's ValidationError if they are inconsistent.

    channels: channels of the backbone's maps at strides 2, 4, 8, 16 and 32; the neck uses the last three.
    depths: blocks at strides 4, 8, 16 and 32. neck_depth: blocks in each layer of the neck.
    box_channels, embedding_channels: channels of the heads' towers for boxes and for similarities.
    text_channels: length of a phrase's vector. attention_channels: channels of each head of the max-sigmoid attention.
    bins: number of bins for a side's distance from its anchor, one stride each.
    image_size: side of the square training images, in pixels.
    resize: how frames are fitted into the input: "bilinear", as the public implementation does it, or "antialias".
    """

    channels: Annotated[tuple[Count, ...], Field(min_length=5, max_length=5)]
    depths: Annotated[tuple[Depth, ...], Field(min_length=4, max_length=4)]
    neck_depth: Depth
    box_channels: Count
    embedding_channels: Count
    text_channels: Count = 512
    attention_channels: Count = 32
    bins: Count = 16
    image_size: Count = 640
    resize: Resize = "bilinear"
    model_type: typing.Literal["yolo_world"] = "yolo_world"

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        unit = 2 * self.attention_channels
        # the attention works on half of a layer's channels, divided into whole heads
        if any(channels % unit for channels in self.channels[2:]):
            raise ValueError(
                f"channels at strides 8, 16 and 32: expected multiples of {unit}, twice attention_channels, found "
                f"{list(self.channels[2:])}"
            )
        return self


Scale = typing.Literal["nano", "s", "m", "l", "x"]
SCALES: dict[Scale, YoloWorldConfig] = {
    "nano": YoloWorldConfig(
        (16, 24, 48, 96, 160),
        (1, 1, 1, 1),
        1,
        32,
        48,
        text_channels=64,
        attention_channels=8,
        image_size=320,
        resize="antialias",
    ),
    "s": YoloWorldConfig((32, 64, 128, 256, 512), (1, 2, 2, 1), 1, 64, 128),
    "m": YoloWorldConfig((48, 96, 192, 384, 576), (2, 4, 4, 2), 2, 64, 192),
    "l": YoloWorldConfig((64, 128, 256, 512, 512), (3, 6, 6, 3), 3, 64, 256),
    "x": YoloWorldConfig((80, 160, 320, 640, 640), (3, 6, 6, 3), 3, 80, 320),
}


NORM_EPSILON = 1e-3
NORM_MOMENTUM = 0.03


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
        self.first = ConvNorm(channels, channels, 3)
        self.second = ConvNorm(channels, channels, 3)
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
        return self.leave(torch.cat(self.chain(x), dim=1))

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
        return (self.project(x).unflatten(1, (self.heads, -1)) * weight[:, :, None]).flatten(1, 2)


class TextGuidedCspLayer(CspLayer):
    """A `CspLayer` without skips whose chain ends in max-sigmoid attention to the text."""

    def __init__(self, channels: int, out: int, depth: int, text_channels: int, head_channels: int) -> None:
        super().__init__(channels, out, depth, residual=False, extra=1)
        self.attention = MaxSigmoidAttention(out // 2, text_channels, head_channels)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:  # type: ignore[override]  # also takes the text
        """Map [B, channels, h, w] and text [B, K, D] to [B, out, h, w]."""
        links = self.chain(x)
        links.append(self.attention(links[-1], text))
        return self.leave(torch.cat(links, dim=1))


class PyramidPooling(nn.Module):
    """Spatial pyramid pooling: maxima over windows of 5, 9 and 13 pixels, as three poolings of 5 in sequence."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.enter = ConvNorm(channels, channels // 2)
        self.leave = ConvNorm(channels // 2 * 4, channels)

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, C, h, w] to the same shape."""
        pooled = [self.enter(x)]
        for _ in range(3):
            pooled.append(F.max_pool2d(pooled[-1], 5, stride=1, padding=2))
        return self.leave(torch.cat(pooled, dim=1))


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
        # callers give float32 pixels, whatever the dtype of the weights
        pixels, text = pixels.to(dtype), text.to(dtype).expand(pixels.shape[0], -1, -1)
        maps = self.neck(self.backbone(pixels), text)
        levels = [head(x, text) for head, x in zip(self.heads, maps, strict=True)]
        # boxes are computed in float32: half precision would round positions of some hundred pixels
        logits, distributions, embeddings = (
            torch.cat(parts, dim=1).float() for parts in zip(*levels, strict=True)
        )
        return Predictions(logits, distributions, *anchors(pixels.shape[-2:], pixels.device), embeddings)

    def _check(self, pixels: Tensor, text: Tensor) -> None:
        # the neck joins maps of all strides, so each side has to divide by the greatest
        if pixels.ndim != 4 or pixels.shape[1] != 3 or any(side % STRIDES[-1] for side in pixels.shape[2:]):
            raise ModelError(
                f"pixels: expected [B, 3, H, W], H and W multiples of {STRIDES[-1]}, found {list(pixels.shape)}"
            )
        width = self.config.text_channels
        fits = text.ndim == 2 or (text.ndim == 3 and text.shape[0] == pixels.shape[0])
        if not fits or text.shape[-1] != width or text.shape[-2] == 0:
            raise ModelError(
                f"text: expected [K, {width}], or [B, K, {width}] for as many images, with K of at least 1; "
                f"found {list(text.shape)} for {len(pixels)} images"
            )


def anchors(size: tuple[int, int] | torch.Size, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the centres [A, 2] (x, y) and strides [A] in pixels for an input (H, W), level by level, row by row."""
    centres = []
    strides = []
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


CONFIG = "config.json"
WEIGHTS = "model.safetensors"
MAX_FAULT_CHARACTERS = 800


def load_yolo_world(
    path: str | os.PathLike[str],
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
) -> YoloWorld:
    """Load the detector in a folder, in inference mode. See `load_tracker` for `device` and `dtype`.

    Raises ModelError, which names the file, and the tensors that are missing or have another shape.
    """
    target = weight_files.pick_device(device)
    chosen_dtype = weight_files.pick_dtype(dtype, target)
    folder = Path(path)
    config = _read_config(folder / CONFIG)
    weight_files.check_weight_files(folder)
    weights = folder / WEIGHTS
    if weight_files.digest_path(weights).exists():
        weight_files.check_digest(weights, hint="copy or convert the weights again")
    try:
        state = load_file(weights)
    except Exception as error:  # OSError, SafetensorError
        raise ModelError(f"cannot read {weights}: expected safetensors, found {error}") from error
    return build(config, state, origin=str(weights)).to(target, chosen_dtype).eval()


def save_yolo_world(model: YoloWorld, folder: Path) -> None:
    """Write config.json, model.safetensors and its digest into a folder. Create the folder if needed."""
    # safetensors refuses tensors that are not contiguous
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    make_folder(folder)
    try:
        write_atomically(folder / CONFIG, (json.dumps(asdict(model.config), indent=2) + "\n").encode())
        write_atomically(folder / WEIGHTS, save(state, metadata={"format": "pt"}))
        weight_files.write_digest(folder / WEIGHTS)
    except OSError as error:
        raise OutputError(f"cannot write weights to {folder}: {error.strerror or error}") from error


def build(config: YoloWorldConfig, state: Mapping[str, Tensor], *, origin: str) -> YoloWorld:
    """Build a network with these float32 weights. Raises ModelError, naming `origin`, unless all tensors match."""
    # on the meta device, weights that are replaced at once take neither memory nor time
    with torch.device("meta"):
        model = YoloWorld(config)
    exact = {
        name: value.float() if value.is_floating_point() else value.long() for name, value in state.items()
    }
    try:
        # tensors of the meta device cannot be written, so the weights take their places
        model.load_state_dict(exact, assign=True)
    except RuntimeError as error:  # it names all tensors that are missing, unknown or of another shape
        faults = " ".join(str(error).split())[:MAX_FAULT_CHARACTERS]
        raise ModelError(f"{origin} does not fit a YOLO-World of its configuration: {faults}") from error
    return model


def _read_config(path: Path) -> YoloWorldConfig:
    try:
        return TypeAdapter(YoloWorldConfig).validate_json(read_regular(path, weight_files.MAX_JSON_BYTES))
    except (OSError, ValidationError) as error:
        raise ModelError(
            f"cannot read {path}: expected a folder with {CONFIG} and {WEIGHTS}, as `sam3-node weights convert` "
            f"writes it; found {describe_faults(error)}"
        ) from error
