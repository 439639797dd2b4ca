"""sam3-node commands as processes on endpoints of their own, and the client calls that benchmarks repeat."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from types import TracebackType
from typing import Self

from sam3_node.client import PerceptionClient
from sam3_node.types import MaskFrame


class Processes:
    """A context manager that runs sam3-node commands as processes on endpoints of their own, and ends them on exit."""

    def __init__(self, **settings: str) -> None:
        self.frames, self.masks, self.control = (f"tcp://127.0.0.1:{port}" for port in free_ports(3))
        endpoints = {
            "SAM3_TRANSPORT__FRAMES": self.frames,
            "SAM3_TRANSPORT__MASKS": self.masks,
            "SAM3_TRANSPORT__CONTROL": self.control,
        }
        self._environment = os.environ | endpoints | settings
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str, **settings: str) -> subprocess.Popen[str]:
        """Start a command and wait for the line that says it is ready."""
        with tempfile.TemporaryFile("w+") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "sam3_node", *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self._environment | settings,
            )
            self._started.append(process)
            assert process.stdout is not None
            if not process.stdout.readline():
                code = process.wait()
                log.seek(0)
                words = " ".join(arguments)
                raise SystemExit(f"sam3-node {words} did not start: exit code {code}\n{log.read()[-1000:]}")
        return process

    def client(self, timeout_ms: int = 30000) -> PerceptionClient:
        """Return a client of the node on these endpoints."""
        return PerceptionClient(
            self.masks, self.control, timeout_ms=timeout_ms, on_restart=lambda restart: None
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in reversed(self._started):
            end(process)


def end(process: subprocess.Popen[str]) -> None:
    """Send SIGTERM and wait until the process has ended."""
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=20)


def free_ports(count: int) -> list[int]:
    """Return TCP ports on which no process listens now."""
    sockets = [socket.socket() for _ in range(count)]
    for holder in sockets:
        holder.bind(("127.0.0.1", 0))
    ports = [holder.getsockname()[1] for holder in sockets]
    for holder in sockets:
        holder.close()
    return ports


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
