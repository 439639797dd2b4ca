"""The engine of YOLO-World in the place of its network, once the gate has passed it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..bags.image_sampling import sample_images
from ..bags.native.labelled_clip import TABLETOP
from ..detection.base import Detector
from ..detection.load import VOCABULARY, load_detector
from ..detection.vocabulary import Vocabulary
from ..detection.yolo_world import YoloWorldDetector
from ..errors import EngineError
from ..models.pixels import letterbox
from ..models.sam.stages import Run
from ..models.yolo.network import YoloWorld, anchors
from ..models.yolo.weights import load_yolo_world
from ..settings import DetectorSettings, Settings
from .detector import (
    DETECT,
    PHRASES,
    FixedPhrases,
    arithmetic_of,
    detector_identity,
    filled,
    folder_of,
    stage_of,
)
from .oom import telling_out_of_memory
from .report import Report
from .slot import (
    CHECK,
    CLIP_FRAMES,
    CLIP_STEP,
    attempt,
    brief,
    by_thresholds,
    read_report,
    require_gpu,
    write_report,
)
from .specs import StageSpec
from .store import Built, EngineStore
from .tensorrt.run import TensorRTRun
from .validation import StageComparator, without_tf32

USUAL = ("person", "cup", "bottle", "chair")  # what is looked for while judging, where no other name is known
_log = logging.getLogger(__name__)


class Opened(NamedTuple):
    """An engine on the device, not yet judged; the ports of `stage` are its own."""

    built: Built
    run: Run
    stage: StageSpec


def serve_detector(detector: Detector, settings: Settings) -> None:
    """Put the engine that `settings` ask for in the place of the network of YOLO-World; other detectors have none.

    It falls back alone, and the detector's name says why; see `serve`.
    """
    if settings.engine.kind != "tensorrt" or not isinstance(detector, YoloWorldDetector):
        return
    reason = attempt(partial(_put_in_place, detector, settings), settings)
    if reason is not None:
        _log.warning("the detector's engine cannot serve, torch does: %s", reason)
        detector.network = detector.model
        detector.name = f"{detector.name} (torch: {brief(reason)})"


def check_detector(settings: Settings, source: str | Path | None = None) -> Report:
    """Judge the engine of the detector that `settings` ask for; the report is kept beside it. See `check`."""
    wanted = settings.detector
    with telling_out_of_memory(EngineError, f"while {wanted.name} was loaded"):
        detector = load_detector(
            wanted.kind,
            wanted.name,
            vocabulary=wanted.vocabulary,
            text_encoder=wanted.text_encoder,
            device=settings.model.device,
            dtype=settings.model.dtype,
        )
    assert isinstance(detector, YoloWorldDetector)
    return judge_detector(_open(detector, settings), detector, settings, source or TABLETOP)


def judge_detector(
    opened: Opened, detector: YoloWorldDetector, settings: Settings, source: str | Path = TABLETOP
) -> Report:
    """Compare an engine with the network in float32 on a clip of a source, and keep the report beside it."""
    frames = list(sample_images(source, CLIP_FRAMES, CLIP_STEP))
    text = detector.prepare(names_for(settings.detector)).vectors.float()
    with telling_out_of_memory(EngineError, "while the detector's engine was compared with torch in float32"):
        reference = load_yolo_world(folder_of(settings.detector), device=text.device, dtype="float32")
        report = compare_detector(
            reference, opened.run, opened.stage, frames, text, settings.engine.min_cosine
        )
    report = replace(report, plans=opened.built.manifest.plans)
    write_report(opened.built, report)
    return report


@without_tf32()
@torch.inference_mode()
def compare_detector(
    reference: YoloWorld,
    run: Run,
    stage: StageSpec,
    frames: Sequence[npt.NDArray[np.uint8]],
    text: Tensor,
    min_cosine: float,
) -> Report:
    """Judge `run`, whose ports are `stage`'s, by the network in float32.

    frames: BGR uint8 [h, w, 3] each. text: vectors [K, D] of 1 to PHRASES phrases. Of boxes the distances from their
    anchors are compared, where they lie on the frame being the same for all networks. Raises EngineError for no frames.
    """
    if not frames:
        raise EngineError("expected frames to judge the detector's engine by, found none")
    judge = StageComparator(stage, _by_distance(reference), _by_distance(run))
    for judge.frame, image in enumerate(frames):
        pixels, _ = letterbox(image, reference.config.image_size, device=text.device)
        judge(pixels, filled(text))
    faults = (judge.fault,) if judge.fault else ()
    return Report(min_cosine, 0.0, len(frames), tuple(judge.figures()), None, faults, tracked=False)


def names_for(settings: DetectorSettings) -> tuple[str, ...]:
    """What to look for while judging: the prompts, else the first names of the vocabulary, else usual ones."""
    file = settings.vocabulary or folder_of(settings) / VOCABULARY
    known = Vocabulary.load(file).phrases if not settings.prompts and file.is_file() else USUAL
    return (settings.prompts or known)[:PHRASES]


def _by_distance(run: Run) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def relative(pixels: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        boxes, scores = run(pixels, text)
        centres, _ = anchors(pixels.shape[-2:], pixels.device)
        return boxes - centres.repeat(1, 2), scores

    return relative


def _put_in_place(detector: YoloWorldDetector, settings: Settings) -> None:
    opened = _open(detector, settings)
    report = read_report(opened.built)
    if report is None:
        _log.info("the engine %s has not been judged yet: the gate runs", opened.built.folder.name)
        report = judge_detector(opened, detector, settings)
    refusal = by_thresholds(report, settings.engine).refusal()
    if refusal is not None:
        raise EngineError(f"the detector's engine is refused by the gate: {refusal}; {CHECK}")
    opened.run(*opened.stage.examples())  # what fails then does so now, and not on a frame
    detector.network = FixedPhrases(opened.run, opened.stage, detector.model)


def _open(detector: YoloWorldDetector, settings: Settings) -> Opened:
    """Load the engine onto the detector's device."""
    net = detector.model
    device = net.backbone.stem.conv.weight.device
    require_gpu(device)
    built = EngineStore(settings.engine.folder).find(detector_identity(settings, net.config.image_size))
    stage = stage_of(net, arithmetic_of(settings))
    with telling_out_of_memory(EngineError, "while the detector's engine was loaded"):
        return Opened(built, TensorRTRun(built.plan(DETECT), stage, device), stage)
