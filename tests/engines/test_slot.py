"""The tracker's engine slot: the gate's stored report, and the fallback to torch."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from sam3_node.bags.bag import sample_images
from sam3_node.engines import engine_store, quantize
from sam3_node.engines.slot import (
    CLIP_FRAMES,
    CLIP_STEP,
    REPORT,
    LoadedEngines,
    TrackerSlot,
    check_tracker,
    read_check_clip,
    read_report,
    serve_tracker,
)
from sam3_node.engines.specs import STAGES, tracker_stages
from sam3_node.errors import BagError, EngineError
from sam3_node.models import TrackerModel, load_tracker
from sam3_node.models.sam.stages import Stages
from sam3_node.perception.loading import load_model
from sam3_node.settings import EngineSettings, ModelSettings, Settings, TrackerSettings
from tests.engines.test_store import KEY
from tests.engines.test_validation import ALWAYS, CountedClock, disturbed
from tests.support.node_rig import Rig, ids, masks_where
from tests.support.patience import PATIENCE_S
from tests.support.rectangles import rectangle_clip
from tests.support.refuses import refuses
from tests.support.tabletop import TABLETOP, truth
from tests.support.tiny import random_source

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    random_source("sam3", presence=ALWAYS).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of images to compare engines on."""
    folder = tmp_path_factory.mktemp("clip")
    for number, frame in enumerate(rectangle_clip().frames):
        cv2.imwrite(str(folder / f"{number}.png"), frame)
    return folder


def make_settings(weights: Path, store: Path, **engine: Any) -> Settings:
    model = ModelSettings(name=str(weights), device="cpu")
    return Settings(model=model, engine=EngineSettings(**{"precision": "float32", "folder": store} | engine))


@pytest.fixture
def settings(weights: Path, tmp_path: Path) -> Settings:
    return make_settings(weights, tmp_path)


def loaded(
    settings: Settings, stages: Stages | None = None, plan: bytes = b"plan", scales: str = ""
) -> LoadedEngines:
    """Return torch stages in the place of engines, and their folder in the store."""
    model = load_tracker(settings.model.name)
    own = {"model": model.name, "precision": settings.engine.precision, "image_size": model.image_size}
    key = KEY.model_copy(update=own | {"library": "tensorrt", "version": "10.8", "gpu": "sm90"})
    stored = engine_store.EngineStore(settings.engine.folder).save(
        key, dict.fromkeys(STAGES, plan), dict.fromkeys(STAGES, 1.0), scales=scales
    )
    runs = dict(zip(STAGES, stages or model.stages, strict=True))
    return LoadedEngines(
        stored, runs, tracker_stages(model, dtype=engine_store.resolve_dtype(settings.engine.precision))
    )


def slot(settings: Settings) -> TrackerSlot:
    return TrackerSlot(load_tracker(settings.model.name), settings, CountedClock())


def must_not_run(*inputs: object) -> object:
    raise AssertionError("the engine runs although its report is stored")


def test_engines_serve_once_the_gate_has_passed_them(settings: Settings, clip: Path) -> None:
    engines = loaded(settings)
    assert read_report(engines.stored) is None
    slot(settings).require_passed(engines, clip)
    report = read_report(engines.stored)
    assert report.passed
    assert report.plans == engines.stored.manifest.plans
    # the stored report is enough, so the engines do not run again
    slot(settings).require_passed(engines._replace(runs=dict.fromkeys(STAGES, must_not_run)), clip)


