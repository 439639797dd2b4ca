"""Load the tracker and the detector that the settings name, and warm them up for the first frame."""

from __future__ import annotations

import torch

from ..detection.base import Detector
from ..detection.load import load_detector
from ..engines.auto_dtype import has_open_dtype, load_by_gate
from ..engines.detector import serve_detector
from ..engines.inductor import keep_compiled, use_graphs
from ..engines.oom import STAGE_ERRORS, find_device_error, reraise_out_of_memory, to_engine_error
from ..engines.store import choose_model_dtype
from ..engines.tracker_slot import serve_fast_torch, serve_tracker, use_torch
from ..errors import ModelError, SettingsError
from ..models import TrackerModel, load_tracker
from ..models.sam.stages import Stages
from ..settings import DetectorSettings, EngineSettings, ModelSettings, Settings, TrackerSettings
from ..types import Frame
from .pipeline import Pipeline
from .prompts import FramePrompt

MEMORY_HINT = (
    "stop other processes that use it, or lower --tracker.max_objects, --tracker.bank_size or "
    "--model.image_size"
)


def load_model(
    model_settings: ModelSettings, tracker: TrackerSettings, engine: EngineSettings | None = None
) -> TrackerModel:
    """Load the tracker, install the engine that `engine` selects, and warm up where the first frames would be slow.

    Where a detector may share the tracker's encoder, use `load_models`. Raises ModelError if the weights cannot be used
    or do not fit into memory. Without `engine.fallback`, raises EngineError or MissingExtraError if the engine cannot
    be used.
    """
    settings = Settings(model=model_settings, tracker=tracker, engine=engine or EngineSettings())
    model, torch_stages = _load_cold(settings)
    _warm_up_if_slow(model, settings, torch_stages)
    return model


def load_models(settings: Settings) -> tuple[TrackerModel, Detector | None]:
    """Load the tracker as `load_model` does, and the detector as `load_configured_detector` does.

    The tracker warms up after the detector is loaded. A detector that shares its encoder adds an output to it, and the
    first frame would have to wait until that is compiled or captured.
    """
    model, torch_stages = _load_cold(settings)
    detector = load_configured_detector(settings.detector, settings.model, model, settings.engine)
    _warm_up_if_slow(model, settings, torch_stages)
    return model, detector


def _load_cold(settings: Settings) -> tuple[TrackerModel, Stages]:
    """Load the tracker with its engine; return it, and its own torch stages."""
    model_settings = settings.model
    if model_settings.threads:
        torch.set_num_threads(model_settings.threads)

    def load(dtype: str | torch.dtype) -> TrackerModel:
        return load_tracker(
            model_settings.name,
            device=model_settings.device,
            dtype=dtype,
            compile=model_settings.compile,
            image_size=model_settings.image_size,
        )

    with reraise_out_of_memory(ModelError, f"while {model_settings.name} was loaded", MEMORY_HINT):
        model = (
            load_by_gate(load, settings) if has_open_dtype(settings) else load(choose_model_dtype(settings))
        )
        _use_read(model, settings)
        torch_stages = model.stages
        serve_tracker(model, settings)
        serve_fast_torch(model, settings)
        if model_settings.compile:
            keep_compiled(settings.engine.folder)
        if settings.engine.graphs:
            use_graphs(model)
    return model, torch_stages


def _use_read(model: TrackerModel, settings: Settings) -> None:
    """Let the model attend to memories as the settings say. Raises SettingsError for an approximation with engines."""
    method, kind = settings.tracker.read, settings.engine.kind
    if method != "exact" and kind != "torch":
        raise SettingsError(
            f"tracker.read {method}: expected engine.kind torch, found {kind}, whose engines read exactly; use "
            "--tracker.read exact"
        )
    model.use_read(method)


def _warm_up_if_slow(model: TrackerModel, settings: Settings, torch_stages: Stages) -> None:
    """Warm up where the first frames would be slow: with compiled stages, and on a GPU."""
    if model.has_memory and (settings.model.compile or model.device.type == "cuda"):
        with reraise_out_of_memory(ModelError, f"while {settings.model.name} was loaded", MEMORY_HINT):
            warm_up(model, settings, torch_stages)


def warm_up(model: TrackerModel, settings: Settings, torch_stages: Stages) -> None:
    """Track on blank frames, so that kernels, contexts, CUDA graphs and memory exist before the first real frame.

    If other stages than `torch_stages` fail here, `torch_stages` replace them, and the model's name states the
    reason. Raises EngineError instead if `engine.fallback` is off. Raises the error of torch if `torch_stages` fail.
    """
    try:
        _track_blank_frames(model, settings.tracker)
        return
    except STAGE_ERRORS as error:
        if model.stages is torch_stages:
            raise
        if lost := find_device_error(error):
            raise lost from error
        reason = to_engine_error(error, "on the first frames")
        if not settings.engine.fallback:
            raise reason from error
    # outside of the except block: the traceback, which holds the failed stages' memory, is released by now
    use_torch(model, torch_stages, settings, reason)
    _track_blank_frames(model, settings.tracker)


def _track_blank_frames(model: TrackerModel, settings: TrackerSettings) -> None:
    """Track one object; with static shapes, as many objects as each batch size needs."""
    pipeline = Pipeline(model, settings, "warm-up")
    pipeline.warm_up_reads()
    side = model.image_size
    blank = Frame("warm-up", 0, 0, side, side, "bgr8", bytes(side * side * 3))
    pipeline.step(blank)
    for count in range(1, settings.max_objects + 1 if model.static_shapes else 2):
        pipeline.add(FramePrompt(points=[(side / 2, side / 2)]))
        pipeline.step(blank)
        if count & (count - 1) == 0:  # a power of two: the next object needs the next batch size
            pipeline.step(blank)


def load_configured_detector(
    settings: DetectorSettings,
    model: ModelSettings,
    tracker: TrackerModel | None = None,
    engine: EngineSettings | None = None,
) -> Detector | None:
    """Load the detector that `settings` name, with the device and dtype of the tracker; None if `kind` is "none".

    tracker: the model whose encoder the detector may share. engine: selects the detector's engine. Raises ModelError
    or VocabularyError if the detector cannot be used. Without `engine.fallback`, raises EngineError or
    MissingExtraError if its engine cannot be used.
    """
    if settings.kind == "none":
        return None
    with reraise_out_of_memory(ModelError, f"while the detector {settings.name} was loaded", MEMORY_HINT):
        detector = load_detector(
            settings.kind,
            settings.name,
            vocabulary=settings.vocabulary,
            text_encoder=settings.text_encoder,
            device=model.device,
            dtype=model.dtype if tracker is None else tracker.dtype,
            tracker=tracker,
        )
        serve_detector(detector, Settings(model=model, detector=settings, engine=engine or EngineSettings()))
    return detector
