"""TensorRT plans: real ones, built here by TensorRT-RTX, which needs no GPU for it; run only where there is one."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytest.importorskip("onnxscript")
pytest.importorskip("tensorrt_rtx")

from sam3_node.engines.export import export
from sam3_node.engines.inductor import GraphedStage, capture_cuda_graph, use_graphs
from sam3_node.engines.quantize import Recipe, Scales, export_quantised, weights_digest
from sam3_node.engines.specs import STAGES, StageSpec, tracker_stages
from sam3_node.engines.tensorrt.builder import build, count_fp8_layers, find_library
from sam3_node.engines.tensorrt.runtime import TensorRTRun
from sam3_node.errors import EngineError
from sam3_node.models import TrackerModel, load_tracker
from sam3_node.models.sam.stages import Stages
from tests.engines.test_graphs import tracked
from tests.support.refuses import refuses
from tests.support.tiny import tiny_model

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
GENERATIONS = ("sm89", "sm120")

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(find_spec("tensorrt") is not None, reason="tensorrt builds for the local GPU alone"),
    pytest.mark.timeout(1200),
]


@pytest.fixture(scope="module")
def nano() -> TrackerModel:
    return load_tracker("nano", dtype="bfloat16")


@pytest.fixture(scope="module")
def small() -> StageSpec:
    """The quickest stage to build."""
    return tracker_stages(tiny_model())["remember"]


@pytest.fixture(scope="module")
def small_onnx(small: StageSpec, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(small, tmp_path_factory.mktemp("onnx") / "remember.onnx")


@pytest.mark.parametrize("name", ["encode", "remember"])  # the others are built in test_layers.py
def test_nano_is_built_for_two_generations(nano: TrackerModel, name: str, tmp_path: Path) -> None:
    stage = tracker_stages(nano)[name]
    path = export(stage, tmp_path / "stage.onnx")
    assert count_fp8_layers(path) == 0
    plans = [build(path, stage, gpu) for gpu in GENERATIONS]
    weights = sum(value.nbytes for value in stage.module.parameters())
    assert all(len(plan) > weights / 2 for plan in plans)
    assert plans[0] != plans[1]


def test_the_fp8_encoder_holds_fp8_layers(nano: TrackerModel, tmp_path: Path) -> None:
    layers = Recipe().select_layers(nano.encode_stage)
    amax = dict.fromkeys(layers, 8.0)
    scales = Scales(model="nano", digest=weights_digest(nano), frames=1, amax=amax)
    path = export_quantised(nano, scales, tmp_path / "encode.onnx")
    # each turns its input and its weights into FP8; weights may be stored as FP8 numbers already
    assert len(layers) <= count_fp8_layers(path) <= 2 * len(layers)
    for gpu in GENERATIONS:
        assert build(path, tracker_stages(nano)["encode"], gpu)


def test_progress_is_reported_until_the_plan_is_built(small: StageSpec, small_onnx: Path) -> None:
    fractions: list[float] = []
    assert build(small_onnx, small, "sm89", progress=fractions.append)
    assert fractions == sorted(fractions)
    assert all(0 <= fraction <= 1 for fraction in fractions)


def test_an_interrupt_ends_a_build(small: StageSpec, small_onnx: Path) -> None:
    def interrupt(fraction: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(small_onnx, small, "sm89", progress=interrupt)
    assert build(small_onnx, small, "sm89")


def _of_another_stage(onnx: Path, stage: StageSpec) -> None:
    build(onnx, tracker_stages(tiny_model())["encode"], "sm89")


def _of_another_dtype(onnx: Path, stage: StageSpec) -> None:
    build(onnx, tracker_stages(tiny_model(), dtype=torch.float16)["remember"], "sm89")


def _not_onnx(onnx: Path, stage: StageSpec) -> None:
    build(Path(__file__), stage, "sm89")


def _not_there(onnx: Path, stage: StageSpec) -> None:
    build(onnx.with_name("absent.onnx"), stage, "sm89")


def _for_an_unknown_generation(onnx: Path, stage: StageSpec) -> None:
    build(onnx, stage, "sm42")


@pytest.mark.parametrize(
    ("attempt", "said"),
    [
        (_of_another_stage, r"not the stage encode: expected \[\('pixels'.* found \[\('top'"),
        (_of_another_dtype, r"not the stage remember: expected .*'HALF'.* found .*'FLOAT'"),
        (_not_onnx, "cannot read .*test_build.py"),
        (_not_there, "found none at .*absent.onnx"),
        (_for_an_unknown_generation, "builds for .*sm89.* found 'sm42'"),
    ],
)
def test_what_cannot_be_built_is_refused(
    attempt: Callable[[Path, StageSpec], None], said: str, small: StageSpec, small_onnx: Path
) -> None:
    with pytest.raises(EngineError, match=said):
        attempt(small_onnx, small)


def test_the_library_has_what_contexts_are_made_by() -> None:
    """By its documentation; making one needs a GPU."""
    api = find_library().api
    assert api.ExecutionContextAllocationStrategy.USER_MANAGED
    assert api.DynamicShapesKernelSpecializationStrategy.EAGER
    config = ("set_execution_context_allocation_strategy", "dynamic_shapes_kernel_specialization_strategy")
    assert all(hasattr(api.IRuntimeConfig, name) for name in config)
    engine = ("create_runtime_config", "create_execution_context", "device_memory_size_v2")
    assert all(hasattr(api.ICudaEngine, name) for name in engine)
    context = ("set_device_memory", "set_input_shape", "set_tensor_address", "execute_async_v3")
    assert all(hasattr(api.IExecutionContext, name) for name in context)


@NO_GPU
def test_without_a_gpu_this_one_cannot_be_built_for(small: StageSpec, small_onnx: Path) -> None:
    with refuses(EngineError, field=("name", "generation")):
        build(small_onnx, small)


@NO_GPU
def test_without_a_gpu_a_plan_cannot_run(small: StageSpec, small_onnx: Path) -> None:
    plan = build(small_onnx, small, "sm89")
    with refuses(EngineError, field=("GPU", "TensorRT")):
        TensorRTRun(plan, small)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", STAGES)
def test_a_plan_gives_what_torch_gives(name: str, tmp_path: Path) -> None:
    stage = tracker_stages(tiny_model().cuda())[name]
    run = TensorRTRun(build(export(stage, tmp_path / "stage.onnx"), stage), stage)
    for objects in (1, 2, 4) if stage.varies else (1,):
        inputs = stage.examples(objects)
        actual = _tuple(run(*inputs))
        expected = _tuple(stage.module(*inputs))
        for spec, left, right in zip(stage.outputs, actual, expected, strict=True):
            assert left.shape == spec.shape_for(objects)
            assert torch.cosine_similarity(left.float().flatten(), right.float().flatten(), dim=0) > 0.99


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", STAGES)
def test_graphs_of_several_numbers_of_objects_do_not_disturb_one_another(name: str, tmp_path: Path) -> None:
    stage = tracker_stages(tiny_model().cuda())[name]
    plan = TensorRTRun(build(export(stage, tmp_path / "stage.onnx"), stage), stage)
    run = GraphedStage(plan, partial(capture_cuda_graph, pool=torch.cuda.graph_pool_handle()))
    counts = (1, 2, 4) if stage.varies else (1,)
    expected = {}
    for objects in counts:
        expected[objects] = _tuple(plan(*stage.examples(objects, seed=objects)))
        run(*stage.examples(objects))
    for objects in (*counts, *counts):
        actual = _tuple(run(*stage.examples(objects, seed=objects)))
        assert all(torch.equal(left, right) for left, right in zip(actual, expected[objects], strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_tracker_of_engines_in_graphs_gives_what_the_engines_give(tmp_path: Path) -> None:
    model = tiny_model().cuda()
    specs = tracker_stages(model)
    runs = (
        TensorRTRun(build(export(specs[name], tmp_path / f"{name}.onnx"), specs[name]), specs[name])
        for name in STAGES
    )
    model.stages = Stages(*runs)
    model.static_shapes = True
    plain = tracked(model, 3)
    use_graphs(model)
    assert all(isinstance(stage, GraphedStage) for stage in model.stages)
    assert (tracked(model, 3) - plain).abs().max() < 1e-4


def _tuple(outputs: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)
