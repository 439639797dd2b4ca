"""The stages of a tracker in the precisions of engines, to be compared with the torch stages in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from sam3_node.engines.export import export
from sam3_node.engines.inductor import InductorRun, build_package
from sam3_node.engines.quantize import calibrate, quantise_encoder
from sam3_node.engines.specs import STAGES, tracker_stages
from sam3_node.errors import EngineError
from sam3_node.models import TrackerModel, load_tracker
from sam3_node.models.sam.stages import Stages
from tests.support.onnx_run import OnnxRun
from tools.bench.latency import step

Images = Sequence[npt.NDArray[np.uint8]]


class Candidate(NamedTuple):
    """Stages in a precision; inputs and outputs that have the model's dtype are of `dtype`."""

    name: str
    stages: Stages
    dtype: torch.dtype


class Weights:
    """Weights of a tracker: `small` and `full` of latency.step, which are random, or a model.name of the node."""

    def __init__(self, name: str, device: str) -> None:
        self.name, self.device = name, device
        self.random = name in step.CONFIGS and name != "nano"
        self._source = step.random_source(name, device) if self.random else None

    def model(self, dtype: torch.dtype) -> TrackerModel:
        """Make a new model on the device."""
        if self._source is None:
            return load_tracker(self.name, device=self.device, dtype=dtype)
        return step.stages(self._source, dtype)


class Bench(NamedTuple):
    """Inputs of all candidates: the weights, the model in float32, images for calibration, and an empty folder."""

    weights: Weights
    reference: TrackerModel
    images: Images
    folder: Path


def _torch(dtype: torch.dtype) -> Callable[[Bench], Candidate]:
    def make(bench: Bench) -> Candidate:
        return Candidate(str(dtype).removeprefix("torch."), bench.weights.model(dtype).stages, dtype)

    return make


def _onnx(bench: Bench) -> Candidate:
    if bench.reference.device.type != "cpu":
        raise EngineError("onnxruntime runs on the CPU here: expected --device cpu")
    specs = tracker_stages(bench.reference)
    runs = (OnnxRun(export(specs[name], bench.folder / f"{name}.onnx"), specs[name]) for name in STAGES)
    return Candidate("onnx", Stages(*runs), torch.float32)


def _inductor(bench: Bench) -> Candidate:
    device = bench.reference.device
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    specs = tracker_stages(bench.weights.model(dtype))
    runs = (InductorRun(build_package(specs[name]), specs[name], device) for name in STAGES)
    return Candidate("inductor", Stages(*runs), dtype)


def _fp8(bench: Bench) -> Candidate:
    encode = quantise_encoder(bench.reference, calibrate(bench.reference, bench.images))
    return Candidate("fp8", bench.reference.stages._replace(encode=encode), torch.float32)


PRECISIONS: dict[str, Callable[[Bench], Candidate]] = {
    "bfloat16": _torch(torch.bfloat16),
    "float16": _torch(torch.float16),
    "onnx": _onnx,
    "inductor": _inductor,
    "fp8": _fp8,
}
