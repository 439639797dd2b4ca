"""Runs a job: steps its frames, writes shards as it goes, then the outputs, and the summary as completion marker.

A job that was killed at any moment continues from its last complete shard. Threads decode frames ahead of the model,
and on a GPU one encodes the next frame while this one's objects are tracked.
`compare_job` compares the replayed masks with recorded ones, bit for bit.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import islice
from typing import NamedTuple, TypeVar

import numpy as np

from ..errors import ReplayError, WireError
from ..perception.encode_ahead import EncodeAhead, WantedFrame
from ..perception.perception import Perception
from ..resources import Closeable
from ..schema.fields import convert
from ..schema.marks import Mark
from ..settings import Settings
from ..tracking.names import NameCalibration, load_name_calibration
from ..types import Instance, Mask, MaskFrame
from ..wire import decode_image, encode_image
from . import completion, second_pass
from .event_log import Action, Step
from .job import (
    SECTIONS,
    Job,
    Sections,
    calibrations_for,
    describe_differences,
    have_equal_sections,
    recorded_name_calibration,
    settings_for,
)
from .planning import check_request, skip_unknown_names
from .player import Player
from .redo import RedoPlan, plan_redo
from .redone import name_newest, write_layers
from .schedule import Schedule, open_schedule
from .shards import LIMITS, SECOND_PASS, ShardLimits, Shards, ShardWriter
from .store import ReplayCounts, Summary, open_store

T = TypeVar("T")
Load = Callable[[Settings], Perception]
THREADS = 2
"""Number of threads that decode frames ahead of the model."""
MAX_FRAMES = 32
"""Number of frames that are decoded ahead, at most."""
MAX_BYTES = 256 << 20
"""Size of the pixels that are decoded ahead, at most."""


def run_job(
    job: Job,
    load: Load = Perception.load,
    progress: completion.ProgressCallback = lambda *_: None,
    stop: threading.Event | None = None,
    again: bool = False,
    limits: ShardLimits = LIMITS,
) -> Summary:
    """Replay a job's first recording into the folder `job.out`, and write its outputs.

    `Job.split_by_recording` handles several recordings. A killed job continues from its last complete shard. Of a
    finished job, only missing outputs are written. `again` starts over. After `stop` is set, the outputs of what is
    done are written, and StoppedError is raised. Raises ReplayError if the folder has results of another job, and the
    exceptions of reading, loading and writing. Results so far are kept.
    """
    with completion.job_session(job, progress, stop, again, check=check_request) as session:
        summary = session.read_finished()
        # the model is loaded only if there are frames to step
        if summary is None:
            perception = _load(load, session.schedule)
            summary = _JobRun(session, perception, limits).replay()
        elif completion.list_missing_outputs(job, summary, name_newest(session.store)):
            # the run had skipped them: labels are numbered as they were then
            skip_unknown_names(session.schedule)
        return session.finish(summary)


def _load(load: Load, schedule: Schedule) -> Perception:
    """Load what a schedule's job steps with. Calibrations are those of the job, else of the recorded node."""
    perception = load(schedule.settings)
    perception.calibrations = calibrations_for(schedule.job, schedule.description)
    detector = None if perception.detector is None else perception.detector.name
    perception.name_calibration = name_calibration_for(schedule, detector)
    return perception


# not in job.py, which knows what is wrong with a job before torch is imported
def name_calibration_for(schedule: Schedule, detector: str | None) -> NameCalibration:
    """Return how sure names of a detector are: by the file of the job's settings, else as on the recorded node.

    What the recorded node knew of another detector does not count. Raises ReplayError and ModelError.
    """
    own = schedule.settings.detector.name_calibration
    recorded = recorded_name_calibration(schedule.job, schedule.description)
    if own is None and recorded is not None:
        try:
            found = convert(recorded, NameCalibration, "the recorded name_calibration")
        except WireError as error:
            raise ReplayError(str(error)) from error
        if detector is None or found.suits(detector):
            return found
    return load_name_calibration(own)


