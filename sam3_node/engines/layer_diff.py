"""Where two networks of the same structure part: the outputs of their layers, compared one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEWEST, SAMPLE = 5, 65536  # layers named; values kept of each output, evenly spread over it

Outputs = dict[str, list[Tensor]]


def worst_layers(
    reference: nn.Module,
    other: nn.Module,
    inputs: Sequence[Tensor],
    other_inputs: Sequence[Tensor] | None = None,
    count: int = FEWEST,
) -> list[tuple[str, float]]:
    """The `count` layers whose outputs differ most, the lowest cosine first: (name, cosine).

    Layers are the leaf modules of the reference that `other` has under the same name; `inputs` are those of one forward
    pass, `other_inputs` the same as `other` takes them. Of large outputs an evenly spread sample is compared.
    """
    names = [name for name in _leaves(reference) if _find(other, name) is not None]
    expected = _outputs(reference, names, inputs)
    found = _outputs(other, names, inputs if other_inputs is None else other_inputs)
    cosines = ((name, _lowest(expected[name], found[name])) for name in names if expected[name])
    return sorted(cosines, key=lambda item: item[1])[:count]


def cosine(expected: Tensor, found: Tensor) -> float:
    """Cosine of two tensors of the same size as vectors, in float32; NaN where one holds no finite numbers.

    Two that are nothing but zeros are the same: 1.
    """
    left, right = expected.flatten().float(), found.flatten().float()
    if not (left.any() or right.any()):
        return 1.0
    return F.cosine_similarity(left, right, dim=0).clamp(max=1.0).item()


def _leaves(module: nn.Module) -> Iterator[str]:
    for name, child in module.named_modules():
        if name and next(child.children(), None) is None:
            yield name


def _find(module: nn.Module, name: str) -> nn.Module | None:
    try:
        return module.get_submodule(name)
    except AttributeError:
        return None


@torch.inference_mode()
def _outputs(module: nn.Module, names: Sequence[str], inputs: Sequence[Tensor]) -> Outputs:
    """What each of the named layers gives in one forward pass, a tensor for each time that it was called."""
    found: Outputs = {name: [] for name in names}
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(_watched(module.get_submodule(name), found[name]))
        module(*inputs)
    return found


@contextmanager
def _watched(layer: nn.Module, into: list[Tensor]) -> Iterator[None]:
    def note(layer: nn.Module, inputs: Any, output: Any) -> None:
        values = output if isinstance(output, tuple) else (output,)
        into.extend(_sample(value) for value in values if isinstance(value, Tensor))

    handle = layer.register_forward_hook(note)
    try:
        yield
    finally:
        handle.remove()


def _sample(values: Tensor) -> Tensor:
    flat = values.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE)].clone().float().cpu()


def _lowest(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """Over all calls; -1, so that it comes first, for what is not finite or has another shape."""
    values = [cosine(*pair) for pair in zip(expected, found, strict=False) if pair[0].shape == pair[1].shape]
    return min((value if value == value else -1.0 for value in values), default=-1.0)
