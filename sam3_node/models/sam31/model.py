"""SAM 3.1's tracker as stages: encode, read, decode and remember for groups of objects."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ModelError
from ..capabilities import Capabilities
from ..sam.encoder import Sam3Pyramid
from ..sam.memory_attention import ReadMethod
from ..sam.stages import Stages
from ..sam.tracker_model import TrackerModel
from ..sam.vit import WindowedViT
from .decoder import PromptDecoder, VideoDecoder
from .memory import GroupMemoryAttention, GroupMemoryEncoder
from .source import MAX_CONDITIONING, MAX_POINTERS, NUM_MASKMEM, Source

ROWS_A_CALL = {"encode": 1, "read": 2, "decode": 4, "remember": 4}
"""Largest number of groups of a call of an engine: one fills a GPU, and each needs memory (450 MB of the read and
113 MB of the memory encoder at 1008 pixels; `tools/bench/results/engines-layers-sam31.json`)."""


class Sam31Encoder(nn.Module):
    """SAM 3's ViT with two pyramids: one for tracking, one for prompts."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        vision: Any = source.tracker.vision_encoder
        self.backbone = WindowedViT(vision.backbone)
        grid = self.backbone.grid
        self.video = Sam3Pyramid(source.propagation, source.video_decoder, grid)
        self.prompt = Sam3Pyramid(vision.neck.fpn_layers, source.tracker.mask_decoder, grid)
        # the tokens are channels-last already
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        """Encode pixels [1, 3, S, S] into the tensors of `Features`."""
        trunk = self.backbone(pixels)
        return *self.video(trunk), trunk, *self.prompt(trunk)


class Sam31Model(TrackerModel):
    """The stages of SAM 3.1's tracker. An object has a slot of a group, and groups take the role of objects."""

    def _declare(self, source: Source, has_memory: bool) -> Capabilities:
        assert has_memory, "a checkpoint without memory modules is refused"
        return Capabilities(
            following="group memories",
            slots=source.sizes.slots,
            has_prompt_features=True,
            ages_conditioning=True,
            keeps_old_pointers=False,
            usual_rows=1,  # most users follow few enough objects for one group
            rows_a_call=ROWS_A_CALL,
        )

    def _build_stages(self, source: Source) -> Stages:
        self.encode_stage = Sam31Encoder(source)
        self.decode_stage = PromptDecoder(source)
        self.video_stage = VideoDecoder(source)
        self.memory_attention = GroupMemoryAttention(source)
        self.memory_encoder = GroupMemoryEncoder(source)
        self.memory_channels = 2 * source.sizes.hidden
        self.num_maskmem = NUM_MASKMEM
        self.max_conditioning = MAX_CONDITIONING
        self.max_pointers = MAX_POINTERS
        self.memory_tokens = self.memory_attention.memory_tokens
        return Stages(self.encode_stage, self.memory_attention, self.video_stage, self.memory_encoder)

    @property
    def rounds_memories(self) -> bool:
        """False: memories are kept in the model's own dtype."""
        return False

    @property
    def trunk(self) -> nn.Module:
        """The part of the encoder that a detector may share."""
        assert isinstance(self.encode_stage, Sam31Encoder)
        return self.encode_stage.backbone

    def use_read(self, method: ReadMethod) -> None:
        """Attend to memories by this method. Raises ModelError for any other than exact."""
        if method != "exact":
            raise ModelError(
                f"tracker.read {method}: expected exact with SAM 3.1, whose objects share their memories; use "
                "--tracker.read exact"
            )
