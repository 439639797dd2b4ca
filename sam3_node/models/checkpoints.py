"""Load a tracker from the bundled nano weights, a local folder in transformers' layout, or a hub name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Sam2VideoModel, Sam3TrackerVideoModel, SamModel

from ..errors import ModelError
from .pretrained import CENTRED, IMAGENET, load_pretrained, read_normalisation
from .sam.edgetam import EdgeTam
from .sam.image_size import set_image_size
from .sam.sam1 import adapt_sam1
from .sam.tracker_model import TrackerModel
from .weight_loading import check_digest, pick_device, pick_dtype

NANO = Path(__file__).parent / "nano"
CLASSES: dict[str, Any] = {
    "sam3_tracker_video": Sam3TrackerVideoModel,
    "sam3_video": Sam3TrackerVideoModel,  # facebook/sam3: detector and tracker in one; only the tracker is used
    "sam2_video": Sam2VideoModel,
    "sam2": Sam2VideoModel,  # for single images: without memory modules
    "edgetam_video": EdgeTam,
    "edgetam": EdgeTam,  # for single images: without memory modules
    "sam": SamModel,  # SAM 1, for single images
}
# without these, objects are followed by their last masks
MEMORY_MODULES = (
    "memory_attention.",
    "memory_encoder.",
    "memory_temporal_positional_encoding",
    "no_memory_positional_encoding",
    "no_object_pointer",
    "object_pointer_proj.",
    "mask_downsample.",
    "temporal_positional_encoding_projection_layer.",
    "occlusion_spatial_embedding_parameter",
    "spatial_perceiver.",
)

FREQUENCIES = ("inv_freq", "positional_embedding")
"""How the names of buffers end that hold frequencies."""


def load_tracker(
    name_or_path: str | os.PathLike[str] = "nano",
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    compile: bool = False,
    image_size: int = 0,
) -> TrackerModel:
    """Load a tracker: "nano", a folder in transformers' layout, or a hub name such as "facebook/sam3".

    `device` may be "auto": CUDA if available, else CPU. `dtype` None or "auto" is bfloat16 on CUDA, else float32.
    A CUDA device becomes the current one of this thread, so that streams, events and graphs are made on it.
    `image_size` is in pixels; 0 selects the weights' own size. Raises ModelError if the weights are missing, damaged,
    or not those of a SAM model, and for an image size that their encoder does not support.
    """
    target = pick_device(device)
    chosen_dtype = pick_dtype(dtype, target)
    if target.type == "cuda" and target.index is not None:
        torch.cuda.set_device(target)
    name = os.fspath(name_or_path)
    if name == "nano":
        check_digest(NANO / "model.safetensors")
    files = str(NANO) if name == "nano" else name
    source, has_memory = _load_source(files, name, image_size)
    family = CENTRED if isinstance(source, Sam3TrackerVideoModel) else IMAGENET
    normalisation = read_normalisation(files, family)
    source = cast_source(source, target, chosen_dtype)
    model = TrackerModel(
        adapt_sam1(source) if isinstance(source, SamModel) else source,
        name=Path(name).name if os.path.isdir(name) else name,
        mean=normalisation.mean,
        std=normalisation.std,
        has_memory=has_memory,
    ).to(target)
    if compile:
        model.compile()
    return model


def _load_source(files: str, name: str, image_size: int) -> tuple[Any, bool]:
    """Load the transformers model; return it, and True if the weights include its memory modules."""
    source, missing = load_pretrained(
        files, CLASSES, configure=lambda config: set_image_size(config, image_size, name)
    )
    essential = [key for key in missing if not key.startswith(MEMORY_MODULES)]
    if essential:
        raise ModelError(
            f"{name} lacks {len(essential)} tensors that a tracker needs, for example {', '.join(essential[:3])}"
        )
    if isinstance(source, EdgeTam):
        source.fold_norms()
    return source, not missing and not isinstance(source, SamModel)


def cast_source(source: Any, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Move the model to device and dtype. Frequencies of positions stay float32.

    Rotary ones do so in the reference. Those of prompts and pixels are multiplied by whole turns: in bfloat16 a click
    would be rounded to a 256th of the image.
    """
    exact = {name: buffer.clone() for name, buffer in source.named_buffers() if name.endswith(FREQUENCIES)}
    model: nn.Module = source.to(device=device, dtype=dtype)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()  # out of the file's mapping, whose alignment changes the last bits
    for name, buffer in exact.items():
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, buffer.to(device))
    return model
