"""Replays many recordings at once on workers that Ray places on machines, and reports what each took and cost.

A lost worker's task goes to another worker. Ray could restart actors and repeat their tasks by itself. But the lost
actor may still be running then, and Ray does not report the loss. Here a lost worker is ended first, and its time is
counted.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import ReplayError, require
from ...resources import Closeable
from ..job import Job
from ..shards import LIMITS, ShardLimits
from ..store import Summary
from .bill import BagResult, UsageReport
from .tasks import (
    NOT_STARTED,
    WHOLE,
    JobPlan,
    PlanSteps,
    Split,
    Task,
    TaskProgress,
    TaskResult,
    Worker,
)

LOCAL = "local"
"""Address of a new Ray on this machine."""
AUTH_MODE = "RAY_AUTH_MODE"
"""Variable of the environment that says whether Ray asks for a token."""
OBJECT_STORE_BYTES = 100 << 20
"""Size of Ray's shared memory. Only small messages go through Ray."""
CONNECT_TIMEOUT_S = 5.0
"""Time that a cluster may take to accept a connection. Ray itself would try for minutes."""
STOP_TIMEOUT_S = 20.0
"""Time that workers have to write what they have done."""
LOCAL_WORKERS = 2
"""Number of workers without GPUs, where none is given."""
RETRIES = 5
"""Number of workers that a task may lose, and of workers in a row that may fail to start."""
POLL_S = 0.2
"""Time between two looks at running tasks."""
START_POLL_S = 2.0
"""Time between two looks at the machines of the cluster while a worker starts."""
SAVE_S = 1.0
"""Time between two reports of a run that goes on. A driver that is killed loses the time of its workers since."""

_log = logging.getLogger(__name__)
_ADDRESS = re.compile(r"(ray://)?\[?(?P<host>[^/\]]+)\]?:(?P<port>\d{1,5})")


class RunProgress(NamedTuple):
    """Progress of a run over many recordings."""

    done: int
    """Recordings that are done."""
    total: int
    """All recordings."""
    workers: int
    """Workers that are ready."""
    frames: int
    """Frames stepped in this run."""
    frames_per_s: float
    left_s: float | None
    """Estimated time left, None if it is unknown."""


@dataclass(slots=True)
class _TaskFrames:
    """Numbers of a task's frames: the first and the last one in this run, and the total if it is known."""

    first: int
    last: int
    total: int | None = None


class ThroughputMeter:
    """Counts the frames that tasks step in this run, and estimates their rate and the time left."""

    def __init__(self, tasks: int) -> None:
        self.tasks = tasks
        """Number of tasks that step frames."""
        self._counts: dict[object, _TaskFrames] = {}
        self._begin_s: float | None = None

    @property
    def frames(self) -> int:
        """Frames stepped in this run."""
        return sum(task.last - task.first for task in self._counts.values())

    @property
    def frames_per_s(self) -> float:
        """Rate of all workers together, since the first frame of this run."""
        if self._begin_s is None:
            return 0.0
        seconds = time.monotonic() - self._begin_s
        if seconds <= 0:
            return 0.0
        return self.frames / seconds

    @property
    def left_s(self) -> float | None:
        """Estimated time left, None before the first estimate. Tasks that have not started count as average ones."""
        remaining = 0
        totals = []
        for task in self._counts.values():
            if task.total is not None:
                totals.append(task.total)
                remaining += max(task.total - task.last, 0)
        if not totals or not self.frames_per_s:
            return None
        mean = sum(totals) / len(totals)
        not_started = max(self.tasks - len(totals), 0)
        return (remaining + not_started * mean) / self.frames_per_s

    def update(self, key: object, what: str, done: int, total: int | None) -> None:
        """Set the progress of a task. Only frames that are stepped count."""
        if what != "replaying":
            return
        self._begin_s = self._begin_s or time.monotonic()
        task = self._counts.setdefault(key, _TaskFrames(done, done))
        # a task that lost its worker begins again at its last shard
        task.last = max(done, task.last)
        if total is not None:
            task.total = total

    def finish(self, key: object, frames: int, resumed_from: int) -> None:
        """Set the result of a replay: its number of frames, of which earlier runs had done `resumed_from`."""
        task = self._counts.setdefault(key, _TaskFrames(resumed_from, frames))
        task.first = min(task.first, resumed_from)
        task.last = max(frames, task.last)
        task.total = task.last


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
    earlier: UsageReport | None = None,
    save: Callable[[UsageReport], None] = lambda _: None,
) -> UsageReport:
    """Replay jobs of one recording each, as `run_job` does, on several workers.

    `workers` defaults to the number of GPUs in the cluster, or two if `ray_address` is local. Each worker has
    `gpus_per_worker` GPUs (default: 1 if there are any), and keeps its model for its next job.

    A lost worker is replaced up to `retries` times, and its job continues from its last complete shard. An error in one
    recording does not end the others; the report has it. After `stop` is set, workers write what they have done, and
    the same call continues from there, as it does after a kill. The report also counts the runs of an `earlier` one;
    `save` gets it every SAVE_S, for the case that this process is killed. Raises ReplayError if jobs cannot be split
    like this, if there is no cluster or no GPU in it, or if workers do not start; MissingExtraError without Ray.
    """
    # refuse all before the first one costs time of machines
    for job in jobs:
        split.check(job)
    begin_s = time.monotonic()
    with connect_ray(ray_address, workers or LOCAL_WORKERS) as ray:
        count, gpus = _choose_resources(ray, ray_address, workers, gpus_per_worker)
        pool = WorkerPool(ray, count, gpus, retries)
        run = _Run(pool, progress, [JobPlan(job, split, again, limits) for job in jobs])

        def describe() -> UsageReport:
            seconds = time.monotonic() - begin_s
            held_s = pool.held_s
            report = UsageReport(
                run.describe_bags(),
                round(seconds, 1),
                round(held_s, 1),
                round(held_s * gpus, 1),
                price_per_hour,
            )
            if earlier is None:
                return report
            return report.after(earlier)

        try:
            with pool:
                run.run_until_done(stop or threading.Event(), lambda: save(describe()))
        except BaseException:
            # the workers have ended with the pool; a bill with running tasks would count them as lost
            save(describe())
            raise
    # all workers have ended
    return describe()


