"""Execution contexts of a TensorRT engine: one for each number of objects, so that none is ever set to another."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import EngineError
from .failures import ROOM
from .ports import Stage
from .tensorrt_library import Library, log_of, told


class Contexts:
    """What runs an engine for a number of objects; made when it is first asked for, and kept.

    All of them use optimisation profile 0, which TensorRT 10 and newer, and TensorRT-RTX, let contexts share. They also
    share one block of device memory for what lies between inputs and outputs, so only one of them may run at a time.
    The shapes and that address stay as they are: a CUDA graph of one number survives the others.
    """

    def __init__(self, library: Library, engine: Any, stage: Stage, device: torch.device) -> None:
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
