"""Progress on a terminal as a line that is written over, elsewhere as a line now and then."""

from __future__ import annotations

import sys
import time
from typing import TextIO

TERMINAL_S, LOG_S = 0.2, 10.0


class Bar:
    """Told how far something is, it shows done/total, rate and time left; `Bar()` is a `Progress` of `run_job`."""

    def __init__(self, name: str = "", out: TextIO | None = None) -> None:
        self._name, self._out = name, out or sys.stderr
        self._live = self._out.isatty()
        self._what = ""
        self._width = 0
        self._begin_s = self._next_s = 0.0
        self._first = 0

    def __call__(self, what: str, done: int, total: int | None) -> None:
        """`done` of `total` frames of `what` are done; None where nobody knows the total."""
        now_s = time.monotonic()
        if what != self._what:
            self.end()
            self._what, self._begin_s, self._first = what, now_s, done
            self._next_s = now_s + (TERMINAL_S if self._live else LOG_S)
        if now_s >= self._next_s or done == total:
            self._next_s = now_s + (TERMINAL_S if self._live else LOG_S)
            self._show(self._line(done, total, now_s - self._begin_s))

    def end(self) -> None:
        """What comes next begins a line."""
        if self._live and self._width:
            print(file=self._out)
        self._width = 0

    def _line(self, done: int, total: int | None, seconds: float) -> str:
        rate = (done - self._first) / seconds if seconds > 0 else 0.0
        of = f"/{max(total, done)}" if total else ""  # frames that failed are not in an index of masks
        line = f"{self._name}{self._what}: {done}{of} frames, {rate:.1f} frames/s"
        if total and rate and done < total:
            line += f", {clock((total - done) / rate)} left"
        return line

    def _show(self, line: str) -> None:
        if self._live:
            print(f"\r{line.ljust(self._width)}", end="", file=self._out, flush=True)
            self._width = len(line)
        else:
            print(line, file=self._out, flush=True)


def clock(seconds: float) -> str:
    """Such as 3:07, or 2:03:07."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
