"""The detector as an engine: YOLO-World's network for square frames of one size and a fixed number of phrases."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor

from ..detection.load import NANO
from ..errors import EngineError
from ..models.sam.stages import Run
from ..models.yolo.network import Detections, YoloWorld
from ..models.yolo.weights import load_yolo_world
from ..settings import DetectorSettings, Settings
from .build_progress import BuildStep, ReportProgress, ignore_progress
from .export import export
from .key import checkpoint_digest
from .oom import reraise_out_of_memory
from .specs import StageSpec, detector_stage
from .store import EngineKey, EngineStore, StoredEngine
from .tensorrt.build import build
from .tensorrt.library import LOCAL, find_library, find_target

PHRASES = 16
"""Phrases that an engine takes at once. YOLO-World gives each box to the phrase that fits best, and a phrase given
twice changes nothing, so fewer phrases are padded by repeating one. Torch runs with more phrases."""
DETECT = "detect"


class FixedPhrases:
    """A replacement for YoloWorld: `run` looks for up to PHRASES phrases, the network itself for more."""

    def __init__(self, run: Run, stage: StageSpec, net: YoloWorld) -> None:
        self.run, self.stage, self.net = run, stage, net

    def __call__(self, pixels: Tensor, text: Tensor) -> Detections:
        """Detect on RGB pixels [1, 3, S, S] in 0..1 with vectors [K, D], as YoloWorld does; raise what `run` raises."""
        if len(text) > PHRASES:
            detections: Detections = self.net(pixels, text)
            return detections
        boxes, scores = self.run(pixels, pad_phrases(text).to(self.stage.inputs[1].dtype))
        return Detections(boxes, scores[..., : len(text)])


def pad_phrases(text: Tensor) -> Tensor:
    """Return vectors of PHRASES phrases [PHRASES, D]: those of `text`, 1 to PHRASES, then repeats of the first."""
    return torch.cat([text, text[:1].expand(PHRASES - len(text), -1)])


def specify_network(net: YoloWorld, dtype: torch.dtype | None = None) -> StageSpec:
    """Return the network as a stage for frames letterboxed into the square that its weights were trained at."""
    side = net.config.image_size
    return detector_stage(net, PHRASES, (side, side), dtype)


def resolve_detector_dtype(settings: Settings) -> torch.dtype:
    """Return the dtype of the engine: float32 where engine.precision is, else float16.

    Not bfloat16, because the exporter joins its convolutions and batch norms as float32.
    """
    return torch.float32 if settings.engine.precision == "float32" else torch.float16


def resolve_folder(settings: DetectorSettings) -> Path:
    """Return the folder of the weights that `detector.name` names."""
    return NANO if settings.name == "nano" else Path(settings.name)


def compute_detector_key(settings: Settings, image_size: int, gpu: str = LOCAL) -> EngineKey:
    """Build the key of the detector's engine; its `max_objects` is a number of phrases. See `compute_key`."""
    library = find_library()
    target = find_target(library, gpu)
    folder = resolve_folder(settings.detector)
    return EngineKey(
        model=f"{folder.resolve().name}-yolo-world",
        weights=checkpoint_digest(str(folder)),
        precision=str(resolve_detector_dtype(settings)).removeprefix("torch."),
        image_size=image_size,
        bank_size=0,
        max_objects=PHRASES,
        library=library.name,
        version=library.version,
        gpu=target.generation,
        gpu_name=target.name,
    )


def build_detector(
    settings: Settings, gpu: str = LOCAL, progress: ReportProgress = ignore_progress
) -> StoredEngine:
    """Build and store the engine of the YOLO-World that `settings` name; see `build_engines`."""
    store, folder = EngineStore(settings.engine.folder), resolve_folder(settings.detector)
    with reraise_out_of_memory(EngineError, "while the detector's engine was built"):
        net = load_yolo_world(folder, device=settings.model.device, dtype=resolve_detector_dtype(settings))
        stage, key = specify_network(net), compute_detector_key(settings, net.config.image_size, gpu)
        step = BuildStep("detect (by name)", progress, store.expected_s(key, DETECT))
        with tempfile.TemporaryDirectory(prefix="sam3_node_engine_") as temporary:
            path = export(stage, Path(temporary) / f"{DETECT}.onnx")
            plan = build(path, stage, key.gpu, progress=step.update)
        build_s = step.finish()
    return store.save(key, {DETECT: plan}, {DETECT: build_s})
