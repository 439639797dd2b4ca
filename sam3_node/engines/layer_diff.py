"""Comparison of two networks of the same structure, layer by layer, to find where their outputs differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LAYERS = 5  # number of layers to name
SAMPLE_SIZE = 65536  # values to keep of each output, evenly spread over it

Outputs = dict[str, list[Tensor]]


def worst_layers(
    reference: nn.Module,
    other: nn.Module,
    inputs: Sequence[Tensor],
    other_inputs: Sequence[Tensor] | None = None,
    count: int = LAYERS,
) -> list[tuple[str, float]]:
    """Return the `count` layers whose outputs differ most, the lowest cosine first: (name, cosine).

    Layers are the leaf modules of the reference that `other` has under the same name. `inputs` are those of one forward
    pass, `other_inputs` the same in the dtypes of `other`. Of large outputs it compares an evenly spread sample.
    """
    names = [name for name in _list_leaves(reference) if _find_module(other, name) is not None]
    expected = _record_outputs(reference, names, inputs)
    outputs = _record_outputs(other, names, inputs if other_inputs is None else other_inputs)
    cosines = ((name, _lowest_cosine(expected[name], outputs[name])) for name in names if expected[name])
    return sorted(cosines, key=lambda item: item[1])[:count]


def cosine(first: Tensor, second: Tensor) -> float:
    """Return the cosine of two tensors of the same size as vectors, in float32.

    NaN if one holds values that are not finite. Two tensors of zeros only count as equal: 1.
    """
    left, right = first.flatten().float(), second.flatten().float()
    if not (left.any() or right.any()):
        return 1.0
    return F.cosine_similarity(left, right, dim=0).clamp(max=1.0).item()


def _list_leaves(module: nn.Module) -> Iterator[str]:
    for name, child in module.named_modules():
        if name and next(child.children(), None) is None:
            yield name


def _find_module(module: nn.Module, name: str) -> nn.Module | None:
    try:
        return module.get_submodule(name)
    except AttributeError:
        return None


@torch.inference_mode()
def _record_outputs(module: nn.Module, names: Sequence[str], inputs: Sequence[Tensor]) -> Outputs:
    """Run one forward pass; return the outputs of each named layer, one tensor for each call of the layer."""
    outputs: Outputs = {name: [] for name in names}
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(_recording(module.get_submodule(name), outputs[name]))
        module(*inputs)
    return outputs


@contextmanager
def _recording(layer: nn.Module, samples: list[Tensor]) -> Iterator[None]:
    """Append samples of the layer's outputs to `samples` within the block."""

    def record(layer: nn.Module, inputs: Any, output: Any) -> None:
        values = output if isinstance(output, tuple) else (output,)
        samples.extend(_sample(value) for value in values if isinstance(value, Tensor))

    handle = layer.register_forward_hook(record)
    try:
        yield
    finally:
        handle.remove()


def _sample(values: Tensor) -> Tensor:
    flat = values.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE_SIZE)].clone().float().cpu()


def _lowest_cosine(expected: Sequence[Tensor], outputs: Sequence[Tensor]) -> float:
    """Return the lowest cosine over all calls; -1, which sorts first, for NaN or another shape."""
    values = [
        cosine(*pair) for pair in zip(expected, outputs, strict=False) if pair[0].shape == pair[1].shape
    ]
    return min((value if value == value else -1.0 for value in values), default=-1.0)
