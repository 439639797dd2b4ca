"""Video object segmentation against ground truth: J, F and J&F as DAVIS defines them, and recovery from occlusion.

    python tools/bench/vos.py ../shared/data/davis                      one setting, the default
    python tools/bench/vos.py FOLDER --prompt box --json                the figures alone
    python tools/bench/vos.py FOLDER --compare                          baselines, banks, selections and prompts
    python tools/bench/vos.py FOLDER --settings default,bank-off,bank=15+select=confident,dtype=bf16,size=160

FOLDER is in DAVIS' layout, real or rendered; a recording (.mcap) with ground truth will do, too. Each object is shown
to the tracker once, on the first frame where it can be seen, by its true mask, box or a point, and is scored on all
frames between that one and the last. All objects of a sequence are tracked at once, and each mask is scored as the node
would publish it, overlaps included. What counts as recovered is defined in tools/vos/occlusion.py.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the node does; read when torch is imported
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout, for `tools`

from sam3_node.errors import Sam3NodeError
from sam3_node.models import TrackerModel
from sam3_node.perception.loading import load_model
from sam3_node.settings import ModelSettings, TrackerSettings
from tools.vos.evaluate import SequenceResult, evaluate
from tools.vos.followers import Masks
from tools.vos.report import as_json, as_table
from tools.vos.sequences import Sequence, TrueFrame, open_sequences
from tools.vos.settings import COMPARED, PROMPTS, ModelKey, Setting, parse_settings
from tools.vos.sheet import Sheet


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, metavar="FOLDER", help="or a recording (.mcap) with ground truth")
    parser.add_argument("--model", default="nano", help="as model.name of the node")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompt", choices=PROMPTS, default="mask")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        "--settings", default="default", help="with commas between; the first is the reference"
    )
    chosen.add_argument("--compare", dest="settings", action="store_const", const=COMPARED, help=COMPARED)
    parser.add_argument(
        "--sequences", default="", help="only these, with commas between; * and ? as in the shell"
    )
    parser.add_argument("--frames", type=int, default=0, help="only the first so many of each sequence")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 lets torch choose")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON alone")
    parser.add_argument("--sheet", type=Path, default=Path("out/vos/contact.png"))
    return parser.parse_args()


def load_models(args: argparse.Namespace, settings: list[Setting]) -> dict[ModelKey, TrackerModel]:
    """A model for each dtype and image size that the settings name."""
    models = {}
    shared = {"name": args.model, "device": args.device, "threads": args.threads}
    for key in dict.fromkeys(setting.model for setting in settings):
        chosen = ModelSettings.model_validate(shared | key._asdict())
        models[key] = load_model(chosen, TrackerSettings())
    return models


def evaluate_all(
    sequences: list[Sequence], settings: list[Setting], models: dict[ModelKey, TrackerModel], sheet: Sheet
) -> dict[str, dict[str, SequenceResult]]:
    """Results by setting, then by sequence; progress goes to stderr."""
    results: dict[str, dict[str, SequenceResult]] = {setting.name: {} for setting in settings}
    for sequence in sequences:
        found = evaluate(sequence, settings, models, partial(watch, sheet, sequence))
        for setting, result in zip(settings, found, strict=True):
            results[setting.name][sequence.name] = result
    return results


def watch(sheet: Sheet, sequence: Sequence, index: int, frame: TrueFrame, masks: Masks) -> None:
    sheet.show(sequence, index, frame, masks)
    last = index + 1 == sequence.length
    if last or sys.stderr.isatty():
        print(f"\r{sequence.name} {index + 1}/{sequence.length}", end="\n" if last else "", file=sys.stderr)


def main() -> None:
    args, sheet = arguments(), Sheet()
    try:
        settings = parse_settings(args.settings, Setting(prompt=args.prompt))
        names = [name for name in args.sequences.split(",") if name]
        sequences = open_sequences(args.path, names, args.frames)
        results = evaluate_all(sequences, settings, load_models(args, settings), sheet)
        sheet.write(args.sheet)
    except Sam3NodeError as error:
        raise SystemExit(f"error: {error}") from error
    print(json.dumps(as_json(results), indent=2) if args.json else as_table(results))
    print(f"pictures in {args.sheet}", file=sys.stderr)


if __name__ == "__main__":
    main()
