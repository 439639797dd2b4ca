"""Reacts to stop signals (end at once, raise KeyboardInterrupt, set an event), and says what a command waits for."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType

from ..resources import Closeable
from .logs import format_line

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 and the number of SIGINT, as shells count."""
PATIENCE_S = 3.0
"""Seconds that a library that runs no Python code has after Ctrl-C before the process ends."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
NOTICE_S = 3.0
"""Seconds without progress after which a command says what it waits for."""
REPEAT_S = 1.0
"""Time between two looks for the reason, once a command waits."""


def exit_on_interrupt() -> None:
    """Make SIGINT end the process at once with INTERRUPTED, while there is nothing to close."""
    signal.signal(signal.SIGINT, _exit)


def raise_on_interrupt() -> None:
    """Make SIGINT raise KeyboardInterrupt, so that the main thread closes what is open.

    A second SIGINT ends the process at once. So does the first one after PATIENCE_S if the main thread is in a library
    that runs no Python code, and at once if the exception would be raised where Python ignores exceptions.
    """
    interruption = _Interruption()
    signal.signal(signal.SIGINT, interruption.handle)
    # an exception in a destructor is ignored by Python: Ctrl-C must not be lost there
    sys.unraisablehook = interruption.report_unraisable
    _run_after_signal((signal.SIGINT,), interruption.exit_if_stuck, "interrupt")


class _Interruption:
    """The state of one interruption: whether the main thread has raised KeyboardInterrupt."""

    def __init__(self) -> None:
        self._is_raised = False
        self._is_signalled = False
        self._report_other = sys.unraisablehook

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt for the first signal, and exit for the second."""
        if self._is_raised:
            _exit(number, frame)
        self._is_raised = True
        raise KeyboardInterrupt

    def exit_if_stuck(self) -> None:
        """Exit PATIENCE_S after a SIGINT that has raised nothing, and for a second one. Runs in a thread."""
        is_second = self._is_signalled
        self._is_signalled = True
        if not is_second:
            time.sleep(PATIENCE_S)
        # a signal just before a read that blocks is not handled before the read ends
        if (is_second or not self._is_raised) and signal.getsignal(signal.SIGINT) == self.handle:
            _exit(signal.SIGINT, None)

    def report_unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Exit if the ignored exception is a KeyboardInterrupt; report others as before."""
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            _exit(signal.SIGINT, None)
        self._report_other(unraisable)


def _exit(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)


def stop_on_signals(once: bool = False) -> threading.Event:
    """Return an event that SIGTERM and SIGINT set; the signals have no other effect.

    With `once`, this is so for the first signal. A second one interrupts the main thread (KeyboardInterrupt).

    A thread sets the event, because a signal handler runs in the main thread, which may hold the event's lock then.
    """
    stop = threading.Event()
    _run_after_signal(STOP_SIGNALS, stop.set, "signals")
    react = _arm_interrupt if once else _do_nothing
    for number in STOP_SIGNALS:
        signal.signal(number, react)
    return stop


def _run_after_signal(numbers: Sequence[int], react: Callable[[], None], name: str) -> None:
    """Run `react` in a thread after each of these signals, which need a handler."""
    # Python writes the number of each signal to this pipe, at once, whatever the main thread does
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)

    def wait() -> None:
        while True:  # other signals with a handler also wake this thread
            if os.read(reader, 1)[0] in numbers:
                react()

    threading.Thread(target=wait, name=name, daemon=True).start()


def _do_nothing(*_: object) -> None:
    """Handle a signal, so that it does not end the process; the thread at the pipe reacts to it."""


def _arm_interrupt(*_: object) -> None:
    # the first signal has set the event; the next one is for a command that does not end
    for number in STOP_SIGNALS:
        signal.signal(number, signal.default_int_handler)


def print_notice(line: str) -> None:
    """Print a line on stderr, in the format of the log."""
    print(format_line(line, "warning"), file=sys.stderr, flush=True)


class WaitingNotice(Closeable):
    """A thread that says what a command waits for, NOTICE_S after the start or after the last progress.

    `find_reason` returns one line, "" if there is nothing to say now, or None if there is nothing more to wait for. It
    runs in the thread. A reason is shown once, and again after it has changed or after progress. A context manager.
    """

    def __init__(
        self, find_reason: Callable[[], str | None], show: Callable[[str], object] = print_notice
    ) -> None:
        self._find_reason = find_reason
        self._show = show
        self._shown = ""
        self._closed = threading.Event()
        self._progress_s = time.monotonic()
        threading.Thread(target=self._run, name="waiting", daemon=True).start()

    def progress(self) -> None:
        """Note that something has arrived."""
        self._progress_s = time.monotonic()
        self._shown = ""

    def close(self) -> None:
        """Say nothing more. Does not wait for `find_reason`. Idempotent."""
        self._closed.set()

    def _run(self) -> None:
        # one look NOTICE_S after the last progress, then one every REPEAT_S
        pause_s = NOTICE_S
        while not self._closed.wait(pause_s):
            begin_s = self._progress_s
            pause_s = begin_s + NOTICE_S - time.monotonic()
            if pause_s > 0:
                continue
            pause_s = REPEAT_S
            reason = self._find_reason()
            if reason is None:
                return
            # finding the reason takes time, in which what was waited for may have come
            is_current = self._progress_s == begin_s and not self._closed.is_set()
            if reason and reason != self._shown and is_current:
                self._shown = reason
                self._show(reason)
