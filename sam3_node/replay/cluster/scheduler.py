"""Replays many recordings at once on workers that Ray places on machines."""

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
from .job_plan import WHOLE, JobPlan, PlanSteps, Split
from .pool import LOCAL, FinishedTask, WorkerPool, connect_ray
from .usage_report import BagResult, RunProgress, ThroughputMeter, UsageReport
from .worker import TaskResult

LOCAL_WORKERS = 2
RETRIES = 5
POLL_S = 0.2


def run_many(
    jobs: Sequence[Job],
    ray_address: str = "auto",
    workers: int | None = None,
    gpus_per_worker: float | None = None,
    price_per_hour: float | None = None,
    progress: Callable[[RunProgress], None] = lambda _: None,
    stop: threading.Event | None = None,
    split: Split = WHOLE,
    again: bool = False,
    retries: int = RETRIES,
    limits: ShardLimits = LIMITS,
) -> UsageReport:
    """Replay jobs of one recording each, as `run_job` does, on several workers.

    `workers` defaults to the number of GPUs in the cluster, or two if `ray_address` is local. Each worker has
    `gpus_per_worker` GPUs (default: 1 if there are any), and keeps its model for its next job.

    A lost worker is replaced up to `retries` times, and its job continues from its last complete shard. An error in one
    recording does not end the others; the report has it. After `stop` is set, workers write what they have done, and
    the same call continues from there, as it does after a kill. Raises ReplayError if jobs cannot be split like this,
    if there is no cluster or no GPU in it, or if workers do not start; MissingExtraError without Ray.
    """
    for job in jobs:
        split.check(job)
    begin_s = time.monotonic()
    with connect_ray(ray_address, workers or LOCAL_WORKERS) as ray:
        count, gpus = _choose_resources(ray, ray_address, workers, gpus_per_worker)
        with WorkerPool(ray, count, gpus, retries) as pool:
            run = _Run(pool, progress, [JobPlan(job, split, again, limits) for job in jobs])
            bags = run.run_until_done(stop or threading.Event())
        held_s = pool.held_s
    seconds = time.monotonic() - begin_s
    return UsageReport(bags, round(seconds, 1), round(held_s, 1), round(held_s * gpus, 1), price_per_hour)


def _choose_resources(ray: Any, address: str, workers: int | None, gpus: float | None) -> tuple[int, float]:
    """Return the number of workers, and the number of GPUs of each."""
    cluster_gpus = ray.cluster_resources().get("GPU", 0.0)
    if gpus is None:
        gpus = 1.0 if cluster_gpus or address != LOCAL else 0.0
    if workers is None and gpus and not cluster_gpus:
        raise ReplayError(
            "expected GPUs in the cluster, found none: give the number of --workers if the cluster starts machines on "
            "demand, or give --gpus-per-worker 0"
        )
    return workers or (max(1, int(cluster_gpus / gpus)) if gpus else LOCAL_WORKERS), gpus


class _TaskKey(NamedTuple):
    """Position of a task in the run."""

    bag: int
    step: int
    task: int


@dataclass(slots=True)
class _BagState:
    """A recording with its remaining steps, and the results of the current step's tasks."""

    steps: PlanSteps
    result: BagResult
    number: int
    step: int = 0
    task_count: int = 0
    results: dict[int, TaskResult] = field(default_factory=dict)
    is_over: bool = False


class _Run:
    """Runs the steps of all recordings on one pool."""

    def __init__(
        self, pool: WorkerPool, progress: Callable[[RunProgress], None], plans: Sequence[JobPlan]
    ) -> None:
        self._bags = [
            _BagState(plan.steps(), BagResult(plan.job.bags[0], plan.job.out), number)
            for number, plan in enumerate(plans)
        ]
        self._pool, self._progress = pool, progress
        self._meter = ThroughputMeter(len(plans))

    def run_until_done(self, stop: threading.Event) -> list[BagResult]:
        """Run all steps, or until `stop` is set."""
        for bag in self._bags:
            self._start_step(bag, None)
        while not all(bag.is_over for bag in self._bags):
            stopping = stop.is_set()
            for task in self._pool.stop() if stopping else self._pool.poll(POLL_S):
                self._add_result(task)
            self._report_progress()
            if stopping:
                break
        return [bag.result for bag in self._bags]

    def _start_step(self, bag: _BagState, values: list[Any] | None) -> None:
        """Start the next step. `values` are those of the previous step's tasks, None for the first step."""
        try:
            tasks = next(bag.steps) if values is None else bag.steps.send(values)
        except StopIteration as end:
            self._finish_bag(bag, end.value)
            return
        bag.step, bag.task_count, bag.results = bag.step + 1, len(tasks), {}
        self._meter.add_tasks(max(sum(task.kind == "replay" for task in tasks) - 1, 0))
        for number, task in enumerate(tasks):
            self._pool.submit(_TaskKey(bag.number, bag.step, number), task)

    def _add_result(self, task: FinishedTask) -> None:
        key, result = task.key, task.result
        assert isinstance(key, _TaskKey)
        bag = self._bags[key.bag]
        bag.results[key.task] = result
        bag.result.worker_s += task.seconds
        bag.result.losses += task.losses
        if isinstance(result.value, Summary) and not result.was_finished:
            self._meter.finish(key, result.value.frames, result.value.resumed_from)
        if len(bag.results) == bag.task_count:
            self._end_step(bag, [bag.results[number] for number in range(bag.task_count)])

    def _end_step(self, bag: _BagState, results: list[TaskResult]) -> None:
        # an error is reported rather than a stop
        failed = sorted((result for result in results if result.error), key=lambda result: result.stopped)
        if not failed:
            self._start_step(bag, [result.value for result in results])
            return
        bag.is_over = True
        bag.result.state, bag.result.error = "stopped" if failed[0].stopped else "failed", failed[0].error

    def _finish_bag(self, bag: _BagState, summaries: Sequence[Summary]) -> None:
        bag.is_over = True
        bag.result.state = "done"
        bag.result.frames = sum(summary.frames for summary in summaries)
        bag.result.notes = [line for summary in summaries for line in summary.lines()]

    def _report_progress(self) -> None:
        for key, task in self._pool.task_progress().items():
            self._meter.update(key, *task)
        meter = self._meter
        done = sum(bag.is_over for bag in self._bags)
        self._progress(
            RunProgress(
                done, len(self._bags), self._pool.ready, meter.frames, meter.frames_per_s, meter.left_s
            )
        )
