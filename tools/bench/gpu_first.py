"""Measure what decides what to do next in the first half hour on a GPU: one JSON line for each figure as it comes.

    python -m tools.bench.gpu_first --section kernels --out first.jsonl
    python -m tools.bench.gpu_first --section eager fast peer node --out first.jsonl --seconds 540
    python -m tools.bench.gpu_first --dry-run           all sections on a CPU with a tiny model, under a minute

kernels: copies, matrix products in bfloat16 and FP8, fused attention by backend, and the tests that need a GPU. eager:
the stages by number of objects, with dynamic and static shapes, their memory, the slowest kernels, and CUDA graphs.
fast: compiled stages in CUDA graphs. peer: transformers' streaming inference on the same weights. node: the pipeline on
1080p frames. SAM 3 at full size, random weights made on the device.

A figure that the file has is not measured again, so that a command that was stopped goes on where it was; delete a
line to measure its figure again. With --seconds, no figure begins after that time. A figure that fails is a line with
its error, and the others follow.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sam3_node.engines.fast_torch import make_fp8_encoder
from sam3_node.engines.inductor import use_graphs
from sam3_node.engines.quantize import Scales, find_layers, weights_digest
from sam3_node.engines.specs import STAGES
from sam3_node.engines.validation import cosine
from sam3_node.models import TrackerModel
from sam3_node.models.checkpoints import cast_source
from sam3_node.models.sam.stages import Stages
from sam3_node.perception.pipeline import Pipeline
from sam3_node.settings import EngineSettings, Settings, TrackerSettings
from sam3_node.tracking.memory import MemoryBank, get_rule
from sam3_node.types import Frame
from sam3_node.wire.frame_prompt import FramePrompt
from tools.bench.common import ROOT, percentile, read_versions
from tools.bench.latency import step
from tools.command import new_parser

FILL = 8  # frames until the memory bank is full
KERNELS = 15  # rows of the profiler's table
FRAME_BYTES = 1080 * 1920 * 3
MASK_BYTES = 16 * 288 * 288 * 4
PRODUCTS = {"qkv": (1024, 3072), "projection": (1024, 1024), "mlp in": (1024, 4736), "mlp out": (4736, 1024)}
"""Inputs and outputs of the linear layers of SAM 3's encoder."""
READ_WIDTH, KEYS = 256, (36352, 51964)  # 7 and 10 memories with their pointers
HEADS = {"windows": (144, 576), "global": (16, 5184)}
"""Heads times windows, and tokens, of the encoder's attentions of 64 channels."""
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
GPU_TESTS_S = 240
KINDS = ("passed", "failed", "errors", "skipped", "deselected")
UNTIMED = 1e9


class OutOfTimeError(Exception):
    """No time is left for another figure. The next call goes on with it."""


