"""The peer process of the transport tests, and helpers that they share."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

import numpy as np

from sam3_node.transport import ControlServer, FramePublisher, FrameSubscriber
from sam3_node.types import Frame, Instance, Mask, MaskFrame
from sam3_node.wire import Reply


def make_frame(seq: int, camera: str = "cam0", side: int = 16) -> Frame:
    """Return a grey frame of `side` x `side` pixels whose value is its number."""
    colour = np.full(side * side, seq % 256, np.uint8)
    return Frame(camera, seq, time.time_ns(), side, side, "mono8", colour.data, clock="system")


def make_masks(seq: int, camera: str = "cam0") -> MaskFrame:
    """Return masks of one object on a frame of 40 x 30 pixels."""
    full = np.zeros((30, 40), np.bool_)
    full[5:20, 10:30] = seq % 2
    full[0, 0] = True
    instance = Instance(7, "cup", 0.5, "tracked", seq, 0, Mask.from_full(full))
    return MaskFrame(camera, seq, time.time_ns(), 40, 30, instances=(instance,))


def wait_until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Wait until a condition is true. Fail after the timeout."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition was not true in time"
        time.sleep(0.005)


@contextmanager
def peer(*args: object) -> Iterator[subprocess.Popen[str]]:
    """Run this file as a process, and kill it at the end."""
    process = subprocess.Popen([sys.executable, __file__, *map(str, args)], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)
        output_of(process).close()


def output_of(process: subprocess.Popen[str]) -> IO[str]:
    """Return the output stream of the process."""
    assert process.stdout is not None
    return process.stdout


def next_line(process: subprocess.Popen[str]) -> str:
    """Return the next line of output."""
    return output_of(process).readline().strip()


def print_line(line: object) -> None:
    print(line, flush=True)


def run_camera(endpoint: str, camera: str, delivery: str, interval_ms: str, count: str, side: str) -> None:
    with FramePublisher(endpoint, delivery) as publisher:  # type: ignore[arg-type]
        print_line(publisher.endpoint)
        for seq in range(int(count)):
            publisher.send(make_frame(seq, camera, int(side)))
            if delivery == "every":
                print_line(seq)
            time.sleep(int(interval_ms) / 1000)


def run_reader(endpoint: str, delivery: str) -> None:
    with FrameSubscriber([endpoint], delivery) as subscriber:  # type: ignore[arg-type]
        while (received := subscriber.take()) is not None:
            print_line(received.frame.seq)


def run_server(endpoint: str) -> None:
    with ControlServer(endpoint) as server:
        print_line(server.endpoint)
        while True:
            received = server.receive(1000)
            if received is not None:
                peer_id, request = received
                server.reply(peer_id, Reply(request.id, request.args))


if __name__ == "__main__":
    roles: dict[str, Callable[..., None]] = {"camera": run_camera, "reader": run_reader, "server": run_server}
    roles[sys.argv[1]](*sys.argv[2:])
