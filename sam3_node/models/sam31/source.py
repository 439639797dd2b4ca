"""The modules of a SAM 3.1 checkpoint, under the names of their tensors in Meta's original file.

`Source` holds what the checkpoint holds and computes nothing: SAM 3's modules where it has the same part, and plain
layers elsewhere. The stages take their weights from it. `original_name` says where each tensor lies in the file.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..sam.configuration import SCALES, DecoderConfig, Sam3Config, Sam3PromptConfig, Sam3Vision, ViTConfig
from ..sam.weights import (
    DecoderWeights,
    FuserWeights,
    MaskDownsampleWeights,
    Perceptron,
    PyramidLevel,
    TrackerWeights,
    make_table,
)

HEADS = 8
"""Attention heads of the mask decoders and of memory attention. The checkpoint does not contain this number."""
VIT_EPS = 1e-5
"""Added to the variance by the ViT's norms, as in Meta's code."""
NUM_MASKMEM = 7
"""Temporal encodings of memories: one for each of the six newest frames, one for all conditioning frames."""
MAX_CONDITIONING = 4
"""Conditioning frames that a group attends to at most: the newest ones."""
MAX_POINTERS = 16
"""Object pointers that a read attends to at most."""


class ModelSizes(NamedTuple):
    """ModelSizes of a SAM 3.1 model. All can be read from its file."""

    image_size: int
    patch: int
    window: int
    """Side of a window of the ViT, in tokens."""
    global_layers: tuple[int, ...]
    """Layers of the ViT that attend to the whole image."""
    layers: int
    width: int
    """Channels of the ViT."""
    heads: int
    mlp: int
    tiles: int
    """Side of the ViT's position map, in tokens; it is tiled over the image."""
    hidden: int
    decoder_mlp: int
    decoder_rate: int
    """By how much the mask decoders narrow keys and queries."""
    slots: int
    masks: int
    """Masks of which the video decoder chooses one for each object."""
    read_layers: int
    read_mlp: int
    downsample: tuple[int, ...]
    """Channels of the mask's downsampling, from two planes a slot on."""
    fuser_layers: int
    fuser_mlp: int

    @property
    def grid(self) -> int:
        """Tokens along a side of the image."""
        return self.image_size // self.patch


