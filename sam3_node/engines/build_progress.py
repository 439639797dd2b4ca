"""How far a build has come: nested phases of steps as the builder reports them, and a line for the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Self, TextIO

PERIOD_S = 1.0


@dataclass(slots=True)
class _Phase:
    parent: str | None
    steps: int
    done: int = 0


class Phases:
    """Phases within steps of other phases; safe to be told of from any thread. `cancelled`: the build is to stop."""

    def __init__(self) -> None:
        self.cancelled = False
        self._phases: dict[str, _Phase] = {}
        self._most = 0.0
        self._lock = Lock()

    def start(self, name: str, parent: str | None, steps: int) -> None:
        """A phase begins, within a step of `parent` or by itself."""
        with self._lock:
            self._phases[name] = _Phase(parent, max(1, steps))

    def step(self, name: str) -> None:
        """A phase has done another of its steps."""
        with self._lock:
            if phase := self._phases.get(name):
                phase.done += 1

    def finish(self, name: str) -> None:
        """A phase has ended."""
        with self._lock:
            ended = self._phases.pop(name, None)
            if ended is not None and ended.parent is None:
                self._most = 1.0

    @property
    def fraction(self) -> float:
        """How much is done, 0 to 1, all steps of a phase taken as equally long; it never falls."""
        with self._lock:
            roots = [name for name, phase in self._phases.items() if phase.parent is None]
            self._most = max(self._most, *(self._done(name) for name in roots), 0.0)
            return self._most

    def _done(self, name: str) -> float:
        phase = self._phases[name]
        within = [self._done(child) for child, other in self._phases.items() if other.parent == name]
        return min(1.0, (phase.done + max(within, default=0.0)) / phase.steps)


class ProgressLine:
    """One line on a terminal, written over as work goes on, within `with`; elsewhere, a line when it ends.

    expected_s: how long the same took before, the best estimate there is; without, it is taken from what is done.
    """

    def __init__(
        self,
        title: str,
        expected_s: float | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._title, self._expected_s = title, expected_s
        self._stream, self._clock = stream or sys.stderr, clock
        self._start, self._last = clock(), -PERIOD_S
        self._live = self._stream.isatty()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self._write(f"{'done in' if kind is None else 'ended after'} {self.elapsed_s:.1f} s", "\n")

    @property
    def elapsed_s(self) -> float:
        """Seconds since the line began."""
        return self._clock() - self._start

    def say(self, text: str) -> None:
        """Show what is being done, where that cannot be told in parts."""
        if self._live:
            self._write(text)

    def __call__(self, fraction: float) -> None:
        """Show that so much is done, 0 to 1."""
        elapsed = self.elapsed_s
        if self._live and elapsed - self._last >= PERIOD_S:
            self._last = elapsed
            self._write(f"{fraction:4.0%}  {elapsed:.0f} s{self._left(fraction, elapsed)}")

    def _left(self, fraction: float, elapsed: float) -> str:
        if self._expected_s is not None:
            left = self._expected_s - elapsed
        elif fraction > 0:
            left = elapsed * (1 - fraction) / fraction
        else:
            return ""
        return f", about {left:.0f} s left" if left > 0 else ", any moment"

    def _write(self, text: str, end: str = "") -> None:
        begin, clear = ("\r", "\x1b[K") if self._live else ("", "")
        print(f"{begin}{self._title}: {text}{clear}", end=end, file=self._stream, flush=True)
