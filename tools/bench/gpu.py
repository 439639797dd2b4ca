"""Measure what decides what to do next in the first half hour on a GPU: one JSON line for each figure as it comes.

    python -m tools.bench.gpu --out first.jsonl --minutes 9         all sections, the decisive ones first
    python -m tools.bench.gpu --out first.jsonl --minutes 15 --pack PACK   then training.pack in what remains
    python -m tools.bench.gpu --out first.jsonl --section together node
    python -m tools.bench.gpu --dry-run           all sections on a CPU with a tiny model

tests: those that need a GPU; their output goes beside the file as it comes. together: steps of SAM 3 by combination of
options, loaded as the product loads them, so that a line is a setting. published: SAM 2.1 in its four sizes, and
EdgeTAM. multiplex: steps of SAM 3.1, whose objects share memories by 16. node: a node over sockets with a camera on
1080p frames, the first detection, and the first mask from an empty cache. ahead: replays that encode the next frame
while this one's objects are tracked, beside plain ones, with and without a stride. cameras: rounds of one to four
cameras, encoded one by one and together. peer: transformers' streaming inference on the same weights, under autocast.
Models have their full sizes and random weights, and scales of FP8 are made up.

A figure that the file has is not measured again, so that a command that was stopped goes on where it was; delete a
line to measure its figure again. Each section has a share of the minutes, and what one leaves goes to those after it:
the figure that is measured when a share is over is cut, and left to the next call. A figure that fails is a line with
its error, and the others follow; if it has cost the process its GPU, they follow in a new process.
"""

import argparse
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
from safetensors.torch import save_file
from torch import Tensor
from transformers import Sam3Config, Sam3Model

from sam3_node.detection.sam3_concept import ConceptNetwork
from sam3_node.engines.oom import find_device_error
from sam3_node.engines.options import resolve
from sam3_node.engines.quantize import Scales, find_layers, weights_digest
from sam3_node.engines.validation import read_clock
from sam3_node.errors import DeviceError
from sam3_node.models import TrackerModel, load_tracker
from sam3_node.models.sam31.loading import STEM
from sam3_node.models.sam31.random_weights import full_sizes, random_tensors, small_sizes
from sam3_node.models.weight_files import cast_source
from sam3_node.perception.loading import load_models
from sam3_node.settings import Settings
from sam3_node.tracking import ObjectPrompt
from tools.bench import parallel
from tools.bench.common import ROOT, percentile, read_versions
from tools.bench.latency import step
from tools.bench.processes import Processes, add_points, next_masks
from tools.bench.tiny_weights import sam3_config
from tools.command import new_parser, read_json_lines

MINUTES = 9.0
CACHE = Path(tempfile.gettempdir()) / "sam3_gpu_bench"
"""Folder of what is compiled."""
KERNELS = 15
"""Rows of the profiler's table."""
MAX_TRACE = 3000
"""Characters of a traceback."""
PRODUCT = (1024, 4736)
"""Inputs and outputs of the largest linear layers of SAM 3's encoder."""
READ = (5184, 36352, 256, 64)
"""Queries, keys, and channels of keys and values of SAM 3's memory read: 7 memories and 16 pointers."""
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
    fill: int = 20
    """Frames until the memory bank is full: 16 pointers and the prompted frame, and some more. A dry run is content
    with a few."""
    watched: int = 20
    """Frames after a new object that are watched."""

    def shrink(self, size: int) -> int:
        """Return a size as given, or a small one in a dry run."""
        return min(size, 64) if self.dry else size


class Journal:
    """Writes figures to a file of JSON lines. Figures that the file has already are not measured again."""

    def __init__(
        self, path: Path, section: str, scale: Scale, end_s: float, context: Mapping[str, Any]
    ) -> None:
        """`end_s`: the time.monotonic() after which no figure begins. `context` goes into each line."""
        self.scale = scale
        self.path = path
        self.errors = 0
        self._section = section
        self._context = dict(context)
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
        release(self.scale)

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


def make_source(scale: Scale, name: str = "") -> Any:
    """Make transformers' model with seeded random weights, on the device from the start."""
    return cast_source(step.random_source(name or scale.model, str(scale.device)), scale.device, _half(scale))


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


class Variant(NamedTuple):
    """A combination of settings to time together."""

    name: str
    counts: tuple[int, ...] = (1, 4, 16)
    settings: Mapping[str, Mapping[str, Any]] = {}


