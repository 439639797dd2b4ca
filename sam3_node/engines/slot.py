"""The engine slot: the place where stored engines may run instead of torch, once the gate has passed them.

`EngineSlot` holds the steps that the tracker's and the detector's slots share. It opens the stored engines, runs the
gate unless its report is stored, and puts the engines in place. Where this fails, torch serves and says why, or the
error is raised.

The clip on which the gate compares: frames of a recording, with prompts of its objects where these are known.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from ..bags.bag import sample_images
from ..bags.native.reader import TABLETOP, LabelledClip
from ..errors import EngineError, OutputError, Sam3NodeError
from ..models.sam.stages import Run
from ..settings import EngineSettings, Settings
from ..tracking import ObjectPrompt
from ..types import Image
from .oom import STAGE_ERRORS, reraise_out_of_memory, to_engine_error
from .specs import StageSpec
from .store import EngineKey, EngineStore, StoredEngine
from .validation import Report

REPORT = "gate.json"
MAX_REASON_CHARS = 100
CHECK_HINT = "see `sam3-node engine check`"
_log = logging.getLogger(__name__)


class LoadedEngines(NamedTuple):
    """Engines on the device, not yet validated; `runs` and their `specs` by stage."""

    stored: StoredEngine
    runs: Mapping[str, Run]
    specs: Mapping[str, StageSpec]


class EngineSlot(ABC):
    """A place where engines may run instead of torch. It holds no engines itself, so that failed ones are freed."""

    subject: ClassVar[str]
    """Name of the engines in messages, a noun without a verb."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @abstractmethod
    def require_device(self) -> None:
        """Raise EngineError unless the device can have engines."""

    @abstractmethod
    def compute_key(self) -> EngineKey:
        """Return the key that stored engines must match."""

    @abstractmethod
    def load(self, stored: StoredEngine) -> LoadedEngines:
        """Load engines onto the device."""

    @abstractmethod
    def compare(self, engines: LoadedEngines, clip: GateClip) -> Report:
        """Compare engines with torch in float32 on a clip."""

    @abstractmethod
    def install(self, engines: LoadedEngines) -> None:
        """Put engines in the place of torch."""

    @abstractmethod
    def fall_back(self, reason: EngineError) -> None:
        """Let torch serve, and say why."""

    def serve(self) -> None:
        """Put the stored engines in place, once the gate has passed them.

        Where they cannot serve and `engine.fallback` is on, torch serves and says why. Otherwise raises EngineError,
        MissingExtraError, or what a damaged recording raises where the gate has to run first.
        """
        reason = attempt(self._serve_engines, self.settings.engine)
        if reason is not None:
            self.fall_back(reason)

    def check(self, source: str | Path | None = None) -> Report:
        """Run the gate on a source, and store the report beside the engines.

        source: a recording, a video or a folder of images; the bundled recording by default. Raises EngineError where
        there are no such engines or they do not run here, MissingExtraError, and CameraError or BagError for the
        source.
        """
        return self.run_gate(self.open(), source or TABLETOP)

    def open(self) -> LoadedEngines:
        """Find the stored engines, and load them onto the device."""
        self.require_device()
        stored = EngineStore(self.settings.engine.folder).find(self.compute_key())
        with reraise_out_of_memory(EngineError, f"while loading {self.subject}"):
            return self.load(stored)

    def require_passed(self, engines: LoadedEngines, source: str | Path = TABLETOP) -> None:
        """Raise EngineError unless the gate has passed these very plans by the present thresholds, or does so now."""
        report = read_report(engines.stored)
        if report is None:
            _log.info("the gate runs: no report yet on %s in %s", self.subject, engines.stored.folder.name)
            report = self.run_gate(engines, source)
        refusal = apply_thresholds(report, self.settings.engine).refusal()
        if refusal is not None:
            raise EngineError(f"{self.subject} refused by the gate: {refusal}; {CHECK_HINT}")

    def run_gate(self, engines: LoadedEngines, source: str | Path = TABLETOP) -> Report:
        """Compare engines with torch in float32 on a clip of a source, and store the report beside them."""
        clip = read_gate_clip(source)
        with reraise_out_of_memory(EngineError, f"while comparing {self.subject} with torch in float32"):
            report = self.compare(engines, clip)
        report = replace(report, plans=engines.stored.manifest.plans)
        write_report(engines.stored, report)
        return report

    def _serve_engines(self) -> None:
        engines = self.open()
        self.require_passed(engines)
        self.install(engines)


def attempt(serve: Callable[[], None], engine: EngineSettings) -> EngineError | None:
    """Put engines in place by `serve`; return the reason if that fails and torch may serve.

    The reason has no reference to the failed engines, so their memory is free when this returns. Without
    `engine.fallback`, raises the error, as an EngineError if it is none of this package's.
    """
    try:
        serve()
        return None
    except STAGE_ERRORS as error:
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
    return replace(report, min_cosine=engine.min_cosine, min_iou=engine.min_iou)


def read_report(stored: StoredEngine) -> Report | None:
    """Read the gate's report that is stored beside engines; None where it is absent, damaged, or of other plans."""
    path = stored.folder / REPORT
    try:
        report = Report.from_json(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        return None
    except (OSError, EngineError) as error:
        _log.warning("%s is ignored: %s", path, error)
        return None
    return report if report.plans == stored.manifest.plans else None


def write_report(stored: StoredEngine, report: Report) -> None:
    """Store the gate's report beside engines; raises OutputError."""
    path = stored.folder / REPORT
    try:
        path.write_text(report.to_json(), encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error


def shorten_reason(error: Exception) -> str:
    """Return the first part of an error's text, short enough to go into every message of a node."""
    text = str(error).split(";")[0]
    return text if len(text) <= MAX_REASON_CHARS else text[: MAX_REASON_CHARS - 1].rsplit(" ", 1)[0] + " …"


CLIP_FRAMES, CLIP_STEP = 16, 2


class GateClip(NamedTuple):
    """Frames, BGR uint8 [h, w, 3] each, and the boxes of the objects in view on the first.

    boxes: by the object's id (x0, y0, x1, y1) as fractions of the image's width and height; empty where nobody knows
    the objects.
    """

    frames: list[Image]
    boxes: dict[int, tuple[float, float, float, float]]

    def prompts(self, side: int) -> list[ObjectPrompt] | None:
        """Return a box prompt for each object, in pixels of a model's square image of `side`; None without boxes.

        Without boxes the reference looks for objects itself.
        """
        boxes = self.boxes.items()
        return [ObjectPrompt(key, box=[edge * side for edge in box]) for key, box in boxes] or None


def read_gate_clip(source: str | Path = TABLETOP) -> GateClip:
    """Read the first frames of a recording, a video or a folder of images; objects are known of the bundled recording.

    Raises CameraError or BagError for the source.
    """
    if Path(source) != TABLETOP:
        return GateClip(list(sample_images(source, CLIP_FRAMES, CLIP_STEP)), {})
    clip = LabelledClip.load(TABLETOP)
    frames = [clip.image(index * CLIP_STEP) for index in range(CLIP_FRAMES)]
    return GateClip(frames, {key: _bound(mask) for key, mask in clip.truth(0).items()})


def _bound(mask: np.ndarray) -> tuple[float, float, float, float]:
    """Return the tight box of a mask [h, w] as fractions of its width and height."""
    (height, width), (rows, columns) = mask.shape, mask.nonzero()
    x0, x1 = columns.min() / width, (columns.max() + 1) / width
    y0, y1 = rows.min() / height, (rows.max() + 1) / height
    return float(x0), float(y0), float(x1), float(y1)
