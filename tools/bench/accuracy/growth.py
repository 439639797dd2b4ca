"""Count the frames on which masks run away, with weights that follow the last mask: a moving camera, hands, a robot.

    python -m tools.bench.accuracy.growth WEIGHTS --image-size 512
    python -m tools.bench.accuracy.growth WEIGHTS --clip cups --every 4 --frames 120

Each object is shown by a box on the first frame. No object of these clips grows to 2.5 times its first area. A
mask runs away on a frame where it has more than 4 times the area of its first mask. A mask is withheld on a frame where
the tracker reports the object out of view.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import torch

from sam3_node.perception.output_masks import rasterize
from sam3_node.perception.perception import load_model
from sam3_node.perception.prompts import to_model
from sam3_node.settings import ModelSettings, TrackerSettings
from sam3_node.tracking import Tracker
from sam3_node.types import Image
from sam3_node.wire.frame_prompt import FramePrompt
from tools.bench.common import SHARED, Figures, make_parser
from tools.vos.followers import encode_frame

RUNAWAY = 4.0
Box = tuple[int, int, int, int]


class Case(NamedTuple):
    """A clip, a video or a folder of images, and boxes of objects on its first frame, in pixels."""

    path: Path
    boxes: dict[str, Box]


CASES = {
    "kitchen": Case(
        SHARED / "data/rgbd/kitchen",
        {
            "book": (514, 258, 607, 347),
            "two books": (495, 255, 607, 347),
            "mug": (358, 160, 402, 206),
            "papers": (374, 196, 500, 262),
            "leaflet": (430, 25, 470, 95),
            "chair": (175, 130, 305, 345),
        },
    ),
    "cups": Case(
        SHARED / "data/video/02_cups.mp4",
        {"left cup": (571, 294, 735, 540), "right cup": (833, 294, 1000, 543)},
    ),
    "robot arm": Case(
        SHARED / "data/video/16_robotarm.mp4", {"arm": (277, 130, 784, 440), "gripper": (184, 416, 527, 617)}
    ),
}


def arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("model", help="as model.name of the node")
    parser.add_argument("--image-size", type=int, default=0, help="as model.image_size; 0: the model's own")
    parser.add_argument("--clip", choices=CASES, action="append", help="clips to run; all if not given")
    parser.add_argument("--frames", type=int, default=120, help="number of first frames of each clip")
    parser.add_argument("--every", type=int, default=1, help="use every N-th frame of a clip")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 lets torch choose")
    return parser.parse_args()


def read_images(path: Path) -> Iterator[Image]:
    """Yield the images BGR uint8 [h, w, 3] of a folder or a video."""
    if path.is_dir():
        for name in sorted(path.glob("*.jpg")):
            yield np.asarray(cv2.imread(str(name)), np.uint8)
        return
    capture = cv2.VideoCapture(str(path))
    while (found := capture.read())[0]:
        yield np.asarray(found[1], np.uint8)
    capture.release()


@torch.inference_mode()
def follow(tracker: Tracker, case: Case, frames: int, every: int) -> dict[str, list[int]]:
    """Return the areas in pixels of each object's mask on all frames; 0 where the object is out of view."""
    areas: dict[str, list[int]] = {name: [] for name in case.boxes}
    for number, image in enumerate(islice(read_images(case.path), 0, frames, every)):
        view = encode_frame(tracker.model, image)
        prompts = [
            to_model(FramePrompt(box=box), index, view.scaling)
            for index, box in enumerate(case.boxes.values())
        ]
        tracks = tracker.step_features(view.features, prompts if number == 0 else ())
        for name, logits in zip(case.boxes, tracks.logits.float().cpu().numpy(), strict=True):
            areas[name].append(rasterize(logits, view.scaling.frame_size).area)
    return areas


def report(clip: str, areas: dict[str, list[int]], what: str, figures: Figures) -> None:
    """Print the figures of each object, and keep those of the clip."""
    runaway = withheld = total = 0
    for name, sizes in areas.items():
        ratio = np.array(sizes[1:]) / max(sizes[0], 1)
        wild, hidden = int((ratio > RUNAWAY).sum()), ratio == 0
        recovered = int((hidden[:-1] & ~hidden[1:]).sum())
        print(
            f"{clip}, {name}: largest {ratio.max():.2f} times its first area, {wild} of {len(ratio)} frames run away, "
            f"{int(hidden.sum())} withheld, {recovered} times shown again"
        )
        runaway, withheld, total = runaway + wild, withheld + int(hidden.sum()), total + len(ratio)
    figures.add(f"masks that run away, of {total}, {clip}, {what}", runaway, "masks", target="0")
    figures.add(f"masks withheld, of {total}, {clip}, {what}", withheld, "masks")


def main() -> None:
    args, figures = arguments(), Figures("accuracy.growth")
    settings = ModelSettings.model_validate(
        {"name": args.model, "image_size": args.image_size, "threads": args.threads}
    )
    model = load_model(settings, TrackerSettings())
    for clip in args.clip or CASES:
        areas = follow(Tracker(model, max_objects=8), CASES[clip], args.frames, max(1, args.every))
        what = f"{Path(args.model).name} at {model.image_size} px"
        report(clip, areas, what if args.every == 1 else f"{what}, one frame of {args.every}", figures)
    figures.write(args.json)


if __name__ == "__main__":
    main()
