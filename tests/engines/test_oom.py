"""Engines that fail once they are chosen: torch serves and says why, or an error says what to do."""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

from sam3_node.engines.inductor import CapturedGraph, GraphedStage, Inputs
from sam3_node.engines.oom import find_device_error, is_out_of_memory, reraise_out_of_memory
from sam3_node.engines.specs import StageSpec, TensorSpec
from sam3_node.errors import EngineError, ModelError
from sam3_node.models import weight_files
from sam3_node.models.sam.stages import Run, Stages
from sam3_node.perception.loading import load_model, warm_up
from sam3_node.settings import EngineSettings, ModelSettings, Settings, TrackerSettings
from tests.support.refuses import refuses
from tests.support.tiny import tiny_model

HUGE = 1 << 50  # bytes: more than any process can address
CUDA_FULL = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8.00 GiB"


def cuda_error(code: int, message: str = "an illegal memory access") -> torch.AcceleratorError:
    error = torch.AcceleratorError(f"CUDA error: {message}")
    error.error_code = code
    return error


def test_errors_after_which_a_process_has_lost_its_gpu() -> None:
    for code in (700, 710, 719):  # illegal address, device assertion, launch failure
        assert "illegal memory access" in str(find_device_error(cuda_error(code)))
    wrapped = EngineError("a stage failed")
    wrapped.__cause__ = cuda_error(700)
    assert find_device_error(wrapped) is not None


