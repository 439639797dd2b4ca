"""YOLO-World as an engine: the same detections, judged by the gate, and torch where it cannot serve."""

from __future__ import annotations

import copy
import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sam3_node.bags.image_sampling import Image, sample_images
from sam3_node.bags.native.labelled_clip import TABLETOP
from sam3_node.detection.load import NANO, load_detector
from sam3_node.detection.yolo_world import YoloWorldDetector
from sam3_node.engines.detector import (
    PHRASES,
    FixedPhrases,
    build_detector,
    detector_identity,
    filled,
    stage_of,
)
from sam3_node.engines.detector_slot import compare_detector, names_for, serve_detector
from sam3_node.engines.export import export
from sam3_node.engines.report import Report
from sam3_node.engines.specs import StageSpec
from sam3_node.engines.tensorrt.run import TensorRTRun
from sam3_node.errors import EngineError
from sam3_node.models.sam.stages import Run
from sam3_node.models.yolo.network import Detections, YoloWorld
from sam3_node.models.yolo.weights import load_yolo_world
from sam3_node.perception.loading import load_configured_detector
from sam3_node.settings import DetectorSettings, EngineSettings, ModelSettings, Settings
from sam3_node.types import Detection
from tests.support.onnx_run import OnnxRun

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
onnx = pytest.mark.skipif(
    find_spec("onnxruntime") is None or find_spec("onnxscript") is None, reason="needs the extra onnx"
)
rtx = pytest.mark.skipif(
    find_spec("tensorrt_rtx") is None or find_spec("onnxscript") is None or find_spec("tensorrt") is not None,
    reason="needs tensorrt_rtx alone, and onnxscript",
)


def nano_detector() -> YoloWorldDetector:
    found = load_detector("yolo-world")
    assert isinstance(found, YoloWorldDetector)
    return found


@pytest.fixture(scope="module")
def frames() -> list[Image]:
    return list(sample_images(TABLETOP, 3))


@pytest.fixture(scope="module")
def names() -> tuple[str, ...]:
    return names_for(DetectorSettings())


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[StageSpec, OnnxRun]:
    stage = stage_of(load_yolo_world(NANO))
    return stage, OnnxRun(export(stage, tmp_path_factory.mktemp("nano") / "detect.onnx"), stage)


def same(found: list[Detection], wanted: list[Detection], pixels: float, score: float) -> None:
    assert [item.label for item in found] == [item.label for item in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one.score == pytest.approx(other.score, abs=score)
        assert one.box == pytest.approx(other.box, abs=pixels)


@onnx
@pytest.mark.parametrize("count", [1, 5, PHRASES])
def test_an_exported_network_detects_what_torch_detects(
    count: int, exported: tuple[StageSpec, OnnxRun], frames: list[Image], names: tuple[str, ...]
) -> None:
    detector = nano_detector()
    query = detector.prepare(names[:count])
    wanted = [detector.detect(frame, query, 0.05) for frame in frames]
    assert any(wanted)
    stage, run = exported
    detector.network = FixedPhrases(run, stage, detector.model)
    for frame, expected in zip(frames, wanted, strict=True):
        same(detector.detect(frame, query, 0.05), expected, pixels=0.05, score=1e-4)


def test_more_phrases_than_an_engine_takes_are_for_torch() -> None:
    def unasked(pixels: Tensor, text: Tensor) -> Detections:
        raise AssertionError("the engine runs")

    detector = nano_detector()
    vectors = torch.nn.functional.normalize(
        torch.randn(PHRASES + 1, detector.model.config.text_channels), dim=1
    )
    pixels = torch.rand(1, 3, 64, 64)
    network = FixedPhrases(unasked, stage_of(detector.model), detector.model)
    with torch.inference_mode():
        found, wanted = network(pixels, vectors), detector.model(pixels, vectors)
    assert torch.equal(found.scores, wanted.scores)


def test_fewer_phrases_are_filled_up() -> None:
    text = torch.rand(3, 8)
    assert torch.equal(filled(text)[:3], text)
    assert torch.equal(filled(text)[3:], text[:1].expand(PHRASES - 3, 8))
    assert torch.equal(filled(filled(text)), filled(text))


def test_names_to_judge_by(tmp_path: Path) -> None:
    assert names_for(DetectorSettings(prompts=("cup", "bowl"))) == ("cup", "bowl")
    assert 1 < len(names_for(DetectorSettings())) <= PHRASES
    assert len(names_for(DetectorSettings(name=str(tmp_path)))) > 1


def judged(run: Run, frames: list[Image], names: tuple[str, ...], stage: StageSpec | None = None) -> Report:
    reference = load_yolo_world(NANO)
    text = nano_detector().prepare(names).vectors
    return compare_detector(reference, run, stage or stage_of(reference), frames, text, 0.99)


@onnx
def test_the_gate_passes_an_export(
    exported: tuple[StageSpec, OnnxRun], frames: list[Image], names: tuple[str, ...]
) -> None:
    stage, run = exported
    report = judged(run, frames, names, stage)
    assert report.passed, report.refusal()
    assert [row.output for row in report.outputs] == ["boxes", "scores"]
    assert min(row.cosine for row in report.outputs) > 0.99999
    assert Report.from_json(report.to_json()) == report
    assert list(report.lines())[-1] == "passed: cosine 0.99 or more"


def disturbed(part: str) -> YoloWorld:
    """A network one of whose layers has other weights."""
    other = copy.deepcopy(load_yolo_world(NANO))
    weight = other.get_parameter(part)
    with torch.no_grad():
        weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)) * weight.std())
    return other


