"""Write docs/benchmarks.md and its plots from the JSON files in tools/bench/results.

`python -m tools.bench.report latency-step` prints all figures of a benchmark instead, with commands and machines.
"""

import ast
import json
import re
import tomllib
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from tools.bench.common import RESULTS, ROOT, Record, format_value
from tools.command import new_parser, read_json_lines
from tools.docs.tables import code, table
from tools.plots import draw

Results = dict[str, list[Record]]
COVERAGES = (50, 65, 80)
HEADLINES: dict[str, list[list[str]]] = tomllib.loads(Path(__file__).with_name("headlines.toml").read_text())
"""Sections of the page: for each line its text, the result file and the figure."""
DOCS = ROOT / "docs"
GROUPS = ("latency", "accuracy", "engines", "replay")
HEADING = """# Benchmarks

The figures that matter most. All are from two CPU cores, but for the plot of GPUs. Each name links to the file of its
result: the command that measures it again, the commit, the date, the machine and its load.
`python -m tools.bench.report latency-step` prints all figures of a benchmark.

`python -m tools.bench.report` writes this page. To renew a figure, run its command with `--json
tools/bench/results/NAME.json`, then write the page again.

A value with a range is a median with the minimum and maximum over that number of runs. A ratio has the unit x; it
comes from paired runs, in which both sides alternate on the same machine.
"""


GONE = """Figures that other pages quote, of benchmarks that are gone. Their commands are those of the commit in the
result:"""
GPU_LINES = RESULTS / "gpu"
"""Folder of the lines that `tools.bench.gpu` wrote."""


class GpuSeries(NamedTuple):
    """A line of the plot of GPUs: figures of `tools.bench.gpu` that differ by their number of objects."""

    label: str
    file: str
    section: str
    variant: str
    style: str
    run: int | None = None


GPU_SERIES = (
    GpuSeries("SAM 3, one H100", "h100", "together", "defaults", "C0o-", 3),
    GpuSeries("SAM 3, compiled", "h100", "together", "compiled, graphs", "C0o:", 3),
    GpuSeries("SAM 3.1, one H200", "h200", "multiplex", "defaults", "C1o-"),
    GpuSeries("SAM 3.1, compiled", "h200", "multiplex", "compiled, graphs", "C1o:"),
)


class Plot(NamedTuple):
    """A picture of docs/images, with what the page says of it."""

    name: str
    title: str
    caption: str
    write: Callable[[Results, Path], None]


def match_values(records: list[Record], pattern: str) -> dict[tuple[str, ...], Record]:
    """Return the records whose figure matches a whole pattern, by the pattern's groups."""
    matches = ((re.fullmatch(pattern, record["figure"]), record) for record in records)
    return {match.groups(): record for match, record in matches if match}


def read_bound(record: Record) -> float:
    """Return the number in a target such as "under 120.0 ms"."""
    return float(re.findall(r"[\d.]+", record["target"])[0])


def plot_latency(results: Results, path: Path) -> None:
    """Draw the age of frames at the start of their step over the camera's rate."""
    pattern = r"age of the frame at the start of its step, (p50|p99), scene:shapes at (\d+) Hz, 4 objects"
    records = match_values(results["latency-age"], pattern)
    with draw(path) as axis:
        for kind, style in (("p99", "o-"), ("p50", "o--")):
            points = sorted((int(rate), r["value"]) for (name, rate), r in records.items() if name == kind)
            axis.plot(*zip(*points, strict=True), style, label=kind)
        bounds = sorted((int(rate), read_bound(r)) for (_, rate), r in records.items() if "target" in r)
        axis.plot(*zip(*bounds, strict=True), "k:", label="bound of p99")
        axis.set(xlabel="rate of the camera, Hz", ylabel="age at the start of the step, ms", ylim=(0, None))
        axis.legend()