FP8: Mapping[str, Any] = {"precision": "fp8"}
VARIANTS = (
    Variant("defaults"),
    Variant("FP8", settings={"engine": FP8}),
    Variant("defaults, pooled", (16,), {"tracker": {"read": "pooled"}}),
    Variant("FP8, pooled", (16,), {"engine": FP8, "tracker": {"read": "pooled"}}),
)
PROFILED = ("defaults", "FP8")
"""Variants whose slowest kernels are told."""


def run_together(journal: Journal) -> None:
    """Measure steps with combinations of options, loaded as the product loads them."""
    scale = journal.scale
    with saved_weights(scale) as weights:
        for variant in VARIANTS:
            settings = make_settings(weights, scale, variant)
            loaded = Loaded(settings)
            for count in variant.counts if not scale.dry else scale.counts[:1]:
                figure = f"{variant.name}, {count} objects"
                journal.measure(figure, "ms", partial(loaded.step_times, count, scale))
            if variant.name in PROFILED and not scale.dry:
                figure = f"{variant.name}, slowest kernels, 1 object"
                journal.measure(figure, "ms", partial(loaded.slowest_kernels, 1, scale))


EIGHT_GROUPS = {"tracker": {"max_objects": 128}}
MULTIPLEX_VARIANTS = (
    Variant("defaults", (1, 16, 64, 128), EIGHT_GROUPS),
    Variant("FP8", (1, 16, 64, 128), {"engine": FP8, **EIGHT_GROUPS}),
)
PUBLISHED = ("sam2.1-tiny", "sam2.1-small", "sam2.1-base-plus", "sam2.1-large", "edgetam")
"""Configurations of the weights that can be downloaded, apart from those of SAM 3."""
PUBLISHED_SIZES = (0, 512)
"""Sizes of the image in pixels; 0 for the weights' own."""


def run_multiplex(journal: Journal) -> None:
    """Measure steps of SAM 3.1 by number of objects, loaded as the product loads it."""
    scale = journal.scale
    sizes = small_sizes() if scale.dry else full_sizes()
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder)
        save_file(random_tensors(sizes), weights / f"{STEM}.safetensors")
        for variant in MULTIPLEX_VARIANTS:
            settings = make_settings(weights, scale, variant)
            loaded = Loaded(settings)
            for count in variant.counts if not scale.dry else scale.counts[:1]:
                figure = f"{variant.name}, {count} objects"
                journal.measure(figure, "ms", partial(loaded.step_times, count, scale))
            if variant.name in PROFILED and not scale.dry:
                figure = f"{variant.name}, slowest kernels, 16 objects"
                journal.measure(figure, "ms", partial(loaded.slowest_kernels, 16, scale))


def run_published(journal: Journal) -> None:
    """Measure steps of SAM 2.1 in its four sizes and of EdgeTAM, at their own image size and at 512 pixels."""
    scale = journal.scale
    for name in PUBLISHED[:1] if scale.dry else PUBLISHED:
        with saved_weights(scale, "tiny" if scale.dry else name) as weights:
            for size in PUBLISHED_SIZES[:1] if scale.dry else PUBLISHED_SIZES:
                settings = make_settings(
                    weights, scale, Variant("", settings={"model": {"image_size": size}})
                )
                loaded = Loaded(settings)
                for count in scale.counts:
                    figure = f"{name}, {size or 'own'} pixels, {count} objects"
                    journal.measure(figure, "ms", partial(loaded.step_times, count, scale))


