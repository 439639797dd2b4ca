"""Let stored engines run instead of torch, once they have passed the accuracy check.

`EngineSlot` holds the steps that the tracker's and the detector's slots share. It opens the stored engines, runs the
accuracy check on a clip unless its report is stored, and puts the engines in place. Where this fails, torch serves and
says why, or the error is raised. `TrackerSlot` is the slot of a tracker's four stages.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import nn

from ..bags.bag import sample_images
from ..bags.native.reader import TABLETOP, LabelledClip
from ..errors import EngineError, Sam3NodeError
from ..files import write_output
from ..models import TrackerModel
from ..models.pixels import mask_boxes
from ..models.sam.stages import Run, Stages
from ..settings import EngineSettings, Settings
from ..tracking import ObjectPrompt
from ..types import Image
from . import engine_store
from .inductor import INDUCTOR, InductorRun
from .oom import STAGE_ERRORS, reraise_out_of_memory, to_engine_error
from .quantize import Quantisation, quantise_encoder
from .specs import STAGES, StageSpec, tracker_stages
from .tensorrt.runtime import TensorRTRun, Workspace
from .validation import Clock, Report, compare_stages, fit_stages, read_clock

REPORT = "gate.json"
"""Name of the file with the report of the accuracy check."""
MAX_REASON_CHARS = 100
"""Characters of the reason for not serving, which is in the `model` field of every message."""
CLIP_FRAMES = 16
"""Frames of the clip on which engines are compared with torch."""
CLIP_STEP = 2
"""Step between these frames in their recording: every second frame is used, so that objects move more."""
CHECK_HINT = "see `sam3-node engine check`"
_log = logging.getLogger(__name__)


class LoadedEngines(NamedTuple):
    """Engines on the device, not yet validated; `runs` and their `specs` by stage."""

    stored: engine_store.StoredEngine
    runs: Mapping[str, Run]
    specs: Mapping[str, StageSpec]


class EngineSlot(ABC):
    """What may run engines instead of torch. It holds no engines itself, so that failed ones are freed."""

    subject: ClassVar[str]
    """Name of the engines in messages, a noun without a verb."""

    def __init__(self, settings: Settings, clock: Clock = read_clock) -> None:
        self.settings = settings
        self.clock = clock

    @abstractmethod
    def compute_key(self) -> engine_store.EngineKey:
        """Return the key that stored engines must match. Raises EngineError unless the device can have engines."""

    @abstractmethod
    def load(self, stored: engine_store.StoredEngine) -> LoadedEngines:
        """Load engines onto the device."""

    @abstractmethod
    def compare(self, engines: LoadedEngines, clip: CheckClip) -> Report:
        """Compare engines with torch in float32 on a clip."""

    @abstractmethod
    def install(self, engines: LoadedEngines) -> None:
        """Let engines run instead of torch."""

    @abstractmethod
    def fall_back(self, reason: EngineError) -> None:
        """Let torch serve, and say why."""

    def serve(self) -> None:
        """Put the stored engines in place, once they have passed the accuracy check.

        Where they cannot serve and `engine.fallback` is on, torch serves and says why. Otherwise raises EngineError,
        MissingExtraError, or what a damaged recording raises where the accuracy check has to run first.
        """
        reason = attempt(self._serve_engines, self.settings.engine)
        if reason is not None:
            self.fall_back(reason)

    def check(self, source: str | Path | None = None) -> Report:
        """Run the accuracy check on a source, and store the report beside the engines.

        source: a recording, a video or a folder of images; the bundled recording by default. Raises EngineError where
        there are no such engines or they do not run here, MissingExtraError, and CameraError or BagError for the
        source.
        """
        return self.check_accuracy(self.open(), source or TABLETOP)

    def open(self) -> LoadedEngines:
        """Find the stored engines, and load them onto the device."""
        stored = engine_store.EngineStore(self.settings.engine.folder).find(self.compute_key())
        with reraise_out_of_memory(EngineError, f"while loading {self.subject}"):
            return self.load(stored)

    def require_passed(self, engines: LoadedEngines, source: str | Path = TABLETOP) -> None:
        """Raise EngineError unless these very plans pass the accuracy check by the present thresholds."""
        report = read_report(engines.stored)
        if report is None:
            _log.info("the gate runs: no report yet on %s in %s", self.subject, engines.stored.folder.name)
            report = self.check_accuracy(engines, source)
        # the stored figures outlast a change of the thresholds
        refusal = apply_thresholds(report, self.settings.engine).refusal()
        if refusal is not None:
            raise EngineError(f"{self.subject} refused by the gate: {refusal}; {CHECK_HINT}")

    def check_accuracy(self, engines: LoadedEngines, source: str | Path = TABLETOP) -> Report:
        """Compare engines with torch in float32 on a clip of a source, and store the report beside them."""
        clip = read_check_clip(source)
        with reraise_out_of_memory(EngineError, f"while comparing {self.subject} with torch in float32"):
            report = self.compare(engines, clip)
        # with the plans' digests, so that the report never speaks for another build
        report = replace(apply_thresholds(report, self.settings.engine), plans=engines.stored.manifest.plans)
        write_output(engines.stored.folder / REPORT, report.to_json().encode())
        return report

    def _serve_engines(self) -> None:
        engines = self.open()
        self.require_passed(engines)
        self.install(engines)


def serve_tracker(model: TrackerModel, settings: Settings) -> None:
    """Put the engines that `settings` ask for into `model.stages`, once they have passed the accuracy check.

    Torch still answers prompts. Where engines cannot serve and `engine.fallback` is on, the model keeps its stages and
    its name says why. See `EngineSlot.serve` for the errors.
    """
    if settings.engine.kind != "torch":
        TrackerSlot(model, settings).serve()


def check_tracker(settings: Settings, source: str | Path | None = None) -> Report:
    """Run the accuracy check on the engines of `settings`, and store its report beside them; see `EngineSlot.check`."""
    with reraise_out_of_memory(EngineError, f"while {settings.model.name} was loaded"):
        # in the dtype in which the model will serve
        model = engine_store.load_model_in(settings, engine_store.choose_model_dtype(settings))
    return TrackerSlot(model, settings).check(source)


def use_torch(model: TrackerModel, stages: Stages, reason: EngineError) -> None:
    """Let the model's own torch stages serve instead of engines that failed; the model's name says why."""
    _log.warning("engines cannot serve, torch does: %s", reason)
    # torch's stages take any number of objects
    model.serve_by(stages, few_shapes=False)
    model.use_kernels(False)
    model.name = f"{model.name} (torch: {shorten_reason(reason)})"
    # torch's allocator keeps the memory of the failed engines until it is told to free it
    if model.device.type == "cuda":
        torch.cuda.empty_cache()


class TrackerSlot(EngineSlot):
    """The slot of a tracker's four stages."""

    subject = "engines"

    def __init__(self, model: TrackerModel, settings: Settings, clock: Clock = read_clock) -> None:
        super().__init__(settings, clock)
        self.model = model
        # `install` replaces them
        self._torch_stages = model.stages

    def compute_key(self) -> engine_store.EngineKey:
        # packages also run on CPUs
        if self.settings.engine.kind != INDUCTOR:
            require_gpu(self.model.device)
        return engine_store.compute_key(self.model, self.settings)

    def load(self, stored: engine_store.StoredEngine) -> LoadedEngines:
        dtype = engine_store.resolve_dtype(self.settings.engine.arithmetic)
        specs = tracker_stages(self.model, dtype=dtype)
        device = self.model.device
        workspace = Workspace(device)  # of plans; packages have their own

        def load(name: str) -> Run:
            plan = stored.read_plan(name)
            if self.settings.engine.kind == INDUCTOR:
                return InductorRun(plan, specs[name], device)
            return TensorRTRun(plan, specs[name], device, workspace, stored.kernels_path(name))

        runs = {name: load(name) for name in STAGES}
        workspace.allocate()  # now, so that it is known whether it fits
        return LoadedEngines(stored, runs, specs)

    def compare(self, engines: LoadedEngines, clip: CheckClip) -> Report:
        engine = self.settings.engine
        reference = engine_store.load_model_in(self.settings, torch.float32)
        return compare_stages(
            reference,
            _list_runs(engines),
            clip.frames,
            engine.min_cosine,
            engine.min_iou,
            dtype=engine_store.resolve_dtype(engine.arithmetic),
            prompts=clip.prompts(reference.image_size),
            # another whole model, which is loaded only if the accuracy check refuses a stage
            find_module=partial(self._load_module, engines.stored),
            served=self.model,
            clock=self.clock,
        )

    def install(self, engines: LoadedEngines) -> None:
        stages = fit_stages(_list_runs(engines), engines.specs, self.model)
        # a plan makes a context for each number of objects, so they are padded to few sizes
        self.model.serve_by(stages, few_shapes=True)

    def fall_back(self, reason: EngineError) -> None:
        use_torch(self.model, self._torch_stages, reason)

    def _load_module(self, stored: engine_store.StoredEngine, name: str) -> nn.Module | None:
        """Load the torch module of a stage in the dtype of its engine, to compare layers.

        None for an FP8 encoder whose scales and recipe are not stored beside its engines.
        """
        precision = self.settings.engine.arithmetic
        model = engine_store.load_model_in(self.settings, engine_store.resolve_dtype(precision))
        if precision == engine_store.FP8 and name == "encode":
            quantisation = Quantisation.load(stored)
            return quantise_encoder(model, *quantisation) if quantisation else None
        return tracker_stages(model)[name].module


