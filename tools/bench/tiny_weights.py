"""Random weights for benchmarks in which neither time nor memory depends on what the masks show."""

from pathlib import Path
from typing import Any

PRESENCE_BIAS = 60.0  # keeps every object in view, which random weights would not
SEED = 0


def save_tiny_checkpoint(folder: Path) -> Path:
    """Save a SAM 3 tracker that takes a few milliseconds a frame; its seeded random weights give smooth masks."""
    import torch
    from transformers import Sam3TrackerVideoModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(SEED)
    source = Sam3TrackerVideoModel(sam3_config()).eval().requires_grad_(False)
    decoder = source.mask_decoder
    decoder.pred_obj_score_head.proj_out.bias.fill_(PRESENCE_BIAS)
    for convolution in (decoder.conv_s0, decoder.conv_s1):
        convolution.weight.zero_()
        convolution.bias.zero_()
    for convolution in (decoder.upscale_conv1, decoder.upscale_conv2):
        weight = convolution.weight
        weight.copy_(20 * weight.mean(dim=(2, 3), keepdim=True).expand_as(weight))
    source.save_pretrained(folder)
    return folder


def sam3_config(hidden: int = 64, grid: int = 4, layers: int = 1, heads: int = 2, **backbone: object) -> Any:
    """Return the configuration of a small SAM 3 tracker on grid x grid patches.

    `layers` and `heads` apply to the memory attention and the mask decoder; `backbone` overrides ViT settings.
    """
    from transformers import Sam3TrackerVideoConfig

    size = 14 * grid
    vit = {
        "model_type": "sam3_vit_model",
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "image_size": size,
        "patch_size": 14,
        "window_size": grid // 2,
        "global_attn_indexes": [0],
        "pretrain_image_size": size,
    }
    return Sam3TrackerVideoConfig(
        vision_config={
            "model_type": "sam3_vision_model",
            "fpn_hidden_size": hidden,
            "backbone_feature_sizes": [[4 * grid] * 2, [2 * grid] * 2, [grid] * 2],
            "backbone_config": vit | backbone,
        },
        prompt_encoder_config={"hidden_size": hidden, "image_size": size, "patch_size": 14},
        mask_decoder_config={
            "hidden_size": hidden,
            "mlp_dim": 2 * hidden,
            "iou_head_hidden_dim": hidden,
            "num_attention_heads": heads,
        },
        image_size=size,
        memory_attention_hidden_size=hidden,
        memory_attention_feed_forward_hidden_size=2 * hidden,
        memory_attention_num_layers=layers,
        memory_attention_rope_feat_sizes=[grid, grid],
        memory_encoder_hidden_size=hidden,
        mask_downsampler_embed_dim=hidden,
        memory_fuser_embed_dim=hidden,
        memory_fuser_intermediate_dim=2 * hidden,
    )
