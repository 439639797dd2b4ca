"""Measure the confidence of masks: reliability, risk at a coverage and AUROC, on clips with true or pseudo-true masks.

    python -m tools.bench.accuracy.doubt                                  DAVIS in ../shared, and clips already labelled
    python -m tools.bench.accuracy.doubt --set NAME=FOLDER --set NAME=FOLDER
    python -m tools.bench.accuracy.doubt --names FOLDER                   the confidence of names, on rendered clips

A set is a folder of clips in DAVIS' layout: rendered ones that the fit has not seen (`python -m tools.scenes --split
val --clips 14 --frames 80 --seed 931 --scenario free=3,occlusion=3,leave=2,lookalike=3 -o out/scenes/doubt`), or real
video with pseudo-masks (`training.doubt.pseudo`), moved and bent (`python -m training.doubt.moved FOLDER -o
out/moved`).
Each object is prompted by its mask on its first frame. A mask is wrong if its IoU with the truth is below 0.5. Frames
on which no mask is published do not count. The tracks are recorded once; remove the folder of records to track again.
Names are measured on clips of similar things that the fit has not seen (`python -m tools.scenes --split test --scenario
similar=3,lookalike=1 --seed 42 --clips 24 --frames 48 --size 640x480 -o out/scenes/names`), with several prompts, with
single ones, and with absent ones; see `tools.doubt.names`.
"""

import argparse
from pathlib import Path

import numpy as np

from sam3_node.models import load_tracker
from sam3_node.settings import DetectorSettings, TrackerSettings
from tools.bench.common import ROOT, SHARED, Figures, make_parser
from tools.command import errors_in_one_line
from tools.doubt import names
from tools.doubt.measure import Played, auroc, calibration_error, play, reliability, risk_at, risk_coverage
from tools.doubt.record import record_folder
from tools.plots import draw

SETS = {
    "rendered, unseen": ROOT / "out/scenes/doubt",
    "DAVIS": SHARED / "data/davis",
    "DROID, pseudo-masks": ROOT / "out/droid-tracks",
    "real video, moved and bent": ROOT / "out/moved",
}
COVERAGES = (0.5, 0.65, 0.8)
EDGES = (0.0, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0)
MAX_RISK = "5"
MIN_AUROC = "0.95"
SORTS = (
    "names of things in the clip",
    "absent names with the colour of a thing",
    "absent names with the kind of a thing",
    "other absent names",
)
"""What the figures call each of `names.SHARED`."""


def measure_all(sets: dict[str, Path], args: argparse.Namespace) -> dict[str, Played]:
    """Record the clips that have no records yet, and play all of them."""
    model = load_tracker(args.model)
    return {
        name: play(record_folder(folder, model, args.records / name.replace(" ", "-"), ["mask"], args.clips))
        for name, folder in sets.items()
    }


def report(name: str, played: Played, figures: Figures) -> None:
    """Keep the figures of a set."""
    confidence = played.confidence
    right = played.right
    sure = confidence >= TrackerSettings().min_confidence
    figures.add(f"masks with IoU below 0.5, {name} ({len(right)} masks)", 100 * float((~right).mean()), "%")
    figures.add(f"AUROC by confidence, {name}", auroc(confidence, right), "AUROC", target=MIN_AUROC)
    figures.add(f"AUROC by score alone, {name}", auroc(played.score, right), "AUROC")
    for coverage in COVERAGES:
        percent = f"{100 * coverage:.0f} %"
        target = MAX_RISK if coverage == 0.65 else ""
        risk = 100 * risk_at(confidence, right, coverage)
        figures.add(f"wrong at {percent} coverage by confidence, {name}", risk, "%", target=target)
        risk = 100 * risk_at(played.score, right, coverage)
        figures.add(f"wrong at {percent} coverage by score alone, {name}", risk, "%")
    figures.add(f"masks that are not doubtful, {name}", 100 * float(sure.mean()), "%")
    if sure.any():
        figures.add(f"wrong among those, {name}", 100 * float((~right[sure]).mean()), "%", target=MAX_RISK)
    bins = reliability(confidence, right, EDGES)
    figures.add(f"expected calibration error, {name}", calibration_error(bins), "probability")
    for one in bins:
        what = f"right at confidence {one.low:g} to {one.high:g} (mean {one.confidence:.2f}, {one.masks} masks), {name}"
        figures.add(what, 100 * one.right, "%")


