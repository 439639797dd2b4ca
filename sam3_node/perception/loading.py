"""Models for a node, as its settings name them, ready for the first frame."""

from __future__ import annotations

import torch

from ..detection.base import Detector
from ..detection.load import load_detector
from ..engines.detector_slot import serve_detector
from ..engines.graphs import use_graphs
from ..engines.inductor import keep_compiled
from ..engines.oom import STAGE_ERRORS, reraise_out_of_memory, to_engine_error
from ..engines.tracker_slot import serve_tracker, use_torch
from ..errors import ModelError
from ..models import TrackerModel, load_tracker
from ..models.sam.stages import Stages
from ..settings import DetectorSettings, EngineSettings, ModelSettings, Settings, TrackerSettings
from ..types import Frame
from .pipeline import Pipeline
from .prompts import FramePrompt

LESS = "end other processes that use it, or lower --tracker.max_objects, --tracker.bank_size or --model.image_size"


def load_model(
    settings: ModelSettings, tracker: TrackerSettings, engine: EngineSettings | None = None
) -> TrackerModel:
    """Load the weights that `settings` name, run by what `engine` says, and warm them up where the first frames would
    be slow.

    Raises ModelError when they cannot serve, also for want of memory, and without `engine.fallback` EngineError or
    MissingExtraError when engines cannot.
    """
    if settings.threads:
        torch.set_num_threads(settings.threads)
    wanted = Settings(model=settings, tracker=tracker, engine=engine or EngineSettings())
    with reraise_out_of_memory(ModelError, f"while {settings.name} was loaded", LESS):
        model = load_tracker(
            settings.name,
            device=settings.device,
            dtype=settings.dtype,
            compile=settings.compile,
            image_size=settings.image_size,
        )
        own = model.stages
        serve_tracker(model, wanted)
        if settings.compile:
            keep_compiled(wanted.engine.folder)
        if wanted.engine.graphs:
            use_graphs(model)
        if model.can_track and (settings.compile or model.device.type == "cuda"):
            warm_up(model, wanted, own)
    return model


def warm_up(model: TrackerModel, settings: Settings, own: Stages) -> None:
    """Track on blank frames, so that all that is made at first use is there: kernels, contexts, CUDA graphs, memory.

    own: the model's torch stages; they take the place of others that fail here, and the model's name says why. Raises
    EngineError where `engine.fallback` is off, and whatever torch raises where its own stages fail.
    """
    try:
        _track_blanks(model, settings.tracker)
        return
    except STAGE_ERRORS as error:
        if model.stages is own:
            raise
        reason = to_engine_error(error, "on the first frames")
        if not settings.engine.fallback:
            raise reason from error
    use_torch(model, own, settings, reason)  # only now is nothing held of what failed
    _track_blanks(model, settings.tracker)


def _track_blanks(model: TrackerModel, settings: TrackerSettings) -> None:
    """One object, and for stages of fixed shapes as many as each batch size needs."""
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
    settings: DetectorSettings,
    model: ModelSettings,
    tracker: TrackerModel | None = None,
    engine: EngineSettings | None = None,
) -> Detector | None:
    """The detector that `settings` name, None for none; on the device and in the arithmetic of the tracker.

    tracker: whose encoder it may share. engine: what runs it. Raises ModelError or VocabularyError when it cannot
    serve, and without `engine.fallback` EngineError or MissingExtraError when its engine cannot.
    """
    if settings.kind == "none":
        return None
    with reraise_out_of_memory(ModelError, f"while the detector {settings.name} was loaded", LESS):
        detector = load_detector(
            settings.kind,
            settings.name,
            vocabulary=settings.vocabulary,
            text_encoder=settings.text_encoder,
            device=model.device,
            dtype=model.dtype,
            tracker=tracker,
        )
        serve_detector(detector, Settings(model=model, detector=settings, engine=engine or EngineSettings()))
    return detector
