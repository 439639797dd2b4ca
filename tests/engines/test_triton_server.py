"""Model repositories for Triton Inference Server: its own schema reads them, and onnxruntime runs what they say."""

import importlib.util
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from sam3_node.bags.native.reader import TABLETOP, LabelledClip
from sam3_node.detection.detectors import NANO
from sam3_node.detection.loading import load_detector
from sam3_node.engines import triton_server
from sam3_node.engines.engine_store import EngineStore, checkpoint_digest
from sam3_node.engines.triton_server import (
    ENSEMBLE_FILE,
    ONNX,
    PLAN,
    TYPES,
    Search,
    ServedModel,
    Serving,
    export_repository,
    format_config,
    make_models,
)
from sam3_node.errors import EngineError, MissingExtraError
from sam3_node.models import TrackerModel, load_tracker
from sam3_node.models.pixels import letterbox
from sam3_node.models.sam31.random_weights import random_tensors, small_sizes
from sam3_node.models.yolo.network import load_yolo_world
from sam3_node.settings import DetectorSettings, EngineSettings, ModelSettings, Settings
from sam3_node.tracking import ObjectPrompt, Tracker
from sam3_node.tracking.tracker import combine_scores
from tests.engines.test_store import KEY
from tests.support.onnx_run import ONNX_TYPES
from tests.support.refuses import refuses
from tests.support.tiny import TRAINED_LOGIT, random_source
from tests.support.tiny_sam1 import random_sam1

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
runtime = pytest.importorskip("onnxruntime")
pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]

STAGES = ("encode", "read", "decode", "remember")
SERVER_TYPES = {ONNX_TYPES[dtype][1]: name for dtype, name in TYPES.items()}
TOLERANCE = 1e-3
KINDS = {"sam3": "box", "sam1": "point", "sam31": "box"}
"""Kind of prompts that is exported of a family; an export takes most of the time of these tests."""
PLACES = {
    "point": [[[40.0, 50.0], [90.5, 20.0]], [[10.0, 101.0], [60.0, 30.0]]],
    "box": [[[20.0, 30.0, 80.0, 90.0], [50.0, 5.0, 110.0, 60.5]], [[5.0, 5.0, 50.0, 70.0], [0, 0, 100, 100]]],
}
PHRASES = ("red mug", "box", "screwdriver")
SERVER_PYTHON = Path(__file__).parents[2] / ".venv-triton" / "bin" / "python"
RUN_FILE = """
import sys

import numpy
import onnxruntime

model, given, found = sys.argv[1:]
session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
names = [output.name for output in session.get_outputs()]
values = session.run(names, dict(numpy.load(given)))
numpy.savez(found, **dict(zip(names, values)))
print(onnxruntime.__version__)
"""
SCORE = 0.2
ONE_LEVEL = 1.01 / 255
"""Difference in 0..1 of a level that is rounded in the other direction."""
DETECTED = 0.01
"""Difference of a score that this makes."""


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tracker's weights, weights for images alone, and a tracker's whose objects share memories."""
    folder = tmp_path_factory.mktemp("weights")
    source = random_source("sam3", presence=60.0, hidden=64)
    with torch.no_grad():
        for head in source.mask_decoder.output_hypernetworks_mlps:
            head.proj_out.weight.mul_(8)  # logits of a trained model's size
    source.save_pretrained(folder / "sam3")
    random_sam1().save_pretrained(folder / "sam1")
    (folder / "sam31").mkdir()
    save_file(random_tensors(small_sizes()), folder / "sam31" / "sam3.1_multiplex.safetensors")
    return {family: folder / family for family in KINDS}


@pytest.fixture(scope="module")
def weights(families: dict[str, Path]) -> Path:
    return families["sam3"]


def settings_for(weights: Path, precision: str, engines: Path) -> Settings:
    return Settings(
        model=ModelSettings(name=str(weights), device="cpu"),
        engine=EngineSettings(precision=precision, folder=engines),  # type: ignore[arg-type]
        detector=DetectorSettings(kind="yolo-world" if weights.name == "sam3" else "none"),
    )


@pytest.fixture(scope="module")
def trackers(families: dict[str, Path]) -> dict[str, TrackerModel]:
    return {name: load_tracker(str(path), device="cpu", dtype="float32") for name, path in families.items()}


@pytest.fixture(scope="module")
def model(trackers: dict[str, TrackerModel]) -> TrackerModel:
    return trackers["sam3"]


@pytest.fixture(scope="module")
def models(trackers: dict[str, TrackerModel]) -> dict[str, ServedModel]:
    net = load_yolo_world(NANO, device="cpu", dtype="float32")
    return {
        served.name: served
        for family, tracker in trackers.items()
        for served in make_models(tracker, bank_size=7, detector=Search(net) if family == "sam3" else None)
    }


@pytest.fixture(scope="module")
def repository(families: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One repository of the models that the ensembles need; tests/engines/test_export.py runs the other stages."""
    folder = tmp_path_factory.mktemp("triton") / "models"
    for family, weights in families.items():
        earlier = {path: path.read_bytes() for path in folder.rglob("*.*")}
        kind = KINDS[family]
        needed = {f"{family}_{name}" for name in ("prepare", "encode", f"prompt_{kind}", f"segment_{kind}")}
        if family == "sam3":
            needed |= {"sam3_detect", "sam3_segment_named", "sam3_encode_image", "sam3_prompt_points"}

        def make_some(*args: Any, needed: set[str] = needed, **options: Any) -> list[ServedModel]:
            return [served for served in make_models(*args, **options) if served.name in needed]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(triton_server, "make_models", make_some)
            written = export_repository(settings_for(weights, "float32", folder), folder)
        assert {path.name for path in written} == needed
        assert earlier.items() <= {path: path.read_bytes() for path in folder.rglob("*.*")}.items()
    return folder


