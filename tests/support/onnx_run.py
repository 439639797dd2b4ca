"""Runner of exported stages: onnxruntime on the CPU, to check exports on machines without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sam3_node.engines.specs import MEMORIES, OBJECTS, Sizes, StageSpec, TensorSpec
from sam3_node.errors import EngineError, require

ONNX_TYPES = {  # numbers of the types in ONNX, and their names in onnxruntime
    torch.float32: (1, "tensor(float)"),
    torch.int64: (7, "tensor(int64)"),
    torch.bool: (9, "tensor(bool)"),
    torch.float16: (10, "tensor(float16)"),
    torch.bfloat16: (16, "tensor(bfloat16)"),
}
ERRORS_ONLY = 4  # onnxruntime's log severity; its exceptions give the details


class OnnxRun:
    """An exported stage with the signature of the stage itself; tensors go in and out without copies.

    Shapes are fixed except for the number of objects, so a tracker that uses it needs `static_shapes`. Raises
    EngineError where the file is absent, damaged, not an export of this stage, or has operators that onnxruntime cannot
    run on a CPU; MissingExtraError without the extra `onnx`.
    """

    def __init__(self, path: Path, stage: StageSpec) -> None:
        self._stage, self._path = stage, path
        self._session = _open_session(path, stage)
        _check(stage, path, "inputs", stage.inputs, self._session.get_inputs())
        _check(stage, path, "outputs", stage.outputs, self._session.get_outputs())

    def __call__(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the stage's output, or a tuple of them. Raises EngineError for inputs that do not fit its specs."""
        sizes = self._find_sizes(tensors)
        held = [tensor.contiguous() for tensor in tensors]
        outputs = tuple(torch.empty(spec.shape_for(*sizes), dtype=spec.dtype) for spec in self._stage.outputs)
        binding = self._session.io_binding()
        for spec, tensor in zip(self._stage.inputs, held, strict=True):
            binding.bind_input(spec.name, *_describe_buffer(spec, tensor))
        for spec, tensor in zip(self._stage.outputs, outputs, strict=True):
            binding.bind_output(spec.name, *_describe_buffer(spec, tensor))
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:  # onnxruntime's classes share no base but this
            raise EngineError(
                f"{self._stage.name}: onnxruntime failed in {self._path}: {_first_line(error)}"
            ) from error
        return outputs if len(outputs) > 1 else outputs[0]

    def _find_sizes(self, tensors: tuple[Tensor, ...]) -> Sizes:
        """Return the sizes of these inputs; raise EngineError for inputs that do not fit the specs."""
        specs = self._stage.inputs
        sizes = next(
            (_read_sizes(spec, x) for spec, x in zip(specs, tensors, strict=False) if OBJECTS in spec.shape),
            Sizes(),
        )
        expected = [_describe(spec.shape_for(*sizes), spec.dtype, "cpu") for spec in specs]
        actual = [
            _describe(x.shape, x.dtype, x.device.type) if isinstance(x, Tensor) else str(x) for x in tensors
        ]
        if actual != expected:
            raise EngineError(
                f"{self._stage.name}: expected inputs {', '.join(expected)}; found {', '.join(actual) or 'none'}"
            )
        return sizes


def _open_session(path: Path, stage: StageSpec) -> Any:
    runtime = require("onnxruntime", "onnx")
    options = runtime.SessionOptions()
    # the next level rearranges convolutions, and crashes the process on some in float16
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.log_severity_level = ERRORS_ONLY
    options.intra_op_num_threads = torch.get_num_threads()
    # it would move FP8 conversions through nodes that do not take FP8
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    if not path.is_file():
        raise EngineError(
            f"{stage.name}: expected an ONNX file at {path}, found none; export the stage first"
        )
    try:
        return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's classes share no base but this
        raise EngineError(
            f"{stage.name}: onnxruntime cannot run {path} on the CPU; if it is damaged, export the stage again: "
            f"{_first_line(error)}"
        ) from error


def _check(stage: StageSpec, path: Path, side: str, specs: tuple[TensorSpec, ...], values: list[Any]) -> None:
    """Raise EngineError for a file whose inputs or outputs do not match the specs."""
    expected = [(spec.name, ONNX_TYPES[spec.dtype][1], list(spec.shape)) for spec in specs]
    actual = [(value.name, value.type, value.shape) for value in values]
    if actual != expected:
        raise EngineError(
            f"{stage.name}: {path} is not an export of this stage: expected {side} {expected}, found {actual}"
        )


def _describe_buffer(spec: TensorSpec, tensor: Tensor) -> tuple[str, int, int, tuple[int, ...], int]:
    """Return device, device number, type, shape and address of a tensor, as onnxruntime takes them."""
    return "cpu", 0, ONNX_TYPES[spec.dtype][0], tuple(tensor.shape), tensor.data_ptr()


def _read_sizes(spec: TensorSpec, tensor: Tensor) -> Sizes:
    """Return the sizes that an input shows; one object's where it does not have the spec's dimensions."""
    fits = isinstance(tensor, Tensor) and tensor.ndim == len(spec.shape)
    found = dict(zip(spec.shape, tensor.shape, strict=True)) if fits else {}
    return Sizes(found.get(OBJECTS, 1), found.get(MEMORIES, 0))


def _describe(shape: Sequence[int], dtype: torch.dtype, device: str) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')} on {device}"


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:300]
