"""Measure what decides what to do next in the first half hour on a GPU: one JSON line for each figure as it comes.

    python -m tools.bench.gpu_first --out first.jsonl                     all sections, the decisive ones first
    python -m tools.bench.gpu_first --out first.jsonl --section eager read
    python -m tools.bench.gpu_first --dry-run           all sections on a CPU with a tiny model

eager: stages and steps by number of objects, without a compiler. read: the memory read by Triton kernels, and sizes of
their launches. compile: compiled steps, CUDA graphs, cold and warm starts. fp8: the encoder in FP8, compiled and eager,
and a product. node: a node over sockets with a camera on 1080p frames, and the first detection. peer: transformers'
streaming inference on the same weights. kernels: fused attention by backend. tests: those that need a GPU. The model is
SAM 3 at full size. Its weights are random and made on the device: a cosine shows errors of the code, not accuracy.

A figure that the file has is not measured again, so that a command that was stopped goes on where it was; delete a
line to measure its figure again. No figure of a section begins later than --seconds after the section; a start of a
model and the tests are stopped then. A figure that fails is a line with its error, and the others follow.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Sam3Config, Sam3Model

from sam3_node.detection.sam3_concept import ConceptNetwork
from sam3_node.engines.fast_torch import make_fp8_encoder
from sam3_node.engines.inductor import use_graphs
from sam3_node.engines.quantize import Scales, find_layers, weights_digest
from sam3_node.engines.specs import STAGES
from sam3_node.engines.validation import TimedStage, cosine, read_clock
from sam3_node.models import TrackerModel
from sam3_node.models.checkpoints import cast_source
from sam3_node.models.sam.stages import Stages
from sam3_node.settings import EngineSettings, Settings
from sam3_node.tracking.memory import MemoryBank, get_rule
from tools.bench.common import ROOT, percentile, read_versions
from tools.bench.latency import start, step
from tools.bench.processes import Processes, add_points, next_masks
from tools.bench.tiny_weights import sam3_config
from tools.command import new_parser

SECTION_S, START_S = 420, 240
FILL = 8  # frames until the memory bank is full
KERNELS = 15  # rows of the profiler's table
LAUNCHES = (
    (128, 64, 8, 3),
    (128, 32, 8, 2),
    (128, 128, 8, 2),
    (64, 64, 4, 2),
    (64, 32, 4, 2),
    (64, 64, 8, 2),
)
"""Queries, keys, warps and stages of a block of the memory read's kernel."""
PRODUCT = (1024, 4736)
"""Inputs and outputs of the largest linear layers of SAM 3's encoder."""
ATTENTIONS = {
    "read, 4 objects": (4, 5184, 36352, 256),
    "encoder, windows": (144, 576, 576, 64),
    "encoder, global": (16, 5184, 5184, 64),
}
"""Objects or heads, queries, keys and channels. Seven memories with their pointers have 36,352 keys."""
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
KINDS = ("passed", "failed", "errors", "skipped", "deselected")
TEXT_SIZE = (32, 256)  # tokens of a phrase, and their features


class OutOfTimeError(Exception):
    """No time is left for another figure of the section. The next call goes on with it."""


class Scale(NamedTuple):
    """Sizes of the measurements: SAM 3's on a GPU, or small ones for a dry run on a CPU."""

    device: torch.device
    model: str
    """A configuration of latency.step"""
    dry: bool
    counts: tuple[int, ...]
    """Numbers of objects"""
    calls: int
    """Timed calls of a kernel, and frames of a step"""

    def shrink(self, size: int) -> int:
        """Return a size as given, or a small one in a dry run."""
        return min(size, 64) if self.dry else size


