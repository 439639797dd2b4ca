"""Layers that multiply in FP8 (E4M3, arXiv 2209.05433): rounded in torch, QuantizeLinear and DequantizeLinear in ONNX.

Activations have one scale a layer, weights one for each output channel.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LARGEST = 448.0  # of E4M3
LEAST_SCALE = 2.0**-14  # the least normal float16; FP8 has exponents of its own, so smaller ones gain nothing


class QuantisedLayer(nn.Module):
    """A linear layer or convolution whose input and weights are rounded to FP8 first.

    amax: largest magnitude of its inputs; what is beyond it saturates. Weights' own are taken from them.
    """

    input_scale: Tensor
    input_zero: Tensor
    weight_scale: Tensor
    weight_zero: Tensor

    def __init__(self, layer: nn.Linear | nn.Conv2d, amax: float) -> None:
        super().__init__()
        self.layer = layer
        weight = layer.weight.detach()
        for name, largest in (
            ("input", weight.new_tensor(amax, dtype=torch.float32)),
            ("weight", weight.abs().flatten(1).amax(1)),
        ):
            self.register_buffer(f"{name}_scale", scale_of(largest, weight))
            self.register_buffer(f"{name}_zero", torch.zeros_like(largest, dtype=torch.float8_e4m3fn))

    def forward(self, x: Tensor) -> Tensor:
        layer = self.layer
        x = round_fp8(x, self.input_scale, self.input_zero)
        weight = round_fp8(layer.weight, self.weight_scale, self.weight_zero)
        if isinstance(layer, nn.Linear):
            return F.linear(x, weight, layer.bias)
        padding: Any = layer.padding
        return F.conv2d(x, weight, layer.bias, layer.stride, padding, layer.dilation, layer.groups)


def scale_of(amax: Tensor, like: Tensor) -> Tensor:
    """The scale that takes `amax` to the largest FP8 number, one of float16's numbers, in the dtype of `like`."""
    return (amax.float() / LARGEST).clamp(min=LEAST_SCALE).half().to(like)


def round_fp8(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """x rounded to multiples of FP8 numbers by scale [], or scale [n] along the first axis of x; zero: 0 in FP8."""
    if torch.onnx.is_in_onnx_export():
        return _as_onnx(x, scale, zero)
    wide = scale.float() if scale.ndim == 0 else scale.float().view(-1, *[1] * (x.ndim - 1))
    scaled = (x.float() / wide).clamp(-LARGEST, LARGEST)  # beyond, the cast gives NaN
    return (scaled.to(zero.dtype).float() * wide).to(x.dtype)


def _as_onnx(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    write = partial(torch.onnx.ops.symbolic, attrs={"axis": 0}, shape=x.shape)
    eight = write("QuantizeLinear", (x, scale, zero), dtype=zero.dtype)
    return write("DequantizeLinear", (eight, scale, zero), dtype=x.dtype)
