"""Many recordings at once, by workers that Ray places on machines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...errors import ReplayError
from ..job import Job
from ..run import LIMITS
from ..shards import ShardLimits
from ..summary import Summary
from .job_plan import WHOLE, JobPlan, Split, Steps
from .pool import Finished, Pool
from .progress import Meter, Progress
from .session import LOCAL, session
from .usage_report import BagResult, UsageReport
from .worker import Answer

LOCAL_WORKERS = 2
RETRIES = 5
POLL_S = 0.2


def run_many(
    jobs: Sequence[Job],
    ray_address: str = "auto",
    workers: int | None = None,
    gpus_per_worker: float | None = None,
    price_per_hour: float | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
    stop: threading.Event | None = None,
    split: Split = WHOLE,
    again: bool = False,
    retries: int = RETRIES,
    limits: ShardLimits = LIMITS,
) -> UsageReport:
    """Replay jobs, one recording each, as `run_job` does, with as many `workers` as there are GPUs in the cluster (two
    with `ray_address` local). A worker has `gpus_per_worker` (1 where there are GPUs) and keeps what sees for its next
    job.

    A worker that is lost is replaced, and its job gone on with from its last complete part, `retries` times. What is
    wrong with one recording does not end the others: its row of the bill tells. When `stop` is set, workers put on disk
    what they have done; the same call goes on from there, as it does after a kill. Raises ReplayError where jobs cannot
    be split as asked, there is no cluster or no GPU in it, or workers do not start; MissingExtraError without Ray.
    """
    for job in jobs:
        split.check(job)
    begin_s = time.monotonic()
    with session(ray_address, workers or LOCAL_WORKERS) as ray:
        count, gpus = _resources(ray, ray_address, workers, gpus_per_worker)
        with Pool(ray, count, gpus, retries) as pool:
            run = _Run(pool, progress, [JobPlan(job, split, again, limits) for job in jobs])
            bags = run.until_done(stop or threading.Event())
        held_s = pool.held_s
    seconds = time.monotonic() - begin_s
    return UsageReport(bags, round(seconds, 1), round(held_s, 1), round(held_s * gpus, 1), price_per_hour)


def _resources(ray: Any, address: str, workers: int | None, gpus: float | None) -> tuple[int, float]:
    """How many workers, and how many GPUs each has."""
    found = ray.cluster_resources().get("GPU", 0.0)
    if gpus is None:
        gpus = 1.0 if found or address != LOCAL else 0.0
    if workers is None and gpus and not found:
        raise ReplayError(
            "expected GPUs in the cluster, found none: tell how many --workers to ask for where it starts machines as "
            "they are needed, or give --gpus-per-worker 0"
        )
    return workers or (max(1, int(found / gpus)) if gpus else LOCAL_WORKERS), gpus


class _Place(NamedTuple):
    """Where a task belongs."""

    bag: int
    step: int
    task: int


@dataclass(slots=True)
class _Bag:
    """A recording, what remains to be done for it, and what came of the tasks of the step at hand."""

    steps: Steps
    result: BagResult
    number: int
    step: int = 0
    size: int = 0
    over: dict[int, Answer] = field(default_factory=dict)
    is_over: bool = False


class _Run:
    """Steps of all recordings, through one pool."""

    def __init__(self, pool: Pool, progress: Callable[[Progress], None], orders: Sequence[JobPlan]) -> None:
        self._bags = [
            _Bag(order.steps(), BagResult(order.job.bags[0], order.job.out), number)
            for number, order in enumerate(orders)
        ]
        self._pool, self._progress = pool, progress
        self._meter = Meter(len(orders))

    def until_done(self, stop: threading.Event) -> list[BagResult]:
        """All steps, or those until `stop` is set."""
        for bag in self._bags:
            self._go_on(bag, None)
        while not all(bag.is_over for bag in self._bags):
            stopping = stop.is_set()
            for over in self._pool.stop() if stopping else self._pool.poll(POLL_S):
                self._take(over)
            self._tell()
            if stopping:
                break
        return [bag.result for bag in self._bags]

    def _go_on(self, bag: _Bag, values: list[Any] | None) -> None:
        """Begin the bag's next step; `values` are what came of the one before it, None at first."""
        try:
            tasks = next(bag.steps) if values is None else bag.steps.send(values)
        except StopIteration as end:
            self._finish(bag, end.value)
            return
        bag.step, bag.size, bag.over = bag.step + 1, len(tasks), {}
        self._meter.expect(max(sum(task.kind == "replay" for task in tasks) - 1, 0))
        for number, task in enumerate(tasks):
            self._pool.submit(_Place(bag.number, bag.step, number), task)

    def _take(self, over: Finished) -> None:
        place, answer = over.key, over.answer
        assert isinstance(place, _Place)
        bag = self._bags[place.bag]
        bag.over[place.task] = answer
        bag.result.worker_s += over.seconds
        bag.result.losses += over.losses
        if isinstance(answer.value, Summary) and not answer.was_there:
            self._meter.finish(place, answer.value.frames, answer.value.resumed_from)
        if len(bag.over) == bag.size:
            self._end_step(bag, [bag.over[number] for number in range(bag.size)])

    def _end_step(self, bag: _Bag, answers: list[Answer]) -> None:
        wrong = sorted((answer for answer in answers if answer.error), key=lambda answer: answer.stopped)
        if not wrong:
            self._go_on(bag, [answer.value for answer in answers])
            return
        bag.is_over = True
        bag.result.state, bag.result.error = "stopped" if wrong[0].stopped else "failed", wrong[0].error

    def _finish(self, bag: _Bag, summaries: Sequence[Summary]) -> None:
        bag.is_over = True
        bag.result.state = "done"
        bag.result.frames = sum(summary.frames for summary in summaries)
        bag.result.notes = [line for summary in summaries for line in summary.lines()]

    def _tell(self) -> None:
        for place, standing in self._pool.standings().items():
            self._meter.note(place, *standing)
        meter = self._meter
        done = sum(bag.is_over for bag in self._bags)
        self._progress(
            Progress(done, len(self._bags), self._pool.ready, meter.frames, meter.frames_per_s, meter.left_s)
        )
