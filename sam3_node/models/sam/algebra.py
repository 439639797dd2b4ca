"""Algebra that the SAM stages share: exact rearrangements of linear maps, rotary position encoding, and attention.

A rearranged map equals the original up to rounding, and is cheaper: it joins, folds or centres weights once, at load
time.
"""

import copy
import functools
import math
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import GELUActivation


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Apply the rotary encoding `rotation`, float32 [hw, D / 2, (cos, sin)], to the channel pairs of x [..., hw, D].

    It may work in place and return `x` itself, so do not use `x` afterwards.
    """
    if not torch.compiler.is_compiling() and not torch.onnx.is_in_onnx_export():
        exact = x.float()  # x itself if it is float32
        torch.view_as_complex(torch.unflatten(exact, -1, (-1, 2))).mul_(
            torch.view_as_complex(rotation.float())
        )
        return x if exact is x else x.copy_(exact)
    even, odd = torch.unflatten(x.float(), -1, (-1, 2)).unbind(-1)
    cos, sin = rotation.unbind(-1)
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2).to(x.dtype)


def apply_linear(layer: nn.Linear, x: Tensor, activation: str = "none") -> Tensor:
    """Apply a linear map, then an activation: "none", "relu" or "gelu".

    On a CPU, bias and activation are applied while the product is in the cache. Layers of other classes, such as
    quantised ones, and layers with hooks are called.
    """
    plain = type(layer) is nn.Linear and not (layer._forward_hooks or layer._forward_pre_hooks)
    if (
        plain
        # `is_eager_on_cpu` without a call: this runs 70 times a frame
        and x.device.type == "cpu"
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.onnx.is_in_onnx_export()
        and x.dtype == layer.weight.dtype  # they differ under autocast
        and x.dtype in _fused_dtypes()
    ):
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, layer.weight, layer.bias, activation, [], "none")
        return out
    out = layer(x)
    if activation == "none":
        return out
    return F.relu(out) if activation == "relu" else F.gelu(out)


@functools.cache
def _fused_dtypes() -> frozenset[torch.dtype]:
    """Return the dtypes in which oneDNN multiplies on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return frozenset()
    half = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return frozenset({torch.float32, torch.bfloat16} if half else {torch.float32})


def apply_mlp(first: nn.Linear, activation: nn.Module, second: nn.Linear, x: Tensor) -> Tensor:
    """Apply two linear maps with an activation between them, fused with the first map where that is possible."""
    if isinstance(activation, nn.ReLU):
        hidden = apply_linear(first, x, "relu")
    elif (isinstance(activation, nn.GELU) and activation.approximate == "none") or (
        isinstance(activation, GELUActivation) and activation.act is F.gelu
    ):
        hidden = apply_linear(first, x, "gelu")
    else:
        hidden = activation(first(x))
    return apply_linear(second, hidden)


def is_eager_on_cpu(x: Tensor) -> bool:
    """Return True on a CPU for a tensor that is neither compiled, exported nor differentiated."""
    return (
        x.device.type == "cpu"
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.onnx.is_in_onnx_export()
    )


