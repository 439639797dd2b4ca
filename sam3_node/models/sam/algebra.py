"""Algebra that the SAM stages share: exact rearrangements of linear maps, and rotary position encoding.

A rearranged map equals the original up to rounding, and is cheaper: it joins, folds or centres weights once, at load
time.
"""

import copy
import functools
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROPE_THETA = 10000.0
"""Longest period of positions, in tokens over 2 pi: of SAM 2, SAM 3 and all that follow them."""
FUSES_GELU = "fuses_gelu"
"""Attribute of layers that apply a GELU to their inputs while they round them."""


def embed_positions(frequencies: Tensor, places: Tensor) -> Tensor:
    """Encode places [..., (x, y)] in 0..1 by random frequencies [2, C / 2] as [..., C] (arXiv 2006.10739)."""
    phase = 2 * torch.pi * ((2 * places - 1).to(frequencies.dtype) @ frequencies)
    return torch.cat([phase.sin(), phase.cos()], dim=-1)


def embed_grid(frequencies: Tensor, height: int, width: int) -> Tensor:
    """Encode the centres of a grid's tokens as [1, C, height, width]; see `embed_positions`."""
    rows, columns = (
        (torch.arange(1, size + 1, device=frequencies.device, dtype=frequencies.dtype) - 0.5) / size
        for size in (height, width)
    )
    y, x = torch.meshgrid(rows, columns, indexing="ij")
    return embed_positions(frequencies, torch.stack([x, y], dim=-1)).permute(2, 0, 1)[None]


def axial_rotation(
    height: int, width: int, channels: int, device: torch.device, scale: float = 1.0
) -> Tensor:
    """Return the rotary encoding of a grid's tokens, float32 [height * width, channels / 2, (cos, sin)].

    The first half of the channels turns by the column, the other by the row; `scale` multiplies both.
    """
    half = channels // 2
    frequencies = 1.0 / (ROPE_THETA ** (torch.arange(0, half, 2, dtype=torch.float32) / half))
    rows, columns = torch.meshgrid(
        torch.arange(height, dtype=torch.float32), torch.arange(width, dtype=torch.float32), indexing="ij"
    )
    places = torch.stack([columns.flatten(), rows.flatten()], dim=-1) * scale
    phase = (places.to(device)[..., None] * frequencies.to(device)).flatten(1)
    return torch.stack([phase.cos(), phase.sin()], dim=-1)


def embed_sine(height: int, width: int, channels: int, device: torch.device) -> Tensor:
    """Return the sine encoding of a grid's tokens, float32 [height * width, channels] (arXiv 2005.12872)."""
    half = channels // 2
    rows, columns = (
        torch.arange(1, size + 1, dtype=torch.float32, device=device) / (size + 1e-6) * (2 * torch.pi)
        for size in (height, width)
    )
    # pairs of channels share a period
    periods = ROPE_THETA ** (2 * (torch.arange(half, device=device).float() // 2) / half)
    y, x = (
        torch.stack([phase[:, 0::2].sin(), phase[:, 1::2].cos()], dim=2).flatten(1)
        for phase in (rows[:, None] / periods, columns[:, None] / periods)
    )
    return torch.cat([y[:, None].expand(-1, width, -1), x[None].expand(height, -1, -1)], dim=-1).flatten(0, 1)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Apply the rotary encoding `rotation`, float32 [hw, D / 2, (cos, sin)], to the channel pairs of x [..., hw, D].

    It may work in place and return `x` itself, so do not use `x` afterwards.
    """
    if not torch.compiler.is_compiling() and not torch.onnx.is_in_onnx_export():
        # x itself if it is float32 or float64
        exact = x if x.dtype == torch.float64 else x.float()
        torch.view_as_complex(torch.unflatten(exact, -1, (-1, 2))).mul_(
            torch.view_as_complex(rotation.to(exact.dtype))
        )
        return x if exact is x else x.copy_(exact)
    # inductor makes no kernels for complex numbers, and the operators of ONNX take none
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
    if plain and activation == "relu" and runs_kernels(x) and layer.bias is not None:
        # the product's own epilogue: nothing is written twice
        rows = torch._addmm_activation(layer.bias, x.flatten(0, -2), layer.weight.t())
        return rows.view(*x.shape[:-1], -1)
    out = layer(x)
    if activation == "none":
        return out
    return F.relu(out) if activation == "relu" else F.gelu(out)


KERNEL_DEVICES: set[torch.device] = set()
"""Devices on which `kernels` were compared with float32 and run; see `TrackerModel.use_kernels`."""


def runs_kernels(x: Tensor) -> bool:
    """Return True for a tensor on which our kernels run: half precision on a GPU, neither compiled nor exported."""
    return (
        x.device in KERNEL_DEVICES
        and x.dtype in (torch.bfloat16, torch.float16)
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.onnx.is_in_onnx_export()
    )


def apply_norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    """Apply a layer norm to x [..., C]: by our kernel where it runs, else by torch's."""
    if not runs_kernels(x) or norm.bias is None:
        return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
    from .kernels import layer_norm

    return layer_norm(x, norm.weight, norm.bias, norm.eps)


@functools.cache
def _fused_dtypes() -> frozenset[torch.dtype]:
    """Return the dtypes in which oneDNN multiplies on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return frozenset()
    half = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return frozenset({torch.float32, torch.bfloat16} if half else {torch.float32})


def apply_mlp(first: nn.Linear, activation: nn.Module, second: nn.Linear, x: Tensor) -> Tensor:
    """Apply two linear maps with an activation between them, fused with one of them where that is possible."""
    if getattr(second, FUSES_GELU, False) and is_exact_gelu(activation):
        out: Tensor = second(first(x), gelu=True)
        return out
    if isinstance(activation, nn.ReLU):
        hidden = apply_linear(first, x, "relu")
    elif is_exact_gelu(activation):
        hidden = apply_linear(first, x, "gelu")
    else:
        hidden = activation(first(x))
    return apply_linear(second, hidden)


def is_exact_gelu(activation: nn.Module) -> bool:
    """Return True for the GELU by the error function, not its approximation."""
    # transformers has a module of its own, which holds the function
    return (isinstance(activation, nn.GELU) and activation.approximate == "none") or (
        getattr(activation, "act", None) is F.gelu
    )


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
    # a transposed convolution has its input channels first
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
    # resizing is linear, so the resized identity is its matrix
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
