"""A connection to Ray: to a cluster that runs, or to one on this machine that is started and ended."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...errors import ReplayError, require

LOCAL = "local"
STORE_BYTES = 100 << 20
"""Of shared memory: only small messages go through Ray."""
ANSWER_S = 5.0
"""Ray itself would try an address for minutes."""
_PLACE = re.compile(r"(ray://)?\[?(?P<host>[^/\]]+)\]?:(?P<port>\d{1,5})")


@contextmanager
def session(address: str, workers: int) -> Iterator[Any]:
    """The module `ray`, connected. `address`: local, for a Ray with room for so many `workers`; auto, for the one that
    runs here; or that of another. One that this process is connected to already is used as it is.

    Raises MissingExtraError, ReplayError where there is none.
    """
    # both are read on import: nothing is reported to anybody, and workers do not stand back behind other processes
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray = require("ray", "cloud")
    if ray.is_initialized():
        yield ray
        return
    with _handlers_kept():
        _connect(ray, address, workers)
    try:
        yield ray
    finally:
        ray.shutdown()


def _connect(ray: Any, address: str, workers: int) -> None:
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if address == LOCAL:
            ray.init(
                "local", num_cpus=workers, include_dashboard=False, object_store_memory=STORE_BYTES, **quiet
            )
        else:
            _require_somebody(address)
            ray.init(address, **quiet)
    except (RuntimeError, ValueError, OverflowError, OSError) as error:
        raise ReplayError(
            f"expected a Ray cluster at {address}, found none: {error}; --ray local starts one on this machine"
        ) from error


def _require_somebody(address: str) -> None:
    """Raise OSError where an address that names host and port does not answer."""
    place = _PLACE.fullmatch(address)
    if place is not None:
        socket.create_connection((place["host"], int(place["port"])), ANSWER_S).close()


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Ray puts its own handlers in place of those that are there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