class Redone(NamedTuple):
    """What a redo did, in one line, and the summary of the results after it."""

    line: str
    summary: Summary


def _choose_settings(schedule: Schedule, settings: Sections) -> Sections:
    """Let a schedule have these settings, too, and return those of them that are others than its job's."""
    before = schedule.settings
    job = schedule.job
    chosen = {name: {**job.settings.get(name, {}), **settings.get(name, {})} for name in SECTIONS}
    schedule.settings = settings_for(replace(job, settings=chosen), schedule.description)
    sections = {name: getattr(schedule.settings, name).model_dump(mode="json") for name in settings}
    return {
        name: {field: value for field, value in section.items() if value != old[field]}
        for name, section in sections.items()
        if (old := getattr(before, name).model_dump(mode="json")) != section
    }


def redo_job(
    recording: str,
    out: str,
    marks: Sequence[Mark],
    load: Load = Perception.load,
    progress: completion.ProgressCallback = lambda *_: None,
    stop: threading.Event | None = None,
    limits: ShardLimits = LIMITS,
    outputs: Sequence[str] = (),
    settings: Sections | None = None,
) -> Redone:
    """Carry out the marks in the finished results of the folder `out`, and write its outputs anew, with `outputs`.

    Only what `redo.plan_redo` names changes. It is made with the job's settings, but for `settings`, by section and
    field: a few stretches may be tracked with more pixels, or other weights, than a whole recording. Until all of it is
    made, the results stay as they were; a killed redo of the same marks goes on. After `stop` is set, StoppedError is
    raised. Raises ReplayError for results that are not finished, of another recording or other weights, for marks that
    do not fit them, and if an edit is refused.
    """
    with completion.redo_session(recording, out, progress, stop) as session:
        summary = session.read_finished()
        assert summary is not None  # the session has read it
        session.schedule.job = replace(session.schedule.job, outputs=(*summary.outputs, *outputs))
        others = _choose_settings(session.schedule, settings or {})
        plan = plan_redo(session.store, marks, session.schedule.episode_starts, others)
        line = "redo: nothing is new among the marks"
        if plan is not None:
            line = plan.describe()
            if plan.edits:
                perception = _load(load, session.schedule)
                _JobRun(session, perception, limits).redo(plan)
            write_layers(session.store, plan.layers)
        return Redone(line, session.finish(summary))


class PerceptionCache:
    """Loads a Perception, and keeps it for the next job with the same settings."""

    def __init__(self) -> None:
        self._perception: Perception | None = None

    def __call__(self, settings: Settings) -> Perception:
        if self._perception is None or not have_equal_sections(self._perception.settings, settings):
            self._perception = None  # memory may not hold two at once
            self._perception = Perception.load(settings)
        return self._perception


def read_finished_summary(job: Job) -> Summary | None:
    """Return the summary of a finished job with all its outputs, None for another one."""
    store = open_store(job.out)
    summary = completion.read_complete_summary(store)
    if summary is None or completion.list_missing_outputs(job, summary, name_newest(store)):
        return None
    return summary


def clear_job(job: Job) -> None:
    """Delete all results of a job, except its outputs, which later outputs replace."""
    # another process may be writing them
    store = open_store(job.out)
    with store.held():
        completion.clear_results(store)


def compare_job(job: Job) -> MaskComparison:
    """Compare the masks in a job's folder with the live node's."""
    with open_schedule(job) as schedule:
        return compare_masks(Shards(open_store(job.out)).masks(), schedule.recorded_masks())


