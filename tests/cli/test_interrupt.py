"""Ctrl-C at any moment: exit code 130, and no traceback. The moments are events: an import, a socket, a line."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import pytest

from tests.support.node_rig import until
from tests.support.patience import PATIENCE_S

Moment = Callable[[subprocess.Popen[str]], object]


def read_until(stream: TextIO | None, text: str) -> None:
    """Read lines until one contains `text`."""
    for line in stream:
        if text in line:
            return
    raise AssertionError(f"ended without {text!r}")


def interrupt(at: Moment, *arguments: str, options: tuple[str, ...] = ()) -> None:
    """Send SIGINT to a command at a moment. Check that it ends with 130 and without a traceback."""
    command = [sys.executable, *options, "-m", "sam3_node", *arguments]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            at(process)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    for word in ("Traceback", "KeyboardInterrupt", "Exception ignored"):
        assert word not in out + err
    assert process.returncode == 130, out + err


@pytest.mark.parametrize(
    ("command", "module"),
    [(("status",), name) for name in ("sam3_node.processes.signals", "argparse", "pydantic_core")]
    + [(("status",), "sam3_node.cli.main"), (("doctor",), "torch._C"), (("doctor",), "torch.nn")]
    + [(("engine", "check"), name) for name in ("torch._C", "sam3_node.models.weight_files")],
)
def test_during_the_imports(tmp_path: Path, command: tuple[str, ...], module: str) -> None:
    folder = ("--engine.folder", str(tmp_path)) if "engine" in command else ()
    at = lambda process: read_until(process.stderr, f" {module}\n")  # noqa: E731
    interrupt(at, *command, *folder, options=("-X", "importtime"))  # prints each import that is complete


def test_while_the_node_loads_its_model(tmp_path: Path) -> None:
    endpoints = {name: f"ipc://{tmp_path}/{name}" for name in ("frames", "masks", "control")}
    arguments = [word for name, value in endpoints.items() for word in (f"--transport.{name}", value)]
    bound = tmp_path / "control"  # the node binds, then loads
    interrupt(lambda _: until(bound.exists, "the control socket"), "run", *arguments)


@pytest.fixture
def silent_peer() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_while_it_waits_for_a_connection(silent_peer: socket.socket) -> None:
    endpoint = f"tcp://127.0.0.1:{silent_peer.getsockname()[1]}"
    interrupt(lambda _: silent_peer.accept(), "status", "--transport.control", endpoint)


def test_the_demo_stops_its_processes(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    interrupt(lambda process: read_until(process.stdout, "node |"), "demo", "--out", str(folder))
    assert not list(folder.iterdir())  # made, and checked, before the start


STUCK = """
import ctypes
from sam3_node.processes import signals
signals.PATIENCE_S = 0.1
signals.raise_on_interrupt()
lock = ctypes.create_string_buffer(64)  # a pthread_mutex_t, unlocked
libc = ctypes.CDLL(None)
libc.pthread_mutex_lock(lock)
print("up", flush=True)
libc.pthread_mutex_lock(lock)
"""


def test_a_library_that_never_returns_is_left() -> None:
    with subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "up\n"
        state = Path(f"/proc/{process.pid}/task/{process.pid}/stat")
        waits = lambda: state.read_text().rsplit(")", 1)[1].split()[0] == "S"  # noqa: E731
        until(waits, "the main thread to wait in the lock")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=PATIENCE_S) == 130


SWALLOWS = """
import sys
from sam3_node.processes.signals import raise_on_interrupt
raise_on_interrupt()
line = "up"
while True:
    try:
        print(line, flush=True)
        sys.stdin.read(1)
    except KeyboardInterrupt:
        line = "swallowed"
"""


def test_a_second_signal_ends_what_swallows_the_first() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SWALLOWS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        for line in ("up\n", "swallowed\n"):
            assert process.stdout.readline() == line
            process.send_signal(signal.SIGINT)
        assert process.wait(timeout=PATIENCE_S) == 130
