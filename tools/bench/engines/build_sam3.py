"""Build TensorRT plans of SAM 3's encoder at full size in bfloat16 and FP8, on a machine without a GPU.

    python -m tools.bench.engines.build_sam3                       1008 px, plans for sm89
    python -m tools.bench.engines.build_sam3 --gpu sm89 sm120
    python -m tools.bench.engines.build_sam3 --image-size 504      at another supported size

Weights are random, seeded, and of transformers' default configuration: time, memory and bytes do not depend on them,
but the cosines hold for such weights only. FP8 is calibrated on --frames frames of the bundled recording. The cosines
compare the encoder that rounds in torch as an engine would with float32, on a further frame. Every step is a process of
its own, and so its peak memory is its own too. The benchmark fails if TensorRT does not find FP8 in the network. It
cannot run a plan: `sam3-node engine check` measures its speed and checks its results on a machine with that GPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

from sam3_node.bags.bag import sample_images
from sam3_node.bags.native.reader import TABLETOP
from sam3_node.cli.progress import ProgressBar
from sam3_node.engines.export import export
from sam3_node.engines.quantize import Recipe, Scales, calibrate, export_quantised, quantise_encoder
from sam3_node.engines.specs import StageSpec, tracker_stages
from sam3_node.engines.tensorrt.builder import build, count_fp8_layers, find_library, find_target
from sam3_node.engines.validation import cosine
from sam3_node.errors import Sam3NodeError
from sam3_node.models import TrackerModel, load_tracker
from tools.bench.common import Figures, make_parser, processor
from tools.bench.latency import step

HALF, FP8 = "bfloat16", "fp8"


class BuildPlan(NamedTuple):
    """The folder of the files, and the settings of all steps."""

    folder: Path
    image_size: int
    frames: int
    threads: int

    def model(self, dtype: torch.dtype) -> TrackerModel:
        """Load the weights."""
        return load_tracker(self.folder / "weights", dtype=dtype, image_size=self.image_size)

    def onnx(self, precision: str) -> Path:
        """Return the path of the exported encoder."""
        return self.folder / f"{precision}.onnx"

    @property
    def scales(self) -> Path:
        return self.folder / "scales.json"


class StepCost(NamedTuple):
    """The result of a step; its seconds, its CPU seconds of all threads, and the peak memory of its process in MB."""

    result: Any
    seconds: float
    cpu_s: float
    peak_mb: float


def make_weights(work: BuildPlan, name: str) -> None:
    """Write random weights of a configuration of latency.step, in transformers' layout."""
    transformers.utils.logging.disable_progress_bar()
    step.random_source(name, "cpu").save_pretrained(work.folder / "weights")


def calibrate_fp8(work: BuildPlan) -> str:
    """Write the scales; return a description of the encoder."""
    images = islice(sample_images(TABLETOP, work.frames + 1), work.frames)
    model = work.model(torch.float32)
    calibrate(model, images, progress=lambda done: log(f"frame {done} of {work.frames}")).save(work.scales)
    count = sum(weight.numel() for weight in model.encode_stage.parameters()) / 1e6
    return f"an encoder of {count:.1f} M parameters at {model.image_size} px"


@torch.inference_mode()
def cosines(work: BuildPlan) -> dict[str, float]:
    """Return the cosine of each output in FP8 with float32, on a frame that the calibration did not use."""
    *_, image = sample_images(TABLETOP, work.frames + 1)
    model = work.model(torch.float32)
    pixels = model.preprocess(image)
    expected = model.encode_stage(pixels)
    rounded = quantise_encoder(model, Scales.load(work.scales))(pixels)
    names = [output.name for output in tracker_stages(model)["encode"].outputs]
    return {name: cosine(*pair) for name, *pair in zip(names, expected, rounded, strict=True)}


def export_encoder(work: BuildPlan, precision: str) -> StageSpec:
    """Write the encoder as ONNX; return its stage without the weights."""
    model = work.model(torch.bfloat16)
    stage = tracker_stages(model)["encode"]
    if precision == FP8:
        export_quantised(model, Scales.load(work.scales), work.onnx(precision))
    else:
        export(stage, work.onnx(precision))
    return stage._replace(module=nn.Identity())


def build_plan(work: BuildPlan, precision: str, stage: StageSpec, gpu: str) -> None:
    """Write the plan of an exported encoder for a generation of GPU."""
    title, bar = f"{precision}: plan for {gpu}", ProgressBar("%")
    plan = build(work.onnx(precision), stage, gpu, progress=lambda done: bar(title, round(100 * done), 100))
    bar.close()
    (work.folder / plan_name(precision, gpu)).write_bytes(plan)


def plan_name(precision: str, gpu: str) -> str:
    return f"{precision}-{gpu}.plan"


def count_fp8(work: BuildPlan) -> tuple[int, int]:
    """Count the layers of TensorRT's network that quantise to FP8, and the layers that the recipe quantises."""
    return count_fp8_layers(work.onnx(FP8)), len(
        Recipe().select_layers(work.model(torch.bfloat16).encode_stage)
    )


