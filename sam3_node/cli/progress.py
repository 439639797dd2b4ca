"""Show text of other processes safely in a terminal, and the progress of long work.

`ProgressBar` draws a bar on a terminal, and otherwise prints a line every few seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Sequence
from typing import Any, TextIO

import msgspec
from tqdm import tqdm

TERMINAL_S = 0.2
"""Shortest time between two states of a bar."""
LOG_S = 10.0
"""Shortest time between two lines of progress where there is no terminal."""


def printable(text: str, line_feeds: bool = False) -> str:
    """Return the text with "?" for each control, invisible or direction-changing character.

    With `line_feeds`, line feeds stay.
    """
    kept = ""
    if line_feeds:
        kept = "\n"
    # names come from other processes: an escape sequence could rewrite what the terminal shows
    return "".join(letter if letter.isprintable() or letter in kept else "?" for letter in text)


def list_more(value: msgspec.Struct, shown: Collection[str]) -> list[str]:
    """Return name and value of the fields that are not `shown` already, and have no default or another value."""
    names = value.__struct_fields__
    defaults = dict(zip(reversed(names), reversed(value.__struct_defaults__), strict=False))
    parts = ((name, getattr(value, name)) for name in names if name not in shown)
    more = [(name, part) for name, part in parts if part is not None and part != defaults.get(name)]
    return [name if part is True else f"{name} {printable(str(part))}" for name, part in more]


def align_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


class ProgressBar:
    """Shows the progress of one task after another on `out` (stderr by default).

    A call with a new task name ends the current bar and starts the next. `close` ends the last one.
    """

    def __init__(self, unit: str = "frames", out: TextIO | None = None) -> None:
        self._unit = unit
        self._out = out or sys.stderr
        self._bar: tqdm[Any] | None = None
        self._task: str | None = None
        self._begin_s = 0.0  # of the current task
        self._next_s = 0.0  # of the next line
        self._first = 0  # units that were done when the task began: a replay may continue

    def __call__(self, what: str, done: int, total: int | None = None, note: str = "") -> None:
        """Show that `done` of `total` units of the task `what` are done; None if the total is not known.

        A `note` replaces the rate and the time left.
        """
        # a recording's name may be in both
        what = printable(what)
        note = printable(note)
        if total is not None:
            total = max(total, done)  # an index of masks does not count the frames that failed
        if self._bar is None or what != self._task:
            self._bar = self._start(what, done, total, note)
        self._bar.total = total
        if note:
            self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(done - self._bar.n)
        # tqdm draws nothing without a terminal, so this writes lines in its place
        if self._bar.disable:
            self._log(done, total, note)

    def report(self, step: str, fraction: float) -> None:
        """Show that this fraction of a step is done, 0 to 1. The unit is per cent."""
        self(step, round(100 * fraction), 100)

    def close(self) -> None:
        """End the current bar, so that other output starts on a new line. Idempotent."""
        if self._bar is not None:
            # tqdm leaves out what comes too soon, so the last state may not be shown yet
            self._bar.refresh()
            self._bar.close()
        self._bar = None
        self._task = None

    def _start(self, what: str, done: int, total: int | None, note: str) -> tqdm[Any]:
        self.close()
        self._task = what
        self._first = done
        self._begin_s = time.monotonic()
        # a note takes the place of the rate, which tqdm would add by itself
        bar_format = None
        if note:
            bar_format = "{l_bar}{bar}| {n_fmt}/{total_fmt}{unit}{postfix}"
        self._next_s = self._begin_s + LOG_S
        return tqdm(
            desc=what,
            total=total,
            initial=done,
            unit=f" {self._unit}",
            file=self._out,
            mininterval=TERMINAL_S,
            miniters=0,
            dynamic_ncols=True,
            postfix=note or None,
            bar_format=bar_format,
            disable=not self._out.isatty(),
        )

    def _log(self, done: int, total: int | None, note: str) -> None:
        # a line now and then, and one at the end
        now_s = time.monotonic()
        if now_s < self._next_s and done != total:
            return
        self._next_s = now_s + LOG_S
        count = f"{done}" if total is None else f"{done}/{total}"
        if note:
            rest = f", {note}"
        else:
            rest = self._rate(done, total, now_s - self._begin_s)
        print(f"{self._task}: {count} {self._unit}{rest}", file=self._out, flush=True)

    def _rate(self, done: int, total: int | None, seconds: float) -> str:
        rate = 0.0
        if seconds > 0:
            rate = (done - self._first) / seconds
        # at the end the rate of the whole, before it the time that is left at this rate
        if done == total:
            return f", {rate:.1f} {self._unit}/s, done in {seconds:.1f} s"
        left = ""
        if total is not None and rate:
            left = f", {format_duration((total - done) / rate)} left"
        return f", {rate:.1f} {self._unit}/s{left}"


def format_duration(seconds: float) -> str:
    """Format seconds as 3:07 or 2:03:07."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{rest:02}"
    return f"{minutes}:{rest:02}"