class Journal:
    """Writes figures to a file of JSON lines. Figures that the file has already are not measured again."""

    def __init__(
        self, path: Path, section: str, scale: Scale, end_s: float, context: Mapping[str, Any]
    ) -> None:
        """`end_s`: the time.monotonic() after which no figure begins. `context` goes into each line."""
        self.scale, self.errors = scale, 0
        self._path, self._section, self._context = path, section, dict(context)
        self._end_s = end_s
        path.parent.mkdir(parents=True, exist_ok=True)
        self._done = {(line["section"], line["figure"]) for line in read_lines(path)}

    @property
    def left_s(self) -> float:
        """Seconds that a process of a figure may take."""
        return max(1.0, self._end_s - time.monotonic())

    def measure(self, figure: str, unit: str, run: Callable[[], float | Mapping[str, float]]) -> None:
        """Measure a figure and write it, unless the file has it. An error of it is written instead, and counted.

        run: returns the value, or several by name, which go into one line. Raises OutOfTimeError where none is left.
        """
        if (self._section, figure) in self._done:
            return
        if time.monotonic() > self._end_s:
            raise OutOfTimeError
        start_s = time.monotonic()
        try:
            found = run()
            value = dict(found) if isinstance(found, Mapping) else float(found)
            self._write(figure, {"value": value, "unit": unit}, start_s)
        except (Exception, SystemExit) as error:  # memory, or what the GPU lacks: the others must follow
            self.note_error(figure, error, start_s)
        gc.collect()
        if self.scale.device.type == "cuda":
            torch.cuda.empty_cache()

    def note_error(self, figure: str, error: BaseException, start_s: float) -> None:
        """Write a figure that failed, and count it."""
        self.errors += 1
        text = f"{type(error).__name__}: {str(error).strip().split(chr(10))[0][:300]}"
        self._write(figure, {"error": text}, start_s)

    def _write(self, figure: str, found: Mapping[str, Any], start_s: float) -> None:
        date = datetime.now(UTC).isoformat(timespec="seconds")
        spent = {"took_s": round(time.monotonic() - start_s, 3), "date": date}
        text = json.dumps({"section": self._section, "figure": figure, **found, **spent, **self._context})
        with self._path.open("a") as file:
            file.write(text + "\n")
        self._done.add((self._section, figure))
        print(json.dumps({"section": self._section, "figure": figure, **found}), flush=True)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the figures of a journal; a line that a killed process left unfinished is dropped from the file."""
    if not path.exists():
        return []
    lines, text = [], path.read_text()
    for line in text.splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    whole = "".join(json.dumps(line) + "\n" for line in lines)
    if whole != text:
        path.write_text(whole)
    return lines


@torch.inference_mode()
def median_ms(run: Callable[[], object], scale: Scale) -> float:
    """Return the median milliseconds of a call with the device's work, after two that are not timed."""
    times = []
    for _ in range(2 + scale.calls):
        begin_s = read_clock(scale.device)
        run()
        times.append(1e3 * (read_clock(scale.device) - begin_s))
    return statistics.median(times[2:])


def make_model(scale: Scale, dtype: torch.dtype) -> TrackerModel:
    """Make the tracker with seeded random weights, on the device from the start."""
    source = cast_source(step.random_source(scale.model, str(scale.device)), scale.device, dtype)
    model = TrackerModel(source, name=scale.model, mean=[0.5] * 3, std=[0.5] * 3)
    return model.to(scale.device)


def make_clip(model: TrackerModel, frames: int) -> list[Tensor]:
    """Make pixels [1, 3, S, S] on the model's device."""
    generator = torch.Generator(model.device).manual_seed(1)
    shape = (1, 3, model.image_size, model.image_size)
    return [
        torch.randn(shape, generator=generator, device=model.device).to(model.dtype) for _ in range(frames)
    ]


def run_eager(journal: Journal) -> None:
    """Measure stages and steps as the defaults serve them."""
    scale = journal.scale
    model = make_model(scale, _half(scale))
    for count in scale.counts:
        journal.measure(f"{count} objects, stages", "ms", partial(stage_times, model, count, scale))
        journal.measure(f"{count} objects, step", "ms", partial(step_times, model, count, scale))
    journal.measure("slowest kernels, 4 objects", "ms", partial(slowest_kernels, model, 4, scale))


def run_read(journal: Journal) -> None:
    """Measure the memory read by Triton kernels, and the sizes of their launches."""
    scale = journal.scale
    if scale.dry:
        return  # the kernels need a GPU
    model = make_model(scale, _half(scale))
    for count in scale.counts:
        journal.measure(f"{count} objects", "ms", partial(triton_read, model, scale, count))
    for launch in LAUNCHES:
        journal.measure(f"4 objects, launch {launch}", "ms", partial(triton_read, model, scale, 4, launch))


