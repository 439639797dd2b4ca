"""Workers as actors of Ray: tasks are given to whichever is free, and given again when one is lost.

Ray could start actors again by itself and repeat their tasks, but it would do so on one that may still be running and
would not tell; here a lost worker is ended first, and its time is counted.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...errors import ReplayError
from ...types import Closeable
from .job_plan import Task
from .worker import UNKNOWN, Answer, Standing, Worker

STOP_S = 20.0
"""How long workers have to put on disk what they have done."""


class Finished(NamedTuple):
    """A task that is over. `seconds` are what workers have worked on it, `losses` how many of them were lost."""

    key: object
    answer: Answer
    seconds: float
    losses: int


@dataclass(slots=True)
class _Open:
    """A task that is waiting or being done."""

    key: object
    task: Task
    seconds: float = 0.0
    losses: int = 0
    standing: Standing = UNKNOWN


@dataclass(slots=True)
class _Held:
    """A worker, and what it does: starting where `work` is None and `call` is not, idle where both are None."""

    actor: Any
    call: Any
    since_s: float
    work: _Open | None = None
    question: Any = None
    begun_s: float | None = None
    """When it was ready first."""


class Pool(Closeable):
    """Up to `most` workers of one CPU and `gpus` GPUs each, started as they are needed and ended when they are not.

    A task whose worker is lost is done again up to `retries` times. A context manager.
    """

    def __init__(self, ray: Any, most: int, gpus: float, retries: int) -> None:
        self._ray, self._most, self._retries = ray, most, retries
        remote = ray.remote(
            num_cpus=1, num_gpus=gpus, max_restarts=0, max_task_retries=0, concurrency_groups={"control": 1}
        )
        self._start = remote(Worker).remote
        self._waiting: deque[_Open] = deque()
        self._held: list[_Held] = []
        self._failed_starts = 0
        self._ended_s = 0.0
        self._stopping = False

    @property
    def ready(self) -> int:
        """Workers that are there."""
        return sum(worker.begun_s is not None for worker in self._held)

    @property
    def held_s(self) -> float:
        """Seconds of all workers together, from when each was ready."""
        now_s = time.monotonic()
        return self._ended_s + sum(
            now_s - worker.begun_s for worker in self._held if worker.begun_s is not None
        )

    def submit(self, key: object, task: Task) -> None:
        """A task; `key` comes back with its answer."""
        self._waiting.append(_Open(key, task))

    def standings(self) -> dict[object, Standing]:
        """How far the tasks are that are being done."""
        return {worker.work.key: worker.work.standing for worker in self._held if worker.work}

    def poll(self, timeout_s: float) -> list[Finished]:
        """Give out tasks, wait until one is over or the time is up -> those that are over.

        Raises ReplayError where workers cannot be started.
        """
        self._end_idle()
        self._give_out()
        calls = {worker.call: worker for worker in self._held if worker.call is not None}
        if not calls:
            return []
        ready, _ = self._ray.wait(list(calls), num_returns=len(calls), timeout=0)
        if not ready:
            ready, _ = self._ray.wait(list(calls), timeout=timeout_s)
        over = [found for call in ready for found in self._hear(calls[call])]
        self._ask()
        return over

    def stop(self) -> list[Finished]:
        """Tell all workers to stop and wait for their answers, though not for long."""
        self._stopping = True
        over = [
            Finished(one.key, Answer(error="not begun", stopped=True), one.seconds, one.losses)
            for one in self._waiting
        ]
        self._waiting.clear()
        for worker in self._held:
            self._control(worker, "stop")
        deadline = time.monotonic() + STOP_S
        while any(worker.work for worker in self._held) and time.monotonic() < deadline:
            over += self.poll(0.2)
        return over

    def close(self) -> None:
        """End all workers. Idempotent."""
        while self._held:
            self._end(self._held[0])

    def _end_idle(self) -> None:
        spare = [worker for worker in self._held if worker.call is None]
        for worker in spare[len(self._waiting) :]:
            self._end(worker)

    def _give_out(self) -> None:
        coming = sum(worker.work is None for worker in self._held)
        for _ in range(min(len(self._waiting) - coming, self._most - len(self._held))):
            actor = self._start(os.getcwd())
            self._held.append(_Held(actor, actor.pid.remote(), time.monotonic()))
        for worker in self._held:
            if worker.call is None and self._waiting:
                worker.work = self._waiting.popleft()
                worker.call, worker.since_s = worker.actor.do.remote(worker.work.task), time.monotonic()

    def _hear(self, worker: _Held) -> Iterator[Finished]:
        work, call = worker.work, worker.call
        try:
            found = self._ray.get(call)
        except self._ray.exceptions.RayError as error:
            yield from self._lose(worker, error)
            return
        worker.call = worker.work = worker.question = None
        if work is None:
            worker.begun_s, self._failed_starts = time.monotonic(), 0
        else:
            work.seconds += time.monotonic() - worker.since_s
            yield Finished(work.key, found, work.seconds, work.losses)

    def _lose(self, worker: _Held, error: Exception) -> Iterator[Finished]:
        work = worker.work
        self._end(worker)
        why = str(error).strip().splitlines()[-1]
        if work is None:
            self._failed_starts += 1
            if self._failed_starts > self._retries:
                raise ReplayError(
                    f"expected workers to start, found that {self._failed_starts} did not: {why}"
                )
            return
        work.seconds += time.monotonic() - worker.since_s
        work.losses += 1
        if self._stopping:
            yield Finished(
                work.key, Answer(error="its worker was lost", stopped=True), work.seconds, work.losses
            )
        elif work.losses > self._retries:
            text = f"lost {work.losses} workers, the last: {why}; what was done is kept, the same command goes on"
            yield Finished(work.key, Answer(error=text), work.seconds, work.losses)
        else:
            self._waiting.appendleft(work)

    def _ask(self) -> None:
        """How far each worker is; one that does not answer is not waited for."""
        for worker in self._held:
            if worker.work is None:
                continue
            if worker.question is None:
                worker.question = self._control(worker, "standing")
            elif self._ray.wait([worker.question], timeout=0)[0]:
                with suppress(self._ray.exceptions.RayError):  # its loss is heard of by its call
                    worker.work.standing = self._ray.get(worker.question)
                worker.question = self._control(worker, "standing")

    def _control(self, worker: _Held, method: str) -> Any:
        return getattr(worker.actor, method).options(concurrency_group="control").remote()

    def _end(self, worker: _Held) -> None:
        self._held.remove(worker)
        if worker.begun_s is not None:
            self._ended_s += time.monotonic() - worker.begun_s
        self._ray.kill(worker.actor)
