"""The log of a chaos soak as figures, checks and a plot. All of it comes from the log, so a cut run loses nothing.

The log has a JSON object a line. `sample` lines come every few seconds: memory, descriptors and threads of each
process, ages of the masks since the last sample, and what has gone wrong with ids. `fault` lines say what was done to
which process, `phase` lines when a part of the run began.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tools.bench.common import percentile
from tools.command import read_json_lines
from tools.plots import draw

Row = dict[str, Any]
WARM_S = 30.0
"""Seconds after the first masks of a process's life that do not count for its growth: it fills caches. Its memory
reaches its highest mark after some minutes only, so the quiet end is judged, which an overload precedes."""
MARGIN_MS = 20.0
"""Age at the start of a step beyond one interval of the camera."""
MAX_GROWTH_MB = 10.0
"""Largest fitted growth of memory over the quiet end."""
MAX_GROWTH_DESCRIPTORS = 2.0
"""Largest fitted growth of descriptors over the whole run."""
MAX_RECOVERY_S = 2.0
EPISODES = ("begun", "stored", "named", "unseen", "lost")
"""What is counted of the episodes of a run."""
COLOURS = {"kill": "tab:red", "stop": "tab:purple", "pause": "tab:orange"}


class Check(NamedTuple):
    """One thing that the run had to show."""

    name: str
    value: float | None
    """None if there was not enough to measure"""
    bound: float
    unit: str

    @property
    def passed(self) -> bool | None:
        """True if the value keeps the bound; None if it is unknown."""
        return None if self.value is None else self.value <= self.bound


def select(rows: Sequence[Row], kind: str) -> list[Row]:
    """Return the lines of one kind."""
    return [row for row in rows if row["kind"] == kind]


def find_calm(rows: Sequence[Row]) -> list[Row]:
    """Return the samples of the phases without load whose ages no fault can have touched."""
    settle_s = rows[0]["settle_s"]
    faults_s = [row["t_s"] for row in select(rows, "fault")]
    return [
        row
        for row in select(rows, "sample")
        if row["phase"] != "overload"
        and not any(row["since_s"] - settle_s <= fault_s <= row["t_s"] for fault_s in faults_s)
    ]


def list_ages(samples: Sequence[Row], camera: str) -> list[float]:
    """Return the ages in ms of one camera's frames at the start of their steps."""
    return [age_ms for row in samples for age_ms in row["ages_ms"].get(camera, ())]


def fit_growth(samples: Sequence[Row], name: str, field: str) -> float | None:
    """Return the fitted growth of a process's `field` over the samples' time, None for too few samples.

    All lives of the process share one slope, and each has a level of its own (least squares with fixed effects).
    """
    lives: dict[int, list[tuple[float, float]]] = {}
    begins_s: dict[int, float] = {}
    for row in samples:
        process = row["processes"].get(name)
        if process is None or not row["masks"]:
            continue
        if row["t_s"] - begins_s.setdefault(process["pid"], row["t_s"]) >= WARM_S:
            lives.setdefault(process["pid"], []).append((row["t_s"], process[field]))
    deviations = [np.array(life) - np.mean(life, axis=0) for life in lives.values() if len(life) > 2]
    if not deviations:
        return None
    times, values = np.concatenate(deviations).T
    return float(times @ values / (times @ times) * (samples[-1]["t_s"] - samples[0]["since_s"]))


def measure_recovery(rows: Sequence[Row]) -> float | None:
    """Return the seconds from the end of the overload to the first second in which no frame was too old."""
    return next((float(row["seconds"]) for row in select(rows, "recovery")), None)


def make_checks(rows: Sequence[Row]) -> list[Check]:
    """Return what the run had to show, each with its bound."""
    head = rows[0]
    samples = select(rows, "sample")
    calm = find_calm(rows)
    last = samples[-1]
    phases = {phase: [row for row in samples if row["phase"] == phase] for phase in ("overload", "quiet")}
    load_ms = next((1000 / row["load_hz"] for row in select(rows, "phase")), 0.0)
    gap_s = max(row["longest_gap_s"] for row in samples)
    ages = [list_ages(calm, "cam0"), list_ages(phases["overload"], "load")]
    age = "age at the start of the step, p99"
    calm_ms, loaded_ms = (percentile(found, 0.99) if found else None for found in ages)
    grown_mb = fit_growth(phases["quiet"], "node", "rss_mb")
    opened = fit_growth(samples, "node", "descriptors")
    return [
        Check("ids with two meanings", float(last["confused_ids"]), 0, ""),
        Check("ids given twice", float(last["reused_ids"]), 0, ""),
        Check("epochs that changed where they had to stay", float(last["lost_epochs"]), 0, ""),
        Check("longest time without masks of cam0", gap_s, head["max_gap_s"], "s"),
        Check("processes that do not run at the end", float(len(last["missing"])), 0, ""),
        Check("growth of the node's memory in the quiet end", grown_mb, MAX_GROWTH_MB, "MB"),
        Check("growth of the node's descriptors", opened, MAX_GROWTH_DESCRIPTORS, ""),
        Check(f"{age}, without faults", calm_ms, 1000 / head["camera_hz"] + MARGIN_MS, "ms"),
        Check(f"{age}, under overload", loaded_ms, load_ms + MARGIN_MS, "ms"),
        Check("recovery after the overload", measure_recovery(rows), MAX_RECOVERY_S, "s"),
        *(
            Check("episodes lost without a word", float(len(row["lost"])), 0, "")
            for row in select(rows, "episodes")
        ),
    ]


