"""A job from beginning to end: parts as they come, then the outputs, then the summary, whose presence says that all is
there. What was killed at any moment is gone on with from its last complete part."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from ..errors import ReplayError
from ..perception import Perception
from ..settings import Settings
from .actions import Action
from .ahead import Ahead
from .compare import Comparison, compare
from .configure import differences, same_sections
from .identity import NAME as IDENTITY
from .identity import digests_of, identity_of, keep_identity
from .job import Job
from .outputs import write_outputs
from .parts import Parts
from .player import Player, forward
from .schedule import Schedule
from .store import FolderStore
from .summary import Summary, of_tally
from .work import PartLimits, Work

SUMMARY = "summary.json"

Progress = Callable[[str, int, int | None], None]
"""Told what is being done, how many frames of it are done, and of how many where that is known."""
Load = Callable[[Settings], Perception]
LIMITS = PartLimits()


class StoppedError(ReplayError):
    """A replay was told to stop. What it has done is kept."""

    def __init__(self, frames: int) -> None:
        super().__init__(
            f"stopped after {frames} frames, which are kept; the same command goes on from there"
        )


class Warm:
    """Loads what sees, and keeps it for the next job that has the same settings."""

    def __init__(self) -> None:
        self._kept: Perception | None = None

    def __call__(self, settings: Settings) -> Perception:
        if self._kept is None or not same_sections(self._kept.settings, settings):
            self._kept = None  # there may not be room for both
            self._kept = Perception.load(settings)
        return self._kept


def run_job(
    job: Job,
    load: Load = Perception.load,
    progress: Progress = lambda *_: None,
    stop: threading.Event | None = None,
    again: bool = False,
    limits: PartLimits = LIMITS,
) -> Summary:
    """Replay the first recording of a job into the folder `job.out`, and write its outputs; `job.each` has one each.

    A job that was killed goes on from its last complete part; of a finished one only outputs are written that are not
    there. `again` starts over. Raises StoppedError soon after `stop` is set, ReplayError for results of another job in
    the folder, and what reading, loading and writing raise; what was done by then is kept.
    """
    store = FolderStore(Path(job.out))
    with store.held(), Schedule(job) as schedule:
        if again:
            _clear(store)
        keep_identity(store, identity_of(job, schedule.settings))
        run = _Run(schedule, store, progress, stop or threading.Event())
        if store.exists(SUMMARY):
            return run.write(Summary.from_json(store.read(SUMMARY)))
        return run.write(run.replay(load(schedule.settings), limits))


def is_finished(job: Job) -> bool:
    """Whether there is nothing left to do in the job's folder."""
    if not (Path(job.out) / SUMMARY).exists():
        return False
    return set(job.outputs) <= set(Summary.from_json(FolderStore(Path(job.out)).read(SUMMARY)).outputs)


def compare_job(job: Job) -> Comparison:
    """The masks in a job's folder beside those that the live node found."""
    with Schedule(job) as schedule:
        return compare(Parts(FolderStore(Path(job.out))).masks(), schedule.recorded_masks())


@dataclass(frozen=True, slots=True)
class _Run:
    schedule: Schedule
    store: FolderStore
    progress: Progress
    stop: threading.Event

    def replay(self, perception: Perception, limits: PartLimits) -> Summary:
        """All that is not yet in parts."""
        self._check_weights(perception)
        player = Player(perception)
        work = Work(Parts(self.store), player, limits)
        resumed_from, before = work.frames, work.standing.actions
        with Ahead(islice(self.schedule.actions(), before, None)) as ahead:
            self._work_through(ahead, player, work)
        job, schedule, stepped = self.schedule.job, self.schedule, max(work.frames - resumed_from, 1)
        return of_tally(
            work.tally,
            bag=job.bags[0],
            mode=job.mode,
            strategy=job.strategy,
            model=perception.model.name,
            device=str(perception.model.device),
            resumed_from=resumed_from,
            lost=schedule.lost,
            notes=schedule.notes.lines,
            stages_ms={name: round(us / stepped / 1e3, 3) for name, us in player.stages_us.items()},
        )

    def write(self, summary: Summary) -> Summary:
        """The outputs that are not there yet, then the summary."""
        parts, job = Parts(self.store), self.schedule.job
        missing = [kind for kind in job.outputs if kind not in summary.outputs]
        total = sum(summary.cameras.values())

        def told(kind: str, done: int) -> None:
            self.progress(f"writing {kind}", done, total)
            if self.stop.is_set():
                raise StoppedError(summary.frames)

        if missing:
            write_outputs(self.store.folder, missing, parts.masks, self.schedule.frames, told)
        if missing or not self.store.exists(SUMMARY):
            summary = replace(summary, outputs=[*summary.outputs, *missing])
            self.store.write(SUMMARY, summary.to_json().encode())
        parts.finish()
        return summary

    def _work_through(self, ahead: Ahead, player: Player, work: Work) -> None:
        total = self.schedule.count()
        for outcome in forward(_keeping(ahead, work), player):
            work.take(outcome)
            self.progress("replaying", work.frames, total)
            if self.stop.is_set():
                work.end_part()
                raise StoppedError(work.frames)
        work.end_part()

    def _check_weights(self, perception: Perception) -> None:
        """Raises ReplayError for other weights than those of the parts that are there, or of the recorded node."""
        schedule, digests = self.schedule, digests_of(perception.describe())
        keep_identity(self.store, digests)
        recorded = schedule.description
        if schedule.job.mode != "as-recorded" or recorded is None:
            return
        for name, found in digests.items():
            if found != recorded.get(name, found):
                schedule.notes.gap(
                    f"{name}: expected the weights that were recorded, {recorded[name]:.12}…, found {found:.12}…"
                )
        for line in differences(schedule.settings, perception.describe(), recorded):
            schedule.notes.tell(line)


def _keeping(actions: Iterable[Action], work: Work) -> Iterator[Action]:
    """The actions; where reading them fails, what was done with those before is put on disk first."""
    try:
        yield from actions
    except Exception:
        work.end_part()
        raise


def _clear(store: FolderStore) -> None:
    """Forget all results, what says that they are complete first."""
    store.delete(SUMMARY)
    store.delete(IDENTITY)
    Parts(store).clear()
