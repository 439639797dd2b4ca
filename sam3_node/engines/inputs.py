"""What an engine is given: checked against the ports of its stage, and where it can be read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import EngineError
from .ports import OBJECTS, Port, Stage

ALIGNMENT = 256  # bytes, of every tensor that TensorRT reads


def objects_of(stage: Stage, inputs: Sequence[Tensor], most_objects: int, device: torch.device) -> int:
    """How many objects `inputs` are of, 1 where the stage does not vary. Raises EngineError unless they fit its ports.

    Nothing is converted: a dtype or device that is not the port's is an error.
    """
    if len(inputs) != len(stage.inputs):
        raise EngineError(f"{stage.name}: expected {len(stage.inputs)} inputs, found {len(inputs)}")
    objects = 1
    for port, tensor in zip(stage.inputs, inputs, strict=True):
        if not isinstance(tensor, Tensor):
            raise EngineError(f"{stage.name}: {port.name}: expected a tensor, found {type(tensor).__name__}")
        if OBJECTS in port.shape and tensor.ndim == len(port.shape):
            objects = tensor.shape[port.shape.index(OBJECTS)]
            break
    if not 1 <= objects <= most_objects:
        raise EngineError(
            f"{stage.name}: built for 1 to {most_objects} objects, found {objects}; build for more: "
            "sam3-node engine build --tracker.max_objects N"
        )
    for port, tensor in zip(stage.inputs, inputs, strict=True):
        _check(stage, port, tensor, objects, device)
    return objects


def placed(tensor: Tensor) -> Tensor:
    """The tensor where any engine can read it: itself if it is contiguous and aligned, else a copy."""
    whole = tensor.contiguous()
    return whole if whole.data_ptr() % ALIGNMENT == 0 else whole.clone()


def _check(stage: Stage, port: Port, tensor: Tensor, objects: int, device: torch.device) -> None:
    if not isinstance(tensor, Tensor):
        raise EngineError(f"{stage.name}: {port.name}: expected a tensor, found {type(tensor).__name__}")
    shape = port.sized(objects)
    if tensor.shape != shape or tensor.dtype != port.dtype or tensor.device != device:
        raise EngineError(
            f"{stage.name}: {port.name}: expected {list(shape)} {port.dtype} on {device}, "
            f"found {list(tensor.shape)} {tensor.dtype} on {tensor.device}"
        )
