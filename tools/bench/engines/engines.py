"""Compare each stage in each precision with float32: time, share of the device's matrix rate, effect on the masks.

    python -m tools.bench.engines.engines             nano
    python -m tools.bench.engines.engines --peer      and the whole step against transformers' streaming
    python -m tools.bench.engines.engines --model full --peer    SAM 3's full size, random weights: for a GPU

Precisions: bfloat16 and float16 by torch; onnx, the exported stages in float32 by onnxruntime on a CPU; inductor,
compiled ahead of time, in float32 on a CPU and bfloat16 on a GPU; fp8, the encoder's layers rounded in torch as an FP8
engine rounds them, which shows the effect on masks but not on time. Cosine is the minimum over a stage's outputs, the
objects and the frames of a clip. Mask IoU compares with the masks that float32 gives when it tracks through that clip.
The time of a stage is the median of calls that alternate with float32's, at --objects objects; the ratio has the spread
of --runs such medians. On a GPU the share is relative to the rate of a plain matrix product in the same precision, and
our whole steps are compiled and run in CUDA graphs.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from sam3_node.bags.bag import sample_images
from sam3_node.bags.native.reader import TABLETOP
from sam3_node.engines.export import export
from sam3_node.engines.inductor import InductorRun, build_package, use_graphs
from sam3_node.engines.quantize import calibrate, quantise_encoder
from sam3_node.engines.specs import STAGES, StageSpec, tracker_stages
from sam3_node.engines.validation import Report, compare_stages
from sam3_node.errors import EngineError, MissingExtraError
from sam3_node.models import TrackerModel, load_tracker
from sam3_node.models.sam.stages import Run, Stages
from sam3_node.tracking import ObjectPrompt
from tests.support.onnx_run import OnnxRun
from tools.bench.common import RUNS, Figures, make_parser, objects_text, percentile
from tools.bench.latency import step

Images = Sequence[npt.NDArray[np.uint8]]
MATRIX = 8192  # side of the matrices whose product gives the device's rate
PLAIN = "float32"
# bounds that everything passes: only the gate's figures are used
ANY_COSINE = 1e-6
ANY_IOU = 1e-6


class Candidate(NamedTuple):
    """Stages in a precision; inputs and outputs that have the model's dtype are of `dtype`."""

    name: str
    stages: Stages
    dtype: torch.dtype


class Weights:
    """Weights of a tracker: `small` and `full` of latency.step, which are random, or a model.name of the node."""

    def __init__(self, name: str, device: str) -> None:
        self.name = name
        self.device = device
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


class Effort(NamedTuple):
    """Length of the measurements."""

    calls: int
    """calls of a stage in one run"""
    clip: int
    """frames of the clip for masks"""
    frames: int
    """timed frames of a whole step"""
    warm: int
    """untimed frames before them"""


CPU = Effort(9, 4, 16, 4)
GPU = Effort(50, 16, 300, 20)


def arguments() -> argparse.Namespace:
    parser = make_parser(__doc__, RUNS, device=step.DEVICE, objects=4, threads=0)
    parser.add_argument("--model", default="nano", help="as model.name; small, full: random weights")
    parser.add_argument("--precisions", default=",".join(PRECISIONS), help="comma-separated")
    parser.add_argument("--source", default=str(TABLETOP), help="frames of the clip and the calibration")
    parser.add_argument("--peer", action="store_true", help="compare whole steps with transformers'")
    args = parser.parse_args()
    if unknown := set(args.precisions.split(",")) - set(PRECISIONS):
        parser.error(f"--precisions: expected some of {', '.join(PRECISIONS)}; found {', '.join(unknown)}")
    return args


@torch.inference_mode()
def milliseconds(run: Run, inputs: Sequence[Tensor]) -> float:
    """Return the milliseconds of one call, with the device's work."""
    start = time.perf_counter()
    run(*inputs)
    if inputs[0].is_cuda:
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def alternating(runs: Sequence[partial[float]], calls: int) -> list[float]:
    """Call all in turns, and return the median result of each."""
    for run in runs:
        run()
    times = [[run() for run in runs] for _ in range(calls)]
    return [statistics.median(column) for column in zip(*times, strict=True)]


