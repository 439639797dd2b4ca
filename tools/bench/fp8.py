"""What FP8 in the encoder's layers costs: masks and J with an encoder rounded as an engine would, beside float32.

    python tools/bench/fp8.py [--weights FOLDER] [--shared FOLDER] [--scenes FOLDER] [--clips 6]

First the real weights: calibrated on frames of the videos, each object of DAVIS' first frames segmented by the box of
its truth, with both encoders; the IoU of the two masks, and of each with the truth. Then nano: calibrated on the
bundled recording, J of `--clips` of the unseen scenes (0: none) with both encoders. Nothing here needs a GPU
or TensorRT; modelopt, which calibrates, comes with the extra `quantize`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout, for `tools`

from sam3_node.bags.native.labelled_clip import TABLETOP
from sam3_node.engines.frames import Image, frames_of
from sam3_node.engines.quantize import calibrate, quantise_encoder
from sam3_node.engines.recipes import Recipe, load_recipe
from sam3_node.errors import Sam3NodeError
from sam3_node.models import TrackerModel, load_tracker
from sam3_node.perception.rasterize import rasterize
from sam3_node.tracking import Tracker
from sam3_node.types import Mask
from tools.vos.evaluate import SequenceResult, evaluate
from tools.vos.followers import View, make_prompt, see
from tools.vos.metrics import Bools
from tools.vos.report import mean_score
from tools.vos.sequences import Sequence, TrueFrame, open_sequences
from tools.vos.settings import Setting

ROOT = Path(__file__).resolve().parents[2]
FLOAT32, FP8 = Setting("float32", prompt="box", dtype="float32"), Setting("fp8", prompt="box", dtype="fp8")


class Agreement(NamedTuple):
    """Of one object: IoU of the masks of both encoders, and of each with the truth."""

    name: str
    same: float
    float32: float
    fp8: float


def with_fp8(name: str, images: Iterable[Image], recipe: Recipe) -> tuple[TrackerModel, TrackerModel]:
    """The weights twice: as they are, and with an encoder that rounds to FP8."""
    model, rounded = load_tracker(name), load_tracker(name)
    scales = calibrate(model, images, recipe, partial(tell, f"calibrating {model.name}: frame"))
    encode = quantise_encoder(rounded, scales, recipe)
    rounded.stages = rounded.stages._replace(encode=encode)
    layers = len(recipe.select_layers(model.encode_stage))
    print(f"{model.name}: {layers} layers in FP8, calibrated on {scales.frames} frames", file=sys.stderr)
    return model, rounded


def spread(sources: list[Path], count: int) -> Iterator[Image]:
    """As many frames of each source."""
    for source in sources:
        yield from frames_of(source, count // len(sources))


def compare_first_frames(sequence: Sequence, models: tuple[TrackerModel, TrackerModel]) -> list[Agreement]:
    """Segment each object of the first frame with both models."""
    frame = next(sequence.frames())
    views = [see(model, frame.image) for model in models]
    found = []
    for object_id, truth in frame.masks.items():
        one, other = (segment(*pair, truth) for pair in zip(models, views, strict=True))
        name = sequence.name if len(frame.masks) == 1 else f"{sequence.name} {object_id}"
        found.append(Agreement(name, iou(one, other), iou(one, truth), iou(other, truth)))
    return found


def segment(model: TrackerModel, view: View, truth: Bools) -> Bools:
    prompt = make_prompt("box", Mask.from_full(truth)).to_model(0, view.scaling)
    logits, _ = Tracker(model, max_objects=1, bank_size=2).segment(view.features, prompt)
    return rasterize(logits.float().cpu().numpy(), view.scaling.frame_size).full()


def iou(a: Bools, b: Bools) -> float:
    return float((a & b).sum() / max(1, (a | b).sum()))


def show_agreement(found: list[Agreement]) -> None:
    print("\nfirst frames, by a box    IoU of both   float32 to truth   fp8 to truth")
    mean = Agreement("mean", *np.mean([each[1:] for each in found], axis=0).tolist())
    for each in (*found, mean):
        print(f"{each.name:24s} {each.same:12.4f} {each.float32:18.4f} {each.fp8:14.4f}")
    worst = min(found, key=lambda each: each.same)
    print(f"worst: {worst.name}, {worst.same:.4f}")


def follow(sequence: Sequence, models: tuple[TrackerModel, TrackerModel]) -> list[SequenceResult]:
    """J of both models on a clip, each object shown once by its box."""
    settings = [FLOAT32, FP8]
    pairs = zip(settings, models, strict=True)

    def watch(index: int, frame: TrueFrame, masks: object) -> None:
        tell(f"{sequence.name}: frame", index + 1, sequence.length)

    return evaluate(sequence, settings, {setting.model: model for setting, model in pairs}, watch)


def show_j(found: dict[str, list[SequenceResult]]) -> None:
    print("\nnano, by a box             J float32         J fp8")
    means = [[mean_score([result]) for result in results] for results in found.values()]
    whole = [mean_score(results) for results in zip(*found.values(), strict=True)]
    for name, scores in zip([*found, "mean of objects"], [*means, whole], strict=True):
        print(f"{name:22s}", *(f"{score.j if score else float('nan'):13.4f}" for score in scores))


def tell(what: str, done: int, count: int = 0) -> None:
    """Progress on stderr, one line that is written over."""
    if sys.stderr.isatty() or done == count:
        of = f"/{count}" if count else ""
        print(f"\r{what} {done}{of}", end="\n" if done == count else "", file=sys.stderr)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shared", type=Path, default=ROOT.parent / "shared", help="data/video and data/davis"
    )
    parser.add_argument(
        "--weights", default="", help="what is calibrated on the videos; SHARED/weights/sam2-hiera-tiny"
    )
    parser.add_argument(
        "--frames", type=int, default=32, help="to calibrate on, of each source an equal share"
    )
    parser.add_argument("--recipe", type=Path, default=ROOT / "calibration/fp8/default.toml")
    parser.add_argument("--scenes", type=Path, default=ROOT / "out/scenes/test")
    parser.add_argument("--clips", type=int, default=6, help="scenes that nano is followed on; 0 for none")
    parser.add_argument("--no-real", action="store_true", help="nano alone")
    return parser.parse_args()


def real_weights(args: argparse.Namespace, recipe: Recipe) -> None:
    videos = sorted((args.shared / "data/video").glob("*.mp4"))
    name = args.weights or str(args.shared / "weights/sam2-hiera-tiny")
    sequences = open_sequences(args.shared / "data/davis", most_frames=1)
    models = with_fp8(name, spread(videos, args.frames), recipe)
    show_agreement([each for sequence in sequences for each in compare_first_frames(sequence, models)])


def nano(args: argparse.Namespace, recipe: Recipe) -> None:
    sequences = open_sequences(args.scenes)
    sequences = sequences[:: max(1, len(sequences) // args.clips)]  # of every scenario
    models = with_fp8("nano", frames_of(TABLETOP, args.frames), recipe)
    show_j({sequence.name: follow(sequence, models) for sequence in sequences[: args.clips]})


def main() -> None:
    args = arguments()
    try:
        recipe = load_recipe(args.recipe)
        if not args.no_real:
            real_weights(args, recipe)
        if args.clips:
            nano(args, recipe)
    except Sam3NodeError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
