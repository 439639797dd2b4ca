"""Compare masks and J of an encoder in FP8, rounded in torch as an engine would, with those of float32.

    python -m tools.bench.engines.fp8 [--weights FOLDER] [--shared FOLDER] [--scenes FOLDER] [--clips 6]

The first part calibrates the real weights on frames of the videos. Both encoders segment each object of DAVIS' first
frames by the box of its truth. The benchmark reports the IoU of the two masks, and of each with the truth. The second
part calibrates nano on the bundled recording, and reports J on `--clips` of the unseen scenes (0: none) with both
encoders. No GPU and no TensorRT is needed; modelopt, which calibrates, comes with the extra `quantize`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sam3_node.bags.bag import sample_images
from sam3_node.bags.native.reader import TABLETOP
from sam3_node.engines.quantize import Recipe, calibrate, load_recipe, quantise_encoder
from sam3_node.errors import Sam3NodeError
from sam3_node.models import TrackerModel, load_tracker
from sam3_node.perception.output_masks import rasterize
from sam3_node.perception.prompts import to_model
from sam3_node.tracking import Tracker
from sam3_node.types import Image, Mask
from tools.bench.common import ROOT, SHARED, Figures, make_parser
from tools.vos.evaluate import SequenceResult, evaluate
from tools.vos.followers import EncodedFrame, encode_frame, make_prompt
from tools.vos.metrics import Bools, region_similarity
from tools.vos.report import mean_score
from tools.vos.sequences import LabelledSequence, TrueFrame, open_sequences
from tools.vos.settings import Setting

FLOAT32, FP8 = Setting("float32", prompt="box", dtype="float32"), Setting("fp8", prompt="box", dtype="fp8")


class Agreement(NamedTuple):
    """IoU of one object's masks by the two encoders, and of each mask with the truth."""

    name: str
    both: float
    float32: float
    fp8: float


def with_fp8(name: str, images: Iterable[Image], recipe: Recipe) -> tuple[TrackerModel, TrackerModel]:
    """Load the weights twice: unchanged, and with an encoder that rounds to FP8."""
    model, rounded = load_tracker(name), load_tracker(name)
    scales = calibrate(model, images, recipe, partial(show_progress, f"calibrating {model.name}: frame"))
    encode = quantise_encoder(rounded, scales, recipe)
    rounded.stages = rounded.stages._replace(encode=encode)
    layers = len(recipe.select_layers(model.encode_stage))
    print(f"{model.name}: {layers} layers in FP8, calibrated on {scales.frames} frames", file=sys.stderr)
    return model, rounded