def measure_step(job: Callable[..., Any], work: BuildPlan, *arguments: Any) -> StepCost:
    """Run a step and measure its cost; runs in the process of the step."""
    if work.threads:
        torch.set_num_threads(work.threads)
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    result = job(work, *arguments)
    seconds, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
    return StepCost(result, seconds, cpu_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6)


class Steps:
    """Runs each step in a process of its own, and reports its cost."""

    def __init__(self, pool: ProcessPoolExecutor, work: BuildPlan, figures: Figures) -> None:
        self._pool, self._work, self._figures = pool, work, figures
        print(f"{'step':26s} {'seconds':>9s} {'CPU s':>9s} {'peak RSS, MB':>14s} {'written, MB':>13s}")

    def run(self, title: str, job: Callable[..., Any], *arguments: Any, writes: str = "") -> Any:
        """Run a step and return its result; `writes` is the pattern of its files, whose size is reported."""
        log(f"{title} ...")
        cost = self._pool.submit(measure_step, job, self._work, *arguments).result()
        written = f"{self.megabytes(writes):.1f}" if writes else "-"
        print(
            f"{title:26s} {cost.seconds:9.1f} {cost.cpu_s:9.1f} {cost.peak_mb:14.0f} {written:>13s}",
            flush=True,
        )
        self._figures.add(f"encoder build, {title}: CPU time", cost.cpu_s, "s")
        self._figures.add(f"encoder build, {title}: peak memory", cost.peak_mb, "MB")
        return cost.result

    def megabytes(self, pattern: str) -> float:
        """Return the size of the files that match a pattern."""
        return sum(file.stat().st_size for file in self._work.folder.glob(pattern)) / 1e6


def measure(steps: Steps, name: str, gpus: Sequence[str], figures: Figures) -> None:
    """Run all steps, and report the plans' sizes and the cosines."""
    steps.run("random weights", make_weights, name, writes="weights/*")
    what = steps.run("fp8: calibration", calibrate_fp8)
    for precision in (HALF, FP8):
        stage = steps.run(f"{precision}: export", export_encoder, precision, writes=f"{precision}.onnx*")
        for gpu in gpus:
            title, file = f"{precision}: plan for {gpu}", plan_name(precision, gpu)
            steps.run(title, build_plan, precision, stage, gpu, writes=file)
    quantised_layers, layers = steps.run("fp8: as TensorRT reads it", count_fp8)
    by_output = steps.run("fp8: beside float32", cosines)
    print(
        f"\n{what}; {layers} linear layers in FP8, {quantised_layers} layers of TensorRT's network that quantise to FP8"
    )
    if quantised_layers < layers:
        raise SystemExit(
            f"expected FP8 at each of {layers} layers, found {quantised_layers} in TensorRT's network"
        )
    for gpu in gpus:
        sizes = [steps.megabytes(plan_name(precision, gpu)) for precision in (HALF, FP8)]
        print(f"{gpu}: the plan in FP8 has {sizes[1] / sizes[0]:.3f} of the bytes of that in bfloat16")
        figures.add(f"encoder plan for {gpu}, bytes in FP8 / bytes in bfloat16", sizes[1] / sizes[0], "x")
    text = ", ".join(f"{output} {value:.5f}" for output, value in by_output.items())
    print(f"cosine with float32, random weights: {text}")
    lowest = min(by_output.values())
    figures.add("encoder in FP8, random weights: minimum cosine with float32", lowest, "cosine")


def heading() -> str:
    """Return a line with the machine and the versions."""
    library = find_library()
    packages = "".join(f", {name} {version(name)}" for name in ("transformers", "onnx", "nvidia-modelopt"))
    versions = f"torch {torch.__version__}{packages}, {library.name} {library.version}"
    return f"{processor()}, no GPU; {versions}\n"


def log(text: str) -> None:
    """Print a line of progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--model", choices=["full", "small"], default="full", help="small: 4.5 M parameters")
    parser.add_argument(
        "--image-size", type=int, default=0, help="side in pixels; 0: the weights' own, 1008 with full"
    )
    parser.add_argument("--gpu", nargs="+", default=["sm89"], help="GPU generations of the plans")
    parser.add_argument("--frames", type=int, default=1, help="frames for the calibration")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads of torch; 0 lets it choose")

    return parser.parse_args()


def main() -> None:
    args, figures = arguments(), Figures("engines.build_sam3")
    fresh = multiprocessing.get_context("spawn")
    try:
        for gpu in args.gpu:  # reject an unknown generation before the long steps
            find_target(find_library(), gpu)
        print(heading())
        with (
            tempfile.TemporaryDirectory(prefix="build_sam3_") as folder,
            ProcessPoolExecutor(1, fresh, max_tasks_per_child=1) as pool,
        ):
            work = BuildPlan(Path(folder), args.image_size, args.frames, args.threads)
            measure(Steps(pool, work, figures), args.model, args.gpu, figures)
    except Sam3NodeError as error:
        raise SystemExit(f"error: {error}") from error
    figures.write(args.json)


if __name__ == "__main__":
    main()
