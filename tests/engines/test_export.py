"""Exported stages: onnxruntime gives the same outputs as torch."""

import copy
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from sam3_node.engines.detector import PHRASES, specify_network
from sam3_node.engines.export import dynamic_axes, export
from sam3_node.engines.specs import STAGES, StageSpec, tracker_stages
from sam3_node.errors import EngineError, MissingExtraError
from sam3_node.models import TrackerModel, load_tracker
from sam3_node.models.sam31 import random_model
from sam3_node.tracking import ObjectPrompt, Tracker
from tests.support import tiny
from tests.support.onnx_run import ONNX_TYPES, OnnxRun
from tests.support.paths import ROOT
from tests.support.refuses import refuses
from tests.support.tiny_stage import Scaled, scaled
from tests.support.tiny_yolo import phrases, tiny_yolo

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.engines

ONE_MEMORY_STEP = 2**-7  # of bfloat16, relative
FAMILIES = ("nano", "sam3.1")
GROUP_SIZE = (56, 32)
"""Image size in pixels and channels of the random model of SAM 3.1."""
PRESENCE_SHIFT = 2.7
"""By how much its presence is lowered, so that some of its objects are in view and some not."""
PRESENT = 20.0  # presence far from 0, so that rounding never changes which objects are in view
Run = Callable[..., Tensor | Sequence[Tensor]]
Exported = Callable[[str], tuple[StageSpec, Path]]


def caching(stages: dict[str, StageSpec], folder: Path) -> Exported:
    """Return a function that exports each stage at its first use."""

    @cache
    def get(name: str) -> tuple[StageSpec, Path]:
        return stages[name], export(stages[name], folder / f"{name}.onnx")

    return get


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(family: str) -> TrackerModel:
    if family == "nano":
        return load_tracker("nano")
    model = random_model(*GROUP_SIZE)
    with torch.inference_mode():
        model.video_stage.presence_head.proj_out.bias -= PRESENCE_SHIFT
    return model


