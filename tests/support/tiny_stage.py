"""The smallest stage: its export costs next to nothing."""

import torch
from torch import Tensor, nn

from sam3_node.engines.specs import OBJECTS, StageSpec, TensorSpec


class Scaled(nn.Module):
    """A module that multiplies values [N, side] by fixed factors."""

    factor: Tensor

    def __init__(self, side: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("factor", torch.linspace(-1, 1, side, dtype=dtype))

    def forward(self, values: Tensor) -> Tensor:
        return values * self.factor


def scaled(side: int = 4096, dtype: torch.dtype = torch.float32, kind: type[Scaled] = Scaled) -> StageSpec:
    """Return a stage "scale" for any number of objects."""
    values, result = (TensorSpec(name, (OBJECTS, side), dtype) for name in ("values", "result"))
    return StageSpec("scale", kind(side, dtype), (values,), (result,))
