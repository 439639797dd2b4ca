"""Measure how many processors other processes keep busy, from /proc/stat. Where there is none, none seem busy."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

STAT = Path("/proc/stat")
PERIOD_S = 1.0
"""Shortest time over which the load is measured."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class CpuTimes(NamedTuple):
    """Seconds of processor time since the machine, or this process, has started."""

    machine_s: float
    """of all processes with the usual priority or a higher one; what a lower one takes, it gives back at once"""
    process_s: float


def read_cpu_times() -> CpuTimes | None:
    """Return the times until now; None where the system does not tell them."""
    try:
        words = STAT.read_bytes().split(b"\n", 1)[0].split()
        user, nice, system, _, _, irq, softirq, steal = map(int, words[1:9])
    except (OSError, ValueError):
        return None
    own = time.process_time()
    # a process of low priority finds its own time among that of the others of low priority
    own_is_nice = os.getpriority(os.PRIO_PROCESS, 0) > 0
    ticks = user + system + irq + softirq + steal + (nice if own_is_nice else 0)
    return CpuTimes(ticks / TICKS_PER_S, own)


class Neighbours:
    """The load by other processes. `measure` is called often, and reads the times at most once a period."""

    def __init__(
        self,
        read: Callable[[], CpuTimes | None] = read_cpu_times,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._clock = clock
        self._last = read()
        self._last_s = clock()
        self._busy = 0.0

    def measure(self) -> float:
        """Return how many processors other processes kept busy in the last period; 0 before its end."""
        now_s = self._clock()
        passed_s = now_s - self._last_s
        if passed_s < PERIOD_S or self._last is None:
            return self._busy
        times = self._read()
        if times is not None:
            machine_s = times.machine_s - self._last.machine_s
            process_s = times.process_s - self._last.process_s
            self._busy = max(0.0, (machine_s - process_s) / passed_s)
        self._last = times
        self._last_s = now_s
        return self._busy