@pytest.fixture(scope="module")
def exported(model: TrackerModel, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return caching(dict(tracker_stages(model)), tmp_path_factory.mktemp("stages"))


def tiny_stages(dtype: torch.dtype, **options: int) -> dict[str, StageSpec]:
    source = tiny.random_source("sam3", presence=PRESENT, **options)
    return dict(tracker_stages(tiny.stages_of(source.to(dtype))))


def group_stages(dtype: torch.dtype) -> dict[str, StageSpec]:
    return dict(tracker_stages(random_model(*GROUP_SIZE, dtype=dtype)))


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> dict[torch.dtype, Exported]:
    types = (torch.float16, torch.bfloat16)
    return {dtype: caching(tiny_stages(dtype), tmp_path_factory.mktemp("half")) for dtype in types}


@pytest.fixture(scope="module")
def half_groups(tmp_path_factory: pytest.TempPathFactory) -> dict[torch.dtype, Exported]:
    types = (torch.float16, torch.bfloat16)
    return {dtype: caching(group_stages(dtype), tmp_path_factory.mktemp("groups")) for dtype in types}


def each(outputs: Tensor | Sequence[Tensor]) -> Iterator[Tensor]:
    yield from [outputs] if isinstance(outputs, Tensor) else outputs


def run_both(
    run: Run, stage: StageSpec, objects: int, memories: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of outputs of the export and of torch for the same inputs."""
    inputs = stage.examples(objects, objects, memories)
    with torch.inference_mode():
        actual = list(each(run(*inputs)))
        expected = list(each(stage.module(*inputs)))
    assert [(x.shape, x.dtype) for x in actual] == [(x.shape, x.dtype) for x in expected]
    yield from zip(actual, expected, strict=True)


def difference(actual: Tensor, expected: Tensor) -> float:
    return (actual.float() - expected.float()).abs().max().item()


@pytest.mark.parametrize("name", STAGES)
def test_each_stage_agrees_with_torch_for_any_number_of_objects(exported: Exported, name: str) -> None:
    stage, path = exported(name)
    run = OnnxRun(path, stage)
    for objects, memories in ((1, None), (2, 2), (5, 7)) if stage.varies else ((1, None),):
        for actual, expected in run_both(run, stage, objects, memories):
            step = ONE_MEMORY_STEP * expected.abs().max().item() if expected.dtype == torch.bfloat16 else 1e-4
            assert difference(actual, expected) <= step


@pytest.mark.parametrize("name", STAGES)
def test_a_file_is_valid_and_typed_as_its_specs(exported: Exported, name: str) -> None:
    check_types(*exported(name))


def check_types(stage: StageSpec, path: Path) -> None:
    onnx.checker.check_model(str(path), full_check=True)
    graph = onnx.load(path).graph
    kinds = {number: dtype for dtype, (number, _) in ONNX_TYPES.items()}
    for specs, values in ((stage.inputs, graph.input), (stage.outputs, graph.output)):
        assert [spec.name for spec in specs] == [value.name for value in values]
        for spec, value in zip(specs, values, strict=True):
            held = value.type.tensor_type
            assert kinds[held.elem_type] == spec.dtype
            assert [side.dim_param or side.dim_value for side in held.shape.dim] == list(spec.shape)


def operators(path: Path) -> list[str]:
    return [node.op_type for node in onnx.load(path).graph.node]


PLAIN = ("MatMul", "MatMul")
FROM_IMAGE = ("Add", "MatMul")
"""The decoder's tokens attend to the image with a term of its places."""
TO_IMAGE = ("Reshape", "Reshape")
"""The image attends to tokens head by head."""


@pytest.mark.parametrize(
    ("name", "expected"), [("encode", {PLAIN}), ("read", {PLAIN}), ("decode", {PLAIN, FROM_IMAGE, TO_IMAGE})]
)
def test_attention_is_in_plain_steps(exported: Exported, name: str, expected: set[tuple[str, str]]) -> None:
    _, path = exported(name)
    assert not [kind for kind in operators(path) if "Attention" in kind]
    assert set(around_softmax(path)) == expected


def around_softmax(path: Path) -> list[tuple[str, str]]:
    """Return the operators before and after each softmax, without casts and selections by a mask."""
    nodes = onnx.load(path).graph.node
    made = {output: node for node in nodes for output in node.output}
    read = {value: node for node in nodes for value in node.input}
    actual = []
    for softmax in (node for node in nodes if node.op_type == "Softmax"):
        before = made[softmax.input[0]]
        after = read[softmax.output[0]]
        while before.op_type in ("Cast", "Where"):
            before = made[before.input[before.op_type == "Where"]]
        while after.op_type == "Cast":
            after = read[after.output[0]]
        actual.append((before.op_type, after.op_type))
    return actual


def test_a_tracked_clip_has_the_same_masks(family: str, model: TrackerModel, exported: Exported) -> None:
    """The clip has two objects, a third for a while, and one object disappears from the image.

    Of groups, it has as many as fill one, and some more for a while.
    """
    follow = track if family == "nano" else track_groups
    truth = follow(model)
    served = copy.copy(model)
    served.static_shapes = True
    served.stages = type(served.stages)(*(OnnxRun(path, stage) for stage, path in map(exported, STAGES)))
    actual = follow(served)
    assert len({tuple(ids) for ids, _, _ in truth}) > 1
    seen_at_all = {bool(each) for _, _, visible in truth for each in visible}
    assert seen_at_all == {True, False}, "an object must be seen, and not seen"
    for (ids, masks, visible), (same, others, seen) in zip(truth, actual, strict=True):
        assert ids == same
        assert torch.equal(visible, seen)
        assert (masks != others).float().mean() < 1e-4


def track(model: TrackerModel) -> list[tuple[list[int], Tensor, Tensor]]:
    """Return ids, masks and visibility on each frame of a clip of two moving discs."""
    tracker = Tracker(model, max_objects=4)
    seen = []
    for frame in range(9):
        prompts = (
            [ObjectPrompt(1, points=[[70, 80]]), ObjectPrompt(2, points=[[180, 170]])] if frame == 0 else []
        )
        if frame == 2:
            prompts = [ObjectPrompt(3, points=[[128, 40]])]
        if frame == 5:
            tracker.remove(3)
        tracks = tracker.step(model.preprocess(picture(frame)), prompts)
        seen.append((tracks.ids, tracks.logits > 0, tracks.visible))
    return seen


def track_groups(model: TrackerModel) -> list[tuple[list[int], Tensor, Tensor]]:
    """Return what `track` does, of a clip in which everything moves, with objects that come and go."""
    tracker = Tracker(model, max_objects=32)
    side = model.image_size
    base = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(0))
    coming = {0: range(1, 16), 2: range(16, 19), 6: range(3, 4)}
    seen = []
    for frame in range(9):
        prompts = [
            ObjectPrompt(number, points=[[3 + 5 * number % (side - 6), 4 + 11 * number % (side - 8)]])
            for number in coming.get(frame, ())
        ]
        if frame == 4:
            tracker.remove(3)
        tracks = tracker.step(torch.roll(base, (frame, 2 * frame), (2, 3)), prompts)
        seen.append((tracks.ids, tracks.logits > 0, tracks.visible))
    return seen


def picture(frame: int) -> npt.NDArray[np.uint8]:
    image = np.full((256, 256, 3), (90, 110, 100), np.uint8)
    cv2.circle(image, (70 + 3 * frame, 80), 26, (40, 60, 200), -1)
    if not 4 <= frame <= 7:
        cv2.circle(image, (180, 170 - 3 * frame), 30, (200, 120, 40), -1)
    return image


@pytest.mark.parametrize(
    ("kind", "name"),
    [("halves", "encode"), ("halves", "read"), ("half_groups", "read"), ("half_groups", "remember")],
)
def test_float16_agrees_within_its_rounding(kind: str, name: str, request: pytest.FixtureRequest) -> None:
    stage, path = request.getfixturevalue(kind)[torch.float16](name)
    check_types(stage, path)
    check_rounding(OnnxRun(path, stage), stage)


@pytest.mark.parametrize(
    ("kind", "name"), [("halves", "encode"), ("halves", "decode"), ("half_groups", "read")]
)
def test_bfloat16_agrees_within_its_rounding(kind: str, name: str, request: pytest.FixtureRequest) -> None:
    """Run by the reference implementation of ONNX: onnxruntime has few operators in bfloat16 for a CPU."""
    stage, path = request.getfixturevalue(kind)[torch.bfloat16](name)
    check_types(stage, path)
    evaluator = pytest.importorskip("onnx.reference").ReferenceEvaluator(str(path))
    numbers = pytest.importorskip("ml_dtypes").bfloat16

    def to_array(tensor: Tensor) -> np.ndarray:
        # numpy itself has no such numbers
        if tensor.dtype != torch.bfloat16:
            return tensor.numpy()
        return tensor.view(torch.int16).numpy().view(numbers)

    def run(*tensors: Tensor) -> list[Tensor]:
        named = {spec.name: to_array(tensor) for spec, tensor in zip(stage.inputs, tensors, strict=True)}
        actual = evaluator.run(None, named)
        return [torch.from_numpy(array.view(np.int16)).view(torch.bfloat16) for array in actual]

    check_rounding(run, stage)


def check_rounding(run: Run, stage: StageSpec) -> None:
    eps = torch.finfo(stage.inputs[0].dtype).eps
    for actual, expected in run_both(run, stage, 3):
        rounding = max(4 * eps, ONE_MEMORY_STEP if expected.dtype == torch.bfloat16 else 0)
        assert difference(actual, expected) <= rounding * expected.float().abs().max().item()


def test_softmax_is_float32_in_half_precision(halves: dict[torch.dtype, Exported]) -> None:
    _, path = halves[torch.float16]("encode")
    model = onnx.shape_inference.infer_shapes(onnx.load(path))
    types = {value.name: value.type.tensor_type.elem_type for value in model.graph.value_info}
    softmaxes = [node for node in model.graph.node if node.op_type == "Softmax"]
    assert softmaxes
    assert {types[node.output[0]] for node in softmaxes} == {onnx.TensorProto.FLOAT}


def test_an_encoder_whose_windows_do_not_divide_the_grid(tmp_path: Path) -> None:
    stage = tiny_stages(torch.float32, size=9 * 14)["encode"]
    run = OnnxRun(export(stage, tmp_path / "encode.onnx"), stage)
    assert "Attention" not in operators(tmp_path / "encode.onnx")
    for actual, expected in run_both(run, stage, 1):
        assert difference(actual, expected) < 1e-4


@torch.inference_mode()
def test_edgetams_memories_are_written_for_any_number_of_objects() -> None:
    """The exporter's first step suffices to see a number of objects that became fixed."""
    stage = tracker_stages(tiny.tiny_model("edgetam"))["remember"]
    program = torch.export.export(stage.module, stage.examples(), dynamic_shapes=dynamic_axes(stage))
    for actual, expected in run_both(program.module(), stage, 3):
        assert difference(actual, expected) < 1e-4


@pytest.fixture(scope="module")
def detector(tmp_path_factory: pytest.TempPathFactory) -> tuple[StageSpec, Path]:
    net = tiny_yolo()
    net.config = replace(net.config, image_size=64)
    stage = specify_network(net)
    return stage, export(stage, tmp_path_factory.mktemp("yolo") / "detect.onnx")


def test_a_detector_answers_as_torch_does(detector: tuple[StageSpec, Path]) -> None:
    stage, path = detector
    check_types(stage, path)
    run = OnnxRun(path, stage)
    pixels = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(4))
    for seed in (1, 2):
        vectors = phrases(PHRASES, seed=seed)
        boxes, scores = run(pixels, vectors)
        with torch.inference_mode():
            truth = stage.module(pixels, vectors)
        assert difference(boxes, truth.boxes) < 1e-3  # pixels
        assert difference(scores, truth.scores) < 1e-5


