"""SAM 3's encoder at full size, from weights to TensorRT plans in float16 and FP8, on a machine without a GPU.

    python tools/bench/build_sam3.py                       1008 px, plans for sm89
    python tools/bench/build_sam3.py --gpu sm89 sm120
    python tools/bench/build_sam3.py --image-size 504      another rung of the ladder

Weights are random, of transformers' default configuration and seeded: time, memory and bytes do not mind, and what the
cosines say holds for such weights alone. FP8 is calibrated on --frames frames of the bundled recording, and judged on
another one: the encoder that rounds in torch as an engine would, beside float32. Every step is a process of its own,
so that its peak of memory is, too. TensorRT must find FP8 in the network, or the benchmark fails. A plan cannot be run
here: how fast it is, and that it is right, is for a machine with that GPU (sam3-node engine check).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
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

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the node does; read when torch is imported

import step
import torch
import transformers
from _common import Saved, processor
from torch import nn

from sam3_node.bags.native.labelled_clip import TABLETOP
from sam3_node.engines.export import export
from sam3_node.engines.frames import frames_of
from sam3_node.engines.layer_diff import cosine
from sam3_node.engines.quantize import Scales, calibrate, export_quantised, quantise_encoder
from sam3_node.engines.recipes import Recipe
from sam3_node.engines.specs import StageSpec, tracker_stages
from sam3_node.engines.tensorrt.build import build, count_fp8_layers
from sam3_node.engines.tensorrt.library import find_library, find_target
from sam3_node.errors import Sam3NodeError
from sam3_node.models import TrackerModel, load_tracker

FP16, FP8 = "float16", "fp8"


class Work(NamedTuple):
    """Where the files are, and what all steps must know."""

    folder: Path
    image_size: int
    frames: int
    threads: int

    def model(self, dtype: torch.dtype) -> TrackerModel:
        return load_tracker(self.folder / "weights", dtype=dtype, image_size=self.image_size)

    def onnx(self, precision: str) -> Path:
        return self.folder / f"{precision}.onnx"

    @property
    def scales(self) -> Path:
        return self.folder / "scales.json"


class Spent(NamedTuple):
    """What a step gave, and took: seconds, CPU seconds of all threads, the most memory of its process in MB."""

    result: Any
    seconds: float
    cpu_s: float
    peak_mb: float


def make_weights(work: Work, name: str) -> None:
    """Random weights of a configuration of step.py, in transformers' layout."""
    transformers.utils.logging.disable_progress_bar()
    step.random_source(name, "cpu").save_pretrained(work.folder / "weights")


def calibrate_fp8(work: Work) -> str:
    """Write the scales; what encoder they are of."""
    images = islice(frames_of(TABLETOP, work.frames + 1), work.frames)
    model = work.model(torch.float32)
    calibrate(model, images, progress=lambda done: tell(f"frame {done} of {work.frames}")).save(work.scales)
    count = sum(weight.numel() for weight in model.encode_stage.parameters()) / 1e6
    return f"an encoder of {count:.1f} M parameters at {model.image_size} px"


@torch.inference_mode()
def cosines(work: Work) -> dict[str, float]:
    """Of each output of the encoder, rounded to FP8 and in float32, on a frame that it was not calibrated on."""
    *_, image = frames_of(TABLETOP, work.frames + 1)
    model = work.model(torch.float32)
    pixels = model.preprocess(image)
    expected = model.encode_stage(pixels)
    found = quantise_encoder(model, Scales.load(work.scales))(pixels)
    names = [port.name for port in tracker_stages(model)["encode"].outputs]
    return {name: cosine(*pair) for name, *pair in zip(names, expected, found, strict=True)}


def export_encoder(work: Work, precision: str) -> StageSpec:
    """Write the encoder; the stage as its plan must be, without the weights."""
    model = work.model(torch.float16)
    stage = tracker_stages(model)["encode"]
    if precision == FP8:
        export_quantised(model, Scales.load(work.scales), None, work.onnx(precision))
    else:
        export(stage, work.onnx(precision))
    return stage._replace(module=nn.Identity())


def build_plan(work: Work, precision: str, stage: StageSpec, gpu: str) -> None:
    title = f"{precision}: plan for {gpu}"
    plan = build(work.onnx(precision), stage, gpu, progress=lambda done: tell(f"{title} {done:4.0%}"))
    (work.folder / plan_name(precision, gpu)).write_bytes(plan)


def plan_name(precision: str, gpu: str) -> str:
    return f"{precision}-{gpu}.plan"


