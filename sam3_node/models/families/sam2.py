"""SAM 2 (arXiv 2408.00714), in transformers' layout; nano is of this family."""

import math
from typing import Any

from transformers import Sam2VideoModel

from ..family import Family, TransformersWeights
from ..sam.tracker_model import MaskLimits
from ..sam.vit import side


def _size_step(config: Any) -> int:
    """See `TransformersWeights`. It follows from the patch stride, the pooling and the windows."""
    backbone = config.vision_config.backbone_config
    # each stage but the first halves the grid
    halved = 2 ** (len(backbone.blocks_per_stage) - 1)
    return side(backbone.patch_stride) * math.lcm(halved, backbone.window_size_per_stage[0])


def set_grids(config: Any, size: int) -> None:
    """Set the image size of all parts but the backbone."""
    grid = size // side(config.prompt_encoder_config.patch_size)
    config.image_size = config.prompt_encoder_config.image_size = size
    config.vision_config.backbone_feature_sizes = [[scale * grid] * 2 for scale in (4, 2, 1)]
    config.memory_attention_rope_feat_sizes = [grid, grid]


def _set_size(config: Any, size: int) -> None:
    set_grids(config, size)
    config.vision_config.backbone_config.image_size = [size, size]


FAMILY = Family(
    "SAM 2",
    TransformersWeights(
        {
            "sam2_video": Sam2VideoModel,
            "sam2": Sam2VideoModel,
        },  # sam2: for single images, without memory modules
        _size_step,
        _set_size,
    ),
    mask_limits=MaskLimits(0.8, 0.95),  # of its SAM2AutomaticMaskGenerator
)
