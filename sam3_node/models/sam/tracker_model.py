"""One tracker model as stages with plain tensor signatures: encode, read, decode, remember.

Each stage is a pure function of tensors of fixed shape, so that each can be run eagerly, compiled, or replaced by an
engine. What follows transformers' `Sam3TrackerVideoModel` and `Sam2VideoModel`, which are also the oracle.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import ModelError
from ..pixels import normalised
from .algebra import centre_convolution, resize_matrix
from .encoder import Sam3Encoder, build_encoder
from .mask_decoder import MaskDecoder
from .memory_read import MemoryRead
from .stages import FollowDecode, FollowRemember, Stages
from .vit import side

ABSENT_LOGIT = -1024.0  # the reference's mask logit where the object is not in view
CPU_BATCH = 16  # objects at once: more fall out of the cache
GPU_BATCH = 64
MASK_SCALE, MASK_BIAS = 20.0, -10.0  # a mask given as prompt, as logits


class Features(NamedTuple):
    """What one image is to the tracker: fine [1, C/8, 4h, 4w], middle [1, C/4, 2h, 2w], top [1, C, h, w].

    trunk [1, D, h, w] is what a detector with the same encoder begins from, where one does: see `share_trunk`.
    """

    fine: Tensor
    middle: Tensor
    top: Tensor
    trunk: Tensor | None = None


class Decoded(NamedTuple):
    """Per object: logits [N, 4h, 4w], iou [N] predicted, presence [N] logit, pointer [N, C]."""

    logits: Tensor
    iou: Tensor
    presence: Tensor
    pointer: Tensor


class TrackerModel(nn.Module):
    """The stages of a SAM tracker, sharing the weights of a transformers model. Inference only.

    `can_track` is False for weights without memory modules: they can segment single frames.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, source: Any, *, name: str, mean: list[float], std: list[float], can_track: bool
    ) -> None:
        super().__init__()
        config = source.config
        self.name, self.can_track = name, can_track
        self.image_size = side(source.prompt_encoder.input_image_size)
        self.grid: tuple[int, int] = tuple(source.backbone_feature_sizes[-1])
        self.mask_size: tuple[int, int] = source.prompt_encoder.mask_input_size
        self.hidden: int = source.hidden_dim
        self.memory_channels: int = source.mem_dim
        self.num_maskmem: int = source.num_maskmem
        self.max_conditioning: int = config.max_cond_frame_num
        self.max_pointers: int = config.max_object_pointers_in_encoder
        self.multimask = config.multimask_output_in_sam
        self.multimask_tracking = config.multimask_output_for_tracking
        self.multimask_points = (config.multimask_min_pt_num, config.multimask_max_pt_num)
        self.static_shapes = False
        self.encode_stage = build_encoder(source)
        self.read_stage = MemoryRead(source)
        self.decode_stage = Decoder(source)
        self.remember_stage = MemoryWrite(source)
        self.stages = Stages(
            self.encode_stage,
            self.read_stage,
            FollowDecode(self.decode_stage, self.competes(0, False)),
            FollowRemember(self.remember_stage),
        )
        """What frames run through, where nothing is prompted; an engine puts others here."""
        self.register_buffer("mean", torch.tensor(mean).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(1, 3, 1, 1), persistent=False)
        self.requires_grad_(False).eval()

    @property
    def device(self) -> torch.device:
        return self.decode_stage.no_memory.device

    @property
    def dtype(self) -> torch.dtype:
        return self.decode_stage.no_memory.dtype

    @property
    def batch_size(self) -> int:
        """Objects to run at once on this device."""
        return CPU_BATCH if self.device.type == "cpu" else GPU_BATCH

    def preprocess(self, image: npt.NDArray[np.uint8]) -> Tensor:
        """BGR uint8 [h, w, 3] -> normalised RGB pixels [1, 3, S, S] on the model's device."""
        size = (self.image_size, self.image_size)
        return normalised(image, size, self.mean, self.std, self.dtype)

    def encode(self, pixels: Tensor) -> Features:
        """pixels [1, 3, S, S] as `preprocess` makes them -> Features."""
        return Features(*self.stages.encode(pixels.to(self.device, self.dtype)))

    def competes(self, points: int, prompted: bool) -> bool:
        """Whether three candidate masks compete for so many points (a box is two), as the reference decides it."""
        fewest, most = self.multimask_points
        wanted = self.multimask and (prompted or self.multimask_tracking)
        return wanted and fewest <= points <= most

    @property
    def trunk(self) -> nn.Module | None:
        """The part of the encoder that a detector may share; None where it has none."""
        return self.encode_stage.backbone if isinstance(self.encode_stage, Sam3Encoder) else None

    def share_trunk(self) -> nn.Module:
        """Put what the trunk makes of a frame into its Features from now on; the trunk."""
        if not isinstance(self.encode_stage, Sam3Encoder):
            raise ModelError(f"{self.name}: expected the encoder of SAM 3 to share, found another")
        self.encode_stage.shares_trunk = True
        return self.encode_stage.backbone

    def compile(self) -> None:
        """Compile every stage; shapes become static, so that each bucket compiles once."""
        self.static_shapes = True
        for stage in (self.encode_stage, self.read_stage, self.decode_stage, self.remember_stage):
            stage.compile(dynamic=False)