@torch.inference_mode()
def tera_operations(stage: StageSpec, objects: int) -> float:
    """Count the floating-point operations of a stage's matrix products, in 10^12."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        stage.module(*stage.examples(objects))
    operations: int = counter.get_total_flops()
    return operations / 1e12


def matrix_rate(device: str, dtype: torch.dtype) -> float:
    """Return the TFLOP/s of a plain matrix product."""
    left, right = (torch.randn(MATRIX, MATRIX, device=device).to(dtype) for _ in range(2))
    median = alternating([partial(milliseconds, torch.matmul, (left, right))], GPU.calls)[0]
    return 2 * MATRIX**3 / median / 1e9


class StageTimes(NamedTuple):
    """Times of one stage in one precision."""

    runs: list[tuple[float, float]]
    """milliseconds of this precision and of float32, a pair for each run"""
    tera: float
    """10^12 floating-point operations of a call"""

    @property
    def ms(self) -> float:
        """Median milliseconds over the runs."""
        return statistics.median(ours for ours, _ in self.runs)

    @property
    def ratios(self) -> list[float]:
        """Time as a multiple of float32's, of each run."""
        return [ours / plain for ours, plain in self.runs]

    @property
    def rate(self) -> float:
        """TFLOP/s."""
        return 1e3 * self.tera / self.ms


def time_stages(
    reference: TrackerModel, candidate: Candidate, objects: int, calls: int, runs: int
) -> Iterator[tuple[str, StageTimes]]:
    """Yield the times of each stage by name; stages that are the reference's own are left out."""
    plain = tracker_stages(reference)
    specs = tracker_stages(reference, dtype=candidate.dtype)
    for name in STAGES:
        theirs = getattr(candidate.stages, name)
        own = getattr(reference.stages, name)
        if theirs is own and candidate.name != PLAIN:
            continue
        inputs, plain_inputs = (stages[name].examples(objects) for stages in (specs, plain))
        pair = [partial(milliseconds, theirs, inputs), partial(milliseconds, own, plain_inputs)]
        times = [alternating(pair, calls) for _ in range(runs)]
        runs_ms = [(ms, plain_ms) for ms, plain_ms in times]
        yield name, StageTimes(runs_ms, tera_operations(plain[name], objects))


def compare_masks(reference: TrackerModel, candidate: Candidate, clip: Images, random: bool) -> Report:
    """Track the clip with both, and compare outputs and masks."""
    prompts = None
    if random:  # automatic prompts need weights that find objects; random ones do not
        places = step.points(4, reference.image_size)
        prompts = [ObjectPrompt(number, points=[place]) for number, place in enumerate(places)]
    return compare_stages(
        reference, candidate.stages, clip, ANY_COSINE, ANY_IOU, dtype=candidate.dtype, prompts=prompts
    )


def stage_table(bench: Bench, args: argparse.Namespace, figures: Figures) -> None:
    """Keep the figures of each stage in each precision, and the effect on the masks."""
    for name in (PLAIN, *args.precisions.split(",")):
        try:
            plain = Candidate(PLAIN, bench.reference.stages, torch.float32)
            candidate = plain if name == PLAIN else PRECISIONS[name](bench)
        except (EngineError, MissingExtraError) as error:
            print(f"{name}: not measured: {error}")
        else:
            _measure_candidate(bench, candidate, args, figures)