def _choose_resources(ray: Any, address: str, workers: int | None, gpus: float | None) -> tuple[int, float]:
    """Return the number of workers, and the number of GPUs of each."""
    # a cluster elsewhere is taken to have GPUs, because it may start machines with them on demand
    cluster_gpus = ray.cluster_resources().get("GPU", 0.0)
    if gpus is None:
        gpus = 1.0 if cluster_gpus or address != LOCAL else 0.0
    if workers is None and gpus and not cluster_gpus:
        raise ReplayError(
            "expected GPUs in the cluster, found none: give the number of --workers if the cluster starts machines on "
            "demand, or give --gpus-per-worker 0"
        )
    if workers:
        return workers, gpus
    if gpus:
        return max(1, int(cluster_gpus / gpus)), gpus
    return LOCAL_WORKERS, gpus


@dataclass(slots=True)
class _BagState:
    """A recording with its remaining steps, and the tasks of the current one."""

    steps: PlanSteps
    result: BagResult
    tasks: list[PoolTask] = field(default_factory=list)
    is_over: bool = False


class _Run:
    """Runs the steps of all recordings on one pool."""

    def __init__(
        self, pool: WorkerPool, progress: Callable[[RunProgress], None], plans: Sequence[JobPlan]
    ) -> None:
        self._bags = [_BagState(plan.steps(), BagResult(plan.job.bags[0], plan.job.out)) for plan in plans]
        self._pool = pool
        self._progress = progress
        self._meter = ThroughputMeter(len(plans))
        self._tasks: dict[Future[TaskResult], tuple[_BagState, PoolTask]] = {}
        """The tasks that are queued or running."""

    def run_until_done(self, stop: threading.Event, save: Callable[[], None]) -> None:
        """Run all steps, or until `stop` is set and the workers have written what they have done.

        Calls `save` every SAVE_S.
        """
        saved_s = time.monotonic()
        # the first steps of all recordings are queued; each end of a step starts the next one of its recording
        for bag in self._bags:
            self._start_step(bag, None)
        while self._tasks:
            self._add_results(wait(self._tasks, POLL_S, FIRST_COMPLETED).done)
            if time.monotonic() - saved_s >= SAVE_S:
                save()
                saved_s = time.monotonic()
            # workers end their tasks as stopped, with what they have done
            if stop.is_set():
                self._pool.stop()
                self._add_results(wait(self._tasks, STOP_TIMEOUT_S).done)
                break

    def describe_bags(self) -> list[BagResult]:
        """Return the results of all recordings so far, with the time and losses of tasks that are not over."""
        # a run may have thousands of recordings, and is described each SAVE_S
        by_bag = defaultdict[int, list[PoolTask]](list)
        for owner, task in self._tasks.values():
            by_bag[id(owner)].append(task)
        results = []
        for bag in self._bags:
            tasks = by_bag[id(bag)]
            result = replace(
                bag.result,
                worker_s=bag.result.worker_s + sum(task.spent_s for task in tasks),
                losses=bag.result.losses + sum(task.losses for task in tasks),
            )
            if any(task.begun_s is not None for task in tasks):
                result.state = "running"
            results.append(result)
        return results

    def _start_step(self, bag: _BagState, values: list[Any] | None) -> None:
        """Start the next step. `values` come from the previous step's tasks, None for the first step."""
        try:
            if values is None:
                tasks = next(bag.steps)
            else:
                tasks = bag.steps.send(values)
        except StopIteration as end:
            self._finish_bag(bag, end.value)
            return
        bag.tasks = list(map(PoolTask, tasks))
        # each recording counts as one task until its segments are known
        replays = sum(task.kind == "replay" for task in tasks)
        self._meter.tasks += max(replays - 1, 0)
        for task in bag.tasks:
            self._tasks[self._pool.submit(task)] = (bag, task)

    def _add_results(self, finished: Iterable[Future[TaskResult]]) -> None:
        """Take the results of tasks, and start the steps after them. Raises ReplayError if workers do not start."""
        for future in finished:
            bag, task = self._tasks.pop(future)
            result = future.result()
            task.result = result
            bag.result.worker_s += task.seconds
            bag.result.losses += task.losses
            if isinstance(result.value, Summary) and not result.was_finished:
                self._meter.finish(task, result.value.frames, result.value.resumed_from)
            results = [task.result for task in bag.tasks if task.result is not None]
            if len(results) == len(bag.tasks):
                self._end_step(bag, results)
        # no task waits for a worker any more: an idle one would cost for nothing
        if all(future.running() for future in self._tasks):
            self._pool.end_idle_workers()
        self._report_progress()

    def _end_step(self, bag: _BagState, results: Sequence[TaskResult]) -> None:
        # an error is reported rather than a stop
        failed = sorted((result for result in results if result.error), key=lambda result: result.stopped)
        if not failed:
            self._start_step(bag, [result.value for result in results])
            return
        bag.is_over = True
        bag.result.state = "stopped" if failed[0].stopped else "failed"
        bag.result.error = failed[0].error

    def _finish_bag(self, bag: _BagState, summaries: Sequence[Summary]) -> None:
        bag.is_over = True
        bag.result.state = "done"
        bag.result.frames = sum(summary.frames for summary in summaries)
        bag.result.notes = [line for summary in summaries for line in summary.lines()]

    def _report_progress(self) -> None:
        meter = self._meter
        for _, task in self._tasks.values():
            meter.update(task, *task.progress)
        done = sum(bag.is_over for bag in self._bags)
        ready = self._pool.ready
        self._progress(
            RunProgress(done, len(self._bags), ready, meter.frames, meter.frames_per_s, meter.left_s)
        )


