"""Plans the replay of one recording as tasks, and runs them in a worker process that keeps its model loaded.

A plan is a list of steps, each with tasks that may run at the same time. A task replays a recording or a segment,
counts frames, deletes results, or stitches the results of segments.
"""

import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from ...errors import ReplayError, Sam3NodeError
from ...types import MaskFrame
from ..completion import SUMMARY, JobSession, ProgressCallback, StoppedError, job_session
from ..job import Job
from ..planning import skip_unknown_names
from ..redone import read_results
from ..run import PerceptionCache, clear_job, read_finished_summary, run_job
from ..schedule import open_schedule
from ..shards import LIMITS, Segment, ShardLimits, cut_segments, stitch
from ..store import WORK, HeldError, ReplayCounts, Summary, open_store

log = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 30.0
"""Time that a worker waits until an abandoned worker releases its results."""
LOCK_POLL_S = 0.5
"""Time between two tries meanwhile."""


class Split(NamedTuple):
    """Division of a recording among workers."""

    by_camera: bool = False
    """Replay each camera that has prompts as its own job, in a folder within the recording's."""
    frames: int | None = None
    """Length of segments in frames of all cameras; None for whole recordings."""
    overlap: int = 0
    """Number of frames that a segment shares with the previous one."""

    def check(self, job: Job) -> None:
        """Raise ReplayError if the job cannot be divided like this."""
        # a segment must have frames of its own
        if self.frames is not None and not 0 <= self.overlap < self.frames:
            raise ReplayError(
                f"expected an overlap of 0 to {self.frames - 1} frames, less than a segment has, found {self.overlap}"
            )
        if (self.by_camera or self.frames) and job.mode == "as-recorded":
            raise ReplayError("as-recorded replays a recording as a whole: use --every to divide it")
        # objects must begin in each segment
        if self.frames and (job.objects or job.everything or not job.names):
            raise ReplayError(
                "segments need names to detect (--prompt), which are detected again in each segment; objects marked on "
                "a frame, and recorded edits, exist in one segment only"
            )
        # what is asked for must be known for each camera
        if self.by_camera and not (job.names or job.objects or job.everything):
            raise ReplayError(
                "recorded edits may apply to all cameras at once: to divide a recording by camera, give names to "
                "detect (--prompt), or objects that name their camera"
            )
        if self.by_camera and not all(marked.camera for marked in job.objects):
            raise ReplayError(
                "to divide a recording by camera, expected objects that name their camera, found one without"
            )


WHOLE = Split()


class ProbeResult(NamedTuple):
    """The cameras of a job, and the number of frames of all cameras together."""

    cameras: tuple[str, ...]
    frames: int
    topics: Mapping[str, tuple[str, ...]] = {}
    """By camera: the topics of a job that reads this one alone."""


@dataclass(frozen=True, slots=True)
class Task:
    """A task for one worker.

    `replay` returns a Summary, `probe` a ProbeResult. `clear` deletes results, and returns None. `join` stitches
    `segments` to the job's results, and returns a Summary.
    """

    kind: Literal["replay", "probe", "clear", "join"]
    job: Job
    segments: tuple[Job, ...] = ()
    split: Split = WHOLE
    limits: ShardLimits = LIMITS


PlanStep = list[Task]
"""Tasks that may run at the same time."""
StepValues = list[Any]
"""The values of a step's tasks, in their order."""
PlanSteps = Generator[PlanStep, StepValues, list[Summary]]
"""A plan: it yields steps, receives their values, and returns the summaries."""


