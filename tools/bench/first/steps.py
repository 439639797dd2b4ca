"""Stages and whole steps: eager, then compiled and in CUDA graphs; transformers beside them; the pipeline on frames."""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from sam3_node.engines.tracker_slot import make_fp8_encoder
from torch import Tensor

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
from tools.bench.common import percentile
from tools.bench.latency import step

from .journal import Journal, Scale, median_ms, synchronise

FILL = 8  # frames until the memory bank is full
KERNELS = 15  # rows of the profiler's table


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


SECTIONS: dict[str, Callable[[Journal], None]] = {
    "eager": run_eager,
    "fast": run_fast,
    "peer": run_peer,
    "node": run_node,
}
