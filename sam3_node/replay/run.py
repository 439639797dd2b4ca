"""A job from beginning to end: parts as they come, then the outputs, then the summary, whose presence says that all is
there. What was killed at any moment is gone on with from its last complete part."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

from ..perception.perception import Perception
from ..settings import Settings
from ..types import MaskFrame
from .actions import Action
from .compare import Comparison, compare
from .completion import SUMMARY, Finish, Progress, StoppedError, clear, digests_of, identity_of, keep_identity
from .job import Job, Strategy, differences, same_sections
from .player import Outcome, Player, forward
from .prefetch import Prefetcher
from .schedule import Schedule
from .second_pass import (
    ReverseFrameBuffer,
    Span,
    actions,
    backward,
    bidirectional_spans,
    multi_shot_spans,
    placed_frames,
    put_aside,
)
from .shards import SECOND, ShardLimits, Shards, ShardWriter
from .summary import Summary, Tally, of_tally
from .url_store import local_bag, open_store

Load = Callable[[Settings], Perception]
LIMITS = ShardLimits()
AGAIN: dict[Strategy, Callable[[Iterable[MaskFrame], float], Iterator[Span]]] = {
    "bidirectional": bidirectional_spans,
    "multi-shot": multi_shot_spans,
}
"""What a strategy tracks again, in a second pass: of the masks of the first, with `detector.min_track_score`."""


class PerceptionCache:
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
    limits: ShardLimits = LIMITS,
) -> Summary:
    """Replay the first recording of a job into the folder `job.out`, and write its outputs; `job.each` has one each.

    A job that was killed goes on from its last complete part; of a finished one only outputs are written that are not
    there. `again` starts over. Raises StoppedError soon after `stop` is set, ReplayError for results of another job in
    the folder, and what reading, loading and writing raise; what was done by then is kept.
    """
    store = open_store(job.out)
    with store.held(), local_bag(job.bags[0]) as path, Schedule(job, path) as schedule:
        if again:
            clear(store)
        keep_identity(store, identity_of(job, schedule.settings, path))
        run = _Run(schedule, store, progress, stop or threading.Event())
        if store.exists(SUMMARY):
            return run.write(Summary.from_json(store.read(SUMMARY)))
        return run.write(run.replay(load(schedule.settings), limits))


def is_finished(job: Job) -> bool:
    """Whether there is nothing left to do in the job's folder."""
    return finished(job) is not None


def finished(job: Job) -> Summary | None:
    """What came of a job that is finished."""
    store = open_store(job.out)
    summary = Summary.from_json(store.read(SUMMARY)) if store.exists(SUMMARY) else None
    return summary if summary and set(job.outputs) <= set(summary.outputs) else None


def clear_job(job: Job) -> None:
    """Forget all that was done of a job; outputs stay until others take their place."""
    store = open_store(job.out)
    with store.held():
        clear(store)


def compare_job(job: Job) -> Comparison:
    """The masks in a job's folder beside those that the live node found."""
    with local_bag(job.bags[0]) as path, Schedule(job, path) as schedule:
        return compare(Shards(open_store(job.out)).masks(), schedule.recorded_masks())


class _Pass(NamedTuple):
    """One time through the recording: actions, of about `total` frames, carried out by `play`, after `before` frames of
    an earlier one."""

    name: str
    actions: Iterable[Action]
    total: int | None
    player: Player
    work: ShardWriter
    play: Callable[[Iterable[Action], Player], Iterator[Outcome]] = forward
    before: int = 0


class _Again(NamedTuple):
    """Of a second pass: after how many of its frames it went on, and what else is to be known."""

    resumed_from: int
    notes: list[str]


class _Run(Finish):
    """What is done before the end."""

    def replay(self, perception: Perception, limits: ShardLimits) -> Summary:
        """All that is not yet in parts."""
        self._check_weights(perception)
        player = Player(perception)
        work = ShardWriter(Shards(self.store), player, limits)
        resumed_from, schedule, job = work.frames, self.schedule, self.schedule.job
        self._work_through(_Pass("replaying", schedule.actions(), schedule.count(), player, work))
        stepped = max(work.frames - resumed_from, 1)
        again = self._go_back(perception, limits, work.tally)
        return of_tally(
            work.tally,
            bag=job.bags[0],
            mode=job.mode,
            strategy=job.strategy,
            model=perception.model.name,
            device=str(perception.model.device),
            resumed_from=resumed_from + again.resumed_from,
            lost=schedule.lost,
            notes=[*schedule.notes.lines, *again.notes],
            stages_ms={name: round(us / stepped / 1e3, 3) for name, us in player.stages_us.items()},
        )

    def _go_back(self, perception: Perception, limits: ShardLimits, first: Tally) -> _Again:
        """The strategy's second pass, where it tracks anything again; its time is added to that of the first."""
        masks, doubt = Shards(self.store).masks, self.schedule.settings.detector.min_track_score
        find = AGAIN.get(self.schedule.job.strategy)
        spans = list(find(masks(), doubt)) if find else []
        if not spans:
            return _Again(0, [])
        with ReverseFrameBuffer(self.store.folder) as spool:
            for count in put_aside(spool, spans, placed_frames(masks(), self.schedule.frames())):
                self.progress("reading", count, None)
                if self.stop.is_set():
                    raise StoppedError(first.counts["frames"])
            player = Player(perception)
            work = ShardWriter(Shards(self.store, SECOND), player, limits)
            resumed_from = work.frames
            searching = bool(self.schedule.settings.detector.prompts)
            steps = actions(spool, spans, searching)
            play = partial(backward, labels=first.objects)
            self._work_through(
                _Pass("going back", steps, len(spool), player, work, play, first.counts["frames"])
            )
        first.work_s += work.tally.work_s
        return _Again(resumed_from, _notes(spans, work.tally))

    def _work_through(self, one: _Pass) -> None:
        work = one.work
        with Prefetcher(islice(one.actions, work.standing.actions, None)) as ahead:
            for outcome in one.play(_keeping(ahead, work), one.player):
                work.take(outcome)
                self.progress(one.name, work.frames, one.total)
                if self.stop.is_set():
                    work.end_part()
                    raise StoppedError(one.before + work.frames)
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


def _keeping(actions: Iterable[Action], work: ShardWriter) -> Iterator[Action]:
    """The actions; where reading them fails, what was done with those before is put on disk first."""
    try:
        yield from actions
    except Exception:
        work.end_part()
        raise


def _notes(spans: Sequence[Span], second: Tally) -> list[str]:
    refused = second.counts["refused"]
    notes = [
        f"{len(spans) - refused} spans of objects tracked again, backward over {second.counts['frames']} frames"
    ]
    if refused:
        notes.append(f"{refused} more were not: no room for all objects at once; raise tracker.max_objects")
    return notes
