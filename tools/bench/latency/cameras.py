"""Measure how a node shares its time between four cameras, and what a flooding camera takes from the others.

    python -m tools.bench.latency.cameras [--seconds 10] [--objects 1] [--runs 3] [--rates 30 30 30 10]

Four cameras of 640x480 and a node are processes. In each run there is a time with all cameras at their rates, and a
time in which the first camera sends as fast as it can. A camera's fair share is a quarter of the node's frames, or
all of its own if it sends fewer; what it does not use is shared by the others. The flood's own work takes CPU time from
the node where they share the cores, so the shares are of the same time; the rates of both times are compared too.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from multiprocessing import get_context
from multiprocessing.synchronize import Event
from typing import NamedTuple

import numpy as np

from sam3_node.client import PerceptionClient
from sam3_node.transport import FramePublisher
from sam3_node.types import Frame
from tools.bench.common import RATIO, Figures, make_parser, percentile
from tools.bench.latency.age import read_timing
from tools.bench.processes import Processes, drain, free_endpoints, spawned

WIDTH = 640
HEIGHT = 480
SETTLE_S = 2.0


def run_camera(name: str, endpoint: str, rate_hz: float, flood: Event) -> None:
    """Publish frames at the rate without end, as fast as it can while `flood` is set: a camera's process."""
    images = np.random.default_rng(0).integers(0, 255, (4, HEIGHT, WIDTH, 3), np.uint8)
    with FramePublisher(endpoint) as publisher:
        due_s = time.monotonic()
        for seq in count():
            colour = images[seq % len(images)].data
            publisher.send(Frame(name, seq, time.time_ns(), WIDTH, HEIGHT, "bgr8", colour))
            now_s = time.monotonic()
            due_s = now_s if flood.is_set() else max(due_s + 1 / rate_hz, now_s)
            time.sleep(due_s - now_s)


@contextmanager
def start_cameras(endpoints: Sequence[str], rates_hz: Sequence[float]) -> Iterator[Event]:
    """Run a process for each camera; the first one floods while the event is set."""
    make_event = get_context("spawn").Event
    floods = [make_event() for _ in endpoints]
    with ExitStack() as running:
        for n, place in enumerate(zip(endpoints, rates_hz, floods, strict=True)):
            running.enter_context(spawned(run_camera, f"cam{n}", *place))
        yield floods[0]


class Measured(NamedTuple):
    """The frames of each camera in one time."""

    rates_hz: dict[str, float]
    """steps a second"""
    sent_hz: dict[str, float]
    """frames that arrived or were known to be skipped, a second"""
    ages_ms: dict[str, float]
    """p99 of the age at the start of the step"""
    spread_ms: float
    """median difference between the captures of the newest masks of all cameras"""

    def compute_shares(self) -> dict[str, float]:
        """Return the rate of each camera over its fair share."""
        fair = compute_fair_rates(self.sent_hz, sum(self.rates_hz.values()))
        return {camera: rate / fair[camera] for camera, rate in self.rates_hz.items()}


def compute_fair_rates(sent_hz: dict[str, float], total_hz: float) -> dict[str, float]:
    """Divide a rate equally. A camera that sends less has what it sends, and the others divide the rest."""
    fair: dict[str, float] = {}
    for camera in sorted(sent_hz, key=lambda name: sent_hz[name]):
        equal = (total_hz - sum(fair.values())) / (len(sent_hz) - len(fair))
        fair[camera] = min(sent_hz[camera], equal)
    return fair


def measure(client: PerceptionClient, seconds: float) -> Measured:
    """Read masks for some seconds."""
    steps = Counter[str]()
    sent = Counter[str]()
    ages = defaultdict[str, list[float]](list)
    newest_ns: dict[str, int] = {}
    spreads_ms = []
    drain(client)
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        masks = client.latest(1000)
        if masks is None:
            continue
        steps[masks.camera] += 1
        sent[masks.camera] += 1 + masks.skipped
        ages[masks.camera].append(read_timing(masks).age)
        newest_ns[masks.camera] = masks.capture_ns
        spreads_ms.append((max(newest_ns.values()) - min(newest_ns.values())) / 1e6)
    cameras = sorted(steps)
    rates, sent_hz = ({camera: found[camera] / seconds for camera in cameras} for found in (steps, sent))
    worst_ms = {camera: percentile(ages[camera], 0.99) for camera in cameras}
    return Measured(rates, sent_hz, worst_ms, percentile(spreads_ms, 0.5))


def report(runs: Sequence[tuple[Measured, Measured]], figures: Figures) -> None:
    """Keep the figures of all runs."""
    for name, index in (("all at their rates", 0), ("one floods", 1)):
        found = [run[index] for run in runs]
        what = f"four cameras, 640x480, {name}"
        shares = [min(measured.compute_shares().values()) for measured in found]
        figures.add(f"{what}: frames of the worst camera / its fair share", shares, RATIO, "at least 0.8")
        ages = [max(measured.ages_ms.values()) for measured in found]
        figures.add(f"{what}: age at the start of the step, p99 of the worst camera", ages, "ms")
        spreads = [measured.spread_ms for measured in found]
        figures.add(f"{what}: difference of captures of the newest masks of all cameras, p50", spreads, "ms")
    taken = [flood.rates_hz["cam0"] / (sum(flood.rates_hz.values()) / 4) for _, flood in runs]
    target = "at most 1.05 if others send enough"
    figures.add("frames of the flooding camera / a quarter of all", taken, RATIO, target)
    kept = [_sum_others(flood) / _sum_others(calm) for calm, flood in runs]
    figures.add("rate of the other three during a flood on the same cores / before it", kept, RATIO)


def _sum_others(measured: Measured) -> float:
    return sum(rate for camera, rate in measured.rates_hz.items() if camera != "cam0")


def main() -> None:
    parser = make_parser(__doc__, runs=3, seconds=10.0, objects=1, model="nano", threads="1")
    parser.add_argument("--rates", type=float, nargs=4, default=[30.0, 30.0, 30.0, 30.0], help="in Hz")
    args = parser.parse_args()
    figures = Figures("latency.cameras")
    endpoints = free_endpoints(4)
    runs = []
    with Processes(SAM3_MODEL__NAME=args.model, SAM3_MODEL__THREADS=args.threads) as processes:
        processes.start("run", SAM3_TRANSPORT__FRAMES=",".join(endpoints), SAM3_DETECTOR__KIND="none")
        with start_cameras(endpoints, args.rates) as flooding, processes.client() as client:
            _add_objects(client, args.objects)
            for _ in range(args.runs):
                measure(client, SETTLE_S)
                calm = measure(client, args.seconds)
                flooding.set()
                measure(client, SETTLE_S)
                flood = measure(client, args.seconds)
                flooding.clear()
                runs.append((calm, flood))
    report(runs, figures)
    figures.write(args.json)


def _add_objects(client: PerceptionClient, objects: int) -> None:
    """Add objects to each camera, once all four are served."""
    while len(client.status()["cameras"]) < 4:
        client.latest(1000)
    for camera in client.status()["cameras"]:
        for n in range(objects):
            point = (WIDTH * (n + 1) / (objects + 1), HEIGHT / 2)
            client.add_object(points=[point], camera=camera)


if __name__ == "__main__":
    main()
