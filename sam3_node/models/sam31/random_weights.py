"""Random weights of SAM 3.1, of any size, under the names of Meta's checkpoint: for tests and benchmarks.

They are scaled so that every part matters and that masks look like a trained model's: logits of several units and of
both signs, objects in view and out of it, a predicted IoU between 0 and 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .checkpoint import POINT_KINDS, POINTS, build_source
from .memory import make_rotation
from .model import Sam31Model
from .source import TRUNK, ModelSizes, Source, original_name

PRESENCE_WEIGHT = 8.0
"""Factor of the weights of the presence head. With PRESENCE_BIAS, most objects are in view and some are not."""
PRESENCE_BIAS = 3.0
"""Bias of the presence head, a logit."""
IOU_WEIGHT = 0.1
"""Factor of the weights of the head that predicts the IoU. With IOU_BIAS, predictions stay within 0..1."""
IOU_BIAS = 0.7
"""Bias of the head that predicts the IoU."""
MASK_GAIN = 6.0
"""Factor of the masks' heads, for logits of a trained model's size."""
FUSER_SCALE = 0.7
"""Share of a fuser block in its output; trained weights have up to 1, untrained ones nearly 0."""
VECTOR_SIGMA = 0.5
"""Standard deviation of embeddings."""
BIAS_SIGMA = 0.1
"""Standard deviation of all other biases."""


def small_sizes(image_size: int = 112, hidden: int = 64) -> ModelSizes:
    """Return the sizes of a small model: 16 slots, two layers of each kind, tokens of 14 pixels."""
    return ModelSizes(
        image_size=image_size,
        patch=14,
        window=4,
        global_layers=(1,),
        layers=2,
        width=64,
        heads=1,
        mlp=296,
        tiles=4,
        hidden=hidden,
        decoder_mlp=8 * hidden,
        decoder_rate=2,
        slots=16,
        masks=3,
        read_layers=2,
        read_mlp=8 * hidden,
        downsample=(32, 16, 64, 256, 1024),
        fuser_layers=2,
        fuser_mlp=4 * hidden,
    )


def full_sizes() -> ModelSizes:
    """Return the sizes of the published model."""
    return ModelSizes(
        image_size=1008,
        patch=14,
        window=24,
        global_layers=(7, 15, 23, 31),
        layers=32,
        width=1024,
        heads=16,
        mlp=4736,
        tiles=24,
        hidden=256,
        decoder_mlp=2048,
        decoder_rate=2,
        slots=16,
        masks=3,
        read_layers=4,
        read_mlp=2048,
        downsample=(32, 16, 64, 256, 1024),
        fuser_layers=2,
        fuser_mlp=1024,
    )


def random_tensors(sizes: ModelSizes, seed: int = 0) -> dict[str, Tensor]:
    """Make the tensors of a checkpoint, float32, under the names of Meta's file."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(sizes).items():
        tensors[name] = _random_tensor(name, shape, generator)
    for layer in range(sizes.layers):
        side = sizes.grid if layer in sizes.global_layers else sizes.window
        # a complex number as a pair, which every reader of safetensors knows
        rotation = make_rotation(side, sizes.width // sizes.heads, torch.device("cpu"))
        tensors[f"{TRUNK}.blocks.{layer}.attn.freqs_cis"] = rotation.float()
    return tensors


def tensor_shapes(sizes: ModelSizes) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors that the tracker takes from a file of these sizes."""
    with torch.device("meta"):
        source = Source(sizes)
    shapes: dict[str, tuple[int, ...]] = {}
    for target, value in source.state_dict().items():
        name = original_name(target, sizes)
        if name is None:
            continue
        shape = tuple(value.shape)
        if name == f"{TRUNK}.pos_embed":
            shape = (1, shape[1] + 1, shape[2])
        elif ".attn.qkv." in name:
            shape = (3 * shape[0], *shape[1:])
        elif target.endswith("prompt_encoder.point_embed.weight"):
            shapes |= {f"{POINTS}.{kind}.weight": (1, shape[1]) for kind in range(POINT_KINDS)}
            continue
        shapes[name] = shape
    return shapes


def _random_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    value = torch.randn(shape, generator=generator)
    is_norm = ".norm" in name or "ln_pre" in name or (value.ndim == 1 and "output_upscaling.1" in name)
    if name.endswith("gamma"):
        return torch.full(shape, FUSER_SCALE)
    if name.endswith("gaussian_matrix"):
        return value
    if name.endswith("pred_obj_score_head.layers.2.bias"):
        return value.fill_(PRESENCE_BIAS)
    if name.endswith("iou_prediction_head.layers.2.bias"):
        return value.fill_(IOU_BIAS)
    if value.ndim == 1:
        # of norms and of maps
        return value.mul_(BIAS_SIGMA).add_(1.0 if is_norm and name.endswith("weight") else 0.0)
    is_vector = "embed" in name.split("sam_prompt_encoder.")[-1] or "token" in name.rsplit(".", 2)[-2]
    if is_vector or (value.ndim == 2 and value.shape[0] == 1):
        return value.mul_(VECTOR_SIGMA)
    fan = value[0].numel()
    gain = 1.0
    if "output_hypernetworks_mlps" in name and ".layers.2." in name:
        gain = MASK_GAIN
    elif "pred_obj_score_head.layers.2." in name:
        gain = PRESENCE_WEIGHT
    elif "iou_prediction_head.layers.2." in name:
        gain = IOU_WEIGHT
    return value.mul_(gain / math.sqrt(fan))


def random_model(
    image_size: int = 112,
    hidden: int = 64,
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Sam31Model:
    """Build a small model with random weights, seeded."""
    from .loading import build_model

    sizes = small_sizes(image_size, hidden)
    source = build_source(random_tensors(sizes, seed), sizes, "random")
    return build_model(source, "random", torch.device(device), dtype)
