"""CUDA graphs: stages captured once for each number of objects, and replayed on every later frame.

A replay launches all kernels of a stage at once, so the GPU does not wait for Python between two kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..errors import EngineError
from ..models import TrackerModel
from ..models.sam.stages import Run, Stages
from .oom import is_out_of_memory, summarize_error, to_engine_error

WARM_UP_CALLS = 3  # before a capture: libraries choose their kernels, compiled stages compile

Inputs = tuple[Tensor | None, ...]


class CapturedGraph(NamedTuple):
    """A call that can be repeated: `replay` reads `inputs` and writes `outputs`, whose addresses are fixed."""

    inputs: Inputs
    outputs: Tensor | tuple[Tensor, ...]
    replay: Callable[[], None]


Capture = Callable[[Run, Inputs], CapturedGraph]


class GraphedStage:
    """A stage that is captured at the first call with inputs of given shapes, and replayed afterwards.

    The caller owns the outputs: each call copies them.
    """

    def __init__(self, run: Run, capture: Capture) -> None:
        self.run, self._capture = run, capture
        self.takes_any_width = getattr(run, "takes_any_width", False)  # see `MemoryRead`
        self.max_objects = getattr(run, "max_objects", None)  # see `Stages`
        self._graphs: dict[tuple[object, ...], CapturedGraph] = {}

    @torch.inference_mode()
    def __call__(self, *inputs: Tensor | None) -> Any:
        """Run the stage. Raises EngineError where it cannot be captured."""
        key = self._compute_key(inputs)
        if key not in self._graphs:
            self._graphs[key] = self._capture(self.run, inputs)
        graph = self._graphs[key]
        for held, given in zip(graph.inputs, inputs, strict=True):
            if held is not None and given is not None:
                held.copy_(given)
        graph.replay()
        if isinstance(graph.outputs, Tensor):
            return graph.outputs.clone()
        return tuple(output.clone() for output in graph.outputs)

    def _compute_key(self, inputs: Inputs) -> tuple[object, ...]:
        """Return the key of a graph: shapes and dtypes, and the flag by which the encoder also returns its trunk."""
        shapes = (None if tensor is None else (tensor.shape, tensor.dtype) for tensor in inputs)
        return getattr(self.run, "shares_trunk", False), *shapes


def make_graphed(stages: Stages, device: torch.device) -> Stages:
    """Return the stages in CUDA graphs; on a CPU, the stages themselves.

    All graphs share one memory pool. This is safe because only one of them is replayed at a time, and no result stays
    in the pool.
    """
    if device.type != "cuda":
        return stages
    capture = partial(capture_cuda_graph, pool=torch.cuda.graph_pool_handle())
    return Stages(*(GraphedStage(run, capture) for run in stages))


def use_graphs(model: TrackerModel) -> None:
    """Run the model's stages in CUDA graphs, for 1, 2, 4, 8 … objects. On a CPU, change nothing."""
    if model.device.type == "cuda":
        model.stages, model.static_shapes = make_graphed(model.stages, model.device), True


def capture_cuda_graph(run: Run, inputs: Inputs, pool: Any) -> CapturedGraph:
    """Capture a call on the current device. Raises EngineError where that fails, also where memory runs out."""
    held = tuple(None if tensor is None else tensor.clone() for tensor in inputs)
    graph = torch.cuda.CUDAGraph()
    try:
        _warm_up(run, held)
        # thread_local: other threads may use the device during the capture
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            outputs = run(*held)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise to_engine_error(error, "while a stage was captured in a CUDA graph") from error
        raise EngineError(
            f"a stage cannot be captured in a CUDA graph: {summarize_error(error)}; set engine.graphs = false"
        ) from error
    return CapturedGraph(held, outputs, graph.replay)


def _warm_up(run: Run, inputs: Inputs) -> None:
    """Run the stage on a side stream, because a capture must not contain the work of first calls."""
    new_stream = cast(Callable[[], torch.cuda.Stream], torch.cuda.Stream)  # torch leaves it untyped
    current, side = torch.cuda.current_stream(), new_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for _ in range(WARM_UP_CALLS):
            run(*inputs)
    current.wait_stream(side)
