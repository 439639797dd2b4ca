"""The worker process: runs one task at a time, and keeps the loaded model for the next task.

A task replays a recording or a segment, counts frames, deletes results, or stitches the results of segments.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from ...errors import Sam3NodeError
from ...types import MaskFrame
from ..completion import SUMMARY, ProgressCallback, StoppedError, build_identity, check_identity, read_results
from ..job import Job
from ..outputs import write_outputs
from ..run import PerceptionCache, clear_job, read_finished_summary, run_job
from ..schedule import Schedule
from ..shards import stitch
from ..store import HeldError, ReplayCounts, Summary, local_bag, open_store
from .job_plan import ProbeResult, Split, Task

log = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 30.0
"""Time that a worker waits until an abandoned worker releases its results."""


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


class Worker:
    """Runs tasks for a driver whose working directory is `folder`, and uses that directory if it exists here.

    Other threads may ask for the progress meanwhile, and stop the worker. After SIGTERM it writes what it has done,
    and hands the task back. Ray's own handler would let the task run on until the machine is gone.
    """

    def __init__(self, folder: str) -> None:
        if os.path.isdir(folder):  # relative paths of jobs refer to it
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
        """Run a task. Returns errors instead of raising them."""
        self._progress = NOT_STARTED
        try:
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
    """Retry while another process holds the results: an abandoned worker may take a moment to end."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            return action()
        except HeldError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def probe_recording(job: Job, progress: ProgressCallback, stop: threading.Event) -> ProbeResult:
    """Return the cameras and the number of frames of a job. Reads the whole recording if its index does not tell."""
    with local_bag(job.bags[0]) as path, Schedule(job, path) as schedule:
        count = schedule.count_frames()
        if count is None:
            count = 0
            for count, _ in enumerate(schedule.frames(), start=1):
                progress("reading", count, None)
                if stop.is_set():
                    raise StoppedError(0)
        return ProbeResult(schedule.cameras, count)


def join_segments(
    job: Job, segments: Sequence[Job], split: Split, progress: ProgressCallback, stop: threading.Event
) -> Summary:
    """Stitch the results of finished `segments`, in their order, and write the job's outputs and summary.

    Raises ReplayError if the job's folder has results of another job or of other segments.
    """
    store = open_store(job.out)
    with store.held(), local_bag(job.bags[0]) as path, Schedule(job, path) as schedule:
        identity = build_identity(job, schedule.settings, path)
        identity["job"]["segments"] = {"frames": split.frames, "overlap": split.overlap}
        check_identity(store, identity)

        def masks() -> Iterator[MaskFrame]:
            min_score = schedule.settings.detector.min_track_score
            return stitch(
                (read_results(open_store(segment.out), min_score) for segment in segments), split.overlap
            )

        def on_output(kind: str, done: int) -> None:
            progress(f"writing {kind}", done, None)
            if stop.is_set():
                raise StoppedError(done)

        if store.exists(SUMMARY):
            summary = Summary.from_json(store.read(SUMMARY))
        else:
            summary = _summarize(job, [_read_summary(segment) for segment in segments], masks(), on_output)
        missing = [kind for kind in job.outputs if kind not in summary.outputs]
        has_images, name = "images" in summary.outputs, PurePosixPath(job.bags[0]).name
        written = write_outputs(
            store.folder, missing, masks, schedule.frames, on_output, name, has_images, schedule.dataset
        )
        store.keep(written)
        summary = replace(summary, outputs=[*summary.outputs, *missing])
        store.write(SUMMARY, summary.to_json().encode())
    return summary


def _read_summary(job: Job) -> Summary:
    return Summary.from_json(open_store(job.out).read(SUMMARY))


def _summarize(
    job: Job, parts: Sequence[Summary], masks: Iterator[MaskFrame], progress: Callable[[str, int], None]
) -> Summary:
    """Build the summary of the whole job. Frames and objects are counted again, as segments share some."""
    totals = ReplayCounts(work_s=sum(part.seconds for part in parts))
    for count, frame_masks in enumerate(masks, start=1):
        totals.add(frame_masks)
        progress("summary", count)
    failed, refused = sum(part.failed for part in parts), sum(part.refused for part in parts)
    frames = sum(totals.frames.values()) + failed
    totals.counts = Counter(frames=frames, failed=failed, refused=refused)
    notes = dict.fromkeys(note for part in parts for note in part.notes)
    return Summary.from_counts(
        totals,
        bag=job.bags[0],
        mode=job.mode,
        strategy=job.strategy,
        model=parts[0].model,
        device=parts[0].device,
        resumed_from=0,
        lost=next((part.lost for part in parts if part.lost), None),
        notes=[f"stitched from {len(parts)} segments", *notes],
        unfound={
            name: line for part in parts for name, line in part.unfound.items() if name not in totals.labels
        },
    )
