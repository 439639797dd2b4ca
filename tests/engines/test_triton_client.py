"""The client of a Triton server: what it sends, and masks that equal the node's, by a stand-in for the server.

The stand-in checks what a server would refuse, and runs the ensembles of an exported repository by onnxruntime.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from sam3_node.bags.native.reader import TABLETOP, LabelledClip
from sam3_node.detection.loading import load_detector
from sam3_node.engines.triton_server import ServedModel, export_repository, make_models
from sam3_node.models import load_tracker
from sam3_node.perception.output_masks import rasterize
from sam3_node.settings import DetectorSettings, EngineSettings, ModelSettings, Settings
from sam3_node.tracking import ObjectPrompt, Tracker
from tests.engines.test_triton_server import SERVER_TYPES, open_session, run_ensemble
from tests.support.onnx_run import ONNX_TYPES
from tests.support.paths import ROOT

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.engines

NAMES = ("red mug", "box", "screwdriver")
NUMPY_TYPES = {"float32": "FP32", "uint8": "UINT8", "int32": "INT32", "int64": "INT64"}
MIN_IOU = 0.99


class StandIn:
    """A server in this process, as far as the client uses one."""

    def __init__(self, repository: Path, configs: dict[str, Any]) -> None:
        self.repository = repository
        self.configs = configs

    def get_model_config(self, name: str) -> dict[str, Any]:
        config = dict(self.configs[name])
        parameters = {each["key"]: each["value"] for each in config.get("parameters", ())}
        return {**config, "parameters": parameters}

    def infer(self, name: str, inputs: list[Any]) -> Any:
        config = self.configs[name]
        expected = {spec["name"]: spec for spec in config["input"]}
        assert {each.name for each in inputs} == set(expected), "a server refuses other inputs"
        for each in inputs:
            assert f"TYPE_{each.datatype}" == expected[each.name]["data_type"]
            sides = zip(each.shape[1:], expected[each.name]["dims"], strict=True)
            assert all(told in (-1, found) for found, told in sides)
        tensors = {each.name: each.values for each in inputs}
        if "ensemble_scheduling" in config:
            return Result(run_ensemble(self.repository, config, tensors))
        session = open_session(self.repository, name)
        names = [output.name for output in session.get_outputs()]
        return Result(dict(zip(names, session.run(names, tensors), strict=True)))


class Result:
    def __init__(self, tensors: dict[str, np.ndarray]) -> None:
        self.tensors = tensors

    def as_numpy(self, name: str) -> np.ndarray:
        return self.tensors[name]

    def get_response(self) -> dict[str, Any]:
        return {"outputs": [{"name": name} for name in self.tensors]}


class Input:
    def __init__(self, name: str, shape: list[int], datatype: str) -> None:
        self.name = name
        self.shape = shape
        self.datatype = datatype

    def set_data_from_numpy(self, values: np.ndarray) -> None:
        assert list(values.shape) == list(self.shape)
        self.values = values


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> StandIn:
    folder = tmp_path_factory.mktemp("triton") / "models"
    settings = Settings(
        model=ModelSettings(device="cpu"),
        engine=EngineSettings(precision="float32", folder=folder),
        detector=DetectorSettings(kind="yolo-world"),
    )
    configs: dict[str, Any] = {}
    needed = ("prepare", "encode", "encode_image", "prompt_points", "prompt_box", "detect", "segment_named")

    def make_some(*args: Any, **options: Any) -> list[ServedModel]:
        made = [each for each in make_models(*args, **options) if each.name.removeprefix("nano_") in needed]
        configs.update((each.name, each.config) for each in made)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sam3_node.engines.triton_server.make_models", make_some)
        export_repository(settings, folder, names=NAMES)
    return StandIn(folder, configs)


@pytest.fixture
def example(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The client, whose package is the stand-in."""
    package = ModuleType("tritonclient.http")
    package.InferenceServerClient = lambda url: stand_in  # type: ignore[attr-defined]
    package.InferInput = Input  # type: ignore[attr-defined]
    package.np_to_triton_dtype = lambda dtype: NUMPY_TYPES[np.dtype(dtype).name]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tritonclient", ModuleType("tritonclient"))
    monkeypatch.setitem(sys.modules, "tritonclient.http", package)
    path = ROOT / "examples" / "triton_client.py"
    assert len(path.read_text().splitlines()) <= 83
    spec = importlib.util.spec_from_file_location("triton_client", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def iou(first: np.ndarray, second: np.ndarray) -> float:
    return float((first & second).sum() / max(1, (first | second).sum()))


def test_masks_equal_the_nodes(example: ModuleType) -> None:
    clip = LabelledClip.load(TABLETOP)
    image = clip.image(0)
    height, width = image.shape[:2]
    model = load_tracker("nano", device="cpu", dtype="float32")
    features = model.encode(model.preprocess(image))
    tracker = Tracker(model, max_objects=1)
    segmenter = example.Segmenter("nano")
    segmenter.set_image(image[..., ::-1].copy())

    detector = load_detector("yolo-world", "nano", device="cpu", dtype=torch.float32)
    expected = detector.detect(image, detector.prepare(NAMES), 0.3)
    masks, scores, names = segmenter.predict(names=NAMES)
    assert [str(name) for name in names] == [found.label for found in expected]
    assert len(masks) == len(scores) >= 2
    for mask, found in zip(masks, expected, strict=True):
        assert iou(mask, decode(tracker, features, found.box, image)) > MIN_IOU
    only, _, names = segmenter.predict(names=[expected[0].label])
    assert set(names) == {expected[0].label}
    assert len(only) < len(masks)

    for unknown in (["cup"], ["box", "cup"], "cup"):
        with pytest.raises(ValueError, match="red mug,box,screwdriver, which are served; found cup"):
            segmenter.predict(names=unknown)

    box = expected[0].box
    masks, scores = segmenter.predict(box=box)
    assert iou(masks[0], decode(tracker, features, box, image)) > MIN_IOU
    centre = [(box[0] + box[2]) / 2, (box[1] + box[3]) / 2]
    scale = model.image_size / np.array([width, height])
    prompt = ObjectPrompt(1, points=[np.array(centre) * scale])
    logits, score = tracker.segment(features, prompt)
    masks, scores = segmenter.predict(points=[centre])
    assert iou(masks[0], rasterize(logits.numpy(), (height, width)).full()) > MIN_IOU
    assert abs(scores[0] - float(score)) < 0.02
    rivals, _ = tracker.segment_candidates(features, prompt)
    masks, scores = segmenter.predict(points=[centre], labels=[1], multimask=True)
    assert len(masks) == len(scores) == len(rivals)
    assert list(scores) == sorted(scores, reverse=True)


def decode(tracker: Tracker, features: Any, box: Any, image: np.ndarray) -> np.ndarray:
    """Return the mask of a box as the node makes it."""
    scale = np.tile(tracker.model.image_size / np.array(image.shape[1::-1]), 2)
    logits, _ = tracker.segment(features, ObjectPrompt(1, box=np.array(box) * scale))
    return rasterize(logits.numpy(), image.shape[:2]).full()


def test_types_of_the_stand_in_are_the_servers() -> None:
    assert {f"TYPE_{name}" for name in NUMPY_TYPES.values()} <= {str(name) for name in SERVER_TYPES.values()}
    assert {name for _, name in ONNX_TYPES.values()} >= set(SERVER_TYPES)
