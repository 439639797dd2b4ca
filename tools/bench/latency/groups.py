"""Measure what a step of SAM 3.1 costs by the number of objects, and what a process holds while objects come and go.

    python -m tools.bench.latency.groups                    all three parts
    python -m tools.bench.latency.groups --part operations  one of them

operations: the FLOPs of a whole step of the tracker at full size, counted on fake tensors, which have shapes but no
values. time: the CPU time of a step of a small model with 16 objects beside one with 1; the steps of both alternate, so
that other load on the machine slows both. memory: the resident memory of this process while a small model follows 16
objects, of which one leaves and another comes every few steps, so that groups are opened, built anew and merged.

Weights are random. The small model is that of `python -m tools.sam31 small`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from sam3_node.models.sam31 import random_model
from sam3_node.models.sam31.loading import build_model
from sam3_node.models.sam31.model import Sam31Model
from sam3_node.models.sam31.random_weights import full_sizes
from sam3_node.models.sam31.source import ModelSizes, Source
from sam3_node.tracking import ObjectPrompt, Tracker
from sam3_node.transport.limits import rss_bytes
from tools.bench.common import RUNS, Figures, make_parser, objects_text, time_cpu
from tools.bench.counting import count
from tools.bench.latency.step import points

GROUP = 16
"""Objects of a full group."""
COUNTS = (1, GROUP, GROUP + 1, 4 * GROUP)
"""Numbers of objects whose steps are counted."""
FULL_BANK = 18
"""Steps after which memories and pointers are as many as they will be."""
TIMED_STEPS = 60
"""Steps of one paired run that are timed, after those that fill the bank."""
MEMORY_STEPS = 1200
CHANGE_EVERY = 5
"""Steps between two changes of the objects."""
CLIP = 8
"""Different frames that repeat."""
SAMPLES = 12
"""Readings of the resident memory over the steps."""
SHARE_LIMIT = "at most 1.15"
"""Target of the cost of 16 objects, in costs of one."""
GROWTH_LIMIT_MB = "at most 4"
"""Target of the growth over the second half, as of tests/test_flat_memory.py."""


def make_empty(sizes: ModelSizes) -> Sam31Model:
    """Build a model whose weights have no values yet, for steps on fake tensors."""
    with torch.device("meta"):
        source = Source(sizes)
    source = source.to_empty(device="cpu").eval().requires_grad_(False)
    return build_model(source, "empty", torch.device("cpu"), torch.float32)


def fill(model: Sam31Model, objects: int, frames: list[Tensor]) -> Tracker:
    """Return a tracker that has followed some objects until its bank is full."""
    tracker = Tracker(model, max_objects=max(objects, GROUP))
    places = enumerate(points(objects, model.image_size))
    prompts = [ObjectPrompt(number, points=[xy]) for number, xy in places]
    for step in range(FULL_BANK):
        tracker.step(frames[step % len(frames)], prompts if step == 0 else [])
    return tracker


def count_operations(figures: Figures, sizes: ModelSizes) -> None:
    """Count the FLOPs of steps."""
    model = make_empty(sizes)
    found: dict[int, float] = {}
    with FakeTensorMode(allow_non_fake_inputs=True):
        frame = torch.empty(1, 3, model.image_size, model.image_size)
        encode = count(torch.inference_mode()(lambda: model.encode(frame))).flops / 1e12
        for objects in COUNTS:
            tracker = fill(model, objects, [frame])
            found[objects] = count(partial(tracker.step, frame)).flops / 1e12
    what = f"a step at {sizes.image_size} px"
    figures.add(f"arithmetic of the encoder at {sizes.image_size} px", encode, "TFLOP")
    for objects, work in found.items():
        figures.add(f"arithmetic of {what}, {objects_text(objects)}", work, "TFLOP")
    both = found[GROUP] / found[1]
    figures.add(f"arithmetic of {what}, {GROUP} objects in steps of 1", both, "x", SHARE_LIMIT)
    rest = (found[GROUP] - encode) / (found[1] - encode)
    figures.add("the same without the encoder", rest, "x", SHARE_LIMIT)


def make_clip(model: Sam31Model) -> list[Tensor]:
    """Return random frames [1, 3, S, S]."""
    generator = torch.Generator().manual_seed(1)
    size = model.image_size
    return [torch.randn(1, 3, size, size, generator=generator) for _ in range(CLIP)]


def time_steps(figures: Figures, runs: int) -> None:
    """Time steps with 1 and with 16 objects in turns."""
    model = random_model()
    clip = make_clip(model)
    ratios = []
    ones = []
    many = []
    for _ in range(runs):
        trackers = (fill(model, 1, clip), fill(model, GROUP, clip))
        times: tuple[list[float], list[float]] = ([], [])
        for step in range(TIMED_STEPS):
            frame = clip[step % CLIP]
            for tracker, taken in zip(trackers, times, strict=True):
                taken.append(time_cpu(partial(tracker.step, frame)))
        one, full = map(statistics.median, times)
        ones.append(one)
        many.append(full)
        ratios.append(full / one)
    what = "CPU time of a step of the small model"
    figures.add(f"{what}, {GROUP} objects in steps of 1", ratios, "x", SHARE_LIMIT)
    figures.add(f"{what}, 1 object", ones, "ms")
    figures.add(f"{what}, {GROUP} objects", many, "ms")


def come_and_go(model: Sam31Model, steps: int) -> Iterator[Tracker]:
    """Yield a tracker after each of some steps with 16 objects, of which one is exchanged every few steps."""
    clip = make_clip(model)
    size = model.image_size
    tracker = Tracker(model, max_objects=GROUP)
    new_id = 0
    for step in range(steps):
        # which object leaves changes, so that groups become empty in every order
        if step % CHANGE_EVERY == 0 and tracker.ids:
            tracker.remove(tracker.ids[step // CHANGE_EVERY * 7 % len(tracker.ids)])
        prompts: list[ObjectPrompt] = []
        while len(tracker.ids) + len(prompts) < GROUP:
            place = [size * (0.1 + 0.05 * (new_id % 17)), size * (0.1 + 0.07 * (new_id % 11))]
            prompts.append(ObjectPrompt(new_id, points=[place]))
            new_id += 1
        tracker.step(clip[step % CLIP], prompts)
        yield tracker


def watch_memory(figures: Figures, steps: int) -> None:
    """Read the resident memory of this process while objects come and go."""
    readings: dict[int, float] = {}
    moved = 0
    for step, tracker in enumerate(come_and_go(random_model(), steps), start=1):
        moved += len(tracker.take_moved())
        if step % (steps // SAMPLES) == 0:
            readings[step] = rss_bytes() / 1e6
    half = [mb for step, mb in readings.items() if step >= steps / 2]
    what = f"resident memory with {GROUP} objects that come and go"
    figures.add(
        f"{what}: growth over the second half of {steps} steps", half[-1] - half[0], "MB", GROWTH_LIMIT_MB
    )
    for step, mb in readings.items():
        figures.add(f"{what}, after {step} steps", mb, "MB")
    figures.add("objects that changed their group meanwhile", moved, "count")


PARTS: dict[str, Callable[[Figures, int], None]] = {
    # first: memory that other parts freed would hide what a step leaks
    "memory": lambda figures, runs: watch_memory(figures, MEMORY_STEPS),
    "time": time_steps,
    "operations": lambda figures, runs: count_operations(figures, full_sizes()),
}


def main() -> None:
    parser = make_parser(__doc__, RUNS, threads=1)
    parser.add_argument("--part", choices=list(PARTS), nargs="+", default=list(PARTS))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    figures = Figures("latency.groups")
    for name, measure in PARTS.items():
        if name in args.part:
            measure(figures, args.runs)
    figures.write(args.json)


if __name__ == "__main__":
    main()
