"""The gate: its figures, its refusals and its reports."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sam3_node.engines import validation
from sam3_node.engines.specs import tracker_stages
from sam3_node.errors import EngineError, ModelError
from sam3_node.models import TrackerModel
from sam3_node.models.capabilities import Capabilities
from sam3_node.models.sam.stages import Run, Stages
from sam3_node.tracking import ObjectPrompt, Tracker
from sam3_node.tracking.association import mask_iou
from tests.support.rectangles import rectangle_clip
from tests.support.refuses import refuses
from tests.support.tiny import random_source, tiny_model
from tests.support.tiny import stages_of as model_of

pytestmark = pytest.mark.engines
CLIP = rectangle_clip().frames[:3]
PROMPTS = [ObjectPrompt(1, box=(10, 10, 60, 60)), ObjectPrompt(2, points=[(80, 50)])]
ALWAYS = 60.0  # presence: no object goes out of view


@cache
def reference() -> TrackerModel:
    return tiny_model(presence=ALWAYS)


def run_gate(stages: Stages, **options: Any) -> validation.Report:
    settings = {"min_cosine": 0.99, "min_iou": 0.95, "prompts": PROMPTS} | options
    return validation.compare_stages(reference(), stages, CLIP, **settings)


def disturbed(stage: nn.Module, layer: str) -> nn.Module:
    """Return a copy of the stage in which one layer has other weights."""
    other = copy.deepcopy(stage)
    weight = other.get_submodule(layer).weight
    generator = torch.Generator().manual_seed(1)
    weight.data = torch.randn(weight.shape, generator=generator) * weight.std()
    return other


class Changed(nn.Module):
    """A stage whose outputs change with its `since`-th call and later ones."""

    def __init__(self, stage: nn.Module, change: Callable[[Any], Any], since: int = 0) -> None:
        super().__init__()
        self.stage = stage
        self.change = change
        self.left = since

    def forward(self, *inputs: Tensor) -> Any:
        actual = self.stage(*inputs)
        self.left -= 1
        return actual if self.left >= 0 else self.change(actual)


class CountedClock:
    """A clock that stands still, except while stages that `delay` made run."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self, device: torch.device) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds

    def delay(self, run: Run, seconds: float) -> Run:
        """Return a stage whose calls take this long."""
        return Delayed(run, lambda: self.advance(seconds))


class Delayed(nn.Module):
    """A stage that lets `wait` be called before each call."""

    def __init__(self, run: Run, wait: Callable[[], None]) -> None:
        super().__init__()
        self.stage = run
        self.wait = wait

    def forward(self, *inputs: Tensor) -> Any:
        self.wait()
        return self.stage(*inputs)


@pytest.mark.parametrize("engines", [True, False])
def test_stages_are_timed_beside_those_of_the_served_model(engines: bool, tmp_path: Path) -> None:
    """Engines together, because they serve together; torch stages each, because each may serve alone."""
    clock = CountedClock()
    served = tiny_model(presence=ALWAYS)
    own = served.stages = Stages(*(clock.delay(run, 0.010) for run in served.stages))
    stages = own._replace(encode=clock.delay(own.encode, 0.007), read=clock.delay(own.read, -0.004))
    report = run_gate(stages, served=served, engines=engines, clock=clock)
    expected = {"a step": (43, 40)} if engines else {"encode": (17, 10), "read": (6, 10)}
    actual = {row.stage: (row.ms, row.torch_ms) for row in report.times}
    assert actual == {name: pytest.approx(pair) for name, pair in expected.items()}
    assert report.passed
    assert read_back(report, tmp_path) == report
    slow = replace(report, max_time=1.05)
    assert not slow.passed
    said = "a step is slower here: 43 against 40 ms" if engines else "encode is slower here: 17 against 10 ms"
    assert said in (slow.refusal() or "")
    assert "read is" not in (slow.refusal() or "")
    assert replace(report, max_time=1.8).passed


def test_the_same_stages_pass() -> None:
    report = run_gate(tiny_model(presence=ALWAYS).stages)
    assert report.passed
    assert report.refusal() is None
    assert [(row.stage, row.output) for row in report.outputs] == [
        (stage.name, spec.name) for stage in tracker_stages(reference()).values() for spec in stage.outputs
    ]
    assert all(row.cosine > 0.99999 and row.error < 1e-3 for row in report.outputs)
    assert report.tracks.mean_iou > 0.999
    assert report.tracks.masks == len(CLIP) * len(PROMPTS)
    assert report.layers == ()
    assert list(report.lines())[-1].startswith("passed")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_differs_but_passes(dtype: torch.dtype) -> None:
    half = model_of(random_source("sam3", presence=ALWAYS).to(dtype))
    report = run_gate(half.stages, dtype=dtype, min_cosine=0.98, min_iou=0.9)
    assert report.passed, report.refusal()
    assert all(0.98 < row.cosine <= 1.0 for row in report.outputs)
    assert any(row.cosine < 0.999999 for row in report.outputs)
    assert any(row.error > 1e-4 for row in report.outputs)


