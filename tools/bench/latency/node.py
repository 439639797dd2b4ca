"""Compare the time from capture to decoded masks, without the model's, with bare pyzmq relays of the same frames.

    python -m tools.bench.latency.node [--seconds 24] [--objects 1]

Ours is the time from a frame's `capture_ns` until the subscriber holds its decoded masks, less the times of the
model's stages (preprocess, encode, detect, track, masks), which the message carries. It includes making the frame
message, both hops, the node's receiver thread and its hand-over, checking and decoding the image, copying logits to
the host, and packing and unpacking masks.

The peers are bare pyzmq. The camera sends [topic, stamps, pixels] without a copy. A thread of the relay drains them
into one slot, its main thread answers on a PUB socket, and the subscriber drains that socket in the same way. The
peers check, pack, decode and count nothing. Their time runs from the capture until the subscriber holds the answer.

    forward   the relay sends the whole frame on, with its pixels
    model     the relay runs the same model on the frame, as a plain script would, and answers with as many bytes as
              our masks message has; the model's time is left out, as in ours, but its effect on the caches is not
    answer    the relay sends that many bytes at once and computes nothing: the minimum of two hops

Frames are drawn ahead and stamped when they are due, at 30 Hz. One camera process serves the four paths in turn, a
second each, so that other load on the machine slows all. The processes start once; each of --runs runs collects for
--seconds, and the ratios of a run compare its percentiles.
"""

from __future__ import annotations

import multiprocessing
import struct
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np
import zmq

from sam3_node.cameras.camera_source import CapturedImage
from sam3_node.cameras.live_source import Pacer
from sam3_node.cameras.publish import frame_from
from sam3_node.cameras.scene import Scene
from sam3_node.client import PerceptionClient
from sam3_node.settings import CameraSettings
from sam3_node.transport import FramePublisher
from sam3_node.types import MaskFrame
from sam3_node.wire import pack_masks
from tools.bench.common import RUNS, Figures, make_parser, objects_text, percentile
from tools.bench.processes import Processes, add_points, free_endpoints, next_masks, spawned
from tools.bench.tiny_weights import save_tiny_checkpoint

FPS = 30
BLOCK = 30  # frames before the camera turns to the next path
PEERS = ("forward", "model", "answer")
PATHS = ("ours", *PEERS)
MODEL_STAGES = ("preprocess", "encode", "detect", "track", "masks")
STAMP = struct.Struct("<qqqq")  # capture_ns; of the relay: received_ns, published_ns, model_ns
SIZES = ((640, 480), (1920, 1080))


@dataclass(frozen=True)
class RelayPlan:
    """Endpoints, weights, frame size and objects, for all processes of the benchmark."""

    frames: dict[str, str]  # endpoint that the camera binds for each path
    answers: dict[str, str]  # endpoint that the relay of each peer binds
    weights: Path
    width: int
    height: int
    objects: int


class Overhead(NamedTuple):
    """Parts of one frame's time in milliseconds, without the model's."""

    hop_in: float
    inside: float
    hop_out: float

    @classmethod
    def between(
        cls, capture_ns: int, received_ns: int, published_ns: int, arrived_ns: int, model_ns: int
    ) -> Overhead:
        """Split the time from capture to arrival; all times are of one clock."""
        inside_ns = published_ns - received_ns - model_ns
        return cls((received_ns - capture_ns) / 1e6, inside_ns / 1e6, (arrived_ns - published_ns) / 1e6)

    @classmethod
    def from_masks(cls, masks: MaskFrame, arrived_ns: int) -> Overhead:
        """Split the time of a masks message that was decoded at `arrived_ns`."""
        model_ns = 1000 * sum(masks.stages_us.get(stage, 0) for stage in MODEL_STAGES)
        return cls.between(masks.capture_ns, masks.received_ns, masks.published_ns, arrived_ns, model_ns)


