"""YOLO-World as an engine: the same detections, the gate, and the fallback to torch."""

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sam3_node.bags.bag import Image, sample_images
from sam3_node.bags.native.reader import TABLETOP
from sam3_node.detection.detectors import NANO
from sam3_node.detection.loading import load_detector
from sam3_node.detection.yolo_world import YoloWorldDetector
from sam3_node.engines.detector import (
    DETECT,
    PHRASES,
    DetectorSlot,
    FixedPhrases,
    build_detector,
    choose_phrases,
    compare_detector,
    compute_detector_key,
    pad_phrases,
    serve_detector,
    specify_network,
)
from sam3_node.engines.engine_store import Manifest, StoredEngine
from sam3_node.engines.export import export
from sam3_node.engines.slot import CheckClip, LoadedEngines, apply_thresholds
from sam3_node.engines.specs import StageSpec
from sam3_node.engines.tensorrt.runtime import TensorRTRun
from sam3_node.engines.validation import Report, StageTime
from sam3_node.errors import EngineError
from sam3_node.models.sam.stages import Run
from sam3_node.models.yolo.network import Detections, load_yolo_world
from sam3_node.perception.loading import load_configured_detector
from sam3_node.settings import DetectorSettings, EngineSettings, ModelSettings, Settings
from sam3_node.types import Detection
from tests.engines.test_store import RTX
from tests.engines.test_validation import CountedClock, disturbed
from tests.support.onnx_run import OnnxRun
from tests.support.refuses import refuses

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
onnx = pytest.mark.skipif(
    find_spec("onnxruntime") is None or find_spec("onnxscript") is None, reason="needs the extra onnx"
)


def nano_detector() -> YoloWorldDetector:
    actual = load_detector("yolo-world")
    assert isinstance(actual, YoloWorldDetector)
    return actual


@pytest.fixture(scope="module")
def frames() -> list[Image]:
    return list(sample_images(TABLETOP, 3))


@pytest.fixture(scope="module")
def names() -> tuple[str, ...]:
    return choose_phrases(DetectorSettings())


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[StageSpec, OnnxRun]:
    stage = specify_network(load_yolo_world(NANO))
    return stage, OnnxRun(export(stage, tmp_path_factory.mktemp("nano") / "detect.onnx"), stage)


def assert_same(actual: list[Detection], expected: list[Detection], pixels: float, score: float) -> None:
    assert [detection.label for detection in actual] == [detection.label for detection in expected]
    for first, second in zip(actual, expected, strict=True):
        assert first.score == pytest.approx(second.score, abs=score)
        assert first.box == pytest.approx(second.box, abs=pixels)


@pytest.mark.engines
@onnx
@pytest.mark.parametrize("count", [1, 5, PHRASES])
def test_an_exported_network_detects_what_torch_detects(
    count: int, exported: tuple[StageSpec, OnnxRun], frames: list[Image], names: tuple[str, ...]
) -> None:
    detector = nano_detector()
    query = detector.prepare(names[:count])
    by_torch = [detector.detect(frame, query, 0.05) for frame in frames]
    assert any(by_torch)
    stage, run = exported
    detector.network = FixedPhrases(run, stage, detector.model)
    for frame, expected in zip(frames, by_torch, strict=True):
        assert_same(detector.detect(frame, query, 0.05), expected, pixels=0.05, score=1e-4)


def test_torch_runs_with_more_phrases_than_an_engine_takes() -> None:
    def must_not_run(pixels: Tensor, text: Tensor) -> Detections:
        raise AssertionError("the engine runs")

    detector = nano_detector()
    vectors = torch.nn.functional.normalize(
        torch.randn(PHRASES + 1, detector.model.config.text_channels), dim=1
    )
    pixels = torch.rand(1, 3, 64, 64)
    network = FixedPhrases(must_not_run, specify_network(detector.model), detector.model)
    with torch.inference_mode():
        actual = network(pixels, vectors)
        expected = detector.model(pixels, vectors)
    assert torch.equal(actual.scores, expected.scores)


def test_fewer_phrases_are_padded() -> None:
    text = torch.rand(3, 8)
    assert torch.equal(pad_phrases(text)[:3], text)
    assert torch.equal(pad_phrases(text)[3:], text[:1].expand(PHRASES - 3, 8))
    assert torch.equal(pad_phrases(pad_phrases(text)), pad_phrases(text))


def test_phrases_for_the_gate(tmp_path: Path) -> None:
    assert choose_phrases(DetectorSettings(prompts=("cup", "bowl"))) == ("cup", "bowl")
    assert 1 < len(choose_phrases(DetectorSettings())) <= PHRASES
    assert len(choose_phrases(DetectorSettings(name=str(tmp_path)))) > 1


def run_gate(run: Run, frames: list[Image], names: tuple[str, ...], stage: StageSpec | None = None) -> Report:
    reference = load_yolo_world(NANO)
    text = nano_detector().prepare(names).vectors
    return compare_detector(reference, run, stage or specify_network(reference), frames, text, 0.99)