def plot_scaling(results: Results, path: Path) -> None:
    """Draw the time of a step over the number of objects, ours beside transformers'."""
    with draw(path) as axis:
        for file, model, colour in (("latency-step-small", "small", "C0"), ("latency-step", "nano", "C1")):
            records = match_values(results[file], rf"frame step of {model}, (\d+) objects?(, transformers)?")
            for suffix, style in ((None, "o-"), (", transformers", "o--")):
                points = sorted((int(count), r) for (count, other), r in records.items() if other == suffix)
                counts = [count for count, _ in points]
                values = [record["value"] for _, record in points]
                low = [record["value"] - record["spread"]["min"] for _, record in points]
                high = [record["spread"]["max"] - record["value"] for _, record in points]
                shown = {"color": colour, "capsize": 3, "label": f"{model}{suffix or ''}"}
                axis.errorbar(counts, values, (low, high), fmt=style, **shown)
        axis.set(xlabel="objects", ylabel="time of a step, ms", xticks=(1, 4, 16), ylim=(0, None))
        axis.legend()


def read_step_times(series: GpuSeries) -> list[tuple[int, float]]:
    """Return the number of objects and the median time of a step in ms, for each figure of a series."""
    points = []
    for line in read_json_lines(GPU_LINES / f"{series.file}.jsonl"):
        found = re.fullmatch(rf"{re.escape(series.variant)}, (\d+) objects", line["figure"])
        is_meant = line["section"] == series.section and line.get("run") == series.run
        if found and is_meant and "value" in line:
            points.append((int(found[1]), float(line["value"]["p50"])))
    return sorted(points)


def plot_gpu(results: Results, path: Path) -> None:
    """Draw the time of a step on a GPU over the number of objects, for SAM 3 and SAM 3.1."""
    with draw(path) as axis:
        for series in GPU_SERIES:
            axis.plot(*zip(*read_step_times(series), strict=True), series.style, label=series.label)
        axis.set_xscale("log", base=2)
        axis.set_xticks((1, 4, 16, 64), ("1", "4", "16", "64"))
        axis.set(xlabel="objects", ylabel="time of a step, ms", ylim=(0, None))
        axis.legend()


def plot_risk(results: Results, path: Path) -> None:
    """Draw the share of wrong masks over the share of masks that are kept."""
    pattern = rf"wrong at ({'|'.join(map(str, COVERAGES))}) % coverage by (confidence|score alone), (.+)"
    records = match_values(results["accuracy-doubt"], pattern)
    sets = list(dict.fromkeys(name for _, _, name in records))
    with draw(path, 1, len(sets), (3 * len(sets), 3), sharey=True, squeeze=False) as axes:
        for axis, name in zip(axes[0], sets, strict=True):
            for by, style in (("confidence", "o-"), ("score alone", "o--")):
                values = [records[str(coverage), by, name]["value"] for coverage in COVERAGES]
                axis.plot(COVERAGES, values, style, label=by)
            axis.plot([65], [5], "k+", markersize=12)
            axis.set(title=name, xlabel="masks kept, %", xticks=COVERAGES, ylim=(0, 11))
            axis.grid(alpha=0.3)
        axes[0][0].set_ylabel("wrong masks, %")
        axes[0][0].legend()


def plot_streaming(results: Results, path: Path) -> None:
    """Draw J of a replay, of the masks held at each moment, and of those moved to it, for each set of clips."""
    kinds = ("offline", "streaming", "streaming and moved")
    records = match_values(results["accuracy-streaming"], rf"J ({'|'.join(kinds)}), (.+)")
    names = list(dict.fromkeys(name for _, name in records))
    with draw(path, size=(8, 3.4)) as axis:
        for number, kind in enumerate(kinds):
            places = [place + 0.27 * number for place in range(len(names))]
            axis.bar(places, [records[kind, name]["value"] for name in names], 0.25, label=kind)
        labels = [name.replace(", ", "\n") for name in names]
        axis.set_xticks([place + 0.27 for place in range(len(names))], labels, fontsize=7)
        axis.set(ylabel="J", ylim=(0, 1))
        axis.legend(ncols=3)