def report_names(args: argparse.Namespace, figures: Figures) -> None:
    """Keep the figures of names."""
    paths = list(names.record_folder(args.names, args.records / f"names-{args.names.name}", step=3, every=2))
    records, _ = names.load(paths)
    sure = records.confidence >= DetectorSettings().min_name_confidence
    for what, chosen in (
        ("all prompts", records.prompts > 0),
        ("several prompts", records.prompts > 1),
        ("one prompt", records.prompts == 1),
    ):
        right = records.right[chosen]
        kept = sure[chosen]
        confidence = records.confidence[chosen]
        at_65 = confidence >= np.quantile(confidence[right], 0.35)
        size = f"{len(paths)} clips, {len(set(records.track[chosen].tolist()))} tracks, {len(right)} masks"
        values = {
            f"wrong names among sure masks before, {what} ({size})": 100 * float((~right).mean()),
            f"wrong names among sure masks, {what}": 100 * float((~right[kept]).mean()),
            f"right names that stay sure, {what}": 100 * float((right & kept).sum() / right.sum()),
            f"wrong names at 65 % coverage, {what}": 100 * float((~right[at_65]).mean()),
        }
        for name, value in values.items():
            figures.add(name, value, "%", target="1" if "at 65" in name else "")
        figures.add(f"AUROC by name confidence, {what}", auroc(confidence, right), "AUROC")
    for index, what in enumerate(SORTS):
        chosen = records.shared == index
        if chosen.any():
            wrong = sure[chosen] & ~records.right[chosen]
            tracks = len(set(records.track[chosen].tolist()))
            size = f"{tracks} tracks, {chosen.sum()} masks"
            figures.add(f"surely wrong, {what} ({size})", 100 * float(wrong.mean()), "%", target="1")


def draw_curves(played: dict[str, Played], path: Path) -> None:
    """Draw the risk-coverage curve of each set, by confidence and by score alone."""
    with draw(path, 1, len(played), (3.6 * len(played), 3), sharey=True, squeeze=False) as axes:
        for axis, (name, result) in zip(axes[0], played.items(), strict=True):
            for label, values, style in (
                ("confidence", result.confidence, "-"),
                ("score alone", result.score, "--"),
            ):
                coverage, risk = risk_coverage(values, result.right)
                axis.plot(100 * coverage, 100 * risk, style, label=label)
            axis.plot([65], [5], "k+", markersize=12)
            axis.set(title=name, xlabel="coverage, % of masks", xlim=(0, 100), ylim=(0, 30))
            axis.grid(alpha=0.3)
        axes[0][0].set_ylabel("wrong masks, %")
        axes[0][0].legend()


def main() -> None:
    parser = make_parser(__doc__, model="nano")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=FOLDER", help="clips")
    parser.add_argument("--names", type=Path, help="rendered clips to measure the confidence of names on")
    parser.add_argument("--records", type=Path, default=ROOT / "out/doubt-records", help="records")
    parser.add_argument("--clips", type=int, default=0, help="number of first clips of each set; 0: all")
    parser.add_argument("--picture", type=Path, help="write the risk-coverage curves to this PNG file")
    args = parser.parse_args()
    figures = Figures("accuracy.doubt")
    if args.names:
        report_names(args, figures)
        figures.write(args.json)
        return
    chosen = {name: Path(folder) for name, _, folder in (item.partition("=") for item in args.set)}
    sets = chosen or {name: folder for name, folder in SETS.items() if folder.is_dir()}
    if not sets:
        raise SystemExit("error: expected clips to measure on, found none; give --set NAME=FOLDER")
    with errors_in_one_line():
        played = measure_all(sets, args)
    for name, result in played.items():
        report(name, result, figures)
    if args.picture:
        draw_curves(played, args.picture)
    figures.write(args.json)


if __name__ == "__main__":
    main()
