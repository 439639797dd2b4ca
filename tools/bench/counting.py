"""Counts of the arithmetic, the memory traffic and the kernels of torch code."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count


class Counts(NamedTuple):
    """Cost of some code: FLOPs, bytes of inputs and outputs, and operations that are no views."""

    flops: int
    traffic: int
    kernels: int


class OperationCounter(TorchDispatchMode):
    """Counts the operations that run inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = self.traffic = self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten" and func.overloadpacket not in flop_registry:
            with self:  # operations that torch decomposes, such as `linear` in inference mode
                out = func.decompose(*args, **(kwargs or {}))
            if out is not NotImplemented:
                return out
        out = func(*args, **(kwargs or {}))
        if func.is_view or func.overloadpacket in (torch.ops.aten.empty, torch.ops.prim.device):
            return out
        tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)]
        self.kernels += 1
        self.traffic += sum(t.numel() * t.element_size() for t in tensors)
        self.flops += count_flops(func, args, kwargs or {}, out)
        return out


def count_flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the FLOPs of one operation."""
    packet = func.overloadpacket
    if packet == torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        return int(sdpa_flop_count(*(tensor.shape for tensor in args[:3])))
    if packet == torch.ops.mkldnn._linear_pointwise:
        return int(2 * args[0].numel() * len(args[1]))
    formula = flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=out)) if formula else 0


def count(run: Callable[[], object]) -> Counts:
    """Run something, which may be on fake tensors, and count its operations."""
    with torch.no_grad(), OperationCounter() as counter:
        run()
    return Counts(counter.flops, counter.traffic, counter.kernels)