class Source(nn.Module):
    """What a SAM 3.1 checkpoint holds for the tracker, with the attributes that `TrackerModel` reads."""

    tracker: TrackerWeights
    """SAM 3's parts: the ViT, the pyramid, the prompt encoder and the mask decoder of prompts. Its own memory modules
    stay unused."""
    positional_embedding: Tensor

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        config = tracker_config(sizes)
        self.sizes = sizes
        self.config = config
        hidden = sizes.hidden
        self.tracker = TrackerWeights(config)
        self.propagation = nn.ModuleList(
            PyramidLevel(sizes.width, hidden, scale) for scale in config.vision_config.scale_factors
        )
        self.video_decoder = _build_video_decoder(sizes)
        self.used_embed = nn.Parameter(torch.zeros(sizes.slots, hidden))
        self.free_embed = nn.Parameter(torch.zeros(sizes.slots, hidden))
        self.pointer_proj = Perceptron(hidden, hidden, hidden, 3)
        self.absent_pointer = nn.Linear(hidden, hidden)
        self.read = _ReadSource(sizes)
        self.memory = _MemorySource(sizes, config)
        # frequencies of the video decoder's positions; the prompts have their own
        self.positional_embedding = nn.Buffer(torch.zeros(2, hidden // 2))

    @property
    def backbone_feature_sizes(self) -> list[tuple[int, int]]:
        """Sides of the three levels, the finest first."""
        return [(scale * self.sizes.grid, scale * self.sizes.grid) for scale in (4, 2, 1)]

    @property
    def hidden_dim(self) -> int:
        """Number of channels C."""
        return self.sizes.hidden

    def interactive(self) -> SimpleNamespace:
        """Return the part that answers prompts, with the names that SAM 3's encoder and decoder read."""
        tracker = self.tracker
        return SimpleNamespace(
            vision_encoder=tracker.vision_encoder,
            prompt_encoder=tracker.prompt_encoder,
            mask_decoder=tracker.mask_decoder,
            no_memory_embedding=tracker.no_memory_embedding,
            object_pointer_proj=tracker.object_pointer_proj,
            no_object_pointer=tracker.no_object_pointer,
            mask_downsample=tracker.mask_downsample,
            # the grid's positions are those of the prompts
            shared_image_embedding=tracker.prompt_encoder.shared_embedding,
            backbone_feature_sizes=self.backbone_feature_sizes,
        )

    @property
    def prompt_encoder(self) -> nn.Module:
        """The prompt encoder."""
        return self.tracker.prompt_encoder


class _ReadSource(nn.Module):
    """The weights of memory attention."""

    def __init__(self, sizes: ModelSizes) -> None:
        super().__init__()
        hidden = sizes.hidden
        self.layers = nn.ModuleList(
            _ReadLayerSource(hidden, sizes.read_mlp) for _ in range(sizes.read_layers)
        )
        self.norm = nn.LayerNorm(hidden)
        self.time = nn.Parameter(torch.zeros(NUM_MASKMEM, 1, 1, hidden))
        self.pointer_time = nn.Linear(hidden, hidden)


class _ReadLayerSource(nn.Module):
    def __init__(self, hidden: int, mlp: int) -> None:
        super().__init__()
        for name in ("self_attn_{}_proj", "cross_attn_{}_proj"):
            for part in ("q", "k", "v", "out"):
                self.add_module(name.format(part), nn.Linear(hidden, hidden))
        self.image_cross_attn_q_proj = nn.Linear(hidden, hidden)
        self.image_cross_attn_k_proj = nn.Linear(hidden, hidden)
        self.linear1 = nn.Linear(hidden, mlp)
        self.linear2 = nn.Linear(mlp, hidden)
        self.norm1 = nn.LayerNorm(hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.norm3 = nn.LayerNorm(hidden)


class _MemorySource(nn.Module):
    """The weights of the memory encoder."""

    def __init__(self, sizes: ModelSizes, config: Sam3Config) -> None:
        super().__init__()
        hidden = sizes.hidden
        steps = zip(sizes.downsample, sizes.downsample[1:], strict=False)
        self.downsample = nn.ModuleList(
            MaskDownsampleWeights(config, before, after) for before, after in steps
        )
        self.embed = nn.Conv2d(sizes.downsample[-1], hidden, 1)
        self.feature_projection = nn.Conv2d(hidden, hidden, 1)
        self.fuser = nn.ModuleList(FuserWeights(config) for _ in range(sizes.fuser_layers))
        self.absent = nn.Parameter(torch.zeros(sizes.slots, hidden))


def _build_video_decoder(sizes: ModelSizes) -> DecoderWeights:
    """Build SAM 3's mask decoder with the tokens of all slots and no mask that does not compete."""
    config = tracker_config(sizes).mask_decoder_config
    # SAM 3's has one mask more, for several points
    config.num_multimask_outputs = sizes.masks - 1
    decoder = DecoderWeights(config)
    decoder.iou_token = make_table(sizes.slots, sizes.hidden)
    decoder.obj_score_token = make_table(sizes.slots, sizes.hidden)
    decoder.mask_tokens = make_table(sizes.slots * sizes.masks, sizes.hidden)
    return decoder


def tracker_config(sizes: ModelSizes) -> Sam3Config:
    """Return the configuration of the parts that SAM 3.1 shares with SAM 3."""
    hidden = sizes.hidden
    backbone = ViTConfig(
        hidden_size=sizes.width,
        intermediate_size=sizes.mlp,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        image_size=sizes.image_size,
        patch_size=sizes.patch,
        window_size=sizes.window,
        global_attn_indexes=sizes.global_layers,
        pretrain_image_size=sizes.tiles * sizes.patch,
        layer_norm_eps=VIT_EPS,
    )
    return Sam3Config(
        vision_config=Sam3Vision(backbone_config=backbone, fpn_hidden_size=hidden, scale_factors=SCALES[:3]),
        prompt_encoder_config=Sam3PromptConfig(hidden_size=hidden, patch_size=sizes.patch),
        mask_decoder_config=DecoderConfig(
            hidden_size=hidden,
            mlp_dim=sizes.decoder_mlp,
            iou_head_hidden_dim=hidden,
            num_attention_heads=HEADS,
            attention_downsample_rate=sizes.decoder_rate,
            dynamic_multimask_via_stability=False,
        ),
        image_size=sizes.image_size,
        memory_fuser_embed_dim=hidden,
        memory_fuser_intermediate_dim=sizes.fuser_mlp,
        # SAM 3's memory modules are not used
        memory_attention_hidden_size=hidden,
        memory_attention_num_layers=0,
        memory_fuser_num_layers=0,
        memory_encoder_hidden_size=hidden,
        memory_encoder_output_channels=hidden,
        mask_downsampler_embed_dim=hidden,
        enable_occlusion_spatial_embedding=False,
    )


TRUNK = "detector.backbone.vision_backbone.trunk"
NECKS = "detector.backbone.vision_backbone"
MODEL = "tracker.model"
SELF_MADE = (
    "tracker.memory_attention.",
    "tracker.memory_encoder.",
    "tracker.no_memory_positional_encoding",
    "tracker.memory_temporal_positional_encoding",
    "tracker.temporal_positional_encoding_projection_layer.",
    "tracker.no_object_pointer",
    "tracker.shared_image_embedding.",
)
"""Tensors of SAM 3's tracker that SAM 3.1 has no weights for."""

_UPSCALING = {
    "0.scale_layers.0": "0.dconv_2x2_0",
    "0.scale_layers.2": "0.dconv_2x2_1",
    "1.scale_layers.0": "1.dconv_2x2",
}
_MASK_EMBED = {"conv1": "0", "layer_norm1": "1", "conv2": "3", "layer_norm2": "4", "conv3": "6"}
_HEAD = {"proj_in": "0", "layers.0": "1", "proj_out": "2"}
_HEAD_LAYER = re.compile(
    r"(output_hypernetworks_mlps\.\d+|iou_prediction_head|pred_obj_score_head|obj_ptr_proj)"
    r"\.(proj_in|layers\.0|proj_out)\."
)
"""A layer of a perceptron of three layers."""


class Renames:
    """A table of names: patterns and what replaces them, in this order."""

    def __init__(self, *table: tuple[str, str]) -> None:
        self._table = [(re.compile(pattern), replacement) for pattern, replacement in table]

    def apply(self, name: str) -> str:
        """Return a name after all replacements."""
        for pattern, replacement in self._table:
            name = pattern.sub(replacement, name)
        return name


_RENAMES = Renames(
    # the ViT
    (r"^tracker\.vision_encoder\.backbone\.layers\.", f"{TRUNK}.blocks."),
    (r"^tracker\.vision_encoder\.backbone\.layer_norm\.", f"{TRUNK}.ln_pre."),
    (r"^tracker\.vision_encoder\.backbone\.embeddings\.position_embeddings$", f"{TRUNK}.pos_embed"),
    (r"^tracker\.vision_encoder\.backbone\.embeddings\.patch_embeddings\.projection\.",
     f"{TRUNK}.patch_embed.proj."),
    (r"(\.blocks\.\d+\.)layer_norm", r"\1norm"),
    (r"(\.blocks\.\d+\.)attention\.[qkv]_proj\.", r"\1attn.qkv."),
    (r"(\.blocks\.\d+\.)attention\.o_proj\.", r"\1attn.proj."),
    # the pyramids
    (r"^tracker\.vision_encoder\.neck\.fpn_layers\.", f"{NECKS}.interactive_convs."),
    (r"^propagation\.", f"{NECKS}.propagation_convs."),
    (r"(convs\.\d\.)proj1\.", r"\1conv_1x1."),
    (r"(convs\.\d\.)proj2\.", r"\1conv_3x3."),
    # the prompt encoder
    (r"^tracker\.prompt_encoder\.shared_embedding\.positional_embedding$",
     f"{MODEL}.interactive_sam_prompt_encoder.pe_layer.positional_encoding_gaussian_matrix"),
    (r"^tracker\.prompt_encoder\.", f"{MODEL}.interactive_sam_prompt_encoder."),
    # the mask decoders
    (r"^tracker\.mask_decoder\.", f"{MODEL}.interactive_sam_mask_decoder."),
    (r"^video_decoder\.", f"{MODEL}.sam_mask_decoder."),
    (r"(_decoder\.transformer\.)layer_norm_final_attn\.", r"\1norm_final_attn."),
    (r"(_decoder\.transformer\.layers\.\d+\.)layer_norm", r"\1norm"),
    (r"(_decoder\.transformer\.layers\.\d+\.)mlp\.proj_in\.", r"\1mlp.lin1."),
    (r"(_decoder\.transformer\.layers\.\d+\.)mlp\.proj_out\.", r"\1mlp.lin2."),
    (r"(_decoder\.transformer\..*)\.o_proj\.", r"\1.out_proj."),
    (r"(_decoder\.)upscale_conv1\.", r"\1output_upscaling.0."),
    (r"(_decoder\.)upscale_layer_norm\.", r"\1output_upscaling.1."),
    (r"(_decoder\.)upscale_conv2\.", r"\1output_upscaling.3."),
    # what describes objects and images
    (r"^tracker\.object_pointer_proj\.", f"{MODEL}.interactive_obj_ptr_proj."),
    (r"^pointer_proj\.", f"{MODEL}.obj_ptr_proj."),
    (r"^absent_pointer\.", f"{MODEL}.no_obj_ptr_linear."),
    (r"^used_embed$", f"{MODEL}.output_valid_embed"),
    (r"^free_embed$", f"{MODEL}.output_invalid_embed"),
    (r"^tracker\.no_memory_embedding$", f"{MODEL}.interactivity_no_mem_embed"),
    (r"^tracker\.mask_downsample\.", f"{MODEL}.interactive_mask_downsample."),
    (r"^positional_embedding$", f"{MODEL}.image_pe_layer.positional_encoding_gaussian_matrix"),
    # memory attention
    (r"^read\.time$", f"{MODEL}.maskmem_tpos_enc"),
    (r"^read\.pointer_time\.", f"{MODEL}.obj_ptr_tpos_proj."),
    (r"^read\.", f"{MODEL}.transformer.encoder."),
    # the memory encoder
    (r"^memory\.absent$", f"{MODEL}.no_obj_embed_spatial"),
    (r"^memory\.feature_projection\.", f"{MODEL}.maskmem_backbone.pix_feat_proj."),
    (r"^memory\.fuser\.(\d+)\.depthwise_conv\.", MODEL + r".maskmem_backbone.fuser.layers.\1.dwconv."),
    (r"^memory\.fuser\.(\d+)\.layer_norm\.", MODEL + r".maskmem_backbone.fuser.layers.\1.norm."),
    (r"^memory\.fuser\.(\d+)\.pointwise_conv", MODEL + r".maskmem_backbone.fuser.layers.\1.pwconv"),
    (r"^memory\.fuser\.(\d+)\.scale$", MODEL + r".maskmem_backbone.fuser.layers.\1.gamma"),
)  # fmt: skip
_CONVOLUTION = re.compile(r"^memory\.downsample\.(\d+)\.(conv|layer_norm)\.")
_EMBED = re.compile(r"^memory\.embed\.")
_STEP = 3
"""Layers of one step of the mask's downsampling in the file: convolution, norm, activation."""


def original_name(name: str, sizes: ModelSizes) -> str | None:
    """Return the name in Meta's file of the tensor `name` of `Source`; None if the file has none for it."""
    if name.startswith(SELF_MADE):
        return None
    # layers of a sequence are numbered through in the file
    if step := _CONVOLUTION.match(name):
        index = _STEP * int(step[1]) + (step[2] == "layer_norm")
        return f"{MODEL}.maskmem_backbone.mask_downsampler.encoder.{index}.{name[step.end() :]}"
    if step := _EMBED.match(name):
        index = _STEP * (len(sizes.downsample) - 1)
        return f"{MODEL}.maskmem_backbone.mask_downsampler.encoder.{index}.{name[step.end() :]}"
    name = _RENAMES.apply(name)
    for before, after in _UPSCALING.items():
        name = name.replace(f"convs.{before}.", f"convs.{after}.")
    for before, after in _MASK_EMBED.items():
        name = name.replace(f".mask_embed.{before}.", f".mask_downscaling.{after}.")
    return _HEAD_LAYER.sub(lambda found: f"{found[1]}.layers.{_HEAD[found[2]]}.", name)
