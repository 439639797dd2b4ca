"""The weights of a tracker as torch modules, whose tensors have the names of transformers' layout.

The stages take their weights from here. What they compute themselves has no `forward`; prompts and perceptrons, which
they use as they are, have one that equals transformers'. No tables of positions are kept: the stages make them. Modules
stand in transformers' order, because random weights are drawn in it.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .algebra import embed_positions
from .configuration import (
    AnyConfig,
    DecoderConfig,
    EdgeTamConfig,
    EdgeTamVision,
    HieraConfig,
    PromptConfig,
    PyramidConfig,
    Sam1DecoderConfig,
    Sam2Vision,
    Sam3Vision,
    TrackerConfig,
    TwoWayConfig,
    ViTConfig,
    side,
)
from .repvit import RepVit

ACTIVATIONS: dict[str, type[nn.Module]] = {"gelu": nn.GELU, "relu": nn.ReLU}
MAP_EPS = 1e-6
"""Added to the variance by the norms of maps."""
TOKEN_EPS = 1e-5
"""Added to the variance by the norms of the decoder's tokens, but for SAM 1."""
NO_POINT = -1
"""Label of a position without a point."""


class TrackerWeights(nn.Module):
    """All weights of a tracker."""

    config: AnyConfig
    occlusion_spatial_embedding_parameter: nn.Parameter | None

    def __init__(self, config: AnyConfig) -> None:
        super().__init__()
        self.config = config
        vision = config.vision_config
        hidden = vision.fpn_hidden_size
        channels = config.memory_encoder_output_channels
        self.hidden_dim = hidden
        self.mem_dim = channels
        self.num_maskmem = config.num_maskmem
        self.backbone_feature_sizes = vision.backbone_feature_sizes
        self.shared_image_embedding = Frequencies(hidden)
        self.vision_encoder = make_encoding(vision)
        self.prompt_encoder = PromptEncoder(config.prompt_encoder_config)
        self.mask_decoder = DecoderWeights(config.mask_decoder_config)
        self.no_memory_embedding = nn.Parameter(torch.zeros(1, 1, hidden))
        self.memory_attention = MemoryAttentionWeights(config)
        self.memory_encoder = MemoryEncoderWeights(config)
        self.no_memory_positional_encoding = nn.Parameter(torch.zeros(1, 1, hidden))
        self.memory_temporal_positional_encoding = nn.Parameter(
            torch.zeros(config.num_maskmem, 1, 1, channels)
        )
        self.no_object_pointer = nn.Parameter(torch.zeros(1, hidden))
        self.mask_downsample = nn.Conv2d(1, 1, 4, stride=4)
        self.object_pointer_proj = Perceptron(hidden, hidden, hidden, 3)
        self.temporal_positional_encoding_projection_layer = (
            nn.Linear(hidden, channels)
            if config.enable_temporal_pos_encoding_for_object_pointers
            else nn.Identity()
        )
        self.occlusion_spatial_embedding_parameter = (
            nn.Parameter(torch.zeros(1, channels)) if config.enable_occlusion_spatial_embedding else None
        )
        if isinstance(config, EdgeTamConfig):
            self.spatial_perceiver = PerceiverWeights(config)


