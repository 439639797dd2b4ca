"""Show what the time of a frame step on a CPU is spent on, by kinds of operations, beside the floor of its arithmetic.

    python -m tools.bench.latency.step_profile --model small --objects 1 4 16
    python -m tools.bench.latency.step_profile --dtype bfloat16

Times are those of torch's profiler, of one thread; shares are comparable between runs. The floor of a stage is its
FLOPs at the rate of a large matrix product in the same dtype and run: no arrangement of the same arithmetic in the same
library is faster.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from sam3_node.models import TrackerModel
from tools.bench.common import Figures, make_parser, objects_text
from tools.bench.counting import count
from tools.bench.latency.step import CONFIGS, DTYPES, Ours, clip, gemm_rate, random_source, stages

WARM, STEPS = 9, 4
KINDS = {
    "matrix products": ("mm", "addmm", "bmm", "baddbmm", "_linear_pointwise"),
    "convolutions": ("convolution", "conv2d", "conv_transpose"),
    "fused attention": ("attention",),
    "softmax": ("softmax",),
    "norms": ("layer_norm", "rsqrt", "pow", "mean"),
    "activations": ("gelu", "relu", "sigmoid"),
    "copies": ("copy_", "cat", "index", "stack", "clone", "fill_"),
}
OTHER = "other"


def kind_of(operation: str) -> str:
    """Return the kind of an operation of the profiler, such as aten::addmm."""
    name = operation.rpartition("::")[2]
    for kind, parts in KINDS.items():
        if any(name == part if kind == "matrix products" else part in name for part in parts):
            return kind
    return OTHER


def profile_step(model: TrackerModel, images: list[torch.Tensor], objects: int) -> Counter[str]:
    """Return the milliseconds of one step by kind of operation, with a full memory bank."""
    ours = Ours(model, objects)
    for pixels in images[:WARM]:
        ours.step(pixels)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for pixels in images[WARM:]:
            ours.step(pixels)
    spent: Counter[str] = Counter()
    for event in profiled.key_averages():
        spent[kind_of(event.key)] += event.self_cpu_time_total / 1e3 / (len(images) - WARM)
    return spent


def floors(model: TrackerModel, images: list[torch.Tensor], objects: int) -> dict[str, float]:
    """Return the milliseconds that the arithmetic of the whole step and of the encoder takes at the rate of gemm."""
    rate, ours = gemm_rate(model.dtype), Ours(model, objects)
    for pixels in images[:WARM]:
        ours.step(pixels)
    runs: dict[str, Any] = {"step": lambda: ours.step(images[0]), "encoder": lambda: model.encode(images[0])}
    return {name: count(run).flops / 1e6 / rate for name, run in runs.items()}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=list(CONFIGS), default="small")
    parser.add_argument("--objects", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0])
    args, figures = parser.parse_args(), Figures("latency.step_profile")
    torch.set_num_threads(1)
    source = random_source(args.model, "cpu")
    model, images = stages(source, getattr(torch, args.dtype)), clip(source, WARM + STEPS)
    for objects in args.objects:
        spent = profile_step(model, images, objects)
        total = spent.total()
        print(f"{args.model}, {args.dtype}, {objects_text(objects)}, one thread: {total:.1f} ms")
        what = f"step of {args.model} in {args.dtype}, {objects_text(objects)}, one thread"
        for kind, spent_ms in spent.most_common():
            print(f"  {kind:18s} {spent_ms:8.2f} ms {spent_ms / total:6.1%}")
            figures.add(f"share of {kind}, {what}", 100 * spent_ms / total, "%")
        for name, floor_ms in floors(model, images, objects).items():
            print(f"  floor of the {name:8s} {floor_ms:5.2f} ms at the rate of gemm")
            figures.add(f"floor of the {name}'s arithmetic at the rate of gemm, {what}", floor_ms, "ms")
    figures.write(args.json)


if __name__ == "__main__":
    main()
