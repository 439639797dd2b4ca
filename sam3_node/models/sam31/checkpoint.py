"""Read SAM 3.1's weights from Meta's original names: sizes, then the tensors of `Source`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...errors import ModelError
from ..weight_files import MAX_LAYERS, explain_sizes
from .source import MODEL, TRUNK, ModelSizes, Source, original_name

POINTS = f"{MODEL}.interactive_sam_prompt_encoder.point_embeddings"
"""Prefix of the checkpoint's tensors with the embeddings of prompt points."""
POINT_KINDS = 4
"""Number of kinds of prompt points, each with an embedding of its own: outside, inside, top-left corner of a box,
bottom-right corner."""
IMAGE_SIZE = 1008
"""Side of the model's input in pixels, for a checkpoint without the rotary tables that tell it."""
WINDOW = 24
"""Side in tokens of the ViT's attention windows, for a checkpoint without rotary tables."""
STAGES = 4
"""Number of equal stages of the ViT, for a checkpoint without rotary tables. The last layer of each stage attends to
the whole image, the others to windows."""
MAX_GRID = 512
"""Largest number of tokens along a side of the image. That of the published model is 72."""
HEAD_WIDTH = 64
"""Channels of one attention head of the ViT, for a checkpoint without rotary tables."""

_PROJECTION = re.compile(r"\.([qkv])_proj\.")
"""Matches the projections of queries, keys and values, which `Source` stores apart."""
_JOINED = re.compile(r"\.attn\.qkv\.|\.in_proj_")
"""Matches tensors of the checkpoint that stack the projections of queries, keys and values."""


def read_sizes(tensors: Mapping[str, Tensor], name: str) -> ModelSizes:
    """Read the sizes of the model whose tensors these are. Raises ModelError for weights of another model."""
    what = f"{name}: expected the tensors of SAM 3.1 under the names of Meta's checkpoint"
    with explain_sizes(f"{what}, found {len(tensors)} tensors without"):
        sizes = _read_sizes(tensors)
    if sizes.grid > MAX_GRID:
        raise ModelError(f"{what} and at most {MAX_GRID} tokens along a side, found {sizes.grid}")
    if min(value for value in sizes if isinstance(value, int)) < 1 or sizes.width % sizes.heads:
        raise ModelError(f"{what}, found others: sizes of {sizes!s:.400}; take the whole checkpoint")
    return sizes


def _read_sizes(tensors: Mapping[str, Tensor]) -> ModelSizes:
    # sizes are divided by sizes below
    if empty := next((key for key, value in tensors.items() if value.numel() == 0), None):
        raise ValueError(f"values in {empty!r:.100}")
    width, _, _, patch = tensors[f"{TRUNK}.patch_embed.proj.weight"].shape
    layers = count_layers(tensors, f"{TRUNK}.blocks.")
    tiles = math.isqrt(tensors[f"{TRUNK}.pos_embed"].shape[1] - 1)
    image_size, window, global_layers, heads = _read_windows(tensors, layers, width, patch)
    decoder = f"{MODEL}.sam_mask_decoder"
    slots, hidden = tensors[f"{decoder}.iou_token.weight"].shape
    downsample = f"{MODEL}.maskmem_backbone.mask_downsampler.encoder"
    steps = sorted(
        int(key.split(".")[-2])
        for key, value in tensors.items()
        if key.startswith(f"{downsample}.") and value.ndim == 4
    )
    kernels = [tensors[f"{downsample}.{step}.weight"].shape for step in steps]
    narrow = f"{decoder}.transformer.layers.0.cross_attn_token_to_image.q_proj.weight"
    return ModelSizes(
        image_size=image_size,
        patch=patch,
        window=window,
        global_layers=global_layers,
        layers=layers,
        width=width,
        heads=heads,
        mlp=tensors[f"{TRUNK}.blocks.0.mlp.fc1.weight"].shape[0],
        tiles=tiles,
        hidden=hidden,
        decoder_mlp=tensors[f"{decoder}.transformer.layers.0.mlp.lin1.weight"].shape[0],
        decoder_rate=hidden // tensors[narrow].shape[0],
        slots=slots,
        masks=tensors[f"{decoder}.mask_tokens.weight"].shape[0] // slots,
        read_layers=count_layers(tensors, f"{MODEL}.transformer.encoder.layers."),
        read_mlp=tensors[f"{MODEL}.transformer.encoder.layers.0.linear1.weight"].shape[0],
        # the last one is the map to the image's channels
        downsample=(kernels[0][1], *(kernel[0] for kernel in kernels[:-1])),
        fuser_layers=count_layers(tensors, f"{MODEL}.maskmem_backbone.fuser.layers."),
        fuser_mlp=tensors[f"{MODEL}.maskmem_backbone.fuser.layers.0.pwconv1.weight"].shape[0],
    )