def plot_memory(results: Results, path: Path) -> None:
    """Draw the node's memory over a soak."""
    pattern = r"chaos of .* minutes: the node's memory after (.*) minutes"
    records = match_values(results["latency-soak"], pattern)
    with draw(path) as axis:
        points = [(float(minute), record["value"]) for (minute,), record in records.items()]
        axis.plot(*zip(*points, strict=True), "o-")
        axis.set(xlabel="minutes", ylabel="resident memory of the node, MB", ylim=(0, None))


PLOTS = (
    Plot(
        "bench-latency-by-rate.png",
        "Age of a frame at the start of its step by the camera's rate",
        "**Latency by rate.** Age of a frame when its step begins: nano, 4 objects, drawn scene (`latency-age`).",
        plot_latency,
    ),
    Plot(
        "bench-scaling-by-objects.png",
        "Time of a step by the number of objects",
        """**Scaling by objects.** Time of a step in float32, median with minimum and maximum of five runs, and that of
transformers on the same frames. `small` is a tracker of SAM 3's class with 4.5 M parameters (`latency-step`).""",
        plot_scaling,
    ),
    Plot(
        "bench-gpu-by-objects.png",
        "Milliseconds of a step by the number of objects, SAM 3 and SAM 3.1 on a GPU",
        """**Milliseconds by number of objects.** Median time of a step at full size with random weights: SAM 3 on one
H100 with up to 16 objects, SAM 3.1 on one H200 with up to 64. An H200 has the arithmetic of an H100, and memory that
is faster by 40 % ([raw lines](../tools/bench/results/gpu)).""",
        plot_gpu,
    ),
    Plot(
        "bench-risk-coverage.png",
        "Share of wrong masks by the share of masks that are kept",
        """**Risk and coverage.** Share of masks with an IoU below 0.5 if the surest 50, 65 or 80 % of masks are kept,
by the confidence and by the decoder's score alone. The cross is the target (`accuracy-doubt`).""",
        plot_risk,
    ),
    Plot(
        "bench-streaming.png",
        "J of a replay and of the masks held at each moment of a live camera",
        """**Live against offline.** J when every frame is tracked and judged by its own truth (offline), and of the
masks that had arrived at each moment of a live camera, judged by the truth of that moment. "Moved" is
`masks.moved_to(now)` of the client. Camera, node and subscriber shared two cores with much other work: masks were
about 260 ms old, and half of them too old to be moved (`accuracy-streaming`).""",
        plot_streaming,
    ),
    Plot(
        "bench-memory.png",
        "Memory of the node over half an hour",
        "**Memory over time.** Resident memory of a node with a fault each minute; it falls at restarts (`soak`).",
        plot_memory,
    ),
)


def read_results(folder: Path = RESULTS) -> Results:
    """Read the records of all result files, by the file's name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def name_bench(record: Record) -> str:
    """Return the name of a record's benchmark, such as "latency-step"."""
    module = str(record["command"]).split()[2].removeprefix("tools.bench.")
    return module.replace(".", "-").replace("_", "-")


def find_bench(name: str) -> Path | None:
    """Return the file of a benchmark; None for one that is gone, whose command is that of its commit."""
    places = (name.replace("-", "_"), name.replace("-", "/", 1).replace("-", "_"))
    paths = (ROOT / f"tools/bench/{place}.py" for place in places)
    return next((path for path in paths if path.is_file()), None)


def group_records(results: Results) -> dict[str, list[Record]]:
    """Return the records of each benchmark, by its name."""
    records = sorted((record for rows in results.values() for record in rows), key=name_bench)
    return {name: list(rows) for name, rows in groupby(records, key=name_bench)}


