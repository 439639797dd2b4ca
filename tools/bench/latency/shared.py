"""Compare frames in shared memory with frames through sockets, on one machine.

    python -m tools.bench.latency.shared [--seconds 20] [--readers 3] [--zenoh]

One camera process draws frames of one size at 30 Hz and sends them by several publishers in turn, a second each, so
that other load on the machine slows all: `memory` as cameras do, `socket` without shared memory, and with --zenoh,
which needs the package eclipse-zenoh, a bare publisher of zenoh with its shared memory. Each publisher has readers,
processes of their own that take the newest frame. The time runs from the capture until a reader holds the frame. CPU
time is that of the camera process and of all readers, for each frame.
"""

from __future__ import annotations

import json
import multiprocessing
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from sam3_node.cameras.camera_source import CapturedImage
from sam3_node.cameras.live_source import Pacer
from sam3_node.cameras.publish import frame_from
from sam3_node.cameras.scene import Scene
from sam3_node.settings import CameraSettings
from sam3_node.transport import FramePublisher, FrameSubscriber
from sam3_node.transport.sockets import send_parts
from sam3_node.types import Buffer, Frame
from tools.bench.common import RATIO, RUNS, Figures, make_parser, percentile
from tools.bench.processes import free_endpoints, spawned

FPS = 30
BLOCK = 30  # frames before the camera turns to the other publisher
WAYS = ("memory", "socket")
ZENOH = "zenoh"
ZENOH_SLOTS = 6  # frames that fit into the memory of zenoh
SIZES = ((640, 480), (1920, 1080))
SETTLE_S = 2.0  # until the readers have found out what works


class SocketPublisher(FramePublisher):
    """A publisher without shared memory."""

    def _hand_over(self, parts: Sequence[Buffer]) -> bool:
        return send_parts(self._bound.socket, parts, self.max_bytes)


class ZenohPublisher:
    """A bare publisher of zenoh, whose frames lie in its shared memory, with the capture time beside."""

    def __init__(self, endpoint: str, frame_bytes: int) -> None:
        self._session = open_zenoh("listen", endpoint)
        shm = import_module("zenoh.shm")
        self._memory = shm.ShmProvider.default_backend(ZENOH_SLOTS * frame_bytes)
        self._policy = shm.GarbageCollect()
        self._publisher = self._session.declare_publisher("frame/bench")

    def send(self, frame: Frame) -> None:
        pixels = bytes(frame.colour)
        buffer = self._memory.alloc(len(pixels), policy=self._policy)
        buffer[0 : len(pixels)] = pixels
        self._publisher.put(buffer, attachment=str(frame.capture_ns))


def open_zenoh(verb: str, endpoint: str) -> Any:
    """Return a session that listens on or connects to an endpoint of ours, and finds no other."""
    zenoh = import_module("zenoh")
    config = zenoh.Config()
    config.insert_json5("scouting/multicast/enabled", "false")
    config.insert_json5("listen/endpoints", "[]")
    config.insert_json5(f"{verb}/endpoints", json.dumps([endpoint.replace("://", "/")]))
    return zenoh.open(config)


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
        publishers: list[FramePublisher | ZenohPublisher] = [memory, socket]
        if ZENOH in endpoints:
            publishers.append(ZenohPublisher(endpoints[ZENOH], 3 * width * height))
        seq = 0
        cpu_s = [0.0] * len(publishers)
        frames = [0] * len(publishers)
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
                cpu_s = [0.0] * len(publishers)
                frames = [0] * len(publishers)


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


def run_zenoh_reader(endpoint: str, asked: Connection) -> None:
    """The same of a bare subscriber of zenoh, which copies each frame as a reader of Python must."""
    ages_ms: list[float] = []

    def take(sample: Any) -> None:
        pixels = bytes(sample.payload)
        age_ns = time.time_ns() - int(bytes(sample.attachment))
        ages_ms.append(age_ns / 1e6 if pixels else 0.0)

    session = open_zenoh("connect", endpoint)
    subscriber = session.declare_subscriber("frame/bench", take)
    start_s = time.process_time()
    while subscriber is not None:
        asked.recv()
        asked.send(Times(ages_ms.copy(), time.process_time() - start_s, len(ages_ms)))
        ages_ms.clear()
        start_s = time.process_time()


class Run(NamedTuple):
    """The results of one run and one way."""

    p50_ms: float
    p99_ms: float
    cpu_ms: float
    """of camera and readers, for each frame"""


def measure(
    ways: Sequence[str], size: tuple[int, int], readers: int, seconds: float, runs: int
) -> list[dict[str, Run]]:
    """Start all processes, and return the results of each run by the way of the frames."""
    endpoints = dict(zip(ways, free_endpoints(len(ways)), strict=True))
    spawn = multiprocessing.get_context("spawn")
    with ExitStack() as running:
        camera, camera_end = spawn.Pipe()
        running.enter_context(spawned(run_camera, endpoints, size, camera_end))
        asked: dict[str, list[Connection]] = {way: [] for way in ways}
        for way in ways:
            run = run_zenoh_reader if way == ZENOH else run_reader
            for _ in range(readers):
                ours, theirs = spawn.Pipe()
                running.enter_context(spawned(run, endpoints[way], theirs))
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
                {way: summarise(sent[index], taken[way]) for index, way in enumerate(ways)},
            )
        return results


def summarise(sent: Times, taken: list[Times]) -> Run:
    """Return the ages at all readers, and the CPU time of each frame."""
    ages_ms = [age for times in taken for age in times.ages_ms]
    # each by its own count: the camera answers between two blocks, a reader within one
    cpu_s = sum(times.cpu_s / max(1, times.frames) for times in (sent, *taken))
    return Run(percentile(ages_ms, 0.5), percentile(ages_ms, 0.99), 1e3 * cpu_s)


def report(results: list[dict[str, Run]], size: tuple[int, int], readers: int, figures: Figures) -> None:
    """Keep the times of both ways, and their ratios."""
    what = f"{size[0]}x{size[1]}, {readers} reader{'s' if readers > 1 else ''}"
    for name, text, unit in (
        ("p50_ms", "capture to frame, p50", "ms"),
        ("p99_ms", "capture to frame, p99", "ms"),
        ("cpu_ms", "CPU time of camera and readers for each frame", "ms"),
    ):
        values = {way: [getattr(result[way], name) for result in results] for way in results[0]}
        for way in values:
            if way != "memory":
                ratios = [ours / theirs for ours, theirs in zip(values["memory"], values[way], strict=True)]
                figures.add(f"{what}: {text}, memory / {way}", ratios, RATIO)
        for way, each in values.items():
            figures.add(f"{what}: {text}, {way}", each, unit)


def main() -> None:
    parser = make_parser(__doc__, RUNS, seconds=20.0, readers=3)
    parser.add_argument("--zenoh", action="store_true", help="also measure frames by eclipse-zenoh")
    args = parser.parse_args()
    figures = Figures("latency.shared")
    ways = [*WAYS, ZENOH] if args.zenoh else WAYS
    for size in SIZES:
        for readers in sorted({1, args.readers}):
            report(measure(ways, size, readers, args.seconds, args.runs), size, readers, figures)
    figures.write(args.json)


if __name__ == "__main__":
    main()