def run_compile(journal: Journal) -> None:
    """Measure CUDA graphs, compiled steps, and starts with and without the cache of torch.compile."""
    scale = journal.scale
    for compiled in (False, True):
        model, what = make_model(scale, _half(scale)), "compiled" if compiled else "eager"
        if compiled:
            model.compile(backend="eager" if scale.dry else "inductor")
            for count in scale.counts:
                journal.measure(f"{what}, {count} objects", "ms", partial(step_times, model, count, scale))
            journal.measure(f"{what}, slowest kernels", "ms", partial(slowest_kernels, model, 1, scale))
        use_graphs(model)
        for count in scale.counts:
            figure = f"{what}, graphs, {count} objects"
            journal.measure(figure, "ms", partial(step_times, model, count, scale))
    starts = [("eager", start.EAGER)]
    if not scale.dry:  # a minute each
        starts += [("cold", start.COMPILED), ("warm", start.COMPILED)]
    with tempfile.TemporaryDirectory() as folder, saved_weights(scale) as weights:
        for name, how in starts:
            command = ["--model", str(weights), "--once", folder, "--how", how]
            figure = f"start, {name}, {scale.counts[-1]} objects"
            journal.measure(figure, "s", partial(start_time, command, scale, journal))


def run_fp8(journal: Journal) -> None:
    """Measure the encoder and its products in FP8 beside bfloat16."""
    scale = journal.scale
    journal.measure("encoder", "ms", partial(fp8_encoder, scale))
    journal.measure("product", "TFLOP/s", partial(product_rates, scale))


def run_node(journal: Journal) -> None:
    """Measure a node over sockets, and the first detection of SAM 3's detector."""
    scale = journal.scale
    counts = scale.counts[:1] if scale.dry else (1, 16)
    with saved_weights(scale) as weights:
        for count in counts:
            journal.measure(
                f"sockets, 1080p, {count} objects", "ms", partial(node_times, weights, count, scale)
            )
    journal.measure("sam3-concept, one phrase", "ms", partial(detection_times, scale))


def run_peer(journal: Journal) -> None:
    """Compare the step with transformers' streaming inference on the same weights."""
    scale = journal.scale
    source: Any = cast_source(step.random_source(scale.model, str(scale.device)), scale.device, _half(scale))
    model = TrackerModel(source, name=scale.model, mean=[0.5] * 3, std=[0.5] * 3)
    for count in scale.counts[:2]:
        journal.measure(
            f"step, {count} objects", "ms", partial(compare_with_peer, source, model, count, scale)
        )


def run_kernels(journal: Journal) -> None:
    """Measure fused attention by backend."""
    for name in ["flash"] if journal.scale.dry else BACKENDS:
        journal.measure(f"attention, {name}", "TFLOP/s", partial(attention_rates, journal.scale, name))


def run_tests(journal: Journal) -> None:
    """Run the tests that need a GPU."""
    journal.measure("tests on a GPU", "tests", partial(count_tests, journal))


@contextmanager
def saved_weights(scale: Scale) -> Iterator[Path]:
    """Save random weights of the model into a folder for the block."""
    with tempfile.TemporaryDirectory() as folder:
        source: Any = cast_source(
            step.random_source(scale.model, str(scale.device)), scale.device, _half(scale)
        )
        source.save_pretrained(folder)
        yield Path(folder)


def start_time(command: Sequence[str], scale: Scale, journal: Journal) -> dict[str, float]:
    """Start a model in a process of its own; return the seconds until it is warm, and of all its processors."""
    options = [f"--device={scale.device.type}", f"--objects={scale.counts[-1]}"]
    words = [sys.executable, "-m", start.MODULE, *options, *command]
    limit_s = min(START_S, journal.left_s)
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, timeout=limit_s)
    seconds, cpu_seconds = map(float, done.stdout.split()[-2:])
    return {"seconds": seconds, "CPU seconds": cpu_seconds}


def stage_times(model: TrackerModel, count: int, scale: Scale) -> dict[str, float]:
    """Return the median milliseconds of each stage of a step, the device waited for after each."""
    stages = model.stages
    timed = [TimedStage(run, partial(read_clock, scale.device)) for run in stages]
    rows, model.stages = list[list[float]](), Stages(*timed)
    try:
        ours = step.Ours(model, count)
        for pixels in make_clip(model, FILL + scale.calls):
            ours.step(pixels)
            rows.append([stage.take_ms() for stage in timed])
    finally:
        model.stages = stages
    return dict(zip(STAGES, map(statistics.median, zip(*rows[FILL:], strict=True)), strict=True))


def step_times(model: TrackerModel, count: int, scale: Scale) -> dict[str, float]:
    """Return the percentiles of the milliseconds of a whole step with a full bank, and the device's peak memory."""
    on_gpu = scale.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(scale.device)
    ours, clip = step.Ours(model, count), make_clip(model, 4)
    times = [step.timed(ours.step, clip[i % len(clip)])[0].wall_ms for i in range(FILL + scale.calls)]
    return {
        "p50": percentile(times[FILL:], 0.5),
        "p99": percentile(times[FILL:], 0.99),
        "slowest of the first frames": max(times[:FILL]),
        "peak memory, GB": torch.cuda.max_memory_allocated(scale.device) / 1e9 if on_gpu else 0.0,
    }


