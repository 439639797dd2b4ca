"""Read SAM 3.1's detector from Meta's checkpoint into transformers' Sam3Model, whose parts it has.

Sizes are those of the tensors. What the file does not tell, such as the number of attention heads, is as published.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers import Sam3Config, Sam3Model

from ..models.sam31.checkpoint import collect_tensors, count_layers, read_sizes
from ..models.sam31.source import NECKS, ModelSizes, Renames, original_name, tracker_config
from ..models.weight_files import explain_sizes
from .pretrained import quiet_transformers

TEXT = "detector.backbone.language_backbone"
GEOMETRY = "detector.geometry_encoder"
ENCODER = "detector.transformer.encoder"
DECODER = "detector.transformer.decoder"
SCORING = "detector.dot_prod_scoring"
HEADS = 8
"""Attention heads of all parts behind the encoders."""
TEXT_HEAD_WIDTH = 64
"""Channels of one of the text encoder's heads."""
LEVEL = 2
"""Index of the feature pyramid's level that the detector uses in Meta's file. Its scale is that of the trunk."""
LEVEL_SCALES = [1.0, 0.5]
"""Scales of the pyramid levels that are built, relative to the trunk. transformers' detector reads the last but one, so
a last one without useful weights follows."""
UNUSED = (
    "mask_decoder.",
    "vision_encoder.neck.fpn_layers.1.",
    "text_encoder.text_projection.",
)
"""Parts of transformers' model that do not take part in finding boxes."""

_VIT = "vision_encoder.backbone."
_PROJECTION = re.compile(r"\.([qkv])_proj\.(weight|bias)$")
_PERCEPTRON = re.compile(r"\.layer(\d)\.(weight|bias)$")
_RENAMES = Renames(
    # the one level of the pyramid
    (r"^vision_encoder\.neck\.fpn_layers\.0\.proj1\.", f"{NECKS}.convs.{LEVEL}.conv_1x1."),
    (r"^vision_encoder\.neck\.fpn_layers\.0\.proj2\.", f"{NECKS}.convs.{LEVEL}.conv_3x3."),
    # the text encoder
    (r"^text_projection\.", f"{TEXT}.resizer."),
    (r"^text_encoder\.text_model\.embeddings\.token_embedding\.", f"{TEXT}.encoder.token_embedding."),
    (r"^text_encoder\.text_model\.embeddings\.position_embedding\.weight$",
     f"{TEXT}.encoder.positional_embedding"),
    (r"^text_encoder\.text_model\.final_layer_norm\.", f"{TEXT}.encoder.ln_final."),
    (r"^text_encoder\.text_model\.encoder\.layers\.", f"{TEXT}.encoder.transformer.resblocks."),
    (r"(\.resblocks\.\d+\.)self_attn\.", r"\1attn."),
    (r"(\.resblocks\.\d+\.)layer_norm", r"\1ln_"),
    (r"(\.resblocks\.\d+\.mlp\.)fc1\.", r"\1c_fc."),
    (r"(\.resblocks\.\d+\.mlp\.)fc2\.", r"\1c_proj."),
    # the encoder of exemplars
    (r"^geometry_encoder\.layers\.", f"{GEOMETRY}.encode."),
    (r"^geometry_encoder\.vision_layer_norm\.", f"{GEOMETRY}.img_pre_norm."),
    (r"^geometry_encoder\.prompt_layer_norm\.", f"{GEOMETRY}.norm."),
    (r"^geometry_encoder\.output_layer_norm\.", f"{GEOMETRY}.encode_norm."),
    (r"^geometry_encoder\.", f"{GEOMETRY}."),
    # the encoder, in which the image reads the phrase
    (r"^detr_encoder\.", f"{ENCODER}."),
    (r"((?:geometry_encoder\.encode|encoder\.layers)\.\d+\.)layer_norm", r"\1norm"),
    (r"((?:geometry_encoder\.encode|encoder\.layers)\.\d+\.)cross_attn\.", r"\1cross_attn_image."),
    # the decoder; norms are numbered as in the model that it descends from: the image's comes first
    (r"^detr_decoder\.", f"{DECODER}."),
    (r"(decoder\.layers\.\d+\.)vision_cross_attn_layer_norm\.", r"\1norm1."),
    (r"(decoder\.layers\.\d+\.)self_attn_layer_norm\.", r"\1norm2."),
    (r"(decoder\.layers\.\d+\.)mlp_layer_norm\.", r"\1norm3."),
    (r"(decoder\.layers\.\d+\.)text_cross_attn_layer_norm\.", r"\1catext_norm."),
    (r"(decoder\.layers\.\d+\.)text_cross_attn\.", r"\1ca_text."),
    (r"(decoder\.layers\.\d+\.)vision_cross_attn\.", r"\1cross_attn."),
    (r"(decoder\.)output_layer_norm\.", r"\1norm."),
    (r"(decoder\.)presence_layer_norm\.", r"\1presence_token_out_norm."),
    (r"(decoder\.)presence_head\.", r"\1presence_token_head."),
    (r"(decoder\.)box_head\.", r"\1bbox_embed."),
    (r"(decoder\.)box_rpb_embed_", r"\1boxRPB_embed_"),
    # the scores
    (r"^dot_product_scoring\.text_mlp_out_norm\.", f"{SCORING}.prompt_mlp.out_norm."),
    (r"^dot_product_scoring\.text_mlp\.", f"{SCORING}.prompt_mlp."),
    (r"^dot_product_scoring\.text_proj\.", f"{SCORING}.prompt_proj."),
    (r"^dot_product_scoring\.query_proj\.", f"{SCORING}.hs_proj."),
    # what attention and perceptrons have in common
    (r"^(detector\.(?:geometry|transformer).*\.)o_proj\.", r"\1out_proj."),
    (r"^(detector\.(?:geometry|transformer).*\.\d+\.)mlp\.fc", r"\1linear"),
)  # fmt: skip


