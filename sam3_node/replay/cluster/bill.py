"""Describes what a run over many recordings took and cost: the bill, over all runs into one folder of results.

The bill is saved while a run goes on, so that a driver that is killed leaves the time of its workers.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Self

from ...errors import OutputError, ReplayError, WireError
from ...schema.fields import Natural, NotNegative, convert, decode_json
from ..store import Store

BILL = "bill.json"
"""File with the time and cost of all runs, beside the results."""
HOUR_S = 3600.0
OUTLIVES_S = 2.0
"""Time that a worker outlives the last bill of its killed driver, about: Ray ends it 1 to 3 s after the driver, and a
bill is half a second old. Nobody is left to measure it."""

_log = logging.getLogger(__name__)


def read_bill(store: Store) -> UsageReport | None:
    """Return the bill of earlier runs, None if there were none. Raises ReplayError for a file that is no bill."""
    if not store.exists(BILL):
        return None
    return UsageReport.from_json(store.read(BILL))


def write_bill(store: Store, report: UsageReport) -> None:
    """Write the bill beside the results."""
    store.write(BILL, report.to_json().encode())


def save_bill(store: Store, report: UsageReport) -> None:
    """Write the bill of a run that goes on. A failure is logged, because the run is worth more than its bill."""
    try:
        write_bill(store, report)
    except OutputError as error:
        _log.warning("the bill was not saved: %s", error)


@dataclass(slots=True)
class BagResult:
    """The result of one recording."""

    bag: str
    out: str
    state: str = "stopped"
    """done, failed or stopped; running in the bill of a run that has not ended."""
    error: str | None = None
    frames: Natural = 0
    worker_s: NotNegative = 0.0
    """Seconds that workers spent on it in all runs, including lost workers and failed attempts."""
    losses: Natural = 0
    """Number of workers lost in all runs, including interrupted ones, as spot machines are."""
    notes: list[str] = field(default_factory=list)

    def after(self, earlier: BagResult) -> BagResult:
        """Return this result with the time and the losses of earlier runs added."""
        losses = self.losses + earlier.losses
        worker_s = self.worker_s + earlier.worker_s
        # the driver was killed, and its worker with it
        if earlier.state == "running":
            losses += 1
            worker_s += OUTLIVES_S
        return replace(self, worker_s=worker_s, losses=losses)


@dataclass(frozen=True, slots=True)
class UsageReport:
    """The results of all recordings, with the time of workers and its cost, over all runs into one folder."""

    bags: list[BagResult]
    seconds: NotNegative
    held_s: NotNegative
    """Seconds of all workers together, each from when it was ready until its end."""
    gpu_s: NotNegative
    """The same for all GPUs; 0 without GPUs."""
    price_per_hour: NotNegative | None = None
    """Price of one worker, None if it is unknown. Runs at different prices have their mean, by time."""
    runs: Natural = 1
    """Number of runs: the first one, and each that resumed it."""
    others: list[BagResult] = field(default_factory=list)
    """Recordings of earlier runs that this run did not have."""

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
        if self.price_per_hour is None:
            return None
        return round(worker_s / HOUR_S * self.price_per_hour, 6)

    def after(self, earlier: UsageReport) -> UsageReport:
        """Return this report with the time, the losses and the cost of earlier runs added."""
        known = {bag.out: bag for bag in (*earlier.others, *earlier.bags)}
        earlier = earlier._outlived([bag.out for bag in self.bags])
        bags = []
        for bag in self.bags:
            before = known.pop(bag.out, None)
            bags.append(bag.after(before) if before else bag)
        return UsageReport(
            bags,
            round(self.seconds + earlier.seconds, 1),
            round(self.held_s + earlier.held_s, 1),
            round(self.gpu_s + earlier.gpu_s, 1),
            self._mean_price(earlier),
            self.runs + earlier.runs,
            list(known.values()),
        )

    def _outlived(self, resumed: Sequence[str]) -> UsageReport:
        """Return this report of a killed driver with the time that its workers on `resumed` folders outlived it."""
        orphans = sum(bag.state == "running" and bag.out in resumed for bag in self.bags)
        if not orphans or not self.held_s:
            return self
        # all workers of a run have the same number of GPUs
        held_s = self.held_s + orphans * OUTLIVES_S
        return replace(self, held_s=held_s, gpu_s=self.gpu_s / self.held_s * held_s)

    def _mean_price(self, earlier: UsageReport) -> float | None:
        # a run without a price counts at that of the other
        prices = (self.price_per_hour, earlier.price_per_hour)
        held_s = self.held_s + earlier.held_s
        if prices[0] is None or prices[1] is None or not held_s:
            return prices[1] if prices[0] is None else prices[0]
        return (prices[0] * self.held_s + prices[1] * earlier.held_s) / held_s

    def to_json(self) -> str:
        """Return the report as indented JSON."""
        whole = {
            **asdict(self),
            "frames": self.frames,
            "cost": self.cost(self.held_s),
            "bags": list(map(self._describe_bag, self.bags)),
            "others": list(map(self._describe_bag, self.others)),
        }
        return json.dumps(whole, indent=2) + "\n"

    def _describe_bag(self, bag: BagResult) -> Mapping[str, object]:
        return {**asdict(bag), "worker_s": round(bag.worker_s, 1), "cost": self.cost(bag.worker_s)}

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Read the JSON of `to_json`. Raises ReplayError for anything else."""
        try:
            # the file has sums beside the fields, and a later version may have written more
            return convert(decode_json(text, "bill"), cls, "bill")
        except WireError as error:
            raise ReplayError(
                f"{BILL}: expected the time and cost of earlier runs, found {error}; move it away to count from zero"
            ) from error

    def rows(self) -> list[tuple[str, ...]]:
        """Return the report as rows of a table. The row `waiting` has the time that workers were idle."""
        all_bags = [*self.bags, *self.others]
        busy_s = sum(bag.worker_s for bag in all_bags)
        cost = f"{'cost':>9}" if self.price_per_hour is not None else ""
        rows: list[tuple[str, ...]] = [("", f"{'frames':>8}", f"{'worker s':>10}", cost, "")]
        rows += [self._make_row(bag.bag, bag.frames, bag.worker_s, _describe_state(bag)) for bag in all_bags]
        rows.append(self._make_row("waiting", "", max(self.held_s - busy_s, 0.0), ""))
        duration = f"in {self.seconds:.0f} s"
        if self.runs > 1:
            duration += f" of {self.runs} runs"
        rows.append(self._make_row("all", self.frames, max(self.held_s, busy_s), duration))
        return rows

    def _make_row(self, name: str, frames: int | str, worker_s: float, state: str) -> tuple[str, ...]:
        cost = self.cost(worker_s)
        cost_text = "" if cost is None else f"{cost:>9.4f}"
        return name, f"{frames:>8}", f"{worker_s:>10.1f}", cost_text, state


def _describe_state(bag: BagResult) -> str:
    text = bag.state
    if bag.losses:
        noun = "worker" if bag.losses == 1 else "workers"
        text += f", {bag.losses} {noun} lost"
    if bag.error:
        text += f": {bag.error}"
    return text
