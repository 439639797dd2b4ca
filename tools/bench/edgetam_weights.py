"""transformers' EdgeTAM with our RepViT in the place of timm's, which it would import."""

from types import SimpleNamespace
from typing import Any

from torch import Tensor
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from sam3_node.models.sam.repvit import RepVit

WIDTHS = (48, 96, 192, 384)
"""Channels of the four stages of the published RepViT."""
DEPTHS = (2, 2, 14, 2)
"""Its numbers of blocks."""
FIXED = {"in_chans": 3, "features_only": True, "out_indices": [0, 1, 2, 3]}


class RepVitConfig(PreTrainedConfig):  # type: ignore[misc]
    """Channels and numbers of blocks of a RepViT's four stages. It is written as timm's."""

    model_type = "sam3_node_repvit"

    def __init__(self, widths: Any = WIDTHS, depths: Any = DEPTHS, **options: Any) -> None:
        super().__init__(**options)
        self.widths = list(widths)
        self.depths = list(depths)

    def to_dict(self) -> dict[str, Any]:
        options = super().to_dict()
        sizes = {"embed_dim": options.pop("widths"), "depth": options.pop("depths")}
        timm = {"model_type": "timm_wrapper", "architecture": "repvit_m1.dist_in1k"}
        return {**options, **timm, "model_args": FIXED | sizes}


class RepVitBackbone(PreTrainedModel):  # type: ignore[misc]
    """Holds a RepViT under the name that transformers gives to timm's networks."""

    config_class = RepVitConfig
    base_model_prefix = "timm_model"
    main_input_name = "pixel_values"

    def __init__(self, config: RepVitConfig) -> None:
        super().__init__(config)
        self.timm_model = RepVit(config.widths, config.depths)
        self.post_init()

    def forward(self, pixel_values: Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=self.timm_model(pixel_values), hidden_states=None)


AutoModel.register(RepVitConfig, RepVitBackbone, exist_ok=True)
