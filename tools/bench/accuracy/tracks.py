"""Score identities over time against ground truth: IDF1 and CLEAR MOT of objects that are tracked by name.

    python -m tools.bench.accuracy.tracks out/scenes/tracks                   the default, and without association
    python -m tools.bench.accuracy.tracks FOLDER --every 1,5,10 --names name  periods; "red mug", not "mug"

FOLDER has rendered clips with the names of their objects, for example from
`python -m tools.scenes --split test --scenario free,leave,lookalike,occlusion --frames 1440 --size 640x480 --seed 21
--clips 4 -o out/scenes/tracks`. The detector does not look for names that it does not know. Frames go through the
pipeline one after another, with the clip's own time stamps and none skipped. A mask is right if its IoU with an object
of its name is at least 0.5. `--json` without a file prints the scores as JSON and nothing else.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

from sam3_node.cameras.camera_source import CapturedImage
from sam3_node.cameras.publish import frame_from
from sam3_node.detection.detectors import Detector, prepare_prompts
from sam3_node.errors import CameraError
from sam3_node.models import TrackerModel
from sam3_node.perception.loading import load_configured_detector, load_model
from sam3_node.perception.pipeline import Pipeline
from sam3_node.replay.name_calibration import knows
from sam3_node.settings import DetectorSettings, ModelSettings, TrackerSettings
from sam3_node.types import NANOSECONDS, MaskFrame
from tools.bench.common import STDOUT, Figures, make_parser
from tools.command import errors_in_one_line
from tools.doubt.names import CAMERA
from tools.mot import MotFrame, MotScore, MotScorer, TrueClip, open_clips, total


def make_settings(args: argparse.Namespace) -> dict[str, DetectorSettings]:
    """Return the settings to compare, by name."""
    kind, _, name = args.detector.partition(":")
    base = {"kind": kind, "name": name or "nano", "vocabulary": args.vocabulary, "score": args.score}
    periods = [int(period) for period in args.every.split(",")]
    settings = {f"every {k}": DetectorSettings.model_validate({**base, "every": k}) for k in periods}
    off = DetectorSettings.model_validate({**base, "every": periods[0], "association": False})
    return {**settings, f"every {periods[0]}, association off": off}


def play(
    truth: TrueClip, model: TrackerModel, detector: Detector, settings: DetectorSettings, max_frames: int
) -> Iterator[tuple[MotFrame, MaskFrame]]:
    """Yield the frames of a clip with the pipeline's masks."""
    pipeline = Pipeline(model, TrackerSettings(), "cam0", detector, settings)
    pipeline.set_prompts(prepare_prompts(detector, truth.prompts, settings.score))
    for seq, true_frame in enumerate(truth.frames(max_frames)):
        image = CapturedImage(true_frame.image, round(seq * NANOSECONDS / truth.fps))
        yield true_frame, pipeline.step(frame_from(image, seq, CAMERA))


def evaluate(
    clips: list[TrueClip],
    model: TrackerModel,
    detector: Detector,
    settings: DetectorSettings,
    args: argparse.Namespace,
) -> MotScore:
    """Return the score over all clips."""
    scorers = []
    frames = 0
    for truth in clips:
        scorer = MotScorer(truth.named)
        length = min(len(truth.clip), args.frames or len(truth.clip))
        for index, (true_frame, masks) in enumerate(play(truth, model, detector, settings, args.frames)):
            scorer.add(true_frame, masks.instances)
            if sys.stderr.isatty():
                print(f"\r{truth.clip.name} {index + 1}/{length}", end="", file=sys.stderr)
        print(f"\r{truth.clip.name}: {length} frames, {len(truth.named)} objects", file=sys.stderr)
        scorers.append(scorer)
        frames += length
    return total(scorers, frames, clips[0].fps)


def keep_figures(scores: dict[str, MotScore], args: argparse.Namespace, figures: Figures) -> None:
    """Keep the scores of each setting."""
    for name, score in scores.items():
        what = f"{args.path.name}, names by {args.names}, {name}"
        figures.add(f"IDF1, {what}", score.idf1, "IDF1", target="0.85")
        figures.add(f"MOTA, {what}", score.mota, "MOTA")
        figures.add(f"identity switches, {what}", score.switches / score.minutes, "per minute")
        figures.add(f"false starts, {what}", score.false_starts / score.minutes, "per minute")
        figures.add(f"misses, {what}", 100 * score.misses / max(1, score.objects), "%")
        figures.add(f"false masks, {what}", 100 * score.false_masks / max(1, score.objects), "%")


def main() -> None:
    parser = make_parser(__doc__, print_json=True, model="nano", threads=0)
    parser.add_argument("path", type=Path, metavar="FOLDER", help="rendered clips with names")
    parser.add_argument("--detector", default="yolo-world:nano", metavar="KIND:NAME", help="detector")
    parser.add_argument("--vocabulary", type=Path, help="as detector.vocabulary")
    parser.add_argument("--names", choices=("kind", "name"), default="kind", help="'mug' or 'red mug'")
    parser.add_argument("--every", default="5", help="detector periods in frames, comma-separated")
    parser.add_argument("--score", type=float, default=DetectorSettings().score, help="as detector.score")
    parser.add_argument("--frames", type=int, default=0, help="number of first frames of each clip; 0: all")
    args = parser.parse_args()
    figures = Figures("accuracy.tracks")
    with errors_in_one_line():
        settings = make_settings(args)
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
        scores: dict[str, MotScore] = {}
        for name, chosen in settings.items():
            print(name, file=sys.stderr)
            scores[name] = evaluate(clips, model, detector, chosen, args)
            print(f"{name}: IDF1 {scores[name].idf1:.3f}", file=sys.stderr)
    if args.json == STDOUT:
        print(json.dumps({name: asdict(score) for name, score in scores.items()}, indent=2))
    else:
        keep_figures(scores, args, figures)
        figures.write(args.json)


if __name__ == "__main__":
    main()
