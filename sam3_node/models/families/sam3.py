"""SAM 3 (arXiv 2511.16719), in transformers' layout."""

from typing import Any

from transformers import Sam3TrackerVideoModel

from ..family import Family, TransformersWeights
from ..sam.vit import side
from ..weight_files import CENTRED


def _size_step(config: Any) -> int:
    return side(config.vision_config.backbone_config.patch_size)


def _set_size(config: Any, size: int) -> None:
    config.image_size = size  # its setter reaches the encoder, the prompts and the memory


FAMILY = Family(
    "SAM 3",
    TransformersWeights(
        {
            "sam3_tracker_video": Sam3TrackerVideoModel,
            # facebook/sam3: detector and tracker in one; only the tracker is used
            "sam3_video": Sam3TrackerVideoModel,
        },
        _size_step,
        _set_size,
        normalisation=CENTRED,
    ),
    hub_name="facebook/sam3",
    is_gated=True,
)
