"""Run the tracker's training forward: many objects of many clips at once, with gradients through the memory.

The same arithmetic as inference (`sam3_node.models`, transformers), on transformers' own modules, which hold the
weights; training/tests/test_nano_network.py compares it with transformers' streaming inference. The module also holds
the tracker's shape and its first weights.
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
from transformers import Sam2VideoConfig, Sam2VideoModel

from sam3_node.models.sam.memory_encoder import MASK_BIAS, MASK_SCALE
from sam3_node.models.sam.stages import ABSENT_LOGIT
from sam3_node.models.sam.vit import POOL, Hiera, z_order

SIZE = 256
HIDDEN = 128
STAGES = (32, 64, 128, 256)
# image features against prompts, so that prompts are heard
QUIET = 0.3
LOUD = 5.0

KEEN = 2.0  # of memory keys: how sharply the read first looks for likeness
PLAIN = 2.0  # deviation of the features that a memory read hands on, as of those without memory
SLOWEST = 0.125
FASTEST = 1.5
GENTLE = 0.1  # of residual branches and learned positions that begin as noise
IMAGES = 4  # encoded at once on a CPU


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
    angle[0::4] = 0.0
    angle[1::4] = math.pi / 2
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
    encoder = model.memory_encoder
    attention = model.memory_attention
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
    reduce = model.mask_downsample
    last = model.prompt_encoder.mask_embed.conv3
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
        self.source = source
        self.mixed = mixed
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
        # [hw, 1, 64]
        self.register_buffer("memory_place", place.flatten(2).permute(2, 0, 1), persistent=False)
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
        vision = self.source.vision_encoder
        decoder = self.source.mask_decoder
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
        own = layer.self_attn
        cross = layer.cross_attn_image
        normed = layer.layer_norm1(x)
        query = self._rotate(own.q_proj(normed))
        key = self._rotate(own.k_proj(normed))
        x = x + own.o_proj(_attend(query, key, own.v_proj(normed)))
        key = cross.k_proj(keys)
        spatial = key.shape[1] - unplaced
        key = torch.cat([self._rotate(key[:, :spatial]), key[:, spatial:]], dim=1)
        read = _attend(self._rotate(cross.q_proj(layer.layer_norm2(x))), key, values)
        # attention weights sum to one: project what was read, not all
        x = x + cross.o_proj(cross.v_proj(read))
        return x + layer.linear2(layer.activation(layer.linear1(layer.layer_norm3(x))))

    def _rotate(self, x: Tensor) -> Tensor:
        """Rotary encoding of x [N, k * hw, D], the map repeated k times."""
        pairs = torch.view_as_complex(x.unflatten(1, (-1, len(self.rotation))).unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * torch.view_as_complex(self.rotation)).flatten(-2).flatten(1, 2)

    def _pointers(self, frame: int, memories: list[Memory]) -> tuple[Tensor, Tensor]:
        """Pointers as memory tokens [P * 2, N, 64] and their places [P * 2, 1, 64]."""
        source = self.source
        most = self.source.config.max_object_pointers_in_encoder
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
    weight = layers[0].weight[:, :, 0, 0]
    bias = layers[0].bias
    for layer in layers[1:]:
        then = layer.weight[:, :, 0, 0]
        weight = then @ weight
        bias = then @ bias + layer.bias
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
