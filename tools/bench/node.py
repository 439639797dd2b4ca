"""Capture-to-publish overhead: camera -> node -> subscriber against a bare pyzmq relay of the same frames.

    python tools/bench/node.py [--seconds 24] [--objects 1]

Ours: from a frame's `capture_ns` to the moment in which the subscriber holds its decoded masks, less the times of
the model's own stages (preprocess, encode, track, masks), which the message carries. So everything else counts:
making the frame message, both hops, the node's receiver thread and its hand-over, checking and decoding the image,
copying logits to the host, packing and unpacking masks.

The peers are bare pyzmq: the camera sends [topic, stamps, pixels] without a copy, a thread of the relay drains them
into one slot, its main thread answers on a PUB socket, and the subscriber drains that likewise. Nothing is checked,
packed, decoded or counted. Theirs is the time from the same capture to the moment in which the subscriber holds the
answer.

    forward   the relay passes the frame on, pixels and all
    model     the relay runs the same model on the frame, as a script would by hand, and answers with as many bytes as
              our masks message has; the model's time is left out as ours is, but not what it does to the caches
    answer    the relay answers so at once: nothing is computed, the least that two hops can take

Frames are drawn ahead and stamped when they are due, at 30 Hz. One camera process serves the four in turn, a second
each, so that a noisy machine is noisy for all; ratios are of percentiles over the whole run.
"""

from __future__ import annotations

import argparse
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
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import NamedTuple

import numpy as np
import zmq
from _common import Processes, add_points, free_ports, next_masks, percentile, save_tiny_checkpoint

from sam3_node.cameras.base import CapturedImage
from sam3_node.cameras.pacing import Pacer
from sam3_node.cameras.publish import frame_from
from sam3_node.cameras.scene import Scene
from sam3_node.client import PerceptionClient
from sam3_node.settings import CameraSettings
from sam3_node.transport import FramePublisher
from sam3_node.types import MaskFrame
from sam3_node.wire import pack_masks

FPS = 30
BLOCK = 30  # frames before the camera turns to the next path
PEERS = ("forward", "model", "answer")
PATHS = ("ours", *PEERS)
MODEL_STAGES = ("preprocess", "encode", "detect", "track", "masks")
STAMP = struct.Struct("<qqqq")  # capture_ns; of the relay: received_ns, published_ns, model_ns
SIZES = ((640, 480), (1920, 1080))


@dataclass(frozen=True)
class Job:
    """What the processes of one run have to know."""

    frames: dict[str, str]  # endpoint that the camera binds for each path
    answers: dict[str, str]  # endpoint that the relay of each peer binds
    weights: Path
    width: int
    height: int
    objects: int


class Overhead(NamedTuple):
    """Where the time of one frame went, in milliseconds; the model's is left out."""

    hop_in: float
    inside: float
    hop_out: float

    @classmethod
    def between(
        cls, capture_ns: int, received_ns: int, published_ns: int, arrived_ns: int, model_ns: int
    ) -> Overhead:
        inside_ns = published_ns - received_ns - model_ns
        return cls((received_ns - capture_ns) / 1e6, inside_ns / 1e6, (arrived_ns - published_ns) / 1e6)

    @classmethod
    def of(cls, masks: MaskFrame, arrived_ns: int) -> Overhead:
        model_ns = 1000 * sum(masks.stages_us.get(stage, 0) for stage in MODEL_STAGES)
        return cls.between(masks.capture_ns, masks.received_ns, masks.published_ns, arrived_ns, model_ns)


def run_sender(job: Job, ready: Connection) -> None:
    """The camera process: the same drawn pictures to each path in turn, until it is terminated."""
    scene = Scene(width=job.width, height=job.height)
    pictures = [scene.render(8 * i)[0] for i in range(8)]
    settings = CameraSettings(name="bench")
    bare = {peer: _bound(zmq.PUB, job.frames[peer]) for peer in PEERS}
    pacer = Pacer(FPS, threading.Event())
    with FramePublisher(job.frames["ours"]) as publisher:
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


def run_relay(job: Job, peer: str, answer_bytes: int) -> None:
    """Answer the newest frame, until terminated."""
    step = model_step(job) if peer == "model" else lambda _: 0
    newest = Newest(job.frames[peer])
    publisher = _bound(zmq.PUB, job.answers[peer])
    filling = bytes(answer_bytes)
    while True:
        parts, received_ns = newest.take()
        model_ns = step(parts[2].buffer)
        capture_ns = STAMP.unpack(parts[1].buffer)[0]
        stamp = STAMP.pack(capture_ns, received_ns, time.time_ns(), model_ns)
        answer = parts[2] if peer == "forward" else filling
        publisher.send_multipart([b"masks/bench", stamp, answer], copy=False)


def model_step(job: Job) -> Callable[[memoryview], int]:
    """Pixels -> the nanoseconds that the model took for them: the stages that are the model's in our messages."""
    import torch

    from sam3_node.models import load_tracker
    from sam3_node.perception.rasterize import rasterize
    from sam3_node.tracking import ObjectPrompt, Tracker

    torch.set_num_threads(1)
    model = load_tracker(job.weights)
    tracker = Tracker(model)
    xs = [model.image_size * (i + 1) / (job.objects + 1) for i in range(job.objects)]
    prompts = [ObjectPrompt(i, points=[[x, model.image_size / 2]]) for i, x in enumerate(xs)]

    def step(pixels: memoryview) -> int:
        image = np.frombuffer(pixels, np.uint8).reshape(job.height, job.width, 3)
        begin_ns = time.perf_counter_ns()
        tracks = tracker.step(model.preprocess(image), prompts if tracker.frame_number == 0 else ())
        for logits in tracks.logits.numpy():
            rasterize(logits, (job.height, job.width))
        return time.perf_counter_ns() - begin_ns

    return step


