"""Measure what decides what to do next in the first half hour on a GPU: one JSON line for each figure as it comes.

    python -m tools.bench.gpu_first --out first.jsonl          all sections, the decisive ones first, 9 minutes in all
    python -m tools.bench.gpu_first --out first.jsonl --section eager read
    python -m tools.bench.gpu_first --dry-run           all sections on a CPU with a tiny model

eager: stages and steps by number of objects, without a compiler. read: the memory read by Triton kernels, and sizes of
their launches. compile: CUDA graphs, and compiled steps, the first of which are a cold start. fp8: products in FP8, and
the encoder, eager and compiled. node: a node over sockets with a camera on 1080p frames, the first detection, the first
start of nano with open options, starts without a compiler and with what the section compile has left. peer:
transformers' streaming inference on the same weights. kernels: fused attention by backend. tests: those that need a
GPU; their output goes beside the file. The model is SAM 3 at full size. Its weights are random and made on the device:
a cosine shows errors of the code, not accuracy.

A figure that the file has is not measured again, so that a command that was stopped goes on where it was; delete a
line to measure its figure again. A section ends after --seconds, and all of them after --total: the figure that is
measured then is cut, and left to the next call. A figure that fails is a line with its error, and the others follow; if
it has cost the process its GPU, they follow in a new process.
"""

import argparse
import copy
import gc
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Sam3Config, Sam3Model

from sam3_node.detection.sam3_concept import ConceptNetwork
from sam3_node.engines.choice import describe
from sam3_node.engines.fast_torch import make_fp8_encoder
from sam3_node.engines.inductor import keep_compiled, use_graphs
from sam3_node.engines.oom import find_device_error
from sam3_node.engines.quantize import Scales, find_layers, weights_digest
from sam3_node.engines.specs import STAGES
from sam3_node.engines.validation import TimedStage, cosine, read_clock
from sam3_node.errors import DeviceError
from sam3_node.models import TrackerModel
from sam3_node.models.checkpoints import cast_source
from sam3_node.models.sam.stages import Stages
from sam3_node.perception.loading import load_models
from sam3_node.settings import EngineSettings, Settings
from sam3_node.tracking.memory import MemoryBank, get_rule
from tools.bench.common import ROOT, percentile, read_versions
from tools.bench.latency import start, step
from tools.bench.processes import Processes, add_points, next_masks
from tools.bench.tiny_weights import sam3_config
from tools.command import new_parser, read_json_lines

SECTION_S, TOTAL_S = 420, 540
CACHE = Path(tempfile.gettempdir()) / "gpu_first"
"""Folder of what is compiled."""
FILL = 8  # frames until the memory bank is full
KERNELS, MAX_TRACE = 15, 3000  # rows of the profiler's table, characters of a traceback
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


class OutOfTimeError(BaseException):
    """No time is left for a figure of the section. The next call goes on with it. No library catches it."""


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
        self.scale, self.path, self.errors = scale, path, 0
        self._section, self._context = section, dict(context)
        self._end_s = end_s
        path.parent.mkdir(parents=True, exist_ok=True)
        self._done = {(line["section"], line["figure"]) for line in read_lines(path)}

    def measure(self, figure: str, unit: str, run: Callable[[], float | Mapping[str, float]]) -> None:
        """Measure a figure and write it, unless the file has it. An error of it is written instead, and counted.

        run: returns the value, or several by name, which go into one line. Raises OutOfTimeError where no time is
        left, and DeviceError where the figure has cost the process its GPU.
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
            if lost := find_device_error(error):
                raise lost from error
        gc.collect()
        if self.scale.device.type == "cuda":
            torch.cuda.empty_cache()

    def note_error(self, figure: str, error: BaseException, start_s: float) -> None:
        """Write a figure that failed, and count it."""
        self.errors += 1
        text = f"{type(error).__name__}: {str(error).strip().split(chr(10))[0][:300]}"
        trace = "".join(traceback.format_exception(error))[-MAX_TRACE:]
        self._write(figure, {"error": text, "traceback": trace}, start_s)

    def _write(self, figure: str, found: Mapping[str, Any], start_s: float) -> None:
        date = datetime.now(UTC).isoformat(timespec="seconds")
        spent = {"took_s": round(time.monotonic() - start_s, 3), "date": date}
        text = json.dumps({"section": self._section, "figure": figure, **found, **spent, **self._context})
        with self.path.open("a") as file:
            file.write(text + "\n")
        self._done.add((self._section, figure))
        print(json.dumps({"section": self._section, "figure": figure, **found}), flush=True)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the figures of a journal; a line that a killed process left unfinished is dropped from the file."""
    lines = read_json_lines(path)
    if path.exists():
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
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


def make_model(scale: Scale) -> TrackerModel:
    """Make the tracker with seeded random weights."""
    return wrap(make_source(scale), scale)


