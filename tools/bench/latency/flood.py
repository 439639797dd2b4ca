"""Flood the control socket of a node from one client, and measure what the masks and another client notice.

    python -m tools.bench.latency.flood [--seconds 6] [--objects 4] [--runs 3] [--attacks segment refine]

Camera and node are processes; the attacker is another one, which sends as fast as the node takes requests. Each attack
follows a quiet time of the same length. The rate of masks during the attack is compared with the rate in that quiet
time; a gap is the time between two masks; memory is the highest resident size of the node during the attack, less that
before it. A policy asks for `list_objects` and `status` during the attack.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, cycle, pairwise
from typing import Any, NamedTuple

import numpy as np
import zmq

from sam3_node.client import PerceptionClient
from sam3_node.types import Mask
from sam3_node.wire import Request, encode_mask, pack_request
from tools.bench.common import RATIO, Figures, make_parser, percentile
from tools.bench.processes import Processes, add_points, next_masks

SETTLE_S = 2.0
POLICY_HZ = 20
CAMERA_HZ = 30
MAX_SIDE = 16384
BODY_BYTES = 15 << 20
HEADER = "flood of       rate: median, min   longest gap ms   in steps  grown MB  list_objects p99 ms  status p99 ms"
ATTACK_OPTION = "--attack"  # of the attacker's process

POINT = {"camera": "cam0", "points": [[320.0, 240.0]]}


def _pack_large_mask() -> dict[str, Any]:
    full = np.zeros((MAX_SIDE, MAX_SIDE), np.bool_)
    full[0, 0] = full[-1, -1] = True
    return encode_mask(Mask.from_full(full))


def make_requests(attack: str) -> Iterator[bytes]:
    """Yield the bodies of an attack's requests without end."""
    arguments: dict[str, Callable[[], tuple[str, dict[str, Any]]]] = {
        "segment": lambda: ("segment", POINT),
        "refine": lambda: ("refine_object", {**POINT, "id": 1}),
        "status": lambda: ("status", {}),
        "huge masks": lambda: ("add_object", {"camera": "cam0", "mask": _pack_large_mask()}),
        "huge requests": lambda: ("segment", {**POINT, "label": os.urandom(BODY_BYTES)}),
    }
    if attack == "malformed":
        junk = [
            b"",
            b"junk",
            os.urandom(2000),
            pack_request(Request(1, "status"))[:-3],
            b"\xdd\xff\xff\xff\xff",
        ]
        yield from cycle(junk)
    op, args = arguments[attack]()
    if attack.startswith("huge"):
        yield from cycle([pack_request(Request(1, op, args))])
    for number in count(1):
        yield pack_request(Request(number, op, args))


ATTACKS = ("segment", "refine", "status", "malformed", "huge masks", "huge requests")


def attack_until_stopped(attack: str, endpoint: str) -> None:
    """Send requests as fast as the node takes them, and read the replies, until standard input ends."""
    stop = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        stop.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.sndhwm = 1000 if not attack.startswith("huge") else 4
        socket.connect(endpoint)
        requests, sent = make_requests(attack), 0
        body = next(requests)
        while not stop.is_set():
            events = socket.poll(100, zmq.POLLIN | zmq.POLLOUT)
            if events & zmq.POLLIN:
                socket.recv()
            if events & zmq.POLLOUT:
                socket.send(body)
                body, sent = next(requests), sent + 1
    print(sent, flush=True)


@contextmanager
def attacker(attack: str, endpoint: str) -> Iterator[None]:
    """Run an attack in a process of its own."""
    command = [sys.executable, "-m", "tools.bench.latency.flood", ATTACK_OPTION, attack, endpoint]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        time.sleep(SETTLE_S)  # it starts
        try:
            yield
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(20)


class Noticed(NamedTuple):
    """Effects on masks and policy in one measurement."""

    rate_hz: float
    step_ms: float
    """median time between two masks"""
    gap_ms: float
    """longest time between two masks"""
    rss_mb: float
    """highest resident memory of the node"""
    list_ms: float
    """p99 of the policy's `list_objects`"""
    status_ms: float
    """p99 of the policy's `status`"""


