"""The tracker's training forward: many objects of many clips at once, with gradients through the memory.

The same arithmetic as inference (`sam3_node.models`, transformers), on transformers' own modules, which hold the
weights. Held to transformers' streaming inference by `python -m tools.train_nano gate parity`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from sam3_node.models.sam.memory_write import MASK_BIAS, MASK_SCALE
from sam3_node.models.sam.stages import ABSENT_LOGIT
from sam3_node.models.sam.vit import POOL, Hiera, z_order

IMAGES = 4  # encoded at once on a CPU


class Features(NamedTuple):
    """Features of M images: fine [M, C/8, 64, 64], middle [M, C/4, 32, 32], top [M, C, 16, 16]."""

    fine: Tensor
    middle: Tensor
    top: Tensor

    def select(self, images: Tensor) -> Features:
        """Return the features of N objects; `images` int64 [N] holds the index of each object's image."""
        return Features(*(level[images] for level in self))


class Decoded(NamedTuple):
    """Output of the decoder for N objects and K candidate masks each.

    logits [N, K, 64, 64], iou [N, K], pointers [N, K, C], presence [N].
    """

    logits: Tensor
    iou: Tensor
    pointers: Tensor
    presence: Tensor


class Memory(NamedTuple):
    """One frame of N objects: memory [N, 256, 64], pointer [N, C]; `prompted` where it was a prompted frame."""

    frame: int
    prompted: bool
    memory: Tensor
    pointer: Tensor


class _NoPosition(nn.Module):
    """Stands in for the memories' position maps, which the training forward computes once."""

    def forward(self, shape: Any, device: Any, dtype: Any, mask: Any = None) -> Tensor:
        return torch.zeros((), device=device, dtype=dtype)