class Loaded:
    """A tracker that is loaded and warmed up when it is first used."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._model: TrackerModel | None = None
        self._seconds = 0.0

    @property
    def model(self) -> TrackerModel:
        """The tracker, as a node would have it before its first frame."""
        if self._model is None:
            torch._dynamo.reset()
            begin_s = time.monotonic()
            self._model, _ = load_models(self._settings)
            self._seconds = time.monotonic() - begin_s
        return self._model

    def step_times(self, count: int, scale: Scale) -> dict[str, float]:
        """Return what the function `step_times` does, and the seconds of the start."""
        model = self.model
        if "(torch:" in model.name:
            raise RuntimeError(f"the options cannot serve: {model.name}")
        return step_times(model, count, scale) | {"seconds until ready": self._seconds}

    def slowest_kernels(self, count: int, scale: Scale) -> dict[str, float]:
        """See `slowest_kernels`."""
        return slowest_kernels(self.model, count, scale)


def make_settings(weights: Path, scale: Scale, variant: Variant) -> Settings:
    """Return the settings of a variant; FP8 has made-up scales."""
    sections: dict[str, dict[str, Any]] = {
        "model": {"name": str(weights), "device": scale.device.type},
        "engine": {"folder": str(CACHE), "min_cosine": 0.01, "min_iou": 0.01, "max_time": 0},
        "detector": {"kind": "none"},
        "tracker": {"max_objects": 16 if not scale.dry else 2},
    }
    for section, values in variant.settings.items():
        sections[section] |= values
    if sections["model"].get("compile") and scale.dry:
        sections["model"]["compile"] = False  # no compiler in a dry run
    if sections["engine"].get("precision") == "fp8":
        sections["engine"]["scales"] = str(make_scales(weights, scale))
    return resolve(Settings.model_validate(sections))


def make_scales(weights: Path, scale: Scale) -> Path:
    """Write made-up scales of the encoder beside weights."""
    model = load_tracker(str(weights), device=scale.device, dtype=_half(scale))
    amax = dict.fromkeys(find_layers(model.encode_stage), 8.0)
    path = weights / "scales.json"
    Scales(model=model.name, digest=weights_digest(model), frames=1, amax=amax).save(path)
    return path


def run_node(journal: Journal) -> None:
    """Measure a node over sockets, the first detection of SAM 3's detector, and first masks."""
    scale = journal.scale
    journal.measure("first mask of nano, empty cache", "s", partial(first_mask, None, scale))
    with saved_weights(scale) as weights:
        journal.measure("first mask of SAM 3, empty cache", "s", partial(first_mask, weights, scale))
        journal.measure("sockets, 1080p", "ms", partial(node_times, weights, scale))
    journal.measure("sam3-concept, one phrase", "ms", partial(detection_times, scale))


def run_ahead(journal: Journal) -> None:
    """Measure replays of SAM 3 that encode ahead, beside plain ones."""
    scale = journal.scale
    with saved_weights(scale) as weights:
        loaded = parallel.Loaded(make_settings(weights, scale, Variant("")))
        for count in scale.counts:
            for stride in (1, 4):
                figure = f"{count} objects, stride {stride}"
                run = partial(parallel.compare_replays, loaded, count, stride, 2 if scale.dry else 300)
                journal.measure(figure, "frames/s", run)


def run_cameras(journal: Journal) -> None:
    """Measure rounds of several cameras of SAM 3, encoded one by one and together."""
    scale = journal.scale
    with saved_weights(scale) as weights:
        loaded = parallel.Loaded(make_settings(weights, scale, Variant("")))
        for count in scale.counts[:2]:
            run = partial(parallel.compare_rounds, loaded, count, scale.calls)
            journal.measure(f"{count} objects of each camera", "ms", run)


def run_peer(journal: Journal) -> None:
    """Compare the eager step with transformers' streaming inference on the same weights."""
    scale = journal.scale
    source = make_source(scale)
    model = wrap(source, scale)
    if scale.device.type == "cuda":
        model.use_kernels()
    for count in scale.counts:
        journal.measure(
            f"step, {count} objects", "ms", partial(compare_with_peer, source, model, count, scale)
        )


def run_tests(journal: Journal) -> None:
    """Run the tests that need a GPU."""
    journal.measure("tests on a GPU", "tests", partial(count_tests, journal))


@contextmanager
def saved_weights(scale: Scale, name: str = "") -> Iterator[Path]:
    """Save random weights of a configuration, by default the scale's, into a folder for the block."""
    with tempfile.TemporaryDirectory() as folder:
        source = make_source(scale, name)
        source.save_pretrained(folder)
        del source
        release(scale)
        yield Path(folder)


def release(scale: Scale) -> None:
    """Free what nothing uses any more."""
    if scale.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def step_times(model: TrackerModel, count: int, scale: Scale) -> dict[str, float]:
    """Return the milliseconds of whole steps, and the device's peak memory.

    p50 and p99 are of full banks. "while banks fill" is the slowest of the first frames, "after a new object" the
    slowest of those after the last of the objects was removed and added again.
    """
    on_gpu = scale.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(scale.device)
    ours = step.Ours(model, count)
    clip = make_clip(model, 4)
    filling = run_steps(ours, clip, scale.fill)
    full = run_steps(ours, clip, 5 * scale.calls)
    ours.tracker.remove(count - 1)
    ours.prompts = [ObjectPrompt(count - 1, points=[[model.image_size / 2] * 2])]
    prompted, *after = run_steps(ours, clip, scale.watched)
    return {
        "p50": percentile(full, 0.5),
        "p99": percentile(full, 0.99),
        "while banks fill": max(filling[1:]),
        "after a new object": max(after),
        "frame of the prompt": prompted,
        "peak memory, GB": torch.cuda.max_memory_allocated(scale.device) / 1e9 if on_gpu else 0.0,
    }


