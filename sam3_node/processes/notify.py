"""systemd's notify protocol, from both sides: a process reports that it is ready and alive, a supervisor listens.

A process sends datagrams such as `WATCHDOG=1` to the socket that NOTIFY_SOCKET names: a path, or an abstract name that
begins with "@". WATCHDOG_USEC is the time in microseconds after which the supervisor replaces a silent process. See
sd_notify(3) and sd_watchdog_enabled(3).
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from ..types import Closeable

KICKS_PER_LIMIT = 4
ADDRESS, LIMIT, PID = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"
VARIABLES = (ADDRESS, LIMIT, PID)
MAX_DATAGRAM_BYTES = 4096
MAX_DATAGRAMS_PER_READ = 64


class Watchdog(Closeable):
    """Reports to the supervisor that this process is alive. A context manager; without a supervisor it does nothing.

    A thread kicks the supervisor's watchdog from the start, so that loading a model may take as long as it takes.
    A stopped process, and one whose interpreter is blocked, is silent at once. After the first `turn`, the thread
    kicks only while the last turn of the main loop began less than `hang_s` ago, or the loop waits for input.
    The variables are removed from `environment`, because they are not for the children of this process.
    """

    def __init__(self, hang_s: float = 0.0, environment: MutableMapping[str, str] | None = None) -> None:
        environment = {} if environment is None else environment
        address, limit, pid = (environment.pop(name, "") for name in VARIABLES)
        self._hang_s = hang_s
        self._deadline_s: float | None = None
        self._is_ready = False
        self._closed = threading.Event()
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if address else None
        limit_s = int(limit) / 1e6 if limit.isdigit() and pid in ("", str(os.getpid())) else 0.0
        if self._socket is not None and limit_s > 0:
            self._period_s = limit_s / KICKS_PER_LIMIT
            threading.Thread(target=self._kick, name="watchdog", daemon=True).start()

    def turn(self) -> None:
        """Report that the main loop begins a turn. The first turn also reports that the process is ready."""
        self._deadline_s = time.monotonic() + self._hang_s
        if not self._is_ready:
            self._is_ready = True
            self._send("READY=1")

    def wait(self) -> None:
        """Report that the main loop waits for input, which may take any time."""
        self._deadline_s = None

    def close(self) -> None:
        """Report that the process ends. Idempotent."""
        if not self._closed.is_set():
            self._closed.set()
            self._send("STOPPING=1")

    def _kick(self) -> None:
        while not self._closed.is_set():
            deadline_s = self._deadline_s
            if deadline_s is None or time.monotonic() < deadline_s:
                self._send("WATCHDOG=1")
            self._closed.wait(self._period_s)

    def _send(self, state: str) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):  # the supervisor has gone, or its queue is full
                self._socket.sendto(state.encode(), socket.MSG_DONTWAIT, self._address)


class NotifySocket(Closeable):
    """The socket on which a supervisor hears one process. Raises OSError when it cannot be opened.

    `path` is to be in a folder that only this user may enter.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._heard_s: float | None = None
        try:
            self._socket.bind(str(path))
        except OSError:
            self._socket.close()
            raise

    @property
    def silent_s(self) -> float:
        """Seconds since the last kick; 0 before the first, and after the process has said that it ends."""
        return 0.0 if self._heard_s is None else time.monotonic() - self._heard_s

    def environment(self, limit_s: float) -> Mapping[str, str]:
        """Return the variables that tell a process this socket, and that it is replaced after `limit_s` of silence."""
        return {ADDRESS: str(self._path), LIMIT: str(int(limit_s * 1e6))}

    def fileno(self) -> int:
        """Return the descriptor, which is readable while reports wait."""
        return self._socket.fileno()

    def read(self) -> None:
        """Read the reports that wait."""
        for _ in range(MAX_DATAGRAMS_PER_READ):
            try:
                states = self._socket.recv(MAX_DATAGRAM_BYTES).split(b"\n")
            except BlockingIOError:
                return
            if b"WATCHDOG=1" in states:
                self._heard_s = time.monotonic()
            if b"STOPPING=1" in states:
                self._heard_s = None

    def forgive(self) -> None:
        """Count the silence anew, if the process is watched."""
        if self._heard_s is not None:
            self._heard_s = time.monotonic()

    def restart(self) -> None:
        """Forget the reports of an earlier process."""
        self.read()
        self._heard_s = None

    def close(self) -> None:
        """Close the socket and remove its path. Idempotent."""
        self._socket.close()
        self._path.unlink(missing_ok=True)