@pytest.mark.parametrize(
    ("part", "output"), [("heads.0.boxes.2.weight", "boxes"), ("heads.1.embeddings.2.weight", "scores")]
)
def test_the_gate_refuses_a_network_that_differs(
    part: str, output: str, frames: list[Image], names: tuple[str, ...]
) -> None:
    report = judged(disturbed(part), frames, names)
    assert not report.passed
    assert f"detect: cosine of {output} " in (report.refusal() or "")
    assert [row.output for row in report.outputs if row.cosine < 0.99] == [output]


def test_the_gate_refuses_what_is_no_number(frames: list[Image], names: tuple[str, ...]) -> None:
    net = load_yolo_world(NANO)

    def broken(pixels: Tensor, text: Tensor) -> Detections:
        found = net(pixels, text)
        return found._replace(scores=found.scores / 0)

    assert "detect: scores holds values that are not finite" in (
        judged(broken, frames, names).refusal() or ""
    )
    with pytest.raises(EngineError, match="found none"):
        judged(net, [], names)


def settings_of(**engine: Any) -> Settings:
    return Settings(model=ModelSettings(device="cpu"), engine=EngineSettings(**engine))


@no_gpu
def test_a_detector_falls_back_alone_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = settings_of(kind="tensorrt", folder=tmp_path)
    with caplog.at_level(logging.WARNING):
        detector = load_configured_detector(settings.detector, settings.model, None, settings.engine)
    assert isinstance(detector, YoloWorldDetector)
    assert detector.name.startswith("nano (torch: no GPU for engines: ")
    assert detector.network is detector.model
    assert "the detector's engine cannot serve, torch does" in caplog.text
    with pytest.raises(EngineError, match="no GPU for engines"):
        serve_detector(detector, settings_of(kind="tensorrt", folder=tmp_path, fallback=False))


def test_torch_is_what_detects_unless_engines_are_asked_for() -> None:
    settings = settings_of(fallback=False)
    detector = load_configured_detector(settings.detector, settings.model, None, settings.engine)
    assert isinstance(detector, YoloWorldDetector)
    assert (detector.name, detector.network) == ("nano", detector.model)


@rtx
def test_precision_of_the_detector() -> None:
    found = {
        precision: detector_identity(settings_of(precision=precision), 320, "sm89").precision
        for precision in ("float32", "float16", "bfloat16", "fp8")
    }
    assert found == {"float32": "float32", "float16": "float16", "bfloat16": "float16", "fp8": "float16"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_plan_detects_what_torch_detects(
    tmp_path: Path, frames: list[Image], names: tuple[str, ...]
) -> None:
    settings = Settings(
        model=ModelSettings(device="cuda"),
        engine=EngineSettings(kind="tensorrt", folder=tmp_path, fallback=False),
    )
    build_detector(settings)
    detector = load_configured_detector(settings.detector, settings.model, None, settings.engine)
    assert isinstance(detector, YoloWorldDetector)
    assert isinstance(detector.network, FixedPhrases)
    assert isinstance(detector.network.run, TensorRTRun)
    query = detector.prepare(names)
    found = [detector.detect(frame, query, 0.2) for frame in frames]
    detector.network = detector.model
    for frame, have in zip(frames, found, strict=True):
        same(have, detector.detect(frame, query, 0.2), pixels=2.0, score=0.05)
