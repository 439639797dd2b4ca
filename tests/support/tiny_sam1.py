"""A tiny random SAM 1 of the real class."""

import math

import torch
from transformers import SamConfig, SamModel

SIZE = 160


def random_sam1(window: int = 4) -> SamModel:
    """Return a SAM 1 whose random weights make every part matter; a window of 4 extends past the grid of 10."""
    torch.manual_seed(0)
    grid = SIZE // 16
    config = SamConfig(
        vision_config={
            "hidden_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "image_size": SIZE,
            "window_size": window,
            "global_attn_indexes": [1],
            "mlp_dim": 96,
            "output_channels": 64,
            "num_pos_feats": 32,
        },
        prompt_encoder_config={"hidden_size": 64, "image_size": SIZE, "image_embedding_size": grid},
        mask_decoder_config={
            "hidden_size": 64,
            "mlp_dim": 128,
            "iou_head_hidden_dim": 64,
            "num_attention_heads": 4,
        },
    )
    source = SamModel(config).eval()
    with torch.no_grad():
        for name, value in source.named_parameters():
            if value.ndim > 1 and "embed" not in name:
                value.normal_(0, 2.0 / math.sqrt(value[0].numel()))
            elif "norm" not in name:
                value.normal_(0, 0.5)
    return source
