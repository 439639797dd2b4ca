"""Load a tracker from the bundled nano weights, a local folder in transformers' layout, or a hub name.

`set_image_size` chooses another image size in the configuration, before the model is built. No weights depend on the
size: SAM 3 tiles its position map and scales its rotary positions to the window (see `Sam3ViTLayer` of transformers),
Hiera interpolates one position map and tiles the other, EdgeTAM's windows grow.
"""

import math
import os
from pathlib import Path
from typing import Any

import torch
from transformers import (
    EdgeTamVideoConfig,
    Sam2VideoModel,
    Sam3TrackerVideoConfig,
    Sam3TrackerVideoModel,
    SamConfig,
    SamModel,
)

from ..errors import ModelError
from . import weight_files
from .sam.edgetam import STRIDE, EdgeTam, RepVitConfig
from .sam.encoder import adapt_sam1
from .sam.tracker_model import TrackerModel
from .sam.vit import side
from .sam31.loading import find_checkpoint, load_sam31

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


def load_tracker(
    name_or_path: str | os.PathLike[str] = "nano",
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    compile: bool = False,
    image_size: int = 0,
) -> TrackerModel:
    """Load a tracker: "nano", a folder in transformers' layout, or a hub name such as "facebook/sam3".

    SAM 3.1's checkpoint may also be a file, or the one file of a folder; see `sam31.loading`.

    `device` may be "auto": CUDA if available, else CPU. `dtype` None or "auto" is bfloat16 on CUDA, else float32.
    A CUDA device becomes the current one of this thread, so that streams, events and graphs are made on it.
    `image_size` is in pixels; 0 selects the weights' own size. Raises ModelError if the weights are missing, damaged,
    or belong to no SAM model, and for an image size that their encoder does not support.
    """
    target = weight_files.pick_device(device)
    chosen_dtype = weight_files.pick_dtype(dtype, target)
    if target.type == "cuda" and target.index is not None:
        torch.cuda.set_device(target)
    name = os.fspath(name_or_path)
    if checkpoint := find_checkpoint(name):
        sam31 = load_sam31(name, checkpoint, device=target, dtype=chosen_dtype, image_size=image_size)
        if compile:
            sam31.compile()
        return sam31
    if name == "nano":
        weight_files.check_digest(NANO / "model.safetensors")
    files = str(NANO) if name == "nano" else name
    source, has_memory = _load_source(files, name, image_size)
    family = weight_files.CENTRED if isinstance(source, Sam3TrackerVideoModel) else weight_files.IMAGENET
    normalisation = weight_files.read_normalisation(files, family)
    source = weight_files.cast_source(source, target, chosen_dtype)
    model = TrackerModel(
        adapt_sam1(source) if isinstance(source, SamModel) else source,
        name=weight_files.name_weights(name),
        mean=normalisation.mean,
        std=normalisation.std,
        has_memory=has_memory,
    ).to(target)
    if compile:
        model.compile()
    return model


def _load_source(files: str, name: str, image_size: int) -> tuple[Any, bool]:
    """Load the transformers model; return it, and True if the weights include its memory modules."""
    source, missing = weight_files.load_pretrained(
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


SIXTHS = (6, 5, 4, 3)  # suggested sizes, in sixths of the weights' own size: 1008, 840, 672 and 504 for SAM 3


def set_image_size(config: Any, size: int, name: str) -> Any:
    """Set the image size of a transformers tracker's configuration to `size` x `size` pixels; 0 changes nothing.

    Return the tracker's configuration. Raises ModelError for a size that the encoder cannot divide into its tokens.
    """
    if size == 0:
        return config
    config = _tracker_part(config)
    if isinstance(config, SamConfig):
        own = config.vision_config.image_size
        if size != own:
            raise ModelError(f"{name}: image_size: expected 0 or {own}, the only size of SAM 1; found {size}")
        return config
    if size % size_step(config) or size < 2 * size_step(config):
        raise ModelError(
            f"{name}: image_size: expected a multiple of {size_step(config)} pixels, "
            f"such as {', '.join(map(str, suggest_sizes(config)))}; found {size}"
        )
    if isinstance(config, Sam3TrackerVideoConfig):
        config.image_size = size  # its setter reaches the encoder, the prompts and the memory
    else:
        _set_sam2(config, size)
    return config


def size_step(config: Any) -> int:
    """Return the number of pixels that divides every valid image size.

    For SAM 3 it is the patch size. For SAM 2 it follows from the patch stride, the pooling and the windows. EdgeTAM's
    grid must also divide into as many windows as the perceiver has latents for.
    """
    backbone = config.vision_config.backbone_config
    if isinstance(config, Sam3TrackerVideoConfig):
        return side(backbone.patch_size)
    if isinstance(backbone, RepVitConfig):
        step = STRIDE
    else:
        # each stage but the first halves the grid
        halved = 2 ** (len(backbone.blocks_per_stage) - 1)
        step = side(backbone.patch_stride) * math.lcm(halved, backbone.window_size_per_stage[0])
    if isinstance(config, EdgeTamVideoConfig):
        windows = math.isqrt(config.perceiver_resampler_num_latents_2d)
        step = math.lcm(step, windows * side(config.prompt_encoder_config.patch_size))
    return step


def suggest_sizes(config: Any) -> list[int]:
    """Return sizes in pixels from the weights' own down to half of it, the largest first."""
    own = side(config.prompt_encoder_config.image_size)
    unit = size_step(config)
    # with few tokens, several sixths round to the same size
    return list(dict.fromkeys(max(2, round(own * sixths / 6 / unit)) * unit for sixths in SIXTHS))


def _tracker_part(config: Any) -> Any:
    """Return the tracker's part of a configuration that may also contain a detector."""
    part = getattr(config, "tracker_config", None)
    if part is None:
        return config
    return Sam3TrackerVideoConfig(**part) if isinstance(part, dict) else part


def _set_sam2(config: Any, size: int) -> None:
    grid = size // side(config.prompt_encoder_config.patch_size)
    config.image_size = config.prompt_encoder_config.image_size = size
    vision = config.vision_config
    if not isinstance(vision.backbone_config, RepVitConfig):
        vision.backbone_config.image_size = [size, size]
    vision.backbone_feature_sizes = [[scale * grid] * 2 for scale in (4, 2, 1)]
    config.memory_attention_rope_feat_sizes = [grid, grid]