@pytest.mark.engines
@onnx
def test_the_gate_passes_an_export(
    exported: tuple[StageSpec, OnnxRun], frames: list[Image], names: tuple[str, ...], tmp_path: Path
) -> None:
    stage, run = exported
    report = run_gate(run, frames, names, stage)
    assert report.passed, report.refusal()
    assert [row.output for row in report.outputs] == ["boxes", "scores"]
    assert min(row.cosine for row in report.outputs) > 0.99999
    (tmp_path / "gate.json").write_text(report.to_json())
    assert Report.load(tmp_path / "gate.json") == report
    assert list(report.lines())[-1] == "passed: cosine 0.99 or more"


@pytest.mark.parametrize(
    ("part", "output"), [("heads.0.boxes.2", "boxes"), ("heads.1.embeddings.2", "scores")]
)
def test_the_gate_refuses_a_network_that_differs(
    part: str, output: str, frames: list[Image], names: tuple[str, ...]
) -> None:
    report = run_gate(disturbed(load_yolo_world(NANO), part), frames, names)
    assert not report.passed
    assert f"detect: cosine of {output} " in (report.refusal() or "")
    assert [row.output for row in report.outputs if row.cosine < 0.99] == [output]


def test_the_gate_refuses_values_that_are_not_finite(frames: list[Image], names: tuple[str, ...]) -> None:
    net = load_yolo_world(NANO)

    def broken(pixels: Tensor, text: Tensor) -> Detections:
        actual = net(pixels, text)
        return actual._replace(scores=actual.scores / 0)

    assert "detect: scores holds values that are not finite" in (
        run_gate(broken, frames, names).refusal() or ""
    )
    with refuses(EngineError, field="none"):
        run_gate(net, [], names)


def test_a_network_that_is_slower_than_torch_is_refused(frames: list[Image], tmp_path: Path) -> None:
    clock = CountedClock()
    detector = nano_detector()
    detector.model.register_forward_hook(lambda *call: clock.advance(0.002))
    run = clock.delay(load_yolo_world(NANO), 0.003)
    slot = DetectorSlot(detector, make_settings(folder=tmp_path), clock)
    manifest = Manifest.model_construct(plans={})
    spec = specify_network(detector.model)
    engines = LoadedEngines(StoredEngine(tmp_path, manifest), {DETECT: run}, {DETECT: spec})
    report = slot.compare(engines, CheckClip(frames, {}))
    assert report.times == (StageTime(DETECT, pytest.approx(3.0), pytest.approx(2.0)),)
    refusal = apply_thresholds(report, EngineSettings()).refusal()
    assert "detect is slower here: 3 against 2 ms" in (refusal or "")
    assert apply_thresholds(report, EngineSettings(max_time=0)).passed


def make_settings(**engine: Any) -> Settings:
    return Settings(model=ModelSettings(device="cpu"), engine=EngineSettings(**engine))


@no_gpu
def test_a_detector_falls_back_alone_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = make_settings(kind="tensorrt", folder=tmp_path)
    with caplog.at_level(logging.WARNING):
        detector = load_configured_detector(settings.detector, settings.model, None, settings.engine)
    assert isinstance(detector, YoloWorldDetector)
    assert detector.name.startswith("nano (torch: no GPU for engines: ")
    assert detector.network is detector.model
    assert "the detector's engine cannot serve, torch does" in caplog.text
    with refuses(EngineError, field="GPU"):
        serve_detector(detector, make_settings(kind="tensorrt", folder=tmp_path, fallback=False))


def test_torch_detects_unless_the_settings_name_engines() -> None:
    settings = make_settings(fallback=False)
    detector = load_configured_detector(settings.detector, settings.model, None, settings.engine)
    assert isinstance(detector, YoloWorldDetector)
    assert (detector.name, detector.network) == ("nano", detector.model)


@pytest.mark.engines
@RTX
def test_precision_of_the_detector() -> None:
    actual = {
        precision: compute_detector_key(make_settings(precision=precision), 320, "sm89").precision
        for precision in ("float32", "float16", "bfloat16", "fp8")
    }
    assert actual == {"float32": "float32", "float16": "float16", "bfloat16": "float16", "fp8": "float16"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_plan_detects_what_torch_detects(
    tmp_path: Path, frames: list[Image], names: tuple[str, ...]
) -> None:
    if not (find_spec("tensorrt") or find_spec("tensorrt_rtx")):
        pytest.skip("no TensorRT is installed")
    settings = Settings(
        model=ModelSettings(device="cuda"),
        engine=EngineSettings(kind="tensorrt", folder=tmp_path, fallback=False, max_time=0),
    )
    build_detector(settings)
    detector = load_configured_detector(settings.detector, settings.model, None, settings.engine)
    assert isinstance(detector, YoloWorldDetector)
    assert isinstance(detector.network, FixedPhrases)
    assert isinstance(detector.network.run, TensorRTRun)
    query = detector.prepare(names)
    actual = [detector.detect(frame, query, 0.2) for frame in frames]
    detector.network = detector.model
    for frame, have in zip(frames, actual, strict=True):
        assert_same(have, detector.detect(frame, query, 0.2), pixels=2.0, score=0.05)
