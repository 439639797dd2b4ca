"""Keep and draw what the hours of training have brought: loss, and J on the validation scenes, over core-hours.

    python -m research.nano_history          draw docs/images/nano-history.png
    python -m research.nano_history --loss out/a/log.jsonl --before 4.2   keep a run's loss

`nano_history.json` holds the points. J is measured by `python -m tools.bench.accuracy.vos out/scenes/val --settings
prompt=box,prompt=point,prompt=mask`, and the agreement with the teacher on real pictures that were held aside by
`python -m training.nano agree nano --taught out/taught/held`. The dotted line is J = a + b log2(hours), by least
squares: b is what a doubling of the hours brings. Agreement has no such line: real pictures came late to the training.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from sam3_node.errors import ModelError, require

from training.nano.curves import read_log
from training.nano.steps import KINDS

HISTORY = Path(__file__).with_name("nano_history.json")
PICTURE = Path("docs/images/nano-history.png")
POINTS = 12
"""Points of a run's loss that are kept: each is the mean of a stretch of steps."""
AHEAD = 4
"""How far the line is drawn, as a multiple of the last point's hours."""
REAL = ("real pictures, box", "real pictures, point")


def thin_loss(records: list[dict[str, Any]], before: float) -> list[tuple[float, float]]:
    """Return core-hours and mean loss of some stretches of a run on one core that began at `before` core-hours."""
    rows = [(record["total"] / 3600 + before, record["loss"]) for record in records]
    parts = np.array_split(np.array(rows), min(POINTS, len(rows)))
    return [
        (round(float(hours), 4), round(float(loss), 4)) for hours, loss in (p.mean(axis=0) for p in parts)
    ]


def fit_line(points: list[dict[str, float]], kind: str) -> tuple[float, float]:
    """Return a and b of J = a + b log2(core-hours). Raises ModelError for fewer than two different hours."""
    hours = np.log2([point["core_hours"] for point in points])
    if len(np.unique(hours)) < 2:
        raise ModelError(f"expected points at two or more hours to fit a line, found {len(np.unique(hours))}")
    slope, at_one = np.polyfit(hours, [point[kind] for point in points], 1)
    return float(at_one), float(slope)


def draw_history(history: dict[str, Any], picture: Path) -> None:
    """Draw the loss of each run, and J by kind of prompt with its line, over core-hours."""
    plot = require("matplotlib.pyplot", "scenes")
    figure, (left, right) = plot.subplots(1, 2, figsize=(11, 4))
    for name, points in history["loss"].items():
        left.plot(*zip(*points, strict=True), label=name)
    left.set(title="loss while training")
    hours = [point["core_hours"] for point in history["validation"]]
    line = np.geomspace(min(hours), AHEAD * max(hours), 50)
    for colour, kind in enumerate(KINDS):
        at_one, slope = fit_line(history["validation"], kind)
        right.plot(hours, [point[kind] for point in history["validation"]], f"C{colour}o", label=kind)
        right.plot(line, at_one + slope * np.log2(line), f"C{colour}:")
    for kind in REAL:
        right.plot(hours, [point[kind] for point in history["validation"]], ".-", label=kind)
    right.set(title="J on validation scenes, and agreement on real pictures")
    for axis in (left, right):
        axis.set_xlabel("core-hours of training")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=80)
    plot.close(figure)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--loss", type=Path, help="log.jsonl of a run to keep the loss of")
    parser.add_argument("--before", type=float, default=0, help="core-hours of training before that run")
    parser.add_argument("--history", type=Path, default=HISTORY)
    parser.add_argument("-o", "--output", type=Path, default=PICTURE)
    args = parser.parse_args()
    history = json.loads(args.history.read_text())
    if args.loss:
        history["loss"][args.loss.parent.name] = thin_loss(read_log(args.loss), args.before)
        args.history.write_text(json.dumps(history, indent=1) + "\n")
    draw_history(history, args.output)
    for kind in KINDS:
        print(f"{kind}: {fit_line(history['validation'], kind)[1]:+.3f} J with each doubling of the hours")


if __name__ == "__main__":
    main()
