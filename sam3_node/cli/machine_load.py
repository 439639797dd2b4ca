"""Measures how much of the machine's processors other programs use while this process and its children work."""

from __future__ import annotations

import os
from pathlib import Path

STAT = Path("/proc/stat")
"""Times of all processors together since the start of the machine, on Linux."""
COUNTED = 8
"""Columns of STAT that are counted: user, nice, system, idle, iowait, irq, softirq, steal. Guests are in user."""
IDLE = (3, 4)
"""Columns in which no program runs. A virtual machine that waits for its host counts as busy (steal)."""


class LoadMeter:
    """A meter of other programs' share of the processors, from its making on."""

    def __init__(self) -> None:
        self._began = _read_ticks()
        self._own_began_s = _read_own_s()

    def measure_others(self) -> float | None:
        """Return the share 0..1 that programs other than this process and its children have used; None if unknown.

        Of the children, those that have ended and were waited for count as own.
        """
        ended = _read_ticks()
        if self._began is None or ended is None:
            return None
        spent = [after - before for before, after in zip(self._began, ended, strict=True)]
        total = sum(spent)
        if total <= 0:
            return None
        busy = total - sum(spent[column] for column in IDLE)
        own = (_read_own_s() - self._own_began_s) * os.sysconf("SC_CLK_TCK")
        return min(max((busy - own) / total, 0.0), 1.0)


def _read_ticks() -> list[int] | None:
    """Return the COUNTED columns of STAT, or None where there are none."""
    try:
        words = STAT.read_text(encoding="ascii").split("\n", 1)[0].split()
        ticks = [int(word) for word in words[1 : 1 + COUNTED]]
    except (OSError, ValueError):
        return None
    if len(ticks) < COUNTED:
        return None
    return ticks


def _read_own_s() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
