"""systemd's notify protocol, from both sides: a process reports that it is ready and alive, a supervisor listens.

A process sends datagrams such as `WATCHDOG=1` to the socket that NOTIFY_SOCKET names: a path, or an abstract name that
begins with "@". WATCHDOG_USEC is the time in microseconds after which the supervisor replaces a silent process. A
process that knows that it hangs sends `WATCHDOG=trigger`, and is replaced at once. See sd_notify(3) and
sd_watchdog_enabled(3).
"""

import contextlib
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import ClassVar

from ..resources import Closeable

log = logging.getLogger(__name__)

KICKS_PER_LIMIT = 4
"""Signs of life in the supervisor's limit. One that is late must not end the process."""
STALLED_PERIODS = 2
"""Periods of the thread's own pause after which the whole process is taken to have been stopped."""
CLOSE_S = 8.0
"""Time that a process may take to close after its main loop has ended."""
STACK_LINES = 12
"""Lines of the main loop's stack that are logged when it hangs."""
ADDRESS = "NOTIFY_SOCKET"
"""Variable with the address of the supervisor's socket."""
LIMIT = "WATCHDOG_USEC"
"""Variable with the microseconds of silence after which the supervisor replaces the process."""
PID = "WATCHDOG_PID"
"""Variable with the process that is watched, if there is only one."""
VARIABLES = (ADDRESS, LIMIT, PID)
RESTARTED = "SAM3NODE_RESTARTED_BY"
"""Variable that a supervisor sets if it starts a failed process again."""
REFUSED = 2
"""Exit code of an error that only a change of settings or files can mend."""
TRY_AGAIN = 75
"""Exit code, under a supervisor, of an error that may pass (EX_TEMPFAIL of sysexits.h): a camera is not plugged in, or
the process had begun its work."""
MAX_DATAGRAM_BYTES = 4096
"""Longest report that is read."""
MAX_DIGITS = 18
"""Digits of a count of bytes."""
MAX_DATAGRAMS_PER_READ = 64
"""Reports that are read at once. A process that floods its supervisor must not stop it."""


def is_supervised() -> bool:
    """Return True if a service manager, or the supervisor, watches this process, and may start it again."""
    return RESTARTED in os.environ or ADDRESS in os.environ


BYTES = b"X_SAM3_BYTES="
"""Beginning of the state that counts what a recorder has written. Service managers ignore states of other programs."""