def spread(sources: list[Path], count: int) -> Iterator[Image]:
    """Yield `count` frames, the same number from each source."""
    for source in sources:
        yield from sample_images(source, count // len(sources))


def compare_first_frames(
    sequence: LabelledSequence, models: tuple[TrackerModel, TrackerModel]
) -> list[Agreement]:
    """Segment each object of the first frame with both models."""
    frame = next(sequence.frames())
    views = [encode_frame(model, frame.image) for model in models]
    agreements = []
    for object_id, truth in frame.masks.items():
        plain, rounded = (segment(*pair, truth) for pair in zip(models, views, strict=True))
        name = sequence.name if len(frame.masks) == 1 else f"{sequence.name} {object_id}"
        ious = (region_similarity(*pair) for pair in ((plain, rounded), (plain, truth), (rounded, truth)))
        agreements.append(Agreement(name, *ious))
    return agreements


def segment(model: TrackerModel, view: EncodedFrame, truth: Bools) -> Bools:
    """Segment an object by the box of its true mask."""
    prompt = to_model(make_prompt("box", Mask.from_full(truth)), 0, view.scaling)
    logits, _ = Tracker(model, max_objects=1, bank_size=2).segment(view.features, prompt)
    return rasterize(logits.float().cpu().numpy(), view.scaling.frame_size).full()


def report_agreement(model: str, agreements: list[Agreement], figures: Figures) -> None:
    """Print a row for each object, the means and the worst object."""
    print("\nfirst frames, by a box    IoU of both   float32 to truth   fp8 to truth")
    mean = Agreement("mean", *np.mean([agreement[1:] for agreement in agreements], axis=0).tolist())
    for name, both, float32, fp8 in (*agreements, mean):
        print(f"{name:24s} {both:12.4f} {float32:18.4f} {fp8:14.4f}")
    worst = min(agreements, key=lambda agreement: agreement.both)
    print(f"worst: {worst.name}, {worst.both:.4f}")
    what = f"{model}, boxes on {len(agreements)} objects of DAVIS' first frames: IoU of FP8 masks with float32 masks"
    figures.add(f"{what}, mean", mean.both, "IoU")
    figures.add(f"{what}, minimum", worst.both, "IoU", target="at least 0.97")


def follow(sequence: LabelledSequence, models: tuple[TrackerModel, TrackerModel]) -> list[SequenceResult]:
    """Track the objects of a clip with both models, each prompted once by its box."""
    settings = [FLOAT32, FP8]
    pairs = zip(settings, models, strict=True)

    def watch(index: int, frame: TrueFrame, masks: object) -> None:
        show_progress(f"{sequence.name}: frame", index + 1, sequence.length)

    return evaluate(sequence, settings, {setting.model: model for setting, model in pairs}, watch)


def report_j(by_sequence: dict[str, list[SequenceResult]], figures: Figures) -> None:
    """Print J of both models on each clip, and the means over all objects."""
    print("\nnano, by a box             J float32         J fp8")
    means = [[mean_score([result]) for result in results] for results in by_sequence.values()]
    total = [mean_score(results) for results in zip(*by_sequence.values(), strict=True)]
    for name, scores in zip([*by_sequence, "mean of objects"], [*means, total], strict=True):
        print(f"{name:22s}", *(f"{score.j if score else float('nan'):13.4f}" for score in scores))
    for setting, score in zip((FLOAT32, FP8), total, strict=True):
        if score:
            figures.add(
                f"nano in {setting.dtype}, box prompts, {len(by_sequence)} unseen scenes: mean J",
                score.j,
                "J",
            )


def show_progress(what: str, done: int, count: int = 0) -> None:
    """Print progress to stderr, in one line that is overwritten."""
    if sys.stderr.isatty() or done == count:
        of = f"/{count}" if count else ""
        print(f"\r{what} {done}{of}", end="\n" if done == count else "", file=sys.stderr)


def arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--shared", type=Path, default=SHARED, help="folder with data/video and data/davis")
    parser.add_argument(
        "--weights", default="", help="real weights; by default weights/sam2-hiera-tiny of --shared"
    )
    parser.add_argument(
        "--frames", type=int, default=32, help="frames for the calibration, the same number of each source"
    )
    parser.add_argument(
        "--recipe", type=Path, default=ROOT / "calibration/fp8/default.toml", help="layers in FP8"
    )
    parser.add_argument(
        "--scenes", type=Path, default=ROOT / "out/scenes/test", help="rendered scenes for nano"
    )
    parser.add_argument("--clips", type=int, default=6, help="number of scenes for nano; 0 for none")
    parser.add_argument("--no-real", action="store_true", help="leave out the real weights")
    return parser.parse_args()


def measure_real_weights(args: argparse.Namespace, recipe: Recipe, figures: Figures) -> None:
    """Compare the masks of real weights in FP8 and float32."""
    videos = sorted((args.shared / "data/video").glob("*.mp4"))
    name = args.weights or str(args.shared / "weights/sam2-hiera-tiny")
    sequences = open_sequences(args.shared / "data/davis", max_frames=1)
    models = with_fp8(name, spread(videos, args.frames), recipe)
    agreements = [agreement for sequence in sequences for agreement in compare_first_frames(sequence, models)]
    report_agreement(models[0].name, agreements, figures)


def measure_nano(args: argparse.Namespace, recipe: Recipe, figures: Figures) -> None:
    """Compare J of nano in FP8 and float32."""
    sequences = open_sequences(args.scenes)
    sequences = sequences[:: max(1, len(sequences) // args.clips)]  # of every scenario
    models = with_fp8("nano", sample_images(TABLETOP, args.frames), recipe)
    report_j({sequence.name: follow(sequence, models) for sequence in sequences[: args.clips]}, figures)


def main() -> None:
    args, figures = arguments(), Figures("engines.fp8")
    try:
        recipe = load_recipe(args.recipe)
        if not args.no_real:
            measure_real_weights(args, recipe, figures)
        if args.clips:
            measure_nano(args, recipe, figures)
    except Sam3NodeError as error:
        raise SystemExit(f"error: {error}") from error
    figures.write(args.json)


if __name__ == "__main__":
    main()
