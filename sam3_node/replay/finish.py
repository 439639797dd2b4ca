"""The end of a job: its outputs, then its summary, whose presence says that all is there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from ..errors import ReplayError
from .identity import NAME as IDENTITY
from .merge import results
from .outputs import write_outputs
from .parts import FIRST, SECOND, Parts
from .schedule import Schedule
from .store import Store
from .summary import Summary

SUMMARY = "summary.json"

Progress = Callable[[str, int, int | None], None]
"""Told what is being done, how many frames of it are done, and of how many where that is known."""


class StoppedError(ReplayError):
    """A replay was told to stop. What it has done is kept."""

    def __init__(self, frames: int, then: str = "goes on from there") -> None:
        super().__init__(f"stopped after {frames} frames, which are kept; the same command {then}")


@dataclass(frozen=True, slots=True)
class Finish:
    """Writes what a job leaves in `store`. Raises StoppedError soon after `stop` is set."""

    schedule: Schedule
    store: Store
    progress: Progress
    stop: threading.Event

    def write(self, summary: Summary) -> Summary:
        """The outputs that are not there yet, then the summary."""
        missing = [kind for kind in self.schedule.job.outputs if kind not in summary.outputs]
        if missing:
            doubt = self.schedule.settings.detector.doubt
            masks, told = partial(results, self.store, doubt), partial(self._told, summary)
            self.store.keep(write_outputs(self.store.folder, missing, masks, self.schedule.frames, told))
        if missing or not self.store.exists(SUMMARY):
            summary = replace(summary, outputs=[*summary.outputs, *missing])
            self.store.write(SUMMARY, summary.to_json().encode())
        for folder in (FIRST, SECOND):
            Parts(self.store, folder).finish()
        return summary

    def _told(self, summary: Summary, kind: str, done: int) -> None:
        self.progress(f"writing {kind}", done, sum(summary.cameras.values()))
        if self.stop.is_set():
            raise StoppedError(summary.frames)


def clear(store: Store) -> None:
    """Forget all results, what says that they are complete first."""
    store.delete(SUMMARY)
    for folder in (SECOND, FIRST):
        Parts(store, folder).clear()
    store.delete(IDENTITY)
