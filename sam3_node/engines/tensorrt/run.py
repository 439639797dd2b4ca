"""TensorRT plans in the place of stages: they read and write torch's device tensors on torch's own stream.

Each number of objects has an execution context of its own, so that the shapes of a context never change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import EngineError
from ..oom import MEMORY_HINT
from ..specs import OBJECTS, StageSpec, TensorSpec, count_objects, ensure_aligned
from .library import Library, describe_errors, find_library, get_logger

REBUILD_HINT = "build it again here: sam3-node engine build"


class TensorRTRun:
    """A plan that runs in the place of a stage's module, for 1 to `max_objects` objects where the stage varies.

    The caller owns the outputs. Each call takes them from torch's allocator, which costs microseconds, so that features
    kept for later frames are never overwritten. Within the capture of a CUDA graph the outputs, and so all addresses,
    are fixed; run a number of objects once before it is captured. Only one call may run at a time.
    """

    def __init__(self, plan: bytes, stage: StageSpec, device: torch.device | str = "cuda") -> None:
        """Load a plan onto a CUDA device.

        Raises EngineError where it cannot run here, MissingExtraError, and torch's OutOfMemoryError.
        """
        library = find_library()
        if not torch.cuda.is_available():
            raise EngineError(
                f"{stage.name}: expected a GPU to run a TensorRT plan on, torch finds none; use --engine.kind torch"
            )
        self._stage = stage
        self._device = torch.empty(0, device=device).device
        with torch.cuda.device(self._device):
            # a context keeps neither engine nor runtime alive
            self._runtime, self._engine = _load_plan(library, plan, stage)
            self._contexts = ExecutionContexts(library, self._engine, stage, self._device)
        self.max_objects = _read_max_objects(self._engine, stage)

    def __call__(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run on torch's current stream with device tensors that fit the specs; return the outputs on the device.

        Raises EngineError for tensors of other shapes or dtypes, or on another device.
        """
        objects = count_objects(self._stage, inputs, self.max_objects, self._device)
        with torch.cuda.device(self._device):
            held = [ensure_aligned(tensor) for tensor in inputs]
            outputs = tuple(self._allocate(spec, objects) for spec in self._stage.outputs)
            context = self._contexts.get(objects)
            for spec, tensor in zip(self._stage.inputs + self._stage.outputs, (*held, *outputs), strict=True):
                context.set_tensor_address(spec.name, tensor.data_ptr())
            if not context.execute_async_v3(torch.cuda.current_stream().cuda_stream):
                raise EngineError(
                    f"{self._stage.name}: TensorRT did not run for {objects} objects; see its log"
                )
        return outputs if len(outputs) > 1 else outputs[0]

    def _allocate(self, spec: TensorSpec, objects: int) -> Tensor:
        return torch.empty(spec.shape_for(objects), dtype=spec.dtype, device=self._device)


class ExecutionContexts:
    """Execution contexts of one engine, by number of objects; each is made at its first use and kept.

    All of them use optimisation profile 0, which TensorRT 10 and newer, and TensorRT-RTX, let contexts share. They also
    share one block of device memory for intermediate values, so only one of them may run at a time. Their shapes and
    the block's address never change, so a CUDA graph of one number of objects stays valid when others are added.
    """

    def __init__(self, library: Library, engine: Any, stage: StageSpec, device: torch.device) -> None:
        """Allocate the memory that the largest number of objects needs; raises torch's OutOfMemoryError."""
        self._library, self._engine, self._stage = library, engine, stage
        self._memory = torch.empty(engine.device_memory_size_v2, dtype=torch.uint8, device=device)
        self._contexts: dict[int, Any] = {}

    def get(self, objects: int) -> Any:
        """Return the context for this number of objects, its shapes set. Raises EngineError where it cannot be made."""
        if objects not in self._contexts:
            self._contexts[objects] = self._create(objects)
        return self._contexts[objects]

    def _create(self, objects: int) -> Any:
        logger = get_logger(self._library.api)
        logger.errors.clear()
        context = self._engine.create_execution_context(self._configure())
        if context is None:
            raise EngineError(
                f"{self._stage.name}: cannot prepare the plan for {objects} objects: {describe_errors(logger)}; where "
                f"memory ran out, {MEMORY_HINT}"
            )
        context.set_device_memory(self._memory.data_ptr(), self._memory.numel())
        for spec in self._stage.inputs:
            shape = spec.shape_for(objects)
            if not context.set_input_shape(spec.name, shape):
                raise EngineError(
                    f"{self._stage.name}: {spec.name}: the plan does not take {list(shape)}: {describe_errors(logger)}"
                )
        return context

    def _configure(self) -> Any:
        """Return the configuration of a context: this class gives it memory, and it compiles all kernels at once.

        The latter concerns TensorRT-RTX, whose kernels must exist when the gate runs and when graphs are captured.
        """
        api = self._library.api
        user_managed = api.ExecutionContextAllocationStrategy.USER_MANAGED
        if not self._library.compiles_at_run_time:
            return user_managed
        config = self._engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(user_managed)
        config.dynamic_shapes_kernel_specialization_strategy = (
            api.DynamicShapesKernelSpecializationStrategy.EAGER
        )
        return config


def _load_plan(library: Library, plan: bytes, stage: StageSpec) -> tuple[Any, Any]:
    """Return runtime and engine of a plan on the current device."""
    logger = get_logger(library.api)
    logger.errors.clear()
    runtime = library.api.Runtime(logger)
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise EngineError(
            f"{stage.name}: {library.name} {library.version} cannot load the plan: {describe_errors(logger)}; where "
            f"memory ran out, {MEMORY_HINT}; else {REBUILD_HINT}"
        )
    names = {engine.get_tensor_name(index) for index in range(engine.num_io_tensors)}
    expected = {spec.name for spec in stage.inputs + stage.outputs}
    if names != expected:
        raise EngineError(
            f"{stage.name}: expected a plan of {sorted(expected)}, found {sorted(names)}; {REBUILD_HINT}"
        )
    return runtime, engine


def _read_max_objects(engine: Any, stage: StageSpec) -> int:
    """Return the largest number of objects that the engine takes."""
    for spec in stage.inputs:
        if OBJECTS in spec.shape:
            return int(engine.get_tensor_profile_shape(spec.name, 0)[2][spec.shape.index(OBJECTS)])
    return 1