class TrainingTracker(nn.Module):
    """Wraps a transformers `Sam2VideoModel`; `source` holds the weights.

    mixed: encode and decode in bfloat16 where that is safe; weights, memories and losses stay float32.
    """

    position: Tensor
    memory_place: Tensor
    image_place: Tensor
    rotation: Tensor

    def __init__(self, source: Any, mixed: bool = False) -> None:
        super().__init__()
        self.source, self.mixed = source, mixed
        self.hiera = Hiera(source.vision_encoder.backbone)
        size = source.backbone_feature_sizes[-1]
        sine = source.memory_encoder.position_encoding
        with torch.no_grad():
            place = sine((1, source.mem_dim, *size), torch.device("cpu"), torch.float32)
            image = type(sine)(num_position_features=source.hidden_dim // 2, normalize=True)(
                (1, source.hidden_dim, *size), torch.device("cpu"), torch.float32
            )
            position = source.get_image_wide_positional_embeddings()
        self.register_buffer("position", position.clone(), persistent=False)  # [1, C, h, w]
        self.register_buffer(
            "memory_place", place.flatten(2).permute(2, 0, 1), persistent=False
        )  # [hw, 1, 64]
        self.register_buffer("image_place", image.flatten(2).permute(2, 0, 1), persistent=False)  # [hw, 1, C]
        cos, sin = source.memory_attention.rotary_emb(position, source.memory_attention.position_ids)
        rotation = torch.stack([cos[0, :, ::2], sin[0, :, ::2]], dim=-1)
        self.register_buffer("rotation", rotation, persistent=False)  # [hw, D / 2, (cos, sin)]
        source.memory_encoder.position_encoding = _NoPosition()

    def encode(self, pixels: Tensor) -> Features:
        """Normalised pixels [M, 3, 256, 256] -> Features; on a CPU a few images at a time, which stay in its cache."""
        if pixels.device.type != "cpu":
            return self._encode(pixels)
        parts = [self._encode(some) for some in pixels.split(IMAGES)]
        return Features(*(torch.cat(levels) for levels in zip(*parts, strict=True)))

    def _encode(self, pixels: Tensor) -> Features:
        vision, decoder = self.source.vision_encoder, self.source.mask_decoder
        with self._precision(pixels):
            fine, middle, top, coarse = self.hiera(pixels, self.hiera.position_map(vision.backbone))
            lateral = vision.neck.convs
            top = _pointwise(top, lateral[1]) + _pointwise(coarse, lateral[0]).repeat_interleave(POOL, dim=1)
            fine = _pointwise(fine, lateral[3], decoder.conv_s0)
            middle = _pointwise(middle, lateral[2], decoder.conv_s1)
        return Features(*(_map(level.float()) for level in (fine, middle, top)))

    @contextmanager
    def _precision(self, pixels: Tensor) -> Iterator[None]:
        """Mixed precision where wanted; on a CPU attention in plain steps, whose fused gradient is slow there."""
        kind = pixels.device.type
        backends = [SDPBackend.MATH] if kind == "cpu" else list(SDPBackend.__members__.values())
        with sdpa_kernel(backends), torch.autocast(kind, torch.bfloat16, enabled=self.mixed):
            yield

    def prompt(self, points: Tensor, labels: Tensor, logits: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Embed points [N, n, 2] in pixels, labels int [N, n] and earlier logits [N, 64, 64], if any.

        -> sparse [N, n + 1, C], dense [N, C, 16, 16]. Labels as in `sam3_node.models.sam.tracker_model.Decoder.prompt`.
        """
        encoder = self.source.prompt_encoder
        sparse = encoder._embed_points(points[:, None], labels[:, None], pad=True)[:, 0]
        return sparse, self._dense(logits, len(points))

    def nothing(self, count: int) -> tuple[Tensor, Tensor]:
        """The embeddings of no prompt, for `count` objects."""
        device = self.position.device
        empty = torch.full((count, 1), -1, dtype=torch.int32, device=device)
        return self.prompt(torch.zeros(count, 1, 2, device=device), empty)

    def _dense(self, logits: Tensor | None, count: int) -> Tensor:
        encoder = self.source.prompt_encoder
        if logits is None:
            empty = encoder.no_mask_embed.weight.reshape(1, -1, 1, 1)
            return empty.expand(count, -1, *self.position.shape[-2:])
        return encoder.mask_embed(logits[:, None])

    def decode(self, image: Features, sparse: Tensor, dense: Tensor) -> Decoded:
        """Masks of N objects; image of N rows, whose top may already have read the memory."""
        with self._precision(image.top):
            decoded = self._decode(image, sparse, dense)
        return Decoded(*(value.float() for value in decoded))

    def _decode(self, image: Features, sparse: Tensor, dense: Tensor) -> Decoded:
        decoder = self.source.mask_decoder
        tokens = torch.cat(
            [decoder.obj_score_token.weight, decoder.iou_token.weight, decoder.mask_tokens.weight]
        )
        queries = torch.cat([tokens.expand(len(sparse), -1, -1), sparse], dim=1)
        queries, pixels = decoder.transformer(
            point_embeddings=queries[:, None],
            image_embeddings=image.top + dense,
            image_positional_embeddings=self.position.expand(len(sparse), -1, -1, -1),
            attention_similarity=None,
            target_embedding=None,
        )
        masks = queries[:, 0, 2 : 2 + decoder.num_mask_tokens]
        logits = self._heads(masks) @ self._upscale(pixels, image).flatten(2)
        return Decoded(
            logits.unflatten(2, image.fine.shape[-2:]),
            decoder.iou_prediction_head(queries[:, 0, 1]),
            self.source.object_pointer_proj(masks),
            decoder.pred_obj_score_head(queries[:, 0, 0])[:, 0],
        )

    def _upscale(self, pixels: Tensor, image: Features) -> Tensor:
        decoder = self.source.mask_decoder
        x = pixels.transpose(2, 3).reshape(image.top.shape)
        x = decoder.activation(decoder.upscale_layer_norm(decoder.upscale_conv1(x) + image.middle))
        return decoder.activation(decoder.upscale_conv2(x) + image.fine)

    def _heads(self, masks: Tensor) -> Tensor:
        heads = self.source.mask_decoder.output_hypernetworks_mlps
        return torch.stack([head(masks[:, i]) for i, head in enumerate(heads)], dim=1)

    def without_memory(self, image: Features) -> Features:
        """Features of a prompted frame."""
        return image._replace(top=image.top + self.source.no_memory_embedding.reshape(1, -1, 1, 1))

    def mask_prompt(self, image: Features, mask: Tensor) -> Decoded:
        """Decode a mask prompt, float [N, 256, 256] in 0..1."""
        small = self.source.mask_downsample(mask[:, None])[:, 0]
        sparse, _ = self.nothing(len(mask))
        return self.decode(image, sparse, self._dense(small, len(mask)))

    def as_if_told(self, top: Tensor, target: Tensor) -> Tensor:
        """The features [N, C, 16, 16] that the decoder would get if a mask [N, 64, 64] in 0..1 were its prompt."""
        return top + self._dense(mask_logits(target), len(target))

    def pointer(self, decoded: Decoded, candidate: int, present: Tensor) -> Tensor:
        """Object pointer [N, C] where present bool [N], else the one that says absent."""
        return torch.where(present[:, None], decoded.pointers[:, candidate], self.source.no_object_pointer)

    def remember(self, top: Tensor, logits: Tensor, prompted: bool, present: Tensor) -> Tensor:
        """top [N, C, 16, 16] of the image, mask logits [N, h, h], present bool [N] -> memory [N, 256, 64]."""
        source = self.source
        size = source.prompt_encoder.mask_input_size[0] * 4
        masks = logits[:, None]
        if masks.shape[-1] != size:
            masks = F.interpolate(masks, size=(size, size), mode="bilinear", align_corners=False)
        weight = (masks > 0).float() if prompted else masks.sigmoid()
        scaled = weight * source.config.sigmoid_scale_for_mem_enc + source.config.sigmoid_bias_for_mem_enc
        memory, _ = source.memory_encoder(top, scaled)
        absent = (~present).float()[:, None, None, None]
        memory = memory + absent * source.occlusion_spatial_embedding_parameter[..., None, None]
        return memory.flatten(2).transpose(1, 2)

    def read(self, top: Tensor, frame: int, memories: list[Memory]) -> Tensor:
        """Condition top [N, C, 16, 16] of frame number `frame` on what is remembered -> the same shape."""
        source = self.source
        attended = [m for m in memories if m.prompted or frame - m.frame < source.num_maskmem]
        rows = [0 if m.prompted else frame - m.frame for m in attended]
        time = source.memory_temporal_positional_encoding
        values = torch.cat([m.memory.transpose(0, 1) for m in attended])
        place = torch.cat([self.memory_place + time[row - 1] for row in rows])
        pointers, pointer_place = self._pointers(frame, memories)
        queries = top.flatten(2).permute(2, 0, 1)
        values = torch.cat([values, pointers]).transpose(0, 1)
        keys = values + torch.cat([place, pointer_place]).transpose(0, 1)
        x = (queries + 0.1 * self.image_place).transpose(0, 1)
        for layer in source.memory_attention.layers:
            x = self._read_layer(layer, x, keys, values, len(pointers))
        return source.memory_attention.layer_norm(x).transpose(1, 2).reshape(top.shape)

    def _read_layer(self, layer: Any, x: Tensor, keys: Tensor, values: Tensor, unplaced: int) -> Tensor:
        """One layer; the last `unplaced` keys are pointers, which have no place in the image."""
        own, cross = layer.self_attn, layer.cross_attn_image
        normed = layer.layer_norm1(x)
        query, key = self._rotate(own.q_proj(normed)), self._rotate(own.k_proj(normed))
        x = x + own.o_proj(_attend(query, key, own.v_proj(normed)))
        key = cross.k_proj(keys)
        spatial = key.shape[1] - unplaced
        key = torch.cat([self._rotate(key[:, :spatial]), key[:, spatial:]], dim=1)
        read = _attend(self._rotate(cross.q_proj(layer.layer_norm2(x))), key, values)
        x = x + cross.o_proj(
            cross.v_proj(read)
        )  # attention weights sum to one: project what was read, not all
        return x + layer.linear2(layer.activation(layer.linear1(layer.layer_norm3(x))))

    def _rotate(self, x: Tensor) -> Tensor:
        """Rotary encoding of x [N, k * hw, D], the map repeated k times."""
        pairs = torch.view_as_complex(x.unflatten(1, (-1, len(self.rotation))).unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * torch.view_as_complex(self.rotation)).flatten(-2).flatten(1, 2)

    def _pointers(self, frame: int, memories: list[Memory]) -> tuple[Tensor, Tensor]:
        """Pointers as memory tokens [P * 2, N, 64] and their places [P * 2, 1, 64]."""
        source, most = self.source, self.source.config.max_object_pointers_in_encoder
        attended = [m for m in memories if m.prompted or frame - m.frame < most]
        age = torch.tensor(
            [frame - m.frame for m in attended], dtype=torch.float32, device=self.position.device
        )
        phase = _sine_1d(age / (most - 1), source.hidden_dim)
        place = source.temporal_positional_encoding_projection_layer(phase)[:, None]
        splits = source.hidden_dim // source.mem_dim
        pointers = torch.stack([m.pointer for m in attended]).unflatten(2, (splits, -1))
        return pointers.transpose(1, 2).flatten(0, 1), place.repeat_interleave(splits, dim=0)


def _pointwise(tokens: Tensor, *layers: Any) -> Tensor:
    """1x1 convolutions, one after the other, of tokens [B, n, C] as one linear map."""
    weight, bias = layers[0].weight[:, :, 0, 0], layers[0].bias
    for layer in layers[1:]:
        then = layer.weight[:, :, 0, 0]
        weight, bias = then @ weight, then @ bias + layer.bias
    return F.linear(tokens, weight, bias)


def _map(tokens: Tensor) -> Tensor:
    """Tokens [B, n, C] in Z order -> map [B, C, h, w]."""
    side = math.isqrt(tokens.shape[1])
    rows = z_order(side).argsort().to(tokens.device)
    return tokens.transpose(1, 2)[:, :, rows].unflatten(2, (side, side))


def mask_logits(mask: Tensor) -> Tensor:
    """Logits of a mask given as prompt, bool or 0..1."""
    return mask.float() * MASK_SCALE + MASK_BIAS


def hide(logits: Tensor, present: Tensor) -> Tensor:
    """Logits [N, h, w] with absent objects at the reference's floor."""
    return logits.masked_fill(~present[:, None, None], ABSENT_LOGIT)


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of query [N, L, D] to key [N, T, D] and value [N, T, V], in plain steps: on a CPU the fastest."""
    scores = torch.bmm(query * query.shape[-1] ** -0.5, key.transpose(1, 2))
    return torch.bmm(scores.softmax(dim=-1), value)


def _sine_1d(position: Tensor, channels: int) -> Tensor:
    """The reference's sine encoding of position [P] -> [P, channels]."""
    half = channels // 2
    period = 10000.0 ** (2 * (torch.arange(half, device=position.device).float() // 2) / half)
    phase = position[:, None] / period
    return torch.cat([phase.sin(), phase.cos()], dim=-1)
