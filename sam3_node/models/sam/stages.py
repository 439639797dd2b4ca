"""Run the four stages of every frame (encode, read, decode, remember) as functions of tensors, and SAM's mask decoder.

An engine may replace each stage of `Stages`, which tracks objects without prompts. Prompts always use the torch modules
`Decoder` and `MemoryEncoder`.

The mask decoder (arXiv 2304.02643, 2408.00714) equals transformers' on the same weights, arranged for many objects on
one image. SAM 1 cannot tell whether the object is in view, so it always says that it is. Attention between few tokens
and many pixels never projects the pixels: the products are regrouped, so that the tokens carry the projections.
`(x Wk) . (t Wq)` is `x . (t Wq Wk^T)`, and `softmax(s) (x Wv)` is `(softmax(s) x) Wv`. The pyramid's pixels stay
grouped by the token that they come from, so upscaling is a matrix product without a rearrangement, until the masks are
complete. The four mask heads are computed together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import ModelError
from .algebra import apply_linear, apply_norm, embed_grid, join_linear, make_linear
from .memory_encoder import MemoryEncoder

IN_VIEW_LOGIT = 10.0
"""Presence logit for weights without a presence head, which cannot say that an object is out of view."""


class MaskDecoder(nn.Module):
    """The mask decoder of a tracker, for image tokens with the position encoding [1, C, h, w]."""

    output_tokens: Tensor
    position: Tensor

    def __init__(self, source: Any, position: Tensor) -> None:
        super().__init__()
        self.masks = source.num_mask_tokens
        self.prefers_stable: bool = getattr(source, "dynamic_multimask_via_stability", False)
        if self.prefers_stable:
            self.stability_delta: float = source.dynamic_multimask_stability_delta
            self.stability_threshold: float = source.dynamic_multimask_stability_thresh
        self.upscale = _Upscale(source)
        self.iou_head = source.iou_prediction_head
        self.presence_head: nn.Module | None = getattr(source, "pred_obj_score_head", None)
        tokens = [source.iou_token.weight, source.mask_tokens.weight]
        # `forward` reads the presence from the first token
        if self.presence_head is not None:
            tokens.insert(0, source.obj_score_token.weight)
        self.register_buffer("output_tokens", torch.cat(tokens).detach()[None].clone(), persistent=False)
        flat = position.detach()[0].flatten(1)  # [C, hw]
        self.register_buffer("position", flat.clone(), persistent=False)
        transformer = source.transformer
        self.layers = nn.ModuleList(map(_TwoWayLayer, transformer.layers))
        self.final = _TokenToImage(transformer.final_attn_token_to_image)
        self.final_norm = transformer.layer_norm_final_attn
        self.heads = _StackedHeads(source.output_hypernetworks_mlps)

    def forward(
        self, image: Tensor, fine: Tensor, middle: Tensor, prompt: Tensor, multimask: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Decode N objects on one image.

        Takes image [N, C, h, w], fine [1, C/8, 4h, 4w], middle [1, C/4, 2h, 2w] and prompt [N, T, C]. Fine and middle
        may be [N, ...] for objects on N images. Return logits
        [N, M, 4h, 4w], iou [N, M], mask tokens [N, M, C] and presence logits [N]; M is 3 with `multimask`, else 1.
        """
        logits, iou, tokens, presence = self.decode_all(image, fine, middle, prompt)
        if multimask:
            return logits[:, 1:], iou[:, 1:], tokens[:, 1:], presence
        logits, iou = self.pick_single(logits, iou)
        return logits, iou, tokens[:, :1], presence

    def decode_all(
        self, image: Tensor, fine: Tensor, middle: Tensor, prompt: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Decode as `forward` does, to all masks: the single one first, then the alternatives."""
        tokens = torch.cat([self.output_tokens.expand(prompt.shape[0], -1, -1), prompt], dim=1)
        queries = tokens
        pixels = image.flatten(2).transpose(1, 2)
        for layer in self.layers:
            queries, pixels = layer(queries, pixels, tokens, self.position)
        queries = self.final_norm(queries + self.final(queries + tokens, pixels, self.position))
        presence = self._presence(queries[:, 0])
        queries = queries if self.presence_head is None else queries[:, 1:]
        mask_tokens = queries[:, 1 : 1 + self.masks]
        logits = self.upscale(self.heads(mask_tokens), pixels, fine, middle)
        return logits, self.iou_head(queries[:, 0]), mask_tokens, presence

    def pick_single(self, logits: Tensor, iou: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mask [N, 1, 4h, 4w] and iou [N, 1] that stand where no masks compete, from those of all.

        SAM 2 takes the best of the competing masks where the single one is unstable: where its area depends on the
        threshold.
        """
        single = logits[:, :1]
        single_iou = iou[:, :1]
        if not self.prefers_stable:
            return single, single_iou
        low, high = (
            (single.flatten(1) > sign * self.stability_delta).sum(dim=-1, keepdim=True).float()
            for sign in (-1, 1)
        )
        is_stable = torch.where(low > 0, high / low, 1.0) >= self.stability_threshold  # [N, 1]
        best = iou[:, 1:].argmax(dim=-1, keepdim=True)
        index = best[..., None, None].expand(-1, -1, *logits.shape[-2:])
        return (
            torch.where(is_stable[..., None, None], single, logits[:, 1:].gather(1, index)),
            torch.where(is_stable, single_iou, iou[:, 1:].gather(1, best)),
        )

    def _presence(self, token: Tensor) -> Tensor:
        if self.presence_head is None:
            return token.new_full((token.shape[0],), IN_VIEW_LOGIT)
        return self.presence_head(token)[:, 0]


class _Upscale(nn.Module):
    """Upscales image tokens four times with the finer features, and multiplies them with the mask heads' output.

    A transposed convolution with stride = kernel size is a linear map of each token to the 2 x 2 pixels below it. All
    pixels below one token stay neighbours until the end; the finer features are brought into this order, once for all
    objects.
    """

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.first, self.second = map(_subpixel_linear, (source.upscale_conv1, source.upscale_conv2))
        self.norm = source.upscale_layer_norm
        self.activation = source.activation

    def forward(self, heads: Tensor, pixels: Tensor, fine: Tensor, middle: Tensor) -> Tensor:
        """Return logits [N, M, 4h, 4w] of heads [N, M, C/8], image tokens [N, hw, C] and the image's features."""
        height = middle.shape[-2] // 2
        width = middle.shape[-1] // 2
        count = pixels.shape[0]
        area = height * width
        x = apply_linear(self.first, pixels).view(count, area * 4, -1) + _group(middle, height, width, 1)
        x = self.activation(apply_norm(self.norm, x))
        x = apply_linear(self.second, x).view(count, area * 16, -1) + _group(fine, height, width, 2)
        logits: Tensor = heads @ self.activation(x).transpose(1, 2)
        logits = logits.view(count, -1, height, width, 2, 2, 2, 2)
        return logits.permute(0, 1, 2, 4, 6, 3, 5, 7).reshape(count, -1, 4 * height, 4 * width)


def _subpixel_linear(layer: nn.ConvTranspose2d) -> nn.Linear:
    """Return the linear map of a token to its 2 x 2 pixels [2 * 2 * C] that equals a transposed convolution."""
    assert layer.kernel_size == layer.stride == (2, 2)
    assert layer.bias is not None
    return make_linear(layer.weight, layer.weight.permute(2, 3, 1, 0).flatten(0, 2), layer.bias.repeat(4))


def _group(features: Tensor, height: int, width: int, levels: int) -> Tensor:
    """Turn features [n, C, 2^L h, 2^L w] into pixels [n, hw * 4^L, C]: by token, then by pixel of each level L."""
    count, channels = features.shape[:2]
    rows = [height] + [2] * levels
    columns = [width] + [2] * levels
    split = features.view(count, channels, *rows, *columns)
    axes = [2 + level + axis * (levels + 1) for level in range(levels + 1) for axis in (0, 1)]
    return split.permute(0, *axes, 1).reshape(count, -1, channels)


class _TwoWayLayer(nn.Module):
    """Tokens attend to each other and to the image, then the image attends to the tokens."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3, self.norm4 = (
            getattr(source, f"layer_norm{i}") for i in range(1, 5)
        )
        self.first = source.skip_first_layer_pe
        self.mlp = source.mlp
        own = source.self_attn
        self.own_query_key = join_linear(own.q_proj, own.k_proj)
        self.own_value = own.v_proj
        self.own_out = own.o_proj
        self.own_heads = own.num_attention_heads
        self.to_image = _TokenToImage(source.cross_attn_token_to_image)
        self.to_tokens = _ImageToToken(source.cross_attn_image_to_token)

    def forward(
        self, queries: Tensor, pixels: Tensor, tokens: Tensor, position: Tensor
    ) -> tuple[Tensor, Tensor]:
        # in the first layer the queries are the tokens, and the sum would double them
        positioned = queries if self.first else queries + tokens
        query, key = self.own_query_key(positioned).chunk(2, dim=-1)
        attended = self.own_out(_attend(query, key, self.own_value(queries), self.own_heads))
        # the reference has no skip connection here in the first layer
        queries = self.norm1(attended if self.first else queries + attended)
        queries = self.norm2(queries + self.to_image(queries + tokens, pixels, position))
        queries = self.norm3(queries + self.mlp(queries))
        back = self.to_tokens(pixels, queries + tokens, queries, position)
        return queries, apply_norm(self.norm4, pixels + back)


class _TokenToImage(nn.Module):
    """Attention of tokens to the image. The bias of the keys is left out: it moves all scores of a token alike."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.heads = source.num_attention_heads
        self.query = source.q_proj
        self.out = source.o_proj
        self.key = _per_head(source.k_proj.weight, self.heads)
        self.value = _per_head(source.v_proj.weight, self.heads)
        self.value_bias = source.v_proj.bias

    def forward(self, tokens: Tensor, pixels: Tensor, position: Tensor) -> Tensor:
        """Attend with tokens [N, T, C] to pixels [N, hw, C] with the position encoding [C, hw]; return [N, T, C]."""
        count, length = tokens.shape[:2]
        carried = _carry(self.query(tokens) * self.key.shape[1] ** -0.5, self.key)  # [N, H * T, C]
        # the position is the same for all objects, so it is multiplied apart and no pixels are copied
        scores = torch.baddbmm(carried @ position, carried, pixels.transpose(1, 2))
        seen = torch.bmm(scores.softmax(dim=-1), pixels)  # [N, H * T, C]
        seen = seen.view(count, self.heads, length, -1).transpose(0, 1).flatten(1, 2)
        values = torch.bmm(seen, self.value.transpose(1, 2))  # [H, N * T, D]
        values = values.view(self.heads, count, length, -1).permute(1, 2, 0, 3).flatten(2)
        return self.out(values + self.value_bias)


class _ImageToToken(nn.Module):
    """Attention of the image to tokens."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.heads = source.num_attention_heads
        self.key = source.k_proj
        self.value = source.v_proj
        self.query = _per_head(source.q_proj.weight, self.heads)
        self.query_bias = nn.Parameter(
            source.q_proj.bias.detach().view(self.heads, -1, 1), requires_grad=False
        )
        out = source.o_proj
        self.out = nn.Parameter(  # [H, D, C]
            out.weight.detach().T.unflatten(0, (self.heads, -1)).contiguous(), requires_grad=False
        )
        self.out_bias = out.bias

    def forward(self, pixels: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
        """Attend with pixels [N, hw, C] to keys and values [N, T, C]; return [N, hw, C]."""
        count, length = keys.shape[:2]
        key = self.key(keys) * self.query.shape[1] ** -0.5
        # [N, H * T, C] and [N, H * T, 1]
        carried = _carry(key, self.query)
        bias = _carry(key, self.query_bias)
        scores = torch.baddbmm(carried @ position + bias, carried, pixels.transpose(1, 2))
        weights = scores.view(count, self.heads, length, -1).softmax(dim=2).flatten(1, 2)
        out = torch.baddbmm(self.out_bias, weights.transpose(1, 2), _carry(self.value(values), self.out))
        return out


def _per_head(weight: Tensor, heads: int) -> nn.Parameter:
    """Return a projection's weight [H * D, C] as [H, D, C]."""
    return nn.Parameter(weight.detach().unflatten(0, (heads, -1)).contiguous(), requires_grad=False)


def _carry(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x [N, T, H * D] with a matrix of each head [H, D, C]; return [N, H * T, C]."""
    split = torch.unflatten(x, -1, (weight.shape[0], -1)).permute(2, 0, 1, 3).flatten(1, 2)
    return torch.unflatten(torch.bmm(split, weight), 1, x.shape[:2]).transpose(0, 1).flatten(1, 2)


class _StackedHeads(nn.Module):
    """The three-layer perceptrons of all mask tokens, computed together."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        layers = [[head.proj_in, *head.layers, head.proj_out] for head in source]
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        for level in zip(*layers, strict=True):
            weight = torch.stack([layer.weight.T for layer in level]).detach()
            bias = torch.stack([layer.bias for layer in level]).detach()[:, None]
            self.weights.append(nn.Parameter(weight, requires_grad=False))
            self.biases.append(nn.Parameter(bias, requires_grad=False))

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [N, K, C] to [N, K, C / 8]."""
        x = tokens.transpose(0, 1)  # [K, N, C]
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(bias, x if i == 0 else x.relu(), weight)
        return x.transpose(0, 1)


def _attend(query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
    """Compute multi-head attention of query [N, L, D] to key and value [N, T, D]."""
    query, key, value = (torch.unflatten(x, -1, (heads, -1)).transpose(1, 2) for x in (query, key, value))
    if query.is_cuda and not torch.compiler.is_compiling():
        # for a few tokens plain products do, while cuDNN would plan each number of objects and points for 0.1 s
        scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5
        return (scores.float().softmax(-1).to(value.dtype) @ value).transpose(1, 2).flatten(2)
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


ABSENT_LOGIT = -1024.0  # the reference's mask logit for an object out of view

Run = Callable[..., Any]


class ReadLimits(NamedTuple):
    """What memory attention takes: by default, as an engine does, any number of memories with a mask of all."""

    any_width: bool = False
    """It takes any number of memories without a mask; of a compiled model, all pointers with a mask of them."""
    full_from: int | None = None
    """Objects from which it takes full rows of the bank without a mask; None: it never does. Otherwise it takes the
    whole bank with a mask, and reads what is valid."""
    max_objects: int | None = None
    """Largest number of objects of a call; None for any."""


def find_limits(run: Any) -> ReadLimits:
    """Return what a read takes. A stage without `limits` takes the whole bank with a mask."""
    limits: ReadLimits = getattr(run, "limits", ReadLimits())
    return limits


class EncodeLimits(NamedTuple):
    """What an encoder takes, and where it may run: by default, one image, while nothing else runs."""

    many_images: bool = False
    """It takes pixels [B, 3, S, S] of several images."""
    runs_beside: bool = False
    """It may run in another thread, and on a GPU in another stream, while other stages run."""


def find_encode_limits(run: Any) -> EncodeLimits:
    """Return the limits of an encoder: torch's own module takes all, but is compiled for one image."""
    if isinstance(run, nn.Module):
        return EncodeLimits(many_images=run._compiled_call_impl is None, runs_beside=True)
    limits: EncodeLimits = getattr(run, "encode_limits", EncodeLimits())
    return limits


class Stages(NamedTuple):
    """The stages that track N objects without prompts. `h`, `w` is the token grid; a memory has T tokens, which are hw
    except for EdgeTAM.

    `find_limits` says what a read takes.
    """

    encode: Run
    """(pixels [1, 3, S, S]) -> the tensors of `Features`; see `find_encode_limits` for more images"""
    read: Run
    """(top [1, C, h, w], memory [N, M, T, 64], offset int64 [N, M], pointers [N, P, C], pointer_age float32 [N, P],
    valid bool [N, M + P] or None) -> [N, C, h, w], see `MemoryAttention`"""
    decode: Run
    """(top [N, C, h, w], fine, middle) -> the tensors of `Decoded`"""
    remember: Run
    """(top [1, C, h, w], logits [N, 4h, 4w], presence [N]) -> [N, T, 64], see `MemoryEncoder`"""


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
    prompt_fine: Tensor | None = None
    """As `fine`, of the pyramid that prompts are decoded on, where weights have one of its own (SAM 3.1)"""
    prompt_middle: Tensor | None = None
    prompt_top: Tensor | None = None

    def split(self) -> list[Features]:
        """Return the maps of each of B images, of maps [B, ...]. No two share memory, so each can be freed alone."""
        maps: list[Any] = [None if part is None else part.split(1) for part in self]
        found = []
        for index in range(len(self.top)):
            own: list[Any] = [None if part is None else part[index].clone() for part in maps]
            found.append(Features(*own))
        return found

    def for_prompts(self) -> Features:
        """Return the features that prompts are decoded on: these, unless the weights have a pyramid for prompts."""
        if self.prompt_fine is None or self.prompt_middle is None or self.prompt_top is None:
            return self
        return Features(self.prompt_fine, self.prompt_middle, self.prompt_top)


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

    def pick(self, index: int) -> Decoded:
        """Return one object of them."""
        return Decoded(*(values[index : index + 1] for values in self))

    def pick_all(self, indices: list[int]) -> Decoded:
        """Return these objects of them."""
        return Decoded(*(values[indices] for values in self))


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
            self.pointer_proj = source.object_pointer_proj
            self.no_pointer = source.no_object_pointer
            self.mask_downsample = source.mask_downsample
        else:  # the mask token itself describes the object
            self.pointer_proj = nn.Identity()
            self.no_pointer = nn.Parameter(torch.zeros_like(self.no_memory[0]))
        frequencies = source.shared_image_embedding.positional_embedding.detach()
        position = embed_grid(frequencies, *source.backbone_feature_sizes[-1]).to(
            self.no_memory.dtype, copy=True
        )
        self.register_buffer("position", position, persistent=False)
        self.mask_decoder = MaskDecoder(source.mask_decoder, position)
        # a point with this label is no point
        empty = torch.full((1, 1, 1), -1, dtype=torch.int32, device=position.device)
        with torch.no_grad():
            nothing, _ = self.prompt_encoder(position.new_zeros(1, 1, 1, 2), empty, None, None)
        # [1, 2, C]
        self.register_buffer("nothing", nothing[0].to(position.dtype, copy=True), persistent=False)

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
        return self._describe(masks[rows, best], iou[rows, best], tokens[rows, best], presence)

    def candidates(
        self, features: Features, points: Tensor, labels: Tensor, logits: Tensor | None
    ) -> Decoded:
        """Return the three masks that compete for each prompt on an image, the highest predicted IoU first.

        See `prompt` for points [n, 2], labels [n] and logits, of one prompt or of N. The three masks of a prompt are
        neighbours in the result.
        """
        top, fine, middle, sparse, dense = self.embed(features, points, labels, logits)
        masks, iou, tokens, presence = self.mask_decoder(top + dense, fine, middle, sparse, True)
        order = iou.argsort(dim=1, descending=True)
        prompts = torch.arange(len(iou), device=iou.device)[:, None].expand_as(order)
        # presence belongs to the object, not to one of its masks
        of_objects = presence.flatten()[:, None].expand_as(order).flatten()
        chosen = prompts.flatten(), order.flatten()
        return self._describe(masks[chosen], iou[chosen], tokens[chosen], of_objects)

    def _describe(self, masks: Tensor, iou: Tensor, tokens: Tensor, presence: Tensor) -> Decoded:
        present = presence[:, None] > 0
        logits = masks.masked_fill(~present[..., None], ABSENT_LOGIT)
        return Decoded(logits, iou, presence, self.describe_pointer(tokens, present))

    def describe_pointer(self, tokens: Tensor, present: Tensor) -> Tensor:
        """Return the pointers [N, C] of mask tokens [N, C]; present [N, 1] says which objects are in view."""
        return torch.where(present, self.pointer_proj(tokens), self.no_pointer)

    def embed(
        self, features: Features, points: Tensor, labels: Tensor, logits: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the first five arguments of `forward` for prompts on an image without memory; see `prompt`."""
        sparse, dense = self.prompt(points, labels, logits)
        features = features.for_prompts()
        top = features.top + self.no_memory.reshape(1, -1, 1, 1)
        # `len` would fix the number of objects in an export
        return top.expand(sparse.shape[0], -1, -1, -1), features.fine, features.middle, sparse, dense

    def no_prompt(self) -> tuple[Tensor, Tensor]:
        """Return the sparse [1, 2, C] and dense [1, C, h, w] embeddings for no prompt."""
        return self.nothing, self._dense(None)

    def prompt(self, points: Tensor, labels: Tensor, logits: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Embed points [n, 2] in model pixels with labels int [n], and optionally logits [4h, 4w] of an earlier mask.

        Labels: 1 inside, 0 outside, 2 and 3 the top-left and bottom-right corner of a box. For N objects, pass points
        [N, n, 2], labels [N, n] and logits [N, 4h, 4w].
        """
        if points.ndim == 2:
            points = points[None]
            labels = labels[None]
        # in float32, because half precision would round the positions
        embedded, _ = self.prompt_encoder(points[None].float(), labels[None], None, None)
        return embedded[0].to(self.position.dtype), self._dense(logits)

    def _dense(self, logits: Tensor | None) -> Tensor:
        if logits is None:
            no_mask: Tensor = self.prompt_encoder.no_mask_embed.weight
            return no_mask.reshape(1, -1, 1, 1).expand(-1, -1, *self.position.shape[-2:])
        maps = logits.reshape(-1, 1, *logits.shape[-2:]).to(self.position.dtype)
        return self.prompt_encoder.mask_embed(maps)

    def embed_mask(self, mask: Tensor) -> Tensor:
        """Embed a mask prompt, float [1, 1, S, S] in 0..1, as dense [1, C, h, w]."""
        small = self.mask_downsample(mask)
        size = self.prompt_encoder.mask_input_size
        if small.shape[-2:] != tuple(size):
            small = F.interpolate(
                small.float(), size=size, mode="bilinear", align_corners=False, antialias=True
            )
        dense: Tensor = self.prompt_encoder.mask_embed(small.to(mask.dtype))
        return dense

    def encode_mask_pointer(self, features: Features, mask: Tensor) -> Tensor:
        """Return the object pointer [1, C] of a mask prompt, float [1, 1, S, S] in 0..1."""
        features = features.for_prompts()
        dense = self.embed_mask(mask)
        decoded: Decoded = self(features.top, features.fine, features.middle, self.nothing, dense, True)
        # an empty mask describes no object
        return torch.where(mask.any(), decoded.pointer, self.no_pointer)


class NoMemory(nn.Module):
    """Stands for a stage that weights without memory modules do not have."""

    def forward(self, *inputs: Tensor) -> Tensor:
        """Raise ModelError."""
        raise ModelError(
            "these weights have no memory modules: expected to follow objects by their last masks"
        )


class CompilableStage(nn.Module):
    """A stage whose inputs vary in size. Once compiled, it is one graph for one object, and one for 2 or more.

    Sizes of 1 are left alone, because torch.compile makes graphs of their own for them.
    """

    _run_graph: Any

    @property
    def varying(self) -> tuple[tuple[int, ...], ...]:
        """For each input, the axes that vary."""
        raise NotImplementedError

    def compile(self, *args: Any, **options: Any) -> None:
        """Compile `forward`; see `torch.nn.Module.compile`."""
        super().compile(*args, **options)
        # torch would call the graph directly, before the axes that vary are marked
        self._run_graph = self._compiled_call_impl
        self._compiled_call_impl = self._call_compiled

    def _call_compiled(self, *inputs: Tensor | None) -> Any:
        if not self.runs_compiled(*inputs):
            return self.forward(*inputs)
        for tensor, axes in zip(inputs, self.varying, strict=False):
            for axis in axes:
                if tensor is not None and tensor.shape[axis] > 1:
                    torch._dynamo.mark_dynamic(tensor, axis)
        return self._run_graph(*inputs)

    def runs_compiled(self, *inputs: Any) -> bool:
        """Return True for inputs for which the compiled stage needs no further graph."""
        return True


class FollowDecode(CompilableStage):
    """The decoder for objects without a prompt."""

    def __init__(self, decoder: Decoder, multimask: bool) -> None:
        super().__init__()
        self.decoder = decoder
        self.multimask = multimask

    @property
    def varying(self) -> tuple[tuple[int, ...], ...]:
        """Objects vary."""
        return ((0,),)

    def forward(self, top: Tensor, fine: Tensor, middle: Tensor) -> Decoded:
        """Decode top [N, C, h, w], the output of memory attention, with fine and middle of the image."""
        sparse, dense = self.decoder.no_prompt()
        return self.decoder(top, fine, middle, sparse, dense, self.multimask)


class FollowMemoryEncoder(CompilableStage):
    """The memory encoder for objects without a prompt."""

    def __init__(self, write: MemoryEncoder) -> None:
        super().__init__()
        self.write = write

    @property
    def varying(self) -> tuple[tuple[int, ...], ...]:
        """Objects vary."""
        return ((), (0,), (0,))

    def forward(self, top: Tensor, logits: Tensor, presence: Tensor) -> Tensor:
        """Encode the memory [N, T, 64] from top [1, C, h, w], logits [N, 4h, 4w] and presence [N]."""
        return self.write(top, self.write.upsample(logits), False, presence)