def format_pages(results: Results) -> dict[str, str]:
    """Return all figures of each benchmark as text, by the benchmark's name."""
    return {name: format_detail(name, records) for name, records in group_records(results).items()}


def format_overview(results: Results) -> str:
    """Return docs/benchmarks.md: headlines, plots and a list of all benchmarks."""
    sections = [HEADING]
    for title, headlines in HEADLINES.items():
        rows = []
        for text, file, figure in headlines:
            record = _find_figure(results[file], figure)
            link = f"[{text}](../tools/bench/results/{file}.json)"
            rows.append((link, f"{format_value(record)} {record['unit']}".strip(), record.get("target", "")))
        sections.append(f"## {title}\n\n{table(('figure', 'value', 'target'), rows)}\n")
    sections.append("## Plots\n")
    sections += [f"![{plot.title}](images/{plot.name})\n\n{plot.caption}\n" for plot in PLOTS]
    names = list(group_records(results))
    kept = ", ".join(code(name) for name in names if find_bench(name))
    gone = ", ".join(code(name) for name in names if not find_bench(name))
    sections.append(f"## All benchmarks\n\n{kept}.\n\n{GONE} {gone}.\n")
    return "\n".join(sections)


def _find_figure(records: list[Record], figure: str) -> Record:
    """Return the record of a figure. Its name may end with what varies from run to run, in parentheses."""
    return next(
        record
        for record in records
        if record["figure"] == figure or record["figure"].startswith(f"{figure} (")
    )


def _describe_bench(name: str) -> str:
    """Return the first line of a benchmark's docstring."""
    path = find_bench(name)
    if path is None:
        return "The commands are those of the commit."
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]


def format_detail(name: str, records: list[Record]) -> str:
    """Return the text of one benchmark: a table of figures for each command and machine."""
    sections = [f"# {name}\n\n{_describe_bench(name)}\n"]
    for (command, origin), rows in groupby(records, key=lambda record: (record["command"], _origin(record))):
        cells = [
            (_name_figure(record), format_value(record), record["unit"], record.get("target", ""))
            for record in rows
        ]
        figures = table(("figure", "value", "unit", "target"), cells)
        sections.append(f"    {command}\n\n{origin}\n\n{figures}\n")
    return "\n".join(sections)


def _name_figure(record: Record) -> str:
    return f"{record['figure']} ({record['remark']})" if "remark" in record else str(record["figure"])


def _origin(record: Record) -> str:
    """Return the date, the commit, the machine with its load, and the versions."""
    machine = record["machine"]
    versions = record.get("versions", {})
    parts = [f"commit {record['commit']}", machine["cpu"]]
    if "cores" in machine:
        parts.append(f"{machine['cores']} cores")
    if machine.get("memory_gb"):
        parts.append(f"{machine['memory_gb']:g} GB")
    flags = {"AVX-512": machine.get("avx512"), "AMX": machine.get("amx")}
    parts += [name if has else f"no {name}" for name, has in flags.items() if has is not None]
    if machine.get("load_average"):
        parts.append(f"load average {machine['load_average'][0]:g}")
    parts += [f"{name} {number}" for name, number in versions.items()]
    parts += [record["note"]] if "note" in record else []
    return f"{record['date']}: {', '.join(parts)}"


def write_page(folder: Path) -> Iterator[Path]:
    """Write the page and its plots below a folder; yield the path of each."""
    results = read_results()
    (folder / "benchmarks.md").write_text(format_overview(results))
    yield folder / "benchmarks.md"
    for plot in PLOTS:
        plot.write(results, folder / "images" / plot.name)
        yield folder / "images" / plot.name


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--out", type=Path, default=DOCS, help="folder of the page")
    records = group_records(read_results())
    parser.add_argument("name", nargs="?", help="print this benchmark", choices=sorted(records))
    options = parser.parse_args()
    if options.name:
        print(format_detail(options.name, records[options.name]))
        return
    for path in write_page(options.out):
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