class Watchdog(Closeable):
    """Reports to the supervisor that this process is alive. A context manager; without a supervisor it does nothing.

    A thread kicks the supervisor's watchdog from the start, so that loading a model may take as long as it takes.
    A stopped process, and one whose interpreter is blocked, is silent at once. After the first `tick`, the thread
    kicks only while the main loop is within its time: `hang_s` for a tick, or what `begin` has said. Then it logs where
    the loop is, and asks to be replaced. A loop that waits for input may take any time. `begin_close` says that the
    loop has ended; closing then has CLOSE_S.
    The variables are removed from `environment`, because they are not for the children of this process.
    """

    began: ClassVar[bool] = False
    """True once a main loop of this process has begun: what ends it later is no error of its settings."""

    def __init__(self, hang_s: float = 0.0, environment: MutableMapping[str, str] | None = None) -> None:
        if environment is None:
            environment = {}
        # removed, because they are not for the children of this process
        address = environment.pop(ADDRESS, "")
        limit = environment.pop(LIMIT, "")
        pid = environment.pop(PID, "")
        self._hang_s = hang_s
        self._limit_s = hang_s  # of what the main loop does now
        self._deadline_s: float | None = None  # None while the main loop waits for input
        self._resumed_s = 0.0  # when the process ran again after it had been stopped
        self._loop_thread = 0
        self._is_ready = False
        self._told = False  # that the main loop hangs
        self._closed = threading.Event()
        # an abstract name of Linux begins with a zero byte, which a variable cannot hold
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket: socket.socket | None = None
        if address:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        # systemd names the process that it watches; a child that inherited the variables is another one
        limit_s = int(limit) / 1e6 if limit.isdigit() and pid in ("", str(os.getpid())) else 0.0
        if self._socket is not None and limit_s > 0:
            self._period_s = limit_s / KICKS_PER_LIMIT
            threading.Thread(target=self._kick, name="watchdog", daemon=True).start()

    @property
    def hangs(self) -> bool:
        """True if the main loop has taken longer than it may. Any thread may read it; it waits for nothing."""
        deadline_s = self._deadline_s
        if deadline_s is None:
            return False
        # after the whole process was stopped, the time of the main loop begins again
        return time.monotonic() >= max(deadline_s, self._resumed_s + self._limit_s)

    def tick(self) -> None:
        """Report that the main loop begins a turn. The first turn also reports that the process is ready."""
        self.begin(self._hang_s)
        if not self._is_ready:
            self._is_ready = True
            Watchdog.began = True
            self._loop_thread = threading.get_ident()
            self._send("READY=1")

    def begin(self, limit_s: float) -> None:
        """Report that the main loop begins work that hangs if it takes longer than `limit_s`."""
        self._limit_s = limit_s
        self._deadline_s = time.monotonic() + limit_s

    def wait(self) -> None:
        """Report that the main loop waits for input, which may take any time."""
        self._deadline_s = None

    def begin_close(self) -> None:
        """Report that the main loop has ended, or goes on with its end. The process hangs if closing takes CLOSE_S."""
        self.begin(min(self._hang_s, CLOSE_S))

    def count_bytes(self, written: int) -> None:
        """Report how many bytes this process has written, so that a recorder that writes nothing is seen."""
        self._send(f"{BYTES.decode()}{written}")

    def close(self) -> None:
        """Report that the process ends. The supervisor kills it if it is still there after its limit. Idempotent."""
        if not self._closed.is_set():
            self._closed.set()
            self._send("STOPPING=1")

    def _kick(self) -> None:
        while not self._closed.is_set():
            # a thread whose sign of life depends on the main loop: a loop that hangs asks to be replaced
            if self.hangs:
                self._log_hang()
                self._send("WATCHDOG=trigger")
            else:
                self._told = False
                self._send("WATCHDOG=1")
            begin_s = time.monotonic()
            self._closed.wait(self._period_s)
            if time.monotonic() - begin_s > STALLED_PERIODS * self._period_s:
                # the whole process did not run: the loop's time begins again
                self._resumed_s = time.monotonic()

    def _log_hang(self) -> None:
        """Log once where the main loop is."""
        if not self._told:
            self._told = True
            # the stack of the main loop, as it is in this moment
            frame = sys._current_frames().get(self._loop_thread)
            place = ""
            if frame is not None:
                place = "".join(traceback.format_stack(frame)[-STACK_LINES:])
            log.critical("the main loop has hung for more than %.1f s; it is here:\n%s", self._limit_s, place)

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
        self._heard_s: float | None = None  # None until the process has reported that it is alive
        self.triggered = False
        """True if the process has said that it hangs."""
        self.written: int | None = None
        """Bytes that the process, and those before it, have reported as written; None before the first report."""
        self._written_before = 0
        try:
            self._socket.bind(str(path))
        except OSError:
            self._socket.close()
            raise

    @property
    def silent_s(self) -> float:
        """Seconds since the last kick, or since the process has said that it ends; 0 before the first."""
        if self._heard_s is None:
            return 0.0
        return time.monotonic() - self._heard_s

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
            # a process that ends is silent from here on, and is killed like one that hangs
            if b"WATCHDOG=1" in states or b"STOPPING=1" in states:
                self._heard_s = time.monotonic()
            if b"WATCHDOG=trigger" in states:
                self.triggered = True
            for state in states:
                count = state.removeprefix(BYTES)
                if state.startswith(BYTES) and count.isdigit() and len(count) < MAX_DIGITS:
                    self.written = self._written_before + int(count)

    def forgive(self) -> None:
        """Count the silence anew, if the process is watched. A process that hangs says so again."""
        self.triggered = False
        if self._heard_s is not None:
            self._heard_s = time.monotonic()

    def restart(self) -> None:
        """Forget the reports of an earlier process."""
        # reports of the earlier process may still wait in the socket
        self.read()
        self._heard_s = None
        self.triggered = False
        self._written_before = self.written or 0

    def close(self) -> None:
        """Close the socket and remove its path. Idempotent."""
        self._socket.close()
        self._path.unlink(missing_ok=True)
