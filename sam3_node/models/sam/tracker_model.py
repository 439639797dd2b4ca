"""One tracker model as stages with plain tensor signatures: encode, read, decode, remember.

Each stage is a pure function of tensors with fixed shapes, so each can run eagerly, be compiled, or be replaced by an
engine. The arithmetic follows transformers' `Sam3TrackerVideoModel`, `Sam2VideoModel` and `EdgeTamVideoModel`; tests
compare with all of them.
"""

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ...errors import ModelError
from ..capabilities import Capabilities
from ..pixels import normalise_frame
from .algebra import KERNEL_DEVICES
from .configuration import side
from .cudnn import has_cudnn
from .encoder import Sam3Encoder, build_encoder
from .memory_attention import MemoryAttention, ReadMethod
from .memory_encoder import MemoryEncoder
from .stages import (
    Decoded,
    Decoder,
    EncodeLimits,
    Features,
    FollowDecode,
    FollowMemoryEncoder,
    NoMemory,
    Stages,
    find_encode_limits,
)
from .vit import WindowedViT

CPU_BATCH = 16  # objects at once; with more, the data no longer fits into the CPU's cache
GPU_BATCH = 64
CPU_COMPILED_BATCH = 15  # torch runs other convolutions for 16 or more, which would be graphs of their own
MAX_GRAPHS = 64
"""Graphs of one stage, over all models of a process: torch's own limit, 8, would silently run others uncompiled."""

_log = logging.getLogger(__name__)


class MaskLimits(NamedTuple):
    """Lowest predicted IoU and lowest stability of masks that are kept of a search for everything."""

    min_iou: float
    min_stability: float


PUBLISHED_LIMITS = MaskLimits(0.88, 0.95)
"""Those of SAM's SamAutomaticMaskGenerator, for all families that have none of their own; SAM 3 has published none."""


