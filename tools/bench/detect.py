"""What detection costs the frames that have none: the same frames with a detector every k of them, and without.

    python tools/bench/detect.py --every 5 --frames 300
    python tools/bench/detect.py --detector yolo-world:./yolo --names mug,bottle

Two pipelines take each frame in turn, the first one alternating. Objects are shown to both by their boxes; the names
are asked for with a threshold that nothing reaches, so that both track the same.
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the node does; read when torch is imported

import numpy as np

from sam3_node.cameras.scene import Scene
from sam3_node.detection.base import prepare_prompts
from sam3_node.errors import ModelError, Sam3NodeError
from sam3_node.perception.loading import load_configured_detector, load_model
from sam3_node.perception.pipeline import Pipeline
from sam3_node.perception.prompts import FramePrompt
from sam3_node.settings import DetectorSettings, ModelSettings, TrackerSettings
from sam3_node.types import Frame, Mask
from sam3_node.wire import encode_image

NOTHING = 0.99  # no detection scores as much
OBJECTS = 4
WARM_UP = 10  # frames


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="nano", help="as model.name of the node")
    parser.add_argument("--detector", default="yolo-world:nano", metavar="KIND:NAME")
    parser.add_argument("--names", default="mug,bottle,box,ball", help="with commas between")
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--frames", type=int, default=300)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 lets torch choose")
    return parser.parse_args()


def pipelines(args: argparse.Namespace) -> tuple[Pipeline, Pipeline]:
    """With the detector, and without."""
    kind, _, name = args.detector.partition(":")
    settings = DetectorSettings.model_validate({"kind": kind, "name": name, "every": args.every})
    models = ModelSettings.model_validate({"name": args.model, "threads": args.threads})
    model, detector = load_model(models, TrackerSettings()), load_configured_detector(settings, models)
    if detector is None:
        raise ModelError("--detector: expected one, found none")
    watching = Pipeline(model, TrackerSettings(), "cam0", detector, settings)
    watching.set_prompts(prepare_prompts(detector, args.names.split(","), NOTHING))
    return watching, Pipeline(model, TrackerSettings(), "cam0")


def frame(scene: Scene, seq: int) -> tuple[Frame, np.ndarray]:
    image, ids = scene.render(seq)
    colour = encode_image(image, "bgr8")
    return Frame("cam0", seq, seq * 33_000_000, scene.width, scene.height, "bgr8", colour), ids


def measure(watching: Pipeline, alone: Pipeline, frames: int) -> dict[str, list[float]]:
    """Milliseconds of frames with a detection, of those between them, and of the latter without a detector."""
    scene = Scene(objects=OBJECTS)
    spent: dict[str, list[float]] = {"with": [], "between": [], "without": []}
    for seq in range(WARM_UP + frames):
        current, ids = frame(scene, seq)
        order = (watching, alone) if seq % 2 else (alone, watching)
        took, detected = {}, False
        for pipeline in order:
            begin = time.perf_counter()
            masks = pipeline.step(current)
            took[pipeline] = 1e3 * (time.perf_counter() - begin)
            detected |= "detect" in masks.stages_us
        if seq == 0:
            show(order, ids)
        elif seq >= WARM_UP:
            spent["with" if detected else "between"].append(took[watching])
            if not detected:
                spent["without"].append(took[alone])
    return spent


def show(found: tuple[Pipeline, Pipeline], ids: np.ndarray) -> None:
    for number in range(1, OBJECTS + 1):
        box = Mask.from_full(ids == number).box
        for pipeline in found:
            pipeline.add(FramePrompt(box=box), seq=0)


def main() -> None:
    args = arguments()
    try:
        spent = measure(*pipelines(args), args.frames)
    except Sam3NodeError as error:
        raise SystemExit(f"error: {error}") from error
    print(f"{'ms of a frame':<42} {'p50':>7} {'p99':>7}")
    rows = {
        "with a detection": spent["with"],
        f"between detections (every {args.every})": spent["between"],
        "the same frames without a detector": spent["without"],
    }
    for name, values in rows.items():
        print(f"{name:<42} {np.percentile(values, 50):>7.1f} {np.percentile(values, 99):>7.1f}")
    ratios = [np.percentile(spent["between"], p) / np.percentile(spent["without"], p) for p in (50, 99)]
    print(f"{'between / without':<42} {ratios[0]:>6.2f}x {ratios[1]:>6.2f}x")


if __name__ == "__main__":
    main()
