"""Opens the session of a job, checks that a folder's results are of the same job, and writes outputs and the summary.

job.json identifies the job, its settings and its weights, so that results of different jobs are never mixed.
summary.json is written last. With `complete: true` it marks the results as complete. A replay that was stopped writes
the outputs of what is done, and a summary with `complete: false`. It can be resumed.
"""

import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import PurePosixPath

from ..errors import ReplayError, WireError
from ..schema.fields import Plain, convert, decode_json
from .davis_png import MaskSource
from .job import SECTIONS, Job
from .outputs import find_output
from .outputs.output import Sources
from .outputs.write import write_outputs
from .redone import INDEX, clear_layers, count_objects, name_newest, read_results
from .schedule import Schedule, open_schedule
from .shards import FIRST_PASS, SECOND_PASS, Shards
from .store import WORK, Store, Summary, local_bag, open_store

log = logging.getLogger(__name__)

IDENTITY = f"{WORK}/job.json"
"""File that identifies the job of a folder."""
SUMMARY = "summary.json"
"""File with the summary, which marks complete results."""
FREE_FIELDS = ("out", "outputs", "allow_gaps", "requires_objects", "doubtful")
"""Fields of a job that may change when it is continued."""
DIGESTS = ("model_digest", "detector_digest")
"""Fields of a Perception's description that identify its weights."""

ProgressCallback = Callable[[str, int, int | None], None]
"""Called with the current task, the number of its completed frames, and their total (None if unknown)."""


class StoppedError(ReplayError):
    """Raised when a replay is stopped on request. Its results so far are kept."""

    def __init__(self, frames: int) -> None:
        super().__init__(
            f"stopped after {frames} frames; they are saved and in the outputs. Run the same command to resume."
        )


@dataclass(frozen=True, slots=True)
class JobSession:
    """A job on its open recording, and the store that holds its results."""

    schedule: Schedule
    store: Store
    progress: ProgressCallback
    stop: threading.Event

    def read_finished(self) -> Summary | None:
        """Return the summary if all frames are done."""
        return read_complete_summary(self.store)

    def finish(self, summary: Summary) -> Summary:
        """Write outputs and summary. Raises StoppedError if the summary is not complete."""
        summary = self.write(summary)
        if not summary.complete:
            raise StoppedError(summary.frames)
        return summary

    def write(
        self, summary: Summary, masks: MaskSource | None = None, is_interruptible: bool = False
    ) -> Summary:
        """Write the missing outputs, then the summary. A stop does not interrupt this unless it `is_interruptible`.

        `masks` are the results of the shards by default. An incomplete summary counts as one without outputs: they are
        replaced when the job is resumed.
        """
        job = self.schedule.job
        redone = name_newest(self.store)
        missing = list_missing_outputs(job, summary, redone)
        total = sum(summary.cameras.values())

        # outputs also take long: the user sees how far they are
        def on_progress(kind: str, done: int) -> None:
            self.progress(f"writing {kind}", done, total)
            if is_interruptible and self.stop.is_set():
                raise StoppedError(done)

        notes = {kind: note for kind, note in summary.output_notes.items() if kind not in missing}
        if missing:
            if not summary.complete:
                log.warning("stopped: writing the outputs of what is done; another interrupt ends that, too")
            sources = self._open_sources(summary, masks)
            written = write_outputs(self.store.folder, missing, sources, on_progress)
            self.store.keep(written.paths)
            notes |= written.notes

        # the summary is the completion marker: it comes after everything that it promises
        if missing or self.read_finished() is None:
            outputs = list(dict.fromkeys([*summary.outputs, *missing]))
            if redone != summary.redone:
                summary = replace(summary, redone=redone, objects=count_objects(self.store))
            summary = replace(summary, outputs=outputs, output_notes=notes, doubtful=job.doubtful)
            self.store.write(SUMMARY, summary.to_json().encode())
        # complete results are never continued, so they need no state
        if summary.complete:
            for folder in (FIRST_PASS, SECOND_PASS):
                Shards(self.store, folder).finish()
        return summary

    def _open_sources(self, summary: Summary, masks: MaskSource | None) -> Sources:
        """Return what outputs are made from. `masks` are the results of the shards by default."""
        job = self.schedule.job
        recorded = self.schedule.recorded_masks if job.mode == "as-recorded" else None
        return Sources(
            masks or partial(read_results, self.store),
            self.schedule.frames,
            recording=PurePosixPath(summary.bag).name,
            has_images="images" in summary.outputs,
            dataset=self.schedule.dataset,
            recorded=recorded,
            doubtful=job.doubtful,
        )


def list_missing_outputs(job: Job, summary: Summary, redone: str) -> list[str]:
    """Return the outputs that a job's results lack, or have in a form that the job does not want any more.

    `redone` names the newest redo of the results.
    """
    # what was written before a redo has other masks
    if summary.redone != redone:
        return list(dict.fromkeys([*summary.outputs, *job.outputs]))
    missing: list[str] = [kind for kind in job.outputs if kind not in summary.outputs]
    # labels are written anew if they treat doubtful objects in another way
    if summary.doubtful != job.doubtful:
        missing += [kind for kind in summary.outputs if find_output(kind).is_label]
    # what names the images is written anew with them
    if "images" in missing:
        missing += [kind for kind in summary.outputs if find_output(kind).names_images]
    return missing


