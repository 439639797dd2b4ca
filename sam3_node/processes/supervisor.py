"""Processes that are started, watched and taken down together.

Each one's output is forwarded with its name in front. Taking down is SIGTERM, then, after a grace time,
SIGKILL. On Linux the kernel kills every member should the supervisor itself be killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self

from ..errors import ProcessError

Restart = Literal["never", "on-failure"]

BACKOFF_S, BACKOFF_LIMIT_S, HEALTHY_S = 0.5, 10.0, 30.0
TAIL_LINES = 40
LINE_LIMIT = 65536
PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


@dataclass(frozen=True, slots=True)
class Process:
    """What to run. The first output line that `ready` (a regular expression) matches says that it is up."""

    name: str
    command: tuple[str, ...]
    ready: str = r"\S"
    env: Mapping[str, str] = field(default_factory=dict)
    restart: Restart = "never"


class _Child:
    """One process of a group through all its lives: its pipe, last lines and restarts."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.ready: re.Match[str] | None = None
        self.code: int | None = None
        self.failures = 0
        self.resume_at = math.inf
        self.spawn()

    def spawn(self) -> None:
        self.pending = b""
        self.resume_at = math.inf
        self.started = time.monotonic()
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **self.process.env}
        try:
            self.popen = subprocess.Popen(
                self.process.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                preexec_fn=_die_with(os.getpid()),
            )
        except OSError as error:
            raise ProcessError(
                f"cannot start {self.process.name}: {self.process.command[0]}: {error.strerror}"
            ) from error
        assert self.popen.stdout is not None
        self.pipe = self.popen.stdout
        os.set_blocking(self.pipe.fileno(), False)

    @property
    def alive(self) -> bool:
        return self.popen.poll() is None

    def read(self) -> list[str] | None:
        """The whole lines that have come in, None when there is nothing yet; closes the pipe at its end."""
        try:
            data = os.read(self.pipe.fileno(), LINE_LIMIT)
        except BlockingIOError:
            return None
        *lines, self.pending = (self.pending + data).split(b"\n")
        if self.pending and (not data or len(self.pending) > LINE_LIMIT):
            lines, self.pending = [*lines, self.pending], b""
        if not data:
            self.pipe.close()
        return [line.decode("utf-8", "replace").rstrip("\r") for line in lines]

    def note(self, line: str) -> None:
        self.tail.append(line)
        self.ready = self.ready or re.search(self.process.ready, line)

    def signal(self, number: signal.Signals) -> None:
        """Signal the process and whatever it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, number)


class Group:
    """Processes that live and die together. Drive it from one thread, the one that will outlive it.

    On Linux a member dies with the thread that started it, so start members from the main thread.
    """

    def __init__(self, *, grace_s: float = 3.0, echo: Callable[[str], object] | None = print) -> None:
        self._children: dict[str, _Child] = {}
        self._selector = selectors.DefaultSelector()
        self._grace_s = grace_s
        self._echo = echo

    def start(self, process: Process) -> None:
        """Start one more member; raises ProcessError when its command cannot be run."""
        if process.name in self._children:
            raise ProcessError(f"two processes are named {process.name!r}; names in a group must differ")
        self._children[process.name] = child = _Child(process)
        self._selector.register(child.pipe, selectors.EVENT_READ, child)

    def wait_ready(
        self, name: str, timeout_s: float = math.inf, stop: threading.Event | None = None
    ) -> re.Match[str] | None:
        """The match of `name`'s ready line; None when `stop` was set first.

        Raises ProcessError, with the last lines of output, when any member ends or the time is over.
        """
        deadline = time.monotonic() + timeout_s
        child = self._children[name]
        while child.ready is None and not (stop and stop.is_set()):
            self.check()
            if time.monotonic() > deadline:
                raise ProcessError(f"{name} was not ready within {timeout_s:g} s{self._last_lines(name)}")
            self.poll(0.1)
        return child.ready

    def poll(self, timeout_s: float = 0.0) -> dict[str, int]:
        """Forward output, waiting `timeout_s` at most, and start again what is due; returns `codes`."""
        self._select(timeout_s)
        for child in self._children.values():
            self._reap(child)
            if time.monotonic() >= child.resume_at:
                child.spawn()
                self._selector.register(child.pipe, selectors.EVENT_READ, child)
        return self.codes

    def check(self) -> None:
        """Raise ProcessError, with its last lines of output, when a member has ended for good."""
        for name, code in self.poll().items():
            raise ProcessError(f"{name} ended with {describe_exit(code)}{self._last_lines(name)}")

    @property
    def ready(self) -> bool:
        """Every member has printed its ready line."""
        return all(child.ready for child in self._children.values())

    @property
    def codes(self) -> dict[str, int]:
        """Exit codes of the members that have ended for good; negative: the signal that killed it."""
        return {name: child.code for name, child in self._children.items() if child.code is not None}

    def stop(self) -> dict[str, int]:
        """Take all down, the last started first, and return every exit code."""
        members = list(reversed(self._children.values()))
        for child in members:
            child.resume_at = math.inf
            child.signal(signal.SIGTERM)
        deadline = time.monotonic() + self._grace_s
        while any(child.alive for child in members) and time.monotonic() < deadline:
            self._select(0.05)
        for child in members:
            if child.alive:
                self._say(f"{child.process.name} did not end within {self._grace_s:g} s of SIGTERM: killed")
            child.signal(signal.SIGKILL)
            child.popen.wait()
            self._drain(child)
            child.code = child.popen.returncode
        return self.codes

    def _select(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            self._forward(key.data)

    def _forward(self, child: _Child) -> bool:
        """Pass on what a process has printed; False when there was nothing more."""
        fileno = child.pipe.fileno()
        lines = child.read()
        for line in lines or ():
            child.note(line)
            self._say(f"{child.process.name} | {line}")
        if child.pipe.closed:
            self._selector.unregister(fileno)
        return lines is not None and not child.pipe.closed

    def _drain(self, child: _Child) -> None:
        while not child.pipe.closed and self._forward(child):
            pass
        if not child.pipe.closed:  # something it started still holds the other end
            self._selector.unregister(child.pipe)
            child.pipe.close()

    def _reap(self, child: _Child) -> None:
        """Notice that a process has ended: its code is final, or the time of its next start is set."""
        if child.code is not None or child.resume_at < math.inf or child.alive:
            return
        self._drain(child)
        child.signal(signal.SIGKILL)  # whatever it started and left behind
        code = child.popen.returncode
        if code == 0 or child.process.restart == "never":
            child.code = code
            return
        if time.monotonic() - child.started > HEALTHY_S:
            child.failures = 0
        pause_s = min(BACKOFF_S * 2**child.failures, BACKOFF_LIMIT_S)
        child.failures = min(child.failures + 1, 16)
        child.resume_at = time.monotonic() + pause_s
        self._say(
            f"{child.process.name} ended with {describe_exit(code)}; starting it again in {pause_s:g} s"
        )

    def _last_lines(self, name: str) -> str:
        lines = list(self._children[name].tail)[-12:]
        return (
            "; it printed nothing"
            if not lines
            else "; its last lines:\n" + "\n".join(f"  {x}" for x in lines)
        )

    def _say(self, line: str) -> None:
        if self._echo is not None:
            with contextlib.suppress(
                OSError
            ):  # nobody reads our output any more: the group must still come down
                self._echo(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._selector.close()


def _die_with(parent: int) -> Callable[[], None] | None:
    """What a new process does first: ask the kernel to be killed when its parent dies (Linux only)."""
    if _libc is None:
        return None
    prctl, kill_signal = _libc.prctl, int(signal.SIGKILL)

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, kill_signal, 0, 0, 0)
        if os.getppid() != parent:  # it died between fork and here
            os._exit(1)

    return ask


def describe_exit(code: int) -> str:
    """An exit code in words; negative codes are signals."""
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name