def _measure_candidate(
    bench: Bench, candidate: Candidate, args: argparse.Namespace, figures: Figures
) -> None:
    on_gpu = args.device.startswith("cuda")
    name = candidate.name
    effort = GPU if on_gpu else CPU
    report = compare_masks(bench.reference, candidate, bench.images, bench.weights.random)
    peak = matrix_rate(args.device, candidate.dtype) if on_gpu else None
    for stage, times in time_stages(bench.reference, candidate, args.objects, effort.calls, args.runs):
        cosine = min((row.cosine for row in report.outputs if row.stage == stage), default=float("nan"))
        what = f"{args.model}, stage {stage} in {name}, {objects_text(args.objects)}"
        if name != PLAIN:
            figures.add(f"{what}: time / float32", times.ratios, "x")
            figures.add(f"{what}: minimum cosine with float32", cosine, "cosine")
        figures.add(f"{what}: time", [ms for ms, _ in times.runs], "ms")
        figures.add(f"{what}: rate", times.rate, "TFLOP/s")
        if peak:
            figures.add(f"{what}: rate / rate of a matrix product", times.rate / peak, "x")
    if report.tracks is None:
        print(f"masks in {name}: none to compare {'; '.join(report.faults)}")
    elif name != PLAIN:
        what = f"{args.model}, masks in {name}"
        print(f"{report.tracks.masks} masks of {report.frames} frames")
        figures.add(f"{what}: mean IoU with float32", report.tracks.mean_iou, "IoU")
        figures.add(f"{what}: minimum IoU with float32", report.tracks.worst_iou, "IoU")


def step_table(model: TrackerModel, counts: Sequence[int], effort: Effort, figures: Figures) -> None:
    """Keep the percentiles of a whole frame, encoded and tracked, for each number of objects."""
    dtype = str(model.dtype).removeprefix("torch.")
    size = model.image_size
    for objects in counts:
        ours = step.Ours(model, objects)
        pixels = [torch.randn(1, 3, size, size, device=model.device, dtype=model.dtype) for _ in range(4)]
        turns = islice(cycle(pixels), effort.warm + effort.frames)
        times = [step.timed(ours.step, each)[0].wall_ms for each in turns]
        for part in (50, 99):
            what = f"{model.name}, whole step in {dtype}, {objects_text(objects)}, p{part}"
            figures.add(what, percentile(times[effort.warm :], part / 100), "ms")


def peer_table(args: argparse.Namespace, dtype: torch.dtype, counts: Sequence[int], figures: Figures) -> None:
    """Compare whole steps with transformers' as latency.step does, with random weights."""
    name = args.model if args.model in step.CONFIGS else "nano"
    source: Any = step.random_source(name, args.device).to(dtype)
    model = fast(step.stages(source, dtype))
    text = str(dtype).removeprefix("torch.")
    print(f"\nagainst transformers' streaming inference, both in {text}, random weights")
    frames, warm = (40, 20) if args.device.startswith("cuda") else (8, 3)
    for objects in counts:
        times = step.compare(source, model, objects, frames, warm, args.runs)
        step.report(f"frame step of {name} in {text}, {objects_text(objects)}", times, None, figures)


def fast(model: TrackerModel) -> TrackerModel:
    """Prepare the model as a node does on its device: on a GPU compiled and in CUDA graphs."""
    if model.device.type == "cuda":
        model.compile()
    use_graphs(model)
    return model


def measure(args: argparse.Namespace, figures: Figures) -> None:
    """Measure stages and whole steps, and compare with transformers if --peer is given."""
    on_gpu = args.device.startswith("cuda")
    effort, counts = (GPU, (1, 4, 16, 64)) if on_gpu else (CPU, (1, 4, 16))
    dtype = torch.bfloat16 if on_gpu else torch.float32
    print(f"{args.model}, {step.name_device(args.device)}")
    weights = Weights(args.model, args.device)
    images = list(sample_images(args.source, effort.clip, step=4))
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(weights, weights.model(torch.float32), images, Path(folder))
        stage_table(bench, args, figures)
    step_table(fast(weights.model(dtype)), counts, effort, figures)
    if args.peer:
        peer_table(args, dtype, counts, figures)


def main() -> None:
    args = arguments()
    figures = Figures("engines.engines")
    if args.threads:
        torch.set_num_threads(args.threads)
    measure(args, figures)
    figures.write(args.json)


if __name__ == "__main__":
    main()
