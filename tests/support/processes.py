"""Processes of the command line that start by a fork, so that each does not spend seconds on importing torch."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

PRELOADED = [
    "sam3_node.node.node",
    "sam3_node.cli.main",
    "sam3_node.cameras.publish",
    "tests.support.processes",
]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOADED)


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
