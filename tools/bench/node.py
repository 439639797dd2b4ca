"""Capture-to-publish overhead: camera -> node -> subscriber against a bare pyzmq relay of the same frames.

    python tools/bench/node.py [--seconds 12] [--objects 1]

Ours: from a frame's `capture_ns` to the moment in which the subscriber holds its decoded masks, less the times of
the model's own stages (preprocess, encode, track, masks), which the message carries. So everything else counts:
making the frame message, both hops, the node's receiver thread and its hand-over, checking and decoding the image,
copying logits to the host, packing and unpacking masks.

Bare: from the same capture to the moment in which the subscriber holds the relay's answer, a message as long as our
masks message. The camera sends [topic, header, pixels] without a copy, the relay drains them in a thread into one
slot as ours does, nothing is checked, packed or decoded; it is the least that a live node can take. `forward` also
sends the pixels on, as a relay does that leaves the work to its subscriber.

Frames are drawn ahead and stamped when they are due, at 30 Hz. One camera process serves the three in turn, a second
each, so that a noisy machine is noisy for all; ratios are of percentiles over the whole run.
"""

from __future__ import annotations

import argparse
import multiprocessing
import struct
import tempfile
import threading
import time
from dataclasses import dataclass
from itertools import count, pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import zmq
from _common import Processes, add_points, free_ports, next_masks, percentile, save_tiny_checkpoint

from sam3_node.cameras.base import CapturedImage, Image
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
PATHS = ("ours", "bare", "forward")
MODEL_STAGES = ("preprocess", "encode", "detect", "track", "masks")
STAMP = struct.Struct("<qqq")  # capture_ns; received_ns and published_ns of the relay
TOPIC = b"frame/bench"
SIZES = ((640, 480), (1920, 1080))


@dataclass(frozen=True)
class Ends:
    """Endpoints: the camera binds the first three, the relays the last two."""

    ours: str
    bare: str
    forward: str
    bare_answers: str
    forward_answers: str


class Overhead(NamedTuple):
    """Where the time of one frame went, in milliseconds; the model's is left out."""

    hop_in: float
    inside: float
    hop_out: float

    @classmethod
    def between(cls, capture_ns: int, received_ns: int, published_ns: int, arrived_ns: int) -> Overhead:
        stamps = capture_ns, received_ns, published_ns, arrived_ns
        return cls(*((later - earlier) / 1e6 for earlier, later in pairwise(stamps)))

    @classmethod
    def of(cls, masks: MaskFrame, arrived_ns: int) -> Overhead:
        found = cls.between(masks.capture_ns, masks.received_ns, masks.published_ns, arrived_ns)
        model_us = sum(masks.stages_us.get(stage, 0) for stage in MODEL_STAGES)
        return found._replace(inside=found.inside - model_us / 1e3)


def run_sender(ends: Ends, width: int, height: int, ready: Connection) -> None:
    """The camera process: the same drawn pictures to each path in turn, until it is terminated."""
    scene = Scene(width=width, height=height)
    pictures = [scene.render(8 * i)[0] for i in range(8)]
    settings = CameraSettings(name="bench")
    bare = {path: _bound(zmq.PUB, getattr(ends, path)) for path in PATHS[1:]}
    pacer = Pacer(FPS, threading.Event())
    with FramePublisher(ends.ours) as publisher:
        ready.send(True)
        for seq in count():
            picture = pictures[seq % len(pictures)]
            pacer.wait()
            capture_ns = time.time_ns()
            path = PATHS[seq // BLOCK % len(PATHS)]
            if path == "ours":
                publisher.send(frame_from(CapturedImage(picture, capture_ns), seq, settings))
            else:
                _send_bare(bare[path], picture, capture_ns)


def run_relay(frames: str, answers: str, answer_bytes: int, forwards: bool) -> None:
    """Answer the newest frame with `answer_bytes`, and pass its pixels on if it `forwards`."""
    newest = Newest(frames)
    publisher = _bound(zmq.PUB, answers)
    filling = bytes(answer_bytes)
    while True:
        parts, received_ns = newest.take()
        stamp = STAMP.pack(STAMP.unpack(parts[1].buffer)[0], received_ns, time.time_ns())
        publisher.send_multipart([b"masks/bench", stamp, parts[2] if forwards else filling], copy=False)


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


def collect_bare(endpoint: str, overheads: list[Overhead]) -> None:
    """The bare subscriber, for a thread: overhead of each answer."""
    newest = Newest(endpoint)
    while True:
        parts, _ = newest.take()
        capture_ns, received_ns, published_ns = STAMP.unpack(parts[1].buffer)
        overheads.append(Overhead.between(capture_ns, received_ns, published_ns, time.time_ns()))


def collect_ours(client: PerceptionClient, until_s: float, overheads: list[Overhead]) -> None:
    """Our subscriber: overhead of each masks message."""
    while time.monotonic() < until_s:
        masks = client.latest(timeout_ms=200)
        if masks is not None:
            overheads.append(Overhead.of(masks, time.time_ns()))


def measure(
    weights: Path, width: int, height: int, objects: int, seconds: float
) -> dict[str, list[Overhead]]:
    """Overheads in milliseconds of the three paths."""
    spawn = multiprocessing.get_context("spawn")
    with Processes(SAM3_MODEL__NAME=str(weights), SAM3_MODEL__THREADS="1") as processes:
        ends = Ends(processes.frames, *(f"tcp://127.0.0.1:{port}" for port in free_ports(4)))
        ready, sender_end = spawn.Pipe(duplex=False)
        sender = spawn.Process(target=run_sender, args=(ends, width, height, sender_end), daemon=True)
        sender.start()
        ready.recv()
        processes.start("run")
        with processes.client() as client:
            add_points(client, objects)
            answer_bytes = len(pack_masks(next_masks(client))[1])
            relays = [
                spawn.Process(target=run_relay, args=arguments, daemon=True)
                for arguments in (
                    (ends.bare, ends.bare_answers, answer_bytes, False),
                    (ends.forward, ends.forward_answers, 0, True),
                )
            ]
            for relay in relays:
                relay.start()
            found = _collect(client, ends, seconds)
        for process in (sender, *relays):
            process.terminate()
            process.join()
    print(f"{width}x{height}, masks message of {answer_bytes} bytes")
    return found


def _collect(client: PerceptionClient, ends: Ends, seconds: float) -> dict[str, list[Overhead]]:
    found: dict[str, list[Overhead]] = {path: [] for path in PATHS}
    for path, endpoint in (("bare", ends.bare_answers), ("forward", ends.forward_answers)):
        threading.Thread(target=collect_bare, args=(endpoint, found[path]), daemon=True).start()
    _settle(client, found)
    collect_ours(client, time.monotonic() + seconds, found["ours"])
    return found


def _settle(client: PerceptionClient, found: dict[str, list[Overhead]]) -> None:
    """Wait until all three flow, then forget what was measured meanwhile."""
    while not (found["bare"] and found["forward"]):
        collect_ours(client, time.monotonic() + 1, found["ours"])
    for overheads in found.values():
        overheads.clear()


def _bound(kind: int, endpoint: str) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.bind(endpoint)
    return socket


def _send_bare(socket: zmq.Socket[bytes], picture: Image, capture_ns: int) -> None:
    socket.send_multipart([TOPIC, STAMP.pack(capture_ns, 0, 0), picture.data], copy=False)


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
