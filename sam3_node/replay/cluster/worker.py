"""What runs on a worker: one task at a time, with what sees kept for the next."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from ...errors import Sam3NodeError
from ..completion import StoppedError
from ..run import PerceptionCache, clear_job, finished, run_job
from ..store import HeldError
from .job_plan import Task
from .segments import extent_of, join

log = logging.getLogger(__name__)

PATIENCE_S = 30.0
"""How long a worker waits for one that is given up to let go of its results."""


class Answer(NamedTuple):
    """What came of a task: its value, or in words what went wrong. `stopped`: it was told to stop;
    `was_there`: it had been done before."""

    value: Any = None
    error: str | None = None
    stopped: bool = False
    was_there: bool = False


class Standing(NamedTuple):
    """What is being done, how many frames of it are done, and of how many where that is known."""

    what: str = ""
    done: int = 0
    total: int | None = None


UNKNOWN = Standing()


class Worker:
    """Does tasks for a driver that works in `folder`, where that is here as well. Others may ask meanwhile how it
    stands, and tell it to stop."""

    def __init__(self, folder: str) -> None:
        if os.path.isdir(folder):  # what paths are relative to
            os.chdir(folder)
        self._load = PerceptionCache()
        self._stop = threading.Event()
        self._standing = UNKNOWN

    def pid(self) -> int:
        """Of this process."""
        return os.getpid()

    def standing(self) -> Standing:
        """How far the task at hand is."""
        return self._standing

    def stop(self) -> None:
        """End the task at hand, and every other one, soon; what is done is kept."""
        self._stop.set()

    def do(self, task: Task) -> Answer:
        """Carry out a task. Nothing is raised."""
        self._standing = UNKNOWN
        try:
            if task.kind == "replay" and (there := finished(task.job)):
                return Answer(there, was_there=True)
            return Answer(_patiently(lambda: self._do(task)))
        except StoppedError as stopped:
            return Answer(error=str(stopped), stopped=True)
        except Sam3NodeError as error:
            return Answer(error=str(error))
        except Exception as error:  # one recording must not end the others
            log.exception("%s", task.job.bags[0])
            return Answer(error=f"{type(error).__name__}: {error}")

    def _do(self, task: Task) -> Any:
        job = task.job
        if task.kind == "look":
            return extent_of(job, self._tell, self._stop)
        if task.kind == "clear":
            return clear_job(job)
        if task.kind == "join":
            return join(job, task.segments, task.split, self._tell, self._stop)
        return run_job(job, self._load, self._tell, self._stop, limits=task.limits)

    def _tell(self, what: str, done: int, total: int | None) -> None:
        self._standing = Standing(what, done, total)


def _patiently(do: Callable[[], Any]) -> Any:
    """Try again while another process holds the results: it was given up, and may take a moment to end."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return do()
        except HeldError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.5)
