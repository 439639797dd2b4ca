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

NOTES = {
    "latency": """**The step on a CPU.** In float32, the step of the small tracker takes 3.23, 6.74 and 20.8 GFLOP
at 1, 4 and 16 objects (3.59, 7.15 and 21.4 before the decoder, the pyramid and the memory write were regrouped).
`python -m tools.bench.latency.step_profile` shows what the time is spent on, and the floor: the same arithmetic at the
rate of sgemm in the same run. In a profile of one thread at 1, 4 and 16 objects, on a machine with other work, 79, 70
and 73 % of the time were matrix products, convolutions and fused attention. The rest was the softmax of the memory read
(2, 8 and 7 %), copies (5 %), norms (1, 3 and 4 %), activations (2 %), and sums, rotations and the interpreter (10 %).

With one object, about half of the time is the encoder's. Five sixths of the encoder's time are matrix products,
attention and convolutions in oneDNN, at 85 % of sgemm's rate. That part is the same in transformers, and bounds the
ratio. Compiling does not change this: in one run, inductor's code took 0.96 of the eager CPU time for the encoder, 0.84
for the memory write and 1.19 for the decoder. bfloat16 does, on a CPU with AMX: large products run at 7 times the rate
of float32, and the step is then bound by softmax, norms and the number of operations.
""",
}


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
            note = f"{NOTES[group]}\n" if group in NOTES else ""
            sections.append(f"## {title}\n\n{note}{_table(rows, machines)}\n")
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
