"""What is done on a worker for one recording, and in which order: steps, each of tasks that may run at once."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from ...errors import ReplayError
from ..job import Job
from ..run import LIMITS
from ..shards import ShardLimits
from ..stitch import Segment, cut
from ..summary import Summary


class Split(NamedTuple):
    """How a recording is divided among workers.

    `by_camera`: each camera on which anything is looked for is a job of its own, with a folder in the recording's.
    `frames`: segments of so many frames (of all cameras), of which each begins `overlap` frames before the former ends;
    None for whole recordings.
    """

    by_camera: bool = False
    frames: int | None = None
    overlap: int = 0

    def check(self, job: Job) -> None:
        """Raises ReplayError where the job cannot be divided like this."""
        if self.frames is not None and not 0 <= self.overlap < self.frames:
            raise ReplayError(
                f"expected an overlap of 0 to {self.frames - 1} frames, less than a segment has, found {self.overlap}"
            )
        if (self.by_camera or self.frames) and job.mode == "as-recorded":
            raise ReplayError("as-recorded goes through a recording as a whole: use --every to divide it")
        if self.frames and (job.objects or not job.names):
            raise ReplayError(
                "segments need names to look for (--prompt), which are found anew in each of them; objects that are "
                "shown on a frame, and recorded edits, are known in one segment only"
            )
        if self.by_camera and not (job.names or job.objects):
            raise ReplayError(
                "recorded edits may be about all cameras at once: to divide a recording by camera, give names to look "
                "for (--prompt), or objects that name their camera"
            )
        if self.by_camera and not all(shown.camera for shown in job.objects):
            raise ReplayError(
                "to divide a recording by camera, expected objects that name their camera, found one that is on "
                "whichever comes first"
            )


WHOLE = Split()


class Extent(NamedTuple):
    """The cameras of a job, and how many frames all of them have together."""

    cameras: tuple[str, ...]
    frames: int


@dataclass(frozen=True, slots=True)
class Task:
    """Something for one worker.

    replay -> Summary; look -> Extent; clear (forget results) -> None; join (`segments` that overlap by `overlap` frames
    into the job's results) -> Summary.
    """

    kind: Literal["replay", "look", "clear", "join"]
    job: Job
    segments: tuple[Job, ...] = ()
    split: Split = WHOLE
    limits: ShardLimits = LIMITS


Step = list[Task]
Answers = list[Any]
Steps = Generator[Step, Answers, list[Summary]]


@dataclass(frozen=True, slots=True)
class JobPlan:
    """A job, and how it is done."""

    job: Job
    split: Split = WHOLE
    again: bool = False
    limits: ShardLimits = LIMITS

    def steps(self) -> Steps:
        """The steps; to be sent the answers of each step's tasks, in their order. Returns the summaries of its results.

        Each task may be done several times, in part: it goes on from where it was.
        """
        jobs = (yield from self._by_camera()) if self.split.by_camera else [self.job]
        if self.split.frames is None:
            return (yield from self._replayed(jobs))
        extents = yield [Task("look", job) for job in jobs]
        divided = [self._segments(job, extent) for job, extent in zip(jobs, extents, strict=True)]
        if self.again:  # what is complete first
            yield [Task("clear", job) for job in jobs]
        yield from self._replayed([segment for segments in divided for segment in segments])
        pairs = zip(jobs, divided, strict=True)
        return (yield [Task("join", job, tuple(segments), self.split) for job, segments in pairs])

    def _by_camera(self) -> Generator[Step, Answers, list[Job]]:
        extent: Extent = (yield [Task("look", self.job)])[0]
        jobs = [_of_camera(self.job, camera) for camera in extent.cameras]
        return [job for job in jobs if job.names or job.objects]

    def _replayed(self, jobs: list[Job]) -> Steps:
        if self.again:
            yield [Task("clear", job) for job in jobs]
        return (yield [Task("replay", job, limits=self.limits) for job in jobs])

    def _segments(self, job: Job, extent: Extent) -> list[Job]:
        assert self.split.frames is not None
        found = cut(extent.frames, self.split.frames, self.split.overlap) or [Segment(0, 0)]
        return [_segment(job, Segment(job.start + one.start, job.start + one.stop)) for one in found]


def _of_camera(job: Job, camera: str) -> Job:
    shown = tuple(one for one in job.objects if one.camera == camera)
    return replace(job, topics=(camera,), objects=shown, out=f"{job.out.rstrip('/')}/{camera}")


def _segment(job: Job, frames: Segment) -> Job:
    folder = f"{job.out.rstrip('/')}/segments/{frames.start:09}-{frames.stop:09}"
    return replace(job, start=frames.start, stop=frames.stop, out=folder, outputs=())
