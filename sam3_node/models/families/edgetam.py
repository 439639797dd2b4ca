"""EdgeTAM (arXiv 2501.07256), in transformers' layout."""

import math
from typing import Any

from ..family import Family, Reading, TransformersWeights
from ..sam.configuration import set_grids, side
from ..sam.repvit import STRIDE, fold_norms
from ..sam.tracker_model import MaskLimits


def _read(name: str, configure: Any) -> Reading:
    from ..pretrained import load_pretrained
    from ..sam.edgetam import EdgeTam

    return Reading(*load_pretrained(name, dict.fromkeys(KINDS, EdgeTam), configure=configure))


def _fold(source: Any) -> None:
    """Fold the backbone's batch norms into its convolutions. A cast before it would round both."""
    backbone = source.vision_encoder.backbone
    backbone.timm_model = fold_norms(backbone.timm_model)


def _size_step(config: Any) -> int:
    """See `TransformersWeights`. The grid must divide into as many windows as the perceiver has latents for."""
    windows = math.isqrt(config.perceiver_resampler_num_latents_2d)
    return math.lcm(STRIDE, windows * side(config.prompt_encoder_config.patch_size))


def _set_size(config: Any, size: int) -> None:
    set_grids(config, size)
    config.memory_attention_rope_feat_sizes = config.vision_config.backbone_feature_sizes[-1]


KINDS = ("edgetam_video", "edgetam")
"""`edgetam` is for single images, without memory modules"""
FAMILY = Family(
    "EdgeTAM",
    TransformersWeights(KINDS, _read, _size_step, _set_size, fold=_fold),
    mask_limits=MaskLimits(0.8, 0.95),  # of its copy of SAM 2's generator
)