def run_sender(plan: RelayPlan, ready: Connection) -> None:
    """Send the same drawn pictures to each path in turn, until terminated: the camera process."""
    scene = Scene(width=plan.width, height=plan.height)
    pictures = [scene.render(8 * i)[0] for i in range(8)]
    settings = CameraSettings(name="bench")
    bare = {peer: _bind(zmq.PUB, plan.frames[peer]) for peer in PEERS}
    pacer = Pacer(FPS, threading.Event())
    with FramePublisher(plan.frames["ours"]) as publisher:
        ready.send(True)
        for seq in count():
            picture = pictures[seq % len(pictures)]
            pacer.wait()
            capture_ns = time.time_ns()
            path = PATHS[seq // BLOCK % len(PATHS)]
            if path == "ours":
                publisher.send(frame_from(CapturedImage(picture, capture_ns), seq, settings))
            else:
                stamp = STAMP.pack(capture_ns, 0, 0, 0)
                bare[path].send_multipart([b"frame/bench", stamp, picture.data], copy=False)


def run_relay(plan: RelayPlan, peer: str, answer_bytes: int) -> None:
    """Answer the newest frame, until terminated: the process of one peer."""
    step = model_step(plan) if peer == "model" else lambda _: 0
    newest = Newest(plan.frames[peer])
    publisher = _bind(zmq.PUB, plan.answers[peer])
    payload = bytes(answer_bytes)
    while True:
        parts, received_ns = newest.take()
        model_ns = step(parts[2].buffer)
        capture_ns = STAMP.unpack(parts[1].buffer)[0]
        stamp = STAMP.pack(capture_ns, received_ns, time.time_ns(), model_ns)
        answer = parts[2] if peer == "forward" else payload
        publisher.send_multipart([b"masks/bench", stamp, answer], copy=False)


def model_step(plan: RelayPlan) -> Callable[[memoryview], int]:
    """Return a function that runs the model's stages on pixels and returns the nanoseconds they took."""
    import torch

    from sam3_node.models import load_tracker
    from sam3_node.perception.output_masks import rasterize
    from sam3_node.tracking import ObjectPrompt, Tracker

    torch.set_num_threads(1)
    model = load_tracker(plan.weights)
    tracker = Tracker(model)
    xs = [model.image_size * (i + 1) / (plan.objects + 1) for i in range(plan.objects)]
    prompts = [ObjectPrompt(i, points=[[x, model.image_size / 2]]) for i, x in enumerate(xs)]

    def step(pixels: memoryview) -> int:
        image = np.frombuffer(pixels, np.uint8).reshape(plan.height, plan.width, 3)
        begin_ns = time.perf_counter_ns()
        tracks = tracker.step(model.preprocess(image), prompts if tracker.frame_number == 0 else ())
        for logits in tracks.logits.numpy():
            rasterize(logits, (plan.height, plan.width))
        return time.perf_counter_ns() - begin_ns

    return step


class Newest:
    """The newest message of a SUB socket, which a thread drains into one slot with the time of arrival."""

    def __init__(self, endpoint: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)
        self._changed = threading.Condition()
        self._slot: tuple[list[zmq.Frame], int] | None = None
        threading.Thread(target=self._drain, daemon=True).start()

    def take(self) -> tuple[list[zmq.Frame], int]:
        """Wait for a message, and return its parts and its time of arrival in ns."""
        with self._changed:
            self._changed.wait_for(lambda: self._slot is not None)
            taken = self._slot
            self._slot = None
        assert taken is not None
        return taken

    def _drain(self) -> None:
        while True:
            parts = self._socket.recv_multipart(copy=False)
            with self._changed:
                self._slot = parts, time.time_ns()
                self._changed.notify()


def collect_peer(endpoint: str, overheads: list[Overhead]) -> None:
    """Append the overhead of each answer of a peer, without end: a subscriber's thread."""
    newest = Newest(endpoint)
    while True:
        parts, _ = newest.take()
        arrived_ns = time.time_ns()
        capture_ns, received_ns, published_ns, model_ns = STAMP.unpack(parts[1].buffer)
        overheads.append(Overhead.between(capture_ns, received_ns, published_ns, arrived_ns, model_ns))


def collect_ours(client: PerceptionClient, until_s: float, overheads: list[Overhead]) -> None:
    """Append the overhead of each masks message until a time of the monotonic clock."""
    while time.monotonic() < until_s:
        masks = client.latest(timeout_ms=200)
        if masks is not None:
            overheads.append(Overhead.from_masks(masks, time.time_ns()))


Run = dict[str, list[Overhead]]
"""Overheads of each path in one run."""


def measure(weights: Path, size: tuple[int, int], objects: int, seconds: float, runs: int) -> list[Run]:
    """Start all processes, and collect the overheads of each run."""
    width, height = size
    model = {"SAM3_MODEL__NAME": str(weights), "SAM3_MODEL__THREADS": "1", "SAM3_MODEL__DTYPE": "float32"}
    with Processes(**model) as processes, ExitStack() as running:
        frames, answers = (dict(zip(PEERS, free_endpoints(len(PEERS)), strict=True)) for _ in range(2))
        plan = RelayPlan({"ours": processes.frames, **frames}, answers, weights, width, height, objects)
        ready, sender_end = multiprocessing.get_context("spawn").Pipe(duplex=False)
        running.enter_context(spawned(run_sender, plan, sender_end))
        ready.recv()
        processes.start("run")
        with processes.client() as client:
            add_points(client, objects)
            answer_bytes = len(pack_masks(next_masks(client))[1])
            for peer in PEERS:
                running.enter_context(spawned(run_relay, plan, peer, answer_bytes))
            print(f"{width}x{height}, masks message of {answer_bytes} bytes")
            return _collect(client, answers, seconds, runs)


def _collect(client: PerceptionClient, answers: dict[str, str], seconds: float, runs: int) -> list[Run]:
    """Wait until answers arrive on all paths, then collect all of them at once in each run."""
    current: Run = {path: [] for path in PATHS}
    for peer, endpoint in answers.items():
        threading.Thread(target=collect_peer, args=(endpoint, current[peer]), daemon=True).start()
    while not all(len(overheads) > BLOCK for overheads in current.values()):
        collect_ours(client, time.monotonic() + 0.2, current["ours"])
    collected = []
    for _ in range(runs):
        for overheads in current.values():
            overheads.clear()
        collect_ours(client, time.monotonic() + seconds, current["ours"])
        collected.append({path: list(overheads) for path, overheads in current.items()})
    return collected


def _bind(kind: int, endpoint: str) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.bind(endpoint)
    return socket


def report(runs: list[Run], size: tuple[int, int], figures: Figures) -> None:
    """Keep the times of each path, their parts, and the ratios to ours."""
    what = f"{size[0]}x{size[1]}, capture to decoded masks without the model"
    ours = [_percentiles(run["ours"]) for run in runs]
    for path in PATHS:
        theirs = [_percentiles(run[path]) for run in runs]
        for place, name in enumerate(("p50", "p99")):
            if path != "ours":
                ratios = [own[place] / other[place] for own, other in zip(ours, theirs, strict=True)]
                figures.add(f"{what}: ours / relay `{path}`, {name}", ratios, "x")
            figures.add(f"{what}: {path}, {name}", [times_ms[place] for times_ms in theirs], "ms")
        overheads = [overhead for run in runs for overhead in run[path]]
        for part, times_ms in zip(Overhead._fields, zip(*overheads, strict=True), strict=True):
            figures.add(f"{what}: {path}, {part}, p50", percentile(times_ms, 0.5), "ms")


def _percentiles(overheads: list[Overhead]) -> tuple[float, float]:
    """Return the median and the 99th percentile of the whole overhead, in ms."""
    totals = [sum(overhead) for overhead in overheads]
    return percentile(totals, 0.50), percentile(totals, 0.99)


def main() -> None:
    parser = make_parser(__doc__, RUNS, seconds=24.0, objects=1)
    args = parser.parse_args()
    figures = Figures("latency.node")
    with tempfile.TemporaryDirectory() as folder:
        weights = save_tiny_checkpoint(Path(folder) / "tiny")
        print(f"raw bgr8 over tcp at {FPS} Hz, {objects_text(args.objects)}")
        for size in SIZES:
            report(measure(weights, size, args.objects, args.seconds, args.runs), size, figures)
    figures.write(args.json)


if __name__ == "__main__":
    main()
