"""Compare the time of frames between two detections with the same frames' time without a detector.

    python -m tools.bench.latency.detect --every 5 --frames 300
    python -m tools.bench.latency.detect --detector yolo-world:./yolo --names mug,bottle

Two pipelines step through the same frames in turns, and the one that begins alternates. Both are prompted with the
boxes of the objects. The detector looks for names with a threshold that nothing reaches, so that both pipelines track
the same objects. Each of --runs runs has --frames frames.
"""

import argparse
import time

import numpy as np

from sam3_node.cameras.camera_source import CapturedImage
from sam3_node.cameras.publish import frame_from
from sam3_node.cameras.scene import Scene
from sam3_node.detection.detectors import prepare_prompts
from sam3_node.errors import ModelError
from sam3_node.perception.loading import load_configured_detector, load_model
from sam3_node.perception.pipeline import Pipeline
from sam3_node.settings import CameraSettings, DetectorSettings, ModelSettings, TrackerSettings
from sam3_node.types import Frame, Mask
from sam3_node.wire.frame_prompt import FramePrompt
from tools.bench.common import RUNS, Figures, make_parser
from tools.command import errors_in_one_line

UNREACHED_SCORE = 0.99  # no detection scores as high
OBJECTS = 4
WARM_UP = 10  # frames


def pipelines(args: argparse.Namespace) -> tuple[Pipeline, Pipeline]:
    """Return a pipeline with the detector and one without."""
    kind, _, name = args.detector.partition(":")
    settings = DetectorSettings.model_validate({"kind": kind, "name": name, "every": args.every})
    models = ModelSettings.model_validate({"name": args.model, "threads": args.threads})
    model = load_model(models, TrackerSettings())
    detector = load_configured_detector(settings, models)
    if detector is None:
        raise ModelError("--detector: expected one, found none")
    detecting = Pipeline(model, TrackerSettings(), "cam0", detector, settings)
    detecting.set_prompts(prepare_prompts(detector, args.names.split(","), UNREACHED_SCORE))
    return detecting, Pipeline(model, TrackerSettings(), "cam0")


def draw_frame(scene: Scene, seq: int) -> tuple[Frame, np.ndarray]:
    """Return a frame of the scene, and the object number of each pixel."""
    image, ids = scene.render(seq)
    return frame_from(CapturedImage(image, seq * 33_000_000), seq, CameraSettings(name="cam0")), ids


Run = dict[str, list[float]]
"""Milliseconds of frames "with" a detection, of those "between", and of the same frames "without" a detector."""


def measure(detecting: Pipeline, plain: Pipeline, frames: int, runs: int) -> list[Run]:
    """Step both pipelines through a drawn scene; objects stay tracked from run to run."""
    scene = Scene(objects=OBJECTS)
    times: list[Run] = [{"with": [], "between": [], "without": []} for _ in range(runs)]
    for seq in range(WARM_UP + frames * runs):
        current, ids = draw_frame(scene, seq)
        order = (detecting, plain) if seq % 2 else (plain, detecting)
        frame_ms = {}
        detected = False
        for pipeline in order:
            begin_s = time.perf_counter()
            masks = pipeline.step(current)
            frame_ms[pipeline] = 1e3 * (time.perf_counter() - begin_s)
            detected |= "detect" in masks.stages_us
        if seq == 0:
            prompt(order, ids)
        elif seq >= WARM_UP:
            run = times[(seq - WARM_UP) // frames]
            run["with" if detected else "between"].append(frame_ms[detecting])
            if not detected:
                run["without"].append(frame_ms[plain])
    return times


def prompt(pipelines: tuple[Pipeline, Pipeline], ids: np.ndarray) -> None:
    """Prompt both pipelines with the box of each object on the first frame."""
    for number in range(1, OBJECTS + 1):
        box = Mask.from_full(ids == number).box
        for pipeline in pipelines:
            pipeline.add(FramePrompt(box=box), seq=0)


def report(runs: list[Run], every: int, figures: Figures) -> None:
    """Keep the median times and the ratios with their spread."""
    names = {
        "with": "with a detection",
        "between": f"between detections (every {every})",
        "without": "the same frames without a detector",
    }
    for key, name in names.items():
        figures.add(f"frame {name}, p50", [float(np.percentile(run[key], 50)) for run in runs], "ms")
    for part in (50, 99):
        pairs = [[np.percentile(run[key], part) for key in ("between", "without")] for run in runs]
        ratios = [float(between / without) for between, without in pairs]
        figures.add(f"frame between detections / the same frame without a detector, p{part}", ratios, "x")


def main() -> None:
    parser = make_parser(__doc__, RUNS, model="nano", threads=0)
    parser.add_argument("--detector", default="yolo-world:nano", metavar="KIND:NAME", help="detector")
    parser.add_argument("--names", default="mug,bottle,box,ball", help="names to look for, comma-separated")
    parser.add_argument("--every", type=int, default=5, help="detector period in frames")
    parser.add_argument("--frames", type=int, default=300, help="frames of each run")
    args = parser.parse_args()
    figures = Figures("latency.detect")
    with errors_in_one_line():
        runs = measure(*pipelines(args), args.frames, args.runs)
    report(runs, args.every, figures)
    figures.write(args.json)


if __name__ == "__main__":
    main()
