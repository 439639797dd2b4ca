"""The configuration of a SAM tracker, as config.json in transformers' layout holds it.

Fields have transformers' names and defaults, because a file may leave out what equals them. Other fields are ignored.
Counts and widths have bounds far above those of any published model, so that a damaged file costs no memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from ...errors import ModelError
from ...schema.fields import ABOVE_0

Count = Annotated[int, Meta(ge=1, le=256)]
Index = Annotated[int, Meta(ge=-1, le=65536)]
Width = Annotated[int, Meta(ge=1, le=65536)]
Pixels = Annotated[int, Meta(ge=1, le=16384)]
Sides = Pixels | list[Pixels]
"""For both axes, or for each. No tuple of two: msgspec 0.22 corrupts memory where one may also be a bounded number."""
Maps = tuple[tuple[Pixels, Pixels], tuple[Pixels, Pixels], tuple[Pixels, Pixels]]
"""Heights and widths of the three levels of features, the finest first."""
Epsilon = Annotated[float, Meta(ge=ABOVE_0, le=1)]
Factor = Annotated[float, Meta(ge=ABOVE_0, le=64)]
Activation = Literal["gelu", "relu"]

ROPE_THETA = 10000.0
"""Longest period of rotary positions, of all published weights."""
SCALES = (4.0, 2.0, 1.0, 0.5)
"""Sides of the levels of SAM 3's pyramid in grids of the encoder."""


class Rope(Struct, frozen=True):
    """Rotary positions."""

    rope_theta: float = ROPE_THETA
    rope_type: str = "axial"

    def __post_init__(self) -> None:
        if (self.rope_theta, self.rope_type) != (ROPE_THETA, "axial"):
            raise ValueError(
                f"expected axial positions with a theta of {ROPE_THETA:g}, found {self.rope_type} with "
                f"{self.rope_theta:g}"
            )


class HieraConfig(Struct):
    """SAM 2's image encoder (arXiv 2306.00989)."""

    model_type: Literal["sam2_hiera_det_model"] = "sam2_hiera_det_model"
    hidden_size: Width = 96
    image_size: Sides = 1024
    patch_kernel_size: Sides = 7
    patch_stride: Sides = 4
    patch_padding: Sides = 3
    query_stride: Sides = 2
    window_positional_embedding_background_size: tuple[Count, Count] = (7, 7)
    num_query_pool_stages: Annotated[int, Meta(ge=0, le=16)] = 3
    blocks_per_stage: tuple[Count, ...] = (1, 2, 7, 2)
    embed_dim_per_stage: tuple[Width, ...] = (96, 192, 384, 768)
    num_attention_heads_per_stage: tuple[Count, ...] = (1, 2, 4, 8)
    window_size_per_stage: tuple[Count, ...] = (8, 4, 14, 7)
    global_attention_blocks: tuple[Index, ...] = (5, 7, 9)
    mlp_ratio: Factor = 4.0
    hidden_act: Activation = "gelu"
    layer_norm_eps: Epsilon = 1e-6

    def __post_init__(self) -> None:
        entries = (
            self.blocks_per_stage,
            self.embed_dim_per_stage,
            self.num_attention_heads_per_stage,
            self.window_size_per_stage,
        )
        counts = {len(values) for values in entries}
        if len(counts) > 1 or counts.pop() not in range(1, 9):
            raise ValueError("expected one to eight stages, and an entry for each in all lists of stages")


class PyramidConfig(Struct):
    """The feature pyramid of SAM 2 and EdgeTAM."""

    backbone_channel_list: tuple[Width, ...] = (768, 384, 192, 96)
    backbone_feature_sizes: Maps = ((256, 256), (128, 128), (64, 64))
    fpn_hidden_size: Width = 256
    fpn_top_down_levels: tuple[Index, ...] = (2, 3)


class Sam2Vision(PyramidConfig):
    """SAM 2's image encoder with its pyramid."""

    model_type: Literal["sam2_vision_model"] = "sam2_vision_model"
    backbone_config: HieraConfig = field(default_factory=HieraConfig)

    def __post_init__(self) -> None:
        if len(self.backbone_channel_list) != len(self.backbone_config.blocks_per_stage):
            raise ValueError("backbone_channel_list: expected an entry for each stage of the backbone")


