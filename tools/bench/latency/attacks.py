"""Attack a node from another process, and measure what the masks, the processes and another client notice.

    python -m tools.bench.latency.attacks [--seconds 5] [--objects 4] [--runs 1] [--attacks NAME ...]

Camera, node and attacker are processes on the loopback interface. Each attack follows a quiet time of the same length.
The rate of masks during the attack is compared with the rate in that quiet time; a gap is the time between two masks
of the camera. Memory is the highest resident size of node and camera together during the attack, less that before it.
A policy asks for `list_objects` and `status` during the attack. A process that has ended is counted and started again.
An attack is a function in a process of its own, which is killed at the end; if it is cut off, it connects again after a
pause.
"""

from __future__ import annotations

import os
import signal
import statistics
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from itertools import count, cycle, pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import cv2
import numpy as np
import psutil
import zmq

from sam3_node.client import PerceptionClient
from sam3_node.errors import Sam3NodeError
from sam3_node.transport import FramePublisher
from sam3_node.types import Frame, Mask
from sam3_node.wire import Request, encode_mask, pack_frame, pack_request
from sam3_node.wire.masks import PackedMask
from tests.support.raw_zmtp import connect, frame, ping, raw_peer, reset
from tools.bench.common import RATIO, Figures, make_parser, percentile
from tools.bench.processes import Processes, add_points, drain, free_endpoints, spawned

MAX_SIDE = 16384
BODY_BYTES = 15 << 20
PAUSE_S = 0.1
CONNECTIONS = 2000
HALF_OPEN = 900
NAMES = 1500
SCANS = 10_000
FRAMES_HZ = 30

POINT = {"camera": "cam0", "points": [[320.0, 240.0]]}
SETTLE_S = 2.0
POLICY_HZ = 20
CAMERA_HZ = 30
MIB = 1 << 20
HEADER = (
    "attack                     ended  rate: median, min  longest gap ms  in steps  grown MiB"
    "  list p99 ms  status p99 ms"
)


class Target(NamedTuple):
    """The endpoints of a node: of its camera, of a second camera that the attacker plays, and its own."""

    frames: str
    second: str
    masks: str
    control: str


Attack = Callable[[Target], None]


def _pack_large_mask() -> PackedMask:
    full = np.zeros((MAX_SIDE, MAX_SIDE), np.bool_)
    full[0, 0] = full[-1, -1] = True
    return encode_mask(Mask.from_full(full))


