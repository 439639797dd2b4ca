"""Each stage in each arithmetic against float32: time, share of the device's matrix rate, and what it does to masks.

    python tools/bench/engines.py                               nano
    python tools/bench/engines.py --peer                        and the whole step against transformers' streaming
    python tools/bench/engines.py --model full --peer --save h200     SAM 3's full size, random weights: for a GPU

Arithmetics: bfloat16 and float16 by torch; onnx, the exported stages in float32 by onnxruntime on a CPU; inductor,
compiled ahead of time, in float32 on a CPU and bfloat16 on a GPU; fp8, the encoder's layers rounded as an FP8 engine
rounds them: what that does to masks, not what it does to time. Cosine is the lowest of a stage's outputs, over the
objects and frames of a clip; mask IoU is with the masks of float32, tracked through that clip. Times of a stage are
medians of calls that alternate with float32's, at --objects objects. On a GPU the share is of the rate that a plain
matrix product reaches in the same arithmetic, and our whole steps are compiled and in CUDA graphs. --save keeps what
was printed in tools/bench/results.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the node does; read when torch is imported

import step
import torch
import transformers
from _candidates import PRECISIONS, Bench, Candidate, Images, Weights
from _common import Saved, percentile
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from sam3_node.bags.native.labelled_clip import TABLETOP
from sam3_node.engines.frames import frames_of
from sam3_node.engines.graphs import use_graphs
from sam3_node.engines.report import Report
from sam3_node.engines.specs import STAGES, StageSpec, tracker_stages
from sam3_node.engines.validation import compare_stages
from sam3_node.errors import EngineError, MissingExtraError
from sam3_node.models import TrackerModel
from sam3_node.models.sam.stages import Run
from sam3_node.tracking import ObjectPrompt

MATRIX = 8192  # side of the matrices whose product is the device's rate
PLAIN = "float32"
ANY_COSINE, ANY_IOU = 1e-6, 1e-6  # the gate is asked for figures, not for a verdict


class Effort(NamedTuple):
    """How long to measure: calls of a stage, frames of the clip, frames of a step, those before they count."""

    calls: int
    clip: int
    frames: int
    warm: int


CPU, GPU = Effort(9, 4, 16, 4), Effort(50, 16, 300, 20)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="nano", help="as model.name of the node; small, full: random weights"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precisions", default=",".join(PRECISIONS), help="with commas between")
    parser.add_argument("--objects", type=int, default=4, help="of a stage that runs for several")
    parser.add_argument(
        "--source", default=str(TABLETOP), help="recording, video or folder for clip and scales"
    )
    parser.add_argument("--peer", action="store_true", help="compare whole steps with transformers'")
    parser.add_argument("--save", metavar="NAME", help="keep what is printed in tools/bench/results/NAME.txt")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 lets torch choose")
    args = parser.parse_args()
    if unknown := set(args.precisions.split(",")) - set(PRECISIONS):
        parser.error(f"--precisions: expected some of {', '.join(PRECISIONS)}; found {', '.join(unknown)}")
    return args


def heading(args: argparse.Namespace) -> str:
    if args.device.startswith("cuda"):
        device = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    else:
        device = f"CPU, {torch.get_num_threads()} threads"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{args.model}, {device}, {versions}\n$ python {' '.join(sys.argv)}"


@torch.inference_mode()
def milliseconds(run: Run, inputs: Sequence[Tensor]) -> float:
    """Of one call, the device's work included."""
    start = time.perf_counter()
    run(*inputs)
    if inputs[0].is_cuda:
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def alternating(runs: Sequence[partial[float]], calls: int) -> list[float]:
    """The median of each, in turns."""
    for run in runs:
        run()
    times = [[run() for run in runs] for _ in range(calls)]
    return [statistics.median(each) for each in zip(*times, strict=True)]


@torch.inference_mode()
def tera_operations(stage: StageSpec, objects: int) -> float:
    """Floating-point operations of a stage's matrix products, in 10^12."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        stage.module(*stage.examples(objects))
    return counter.get_total_flops() / 1e12


def matrix_rate(device: str, dtype: torch.dtype) -> float:
    """TFLOP/s of a plain matrix product."""
    one, other = (torch.randn(MATRIX, MATRIX, device=device).to(dtype) for _ in range(2))
    median = alternating([partial(milliseconds, torch.matmul, (one, other))], GPU.calls)[0]
    return 2 * MATRIX**3 / median / 1e9


class Figures(NamedTuple):
    """Of one stage in one arithmetic: milliseconds, those of float32 in turns with it, 10^12 operations."""

    ms: float
    plain_ms: float
    tera: float

    @property
    def rate(self) -> float:
        """TFLOP/s"""
        return 1e3 * self.tera / self.ms


def stage_figures(
    reference: TrackerModel, candidate: Candidate, objects: int, calls: int
) -> Iterator[tuple[str, Figures]]:
    """Of each stage by name, where it is not the reference's own."""
    plain, ports = tracker_stages(reference), tracker_stages(reference, dtype=candidate.dtype)
    for name in STAGES:
        theirs, own = getattr(candidate.stages, name), getattr(reference.stages, name)
        if theirs is own and candidate.name != PLAIN:
            continue
        inputs, plain_inputs = (stages[name].examples(objects) for stages in (ports, plain))
        ms, plain_ms = alternating(
            [partial(milliseconds, theirs, inputs), partial(milliseconds, own, plain_inputs)], calls
        )
        yield name, Figures(ms, plain_ms, tera_operations(plain[name], objects))