def _list_runs(engines: LoadedEngines) -> Stages:
    return Stages(*(engines.runs[name] for name in STAGES))


def attempt(serve: Callable[[], None], engine: EngineSettings) -> EngineError | None:
    """Put engines in place by `serve`; return the reason if that fails and torch may serve.

    The reason has no reference to the failed engines, so their memory is free when this returns. Without
    `engine.fallback`, raises the error, as an EngineError if it comes from outside this package.
    """
    try:
        serve()
        return None
    except STAGE_ERRORS as error:
        # an error of this package already says what to do
        if isinstance(error, Sam3NodeError) and not engine.fallback:
            raise
        reason = to_engine_error(error, "while they were loaded and compared")
        if not engine.fallback:
            raise reason from error
        return reason


def require_gpu(device: torch.device) -> None:
    """Raise EngineError unless a model's device can have TensorRT engines."""
    if device.type != "cuda":
        raise EngineError(
            f"no GPU for engines: expected --model.device on CUDA, found {device}; use --engine.kind torch or inductor"
        )


def apply_thresholds(report: Report, engine: EngineSettings) -> Report:
    """Return the same figures with the thresholds of `engine`."""
    return replace(report, min_cosine=engine.min_cosine, min_iou=engine.min_iou, max_time=engine.max_time)