def _send_requests(bodies: Iterator[bytes], target: Target, ahead: int = 1000) -> None:
    """Send requests as fast as the node takes them, and read the replies."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        client.sndhwm = ahead
        client.connect(target.control)
        body = next(bodies)
        while True:
            events = client.poll(100, zmq.POLLIN | zmq.POLLOUT)
            if events & zmq.POLLIN:
                client.recv()
            if events & zmq.POLLOUT:
                client.send(body)
                body = next(bodies)


def _requests(op: str, arguments: dict[str, Any]) -> Attack:
    return lambda target: _send_requests((pack_request(Request(n, op, arguments)) for n in count(1)), target)


def _large_requests(op: str, arguments: Callable[[], dict[str, Any]]) -> Attack:
    return lambda target: _send_requests(cycle([pack_request(Request(1, op, arguments()))]), target, ahead=4)


def _malformed(target: Target) -> None:
    cut = pack_request(Request(1, "status"))[:-3]
    _send_requests(cycle([b"", b"junk", os.urandom(2000), cut, b"\xdd\xff\xff\xff\xff"]), target)


def _raw(place: str, kind: str, make: Callable[[], bytes]) -> Attack:
    """Return an attack that sends the same bytes again and again, and connects anew when it is cut off."""

    def attack(target: Target) -> None:
        data = make()
        while True:
            with suppress(OSError, AssertionError), raw_peer(getattr(target, place), kind) as peer:
                peer.settimeout(1)
                while True:
                    with suppress(TimeoutError):
                        peer.sendall(data)
            time.sleep(PAUSE_S)

    return attack


def _subscribe(size: int) -> Callable[[], bytes]:
    return lambda: b"".join(frame(b"\x01" + os.urandom(size)) for _ in range(1000))


def _half_open(target: Target) -> None:
    """Hold connections without a handshake, a third at each socket."""
    places = cycle([target.frames, target.masks, target.control])
    while True:
        with ExitStack() as stack:
            for _ in range(HALF_OPEN):
                with suppress(OSError):
                    stack.enter_context(connect(next(places)))
            time.sleep(2)


def _connects(target: Target) -> None:
    """Connect to the sockets one after the other, with a handshake, and hold the connections."""
    places = cycle([(target.masks, "SUB"), (target.control, "DEALER")])
    with ExitStack() as stack:
        for _ in range(CONNECTIONS):
            with suppress(OSError, AssertionError):
                stack.enter_context(raw_peer(*next(places)))
        signal.pause()


def _pings(target: Target) -> None:
    """Send PINGs behind more messages than a short queue holds, and reset the connection."""
    junk = b"".join(frame(b"\x01%d" % n) + ping() for n in range(300))
    for place, kind in cycle([(target.frames, "SUB"), (target.masks, "SUB"), (target.control, "DEALER")]):
        with suppress(OSError, AssertionError), raw_peer(place, kind) as peer:
            peer.sendall(junk)
            time.sleep(0.05)
            reset(peer)


def _publish(make: Callable[[int], Frame], hz: float = FRAMES_HZ, burst: int = 1) -> Attack:
    """Return an attack by a camera of the second endpoint."""

    def attack(target: Target) -> None:
        with zmq.Context() as context, context.socket(zmq.PUB) as camera:
            camera.linger = 0
            camera.sndhwm = 0
            camera.bind(target.second)
            for seq in count():
                if seq % burst == 0:
                    time.sleep(1 / hz)
                camera.send_multipart(pack_frame(make(seq)))

    return attack


def _grey(camera: str, seq: int, ahead_s: float = 0.0) -> Frame:
    capture_ns = time.time_ns() + int(1e9 * ahead_s)
    return Frame(camera, seq, capture_ns, 64, 48, "mono8", bytes(64 * 48), sent_ns=time.time_ns())


def _jpeg(side: int, *options: int) -> bytes:
    return cv2.imencode(".jpg", np.full((side, side, 3), 90, np.uint8), options)[1].tobytes()


def _jpeg_of_many_scans() -> bytes:
    """Return a progressive JPEG in which the last scan is repeated."""
    data = _jpeg(1024, cv2.IMWRITE_JPEG_PROGRESSIVE, 1)
    scan = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + scan * SCANS + data[-2:]


def _jpeg_of_two_sizes() -> bytes:
    """Return a JPEG of 12000 x 12000 behind a marker with fill bytes; a reader that skips them finds 64 x 64."""
    large = _jpeg(12000)
    body = bytearray(large[large.index(b"\xff\xc0") : large.index(b"\xff\xc0") + 19])
    body[5:9] = struct.pack(">HH", 64, 64)
    return large[:2] + b"\xff\xe0\x00\x15" + bytes(body) + b"\xff\xff\xff" + large[3:]


def _images(make: Callable[[], bytes], side: int) -> Attack:
    def attack(target: Target) -> None:
        data = make()
        _publish(lambda seq: Frame("evil", seq, time.time_ns(), side, side, "jpeg", data))(target)

    return attack


def _same_name(target: Target) -> None:
    with FramePublisher(target.second) as camera:
        for seq in count():
            time.sleep(1 / FRAMES_HZ)
            camera.send(_grey("cam0", seq))


def _large_frames(target: Target) -> None:
    """Send frames whose pixels are noise, as large as the node accepts by default."""
    pixels = os.urandom(4096 * 4096)
    _publish(lambda seq: Frame("evil", seq, time.time_ns(), 4096, 4096, "mono8", pixels), 5)(target)


ATTACKS: dict[str, Attack] = {
    "segment requests": _requests("segment", POINT),
    "refine requests": _requests("refine_object", {**POINT, "id": 1}),
    "status requests": _requests("status", {}),
    "malformed requests": _malformed,
    "huge masks": _large_requests("add_object", lambda: {"camera": "cam0", "mask": _pack_large_mask()}),
    "huge requests": _large_requests("segment", lambda: {**POINT, "label": os.urandom(BODY_BYTES)}),
    "small junk to control": _raw("control", "DEALER", lambda: frame(b"junk") * 20_000),
    "empty messages to control": _raw("control", "DEALER", lambda: frame(b"") * 40_000),
    "a request of empty parts": _raw("control", "DEALER", lambda: frame(b"", more=True) * 40_000),
    "a request of large parts": _raw("control", "DEALER", lambda: frame(bytes(1 << 16), more=True) * 8),
    "a subscription of parts": _raw("masks", "SUB", lambda: frame(b"\x01" + bytes(400), more=True) * 500),
    "subscriptions, 12 bytes": _raw("masks", "SUB", _subscribe(12)),
    "subscriptions, 4 KB": _raw("masks", "SUB", _subscribe(4000)),
    "subscriptions to camera": _raw("frames", "SUB", _subscribe(70)),
    "half-open handshakes": _half_open,
    "2000 connections": _connects,
    "pings and resets": _pings,
    "1500 camera names": _publish(lambda seq: _grey(f"evil{seq % NAMES}", seq), 50, 30),
    "a camera of the same name": _same_name,
    "jpeg of 10000 scans": _images(_jpeg_of_many_scans, 1024),
    "jpeg of two sizes": _images(_jpeg_of_two_sizes, 64),
    "large frames": _large_frames,
    "frames 10 s ahead": _publish(lambda seq: _grey("evil", seq, 10.0)),
    "frames 10 s behind": _publish(lambda seq: _grey("evil", seq, -10.0)),
}
"""By name. The attacks of a camera come from the second endpoint of the node."""


def attack(name: str, target: Target) -> None:
    """Attack without end: for a process of its own."""
    ATTACKS[name](target)


class Noticed(NamedTuple):
    """Effects on masks, processes and policy in one measurement."""

    rate_hz: float
    step_ms: float
    """median time between two masks"""
    gap_ms: float
    """longest time between two masks"""
    rss_mib: float
    """highest resident memory of the node and its camera"""
    list_ms: float
    """p99 of the policy's `list_objects`"""
    status_ms: float
    """p99 of the policy's `status`"""