def open_session(repository: Path, name: str) -> Any:
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    return runtime.InferenceSession(
        str(repository / name / "1" / "model.onnx"), options, providers=["CPUExecutionProvider"]
    )


def run_ensemble(
    repository: Path, config: Mapping[str, Any], tensors: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Run the steps of an ensemble by its own wiring, as the server does; return its outputs."""
    assert {spec["name"] for spec in config["input"]} == set(tensors)
    tensors = dict(tensors)
    for step in config["ensemble_scheduling"]["step"]:
        names = [item["key"] for item in step["output_map"]]
        inputs = {item["key"]: tensors[item["value"]] for item in step["input_map"]}
        results = open_session(repository, step["model_name"]).run(names, inputs)
        tensors |= {item["value"]: found for item, found in zip(step["output_map"], results, strict=True)}
    return {spec["name"]: tensors[spec["name"]] for spec in config["output"]}


@pytest.mark.parametrize(("family", "kind"), KINDS.items())
def test_an_ensemble_segments_images_as_the_tracker_does(
    repository: Path,
    models: dict[str, ServedModel],
    trackers: dict[str, TrackerModel],
    family: str,
    kind: str,
) -> None:
    model = trackers[family]
    config = models[f"{family}_segment_{kind}"].config
    images = np.random.default_rng(0).integers(0, 256, (2, 70, 100, 3), np.uint8)  # RGB
    tensors = {"image": images, f"{kind}{'e' * (kind == 'box')}s": np.float32(PLACES[kind])}
    found = run_ensemble(repository, config, tensors)
    for index, image in enumerate(images):
        one = {name: values[index : index + 1] for name, values in tensors.items()}
        for name, values in run_ensemble(repository, config, one).items():
            np.testing.assert_allclose(found[name][index : index + 1], values, rtol=0, atol=1e-4)
        pixels = torch.from_numpy(prepare(repository, family, image[None])["pixels"])
        # the server rounds levels as it likes: by one of 255
        assert (pixels - model.preprocess(image[..., ::-1])).abs().max() <= ONE_LEVEL / model.std.min()
        check_masks(
            model, pixels, {name: values[index] for name, values in found.items()}, kind, PLACES[kind][index]
        )


def prepare(repository: Path, family: str, images: np.ndarray) -> dict[str, np.ndarray]:
    """Return what the server makes of images [B, H, W, 3]."""
    session = open_session(repository, f"{family}_prepare")
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, {"image": images}), strict=True))


def check_masks(
    model: TrackerModel, pixels: torch.Tensor, found: Mapping[str, np.ndarray], kind: str, places: Sequence
) -> None:
    """Compare the masks of an image with what the tracker segments there."""
    tracker = Tracker(model, max_objects=1)
    features = model.encode(pixels)
    scores = combine_scores(*(torch.from_numpy(found[column]) for column in ("presence", "iou")))
    for logits, score, place in zip(torch.from_numpy(found["logits"]), scores, places, strict=True):
        prompt = ObjectPrompt(1, points=[place]) if kind == "point" else ObjectPrompt(1, box=place)
        expected, expected_score = tracker.segment(features, prompt)
        assert expected.abs().max() > TRAINED_LOGIT
        assert (logits - expected).abs().max() < TOLERANCE
        assert abs(score - expected_score) < TOLERANCE


def test_an_ensemble_segments_what_the_detector_finds(
    repository: Path, models: dict[str, ServedModel], model: TrackerModel
) -> None:
    clip = LabelledClip.load(TABLETOP)
    detector = load_detector("yolo-world", "nano", device="cpu", dtype=torch.float32)
    query = detector.prepare(PHRASES)
    images = [clip.image(0), clip.image(0)[:, 60:400]]  # wide, and high
    side = detector.model.config.image_size
    for image in images:
        prepared = prepare(repository, "sam3", image[None, ..., ::-1])
        assert np.abs(prepared["letterbox"] - letterbox(image, side)[0].numpy()).max() <= ONE_LEVEL
        assert prepared["frame"].tolist() == [list(image.shape[1::-1])]
        found = run_ensemble(
            repository,
            models["sam3_segment_named"].config,
            {"image": image[None, ..., ::-1], "text": query.vectors.numpy()[None]},
        )
        expected = detector.detect(image, query, SCORE)
        count = int((found["scores"][0] > SCORE).sum())
        assert count == len(expected) >= 1
        scale = np.tile(model.image_size / np.array(image.shape[1::-1]), 2)
        for row, detection in enumerate(expected):
            assert PHRASES[found["phrases"][0, row]] == detection.label
            assert abs(found["scores"][0, row] - detection.score) < DETECTED
            assert np.abs(found["boxes"][0, row] - detection.box * scale).max() < 1
        outputs = {name: values[0] for name, values in found.items()}
        pixels = torch.from_numpy(prepared["pixels"])
        check_masks(model, pixels, outputs, "box", outputs["boxes"].tolist())


def test_points_have_labels_and_masks_compete(
    repository: Path, models: dict[str, ServedModel], model: TrackerModel
) -> None:
    """Features are made once, and prompts of some points each are decoded on them, also the corners of boxes."""
    images = np.random.default_rng(1).integers(0, 256, (1, 90, 120, 3), np.uint8)
    features = run_ensemble(repository, models["sam3_encode_image"].config, {"image": images})
    pixels = torch.from_numpy(prepare(repository, "sam3", images)["pixels"])
    encoded = model.encode(pixels)
    prompt = open_session(repository, "sam3_prompt_points")
    names = [output.name for output in prompt.get_outputs()]
    prompts = {
        (1,): [[[40.0, 50.0]], [[90.5, 20.0]]],
        (1, 0, 1): [[[40.0, 50.0], [90.5, 20.0], [10.0, 30.0]]],
        (2, 3): [[[20.0, 30.0], [80.0, 90.0]]],
    }
    for labels, points in prompts.items():
        inputs = {name: features[name] for name in ("top", "fine", "middle")} | {
            "points": np.float32([points]),
            "labels": np.int32([[labels] * len(points)]),
        }
        found = dict(zip(names, prompt.run(names, inputs), strict=True))
        for index, place in enumerate(points):
            embedded = model.decode_stage.embed(encoded, torch.tensor(place), torch.tensor(labels))
            single = model.decode_stage(*embedded, False)
            assert single.logits.abs().max() > TRAINED_LOGIT
            assert np.abs(found["logits"][0, index] - single.logits[0].numpy()).max() < TOLERANCE
            rivals = model.decode_stage.candidates(encoded, torch.tensor(place), torch.tensor(labels), None)
            assert np.abs(found["candidates"][0, index] - rivals.logits.numpy()).max() < TOLERANCE
            assert np.abs(found["candidate_iou"][0, index] - rivals.iou.numpy()).max() < TOLERANCE


def test_memories_are_served_without_bfloat16(models: dict[str, ServedModel], model: TrackerModel) -> None:
    read, remember = (models[f"sam3_{name}"].stage for name in ("read", "remember"))
    for stage in (read, remember):
        assert torch.bfloat16 not in {spec.dtype for spec in (*stage.inputs, *stage.outputs)}
    assert models["sam3_read"].config["input"][1]["dims"][:2] == (-1, -1), "objects and memories vary"
    top, memory, *others = read.examples(3)
    assert memory.shape[1] > 0
    rounded = memory.bfloat16()  # as `remember` gives them
    assert torch.equal(read.module(top, rounded.float(), *others), model.stages.read(top, rounded, *others))
    inputs = remember.examples(3)
    assert torch.equal(remember.module(*inputs), model.stages.remember(*inputs).float())


def test_memories_of_groups_are_served_with_their_slots(
    models: dict[str, ServedModel], trackers: dict[str, TrackerModel]
) -> None:
    """A client keeps them; the server only computes."""
    model = trackers["sam31"]
    dims = {
        f"{name}.{tensor['name']}": tensor["dims"]
        for name in ("read", "decode", "remember")
        for side in ("input", "output")
        for tensor in models[f"sam31_{name}"].config[side]
    }
    assert dims["read.memory"] == (-1, -1, model.memory_tokens, 2 * model.hidden)
    assert dims["read.pointers"][-1] == model.slots * model.hidden
    assert dims["decode.used"] == dims["decode.presence"] == dims["remember.prompted"] == (-1, model.slots)
    assert dims["decode.logits"] == dims["remember.logits"] == (-1, model.slots, *model.mask_size)
    for name in ("read", "decode", "remember"):
        assert models[f"sam31_{name}"].stage.module is getattr(model.stages, name)


def of(repository: Path, models: dict[str, ServedModel]) -> list[ServedModel]:
    return [models[path.name] for path in repository.iterdir()]


def test_configurations_say_what_the_files_take_and_give(
    repository: Path, models: dict[str, ServedModel]
) -> None:
    for served in of(repository, models):
        assert (repository / served.name / "config.pbtxt").read_text() == format_config(served.config)
        if served.stage is None:
            # an empty folder is lost in an object store or a repository
            assert [path.name for path in (repository / served.name / "1").iterdir()] == [ENSEMBLE_FILE]
            continue
        session = open_session(repository, served.name)
        for side, values in (("input", session.get_inputs()), ("output", session.get_outputs())):
            for x, told in zip(values, served.config[side], strict=True):
                dims = tuple(-1 if isinstance(side, str) else side for side in x.shape[1:])
                assert isinstance(x.shape[0], str), "any number of images"
                assert (x.name, SERVER_TYPES[x.type], dims) == (told["name"], told["data_type"], told["dims"])


def load_schema() -> ModuleType:
    """Load the server's schema alone: the package around it needs gRPC."""
    package = importlib.util.find_spec("tritonclient")
    if package is None or not package.submodule_search_locations:
        pytest.skip("the server's schema is not installed: pip install --no-deps tritonclient")
    path = Path(next(iter(package.submodule_search_locations))) / "grpc" / "model_config_pb2.py"
    spec = importlib.util.spec_from_file_location("model_config_pb2", path)
    schema = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(schema)
    return schema


def test_the_servers_schema_reads_the_files(
    repository: Path, models: dict[str, ServedModel], trackers: dict[str, TrackerModel]
) -> None:
    schema = load_schema()
    text_format = pytest.importorskip("google.protobuf.text_format")
    patient = make_models(trackers["sam1"], 7, serving=Serving(delay_us=200, preferred=(1, 4)))
    batching = text_format.Parse(format_config(patient[0].config), schema.ModelConfig()).dynamic_batching
    assert (batching.max_queue_delay_microseconds, list(batching.preferred_batch_size)) == (200, [1, 4])
    for served in of(repository, models):
        text = (repository / served.name / "config.pbtxt").read_text()
        config = text_format.Parse(text, schema.ModelConfig())
        assert (config.name, config.platform) == (served.name, served.config["platform"])
        assert config.max_batch_size == 8
        assert config.HasField("dynamic_batching") == (served.stage is not None)
        for side in ("input", "output"):
            found = [
                (x.name, schema.DataType.Name(x.data_type), tuple(x.dims)) for x in getattr(config, side)
            ]
            assert found == [(x["name"], x["data_type"], x["dims"]) for x in served.config[side]]
        steps = served.config.get("ensemble_scheduling", {"step": []})["step"]
        for parsed, step in zip(config.ensemble_scheduling.step, steps, strict=True):
            assert (parsed.model_name, parsed.model_version) == (step["model_name"], -1)
            for side in ("input_map", "output_map"):
                assert dict(getattr(parsed, side)) == {x["key"]: x["value"] for x in step[side]}
        if served.stage is not None:
            kind = schema.ModelInstanceGroup.Kind.Name(config.instance_group[0].kind)
            assert kind == served.config["instance_group"][0]["kind"]


@pytest.mark.skipif(not SERVER_PYTHON.exists(), reason="make test-engines installs the server's onnxruntime")
def test_the_servers_onnxruntime_runs_the_files(
    repository: Path, models: dict[str, ServedModel], tmp_path: Path
) -> None:
    """Triton 25.01 has onnxruntime 1.20.1, which knows older operators than the one beside these tests."""
    files = sorted(repository.glob("*/1/model.onnx"))
    for path in files:
        stage = models[path.parents[1].name].stage
        inputs = {
            spec.name: values.numpy() for spec, values in zip(stage.inputs, stage.examples(), strict=True)
        }
        if stage.name == "detect":
            inputs = find_on_a_real_image()
        np.savez(tmp_path / f"{stage.name}.npz", **inputs)
        names = [spec.name for spec in stage.outputs]
        expected = open_session(repository, path.parents[1].name).run(names, inputs)
        ran = subprocess.run(
            [SERVER_PYTHON, "-c", RUN_FILE, path, tmp_path / f"{stage.name}.npz", tmp_path / "found.npz"],
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.strip() == "1.20.1"
        found = dict(np.load(tmp_path / "found.npz"))
        told = dict(zip(names, expected, strict=True))
        if stage.name == "detect":
            # boxes whose scores are nearly equal may change places, and those near 0 are nearly equal
            kept = told["scores"] > SCORE
            assert kept.any()
            found = {name: values[kept] for name, values in found.items()}
            told = {name: values[kept] for name, values in told.items()}
        for name, values in told.items():
            np.testing.assert_allclose(found[name], values, rtol=1e-4, atol=1e-4)


def find_on_a_real_image() -> dict[str, np.ndarray]:
    """Return the inputs of the detector's model for a frame of the bundled recording."""
    image = LabelledClip.load(TABLETOP).image(0)
    detector = load_detector("yolo-world", "nano", device="cpu", dtype=torch.float32)
    return {
        "letterbox": letterbox(image, detector.model.config.image_size)[0].numpy(),
        "frame": np.float32([image.shape[1::-1]]),
        "text": detector.prepare(PHRASES).vectors.numpy()[None],
    }


def store_plans(weights: Path, engines: Path, library: str, precision: str = "bfloat16") -> None:
    own = {"model": "tiny", "weights": checkpoint_digest(str(weights)), "image_size": 112, "gpu": "sm90"}
    key = KEY.model_copy(update=own | {"library": library, "version": "10.9", "precision": precision})
    plans = {name: f"{library} {name}".encode() for name in STAGES}
    EngineStore(engines).save(key, plans, dict.fromkeys(plans, 1.0))


def test_plans_of_the_store_are_served_as_they_are(weights: Path, tmp_path: Path) -> None:
    store_plans(weights, tmp_path / "engines", "tensorrt")
    store_plans(weights, tmp_path / "engines", "tensorrt_rtx")  # newer, and of no use to the server
    settings = settings_for(weights, "bfloat16", tmp_path / "engines")
    written = export_repository(settings, tmp_path / "models", plans=True, name="arm")
    assert [path.name for path in written] == [f"arm_{name}" for name in STAGES]
    for name, path in zip(STAGES, written, strict=True):
        assert (path / "1" / "model.plan").read_bytes() == f"tensorrt {name}".encode()
        text = (path / "config.pbtxt").read_text()
        assert f'platform: "{PLAN}"' in text
        assert "TYPE_BF16" in text
    with refuses(EngineError, field=("arm_encode", "--name")):
        export_repository(settings, tmp_path / "models", plans=True, name="arm")


def test_what_cannot_be_served_is_refused(weights: Path, tmp_path: Path) -> None:
    engines = tmp_path / "engines"
    out = tmp_path / "models"
    settings = settings_for(weights, "bfloat16", engines)
    with refuses(EngineError, field=("engine.precision", "bfloat16", "float32", "float16")):
        export_repository(settings, out)
    with refuses(EngineError, field="sam3-node"):
        export_repository(settings, out, plans=True)
    store_plans(weights, engines, "tensorrt_rtx")
    with refuses(EngineError, field="tensorrt_rtx"):
        export_repository(settings, out, plans=True)
    assert not out.exists()


def test_a_missing_exporter_names_its_extra(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with refuses(MissingExtraError, field="sam3-node"):
        export_repository(settings_for(weights, "float32", tmp_path), tmp_path / "models")


def test_half_precision_is_described_as_such(weights: Path) -> None:
    half = load_tracker(str(weights), device="cpu", dtype="float16")
    serving = Serving(batch=4, instances=3, delay_us=200, preferred=(1, 2, 4))
    models = {served.name: served.config for served in make_models(half, bank_size=7, serving=serving)}
    assert len(models) == 12
    batching = {"preferred_batch_size": (1, 2, 4), "max_queue_delay_microseconds": 200}
    assert models["sam3_encode"]["dynamic_batching"] == batching
    assert {x["data_type"] for x in models["sam3_encode"]["output"]} == {"TYPE_FP16"}
    assert models["sam3_segment_box"]["input"][1]["data_type"] == "TYPE_FP32"
    assert {config["platform"] for config in models.values()} == {ONNX, "ensemble"}
    for name, config in models.items():
        of_memories = name.removeprefix("sam3_") in STAGES[1:]
        assert config["max_batch_size"] == (0 if of_memories else 4)
        assert config["platform"] != ONNX or config["instance_group"][0]["count"] == (1 if of_memories else 3)
