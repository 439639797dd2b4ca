"""Identities over time by names alone: IDF1 and CLEAR MOT of what the node would publish, against ground truth.

    python tools/bench/tracks.py out/scenes/tracks                   the default, and without association
    python tools/bench/tracks.py FOLDER --every 1,5,10 --names name  detector periods; "red mug" in place of "mug"

FOLDER has rendered clips with the names of their objects, such as those of
`python -m tools.scenes --split test --scenario free,leave,lookalike,occlusion --frames 1440 --size 640x480 --seed 21
--clips 4 -o out/scenes/tracks`. Names of objects that the detector does not know are not looked for. Frames go through
the pipeline one after another, at the rate that the clip was filmed at, none skipped. A mask is right when its IoU with
an object of its name is 0.5 or more.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the node does; read when torch is imported
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout, for `tools`

import numpy as np

from sam3_node.detection.base import Detector, prepare_prompts
from sam3_node.errors import CameraError, RequestError, Sam3NodeError
from sam3_node.models import TrackerModel
from sam3_node.perception.loading import load_configured_detector, load_model
from sam3_node.perception.pipeline import Pipeline
from sam3_node.settings import DetectorSettings, ModelSettings, TrackerSettings
from sam3_node.types import NANOSECONDS, Frame, MaskFrame
from sam3_node.visualization import contact_sheet, overlay, write_image
from sam3_node.wire import encode_image
from tools.mot.score import Judge, Score, total
from tools.mot.truth import TrueClip, TrueFrame, open_clips

PICTURES = 6  # of each clip on the sheet


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path, metavar="FOLDER")
    parser.add_argument("--model", default="nano", help="as model.name of the node")
    parser.add_argument(
        "--detector", default="yolo-world:nano", metavar="KIND:NAME", help="as detector.kind and .name"
    )
    parser.add_argument("--vocabulary", type=Path, help="as detector.vocabulary")
    parser.add_argument("--names", choices=("kind", "name"), default="kind", help="what objects are called")
    parser.add_argument("--every", default="5", help="detector periods in frames, with commas between")
    parser.add_argument("--score", type=float, default=DetectorSettings().score, help="as detector.score")
    parser.add_argument("--frames", type=int, default=0, help="only the first so many of each clip")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 lets torch choose")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON alone")
    parser.add_argument("--sheet", type=Path, default=Path("out/tracks/contact.png"))
    return parser.parse_args()


def settings_of(args: argparse.Namespace) -> dict[str, DetectorSettings]:
    """The settings to compare, by name."""
    kind, _, name = args.detector.partition(":")
    base = {"kind": kind, "name": name or "nano", "vocabulary": args.vocabulary, "score": args.score}
    periods = [int(period) for period in args.every.split(",")]
    found = {f"every {k}": DetectorSettings.model_validate({**base, "every": k}) for k in periods}
    off = DetectorSettings.model_validate({**base, "every": periods[0], "association": False})
    return {**found, f"every {periods[0]}, association off": off}


def play(
    truth: TrueClip, model: TrackerModel, detector: Detector, settings: DetectorSettings, most: int
) -> Iterator[tuple[TrueFrame, MaskFrame]]:
    """The frames of a clip with what the pipeline makes of them."""
    pipeline = Pipeline(model, TrackerSettings(), "cam0", detector, settings)
    pipeline.set_prompts(prepare_prompts(detector, truth.prompts, settings.score))
    for seq, true_frame in enumerate(truth.frames(most)):
        height, width = true_frame.image.shape[:2]
        colour = encode_image(true_frame.image, "bgr8")
        now_ns = round(seq * NANOSECONDS / truth.fps)
        yield true_frame, pipeline.step(Frame("cam0", seq, now_ns, width, height, "bgr8", colour))


def evaluate(
    clips: list[TrueClip],
    model: TrackerModel,
    detector: Detector,
    settings: DetectorSettings,
    args: argparse.Namespace,
) -> tuple[Score, list[np.ndarray]]:
    """The score over all clips, and pictures of them."""
    judges, frames, pictures = [], 0, []
    for truth in clips:
        judge = Judge(truth.named)
        length = min(len(truth.clip), args.frames or len(truth.clip))
        shown = set(np.linspace(length // 12, length - 1, PICTURES).astype(int).tolist())
        for index, (true_frame, masks) in enumerate(play(truth, model, detector, settings, args.frames)):
            judge.add(true_frame, masks.instances)
            if index in shown:
                pictures.append(overlay(true_frame.image, masks))
            if sys.stderr.isatty():
                print(f"\r{truth.clip.name} {index + 1}/{length}", end="", file=sys.stderr)
        print(f"\r{truth.clip.name}: {length} frames, {len(truth.named)} objects", file=sys.stderr)
        judges.append(judge)
        frames += length
    return total(judges, frames, clips[0].fps), pictures


def table(scores: dict[str, Score]) -> str:
    """Misses and false masks are shares of the masks that should be there."""
    heads = ("setting", "IDF1", "MOTA", "switches/min", "false starts/min", "misses %", "false masks %")
    rows = [
        (
            name,
            f"{score.idf1:.3f}",
            f"{score.mota:.3f}",
            f"{score.switches / score.minutes:.1f}",
            f"{score.false_starts / score.minutes:.1f}",
            f"{100 * score.misses / max(1, score.objects):.1f}",
            f"{100 * score.false_masks / max(1, score.objects):.1f}",
        )
        for name, score in scores.items()
    ]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in (heads, *rows)
    )


def main() -> None:
    args = arguments()
    try:
        settings = settings_of(args)
        models = ModelSettings.model_validate({"name": args.model, "threads": args.threads})
        model = load_model(models, TrackerSettings())
        detector = load_configured_detector(next(iter(settings.values())), models)
        if detector is None:
            raise CameraError("--detector: expected one, found none")
        clips = [clip for clip in open_clips(args.path, partial(knows, detector), args.names) if clip.named]
        if not clips:
            raise CameraError(
                f"{args.path}: expected objects with names that {detector.name} knows, found none"
            )
        scores: dict[str, Score] = {}
        sheet: list[np.ndarray] = []
        for name, chosen in settings.items():
            print(name, file=sys.stderr)
            scores[name], pictures = evaluate(clips, model, detector, chosen, args)
            sheet = sheet or pictures
        write_image(args.sheet, contact_sheet(sheet, [""] * len(sheet), PICTURES))
    except Sam3NodeError as error:
        raise SystemExit(f"error: {error}") from error
    print(json.dumps({n: asdict(s) for n, s in scores.items()}, indent=2) if args.json else table(scores))
    print(f"pictures in {args.sheet}", file=sys.stderr)


def knows(detector: Detector, name: str) -> bool:
    """Whether it can look for this."""
    try:
        detector.prepare([name])
    except RequestError:
        return False
    return True


if __name__ == "__main__":
    main()