class Frequencies(nn.Module):
    """Random frequencies that encode places of an image [2, C / 2]. A cast of the model leaves them in float32."""

    positional_embedding: Tensor

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.register_buffer("positional_embedding", torch.zeros(2, hidden // 2))


def make_table(rows: int, hidden: int) -> nn.Embedding:
    """Return a table of zeros: torch's own start values would import the compiler, which takes a second."""
    return nn.Embedding.from_pretrained(torch.zeros(rows, hidden))


class Perceptron(nn.Module):
    """Linear maps with an activation between them, which `layers` counts; then a sigmoid if asked for."""

    def __init__(
        self,
        inputs: int,
        hidden: int,
        outputs: int,
        layers: int,
        activation: str = "relu",
        sigmoid_output: bool = False,
    ) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]()
        self.proj_in = nn.Linear(inputs, hidden)
        self.proj_out = nn.Linear(hidden, outputs)
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers - 2))
        self.sigmoid_output = sigmoid_output

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., inputs] to [..., outputs]."""
        x = self.activation(self.proj_in(x))
        for layer in self.layers:
            x = self.activation(layer(x))
        x = self.proj_out(x)
        return x.sigmoid() if self.sigmoid_output else x


class AttentionWeights(nn.Module):
    """Projections of an attention; `width` channels inside, `sources` channels of keys and values."""

    def __init__(
        self, hidden: int, width: int, heads: int = 1, sources: int | None = None, bias: bool = True
    ) -> None:
        super().__init__()
        self.num_attention_heads = heads
        self.q_proj = nn.Linear(hidden, width, bias)
        self.k_proj = nn.Linear(sources or hidden, width, bias)
        self.v_proj = nn.Linear(sources or hidden, width, bias)
        self.o_proj = nn.Linear(width, hidden, bias)


def make_encoding(config: Sam2Vision | Sam3Vision | EdgeTamVision) -> nn.Module:
    """Return the weights of an image encoder."""
    if isinstance(config, Sam2Vision):
        return Sam2Encoding(config)
    return EdgeTamEncoding(config) if isinstance(config, EdgeTamVision) else Sam3Encoding(config)


class Sam2Encoding(nn.Module):
    """SAM 2's image encoder: `Hiera` and its pyramid."""

    def __init__(self, config: Sam2Vision) -> None:
        super().__init__()
        self.backbone = HieraWeights(config.backbone_config)
        self.neck = PyramidWeights(config)


class EdgeTamEncoding(nn.Module):
    """EdgeTAM's image encoder: `RepVit` and the pyramid of SAM 2."""

    def __init__(self, config: EdgeTamVision) -> None:
        super().__init__()
        sizes = config.backbone_config.model_args
        self.backbone = nn.Module()
        self.backbone.timm_model = RepVit(sizes.embed_dim, sizes.depth)
        self.neck = PyramidWeights(config)


class PyramidWeights(nn.Module):
    """The pyramid of SAM 2: a 1x1 convolution for each stage of the backbone, the last stage first."""

    def __init__(self, config: PyramidConfig) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(channels, config.fpn_hidden_size, 1) for channels in config.backbone_channel_list
        )
        self.fpn_top_down_levels = config.fpn_top_down_levels