class RepVitSizes(Struct, forbid_unknown_fields=True):
    """The arguments with which timm builds EdgeTAM's RepViT. With others, it would be another network."""

    in_chans: Literal[3] = 3
    features_only: bool = True
    out_indices: tuple[Index, Index, Index, Index] = (0, 1, 2, 3)
    embed_dim: tuple[Width, Width, Width, Width] = (48, 96, 192, 384)
    depth: tuple[Count, Count, Count, Count] = (2, 2, 14, 2)

    def __post_init__(self) -> None:
        if not self.features_only or self.out_indices != (0, 1, 2, 3):
            raise ValueError("expected features_only, and out_indices of all four stages")


class RepVitConfig(Struct):
    """EdgeTAM's image encoder, timm's `repvit_m1` (arXiv 2307.09283)."""

    model_type: Literal["timm_wrapper"] = "timm_wrapper"
    architecture: Annotated[str, Meta(max_length=256)] = "repvit_m1"
    model_args: RepVitSizes = field(default_factory=RepVitSizes)

    def __post_init__(self) -> None:
        # a name of timm may end in a tag of the weights, after a dot
        if self.architecture.split(".")[0] != "repvit_m1":
            raise ValueError(f"expected the architecture repvit_m1, found {self.architecture}")


class EdgeTamVision(PyramidConfig):
    """EdgeTAM's image encoder with its pyramid."""

    model_type: Literal["edgetam_vision_model"] = "edgetam_vision_model"
    backbone_config: RepVitConfig = field(default_factory=RepVitConfig)
    backbone_channel_list: tuple[Width, ...] = (384, 192, 96, 48)

    def __post_init__(self) -> None:
        if self.backbone_channel_list != self.backbone_config.model_args.embed_dim[::-1]:
            raise ValueError(
                "backbone_channel_list: expected embed_dim of the backbone, the last stage first"
            )


class Sam1Vision(Struct):
    """SAM 1's image encoder (arXiv 2304.02643)."""

    model_type: Literal["sam_vision_model"] = "sam_vision_model"
    hidden_size: Width = 768
    output_channels: Width = 256
    num_hidden_layers: Count = 12
    num_attention_heads: Count = 12
    num_channels: Literal[3] = 3
    image_size: Pixels = 1024
    patch_size: Pixels = 16
    hidden_act: Activation = "gelu"
    layer_norm_eps: Epsilon = 1e-6
    qkv_bias: bool = True
    mlp_ratio: Factor = 4.0
    use_abs_pos: bool = True
    use_rel_pos: bool = True
    window_size: Count = 14
    global_attn_indexes: tuple[Index, ...] = (2, 5, 8, 11)
    num_pos_feats: Width = 128
    mlp_dim: Width | None = None
    """None for `mlp_ratio` of the width"""

    def __post_init__(self) -> None:
        if self.mlp_dim is None:
            self.mlp_dim = int(self.hidden_size * self.mlp_ratio)

    @property
    def grid(self) -> int:
        """Number of tokens along a side of the image."""
        return self.image_size // self.patch_size


class ViTConfig(Struct):
    """SAM 3's image encoder (arXiv 2511.16719)."""

    model_type: Literal["sam3_vit_model"] = "sam3_vit_model"
    hidden_size: Width = 1024
    intermediate_size: Width = 4736
    num_hidden_layers: Count = 32
    num_attention_heads: Count = 16
    image_size: Sides = 1008
    patch_size: Sides = 14
    hidden_act: Activation = "gelu"
    layer_norm_eps: Epsilon = 1e-6
    window_size: Count = 24
    global_attn_indexes: tuple[Index, ...] = (7, 15, 23, 31)
    pretrain_image_size: Sides = 336
    rope_parameters: Rope = Rope()


class Sam3Vision(Struct):
    """SAM 3's image encoder with its pyramid."""

    model_type: Literal["sam3_vision_model"] = "sam3_vision_model"
    backbone_config: ViTConfig = field(default_factory=ViTConfig)
    backbone_feature_sizes: Maps = ((288, 288), (144, 144), (72, 72))
    fpn_hidden_size: Width = 256
    scale_factors: tuple[float, ...] = SCALES

    def __post_init__(self) -> None:
        if self.scale_factors not in (SCALES, SCALES[:3]):
            raise ValueError(f"scale_factors: expected {SCALES}, with or without the last")


