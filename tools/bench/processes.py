"""sam3-node commands as processes on endpoints of their own, and the client calls that benchmarks repeat."""

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import cycle, islice
from multiprocessing import get_context
from typing import Any, Self

from sam3_node.client import PerceptionClient
from sam3_node.types import MaskFrame

FIRST_PORT = 20_000
"""First TCP port that `free_ports` returns."""

END_PORT = 32_000
"""End of the ports that `free_ports` returns. Linux takes 32768 and more for connections, at times that none knows."""

BLOCK_PORTS = 120
"""Ports of a process. It gets one again after as many draws; more ports mean fewer processes at once."""

MAX_TRIES = 3 * BLOCK_PORTS
"""Ports that one call of `free_ports` tries before it gives up."""

_leases: list[socket.socket] = []
"""Names that tell other processes which block is this process's own. They stay open until its end."""


class Processes:
    """A context manager that runs sam3-node commands as processes on endpoints of their own, and ends them on exit."""

    def __init__(self, **settings: str) -> None:
        self.frames, self.masks, self.control = free_endpoints(3)
        endpoints = {
            "SAM3_TRANSPORT__FRAMES": self.frames,
            "SAM3_TRANSPORT__MASKS": self.masks,
            "SAM3_TRANSPORT__CONTROL": self.control,
        }
        self.environment: dict[str, str] = os.environ | endpoints | settings
        """Variables of each process"""
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str, **settings: str) -> subprocess.Popen[str]:
        """Start a command and wait for the line that says it is ready."""
        with tempfile.TemporaryFile("w+") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "sam3_node", *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self.environment | settings,
            )
            self._started.append(process)
            assert process.stdout is not None
            if not process.stdout.readline():
                code = process.wait()
                log.seek(0)
                words = " ".join(arguments)
                raise SystemExit(f"sam3-node {words} did not start: exit code {code}\n{log.read()[-1000:]}")
        return process

    def start_camera(self, source: str, rate_hz: float, **settings: str) -> subprocess.Popen[str]:
        """Start a camera that plays a source again and again."""
        rate = {"SAM3_CAMERA__FPS": str(rate_hz), "SAM3_CAMERA__LOOP": "true"}
        return self.start("camera", source, **rate, **settings)

    def client(self, **options: Any) -> PerceptionClient:
        """Return a client of the node on these endpoints."""
        given: dict[str, Any] = {"timeout_ms": 30_000, "on_restart": lambda restart: None} | options
        return PerceptionClient(self.masks, self.control, **given)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for process in reversed(self._started):
            end(process)


@contextmanager
def run_node(source: str, rate_hz: float, objects: int, **settings: str) -> Iterator[PerceptionClient]:
    """Run a node and a camera that plays a source again and again; yield a client, once objects are tracked."""
    with Processes(**settings) as processes:
        processes.start("run")
        processes.start_camera(source, rate_hz)
        with processes.client() as client:
            add_points(client, objects)
            yield client


def end(process: subprocess.Popen[str]) -> None:
    """Send SIGTERM and wait until the process has ended."""
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=20)


@contextmanager
def spawned(function: Callable[..., None], *arguments: object) -> Iterator[None]:
    """Run a function in a process of its own until the block ends."""
    process = get_context("spawn").Process(target=function, args=arguments, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def free_ports(count: int) -> list[int]:
    """Return different TCP ports on which no process listens now.

    No other caller of this machine gets them soon: each process draws from a block of its own, in turn, and the
    system itself gives the ports of the blocks to nobody.
    """
    ports: list[int] = []
    for port in islice(_own_ports(), MAX_TRIES):
        if len(ports) == count:
            return ports
        if _is_free(port):
            ports.append(port)
    raise SystemExit(f"expected {count} free TCP ports, found {len(ports)}; end the processes that listen")


def free_endpoints(count: int) -> list[str]:
    """Return TCP endpoints on which no process listens now."""
    return [f"tcp://127.0.0.1:{port}" for port in free_ports(count)]


@cache
def _own_ports() -> Iterator[int]:
    """Return the ports of a block that no other process has, again and again from a first one of chance."""
    blocks = [range(first, first + BLOCK_PORTS) for first in range(FIRST_PORT, END_PORT, BLOCK_PORTS)]
    chance = random.SystemRandom()
    chance.shuffle(blocks)
    for block in blocks:
        # the system frees an abstract name when the process ends, however it ends
        lease = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            lease.bind(f"\0sam3-node-ports-{block.start}")
        except OSError:
            lease.close()
            continue
        _leases.append(lease)
        return cycle(chance.sample(block, len(block)))
    raise SystemExit(f"every block of TCP ports is taken by another process; end some of {len(blocks)}")


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def drain(client: PerceptionClient) -> None:
    """Take the masks that have come so far."""
    while client.latest(0) is not None:
        pass


def next_masks(client: PerceptionClient, timeout_ms: int = 60000) -> MaskFrame:
    """Return the next masks message; end the benchmark if none arrives in time."""
    masks = client.latest(timeout_ms)
    if masks is None:
        raise SystemExit(f"no masks came within {timeout_ms / 1000:.0f} s")
    return masks


def add_points(client: PerceptionClient, count: int) -> None:
    """Track `count` objects, each from one point on the horizontal middle line of the frame."""
    masks = next_masks(client)
    for i in range(count):
        client.add_object(points=[(masks.width * (i + 1) / (count + 1), masks.height / 2)])
    while len(next_masks(client).instances) < count:
        pass