class Scale(NamedTuple):
    """Sizes of the measurements: SAM 3's on a GPU, or small ones for a dry run on a CPU."""

    device: torch.device
    model: str
    """A configuration of latency.step"""
    dry: bool
    rows: int
    """Tokens of the image"""
    counts: tuple[int, ...]
    """Numbers of objects"""
    calls: int
    """Timed calls of a kernel"""
    frames: int
    """Timed frames of a step"""

    def tokens(self, count: int) -> int:
        """Return a number of tokens: as given, or small in a dry run."""
        return max(64, count // 256) if self.dry else count

    def channels(self, count: int) -> int:
        """Return a number of channels: as given, or small in a dry run."""
        return count // 32 if self.dry else count


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

    def __contains__(self, figure: str) -> bool:
        return (self._section, figure) in self._done

    def measure(self, figure: str, unit: str, run: Callable[[], float | Mapping[str, float]]) -> None:
        """Measure a figure and write it, unless the file has it. An error of it is written instead, and counted.

        run: returns the value, or several by name, which go into one line. Raises OutOfTimeError where none is left.
        """
        if figure in self:
            return
        if time.monotonic() > self._end_s:
            raise OutOfTimeError
        start_s = time.monotonic()
        try:
            found = run()
            value = (
                {key: float(item) for key, item in found.items()}
                if isinstance(found, Mapping)
                else float(found)
            )
            self._write(figure, {"value": value, "unit": unit}, start_s)
        except (
            Exception
        ) as error:  # memory, a kernel that the GPU lacks, and anything else: the others must follow
            self.note_error(figure, error, start_s)
        gc.collect()
        if self.scale.device.type == "cuda":
            torch.cuda.empty_cache()

    def note_error(self, figure: str, error: Exception, start_s: float) -> None:
        """Write a figure that failed, and count it."""
        self.errors += 1
        text = f"{type(error).__name__}: {str(error).strip().split(chr(10))[0][:300]}"
        self._write(figure, {"error": text}, start_s)

    def _write(self, figure: str, found: Mapping[str, Any], start_s: float) -> None:
        spent = {
            "took_s": round(time.monotonic() - start_s, 3),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }
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


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.inference_mode()
def median_ms(run: Callable[[], object], scale: Scale) -> float:
    """Return the median milliseconds of a call, after two that are not timed; by the device's own clock on a GPU."""
    for _ in range(2):
        run()
    synchronise(scale.device)
    times = [_time_ms(run, scale.device) for _ in range(scale.calls)]
    return sorted(times)[len(times) // 2]


def _time_ms(run: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


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
    """Measure stages and steps without a compiler, their memory, and bfloat16 beside float32."""
    scale = journal.scale
    model = make_model(scale, _half(scale))
    for static in (False, True):
        for count in scale.counts:
            what = f"eager, {'static' if static else 'dynamic'} shapes, {count} objects"
            journal.measure(f"{what}, stages", "ms", partial(stage_times, model, count, static, scale))
            journal.measure(f"{what}, peak memory", "GB", partial(peak_memory, model, count, static, scale))
    journal.measure("eager, slowest kernels, 4 objects", "ms", partial(slowest_kernels, model, 4, scale))
    journal.measure("bfloat16 beside float32, encoder", "cosine", partial(half_cosines, scale))
    use_graphs(model)
    for count in scale.counts:
        journal.measure(f"graphs, {count} objects, step", "ms", partial(step_times, model, count, scale))


def run_fast(journal: Journal) -> None:
    """Measure the encoder in FP8, the read by Triton kernels, and compiled stages in CUDA graphs."""
    scale = journal.scale
    journal.measure("FP8 encoder beside bfloat16", "ms", partial(fp8_encoder, scale))
    for count in () if scale.dry else (1, 4, 16):  # the kernels need a GPU
        journal.measure(
            f"Triton read, {count} objects, beside torch", "ms", partial(triton_read, scale, count)
        )
    model = make_model(scale, _half(scale))
    model.compile(backend="eager" if scale.dry else "inductor")
    use_graphs(model)
    for count in scale.counts[:1] if scale.dry else (1, 16):
        journal.measure(f"compiled, {count} objects, step", "ms", partial(step_times, model, count, scale))
        journal.measure(
            f"compiled, {count} objects, stages", "ms", partial(stage_times, model, count, True, scale)
        )
    journal.measure("compiled, slowest kernels, 1 object", "ms", partial(slowest_kernels, model, 1, scale))


def run_peer(journal: Journal) -> None:
    """Compare the step with transformers' streaming inference on the same weights."""
    scale = journal.scale
    source: Any = cast_source(step.random_source(scale.model, str(scale.device)), scale.device, _half(scale))
    model = TrackerModel(source, name=scale.model, mean=[0.5] * 3, std=[0.5] * 3)
    for count in scale.counts[:2]:
        journal.measure(
            f"step, {count} objects", "ms", partial(compare_with_peer, source, model, count, scale)
        )


def run_node(journal: Journal) -> None:
    """Measure the pipeline of a node on 1080p JPEG frames: the wall clock beside the sum of its stages."""
    scale = journal.scale
    model = make_model(scale, _half(scale))
    for count in scale.counts[:1] if scale.dry else (1, 16):
        journal.measure(
            f"pipeline, 1080p, {count} objects", "ms", partial(pipeline_times, model, count, scale)
        )


def stage_times(model: TrackerModel, count: int, static: bool, scale: Scale) -> dict[str, float]:
    """Return the median milliseconds of each stage of a step, the device waited for after each."""
    stages, before = model.stages, model.static_shapes
    timed = {name: TimedStage(getattr(stages, name), scale.device) for name in STAGES}
    model.stages, model.static_shapes = Stages(**timed), static
    try:
        ours = step.Ours(model, count)
        for pixels in make_clip(model, FILL + scale.frames):
            ours.step(pixels)
    finally:
        model.stages, model.static_shapes = stages, before
    return {name: statistics.median(stage.ms[-scale.frames :]) for name, stage in timed.items()}


class TimedStage:
    """A stage that notes how long each call takes, with the device's work."""

    def __init__(self, run: Any, device: torch.device) -> None:
        self.run, self.device, self.ms = run, device, list[float]()
        self.takes_any_width = getattr(run, "takes_any_width", False)
        self.max_objects = getattr(run, "max_objects", None)

    def __call__(self, *inputs: Tensor) -> Any:
        synchronise(self.device)
        start = time.perf_counter()
        out = self.run(*inputs)
        synchronise(self.device)
        self.ms.append(1e3 * (time.perf_counter() - start))
        return out


def peak_memory(model: TrackerModel, count: int, static: bool, scale: Scale) -> float:
    """Return the largest memory of the device while frames are stepped, weights and bank included."""
    if scale.device.type != "cuda":
        return 0.0
    torch.cuda.reset_peak_memory_stats(scale.device)
    before, model.static_shapes = model.static_shapes, static
    try:
        ours = step.Ours(model, count)
        for pixels in make_clip(model, FILL + 1):
            ours.step(pixels)
    finally:
        model.static_shapes = before
    return torch.cuda.max_memory_allocated(scale.device) / 1e9


def step_times(model: TrackerModel, count: int, scale: Scale) -> dict[str, float]:
    """Return the percentiles of the milliseconds of a whole step with a full bank."""
    ours, clip = step.Ours(model, count), make_clip(model, 4)
    times = [step.timed(ours.step, clip[i % len(clip)])[0].wall_ms for i in range(FILL + scale.frames)][FILL:]
    return {"p50": percentile(times, 0.5), "p99": percentile(times, 0.99)}


def slowest_kernels(model: TrackerModel, count: int, scale: Scale) -> dict[str, float]:
    """Return the milliseconds of the kernels that take the most time of a step, by name."""
    ours, clip = step.Ours(model, count), make_clip(model, FILL)
    for pixels in clip:
        ours.step(pixels)
    with torch.profiler.profile() as profile:
        ours.step(clip[0])
        synchronise(scale.device)
    on_gpu = scale.device.type == "cuda"

    def time_ms(row: Any) -> float:
        return float(row.self_device_time_total if on_gpu else row.self_cpu_time_total) / 1e3

    kind = "CUDA" if on_gpu else "CPU"
    rows = [row for row in profile.key_averages() if row.device_type.name == kind]
    return {row.key[:120]: time_ms(row) for row in sorted(rows, key=time_ms, reverse=True)[:KERNELS]}


@torch.inference_mode()
def half_cosines(scale: Scale) -> dict[str, float]:
    """Return the smallest cosine of each of the encoder's outputs in bfloat16 with float32, on two frames."""
    exact, half = make_model(scale, torch.float32), make_model(scale, torch.bfloat16)
    found: dict[str, float] = {}
    for pixels in make_clip(exact, 2):
        pair = (exact.encode(pixels), half.encode(pixels))
        for name in ("fine", "middle", "top"):
            value = cosine(*(getattr(features, name).float() for features in pair))
            found[name] = min(found.get(name, 1.0), value)
    return found


@torch.inference_mode()
def fp8_encoder(scale: Scale) -> dict[str, float]:
    """Return the milliseconds of the compiled encoder in FP8 and in the model's dtype, and the cosine of their outputs.

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
    value = cosine(fast(pixels)[2].float(), model.encode_stage(pixels)[2].float())
    if not scale.dry:
        fast.compile(dynamic=False)
        model.encode_stage.compile(dynamic=False)
    times = [median_ms(partial(run, pixels), scale) for run in (fast, model.encode_stage)]
    return {"FP8": times[0], "model's dtype": times[1], "cosine": value}


@torch.inference_mode()
def triton_read(scale: Scale, count: int) -> dict[str, float]:
    """Return the milliseconds of the read of a full bank by the kernels and by torch, and their cosine."""
    model = make_model(scale, _half(scale))
    top, read = make_clip(model, 1)[0].new_zeros(1, model.hidden, *model.grid).normal_(), model.read_stage
    memories = next(MemoryBank(model, count, 7, get_rule("recent")).examples(count))
    memories = memories._replace(memory=torch.randn_like(memories.memory))
    fast = copy.deepcopy(read)
    fast.use_kernels()
    value = cosine(fast(top, *memories).float(), read(top, *memories).float())
    times = [median_ms(partial(run, top, *memories), scale) for run in (fast, read)]
    return {"kernels": times[0], "torch": times[1], "cosine": value}


def compare_with_peer(source: Any, model: TrackerModel, count: int, scale: Scale) -> dict[str, float]:
    """Return the median milliseconds of a step of both, and how many times as fast ours is."""
    clip = make_clip(model, FILL + scale.frames)
    times = step.run_pair(step.Ours(model, count).step, step.Theirs(source, count).step, clip, FILL)
    return {
        "ours": times.ours.wall_ms,
        "transformers": times.theirs.wall_ms,
        "times as fast": times.ratio,
        "largest difference of logits": times.difference,
    }


def pipeline_times(model: TrackerModel, count: int, scale: Scale) -> dict[str, float]:
    """Return the percentiles of a frame's milliseconds, and the median of each of its stages."""
    height, width = (270, 480) if scale.dry else (1080, 1920)
    pipeline = Pipeline(model, TrackerSettings(max_objects=count), "bench")
    frames = [_draw_frame(number, height, width) for number in range(FILL + scale.frames)]
    times, stages = list[float](), list[Mapping[str, int]]()
    for number, frame in enumerate(frames):
        start = time.perf_counter()
        stages.append(pipeline.step(frame).stages_us)
        times.append(1e3 * (time.perf_counter() - start))
        if number == 0:
            for x, y in step.points(count, width):
                pipeline.add(FramePrompt(points=[(x, min(y, height - 1))]))
    medians = {name: statistics.median(row[name] for row in stages[FILL:]) / 1e3 for name in stages[-1]}
    wall = {f"wall, p{100 * part:.0f}": percentile(times[FILL:], part) for part in (0.5, 0.99)}
    return {**wall, "sum of stages": sum(medians.values()), **medians}


def _draw_frame(number: int, height: int, width: int) -> Frame:
    rows, columns = np.mgrid[:height, :width]
    image = np.stack([rows, columns + 3 * number, rows + columns], axis=-1).astype(np.uint8)
    data = cv2.imencode(".jpg", image)[1].tobytes()
    return Frame("bench", number, number * 33_000_000, width, height, "jpeg", data)


def _half(scale: Scale) -> torch.dtype:
    return torch.bfloat16 if scale.device.type == "cuda" else torch.float32


STEPS: dict[str, Callable[[Journal], None]] = {
    "eager": run_eager,
    "fast": run_fast,
    "peer": run_peer,
    "node": run_node,
}


def run_kernels(journal: Journal) -> None:
    """Measure all kernels."""
    scale = journal.scale
    journal.measure("copies", "GB/s", partial(copy_rates, scale))
    for name, sizes in PRODUCTS.items():
        width, out = (scale.channels(size) for size in sizes)
        journal.measure(f"product, {name}, bfloat16", "TFLOP/s", partial(bfloat16_rate, scale, width, out))
        for rows in (True,) if scale.dry else (False, True):  # some CPUs lack the other
            what = "scales by row and column" if rows else "one scale each"
            journal.measure(
                f"product, {name}, FP8, {what}", "TFLOP/s", partial(fp8_rate, scale, width, out, rows)
            )
    for figure, rate in attentions(scale):
        journal.measure(f"attention, {figure}", "TFLOP/s", rate)
    journal.measure("tests on a GPU", "tests", partial(count_tests, scale))


def copy_rates(scale: Scale) -> dict[str, float]:
    """Return the rates of copies of a 1080p frame to the device, and of 16 masks' logits back."""
    rates, pinned = {}, scale.device.type == "cuda"
    for name, size in (("frame", FRAME_BYTES), ("logits", MASK_BYTES)):
        for pin in (False, True) if pinned else (False,):
            host = torch.empty(size, dtype=torch.uint8, pin_memory=pin)
            there = torch.empty(size, dtype=torch.uint8, device=scale.device)
            pair = (there, host) if name == "frame" else (host, there)
            ms = median_ms(partial(_copy, *pair), scale)
            rates[f"{name}, {'pinned' if pin else 'pageable'}"] = size / ms / 1e6
    return rates


def _copy(to: Tensor, source: Tensor) -> None:
    to.copy_(source, non_blocking=True)


def bfloat16_rate(scale: Scale, width: int, out: int) -> float:
    """Return the rate of a linear layer with bias."""
    x = torch.randn(scale.rows, width, device=scale.device, dtype=torch.bfloat16)
    weight, bias = torch.randn_like(x[:1]).expand(out, -1).contiguous(), x.new_zeros(out)
    ms = median_ms(lambda: F.linear(x, weight, bias), scale)
    return 2 * scale.rows * width * out / ms / 1e9


def fp8_rate(scale: Scale, width: int, out: int, by_row: bool) -> float:
    """Return the rate of the same product of FP8 numbers, with bfloat16 outputs."""
    left = torch.randn(scale.rows, width, device=scale.device).to(torch.float8_e4m3fn)
    right = torch.randn(out, width, device=scale.device).to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=scale.device)
    scales = (
        (one.expand(scale.rows, 1).contiguous(), one.expand(1, out).contiguous()) if by_row else (one, one)
    )
    multiply = partial(torch._scaled_mm, left, right, *scales, out_dtype=torch.bfloat16, use_fast_accum=False)
    return 2 * scale.rows * width * out / median_ms(multiply, scale) / 1e9


def attentions(scale: Scale) -> Iterator[tuple[str, partial[float]]]:
    """Yield each attention and how to measure its rate: the read's, masked or not, and the encoder's."""
    for backend in BACKENDS if scale.device.type == "cuda" else ["flash"]:
        for keys in KEYS:
            for masked in (False, True):
                for count in scale.counts[:3]:
                    shapes = ((count, 1, scale.rows), scale.tokens(keys), READ_WIDTH)
                    what = (
                        f"read, {keys} keys, {'masked' if masked else 'no mask'}, {count} objects, {backend}"
                    )
                    yield what, partial(attention_rate, scale, backend, *shapes, masked)
        for name, (heads, tokens) in HEADS.items():
            shapes = ((1, heads, scale.tokens(tokens)), scale.tokens(tokens), 64)
            yield f"encoder, {name}, {backend}", partial(attention_rate, scale, backend, *shapes, False)


def attention_rate(
    scale: Scale, backend: str, shape: tuple[int, int, int], keys: int, width: int, masked: bool
) -> float:
    """Return the rate of softmax(Q K) V for queries [*shape, width]."""
    query = torch.randn(*shape, width, device=scale.device, dtype=torch.bfloat16)
    key = torch.randn(*shape[:2], keys, width, device=scale.device, dtype=torch.bfloat16)
    mask = torch.ones(shape[0], 1, 1, keys, device=scale.device, dtype=torch.bool) if masked else None
    with sdpa_kernel([BACKENDS[backend], *([SDPBackend.MATH] if scale.dry else [])]):
        ms = median_ms(lambda: F.scaled_dot_product_attention(query, key, key, mask), scale)
    return 4 * query.numel() * keys / ms / 1e9


def count_tests(scale: Scale) -> dict[str, float]:
    """Run the tests that need a GPU; return how many passed, failed and so on.

    A dry run takes a file that has none of them, and counts what it leaves out.
    """
    where = "tests/test_geometry.py" if scale.dry else "tests"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", where]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=GPU_TESTS_S)
    words = done.stdout.replace(",", " ").split()
    if not scale.dry:
        print(done.stdout[-4000:], file=sys.stderr)
    return {kind: float(words[words.index(kind) - 1]) if kind in words else 0.0 for kind in KINDS}


SECTIONS = {"kernels": run_kernels, **STEPS}


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--section", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--out", type=Path, help="file of JSON lines; default: a temporary one")
    parser.add_argument("--seconds", type=float, default=UNTIMED, help="begin no figure after this time")
    parser.add_argument("--dry-run", action="store_true", help="small sizes on a CPU")
    return parser.parse_args(words)


def choose_scale(dry: bool) -> Scale:
    """Return the sizes. Exits with an error where there is no GPU for the real ones."""
    if dry:
        return Scale(torch.device("cpu"), "tiny", True, rows=64, counts=(1, 2), calls=2, frames=2)
    if not torch.cuda.is_available():
        sys.exit("expected a GPU, torch finds none; try --dry-run")
    return Scale(torch.device("cuda"), "full", False, rows=5184, counts=(1, 4, 16, 64), calls=30, frames=20)


def main(words: Sequence[str] | None = None) -> int:
    """Measure the sections; return 0 where all figures came, 1 where some failed, 3 where time ran out."""
    args = arguments(words)
    scale = choose_scale(args.dry_run)
    path = args.out or Path(tempfile.mkdtemp(prefix="gpu_first_")) / "first.jsonl"
    device = torch.cuda.get_device_name() if scale.device.type == "cuda" else "cpu"
    context = {"device": device, "versions": read_versions() | {"cuda": str(torch.version.cuda)}}
    errors, end_s = 0, time.monotonic() + args.seconds
    for section in args.section:
        start_s = time.monotonic()
        journal = Journal(path, section, scale, end_s, context)
        try:
            SECTIONS[section](journal)
        except OutOfTimeError:
            print(f"time is over in {section}; the same command goes on there", file=sys.stderr)
            return 3
        except Exception as error:  # the other sections must follow
            journal.note_error("preparation", error, start_s)
        errors += journal.errors
    print(f"wrote {path}", file=sys.stderr)
    return int(errors > 0)


if __name__ == "__main__":
    sys.exit(main())
