"""Engines in a model's place: the gate's report beside them, and torch where they cannot serve."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import pytest
import torch

from sam3_node.engines.build import Quantisation
from sam3_node.engines.key import arithmetic
from sam3_node.engines.quantize import Scales, quantised, weights_digest
from sam3_node.engines.recipes import Recipe, layers_of
from sam3_node.engines.slot import REPORT, Opened, check, judge, read_report, require_passed, serve
from sam3_node.engines.specs import STAGES, stages_of
from sam3_node.engines.store import Built, EngineStore, Identity
from sam3_node.errors import EngineError
from sam3_node.models import TrackerModel, load_tracker
from sam3_node.models.sam.stages import Stages
from sam3_node.perception.loading import load_model
from sam3_node.settings import EngineSettings, ModelSettings, Settings, TrackerSettings
from tests.engines.test_validation import ALWAYS, disturbed
from tests.support.node_rig import Rig, ids, masks_where
from tests.support.rectangles import rectangle_clip
from tests.support.tiny import random_source

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    random_source("sam3", presence=ALWAYS).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of images to judge by."""
    folder = tmp_path_factory.mktemp("clip")
    for number, frame in enumerate(rectangle_clip().frames):
        cv2.imwrite(str(folder / f"{number}.png"), frame)
    return folder


def settings_of(weights: Path, store: Path, **engine: Any) -> Settings:
    model = ModelSettings(name=str(weights), device="cpu")
    return Settings(model=model, engine=EngineSettings(**{"precision": "float32", "folder": store} | engine))


def opened(
    settings: Settings, stages: Stages | None = None, plan: bytes = b"plan", scales: str = ""
) -> Opened:
    """Torch stages in the place of engines, and their folder in the store."""
    model = load_tracker(settings.model.name)
    identity = Identity(
        model=model.name,
        weights="a" * 64,
        precision=settings.engine.precision,
        image_size=model.image_size,
        bank_size=7,
        most_objects=16,
        library="tensorrt",
        version="10.8",
        gpu="sm90",
    )
    built = EngineStore(settings.engine.folder).save(
        identity, dict.fromkeys(STAGES, plan), dict.fromkeys(STAGES, 1.0), scales=scales
    )
    return Opened(
        built, stages or model.stages, stages_of(model, dtype=arithmetic(settings.engine.precision))
    )


def unasked(*inputs: object) -> object:
    raise AssertionError("the engine runs although its report is there")


def test_engines_serve_once_the_gate_has_passed_them(weights: Path, clip: Path, tmp_path: Path) -> None:
    settings = settings_of(weights, tmp_path)
    engines = opened(settings)
    assert read_report(engines.built) is None
    require_passed(engines, settings, clip)
    report = read_report(engines.built)
    assert report is not None
    assert report.passed
    assert report.plans == engines.built.manifest.plans
    # from now on the report is enough
    require_passed(engines._replace(runs=Stages(unasked, unasked, unasked, unasked)), settings, clip)


def test_other_thresholds_judge_the_same_figures(weights: Path, clip: Path, tmp_path: Path) -> None:
    half = load_tracker(str(weights), dtype=torch.bfloat16)
    settings = settings_of(weights, tmp_path, precision="bfloat16", min_cosine=0.5, min_iou=0.1)
    engines = opened(settings, half.stages)
    require_passed(engines, settings, clip)
    strict = settings_of(weights, tmp_path, precision="bfloat16", min_cosine=1.0)
    with pytest.raises(
        EngineError, match=r"refused by the gate: .*cosine of .* below 1; see `sam3-node engine check`"
    ):
        require_passed(engines._replace(runs=Stages(unasked, unasked, unasked, unasked)), strict, clip)


def test_refused_engines_stay_refused_until_they_are_others(
    weights: Path, clip: Path, tmp_path: Path
) -> None:
    settings = settings_of(weights, tmp_path)
    stages = load_tracker(str(weights)).stages
    wrong = opened(settings, stages._replace(encode=disturbed(stages.encode, "top.0")))
    for _ in range(2):
        with pytest.raises(EngineError, match=r"encode: cosine of top .*encode\.top\.0"):
            require_passed(wrong, settings, clip)
    kept = read_report(wrong.built)
    assert kept is not None
    assert not kept.passed
    require_passed(opened(settings, plan=b"another"), settings, clip)


def test_an_fp8_encoder_is_explained_by_the_scales_kept_beside_it(
    weights: Path, clip: Path, tmp_path: Path
) -> None:
    settings = settings_of(weights, tmp_path, precision="fp8")
    half = load_tracker(str(weights), dtype=torch.float16)
    amax = dict.fromkeys(layers_of(half.encode_stage), 3.0)
    first = next(iter(Recipe().chosen(half.encode_stage)))
    scales = Scales(
        model="tiny",
        digest=weights_digest(half),
        frames=1,
        amax=amax | {first: 1e-3},  # most of it saturates
    )
    quantisation = Quantisation(scales)
    encode = quantised(half, scales)
    stages = half.stages._replace(encode=lambda pixels: encode(pixels))
    engines = opened(settings, stages, scales=quantisation.digest)
    assert not judge(engines, settings, clip).layers
    quantisation.keep(engines.built)
    report = judge(engines, settings, clip)
    assert not report.passed
    assert f"encode.{first}" in dict(report.layers)
    assert Quantisation.kept(opened(settings, stages, plan=b"of other scales").built) is None


def test_a_report_of_other_plans_or_a_damaged_one_counts_for_nothing(
    weights: Path, clip: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_of(weights, tmp_path)
    engines = opened(settings)
    report = judge(engines, settings, clip)
    other = Built(engines.built.folder, engines.built.manifest.model_copy(update={"plans": {"encode": "0"}}))
    assert read_report(engines.built) == report
    assert read_report(other) is None
    (engines.built.folder / REPORT).write_bytes(b"\xff{")
    with caplog.at_level(logging.WARNING):
        assert read_report(engines.built) is None
    assert "passed over" in caplog.text


def test_torch_is_what_serves_unless_engines_are_asked_for(weights: Path, tmp_path: Path) -> None:
    model = load_tracker(str(weights))
    stages, name = model.stages, model.name
    serve(model, settings_of(weights, tmp_path, fallback=False))
    assert model.stages is stages
    assert model.name == name
    assert not model.static_shapes


@no_gpu
def test_without_a_gpu_torch_serves_and_the_name_says_so(
    weights: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = settings_of(weights, tmp_path, kind="tensorrt")
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
    settings = settings_of(weights, tmp_path, kind="tensorrt", fallback=False)
    with pytest.raises(EngineError, match=r"no GPU for engines: .*--engine\.kind torch"):
        load_model(settings.model, TrackerSettings(), settings.engine)
    with pytest.raises(EngineError, match="no GPU for engines"):
        check(settings)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    rig.environment |= {"SAM3_ENGINE__KIND": "tensorrt", "SAM3_ENGINE__FOLDER": str(tmp_path / "engines")}
    yield rig
    rig.close()


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
    ended = subprocess.run(
        [sys.executable, "-m", "sam3_node", "run", "--engine.fallback", "false"],
        env=os.environ | rig.environment,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert ended.returncode != 0
    assert "no GPU for engines" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "node ready" not in ended.stdout
