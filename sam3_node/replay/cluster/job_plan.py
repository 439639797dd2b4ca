"""Plans the replay of one recording on workers: a list of steps, each with tasks that may run at the same time."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from ...errors import ReplayError
from ..job import Job
from ..run import LIMITS
from ..shards import Segment, ShardLimits, cut_segments
from ..store import Summary


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
        if self.frames is not None and not 0 <= self.overlap < self.frames:
            raise ReplayError(
                f"expected an overlap of 0 to {self.frames - 1} frames, less than a segment has, found {self.overlap}"
            )
        if (self.by_camera or self.frames) and job.mode == "as-recorded":
            raise ReplayError("as-recorded replays a recording as a whole: use --every to divide it")
        if self.frames and (job.objects or job.everything or not job.names):
            raise ReplayError(
                "segments need names to detect (--prompt), which are detected again in each segment; objects marked on "
                "a frame, and recorded edits, exist in one segment only"
            )
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


@dataclass(frozen=True, slots=True)
class Task:
    """A task for one worker.

    replay returns a Summary; probe returns a ProbeResult; clear (delete results) returns None; join (stitch `segments`
    to the job's results) returns a Summary.
    """

    kind: Literal["replay", "probe", "clear", "join"]
    job: Job
    segments: tuple[Job, ...] = ()
    split: Split = WHOLE
    limits: ShardLimits = LIMITS


PlanStep = list[Task]
StepValues = list[Any]
PlanSteps = Generator[PlanStep, StepValues, list[Summary]]


@dataclass(frozen=True, slots=True)
class JobPlan:
    """A job, and the options that its steps depend on."""

    job: Job
    split: Split = WHOLE
    again: bool = False
    limits: ShardLimits = LIMITS

    def steps(self) -> PlanSteps:
        """Yield the steps, and receive the values of each step's tasks in their order. Returns the summaries.

        A task may run several times in part: it continues where it stopped.
        """
        jobs = (yield from self._split_by_camera()) if self.split.by_camera else [self.job]
        if self.split.frames is None:
            return (yield from self._replay(jobs))
        sizes = yield [Task("probe", job) for job in jobs]
        divided = [self._cut(job, size) for job, size in zip(jobs, sizes, strict=True)]
        if self.again:  # joined results are deleted before their segments
            yield [Task("clear", job) for job in jobs]
        yield from self._replay([segment for segments in divided for segment in segments])
        pairs = zip(jobs, divided, strict=True)
        return (yield [Task("join", job, tuple(segments), self.split) for job, segments in pairs])

    def _split_by_camera(self) -> Generator[PlanStep, StepValues, list[Job]]:
        size: ProbeResult = (yield [Task("probe", self.job)])[0]
        jobs = [_select_camera(self.job, camera) for camera in size.cameras]
        return [job for job in jobs if job.names or job.objects or job.everything]

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


def _select_camera(job: Job, camera: str) -> Job:
    objects = tuple(marked for marked in job.objects if marked.camera == camera)
    return replace(job, topics=(camera,), objects=objects, out=f"{job.out.rstrip('/')}/{camera}")


def _select_frames(job: Job, frames: Segment) -> Job:
    folder = f"{job.out.rstrip('/')}/segments/{frames.start:09}-{frames.stop:09}"
    return replace(job, start=frames.start, stop=frames.stop, out=folder, outputs=())
