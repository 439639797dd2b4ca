"""Compile memory attention with our kernels in Triton's interpreter; print errors and numbers of graphs as JSON.

A program of its own, because TRITON_INTERPRET has to be set before triton is imported. Nothing becomes machine code:
the backend runs the traced graphs, in which a size that became a constant would be an error.
"""

import copy
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from sam3_node.engines.inductor import CapturedGraph, GraphedStage, Inputs
from sam3_node.models import TrackerModel
from sam3_node.models.sam import kernels
from sam3_node.models.sam.stages import Run, Stages, find_limits
from sam3_node.tracking import ObjectPrompt, Tracker
from sam3_node.tracking.memory import MemoryBank, get_rule
from tests.support.tiny import noise_clip, tiny_model

COUNTS = (1, 2, 4, 16)
FRAMES = 22


class CountingBackend:
    """Runs the graphs that it is given, and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


def list_inputs(model: TrackerModel, objects: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield inputs of a read: a full bank, and whole banks of which 2 to 10 memories and 1 to 31 pointers are valid."""
    bank = MemoryBank(model, objects, 7, get_rule("recent"))
    generator = torch.Generator().manual_seed(objects)
    top = torch.randn(1, model.hidden, *model.grid, generator=generator)
    slots, pointers = bank.widths
    few = [(2, 1), (7, 16), (slots, pointers)]
    sizes = list(itertools.product((2, 3, 7, slots), (1, pointers))) if objects <= 2 else few
    for empty in bank.examples(objects, find_limits(model.stages.read)):
        memory = torch.randn(empty.memory.shape, generator=generator)
        content = torch.randn(empty.pointers.shape, generator=generator)
        age = torch.rand(empty.pointer_age.shape, generator=generator) * 10
        if empty.valid is None:
            yield top, memory, empty.offset, content, age, None  # type: ignore[misc]
            continue
        for memories, held in sizes:
            valid = torch.zeros_like(empty.valid)
            valid[:, :memories] = valid[:, slots : slots + held] = True
            yield top, memory, empty.offset, content, age, valid


@torch.inference_mode()
def measure_reads(method: str) -> dict[str, float]:
    """Return the largest difference of compiled reads by kernels from torch's own, and the graphs of the read."""
    torch._dynamo.reset()
    plain = tiny_model("sam3", hidden=64, size=56)
    fused = copy.deepcopy(plain)
    for model in (plain, fused):
        model.use_read(method)
    fused.use_kernels()
    backend = CountingBackend()
    fused.compile(backend)
    largest = 0.0
    for objects in COUNTS if method == "exact" else COUNTS[:3]:
        for inputs in list_inputs(fused, objects):
            difference = plain.memory_attention(*inputs) - fused.stages.read(*inputs)
            largest = max(largest, difference.abs().max().item())
    return {f"{method}, difference": largest, f"{method}, graphs": backend.graphs}


def replay_on_tape(run: Run, inputs: Inputs) -> CapturedGraph:
    """Stand in for the capture of a CUDA graph: a replay reads and writes fixed tensors."""
    outputs = run(*inputs)
    places = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)

    def replay() -> None:
        actual = run(*inputs)
        for place, value in zip(places, (actual,) if isinstance(actual, Tensor) else actual, strict=True):
            place.copy_(value)

    return CapturedGraph(outputs, replay)


@torch.inference_mode()
def track(model: TrackerModel, objects: int) -> Tensor:
    """Return the logits of all frames; the objects are added on the first frames."""
    tracker = Tracker(model, max_objects=objects)
    tracker.warm_up_reads()
    found = []
    for number, pixels in enumerate(noise_clip(model.image_size, FRAMES)):
        prompts = [ObjectPrompt(number, points=[[10.0 + 9 * number, 30.0]])] if number < objects else []
        tracks = tracker.step(pixels, prompts)
        found.append(torch.zeros(objects, *model.mask_size))
        found[-1][: len(tracks.ids)] = tracks.logits
    return torch.stack(found)


def measure_tracks(graphs: bool) -> dict[str, float]:
    """Return the largest difference of tracks by compiled stages and kernels from torch's own, and all graphs."""
    torch._dynamo.reset()
    plain, fused = (tiny_model("sam3", hidden=64, size=56) for _ in range(2))
    fused.use_kernels()
    backend = CountingBackend()
    fused.compile(backend)
    fused.static_shapes = True
    if graphs:
        fused.stages = Stages(*(GraphedStage(run, replay_on_tape) for run in fused.stages))
    what = "captured" if graphs else "called"
    difference = (track(fused, 4) - track(plain, 4)).abs().max().item()
    return {f"tracks {what}, difference": difference, f"tracks {what}, graphs": backend.graphs}


def main() -> None:
    kernels.count_processors = lambda device: 3
    found: dict[str, float] = {}
    for method in ("exact", "pooled", "sparse"):
        found |= measure_reads(method)
    for graphs in (False, True):
        found |= measure_tracks(graphs)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
