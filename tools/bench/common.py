"""Common parts of all benchmarks: command-line options, statistics, figures printed and written as JSON.

A figure is a number with its unit, its target where one was set, and its spread where it was measured in several
runs. The JSON also says how to measure it again, when, of which commit, on which machine and with which versions it was
measured.
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from sam3_node.errors import find_version
from tools.command import new_parser

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tools/bench/results"
SHARED = ROOT.parent / "shared"
"""Default place of public weights, videos and labelled clips that are not part of the repository."""

RUNS = 5
"""Paired runs of a benchmark that compares two implementations."""

RATIO = "x"
"""Unit of a ratio; ratios come first in the JSON, since they depend on the machine least."""

PACKAGES = {
    "torch": "torch",
    "transformers": "transformers",
    "numpy": "numpy",
    "opencv": "opencv-python",
    "pyzmq": "pyzmq",
    "sam3_node": "sam3-node",
}
CPU_FLAGS = {"avx512": "avx512f", "amx": "amx_tile"}

STDOUT = Path("-")
"""Value of --json without a file, where the benchmark allows that."""

OPTIONS = {
    "seconds": "length of each measurement",
    "fps": "frames a second of the camera",
    "objects": "tracked objects",
    "readers": "readers of the frames",
    "model": "weights, as model.name of the node",
    "threads": "CPU threads of the model; 0 lets torch choose",
    "device": "as model.device of the node",
}
"""Help of the options that several benchmarks have."""

Record = dict[str, Any]


def make_parser(
    description: str | None,
    runs: int = 0,
    runs_note: str = "",
    print_json: bool = False,
    **defaults: float | str,
) -> argparse.ArgumentParser:
    """Return a parser with --json, with --runs if `runs`, its default, is not 0, and with these of OPTIONS.

    With `print_json` the file may be left out: the benchmark then prints JSON to standard output and nothing else.
    """
    parser = new_parser(description)
    more: Record = {"nargs": "?", "const": STDOUT} if print_json else {}
    text = "write the figures to this file" + ("; without a file, print only JSON" if print_json else "")
    parser.add_argument("--json", type=Path, metavar="FILE", help=text, **more)
    if runs:
        text = f"paired runs for the spread of the ratios (default {runs}{runs_note})"
        parser.add_argument("--runs", type=int, default=runs, help=text)
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=OPTIONS[name])
    return parser


class Figures:
    """Figures of one benchmark run; written to a JSON file at the end.

    Make it before measuring: it keeps the machine's load at that time.
    """

    def __init__(
        self, module: str, arguments: Sequence[str] | None = None, group: str = "", show: bool = True
    ) -> None:
        """`module` is the benchmark's name below tools.bench, such as "latency.step"; it begins with its group.

        `group` is the group of a benchmark whose name does not. `show`: print each figure as it is added.
        """
        self._show = show
        words = sys.argv[1:] if arguments is None else arguments
        self._context: Record = {
            "group": group or module.partition(".")[0],
            "command": shlex.join(["python", "-m", f"tools.bench.{module}", *_without_json(words)]),
            "machine": describe_machine(),
            "versions": read_versions(),
            "date": datetime.now(UTC).date().isoformat(),
            "commit": find_commit(),
        }
        self._figures: list[Record] = []

    @property
    def records(self) -> list[Record]:
        """The figures so far, in the order in which they were added."""
        return self._figures

    def add(
        self,
        figure: str,
        values: float | Sequence[float],
        unit: str,
        target: str = "",
        interval: tuple[float, float] | None = None,
    ) -> None:
        """Keep and print a figure. Several values are runs: the median is the value, and their spread is kept.

        `interval` is the 95 % interval of the value.
        """
        runs = [values] if isinstance(values, (int, float)) else values
        low = float(min(runs))
        median = float(statistics.median(runs))
        high = float(max(runs))
        record: Record = {"figure": figure, "unit": unit, "value": median}
        if runs is values:
            record["spread"] = {"min": low, "median": median, "max": high, "runs": len(runs)}
        if interval is not None:
            record["interval"] = dict(zip(("low", "high"), interval, strict=True))
        if target:
            record["target"] = target
        self._figures.append(record)
        if self._show:
            bound = f" (target: {target})" if target else ""
            print(f"{figure}: {format_value(record)} {unit}{bound}", flush=True)

    def add_percentiles(
        self, figure: str, values: Sequence[float], unit: str, median: str = "", p95: str = ""
    ) -> None:
        """Add the median and the 95th percentile of many values, with these targets."""
        for name, share, target in (("median", 50, median), ("p95", 95, p95)):
            self.add(f"{figure} {name}", float(np.percentile(values, share)), unit, target)

    def write(self, path: Path | None) -> None:
        """Write the figures to a JSON file, ratios first; do nothing where `path` is None."""
        if path is None:
            return
        ratios_first = sorted(self._figures, key=lambda record: record["unit"] != RATIO)
        records = [record | self._context for record in ratios_first]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(records, indent=1) + "\n")
        print(f"wrote {path}", file=sys.stderr)


def format_value(record: Record) -> str:
    """Return the value with its spread or interval: "1.52 (1.48 to 1.55, 5 runs)", "72 (64 to 79 in 95 %)"."""
    text = _number(record["value"], record["unit"])
    if interval := record.get("interval"):
        low, high = (_number(interval[key], record["unit"]) for key in ("low", "high"))
        return f"{text} ({low} to {high} in 95 %)"
    spread = record.get("spread")
    if not spread or spread["runs"] == 1:
        return text
    low, high = (_number(spread[key], record["unit"]) for key in ("min", "max"))
    return f"{text} ({low} to {high}, {spread['runs']} runs)"


def _number(value: float | str, unit: str) -> str:
    if isinstance(value, str):
        return value
    if unit == RATIO:
        return f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"


def _without_json(words: Sequence[str]) -> list[str]:
    """Drop `--json FILE` from the words of a command."""
    pairs = zip(("", *words), words, strict=False)
    return [word for before, word in pairs if before != "--json" and word.partition("=")[0] != "--json"]


def describe_machine() -> Record:
    """Return the CPU, the cores of this process, the load averages, the CPU's wide instructions and the memory."""
    lines = _lines("/proc/cpuinfo")
    flags = set(_value(lines, "flags").split())
    memory_kb = _value(_lines("/proc/meminfo"), "MemTotal").split()
    machine: Record = {
        "cpu": _value(lines, "model name") or platform.processor() or platform.machine(),
        "cores": count_cores(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "memory_gb": round(int(memory_kb[0]) / 1e6, 1) if memory_kb else None,
    }
    return machine | {name: flag in flags for name, flag in CPU_FLAGS.items()}


def find_commit() -> str:
    """Return the commit of this checkout, with "-dirty" where files have changed since; "unknown" without git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=8", "--exclude=*"]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"


def count_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text().splitlines() if file.is_file() else []


def _value(lines: Sequence[str], key: str) -> str:
    """Return the value of the first `key : value` line; empty where there is none."""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


def read_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter for speed."""
    found = {name: find_version(package) or "not installed" for name, package in PACKAGES.items()}
    return {"python": platform.python_version(), **found}


def percentile(values: Sequence[float], fraction: float) -> float:
    """Return the value below which `fraction` (0..1) of all values lie."""
    return sorted(values)[int(fraction * (len(values) - 1))]


def time_cpu(work: Callable[[], object]) -> float:
    """Return the CPU time of some work in this process, in ms."""
    begin_s = time.process_time()
    work()
    return 1e3 * (time.process_time() - begin_s)


def objects_text(count: int) -> str:
    """Return "1 object" or "4 objects"."""
    return f"{count} object" if count == 1 else f"{count} objects"