class Robot:
    """A node and its camera, which are started again when they have ended, and a reader of the masks."""

    def __init__(self, model: str, threads: str, objects: int) -> None:
        (second,) = free_endpoints(1)
        self._objects = objects
        self._processes = Processes(SAM3_MODEL__NAME=model, SAM3_MODEL__THREADS=threads)
        frames = self._processes.frames
        self._both = {"SAM3_TRANSPORT__FRAMES": f"{frames},{second}"}
        self._running: dict[str, subprocess.Popen[str]] = {}
        self.target = Target(frames, second, self._processes.masks, self._processes.control)

    def __enter__(self) -> Robot:
        self._processes.__enter__()
        self.restart()
        return self

    def __exit__(self, *error: Any) -> None:
        self.client.close()
        self._processes.__exit__(*error)

    def restart(self) -> int:
        """Start the processes that do not run. Return how many had ended."""
        ended = [name for name, process in self._running.items() if process.poll() is not None]
        if "node" in ended or not self._running:
            self._running["node"] = self._processes.start("run", **self._both)
        if "camera" in ended or len(self._running) == 1:
            self._running["camera"] = self._processes.start_camera("scene:tabletop", CAMERA_HZ)
        if ended or not hasattr(self, "client"):
            self.client = self.open_client()
            self.client.wait_for_camera()
            add_points(self.client, self._objects)
            self.client.segment(points=[(320.0, 240.0)], camera="cam0")  # the first one takes buffers
        return len(ended)

    def open_client(self) -> PerceptionClient:
        """Return a client that receives the masks of the camera."""
        return self._processes.client(cameras=["cam0"])

    def rss_mib(self) -> float:
        """Return the resident memory of the processes now."""
        total = 0
        for process in self._running.values():
            with suppress(psutil.NoSuchProcess):
                total += psutil.Process(process.pid).memory_info().rss
        return total / MIB


class Policy:
    """A client that asks for objects and status, and looks at the memory, until it is stopped."""

    def __init__(self, robot: Robot) -> None:
        self._robot = robot
        self._stop = threading.Event()
        self.times_ms: dict[str, list[float]] = {"list_objects": [], "status": []}
        self.rss_mib: list[float] = []
        self._threads = [threading.Thread(target=run) for run in (self._ask, self._watch)]

    def __enter__(self) -> Policy:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        with self._robot.open_client() as client:
            while not self._stop.wait(1 / POLICY_HZ):
                for op, call in (("list_objects", client.list_objects), ("status", client.status)):
                    begin_s = time.monotonic()
                    with suppress(Sam3NodeError):
                        call()
                    self.times_ms[op].append(1e3 * (time.monotonic() - begin_s))

    def _watch(self) -> None:
        while not self._stop.wait(0.05):
            self.rss_mib.append(self._robot.rss_mib())


