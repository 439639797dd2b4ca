"""Write docs/benchmarks.md from the JSON files that the benchmarks have written to tools/bench/results.

python -m tools.bench.report
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from tools.bench.common import RATIO, RESULTS, ROOT, Record

PAGE = ROOT / "docs/benchmarks.md"
GROUPS = {
    "latency": "Latency and memory of the node",
    "accuracy": "Accuracy",
    "engines": "Engines and precisions",
    "replay": "Replay",
}
HEADING = """# Benchmarks

Every figure on this page has the command that measures it again, the date, and the machine. `python -m
tools.bench.report` writes this page from the JSON files in `tools/bench/results`; do not edit it by hand. To renew a
figure, run its command with `--json tools/bench/results/NAME.json`, then write the page again.

A value with a range is a median with the minimum and maximum over that number of runs. A ratio has the unit x; it
comes from paired runs, in which both sides alternate on the same machine. "Load" is the one-minute load average when
the benchmark began. More load than cores gives long times and wide ranges.
"""


def read_records(folder: Path = RESULTS) -> list[Record]:
    """Read the records of all result files, in the order of the files' names."""
    records: list[Record] = []
    for path in sorted(folder.glob("*.json")):
        records += json.loads(path.read_text())
    return records


def format_page(records: Iterable[Record]) -> str:
    """Return the page: a table for each group, then the machines."""
    records = list(records)
    machines: dict[str, int] = {}
    sections = [HEADING]
    for group, title in GROUPS.items():
        rows = [record for record in records if record["group"] == group]
        rows.sort(key=lambda record: "note" in record)  # figures of earlier versions come last
        if rows:
            sections.append(f"## {title}\n\n{_table(rows, machines)}\n")
    lines = [f"{number}. {description}" for description, number in machines.items()]
    sections.append("## Machines\n\n" + "\n".join(lines) + "\n")
    return "\n".join(sections)


def _table(records: list[Record], machines: dict[str, int]) -> str:
    rows = ["| figure | value | unit | target | command | date | machine |", "|---|---|---|---|---|---|---|"]
    for record in records:
        number = machines.setdefault(_describe(record), len(machines) + 1)
        load = record["machine"].get("load_average")
        cells = (
            record["figure"] + (f" ({record['remark']})" if "remark" in record else ""),
            format_value(record),
            record["unit"],
            record.get("target", ""),
            f"`{record['command']}`",
            record["date"],
            f"{number}" + (f", load {load[0]:g}" if load else ""),
        )
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def format_value(record: Record) -> str:
    """Return the value with its spread, such as "1.52 (1.48 to 1.55, 5 runs)"."""
    text = _number(record["value"], record["unit"])
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


def _describe(record: Record) -> str:
    """Describe the machine and the versions in one line."""
    machine, versions = record["machine"], record.get("versions", {})
    parts = [machine["cpu"]]
    if "cores" in machine:
        parts.append(f"{machine['cores']} cores")
    if machine.get("memory_gb"):
        parts.append(f"{machine['memory_gb']:g} GB")
    for key, name in (("avx512", "AVX-512"), ("amx", "AMX")):
        if key in machine:
            parts.append(name if machine[key] else f"no {name}")
    parts += [f"{name} {number}" for name, number in versions.items()]
    if "note" in record:
        parts.append(record["note"])
    return ", ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=PAGE, help="page to write")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(format_page(read_records()))
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