@pytest.mark.parametrize(("name", "layer"), [("encode", "top.0"), ("remember", "write.embed")])
def test_a_disturbed_layer_is_refused_and_named(name: str, layer: str) -> None:
    stages = reference().stages
    other = disturbed(getattr(stages, name), layer)
    report = run_gate(stages._replace(**{name: other}))
    refusal = report.refusal()
    assert not report.passed
    assert refusal.startswith(f"{name}: cosine of ")
    assert "below 0.99" in refusal
    assert f"{name}.{layer}" in refusal
    assert f"{name}.{layer}" in [actual for actual, _ in report.layers]
    assert report.layers == tuple(sorted(report.layers, key=lambda row: row[1]))
    # the other stages ran on the reference's own inputs, so they do not differ
    assert all(row.cosine > 0.99999 for row in report.outputs if row.stage != name)
    assert list(report.lines())[-1] == f"refused: {refusal}"


def test_an_engine_that_is_no_module_is_explained_by_the_module_of_its_stage() -> None:
    stages = reference().stages
    other = disturbed(stages.encode, "top.0")
    engine = stages._replace(encode=lambda pixels: other(pixels))
    assert run_gate(engine).layers == ()
    asked = []

    def find_module(name: str) -> nn.Module:
        asked.append(name)
        return other

    assert "encode.top.0" in dict(run_gate(engine, find_module=find_module).layers)
    assert asked == ["encode"]


def test_masks_are_compared_besides_the_stages() -> None:
    """Every stage passes a low threshold by itself, but the masks still differ."""
    stages = reference().stages
    other = disturbed(stages.encode, "top.0")
    report = run_gate(stages._replace(encode=other), min_cosine=1e-6)
    assert report.tracks.mean_iou < 0.95
    assert report.tracks.worst_iou <= report.tracks.mean_iou
    assert report.tracks.worst_object in (1, 2)
    assert 0 <= report.tracks.worst_frame < len(CLIP)
    assert "mean mask IoU" in (report.refusal() or "")


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("read", lambda top: top * float("nan"), "read: read holds values that are not finite"),
        ("remember", lambda memory: memory[:, :-1], "remember: expected remembered as bfloat16 [2, 64, 64]"),
        ("decode", lambda actual: actual[:3], "decode: expected 4 outputs, found 3"),
        ("read", lambda top: top.half(), "read: expected read as float32 [2, 128, 8, 8], found float16"),
    ],
)
def test_outputs_that_cannot_be_compared_are_refused(
    name: str, change: Callable[[Any], Any], said: str
) -> None:
    stages = reference().stages
    wrong = Changed(getattr(stages, name), change, since=1)
    report = run_gate(stages._replace(**{name: wrong}))
    assert not report.passed
    assert said in (report.refusal() or "")
    assert report.tracks is None
    assert [row.stage for row in report.outputs].count("encode") == 4  # with the trunk


def test_the_reference_is_not_changed() -> None:
    model = reference()
    stages = model.stages
    run_gate(stages)
    assert model.stages is stages
    assert not model.static_shapes


def test_prompts_are_found_where_none_are_given() -> None:
    model = reference()
    pixels = model.preprocess(CLIP[0])
    prompts = validation.find_confident_prompts(model, pixels)
    assert 1 <= len(prompts) <= 4
    assert [prompt.object_id for prompt in prompts] == list(range(1, len(prompts) + 1))
    for prompt in prompts:
        x0, y0, x1, y1 = prompt.box  # type: ignore[misc]
        assert 0 <= x0 < x1 <= model.image_size
        assert 0 <= y0 < y1 <= model.image_size
    tracks = Tracker(model).step(pixels, prompts)
    assert all(mask.any() for mask in tracks.logits > 0)
    assert run_gate(model.stages, prompts=None).passed


def test_a_clip_without_frames_or_objects_is_an_error() -> None:
    model = reference()
    with refuses(EngineError, field=("2", "frames")):
        validation.compare_stages(model, model.stages, CLIP[:1], 0.99, 0.95)
    blind = tiny_model(presence=-ALWAYS)
    with refuses(EngineError, field=("segments", "nothing")):
        validation.compare_stages(blind, blind.stages, CLIP, 0.99, 0.95)
    still = tiny_model(presence=ALWAYS)
    still.capabilities = Capabilities(following="last masks")
    with refuses(ModelError, field=("memory", "modules")):
        validation.compare_stages(still, still.stages, CLIP, 0.99, 0.95)


def test_objects_out_of_view_are_compared_by_their_presence() -> None:
    """An object whose presence is near the threshold does not fail an engine; an engine without any object fails."""
    model = tiny_model()  # presence near 0
    blind = Changed(model.stages.decode, lambda actual: actual._replace(presence=-actual.presence.abs() - 1))
    report = validation.compare_stages(
        model, model.stages._replace(decode=blind), CLIP, 0.99, 0.95, prompts=PROMPTS
    )
    assert {row.output for row in report.outputs if row.cosine < 0.99} == {"presence"}
    assert validation.compare_stages(model, model.stages, CLIP, 0.99, 0.95, prompts=PROMPTS).passed


