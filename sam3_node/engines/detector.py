"""Run YOLO-World's network as an engine, for square frames of one size and a fixed number of phrases.

The detector's engine slot lets it run instead of torch's network.
"""

import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..detection.detectors import NANO, VOCABULARY, Detector
from ..detection.loading import load_detector
from ..detection.vocabulary import Vocabulary
from ..detection.yolo_world import YoloWorldDetector
from ..errors import EngineError
from ..models import TrackerModel
from ..models.pixels import letterbox
from ..models.sam.stages import Run
from ..models.yolo.network import STRIDES, Detections, YoloWorld, anchors, load_yolo_world
from ..settings import DetectorSettings, ModelSettings, Settings
from ..types import Image
from . import validation
from .engine_store import EngineKey, EngineStore, StoredEngine, checkpoint_digest, describe_tensorrt
from .export import BuildStep, ReportProgress, export, ignore_progress
from .oom import reraise_out_of_memory
from .slot import CheckClip, EngineSlot, LoadedEngines, require_gpu, shorten_reason
from .specs import StageSpec, TensorSpec
from .tensorrt.builder import LOCAL, build
from .tensorrt.runtime import TensorRTRun

PHRASES = 16
"""Phrases that an engine takes at once. YOLO-World gives each box to the phrase that fits best, and a phrase given
twice changes nothing, so fewer phrases are padded by repeating one. Torch runs with more phrases."""
DETECT = "detect"


class FixedPhrases:
    """A replacement for YoloWorld: `run` looks for up to PHRASES phrases, the network itself for more."""

    def __init__(self, run: Run, stage: StageSpec, net: YoloWorld) -> None:
        self.run = run
        self.stage = stage
        self.net = net

    def __call__(self, pixels: Tensor, text: Tensor) -> Detections:
        """Detect on RGB pixels [1, 3, S, S] in 0..1 with vectors [K, D], as YoloWorld does; raise what `run` raises."""
        if len(text) > PHRASES:
            detections: Detections = self.net(pixels, text)
            return detections
        boxes, scores = self.run(pixels, pad_phrases(text).to(self.stage.inputs[1].dtype))
        # the other columns belong to the padding, which repeats the first phrase
        return Detections(boxes, scores[..., : len(text)])


def pad_phrases(text: Tensor) -> Tensor:
    """Return vectors of PHRASES phrases [PHRASES, D]: the 1 to PHRASES vectors of `text`, then repeats of the first."""
    return torch.cat([text, text[:1].expand(PHRASES - len(text), -1)])


