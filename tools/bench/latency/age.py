"""Measure the age of a frame at the start of its step, for cameras slower and faster than the node.

    python -m tools.bench.latency.age [--seconds 20] [--objects 1] [--video FILE.mp4] [--model nano]

The age runs from `capture_ns` to the start of the frame's step. The benchmark derives the start from each masks
message: `published_ns` less all stages before publication. A node that always takes the newest frame stays under one
frame interval of the camera + 20 ms at p99, whatever the camera's rate. If frames queued up, the age would grow with
every frame.
"""

import time
from pathlib import Path
from typing import NamedTuple

from sam3_node.client import PerceptionClient
from sam3_node.types import MaskFrame
from tools.bench.common import SHARED, Figures, make_parser, objects_text, percentile
from tools.bench.processes import next_masks, run_node

SETTLE_S = 2.0
RATES_HZ = (10, 30, 60)
VIDEO_HZ = 25
MARGIN_MS = 20


class FrameTiming(NamedTuple):
    """Age at the start of the step and time of the step, in ms, and frames skipped before this one."""

    age: float
    step: float
    skipped: int


def read_timing(masks: MaskFrame) -> FrameTiming:
    """Derive a frame's timing from its masks message."""
    # `pack` is the packing of the previous message: it does not lie between capture_ns and published_ns
    step_us = sum(spent for stage, spent in masks.stages_us.items() if stage != "pack")
    age_ns = masks.published_ns - 1000 * step_us - masks.capture_ns
    return FrameTiming(age_ns / 1e6, step_us / 1e3, masks.skipped)


def collect(client: PerceptionClient, seconds: float) -> list[FrameTiming]:
    """Return the timings of the frames of the next seconds."""
    end_s = time.monotonic() + seconds
    timings = []
    while time.monotonic() < end_s:
        timings.append(read_timing(next_masks(client)))
    return timings


def measure(
    model: str, threads: str, source: str, rate_hz: float, objects: int, seconds: float, **settings: str
) -> list[FrameTiming]:
    """Run a camera and a node as processes, with this process as the subscriber. `settings` are SAM3_ variables."""
    settings |= {"SAM3_MODEL__NAME": model, "SAM3_MODEL__THREADS": threads}
    with run_node(source, rate_hz, objects, **settings) as client:
        collect(client, SETTLE_S)
        return collect(client, seconds)


def report(
    name: str, rate_hz: float, objects: int, timings: list[FrameTiming], seconds: float, figures: Figures
) -> None:
    """Keep the figures of one camera."""
    ages, steps, _ = zip(*timings, strict=True)
    what = f"{name} at {rate_hz:g} Hz, {objects_text(objects)}"
    bound = f"under {1e3 / rate_hz + MARGIN_MS:.1f} ms"
    age = "age of the frame at the start of its step"
    figures.add(f"{age}, p99, {what}", percentile(ages, 0.99), "ms", bound)
    figures.add(f"{age}, p50, {what}", percentile(ages, 0.5), "ms")
    figures.add(f"frame step, p50, {what}", percentile(steps, 0.5), "ms")
    figures.add(f"frames processed by the node, {what}", len(timings) / seconds, "frames/s")


def main() -> None:
    parser = make_parser(__doc__, seconds=20.0, objects=1, model="nano", threads="0")
    video = SHARED / "data/video/16_robotarm.mp4"
    parser.add_argument("--video", type=Path, default=video, help="played as a camera, if it exists")
    args = parser.parse_args()
    figures = Figures("latency.age")
    sources = [("scene:shapes", "scene:shapes", rate) for rate in RATES_HZ]
    if args.video.is_file():
        sources.append((args.video.name[:12], f"video:{args.video}", VIDEO_HZ))
    for name, source, rate_hz in sources:
        timings = measure(args.model, args.threads, source, rate_hz, args.objects, args.seconds)
        report(name, rate_hz, args.objects, timings, args.seconds, figures)
    figures.write(args.json)


if __name__ == "__main__":
    main()