def slowest_kernels(model: TrackerModel, count: int, scale: Scale) -> dict[str, float]:
    """Return the milliseconds of the kernels that take the most time of a step, by name."""
    ours, clip = step.Ours(model, count), make_clip(model, FILL)
    for pixels in clip:
        ours.step(pixels)
    with torch.profiler.profile() as profile:
        ours.step(clip[0])
        read_clock(scale.device)  # waits
    on_gpu = scale.device.type == "cuda"

    def time_ms(row: Any) -> float:
        return float(row.self_device_time_total if on_gpu else row.self_cpu_time_total) / 1e3

    kind = "CUDA" if on_gpu else "CPU"
    rows = [row for row in profile.key_averages() if row.device_type.name == kind]
    return {row.key[:120]: time_ms(row) for row in sorted(rows, key=time_ms, reverse=True)[:KERNELS]}


@torch.inference_mode()
def fp8_encoder(scale: Scale) -> dict[str, float]:
    """Return the milliseconds of the encoder in FP8 and in the model's dtype, eager and compiled.

    Scales are made up, so that the cosine shows errors alone, not the accuracy of a calibration.
    """
    model = make_model(scale, _half(scale))
    amax = dict.fromkeys(find_layers(model.encode_stage), 8.0)
    scales = Scales(model=model.name, digest=weights_digest(model), frames=1, amax=amax)
    with tempfile.TemporaryDirectory() as folder:
        scales.save(Path(folder) / "scales.json")
        engine = EngineSettings(precision="fp8", scales=Path(folder) / "scales.json")
        fast = make_fp8_encoder(model, Settings(engine=engine))
    (pixels,) = make_clip(model, 1)
    encoders = {"FP8": fast, "model's dtype": model.encode_stage}
    value = cosine(*(encode(pixels)[2].float() for encode in encoders.values()))
    times = {f"{name}, eager": median_ms(partial(run, pixels), scale) for name, run in encoders.items()}
    for name, run in encoders.items():
        run.compile(backend="eager" if scale.dry else "inductor", dynamic=False)
        times[f"{name}, compiled"] = median_ms(partial(run, pixels), scale)
    return times | {"cosine": value}


@torch.inference_mode()
def triton_read(
    model: TrackerModel, scale: Scale, count: int, launch: Sequence[int] = ()
) -> dict[str, float]:
    """Return the milliseconds of the read of a full bank by the kernels and by torch, and their cosine.

    launch: the sizes of the kernel; by default, those that serve.
    """
    from sam3_node.models.sam import read_kernel

    top = make_clip(model, 1)[0].new_zeros(1, model.hidden, *model.grid).normal_()
    memories = next(MemoryBank(model, count, 7, get_rule("recent")).examples(count))
    inputs = (top, *memories._replace(memory=torch.randn_like(memories.memory)))
    sizes = read_kernel.Launch(*launch) if launch else read_kernel.choose_launch(scale.device)
    fast, slow = copy.deepcopy(model.read_stage), model.read_stage
    fast.use_kernels()
    with mock.patch.object(read_kernel, "choose_launch", return_value=sizes):
        begin_s = read_clock(scale.device)
        output = fast(*inputs)
        first_ms = 1e3 * (read_clock(scale.device) - begin_s)
        kernels_ms = median_ms(partial(fast, *inputs), scale)
    times = {"kernels": kernels_ms, "their first call": first_ms}
    if not launch:
        times["torch"] = median_ms(partial(slow, *inputs), scale)
    return times | {"cosine": cosine(output.float(), slow(*inputs).float())}


@torch.inference_mode()
def detection_times(scale: Scale) -> dict[str, float]:
    """Return the milliseconds of the first and of later detections of one phrase by SAM 3's detector.

    The encoder is left out, because the tracker's serves both.
    """
    with torch.device(scale.device):
        network = ConceptNetwork(Sam3Model(_concept_config(scale)).to(_half(scale)).eval())
    backbone: Any = network.trunk
    width, grid = len(backbone.layers[0].norm1.weight), backbone.grid
    trunk = torch.randn(1, width, grid, grid, device=scale.device, dtype=_half(scale))
    tokens, channels = TEXT_SIZE[0], 64 if scale.dry else TEXT_SIZE[1]
    text = torch.randn(1, tokens, channels, device=scale.device, dtype=_half(scale))
    mask = torch.ones(1, tokens, device=scale.device, dtype=torch.bool)

    def detect() -> object:
        return network(*network.encode(trunk), text, mask)

    begin_s = read_clock(scale.device)
    detect()
    first_ms = 1e3 * (read_clock(scale.device) - begin_s)
    return {"first": first_ms, "later": median_ms(detect, scale)}