@contextmanager
def connect_ray(address: str, workers: int) -> Iterator[Any]:
    """Provide the module `ray`, connected to a cluster for the length of the block.

    `address` is local, for a new Ray on this machine with CPUs for this number of `workers`; auto, for the cluster that
    runs here; or the address of another cluster. An existing connection of this process is used as it is. Raises
    MissingExtraError without Ray, ReplayError if there is no cluster.
    """
    # Ray reads these on import: no usage reports, no lower priority for workers, and a token
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")
    if address == LOCAL:
        # an imported Ray keeps the mode that it found
        if "ray" not in sys.modules:
            os.environ.setdefault(AUTH_MODE, "token")
    elif not _has_token():
        _log.warning(
            "the Ray cluster at %s is used without a token: whoever reaches its ports can run code on its machines; "
            "start it, and this command, with %s=token (ray get-auth-token --generate)",
            address,
            AUTH_MODE,
        )
    ray = require("ray", "cloud")
    # a connection that the caller has opened stays open
    if ray.is_initialized():
        yield ray
        return
    with _keep_signal_handlers():
        _init_ray(ray, address, workers)
    try:
        yield ray
    finally:
        ray.shutdown()


def _has_token() -> bool:
    """Return True if Ray would show a token to a cluster: by its setting, or by default if there is a token."""
    mode = os.environ.get(AUTH_MODE)
    if mode is not None:
        return mode.lower() == "token"
    sources = (os.environ.get("RAY_AUTH_TOKEN"), os.environ.get("RAY_AUTH_TOKEN_PATH"))
    return any(sources) or (Path.home() / ".ray" / "auth_token").is_file()


