"""How long recordings are, and the results of their segments as one."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ...types import MaskFrame
from ..completion import SUMMARY, Progress, StoppedError, identity_of, keep_identity
from ..job import Job
from ..merge import results
from ..outputs import write_outputs
from ..schedule import Schedule
from ..stitch import stitch
from ..summary import Summary, Tally, of_tally
from ..url_store import local_bag, open_store
from .job_plan import Extent, Split


def extent_of(job: Job, progress: Progress, stop: threading.Event) -> Extent:
    """The cameras and frames of a job's recording, which is gone through where its index does not tell."""
    with local_bag(job.bags[0]) as path, Schedule(job, path) as schedule:
        count = schedule.count()
        if count is None:
            count = 0
            for count, _ in enumerate(schedule.frames(), start=1):
                progress("reading", count, None)
                if stop.is_set():
                    raise StoppedError(0)
        return Extent(schedule.cameras, count)


def join(
    job: Job, segments: Sequence[Job], split: Split, progress: Progress, stop: threading.Event
) -> Summary:
    """The results of finished `segments`, in their order, as those of the job they are of: outputs and summary.

    Raises ReplayError for results of another job, or of other segments, in the job's folder.
    """
    store = open_store(job.out)
    with store.held(), local_bag(job.bags[0]) as path, Schedule(job, path) as schedule:
        identity = identity_of(job, schedule.settings, path)
        identity["job"]["segments"] = {"frames": split.frames, "overlap": split.overlap}
        keep_identity(store, identity)

        def masks() -> Iterator[MaskFrame]:
            doubt = schedule.settings.detector.min_track_score
            return stitch((results(open_store(one.out), doubt) for one in segments), split.overlap)

        def told(kind: str, done: int) -> None:
            progress(f"writing {kind}", done, None)
            if stop.is_set():
                raise StoppedError(done)

        if store.exists(SUMMARY):
            summary = Summary.from_json(store.read(SUMMARY))
        else:
            summary = _whole(job, [_summary(one) for one in segments], masks(), told)
        missing = [kind for kind in job.outputs if kind not in summary.outputs]
        store.keep(write_outputs(store.folder, missing, masks, schedule.frames, told))
        summary = replace(summary, outputs=[*summary.outputs, *missing])
        store.write(SUMMARY, summary.to_json().encode())
    return summary


def _summary(job: Job) -> Summary:
    return Summary.from_json(open_store(job.out).read(SUMMARY))


def _whole(job: Job, parts: Sequence[Summary], masks: Iterator[MaskFrame], told: Any) -> Summary:
    """Frames and objects are counted anew: segments have some in common."""
    tally = Tally(work_s=sum(part.seconds for part in parts))
    for count, found in enumerate(masks, start=1):
        tally.add(found)
        told("summary", count)
    failed, refused = sum(part.failed for part in parts), sum(part.refused for part in parts)
    frames = sum(tally.frames.values()) + failed
    tally.counts = Counter(frames=frames, failed=failed, refused=refused)
    notes = dict.fromkeys(note for part in parts for note in part.notes)
    return of_tally(
        tally,
        bag=job.bags[0],
        mode=job.mode,
        strategy=job.strategy,
        model=parts[0].model,
        device=parts[0].device,
        resumed_from=0,
        lost=next((part.lost for part in parts if part.lost), None),
        notes=[f"stitched of {len(parts)} segments", *notes],
    )
