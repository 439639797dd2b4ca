"""The progress of a run over many recordings, and the report of what each recording took and cost."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

HOUR_S = 3600.0


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


class ThroughputMeter:
    """Counts the frames that tasks step in this run, and estimates their rate and the time left."""

    def __init__(self, tasks: int) -> None:
        self._first: dict[object, int] = {}
        self._last: dict[object, int] = {}
        self._totals: dict[object, int] = {}
        self._tasks = tasks
        self._begin_s: float | None = None

    @property
    def frames(self) -> int:
        """Frames stepped in this run."""
        return sum(self._last[key] - self._first[key] for key in self._last)

    @property
    def frames_per_s(self) -> float:
        """Rate of all workers together, since the first frame of this run."""
        seconds = time.monotonic() - self._begin_s if self._begin_s is not None else 0.0
        return self.frames / seconds if seconds > 0 else 0.0

    @property
    def left_s(self) -> float | None:
        """Estimated time left, None before the first estimate. Tasks that have not started count as average ones."""
        if not self._totals or not self.frames_per_s:
            return None
        remaining = [max(self._totals[key] - self._last[key], 0) for key in self._totals]
        mean = sum(self._totals.values()) / len(self._totals)
        not_started = max(self._tasks - len(self._totals), 0)
        return (sum(remaining) + not_started * mean) / self.frames_per_s

    def add_tasks(self, count: int) -> None:
        """Add tasks to the estimate."""
        self._tasks += count

    def update(self, key: object, what: str, done: int, total: int | None) -> None:
        """Set the progress of a task. Only frames that are stepped count."""
        if what != "replaying":
            return
        if self._begin_s is None:
            self._begin_s = time.monotonic()
        self._first.setdefault(key, done)
        self._last[key] = max(done, self._last.get(key, done))
        if total is not None:
            self._totals[key] = total

    def finish(self, key: object, frames: int, resumed_from: int) -> None:
        """Set the result of a replay: its number of frames; earlier runs had done `resumed_from` of them."""
        self._first[key] = min(self._first.get(key, resumed_from), resumed_from)
        self._last[key] = self._totals[key] = max(frames, self._last.get(key, 0))


@dataclass(slots=True)
class BagResult:
    """The result of one recording."""

    bag: str
    out: str
    state: str = "stopped"
    """done, failed or stopped."""
    error: str | None = None
    frames: int = 0
    worker_s: float = 0.0
    """Seconds that workers spent on it in this run, including lost workers and failed attempts."""
    losses: int = 0
    """Number of workers lost."""
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class UsageReport:
    """The results of all recordings of one run, with the time of workers and its cost."""

    bags: list[BagResult]
    seconds: float
    held_s: float
    """Seconds of all workers together, each from when it was ready until its end."""
    gpu_s: float
    """The same for all GPUs; 0 without GPUs."""
    price_per_hour: float | None = None
    """Price of one worker, None if it is unknown."""

    @property
    def is_complete(self) -> bool:
        """True if all recordings are done."""
        return all(bag.state == "done" for bag in self.bags)

    @property
    def is_stopped(self) -> bool:
        """True if the run was stopped before all recordings were done."""
        return any(bag.state == "stopped" for bag in self.bags)

    @property
    def frames(self) -> int:
        """Frames of all recordings that are done."""
        return sum(bag.frames for bag in self.bags)

    def cost(self, worker_s: float) -> float | None:
        """Return the cost of this time of one worker, None if the price is unknown."""
        return None if self.price_per_hour is None else round(worker_s / HOUR_S * self.price_per_hour, 6)

    def to_json(self) -> str:
        """Return the report as indented JSON."""
        bags = [
            {**asdict(bag), "worker_s": round(bag.worker_s, 1), "cost": self.cost(bag.worker_s)}
            for bag in self.bags
        ]
        whole = {**asdict(self), "frames": self.frames, "cost": self.cost(self.held_s), "bags": bags}
        return json.dumps(whole, indent=2) + "\n"

    def lines(self) -> list[str]:
        """Return the report as lines of a table. The row `waiting` has the time that workers were idle."""
        busy_s = sum(bag.worker_s for bag in self.bags)
        rows = [("", "frames", "worker s", *(["cost"] if self.price_per_hour is not None else []), "")]
        rows += [self._make_row(bag.bag, bag.frames, bag.worker_s, _describe_state(bag)) for bag in self.bags]
        rows.append(self._make_row("waiting", "", max(self.held_s - busy_s, 0.0), ""))
        rows.append(self._make_row("all", self.frames, max(self.held_s, busy_s), f"in {self.seconds:.0f} s"))
        return list(_align(rows))

    def _make_row(self, name: str, frames: int | str, worker_s: float, state: str) -> tuple[str, ...]:
        cost = self.cost(worker_s)
        return (name, str(frames), f"{worker_s:.1f}", *([] if cost is None else [f"{cost:.4f}"]), state)


def _describe_state(bag: BagResult) -> str:
    losses = f", {bag.losses} workers lost" if bag.losses else ""
    return f"{bag.state}{losses}{f': {bag.error}' if bag.error else ''}"


def _align(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *numbers, state in rows:
        cells = [
            name.ljust(widths[0]),
            *(number.rjust(width) for number, width in zip(numbers, widths[1:-1], strict=True)),
        ]
        yield "  ".join([*cells, state]).rstrip()
