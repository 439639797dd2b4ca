"""Load the models that the settings name, install their engines, and warm up what the first frames would wait for."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import torch

from ..detection.detectors import Detector
from ..engines.detector import choose_phrases, load_chosen, serve_detector
from ..engines.engine_store import choose_model_dtype, identify_setup
from ..engines.fast_torch import has_open_dtype, load_by_accuracy_check, serve_fast_torch, serve_kernels
from ..engines.inductor import CompiledArtifacts, keep_compiled, use_graphs
from ..engines.oom import STAGE_ERRORS, find_device_error, reraise_out_of_memory, to_engine_error
from ..engines.options import resolve
from ..engines.slot import serve_tracker, use_torch
from ..errors import EngineError, ModelError, RequestError, SettingsError
from ..models import TrackerModel, load_tracker
from ..models.sam.stages import Stages
from ..settings import DetectorSettings, EngineSettings, ModelSettings, Settings, TrackerSettings
from ..types import Frame, Mask
from ..wire.frame_prompt import FramePrompt
from .pipeline import Pipeline

_log = logging.getLogger(__name__)

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
    settings = Settings(
        model=model_settings,
        tracker=tracker,
        engine=engine or EngineSettings(),
        detector=DetectorSettings(kind="none"),
    )
    return load_models(settings)[0]


def load_models(settings: Settings) -> tuple[TrackerModel, Detector | None]:
    """Load the tracker as `load_model` does, and the detector as `load_configured_detector` does.

    The detector is loaded before a gate or a warm-up runs the tracker: one that shares its encoder adds an output to
    it, and the encoder would be compiled or captured again.
    """
    # each `auto` becomes a default, or the value that a tuning has found best on this machine
    settings = resolve(settings)
    begin_s = time.monotonic()
    hint = f"while {settings.model.name} was loaded"
    with reraise_out_of_memory(ModelError, hint, MEMORY_HINT):
        model = _load_torch(settings)
    # before the tracker runs: see above
    detector = load_configured_detector(settings.detector, settings.model, model, settings.engine)
    with reraise_out_of_memory(ModelError, hint, MEMORY_HINT), _keeping_artifacts(settings):
        # they stay, in case that the engines fail on the first frames
        torch_stages = model.stages
        _serve(model, settings)
        if model.capabilities.needs_warm_up and (settings.model.compile or model.device.type == "cuda"):
            warm_up(model, settings, torch_stages)
            if detector is not None:
                _detect_on_blank_frame(detector, model, settings)
    _log.info("%s is ready after %.1f s on %s", model.name, time.monotonic() - begin_s, model.device)
    return model, detector


def _load_torch(settings: Settings) -> TrackerModel:
    """Load the tracker with its torch stages."""
    model_settings = settings.model
    if model_settings.threads:
        torch.set_num_threads(model_settings.threads)
    if settings.model.compile is True:
        keep_compiled(settings.engine.folder)

    def load(dtype: str | torch.dtype) -> TrackerModel:
        return load_tracker(
            model_settings.name,
            device=model_settings.device,
            dtype=dtype,
            compile=model_settings.compile is True,
            image_size=model_settings.image_size,
        )

    model = (
        load_by_accuracy_check(load, settings)
        if has_open_dtype(settings)
        else load(choose_model_dtype(settings))
    )
    _use_read(model, settings)
    return model


def _serve(model: TrackerModel, settings: Settings) -> None:
    """Put engines, faster stages and CUDA graphs in the place of the tracker's torch stages, as the settings say."""
    serve_tracker(model, settings)
    # before the encoder in FP8, whose layers round by a kernel
    serve_kernels(model, settings)
    serve_fast_torch(model, settings)
    # last, because a graph captures the stages that were put in place above
    if settings.engine.graphs:
        use_graphs(model)


def load_to_serve(settings: Settings) -> TrackerModel:
    """Load the tracker alone, as it would serve; nothing is warmed up."""
    with reraise_out_of_memory(ModelError, f"while {settings.model.name} was loaded", MEMORY_HINT):
        model = _load_torch(settings)
        _serve(model, settings)
    return model


@contextmanager
def _keeping_artifacts(settings: Settings) -> Iterator[None]:
    """Load what torch compiled for these weights before, and keep what the block compiles."""
    artifacts = None
    if settings.model.compile is True:
        with suppress(EngineError):  # of weights that are no files
            artifacts = CompiledArtifacts(settings.engine.folder, identify_setup(settings))
    if artifacts:
        artifacts.load()
    yield
    if artifacts:
        artifacts.save()


def _use_read(model: TrackerModel, settings: Settings) -> None:
    """Let the model attend to memories as the settings say. Raises SettingsError for an approximation with engines."""
    method = settings.tracker.read
    kind = settings.engine.kind
    if method != "exact" and kind != "torch":
        raise SettingsError(
            f"tracker.read {method}: expected engine.kind torch, found {kind}, whose engines read exactly; use "
            "--tracker.read exact"
        )
    model.use_read(method)


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
    use_torch(model, torch_stages, reason)
    _track_blank_frames(model, settings.tracker)


def _track_blank_frames(model: TrackerModel, settings: TrackerSettings) -> None:
    """Prompt of each kind, and track one object. Where more objects run other code, track more."""
    pipeline = Pipeline(model, settings, "warm-up")
    pipeline.prompting.warm_up_reads()
    side = model.image_size
    blank = Frame("warm-up", 0, 0, side, side, "bgr8", bytes(side * side * 3))
    point = FramePrompt(points=[(side / 2, side / 2)])
    pipeline.step(blank)
    # each kind of prompt runs other kernels; an object that is removed again takes no slot below
    for prompt in (
        FramePrompt(box=(0, 0, side / 2, side / 2)),
        FramePrompt(mask=Mask.from_full(np.eye(side, dtype=np.bool_))),
    ):
        pipeline.remove(pipeline.add(prompt, seq=blank.seq).id)
    plan = pipeline.prompting.plan_warm_up(settings.max_objects)
    for count in range(1, plan.counts[-1] + 1):
        pipeline.add(point)
        if count in plan.counts:
            pipeline.step(blank)
        # tracks it: with the next object, a stage that fails would remove that one, too
        if count == 1:
            pipeline.step(blank)
    # an object is tracked on the frame after the one on which it enters
    pipeline.step(blank)
    if plan.refills:
        pipeline.remove(pipeline.objects[0].id)
        pipeline.add(point)
        for _ in range(2):
            pipeline.step(blank)


@torch.inference_mode()
def _detect_on_blank_frame(detector: Detector, model: TrackerModel, settings: Settings) -> None:
    """Search a blank frame for one phrase, so that the detector's kernels and memory exist before a real frame."""
    image = np.zeros((model.image_size, model.image_size, 3), dtype=np.uint8)
    with suppress(RequestError):  # a phrase that it does not know is refused where the prompts are set
        query = detector.prepare(choose_phrases(settings.detector)[:1])
        detector.detect(image, query, 0.5, model.encode(model.preprocess(image)).trunk)


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
        detector = load_chosen(settings, model, tracker)
        serve_detector(detector, Settings(model=model, detector=settings, engine=engine or EngineSettings()))
    return detector