def judged(reference: TrackerModel, candidate: Candidate, clip: Images, random: bool) -> Report:
    prompts = None
    if random:  # such weights see objects nowhere in particular
        places = step.points(4, reference.image_size)
        prompts = [ObjectPrompt(number, points=[place]) for number, place in enumerate(places)]
    return compare_stages(
        reference, candidate.stages, clip, ANY_COSINE, ANY_IOU, dtype=candidate.dtype, prompts=prompts
    )


def stage_table(bench: Bench, names: Sequence[str], args: argparse.Namespace, say: Saved) -> None:
    heads = f"{'ms':>9s} {'of float32':>11s} {'TFLOP/s':>9s} {'share':>6s} {'cosine':>9s}"
    say(f"\n{'stage':9s} {'arithmetic':11s} {heads}")
    for name in (PLAIN, *names):
        try:
            candidate = _candidate(bench, name)
        except (EngineError, MissingExtraError) as error:
            say(f"{name}: not measured: {error}")
        else:
            _measured(bench, candidate, args, say)


def _measured(bench: Bench, candidate: Candidate, args: argparse.Namespace, say: Saved) -> None:
    on_gpu, name = args.device.startswith("cuda"), candidate.name
    effort = GPU if on_gpu else CPU
    report = judged(bench.reference, candidate, bench.images, bench.weights.random)
    most = matrix_rate(args.device, candidate.dtype) if on_gpu else None
    for stage, found in stage_figures(bench.reference, candidate, args.objects, effort.calls):
        share = f"{found.rate / most:6.0%}" if most else f"{'-':>6s}"
        cosine = min((row.cosine for row in report.outputs if row.stage == stage), default=float("nan"))
        ratio = f"{found.ms / found.plain_ms:10.2f}x"
        say(f"{stage:9s} {name:11s} {found.ms:9.2f} {ratio} {found.rate:9.3f} {share} {cosine:9.6f}")
    say(_masks(name, report))


def _candidate(bench: Bench, name: str) -> Candidate:
    if name == PLAIN:
        return Candidate(name, bench.reference.stages, torch.float32)
    return PRECISIONS[name](bench)


def _masks(name: str, report: Report) -> str:
    if report.tracks is None:
        return f"masks     {name:11s} none to compare {'; '.join(report.faults)}"
    found = report.tracks
    return (
        f"masks     {name:11s} IoU with float32 mean {found.mean_iou:.4f}, worst {found.worst_iou:.4f}, "
        f"{found.masks} masks of {report.frames} frames"
    )


def step_table(model: TrackerModel, counts: Sequence[int], effort: Effort, say: Saved) -> None:
    """Percentiles of a frame, encoded and tracked."""
    say(f"\nwhole step, {str(model.dtype).removeprefix('torch.')}\nobjects   p50 ms   p99 ms   p99/p50")
    size = model.image_size
    for objects in counts:
        ours = step.Ours(model, objects)
        pixels = [torch.randn(1, 3, size, size, device=model.device, dtype=model.dtype) for _ in range(4)]
        times = [
            step.timed(ours.step, pixels[i % len(pixels)])[0] for i in range(effort.warm + effort.frames)
        ]
        middle, last = (percentile(times[effort.warm :], part) for part in (0.5, 0.99))
        say(f"{objects:7d} {middle:8.1f} {last:8.1f} {last / middle:9.2f}")


def peer_table(name: str, device: str, dtype: torch.dtype, counts: Sequence[int], say: Saved) -> None:
    """As step.py; random weights, and the first object's logits are compared on the way."""
    source: Any = step.random_source(name if name in step.CONFIGS else "nano", device).to(dtype)
    model = fast(step.stages(source, dtype))
    say(
        f"\nagainst transformers' streaming inference, both in {str(dtype).removeprefix('torch.')}, random weights"
    )
    say("objects    ours ms   transformers ms   ratio   largest logit difference")
    frames, warm = (40, 20) if device.startswith("cuda") else (8, 3)
    for objects in counts:
        say(step.compare(source, model, objects, frames, warm))


def fast(model: TrackerModel) -> TrackerModel:
    """The model as a node runs it on its device: on a GPU compiled and in CUDA graphs."""
    if model.device.type == "cuda":
        model.compile()
    use_graphs(model)
    return model


def measure(args: argparse.Namespace, say: Saved) -> None:
    on_gpu = args.device.startswith("cuda")
    effort, counts = (GPU, (1, 4, 16, 64)) if on_gpu else (CPU, (1, 4, 16))
    dtype = torch.bfloat16 if on_gpu else torch.float32
    say(heading(args))
    weights = Weights(args.model, args.device)
    images = list(frames_of(args.source, effort.clip, step=4))
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(weights, weights.model(torch.float32), images, Path(folder))
        stage_table(bench, args.precisions.split(","), args, say)
    step_table(fast(weights.model(dtype)), counts, effort, say)
    if args.peer:
        peer_table(args.model, args.device, dtype, counts, say)


def main() -> None:
    args, say = arguments(), Saved()
    if args.threads:
        torch.set_num_threads(args.threads)
    measure(args, say)
    if args.save:
        say.write(args.save)


if __name__ == "__main__":
    main()
