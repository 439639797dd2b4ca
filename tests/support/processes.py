"""Start processes: commands by a fork, so that each does not spend seconds on importing torch, and other programs."""

from __future__ import annotations

import io
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

PRELOADED = [
    "sam3_node.node.node",
    "sam3_node.cli.main",
    "sam3_node.cameras.publish",
    "tests.support.processes",
]

T = TypeVar("T")
READY_S = PATIENCE_S = 300.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOADED)


def until(find: Callable[[], T | None], what: str, timeout_s: float = PATIENCE_S) -> T:
    """Return the first result that is true; fail if it does not come in time."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        result = find()
        if result:
            return result
    raise AssertionError(f"did not come in time: {what}")


class Process:
    """A process whose lines are read as they come. The end of a `with` block kills it.

    lines: those that `next_line` has not returned. seen: all lines so far. log: the file that stderr goes to, if any.
    """

    def __init__(self, process: CommandProcess | subprocess.Popen[str], log: Path | None = None) -> None:
        self.process, self.log = process, log
        self.lines: queue.Queue[str] = queue.Queue()
        self.seen: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @classmethod
    def spawn(cls, command: Sequence[str]) -> Process:
        """Start any program; its stderr is read with its output."""
        return cls(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))

    def next_line(self) -> str:
        """Return the next line; fail if none comes."""
        try:
            return self.lines.get(timeout=READY_S)
        except queue.Empty:
            raise AssertionError(f"silent process; its log: {self.log and self.log.read_text()}") from None

    def line_with(self, text: str) -> str:
        """Wait for a line that has this text, and return it."""
        return until(lambda: next((line for line in self.seen if text in line), None), text, READY_S)

    def terminate(self) -> int:
        """Send SIGTERM; return the exit code once every line has come."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=PATIENCE_S)
        self._reader.join(20)
        return code

    def kill(self) -> None:
        """Send SIGKILL, and wait for the end."""
        self.process.kill()
        self.process.wait(timeout=PATIENCE_S)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.seen.append(line.rstrip("\n"))
            self.lines.put(self.seen[-1])


class CommandProcess:
    """`sam3-node ARGUMENTS` as a process of its own; stdout is read from `stdout`, stderr goes to the file `log`.

    The interface is the part of subprocess.Popen that the tests use. The process is forked from a server that has
    imported the node, one for each process that runs tests.
    """

    def __init__(self, arguments: Sequence[str], environment: dict[str, str], log: Path) -> None:
        reader, writer = _context.Pipe(duplex=False)
        self._process = _context.Process(target=_run, args=(tuple(arguments), environment, writer, str(log)))
        self._process.start()
        writer.close()
        self.stdout = io.TextIOWrapper(io.FileIO(os.dup(reader.fileno())))
        reader.close()

    @property
    def pid(self) -> int:
        """Process id."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None while the process runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit code, None while the process runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code; TimeoutError after `timeout` seconds."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"process {self.pid} still runs after {timeout} s")
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal unless the process has ended."""
        if self._process.exitcode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL unless the process has ended."""
        self.send_signal(signal.SIGKILL)


def _run(arguments: tuple[str, ...], environment: dict[str, str], stdout: Connection, log: str) -> None:
    from sam3_node.cli.main import main

    os.environ.clear()
    os.environ.update(environment)
    os.dup2(stdout.fileno(), 1)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    stdout.close()
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    sys.exit(main(arguments))
