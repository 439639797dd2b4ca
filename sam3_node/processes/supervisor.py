"""Starts, watches and stops a group of processes, such as the processes of a profile (`launch/start`).

It forwards the output of each process with its name in front. To stop a process it sends SIGTERM and, after a grace
time, SIGKILL. It kills a process that reports that it is alive (see `notify`) and then falls silent. On Linux, the
kernel kills all members if the supervisor is killed. It needs only the standard library and no service manager.

When a process that the others need ends for good, or on SIGINT or SIGTERM, the group stops all processes. A helper,
such as a recorder, ends or fails alone: the others find it in the file that HELPERS_FILE names (see `helpers`).
"""

import contextlib
import ctypes
import math
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from ..errors import ProcessError, Sam3NodeError, SettingsError
from ..files import explain_os_error
from ..resources import Closeable
from ..settings import CameraSettings, Settings, load_settings
from .helpers import HELPERS_FILE, HelperState, write_helpers
from .logs import announce, format_line, print_line, read_message, use_environment_format, use_format
from .notify import REFUSED, RESTARTED, VARIABLES, NotifySocket
from .signals import stop_on_signals

Restart = Literal["never", "on-failure"]

BACKOFF_S = 0.5
"""Pause before the first restart. It doubles with each failure in a row."""
MAX_BACKOFF_S = 10.0
"""Longest pause before a restart."""
MAX_HELPER_BACKOFF_S = 300.0
"""Longest pause before the restart of a helper: what ends a recorder, such as a full disk, takes a person's time."""
HEALTHY_S = 30.0
"""Seconds of life after which the earlier failures of a process do not count any more."""
TAIL_LINES = 40
"""Last lines of output that are kept of each process, for errors."""
MAX_LINE_BYTES = 65536
"""Longest line that is forwarded. A longer one is cut into several."""
NOTE_S = 5.0
"""Seconds between two notes of what helpers have written."""
STALL_S = 5.0
"""Seconds between two polls after which this process, or the whole machine, is taken to have been stopped."""
MAX_SOCKET_FOLDER_BYTES = 80
"""Longest path of a folder of sockets: a socket's path may have 107 bytes."""
MAX_REASON_CHARACTERS = 300
"""Characters of the reason for a helper's end that the node's status has."""
MAX_BACKOFF_FAILURES = 16
"""Failures in a row that are counted: the pause is at its longest long before."""
PR_SET_PDEATHSIG = 1  # of Linux' prctl
_libc = None
if sys.platform == "linux":
    # loaded here, because it must not be loaded between fork and exec
    _libc = ctypes.CDLL(None, use_errno=True)
CAMERA_READY = r"^camera \S+ publishing on (\S+)"
NODE_READY = r"^node ready: .* masks on (\S+), control on (\S+)"
RECORD_READY = r"^record frames from"
HELPERS = ("watch", "record", "console")
"""Processes without which cameras and node go on."""
COMMANDS = {
    "node": ("run", NODE_READY),
    "watch": ("watch", r"^watch masks from"),
    "record": ("record", RECORD_READY),
    "console": ("console", r"^console at "),
}


@dataclass(frozen=True, slots=True)
class Process:
    """A command to run. The first line of output that matches `ready`, a regular expression, marks it as ready.

    With `restart` "on-failure", it is started again unless it ends with 0, or with REFUSED before it was ready, an
    error that another start does not mend. A process that has reported that it is alive fails when it is silent for
    `watchdog_s`, or says that it hangs; 0 turns this off. A group goes on without a process that `is_helper`.
    """

    name: str
    command: tuple[str, ...]
    ready: str = r"\S"
    env: Mapping[str, str] = field(default_factory=dict)
    restart: Restart = "never"
    watchdog_s: float = 0.0
    is_helper: bool = False


