"""The command `sam3-node calibrate names`. Heavy packages are imported when it runs."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import SettingsError
from ..files import prepare_output, write_output
from ..processes.signals import print_notice
from ..settings import Settings
from .early_checks import check_named_files, check_source
from .engine import parse_names
from .parser import Commands, parse_count
from .progress import ProgressBar, align_rows

if TYPE_CHECKING:
    from ..replay.name_calibration import NamedMask, NameReport

EVERY = 3
"""Interval between the frames of a recording that are played."""
FEW = 50
"""Masks, with right or with wrong names, below which a warning says that they are few."""


def add_names_command(group: Commands) -> None:
    """Add the command `calibrate names`."""
    names = group.add("names", calibrate_names)
    names.add("sources RECORDING", "recordings; detector.prompts names all things that they show", nargs="+")
    names.add_path("-o, --out FILE.json", "file to write, for detector.name_calibration", required=True)
    text = "names of things that no recording shows, such as 'green box,red ball' [chosen, and printed]"
    names.add("--absent NAMES", text, parse_names, ())
    names.add("--every N", f"play every N-th frame [{EVERY}]", parse_count, EVERY)


def calibrate_names(args: Namespace, settings: Settings) -> None:
    """Fit how sure the names of a detector are, by names of things that recordings show and do not show.

    The things of detector.prompts are in the recordings, those of --absent are not. A name of the latter is wrong
    wherever it is given. Watch out for other words of what is there: a cup is no absent thing beside a mug.
    """
    present = list(settings.detector.prompts)
    paths = [Path(source).expanduser() for source in args.sources]
    _check(args, settings, present, paths)
    from msgspec import json, structs, to_builtins

    from ..engines.options import resolve
    from ..perception.loading import load_models
    from ..replay import name_calibration as fitting

    settings = resolve(settings)
    model, detector = load_models(settings)
    if detector is None:
        raise SettingsError("detector.kind: expected a detector, found none")
    absent = list(args.absent)
    if not absent:
        absent = fitting.choose_absent(present, lambda name: fitting.knows(detector, name))
    print(f"there: {', '.join(present)}")
    print(f"not there: {', '.join(absent)}")
    runs = fitting.choose_runs(present, absent)
    masks: list[NamedMask] = []
    with closing(ProgressBar()) as bar:
        chosen = (settings.tracker, settings.detector)
        played = fitting.record_names(paths, model, detector, chosen, runs, args.every)
        for done, found in enumerate(played, 1):
            bar("playing", done, note=f"{len(paths) * len(runs)} passes, {len(masks)} masks with a name")
            masks += found
    sure = settings.detector.min_name_confidence
    calibration, report = fitting.fit_names(masks, present, detector.name, sure)
    told = to_builtins(report) | {"sure": sure, "there": present, "not_there": absent}
    write_output(args.out, json.format(json.encode(structs.asdict(calibration) | {"report": told})))
    counts = Counter(mask.name for mask in masks)
    rows = [(name, str(counts[name]), "there" if name in present else "not there") for name in sorted(counts)]
    print(*align_rows([("name", "sure masks", ""), *rows]), sep="\n")
    _tell(report, args.out)


def _check(args: Namespace, settings: Settings, present: Sequence[str], paths: Sequence[Path]) -> None:
    """Check what can be checked before the model is loaded, which takes long."""
    if not present:
        raise SettingsError(
            "expected names of things that the recordings show, found none: name them by --detector.prompts"
        )
    if both := sorted({*present} & {*args.absent}):
        raise SettingsError(f"--absent: expected names of things that are not there, found {', '.join(both)}")
    prepare_output(args.out)
    check_named_files(settings)
    for path in paths:
        check_source(path)


def _tell(report: NameReport, out: Path) -> None:
    before = report.before
    after = report.after
    print(f"of {report.present} masks with the name of a thing that is there stay sure:", end=" ")
    print(f"{100 * after.present:.0f} % ({100 * before.present:.0f} % without {out})")
    print(
        f"of {report.absent} with the name of another: {100 * after.absent:.1f} % ({100 * before.absent:.1f} %)"
    )
    if report.judged_apart:
        print("each name is judged by a fit to the others")
    else:
        print_notice(
            "sam3-node: warning: with a single name of a kind, these figures are of the fit itself: expected two or "
            "more names that are there, and two or more others that the detector gives to something (--absent)"
        )
    if (fewest := min(report.present, report.absent)) < FEW:
        print_notice(
            f"sam3-node: warning: {fewest} masks are few to judge by: play more frames (--every 1), give more "
            "recordings, or other names (--absent)"
        )
    print(f"use it: sam3-node run --detector.name_calibration {out}")
