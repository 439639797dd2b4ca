"""EdgeTAM (arXiv 2501.07256), in transformers' layout."""

import math
from typing import Any

from ..family import Family, TransformersWeights
from ..sam.edgetam import STRIDE, EdgeTam
from ..sam.tracker_model import MaskLimits
from ..sam.vit import side
from .sam2 import set_grids


def _size_step(config: Any) -> int:
    """See `TransformersWeights`. The grid must divide into as many windows as the perceiver has latents for."""
    windows = math.isqrt(config.perceiver_resampler_num_latents_2d)
    return math.lcm(STRIDE, windows * side(config.prompt_encoder_config.patch_size))


FAMILY = Family(
    "EdgeTAM",
    TransformersWeights(
        {"edgetam_video": EdgeTam, "edgetam": EdgeTam},  # edgetam: for single images, without memory modules
        _size_step,
        set_grids,
        fold=EdgeTam.fold_norms,
    ),
    mask_limits=MaskLimits(0.8, 0.95),  # of its copy of SAM 2's generator
)