@dataclass(frozen=True, slots=True)
class _JobRun:
    """Both passes of a job."""

    session: completion.JobSession
    perception: Perception
    limits: ShardLimits

    def replay(self) -> Summary:
        """Play all actions that are not in shards yet, up to a stop."""
        self._check_weights()
        schedule = self.session.schedule
        model = self.perception.model

        # the writer stands behind the last complete shard, and has restored the player's state from it
        player = Player(self.perception, joins_recorded=schedule.job.mode == "as-recorded")
        writer = ShardWriter(Shards(self.session.store), player, self.limits)
        resumed_from = writer.frames
        second_from = 0
        unfound = dict[str, str]()
        notes = list[str]()
        is_complete = True
        # a stop keeps what is done: the summary says that it is not complete
        try:
            self._play("replaying", schedule.actions(), schedule.count_steps(), player, writer)
            unfound = writer.totals.describe_unfound(self.perception.status())
            second_from, notes = self._run_second_pass(writer.totals)
        except completion.StoppedError:
            is_complete = False

        # times of stages are of the frames of this run alone
        stepped = max(writer.frames - resumed_from, 1)
        return Summary.from_counts(
            writer.totals,
            schedule.job,
            model=model.name,
            device=str(model.device),
            resumed_from=resumed_from + second_from,
            lost=schedule.lost,
            notes=[*schedule.remarks, *player.notes, *writer.totals.describe_missing_3d(), *notes],
            unfound=unfound,
            complete=is_complete,
            stages_ms={name: round(us / stepped / 1e3, 3) for name, us in player.stages_us.items()},
        )

    def _run_second_pass(self, first: ReplayCounts) -> tuple[int, list[str]]:
        """Run the strategy's second pass if it has spans to track again, and add its time to the first pass's.

        Return the number of frames that earlier runs of it had done, and notes for the summary.
        """
        session = self.session
        schedule = self.session.schedule
        masks = Shards(session.store).masks
        detector = schedule.settings.detector
        if schedule.job.strategy != "bidirectional":
            return 0, []
        min_score = detector.min_track_score
        spans = list(second_pass.find_bidirectional_spans(masks(), min_score, schedule.episode_starts))
        if not spans:
            return 0, []

        with second_pass.ReverseFrameBuffer(session.store.folder) as buffer:
            # most recordings can only be read forward: put the frames on disk first
            frames = second_pass.index_frames(masks(), schedule.frames())
            for count in second_pass.buffer_frames(buffer, spans, frames):
                session.progress("reading", count, None)
                if session.stop.is_set():
                    raise completion.StoppedError(first.counts["frames"])

            # a second player assigns its own ids, which `restore` maps back to the first pass's
            player = Player(self.perception)
            writer = ShardWriter(Shards(session.store, SECOND_PASS), player, self.limits)
            resumed_from = writer.frames
            actions = second_pass.schedule_backward(buffer, spans, bool(detector.prompts))
            restore = partial(second_pass.restore_ids, labels=first.objects)
            self._play("tracking backward", actions, len(buffer), player, writer, restore)
        first.work_s += writer.totals.work_s
        return resumed_from, _make_notes(spans, writer.totals)

    def redo(self, plan: RedoPlan) -> None:
        """Make the masks of a plan's new layer. Raises ReplayError if an edit is refused."""
        session = self.session
        assert plan.layer is not None
        if "name" not in plan.layer.settings.get("model", {}):
            self._check_weights()
        player = Player(self.perception)
        writer = ShardWriter(Shards(session.store, plan.layer.folder), player, self.limits)
        masks = Shards(session.store).masks()
        actions = plan.actions(session.schedule, second_pass.index_frames(masks, session.schedule.frames()))
        self._play("redoing", actions, plan.count_steps(), player, writer, plan.restore)
        if player.counts["refused"]:
            Shards(session.store, plan.layer.folder).clear()
            raise ReplayError(
                f"redo: expected every mark to be possible, found {player.counts['refused']} refused: "
                f"{'; '.join(player.notes)}; the results are as they were"
            )
        Shards(session.store, plan.layer.folder).finish()

    def _play(
        self,
        task: str,
        actions: Iterable[Action],
        total: int | None,
        player: Player,
        writer: ShardWriter,
        finish: Callable[[MaskFrame], MaskFrame] = lambda masks: masks,
    ) -> None:
        """Play the actions of one pass, on about `total` frames, from where the writer stands."""
        model = self.perception.model
        ahead = EncodeAhead(model, self.perception.settings.tracker.max_frame_pixels)
        needed = ahead.count_needed(has_batches=self.session.schedule.job.mode == "as-recorded")
        with Prefetcher(islice(actions, writer.cursor.actions, None)) as prefetched, ahead:
            for action, later in _flush_on_error(look_ahead(prefetched, needed), writer):
                encoding = ahead.take(_list_wanted(action, later)) if isinstance(action, Step) else None
                # an edit has no masks, and is counted as an action all the same
                masks = player.play(action, encoding)
                writer.add(masks and finish(masks))
                self.session.progress(task, writer.frames, total)
                if self.session.stop.is_set():
                    writer.flush()
                    raise completion.StoppedError(writer.frames)
        writer.flush()

    def _check_weights(self) -> None:
        """Raise ReplayError if the existing shards or the recorded node had other weights."""
        schedule = self.session.schedule
        description = self.perception.describe()
        digests = completion.read_digests(description)
        completion.check_identity(self.session.store, digests)

        # other weights give other masks, so a recording cannot be repeated with them
        recorded = schedule.description
        if schedule.job.mode != "as-recorded" or recorded is None:
            return
        for name, digest in digests.items():
            if digest != recorded.get(name, digest):
                schedule.notes.add_gap(
                    f"{name}: expected the weights that were recorded, {recorded[name]:.12}…, found {digest:.12}…"
                )
        for line in describe_differences(description, recorded):
            schedule.notes.add(line)