def measure(processes: Processes, client: PerceptionClient, seconds: float) -> Noticed:
    """Read masks for some seconds while a policy asks."""
    stop = threading.Event()
    times_ms: dict[str, list[float]] = {"list_objects": [], "status": []}
    rss_mb: list[float] = []

    def ask() -> None:
        with processes.client() as policy:
            while not stop.wait(1 / POLICY_HZ):
                for op, call in (("list_objects", policy.list_objects), ("status", policy.status)):
                    begin_s = time.monotonic()
                    reply = call()
                    times_ms[op].append(1e3 * (time.monotonic() - begin_s))
                rss_mb.append(reply["rss_bytes"] / 1e6)  # type: ignore[call-overload]

    asker = threading.Thread(target=ask)
    asker.start()
    while client.latest(0) is not None:
        pass
    stamps_ns = [next_masks(client).published_ns]
    while stamps_ns[-1] - stamps_ns[0] < 1e9 * seconds:
        stamps_ns.append(next_masks(client).published_ns)
    stop.set()
    asker.join()
    gaps_ms = [(later - earlier) / 1e6 for earlier, later in pairwise(stamps_ns)]
    rate_hz = 1e9 * len(gaps_ms) / (stamps_ns[-1] - stamps_ns[0])
    late_ms = (percentile(times_ms[op], 0.99) for op in ("list_objects", "status"))
    return Noticed(rate_hz, statistics.median(gaps_ms), max(gaps_ms), max(rss_mb), *late_ms)


def run(
    attack: str, processes: Processes, client: PerceptionClient, seconds: float
) -> tuple[Noticed, Noticed]:
    """Return the effects in the quiet time and during the attack."""
    quiet = measure(processes, client, seconds)
    with attacker(attack, processes.control):
        flooded = measure(processes, client, seconds)
    return quiet, flooded


def report(attack: str, runs: list[tuple[Noticed, Noticed]], figures: Figures) -> None:
    """Print one row of the table and keep its figures."""
    ratios = [flooded.rate_hz / quiet.rate_hz for quiet, flooded in runs]
    gaps_ms = [flooded.gap_ms for _, flooded in runs]
    steps = [flooded.gap_ms / quiet.step_ms for quiet, flooded in runs]
    grown_mb = [flooded.rss_mb - quiet.rss_mb for quiet, flooded in runs]
    list_ms, status_ms = (
        [getattr(flooded, name) for _, flooded in runs] for name in ("list_ms", "status_ms")
    )
    print(
        f"{attack:14s} {statistics.median(ratios):6.2f} {min(ratios):6.2f} {max(gaps_ms):19.0f} {max(steps):10.1f} "
        f"{max(grown_mb):9.1f} {statistics.median(list_ms):20.1f} {statistics.median(status_ms):14.1f}",
        flush=True,
    )
    what = f"flood of {attack} by one client"
    figures.add(f"{what}: rate of masks / quiet rate", ratios, RATIO, "at least 0.5")
    figures.add(f"{what}: longest gap between masks", gaps_ms, "ms", "500, or 3 steps")
    figures.add(f"{what}: longest gap / median quiet step", steps, RATIO)
    figures.add(f"{what}: growth of resident memory", grown_mb, "MB", "at most 64")
    figures.add(f"{what}: `list_objects` of another client, p99", list_ms, "ms")
    figures.add(f"{what}: `status` of another client, p99", status_ms, "ms")


def main() -> None:
    if sys.argv[1:2] == [ATTACK_OPTION]:
        attack_until_stopped(*sys.argv[2:4])
        return
    parser = make_parser(__doc__, runs=3)
    parser.add_argument("--seconds", type=float, default=6.0, help="length of each measurement")
    parser.add_argument("--objects", type=int, default=4, help="objects that the node tracks")
    parser.add_argument("--model", default="nano", help="weights of the node")
    parser.add_argument("--threads", default="1", help="CPU threads of the node's model")
    parser.add_argument("--attacks", nargs="+", choices=ATTACKS, default=ATTACKS, help="attacks to run")
    args, figures = parser.parse_args(), Figures("latency.flood")
    model = {"SAM3_MODEL__NAME": args.model, "SAM3_MODEL__THREADS": args.threads}
    camera = {"SAM3_CAMERA__FPS": str(CAMERA_HZ), "SAM3_CAMERA__LOOP": "true"}
    with Processes(**model) as processes:
        processes.start("run")
        processes.start("camera", "scene:tabletop", **camera)
        with processes.client() as client:
            add_points(client, args.objects)
            measure(processes, client, SETTLE_S)
            print(
                "flood of         rate: median, min  longest gap ms   in steps   grown MB  list p99 ms  status p99 ms"
            )
            for attack in args.attacks:
                runs = [run(attack, processes, client, args.seconds) for _ in range(args.runs)]
                report(attack, runs, figures)
    figures.write(args.json)


if __name__ == "__main__":
    main()
