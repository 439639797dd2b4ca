"""Set another image size than that of the weights, in the configuration, before the model is built.

No weights depend on the size: SAM 3 tiles its position map and scales its rotary positions to the window (see
`Sam3ViTLayer` of transformers), Hiera interpolates one position map and tiles the other, EdgeTAM's windows grow.
"""

from __future__ import annotations

import math
from typing import Any

from transformers import EdgeTamVideoConfig, Sam3TrackerVideoConfig, SamConfig

from ...errors import ModelError
from .edgetam import STRIDE, RepVitConfig
from .vit import side

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
        halved = 2 ** (len(backbone.blocks_per_stage) - 1)
        step = side(backbone.patch_stride) * math.lcm(halved, backbone.window_size_per_stage[0])
    if isinstance(config, EdgeTamVideoConfig):
        windows = math.isqrt(config.perceiver_resampler_num_latents_2d)
        step = math.lcm(step, windows * side(config.prompt_encoder_config.patch_size))
    return step


def suggest_sizes(config: Any) -> list[int]:
    """Return sizes in pixels from the weights' own down to half of it, the largest first."""
    own, unit = side(config.prompt_encoder_config.image_size), size_step(config)
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
