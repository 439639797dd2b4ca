"""The runtime of TensorRT plans, on a strict stand-in for the library and for CUDA's streams and graphs; no GPU."""

import copy
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sam3_node.cli import main as cli
from sam3_node.engines.export import BuildStep
from sam3_node.engines.inductor import GraphedStage
from sam3_node.engines.specs import ALIGNMENT, STAGES, StageSpec, TensorSpec, tracker_stages
from sam3_node.engines.tensorrt.builder import (
    DTYPES,
    PACKAGES,
    WORKSPACE_BYTES,
    BuildProgress,
    Gpu,
    build,
    find_library,
    find_target,
    get_logger,
)
from sam3_node.engines.tensorrt.runtime import TensorRTRun, Workspace, require_fused
from sam3_node.errors import EngineError, MissingExtraError
from sam3_node.models import TrackerModel
from sam3_node.models.sam.stages import Stages
from sam3_node.models.sam31 import random_model
from sam3_node.tracking import ObjectPrompt, Tracker
from tests.support.refuses import refuses
from tests.support.strict_cuda import StrictCuda
from tests.support.strict_tensorrt import BYTES_AN_OBJECT, StrictTensorRT
from tests.support.tiny import noise_clip, random_source, stages_of

CPU = torch.device("cpu")


class Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("one", torch.ones(()))

    def forward(self, image: Tensor, factor: Tensor) -> Tensor:
        return (image * factor[:, :1]).half()


STAGE = StageSpec(
    "scale",
    Scale(),
    (TensorSpec("image", (1, 4), torch.float16), TensorSpec("factor", ("objects", 3), torch.float32)),
    (TensorSpec("out", ("objects", 4), torch.float16),),
)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> StrictCuda:
    return StrictCuda(monkeypatch)


@pytest.fixture
def api(cuda: StrictCuda, monkeypatch: pytest.MonkeyPatch) -> StrictTensorRT:
    api = StrictTensorRT(cuda)
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", api)
    return api


def make_run(api: StrictTensorRT, kernels: Path | None = None) -> TensorRTRun:
    return TensorRTRun(api.plan(STAGE, 8), STAGE, CPU, kernels=kernels)


def inputs(objects: int) -> tuple[Tensor, Tensor]:
    return torch.arange(4.0).half()[None], torch.arange(1.0, 3 * objects + 1).view(objects, 3)


def test_a_plan_gives_what_its_module_gives(api: StrictTensorRT) -> None:
    run = make_run(api)
    for objects in (1, 3, 8, 3):
        assert torch.equal(run(*inputs(objects)), Scale()(*inputs(objects)))
    assert api.compiled == ["scale 1", "scale 3", "scale 8"]


def test_inputs_that_are_not_aligned_are_copied(api: StrictTensorRT) -> None:
    image, factor = inputs(2)
    block = torch.zeros(5, 3)
    block[1:3] = factor
    assert block[1:3].data_ptr() % ALIGNMENT
    assert torch.equal(make_run(api)(image, block[1:3]), Scale()(image, factor))


def test_work_leaves_the_default_stream_and_keeps_its_order(api: StrictTensorRT, cuda: StrictCuda) -> None:
    run = make_run(api)
    run(*inputs(2))  # the stand-in refuses the default stream
    (place,) = api.last_use.values()
    assert cuda.current.cuda_stream == 0
    assert cuda.current.comes_after(place), "later work of the default stream waits for the engine"


def test_on_another_stream_it_stays_there(api: StrictTensorRT, cuda: StrictCuda) -> None:
    stream = cuda.new_stream()
    run = make_run(api)
    with cuda.use(stream):
        run(*inputs(2))
    ((used, _),) = api.last_use.values()
    assert used is stream