class _Child:
    """One member of a group across its restarts: its process, pipe, last lines and exit code."""

    def __init__(self, process: Process, reports: NotifySocket | None, helpers: Path) -> None:
        self.process = process
        self.reports = reports
        self.helpers = helpers
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.ready: re.Match[str] | None = None
        self.code: int | None = None
        self.failures = 0
        self.helper_state = HelperState()
        self.restart_at = math.inf
        self.spawn()

    def spawn(self) -> None:
        """Start the process. Raises ProcessError when its command cannot be run."""
        self.pending = b""
        self.restart_at = math.inf
        self.is_up = False
        self.started = time.monotonic()
        # a member never reports to the supervisor of this process, if it has one itself
        inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        own = {"PYTHONUNBUFFERED": "1", HELPERS_FILE: str(self.helpers)}
        environment = {**inherited, **own, **self.process.env}
        if self.process.restart != "never":
            environment[RESTARTED] = "sam3-node"
        if self.reports is not None:
            self.reports.restart()
            environment |= self.reports.environment(self.process.watchdog_s)
        program = f"{self.process.name}: {self.process.command[0]}"
        with explain_os_error(ProcessError, f"cannot start {program}"):
            self.popen = subprocess.Popen(
                self.process.command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                # a session of its own: a signal to the group reaches what it has started, and Ctrl-C does not reach it
                start_new_session=True,
                preexec_fn=_make_child_setup(os.getpid()),
            )
        assert self.popen.stdout is not None
        self.pipe = self.popen.stdout
        # read without waiting: one member that prints nothing must not stop the others
        os.set_blocking(self.pipe.fileno(), False)

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return self.popen.poll() is None

    @property
    def hangs(self) -> bool:
        """True if the process says that it hangs, or was alive and has been silent for too long since."""
        reports = self.reports
        return reports is not None and (reports.triggered or reports.silent_s > self.process.watchdog_s)

    def read(self) -> list[str] | None:
        """Return the complete new lines, or None without new output. Close the pipe at its end."""
        try:
            data = os.read(self.pipe.fileno(), MAX_LINE_BYTES)
        except BlockingIOError:
            return None
        *lines, self.pending = (self.pending + data).split(b"\n")
        # the end of the output, or a line that never ends: hand out what there is
        if self.pending and (not data or len(self.pending) > MAX_LINE_BYTES):
            lines.append(self.pending)
            self.pending = b""
        if not data:
            self.pipe.close()
        return [line.decode("utf-8", "replace").rstrip("\r") for line in lines]

    def add_line(self, line: str) -> None:
        """Keep a line of output, and check whether it marks the process as ready."""
        # of a line in JSON, its message: the node's status and an error show these lines to people
        message = read_message(line)
        self.tail.append(message)
        match = re.search(self.process.ready, message)
        # ready stays true across restarts; `is_up` is of this process alone
        self.ready = self.ready or match
        self.is_up |= match is not None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and to all processes that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, number)