@contextmanager
def job_session(
    job: Job,
    progress: ProgressCallback = lambda *_: None,
    stop: threading.Event | None = None,
    again: bool = False,
    check: Callable[[Schedule], None] = lambda _: None,
    **marks: object,
) -> Iterator[JobSession]:
    """Open a job's first recording, and hold its folder for the length of the block.

    `again` deletes earlier results. `check` raises what refuses an unfinished job, before the folder belongs to the
    job, so that a corrected one may use it. `marks` belong to the job's identity, as its fields do. Raises ReplayError
    if the folder has results of another job.
    """
    # hold the folder before the first look at its results, so that no other process changes them meanwhile
    store = open_store(job.out)
    with store.held(), open_schedule(job) as schedule:
        if again or read_complete_summary(store) is None:
            check(schedule)
        if again:
            clear_results(store)
        check_identity(store, _build_identity(schedule, marks))
        yield JobSession(schedule, store, progress, stop or threading.Event())


@contextmanager
def redo_session(
    recording: str,
    out: str,
    progress: ProgressCallback = lambda *_: None,
    stop: threading.Event | None = None,
) -> Iterator[JobSession]:
    """Open the finished job of a folder with its recording, which may lie elsewhere now, and hold the folder.

    Raises ReplayError for a folder without finished results, and for another recording.
    """
    store = open_store(out)
    with store.held(), local_bag(recording) as path:
        job = read_job(store, out)
        with Schedule(job, path) as schedule:
            check_identity(store, _build_identity(schedule, {}))
            yield JobSession(schedule, store, progress, stop or threading.Event())


def read_job(store: Store, out: str) -> Job:
    """Return the job of finished results, with the outputs that it has. Raises ReplayError if there are none."""
    summary = read_complete_summary(store)
    if summary is None:
        raise ReplayError(
            f"{out}: expected the finished results of a replay, found none; replay the recording first"
        )
    free = {"out": out, "outputs": summary.outputs, "doubtful": summary.doubtful, "allow_gaps": True}
    try:
        return convert({**_require_map(read_identity(store).get("job")), **free}, Job, IDENTITY)
    except WireError as error:
        raise ReplayError(
            f"{IDENTITY}: expected the job of a replay, found {error}; start over with --again"
        ) from error


def _require_map(value: object) -> Plain:
    if not isinstance(value, dict):
        raise WireError("no job")
    return value


def _build_identity(schedule: Schedule, marks: Plain) -> Plain:
    """Collect, as JSON values, what must be equal for masks to be equal, except the weights."""
    # all of the job but what may change, and all settings that masks depend on
    fixed = {name: value for name, value in asdict(schedule.job).items() if name not in FREE_FIELDS}
    # results of versions without this field stay the same job
    for marked in fixed["objects"]:
        if marked["frame_name"] is None:
            del marked["frame_name"]
    sections = {name: getattr(schedule.settings, name).model_dump(mode="json") for name in SECTIONS}
    # a recording of another size is another one; a folder has no size that would tell
    size = None
    if schedule.path.is_file():
        size = schedule.path.stat().st_size
    whole = {"job": {**fixed, **marks}, "settings": sections, "bytes": size}
    identity: Plain = json.loads(json.dumps(whole))
    return identity


def read_digests(description: Plain) -> Plain:
    """Return the digests of the weights in a Perception's description."""
    return {name: description.get(name, "") for name in DIGESTS}


def check_identity(store: Store, identity: Plain) -> None:
    """Compare an identity with the stored one, and store entries that are new.

    Raises ReplayError with the differences.
    """
    # the digests of the weights join the identity later, when the model is loaded
    stored = read_identity(store)
    if not all(name in stored for name in identity):
        store.write(IDENTITY, json.dumps({**stored, **identity}, indent=2).encode())
    expected = {name: stored.get(name, identity[name]) for name in identity}
    differences = _list_differences("", expected, identity)
    if differences:
        raise ReplayError(
            f"the folder holds results of another job: {'; '.join(differences[:4])}; choose another folder, or start "
            "over with --again"
        )


def read_identity(store: Store) -> Plain:
    """Return the stored identity; an empty map if there is none."""
    # damage is no other job: say so, instead of listing differences
    if not store.exists(IDENTITY):
        return {}
    try:
        identity = decode_json(store.read(IDENTITY), IDENTITY)
    except WireError:
        identity = None
    if not isinstance(identity, dict):
        raise ReplayError(
            f"{IDENTITY}: expected the identity of a replay, found other bytes; start over with --again"
        )
    return identity


def _list_differences(name: str, stored: object, current: object) -> list[str]:
    """Return a line for each value that differs, with its dotted name."""
    if isinstance(stored, dict) and isinstance(current, dict):
        lines = []
        for key in dict.fromkeys([*stored, *current]):
            lines += _list_differences(f"{name}.{key}", stored.get(key), current.get(key))
        return lines
    if stored == current:
        return []
    return [f"{name.strip('.')} was {stored!r:.80}, is {current!r:.80}"]


def read_complete_summary(store: Store) -> Summary | None:
    """Return the summary of results that are complete, None for others."""
    if not store.exists(SUMMARY):
        return None
    summary = Summary.from_json(store.read(SUMMARY))
    if summary is None or not summary.complete:
        return None
    return summary


def clear_results(store: Store) -> None:
    """Delete all results, the completion marker first. Outputs stay."""
    # the reverse of their order: at any moment the rest is an unfinished replay, never one that seems complete
    store.delete(SUMMARY)
    store.delete(INDEX)
    clear_layers(store)
    for folder in (SECOND_PASS, FIRST_PASS):
        Shards(store, folder).clear()
    store.delete(IDENTITY)