def test_a_file_holds_no_paths_of_the_exporting_machine(detector: tuple[StageSpec, Path]) -> None:
    assert str(ROOT).encode() not in detector[1].read_bytes()


def test_weights_may_lie_beside_the_file(tmp_path: Path) -> None:
    stage = scaled()
    path = export(stage, tmp_path / "scale.onnx", external_data=True)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["scale.onnx", "scale.onnx.data"]
    assert path.stat().st_size < (tmp_path / "scale.onnx.data").stat().st_size == stage.module.factor.nbytes
    for actual, expected in run_both(OnnxRun(path, stage), stage, 64):
        assert torch.equal(actual, expected)


class Unexportable(Scaled):
    def forward(self, values: Tensor) -> Tensor:
        raise RuntimeError("this cannot be traced")


def test_a_stage_that_cannot_be_exported_leaves_the_earlier_file(tmp_path: Path) -> None:
    (tmp_path / "scale.onnx").write_text("earlier")
    with refuses(EngineError, field=("scale", "RuntimeError")):
        export(scaled(kind=Unexportable), tmp_path / "scale.onnx")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["earlier"]


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with refuses(EngineError, field="scale"):
        export(scaled(), tmp_path / "absent" / "scale.onnx")
    (tmp_path / "taken").mkdir()
    with refuses(EngineError, field="scale"):
        export(scaled(), tmp_path / "taken")
    assert [file.name for file in tmp_path.iterdir()] == ["taken"]


def test_a_missing_exporter_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with refuses(MissingExtraError, field="onnx"):
        export(scaled(), tmp_path / "scale.onnx")


def test_the_exporter_is_silent(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    levels = [logging.getLogger(name).level for name in ("torch.onnx", "onnxscript")]
    export(scaled(), tmp_path / "scale.onnx")
    assert capfd.readouterr() == ("", "")
    assert not list(recwarn)
    assert levels == [logging.getLogger(name).level for name in ("torch.onnx", "onnxscript")]
