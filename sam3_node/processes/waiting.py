"""Notices on stderr that say what a command waits for."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from ..types import Closeable

NOTICE_S = 3.0
"""Seconds without progress after which a command says what it waits for."""
REPEAT_S = 1.0


def print_notice(line: str) -> None:
    """Print a line on stderr."""
    print(line, file=sys.stderr, flush=True)


class WaitingNotice(Closeable):
    """A thread that says what a command waits for, NOTICE_S after the start or after the last progress.

    `find_reason` returns one line, "" if there is nothing to say now, or None if there is nothing more to wait for. It
    runs in the thread. A reason is shown once, and again after it has changed or after progress. A context manager.
    """

    def __init__(
        self, find_reason: Callable[[], str | None], show: Callable[[str], object] = print_notice
    ) -> None:
        self._find_reason, self._show = find_reason, show
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
            is_current = self._progress_s == begin_s and not self._closed.is_set()
            if reason and reason != self._shown and is_current:
                self._shown = reason
                self._show(reason)