def _concept_config(scale: Scale) -> Sam3Config:
    """Return the configuration of SAM 3's detector, or of a small one."""
    if not scale.dry:
        return Sam3Config()
    small = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 64}
    return Sam3Config(
        vision_config=sam3_config(64).vision_config.to_dict(),
        geometry_encoder_config=small | {"num_layers": 1},
        detr_encoder_config=small | {"num_layers": 1},
        detr_decoder_config=small | {"num_layers": 1, "num_queries": 4},
        mask_decoder_config={"hidden_size": 64, "num_attention_heads": 2},
    )


def compare_with_peer(source: Any, model: TrackerModel, count: int, scale: Scale) -> dict[str, float]:
    """Return the median milliseconds of a step of both, and how many times as fast ours is."""
    clip = make_clip(model, FILL + scale.calls)
    times = step.run_pair(step.Ours(model, count).step, step.Theirs(source, count).step, clip, FILL)
    return {
        "ours": times.ours.wall_ms,
        "transformers": times.theirs.wall_ms,
        "times as fast": times.ratio,
        "largest difference of logits": times.difference,
    }


def node_times(weights: Path, count: int, scale: Scale) -> dict[str, float]:
    """Run a camera and a node as processes; return the age of a frame when its masks arrive, and its stages."""
    size = (480, 270) if scale.dry else (1920, 1080)
    settings = {
        "SAM3_MODEL__NAME": str(weights),
        "SAM3_MODEL__DEVICE": scale.device.type,
        "SAM3_DETECTOR__KIND": "none",
        "SAM3_MODEL__DTYPE": str(_half(scale)).removeprefix("torch."),
        "SAM3_MODEL__COMPILE": "false",
        "SAM3_ENGINE__GRAPHS": "false",
        "SAM3_ENGINE__READ_KERNEL": "torch",
        "SAM3_CAMERA__WIDTH": str(size[0]),
        "SAM3_CAMERA__HEIGHT": str(size[1]),
    }
    with Processes(**settings) as processes:
        begin_s = time.monotonic()
        processes.start("run")
        ready_s = time.monotonic() - begin_s
        processes.start("camera", "scene:shapes")
        with processes.client() as client:
            add_points(client, count)
            ages, stages = list[float](), list[Mapping[str, int]]()
            for _ in range(FILL + 5 * scale.calls):
                masks = next_masks(client)
                ages.append((time.time_ns() - masks.capture_ns) / 1e6)
                stages.append(masks.stages_us)
    medians = {name: statistics.median(row[name] for row in stages[FILL:]) / 1e3 for name in stages[-1]}
    whole = {f"age of the masks, p{100 * part:.0f}": percentile(ages[FILL:], part) for part in (0.5, 0.99)}
    return {"seconds until ready": ready_s, **whole, **medians}


def _half(scale: Scale) -> torch.dtype:
    return torch.bfloat16 if scale.device.type == "cuda" else torch.float32


def product_rates(scale: Scale) -> dict[str, float]:
    """Return the rates of a linear layer in bfloat16, and in FP8 by its scales and the accuracy of its sums."""
    rows, width, out = 5184 // (64 if scale.dry else 1), *map(scale.shrink, PRODUCT)
    left = torch.randn(rows, width, device=scale.device)
    right = torch.randn(out, width, device=scale.device)
    one = torch.ones((), device=scale.device)
    kinds = {"scales by row": (one.expand(rows, 1).contiguous(), one.expand(1, out).contiguous())}
    if not scale.dry:  # many processors lack it
        kinds["one scale"] = (one, one)
    halves = left.bfloat16(), right.bfloat16()
    runs: dict[str, Callable[[], object]] = {"bfloat16": partial(F.linear, *halves)}
    eights = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).T
    for name, scales in kinds.items():
        for fast in (True, False):
            what = f"FP8, {name}, {'fast' if fast else 'full'} accumulation"
            options: Any = {"out_dtype": torch.bfloat16, "use_fast_accum": fast}
            runs[what] = partial(torch._scaled_mm, *eights, *scales, **options)
    return {name: 2 * rows * width * out / median_ms(run, scale) / 1e9 for name, run in runs.items()}


