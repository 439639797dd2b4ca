"""The command `sam3-node calibrate names`. Heavy packages are imported when it runs."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from contextlib import closing
from pathlib import Path

from ..errors import SettingsError
from ..files import prepare_output, write_output
from ..settings import Settings
from .early_checks import check_named_files, check_source
from .engine import parse_names
from .parser import Commands, parse_count
from .progress import ProgressBar, align_rows

EVERY = 3
"""Interval between the frames of a recording that are played."""


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
    if not present:
        raise SettingsError(
            "expected names of things that the recordings show, found none: name them by --detector.prompts"
        )
    if both := sorted({*present} & {*args.absent}):
        raise SettingsError(f"--absent: expected names of things that are not there, found {', '.join(both)}")
    # before the model, which takes long to load
    prepare_output(args.out)
    check_named_files(settings)
    paths = [Path(source).expanduser() for source in args.sources]
    for path in paths:
        check_source(path)
    from msgspec import json, structs, to_builtins

    from ..engines.options import resolve
    from ..perception.loading import load_models
    from ..replay.name_calibration import (
        NamedMask,
        choose_absent,
        choose_runs,
        fit_names,
        knows,
        record_names,
    )

    settings = resolve(settings)
    model, detector = load_models(settings)
    if detector is None:
        raise SettingsError("detector.kind: expected a detector, found none")
    absent = list(args.absent) or choose_absent(present, lambda name: knows(detector, name))
    print(f"there: {', '.join(present)}")
    print(f"not there: {', '.join(absent)}")
    runs = choose_runs(present, absent)
    masks: list[NamedMask] = []
    with closing(ProgressBar()) as bar:
        chosen = (settings.tracker, settings.detector)
        played = record_names(paths, model, detector, chosen, runs, args.every)
        for done, found in enumerate(played, 1):
            bar("playing", done, note=f"{len(paths) * len(runs)} passes, {len(masks)} masks with a name")
            masks += found
    sure = settings.detector.min_name_confidence
    calibration, report = fit_names(masks, present, detector.name, sure)
    report_fields = to_builtins(report) | {"sure": sure, "there": present, "not_there": absent}
    content = structs.asdict(calibration) | {"report": report_fields}
    write_output(args.out, json.format(json.encode(content)))
    counts = Counter(mask.name for mask in masks)
    rows = [(name, str(counts[name]), "there" if name in present else "not there") for name in sorted(counts)]
    print(*align_rows([("name", "sure masks", ""), *rows]), sep="\n")
    before = report.before
    after = report.after
    print(f"of {report.present} masks with the name of a thing that is there stay sure:", end=" ")
    print(f"{100 * after.present:.0f} % ({100 * before.present:.0f} % without {args.out})")
    print(
        f"of {report.absent} with the name of another: {100 * after.absent:.1f} % ({100 * before.absent:.1f} %)"
    )
    print("each name is judged by a fit to the others")
    print(f"use it: sam3-node run --detector.name_calibration {args.out}")
