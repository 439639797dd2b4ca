"""SAM's mask decoder (arXiv 2304.02643, 2408.00714), arranged for many objects on one image.

It equals transformers' decoder on the same weights. SAM 1's has no opinion whether the object is in view, so it always
says that it is. All projections of the image tokens in a layer are one matrix
product. The contribution of the fixed position encoding to them is computed once, at load time. The four mask heads are
computed together.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .algebra import join_linear

IN_VIEW_LOGIT = 10.0  # presence logit of weights that cannot tell


class MaskDecoder(nn.Module):
    """The mask decoder of a transformers tracker, for image tokens with the position encoding [1, C, h, w]."""

    output_tokens: Tensor

    def __init__(self, source: Any, position: Tensor) -> None:
        super().__init__()
        self.masks = source.num_mask_tokens
        stable = getattr(source, "dynamic_multimask_via_stability", False)
        self.stable_mask = source._dynamic_multimask_via_stability if stable else None
        self.up1, self.up2, self.up_norm = (
            source.upscale_conv1,
            source.upscale_conv2,
            source.upscale_layer_norm,
        )
        self.activation = source.activation
        self.iou_head = source.iou_prediction_head
        self.presence_head: nn.Module | None = getattr(source, "pred_obj_score_head", None)
        tokens = [source.iou_token.weight, source.mask_tokens.weight]
        if self.presence_head is not None:
            tokens.insert(0, source.obj_score_token.weight)
        self.register_buffer("output_tokens", torch.cat(tokens).detach()[None].clone(), persistent=False)
        place = position.flatten(2).transpose(1, 2)  # [1, hw, C]
        transformer = source.transformer
        self.layers = nn.ModuleList(_TwoWayLayer(layer, place) for layer in transformer.layers)
        self.final = _TokenToImage(transformer.final_attn_token_to_image, place)
        self.final_norm = transformer.layer_norm_final_attn
        self.heads = _StackedHeads(source.output_hypernetworks_mlps)

    def forward(
        self, image: Tensor, fine: Tensor, middle: Tensor, prompt: Tensor, multimask: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Decode N objects on one image.

        Takes image [N, C, h, w], fine [1, C/8, 4h, 4w], middle [1, C/4, 2h, 2w] and prompt [N, T, C]. Return logits
        [N, M, 4h, 4w], iou [N, M], mask tokens [N, M, C] and presence logits [N]; M is 3 with `multimask`, else 1.
        """
        tokens = torch.cat([self.output_tokens.expand(prompt.shape[0], -1, -1), prompt], dim=1)
        queries, pixels = tokens, image.flatten(2).transpose(1, 2)
        for layer in self.layers:
            queries, pixels = layer(queries, pixels, tokens)
        queries = self.final_norm(queries + self.final(queries + tokens, pixels))
        presence = self._presence(queries[:, 0])
        queries = queries if self.presence_head is None else queries[:, 1:]
        mask_tokens = queries[:, 1 : 1 + self.masks]
        up = self._upscale(torch.unflatten(pixels.transpose(1, 2), 2, image.shape[-2:]), fine, middle)
        logits = (self.heads(mask_tokens) @ up.flatten(2)).unflatten(2, up.shape[-2:])
        iou = self.iou_head(queries[:, 0])
        if multimask:
            return logits[:, 1:], iou[:, 1:], mask_tokens[:, 1:], presence
        if self.stable_mask is not None:
            logits, iou = (x[:, 0] for x in self.stable_mask(logits[:, None], iou[:, None]))
        return logits[:, :1], iou[:, :1], mask_tokens[:, :1], presence

    def _presence(self, token: Tensor) -> Tensor:
        if self.presence_head is None:
            return token.new_full((len(token),), IN_VIEW_LOGIT)
        presence: Tensor = self.presence_head(token)[:, 0]
        return presence

    def _upscale(self, image: Tensor, fine: Tensor, middle: Tensor) -> Tensor:
        """Upscale image tokens [N, C, h, w] four times with the finer features, to [N, C/8, 4h, 4w]."""
        image = self.activation(self.up_norm(self.up1(image) + middle))
        upscaled: Tensor = self.activation(self.up2(image) + fine)
        return upscaled