def run_steps(ours: step.Ours, clip: Sequence[Tensor], frames: int) -> list[float]:
    """Return the milliseconds of each of the next steps."""
    return [step.timed(ours.step, clip[number % len(clip)])[0].wall_ms for number in range(frames)]


def slowest_kernels(model: TrackerModel, count: int, scale: Scale) -> dict[str, float]:
    """Return the milliseconds of the kernels that take the most time of a step, by name."""
    ours = step.Ours(model, count)
    clip = make_clip(model, scale.fill)
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


def first_mask(weights: Path | None, scale: Scale) -> dict[str, float]:
    """Start a node and a camera as a user does, with empty caches; return the seconds until masks arrive.

    weights: nano by default. Triton's and this package's caches are new folders.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "SAM3_MODEL__NAME": "nano" if weights is None else str(weights),
            "SAM3_MODEL__DEVICE": scale.device.type,
            "SAM3_DETECTOR__KIND": "none",
            "SAM3_ENGINE__FOLDER": f"{folder}/engines",
            "TRITON_CACHE_DIR": f"{folder}/triton",
        }
        begin_s = time.monotonic()
        with Processes(**settings) as processes:
            processes.start("run")
            found = {"node is ready": time.monotonic() - begin_s}
            processes.start("camera", "scene:shapes")
            with processes.client() as client:
                add_points(client, 1)
                while not next_masks(client).instances:
                    pass
        return found | {"first mask": time.monotonic() - begin_s}


@torch.inference_mode()
def detection_times(scale: Scale) -> dict[str, float]:
    """Return the milliseconds of the first and of later detections of one phrase by SAM 3's detector.

    The encoder is left out, because the tracker's serves both.
    """
    with torch.device(scale.device):
        network = ConceptNetwork(Sam3Model(_concept_config(scale)).to(_half(scale)).eval())
    backbone: Any = network.trunk
    width = len(backbone.layers[0].norm1.weight)
    grid = backbone.grid
    trunk = torch.randn(1, width, grid, grid, device=scale.device, dtype=_half(scale))
    tokens = TEXT_SIZE[0]
    channels = 64 if scale.dry else TEXT_SIZE[1]
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
    clip = make_clip(model, scale.fill + scale.calls)
    theirs = step.Theirs(source, count)

    def step_theirs(pixels: Tensor) -> Tensor:
        # transformers mixes float32 into a model in bfloat16
        with torch.autocast(scale.device.type, torch.bfloat16, enabled=not scale.dry):
            return theirs.step(pixels)

    with torch.inference_mode():
        times = step.run_pair(step.Ours(model, count).step, step_theirs, clip, scale.fill)
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
                wanted = scale.fill + 5 * scale.calls
                rows = [(next_masks(client), time.time_ns()) for _ in range(wanted)][scale.fill :]
                frames = [masks for masks, _ in rows]
                what = f"{len(rows[-1][0].instances)} objects"
                ages = [(now_ns - masks.capture_ns) / 1e6 for masks, now_ns in rows]
                for name in frames[-1].stages_us:
                    taken_us = statistics.median(masks.stages_us[name] for masks in frames)
                    found[f"{what}, {name}"] = taken_us / 1e3
                for part in (0.5, 0.99):
                    found[f"{what}, age of the masks, p{100 * part:.0f}"] = percentile(ages, part)
    return found


def _half(scale: Scale) -> torch.dtype:
    return torch.bfloat16 if scale.device.type == "cuda" else torch.float32


def count_tests(journal: Journal) -> dict[str, float]:
    """Run the tests that need a GPU; return how many passed, failed and so on.

    A file whose imports this machine lacks costs only its own tests. A dry run counts tests of another kind. Raises
    RuntimeError if none passed.
    """
    marked = ["-m", "gpu", *find_gpu_tests()]
    chosen = ["tests/test_geometry.py"] if journal.scale.dry else marked
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "--continue-on-collection-errors",
        "-p",
        "no:cacheprovider",
    ]
    path = journal.path.with_suffix(".tests.txt")
    with path.open("w") as file:  # as it comes: what a limit cuts has said something by then
        subprocess.run([*command, *chosen], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
    counts = read_counts(path.read_text())
    if not counts["passed"]:
        raise RuntimeError(f"no test passed: {' '.join(path.read_text().split())[-250:]}")
    return counts


def find_gpu_tests() -> list[str]:
    """Return the files with tests that need a GPU: importing all others fails where their packages are absent."""
    files = (ROOT / "tests").rglob("test_*.py")
    return sorted(str(file.relative_to(ROOT)) for file in files if "pytest.mark.gpu" in file.read_text())


def read_counts(summary: str) -> dict[str, float]:
    """Return the numbers of pytest's last lines."""
    found = {kind.removesuffix("s"): float(number) for number, kind in re.findall(r"(\d+) (\w+)", summary)}
    return {kind: found.get(kind.removesuffix("s"), 0.0) for kind in KINDS}


