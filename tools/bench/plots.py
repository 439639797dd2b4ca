"""Draw the plots of docs/benchmarks.md from the results."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tools.bench.common import Record
from tools.plots import draw

Results = dict[str, list[Record]]
COVERAGES = (50, 65, 80)


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
            points = sorted(
                (int(rate), record["value"]) for (name, rate), record in records.items() if name == kind
            )
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
            for suffix, style, label in (
                (None, "o-", model),
                (", transformers", "o--", f"{model}, transformers"),
            ):
                points = sorted((int(count), r) for (count, other), r in records.items() if other == suffix)
                values = [record["value"] for _, record in points]
                spreads = [record["spread"] for _, record in points]
                low = [value - spread["min"] for value, spread in zip(values, spreads, strict=True)]
                high = [spread["max"] - value for value, spread in zip(values, spreads, strict=True)]
                counts = [count for count, _ in points]
                axis.errorbar(counts, values, (low, high), fmt=style, color=colour, capsize=3, label=label)
        axis.set(xlabel="objects", ylabel="time of a step, ms", xticks=(1, 4, 16), ylim=(0, None))
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


MEMORY = {
    "quiet end of an hour\nwith a fault each minute": (
        "latency-soak",
        "growth of the node's memory in the quiet end",
    ),
    "5,000 steps, 4 objects": ("carried-over", "growth of resident memory over 5,000 steps"),
    "prompts on past frames\nevery 8 s": ("latency-past", "growth of the node's resident memory meanwhile"),
    "worst of 24 attacks": ("latency-attacks", "growth of memory"),
}
"""Bars of the plot: the result file, and words of the figure."""


def plot_memory(results: Results, path: Path) -> None:
    """Draw the node's memory over a soak, or, without a soak that kept it, how much it grew in each long run."""
    records = match_values(
        results["latency-soak"], r"chaos of .* minutes: the node's memory after (.*) minutes"
    )
    if records:
        with draw(path) as axis:
            points = [(float(minute), record["value"]) for (minute,), record in records.items()]
            axis.plot(*zip(*points, strict=True), "o-")
            axis.set(xlabel="minutes", ylabel="resident memory of the node, MB", ylim=(0, None))
        return
    with draw(path, size=(6, 2.6)) as axis:
        for place, (file, words) in enumerate(MEMORY.values()):
            record = next(record for record in results[file] if words in record["figure"])
            bound = read_bound(record) if "target" in record else 0.0
            axis.barh(place, record["value"], color="C0")
            text = f"{record['value']:.1f} {record['unit']}"
            axis.text(max(record["value"], bound, 0) + 1, place, text, va="center")
            if bound:
                axis.plot([bound, bound], [place - 0.4, place + 0.4], "k-")
        axis.set(xlabel="growth of the node's memory", xlim=(-8, 105))
        axis.set_yticks(range(len(MEMORY)), MEMORY)
        axis.invert_yaxis()


PLOTS = (
    Plot(
        "bench-latency-by-rate.png",
        "Age of a frame at the start of its step by the camera's rate",
        """**Latency by rate.** Age of a frame when its step begins, by the camera's rate: nano, 4 objects, drawn scene.
A camera faster than the node does not make frames older: the node takes the newest frame and skips the others
([latency-age](benchmarks/latency-age.md)).""",
        plot_latency,
    ),
    Plot(
        "bench-scaling-by-objects.png",
        "Time of a step by the number of objects",
        """**Scaling by objects.** Time of a step in float32, median with minimum and maximum of five runs, beside
transformers' streaming inference on the same frames. `small` is a tracker of SAM 3's class with 4.5 M parameters
([latency-step](benchmarks/latency-step.md)).""",
        plot_scaling,
    ),
    Plot(
        "bench-risk-coverage.png",
        "Share of wrong masks by the share of masks that are kept",
        """**Risk and coverage.** Share of masks with an IoU below 0.5 if the surest 50, 65 or 80 % of masks are kept,
by the calibrated confidence and by the decoder's score alone. The cross is the target, 5 % wrong at 65 %
([accuracy-doubt](benchmarks/accuracy-doubt.md)).""",
        plot_risk,
    ),
    Plot(
        "bench-memory.png",
        "Growth of the node's memory in long runs",
        """**Memory in long runs.** Growth of resident memory in each run, with bounds in black; the node's memory over
time where a soak has kept it, which the results so far have not. [Development](development.md#long-runs) shows the
course of the hour ([soak](benchmarks/soak.md), [latency-past](benchmarks/latency-past.md),
[latency-attacks](benchmarks/latency-attacks.md)).""",
        plot_memory,
    ),
)
