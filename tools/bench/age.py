"""Newest wins: how old a frame is when the node begins with it, for cameras slower and faster than the node.

    python tools/bench/age.py [--seconds 20] [--objects 1] [--video FILE.mp4] [--model nano]

The age is from `capture_ns` to the start of the frame's step, derived from each masks message as published_ns less
all stages before publication. A node that never waits on a stale frame stays under one frame interval of the camera
+ 20 ms at p99, whatever the camera's rate; a queue in between would show as an age that grows with every frame.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import NamedTuple

from _common import Processes, add_points, next_masks, percentile

from sam3_node.client import PerceptionClient
from sam3_node.types import MaskFrame

SHARED = Path(__file__).resolve().parents[3] / "shared"
SETTLE_S = 2.0
RATES_HZ = (10, 30, 60)
VIDEO_HZ = 25
MARGIN_MS = 20


class Seen(NamedTuple):
    """One frame that was processed; milliseconds."""

    age: float
    step: float
    skipped: int


def seen(masks: MaskFrame) -> Seen:
    # `pack` is the packing of the message before, and comes after this one's published_ns
    step_us = sum(spent for stage, spent in masks.stages_us.items() if stage != "pack")
    age_ns = masks.published_ns - 1000 * step_us - masks.capture_ns
    return Seen(age_ns / 1e6, step_us / 1e3, masks.skipped)


def collect(client: PerceptionClient, seconds: float) -> list[Seen]:
    """What the messages of the next seconds tell."""
    end_s = time.monotonic() + seconds
    found = []
    while time.monotonic() < end_s:
        found.append(seen(next_masks(client)))
    return found


def measure(
    model: str, threads: str, source: str, rate_hz: float, objects: int, seconds: float
) -> list[Seen]:
    """A camera and a node as processes, this one the subscriber."""
    with Processes(SAM3_MODEL__NAME=model, SAM3_MODEL__THREADS=threads) as processes:
        processes.start("run")
        processes.start("camera", source, SAM3_CAMERA__FPS=str(rate_hz), SAM3_CAMERA__LOOP="true")
        with processes.client() as client:
            add_points(client, objects)
            collect(client, SETTLE_S)
            return collect(client, seconds)


def report(name: str, rate_hz: float, found: list[Seen], seconds: float) -> None:
    ages, steps, _ = zip(*found, strict=True)
    stepped, skipped = len(found), sum(each.skipped for each in found)
    print(
        f"{name:12s} {rate_hz:5.0f} {percentile(steps, 0.5):12.1f} {stepped:8d} {stepped / seconds:9.1f} {skipped:8d}"
        f" {percentile(ages, 0.5):10.1f} {percentile(ages, 0.99):8.1f} {1e3 / rate_hz + MARGIN_MS:10.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--objects", type=int, default=1)
    parser.add_argument("--video", type=Path, default=SHARED / "data/video/16_robotarm.mp4")
    parser.add_argument("--model", default="nano")
    parser.add_argument("--threads", default="0", help="of the model; 0: as torch chooses")
    args = parser.parse_args()
    sources = [("scene:shapes", "scene:shapes", rate) for rate in RATES_HZ]
    if args.video.is_file():
        sources.append((args.video.name[:12], f"video:{args.video}", VIDEO_HZ))
    print(f"{args.model}, {args.objects} objects; ages in milliseconds, at the start of the step")
    print("camera          Hz  step p50 ms  stepped  a second  skipped    age p50      p99      bound")
    for name, source, rate_hz in sources:
        found = measure(args.model, args.threads, source, rate_hz, args.objects, args.seconds)
        report(name, rate_hz, found, args.seconds)


if __name__ == "__main__":
    main()
