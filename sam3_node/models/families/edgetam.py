"""EdgeTAM (arXiv 2501.07256), in transformers' layout."""

import math
from functools import partial
from typing import Any

from ..family import Family, TransformersWeights
from ..sam.configuration import EdgeTamConfig, set_grids, side
from ..sam.repvit import STRIDE, fold_norms
from ..sam.tracker_model import MaskLimits
from ..tracker_reader import read_tracker


def _fold(source: Any) -> None:
    """Fold the backbone's batch norms into its convolutions. A cast before it would round both."""
    backbone = source.vision_encoder.backbone
    backbone.timm_model = fold_norms(backbone.timm_model)


def _size_step(config: Any) -> int:
    """See `TransformersWeights`. The grid must divide into as many windows as the perceiver has latents for."""
    windows = math.isqrt(config.perceiver_resampler_num_latents_2d)
    return math.lcm(STRIDE, windows * side(config.prompt_encoder_config.patch_size))


FAMILY = Family(
    "EdgeTAM",
    TransformersWeights(
        ("edgetam_video", "edgetam"),  # edgetam: for single images, without memory modules
        partial(read_tracker, EdgeTamConfig),
        _size_step,
        set_grids,
        fold=_fold,
    ),
    mask_limits=MaskLimits(0.8, 0.95),  # of its copy of SAM 2's generator
)