class PromptConfig(Struct):
    """The prompt encoder."""

    hidden_size: Width = 256
    image_size: Sides = 1024
    patch_size: Sides = 16
    mask_input_channels: Annotated[int, Meta(ge=4, le=1024, multiple_of=4)] = 16
    num_point_embeddings: Literal[4] = 4
    hidden_act: Activation = "gelu"
    layer_norm_eps: Epsilon = 1e-6


class Sam3PromptConfig(PromptConfig):
    """The prompt encoder of SAM 3."""

    image_size: Sides = 1008
    patch_size: Sides = 14


class TwoWayConfig(Struct):
    """What the mask decoders have in common."""

    hidden_size: Annotated[int, Meta(ge=8, le=65536, multiple_of=8)] = 256
    mlp_dim: Width = 2048
    num_hidden_layers: Count = 2
    num_attention_heads: Count = 8
    attention_downsample_rate: Count = 2
    num_multimask_outputs: Count = 3
    iou_head_depth: Annotated[int, Meta(ge=2, le=16)] = 3
    iou_head_hidden_dim: Width = 256


class DecoderConfig(TwoWayConfig):
    """The mask decoder of SAM 2, SAM 3 and EdgeTAM."""

    dynamic_multimask_via_stability: bool = True
    dynamic_multimask_stability_delta: float = 0.05
    dynamic_multimask_stability_thresh: float = 0.98


class Sam1DecoderConfig(TwoWayConfig):
    """The mask decoder of SAM 1."""

    hidden_act: Activation = "relu"
    layer_norm_eps: Epsilon = 1e-6


class TrackerConfig(Struct):
    """What SAM 2, SAM 3 and EdgeTAM have in common."""

    model_type: str = ""
    prompt_encoder_config: PromptConfig = field(default_factory=PromptConfig)
    mask_decoder_config: DecoderConfig = field(default_factory=DecoderConfig)
    num_maskmem: Count = 7
    sigmoid_scale_for_mem_enc: float = 20.0
    sigmoid_bias_for_mem_enc: float = -10.0
    enable_occlusion_spatial_embedding: bool = True
    multimask_output_in_sam: bool = True
    multimask_min_pt_num: Annotated[int, Meta(ge=0, le=1024)] = 0
    multimask_max_pt_num: Annotated[int, Meta(ge=0, le=1024)] = 1
    multimask_output_for_tracking: bool = True
    max_object_pointers_in_encoder: Annotated[int, Meta(ge=2, le=256)] = 16
    max_cond_frame_num: Annotated[int, Meta(ge=-1, le=256)] = -1
    enable_temporal_pos_encoding_for_object_pointers: bool = True
    memory_attention_hidden_size: Width = 256
    memory_attention_num_layers: Count = 4
    memory_attention_num_attention_heads: Literal[1] = 1
    memory_attention_downsample_rate: Literal[1] = 1
    memory_attention_feed_forward_hidden_size: Width = 2048
    memory_attention_feed_forward_hidden_act: Activation = "relu"
    memory_encoder_hidden_size: Width = 256
    memory_encoder_output_channels: Width = 64
    mask_downsampler_embed_dim: Width = 256
    mask_downsampler_kernel_size: Count = 3
    mask_downsampler_stride: Annotated[int, Meta(ge=2, le=16)] = 2
    mask_downsampler_padding: Annotated[int, Meta(ge=0, le=16)] = 1
    mask_downsampler_total_stride: Annotated[int, Meta(ge=2, le=256)] = 16
    mask_downsampler_hidden_act: Activation = "gelu"
    memory_fuser_num_layers: Annotated[int, Meta(ge=0, le=256)] = 2
    memory_fuser_embed_dim: Width = 256
    memory_fuser_intermediate_dim: Width = 1024
    memory_fuser_kernel_size: Count = 7
    memory_fuser_padding: Annotated[int, Meta(ge=0, le=64)] = 3
    memory_fuser_hidden_act: Activation = "gelu"
    rope_parameters: Rope = Rope()


