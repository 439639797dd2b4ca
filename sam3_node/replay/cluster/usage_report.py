"""What became of many recordings, and what it cost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

HOUR_S = 3600.0


@dataclass(slots=True)
class BagResult:
    """One recording's. `state`: done, failed, or stopped; `error` why. `worker_s` are the seconds that workers were
    busy with it, lost ones and earlier tries in this run included; `losses` how many of them were lost."""

    bag: str
    out: str
    state: str = "stopped"
    error: str | None = None
    frames: int = 0
    worker_s: float = 0.0
    losses: int = 0
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class UsageReport:
    """All recordings of one run. `held_s` are the seconds of all workers, each from when it was ready to its end;
    `gpu_s` the same of all GPUs, 0 without any. `price_per_hour` is that of one worker, None where it is not told."""

    bags: list[BagResult]
    seconds: float
    held_s: float
    gpu_s: float
    price_per_hour: float | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all is done."""
        return all(bag.state == "done" for bag in self.bags)

    @property
    def is_stopped(self) -> bool:
        """Whether it was told to stop before."""
        return any(bag.state == "stopped" for bag in self.bags)

    @property
    def frames(self) -> int:
        """Of all recordings that are done."""
        return sum(bag.frames for bag in self.bags)

    def cost(self, worker_s: float) -> float | None:
        """Of so many seconds of a worker."""
        return None if self.price_per_hour is None else round(worker_s / HOUR_S * self.price_per_hour, 6)

    def to_json(self) -> str:
        """As JSON, readable."""
        bags = [
            {**asdict(bag), "worker_s": round(bag.worker_s, 1), "cost": self.cost(bag.worker_s)}
            for bag in self.bags
        ]
        whole = {**asdict(self), "frames": self.frames, "cost": self.cost(self.held_s), "bags": bags}
        return json.dumps(whole, indent=2) + "\n"

    def lines(self) -> list[str]:
        """A table for people; what no recording kept workers busy with is in a row of its own."""
        busy_s = sum(bag.worker_s for bag in self.bags)
        rows = [("", "frames", "worker s", *(["cost"] if self.price_per_hour is not None else []), "")]
        rows += [self._row(bag.bag, bag.frames, bag.worker_s, _state(bag)) for bag in self.bags]
        rows.append(self._row("waiting", "", max(self.held_s - busy_s, 0.0), ""))
        rows.append(self._row("all", self.frames, max(self.held_s, busy_s), f"in {self.seconds:.0f} s"))
        return list(_aligned(rows))

    def _row(self, name: str, frames: int | str, worker_s: float, state: str) -> tuple[str, ...]:
        cost = self.cost(worker_s)
        return (name, str(frames), f"{worker_s:.1f}", *([] if cost is None else [f"{cost:.4f}"]), state)


def _state(bag: BagResult) -> str:
    lost = f", {bag.losses} workers lost" if bag.losses else ""
    return f"{bag.state}{lost}{f': {bag.error}' if bag.error else ''}"


def _aligned(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *numbers, state in rows:
        cells = [
            name.ljust(widths[0]),
            *(one.rjust(width) for one, width in zip(numbers, widths[1:-1], strict=True)),
        ]
        yield "  ".join([*cells, state]).rstrip()
