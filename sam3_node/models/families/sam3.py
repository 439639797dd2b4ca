"""SAM 3 (arXiv 2511.16719), in transformers' layout."""

from functools import partial
from typing import Any

from ..family import Family, TransformersWeights
from ..sam.configuration import Sam3Config, set_grids, side
from ..tracker_reader import read_tracker
from ..weight_files import CENTRED


def _size_step(config: Any) -> int:
    return side(config.vision_config.backbone_config.patch_size)


def _set_size(config: Any, size: int) -> None:
    set_grids(config, size)
    config.vision_config.backbone_config.image_size = size


FAMILY = Family(
    "SAM 3",
    TransformersWeights(
        # sam3_video is facebook/sam3: detector and tracker in one; only the tracker is used
        ("sam3_tracker_video", "sam3_video"),
        partial(read_tracker, Sam3Config),
        _size_step,
        _set_size,
        normalisation=CENTRED,
    ),
    hub_name="facebook/sam3",
    is_gated=True,
)
