"""TensorRT's runtime interface on a CPU: it runs torch modules on addresses.

It refuses what TensorRT leaves undefined: the default stream, tensors and memory that are not aligned, inputs without
shapes, too little memory, memory that another work may still use, and changes of a context that a CUDA graph holds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sam3_node.engines.specs import MEMORIES, MIN_MEMORIES, OBJECTS, Sizes, StageSpec, as_tuple
from tests.support.strict_cuda import Stream, StrictCuda

ALIGNMENT = 256
BYTES_AN_OBJECT = 4096
GARBAGE = 0xFF  # as floating-point numbers, NaN


class StrictTensorRT(ModuleType):
    """The module `tensorrt_rtx`, or `tensorrt`. `compiled` counts the kernels that were compiled at run time."""

    def __init__(self, cuda: StrictCuda, name: str = "tensorrt_rtx") -> None:
        super().__init__(name)
        self.__version__ = "1.7.1"
        self.cuda = cuda
        self.compiled: list[str] = []
        self.executed: list[tuple[str, int]] = []
        """stage and number of objects of each execution"""
        self.capturable = True
        self.last_use: dict[int, tuple[Stream, int]] = {}
        """the last work on each block of memory"""
        self._plans: dict[bytes, tuple[StageSpec, int]] = {}
        self.ILogger = Logger
        self.ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED="user managed")
        self.DynamicShapesKernelSpecializationStrategy = SimpleNamespace(EAGER="eager")
        self.Runtime = lambda logger: SimpleNamespace(deserialize_cuda_engine=self._load)

    def plan(self, stage: StageSpec, max_objects: int) -> bytes:
        """Return the plan of a stage."""
        plan = f"{stage.name} {max_objects} {len(self._plans)}".encode()
        self._plans[plan] = (stage, max_objects)
        return plan

    def _load(self, plan: bytes) -> Engine | None:
        return Engine(self, *self._plans[plan]) if plan in self._plans else None


class Logger:
    INTERNAL_ERROR, ERROR, WARNING, INFO, VERBOSE = range(5)


class RuntimeCache:
    """Names of kernels, one a line, below a line with the version."""

    def __init__(self, version: str) -> None:
        self.version = version
        self.kernels = set[str]()

    def serialize(self) -> bytes:
        return "\n".join([self.version, *sorted(self.kernels)]).encode()

    def deserialize(self, blob: bytes) -> bool:
        version, *kernels = blob.decode(errors="replace").split("\n")
        if version != self.version:
            return False
        self.kernels = set(kernels)
        return True


class Engine:
    """A plan on the device."""

    def __init__(self, api: StrictTensorRT, stage: StageSpec, max_objects: int) -> None:
        self.api = api
        self.stage = stage
        self.max_objects = max_objects
        self.device_memory_size_v2 = BYTES_AN_OBJECT * max_objects
        self._tensors = [*stage.inputs, *stage.outputs]
        self.num_io_tensors = len(self._tensors)

    def get_tensor_name(self, index: int) -> str:
        return self._tensors[index].name

    def get_tensor_profile_shape(self, name: str, profile: int) -> list[tuple[int, ...]]:
        spec = next(spec for spec in self.stage.inputs if spec.name == name)
        most = self.stage.max_memories
        sizes = Sizes(1, min(MIN_MEMORIES, most)), *[Sizes(self.max_objects, most)] * 2
        return [spec.shape_for(*each) for each in sizes]

    def create_runtime_config(self) -> SimpleNamespace:
        config = SimpleNamespace(allocation=None, cache=None)
        config.create_runtime_cache = lambda: RuntimeCache(self.api.__version__)
        config.set_runtime_cache = lambda cache: setattr(config, "cache", cache)
        config.set_execution_context_allocation_strategy = lambda how: setattr(config, "allocation", how)
        return config

    def create_execution_context(self, how: Any) -> Context:
        if self.api.__name__ == "tensorrt_rtx":
            assert how.dynamic_shapes_kernel_specialization_strategy == "eager"
            how, cache = how.allocation, how.cache
        else:
            cache = None
        assert how == "user managed"
        return Context(self, cache)


class Context:
    """An execution context of given shapes."""

    def __init__(self, engine: Engine, cache: RuntimeCache | None) -> None:
        self.engine = engine
        self.stage = engine.stage
        self.api = engine.api
        self.cache = cache
        self.addresses: dict[str, int] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.memory = 0
        self.captured = False

    def set_device_memory(self, address: int, size: int) -> None:
        self._require_changeable()
        _require_aligned("memory", address)
        assert size >= self.engine.device_memory_size_v2, "too little memory"
        self.memory = address

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        self._require_changeable()
        spec = next(spec for spec in self.stage.inputs if spec.name == name)
        self.shapes[name] = tuple(shape)
        objects, memories, *_ = sizes = self._sizes()
        fits = 1 <= objects <= self.engine.max_objects and memories <= self.stage.max_memories
        return fits and tuple(shape) == spec.shape_for(*sizes)

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        spec = next(spec for spec in (*self.stage.inputs, *self.stage.outputs) if spec.name == name)
        return spec.shape_for(*self._sizes())

    def set_tensor_address(self, name: str, address: int) -> bool:
        self._require_changeable()
        _require_aligned(name, address)
        self.addresses[name] = address
        return True

    def is_stream_capturable(self, stream: int) -> bool:
        return self.api.capturable

    def execute_async_v3(self, stream: int) -> bool:
        """Run, or within a capture record, the stage's module on what lies at the addresses."""
        assert stream, "the default stream"
        self._require_all_set()
        if self.api.cuda.tape is not None:
            assert self.cache is None or self._kernel() in self.cache.kernels, "kernels compile in a capture"
            self.captured = True
            addresses = dict(self.addresses)
            self.api.cuda.tape.works.append(lambda: self._run(addresses))
            return True
        self._use_memory(self.api.cuda.streams[stream])
        self._compile()
        self._run(self.addresses)
        self.api.executed.append((self.stage.name, self._sizes().objects))
        return True

    def _run(self, addresses: dict[str, int]) -> None:
        sizes = self._sizes()
        ctypes.memset(self.memory, GARBAGE, self.engine.device_memory_size_v2)
        inputs = [_tensor_at(addresses[s.name], s.shape_for(*sizes), s.dtype) for s in self.stage.inputs]
        with torch.no_grad():
            results = as_tuple(self.stage.module(*(tensor.clone() for tensor in inputs)))
        for spec, result in zip(self.stage.outputs, results, strict=True):
            _tensor_at(addresses[spec.name], spec.shape_for(*sizes), spec.dtype).copy_(result)

    def _sizes(self) -> Sizes:
        """Return the sizes by the shapes that were set so far."""
        found: dict[int | str, int] = {OBJECTS: 1, MEMORIES: 0}
        for spec in self.stage.inputs:
            found |= dict(zip(spec.shape, self.shapes.get(spec.name, ()), strict=False))
        return Sizes(found[OBJECTS], found[MEMORIES])

    def _kernel(self) -> str:
        objects, memories, *_ = self._sizes()
        return f"{self.stage.name} {objects}" + (f" {memories}" if memories else "")

    def _compile(self) -> None:
        kernel = self._kernel()
        if self.cache is not None and kernel not in self.cache.kernels:
            self.cache.kernels.add(kernel)
            self.api.compiled.append(kernel)

    def _use_memory(self, stream: Stream) -> None:
        before = self.api.last_use.get(self.memory)
        assert before is None or stream.comes_after(before), "another work may still use the memory"
        self.api.last_use[self.memory] = stream.enqueue()

    def _require_all_set(self) -> None:
        assert self.memory or not self.engine.device_memory_size_v2, "no memory"
        assert self.shapes.keys() == {spec.name for spec in self.stage.inputs}, "not all shapes are set"
        names = {spec.name for spec in (*self.stage.inputs, *self.stage.outputs)}
        assert self.addresses.keys() == names, "not all addresses are set"

    def _require_changeable(self) -> None:
        assert not self.captured, "a CUDA graph holds this context: its changes are undefined"


def _require_aligned(name: str, address: int) -> None:
    assert address, f"{name} has no memory"
    assert address % ALIGNMENT == 0, f"{name} is not aligned"


def _tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    size = torch.Size(shape).numel()
    memory = (ctypes.c_char * (size * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=size).view(shape)
