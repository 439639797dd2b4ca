"""SAM 2 (arXiv 2408.00714), in transformers' layout; nano is of this family."""

import math
from functools import partial
from typing import Any

from ..family import Family, TransformersWeights
from ..sam.configuration import Sam2Config, set_grids, side
from ..sam.tracker_model import MaskLimits
from ..tracker_reader import read_tracker


def _size_step(config: Any) -> int:
    """See `TransformersWeights`. It follows from the patch stride, the pooling and the windows."""
    backbone = config.vision_config.backbone_config
    # each stage but the first halves the grid
    halved = 2 ** (len(backbone.blocks_per_stage) - 1)
    return side(backbone.patch_stride) * math.lcm(halved, backbone.window_size_per_stage[0])


def _set_size(config: Any, size: int) -> None:
    set_grids(config, size)
    config.vision_config.backbone_config.image_size = [size, size]


FAMILY = Family(
    "SAM 2",
    TransformersWeights(
        ("sam2_video", "sam2"),  # sam2: for single images, without memory modules
        partial(read_tracker, Sam2Config),
        _size_step,
        _set_size,
    ),
    mask_limits=MaskLimits(0.8, 0.95),  # of its SAM2AutomaticMaskGenerator
)
