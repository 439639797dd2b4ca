"""Tell real things apart by their looks: pairs of views of the same and of other things, half a clip apart.

    python -m tools.bench.accuracy.looks FOLDER [--clips N] [--features WEIGHTS --size PX] [--json FILE]

FOLDER has videos, such as those of data/real/droid-mp4.tar. Of each, segment-everything gives up to six things on the
first frame, and nano tracks them. Sure masks of frames that are spread over the clip give the views, by the features of
nano or of other weights. No mask is checked by a person, so a track that has drifted counts as the same thing.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import torch

from sam3_node.errors import CameraError
from sam3_node.models import TrackerModel, load_tracker
from sam3_node.perception.output_masks import rasterize
from sam3_node.perception.remembering import LIMITS, OTHER_LIMITS
from sam3_node.resumable import run_to_end
from sam3_node.tracking import ObjectPrompt, Tracker
from sam3_node.tracking.everything import EverythingOptions, segment_everything
from sam3_node.tracking.looks import describe_colours, describe_features, make_views
from sam3_node.types import Image
from tools.bench.common import Figures, make_parser
from tools.command import errors_in_one_line

FRAMES = 32
"""Frames of each clip that are tracked, spread over its length."""
EVERY = 8
"""Tracked frames from one view of a thing to the next."""
APART = 16
"""Tracked frames between the two views of a pair of the same thing at least."""
THINGS = 6
"""Things of each clip at most."""
AREAS = (0.002, 0.1)
"""Smallest and largest share of the frame that a thing may have."""
MIN_SCORE = 0.5
"""Score of a mask from which on it gives a view."""


class SeenThing(NamedTuple):
    """A view of a thing."""

    clip: str
    id: int
    frame: int
    """number of the tracked frame"""
    view: torch.Tensor


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder of videos")
    parser.add_argument("--clips", type=int, default=40, help="number of first videos (default 40)")
    parser.add_argument("--features", default="nano", help="weights whose features make the views")
    parser.add_argument("--size", type=int, default=0, help="as model.image_size of these weights")
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures = Figures("accuracy.looks")
    with errors_in_one_line():
        videos = sorted(args.folder.glob("*.mp4"))[: args.clips]
        if not videos:
            raise CameraError(f"{args.folder}: expected videos, found none")
        tracker = load_tracker("nano")
        features = tracker
        if args.features != "nano":
            features = load_tracker(args.features, image_size=args.size)
        seen: list[SeenThing] = []
        for number, video in enumerate(videos):
            seen += list_views(video, tracker, features)
            print(f"\r{number + 1} of {len(videos)} clips", end="", flush=True)
        print()
    same, other = list_pairs(seen)
    rate, threshold = find_equal_error(same, other)
    sure = LIMITS.get(features.name, OTHER_LIMITS).sure
    what = f"features of {features.name}"
    figures.add(f"things in clips, {what}", len({(each.clip, each.id) for each in seen}), "")
    figures.add(f"pairs of the same thing and of others, {what}", len(same) + len(other), "")
    figures.add(f"equal error rate, {what}", 100 * rate, "%")
    figures.add(f"similarity at that rate, {what}", threshold, "")
    figures.add(f"pairs of other things above `sure`, {what}", 100 * float((other > sure).mean()), "%")
    figures.add(f"pairs of the same thing above `sure`, {what}", 100 * float((same > sure).mean()), "%")
    figures.write(args.json)


def read_video(path: Path) -> list[Image]:
    """Return frames that are spread over a video."""
    capture = cv2.VideoCapture(str(path))
    frames = []
    while True:
        has_frame, image = capture.read()
        if not has_frame:
            break
        frames.append(np.asarray(image, np.uint8))
    return frames[:: max(1, len(frames) // FRAMES)]


@torch.inference_mode()
def list_views(path: Path, model: TrackerModel, described: TrackerModel) -> Iterator[SeenThing]:
    """Yield views of the things of a video; none of a short one."""
    frames = read_video(path)
    if len(frames) < APART + EVERY:
        return
    tracker = Tracker(model)
    size = frames[0].shape[:2]
    prompts = find_things(model, frames[0])
    for index, image in enumerate(frames):
        tracks = tracker.step(model.preprocess(image), prompts if index == 0 else ())
        if index % EVERY:
            continue
        top = described.encode(described.preprocess(image)).top
        for row, object_id in enumerate(tracks.ids):
            mask = rasterize(tracks.logits[row].numpy(), size)
            if tracks.visible[row] and tracks.scores[row] >= MIN_SCORE and mask.area:
                features = describe_features(top, tracks.logits[row : row + 1])
                view = make_views(features, [describe_colours(image, mask)])[0]
                yield SeenThing(path.name, object_id, index, view)


def find_things(model: TrackerModel, image: Image) -> list[ObjectPrompt]:
    """Return a box around each of some things that do not touch the frame's edge and do not overlap."""
    options = EverythingOptions(most=40, grid=14, min_iou=0.3, min_stability=0.3)
    found = run_to_end(segment_everything(model, model.encode(model.preprocess(image)), options))
    height, width = image.shape[:2]
    taken = np.zeros((height, width), bool)
    prompts: list[ObjectPrompt] = []
    for logits in found.logits:
        mask = rasterize(logits.numpy(), (height, width))
        x0, y0, x1, y1 = mask.box
        is_inside = x0 >= 3 and y0 >= 3 and x1 <= width - 3 and y1 <= height - 3
        share = mask.area / (height * width)
        if not is_inside or not AREAS[0] < share < AREAS[1] or len(prompts) == THINGS:
            continue
        full = mask.full()
        if (full & taken).sum() > 0.3 * mask.area:
            continue
        taken |= full
        scale = (model.image_size / width, model.image_size / height)
        box = (x0 * scale[0], y0 * scale[1], x1 * scale[0], y1 * scale[1])
        prompts.append(ObjectPrompt(len(prompts) + 1, box=box))
    return prompts


def list_pairs(seen: list[SeenThing]) -> tuple[np.ndarray, np.ndarray]:
    """Return the similarities of pairs of the same thing, and of other things of the same clip."""
    same = []
    other = []
    for place, first in enumerate(seen):
        for second in seen[:place]:
            if first.clip != second.clip:
                continue
            similarity = float(first.view @ second.view)
            if first.id != second.id:
                other.append(similarity)
            elif abs(first.frame - second.frame) >= APART:
                same.append(similarity)
    return np.array(same), np.array(other)


def find_equal_error(same: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """Return the rate at which as many pairs of the same are missed as others are accepted, and the threshold."""
    thresholds = np.sort(np.concatenate([same, other]))
    missed = np.searchsorted(np.sort(same), thresholds) / len(same)
    accepted = 1 - np.searchsorted(np.sort(other), thresholds) / len(other)
    best = int(np.abs(missed - accepted).argmin())
    return float(missed[best] + accepted[best]) / 2, float(thresholds[best])


if __name__ == "__main__":
    main()