def test_worst_layers_come_first() -> None:
    stage = reference().stages.encode
    pixels = reference().preprocess(CLIP[0])
    half = copy.deepcopy(stage).to(torch.bfloat16)
    layers = validation.worst_layers(stage, half, (pixels,), (pixels.bfloat16(),))
    assert len(layers) == 5
    assert [cosine for _, cosine in layers] == sorted(cosine for _, cosine in layers)
    assert all(0.99 < cosine < 1 for _, cosine in layers)
    names = {name for name, _ in stage.named_modules()}
    assert all(name in names for name, _ in layers)
    assert all(cosine > 0.99999 for _, cosine in validation.worst_layers(stage, stage, (pixels,), count=1000))
    assert not any(module._forward_hooks for module in stage.modules())


def test_onnx_stages_pass(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from sam3_node.engines.export import export
    from tests.support.onnx_run import OnnxRun

    stages = reference().stages
    spec = tracker_stages(reference())["encode"]
    report = run_gate(stages._replace(encode=OnnxRun(export(spec, tmp_path / "encode.onnx"), spec)))
    assert report.passed, report.refusal()
    assert min(row.cosine for row in report.outputs if row.stage == "encode") > 0.9999


def make_report(cosine: float = 0.995, iou: float = 0.97) -> validation.Report:
    return validation.Report(
        min_cosine=0.99,
        min_iou=0.95,
        frames=8,
        outputs=(
            validation.OutputFigures("encode", "top", cosine, 0.01, 3),
            validation.OutputFigures("read", "read", 0.999, 0.1, 2),
        ),
        tracks=validation.TrackFigures(iou, 0.8, 5, 2, 16),
        layers=(("encode.backbone.0", 0.5),),
    )


def read_back(report: validation.Report, folder: Path) -> validation.Report | None:
    (folder / "gate.json").write_text(report.to_json())
    return validation.Report.load(folder / "gate.json")


def test_a_report_survives_its_file(tmp_path: Path) -> None:
    for report in (make_report(), replace(make_report(), tracks=None, faults=("encode: NaN",), outputs=())):
        assert read_back(report, tmp_path) == report


@pytest.mark.parametrize(
    "text",
    ["", "nonsense", "[]", "{}", "null", make_report().to_json().replace('"version": 1', '"version": 2')]
    + [make_report().to_json().replace(name, "other") for name in ("cosine", "mean_iou", "faults")]
    + [make_report().to_json().replace("0.995", '"high"'), make_report().to_json().replace("0.97", "[]")],
)
def test_other_text_is_no_report(text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "gate.json").write_text(text)
    assert validation.Report.load(tmp_path / "gate.json") is None
    assert f"{tmp_path / 'gate.json'} is ignored" in caplog.text


def test_thresholds() -> None:
    assert make_report().passed
    assert make_report(cosine=0.99, iou=0.95).passed
    low = make_report(cosine=0.98999)
    assert not low.passed
    assert "encode: cosine of top 0.9899 on frame 3, below 0.99" in (low.refusal() or "")
    assert "encode.backbone.0 (0.5000)" in (low.refusal() or "")
    assert "read" not in (low.refusal() or "")
    other = make_report(iou=0.9499)
    assert "mean mask IoU 0.9499, below 0.95 (worst 0.8000 on frame 5, object 2)" in (other.refusal() or "")
    assert not make_report(cosine=float("nan")).passed
    assert not make_report(iou=float("nan")).passed
    assert not replace(make_report(), tracks=None).passed
    assert replace(low, min_cosine=0.98).passed


def test_the_table_has_a_row_for_each_output() -> None:
    lines = list(make_report().lines())
    assert lines[0].split() == ["stage", "output", "cosine", "error", "frame"]
    assert lines[1].split() == ["encode", "top", "0.995000", "1.00%", "3"]
    assert "mean 0.9700, worst 0.8000 (frame 5, object 2)" in lines[3]


def test_iou_of_masks() -> None:
    """The tracker's IoU is exact: the number of shared pixels over the number of all pixels."""
    first = torch.tensor([[[True, True], [False, False]]])
    assert mask_iou(first, first).item() == 1.0
    assert mask_iou(first, first.mT).item() == pytest.approx(1 / 3)
    assert mask_iou(first, ~first).item() == 0.0
    assert mask_iou(first & False, first & False).item() == 0.0  # the gate leaves out such pairs
    masks = torch.rand(6, 288, 288, generator=torch.Generator().manual_seed(0)) > 0.4
    for left, right in pairwise(masks):
        exact = (left & right).sum().item() / (left | right).sum().item()
        assert mask_iou(left[None], right[None]).item() == pytest.approx(exact, rel=1e-7)
