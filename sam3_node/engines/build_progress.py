"""Progress of engine builds: the steps that a caller sees, and the nested phases that a builder reports."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

ReportProgress = Callable[[str, float], None]
"""Called with the title of a build step and the fraction of it that is done, 0 to 1."""
MAX_FRACTION = (
    0.99  # of a step that has not ended: a builder reports 1 before it returns, and estimates may be short
)


def ignore_progress(title: str, fraction: float) -> None:
    """Do nothing: the default of callers that show no progress."""


class BuildStep:
    """A step of a build: it measures how long the step takes, and reports which fraction is done.

    expected_s: how long the same step took before, in seconds. It is a better estimate than the builder's own fraction,
    so the reported fraction is of that time where it is known.
    """

    def __init__(
        self,
        title: str,
        report: ReportProgress,
        expected_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._title, self._report = title, report
        self._expected_s, self._clock = expected_s, clock
        self._start_s = clock()
        report(title, 0.0)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the step began."""
        return self._clock() - self._start_s

    def update(self, fraction: float) -> None:
        """Report progress; `fraction`, 0 to 1, is the builder's."""
        if self._expected_s:
            fraction = self.elapsed_s / self._expected_s
        self._report(self._title, min(fraction, MAX_FRACTION))

    def finish(self) -> float:
        """Report the end of the step; return the seconds that it took, rounded to 0.1."""
        elapsed_s = self.elapsed_s
        self._report(self._title, 1.0)
        return round(elapsed_s, 1)


@dataclass(slots=True)
class _Phase:
    parent: str | None
    steps: int
    done: int = 0


class BuildProgress:
    """Phases of a build, nested in steps of other phases. Any thread may report them.

    cancelled: set it to make the builder stop.
    """

    def __init__(self) -> None:
        self.cancelled = False
        self._phases: dict[str, _Phase] = {}
        self._highest = 0.0
        self._lock = Lock()

    def start(self, name: str, parent: str | None, steps: int) -> None:
        """Begin a phase within a step of `parent`, or at the top level for None."""
        with self._lock:
            self._phases[name] = _Phase(parent, max(1, steps))

    def step(self, name: str) -> None:
        """Count one more step of a phase as done."""
        with self._lock:
            if phase := self._phases.get(name):
                phase.done += 1

    def finish(self, name: str) -> None:
        """End a phase."""
        with self._lock:
            ended = self._phases.pop(name, None)
            if ended is not None and ended.parent is None:
                self._highest = 1.0

    @property
    def fraction(self) -> float:
        """Fraction done, 0 to 1. All steps of a phase count as equally long. The value never falls."""
        with self._lock:
            roots = [name for name, phase in self._phases.items() if phase.parent is None]
            self._highest = max(self._highest, *(self._measure(name) for name in roots), 0.0)
            return self._highest

    def _measure(self, name: str) -> float:
        phase = self._phases[name]
        nested = [self._measure(child) for child, other in self._phases.items() if other.parent == name]
        return min(1.0, (phase.done + max(nested, default=0.0)) / phase.steps)