def look_ahead(actions: Iterable[Action], steps: int) -> Iterator[tuple[Action, list[Step]]]:
    """Yield each action with up to `steps` steps that come after it.

    An exception of the source is raised after all actions before it.
    """
    source = iter(actions)
    ahead = deque[Action]()
    known = 0  # steps among them
    end: BaseException | None = None
    while True:
        while end is None and (not ahead or 0 < known <= steps) and len(ahead) < MAX_FRAMES:
            try:
                ahead.append(next(source))
                known += isinstance(ahead[-1], Step)
            except Exception as error:  # also the StopIteration of the end
                end = error
        if not ahead:
            break
        action = ahead.popleft()
        known -= isinstance(action, Step)
        later = (one for one in ahead if isinstance(one, Step))
        yield action, list(islice(later, steps))
    if end is not None and not isinstance(end, StopIteration):
        raise end


def _list_wanted(step: Step, later: Sequence[Step]) -> list[WantedFrame]:
    return [WantedFrame(one.frame, one.decisions.batch) for one in (step, *later)]


def _flush_on_error(actions: Iterable[T], writer: ShardWriter) -> Iterator[T]:
    """Yield the actions. If reading them fails, write the outcomes of earlier ones to disk first."""
    try:
        yield from actions
    except Exception:
        writer.flush()
        raise


def _make_notes(spans: Sequence[second_pass.Span], second: ReplayCounts) -> list[str]:
    refused = second.counts["refused"]
    notes = [
        f"{len(spans) - refused} spans of objects tracked again, backward over {second.counts['frames']} frames"
    ]
    if refused:
        notes.append(
            f"{refused} more spans were not tracked: too many objects at once; raise tracker.max_objects"
        )
    return notes