@torch.no_grad()
def make_linear(like: Tensor, weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a linear map with a weight [O, I] and a bias [O], with the dtype and on the device of `like`."""
    outputs, inputs = weight.shape
    linear = nn.Linear(inputs, outputs, bias=bias is not None).to(like).requires_grad_(False)
    linear.weight.copy_(weight)
    if bias is not None:
        linear.bias.copy_(bias)
    return linear


def join_linear(*layers: nn.Linear) -> nn.Linear:
    """Join `layers` into one linear map with all their outputs, one after the other."""
    weight = torch.cat([layer.weight for layer in layers])
    return make_linear(weight, weight, torch.cat([layer.bias for layer in layers]))


def patch_linear(layer: nn.Conv2d) -> nn.Linear:
    """Return the linear map of flattened patches [C * p * p] that equals a convolution with stride = kernel size."""
    return make_linear(layer.weight, layer.weight.flatten(1), layer.bias)


def fold_linear(first: nn.Linear, second: nn.Linear) -> nn.Linear:
    """Fold two linear maps into one that equals `second` after `first`. Computed in float64."""
    outer = second.weight.double()
    bias = outer @ first.bias.double() + second.bias.double()
    return make_linear(first.weight, outer @ first.weight.double(), bias)


def scale_linear(layer: nn.Linear, scale: Tensor) -> nn.Linear:
    """Return the linear map that equals `layer` times `scale` [outputs]. Computed in float64."""
    scale = scale.double()
    return make_linear(layer.weight, scale[:, None] * layer.weight.double(), scale * layer.bias.double())


C = TypeVar("C", nn.Conv2d, nn.ConvTranspose2d)


def with_weights(like: C, weight: Tensor, bias: Tensor) -> C:
    """Return a convolution with the strides, padding and dtype of `like`, and another weight and bias [outputs]."""
    layer = copy.deepcopy(like)
    layer.weight, layer.bias = (
        nn.Parameter(values.detach().to(like.weight).contiguous()) for values in (weight, bias)
    )
    layer.out_channels = len(bias)
    return layer


def fold_convolution(first: Any, second: Any) -> Any:
    """Fold two convolutions into one that equals `second` (1x1) after `first`, which may be transposed."""
    pointwise = second.weight[:, :, 0, 0].double()
    path = "om,imkl->iokl" if first.transposed else "om,mikl->oikl"
    weight = torch.einsum(path, pointwise, first.weight.double())
    return with_weights(first, weight, pointwise @ first.bias.double() + second.bias.double())


@torch.no_grad()
def fold_upscaling(first: nn.ConvTranspose2d, second: nn.Conv2d) -> nn.ConvTranspose2d:
    """Fold a transposed convolution (2x2, stride 2) and a 3x3 convolution into one transposed convolution (4x4).

    It has no bias: the bias of `first` reaches pixels at the edge less often than others. See `upscaled_bias`.
    """
    assert first.kernel_size == first.stride == (2, 2)
    assert second.kernel_size == (3, 3)
    folded = nn.ConvTranspose2d(
        first.in_channels, second.out_channels, 4, stride=2, padding=1, bias=False
    ).to(first.weight)
    # the 3x3 convolution reads pixel p + k - 1 for each k, so its kernel is flipped where pixels are scattered
    flipped = second.weight.double().flip(2, 3).transpose(0, 1)  # [M, O, 3, 3]
    folded.weight.copy_(F.conv_transpose2d(first.weight.double(), flipped))
    return folded


@torch.no_grad()
def upscaled_bias(first: nn.ConvTranspose2d, second: nn.Conv2d, size: int) -> Tensor:
    """Return the map [1, O, size, size] that `second` after `first` returns for zeros."""
    assert first.bias is not None
    assert second.bias is not None
    constant = first.bias.double()[None, :, None, None].expand(1, -1, size, size)
    bias = F.conv2d(constant, second.weight.double(), second.bias.double(), padding=second.padding)
    return bias.to(first.weight)


def centre_convolution(layer: Any) -> Any:
    """Return `layer` with the mean over its output channels subtracted, as a following layer norm would do."""
    weight = layer.weight - layer.weight.mean(dim=0, keepdim=True)
    return with_weights(layer, weight, layer.bias - layer.bias.mean())


def resize_matrix(sizes: tuple[int, ...]) -> Tensor:
    """Return the matrix [sizes[-1], sizes[0]] that resizes one axis bilinearly through all sizes, with antialiasing."""
    matrix = torch.eye(sizes[0])[None, None]
    for size in sizes[1:]:
        matrix = F.interpolate(
            matrix,
            size=(size, sizes[0]),
            mode="bilinear",
            align_corners=False,
            antialias=size < matrix.shape[-2],
        )
    return matrix[0, 0]


MAX_SCORES = 1 << 24  # of one step of plain attention: 64 MB


class Attention(nn.Module):
    """softmax(Q K^T / sqrt(D)) V with values narrower than keys.

    On a CPU, float32 inputs are computed in plain steps, object by object, with a reused buffer for the scores. For
    narrow values this is faster than fused attention, which needs values as wide as keys. Otherwise, the values are
    padded for the fused kernel.
    """

    def __init__(self) -> None:
        super().__init__()
        self._buffer = torch.empty(0)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, first: int = 0, weight: int = 1
    ) -> Tensor:
        """Attend with query [N, L, D] to key [N, T, D] and value [N, T, V <= D]; return [N, L, V].

        mask: bool [N, 1, M <= T] for the last M keys, True for keys to attend to; None for all. Each object attends to
        at least one. The first `first` keys weigh as if each occurred `weight` times.
        """
        if query.dtype == torch.float32 and is_eager_on_cpu(query):
            return self._attend_in_steps(query, key, value, mask, first, weight)
        wide = F.pad(value, (0, key.shape[-1] - value.shape[-1]))
        free = key.shape[1] - (0 if mask is None else mask.shape[-1])
        if weight == 1:
            first = 0
        if first > free:
            out = _attend_weighted(query, key, wide, mask, first, weight)
        elif mask is None and not first:
            out = F.scaled_dot_product_attention(query[:, None], key[:, None], wide[:, None])[:, 0]
        elif mask is not None and not free:
            out = F.scaled_dot_product_attention(
                query[:, None], key[:, None], wide[:, None], attn_mask=mask[:, None]
            )[:, 0]
        else:
            parts = [_attend_fused(query, key[:, first:free], wide[:, first:free])]
            if first:
                parts.append(_attend_fused(query, key[:, :first], wide[:, :first], weight))
            if mask is not None:
                parts.append(_attend_masked(query, key[:, free:], wide[:, free:], mask))
            out = functools.reduce(_merge_attention, parts).out
        return out[..., : value.shape[-1]]

    def _attend_in_steps(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, first: int, weight: int
    ) -> Tensor:
        count, length, keys = query.shape[0], query.shape[1], key.shape[1]
        query = query * query.shape[-1] ** -0.5
        rows = min(length, max(1, MAX_SCORES // keys))
        if self._buffer.numel() < rows * keys:  # it grows, and is reused
            with torch.inference_mode(False):
                self._buffer = torch.empty(rows * keys)
        buffer = self._buffer[: rows * keys].view(rows, keys)
        out = query.new_empty(count, length, value.shape[-1])
        for i in range(count):
            for start in range(0, length, rows):
                some = slice(start, start + rows)
                part = query[i, some]
                scores = torch.mm(part, key[i].T, out=buffer[: len(part)])
                if weight > 1:
                    scores[:, :first].add_(math.log(weight))
                if mask is not None:
                    scores[:, -mask.shape[-1] :].masked_fill_(~mask[i], float("-inf"))
                torch.softmax(scores, dim=-1, out=scores)
                torch.mm(scores, value[i], out=out[i, some])
        return out


class _Attended(NamedTuple):
    """Attention to some of the keys: out [N, L, V], and the log of the sum of exponentials, float32 [N, L, 1]."""

    out: Tensor
    log_sum: Tensor


def _attend_fused(query: Tensor, key: Tensor, value: Tensor, weight: int = 1) -> _Attended:
    """Attend to all keys with the device's fused kernel; [N, L or T, D] each. A mask would rule out the fastest."""
    heads = query[:, None], key[:, None], value[:, None]
    if query.device.type == "cpu":
        out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads)
    elif query.dtype == torch.float32:
        out, log_sum, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(*heads, None, True)
    else:
        out, log_sum, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*heads)
    return _Attended(out[:, 0], log_sum[:, 0, : query.shape[1], None].float() + math.log(weight))