class Newest:
    """A thread that drains a SUB socket into one slot, with the time of arrival."""

    def __init__(self, endpoint: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)
        self._changed = threading.Condition()
        self._slot: tuple[list[zmq.Frame], int] | None = None
        threading.Thread(target=self._drain, daemon=True).start()

    def take(self) -> tuple[list[zmq.Frame], int]:
        with self._changed:
            self._changed.wait_for(lambda: self._slot is not None)
            taken, self._slot = self._slot, None
        assert taken is not None
        return taken

    def _drain(self) -> None:
        while True:
            parts = self._socket.recv_multipart(copy=False)
            with self._changed:
                self._slot = parts, time.time_ns()
                self._changed.notify()


def collect_peer(endpoint: str, overheads: list[Overhead]) -> None:
    """A peer's subscriber, for a thread: overhead of each answer."""
    newest = Newest(endpoint)
    while True:
        parts, _ = newest.take()
        arrived_ns = time.time_ns()
        capture_ns, received_ns, published_ns, model_ns = STAMP.unpack(parts[1].buffer)
        overheads.append(Overhead.between(capture_ns, received_ns, published_ns, arrived_ns, model_ns))


def collect_ours(client: PerceptionClient, until_s: float, overheads: list[Overhead]) -> None:
    """Our subscriber: overhead of each masks message."""
    while time.monotonic() < until_s:
        masks = client.latest(timeout_ms=200)
        if masks is not None:
            overheads.append(Overhead.of(masks, time.time_ns()))


def measure(
    weights: Path, width: int, height: int, objects: int, seconds: float
) -> dict[str, list[Overhead]]:
    """Overheads on each path."""
    spawn = multiprocessing.get_context("spawn")
    with (
        Processes(SAM3_MODEL__NAME=str(weights), SAM3_MODEL__THREADS="1") as processes,
        ExitStack() as ending,
    ):
        ports = iter(free_ports(2 * len(PEERS)))
        frames, answers = ({peer: f"tcp://127.0.0.1:{next(ports)}" for peer in PEERS} for _ in range(2))
        job = Job({"ours": processes.frames, **frames}, answers, weights, width, height, objects)
        ready, sender_end = spawn.Pipe(duplex=False)
        _start(spawn.Process(target=run_sender, args=(job, sender_end), daemon=True), ending)
        ready.recv()
        processes.start("run")
        with processes.client() as client:
            add_points(client, objects)
            answer_bytes = len(pack_masks(next_masks(client))[1])
            for peer in PEERS:
                _start(spawn.Process(target=run_relay, args=(job, peer, answer_bytes), daemon=True), ending)
            print(f"{width}x{height}, masks message of {answer_bytes} bytes")
            return _collect(client, answers, seconds)


def _start(process: SpawnProcess, ending: ExitStack) -> None:
    process.start()
    ending.callback(process.join)
    ending.callback(process.terminate)


def _collect(client: PerceptionClient, answers: dict[str, str], seconds: float) -> dict[str, list[Overhead]]:
    """All paths at once, from the moment on in which all flow."""
    found: dict[str, list[Overhead]] = {path: [] for path in PATHS}
    for peer, endpoint in answers.items():
        threading.Thread(target=collect_peer, args=(endpoint, found[peer]), daemon=True).start()
    while not all(len(overheads) > BLOCK for overheads in found.values()):
        collect_ours(client, time.monotonic() + 0.2, found["ours"])
    for overheads in found.values():
        overheads.clear()
    collect_ours(client, time.monotonic() + seconds, found["ours"])
    return found


def _bound(kind: int, endpoint: str) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.bind(endpoint)
    return socket


def report(found: dict[str, list[Overhead]]) -> None:
    print(
        "               p50 ms   p99 ms   ours, p50   ours, p99     hop in   inside   hop out (p50)   frames"
    )
    totals = {path: [sum(overhead) for overhead in overheads] for path, overheads in found.items()}
    ours = {part: percentile(totals["ours"], part) for part in (0.50, 0.99)}
    for path, overheads in found.items():
        p50, p99 = (percentile(totals[path], part) for part in ours)
        parts = "".join(f"{percentile(column, 0.5):9.2f}" for column in zip(*overheads, strict=True))
        ratios = f"{ours[0.50] / p50:10.2f}x {ours[0.99] / p99:10.2f}x"
        print(f"  {path:10s} {p50:8.2f} {p99:8.2f} {ratios}  {parts} {len(overheads):18d}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=24.0)
    parser.add_argument("--objects", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        weights = save_tiny_checkpoint(Path(folder) / "tiny")
        print(
            f"raw bgr8 over tcp at {FPS} Hz, {args.objects} objects; milliseconds from capture, without the model"
        )
        for width, height in SIZES:
            report(measure(weights, width, height, args.objects, args.seconds))


if __name__ == "__main__":
    main()
