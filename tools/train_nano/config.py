"""The nano tracker's shape and its first weights."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from transformers import Sam2VideoConfig, Sam2VideoModel

from sam3_node.models.sam.memory_write import MASK_BIAS, MASK_SCALE

SIZE, HIDDEN = 256, 128
STAGES = (32, 64, 128, 256)
QUIET, LOUD = 0.3, 5.0  # image features against prompts, so that prompts are heard
KEEN = 2.0  # of memory keys: how sharply the read first looks for likeness
PLAIN = 2.0  # deviation of the features that a memory read hands on, as of those without memory
SLOWEST, FASTEST = 0.125, 1.5
GENTLE = 0.1  # of residual branches and learned positions that begin as noise


def nano_config() -> Sam2VideoConfig:
    """3.7 M parameters: a Hiera of ten blocks on 256 px, 128 channels, one mask a prompt.

    At 256 px the third stage's window is the whole map, so no block needs to be marked as global. Masks enter the
    memory encoder by two patch convolutions of stride 4, which cost a fraction of four of stride 2.
    """
    return Sam2VideoConfig(
        architectures=["Sam2VideoModel"],
        image_size=SIZE,
        vision_config=_vision_config(),
        prompt_encoder_config={"hidden_size": HIDDEN, "image_size": SIZE, "patch_size": 16},
        mask_decoder_config={
            "hidden_size": HIDDEN,
            "mlp_dim": 256,
            "num_attention_heads": 4,
            "iou_head_hidden_dim": HIDDEN,
            "num_multimask_outputs": 1,
            "dynamic_multimask_via_stability": False,
        },
        multimask_output_in_sam=False,
        multimask_output_for_tracking=False,
        **_memory_config(),
    )


def _vision_config() -> dict[str, Any]:
    return {
        "backbone_config": {
            "model_type": "sam2_hiera_det_model",
            "image_size": [SIZE, SIZE],
            "hidden_size": STAGES[0],
            "embed_dim_per_stage": list(STAGES),
            "blocks_per_stage": [1, 2, 4, 2],
            "num_attention_heads": 1,
            "num_attention_heads_per_stage": [1, 2, 4, 8],
            "window_size_per_stage": [8, 4, 16, 8],
            "global_attention_blocks": [],
        },
        "backbone_channel_list": list(STAGES[::-1]),
        "backbone_feature_sizes": [[SIZE // stride] * 2 for stride in (4, 8, 16)],
        "fpn_hidden_size": HIDDEN,
    }


def _memory_config() -> dict[str, Any]:
    return {
        "memory_attention_hidden_size": HIDDEN,
        "memory_attention_num_layers": 2,
        "memory_attention_feed_forward_hidden_size": 256,
        "memory_attention_rope_feat_sizes": [SIZE // 16] * 2,
        "memory_attention_dropout": 0.0,
        "memory_attention_rope_dropout": 0.0,
        "memory_encoder_hidden_size": HIDDEN,
        "mask_downsampler_embed_dim": HIDDEN,
        "mask_downsampler_stride": 4,
        "mask_downsampler_kernel_size": 4,
        "mask_downsampler_padding": 0,
        "memory_fuser_embed_dim": HIDDEN,
        "memory_fuser_intermediate_dim": 256,
        "memory_fuser_num_layers": 1,
        "enable_temporal_pos_encoding_for_object_pointers": True,
        "enable_occlusion_spatial_embedding": True,
    }


def new_tracker(config: Sam2VideoConfig, seed: int = 0) -> Sam2VideoModel:
    """A tracker with weights to begin training from.

    Variance follows the fan-in (transformers' constant 0.02 starves a net this narrow), and the prompts' position
    matrix is the image's: transformers draws two, but a prompt and a pixel at one place must be encoded alike.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = Sam2VideoModel._from_config(config, attn_implementation="eager")
        model.apply(_initialise)
        for table in (
            model.vision_encoder.backbone.pos_embed,
            model.vision_encoder.backbone.pos_embed_window,
        ):
            nn.init.trunc_normal_(table, std=GENTLE)
        for row in (
            model.memory_temporal_positional_encoding,
            model.no_memory_embedding,
            model.no_object_pointer,
        ):
            nn.init.trunc_normal_(row, std=GENTLE)
        if model.occlusion_spatial_embedding_parameter is not None:
            nn.init.trunc_normal_(model.occlusion_spatial_embedding_parameter, std=GENTLE)
        for block in model.memory_encoder.memory_fuser.layers:
            nn.init.constant_(block.scale, GENTLE)
        for head in model.mask_decoder.output_hypernetworks_mlps:
            head.proj_out.weight.mul_(GENTLE)
        for convolution in model.vision_encoder.neck.convs:
            convolution.weight.mul_(QUIET)
        _spread_frequencies(model.shared_image_embedding.positional_embedding)
        _match_places(model.mask_decoder.transformer)
        _hear_masks(model)
        _match_memories(model)
    tie(model)
    return model


def _spread_frequencies(matrix: torch.Tensor) -> None:
    """Fourier features [2, F] from an eighth of a cycle to one and a half across half the image, half of them upright.

    transformers draws all from one Gaussian, whose features tell places apart only within a tenth of the image: from
    those, that a pixel lies between the corners of a box is hard to learn.
    """
    count = matrix.shape[1]
    frequency = torch.logspace(math.log10(SLOWEST), math.log10(FASTEST), count)
    angle = torch.rand(count) * math.pi
    angle[0::4], angle[1::4] = 0.0, math.pi / 2
    matrix.copy_(frequency * torch.stack([angle.cos(), angle.sin()]))


def _match_places(transformer: Any) -> None:
    """Begin with prompts and pixels that attend to each other where their places are alike: keys equal queries."""
    last = transformer.final_attn_token_to_image
    for layer in transformer.layers:
        for attention in (layer.cross_attn_token_to_image, layer.cross_attn_image_to_token):
            attention.k_proj.weight.copy_(attention.q_proj.weight)
    last.k_proj.weight.copy_(last.q_proj.weight)


def _match_memories(model: Any) -> None:
    """Begin with a memory read that looks for what looks alike, and disturbs the features little.

    Memories are reduced features, keys are queries of what the reduction kept, so that attention starts as similarity.
    """
    encoder, attention = model.memory_encoder, model.memory_attention
    nn.init.dirac_(encoder.feature_projection.weight)
    reduction = nn.init.orthogonal_(torch.empty(model.mem_dim, model.hidden_dim))
    encoder.projection.weight.copy_(reduction[:, :, None, None])
    encoder.mask_downsampler.final_conv.weight.mul_(LOUD)
    for layer in attention.layers:
        cross = layer.cross_attn_image
        cross.k_proj.weight.copy_(KEEN * cross.q_proj.weight @ reduction.T)
        layer.self_attn.o_proj.weight.mul_(QUIET)
        layer.linear2.weight.mul_(QUIET)
    attention.layer_norm.weight.fill_(PLAIN)


def _hear_masks(model: Sam2VideoModel) -> None:
    """Begin with mask prompts as logits of the usual size, and with an embedding of them that pixels do not drown."""
    reduce, last = model.mask_downsample, model.prompt_encoder.mask_embed.conv3
    nn.init.constant_(reduce.weight, MASK_SCALE / reduce.weight[0].numel())
    nn.init.constant_(reduce.bias, MASK_BIAS)
    last.weight.mul_(LOUD)


def tie(model: Sam2VideoModel) -> None:
    """Make the image's position matrix the prompt encoder's own."""
    shared = model.shared_image_embedding.positional_embedding
    model.prompt_encoder.shared_embedding.positional_embedding.copy_(shared)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
    elif isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        fan_in = module.weight[0].numel() if isinstance(module, nn.Conv2d) else module.in_channels
        nn.init.trunc_normal_(module.weight, std=1 / math.sqrt(fan_in))
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.5)
        return
    else:
        return
    if module.bias is not None:
        nn.init.zeros_(module.bias)
