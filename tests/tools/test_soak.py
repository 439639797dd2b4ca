"""The chaos soak: a short run of it, and what its summary makes of a log."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from sam3_node.types import MaskFrame
from tests.support.repeats import if_whole
from tests.support.transport_peer import wait_until
from tools.bench import soak_chaos
from tools.bench.soak_chaos import Plan, Reader, Soak
from tools.bench.soak_episodes import Marked, Recorded
from tools.bench.soak_summary import Row, find_calm, fit_growth, select, summarise, write_results
from tools.bench.tiny_weights import save_tiny_checkpoint
from tools.command import read_json_lines


def sample(t_s: float, pid: int = 1, rss_mb: float = 100.0, phase: str = "chaos", **fields: Any) -> Row:
    process = {"pid": pid, "age_s": t_s, "rss_mb": rss_mb, "descriptors": 50, "threads": 9}
    names = ("over_budget", "shed_level", "confused_ids", "reused_ids", "lost_epochs")
    row = {"kind": "sample", "t_s": t_s, "since_s": t_s - 5, "phase": phase, "processes": {"node": process}}
    row |= {"masks": 50, "missing": [], "restarts": {"node": 0}, "ids": 3, "epochs": {"cam0": 1}}
    return row | {"ages_ms": {"cam0": [10.0] * 50}, "longest_gap_s": 0.2} | dict.fromkeys(names, 0) | fields


UNDER_OVERLOAD = {"age at the start of the step, p99, under overload", "recovery after the overload"}
HEAD = {"kind": "head", "t_s": 0.0, "camera_hz": 10.0, "settle_s": 20.0, "max_gap_s": 60.0}


def failed(rows: list[Row]) -> set[str]:
    return {check["name"] for check in summarise(rows)["checks"] if check["passed"] is False}


def test_a_log_of_a_healthy_run_passes() -> None:
    rows = [HEAD, *(sample(5.0 * n, phase="chaos" if n < 40 else "quiet") for n in range(1, 61))]
    summary = summarise(rows)
    assert summary["passed"]
    assert {check["name"] for check in summary["checks"] if check["passed"] is None} == UNDER_OVERLOAD


def test_growth_is_fitted_within_each_life_of_a_process() -> None:
    def grow(per_s: float, phase: str = "quiet") -> list[Row]:
        """Two lives of 300 s. The second begins with other memory, which is not growth."""
        return [
            sample(5.0 * n, pid=n // 60, rss_mb=100 + 80 * (n // 60) + per_s * (5 * n % 300), phase=phase)
            for n in range(1, 120)
        ]

    assert fit_growth(grow(0.0), "node", "rss_mb") == pytest.approx(0.0, abs=1e-6)
    assert fit_growth(grow(0.1), "node", "rss_mb") == pytest.approx(0.1 * 595)
    assert failed([HEAD, *grow(0.1)]) == {"growth of the node's memory in the quiet end"}
    assert not failed([HEAD, *grow(0.1, "chaos")])
    assert fit_growth([sample(5), sample(10)], "node", "rss_mb") is None


@pytest.mark.parametrize(
    ("fields", "check"),
    [
        ({"confused_ids": 1}, "ids with two meanings"),
        ({"reused_ids": 1}, "ids given twice"),
        ({"longest_gap_s": 61.0}, "longest time without masks of cam0"),
        ({"missing": ["cam0"]}, "processes that do not run at the end"),
        ({"ages_ms": {"cam0": [500.0] * 50}}, "age at the start of the step, p99, without faults"),
    ],
)
def test_a_run_that_shows_a_defect_fails(fields: dict[str, Any], check: str) -> None:
    assert failed([HEAD, sample(5), sample(10, **fields)]) == {check}


def test_ages_count_outside_of_faults_and_under_overload() -> None:
    fault = {"kind": "fault", "t_s": 12.0, "fault": "kill", "process": "node"}
    old = {"cam0": [400.0] * 50}
    rows = [HEAD, sample(10), fault, *(sample(float(t), ages_ms=old) for t in (15, 20, 30)), sample(60)]
    assert [row["t_s"] for row in find_calm(rows)] == [10, 60]
    assert not failed(rows)
    phase = {"kind": "phase", "t_s": 61.0, "phase": "overload", "load_hz": 100.0}
    slow = sample(70, phase="overload", ages_ms={"load": [40.0] * 50})
    late = {"kind": "recovery", "t_s": 80.0, "seconds": 2.5}
    assert failed([*rows, phase, slow, late]) == UNDER_OVERLOAD


def test_a_log_that_was_cut_off_is_summarised(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    lines = [json.dumps(row) for row in (HEAD, sample(5), sample(10))]
    log.write_text("\n".join(lines) + "\n" + lines[-1][:40])
    assert len(read_json_lines(log)) == 3
    assert write_results(log)["passed"]
    assert {path.name for path in tmp_path.iterdir()} == {"log.jsonl", "summary.json", "plot.png"}


@if_whole("test_departures.py kills and stops the same processes")
@pytest.mark.timeout(900)
def test_a_short_chaos_runs_and_keeps_its_ids(tmp_path: Path) -> None:
    """Times are not asserted: only that faults happened, that all runs again, and that no id had two meanings."""
    chosen = {"MODEL__NAME": str(save_tiny_checkpoint(tmp_path / "tiny")), "MODEL__THREADS": "1"}
    chosen |= {"MODEL__DEVICE": "cpu", "DETECTOR__KIND": "none", "DEADLINE__BUDGET_MS": "5"}
    settings = {f"SAM3_{name}": value for name, value in chosen.items()}
    # a busy machine starves processes for longer than a watchdog may wait in a short test
    plan = Plan(
        5, 2, 2, fault_every_s=2, sample_every_s=1, watchdog_s=0, faults=("kill", "pause"), settings=settings
    )
    Soak(plan, tmp_path / "log.jsonl").run()
    rows = read_json_lines(tmp_path / "log.jsonl")
    summary = write_results(tmp_path / "log.jsonl")
    assert 1 <= sum(summary["faults"].values()) == len(select(rows, "fault"))
    assert [row["phase"] for row in select(rows, "phase")] == ["overload"]
    assert len(select(rows, "recovery")) == 1
    assert summary["ids"] > 0
    last = select(rows, "sample")[-1]
    assert (last["confused_ids"], last["reused_ids"]) == (0, 0)
    assert (tmp_path / "plot.png").stat().st_size > 1000


class TimedClient:
    """A client of a node whose masks come at given times, by a clock that only they move."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self._coming: SimpleQueue[tuple[int, float] | None] = SimpleQueue()

    def monotonic(self) -> float:
        return self.now_s

    def send(self, *frames: tuple[int, float]) -> None:
        """Send masks of frames of these ages in ms, at these times in s since the start."""
        for frame in frames:
            self._coming.put(frame)

    def end(self) -> None:
        self._coming.put(None)

    def __iter__(self) -> Iterator[MaskFrame]:
        for seq, (age_ms, at_s) in enumerate(iter(self._coming.get, None)):
            self.now_s = 100.0 + at_s
            yield MaskFrame("cam0", seq, 0, 2, 2, published_ns=age_ms * 1_000_000)