def specify_network(net: YoloWorld, dtype: torch.dtype | None = None) -> StageSpec:
    """Specify YOLO-World for frames letterboxed into the square that its weights were trained at, and PHRASES phrases.

    The vectors of the phrases are an input of each frame. dtype: of the vectors, and what an engine computes in; the
    network's own by default. The stage does not choose among overlapping boxes.
    """
    side = net.config.image_size
    # the network gives one box for each cell of each of its maps
    count = sum((side // stride) ** 2 for stride in STRIDES)
    number = dtype or net.backbone.stem.conv.weight.dtype
    inputs = (
        TensorSpec("pixels", (1, 3, side, side), torch.float32),
        TensorSpec("text", (PHRASES, net.config.text_channels), number),
    )
    outputs = (
        TensorSpec("boxes", (1, count, 4), torch.float32),
        TensorSpec("scores", (1, count, PHRASES), torch.float32),
    )
    return StageSpec(DETECT, net, inputs, outputs)


def resolve_detector_dtype(settings: Settings) -> torch.dtype:
    """Return the dtype of the engine: float32 where engine.precision is, else float16.

    Not bfloat16, because the exporter joins its convolutions and batch norms as float32.
    """
    return torch.float32 if settings.engine.precision == "float32" else torch.float16


def resolve_folder(settings: DetectorSettings) -> Path:
    """Return the folder of the weights that `detector.name` names."""
    # the same word may mean something else to a detector of another package
    is_bundled = settings.kind == "yolo-world" and settings.name == "nano"
    return NANO if is_bundled else Path(settings.name)


def compute_detector_key(settings: Settings, image_size: int, gpu: str = LOCAL) -> EngineKey:
    """Build the key of the detector's engine; its `max_objects` is a number of phrases. See `compute_key`."""
    folder = resolve_folder(settings.detector)
    return EngineKey(
        model=f"{folder.resolve().name}-yolo-world",
        weights=checkpoint_digest(str(folder)),
        precision=str(resolve_detector_dtype(settings)).removeprefix("torch."),
        image_size=image_size,
        bank_size=0,
        max_objects=PHRASES,
        **describe_tensorrt(gpu),
    )


def build_detector(
    settings: Settings, gpu: str = LOCAL, progress: ReportProgress = ignore_progress
) -> StoredEngine:
    """Build and store the engine of the YOLO-World that `settings` name; see `build_engines`."""
    store = EngineStore(settings.engine.folder)
    folder = resolve_folder(settings.detector)
    with reraise_out_of_memory(EngineError, "while the detector's engine was built"):
        # in the engine's dtype, because a plan computes in the dtypes of the ONNX file
        net = load_yolo_world(folder, device=settings.model.device, dtype=resolve_detector_dtype(settings))
        stage = specify_network(net)
        key = compute_detector_key(settings, net.config.image_size, gpu)
        step = BuildStep("detect (by name)", progress, store.expected_s(key, DETECT))
        with tempfile.TemporaryDirectory(prefix="sam3_node_engine_") as temporary:
            path = export(stage, Path(temporary) / f"{DETECT}.onnx")
            plan = build(path, stage, key.gpu, progress=step.update)
        build_s = step.finish()
    return store.save(key, {DETECT: plan}, {DETECT: build_s})


DEFAULT_PHRASES = (
    "person",
    "cup",
    "bottle",
    "chair",
)  # for the accuracy check, where the settings give no others
_log = logging.getLogger(__name__)


def load_chosen(
    settings: DetectorSettings, model: ModelSettings, tracker: TrackerModel | None = None
) -> Detector:
    """Load the detector that `settings` name, on the device of `model`, in the dtype of the tracker if there is one.

    Raises ModelError or VocabularyError.
    """
    return load_detector(
        settings.kind,
        settings.name,
        vocabulary=settings.vocabulary,
        text_encoder=settings.text_encoder,
        text_score=settings.text_score,
        device=model.device,
        dtype=tracker.dtype if tracker else model.dtype,
        tracker=tracker,
    )


def serve_detector(detector: Detector, settings: Settings) -> None:
    """Let the engine that `settings` ask for run instead of YOLO-World's network; other detectors have no engine.

    If it cannot serve, only the detector falls back to torch, not the tracker, and the detector's name says why. See
    `EngineSlot.serve`.
    """
    if settings.engine.kind == "tensorrt" and isinstance(detector, YoloWorldDetector):
        DetectorSlot(detector, settings).serve()


def check_detector(settings: Settings, source: str | Path | None = None) -> validation.Report:
    """Run the accuracy check on the detector's engine of `settings`, and store its report; see `EngineSlot.check`."""
    with reraise_out_of_memory(EngineError, f"while {settings.detector.name} was loaded"):
        detector = load_chosen(settings.detector, settings.model)
    assert isinstance(detector, YoloWorldDetector)
    return DetectorSlot(detector, settings).check(source)


class DetectorSlot(EngineSlot):
    """The slot of YOLO-World's network."""

    subject = "the detector's engine"

    def __init__(
        self, detector: YoloWorldDetector, settings: Settings, clock: validation.Clock = validation.read_clock
    ) -> None:
        super().__init__(settings, clock)
        self.detector = detector

    @property
    def _device(self) -> torch.device:
        return self.detector.model.backbone.stem.conv.weight.device

    def compute_key(self) -> EngineKey:
        require_gpu(self._device)
        return compute_detector_key(self.settings, self.detector.model.config.image_size)

    def load(self, stored: StoredEngine) -> LoadedEngines:
        spec = specify_network(self.detector.model, resolve_detector_dtype(self.settings))
        run = TensorRTRun(stored.read_plan(DETECT), spec, self._device, kernels=stored.kernels_path(DETECT))
        return LoadedEngines(stored, {DETECT: run}, {DETECT: spec})

    def compare(self, engines: LoadedEngines, clip: CheckClip) -> validation.Report:
        # the reference computes in float32; the comparator casts the vectors for the engine
        text = self.detector.prepare(choose_phrases(self.settings.detector)).vectors.float()
        folder = resolve_folder(self.settings.detector)
        reference = load_yolo_world(folder, device=text.device, dtype="float32")
        run = engines.runs[DETECT]
        spec = engines.specs[DETECT]
        report = compare_detector(reference, run, spec, clip.frames, text, self.settings.engine.min_cosine)
        own = self.detector.model
        # the time includes what FixedPhrases adds, as it will on a frame
        network = FixedPhrases(run, spec, own)
        return replace(report, times=time_detector(network, own, clip.frames, text, self.clock))

    def install(self, engines: LoadedEngines) -> None:
        run = engines.runs[DETECT]
        spec = engines.specs[DETECT]
        run(*spec.examples())  # so that an engine that fails does so now, not on a frame
        self.detector.network = FixedPhrases(run, spec, self.detector.model)

    def fall_back(self, reason: EngineError) -> None:
        _log.warning("the detector's engine cannot serve, torch does: %s", reason)
        self.detector.network = self.detector.model
        self.detector.name = f"{self.detector.name} (torch: {shorten_reason(reason)})"


@validation.without_tf32()
@torch.inference_mode()
def compare_detector(
    reference: YoloWorld,
    run: Run,
    spec: StageSpec,
    frames: Sequence[Image],
    text: Tensor,
    min_cosine: float,
) -> validation.Report:
    """Compare `run`, an engine of spec `spec`, with the network in float32.

    frames: BGR uint8 [h, w, 3] each. text: vectors [K, D] of 1 to PHRASES phrases. Boxes are compared as distances from
    their anchors, because the positions of the anchors are the same for all networks. Raises EngineError for no frames.
    """
    if not frames:
        raise EngineError("expected frames to compare the detector's engine on, found none")
    comparator = validation.StageComparator(spec, _relative_to_anchors(reference), _relative_to_anchors(run))
    for comparator.frame, pixels in enumerate(_fit_frames(frames, reference, text.device)):
        comparator(pixels, pad_phrases(text))
    faults = (comparator.fault,) if comparator.fault else ()
    # a detector has no masks, so no IoU is required
    return validation.Report(
        min_cosine, 0.0, len(frames), tuple(comparator.figures()), None, faults, tracked=False
    )


@torch.inference_mode()
def time_detector(
    network: Run, own: YoloWorld, frames: Sequence[Image], text: Tensor, clock: validation.Clock
) -> tuple[validation.StageTime, ...]:
    """Time a network and torch's own, in turns, on frames, BGR uint8 [h, w, 3] each, with vectors [K, D] of phrases."""
    text = text.to(own.backbone.stem.conv.weight.dtype)
    pair = [validation.TimedStage(run, partial(clock, text.device)) for run in (network, own)]
    times: list[list[float]] = []
    # both run on each frame in turn, so that a change of the machine's load meets both
    for pixels in _fit_frames(frames, own, text.device):
        for stage in pair:
            stage(pixels, text)
        times.append([stage.take_ms() for stage in pair])
    return (validation.StageTime(DETECT, *np.median(times, axis=0).tolist()),)


def choose_phrases(settings: DetectorSettings) -> tuple[str, ...]:
    """Return phrases for the accuracy check: the prompts, else the first of the vocabulary, else DEFAULT_PHRASES."""
    if settings.prompts:
        return settings.prompts[:PHRASES]
    file = settings.vocabulary or resolve_folder(settings) / VOCABULARY
    phrases = Vocabulary.load(file).phrases if file.is_file() else DEFAULT_PHRASES
    return phrases[:PHRASES]


def _fit_frames(frames: Sequence[Image], net: YoloWorld, device: torch.device) -> Iterator[Tensor]:
    """Yield the input of the network for each frame."""
    for image in frames:
        yield letterbox(image, net.config.image_size, device=device, resize=net.config.resize)[0]


def _relative_to_anchors(run: Run) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def run_relative(pixels: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        boxes, scores = run(pixels, text)
        # the positions of the anchors would dominate the cosine and hide differences of the boxes
        centres, _ = anchors(pixels.shape[-2:], pixels.device)
        return boxes - centres.repeat(1, 2), scores

    return run_relative
