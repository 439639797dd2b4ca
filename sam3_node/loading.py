"""Models for a node, as its settings name them, ready for the first frame."""

from __future__ import annotations

import torch

from .detection.base import Detector
from .detection.load import load_detector
from .engines.compiled import keep_compiled
from .engines.graphs import use_graphs
from .engines.serve import serve
from .models import TrackerModel, load_tracker
from .pipeline import Pipeline
from .prompts import FramePrompt
from .settings import DetectorSettings, EngineSettings, ModelSettings, Settings, TrackerSettings
from .types import Frame


def load_model(
    settings: ModelSettings, tracker: TrackerSettings, engine: EngineSettings | None = None
) -> TrackerModel:
    """Load the weights that `settings` name, run by what `engine` says, and warm them up where the first frames would
    be slow.

    Raises ModelError when they cannot serve, and without `engine.fallback` EngineError or MissingExtraError when
    engines cannot.
    """
    if settings.threads:
        torch.set_num_threads(settings.threads)
    model = load_tracker(
        settings.name,
        device=settings.device,
        dtype=settings.dtype,
        compile=settings.compile,
        image_size=settings.image_size,
    )
    chosen = engine or EngineSettings()
    serve(model, Settings(model=settings, tracker=tracker, engine=chosen))
    if settings.compile:
        keep_compiled(chosen.folder)
    if chosen.graphs:
        use_graphs(model)
    if model.can_track and (settings.compile or model.device.type == "cuda"):
        _warm_up(model, tracker)
    return model


def _warm_up(model: TrackerModel, settings: TrackerSettings) -> None:
    """Track on blank frames: one object, and for compiled stages as many as each batch size needs."""
    pipeline = Pipeline(model, settings, "warm-up")
    side = model.image_size
    blank = Frame("warm-up", 0, 0, side, side, "bgr8", bytes(side * side * 3))
    pipeline.step(blank)
    for count in range(1, settings.max_objects + 1 if model.static_shapes else 2):
        pipeline.add(FramePrompt(points=[(side / 2, side / 2)]))
        pipeline.step(blank)
        if count & (count - 1) == 0:
            pipeline.step(blank)


def load_finder(
    settings: DetectorSettings, model: ModelSettings, tracker: TrackerModel | None = None
) -> Detector | None:
    """The detector that `settings` name, None for none; on the device and in the arithmetic of the tracker.

    tracker: whose encoder it may share. Raises ModelError or VocabularyError when it cannot serve.
    """
    if settings.kind == "none":
        return None
    return load_detector(
        settings.kind,
        settings.name,
        vocabulary=settings.vocabulary,
        text_encoder=settings.text_encoder,
        device=model.device,
        dtype=model.dtype,
        tracker=tracker,
    )