def read_report(stored: engine_store.StoredEngine) -> Report | None:
    """Read the report of an accuracy check from beside engines; None where it is absent, damaged, or of other plans."""
    report = Report.load(stored.folder / REPORT)
    return report if report is not None and report.plans == stored.manifest.plans else None


def shorten_reason(error: Exception) -> str:
    """Return the first part of an error's text, short enough to go into every message of a node."""
    # the rest of a message is advice
    text = str(error).split(";")[0]
    return text if len(text) <= MAX_REASON_CHARS else text[: MAX_REASON_CHARS - 1].rsplit(" ", 1)[0] + " …"


class CheckClip(NamedTuple):
    """Frames, BGR uint8 [h, w, 3] each, and the boxes of the objects in view on the first.

    boxes: by the object's id (x0, y0, x1, y1) as fractions of the image's width and height; empty where the
    objects are unknown.
    """

    frames: list[Image]
    boxes: dict[int, tuple[float, float, float, float]]

    def prompts(self, side: int) -> list[ObjectPrompt] | None:
        """Return a box prompt for each object, in pixels of a model's square image of `side`; None without boxes.

        Without boxes the reference looks for objects itself.
        """
        boxes = self.boxes.items()
        return [ObjectPrompt(key, box=[edge * side for edge in box]) for key, box in boxes] or None


def read_check_clip(source: str | Path = TABLETOP) -> CheckClip:
    """Read the first frames of a recording, a video or a folder of images; objects are known of the bundled recording.

    Raises CameraError or BagError for the source.
    """
    if Path(source) != TABLETOP:
        return CheckClip(list(sample_images(source, CLIP_FRAMES, CLIP_STEP)), {})
    clip = LabelledClip.load(TABLETOP)
    frames = [clip.image(index * CLIP_STEP) for index in range(CLIP_FRAMES)]
    return CheckClip(frames, {key: _bound(mask) for key, mask in clip.truth(0).items()})


def _bound(mask: np.ndarray) -> tuple[float, float, float, float]:
    """Return the tight box of a mask [h, w] as fractions of its width and height."""
    height, width = mask.shape
    x0, y0, x1, y1 = mask_boxes(torch.from_numpy(mask)[None])[0].tolist()
    return x0 / width, y0 / height, x1 / width, y1 / height
