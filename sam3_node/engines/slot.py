"""Engines in the place of a model's stages: found in the store, and judged by the gate before they serve."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from ..bags.image_sampling import sample_images
from ..bags.native.labelled_clip import TABLETOP
from ..errors import EngineError, OutputError, Sam3NodeError
from ..models import TrackerModel, load_tracker
from ..models.sam.stages import Stages
from ..settings import EngineSettings, Settings
from .build import Quantisation
from .inductor import INDUCTOR, InductorRun
from .key import FP8, arithmetic, identity_of
from .oom import FAILURES, engine_failure, telling_out_of_memory
from .quantize import quantised
from .report import Report
from .specs import STAGES, StageSpec, stages_of
from .store import Built, EngineStore
from .tensorrt.run import TensorRTRun
from .validation import compare, fit

REPORT = "gate.json"
CLIP_FRAMES, CLIP_STEP = 16, 2
MAX_REASON = 100
LOADING = "while they were loaded and compared"
CHECK = "see `sam3-node engine check`"
_log = logging.getLogger(__name__)


class Opened(NamedTuple):
    """Engines on the device, not yet judged; `ports` are theirs."""

    built: Built
    runs: Stages
    ports: Mapping[str, StageSpec]


def serve(model: TrackerModel, settings: Settings) -> None:
    """Put the engines that `settings` ask for into `model.stages`, once the gate has passed them.

    Prompts are still answered by torch. Where engines cannot serve and `engine.fallback` allows it, the model is left
    as it is, and its name says why. Otherwise raises EngineError, MissingExtraError, or what a damaged recording
    raises where the gate has to run first.
    """
    if settings.engine.kind == "torch":
        return
    stages = model.stages
    reason = attempt(partial(_put_in_place, model, settings), settings)
    if reason is not None:
        use_torch(model, stages, settings, reason)


def attempt(put_in_place: Callable[[], None], settings: Settings) -> EngineError | None:
    """None once that is done; where it fails and torch may serve, why. It is nowhere held then what failed.

    Raises what failed where `engine.fallback` is off, as an EngineError if it is none of this package's.
    """
    try:
        put_in_place()
        return None
    except FAILURES as error:
        if settings.engine.fallback:
            return engine_failure(error, LOADING)
        if isinstance(error, Sam3NodeError):
            raise
        raise engine_failure(error, LOADING) from error


def use_torch(model: TrackerModel, stages: Stages, settings: Settings, reason: EngineError) -> None:
    """Let the model's own torch stages serve, in the place of what cannot; its name says why."""
    _log.warning("engines cannot serve, torch does: %s", reason)
    model.stages, model.static_shapes = stages, settings.model.compile
    model.name = f"{model.name} (torch: {brief(reason)})"
    if model.device.type == "cuda":
        torch.cuda.empty_cache()


def check(settings: Settings, source: str | Path | None = None) -> Report:
    """Judge the engines that `settings` ask for by the gate; the report is kept beside them.

    source: a recording, a video or a folder of images, the bundled recording if left out. Raises EngineError where
    there are no such engines or they do not run here, MissingExtraError, and CameraError or BagError for the source.
    """
    wanted = settings.model
    with telling_out_of_memory(EngineError, f"while {wanted.name} was loaded"):
        model = load_tracker(
            wanted.name, device=wanted.device, dtype=wanted.dtype, image_size=wanted.image_size
        )
    return judge(_open(model, settings), settings, source or TABLETOP)


def require_gpu(device: torch.device) -> None:
    """Raise EngineError unless a model's device can have engines."""
    if device.type != "cuda":
        raise EngineError(
            f"no GPU for engines: expected --model.device on CUDA, found {device}; use --engine.kind torch or inductor"
        )


def _put_in_place(model: TrackerModel, settings: Settings) -> None:
    opened = _open(model, settings)
    require_passed(opened, settings)
    model.stages = fit(opened.runs, opened.ports, stages_of(model))
    model.static_shapes = True  # engines read the whole bank


def _open(model: TrackerModel, settings: Settings) -> Opened:
    """Load the engines onto the model's device."""
    compiled = settings.engine.kind == INDUCTOR
    if not compiled:
        require_gpu(model.device)
    built = EngineStore(settings.engine.folder).find(identity_of(model, settings))
    ports = stages_of(model, dtype=arithmetic(settings.engine.precision))
    run = InductorRun if compiled else TensorRTRun
    with telling_out_of_memory(EngineError, "while engines were loaded"):
        runs = Stages(*(run(built.plan(name), ports[name], model.device) for name in STAGES))
    return Opened(built, runs, ports)


def require_passed(opened: Opened, settings: Settings, source: str | Path = TABLETOP) -> None:
    """Raise EngineError unless the gate has passed these very plans by these thresholds, or does so now."""
    report = read_report(opened.built)
    if report is None:
        _log.info("engines %s have not been judged yet: the gate runs", opened.built.folder.name)
        report = judge(opened, settings, source)
    refusal = by_thresholds(report, settings.engine).refusal()
    if refusal is not None:
        raise EngineError(f"engines refused by the gate: {refusal}; {CHECK}")


def by_thresholds(report: Report, engine: EngineSettings) -> Report:
    """The same figures, judged by the thresholds of `engine`."""
    return replace(report, min_cosine=engine.min_cosine, min_iou=engine.min_iou)


def read_report(built: Built) -> Report | None:
    """The gate's report that is kept beside engines; None where it is absent, damaged, or of other plans."""
    path = built.folder / REPORT
    try:
        report = Report.from_json(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        return None
    except (OSError, EngineError) as error:
        _log.warning("%s is passed over: %s", path, error)
        return None
    return report if report.plans == built.manifest.plans else None


def judge(opened: Opened, settings: Settings, source: str | Path = TABLETOP) -> Report:
    """Compare engines with the model in float32 on a clip of a source, and keep the report beside them."""
    wanted, engine = settings.model, settings.engine
    frames = list(sample_images(source, CLIP_FRAMES, CLIP_STEP))
    with telling_out_of_memory(EngineError, "while engines were compared with torch in float32"):
        reference = load_tracker(
            wanted.name, device=wanted.device, dtype=torch.float32, image_size=wanted.image_size
        )
        dtype, thresholds = arithmetic(engine.precision), (engine.min_cosine, engine.min_iou)
        likeness = partial(_likeness, opened, settings)
        report = compare(reference, opened.runs, frames, *thresholds, dtype=dtype, likeness=likeness)
    report = replace(report, plans=opened.built.manifest.plans)
    write_report(opened.built, report)
    return report


def _likeness(opened: Opened, settings: Settings, name: str) -> nn.Module | None:
    """Torch in the arithmetic of the engine of this stage; None where it is not known how its encoder became FP8."""
    engine, wanted = settings.engine, settings.model
    dtype = arithmetic(engine.precision)
    model = load_tracker(wanted.name, device=wanted.device, dtype=dtype, image_size=wanted.image_size)
    if engine.precision == FP8 and name == "encode":
        kept = Quantisation.kept(opened.built)
        return quantised(model, kept.scales, kept.recipe) if kept else None
    return stages_of(model)[name].module


def write_report(built: Built, report: Report) -> None:
    """Keep the gate's report beside engines; raises OutputError."""
    path = built.folder / REPORT
    try:
        path.write_text(report.to_json(), encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error


def brief(error: Exception) -> str:
    """The first part of what an error says, short enough for every message to carry it."""
    said = str(error).split(";")[0]
    return said if len(said) <= MAX_REASON else said[: MAX_REASON - 1].rsplit(" ", 1)[0] + " …"