def make_source(scale: Scale) -> Any:
    """Make transformers' model with seeded random weights, on the device from the start."""
    return cast_source(step.random_source(scale.model, str(scale.device)), scale.device, _half(scale))


def wrap(source: Any, scale: Scale) -> TrackerModel:
    """Return the tracker of transformers' model."""
    return TrackerModel(source, name=scale.model, mean=[0.5] * 3, std=[0.5] * 3).to(scale.device)


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
    model = make_model(scale)
    for count in scale.counts:
        journal.measure(f"{count} objects, stages", "ms", partial(stage_times, model, count, scale))
        journal.measure(f"{count} objects, step", "ms", partial(step_times, model, count, scale))
    journal.measure("slowest kernels, 4 objects", "ms", partial(slowest_kernels, model, 4, scale))


def run_read(journal: Journal) -> None:
    """Measure the memory read by Triton kernels, and the sizes of their launches."""
    scale = journal.scale
    if scale.dry:
        return  # the kernels need a GPU
    from sam3_node.models.sam import read_kernel

    model = make_model(scale)
    for count in scale.counts:
        journal.measure(f"{count} objects", "ms", partial(triton_read, model, scale, count))
    for launch in read_kernel.list_launches(scale.device)[1:]:
        read_kernel.use_launch(scale.device, launch)
        journal.measure(f"4 objects, {launch}", "ms", partial(triton_read, model, scale, 4))


def run_compile(journal: Journal) -> None:
    """Measure CUDA graphs, and compiled steps; the first frames of these compile."""
    scale = journal.scale
    if not scale.dry:
        keep_compiled(CACHE)
    for compiled in (False, True):
        model, what = make_model(scale), "compiled" if compiled else "eager"
        if compiled:
            model.compile(backend="eager" if scale.dry else "inductor")
            for count in scale.counts:
                journal.measure(f"{what}, {count} objects", "ms", partial(step_times, model, count, scale))
            journal.measure(f"{what}, slowest kernels", "ms", partial(slowest_kernels, model, 1, scale))
        use_graphs(model)
        for count in scale.counts:
            figure = f"{what}, graphs, {count} objects"
            journal.measure(figure, "ms", partial(step_times, model, count, scale))


def run_fp8(journal: Journal) -> None:
    """Measure products and the encoder in FP8 beside bfloat16."""
    scale = journal.scale
    journal.measure("product", "TFLOP/s", partial(product_rates, scale))
    model = make_model(scale)
    for compiled in (False, True):
        what = "compiled" if compiled else "eager"
        journal.measure(f"encoder, {what}", "ms", partial(fp8_encoder, model, scale, compiled))


def run_node(journal: Journal) -> None:
    """Measure a node over sockets, the first detection of SAM 3's detector, and starts."""
    scale = journal.scale
    starts = {"eager": start.EAGER} | ({} if scale.dry else {"compiled, warm": start.COMPILED})
    with saved_weights(scale) as weights:
        journal.measure("sockets, 1080p", "ms", partial(node_times, weights, scale))
        journal.measure("sam3-concept, one phrase", "ms", partial(detection_times, scale))
        journal.measure("first start of nano", "s", partial(choose_for_nano, weights, scale))
        for name, how in starts.items():
            command = ["--model", str(weights), "--once", str(CACHE), "--how", how]
            journal.measure(f"start, {name}", "s", partial(start_time, command, scale))


def run_peer(journal: Journal) -> None:
    """Compare the step with transformers' streaming inference on the same weights."""
    scale = journal.scale
    source = make_source(scale)
    model = wrap(source, scale)
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
        make_source(scale).save_pretrained(folder)
        yield Path(folder)


def start_time(command: Sequence[str], scale: Scale) -> dict[str, float]:
    """Start a model in a process of its own; return the seconds until it is warm, and of all its processors."""
    options = [f"--device={scale.device.type}", f"--objects={scale.counts[-1]}"]
    words = [sys.executable, "-m", start.MODULE, *options, *command]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
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
def fp8_encoder(model: TrackerModel, scale: Scale, compiled: bool) -> dict[str, float]:
    """Return the milliseconds of the encoder in FP8 and in the model's dtype.

    Scales are made up, so that the cosine shows errors alone, not the accuracy of a calibration.
    """
    amax = dict.fromkeys(find_layers(model.encode_stage), 8.0)
    scales = Scales(model=model.name, digest=weights_digest(model), frames=1, amax=amax)
    with tempfile.TemporaryDirectory() as folder:
        scales.save(Path(folder) / "scales.json")
        engine = EngineSettings(precision="fp8", scales=Path(folder) / "scales.json")
        fast = make_fp8_encoder(model, Settings(engine=engine))
    (pixels,) = make_clip(model, 1)
    encoders = {"FP8": fast, "model's dtype": copy.deepcopy(model.encode_stage)}
    if compiled:
        for run in encoders.values():
            run.compile(backend="eager" if scale.dry else "inductor", dynamic=False)
    value = cosine(*(encode(pixels)[2].float() for encode in encoders.values()))
    return {name: median_ms(partial(run, pixels), scale) for name, run in encoders.items()} | {
        "cosine": value
    }