def summarise(rows: Sequence[Row]) -> Row:
    """Return the summary of a log: counts, checks, and whether all that could be checked has passed."""
    samples = select(rows, "sample")
    faults = select(rows, "fault")
    if not samples:
        return {"settings": rows[0] if rows else {}, "seconds": 0.0, "checks": [], "passed": False}
    checks = make_checks(rows)
    kinds = [f"{row['fault']} {row['process']}" for row in faults]
    return {
        "settings": {key: value for key, value in rows[0].items() if key != "kind"},
        "seconds": samples[-1]["t_s"],
        "masks": sum(row["masks"] for row in samples),
        "faults": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "restarts": samples[-1]["restarts"],
        "ids": samples[-1]["ids"],
        "epochs": samples[-1]["epochs"],
        "episodes": [{name: row[name] for name in EPISODES} for row in select(rows, "episodes")],
        "rss_mb": {round(row["t_s"] / 60, 1): rss for row, rss in _read_memory(samples)},
        "highest_rss_mb": max(row["processes"].get("node", {}).get("rss_mb", 0.0) for row in samples),
        "over_budget": max(row["over_budget"] for row in samples),
        "highest_shed_level": max(row["shed_level"] for row in samples),
        "checks": [{**check._asdict(), "passed": check.passed} for check in checks],
        "passed": all(check.passed is not False for check in checks),
    }


def _read_memory(samples: Sequence[Row]) -> Iterator[tuple[Row, float]]:
    """Yield some fifteen of the samples with the node's resident memory in MB; those without a node are left out."""
    for row in samples[:: max(1, len(samples) // 15)]:
        if "node" in row["processes"]:
            yield row, row["processes"]["node"]["rss_mb"]


def describe(summary: Row) -> Iterator[str]:
    """Yield the lines of a table of the checks."""
    yield f"{summary['seconds']:.0f} s, {summary.get('masks', 0)} masks, faults: {summary.get('faults', {})}"
    for check in summary["checks"]:
        word = {True: "passed", False: "FAILED", None: "not measured"}[check["passed"]]
        value = "-" if check["value"] is None else f"{check['value']:.2f}"
        yield f"{word:13s} {check['name']:52s} {value:>9s}  at most {check['bound']:.1f} {check['unit']}"


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw age, memory and descriptors over time, with the faults as vertical lines."""
    samples = select(rows, "sample")
    faults = select(rows, "fault")
    minutes = [row["t_s"] / 60 for row in samples]
    with draw(path, 3, 1, (10, 8), sharex=True) as (ages, memory, descriptors):
        for fraction, style in ((0.5, "-"), (0.99, ":")):
            found = (list_ages([row], "cam0") for row in samples)
            values = [percentile(ages_ms, fraction) if ages_ms else np.nan for ages_ms in found]
            ages.plot(minutes, values, style, color="tab:blue", label=f"p{100 * fraction:.0f}")
        ages.set(ylabel="age at step start, ms", yscale="log")
        names = sorted({name for row in samples for name in row["processes"]})
        lower = ((memory, "rss_mb", "resident memory, MB"), (descriptors, "descriptors", "descriptors"))
        for axis, field, label in lower:
            for name in names:
                values = [row["processes"].get(name, {}).get(field, np.nan) for row in samples]
                axis.plot(minutes, values, label=name)
            axis.set(ylabel=label, ylim=(0, None))
        for axis in (ages, memory, descriptors):
            for row in faults:
                axis.axvline(row["t_s"] / 60, color=COLOURS[row["fault"]], alpha=0.3, linewidth=0.8)
        for row in samples:
            if row["phase"] == "overload":
                ages.axvspan(row["since_s"] / 60, row["t_s"] / 60, color="tab:gray", alpha=0.2, linewidth=0)
        ages.legend(loc="upper right")
        memory.legend(loc="upper right")
        faults_text = "red: kill -9, purple: SIGSTOP, orange: SIGSTOP for a while, grey: overload"
        descriptors.set(xlabel=f"minutes; {faults_text}")


def write_results(log: Path) -> Row:
    """Write summary.json and plot.png beside a log; return the summary."""
    rows = read_json_lines(log)
    summary = summarise(rows)
    (log.parent / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    if select(rows, "sample"):
        plot(rows, log.parent / "plot.png")
    return summary
