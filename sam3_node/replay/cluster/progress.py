"""One view of many recordings that are replayed at once."""

from __future__ import annotations

import sys
import time
from typing import NamedTuple, TextIO

from ..progress import LOG_S, TERMINAL_S, clock


class Progress(NamedTuple):
    """How far a run is: recordings done, of how many, workers that are there, frames done in this run and in a second,
    and about how long it takes, where that can be told."""

    done: int
    total: int
    workers: int
    frames: int
    frames_per_s: float
    left_s: float | None

    def __str__(self) -> str:
        left = f", {clock(self.left_s)} left" if self.left_s is not None and self.done < self.total else ""
        return (
            f"{self.done}/{self.total} recordings, {self.workers} workers, {self.frames} frames, "
            f"{self.frames_per_s:.1f} frames/s{left}"
        )


class View:
    """Shows it as a line that is written over on a terminal, elsewhere as a line now and then."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stderr
        self._live = self._out.isatty()
        self._next_s = 0.0
        self._width = 0

    def __call__(self, progress: Progress) -> None:
        """How far it is now."""
        now_s = time.monotonic()
        if now_s < self._next_s and progress.done < progress.total:
            return
        self._next_s = now_s + (TERMINAL_S if self._live else LOG_S)
        line = str(progress)
        end = "" if self._live else "\n"
        print(f"\r{line.ljust(self._width)}" if self._live else line, end=end, file=self._out, flush=True)
        self._width = len(line)

    def end(self) -> None:
        """What comes next begins a line."""
        if self._live and self._width:
            print(file=self._out)


class Meter:
    """Frames done in this run, of tasks that come and go, and from them rate and time left."""

    def __init__(self, tasks: int) -> None:
        self._first: dict[object, int] = {}
        self._last: dict[object, int] = {}
        self._totals: dict[object, int] = {}
        self._tasks = tasks
        self._begin_s: float | None = None

    @property
    def frames(self) -> int:
        """Stepped in this run."""
        return sum(self._last[key] - self._first[key] for key in self._last)

    @property
    def frames_per_s(self) -> float:
        """Of all workers, since the first frame of this run."""
        seconds = time.monotonic() - self._begin_s if self._begin_s is not None else 0.0
        return self.frames / seconds if seconds > 0 else 0.0

    @property
    def left_s(self) -> float | None:
        """What is not begun is taken to be as long as what is, on average; None while nothing is known."""
        if not self._totals or not self.frames_per_s:
            return None
        todo = [self._totals[key] - self._last[key] for key in self._totals]
        mean = sum(self._totals.values()) / len(self._totals)
        unknown = max(self._tasks - len(self._totals), 0)
        return (sum(max(one, 0) for one in todo) + unknown * mean) / self.frames_per_s

    def expect(self, more: int) -> None:
        """So many more tasks."""
        self._tasks += more

    def note(self, key: object, what: str, done: int, total: int | None) -> None:
        """How far a task is; only frames that are stepped count."""
        if what != "replaying":
            return
        if self._begin_s is None:
            self._begin_s = time.monotonic()
        self._first.setdefault(key, done)
        self._last[key] = max(done, self._last.get(key, done))
        if total is not None:
            self._totals[key] = total

    def finish(self, key: object, frames: int, resumed_from: int) -> None:
        """A replay that is over, after so many frames, of which those before `resumed_from` were done before."""
        self._first[key] = min(self._first.get(key, resumed_from), resumed_from)
        self._last[key] = self._totals[key] = max(frames, self._last.get(key, 0))
