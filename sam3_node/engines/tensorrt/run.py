"""Execution contexts of a TensorRT engine: one for each number of objects, so that none is ever set to another.

A TensorRT plan as a stage: device tensors of torch in and out, on torch's own stream, without copies."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import EngineError
from ..oom import ROOM
from ..specs import OBJECTS, StageSpec, TensorSpec, objects_of, placed
from .library import Library, find_library, log_of, told


class Contexts:
    """What runs an engine for a number of objects; made when it is first asked for, and kept.

    All of them use optimisation profile 0, which TensorRT 10 and newer, and TensorRT-RTX, let contexts share. They also
    share one block of device memory for what lies between inputs and outputs, so only one of them may run at a time.
    The shapes and that address stay as they are: a CUDA graph of one number survives the others.
    """

    def __init__(self, library: Library, engine: Any, stage: StageSpec, device: torch.device) -> None:
        """Take the memory that the largest number needs; raises torch's OutOfMemoryError."""
        self._library, self._engine, self._stage = library, engine, stage
        self._memory = torch.empty(engine.device_memory_size_v2, dtype=torch.uint8, device=device)
        self._made: dict[int, Any] = {}

    def of(self, objects: int) -> Any:
        """The context for so many objects, its shapes set. Raises EngineError where there is no room for it."""
        if objects not in self._made:
            self._made[objects] = self._make(objects)
        return self._made[objects]

    def _make(self, objects: int) -> Any:
        log = log_of(self._library.api)
        log.errors.clear()
        context = self._engine.create_execution_context(self._how())
        if context is None:
            raise EngineError(
                f"{self._stage.name}: no room to run the plan for {objects} objects: {told(log)}; where memory ran "
                f"out, {ROOM}"
            )
        context.set_device_memory(self._memory.data_ptr(), self._memory.numel())
        for port in self._stage.inputs:
            if not context.set_input_shape(port.name, port.sized(objects)):
                raise EngineError(
                    f"{self._stage.name}: {port.name}: the plan does not take {list(port.sized(objects))}: {told(log)}"
                )
        return context

    def _how(self) -> Any:
        """Memory from here; from TensorRT-RTX at once the kernels that it keeps, for the gate and graphs to see."""
        api = self._library.api
        ours = api.ExecutionContextAllocationStrategy.USER_MANAGED
        if not self._library.compiles_at_run_time:
            return ours
        config = self._engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(ours)
        config.dynamic_shapes_kernel_specialization_strategy = (
            api.DynamicShapesKernelSpecializationStrategy.EAGER
        )
        return config


AGAIN = "build it again here: sam3-node engine build"


class TensorRTRun:
    """Runs a plan in the place of a stage's module, for 1 to `most_objects` objects where the stage varies.

    Outputs are the caller's to keep: each call takes them from torch's allocator, which costs microseconds, so that
    features kept for later frames are never written over. Within a CUDA graph's capture they, and with them all
    addresses, are fixed; a number of objects must have run before it is captured. One call at a time.
    """

    def __init__(self, plan: bytes, stage: StageSpec, device: torch.device | str = "cuda") -> None:
        """Load a plan onto a CUDA device. Raises EngineError where it cannot run here, MissingExtraError, and torch's
        OutOfMemoryError."""
        library = find_library()
        if not torch.cuda.is_available():
            raise EngineError(
                f"{stage.name}: expected a GPU to run a TensorRT plan on, torch finds none; use --engine.kind torch"
            )
        self._stage = stage
        self._device = torch.empty(0, device=device).device
        with torch.cuda.device(self._device):
            # a context keeps neither engine nor runtime alive
            self._runtime, self._engine = _load(library, plan, stage)
            self._contexts = Contexts(library, self._engine, stage, self._device)
        self.most_objects = _most_objects(self._engine, stage)

    def __call__(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run on torch's current stream: the ports' tensors in, the ports' tensors out, on the device.

        Raises EngineError for tensors of other shapes or dtypes, or on another device.
        """
        objects = objects_of(self._stage, inputs, self.most_objects, self._device)
        with torch.cuda.device(self._device):
            held = [placed(tensor) for tensor in inputs]
            outputs = tuple(self._empty(port, objects) for port in self._stage.outputs)
            context = self._contexts.of(objects)
            for port, tensor in zip(self._stage.inputs + self._stage.outputs, (*held, *outputs), strict=True):
                context.set_tensor_address(port.name, tensor.data_ptr())
            if not context.execute_async_v3(torch.cuda.current_stream().cuda_stream):
                raise EngineError(
                    f"{self._stage.name}: TensorRT did not run for {objects} objects; see its log"
                )
        return outputs if len(outputs) > 1 else outputs[0]

    def _empty(self, port: TensorSpec, objects: int) -> Tensor:
        return torch.empty(port.sized(objects), dtype=port.dtype, device=self._device)


def _load(library: Library, plan: bytes, stage: StageSpec) -> tuple[Any, Any]:
    """Runtime and engine of a plan on the current device."""
    log = log_of(library.api)
    log.errors.clear()
    runtime = library.api.Runtime(log)
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise EngineError(
            f"{stage.name}: {library.name} {library.version} cannot load the plan: {told(log)}; where memory ran "
            f"out, {ROOM}; else {AGAIN}"
        )
    names = {engine.get_tensor_name(index) for index in range(engine.num_io_tensors)}
    expected = {port.name for port in stage.inputs + stage.outputs}
    if names != expected:
        raise EngineError(
            f"{stage.name}: expected a plan of {sorted(expected)}, found {sorted(names)}; {AGAIN}"
        )
    return runtime, engine


def _most_objects(engine: Any, stage: StageSpec) -> int:
    for port in stage.inputs:
        if OBJECTS in port.shape:
            return int(engine.get_tensor_profile_shape(port.name, 0)[2][port.shape.index(OBJECTS)])
    return 1