def attention_rates(scale: Scale, backend: str) -> dict[str, float]:
    """Return the rates of softmax(Q K) V in bfloat16."""
    rates = {}
    for name, sizes in ATTENTIONS.items():
        batch, queries, keys, width = map(scale.shrink, sizes)
        query = torch.randn(batch, 1, queries, width, device=scale.device, dtype=torch.bfloat16)
        key = torch.randn(batch, 1, keys, width, device=scale.device, dtype=torch.bfloat16)
        with sdpa_kernel([BACKENDS[backend], *([SDPBackend.MATH] if scale.dry else [])]):
            ms = median_ms(partial(F.scaled_dot_product_attention, query, key, key), scale)
        rates[name] = 4 * query.numel() * keys / ms / 1e9
    return rates


def count_tests(journal: Journal) -> dict[str, float]:
    """Run the tests that need a GPU; return how many passed, failed and so on.

    A file whose imports this machine lacks costs only its own tests. A dry run counts tests of another kind. Raises
    RuntimeError if none passed.
    """
    marked = ["-m", "gpu", *find_gpu_tests()]
    chosen = ["tests/test_geometry.py"] if journal.scale.dry else marked
    command = [sys.executable, "-m", "pytest", "--continue-on-collection-errors", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *chosen], cwd=ROOT, capture_output=True, text=True, timeout=journal.left_s
    )
    counts = read_counts(done.stdout)
    if not counts["passed"]:
        raise RuntimeError(f"no test passed: {' '.join(done.stdout.split())[-250:]}")
    return counts


def find_gpu_tests() -> list[str]:
    """Return the files with tests that need a GPU: importing all others fails where their packages are absent."""
    files = (ROOT / "tests").rglob("test_*.py")
    return sorted(str(file.relative_to(ROOT)) for file in files if "pytest.mark.gpu" in file.read_text())


def read_counts(summary: str) -> dict[str, float]:
    """Return the numbers of pytest's last lines."""
    found = {kind.removesuffix("s"): float(number) for number, kind in re.findall(r"(\d+) (\w+)", summary)}
    return {kind: found.get(kind.removesuffix("s"), 0.0) for kind in KINDS}


SECTIONS: dict[str, Callable[[Journal], None]] = {
    "eager": run_eager,
    "read": run_read,
    "compile": run_compile,
    "fp8": run_fp8,
    "node": run_node,
    "peer": run_peer,
    "kernels": run_kernels,
    "tests": run_tests,
}


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--section", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--out", type=Path, help="file of JSON lines; default: a temporary one")
    parser.add_argument("--seconds", type=float, default=SECTION_S, help="of a section [420]")
    parser.add_argument("--dry-run", action="store_true", help="small sizes on a CPU")
    return parser.parse_args(words)


def choose_scale(dry: bool) -> Scale:
    """Return the sizes. Exits with an error where there is no GPU for the real ones."""
    if dry:
        return Scale(torch.device("cpu"), "tiny", True, counts=(1, 2), calls=2)
    if not torch.cuda.is_available():
        sys.exit("expected a GPU, torch finds none; try --dry-run")
    return Scale(torch.device("cuda"), "full", False, counts=(1, 4, 16), calls=20)


def main(words: Sequence[str] | None = None) -> int:
    """Measure the sections; return 0 where all figures came, 1 where some failed, 3 where time ran out."""
    args = arguments(words)
    scale = choose_scale(args.dry_run)
    path = args.out or Path(tempfile.mkdtemp(prefix="gpu_first_")) / "first.jsonl"
    device = torch.cuda.get_device_name() if scale.device.type == "cuda" else "cpu"
    context = {"device": device, "versions": read_versions() | {"cuda": str(torch.version.cuda)}}
    errors, late = 0, False
    for section in args.section:
        start_s = time.monotonic()
        journal = Journal(path, section, scale, time.monotonic() + args.seconds, context)
        try:
            SECTIONS[section](journal)
        except OutOfTimeError:
            print(f"time is over in {section}; the same command goes on there", file=sys.stderr)
            late = True
        except Exception as error:  # the other sections must follow
            journal.note_error("preparation", error, start_s)
        errors += journal.errors
    print(f"wrote {path}", file=sys.stderr)
    return 3 if late else int(errors > 0)


if __name__ == "__main__":
    sys.exit(main())
