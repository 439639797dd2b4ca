"""Choose how many CPU threads a step uses, from the measured times of steps.

Several threads are fastest alone; beside other busy processes they wait for one another at each operation, and one
thread may be several times as fast. So the choice is made while the node runs. Only as many threads are used as other
processes leave processors idle, because threads that share one keep all others waiting. Among these numbers a trial
decides: steps alternate between the number that is used and its neighbour, and the faster one stays.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable

import torch

from .neighbours import Neighbours

GAIN = 0.9
"""Ratio of the median times below which the number that is tried takes over."""
HOPELESS = 1.5
"""Ratio from which a trial ends after half of its steps."""
TURNS = (0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 0, 1, 0, 1, 1, 0)
"""Which of both numbers each step of a trial uses (Thue-Morse): neither gets more of what comes every few frames."""
FIRST_S = 1.0
"""Time from the first step to the first trial: the first steps are slow."""
SHORTEST_S = 10.0
"""Time between trials after one that kept the number; it doubles with each, up to LONGEST_S."""
LONGEST_S = 160.0
"""Longest time between trials: one in 150 steps at 15 Hz is of a trial."""
CHANGED = 1.4
"""Factor by which the median time of a step must change for a trial before its time."""
RECENT = 15
"""Steps of that median."""
WHOLE = 0.75
"""Share of its time from which a processor counts as kept busy by others."""


def count_threads() -> int:
    """Return how many CPU threads a step of this thread uses now."""
    return torch.get_num_threads()


def use_threads(count: int) -> None:
    """Use this number of CPU threads for steps of this thread from now on."""
    if count != torch.get_num_threads():
        torch.set_num_threads(count)


class ThreadChooser:
    """Gives the number of threads for each step. The main loop calls `next` before a step and `note` after it."""

    def __init__(
        self,
        most: int,
        fixed: bool = False,
        clock: Callable[[], float] = time.monotonic,
        measure_busy: Callable[[], float] | None = None,
    ) -> None:
        """`measure_busy` returns how many processors other processes keep busy."""
        powers = [2**exponent for exponent in range(most.bit_length()) if 2**exponent < most]
        self.numbers = [most] if fixed else [*powers, most]
        """The numbers to choose from, ascending."""
        self.chosen = most
        self.times_s: dict[int, float] = {}
        """Median time of a step with each number at its last trial."""
        self._clock = clock
        self._measure_busy = measure_busy or Neighbours(clock=clock).measure
        self._free = most
        self._trial: list[tuple[int, float]] | None = None
        self._tried = most
        self._last = most
        self._upwards = False
        self._pause_s = SHORTEST_S
        self._next_s = clock() + FIRST_S
        self._recent = deque[float](maxlen=RECENT)
        self._usual_s: float | None = None

    @property
    def has_choice(self) -> bool:
        """True if there is more than one number."""
        return len(self.numbers) > 1

    def next(self, hold: bool = False) -> int:
        """Return the number for the next step. With `hold`, work is under way whose number must not change."""
        if hold:
            self._trial = None
            return self._last
        self._yield_to_others()
        if self._trial is None and self._is_due():
            self._begin()
        is_turn = self._trial is not None and TURNS[len(self._trial)]
        self._last = self._tried if is_turn else self.chosen
        return self._last

    def note(self, number: int, step_s: float) -> None:
        """Take the time of a step that used `number` threads."""
        if self._trial is None:
            self._recent.append(step_s)
            return
        self._trial.append((number, step_s))
        half = len(TURNS) // 2
        if len(self._trial) == len(TURNS) or (len(self._trial) == half and self._ratio() > HOPELESS):
            self._end()

    def describe(self) -> str:
        """Say why the number was chosen."""
        if not self.has_choice:
            return "there is no choice: model.threads, a GPU or a single processor decides"
        few = "" if self._free == self.numbers[-1] else f"; other processes leave {self._free} processors"
        if not self.times_s:
            return f"not tried yet{few}"
        times = (f"{number}: {1e3 * step_s:.1f} ms" for number, step_s in sorted(self.times_s.items()))
        return f"median time of a step with each number of threads: {', '.join(times)}{few}"

    def _yield_to_others(self) -> None:
        """Use no more threads than others leave processors idle, from this step on."""
        if not self.has_choice:
            return
        others = math.floor(self._measure_busy() + 1 - WHOLE)
        self._free = max(self.numbers[0], self.numbers[-1] - others)
        if self.chosen > self._free:
            self.chosen = max(number for number in self.numbers if number <= self._free)
            self._trial = None
            self._usual_s = None
            self._pause_s = SHORTEST_S
            self._next_s = self._clock() + self._pause_s
            self._recent.clear()
        elif self._trial is not None and self._tried > self._free:
            self._trial = None

    def _is_due(self) -> bool:
        if not self._list_neighbours():
            return False
        if self._clock() >= self._next_s:
            return True
        # the machine or the work has changed, so another number may be the best now
        if self._usual_s is None or len(self._recent) < RECENT:
            return False
        ratio = statistics.median(self._recent) / self._usual_s
        return not 1 / CHANGED < ratio < CHANGED

    def _list_neighbours(self) -> list[int]:
        """Return the numbers beside the chosen one that may be tried, the lower one first."""
        place = self.numbers.index(self.chosen)
        beside = [*self.numbers[max(0, place - 1) : place], *self.numbers[place + 1 : place + 2]]
        return [number for number in beside if number <= self._free]

    def _begin(self) -> None:
        beside = self._list_neighbours()
        self._upwards = beside[0] > self.chosen if len(beside) == 1 else not self._upwards
        self._tried = beside[-1] if self._upwards else beside[0]
        self._trial = []

    def _medians(self) -> tuple[float, float]:
        """Return the median times of the trial's steps, with the chosen number and with the one that is tried."""
        assert self._trial is not None
        chosen = [step_s for number, step_s in self._trial if number == self.chosen]
        tried = [step_s for number, step_s in self._trial if number == self._tried]
        return statistics.median(chosen), statistics.median(tried)

    def _ratio(self) -> float:
        chosen_s, tried_s = self._medians()
        return tried_s / chosen_s

    def _end(self) -> None:
        chosen_s, tried_s = self._medians()
        # a new map, because other threads describe the old one
        self.times_s = {**self.times_s, self.chosen: chosen_s, self._tried: tried_s}
        if tried_s < GAIN * chosen_s:
            self.chosen = self._tried
            self._usual_s = tried_s
            self._pause_s = SHORTEST_S
            # the next number in this direction may be better still
            pause_s = 0.0
            self._upwards = not self._upwards
        else:
            self._usual_s = chosen_s
            pause_s = self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_S)
        self._next_s = self._clock() + pause_s
        self._recent.clear()
        self._trial = None