class Decoder(nn.Module):
    """Prompts and features to masks: SAM's prompt encoder and mask decoder, and the object pointer."""

    position: Tensor
    nothing: Tensor
    no_memory: Tensor

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.prompt_encoder = source.prompt_encoder
        self.pointer_proj = source.object_pointer_proj
        self.mask_downsample = source.mask_downsample
        self.no_memory = source.no_memory_embedding
        self.no_pointer = source.no_object_pointer
        position = source.get_image_wide_positional_embeddings()
        self.register_buffer("position", position.detach().clone(), persistent=False)
        self.mask_decoder = MaskDecoder(source.mask_decoder, position)
        empty = torch.full((1, 1, 1), -1, dtype=torch.int32, device=position.device)
        with torch.no_grad():
            nothing, _ = self.prompt_encoder(position.new_zeros(1, 1, 1, 2), empty, None, None)
        self.register_buffer("nothing", nothing[0].detach().clone(), persistent=False)  # [1, 2, C]

    def forward(
        self, top: Tensor, fine: Tensor, middle: Tensor, sparse: Tensor, dense: Tensor, multimask: bool
    ) -> Decoded:
        """Decode N objects on one image.

        top [N, C, h, w], fine and middle of the image, sparse [1 or N, T, C], dense [1 or N, C, h, w]; with
        `multimask` the best of three masks.
        """
        count = top.shape[0]
        masks, iou, tokens, presence = self.mask_decoder(
            top + dense, fine, middle, sparse.expand(count, -1, -1), multimask
        )
        best = iou.argmax(dim=-1)
        rows = torch.arange(count, device=top.device)
        present = presence[:, None] > 0
        logits = masks[rows, best].masked_fill(~present[..., None], ABSENT_LOGIT)
        pointer = torch.where(present, self.pointer_proj(tokens[rows, best]), self.no_pointer)
        return Decoded(logits, iou[rows, best], presence, pointer)

    def no_prompt(self) -> tuple[Tensor, Tensor]:
        """The sparse [1, 2, C] and dense [1, C, h, w] embeddings of no prompt at all."""
        return self.nothing, self._dense(None)

    def prompt(self, points: Tensor, labels: Tensor, logits: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Embed points [n, 2] in model pixels with labels int [n], and logits [4h, 4w] of an earlier mask, if any.

        Labels: 1 inside, 0 outside, 2 and 3 the top-left and bottom-right corner of a box. Points [N, n, 2] with labels
        [N, n] are of N objects.
        """
        if points.ndim == 2:
            points, labels = points[None], labels[None]
        embedded, _ = self.prompt_encoder(points[None].to(self.position.dtype), labels[None], None, None)
        return embedded[0], self._dense(logits)

    def _dense(self, logits: Tensor | None) -> Tensor:
        if logits is None:
            return self.prompt_encoder.no_mask_embed.weight.reshape(1, -1, 1, 1).expand(
                -1, -1, *self.position.shape[-2:]
            )
        return self.prompt_encoder.mask_embed(logits[None, None].to(self.position.dtype))

    def pointer_of_mask(self, features: Features, mask: Tensor) -> Tensor:
        """Object pointer [1, C] of a mask given as prompt, float [1, 1, S, S] in 0..1."""
        small = self.mask_downsample(mask)
        size = self.prompt_encoder.mask_input_size
        if small.shape[-2:] != tuple(size):
            small = F.interpolate(
                small.float(), size=size, mode="bilinear", align_corners=False, antialias=True
            )
        dense = self.prompt_encoder.mask_embed(small.to(mask.dtype))
        sparse = self.nothing
        pointer = self(features.top, features.fine, features.middle, sparse, dense, True).pointer
        return torch.where(mask.any(), pointer, self.no_pointer)


class MemoryWrite(nn.Module):
    """Features and masks to memories: the memory encoder, and the mark of an object that is out of view."""

    from_logits: Tensor
    from_image: Tensor
    to_logits: Tensor

    def __init__(self, source: Any) -> None:
        super().__init__()
        encoder, config = source.memory_encoder, source.config
        self.feature_projection = encoder.feature_projection
        self.downsample = nn.ModuleList(_Downsample(layer) for layer in encoder.mask_downsampler.layers)
        self.embed = encoder.mask_downsampler.final_conv
        self.memory_fuser, self.projection = encoder.memory_fuser, encoder.projection
        self.scale, self.bias = config.sigmoid_scale_for_mem_enc, config.sigmoid_bias_for_mem_enc
        self.occluded = source.occlusion_spatial_embedding_parameter
        image, low = side(source.prompt_encoder.input_image_size), source.prompt_encoder.mask_input_size[0]
        device = source.no_memory_embedding.device
        # the reference resizes logits to the image and then to the memory encoder's input: two linear maps, one matrix
        self.register_buffer("from_logits", resize_matrix((low, image, 4 * low)).to(device), persistent=False)
        self.register_buffer("from_image", resize_matrix((image, 4 * low)).to(device), persistent=False)
        self.register_buffer("to_logits", resize_matrix((image, low)).to(device), persistent=False)

    def upsample(self, logits: Tensor) -> Tensor:
        """Low-resolution logits [N, 4h, 4w] -> [N, 1, 16h, 16w], the memory encoder's input size, float32."""
        return (self.from_logits @ logits.float() @ self.from_logits.T)[:, None]

    def from_mask(self, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Mask [1, 1, S, S] in 0..1 -> logits [1, 4h, 4w] and memory input [1, 1, 16h, 16w], float32."""
        high = mask.float() * MASK_SCALE + MASK_BIAS
        return (self.to_logits @ high @ self.to_logits.T)[:, 0], self.from_image @ high @ self.from_image.T

    def forward(self, top: Tensor, masks: Tensor, prompted: bool, presence: Tensor) -> Tensor:
        """top [1, C, h, w] of the image, masks [N, 1, 16h, 16w] logits, presence [N] -> memory [N, hw, 64] bfloat16.

        `prompted`: the masks answer a prompt, and are made binary first.
        """
        weight = (masks > 0).float() if prompted else masks.sigmoid()
        x = (weight * self.scale + self.bias).to(top.dtype)
        for layer in self.downsample:
            x = layer(x)
        memory = self.projection(self.memory_fuser(self.feature_projection(top) + self.embed(x)))
        if self.occluded is not None:
            absent = (presence <= 0).to(memory.dtype)[:, None, None, None]
            memory = memory + absent * self.occluded[..., None, None]
        return memory.flatten(2).transpose(1, 2).to(torch.bfloat16)


class _Downsample(nn.Module):
    """Convolution, layer norm over channels and activation; the norm's mean is taken out by the convolution."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.conv, self.activation = centre_convolution(source.conv), source.activation
        self.eps = source.layer_norm.eps
        self.weight, self.bias = (
            nn.Parameter(value.detach().reshape(1, -1, 1, 1), False)
            for value in (source.layer_norm.weight, source.layer_norm.bias)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        inverse = torch.rsqrt(x.float().square().mean(dim=1, keepdim=True) + self.eps).to(x.dtype)
        return self.activation(torch.addcmul(self.bias, x * inverse, self.weight))
