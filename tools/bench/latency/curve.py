"""Measure what encryption (CURVE) adds to the way of frames and masks between two processes of this machine.

A publisher process sends each kind of message with and without keys in turn, so that both see the same load. The time
is from before `send` in one process to after `take` in the other: packing, encryption, the loopback interface,
decryption and unpacking. Run it on a quiet machine: `python -m tools.bench.latency.curve --json curve.json`.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from sam3_node.transport import FramePublisher, FrameSubscriber, MaskPublisher, MaskSubscriber, Security
from sam3_node.transport.security import KeyFolder
from sam3_node.types import Frame, Instance, Mask, MaskFrame
from sam3_node.wire import pack_frame, pack_masks
from tools.bench.common import RATIO, Figures, make_parser
from tools.bench.processes import spawned

SIZES = {"raw 640x480": (640, 480), "raw 1920x1080": (1920, 1080), "jpeg 1920x1080": (1920, 1080)}
MASKS = "masks 1920x1080"
KINDS = (*SIZES, MASKS)
OBJECTS = 5
MASK_SIDE = 300
JOIN_S = 60.0
WARMUP = 5

Channel = tuple[Any, Connection]
"""A publisher in this process, and the times at which the subscriber's process has taken its messages."""


def make_message(kind: str, seq: int) -> Frame | MaskFrame:
    """Return a message of a kind. The pixels are noise, smoothed for JPEG as a picture is."""
    rng = np.random.default_rng(0)
    if kind == MASKS:
        instances = []
        for index in range(OBJECTS):
            disc = np.zeros((1080, 1920), np.uint8)
            cv2.circle(disc, (300 + index * 320, 540), MASK_SIDE // 2, 1, -1)
            mask = Mask.from_full(disc.astype(np.bool_))
            instances.append(Instance(index + 1, "object", 0.9, "tracked", seq, 0, mask))
        return MaskFrame("cam0", seq, time.time_ns(), 1920, 1080, instances=tuple(instances))
    width, height = SIZES[kind]
    image = rng.integers(0, 255, (height, width, 3), np.uint8)
    if not kind.startswith("jpeg"):
        return Frame("cam0", seq, time.time_ns(), width, height, "bgr8", image.data.cast("B"))
    smooth = cv2.GaussianBlur(image, (0, 0), 4)
    _, data = cv2.imencode(".jpg", cv2.normalize(smooth, smooth, 0, 255, cv2.NORM_MINMAX))
    return Frame("cam0", seq, time.time_ns(), width, height, "jpeg", memoryview(data.tobytes()))


def receive(kind: str, endpoint: str, keys: str, times: Connection) -> None:
    """Send the time (`time.monotonic_ns`) at which each message has been taken. The other process runs this."""
    security = Security(Path(keys) if keys else None)
    subscribe: Any = (
        partial(MaskSubscriber, endpoint) if kind == MASKS else partial(FrameSubscriber, [endpoint])
    )
    with subscribe(security=security) as subscriber:
        while True:
            if subscriber.take(200) is not None:
                times.send(time.monotonic_ns())


@contextmanager
def open_channel(kind: str, keys: str) -> Iterator[Channel]:
    """Start a publisher here, and a subscriber in a process of its own."""
    security = Security(Path(keys) if keys else None)
    publisher_class = MaskPublisher if kind == MASKS else FramePublisher
    with publisher_class("tcp://127.0.0.1:*", security=security) as publisher:
        times, sender = Pipe(duplex=False)
        with spawned(receive, kind, publisher.endpoint, keys, sender):
            yield publisher, times


def measure_once(channel: Channel, message: Any) -> float:
    """Send one message and return the milliseconds until it was taken. Send again what found no subscriber."""
    publisher, times = channel
    begin_ns = time.monotonic_ns()
    publisher.send(message)
    return float(times.recv() - begin_ns) / 1e6


def wait_for_subscriber(channel: Channel, message: Any) -> None:
    """Send until the subscriber has joined: messages before that are lost. Return when nothing more comes."""
    publisher, times = channel
    deadline_s = time.monotonic() + JOIN_S
    while not times.poll(0.1):
        if time.monotonic() > deadline_s:
            raise SystemExit(f"the subscriber's process has received nothing within {JOIN_S:.0f} s")
        publisher.send(message)
    while times.poll(1.0):
        times.recv()
    for _ in range(WARMUP):
        measure_once(channel, message)


def measure(kind: str, keys: str, count: int, rate: float) -> dict[str, list[float]]:
    """Measure `count` pairs of messages at `rate` pairs a second. Return the times in ms, plain and with keys."""
    times: dict[str, list[float]] = {"plain": [], "CURVE": []}
    with open_channel(kind, "") as plain, open_channel(kind, keys) as curve:
        channels = {"plain": plain, "CURVE": curve}
        message: Any = make_message(kind, 1)
        for channel in channels.values():
            wait_for_subscriber(channel, message)
        for index in range(count):
            begin_s = time.monotonic()
            for name in sorted(channels, reverse=bool(index % 2)):  # each is first in half of the pairs
                times[name].append(measure_once(channels[name], message))
            time.sleep(max(0.0, 1 / rate - (time.monotonic() - begin_s)))
    return times


def report(kind: str, times: dict[str, list[float]], figures: Figures) -> None:
    """Keep the times of a kind as figures."""
    message: Any = make_message(kind, 1)
    size = sum(memoryview(part).nbytes for part in (pack_masks if kind == MASKS else pack_frame)(message))
    ratio = float(np.median(np.divide(times["CURVE"], times["plain"])))
    figures.add(f"{kind} ({size / 1e3:.0f} kB) to another process: with CURVE / plain", ratio, RATIO)
    for name, values in times.items():
        for percent in (50, 99):
            value = float(np.percentile(values, percent))
            figures.add(f"{kind} to another process: {name}, p{percent}", value, "ms")


def main() -> None:
    """Measure all kinds, and print or write the result."""
    parser = make_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=300, help="number of pairs of each kind [300]")
    parser.add_argument("--rate", type=float, default=30.0, help="pairs a second [30]")
    args = parser.parse_args()
    figures = Figures("latency.curve")
    with tempfile.TemporaryDirectory() as folder:
        keys = KeyFolder(Path(folder) / "keys")
        for name, role in (("node", "node"), ("cam0", "camera"), ("watcher", "reader")):
            keys.create(name, role)
        for kind in KINDS:
            report(kind, measure(kind, str(keys.path), args.pairs, args.rate), figures)
    figures.write(args.json)


if __name__ == "__main__":
    main()
