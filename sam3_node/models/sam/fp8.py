"""Linear layers that multiply in FP8 (E4M3, arXiv 2209.05433)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .algebra import runs_kernels

MAX_E4M3 = torch.finfo(torch.float8_e4m3fn).max
"""The largest FP8 number."""
MULTIPLE = 16
"""Both sides of a matrix must be multiples of this to be multiplied in FP8 on a GPU."""


class Fp8Linear(nn.Module):
    """A linear layer whose product is computed in FP8 by `torch._scaled_mm`.

    Inputs have one scale and weights have one, so that the product's own kernel applies both and adds the bias. FP8
    numbers have exponents, so a scale for each output channel rounds no finer: it matters only for channels 30,000
    times smaller than the largest.

    input_scale: inputs beyond 448 times this saturate.
    """

    fuses_gelu = True
    weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor
    inverse: Tensor
    bias: Tensor | None

    def __init__(self, layer: nn.Linear, input_scale: Tensor) -> None:
        super().__init__()
        weight = layer.weight.detach().float()
        scale = (weight.abs().amax() / MAX_E4M3).clamp(min=torch.finfo(torch.float32).tiny)
        input_scale = input_scale.float().reshape(()).to(scale.device)
        self.register_buffer("weight", _to_fp8(weight / scale), persistent=False)
        self.register_buffer("weight_scale", scale, persistent=False)
        self.register_buffer("input_scale", input_scale, persistent=False)
        self.register_buffer("inverse", 1 / input_scale, persistent=False)
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach(), persistent=False)

    def forward(self, x: Tensor, gelu: bool = False) -> Tensor:
        """Map x [..., in], after the exact GELU if `gelu`, to [..., out] in the dtype of x."""
        rows = self._round(x, gelu).flatten(0, -2)
        left = self.input_scale
        right = self.weight_scale
        bias = self.bias
        # many processors multiply FP8 with a scale for each row alone, and half precision alone adds a bias
        if x.device.type == "cpu":
            left = left.repeat(len(rows), 1)
            right = right.repeat(1, len(self.weight))
        adds_bias = x.device.type != "cpu" and x.dtype in (torch.bfloat16, torch.float16)
        # Fast accumulation errs by at most 2 % for 4096 inputs (arXiv 2412.19437, sec. 3.3.2), less than the rounding
        # to FP8 (3.7 % RMS of a product). The accuracy check judges both together.
        out = torch._scaled_mm(
            rows,
            self.weight.T,
            scale_a=left,
            scale_b=right,
            bias=bias if adds_bias else None,
            out_dtype=x.dtype,
            use_fast_accum=True,
        )
        if bias is not None and not adds_bias:
            out = out + bias
        return out.view(*x.shape[:-1], -1)

    def _round(self, x: Tensor, gelu: bool) -> Tensor:
        """Return the inputs in FP8."""
        if runs_kernels(x):
            from .kernels import quantise

            return quantise(x, self.inverse, gelu)
        values = F.gelu(x) if gelu else x
        return _to_fp8(values.float() * self.inverse)


def can_multiply(layer: nn.Module) -> bool:
    """Return True for a linear layer whose sides FP8 products take."""
    return isinstance(layer, nn.Linear) and not (
        layer.in_features % MULTIPLE or layer.out_features % MULTIPLE
    )


def _to_fp8(x: Tensor) -> Tensor:
    # beyond this range the cast gives NaN
    return x.clamp(-MAX_E4M3, MAX_E4M3).to(torch.float8_e4m3fn)
