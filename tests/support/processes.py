"""Start processes: commands and functions by a fork, which spares each the seconds of importing torch, and programs."""

from __future__ import annotations

import io
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, TypeVar

from tests.support.paths import ROOT
from tests.support.patience import PATIENCE_S

PRELOADED = [
    # recordings: readers in a process of their own, and those of the node and the recorder
    "av",
    "cv2",
    "rosbags.typesys",
    "mcap_protobuf.decoder",
    "foxglove_schemas_protobuf.CompressedImage_pb2",
    "sam3_node.node.node",
    "sam3_node.cli.main",
    "sam3_node.cameras.publish",
    "sam3_node.replay.run",
    "pytest",  # a function of a test file is imported with it
    "tests.support.confined",
    "tests.support.transport_peer",
    "tests.support.freeze",  # the last
]
"""All that any forked process needs: a process that runs tests has one server, whoever starts it."""

T = TypeVar("T")
PAUSE_S = 0.005
"""Seconds between the first two looks of `until`."""
LONGEST_PAUSE_S = 0.05
"""Seconds between two looks after a while: a look may ask a node, which needs the core."""
PAUSE_SHARE = 0.05
"""A pause as a share of the time waited so far, between these limits."""

forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(PRELOADED)


def until(find: Callable[[], T | None], what: str, timeout_s: float = PATIENCE_S) -> T:
    """Return the first result that is true; fail if it does not come in time."""
    begin_s = time.monotonic()
    while (waited_s := time.monotonic() - begin_s) < timeout_s:
        result = find()
        if result:
            return result
        # the others need the cores
        time.sleep(min(max(PAUSE_S, PAUSE_SHARE * waited_s), LONGEST_PAUSE_S))
    raise AssertionError(f"did not come in time: {what}")