@dataclass(frozen=True, slots=True)
class JobPlan:
    """A job, and the options that its steps depend on."""

    job: Job
    split: Split = WHOLE
    again: bool = False
    limits: ShardLimits = LIMITS

    def steps(self) -> PlanSteps:
        """Yield the steps, and receive the values of each step's tasks in their order. Return the summaries.

        A task may run several times in part: it continues where it stopped.
        """
        jobs = [self.job]
        if self.split.by_camera:
            jobs = yield from self._split_by_camera()
        if self.split.frames is None:
            return (yield from self._replay(jobs))

        # cut each job into segments, which needs its number of frames
        sizes = yield [Task("probe", job) for job in jobs]
        divided = [self._cut(job, size) for job, size in zip(jobs, sizes, strict=True)]
        # joined results are deleted before their segments
        if self.again:
            yield [Task("clear", job) for job in jobs]

        # replay the segments of all jobs at once, then join those of each job
        segments = [segment for parts in divided for segment in parts]
        yield from self._replay(segments)
        return (
            yield [
                Task("join", job, tuple(parts), self.split) for job, parts in zip(jobs, divided, strict=True)
            ]
        )

    def _split_by_camera(self) -> Generator[PlanStep, StepValues, list[Job]]:
        (size,) = yield [Task("probe", self.job)]
        jobs = [
            _select_camera(self.job, camera, size.topics.get(camera, (camera,))) for camera in size.cameras
        ]
        prompted = [job for job in jobs if job.names or job.objects or job.everything]
        # without any, the whole job notes the objects that are on no camera
        return prompted or [self.job]

    def _replay(self, jobs: list[Job]) -> PlanSteps:
        if self.again:
            yield [Task("clear", job) for job in jobs]
        return (yield [Task("replay", job, limits=self.limits) for job in jobs])

    def _cut(self, job: Job, size: ProbeResult) -> list[Job]:
        assert self.split.frames is not None
        segments = cut_segments(size.frames, self.split.frames, self.split.overlap) or [Segment(0, 0)]
        return [
            _select_frames(job, Segment(job.start + segment.start, job.start + segment.stop))
            for segment in segments
        ]


def _select_camera(job: Job, camera: str, topics: tuple[str, ...]) -> Job:
    # each camera has results of its own, in a folder below the recording's
    objects = tuple(marked for marked in job.objects if marked.camera == camera)
    return replace(job, topics=topics, objects=objects, out=f"{job.out.rstrip('/')}/{camera}")


def _select_frames(job: Job, frames: Segment) -> Job:
    # segments are no results: they lie in the folder of work, and write no outputs
    folder = f"{job.out.rstrip('/')}/{WORK}/segments/{frames.start:09}-{frames.stop:09}"
    return replace(job, start=frames.start, stop=frames.stop, out=folder, outputs=())


class TaskResult(NamedTuple):
    """The value of a task, or the error that it ended with."""

    value: Any = None
    error: str | None = None
    stopped: bool = False
    """True if the task was stopped on request."""
    was_finished: bool = False
    """True if an earlier run had finished the task."""
    interrupted: bool = False
    """True if the worker got SIGTERM, as on a spot machine that is taken away: another worker continues the task."""


class TaskProgress(NamedTuple):
    """The current activity of a task, the number of its completed frames, and their total (None if unknown)."""

    what: str = ""
    done: int = 0
    total: int | None = None


NOT_STARTED = TaskProgress()
"""The progress of a task before it begins."""


class Worker:
    """Runs tasks for a driver whose working directory is `folder`, and uses that directory if it exists here.

    Other threads may ask for the progress meanwhile, and stop the worker. After SIGTERM the worker writes what it has
    done, and hands the task back. Ray's own handler would let the task run on until the machine is gone.
    """

    def __init__(self, folder: str) -> None:
        # relative paths of jobs refer to the driver's folder
        if os.path.isdir(folder):
            os.chdir(folder)
        self._load = PerceptionCache()
        self._stop = threading.Event()
        self._is_interrupted = False
        self._progress = NOT_STARTED
        if threading.current_thread() is threading.main_thread():  # as Ray creates actors
            signal.signal(signal.SIGTERM, self._interrupt)

    def pid(self) -> int:
        """Return the id of this process."""
        return os.getpid()

    def progress(self) -> TaskProgress:
        """Return the progress of the current task."""
        return self._progress

    def stop(self) -> None:
        """Stop the current task soon, and each later one. Results so far are kept."""
        self._stop.set()

    def _interrupt(self, *_: object) -> None:
        self._is_interrupted = True
        self._stop.set()

    def run(self, task: Task) -> TaskResult:
        """Run a task. Return errors instead of raising them."""
        self._progress = NOT_STARTED
        try:
            # a finished recording needs no model
            if task.kind == "replay" and (summary := read_finished_summary(task.job)):
                return TaskResult(summary, was_finished=True)
            return TaskResult(_retry_while_held(lambda: self._run(task)))
        except StoppedError as stopped:
            return TaskResult(error=str(stopped), stopped=True, interrupted=self._is_interrupted)
        except Sam3NodeError as error:
            return TaskResult(error=str(error))
        except Exception as error:  # one recording must not end the others
            log.exception("%s", task.job.bags[0])
            return TaskResult(error=f"{type(error).__name__}: {error}")

    def _run(self, task: Task) -> Any:
        job = task.job
        if task.kind == "probe":
            return probe_recording(job, self._set_progress, self._stop)
        if task.kind == "clear":
            return clear_job(job)
        if task.kind == "join":
            return join_segments(job, task.segments, task.split, self._set_progress, self._stop)
        return run_job(job, self._load, self._set_progress, self._stop, limits=task.limits)

    def _set_progress(self, what: str, done: int, total: int | None) -> None:
        self._progress = TaskProgress(what, done, total)


