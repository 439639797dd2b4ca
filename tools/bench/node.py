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
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import zmq
from _common import Processes, add_points, free_ports, next_masks, percentile, save_tiny_checkpoint

from sam3_node.cameras.base import CapturedImage, Image
from sam3_node.cameras.pacing import Pacer
from sam3_node.cameras.publish import frame_from
from sam3_node.cameras.scene import Scene
from sam3_node.client import PerceptionClient
from sam3_node.settings import CameraSettings
from sam3_node.transport import FramePublisher
from sam3_node.wire import pack_masks

FPS = 30
BLOCK = 30  # frames before the camera turns to the next path
PATHS = ("ours", "bare", "forward")
MODEL_STAGES = ("preprocess", "encode", "detect", "track", "masks")
STAMP = struct.Struct("<qq")  # seq, capture_ns
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


def run_sender(ends: Ends, width: int, height: int, ready: Connection) -> None:
    """The camera process: the same drawn pictures to each path in turn, until it is terminated."""
    scene = Scene(width=width, height=height)
    pictures = [scene.render(8 * i)[0] for i in range(8)]
    settings = CameraSettings(name="bench")
    bare = {path: _bound(zmq.PUB, getattr(ends, path)) for path in PATHS[1:]}
    pacer = Pacer(FPS, threading.Event())
    with FramePublisher(ends.ours) as publisher:
        ready.send(True)
        for seq in _forever():
            picture = pictures[seq % len(pictures)]
            pacer.wait()
            capture_ns = time.time_ns()
            path = PATHS[seq // BLOCK % len(PATHS)]
            if path == "ours":
                publisher.send(frame_from(CapturedImage(picture, capture_ns), seq, settings))
            else:
                _send_bare(bare[path], picture, seq, capture_ns)


def run_relay(frames: str, answers: str, answer_bytes: int, forwards: bool) -> None:
    """Answer the newest frame with `answer_bytes`, and pass its pixels on if it `forwards`."""
    newest = Newest(frames)
    publisher = _bound(zmq.PUB, answers)
    filling = bytes(answer_bytes)
    while True:
        parts = newest.take()
        last = parts[2] if forwards else filling
        publisher.send_multipart([b"masks/bench", parts[1], last], copy=False)


class Newest:
    """A thread that drains a SUB socket into one slot."""

    def __init__(self, endpoint: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)
        self._changed = threading.Condition()
        self._slot: list[zmq.Frame] | None = None
        threading.Thread(target=self._drain, daemon=True).start()

    def take(self) -> list[zmq.Frame]:
        with self._changed:
            self._changed.wait_for(lambda: self._slot is not None)
            parts, self._slot = self._slot, None
        assert parts is not None
        return parts

    def _drain(self) -> None:
        while True:
            parts = self._socket.recv_multipart(copy=False)
            with self._changed:
                self._slot = parts
                self._changed.notify()


def collect_bare(endpoint: str, overheads_ms: list[float]) -> None:
    """The bare subscriber, for a thread: overhead of each answer."""
    newest = Newest(endpoint)
    while True:
        parts = newest.take()
        _, capture_ns = STAMP.unpack(parts[1].buffer)
        overheads_ms.append((time.time_ns() - capture_ns) / 1e6)


def collect_ours(client: PerceptionClient, until_s: float, overheads_ms: list[float]) -> None:
    """Our subscriber: overhead of each masks message."""
    while time.monotonic() < until_s:
        masks = client.latest(timeout_ms=200)
        if masks is not None:
            model_us = sum(masks.stages_us.get(stage, 0) for stage in MODEL_STAGES)
            overheads_ms.append((time.time_ns() - masks.capture_ns) / 1e6 - model_us / 1e3)


def measure(weights: Path, width: int, height: int, objects: int, seconds: float) -> dict[str, list[float]]:
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
    print(f"  {width}x{height}: masks message of {answer_bytes} bytes", flush=True)
    return found


def _collect(client: PerceptionClient, ends: Ends, seconds: float) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {path: [] for path in PATHS}
    for path, endpoint in (("bare", ends.bare_answers), ("forward", ends.forward_answers)):
        threading.Thread(target=collect_bare, args=(endpoint, found[path]), daemon=True).start()
    _settle(client, found)
    collect_ours(client, time.monotonic() + seconds, found["ours"])
    return found


def _settle(client: PerceptionClient, found: dict[str, list[float]]) -> None:
    """Wait until all three flow, then forget what was measured meanwhile."""
    while not (found["bare"] and found["forward"]):
        collect_ours(client, time.monotonic() + 1, found["ours"])
    for overheads in found.values():
        overheads.clear()


def _bound(kind: int, endpoint: str) -> zmq.Socket[bytes]:
    socket = zmq.Context.instance().socket(kind)
    socket.bind(endpoint)
    return socket


def _send_bare(socket: zmq.Socket[bytes], picture: Image, seq: int, capture_ns: int) -> None:
    socket.send_multipart([TOPIC, STAMP.pack(seq, capture_ns), picture], copy=False)


def _forever() -> Iterator[int]:
    seq = 0
    while True:
        yield seq
        seq += 1


def report(width: int, height: int, found: dict[str, list[float]]) -> None:
    for part in (0.50, 0.99):
        ours, bare, forward = (percentile(found[path], part) for path in PATHS)
        print(
            f"{width:5d}x{height:<5d} p{100 * part:2.0f} {ours:9.2f} {bare:9.2f} {ours / bare:7.2f}x"
            f" {forward:11.2f} {ours / forward:7.2f}x   {len(found['ours'])}, {len(found['bare'])}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=24.0)
    parser.add_argument("--objects", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        weights = save_tiny_checkpoint(Path(folder) / "tiny")
        print(f"raw bgr8 over tcp at {FPS} Hz, {args.objects} objects; milliseconds from capture, without the model")
        results = {size: measure(weights, *size, args.objects, args.seconds) for size in SIZES}
    print("                  ours ms   bare ms    ratio  forward ms   ratio   frames of ours, bare")
    for (width, height), found in results.items():
        report(width, height, found)


if __name__ == "__main__":
    main()
