"""Execution contexts of a TensorRT plan, with a stand-in for the library; no GPU needed."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pytest
import torch

from sam3_node.engines.specs import StageSpec, TensorSpec
from sam3_node.engines.tensorrt.library import Library, get_logger
from sam3_node.engines.tensorrt.run import ExecutionContexts
from sam3_node.errors import EngineError

CPU = torch.device("cpu")
STAGE = StageSpec(
    "scale",
    torch.nn.Identity(),
    (TensorSpec("image", (1, 4), torch.float16), TensorSpec("factor", ("objects", 3), torch.float32)),
    (TensorSpec("out", ("objects", 4), torch.float16),),
)


class LibraryContext:
    """The used part of TensorRT's own execution context."""

    def __init__(self, how: object, refused: str = "") -> None:
        self.how, self.refused = how, refused
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.memory = (0, 0)

    def set_device_memory(self, address: int, size: int) -> None:
        self.memory = (address, size)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = shape
        return name != self.refused


class LibraryEngine:
    """The used part of TensorRT's own engine; it makes `capacity` contexts."""

    device_memory_size_v2 = 4096

    def __init__(self, api: ModuleType, capacity: int = 9, refused: str = "") -> None:
        self.api, self.capacity, self.refused = api, capacity, refused

    def create_runtime_config(self) -> SimpleNamespace:
        config = SimpleNamespace()
        config.set_execution_context_allocation_strategy = lambda how: setattr(config, "allocation", how)
        return config

    def create_execution_context(self, how: object) -> LibraryContext | None:
        self.capacity -= 1
        if self.capacity < 0:
            get_logger(self.api).errors.append("CUDA error 2: out of memory")
            return None
        return LibraryContext(how, self.refused)


@pytest.fixture
def api() -> ModuleType:
    class ILogger:
        INTERNAL_ERROR, ERROR, VERBOSE = range(3)

    api = ModuleType("tensorrt")
    api.ILogger = ILogger  # type: ignore[attr-defined]
    api.ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED="given")  # type: ignore[attr-defined]
    api.DynamicShapesKernelSpecializationStrategy = SimpleNamespace(EAGER="eager")  # type: ignore[attr-defined]
    return api


def make_contexts(engine: LibraryEngine, name: str = "tensorrt") -> ExecutionContexts:
    return ExecutionContexts(Library(name, "10.8", engine.api), engine, STAGE, CPU)


def test_each_number_of_objects_has_a_context_of_its_own(api: ModuleType) -> None:
    contexts = make_contexts(LibraryEngine(api))
    made = {objects: contexts.get(objects) for objects in (1, 2, 8)}
    assert len(set(map(id, made.values()))) == 3
    for objects, context in made.items():
        assert contexts.get(objects) is context
        assert context.shapes == {"image": (1, 4), "factor": (objects, 3)}
        assert context.how == "given"
    assert len({context.memory for context in made.values()}) == 1, "one block of memory for all"
    address, size = made[1].memory
    assert size == LibraryEngine.device_memory_size_v2
    assert address


def test_kernels_that_compile_at_run_time_compile_at_once(api: ModuleType) -> None:
    how = make_contexts(LibraryEngine(api), "tensorrt_rtx").get(2).how
    assert how.allocation == "given"
    assert how.dynamic_shapes_kernel_specialization_strategy == "eager"


def test_a_context_without_memory_says_what_to_lower(api: ModuleType) -> None:
    contexts = make_contexts(LibraryEngine(api, capacity=1))
    first = contexts.get(1)
    with pytest.raises(
        EngineError,
        match=r"cannot prepare the plan for 4 objects: CUDA error 2: out of memory; .*--tracker\.max_objects",
    ):
        contexts.get(4)
    assert contexts.get(1) is first


def test_a_plan_that_does_not_take_the_shapes_is_refused(api: ModuleType) -> None:
    contexts = make_contexts(LibraryEngine(api, refused="factor"))
    for _ in range(2):
        with pytest.raises(EngineError, match=r"scale: factor: the plan does not take \[4, 3\]"):
            contexts.get(4)
