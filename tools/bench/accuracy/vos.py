"""Score video object segmentation against ground truth: J, F and J&F as DAVIS defines them, and recovery.

    python -m tools.bench.accuracy.vos ../shared/data/davis                the default setting
    python -m tools.bench.accuracy.vos FOLDER --prompt box --json FILE     also as JSON
    python -m tools.bench.accuracy.vos FOLDER --compare                    baselines, banks, selections and prompts
    python -m tools.bench.accuracy.vos FOLDER --settings default,bank-off,bank=15+select=confident,dtype=bf16,size=160

FOLDER has DAVIS' layout, real or rendered: JPEGImages and Annotations, with the level 480p or without, as MOSE and LVOS
have it. Their splits for training have the truth of their frames; those for validation have it of the first frame
alone, and are scored by their servers. A recording (.mcap) with ground truth is accepted too. The tracker is
prompted for each object once, on the first frame where it can be seen, by its true mask, box or a point. The object is
scored on all frames between that one and the last, but those on which its truth is unknown
(`tools.vos.sequences.UNKNOWN`). All objects of a sequence are tracked together, and each mask is scored as the node
would publish it, with overlaps. tools/vos/metrics.py defines recovery. `--json` without a file
prints all figures, of each sequence and object too, as JSON and nothing else.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

from sam3_node.models import TrackerModel
from sam3_node.perception.loading import load_model
from sam3_node.settings import ModelSettings, TrackerSettings
from tools.bench.common import STDOUT, Figures, make_parser
from tools.command import errors_in_one_line
from tools.vos.evaluate import SequenceResult, evaluate
from tools.vos.followers import COMPARED, PROMPTS, Masks, ModelKey, Setting, parse_settings
from tools.vos.report import all_settings, as_json, as_table
from tools.vos.sequences import LabelledSequence, TrueFrame, open_sequences


def load_models(args: argparse.Namespace, settings: list[Setting]) -> dict[ModelKey, TrackerModel]:
    """Load a model for each dtype and image size that the settings name."""
    models = {}
    shared = {"name": args.model, "device": args.device, "threads": args.threads}
    for key in dict.fromkeys(setting.model for setting in settings):
        chosen = ModelSettings.model_validate(shared | {"dtype": key.dtype, "image_size": key.image_size})
        models[key] = load_model(chosen, TrackerSettings.model_validate({"read": key.read}))
    return models


def evaluate_all(
    sequences: list[LabelledSequence],
    settings: list[Setting],
    models: dict[ModelKey, TrackerModel],
) -> dict[str, dict[str, SequenceResult]]:
    """Return the results by setting, then by sequence; print progress to stderr."""
    results: dict[str, dict[str, SequenceResult]] = {setting.name: {} for setting in settings}
    for sequence in sequences:
        of_settings = evaluate(sequence, settings, models, partial(watch, sequence))
        for setting, result in zip(settings, of_settings, strict=True):
            results[setting.name][sequence.name] = result
    return results


def watch(sequence: LabelledSequence, index: int, frame: TrueFrame, masks: Masks) -> None:
    """Print progress."""
    last = index + 1 == sequence.length
    if last or sys.stderr.isatty():
        print(f"\r{sequence.name} {index + 1}/{sequence.length}", end="\n" if last else "", file=sys.stderr)


def keep_figures(
    results: dict[str, dict[str, SequenceResult]], args: argparse.Namespace, figures: Figures
) -> None:
    """Keep the means of each setting."""
    for setting, report in all_settings(results).items():
        what = f"{args.path.name}, prompt {args.prompt}, {Path(args.model).name}, setting {setting}"
        if args.every > 1:
            what += f", one frame of {args.every}"
        for key in ("J", "F"):
            if report[key] is not None:
                figures.add(f"mean {key}, {what}", report[key], key)
        occlusions = report["occlusions"]
        shares = {
            f"objects recovered of {occlusions['cases']} occluded": occlusions["recovered"],
            f"a mask on the {occlusions['hidden_frames']} frames of hidden objects": occlusions[
                "false_while_hidden"
            ],
        }
        for name, share in shares.items():
            if share is not None:
                figures.add(f"{name}, {what}", 100 * share, "%")
        figures.add(f"time of a frame, {what}", report["frame_ms"], "ms")


def main() -> None:
    parser = make_parser(__doc__, print_json=True, model="nano", device="auto", threads=0)
    parser.add_argument("path", type=Path, metavar="FOLDER", help="clips, or a recording with ground truth")
    parser.add_argument("--prompt", choices=PROMPTS, default="mask", help="kind of an object's only prompt")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        "--settings", default="default", help="compared, comma-separated; the first is the reference"
    )
    chosen.add_argument("--compare", dest="settings", action="store_const", const=COMPARED, help=COMPARED)
    parser.add_argument(
        "--sequences", default="", help="sequences to run, comma-separated; * and ? are wildcards"
    )
    parser.add_argument("--frames", type=int, default=0, help="first frames of each sequence; 0: all")
    parser.add_argument("--every", type=int, default=1, help="use every N-th frame")
    args = parser.parse_args()
    figures = Figures("accuracy.vos", show=False)
    with errors_in_one_line():
        settings = parse_settings(args.settings, Setting(prompt=args.prompt))
        names = [name for name in args.sequences.split(",") if name]
        sequences = open_sequences(args.path, names, args.frames, max(1, args.every))
        results = evaluate_all(sequences, settings, load_models(args, settings))
    if args.json == STDOUT:
        print(json.dumps(as_json(results), indent=2))
    else:
        print(as_table(results))
        keep_figures(results, args, figures)
        figures.write(args.json)


if __name__ == "__main__":
    main()
