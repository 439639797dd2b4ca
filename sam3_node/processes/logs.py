"""The log of a process on stderr: as text or JSON, with the frame that a line is about, limited per kind of line.

A kind is a logger, a level, a message without its arguments, and a camera. So a fault of every frame of one camera
neither fills the disk nor hides what else happens.
The limit of open files of this process is raised here, and a warning comes before they run out.
"""

import json
import logging
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, TextIO

from ..errors import current_request_id

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s%(about)s"
WINDOW_S = 10.0
"""Seconds in which at most `logging.limit` lines of one kind are written."""
MAX_KINDS = 1000
"""Kinds that are counted apart. All others together are one more kind."""
MAX_DESCRIPTORS = 65536
"""Open files that this process asks the system to permit."""
NEARLY_FULL = 0.8
"""Share of the permitted files from which on a warning is logged."""
CHATTY = ("aiobotocore", "botocore")
"""Loggers that are heard from level WARNING on. These tell at level INFO where they found keys for S3."""
FORMAT_VARIABLE = "SAM3_LOGGING__FORMAT"
"""Variable of the environment that sets `logging.format`."""

LogFormat = Literal["text", "json"]
Kind = tuple[str, int, str, str | None]
"""Logger, level, message without its arguments, and camera."""

_subject: ContextVar[tuple[str | None, int | None]] = ContextVar("subject", default=(None, None))
log = logging.getLogger(__name__)


@contextmanager
def log_subject(camera: str, seq: int | None = None) -> Iterator[None]:
    """Within the block, all lines that this thread logs are about a camera, or about one of its frames."""
    token = _subject.set((camera, seq))
    try:
        yield
    finally:
        _subject.reset(token)


@dataclass(slots=True)
class _Window:
    """Lines of one kind since a time."""

    end_s: float
    written: int = 0
    suppressed: int = 0


class LogHandler(logging.StreamHandler[TextIO]):
    """A handler that writes at most `limit` lines of one kind in WINDOW_S; 0 is no limit.

    The number of suppressed lines is logged after their window, at the latest when the process ends.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(stream)
        self._limit = 0
        self._windows: dict[Kind, _Window] = {}
        self.configure("text", 0)

    def configure(self, form: LogFormat, limit: int) -> None:
        """Set the format and the limit of further lines."""
        formatter: logging.Formatter = JsonFormatter()
        if form == "text":
            formatter = logging.Formatter(TEXT_FORMAT, defaults={"about": ""})
        self.setFormatter(formatter)
        self._limit = limit

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, or count it."""
        # what the line is about: the frame of this thread, and the request that it carries out
        record.camera, record.seq = _subject.get()
        request_id = current_request_id()
        record.request_id = request_id
        record.about = f" [request {request_id}]" if request_id else ""
        now_s = time.monotonic()
        # counts of windows that have ended come before this line, in order of time
        self._report(now_s)
        if self._limit and not self._admits(record, now_s):
            return
        super().emit(record)

    def close(self) -> None:
        """Log what was suppressed, and close the handler."""
        self._report(float("inf"))
        super().close()

    def _admits(self, record: logging.LogRecord, now_s: float) -> bool:
        kind: Kind = (record.name, record.levelno, str(record.msg), _subject.get()[0])
        # many kinds at once are a fault of their own, and must not fill the memory
        if kind not in self._windows and len(self._windows) >= MAX_KINDS:
            kind = ("", 0, "lines of other kinds", None)
        window = self._windows.setdefault(kind, _Window(now_s + WINDOW_S))
        if window.written < self._limit:
            window.written += 1
            return True
        window.suppressed += 1
        return False

    def _report(self, now_s: float) -> None:
        """Close the windows that have ended, and log how many lines each has suppressed."""
        # a list of the kinds: their windows are removed meanwhile
        for kind in [kind for kind, window in self._windows.items() if window.end_s <= now_s]:
            count = self._windows.pop(kind).suppressed
            if count:
                # logged by the same logger and level, so that filters treat it like the lines that it stands for
                name, level, message, camera = kind
                text = f"{count} lines were suppressed (logging.limit), of this kind: {message}"
                line = logging.LogRecord(name, level, __file__, 0, text, None, None)
                line.camera = camera
                line.seq = None
                line.suppressed = count
                super().emit(line)


