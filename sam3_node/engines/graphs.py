"""CUDA graphs: what every frame runs is recorded once for each number of objects, and replayed.

A GPU then need not wait for Python to launch one kernel after another.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import EngineError
from ..models import TrackerModel
from ..models.sam.stages import Run, Stages
from .oom import engine_failure, first_line, out_of_memory

WARM_UP = 3  # calls before a recording: libraries choose their kernels, compiled stages compile

Inputs = tuple[Tensor | None, ...]


class Recording(NamedTuple):
    """A call that can be repeated: `replay` reads `inputs` and writes `outputs`, which stay where they are."""

    inputs: Inputs
    outputs: Tensor | tuple[Tensor, ...]
    replay: Callable[[], None]


Record = Callable[[Run, Inputs], Recording]


class GraphedStage:
    """A stage that is recorded at the first call with inputs of some shapes, and replayed from then on.

    What it returns is the caller's to keep.
    """

    def __init__(self, run: Run, record: Record) -> None:
        self.run, self._record = run, record
        self._recordings: dict[tuple[object, ...], Recording] = {}

    @torch.inference_mode()
    def __call__(self, *inputs: Tensor | None) -> Any:
        """As the stage. Raises EngineError where it cannot be recorded."""
        key = self._key(inputs)
        if key not in self._recordings:
            self._recordings[key] = self._record(self.run, inputs)
        recording = self._recordings[key]
        for held, given in zip(recording.inputs, inputs, strict=True):
            if held is not None and given is not None:
                held.copy_(given)
        recording.replay()
        if isinstance(recording.outputs, Tensor):
            return recording.outputs.clone()
        return tuple(output.clone() for output in recording.outputs)

    def _key(self, inputs: Inputs) -> tuple[object, ...]:
        """What a recording depends on: shapes and dtypes, and whether the encoder gives away its trunk."""
        shapes = (None if tensor is None else (tensor.shape, tensor.dtype) for tensor in inputs)
        return getattr(self.run, "shares_trunk", False), *shapes


def replayed(stages: Stages, device: torch.device) -> Stages:
    """The stages in CUDA graphs; on a CPU as they are.

    Their recordings share one pool of memory: only one of them is replayed at a time, and nothing is left in it.
    """
    if device.type != "cuda":
        return stages
    record = partial(record_cuda, pool=torch.cuda.graph_pool_handle())
    return Stages(*(GraphedStage(run, record) for run in stages))


def use_graphs(model: TrackerModel) -> None:
    """Run the model's stages in CUDA graphs, for 1, 2, 4, 8 … objects; changes nothing on a CPU."""
    if model.device.type == "cuda":
        model.stages, model.static_shapes = replayed(model.stages, model.device), True


def record_cuda(run: Run, inputs: Inputs, pool: Any) -> Recording:
    """Record a call on the current device; raises EngineError where that fails, be it for want of memory."""
    held = tuple(None if tensor is None else tensor.clone() for tensor in inputs)
    graph = torch.cuda.CUDAGraph()
    try:
        _warm_up(run, held)
        with torch.cuda.graph(
            graph, pool=pool, capture_error_mode="thread_local"
        ):  # others may use the device
            outputs = run(*held)
    except RuntimeError as error:
        if out_of_memory(error):
            raise engine_failure(error, "while a stage was captured in a CUDA graph") from error
        raise EngineError(
            f"a stage cannot be captured in a CUDA graph: {first_line(error)}; set engine.graphs = false"
        ) from error
    return Recording(held, outputs, graph.replay)


def _warm_up(run: Run, inputs: Inputs) -> None:
    """On another stream, as captures must not begin with what a first call does."""
    here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
    aside.wait_stream(here)
    with torch.cuda.stream(aside):
        for _ in range(WARM_UP):
            run(*inputs)
    here.wait_stream(aside)
