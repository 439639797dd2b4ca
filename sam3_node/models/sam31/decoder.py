"""The two mask decoders of SAM 3.1: of prompts, with one slot, and of video, with one slot for each object of a group.

The decoder of prompts is SAM 3's but for what it says of an object out of view: its pointer is projected, where SAM 3
has one constant. The video decoder has no prompt. Each slot has a token of presence, one of predicted IoU, and one for
each of its masks; an embedding tells whether the slot is used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..sam.stages import (
    ABSENT_LOGIT,
    CompilableStage,
    Decoded,
    Decoder,
    Features,
    _StackedHeads,
    _TokenToImage,
    _TwoWayLayer,
    _Upscale,
)
from .source import Source

FREE_PRESENCE = -10.0
"""Presence logit of a slot without an object, as the memory encoder takes it."""


class PromptDecoder(Decoder):
    """The prompt encoder and the mask decoder of prompts."""

    def __init__(self, source: Source) -> None:
        super().__init__(source.interactive())
        self.absent_pointer = source.absent_pointer

    def describe_pointer(self, tokens: Tensor, present: Tensor) -> Tensor:
        """Return the pointers [N, C] of mask tokens [N, C]; present [N, 1] says which objects are in view."""
        pointer = self.pointer_proj(tokens)
        return torch.where(present, pointer, self.absent_pointer(pointer))

    def encode_mask_pointer(self, features: Features, mask: Tensor) -> Tensor:
        """Return the object pointer [1, C] of a mask prompt, float [1, 1, S, S] in 0..1.

        As in the reference, it is the pointer of the mask that does not compete.
        """
        features = features.for_prompts()
        top = features.top + self.no_memory.reshape(1, -1, 1, 1)
        decoded: Decoded = self(
            top, features.fine, features.middle, self.nothing, self.embed_mask(mask), False
        )
        return torch.where(mask.any(), decoded.pointer, self.absent_pointer(decoded.pointer))


class VideoDecoder(CompilableStage):
    """Decodes the masks of all slots of G groups."""

    tokens: Tensor
    used: Tensor
    position: Tensor

    def __init__(self, source: Source) -> None:
        super().__init__()
        decoder = source.video_decoder
        sizes = source.sizes
        self.slots = sizes.slots
        self.masks = sizes.masks
        tokens = [decoder.obj_score_token.weight, decoder.iou_token.weight, decoder.mask_tokens.weight]
        self.register_buffer("tokens", torch.cat(tokens).detach()[None].clone(), persistent=False)
        embeds = torch.stack([source.free_embed, source.used_embed])
        self.register_buffer("used", embeds.detach().clone(), persistent=False)
        position = embed_grid(source.positional_embedding, sizes.grid).to(self.tokens.dtype)
        self.register_buffer("position", position, persistent=False)
        transformer: Any = decoder.transformer
        self.layers = nn.ModuleList(map(_TwoWayLayer, transformer.layers))
        self.final = _TokenToImage(transformer.final_attn_token_to_image)
        self.final_norm = transformer.layer_norm_final_attn
        self.upscale = _Upscale(decoder)
        self.heads = _StackedHeads(decoder.output_hypernetworks_mlps)
        self.iou_head = decoder.iou_prediction_head
        self.presence_head = decoder.pred_obj_score_head
        self.pointer_proj = source.pointer_proj
        self.absent_pointer = source.absent_pointer

    @property
    def varying(self) -> tuple[tuple[int, ...], ...]:
        """Groups vary."""
        return ((0,), (), (), (0,))

    def forward(self, top: Tensor, fine: Tensor, middle: Tensor, used: Tensor) -> Decoded:
        """Decode top [G, C, h, w], the output of memory attention, with fine and middle of the image.

        used: bool [G, slots]. Each object gets the mask with the highest predicted IoU. Return `Decoded` with logits
        [G, slots, 4h, 4w], iou and presence [G, slots] and pointer [G, slots, C]; free slots have logits, IoU and
        pointer 0, and presence -10.
        """
        slots = self.slots
        # a slot's embedding belongs to its mask tokens alone
        embed = torch.where(used[..., None], self.used[1], self.used[0])  # [G, slots, C]
        tokens = self.tokens + torch.cat(
            [
                embed.new_zeros(embed.shape[0], 2 * slots, embed.shape[2]),
                embed.repeat_interleave(self.masks, 1),
            ],
            dim=1,
        )
        queries = tokens
        pixels = top.flatten(2).transpose(1, 2)
        for layer in self.layers:
            queries, pixels = layer(queries, pixels, tokens, self.position)
        queries = self.final_norm(queries + self.final(queries + tokens, pixels, self.position))
        presence = self.presence_head(queries[:, :slots])[..., 0]
        iou = self.iou_head(queries[:, slots : 2 * slots])
        masks = queries[:, 2 * slots :].unflatten(1, (slots, self.masks))  # [G, slots, masks, C]
        best = iou.argmax(dim=-1, keepdim=True)
        # only the chosen masks are multiplied with the pixels
        heads = self.heads(masks.flatten(0, 1)).unflatten(0, masks.shape[:2])
        logits = self.upscale(_choose(heads, best), pixels, fine, middle)
        present = (presence > 0)[..., None]
        pointer = self.pointer_proj(_choose(masks, best))
        pointer = torch.where(present, pointer, self.absent_pointer(pointer))
        return Decoded(
            logits.masked_fill(~present[..., None], ABSENT_LOGIT).masked_fill(~used[..., None, None], 0),
            iou.gather(-1, best)[..., 0].masked_fill(~used, 0),
            presence.masked_fill(~used, FREE_PRESENCE),
            pointer.masked_fill(~used[..., None], 0),
        )


def _choose(values: Tensor, best: Tensor) -> Tensor:
    """Return the values [G, slots, C] at index best [G, slots, 1] of [G, slots, masks, C]."""
    return values.gather(2, best[..., None].expand(-1, -1, -1, values.shape[-1]))[:, :, 0]


def embed_grid(frequencies: Tensor, grid: int) -> Tensor:
    """Return the position encoding [C, grid * grid] of the centres of an image's tokens."""
    # exact to float64, whatever the model's dtype
    centres = (torch.arange(grid, device=frequencies.device, dtype=torch.float64) + 0.5) / grid
    rows, columns = torch.meshgrid(centres, centres, indexing="ij")
    positions = 2 * torch.stack([columns, rows], dim=-1).flatten(0, 1) - 1
    phase = 2 * torch.pi * positions @ frequencies.double()
    return torch.cat([phase.sin(), phase.cos()], dim=-1).T