def count_fp8(work: Work) -> tuple[int, int]:
    """Layers of TensorRT's network that turn numbers into FP8, and layers that the recipe quantises."""
    return count_fp8_layers(work.onnx(FP8)), len(
        Recipe().select_layers(work.model(torch.float16).encode_stage)
    )


def spent(job: Callable[..., Any], work: Work, *arguments: Any) -> Spent:
    """Runs in the process of a step."""
    if work.threads:
        torch.set_num_threads(work.threads)
    begin, used = time.perf_counter(), time.process_time()
    result = job(work, *arguments)
    seconds, cpu_s = time.perf_counter() - begin, time.process_time() - used
    return Spent(result, seconds, cpu_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6)


class Steps:
    """Runs each step in a process of its own, and says what it took."""

    def __init__(self, pool: ProcessPoolExecutor, work: Work, say: Saved) -> None:
        self._pool, self._work, self._say = pool, work, say
        say(f"{'step':26s} {'seconds':>9s} {'CPU s':>9s} {'peak RSS, MB':>14s} {'written, MB':>13s}")

    def run(self, title: str, job: Callable[..., Any], *arguments: Any, writes: str = "") -> Any:
        """What the step gives; `writes`: the pattern of its files, whose size is told."""
        tell(f"{title} ...")
        found = self._pool.submit(spent, job, self._work, *arguments).result()
        written = f"{self.megabytes(writes):.1f}" if writes else "-"
        self._say(f"{title:26s} {found.seconds:9.1f} {found.cpu_s:9.1f} {found.peak_mb:14.0f} {written:>13s}")
        return found.result

    def megabytes(self, pattern: str) -> float:
        return sum(file.stat().st_size for file in self._work.folder.glob(pattern)) / 1e6


def measure(steps: Steps, name: str, gpus: Sequence[str], say: Saved) -> None:
    """All steps, and what they come to."""
    steps.run("random weights", make_weights, name, writes="weights/*")
    what = steps.run("fp8: calibration", calibrate_fp8)
    for precision in (FP16, FP8):
        stage = steps.run(f"{precision}: export", export_encoder, precision, writes=f"{precision}.onnx*")
        for gpu in gpus:
            title, file = f"{precision}: plan for {gpu}", plan_name(precision, gpu)
            steps.run(title, build_plan, precision, stage, gpu, writes=file)
    eight, layers = steps.run("fp8: as TensorRT reads it", count_fp8)
    found = steps.run("fp8: beside float32", cosines)
    say(
        f"\n{what}; {layers} linear layers in FP8, and {eight} layers of TensorRT's network that turn numbers into FP8"
    )
    if eight < layers:
        raise SystemExit(f"expected FP8 at each of {layers} layers, found {eight} in TensorRT's network")
    for gpu in gpus:
        sizes = [steps.megabytes(plan_name(precision, gpu)) for precision in (FP16, FP8)]
        say(f"{gpu}: the plan in FP8 has {sizes[1] / sizes[0]:.3f} of the bytes of that in float16")
    told = ", ".join(f"{output} {value:.5f}" for output, value in found.items())
    say(f"cosine with float32, of random weights: {told}")


def heading() -> str:
    library = find_library()
    packages = "".join(f", {name} {version(name)}" for name in ("transformers", "onnx", "nvidia-modelopt"))
    versions = f"torch {torch.__version__}{packages}, {library.name} {library.version}"
    return f"{processor()}, no GPU; {versions}\n\n$ python {' '.join(sys.argv)}"


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=["full", "small"], default="full", help="small: 4.5 M parameters")
    parser.add_argument(
        "--image-size", type=int, default=0, help="pixels; 0 is the weights' own, 1008 of full"
    )
    parser.add_argument("--gpu", nargs="+", default=["sm89"], help="generations to build plans for")
    parser.add_argument("--frames", type=int, default=1, help="to calibrate on")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads of torch; 0 lets it choose")
    parser.add_argument("--save", metavar="NAME", help="keep what is printed in tools/bench/results/NAME.txt")
    return parser.parse_args()


def main() -> None:
    args, say = arguments(), Saved()
    fresh = multiprocessing.get_context("spawn")
    try:
        for gpu in args.gpu:  # one that cannot be is told before anything takes time
            find_target(find_library(), gpu)
        say(heading())
        with (
            tempfile.TemporaryDirectory(prefix="build_sam3_") as folder,
            ProcessPoolExecutor(1, fresh, max_tasks_per_child=1) as pool,
        ):
            work = Work(Path(folder), args.image_size, args.frames, args.threads)
            measure(Steps(pool, work, say), args.model, args.gpu, say)
    except Sam3NodeError as error:
        raise SystemExit(f"error: {error}") from error
    if args.save:
        say.write(args.save)


if __name__ == "__main__":
    main()