class _Output:
    """The format of what this process prints outside of its log: its ready line, notices and last error."""

    form: LogFormat = "text"


def use_format(form: LogFormat) -> None:
    """Print also ready lines, notices, warnings of libraries and errors of this process in this format."""
    _Output.form = form
    logging.captureWarnings(form == "json")
    if form == "json":
        sys.excepthook = _log_exception
        threading.excepthook = lambda args: _log_exception(args.exc_type, args.exc_value, args.exc_traceback)


def use_environment_format() -> None:
    """Use the format of the environment until the settings are read, so that errors in them also have it."""
    use_format("json" if os.environ.get(FORMAT_VARIABLE) == "json" else "text")


def format_line(line: str, level: str = "info", process: str = "") -> str:
    """Return a line that is no record of the log in the format of the log. In JSON, `process` says whose it is.

    A line that is such an object already gets the process alone.
    """
    if _Output.form == "text":
        return f"{process} | {line}" if process else line
    fields = _read_json(line)
    if fields is None:
        fields = {"time": _format_time(time.time()), "level": level, "message": line}
    if process:
        fields["process"] = process
    return json.dumps(fields)


def read_message(line: str) -> str:
    """Return the message of a line of the log or of other output, in either format."""
    fields = _read_json(line) or {}
    message = fields.get("message")
    return message if isinstance(message, str) else line


def _read_json(line: str) -> dict[str, object] | None:
    """Return a line that is one JSON object; None for any other."""
    if not line.startswith("{"):
        return None
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def _log_exception(kind: type[BaseException], error: BaseException | None, traceback: Any) -> None:
    """Log what nobody has caught, as one record with its traceback."""
    log.critical("%s: %s", kind.__name__, error, exc_info=(kind, error or kind(), traceback))


def _format_time(unix_s: float) -> str:
    whole_s = int(unix_s)
    milliseconds = int(1000 * (unix_s - whole_s))
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole_s))}.{milliseconds:03d}Z"


class JsonFormatter(logging.Formatter):
    """Writes a record as one JSON object: time, level, logger, message; where known, camera, seq, request_id, error."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line. Control characters and what is not ASCII are escaped."""
        fields: dict[str, object] = {
            "time": _format_time(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        # only what is known: a reader of JSON tells absent from empty
        for name in ("camera", "seq", "request_id", "suppressed"):
            value = getattr(record, name, None)
            if value is not None:
                fields[name] = value
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def announce(line: str) -> None:
    """Print a line on stdout in the format of the log; see `print_line`."""
    print_line(format_line(line))


def print_line(line: str) -> None:
    """Print a line on stdout. If it cannot be written, such as to a full disk, the process continues without stdout."""
    try:
        print(line, flush=True)
    except OSError:
        discard_stdout()


def discard_stdout() -> None:
    """Redirect stdout to the null device, so that neither further lines nor the interpreter's last flush fail."""
    descriptor = os.open(os.devnull, os.O_WRONLY)
    os.dup2(descriptor, sys.stdout.fileno())
    os.close(descriptor)


def install_log_handler() -> LogHandler:
    """Make the root logger write to stderr from level INFO on, unless it has handlers. Return the handler."""
    handler = LogHandler(sys.stderr)
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    return handler


def raise_descriptor_limit() -> int:
    """Raise the soft limit of open files to the hard limit, at most MAX_DESCRIPTORS. Return the limit in force.

    Each connection of a peer takes a descriptor. At the usual limit of 1024, many peers would lock out a camera.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, MAX_DESCRIPTORS) if hard != resource.RLIM_INFINITY else MAX_DESCRIPTORS
    # a limit that is high enough stays as the administrator has set it
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        log.warning("the limit of open files stays at %d: %s", soft, error)
        return soft
    return wanted


def warn_if_descriptors_run_out() -> bool:
    """Log a warning and return True if more than 80 % of the allowed files are open. Needs /proc."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    # Linux lists the open files there; elsewhere nothing is known
    try:
        count = len(os.listdir("/proc/self/fd"))
    except OSError:
        return False
    if limit == resource.RLIM_INFINITY or count <= NEARLY_FULL * limit:
        return False
    log.warning(
        "%d of %d files are open: beyond the limit no peer can connect; find who holds the connections"
        " (ss -tnp), or raise the limit (ulimit -n)",
        count,
        limit,
    )
    return True