class Section(NamedTuple):
    """A part of the measurements."""

    run: Callable[[Journal], None]
    share: float
    """of the minutes"""


SECTIONS = {
    "tests": Section(run_tests, 0.2),
    "together": Section(run_together, 0.2),
    "published": Section(run_published, 0.25),
    "multiplex": Section(run_multiplex, 0.2),
    "node": Section(run_node, 0.2),
    "ahead": Section(run_ahead, 0.15),
    "cameras": Section(run_cameras, 0.1),
    "peer": Section(run_peer, 0.1),
}


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--section", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--out", type=Path, help="file of JSON lines; default: a temporary one")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"of everything [{MINUTES:g}]")
    parser.add_argument(
        "--pack", type=Path, help="file of training.pack to train from in the minutes that remain"
    )
    parser.add_argument("--dry-run", action="store_true", help="small sizes on a CPU")
    return parser.parse_args(words)


def choose_scale(dry: bool) -> Scale:
    """Return the sizes. Exits with an error where there is no GPU for the real ones."""
    if dry:
        return Scale(torch.device("cpu"), "tiny", True, counts=(2,), calls=2, fill=3, watched=3)
    if not torch.cuda.is_available():
        sys.exit("expected a GPU, torch finds none; try --dry-run")
    return Scale(torch.device("cuda"), "full", False, counts=(1, 4, 16), calls=20)


def main(words: Sequence[str] | None = None) -> int:
    """Measure the sections; return 0 where all figures came, 1 where some failed, 3 where time ran out."""
    words = sys.argv[1:] if words is None else words
    args = arguments(words)
    total_s = 60 * args.minutes
    end_s = time.monotonic() + total_s
    scale = choose_scale(args.dry_run)
    path = args.out or Path(tempfile.mkdtemp(prefix="gpu_")) / "first.jsonl"
    device = torch.cuda.get_device_name() if scale.device.type == "cuda" else "cpu"
    context = {"device": device, "versions": read_versions() | {"cuda": str(torch.version.cuda)}}
    errors = 0
    late = False
    for section in args.section:
        start_s = time.monotonic()
        share_s = min(SECTIONS[section].share * total_s, end_s - start_s)
        journal = Journal(path, section, scale, start_s + share_s, context)
        try:
            with cutting(share_s):
                SECTIONS[section].run(journal)
        except OutOfTimeError:
            print(f"time is over in {section}; the same command goes on there", file=sys.stderr)
            late = True
        except DeviceError as error:  # a new process has the GPU, and finds the figure in the file
            print(f"{error}; a new process goes on", file=sys.stderr, flush=True)
            more = ["--out", str(path), "--minutes", str((end_s - time.monotonic()) / 60)]
            os.execv(sys.executable, [sys.executable, "-m", "tools.bench.gpu", *words, *more])
        except Exception as error:  # the other sections must follow
            journal.note_error("preparation", error, start_s)
        errors += journal.errors
    print(f"wrote {path}", file=sys.stderr)
    if args.pack:
        minutes = (end_s - time.monotonic()) / 60
        print(f"training for {minutes:.1f} minutes", file=sys.stderr)
        command = ["training.pack", args.pack, "--run", path.parent / "training", "--minutes", minutes]
        subprocess.run([sys.executable, "-m", *map(str, command)], check=True, cwd=ROOT)
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