@pytest.mark.parametrize(
    ("answer", "is_lost"),
    [(cuda_error(700), True), (cuda_error(9, "invalid configuration"), False), (None, False)],
)
def test_an_error_of_a_library_is_explained_by_the_device(
    monkeypatch: pytest.MonkeyPatch, answer: Exception | None, is_lost: bool
) -> None:
    def synchronize() -> None:
        if answer is not None:
            raise answer

    error = RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`")
    assert find_device_error(error) is None, "there is no device that could have failed"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    found = find_device_error(error)
    assert (found is not None) == is_lost
    assert found is None or "illegal memory access" in str(found)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shapes do not match"),
        torch.OutOfMemoryError(CUDA_FULL),
        cuda_error(2, "out of memory"),
        cuda_error(9, "invalid configuration argument"),
        cuda_error(209, "no kernel image is available"),
    ],
    ids=str,
)
def test_errors_that_leave_the_gpu_usable(error: Exception) -> None:
    assert find_device_error(error) is None


class Failing(nn.Module):
    """A stage that calls `fail`, which raises."""

    def __init__(self, fail: Callable[[], Any]) -> None:
        super().__init__()
        self.fail = fail
        self.register_buffer("scale", torch.ones(1))

    def forward(self, *inputs: Tensor) -> Any:
        return self.fail()


def raising(error: Exception) -> Callable[[], NoReturn]:
    def fail() -> NoReturn:
        raise error

    return fail


def allocate() -> Tensor:
    return torch.empty(HUGE, dtype=torch.uint8)


FAILURES = {
    "device memory": (
        raising(torch.OutOfMemoryError(CUDA_FULL)),
        "memory ran out on the first frames: .*2.00 GiB",
    ),
    "host memory": (allocate, "memory ran out on the first frames: .*DefaultCPUAllocator"),
    "Python's memory": (raising(MemoryError()), "memory ran out on the first frames: MemoryError"),
    "a kernel": (
        raising(RuntimeError("CUDA error: invalid argument")),
        "engines failed on the first frames: .*invalid",
    ),
    "an engine": (
        raising(EngineError("read: TensorRT did not run for 2 objects; see its log")),
        "did not run",
    ),
}


def make_settings(**engine: Any) -> Settings:
    tracker = TrackerSettings(max_objects=2, bank_size=2)
    return Settings(model=ModelSettings(device="cpu"), tracker=tracker, engine=EngineSettings(**engine))


@pytest.mark.parametrize("stage", ["encode", "remember"])
@pytest.mark.parametrize("kind", FAILURES)
def test_torch_serves_where_engines_fail_on_the_first_frames(
    kind: str, stage: str, caplog: pytest.LogCaptureFixture
) -> None:
    fail, said = FAILURES[kind]
    model = tiny_model(presence=60.0)
    own = model.stages
    model.stages = own._replace(**{stage: Failing(fail)})
    model.static_shapes = True
    with caplog.at_level(logging.WARNING):
        warm_up(model, make_settings(), own)
    assert model.stages is own
    assert not model.static_shapes
    assert model.name.startswith("tiny (torch: ")
    assert len(model.name) < 120
    (warning,) = caplog.records
    assert re.search(said, warning.getMessage())


@pytest.mark.parametrize("kind", FAILURES)
def test_without_a_fallback_the_start_ends_with_what_to_do(kind: str) -> None:
    fail, said = FAILURES[kind]
    model = tiny_model(presence=60.0)
    own = model.stages
    model.stages = own._replace(read=Failing(fail))
    with pytest.raises(EngineError, match=said) as caught:
        warm_up(model, make_settings(fallback=False), own)
    advised = "--engine.kind torch" in str(caught.value)
    assert advised == (kind != "an engine")
    assert ("--tracker.max_objects" in str(caught.value)) == ("memory" in kind)
    assert model.name == "tiny"


def test_torch_serves_where_a_capture_fails() -> None:
    def record(run: Run, inputs: Inputs) -> CapturedGraph:
        raise EngineError("a stage cannot be captured in a CUDA graph: no; set engine.graphs = false")

    model = tiny_model(presence=60.0)
    own = model.stages
    model.stages = Stages(*(GraphedStage(run, record) for run in own))
    warm_up(model, make_settings(graphs=True), own)
    assert model.stages is own
    assert model.name == "tiny (torch: a stage cannot be captured in a CUDA graph: no)"


def test_torch_has_nothing_to_fall_back_to() -> None:
    model = tiny_model(presence=60.0)
    model.stages = model.stages._replace(encode=Failing(allocate))
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        warm_up(model, make_settings(), model.stages)
    assert model.name == "tiny"


@pytest.fixture
def vast(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of weights that do not fit into memory."""

    def fail(*_: object) -> NoReturn:
        raise torch.OutOfMemoryError(CUDA_FULL)

    monkeypatch.setattr(weight_files, "cast_source", fail)
    return "nano"


def test_weights_that_do_not_fit_say_what_to_lower(vast: str) -> None:
    with refuses(ModelError, field=("ran", "loaded")):
        load_model(ModelSettings(name=vast, device="cpu"), TrackerSettings())


@pytest.mark.engines
def test_a_build_that_does_not_fit_says_what_to_lower(vast: str, tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    from sam3_node.engines.build import build_engines

    model = ModelSettings(name=vast, device="cpu")
    engine = EngineSettings(folder=tmp_path)
    with refuses(EngineError, field=("engines", "built")):
        build_engines(Settings(model=model, engine=engine), "sm89")
    assert not list(tmp_path.iterdir())


@pytest.mark.engines
def test_an_export_that_does_not_fit_says_what_to_lower(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    from sam3_node.engines.export import export

    spec = TensorSpec("x", (1, 4), torch.float32)
    stage = StageSpec("wide", Failing(raising(torch.OutOfMemoryError(CUDA_FULL))), (spec,), (spec,))
    with refuses(EngineError, field=("wide", "OutOfMemoryError")):
        export(stage, tmp_path / "wide.onnx")


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("full"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: invalid argument"), False),
        (ModelError("no folder"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: Exception, is_memory: bool) -> None:
    assert is_out_of_memory(error) == is_memory
    with pytest.raises(ModelError) as caught:
        raise ModelError("cannot load it") from error
    assert is_out_of_memory(caught.value) == is_memory


def test_only_out_of_memory_errors_are_converted() -> None:
    for error in (RuntimeError("invalid argument"), EngineError("full: out of memory"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught, reraise_out_of_memory(ModelError, "here"):
            raise error
        assert caught.value is error