@pytest.mark.engines
def test_the_gate_judges_what_serves(settings: Settings, weights: Path, clip: Path) -> None:
    """Exact engines in a model of another dtype: each hand-over is rounded, and the figures show it."""
    engines = loaded(settings)
    models = (load_tracker(str(weights), dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    slots = [TrackerSlot(model, settings, CountedClock()) for model in models]
    exact, rounded = (served.check_accuracy(engines, clip).tracks for served in slots)
    assert exact.mean_iou == 1.0
    assert 0.5 < rounded.mean_iou < 1.0


@pytest.mark.parametrize(
    ("engine", "dtype", "expected"),
    [
        ({"kind": "tensorrt"}, "auto", torch.bfloat16),
        ({"kind": "tensorrt", "precision": "fp8"}, "auto", torch.bfloat16),
        ({"kind": "tensorrt", "precision": "float16"}, "auto", torch.float16),
        ({"kind": "tensorrt", "precision": "float16"}, "float32", "float32"),
        ({"kind": "torch", "precision": "float16"}, "auto", "auto"),
    ],
)
def test_a_model_computes_in_the_dtype_of_its_engines(
    monkeypatch: pytest.MonkeyPatch, engine: dict[str, Any], dtype: Any, expected: object
) -> None:
    model = ModelSettings(device="cuda", dtype=dtype)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert engine_store.choose_model_dtype(Settings(model=model, engine=EngineSettings(**engine))) == expected


def test_on_a_cpu_torch_keeps_its_dtype_where_it_serves_instead_of_engines() -> None:
    settings = Settings(model=ModelSettings(device="cpu"), engine=EngineSettings(kind="tensorrt"))
    assert engine_store.choose_model_dtype(settings) == "auto"


@pytest.mark.engines
@pytest.mark.parametrize(("precision", "gpu"), [("bfloat16", "sm75"), ("fp8", "sm86")])
def test_a_precision_that_a_gpu_lacks_is_refused(
    weights: Path, tmp_path: Path, precision: str, gpu: str
) -> None:
    pytest.importorskip("tensorrt_rtx")
    settings = make_settings(weights, tmp_path, kind="tensorrt", precision=precision)
    with refuses(EngineError, field=(str(precision), str(gpu))):
        engine_store.compute_key(load_tracker(str(weights)), settings, gpu)


@pytest.mark.engines
def test_an_encoders_engine_gives_the_trunk_once_a_detector_shares_it(
    settings: Settings, weights: Path, clip: Path
) -> None:
    source = load_tracker(str(weights))
    served = slot(settings)
    engines = loaded(settings, source.stages)
    report = served.check_accuracy(engines, clip)
    assert report.passed
    assert [row.output for row in report.outputs if row.stage == "encode"][-1] == "trunk"
    served.install(engines)
    pixels = torch.randn(1, 3, source.image_size, source.image_size)
    assert served.model.encode(pixels).trunk is None
    for model in (served.model, source):
        model.share_trunk()
    actual, expected = (model.encode(pixels).trunk for model in (served.model, source))
    assert torch.equal(actual, expected)


@pytest.mark.engines
def test_other_thresholds_apply_to_the_same_figures(weights: Path, clip: Path, tmp_path: Path) -> None:
    half = load_tracker(str(weights), dtype=torch.bfloat16)
    settings = make_settings(weights, tmp_path, precision="bfloat16", min_cosine=0.5, min_iou=0.1)
    engines = loaded(settings, half.stages)
    slot(settings).require_passed(engines, clip)
    strict = make_settings(weights, tmp_path, precision="bfloat16", min_cosine=1.0)
    with refuses(EngineError, field=("1", "sam3-node")):
        slot(strict).require_passed(engines._replace(runs=dict.fromkeys(STAGES, must_not_run)), clip)


@pytest.mark.engines
def test_engines_that_are_slower_than_torch_serve_only_if_they_are_forced(
    settings: Settings, weights: Path, clip: Path, tmp_path: Path
) -> None:
    """The four serve together, so a slower one may serve if the step is faster."""
    clock = CountedClock()
    served = load_tracker(str(weights))
    served.stages = Stages(*(clock.delay(run, 0.010) for run in served.stages))

    def load(settings: Settings, encode_s: float, plan: bytes) -> LoadedEngines:
        own = load_tracker(str(weights)).stages
        stages = Stages(clock.delay(own.encode, encode_s), *(clock.delay(run, 0.005) for run in own[1:]))
        return loaded(settings, stages, plan=plan)

    TrackerSlot(served, settings, clock).require_passed(load(settings, 0.020, b"fast"), clip)
    slow = load(settings, 0.045, b"slow")
    with refuses(EngineError, field=("60 against 40 ms", "--engine.max_time 0")):
        TrackerSlot(served, settings, clock).require_passed(slow, clip)
    kept = slow._replace(runs=dict.fromkeys(STAGES, must_not_run))
    with refuses(EngineError, field="60 against 40 ms"):  # by the report
        TrackerSlot(served, settings, clock).require_passed(kept, clip)
    forced = make_settings(weights, tmp_path, max_time=0)
    TrackerSlot(served, forced, clock).require_passed(kept, clip)


@pytest.mark.engines
def test_refused_engines_stay_refused_until_they_are_rebuilt(
    settings: Settings, weights: Path, clip: Path
) -> None:
    stages = load_tracker(str(weights)).stages
    wrong = loaded(settings, stages._replace(encode=disturbed(stages.encode, "top.0")))
    for _ in range(2):
        with refuses(EngineError, field="encode"):
            slot(settings).require_passed(wrong, clip)
    kept = read_report(wrong.stored)
    assert not kept.passed
    slot(settings).require_passed(loaded(settings, plan=b"another"), clip)


@pytest.mark.engines
def test_an_fp8_encoder_is_explained_by_the_scales_stored_beside_it(
    weights: Path, clip: Path, tmp_path: Path
) -> None:
    settings = make_settings(weights, tmp_path, precision="fp8")
    half = load_tracker(str(weights), dtype=torch.bfloat16)
    amax = dict.fromkeys(quantize.find_layers(half.encode_stage), 3.0)
    first = next(iter(quantize.Recipe().select_layers(half.encode_stage)))
    scales = quantize.Scales(
        model="tiny",
        digest=quantize.weights_digest(half),
        frames=1,
        amax=amax | {first: 1e-3},  # most of it saturates
    )
    quantisation = quantize.Quantisation(scales)
    encode = quantize.quantise_encoder(half, scales)
    stages = half.stages._replace(encode=lambda pixels: encode(pixels))
    engines = loaded(settings, stages, scales=quantisation.digest)
    assert not slot(settings).check_accuracy(engines, clip).layers
    quantisation.save(engines.stored)
    report = slot(settings).check_accuracy(engines, clip)
    assert not report.passed
    assert f"encode.{first}" in dict(report.layers)
    assert quantize.Quantisation.load(loaded(settings, stages, plan=b"of other scales").stored) is None


def test_a_report_of_other_plans_or_a_damaged_one_is_ignored(
    settings: Settings, clip: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engines = loaded(settings)
    report = slot(settings).check_accuracy(engines, clip)
    other = engine_store.StoredEngine(
        engines.stored.folder, engines.stored.manifest.model_copy(update={"plans": {"encode": "0"}})
    )
    assert read_report(engines.stored) == report
    assert read_report(other) is None
    (engines.stored.folder / REPORT).write_bytes(b"\xff{")
    with caplog.at_level(logging.WARNING):
        assert read_report(engines.stored) is None
    assert "is ignored" in caplog.text


def test_torch_serves_unless_the_settings_name_engines(weights: Path, tmp_path: Path) -> None:
    model = load_tracker(str(weights))
    stages = model.stages
    name = model.name
    serve_tracker(model, make_settings(weights, tmp_path, fallback=False))
    assert model.stages is stages
    assert model.name == name
    assert not model.static_shapes


@no_gpu
def test_without_a_gpu_torch_serves_and_the_name_says_so(
    weights: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = make_settings(weights, tmp_path, kind="tensorrt")
    with caplog.at_level(logging.WARNING):
        model: TrackerModel = load_model(settings.model, settings.tracker, settings.engine)
    assert model.name.startswith(f"{weights.name} (torch: no GPU for engines: ")
    assert model.name.endswith(")")
    assert len(model.name) < 200
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert model.stages.encode is model.encode_stage
    assert not model.static_shapes


@no_gpu
def test_without_a_gpu_and_a_fallback_nothing_serves(weights: Path, tmp_path: Path) -> None:
    settings = make_settings(weights, tmp_path, kind="tensorrt", fallback=False)
    with refuses(EngineError, field="GPU"):
        load_model(settings.model, TrackerSettings(), settings.engine)
    with refuses(EngineError, field="GPU"):
        check_tracker(settings)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with Rig(tmp_path) as rig:
        rig.environment |= {"SAM3_ENGINE__KIND": "tensorrt", "SAM3_ENGINE__FOLDER": str(tmp_path / "engines")}
        yield rig


@no_gpu
def test_a_node_falls_back_and_says_so_in_every_message(rig: Rig) -> None:
    node = rig.node()
    rig.camera()
    with rig.client() as client:
        first = masks_where(client, lambda masks: True, "masks")
        added = client.add_object(box=(60, 60, 160, 160)).id
        tracked = masks_where(client, lambda masks: added in ids(masks), "the object")
        later = masks_where(client, lambda masks: masks.seq > tracked.seq + 3, "later masks")
        assert client.status()["model"] == first.model
    assert first.model == tracked.model == later.model
    assert first.model.startswith("tiny (torch: no GPU for engines")
    assert ids(later) == [added]
    assert node.log.read_text().count("engines cannot serve, torch does") == 1


@no_gpu
def test_a_node_that_may_not_fall_back_refuses_to_start(rig: Rig) -> None:
    command = [sys.executable, "-m", "sam3_node", "run", "--engine.fallback", "false"]
    environment = os.environ | rig.environment
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode != 0
    assert "no GPU for engines" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "node ready" not in ended.stdout


SIDE = 256


def test_prompts_are_boxes_of_the_objects_on_the_bundled_recording() -> None:
    clip = read_check_clip()
    prompts = clip.prompts(SIDE)
    first = {item.id: item.mask.full() for item in truth()[0].instances if item.area}
    assert [prompt.object_id for prompt in prompts] == list(first)
    for prompt in prompts:
        mask = cv2.resize(
            first[prompt.object_id].astype(np.uint8), (SIDE, SIDE), interpolation=cv2.INTER_AREA
        )
        rows, columns = mask.nonzero()
        edges = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
        assert prompt.box == pytest.approx(edges, abs=1.5)


def test_frames_are_those_that_are_sampled_from_any_source(tmp_path: Path) -> None:
    sampled = list(sample_images(TABLETOP, CLIP_FRAMES, CLIP_STEP))
    assert np.array_equal(read_check_clip().frames, sampled)
    for number, image in enumerate(sampled[:3]):
        cv2.imwrite(str(tmp_path / f"{number}.png"), image)
    clip = read_check_clip(tmp_path)
    assert np.array_equal(clip.frames, sampled[:3:CLIP_STEP])
    assert clip.prompts(SIDE) is None  # the reference looks for objects itself


def test_a_source_without_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "0.png").write_bytes(b"no image")
    with refuses(BagError, field="none"):
        read_check_clip(tmp_path)