class TrackerModel(nn.Module):
    """The stages of a SAM tracker. They share the weights of `TrackerWeights`. For inference only.

    Without memory modules (`has_memory` is False), objects are followed by their last masks; see
    `tracking.last_masks.LastMasks`.
    """

    mean: Tensor
    std: Tensor
    memory_attention: Any
    memory_encoder: Any

    def __init__(
        self, source: Any, *, name: str, mean: list[float], std: list[float], has_memory: bool = True
    ) -> None:
        super().__init__()
        config = source.config
        self.name = name
        self.capabilities = self._declare(source, has_memory)
        self.mask_limits = PUBLISHED_LIMITS
        """Of the weights' family"""
        self.image_size = side(source.prompt_encoder.input_image_size)
        self.grid: tuple[int, int] = tuple(source.backbone_feature_sizes[-1])
        self.mask_size: tuple[int, int] = source.prompt_encoder.mask_input_size
        self.hidden: int = source.hidden_dim
        self.multimask = config.multimask_output_in_sam
        self.multimask_tracking = config.multimask_output_for_tracking
        self.multimask_points = (config.multimask_min_pt_num, config.multimask_max_pt_num)
        self._static_shapes = False
        self.is_compiled = False
        self.shares_trunk = False
        """True if a detector takes the trunk from the Features of each frame."""
        self._batch_limit = GPU_BATCH
        self.stages = self._build_stages(source)
        """The stages that track objects without prompts. An engine replaces them here."""
        self.register_buffer("mean", torch.tensor(mean).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(1, 3, 1, 1), persistent=False)
        self.requires_grad_(False).eval()

    def _declare(self, source: Any, has_memory: bool) -> Capabilities:
        """Declare what the weights can do. The configuration and the stages are not read yet."""
        return Capabilities() if has_memory else Capabilities(following="last masks")

    def _build_stages(self, source: Any) -> Stages:
        """Build the stages, and what prompts need."""
        self.encode_stage = build_encoder(source)
        self.decode_stage = Decoder(source, self.has_memory)
        read, remember = self._build_memory(source) if self.has_memory else (NoMemory(), NoMemory())
        decode = FollowDecode(self.decode_stage, self.competes(0, False))
        return Stages(self.encode_stage, read, decode, remember)

    def _build_memory(self, source: Any) -> tuple[nn.Module, nn.Module]:
        """Build the stages that need memory modules; return memory attention and memory encoder of `stages`."""
        self.memory_channels: int = source.mem_dim
        self.num_maskmem: int = source.num_maskmem
        self.max_conditioning: int = source.config.max_cond_frame_num
        self.max_pointers: int = source.config.max_object_pointers_in_encoder
        self.memory_attention = MemoryAttention(source)
        self.memory_encoder = MemoryEncoder(source)
        self.memory_tokens: int = self.memory_attention.tokens.memory_tokens
        return self.memory_attention, FollowMemoryEncoder(self.memory_encoder)

    @property
    def has_memory(self) -> bool:
        """True if the weights have memory modules."""
        return self.capabilities.has_memory

    @property
    def slots(self) -> int:
        """Number of objects that share a memory, its attention and a run of the mask decoder: a group in the bank."""
        return self.capabilities.slots

    @property
    def pointer_width(self) -> int:
        """Number of channels of the object pointers of a row."""
        return self.slots * self.hidden

    @property
    def rounds_memories(self) -> bool:
        """True if memories are kept in bfloat16 whatever the model's dtype, as in the reference: if not compressed."""
        return self.memory_encoder.compress is None

    @property
    def memory_dtype(self) -> torch.dtype:
        """Dtype in which memories are kept."""
        return torch.bfloat16 if self.rounds_memories else self.dtype

    @property
    def can_track(self) -> bool:
        """True: all weights can track. It stays for programs that read it."""
        return True

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.decode_stage.no_memory.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.decode_stage.no_memory.dtype

    @property
    def batch_size(self) -> int:
        """Number of objects that run at once on this device."""
        most = CPU_COMPILED_BATCH if self.is_compiled else CPU_BATCH
        return min(self._batch_limit, most if self.device.type == "cpu" else GPU_BATCH)

    def limit_batch(self, count: int) -> None:
        """Run at most `count` objects at once from now on, because memory ran out for more; free what torch caches."""
        _log.warning("the device's memory ran out: from now on, at most %d objects run at once", count)
        self._batch_limit = count
        torch.cuda.empty_cache()

    def preprocess(self, image: npt.NDArray[np.uint8]) -> Tensor:
        """Turn a BGR uint8 image [h, w, 3] into normalised RGB pixels [1, 3, S, S] on the model's device."""
        size = (self.image_size, self.image_size)
        return normalise_frame(image, size, self.mean, self.std, self.dtype)

    def encode(self, pixels: Tensor) -> Features:
        """Encode pixels [1, 3, S, S], the output of `preprocess`."""
        features = Features(*self.stages.encode(pixels.to(self.device, self.dtype)))
        # features may be kept for later frames, so a trunk that nobody shares is not among them
        return features if self.shares_trunk else features._replace(trunk=None)

    def encode_together(self, pixels: Tensor) -> list[Features]:
        """Encode pixels [B, 3, S, S] of several images in one call; the encoder must take `many_images`.

        The features of an image depend on its pixels, on B and on its index: the same image is rounded otherwise in
        another batch. They do not depend on the pixels of the other images.
        """
        features = Features(*self.stages.encode(pixels.to(self.device, self.dtype)))
        return (features if self.shares_trunk else features._replace(trunk=None)).split()

    @property
    def encode_limits(self) -> EncodeLimits:
        """Limits of the encoder that serves."""
        return find_encode_limits(self.stages.encode)

    def competes(self, points: int, prompted: bool) -> bool:
        """Return True if three candidate masks compete for this number of points, by the rule of the reference.

        A box counts as two points.
        """
        min_points, max_points = self.multimask_points
        enabled = self.multimask and (prompted or self.multimask_tracking)
        return bool(enabled and min_points <= points <= max_points)

    @property
    def candidates(self) -> int:
        """Number of masks to choose from for a prompt: 1 if the weights were not trained to compete."""
        # the first of the decoder's masks does not compete
        return self.decode_stage.mask_decoder.masks - 1 if self.multimask else 1

    @property
    def has_candidates(self) -> bool:
        """True if there is a choice among masks for a prompt."""
        return self.candidates > 1

    def decode_candidates(
        self, features: Features, points: Tensor, labels: Tensor, logits: Tensor | None
    ) -> Decoded:
        """Decode each prompt on an image without memory to all its `candidates`; see `Decoder.candidates`."""
        if self.has_candidates:
            return self.decode_stage.candidates(features, points, labels, logits)
        return self.decode_stage(*self.decode_stage.embed(features, points, labels, logits), False)

    @property
    def trunk(self) -> nn.Module | None:
        """The part of the encoder that a detector may share; None if there is none."""
        return self.encode_stage.backbone if isinstance(self.encode_stage, Sam3Encoder) else None

    def share_trunk(self) -> nn.Module:
        """Keep the trunk's output in the Features of each frame from now on, and return the trunk."""
        if self.trunk is None:
            raise ModelError(f"{self.name}: expected the encoder of SAM 3 to share, found another")
        self.shares_trunk = True
        return self.trunk

    @property
    def static_shapes(self) -> bool:
        """True if the tracker keeps to few shapes: numbers of objects are batch sizes, banks are read whole or full.

        It is so on CUDA, where libraries plan each new shape for up to 150 ms, and for engines and graphs.
        """
        return self._static_shapes or self.device.type == "cuda"

    @static_shapes.setter
    def static_shapes(self, value: bool) -> None:
        self._static_shapes = value

    def serve_by(self, stages: Stages, few_shapes: bool | None = None) -> None:
        """Replace the stages that track objects without prompts.

        few_shapes: True if they have a plan or a graph for each shape, so that the tracker keeps to few; None if they
        take what the stages before took.
        """
        self.stages = stages
        if few_shapes is not None:
            self.static_shapes = few_shapes

    def why_not_crops(self) -> str | None:
        """Return why no object can be followed in a window of the frame now; None if objects can."""
        if self.static_shapes or self.is_compiled:
            return "is served by stages whose shapes are fixed, and a window has others"
        return self.capabilities.why_not_crops()

    def use_kernels(self, on: bool = True) -> None:
        """Run our kernels from now on, or torch's operations: for memory attention, norms, and SAM 3's rotary encoding.

        Norms follow the last call for this device, whatever the model. Raises MissingExtraError without triton.
        """
        if on:
            has_cudnn(self.device, self.dtype)  # probes it now: neither compiled nor captured code may do so
        if self.has_memory:
            self.memory_attention.use_kernels(on)
        if isinstance(self.trunk, WindowedViT):
            self.trunk.use_kernels(on)
        if on:
            KERNEL_DEVICES.add(self.device)
        else:
            KERNEL_DEVICES.discard(self.device)

    def use_read(self, method: ReadMethod) -> None:
        """Attend to memories by this method from now on. Raises ModelError where weights or image size do not allow it.

        Weights without memory modules have nothing to attend to.
        """
        if self.has_memory:
            self.memory_attention.tokens.use(method)

    def compile(self, backend: str | Callable[..., Any] = "inductor") -> None:
        """Compile every stage that tracks objects without prompts: once for one object, and once for 2 or more.

        Prompts run eagerly: each number of points would be compiled anew, while frames wait.
        """
        self.is_compiled = True
        has_cudnn(self.device, self.dtype)  # probes it now: compiled code may not do so
        torch._dynamo.config.recompile_limit = max(MAX_GRAPHS, torch._dynamo.config.recompile_limit)
        for stage in self.stages:
            assert isinstance(stage, nn.Module), "engines replace stages after they are compiled"
            # CompilableStage marks the axes that vary
            stage.compile(backend=backend, dynamic=False)