def test_a_plan_without_scratch_memory_is_given_none(
    api: StrictTensorRT, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.strict_tensorrt.BYTES_AN_OBJECT", 0)
    assert make_run(api)(*inputs(2)) is not None


def test_engines_of_a_workspace_share_one_block_of_the_largest_size(api: StrictTensorRT) -> None:
    workspace = Workspace(CPU)
    small, large = (TensorRTRun(api.plan(STAGE, most), STAGE, CPU, workspace) for most in (1, 8))
    small(*inputs(1)), large(*inputs(8)), small(*inputs(1))
    assert len(api.last_use) == 1
    with refuses(EngineError, field=("loaded", "runs")):
        TensorRTRun(api.plan(STAGE, 9), STAGE, CPU, workspace)


def test_the_library_needs_no_runtime_configuration_of_its_own(
    cuda: StrictCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = StrictTensorRT(cuda, "tensorrt")
    monkeypatch.setitem(sys.modules, "tensorrt", api)
    assert torch.equal(make_run(api)(*inputs(2)), Scale()(*inputs(2)))


def test_kernels_are_compiled_once_and_kept_for_the_next_start(api: StrictTensorRT, tmp_path: Path) -> None:
    kept = tmp_path / "scale.kernels"
    for objects in (1, 2, 1):
        make_run(api, kept)(*inputs(objects))
    assert api.compiled == ["scale 1", "scale 2"], "each start takes what those before it have compiled"
    assert kept.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "damage", [lambda path: path.write_bytes(b"\xff\x00"), lambda path: path.chmod(0o666)]
)
def test_kernels_that_cannot_be_used_are_compiled_again(
    api: StrictTensorRT, tmp_path: Path, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    kept = tmp_path / "scale.kernels"
    make_run(api, kept)(*inputs(1))
    damage(kept)
    with caplog.at_level(logging.INFO):
        make_run(api, kept)(*inputs(1))
    assert "are compiled again" in caplog.text
    make_run(api, kept)(*inputs(1))
    assert api.compiled == ["scale 1"] * 2


def test_where_kernels_cannot_be_kept_the_engine_serves(
    api: StrictTensorRT, caplog: pytest.LogCaptureFixture
) -> None:
    make_run(api, Path(__file__) / "scale.kernels")(*inputs(1))
    assert "are not kept" in caplog.text


def test_a_plan_that_does_not_load_says_what_to_do(api: StrictTensorRT) -> None:
    with refuses(EngineError, field=("scale", "tensorrt_rtx", "1.7.1")):
        TensorRTRun(b"damaged", STAGE, CPU)


def test_a_context_without_memory_says_what_to_lower(
    api: StrictTensorRT, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(api)
    run(*inputs(1))
    monkeypatch.setattr("tests.support.strict_tensorrt.Engine.create_execution_context", lambda *_: None)
    with refuses(EngineError, field=("4", "objects")):
        run(*inputs(4))
    assert torch.equal(run(*inputs(1)), Scale()(*inputs(1)))


@pytest.mark.parametrize(
    ("method", "result", "said"),
    [
        ("set_input_shape", False, ("image", "1", "4")),
        ("get_tensor_shape", (9, 4), ("out", "4", "9")),
        ("set_tensor_address", False, "image"),
        ("execute_async_v3", False, ("4", "objects")),
    ],
)
def test_what_the_library_refuses_is_an_error(
    api: StrictTensorRT,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    result: object,
    said: str | tuple[str, ...],
) -> None:
    monkeypatch.setattr(f"tests.support.strict_tensorrt.Context.{method}", lambda *_: result)
    with refuses(EngineError, field=said):
        make_run(api)(*inputs(4))


def test_what_cannot_be_captured_is_an_error(api: StrictTensorRT, cuda: StrictCuda) -> None:
    run = GraphedStage(make_run(api), cuda.capture)
    api.capturable = False
    with refuses(EngineError, field=("CUDA", "engine.graphs")):
        run(*inputs(2))


@pytest.fixture(scope="module")
def source() -> torch.nn.Module:
    return random_source("sam3")


def tracked(model: TrackerModel, objects: int = 5, frames: int = 4) -> Tensor:
    """Return the logits of all frames; all objects are prompted on the first one."""
    tracker = Tracker(model, max_objects=objects)
    prompts = [ObjectPrompt(i, points=[[20.0 + 12 * i, 40.0]]) for i in range(objects)]
    clip = noise_clip(model.image_size, frames)
    return torch.stack([tracker.step(pixels, () if i else prompts).logits for i, pixels in enumerate(clip)])


@pytest.mark.parametrize("graphs", [False, True])
def test_a_tracker_of_plans_gives_what_torch_gives(
    api: StrictTensorRT, cuda: StrictCuda, source: torch.nn.Module, graphs: bool
) -> None:
    """Five objects: padded to six, and read by a plan that takes four at a time."""
    plain = stages_of(source)
    model = stages_of(source)
    specs = tracker_stages(model)
    workspace = Workspace(CPU)
    runs = (
        TensorRTRun(api.plan(specs[name], 4 if name == "read" else 8), specs[name], CPU, workspace)
        for name in STAGES
    )
    stages = Stages(*runs)
    model.stages = Stages(*(GraphedStage(run, cuda.capture) for run in stages)) if graphs else stages
    model.static_shapes = True
    assert (tracked(model) - tracked(plain)).abs().max() < 1e-4
    assert {objects for name, objects in api.executed if name == "read"} == {4, 2}
    assert {objects for name, objects in api.executed if name == "decode"} == {6}
    if graphs:
        before = len(api.executed)
        tracked(model)
        assert len(api.executed) == before, "all calls are replays"


@pytest.mark.parametrize("graphs", [False, True])
def test_groups_are_followed_by_plans_in_as_many_calls_as_they_need(
    api: StrictTensorRT, cuda: StrictCuda, graphs: bool
) -> None:
    """33 objects of SAM 3.1 are three groups; its plans take two at a time."""
    plain = random_model(56, 32)
    model = copy.copy(plain)
    specs = tracker_stages(model)
    workspace = Workspace(CPU)
    stages = Stages(*(TensorRTRun(api.plan(specs[name], 2), specs[name], CPU, workspace) for name in STAGES))
    model.stages = Stages(*(GraphedStage(run, cuda.capture) for run in stages)) if graphs else stages
    model.static_shapes = True
    assert (tracked(model, 33) - tracked(plain, 33)).abs().max() < 1e-3
    for stage in STAGES[1:]:
        assert {objects for name, objects in api.executed if name == stage} == {2, 1}


@pytest.fixture
def without_tensorrt(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PACKAGES:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.usefixtures("without_tensorrt")
def test_a_missing_library_is_told_with_its_extras() -> None:
    with refuses(MissingExtraError, field="sam3-node"):
        find_library()


@pytest.mark.usefixtures("without_tensorrt")
def test_a_build_without_the_library_ends_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["engine", "build", "--gpu", "sm89"]) == 2
    assert "found neither" in capsys.readouterr().err


class Timings:
    """TensorRT's timing cache of one version."""

    def __init__(self, kept: bytes) -> None:
        self.kept = kept

    def serialize(self) -> bytes:
        return self.kept


class BuilderConfig:
    """TensorRT's configuration of a build; `set_timing_cache` refuses the cache of another GPU."""

    def __init__(self, version: bytes, gpu: bytes) -> None:
        self.version = version
        self.gpu = gpu
        self.pools: dict[str, int] = {}
        self.cache = Timings(b"")

    def clear_flag(self, flag: str) -> None:
        assert flag == "tf32"

    def set_memory_pool_limit(self, pool: str, size: int) -> None:
        self.pools[pool] = size

    def create_timing_cache(self, kept: bytes) -> Timings | None:
        return Timings(kept) if not kept or kept.startswith(self.version) else None

    def set_timing_cache(self, cache: Timings, ignore_mismatch: bool) -> bool:
        assert not ignore_mismatch
        if cache.kept and self.gpu not in cache.kept:
            return False
        self.cache = cache
        return True

    def add_optimization_profile(self, profile: object) -> None:
        pass


class BuilderApi(StrictTensorRT):
    """Plain TensorRT that builds plans of STAGE; `timed` notes what each build found in its timing cache."""

    def __init__(self, cuda: StrictCuda) -> None:
        super().__init__(cuda, "tensorrt")
        self.gpu = b"gpu0"
        self.timed = list[bytes]()
        self.configs = list[BuilderConfig]()
        self.NetworkDefinitionCreationFlag = SimpleNamespace(STRONGLY_TYPED=1)
        self.BuilderFlag = SimpleNamespace(TF32="tf32")
        self.MemoryPoolType = SimpleNamespace(WORKSPACE="workspace")
        self.IProgressMonitor = object
        self.OnnxParser = lambda network, logger: SimpleNamespace(parse_from_file=lambda path: True)
        self.Builder: Callable[[Any], Any] = lambda logger: SimpleNamespace(
            create_network=lambda flags: _describe_network(STAGE),
            create_builder_config=self._configure,
            create_optimization_profile=lambda: SimpleNamespace(set_shape=lambda *shapes: None),
            build_serialized_network=self._build,
        )

    def _configure(self) -> BuilderConfig:
        self.configs.append(BuilderConfig(self.__version__.encode(), self.gpu))
        return self.configs[-1]

    def _build(self, network: object, config: BuilderConfig) -> bytes:
        self.timed.append(config.cache.kept)
        config.cache.kept = b"%s %s kernels" % (config.version, config.gpu)
        return self.plan(STAGE, 8)


def _describe_network(stage: StageSpec) -> SimpleNamespace:
    """Return the network that TensorRT reads from the file of a stage."""
    tensors = [
        SimpleNamespace(
            name=spec.name,
            dtype=SimpleNamespace(name=DTYPES[spec.dtype]),
            shape=[side if isinstance(side, int) else -1 for side in spec.shape],
        )
        for spec in (*stage.inputs, *stage.outputs)
    ]
    return SimpleNamespace(
        num_inputs=len(stage.inputs),
        num_outputs=len(stage.outputs),
        get_input=lambda index: tensors[index],
        get_output=lambda index: tensors[len(stage.inputs) + index],
    )


@pytest.fixture
def builder(cuda: StrictCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> BuilderApi:
    api = BuilderApi(cuda)
    monkeypatch.setitem(sys.modules, "tensorrt", api)
    use_gpu(monkeypatch)
    (tmp_path / "scale.onnx").touch()
    return api


def use_gpu(monkeypatch: pytest.MonkeyPatch, units: int = 16, gib: float = 61.4) -> None:
    gpu = SimpleNamespace(
        name="Orin", major=8, minor=7, multi_processor_count=units, total_memory=int(gib * 2**30)
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: gpu)


def test_a_gpu_is_told_from_a_smaller_one_of_its_name(
    builder: BuilderApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_target(find_library()) == Gpu("sm87", "Orin, 16 SMs, 61 GiB")
    use_gpu(monkeypatch, units=8, gib=15.3)
    assert find_target(find_library()) == Gpu("sm87", "Orin, 8 SMs, 15 GiB")


def test_a_build_limits_scratch_memory_and_keeps_its_timings(builder: BuilderApi, tmp_path: Path) -> None:
    timings = tmp_path / "store" / "timing.cache"
    onnx = tmp_path / "scale.onnx"
    for _ in range(2):
        build(onnx, STAGE, timings=timings)
    assert [config.pools for config in builder.configs] == [{"workspace": WORKSPACE_BYTES}] * 2
    kept = timings.read_bytes()
    assert builder.timed == [b"", kept]
    assert timings.stat().st_mode & 0o777 == 0o600
    builder.__version__ = "10.99"
    build(onnx, STAGE, timings=timings)
    builder.gpu = b"gpu1"
    build(onnx, STAGE, timings=timings)
    timings.chmod(0o666)  # anybody could have written it
    build(onnx, STAGE, timings=timings)
    assert builder.timed[2:] == [b"", b"", b""]
    assert timings.read_bytes() == b"10.99 gpu1 kernels"
    assert build(onnx, STAGE)
    assert builder.timed[-1] == b""


def test_a_plan_whose_attention_is_not_fused_is_refused(builder: BuilderApi) -> None:
    plan = builder.plan(STAGE, 8)
    require_fused(plan, STAGE, max_bytes=8 * BYTES_AN_OBJECT + 1)
    with refuses(EngineError, field=("attention was not fused", "--engine.kind torch")):
        require_fused(plan, STAGE, max_bytes=8 * BYTES_AN_OBJECT)


def test_a_library_that_the_driver_is_too_old_for_says_so(builder: BuilderApi, tmp_path: Path) -> None:
    """The real bindings raise TypeError then; see test_bindings.py."""

    def fail(logger: Any) -> None:
        logger.log(logger.ERROR, "CUDA initialization failure with error: 35")
        raise TypeError("pybind11::init(): factory function returned nullptr")

    builder.Builder = builder.Runtime = fail
    for attempt in (lambda: build(tmp_path / "scale.onnx", STAGE), lambda: TensorRTRun(b"plan", STAGE, CPU)):
        with refuses(EngineError, field=("CUDA initialization failure", "tensorrt-cu12", "580")):
            attempt()


def test_warnings_of_the_library_are_warnings(api: StrictTensorRT, caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger(api)
    with caplog.at_level(logging.DEBUG):
        logger.log(logger.WARNING, "Using an engine plan file across different models of devices")
        logger.log(logger.INFO, "loaded")
    assert [record.levelname for record in caplog.records] == ["WARNING", "DEBUG"]


def test_nested_phases_count_as_part_of_a_step() -> None:
    progress = BuildProgress()
    assert progress.fraction == 0
    progress.phase_start("all", None, 4)
    progress.step_complete("all", 0)
    progress.phase_start("part", "all", 2)
    progress.phase_start("detail", "part", 10)
    for step in range(5):
        progress.step_complete("detail", step)
    assert progress.fraction == pytest.approx((1 + 0.5 / 2) / 4)
    progress.phase_finish("detail")
    assert progress.fraction == pytest.approx((1 + 0.5 / 2) / 4)
    progress.phase_finish("part")
    progress.step_complete("all", 0)
    assert progress.fraction == pytest.approx(2 / 4)
    progress.phase_finish("all")
    assert progress.fraction == 1


def test_unknown_phases_are_ignored() -> None:
    progress = BuildProgress()
    assert progress.step_complete("unknown", 0)
    progress.phase_finish("unknown")
    assert progress.fraction == 0


def test_a_step_reports_the_fraction_of_the_builder_and_measures_its_time() -> None:
    now = [0.0]
    reports = list[tuple[str, float]]()
    step = BuildStep("encode", lambda *report: reports.append(report), clock=lambda: now[0])
    step.update(0.25)
    step.update(1.0)  # a builder has ended its last phase, but has not returned
    now[0] = 30.04
    assert step.finish() == 30.0
    assert reports == [("encode", 0.0), ("encode", 0.25), ("encode", 0.99), ("encode", 1.0)]


def test_an_earlier_build_is_the_better_estimate() -> None:
    now = [0.0]
    fractions = list[float]()
    step = BuildStep("encode", lambda title, fraction: fractions.append(fraction), 25.0, lambda: now[0])
    for now[0] in (5.0, 28.0):
        step.update(0.9)
    step.finish()
    assert fractions == [0.0, 0.2, 0.99, 1.0]