def _init_ray(ray: Any, address: str, workers: int) -> None:
    # the logs of workers would hide the progress
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        # a Ray of its own here, without the page that would open a port; or an existing cluster
        if address == LOCAL:
            ray.init(
                "local",
                num_cpus=workers,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                **quiet,
            )
        else:
            _check_address(address)
            ray.init(address, **quiet)
    except Exception as error:  # Ray raises errors of many kinds, also a bare Exception
        if address == LOCAL:
            raise ReplayError(
                f"expected Ray to start on this machine, found {error}; if the machine is busy, try again later"
            ) from error
        raise ReplayError(
            f"expected a Ray cluster at {address}, found none: {error}; --ray local starts one on this machine"
        ) from error


def _check_address(address: str) -> None:
    """Raise OSError if the address names a host and port that does not accept connections."""
    match = _ADDRESS.fullmatch(address)
    if match is not None:
        socket.create_connection((match["host"], int(match["port"])), CONNECT_TIMEOUT_S).close()


@contextmanager
def _keep_signal_handlers() -> Iterator[None]:
    """Restore the signal handlers that Ray replaces with its own."""
    # handlers belong to the main thread, and Ray sets them there alone
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@dataclass(slots=True, eq=False)
class PoolTask:
    """A task that is queued, running or finished. Its thread writes all but `result`."""

    task: Task
    seconds: float = 0.0
    """Time that workers spent on it, in attempts that are over."""
    begun_s: float | None = None
    """Time when the current attempt began, None between attempts."""
    losses: int = 0
    """Number of workers lost, including those interrupted or lost while they started."""
    failures: int = 0
    """Number of workers lost while they worked on it."""
    progress: TaskProgress = NOT_STARTED
    result: TaskResult | None = None

    @property
    def spent_s(self) -> float:
        """Time that workers spent on it, with the current attempt."""
        begun_s = self.begun_s
        if begun_s is None:
            return self.seconds
        return self.seconds + time.monotonic() - begun_s


@dataclass(slots=True, eq=False)
class _WorkerHandle:
    """A worker, and the time when it was ready; None while it starts."""

    actor: Any
    ready_s: float | None = None

    def call_control(self, method: str) -> Any:
        """Call a method that a worker carries out while its task runs."""
        return getattr(self.actor, method).options(concurrency_group="control").remote()