def detector_name(target: str, sizes: ModelSizes) -> str | None:
    """Return the name in Meta's file of the tensor `target` of a Sam3Model; None for one that finds no boxes.

    Tensors of queries, keys and values are one tensor there, which is named for all three.
    """
    if target.startswith(UNUSED):
        return None
    # the tracker has the same trunk
    if target.startswith(_VIT):
        return original_name(f"tracker.{target}", sizes)
    # torch's own attention keeps the three in one
    name = _PROJECTION.sub(r".in_proj_\2", _RENAMES.apply(target))
    return _PERCEPTRON.sub(lambda found: f".layers.{int(found[1]) - 1}.{found[2]}", name)


def read_config(tensors: Mapping[str, Tensor], sizes: ModelSizes) -> Sam3Config:
    """Read the sizes of the detector. Raises KeyError for a tensor that lacks."""
    vision = msgspec.json.decode(msgspec.json.encode(tracker_config(sizes).vision_config))
    vision["scale_factors"] = LEVEL_SCALES
    vision["backbone_feature_sizes"] = [[int(scale * sizes.grid)] * 2 for scale in LEVEL_SCALES]
    queries, hidden = tensors[f"{DECODER}.query_embed.weight"].shape
    vision["fpn_hidden_size"] = hidden
    words, width = tensors[f"{TEXT}.encoder.token_embedding.weight"].shape
    common = {"hidden_size": hidden, "num_attention_heads": HEADS}
    return Sam3Config(
        vision_config=vision,
        text_config={
            "vocab_size": words,
            "hidden_size": width,
            "intermediate_size": len(tensors[f"{TEXT}.encoder.transformer.resblocks.0.mlp.c_fc.weight"]),
            "num_hidden_layers": count_layers(tensors, f"{TEXT}.encoder.transformer.resblocks."),
            "num_attention_heads": max(1, width // TEXT_HEAD_WIDTH),
            "max_position_embeddings": len(tensors[f"{TEXT}.encoder.positional_embedding"]),
            "projection_dim": hidden,
            # CLIP's own is another
            "hidden_act": "gelu",
            # the marks of a phrase's start and end are the last words
            "bos_token_id": words - 2,
            "eos_token_id": words - 1,
        },
        geometry_encoder_config=common
        | _read_layers(tensors, f"{GEOMETRY}.encode.")
        | {"roi_size": tensors[f"{GEOMETRY}.boxes_pool_project.weight"].shape[-1]},
        detr_encoder_config=common | _read_layers(tensors, f"{ENCODER}.layers."),
        detr_decoder_config=common | _read_layers(tensors, f"{DECODER}.layers.") | {"num_queries": queries},
        # not used: as small as it can be
        mask_decoder_config=common | {"num_upsampling_stages": 1},
    )


def _read_layers(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, int]:
    """Return how many layers there are, and how wide their perceptrons are."""
    width = len(tensors[f"{prefix}0.linear1.weight"])
    return {"num_layers": count_layers(tensors, prefix), "intermediate_size": width}


def build_sam3_model(
    tensors: Mapping[str, Tensor], name: str, dtype: torch.dtype = torch.float32
) -> Sam3Model:
    """Build the model from a checkpoint's tensors. Its mask decoder has no weights of use.

    Raises ModelError for tensors that lack or have another shape.
    """
    sizes, config = read_detector(tensors, name)
    with torch.device("meta"), explain_sizes(f"{name}: expected tensors of one detector, found others:"):
        expected = Sam3Model(config)
    originals = {target: detector_name(target, sizes) for target in expected.state_dict()}
    state = collect_tensors(tensors, expected, originals, name, "SAM 3.1's detector")
    with quiet_transformers():
        model: Any = Sam3Model.from_pretrained(None, config=config, state_dict=state, dtype=dtype)
    return model.requires_grad_(False).eval()


def read_detector(tensors: Mapping[str, Tensor], name: str) -> tuple[ModelSizes, Sam3Config]:
    """Read the sizes of a checkpoint and of its detector. Raises ModelError if it has none."""
    sizes = read_sizes(tensors, name)
    with explain_sizes(
        f"{name}: expected SAM 3.1's detector under the names of Meta's checkpoint (detector.*), found a file without"
    ):
        return sizes, read_config(tensors, sizes)