def test_recovery_counts_from_the_first_of_enough_frames_on_time(monkeypatch: pytest.MonkeyPatch) -> None:
    client = TimedClient()
    monkeypatch.setattr(soak_chaos, "time", client)
    reader = Reader(client, keeps_epochs=False)  # type: ignore[arg-type]
    reader.watch_recovery(120.0, frames=3)
    client.send((500, 0.1), (20, 0.2), (30, 0.3), (130, 0.4), (10, 0.5), (20, 0.6))
    wait_until(lambda: reader.masks == 6)
    assert reader.cameras == {"cam0"}  # which waits until the last masks are taken
    assert reader.recovery_s == math.inf
    client.send((30, 0.7), (400, 5.0), (10, 5.1), (10, 5.2), (10, 5.3))
    wait_until(lambda: reader.masks == 11)
    assert reader.cameras == {"cam0"}
    assert reader.recovery_s == pytest.approx(0.5)
    client.end()


def test_each_episode_is_stored_named_unseen_or_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(tmp_path)
    monkeypatch.setattr(Recorded, "list_tasks", lambda self: {"task 1"})
    recorded.note("recorder | lerobot: left out episode 1 ('task 2') of a.mcap: a gap")
    recorded.note("recorder | 10 frames of 'task 4'")
    marked = [
        Marked("task 1", 0, 5),
        Marked("task 2", 6, 9),
        Marked("task 3", 20, 24),
        Marked("task 4", 24, 40),
    ]
    found = recorded.account(marked, [(19, 30)])
    assert (found["begun"], found["stored"], found["named"], found["unseen"]) == (4, 1, 1, 1)
    assert found["lost"] == ["task 4"]
    row = {"kind": "episodes", "t_s": 11.0, **found}
    assert failed([HEAD, sample(5), sample(10), row]) == {"episodes lost without a word"}
