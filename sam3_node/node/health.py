"""Answer whether the node's main loop turns and publishes masks, and count how long its steps and stages take.

The thread of the main loop writes, any thread reads.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from typing import NamedTuple

from ..processes.notify import Watchdog
from ..settings import Settings

STEPS = 25
"""Steps whose median duration says how long a step may take."""
HANG_PER_STEP = 10.0
"""Times the median duration after which a step counts as hanging, but never before group.hang_step_s."""
BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.033, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds in seconds of the bins of each histogram. Dashboards read quantiles no finer than these."""


class Histogram:
    """Counts of durations in seconds, by upper bound. One thread counts; any thread may read."""

    def __init__(self) -> None:
        self.sum_s = 0.0
        self._counts = [0] * (len(BOUNDS_S) + 1)

    def observe(self, seconds: float) -> None:
        """Count a duration. One below 0, such as an age by a clock that is ahead, adds nothing to the sum."""
        self._counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += max(0.0, seconds)  # a sum that falls looks like a new process

    def cumulative(self) -> list[tuple[str, int]]:
        """Return each bound as text, the last is +Inf, with the number of durations up to it."""
        # a copy of the counts, because the main loop may count meanwhile
        return list(zip((*map(str, BOUNDS_S), "+Inf"), accumulate(list(self._counts)), strict=True))


class Verdict(NamedTuple):
    """An answer to a probe, and the reason for it."""

    ok: bool
    reason: str


class Health:
    """Reports of a node's loop about itself, and the verdicts for probes."""

    def __init__(self, settings: Settings, watchdog: Watchdog | None = None) -> None:
        self.watchdog = watchdog or Watchdog(settings.group.hang_s)
        self.serving = False
        """True once the model is loaded and the main loop runs."""
        self.paused = False
        self.explain_pause: Callable[[], str | None] = lambda: None
        """Returns why the node is paused, None if somebody has paused it. Any thread may call it."""
        self.step_times = Histogram()
        self.stages: defaultdict[str, Histogram] = defaultdict(Histogram)
        """Durations of the steps, and of the stages of those whose masks were published."""
        self._deadline_s = settings.health.deadline_s
        self._hang_s = settings.group.hang_s
        self._hang_step_s = settings.group.hang_step_s
        self._compiles = settings.model.compile is True
        self._began_s: float | None = None
        self._published_s: float | None = None
        self._steps_s: deque[float] = deque(maxlen=STEPS)

    @property
    def stepping(self) -> bool:
        """True while a step runs."""
        return self._began_s is not None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure a step within the block, and have the watchdog watch over it."""
        # a step has a shorter limit than the rest of the loop where the steps before it were short
        self.watchdog.begin(self._step_limit_s())
        begin_s = time.monotonic()
        self._began_s = begin_s
        try:
            yield
        finally:
            took_s = time.monotonic() - begin_s
            self._began_s = None
            self._steps_s.append(took_s)
            self.step_times.observe(took_s)
            self.watchdog.begin(self._hang_s)

    def published(self, stages_us: Mapping[str, int]) -> None:
        """Note that masks were published, and how long their stages took."""
        self._published_s = time.monotonic()
        for stage, duration_us in stages_us.items():
            self.stages[stage].observe(duration_us / 1e6)

    def check_alive(self) -> Verdict:
        """Return whether the loop turns: exactly while the watchdog is kicked."""
        if self.watchdog.hangs:
            return Verdict(False, "the main loop hangs; its supervisor starts the process again")
        return Verdict(True, "the main loop turns" if self.serving else "the model is being loaded")

    def check_ready(self) -> Verdict:
        """Return whether masks were published lately, and if not, why."""
        # read once, because the main loop may change these in between
        now_s = time.monotonic()
        began_s = self._began_s
        published_s = self._published_s
        if published_s is not None and now_s - published_s <= self._deadline_s and not self.paused:
            return Verdict(True, f"masks were published {max(0.0, now_s - published_s):.3f} s ago")
        if not self.serving:
            return Verdict(False, "the model is being loaded")
        if self.paused:
            return Verdict(False, self.explain_pause() or "the node is paused: sam3-node resume")
        if began_s is not None and now_s - began_s > self._deadline_s:
            return Verdict(False, f"the step of a frame has run for {now_s - began_s:.1f} s")
        if published_s is None:
            return Verdict(
                False, "no frame has been stepped yet: start a camera, or correct transport.frames"
            )
        return Verdict(
            False, f"no masks for {now_s - published_s:.1f} s: frames have stopped, are too old, or fail"
        )

    def _step_limit_s(self) -> float:
        """Return how long a step may take. The first one, and each where the model compiles, may take long."""
        if self._compiles or not self._steps_s:
            return self._hang_s
        return min(self._hang_s, max(self._hang_step_s, HANG_PER_STEP * statistics.median(self._steps_s)))