class _TwoWayLayer(nn.Module):
    """Tokens attend to each other and to the image, then the image attends to the tokens."""

    def __init__(self, source: Any, place: Tensor) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3, self.norm4 = (
            getattr(source, f"layer_norm{i}") for i in range(1, 5)
        )
        self.first, self.mlp = source.skip_first_layer_pe, source.mlp
        own, back = source.self_attn, source.cross_attn_image_to_token
        self.own_query_key, self.own_value, self.own_out = (
            join_linear(own.q_proj, own.k_proj),
            own.v_proj,
            _output_projection(own),
        )
        self.own_heads = own.num_attention_heads
        self.to_image = _TokenToImage(source.cross_attn_token_to_image, place, back.q_proj)
        self.back_key, self.back_value, self.back_out = back.k_proj, back.v_proj, _output_projection(back)

    def forward(self, queries: Tensor, pixels: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        placed = queries if self.first else queries + tokens
        query, key = self.own_query_key(placed).chunk(2, dim=-1)
        attended = self.own_out(_attend(query, key, self.own_value(queries), self.own_heads))
        queries = self.norm1(attended if self.first else queries + attended)
        projected = self.to_image.project(pixels)
        queries = self.norm2(queries + self.to_image.read(queries + tokens, projected))
        queries = self.norm3(queries + self.mlp(queries))
        key, value = self.back_key(queries + tokens), self.back_value(queries)
        back = _attend(projected[-1], key, value, self.to_image.heads)
        return queries, self.norm4(pixels + self.back_out(back))


class _TokenToImage(nn.Module):
    """Attention of tokens to the image. With `back`, also projects the image's queries for the reverse attention."""

    place: Tensor

    def __init__(self, source: Any, place: Tensor, back: Any = None) -> None:
        super().__init__()
        self.heads, self.query = source.num_attention_heads, source.q_proj
        self.out = _output_projection(source)
        joined = join_linear(source.k_proj, source.v_proj, *([back] if back is not None else []))
        self.weight = nn.Parameter(joined.weight.detach(), requires_grad=False)
        self.parts = 2 if back is None else 3
        with torch.no_grad():
            contribution = (place.float() @ joined.weight.float().T).to(place.dtype)
            width = source.internal_dim
            contribution[..., width : 2 * width] = 0  # values have no position encoding
        self.register_buffer("place", (contribution + joined.bias).detach(), persistent=False)

    def project(self, pixels: Tensor) -> tuple[Tensor, ...]:
        """Project image tokens [N, hw, C] to keys, values and, with `back`, queries."""
        return (F.linear(pixels, self.weight) + self.place).chunk(self.parts, dim=-1)

    def read(self, queries: Tensor, projected: tuple[Tensor, ...]) -> Tensor:
        attended: Tensor = self.out(_attend(self.query(queries), projected[0], projected[1], self.heads))
        return attended

    def forward(self, queries: Tensor, pixels: Tensor) -> Tensor:
        return self.read(queries, self.project(pixels))


class _StackedHeads(nn.Module):
    """The three-layer perceptrons of all mask tokens, computed together."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        layers = [[head.proj_in, *head.layers, head.proj_out] for head in source]
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
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


def _output_projection(attention: Any) -> nn.Module:
    """Return the output projection of an attention layer, which SAM 1 and SAM 2 name differently."""
    projection: nn.Module = attention.o_proj if hasattr(attention, "o_proj") else attention.out_proj
    return projection


def _attend(query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
    """Compute multi-head attention of query [N, L, D] to key and value [N, T, D]."""
    query, key, value = (torch.unflatten(x, -1, (heads, -1)).transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
