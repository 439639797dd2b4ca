"""A stage in an ONNX file, run by onnxruntime on the CPU: what an export is held to where there is no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sam3_node.engines.specs import OBJECTS, StageSpec, TensorSpec
from sam3_node.errors import EngineError, require

ONNX_TYPES = {  # by the numbers and names that ONNX and onnxruntime give them
    torch.float32: (1, "tensor(float)"),
    torch.int64: (7, "tensor(int64)"),
    torch.bool: (9, "tensor(bool)"),
    torch.float16: (10, "tensor(float16)"),
    torch.bfloat16: (16, "tensor(bfloat16)"),
}
ERRORS_ONLY = 4  # onnxruntime's log severity; what it raises says the rest


class OnnxRun:
    """A callable with the signature of the stage whose export it runs, tensors in and out without copies.

    Shapes are fixed but for the number of objects: a tracker that steps with it needs `static_shapes`. Raises
    EngineError where the file is absent, damaged, not an export of this stage, or holds what onnxruntime cannot run on
    a CPU; MissingExtraError without the extra `onnx`.
    """

    def __init__(self, path: Path, stage: StageSpec) -> None:
        self._stage, self._path = stage, path
        self._session = _session(path, stage)
        _check(stage, path, "inputs", stage.inputs, self._session.get_inputs())
        _check(stage, path, "outputs", stage.outputs, self._session.get_outputs())

    def __call__(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The stage's outputs, the only one or a tuple. Raises EngineError for inputs that its ports do not take."""
        objects = self._objects(tensors)
        held = [tensor.contiguous() for tensor in tensors]
        outputs = tuple(torch.empty(port.sized(objects), dtype=port.dtype) for port in self._stage.outputs)
        binding = self._session.io_binding()
        for port, tensor in zip(self._stage.inputs, held, strict=True):
            binding.bind_input(port.name, *_place(port, tensor))
        for port, tensor in zip(self._stage.outputs, outputs, strict=True):
            binding.bind_output(port.name, *_place(port, tensor))
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:  # onnxruntime's classes share no base but this
            raise EngineError(
                f"{self._stage.name}: onnxruntime failed in {self._path}: {_told(error)}"
            ) from error
        return outputs if len(outputs) > 1 else outputs[0]

    def _objects(self, tensors: tuple[Tensor, ...]) -> int:
        """How many objects these inputs are of; refuses what the ports do not take."""
        ports = self._stage.inputs
        objects = next(
            (_axis(port, x) for port, x in zip(ports, tensors, strict=False) if OBJECTS in port.shape), 1
        )
        wanted = [_shown(port.sized(objects), port.dtype, "cpu") for port in ports]
        found = [
            _shown(x.shape, x.dtype, x.device.type) if isinstance(x, Tensor) else str(x) for x in tensors
        ]
        if found != wanted:
            raise EngineError(
                f"{self._stage.name}: expected inputs {', '.join(wanted)}; found {', '.join(found) or 'none'}"
            )
        return objects


def _session(path: Path, stage: StageSpec) -> Any:
    runtime = require("onnxruntime", "onnx")
    options = runtime.SessionOptions()
    # the next level, which arranges convolutions anew, ends the process on some in float16
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.log_severity_level = ERRORS_ONLY
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry(
        "session.disable_quant_qdq", "1"
    )  # it moves FP8 through nodes that refuse it
    if not path.is_file():
        raise EngineError(
            f"{stage.name}: expected an ONNX file at {path}, found none; export the stage first"
        )
    try:
        return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's classes share no base but this
        raise EngineError(
            f"{stage.name}: onnxruntime cannot run {path} on the CPU; if it is damaged, export the stage again: "
            f"{_told(error)}"
        ) from error


def _check(stage: StageSpec, path: Path, which: str, ports: tuple[TensorSpec, ...], found: list[Any]) -> None:
    """Refuse a file whose inputs or outputs are not the ports."""
    wanted = [(port.name, ONNX_TYPES[port.dtype][1], list(port.shape)) for port in ports]
    held = [(value.name, value.type, value.shape) for value in found]
    if held != wanted:
        raise EngineError(
            f"{stage.name}: {path} is not an export of this stage: expected {which} {wanted}, found {held}"
        )


def _place(port: TensorSpec, tensor: Tensor) -> tuple[str, int, int, tuple[int, ...], int]:
    """Where a tensor lies, in onnxruntime's words."""
    return "cpu", 0, ONNX_TYPES[port.dtype][0], tuple(tensor.shape), tensor.data_ptr()


def _axis(port: TensorSpec, tensor: Tensor) -> int:
    """The number of objects that an input is of; 1 where it has not the port's dimensions."""
    fits = isinstance(tensor, Tensor) and tensor.ndim == len(port.shape)
    return tensor.shape[port.shape.index(OBJECTS)] if fits else 1


def _shown(shape: Sequence[int], dtype: torch.dtype, place: str) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')} on {place}"


def _told(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:300]