class Prefetcher(Closeable):
    """Iterates over actions in their order, with the colour of their frames decoded to bgr8. A context manager.

    One thread reads `actions`. `threads` others decode, up to `max_frames` frames or `max_bytes` of pixels ahead (a
    single frame may be larger). A frame that cannot be decoded is passed on unchanged. An exception of the source is
    raised after all actions before it. The iteration happens once.
    """

    def __init__(
        self,
        actions: Iterable[Action],
        threads: int = THREADS,
        max_frames: int = MAX_FRAMES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._actions = iter(actions)
        self._max_frames = max_frames
        self._max_bytes = max_bytes
        self._reader = ThreadPoolExecutor(1, "read")
        self._decoders = ThreadPoolExecutor(threads, "decode")

    def __iter__(self) -> Iterator[Action]:
        ahead = deque([self._reader.submit(self._read)])
        largest = 1
        while (decoding := ahead.popleft().result()) is not None:
            action = decoding.result()
            # look as far ahead as memory allows for the largest frame so far
            if isinstance(action, Step):
                largest = max(largest, action.frame.width * action.frame.height * 3)
            while len(ahead) < max(1, min(self._max_frames, self._max_bytes // largest)):
                ahead.append(self._reader.submit(self._read))
            yield action

    def close(self) -> None:
        """Stop reading and decoding. Idempotent."""
        self._reader.shutdown(cancel_futures=True)
        self._decoders.shutdown(cancel_futures=True)

    def _read(self) -> Future[Action] | None:
        """Read one action, and return its decoding; None at the end."""
        action = next(self._actions, None)
        if action is None:
            return None
        return self._decoders.submit(_decode_colour, action)


def _decode_colour(action: Action) -> Action:
    """Return a step with its colour as bgr8. A step whose frame cannot be decoded is returned as it is, to fail."""
    if not isinstance(action, Step):
        return action
    # the step raises the error of a frame that cannot be decoded, in its turn
    try:
        colour = encode_image(decode_image(action.frame), "bgr8")
        return action._replace(frame=replace(action.frame, encoding="bgr8", colour=colour))
    except Exception:
        return action


@dataclass(frozen=True, slots=True)
class MaskComparison:
    """Number of frames with recorded masks, number of these with identical replayed masks, and first difference."""

    frames: int
    identical: int
    first: str | None

    @property
    def is_identical(self) -> bool:
        return self.first is None

    def __str__(self) -> str:
        if self.first is None:
            return f"identical: the masks of all {self.frames} recorded frames, bit for bit"
        return f"different: the masks of {self.frames - self.identical} of {self.frames} recorded frames; {self.first}"


def compare_masks(replayed: Iterable[MaskFrame], recorded: Iterable[MaskFrame]) -> MaskComparison:
    """Compare replayed masks with recorded ones, both in the order of the steps.

    All fields must be equal, except the times of the stages and of publishing, and the node's session.
    """
    remaining = iter(replayed)
    count = 0
    identical = 0
    first = None
    masks = next(remaining, None)
    for expected in recorded:
        count += 1
        # a frame that was not replayed leaves the replayed masks for the next recorded ones
        if masks is None or masks.key != expected.key:
            first = first or _describe(expected, "was not replayed")
            continue
        difference = _find_difference(_without_session(masks), _without_session(expected))
        if difference is None:
            identical += 1
        elif first is None:
            first = _describe(expected, difference)
        masks = next(remaining, None)
    if masks is not None:
        first = first or _describe(masks, "was not recorded")
    return MaskComparison(count, identical, first)


def _describe(masks: MaskFrame, difference: str) -> str:
    return f"camera {masks.camera}, frame {masks.seq} {difference}"


def _without_session(masks: MaskFrame) -> MaskFrame:
    return replace(masks, stages_us={}, published_ns=0, node=None, epoch=None)


def _find_difference(masks: MaskFrame, expected: MaskFrame) -> str | None:
    """Describe the first difference of a frame's masks, None if they are equal."""
    ids = [instance.id for instance in masks.instances]
    recorded = [instance.id for instance in expected.instances]
    if ids != recorded:
        return f"had the objects {recorded}, has {ids}"

    # the frame's own fields, then those of each object
    difference = _find_different_field(masks, expected, "")
    for now, then in zip(masks.instances, expected.instances, strict=True):
        if difference is None:
            difference = _find_different_field(now, then, f" of object {now.id}")
    return difference


def _find_different_field(now: MaskFrame | Instance, then: MaskFrame | Instance, whose: str) -> str | None:
    for field in fields(now):
        here = getattr(now, field.name)
        there = getattr(then, field.name)
        # masks may be equal with other boxes
        if isinstance(here, Mask) and isinstance(there, Mask):
            if pixels := np.count_nonzero(here.full() != there.full()):
                return f"has another {field.name}{whose}: {pixels} pixels differ"
        elif field.compare and field.name != "instances" and here != there:
            return f"had {field.name} {there!r}{whose}, has {here!r}"
    return None