def count_layers(tensors: Mapping[str, Tensor], prefix: str) -> int:
    """Return the number of layers whose tensors begin with `prefix`.

    Raises KeyError if there are none, and ModelError for a number of a layer beyond MAX_LAYERS.
    """
    pattern = re.compile(rf"{re.escape(prefix)}(\d+)\.")
    found = {match[1] for match in map(pattern.match, tensors) if match}
    if not found:
        raise KeyError(f"{prefix}0")
    numbers = {str(number) for number in range(MAX_LAYERS)}
    if beyond := found - numbers:
        raise ModelError(
            f"expected at most {MAX_LAYERS} layers {prefix}N, found {prefix}{min(beyond)!s:.40}; take the original "
            "checkpoint"
        )
    return 1 + max(map(int, found))


def _read_windows(
    tensors: Mapping[str, Tensor], layers: int, width: int, patch: int
) -> tuple[int, int, tuple[int, ...], int]:
    """Return the image size, the window, the layers without windows, and the heads of the ViT.

    The file tells them by the tables of its rotary encoding, [tokens, channels of a head / 2], if it has them.
    """
    tables = [tensors.get(f"{TRUNK}.blocks.{layer}.attn.freqs_cis") for layer in range(layers)]
    found = [table for table in tables if table is not None]
    if len(found) < layers:
        part = max(1, layers // STAGES)
        return IMAGE_SIZE, WINDOW, tuple(range(part - 1, layers, part)), max(1, width // HEAD_WIDTH)
    tokens = [len(table) for table in found]
    grid = math.isqrt(max(tokens))
    window = math.isqrt(min(tokens))
    whole = tuple(layer for layer, count in enumerate(tokens) if count == max(tokens))
    return grid * patch, window, whole, width // (2 * found[0].shape[1])


def build_source(tensors: Mapping[str, Tensor], sizes: ModelSizes, name: str) -> Source:
    """Build the modules from the tensors of a file. Raises ModelError for tensors that lack or have another shape."""
    with torch.device("meta"), explain_sizes(f"{name}: expected tensors of one SAM 3.1, found others:"):
        source = Source(sizes)
    originals = {target: original_name(target, sizes) for target in source.state_dict()}
    _fill(source, collect_tensors(tensors, source, originals, name, "a tracker"))
    # SAM 3.1 predicts the IoU itself, where SAM 3 predicts its logit
    for decoder in (source.tracker.mask_decoder, source.video_decoder):
        decoder.iou_prediction_head.sigmoid_output = False
    return source.requires_grad_(False).eval()


def collect_tensors(
    tensors: Mapping[str, Tensor],
    module: nn.Module,
    originals: Mapping[str, str | None],
    name: str,
    user: str,
) -> dict[str, Tensor]:
    """Return the state of a module, float32, from the tensors of a file.

    originals: for each tensor of the module, its name in the file; None for one that the file does not give. Raises
    ModelError, which says that the file `name` lacks what `user` needs, or holds a tensor of another shape.
    """
    state = {}
    lacking = []
    for target, value in module.state_dict().items():
        original = originals[target]
        if original is None:
            continue
        found = _find(tensors, target, original)
        if found is None:
            lacking.append(original)
            continue
        if found.shape != value.shape:
            raise ModelError(
                f"{name}: {original}: expected a tensor {tuple(value.shape)}, found {tuple(found.shape)}"
            )
        state[target] = found
    if lacking:
        raise ModelError(
            f"{name} lacks {len(lacking)} tensors that {user} needs, for example {', '.join(lacking[:3])}; take the "
            "whole checkpoint"
        )
    return state


def _fill(source: Source, state: dict[str, Tensor]) -> None:
    """Put the tensors into the modules, and zeros where SAM 3.1 has no weights."""
    for key, value in source.state_dict().items():
        if key not in state:
            state[key] = torch.zeros(value.shape)
    source.load_state_dict(state, assign=True)


def _find(tensors: Mapping[str, Tensor], target: str, original: str) -> Tensor | None:
    """Return the tensor of a module named `target`, from what the file calls `original`; None if it lacks."""
    if target.endswith("prompt_encoder.point_embed.weight"):
        kinds = [tensors.get(f"{POINTS}.{kind}.weight") for kind in range(POINT_KINDS)]
        parts = [kind for kind in kinds if kind is not None]
        return torch.cat(parts).float() if len(parts) == POINT_KINDS else None
    found = tensors.get(original)
    if found is None:
        return None
    if original == f"{TRUNK}.pos_embed":
        found = found[:, 1:]  # the first is a class token's, which the model does not have
    part = _PROJECTION.search(target)
    if part and _JOINED.search(original):
        found = found.chunk(3)["qkv".index(part[1])]
    return found.float()
