"""Load EdgeTAM (arXiv 2501.07256) by transformers, with our RepViT in the place of timm's.

The published configuration names timm's `repvit_m1` as the backbone; `EdgeTamConfig` reads it as a `RepVitConfig`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor
from transformers import AutoModel, EdgeTamVideoConfig, EdgeTamVideoModel, PreTrainedConfig, PreTrainedModel

from ...errors import ModelError
from .repvit import RepVit, fold_norms

TIMM = "timm_wrapper"
ARCHITECTURE = "repvit_m1"
WIDTHS = (48, 96, 192, 384)
DEPTHS = (2, 2, 14, 2)
_FIXED = {"in_chans": 3, "features_only": True, "out_indices": [0, 1, 2, 3]}


class RepVitConfig(PreTrainedConfig):  # type: ignore[misc]
    """Channels and numbers of blocks of a RepViT's four stages."""

    model_type = "sam3_node_repvit"

    def __init__(self, widths: Any = WIDTHS, depths: Any = DEPTHS, **options: Any) -> None:
        super().__init__(**options)
        for name, values in (("embed_dim", widths), ("depth", depths)):
            if len(values) != len(WIDTHS) or not all(
                isinstance(value, int) and value > 0 for value in values
            ):
                raise ModelError(
                    f"EdgeTAM: expected {len(WIDTHS)} positive numbers as the backbone's {name}, found {values!r:.100}"
                )
        self.widths = list(widths)
        self.depths = list(depths)

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration of timm's network, as transformers reads it."""
        options = super().to_dict()
        sizes = {"embed_dim": options.pop("widths"), "depth": options.pop("depths")}
        return {**options, "model_type": TIMM, "architecture": ARCHITECTURE, "model_args": _FIXED | sizes}


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
        """Return the maps [B, width, h, w] of the four stages as `last_hidden_state`, the finest first."""
        return SimpleNamespace(last_hidden_state=self.timm_model(pixel_values), hidden_states=None)


class EdgeTamConfig(EdgeTamVideoConfig):  # type: ignore[misc]
    """The configuration of EdgeTAM, for videos or single images, that needs no timm."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Return the configuration. Raises ModelError for a backbone other than RepViT M1."""
        vision = config_dict.get("vision_config")
        if isinstance(vision, dict) and vision.get("model_type") == "edgetam_vision_model":
            # for the published backbone, transformers would import timm
            backbone = _read_backbone(vision.get("backbone_config") or {})
            config_dict = config_dict | {"vision_config": vision | {"backbone_config": backbone}}
        return super().from_dict(config_dict, **kwargs)


class EdgeTam(EdgeTamVideoModel):  # type: ignore[misc]
    """transformers' model with our backbone."""

    def fold_norms(self) -> None:
        """Fold the backbone's batch norms into its convolutions. A cast before it would round both."""
        backbone = self.vision_encoder.backbone
        if isinstance(backbone, RepVitBackbone):
            backbone.timm_model = fold_norms(backbone.timm_model)

    config_class = EdgeTamConfig
    config: EdgeTamConfig


def _read_backbone(found: dict[str, Any]) -> RepVitConfig:
    name = str(found.get("architecture", ARCHITECTURE))
    options = dict(found.get("model_args") or {})
    widths = options.pop("embed_dim", WIDTHS)
    depths = options.pop("depth", DEPTHS)
    unknown = {key: value for key, value in options.items() if value != _FIXED.get(key)}
    # a name of timm may end in a tag of the weights, after a dot
    if found.get("model_type", TIMM) != TIMM or name.split(".")[0] != ARCHITECTURE or unknown:
        raise ModelError(
            f"EdgeTAM: expected timm's {ARCHITECTURE} as the backbone, found {found.get('model_type')} {name} "
            f"{unknown or ''}".rstrip()
        )
    return RepVitConfig(widths, depths)


AutoModel.register(RepVitConfig, RepVitBackbone, exist_ok=True)