class Process:
    """A process whose lines are read as they come. The end of a `with` block kills it.

    seen: all lines so far. log: the file that stderr goes to, if any.
    """

    def __init__(self, process: ForkedProcess | subprocess.Popen[str], log: Path | None = None) -> None:
        self.process = process
        self.log = log
        # None stands behind the last line
        self._lines: queue.Queue[str | None] = queue.Queue()
        self.seen: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @classmethod
    def spawn(cls, command: Sequence[str], stderr: int | None = subprocess.STDOUT) -> Process:
        """Start any program in the root of the checkout; by default, its stderr is read with its output."""
        return cls(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=ROOT))

    def next_line(self) -> str:
        """Return the next line. Fail at once if the process has ended, else if none comes."""
        try:
            line = self._lines.get(timeout=PATIENCE_S)
        except queue.Empty:
            raise AssertionError(f"silent process; {self._story()}") from None
        if line is None:
            self._lines.put(None)
            raise AssertionError(f"the process ended, exit code {self.process.poll()}; {self._story()}")
        return line

    def new_line(self, text: str = "") -> None:
        """Wait for a line that has this text among those that come from now on."""
        self.take_lines()
        until(lambda: text in self.next_line(), f"a line with {text!r}")

    def take_lines(self) -> list[str]:
        """Return the lines that have come and that `next_line` has not returned."""
        taken = []
        while not self._lines.empty():
            line = self._lines.get()
            if line is None:
                self._lines.put(None)
                break
            taken.append(line)
        return taken

    def line_with(self, text: str) -> str:
        """Wait for a line that has this text, and return it. Fail at once if the process ends without it."""

        def find() -> str | None:
            has_ended = not self._reader.is_alive()
            found = next((line for line in self.seen if text in line), None)
            assert found or not has_ended, f"the process ended without {text!r}; {self._story()}"
            return found

        return until(find, text, PATIENCE_S)

    def terminate(self) -> int:
        """Send SIGTERM; return the exit code once every line has come."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=PATIENCE_S)
        self._reader.join(PATIENCE_S)
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
        try:
            for line in self.process.stdout:
                self.seen.append(line.rstrip("\n"))
                self._lines.put(self.seen[-1])
        finally:
            self._lines.put(None)

    def _story(self) -> str:
        log = self.log.read_text() if self.log else None
        return f"its last lines: {self.seen[-20:]}; its log: {log}"


class Team:
    """Processes by name, each of which can be killed, stopped, and started again."""

    def __init__(self, **launch: Callable[[], Process]) -> None:
        self._launch = launch
        self.running: dict[str, Process] = {}
        for name in launch:
            self.start(name)

    def start(self, name: str) -> None:
        """Start a process and wait for its first line."""
        self.running[name] = self._launch[name]()
        self.running[name].next_line()

    def restart(self, name: str) -> None:
        """Kill a process, and start it again."""
        self.running[name].kill()
        self.start(name)

    def stop_for(self, name: str, seconds: float) -> None:
        """Stop a process for some time."""
        self.running[name].process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.running[name].process.send_signal(signal.SIGCONT)

    def check(self, **texts: str) -> None:
        """Wait for a new line with its text from each of these processes. Fail if any process has ended."""
        for name, text in texts.items():
            self.running[name].new_line(text)
        codes = {name: process.process.poll() for name, process in self.running.items()}
        assert set(codes.values()) == {None}, codes


class ForkedProcess:
    """A function as a process of its own; stdout is read from `stdout`, stderr goes to the file `log`, if any.

    The interface is the part of subprocess.Popen that the tests use. The process is forked from a server that has
    imported the node, one for each process that runs tests.
    """

    def __init__(
        self,
        function: Callable[..., object],
        arguments: Sequence[object],
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        folder: Path = ROOT,
    ) -> None:
        reader, writer = forks.Pipe(duplex=False)
        begin = _Begin(dict(os.environ if environment is None else environment), writer, log, folder)
        self._process = forks.Process(target=_run, args=(begin, function, tuple(arguments)))
        self._process.start()
        writer.close()
        self.stdout = io.TextIOWrapper(io.FileIO(os.dup(reader.fileno())))
        reader.close()

    @property
    def pid(self) -> int:
        return int(self._process.pid)

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code; TimeoutError after `timeout` seconds."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"process {self._process.pid} still runs after {timeout} s")
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal unless the process has ended."""
        if self._process.exitcode is None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Send SIGKILL unless the process has ended."""
        self.send_signal(signal.SIGKILL)


def fork_command(
    arguments: Sequence[str], environment: Mapping[str, str], log: Path, folder: Path = ROOT
) -> ForkedProcess:
    """Start `sam3-node ARGUMENTS`."""
    return ForkedProcess(_command, arguments, environment, log, folder)


def run_command(
    arguments: Sequence[object], environment: Mapping[str, str] | None = None, folder: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run `sam3-node ARGUMENTS` to its end; `environment` is all that it has."""
    words = [str(argument) for argument in arguments]
    with tempfile.TemporaryDirectory() as temporary:
        log = Path(temporary) / "stderr"
        process = ForkedProcess(_command, words, environment, log, folder)
        with process.stdout:
            printed = process.stdout.read()
        return subprocess.CompletedProcess(words, process.wait(PATIENCE_S), printed, log.read_text())


class _Begin(NamedTuple):
    """What a forked process has of its own before its function begins."""

    environment: dict[str, str]
    stdout: Connection
    log: Path | None
    folder: Path


def _run(begin: _Begin, function: Callable[..., object], arguments: tuple[object, ...]) -> None:
    os.environ.clear()
    os.environ.update(begin.environment)
    # torch, which the server of forks has imported, has read it already
    if "torch" in sys.modules and (count := begin.environment.get("OMP_NUM_THREADS")):
        sys.modules["torch"].set_num_threads(int(count))
    os.chdir(begin.folder)
    os.dup2(begin.stdout.fileno(), 1)
    begin.stdout.close()
    if begin.log is not None:
        os.dup2(os.open(begin.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    # open as long as the process lives
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    function(*arguments)


def _command(*arguments: str) -> None:
    from sam3_node.cli.main import main

    sys.exit(main(arguments))