class WorkerPool(Closeable):
    """Up to `max_workers` workers with one CPU and `gpus` GPUs each, started on demand. A context manager.

    A thread for each worker runs one task after the other. A task whose worker is lost runs again up to `retries`
    times. An interruption is a loss in the report, but uses up none of these.
    """

    def __init__(self, ray: Any, max_workers: int, gpus: float, retries: int) -> None:
        self._ray = ray
        self._retries = retries
        # Ray restarts and repeats nothing by itself, and answers control calls while a task runs
        remote = ray.remote(
            num_cpus=1, num_gpus=gpus, max_restarts=0, max_task_retries=0, concurrency_groups={"control": 1}
        )
        self._start_actor = remote(Worker).remote
        self._threads = ThreadPoolExecutor(max_workers, "worker")
        self._workers: list[_WorkerHandle] = []
        self._idle: list[_WorkerHandle] = []
        self._failed_starts = 0
        self._ended_s = 0.0
        """Seconds of all workers that have ended, each since it was ready."""
        self._stopping = threading.Event()

    @property
    def ready(self) -> int:
        """Number of workers that are ready."""
        return sum(worker.ready_s is not None for worker in list(self._workers))

    @property
    def held_s(self) -> float:
        """Seconds of all workers so far, each since it was ready."""
        now_s = time.monotonic()
        ready = [worker.ready_s for worker in list(self._workers) if worker.ready_s is not None]
        return self._ended_s + sum(now_s - ready_s for ready_s in ready)

    def submit(self, task: PoolTask) -> Future[TaskResult]:
        """Queue a task. The result raises ReplayError if workers cannot be started."""
        return self._threads.submit(self._run, task)

    def stop(self) -> None:
        """Have all workers write what they have done, and end workers that still start."""
        self._stopping.set()
        starting = [worker for worker in self._workers if worker.ready_s is None]
        for worker in starting:
            self._end_worker(worker)

    def end_idle_workers(self) -> None:
        """End the workers without a task. They may be needed while tasks are queued."""
        while self._idle:
            self._end_worker(self._idle.pop())

    def close(self) -> None:
        """End all workers. Idempotent."""
        # a worker that is killed ends the call that its thread waits for
        self._stopping.set()
        while self._workers:
            self._end_worker(self._workers[0])
        self._threads.shutdown(cancel_futures=True)

    def _run(self, task: PoolTask) -> TaskResult:
        """Run a task on a worker, and again on another one if that is lost or interrupted."""
        while not self._stopping.is_set():
            worker = self._take_worker()
            try:
                result = self._await_result(worker, task)
            except self._ray.exceptions.RayError as error:
                # end it first: a worker that seems lost may still run, and hold the results
                self._end_worker(worker)
                if self._stopping.is_set():
                    continue
                failed = self._count_loss(worker, task, error)
                if failed is not None:
                    return failed
                continue
            # the worker stays for the next task, with its model loaded
            if self._stopping.is_set() or not result.interrupted:
                self._idle.append(worker)
                return result
            # a machine that was taken away is lost, but says nothing about the task
            task.losses += 1
            _log.warning("%s: its worker was interrupted, another one continues", task.task.job.bags[0])
            self._end_worker(worker)
        return TaskResult(error="its worker was lost" if task.seconds else "not started", stopped=True)

    def _take_worker(self) -> _WorkerHandle:
        """Return an idle worker, or a new one."""
        with suppress(IndexError):
            return self._idle.pop()
        worker = _WorkerHandle(self._start_actor(os.getcwd()))
        self._workers.append(worker)
        return worker

    def _await_result(self, worker: _WorkerHandle, task: PoolTask) -> TaskResult:
        """Run a task once. Ask for its progress meanwhile, and pass a stop on. Raises RayError for a lost worker."""
        # a worker that answers has started; its time costs from here on
        if worker.ready_s is None:
            self._await_start(worker)
            worker.ready_s = time.monotonic()
            self._failed_starts = 0
        begin_s = time.monotonic()
        task.begun_s = begin_s
        try:
            call = worker.actor.run.remote(task.task)
            while not self._ray.wait([call], timeout=POLL_S)[0]:
                if self._stopping.is_set():
                    worker.call_control("stop")
                task.progress = self._ray.get(worker.call_control("progress"))
            result: TaskResult = self._ray.get(call)
            return result
        finally:
            task.begun_s = None
            task.seconds += time.monotonic() - begin_s

    def _await_start(self, worker: _WorkerHandle) -> None:
        """Wait until a worker has started. Raises RayError for a lost worker, ReplayError without a machine for it."""
        # Ray waits for ever for machines, as new ones may join; but without any, the head is gone as well
        call = worker.actor.pid.remote()
        while not self._ray.wait([call], timeout=START_POLL_S)[0]:
            if not any(node["Alive"] for node in self._ray.nodes()):
                raise ReplayError(
                    "expected Ray to run, found that it has ended: was it killed, for example for lack of memory? "
                    "Results so far are kept, the same command continues"
                )
        self._ray.get(call)

    def _count_loss(self, worker: _WorkerHandle, task: PoolTask, error: Exception) -> TaskResult | None:
        """Count the loss of a worker. Return the result of a task that has lost too many, None to try again.

        Raises ReplayError if too many workers in a row did not start.
        """
        # a worker that never was ready says nothing about the task
        reason = str(error).strip().splitlines()[-1]
        task.losses += 1
        if worker.ready_s is None:
            self._failed_starts += 1
            if self._failed_starts > self._retries:
                raise ReplayError(
                    f"expected workers to start, found that {self._failed_starts} did not: {reason}"
                )
            return None
        task.failures += 1
        if task.failures <= self._retries:
            return None
        lost = f"lost {task.failures} workers, the last: {reason}"
        return TaskResult(error=f"{lost}; results so far are kept, the same command continues")

    def _end_worker(self, worker: _WorkerHandle) -> None:
        with suppress(ValueError):  # another thread has ended it
            self._workers.remove(worker)
            if worker.ready_s is not None:
                self._ended_s += time.monotonic() - worker.ready_s
            self._ray.kill(worker.actor)