def measure(robot: Robot, seconds: float) -> Noticed:
    """Read masks for some seconds while a policy asks."""
    client = robot.client
    drain(client)
    with Policy(robot) as policy:
        begin_s = time.monotonic()
        times_s = [begin_s]
        while times_s[-1] - begin_s < seconds:
            if client.latest(int(1e3 * seconds)) is None:
                break
            times_s.append(time.monotonic())
        gaps_ms = [1e3 * (later - earlier) for earlier, later in pairwise([*times_s, time.monotonic()])]
        rate_hz = (len(times_s) - 1) / (time.monotonic() - begin_s)
    late_ms = (percentile(policy.times_ms[op], 0.99) for op in ("list_objects", "status"))
    return Noticed(rate_hz, statistics.median(gaps_ms), max(gaps_ms), max(policy.rss_mib), *late_ms)


def run(name: str, robot: Robot, seconds: float) -> tuple[Noticed, Noticed, int]:
    """Return the effects in the quiet time and during the attack, and the number of processes that ended."""
    quiet = measure(robot, seconds)
    with spawned(attack, name, robot.target):
        attacked = measure(robot, seconds + SETTLE_S)  # the attacker starts
    return quiet, attacked, robot.restart()


class Row(NamedTuple):
    """Effects of one attack: the worst of its runs, and the median ratio of the rates."""

    attack: str
    ended: int
    median_ratio: float
    ratio: float
    gap_ms: float
    steps: float
    grown_mib: float
    list_ms: float
    status_ms: float

    @classmethod
    def from_runs(cls, attack: str, runs: list[tuple[Noticed, Noticed, int]]) -> Row:
        """Summarise the runs of an attack."""
        ratios = [attacked.rate_hz / quiet.rate_hz for quiet, attacked, _ in runs]
        return cls(
            attack,
            sum(count for _, _, count in runs),
            statistics.median(ratios),
            min(ratios),
            max(attacked.gap_ms for _, attacked, _ in runs),
            max(attacked.gap_ms / quiet.step_ms for quiet, attacked, _ in runs),
            max(attacked.rss_mib - quiet.rss_mib for quiet, attacked, _ in runs),
            statistics.median(attacked.list_ms for _, attacked, _ in runs),
            statistics.median(attacked.status_ms for _, attacked, _ in runs),
        )

    def format(self) -> str:
        """Return the line of the table."""
        return (
            f"{self.attack:26s} {self.ended:5d} {self.median_ratio:13.2f} {self.ratio:4.2f} {self.gap_ms:15.0f} "
            f"{self.steps:9.1f} {self.grown_mib:10.1f} {self.list_ms:12.1f} {self.status_ms:14.1f}"
        )


def add_worst(rows: list[Row], figures: Figures) -> None:
    """Keep the worst figure of all attacks, with the name of its attack."""
    count = f"worst of {len(rows)} attacks"
    figures.add(f"{count}: processes ended", float(sum(row.ended for row in rows)), "processes", "0")
    for field, worst_of, what, unit, target in (
        ("ratio", min, "rate of masks / quiet rate", RATIO, "at least 0.5"),
        ("steps", max, "longest gap between masks / median quiet step", RATIO, "3, or 500 ms"),
        ("grown_mib", max, "growth of memory", "MiB", "at most 64"),
        ("status_ms", max, "`status` of another client, p99", "ms", ""),
    ):
        worst: Row = worst_of(rows, key=attrgetter(field))
        figures.add(f"{count}: {what} ({worst.attack})", getattr(worst, field), unit, target)


def main() -> None:
    parser = make_parser(__doc__, runs=1, seconds=5.0, objects=4, model="nano", threads="1")
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=ATTACKS, help="attacks to run")
    args = parser.parse_args()
    figures = Figures("latency.attacks", show=False)
    with Robot(args.model, args.threads, args.objects) as robot:
        measure(robot, SETTLE_S)
        print(HEADER)
        rows: list[Row] = []
        for name in args.attacks:
            rows.append(Row.from_runs(name, [run(name, robot, args.seconds) for _ in range(args.runs)]))
            print(rows[-1].format(), flush=True)
    add_worst(rows, figures)
    figures.write(args.json)


if __name__ == "__main__":
    main()
