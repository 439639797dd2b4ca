"""The weights of SAM 1 as torch modules, whose tensors have the names of transformers' layout.

What has another name in SAM 2 has that one here; `tracker_reader` renames it. See `weights`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .configuration import PromptConfig, Sam1Config, Sam1Vision, side
from .weights import MAP_EPS, Frequencies, MaskEmbedding, Perceptron, Sam1DecoderWeights, make_table


class Sam1Weights(nn.Module):
    """All weights."""

    def __init__(self, config: Sam1Config) -> None:
        super().__init__()
        self.config = config
        self.shared_image_embedding = Frequencies(2 * config.vision_config.num_pos_feats)
        self.vision_encoder = Sam1Encoding(config.vision_config)
        self.prompt_encoder = Sam1PromptWeights(config.prompt_encoder_config)
        self.mask_decoder = Sam1DecoderWeights(config.mask_decoder_config)


class Sam1Encoding(nn.Module):
    """The image encoder: a ViT whose attention adds relative positions to its scores."""

    pos_embed: nn.Parameter | None

    def __init__(self, config: Sam1Vision) -> None:
        super().__init__()
        self.config = config
        grid = config.grid
        self.pos_embed = (
            nn.Parameter(torch.zeros(1, grid, grid, config.hidden_size)) if config.use_abs_pos else None
        )
        self.patch_embed = nn.Module()
        self.patch_embed.projection = nn.Conv2d(3, config.hidden_size, config.patch_size, config.patch_size)
        self.layers = nn.ModuleList(
            Sam1LayerWeights(config, 0 if number in config.global_attn_indexes else config.window_size)
            for number in range(config.num_hidden_layers)
        )
        self.neck = Sam1Neck(config)


class Sam1LayerWeights(nn.Module):
    """A layer, which attends within windows of `window_size` tokens; 0 for the whole image."""

    def __init__(self, config: Sam1Vision, window_size: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.window_size = window_size
        self.layer_norm1 = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.attn = nn.Module()
        self.attn.num_attention_heads = config.num_attention_heads  # type: ignore[assignment]
        self.attn.use_rel_pos = config.use_rel_pos  # type: ignore[assignment]
        self.attn.qkv = nn.Linear(width, 3 * width, config.qkv_bias)
        self.attn.proj = nn.Linear(width, width)
        if config.use_rel_pos:
            positions = 2 * (window_size or config.grid) - 1
            for name in ("rel_pos_h", "rel_pos_w"):
                table = nn.Parameter(torch.zeros(positions, width // config.num_attention_heads))
                self.attn.register_parameter(name, table)
        self.layer_norm2 = nn.LayerNorm(width, eps=config.layer_norm_eps)
        assert config.mlp_dim is not None, "set by the configuration"
        self.mlp = Perceptron(width, config.mlp_dim, width, 2, config.hidden_act)


class Sam1Neck(nn.Module):
    """Two convolutions with norms over channels."""

    def __init__(self, config: Sam1Vision) -> None:
        super().__init__()
        channels = config.output_channels
        self.conv1 = nn.Conv2d(config.hidden_size, channels, 1, bias=False)
        self.layer_norm1 = nn.LayerNorm(channels, eps=MAP_EPS)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.layer_norm2 = nn.LayerNorm(channels, eps=MAP_EPS)

    def forward(self, x: Tensor) -> Tensor:
        """Turn tokens [B, h, w, D] into a map [B, C, h, w]."""
        for convolution, norm in ((self.conv1, self.layer_norm1), (self.conv2, self.layer_norm2)):
            x = norm(convolution(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))
        return x.permute(0, 3, 1, 2)


class Sam1PromptWeights(nn.Module):
    """The prompt encoder. Its frequencies are those of the image."""

    def __init__(self, config: PromptConfig) -> None:
        super().__init__()
        self.input_image_size = side(config.image_size)
        grid = self.input_image_size // side(config.patch_size)
        self.image_embedding_size = (grid, grid)
        self.mask_embed = MaskEmbedding(config)
        self.no_mask_embed = make_table(1, config.hidden_size)
        self.point_embed = nn.ModuleList(
            make_table(1, config.hidden_size) for _ in range(config.num_point_embeddings)
        )
        self.not_a_point_embed = make_table(1, config.hidden_size)