def choose_for_nano(weights: Path, scale: Scale) -> dict[str, float]:
    """Start nano with open options; return the seconds, and 1 for each reason of what was chosen.

    A dry run starts `weights`, which are smaller.
    """
    name = str(weights) if scale.dry else "nano"
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings.model_validate(
            {
                "model": {"name": name, "device": scale.device.type, "compile": False},
                "engine": {"folder": folder},
                "detector": {"kind": "none"},
                "tracker": {"max_objects": 4},
            }
        )
        begin_s = time.monotonic()
        load_models(settings)
        return {"seconds": time.monotonic() - begin_s, **dict.fromkeys(describe(settings), 1.0)}


@torch.inference_mode()
def triton_read(model: TrackerModel, scale: Scale, count: int) -> dict[str, float]:
    """Return the milliseconds of the read of a full bank by the kernels and by torch, and their cosine."""
    top = make_clip(model, 1)[0].new_zeros(1, model.hidden, *model.grid).normal_()
    memories = next(MemoryBank(model, count, 7, get_rule("recent")).examples(count))
    inputs = (top, *memories._replace(memory=torch.randn_like(memories.memory)))
    fast, slow = copy.deepcopy(model.read_stage), model.read_stage
    fast.use_kernels()
    begin_s = read_clock(scale.device)
    output = fast(*inputs)
    first_ms = 1e3 * (read_clock(scale.device) - begin_s)
    times = {"kernels": median_ms(partial(fast, *inputs), scale), "their first call": first_ms}
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


def node_times(weights: Path, scale: Scale) -> dict[str, float]:
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
    found = dict[str, float]()
    with Processes(**settings) as processes:
        begin_s = time.monotonic()
        processes.start("run")
        found["seconds until ready"] = time.monotonic() - begin_s
        processes.start("camera", "scene:shapes")
        with processes.client() as client:
            for added in [1] if scale.dry else [1, 15]:
                add_points(client, added)
                rows = [(next_masks(client), time.time_ns()) for _ in range(FILL + 5 * scale.calls)][FILL:]
                frames, what = [masks for masks, _ in rows], f"{len(rows[-1][0].instances)} objects"
                ages = [(now_ns - masks.capture_ns) / 1e6 for masks, now_ns in rows]
                for name in frames[-1].stages_us:
                    taken_us = statistics.median(masks.stages_us[name] for masks in frames)
                    found[f"{what}, {name}"] = taken_us / 1e3
                for part in (0.5, 0.99):
                    found[f"{what}, age of the masks, p{100 * part:.0f}"] = percentile(ages, part)
    return found


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
    done = subprocess.run([*command, *chosen], cwd=ROOT, capture_output=True, text=True)
    journal.path.with_suffix(".tests.txt").write_text(done.stdout + done.stderr)
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
    parser.add_argument("--total", type=float, default=TOTAL_S, help="seconds of all sections [540]")
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
    words = sys.argv[1:] if words is None else words
    end_s = time.monotonic() + (args := arguments(words)).total
    scale = choose_scale(args.dry_run)
    path = args.out or Path(tempfile.mkdtemp(prefix="gpu_first_")) / "first.jsonl"
    device = torch.cuda.get_device_name() if scale.device.type == "cuda" else "cpu"
    context = {"device": device, "versions": read_versions() | {"cuda": str(torch.version.cuda)}}
    errors, late = 0, False
    for section in args.section:
        start_s = time.monotonic()
        journal = Journal(path, section, scale, min(start_s + args.seconds, end_s), context)
        try:
            with cutting(min(args.seconds, end_s - start_s)):
                SECTIONS[section](journal)
        except OutOfTimeError:
            print(f"time is over in {section}; the same command goes on there", file=sys.stderr)
            late = True
        except DeviceError as error:  # a new process has the GPU, and finds the figure in the file
            print(f"{error}; a new process goes on", file=sys.stderr, flush=True)
            more = ["--out", str(path), "--total", str(end_s - time.monotonic())]
            os.execv(sys.executable, [sys.executable, "-m", "tools.bench.gpu_first", *words, *more])
        except Exception as error:  # the other sections must follow
            journal.note_error("preparation", error, start_s)
        errors += journal.errors
    print(f"wrote {path}", file=sys.stderr)
    return 3 if late else int(errors > 0)


@contextmanager
def cutting(seconds: float) -> Iterator[None]:
    """Raise OutOfTimeError in the block after some seconds, also while it waits for a process or compiles."""

    def cut(*_: object) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGALRM, cut)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


if __name__ == "__main__":
    sys.exit(main())
