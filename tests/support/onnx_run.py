"""Runner of exported stages: onnxruntime on the CPU, to check exports on machines without a GPU."""

from pathlib import Path

import torch
from torch import Tensor

from sam3_node.engines.specs import IMAGES, MEMORIES, OBJECTS, Sizes, StageSpec, TensorSpec
from sam3_node.errors import require

ONNX_TYPES = {  # numbers of the types in ONNX, and their names in onnxruntime
    torch.float32: (1, "tensor(float)"),
    torch.uint8: (2, "tensor(uint8)"),
    torch.int32: (6, "tensor(int32)"),
    torch.int64: (7, "tensor(int64)"),
    torch.bool: (9, "tensor(bool)"),
    torch.float16: (10, "tensor(float16)"),
    torch.bfloat16: (16, "tensor(bfloat16)"),
}
ERRORS_ONLY = 4  # onnxruntime's log severity; its exceptions give the details


class OnnxRun:
    """An exported stage with the signature of the stage itself; tensors go in and out without copies.

    A tracker that uses it needs `static_shapes`. onnxruntime refuses what it cannot run on a CPU.
    """

    def __init__(self, path: Path, stage: StageSpec) -> None:
        runtime = require("onnxruntime", "onnx")
        options = runtime.SessionOptions()
        # the next level rearranges convolutions, and crashes the process on some in float16
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.log_severity_level = ERRORS_ONLY
        options.intra_op_num_threads = torch.get_num_threads()
        # it would move FP8 conversions through nodes that do not take FP8
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        self._session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self._stage = stage

    def __call__(self, *tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the stage's output, or a tuple of them."""
        inputs = self._stage.inputs
        outputs = self._stage.outputs
        found: dict[int | str, int] = {}
        for spec, tensor in zip(inputs, tensors, strict=True):
            assert tensor.dtype == spec.dtype, spec.name
            found |= zip(spec.shape, tensor.shape, strict=True)
        sizes = Sizes(found.get(OBJECTS, 1), found.get(MEMORIES, 0), found.get(IMAGES, 1))
        held = [tensor.contiguous() for tensor in tensors]
        results = tuple(torch.empty(spec.shape_for(*sizes), dtype=spec.dtype) for spec in outputs)
        binding = self._session.io_binding()
        for spec, tensor in zip(inputs, held, strict=True):
            binding.bind_input(spec.name, *_describe_buffer(spec, tensor))
        for spec, tensor in zip(outputs, results, strict=True):
            binding.bind_output(spec.name, *_describe_buffer(spec, tensor))
        self._session.run_with_iobinding(binding)
        return results if len(results) > 1 else results[0]


def _describe_buffer(spec: TensorSpec, tensor: Tensor) -> tuple[str, int, int, tuple[int, ...], int]:
    """Return device, device number, type, shape and address of a tensor, as onnxruntime takes them."""
    return "cpu", 0, ONNX_TYPES[spec.dtype][0], tuple(tensor.shape), tensor.data_ptr()
