"""YOLO-World's network as an engine: for square frames of one size and a fixed number of phrases."""

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
from .build_progress import ProgressLine
from .export import export
from .key import checkpoint_digest
from .oom import telling_out_of_memory
from .specs import StageSpec, detector_stage
from .store import Built, EngineStore, Identity
from .tensorrt.build import build
from .tensorrt.library import LOCAL, find_library, target

PHRASES = 16
"""What an engine takes at once. YOLO-World gives each box to the phrase that fits best and a phrase given twice changes
nothing, so fewer are filled up by repeating one; more are for torch."""
DETECT = "detect"


class FixedPhrases:
    """Takes the place of a YoloWorld: `run` finds up to PHRASES phrases, the network itself more of them."""

    def __init__(self, run: Run, stage: StageSpec, net: YoloWorld) -> None:
        self.run, self.stage, self.net = run, stage, net

    def __call__(self, pixels: Tensor, text: Tensor) -> Detections:
        """RGB pixels [1, 3, S, S] in 0..1 and vectors [K, D], as YoloWorld takes them. Raises what `run` raises."""
        if len(text) > PHRASES:
            found: Detections = self.net(pixels, text)
            return found
        boxes, scores = self.run(pixels, filled(text).to(self.stage.inputs[1].dtype))
        return Detections(boxes, scores[..., : len(text)])


def filled(text: Tensor) -> Tensor:
    """Vectors of PHRASES phrases [PHRASES, D]: those of `text`, 1 to PHRASES, and the first of them again."""
    return torch.cat([text, text[:1].expand(PHRASES - len(text), -1)])


def stage_of(net: YoloWorld, dtype: torch.dtype | None = None) -> StageSpec:
    """The network as a stage for frames letterboxed into the square that its weights were trained at."""
    side = net.config.image_size
    return detector_stage(net, PHRASES, (side, side), dtype)


def arithmetic_of(settings: Settings) -> torch.dtype:
    """The dtype of the engine. Not bfloat16: the exporter joins its convolutions and batch norms as float32."""
    return torch.float32 if settings.engine.precision == "float32" else torch.float16


def folder_of(settings: DetectorSettings) -> Path:
    """Where the weights are that `detector.name` names."""
    return NANO if settings.name == "nano" else Path(settings.name)


def detector_identity(settings: Settings, image_size: int, gpu: str = LOCAL) -> Identity:
    """The engine of the detector that `settings` ask for, its `most_objects` being phrases; see `identity_of`."""
    library = find_library()
    place = target(library, gpu)
    folder = folder_of(settings.detector)
    return Identity(
        model=f"{folder.resolve().name}-yolo-world",
        weights=checkpoint_digest(str(folder)),
        precision=str(arithmetic_of(settings)).removeprefix("torch."),
        image_size=image_size,
        bank_size=0,
        most_objects=PHRASES,
        library=library.name,
        version=library.version,
        gpu=place.generation,
        gpu_name=place.name,
    )


def build_detector(settings: Settings, gpu: str = LOCAL) -> Built:
    """Build and keep the engine of the YOLO-World that `settings` name; see `build_engines`.

    It is in float32 where engine.precision is, else in float16.
    """
    store, folder = EngineStore(settings.engine.folder), folder_of(settings.detector)
    with telling_out_of_memory(EngineError, "while the detector's engine was built"):
        net = load_yolo_world(folder, device=settings.model.device, dtype=arithmetic_of(settings))
        stage, identity = stage_of(net), detector_identity(settings, net.config.image_size, gpu)
        with (
            tempfile.TemporaryDirectory(prefix="sam3_node_engine_") as temporary,
            ProgressLine("detect (by name)", store.expected_s(identity, DETECT)) as line,
        ):
            line.say("exporting")
            path = export(stage, Path(temporary) / f"{DETECT}.onnx")
            plan = build(path, stage, identity.gpu, progress=line)
    return store.save(identity, {DETECT: plan}, {DETECT: round(line.elapsed_s, 1)})