class Sam2Config(TrackerConfig):
    """SAM 2."""

    vision_config: Sam2Vision = field(default_factory=Sam2Vision)
    image_size: Pixels = 1024


class EdgeTamConfig(TrackerConfig):
    """EdgeTAM."""

    vision_config: EdgeTamVision = field(default_factory=EdgeTamVision)
    image_size: Pixels = 1024
    memory_attention_num_layers: Count = 2
    memory_attention_feed_forward_hidden_size: Width = field(
        default=2048, name="memory_attention_mlp_hidden_size"
    )
    memory_attention_feed_forward_hidden_act: Activation = field(
        default="relu", name="memory_attention_mlp_hidden_act"
    )
    memory_attention_rope_k_sizes: tuple[Count, Count] = (16, 16)
    perceiver_resampler_num_latents: Annotated[int, Meta(ge=1, le=65536)] = 256
    perceiver_resampler_num_latents_2d: Annotated[int, Meta(ge=1, le=65536)] = 256
    perceiver_resampler_hidden_size: Width = 64
    perceiver_resampler_mlp_intermediate_size: Width = 256
    perceiver_resampler_num_attention_heads: Literal[1] = 1
    perceiver_resampler_attention_head_dim: Width = 64
    perceiver_resampler_num_layers: Count = 2

    def __post_init__(self) -> None:
        latents = self.perceiver_resampler_num_latents_2d
        windows = math.isqrt(latents)
        if windows**2 != latents or self.memory_attention_rope_k_sizes != (windows, windows):
            raise ValueError(
                "expected memory_attention_rope_k_sizes of a square with perceiver_resampler_num_latents_2d cells, "
                f"found {self.memory_attention_rope_k_sizes} and {latents}"
            )
        if self.perceiver_resampler_hidden_size != self.memory_encoder_output_channels:
            raise ValueError("perceiver_resampler_hidden_size: expected memory_encoder_output_channels")


class Sam3Config(TrackerConfig):
    """SAM 3's tracker."""

    vision_config: Sam3Vision = field(default_factory=Sam3Vision)
    prompt_encoder_config: Sam3PromptConfig = field(default_factory=Sam3PromptConfig)
    image_size: Pixels = 1008
    max_cond_frame_num: Annotated[int, Meta(ge=-1, le=256)] = 4
    tracker_config: Sam3Config | None = None
    """The tracker's part, where the file also holds a detector"""

    def __post_init__(self) -> None:
        # one number sets the size of all parts, as in transformers
        set_grids(self, self.image_size)
        self.vision_config.backbone_config.image_size = self.image_size


class Sam1Config(Struct):
    """SAM 1, for single images."""

    model_type: str = ""
    vision_config: Sam1Vision = field(default_factory=Sam1Vision)
    prompt_encoder_config: PromptConfig = field(default_factory=PromptConfig)
    mask_decoder_config: Sam1DecoderConfig = field(default_factory=Sam1DecoderConfig)

    def __post_init__(self) -> None:
        prompts = self.prompt_encoder_config
        sizes = (self.vision_config.image_size, self.vision_config.patch_size)
        if sizes != (side(prompts.image_size), side(prompts.patch_size)):
            raise ValueError(
                "expected the same image_size and patch_size in vision_config and prompt_encoder_config"
            )


AnyConfig = Sam2Config | Sam3Config | EdgeTamConfig
"""The configuration of a tracker with memory modules."""


def set_grids(config: Any, size: int) -> None:
    """Set the image size in pixels of all parts of a configuration, ours or transformers'.

    Raises ModelError for patches that are no squares.
    """
    vision = config.vision_config
    prompts = config.prompt_encoder_config
    grid = size // side(prompts.patch_size)
    config.image_size = size
    prompts.image_size = size
    vision.backbone_feature_sizes = [[scale * grid] * 2 for scale in (4, 2, 1)]


def side(size: int | Sequence[int]) -> int:
    """Return a configured size. It may be given for both axes; ModelError unless both are equal."""
    if isinstance(size, int):
        return size
    if len(set(size)) != 1:
        raise ModelError(f"image and patch size: expected squares, found {list(size)}")
    return size[0]