def _attend_masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> _Attended:
    """Attend to a few keys with a mask, in plain steps."""
    scores = (query @ key.transpose(1, 2)).float() * query.shape[-1] ** -0.5
    scores = scores.masked_fill(~mask, torch.finfo(torch.float32).min)
    return _Attended(scores.softmax(-1).to(value.dtype) @ value, scores.logsumexp(-1, keepdim=True))


def _attend_weighted(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, first: int, weight: int
) -> Tensor:
    """Attend with a mask that reaches into the first, weighted keys; see `Attention`."""
    bias = query.new_zeros(len(key), 1, key.shape[1])
    bias[..., :first] = math.log(weight)
    if mask is not None:
        bias[..., -mask.shape[-1] :].masked_fill_(~mask, float("-inf"))
    return F.scaled_dot_product_attention(
        query[:, None], key[:, None], value[:, None], attn_mask=bias[:, None]
    )[:, 0]


def _merge_attention(first: _Attended, second: _Attended) -> _Attended:
    """Return the attention to the keys of both. This is exact: each part weighs as the sum of its exponentials."""
    share = torch.sigmoid(second.log_sum - first.log_sum).to(first.out.dtype)
    return _Attended(torch.lerp(first.out, second.out, share), torch.logaddexp(first.log_sum, second.log_sum))
