"""Image sizes other than the weights' own: all that follows from a size is set in the configuration, before building.

No weights depend on the size: SAM 3 tiles its position map and scales its rotary positions to the window (see
`Sam3ViTLayer` of transformers), Hiera interpolates one position map and tiles the other.
"""

from __future__ import annotations

import math
from typing import Any

from transformers import Sam3TrackerVideoConfig

from ...errors import ModelError
from .vit import side

RUNGS = (6, 5, 4, 3)  # sixths of the weights' own size: 1008, 840, 672 and 504 for SAM 3


def at_image_size(config: Any, size: int, name: str) -> Any:
    """The configuration of a transformers tracker for images of `size` x `size` pixels; 0 leaves its own.

    Raises ModelError for a size that the encoder cannot cut into its tokens.
    """
    if size == 0:
        return config
    config = _tracker_part(config)
    if size % step(config) or size < 2 * step(config):
        raise ModelError(
            f"{name}: image_size: expected a multiple of {step(config)} pixels, "
            f"such as {', '.join(map(str, ladder(config)))}; found {size}"
        )
    if isinstance(config, Sam3TrackerVideoConfig):
        config.image_size = size  # its setter reaches the encoder, the prompts and the memory
    else:
        _set_sam2(config, size)
    return config


def step(config: Any) -> int:
    """What image sizes must be a multiple of, pixels: a patch for SAM 3; for SAM 2 what pooling and windows divide."""
    backbone = config.vision_config.backbone_config
    if isinstance(config, Sam3TrackerVideoConfig):
        return side(backbone.patch_size)
    halved = 2 ** (len(backbone.blocks_per_stage) - 1)
    return side(backbone.patch_stride) * math.lcm(halved, backbone.window_size_per_stage[0])


def ladder(config: Any) -> list[int]:
    """Sizes from the weights' own down to half of it, pixels, the largest first."""
    own, unit = side(config.prompt_encoder_config.image_size), step(config)
    return [max(2, round(own * rung / RUNGS[0] / unit)) * unit for rung in RUNGS]


def _tracker_part(config: Any) -> Any:
    """The tracker's configuration in a checkpoint that holds a detector, too."""
    part = getattr(config, "tracker_config", None)
    if part is None:
        return config
    return Sam3TrackerVideoConfig(**part) if isinstance(part, dict) else part


def _set_sam2(config: Any, size: int) -> None:
    grid = size // side(config.prompt_encoder_config.patch_size)
    config.image_size = config.prompt_encoder_config.image_size = size
    vision = config.vision_config
    vision.backbone_config.image_size = [size, size]
    vision.backbone_feature_sizes = [[scale * grid] * 2 for scale in (4, 2, 1)]
    config.memory_attention_rope_feat_sizes = [grid, grid]
