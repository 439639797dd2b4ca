"""Compare frames in shared memory with frames through sockets, on one machine.

    python -m tools.bench.latency.shared [--seconds 20] [--readers 3]

One camera process draws frames of one size at 30 Hz and publishes them by two publishers in turn, a second each, so
that other load on the machine slows both: `memory` as cameras do, `socket` without shared memory. Each publisher has
readers, processes of their own that take the newest frame. The time runs from the capture until a reader holds the
frame. CPU time is that of the camera process and of all readers, for each frame.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import NamedTuple

from sam3_node.cameras.camera_source import CapturedImage
from sam3_node.cameras.live_source import Pacer
from sam3_node.cameras.publish import frame_from
from sam3_node.cameras.scene import Scene
from sam3_node.settings import CameraSettings
from sam3_node.transport import FramePublisher, FrameSubscriber
from sam3_node.transport.sockets import send_parts
from sam3_node.types import Buffer
from tools.bench.common import RATIO, RUNS, Figures, make_parser, percentile
from tools.bench.processes import free_endpoints, spawned

FPS = 30
BLOCK = 30  # frames before the camera turns to the other publisher
WAYS = ("memory", "socket")
SIZES = ((640, 480), (1920, 1080))
SETTLE_S = 2.0  # until the readers have found out what works


class SocketPublisher(FramePublisher):
    """A publisher without shared memory."""

    def _hand_over(self, parts: Sequence[Buffer]) -> bool:
        return send_parts(self._bound.socket, parts, self.max_bytes)


class Times(NamedTuple):
    """What one process has measured since it was asked before."""

    ages_ms: list[float]
    cpu_s: float
    frames: int


def run_camera(endpoints: dict[str, str], size: tuple[int, int], asked: Connection) -> None:
    """Send drawn pictures by each publisher in turn; answer with the CPU time and the frames of each."""
    width, height = size
    scene = Scene(width=width, height=height)
    pictures = [scene.render(8 * i)[0] for i in range(8)]
    settings = CameraSettings(name="bench")
    pacer = Pacer(FPS, threading.Event())
    with FramePublisher(endpoints["memory"]) as memory, SocketPublisher(endpoints["socket"]) as socket:
        publishers = (memory, socket)
        seq = 0
        cpu_s = [0.0, 0.0]
        frames = [0, 0]
        while True:
            index = seq // BLOCK % len(publishers)
            start_s = time.process_time()
            for _ in range(BLOCK):
                pacer.wait()
                image = CapturedImage(pictures[seq % len(pictures)], time.time_ns())
                publishers[index].send(frame_from(image, seq, settings))
                seq += 1
            cpu_s[index] += time.process_time() - start_s
            frames[index] += BLOCK
            if asked.poll():
                asked.recv()
                asked.send([Times([], spent_s, count) for spent_s, count in zip(cpu_s, frames, strict=True)])
                cpu_s = [0.0, 0.0]
                frames = [0, 0]


def run_reader(endpoint: str, asked: Connection) -> None:
    """Take frames; answer with their ages and the CPU time."""
    with FrameSubscriber([endpoint]) as subscriber:
        ages_ms: list[float] = []
        start_s = time.process_time()
        while True:
            received = subscriber.take(100)
            if received is not None:
                ages_ms.append((time.time_ns() - received.frame.capture_ns) / 1e6)
            if asked.poll():
                asked.recv()
                asked.send(Times(ages_ms, time.process_time() - start_s, len(ages_ms)))
                ages_ms = []
                start_s = time.process_time()


class Run(NamedTuple):
    """The results of one run and one way."""

    p50_ms: float
    p99_ms: float
    cpu_ms: float
    """of camera and readers, for each frame"""


def measure(size: tuple[int, int], readers: int, seconds: float, runs: int) -> list[dict[str, Run]]:
    """Start all processes, and return the results of each run by the way of the frames."""
    endpoints = dict(zip(WAYS, free_endpoints(len(WAYS)), strict=True))
    spawn = multiprocessing.get_context("spawn")
    with ExitStack() as running:
        camera, camera_end = spawn.Pipe()
        running.enter_context(spawned(run_camera, endpoints, size, camera_end))
        asked: dict[str, list[Connection]] = {way: [] for way in WAYS}
        for way in WAYS:
            for _ in range(readers):
                ours, theirs = spawn.Pipe()
                running.enter_context(spawned(run_reader, endpoints[way], theirs))
                asked[way].append(ours)

        def collect() -> tuple[list[Times], dict[str, list[Times]]]:
            everyone = [camera, *(end for ends in asked.values() for end in ends)]
            for end in everyone:
                end.send(True)
            return camera.recv(), {way: [end.recv() for end in ends] for way, ends in asked.items()}

        # all have answered once: the readers are connected, and have the frames in their way
        collect()
        time.sleep(SETTLE_S)
        collect()
        results = []
        for _ in range(runs):
            time.sleep(seconds)
            sent, taken = collect()
            results.append(
                {way: summarise(sent[index], taken[way]) for index, way in enumerate(WAYS)},
            )
        return results


def summarise(sent: Times, taken: list[Times]) -> Run:
    """Return the ages at all readers, and the CPU time of each frame."""
    ages_ms = [age for times in taken for age in times.ages_ms]
    cpu_s = sent.cpu_s + sum(times.cpu_s for times in taken)
    return Run(percentile(ages_ms, 0.5), percentile(ages_ms, 0.99), 1e3 * cpu_s / max(1, sent.frames))


def report(results: list[dict[str, Run]], size: tuple[int, int], readers: int, figures: Figures) -> None:
    """Keep the times of both ways, and their ratios."""
    what = f"{size[0]}x{size[1]}, {readers} reader{'s' if readers > 1 else ''}"
    for name, text, unit in (
        ("p50_ms", "capture to frame, p50", "ms"),
        ("p99_ms", "capture to frame, p99", "ms"),
        ("cpu_ms", "CPU time of camera and readers for each frame", "ms"),
    ):
        values = {way: [getattr(result[way], name) for result in results] for way in WAYS}
        ratios = [memory / socket for memory, socket in zip(*values.values(), strict=True)]
        figures.add(f"{what}: {text}, memory / socket", ratios, RATIO)
        for way in WAYS:
            figures.add(f"{what}: {text}, {way}", values[way], unit)


def main() -> None:
    parser = make_parser(__doc__, RUNS, seconds=20.0, readers=3)
    args = parser.parse_args()
    figures = Figures("latency.shared")
    for size in SIZES:
        for readers in sorted({1, args.readers}):
            report(measure(size, readers, args.seconds, args.runs), size, readers, figures)
    figures.write(args.json)


if __name__ == "__main__":
    main()
