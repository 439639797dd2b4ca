"""The four stages that every frame runs through (encode, read, decode, remember), as functions of tensors.

An engine may replace each stage of `Stages`, which tracks objects without prompts. Prompts always use the torch modules
`Decoder` and `MemoryWrite` directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import ModelError
from .mask_decoder import MaskDecoder
from .memory_write import MemoryWrite

ABSENT_LOGIT = -1024.0  # the reference's mask logit for an object out of view

Run = Callable[..., Any]


class Stages(NamedTuple):
    """The stages that track N objects without prompts. `h`, `w` is the token grid; a memory has T tokens, which are hw
    except for EdgeTAM.

    A read with an attribute `max_objects` that is not None is an engine: it takes that many objects in a call and no
    more, with any number of memories and a mask. One with `takes_any_width` needs no mask. Others take the whole bank.
    """

    encode: Run
    """(pixels [1, 3, S, S]) -> the tensors of `Features`"""
    read: Run
    """(top [1, C, h, w], memory [N, M, T, 64], offset int64 [N, M], pointers [N, P, C], pointer_age float32 [N, P],
    valid bool [N, M + P] or None) -> [N, C, h, w], see `MemoryRead`"""
    decode: Run
    """(top [N, C, h, w], fine, middle) -> the tensors of `Decoded`"""
    remember: Run
    """(top [1, C, h, w], logits [N, 4h, 4w], presence [N]) -> [N, T, 64], see `MemoryWrite`"""


class Features(NamedTuple):
    """The feature maps of one image."""

    fine: Tensor
    """[1, C/8, 4h, 4w]"""
    middle: Tensor
    """[1, C/4, 2h, 2w]"""
    top: Tensor
    """[1, C, h, w]"""
    trunk: Tensor | None = None
    """[1, D, h, w]: the trunk's output, if a detector shares it; see `TrackerModel.share_trunk`"""


class Decoded(NamedTuple):
    """The decoder's output for N objects."""

    logits: Tensor
    """[N, 4h, 4w]"""
    iou: Tensor
    """[N], predicted"""
    presence: Tensor
    """logit [N]"""
    pointer: Tensor
    """object pointer [N, C]"""


class Decoder(nn.Module):
    """Turns prompts and features into masks and object pointers, with SAM's prompt encoder and mask decoder."""

    position: Tensor
    nothing: Tensor
    no_memory: Tensor

    def __init__(self, source: Any, has_memory: bool = True) -> None:
        super().__init__()
        self.prompt_encoder = source.prompt_encoder
        self.no_memory = source.no_memory_embedding
        if has_memory:
            self.pointer_proj, self.no_pointer = source.object_pointer_proj, source.no_object_pointer
            self.mask_downsample = source.mask_downsample
        else:  # the mask token itself describes the object
            self.pointer_proj = nn.Identity()
            self.no_pointer = nn.Parameter(torch.zeros_like(self.no_memory[0]))
        position = source.get_image_wide_positional_embeddings().detach().to(self.no_memory.dtype, copy=True)
        self.register_buffer("position", position, persistent=False)
        self.mask_decoder = MaskDecoder(source.mask_decoder, position)
        empty = torch.full((1, 1, 1), -1, dtype=torch.int32, device=position.device)
        with torch.no_grad():
            nothing, _ = self.prompt_encoder(position.new_zeros(1, 1, 1, 2), empty, None, None)
        self.register_buffer(
            "nothing", nothing[0].to(position.dtype, copy=True), persistent=False
        )  # [1, 2, C]

    def forward(
        self, top: Tensor, fine: Tensor, middle: Tensor, sparse: Tensor, dense: Tensor, multimask: bool
    ) -> Decoded:
        """Decode N objects on one image.

        top [N, C, h, w] is per object; fine and middle are the image's; sparse [1 or N, T, C] and dense
        [1 or N, C, h, w] embed the prompt. With `multimask`, return the best of three masks.
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
        """Return the sparse [1, 2, C] and dense [1, C, h, w] embeddings for no prompt."""
        return self.nothing, self._dense(None)

    def prompt(self, points: Tensor, labels: Tensor, logits: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Embed points [n, 2] in model pixels with labels int [n], and optionally logits [4h, 4w] of an earlier mask.

        Labels: 1 inside, 0 outside, 2 and 3 the top-left and bottom-right corner of a box. For N objects, pass points
        [N, n, 2], labels [N, n] and logits [N, 4h, 4w].
        """
        if points.ndim == 2:
            points, labels = points[None], labels[None]
        embedded, _ = self.prompt_encoder(points[None].float(), labels[None], None, None)
        return embedded[0].to(self.position.dtype), self._dense(logits)

    def _dense(self, logits: Tensor | None) -> Tensor:
        if logits is None:
            no_mask: Tensor = self.prompt_encoder.no_mask_embed.weight
            return no_mask.reshape(1, -1, 1, 1).expand(-1, -1, *self.position.shape[-2:])
        maps = logits.reshape(-1, 1, *logits.shape[-2:]).to(self.position.dtype)
        embedded: Tensor = self.prompt_encoder.mask_embed(maps)
        return embedded

    def encode_mask_pointer(self, features: Features, mask: Tensor) -> Tensor:
        """Return the object pointer [1, C] of a mask prompt, float [1, 1, S, S] in 0..1."""
        small = self.mask_downsample(mask)
        size = self.prompt_encoder.mask_input_size
        if small.shape[-2:] != tuple(size):
            small = F.interpolate(
                small.float(), size=size, mode="bilinear", align_corners=False, antialias=True
            )
        dense = self.prompt_encoder.mask_embed(small.to(mask.dtype))
        sparse = self.nothing
        decoded: Decoded = self(features.top, features.fine, features.middle, sparse, dense, True)
        return torch.where(mask.any(), decoded.pointer, self.no_pointer)


class NoMemory(nn.Module):
    """The place of a stage that weights without memory modules do not have."""

    def forward(self, *inputs: Tensor) -> Tensor:
        """Raise ModelError."""
        raise ModelError(
            "these weights have no memory modules: expected to follow objects by their last masks"
        )


class FollowDecode(nn.Module):
    """The decoder for objects without a prompt."""

    def __init__(self, decoder: Decoder, multimask: bool) -> None:
        super().__init__()
        self.decoder, self.multimask = decoder, multimask

    def forward(self, top: Tensor, fine: Tensor, middle: Tensor) -> Decoded:
        """Decode top [N, C, h, w], the output of the memory read, with fine and middle of the image."""
        sparse, dense = self.decoder.no_prompt()
        decoded: Decoded = self.decoder(top, fine, middle, sparse, dense, self.multimask)
        return decoded


class FollowRemember(nn.Module):
    """The memory encoder for objects without a prompt."""

    def __init__(self, write: MemoryWrite) -> None:
        super().__init__()
        self.write = write

    def forward(self, top: Tensor, logits: Tensor, presence: Tensor) -> Tensor:
        """Encode the memory [N, T, 64] from top [1, C, h, w], logits [N, 4h, 4w] and presence [N]."""
        memory: Tensor = self.write(top, self.write.upsample(logits), False, presence)
        return memory