def _retry_while_held(action: Callable[[], Any]) -> Any:
    """Carry out an action, again while another process holds the results. An abandoned worker may end late."""
    # a worker that was ended may hold its lock until its process is gone
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            return action()
        except HeldError:
            if time.monotonic() > deadline:
                raise
            time.sleep(LOCK_POLL_S)


def probe_recording(job: Job, progress: ProgressCallback, stop: threading.Event) -> ProbeResult:
    """Return the cameras and the number of frames of a job. Read the whole recording if its index does not tell."""
    with open_schedule(job) as schedule:
        count = schedule.count_frames()
        if count is None:
            count = 0
            for count, _ in enumerate(schedule.frames(), start=1):
                progress("reading", count, None)
                if stop.is_set():
                    raise StoppedError(0)
        topics = {camera: schedule.select_topics(camera) for camera in schedule.cameras}
        return ProbeResult(schedule.cameras, count, topics)


def join_segments(
    job: Job, segments: Sequence[Job], split: Split, progress: ProgressCallback, stop: threading.Event
) -> Summary:
    """Stitch the results of finished `segments`, in their order, and write the job's outputs and summary.

    Raises ReplayError if the job's folder has results of another job or of other segments.
    """
    # the division belongs to the job's identity: other segments give other masks
    division = {"frames": split.frames, "overlap": split.overlap}
    with job_session(job, progress, stop, segments=division) as session:
        # each pass stitches anew, because the masks of a recording do not fit into memory
        def masks() -> Iterator[MaskFrame]:
            parts = (read_results(open_store(segment.out)) for segment in segments)
            return stitch(parts, split.overlap)

        # the segments have skipped them
        skip_unknown_names(session.schedule)
        summary = session.read_finished() or _summarize(session, segments, masks())
        return session.write(summary, masks, is_interruptible=True)


def _summarize(session: JobSession, segments: Sequence[Job], masks: Iterator[MaskFrame]) -> Summary:
    """Build the summary of the whole job. Frames and objects are counted again, as segments share some."""
    parts = [Summary.from_json(open_store(segment.out).read(SUMMARY)) for segment in segments]
    totals = ReplayCounts(work_s=sum(part.seconds for part in parts))
    for count, frame_masks in enumerate(masks, start=1):
        totals.add(frame_masks)
        session.progress("writing summary", count, None)
        if session.stop.is_set():
            raise StoppedError(count)

    # masks tell only the frames whose step did not fail; failures in an overlap count twice
    failed = sum(part.failed for part in parts)
    refused = sum(part.refused for part in parts)
    frames = sum(totals.frames.values()) + failed
    totals.counts = Counter(frames=frames, failed=failed, refused=refused)

    # segments have equal notes, and a name that one of them lacks may be in another
    notes: dict[str, None] = {}
    unfound: dict[str, str] = {}
    for part in parts:
        notes |= dict.fromkeys(part.notes)
        unfound |= {name: line for name, line in part.unfound.items() if name not in totals.labels}
    return Summary.from_counts(
        totals,
        session.schedule.job,
        model=parts[0].model,
        device=parts[0].device,
        lost=next((part.lost for part in parts if part.lost), None),
        notes=[f"stitched from {len(parts)} segments", *notes],
        unfound=unfound,
    )