class Group(Closeable):
    """Processes that start and stop together. Only one thread may use a group.

    On Linux a member is killed when the thread that started it ends, so start members from the main thread.
    """

    def __init__(self, *, grace_s: float = 3.0, echo: Callable[[str], object] | None = print) -> None:
        self._children: dict[str, _Child] = {}
        self._selector = selectors.DefaultSelector()
        self._grace_s = grace_s
        self._echo = echo
        self._opened = contextlib.ExitStack()
        self._folder: Path | None = None
        self._polled_s = time.monotonic()
        self._next_note_s = 0.0

    def start(self, process: Process) -> None:
        """Start one more member. Raises ProcessError when its command cannot be run."""
        if process.name in self._children:
            raise ProcessError(f"two processes are named {process.name!r}; names in a group must differ")
        reports = self._open_reports(process) if process.watchdog_s else None
        child = _Child(process, reports, self._open_folder(process) / "helpers")
        self._children[process.name] = child
        self._selector.register(child.pipe, selectors.EVENT_READ, child)

    def wait_ready(self, name: str, timeout_s: float) -> re.Match[str]:
        """Wait for the ready line of `name` and return its match.

        Raises ProcessError, with the last lines of output, when any member ends or the timeout expires.
        """
        deadline = time.monotonic() + timeout_s
        # any member that ends ends the wait: the others could not become ready without it
        child = self._children[name]
        while child.ready is None:
            self.check()
            if time.monotonic() > deadline:
                raise ProcessError(f"{name} was not ready within {timeout_s:g} s{self._last_lines(name)}")
            self.poll(0.1)
        return child.ready

    def poll(self, timeout_s: float = 0.0) -> dict[str, int]:
        """Forward output for at most `timeout_s`, and restart members whose pause is over. Return `codes`."""
        # silence is judged only after the reports that wait were read
        self._forgive_after_stall()
        self._select(timeout_s)
        self._note_written()
        for child in self._children.values():
            self._kill_hung(child)
            self._reap(child)
            # by the thread that polls: on Linux, the end of that thread ends the member
            if time.monotonic() >= child.restart_at:
                child.spawn()
                self._selector.register(child.pipe, selectors.EVENT_READ, child)
        return self.codes

    def check(self) -> None:
        """Raise ProcessError, with the last lines of output, if a member has ended for good."""
        for name, code in self.poll().items():
            raise ProcessError(f"{name} ended with {describe_exit(code)}{self._last_lines(name)}")

    @property
    def ready(self) -> bool:
        """True when every member has printed its ready line, or is a helper that has ended."""
        return all(
            child.ready or (child.process.is_helper and child.code is not None)
            for child in self._children.values()
        )

    @property
    def is_over(self) -> bool:
        """True when a process that is no helper has ended for good, or all have."""
        ended = [child.process.is_helper for child in self._children.values() if child.code is not None]
        return not all(ended) or len(ended) == len(self._children)

    @property
    def codes(self) -> dict[str, int]:
        """Exit codes of the members that have ended for good. A negative code is the signal that killed the member."""
        return {name: child.code for name, child in self._children.items() if child.code is not None}

    def stop(self) -> dict[str, int]:
        """Stop all members, the last started first, and return all exit codes."""
        # the last started first: a reader ends before what it reads from
        members = list(reversed(self._children.values()))
        for child in members:
            # all get the signal at once, and share the grace time, in which their output is still forwarded
            child.restart_at = math.inf
            child.signal(signal.SIGTERM)
        deadline = time.monotonic() + self._grace_s
        while any(child.alive for child in members) and time.monotonic() < deadline:
            self._select(0.05)
        # what is left is killed, with everything that it has started
        for child in members:
            if child.alive:
                self._print(f"{child.process.name} did not end within {self._grace_s:g} s of SIGTERM: killed")
            child.signal(signal.SIGKILL)
            child.popen.wait()
            self._drain(child)
            child.code = child.popen.returncode
        return self.codes

    def _select(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            if isinstance(key.data, NotifySocket):
                key.data.read()
            else:
                self._forward(key.data)

    def _open_folder(self, process: Process) -> Path:
        """Make the folder of sockets and of the file of ended helpers, which only this user may enter."""
        if self._folder is None:
            with explain_os_error(
                ProcessError, f"cannot watch {process.name}: its folder", "; free or set TMPDIR"
            ):
                # a long TMPDIR, such as that of a test, leaves no room for the name of a socket
                parent = None
                if len(os.fsencode(tempfile.gettempdir())) > MAX_SOCKET_FOLDER_BYTES:
                    parent = "/tmp"
                folder = tempfile.TemporaryDirectory(prefix="sam3-", dir=parent)
            self._folder = Path(self._opened.enter_context(folder))
        return self._folder

    def _open_reports(self, process: Process) -> NotifySocket:
        """Open the socket on which a process reports."""
        folder = self._open_folder(process)
        with explain_os_error(
            ProcessError, f"cannot watch {process.name}: its socket", "; free or set TMPDIR"
        ):
            reports = self._opened.enter_context(NotifySocket(folder / str(len(self._children))))
        self._selector.register(reports, selectors.EVENT_READ, reports)
        return reports

    def _forgive_after_stall(self) -> None:
        """Count all silences anew if this process, and maybe the whole machine, did not run for some time."""
        # a laptop that slept: everybody was silent, and nobody hangs
        now_s = time.monotonic()
        if now_s - self._polled_s > STALL_S:
            for child in self._children.values():
                if child.reports is not None:
                    child.reports.forgive()
        self._polled_s = now_s

    def _kill_hung(self, child: _Child) -> None:
        if child.alive and child.hangs:
            reason = f"has been silent for {child.process.watchdog_s:g} s"
            if child.reports is not None and child.reports.triggered:
                reason = "says that it hangs"
            self._print(f"{child.process.name} {reason}: killed")
            child.signal(signal.SIGKILL)
            child.popen.wait()

    def _forward(self, child: _Child) -> bool:
        """Forward the output of a process. Return False when there is no more output."""
        fileno = child.pipe.fileno()
        lines = child.read()
        for line in lines or ():
            child.add_line(line)
            self._print(line, child.process.name)
        if child.pipe.closed:
            self._selector.unregister(fileno)
        return lines is not None and not child.pipe.closed

    def _drain(self, child: _Child) -> None:
        while not child.pipe.closed and self._forward(child):
            pass
        if not child.pipe.closed:  # a process that it started still holds the other end
            self._selector.unregister(child.pipe)
            child.pipe.close()

    def _reap(self, child: _Child) -> None:
        """Check whether a process has ended; then set its final exit code, or the time of its restart."""
        if child.code is not None or child.restart_at < math.inf or child.alive:
            return
        # what it printed last says why it ended
        self._drain(child)
        child.signal(signal.SIGKILL)  # processes that it has started and left running
        code = child.popen.returncode
        # settings, a file or a missing package are the same at the next start
        is_refused = code == REFUSED and not child.is_up
        if code == 0 or is_refused or child.process.restart == "never":
            child.code = code
            child.helper_state = replace(child.helper_state, reason=_describe_end(child), is_over=True)
            self._note_helpers(child)
            return
        # a process that ran for long has not failed to start: its pauses begin again
        if time.monotonic() - child.started > HEALTHY_S:
            child.failures = 0
        longest_s = MAX_HELPER_BACKOFF_S if child.process.is_helper else MAX_BACKOFF_S
        pause_s = min(BACKOFF_S * 2**child.failures, longest_s)
        child.failures = min(child.failures + 1, MAX_BACKOFF_FAILURES)
        child.restart_at = time.monotonic() + pause_s
        self._print(f"{child.process.name} ended with {describe_exit(code)}; restarting it in {pause_s:g} s")
        restarts = child.helper_state.restarts + 1
        child.helper_state = replace(child.helper_state, restarts=restarts, reason=_describe_end(child))
        self._note_helpers(child)

    def _note_helpers(self, child: _Child) -> None:
        """Tell the other processes which helpers have ended or failed, so that the node's status says so."""
        if not child.process.is_helper:
            return
        states = {
            name: other.helper_state
            for name, other in self._children.items()
            if other.process.is_helper and other.helper_state != HelperState()
        }
        try:
            write_helpers(child.helpers, states)
        except OSError as error:  # the disk may be full, which may also have ended the helper
            self._print(f"cannot tell the node that {child.process.name} has ended: {error}")

    def _note_written(self) -> None:
        """Tell the other processes now and then how much helpers have written."""
        if time.monotonic() < self._next_note_s:
            return
        self._next_note_s = time.monotonic() + NOTE_S
        for child in self._children.values():
            if child.reports is not None and child.reports.written != child.helper_state.written:
                child.helper_state = replace(child.helper_state, written=child.reports.written)
                self._note_helpers(child)

    def _last_lines(self, name: str) -> str:
        lines = list(self._children[name].tail)[-12:]
        if not lines:
            return "; it printed nothing"
        return "; its last lines:\n" + "\n".join(f"  {line}" for line in lines)

    def _print(self, line: str, process: str = "") -> None:
        """Show a line of the group, or one that a process has printed."""
        if self._echo is not None:
            # the reader of the output may have gone; the group must still stop
            with contextlib.suppress(OSError):
                self._echo(format_line(line, process=process))

    def close(self) -> None:
        """Stop all members, and close their pipes and sockets."""
        self.stop()
        self._selector.close()
        self._opened.close()


def _describe_end(child: _Child) -> str:
    """Return why a helper has ended: its exit code and its last line."""
    text = f"ended with {describe_exit(child.popen.returncode)}"
    if child.tail:
        text += f": {child.tail[-1]}"
    return text[:MAX_REASON_CHARACTERS]


def _make_child_setup(parent: int) -> Callable[[], None] | None:
    """Return the function with which a new process asks the kernel to kill it when its parent dies.

    Returns None on systems other than Linux.
    """
    if _libc is None:
        return None
    prctl = _libc.prctl
    kill_signal = int(signal.SIGKILL)

    def set_death_signal() -> None:
        # between fork and exec, as little as possible: another thread may have held any lock at the fork
        prctl(PR_SET_PDEATHSIG, kill_signal, 0, 0, 0)
        if os.getppid() != parent:  # the parent died after the fork, before prctl
            os._exit(1)

    return set_death_signal


def describe_exit(code: int) -> str:
    """Return an exit code in words. Negative codes are signals."""
    if code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"


def list_processes(settings: Settings, profile: Path) -> list[Process]:
    """Return the processes of `settings.group`. Each is a command of `sam3-node` with the same profile.

    Raises SettingsError when there are more cameras than frame endpoints, when two cameras have the same name, or when
    a watcher or recorder would take messages from their only reader.
    """
    # with lossless delivery each message goes to one reader: a second one would take it from the first
    for name in settings.group.processes:
        if name in ("watch", "record", "console"):
            settings.transport.require_newest(f"group.processes: {name}")
    # a profile has several cameras in a table of the group, or one in its own section
    cameras = settings.group.cameras or (settings.camera,)
    _check_cameras(cameras, settings.transport.frames)
    processes: list[Process] = []
    for name in settings.group.processes:
        if name == "camera":
            processes += [_make_camera(settings, profile, *indexed) for indexed in enumerate(cameras)]
        else:
            processes.append(_make_process(settings, profile, name, *COMMANDS[name], {}))
    return processes


def _check_cameras(cameras: Sequence[CameraSettings], endpoints: Sequence[str]) -> None:
    names = [camera.name for camera in cameras]
    if len(set(names)) < len(names):
        raise SettingsError(f"cameras of one group need different names, found {', '.join(names)}")
    # each camera binds an endpoint of its own
    if len(cameras) > len(endpoints):
        raise SettingsError(
            f"{len(cameras)} cameras need as many endpoints in transport.frames, found {len(endpoints)}"
        )


def _make_camera(settings: Settings, profile: Path, index: int, camera: CameraSettings) -> Process:
    """Create a camera process. It reads its section and endpoint from the environment."""
    # the n-th camera has the n-th endpoint; its section comes by the environment, because the profile has a list
    environment = {"SAM3_TRANSPORT__FRAMES": settings.transport.frames[index]}
    if settings.group.cameras:
        environment["SAM3_CAMERA"] = camera.model_dump_json()
    name = camera.name if settings.group.cameras else "camera"
    return _make_process(settings, profile, name, "camera", CAMERA_READY, environment)


def _make_process(
    settings: Settings, profile: Path, name: str, command: str, ready: str, environment: dict[str, str]
) -> Process:
    command_line = (sys.executable, "-m", "sam3_node", command, "--profile", str(profile))
    group = settings.group
    return Process(
        name, command_line, ready, environment, group.restart, group.watchdog_s, command in HELPERS
    )


def run_group(processes: Sequence[Process], stop: threading.Event, grace_s: float = 3.0) -> dict[str, int]:
    """Run all processes until one that is no helper ends for good, all have ended, or `stop` is set. Then stop all.

    Return the exit codes by name.
    """
    with Group(grace_s=grace_s, echo=print_line) as group:
        for process in processes:
            group.start(process)
        announced = False
        told = set[str]()
        # until a signal, or until a member has ended for good that the others need
        while not stop.is_set() and not group.is_over:
            for name, code in group.poll(0.2).items():
                if name not in told and not group.is_over:
                    told.add(name)
                    announce(f"{name} ended with {describe_exit(code)}; the group goes on without it")
            if not announced and group.ready:
                announced = True
                announce(f"group up: {', '.join(process.name for process in processes)}")
        for name, code in group.codes.items():
            if name not in told:
                announce(f"{name} ended with {describe_exit(code)}; stopping the group")
        return group.stop()


def combine_exit_codes(codes: dict[str, int]) -> int:
    """Return 0 if each process ended with 0 or by SIGTERM, else the first other exit code."""
    # SIGTERM is how the group itself ends its members
    failures = [code for code in codes.values() if code not in (0, -signal.SIGTERM)]
    if not failures:
        return 0
    # a negative code is a signal, which shells count from 128
    if failures[0] < 0:
        return 128 - failures[0]
    return failures[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of launch/start. Its one argument is the profile."""
    words = list(sys.argv[1:]) if arguments is None else list(arguments)
    if len(words) != 1 or words[0].startswith("-"):
        print("usage: launch/start PROFILE.toml (such as launch/demo.toml)", file=sys.stderr)
        if words in (["-h"], ["--help"]):
            return 0
        return 2
    use_environment_format()
    try:
        profile = Path(words[0]).resolve()
        settings = load_settings(profile)
        use_format(settings.logging.format)
        processes = list_processes(settings, profile)
        return combine_exit_codes(run_group(processes, stop_on_signals(), settings.group.grace_s))
    except Sam3NodeError as error:
        print(format_line(f"error: {error}", "error"), file=sys.stderr)
        return 2