class HieraWeights(nn.Module):
    """The backbone of SAM 2. Tokens of 7x7 overlapping patches; each stage halves both sides, except the first."""

    def __init__(self, config: HieraConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        window = config.window_size_per_stage[0]
        self.patch_embed = nn.Module()
        self.patch_embed.projection = nn.Conv2d(
            3, width, side(config.patch_kernel_size), side(config.patch_stride), side(config.patch_padding)
        )
        self.pos_embed = nn.Parameter(
            torch.zeros(1, width, *config.window_positional_embedding_background_size)
        )
        self.pos_embed_window = nn.Parameter(torch.zeros(1, width, window, window))
        self.blocks = nn.ModuleList()
        self.stage_ends = []
        for stage, count in enumerate(config.blocks_per_stage):
            for index in range(count):
                self.blocks.append(HieraBlockWeights(config, stage, index == 0, len(self.blocks)))
            self.stage_ends.append(len(self.blocks) - 1)


class HieraBlockWeights(nn.Module):
    """A block of `HieraWeights`. The first one of a stage still has the window of the stage before."""

    def __init__(self, config: HieraConfig, stage: int, is_first: bool, number: int) -> None:
        super().__init__()
        before = stage - 1 if stage and is_first else stage
        self.dim = config.embed_dim_per_stage[before]
        self.dim_out = config.embed_dim_per_stage[stage]
        is_global = number in config.global_attention_blocks
        self.window_size = 0 if is_global else config.window_size_per_stage[before]
        pools = is_first and 0 < stage <= config.num_query_pool_stages
        self.query_stride = config.query_stride if pools else None
        self.layer_norm1 = nn.LayerNorm(self.dim, eps=config.layer_norm_eps)
        self.attn = nn.Module()
        self.attn.num_attention_heads = config.num_attention_heads_per_stage[stage]  # type: ignore[assignment]
        self.attn.qkv = nn.Linear(self.dim, 3 * self.dim_out)
        self.attn.proj = nn.Linear(self.dim_out, self.dim_out)
        self.layer_norm2 = nn.LayerNorm(self.dim_out, eps=config.layer_norm_eps)
        inner = int(self.dim_out * config.mlp_ratio)
        self.mlp = Perceptron(self.dim_out, inner, self.dim_out, 2, config.hidden_act)
        if self.dim != self.dim_out:
            self.proj = nn.Linear(self.dim, self.dim_out)


class Sam3Encoding(nn.Module):
    """SAM 3's image encoder: a plain ViT and its pyramid."""

    def __init__(self, config: Sam3Vision) -> None:
        super().__init__()
        self.backbone = ViTWeights(config.backbone_config)
        self.neck = nn.Module()
        self.neck.fpn_layers = nn.ModuleList(
            PyramidLevel(config.backbone_config.hidden_size, config.fpn_hidden_size, scale)
            for scale in config.scale_factors
        )


class ViTWeights(nn.Module):
    """The backbone of SAM 3. Its position map covers fewer tokens than the image and is tiled over it."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        patch = side(config.patch_size)
        tiles = (side(config.pretrain_image_size) // patch) ** 2
        self.embeddings = nn.Module()
        self.embeddings.patch_embeddings = nn.Module()
        self.embeddings.patch_embeddings.projection = nn.Conv2d(
            3, config.hidden_size, patch, stride=patch, bias=False
        )
        self.embeddings.position_embeddings = nn.Parameter(torch.zeros(1, tiles, config.hidden_size))
        self.layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.layers = nn.ModuleList(
            ViTLayerWeights(config, 0 if number in config.global_attn_indexes else config.window_size)
            for number in range(config.num_hidden_layers)
        )


class ViTLayerWeights(nn.Module):
    """A layer of `ViTWeights`, which attends within windows of `window_size` tokens; 0 for the whole image."""

    def __init__(self, config: ViTConfig, window_size: int) -> None:
        super().__init__()
        width = config.hidden_size
        self.window_size = window_size
        self.layer_norm1 = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.attention = AttentionWeights(width, width, config.num_attention_heads)
        self.layer_norm2 = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.mlp = nn.Module()
        self.mlp.fc1 = nn.Linear(width, config.intermediate_size)
        self.mlp.activation_fn = ACTIVATIONS[config.hidden_act]()
        self.mlp.fc2 = nn.Linear(config.intermediate_size, width)


class PyramidLevel(nn.Module):
    """A level of SAM 3's pyramid, whose side is `scale` times that of the encoder's grid."""

    def __init__(self, width: int, hidden: int, scale: float) -> None:
        super().__init__()
        self.scale_layers = nn.ModuleList()
        if scale == 0.5:
            self.scale_layers.append(nn.MaxPool2d(2, 2))
        for step in range(int(math.log2(max(1.0, scale)))):
            if step:
                self.scale_layers.append(nn.GELU())
            self.scale_layers.append(nn.ConvTranspose2d(width, width // 2, 2, stride=2))
            width //= 2
        self.proj1 = nn.Conv2d(width, hidden, 1)
        self.proj2 = nn.Conv2d(hidden, hidden, 3, padding=1)


class PromptEncoder(nn.Module):
    """Embeds points, corners of boxes, and masks (arXiv 2304.02643)."""

    def __init__(self, config: PromptConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.input_image_size = side(config.image_size)
        grid = self.input_image_size // side(config.patch_size)
        self.image_embedding_size = (grid, grid)
        self.mask_input_size = (4 * grid, 4 * grid)
        self.shared_embedding = Frequencies(hidden)
        self.mask_embed = MaskEmbedding(config)
        self.no_mask_embed = make_table(1, hidden)
        self.point_embed = make_table(config.num_point_embeddings, hidden)
        self.not_a_point_embed = make_table(1, hidden)

    def forward(self, points: Tensor, labels: Tensor, boxes: None, masks: None) -> tuple[Tensor, None]:
        """Embed points [1, N, n, 2] in model pixels with labels [1, N, n], as [1, N, n + 1, C].

        Labels are 1 inside, 0 outside, 2 and 3 for corners of a box, `NO_POINT` for none; one of these is added.
        """
        points = F.pad(points + 0.5, (0, 0, 0, 1))  # to the centres of pixels
        labels = F.pad(labels, (0, 1), value=NO_POINT)[..., None]
        places = points / self.input_image_size
        embedded = embed_positions(self.shared_embedding.positional_embedding, places)
        embedded = torch.where(labels == NO_POINT, self.not_a_point_embed.weight, embedded)
        kinds = self.point_embed(labels[..., 0].clamp(min=0))
        return embedded + kinds * (labels >= 0), None


class MaskEmbedding(nn.Module):
    """Embeds logits of masks, at a quarter of their size."""

    def __init__(self, config: PromptConfig) -> None:
        super().__init__()
        channels = config.mask_input_channels
        self.activation = ACTIVATIONS[config.hidden_act]()
        self.conv1 = nn.Conv2d(1, channels // 4, 2, stride=2)
        self.conv2 = nn.Conv2d(channels // 4, channels, 2, stride=2)
        self.conv3 = nn.Conv2d(channels, config.hidden_size, 1)
        self.layer_norm1 = nn.LayerNorm(channels // 4, eps=config.layer_norm_eps)
        self.layer_norm2 = nn.LayerNorm(channels, eps=config.layer_norm_eps)

    def forward(self, masks: Tensor) -> Tensor:
        """Embed logits [N, 1, 4h, 4w] as [N, C, h, w]."""
        for convolution, norm in ((self.conv1, self.layer_norm1), (self.conv2, self.layer_norm2)):
            # norms are over channels
            masks = self.activation(norm(convolution(masks).permute(0, 2, 3, 1)).permute(0, 3, 1, 2))
        return self.conv3(masks)


class Sam1DecoderWeights(nn.Module):
    """The mask decoder of SAM 1, and what those of its successors have in common with it."""

    def __init__(self, config: TwoWayConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.num_mask_tokens = config.num_multimask_outputs + 1
        self.iou_token = make_table(1, hidden)
        self.mask_tokens = make_table(self.num_mask_tokens, hidden)
        narrow = hidden // config.attention_downsample_rate
        heads = config.num_attention_heads
        self.transformer = nn.Module()
        self.transformer.layers = nn.ModuleList(
            TwoWayWeights(config, is_first=number == 0) for number in range(config.num_hidden_layers)
        )
        self.transformer.final_attn_token_to_image = AttentionWeights(hidden, narrow, heads)
        self.transformer.layer_norm_final_attn = nn.LayerNorm(hidden)
        self.upscale_conv1 = nn.ConvTranspose2d(hidden, hidden // 4, 2, stride=2)
        self.upscale_conv2 = nn.ConvTranspose2d(hidden // 4, hidden // 8, 2, stride=2)
        self.upscale_layer_norm = nn.LayerNorm(hidden // 4, eps=MAP_EPS)
        self.activation = nn.GELU()
        self.output_hypernetworks_mlps = nn.ModuleList(
            Perceptron(hidden, hidden, hidden // 8, 3) for _ in range(self.num_mask_tokens)
        )
        self.iou_prediction_head = Perceptron(
            hidden,
            config.iou_head_hidden_dim,
            self.num_mask_tokens,
            config.iou_head_depth,
            sigmoid_output=not isinstance(config, Sam1DecoderConfig),
        )


class DecoderWeights(Sam1DecoderWeights):
    """The mask decoder of SAM 2, SAM 3 and EdgeTAM."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        self.dynamic_multimask_via_stability = config.dynamic_multimask_via_stability
        self.dynamic_multimask_stability_delta = config.dynamic_multimask_stability_delta
        self.dynamic_multimask_stability_thresh = config.dynamic_multimask_stability_thresh
        self.conv_s0 = nn.Conv2d(hidden, hidden // 8, 1)
        self.conv_s1 = nn.Conv2d(hidden, hidden // 4, 1)
        self.obj_score_token = make_table(1, hidden)
        self.pred_obj_score_head = Perceptron(hidden, hidden, 1, 3)


class TwoWayWeights(nn.Module):
    """A layer of the mask decoder. The first one adds no positions to the tokens."""

    def __init__(self, config: TwoWayConfig, is_first: bool) -> None:
        super().__init__()
        hidden = config.hidden_size
        heads = config.num_attention_heads
        narrow = hidden // config.attention_downsample_rate
        eps = TOKEN_EPS
        activation = "relu"
        # the reference of all but SAM 1 takes the number of layers of the decoder for that of the perceptron
        depth = config.num_hidden_layers
        if isinstance(config, Sam1DecoderConfig):
            eps = config.layer_norm_eps
            activation = config.hidden_act
            depth = 2
        self.skip_first_layer_pe = is_first
        self.self_attn = AttentionWeights(hidden, hidden, heads)
        self.layer_norm1 = nn.LayerNorm(hidden, eps=eps)
        self.cross_attn_token_to_image = AttentionWeights(hidden, narrow, heads)
        self.layer_norm2 = nn.LayerNorm(hidden, eps=eps)
        self.mlp = Perceptron(hidden, config.mlp_dim, hidden, depth, activation)
        self.layer_norm3 = nn.LayerNorm(hidden, eps=eps)
        self.layer_norm4 = nn.LayerNorm(hidden, eps=eps)
        self.cross_attn_image_to_token = AttentionWeights(hidden, narrow, heads)


class MemoryAttentionWeights(nn.Module):
    """Memory attention."""

    def __init__(self, config: TrackerConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            MemoryLayerWeights(config) for _ in range(config.memory_attention_num_layers)
        )
        self.layer_norm = nn.LayerNorm(config.memory_attention_hidden_size)


class MemoryLayerWeights(nn.Module):
    """A layer of memory attention."""

    def __init__(self, config: TrackerConfig) -> None:
        super().__init__()
        hidden = config.memory_attention_hidden_size
        inner = config.memory_attention_feed_forward_hidden_size
        self.self_attn = AttentionWeights(hidden, hidden)
        self.cross_attn_image = AttentionWeights(
            hidden, hidden, sources=config.memory_encoder_output_channels
        )
        activation = ACTIVATIONS[config.memory_attention_feed_forward_hidden_act]()
        if isinstance(config, EdgeTamConfig):
            self.mlp = nn.Module()
            self.mlp.up_proj = nn.Linear(hidden, inner)
            self.mlp.down_proj = nn.Linear(inner, hidden)
            self.mlp.act_fn = activation
        else:
            self.linear1 = nn.Linear(hidden, inner)
            self.activation = activation
            self.linear2 = nn.Linear(inner, hidden)
        self.layer_norm1 = nn.LayerNorm(hidden)
        self.layer_norm2 = nn.LayerNorm(hidden)
        self.layer_norm3 = nn.LayerNorm(hidden)


class MemoryEncoderWeights(nn.Module):
    """The memory encoder."""

    def __init__(self, config: TrackerConfig) -> None:
        super().__init__()
        hidden = config.memory_encoder_hidden_size
        stride = config.mask_downsampler_stride
        steps = int(math.log2(config.mask_downsampler_total_stride) // math.log2(stride))
        channels = [stride ** (2 * step) for step in range(steps + 1)]
        self.mask_downsampler = nn.Module()
        self.mask_downsampler.layers = nn.ModuleList(
            MaskDownsampleWeights(config, before, after) for before, after in pairwise(channels)
        )
        self.mask_downsampler.final_conv = nn.Conv2d(channels[-1], config.mask_downsampler_embed_dim, 1)
        self.feature_projection = nn.Conv2d(hidden, hidden, 1)
        self.memory_fuser = nn.Module()
        self.memory_fuser.layers = nn.ModuleList(
            FuserWeights(config) for _ in range(config.memory_fuser_num_layers)
        )
        self.projection = nn.Conv2d(hidden, config.memory_encoder_output_channels, 1)


class MaskDownsampleWeights(nn.Module):
    """A step of the mask's downsampling."""

    def __init__(self, config: TrackerConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(
            inputs,
            outputs,
            config.mask_downsampler_kernel_size,
            config.mask_downsampler_stride,
            config.mask_downsampler_padding,
        )
        self.layer_norm = nn.LayerNorm(outputs, eps=MAP_EPS)
        self.activation = ACTIVATIONS[config.mask_downsampler_hidden_act]()


class FuserWeights(nn.Module):
    """A ConvNeXt block of the memory encoder."""

    def __init__(self, config: TrackerConfig) -> None:
        super().__init__()
        width = config.memory_fuser_embed_dim
        inner = config.memory_fuser_intermediate_dim
        kernel = config.memory_fuser_kernel_size
        self.depthwise_conv = nn.Conv2d(
            width, width, kernel, padding=config.memory_fuser_padding, groups=width
        )
        self.layer_norm = nn.LayerNorm(width, eps=MAP_EPS)
        self.activation = ACTIVATIONS[config.memory_fuser_hidden_act]()
        self.pointwise_conv1 = nn.Linear(width, inner)
        self.pointwise_conv2 = nn.Linear(inner, width)
        self.scale = nn.Parameter(torch.zeros(width))


class PerceiverWeights(nn.Module):
    """EdgeTAM's perceiver: latents without a position, and latents of the windows of a grid."""

    def __init__(self, config: EdgeTamConfig) -> None:
        super().__init__()
        width = config.perceiver_resampler_hidden_size
        self.latents_1d = nn.Parameter(torch.zeros(config.perceiver_resampler_num_latents, width))
        self.latents_2d = nn.Parameter(torch.zeros(config.perceiver_resampler_num_latents_2d, width))
        self.layers = nn.ModuleList(
            PerceiverLayerWeights(config) for _ in range(config.perceiver_resampler_num_layers)
        )
        self.layer_norm = nn.LayerNorm(width)


class PerceiverLayerWeights(nn.Module):
    """A layer of the perceiver."""

    def __init__(self, config: EdgeTamConfig) -> None:
        super().__init__()
        width = config.perceiver_resampler_hidden_size
        inner = config.perceiver_resampler_attention_head_dim
        self.cross_attention = AttentionWeights(width, inner, bias=False)
        self.mlp = PerceiverPerceptron(config)
        self.self_attention = AttentionWeights(width, inner, bias=False)
        self.self_mlp = PerceiverPerceptron(config)
        self.layer_norm_input = nn.LayerNorm(width)
        self.layer_norm_latents = nn.LayerNorm(width)
        self.layer_norm_self = nn.LayerNorm(width)


class PerceiverPerceptron(nn.Module):
    """A norm and two linear maps of the perceiver."""

    def __init__(self, config: EdgeTamConfig) -> None:
        super().__init__()
        width = config.perceiver_resampler_hidden_size
        inner = config.perceiver_resampler_mlp_intermediate_size
        self.layer_norm = nn.LayerNorm(width)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
