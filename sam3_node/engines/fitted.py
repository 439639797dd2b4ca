"""An engine in the place of a stage, where the model around it computes in another dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..models.stages import Run
from .ports import Port, Stage


class Fitted:
    """Runs `run` with tensors of the dtypes that `inside` has, and gives them back in those of `outside`."""

    def __init__(self, run: Run, inside: Stage, outside: Stage) -> None:
        self.run, self.inside, self.outside = run, inside, outside

    def __call__(self, *inputs: Tensor) -> Any:
        found = as_tuple(self.run(*cast(inputs, self.inside.inputs)))
        outputs = cast(found, self.outside.outputs)
        return outputs if len(outputs) > 1 else outputs[0]


def cast(tensors: Sequence[Tensor], ports: Sequence[Port]) -> tuple[Tensor, ...]:
    """Tensors in the dtypes of their ports."""
    return tuple(tensor.to(port.dtype) for tensor, port in zip(tensors, ports, strict=True))


def as_tuple(found: Any) -> tuple[Tensor, ...]:
    """What a stage gave, be it one tensor or several."""
    return (found,) if isinstance(found, Tensor) else tuple(found)
