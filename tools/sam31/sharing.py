"""Measure how much the masks of others change when an object is added to their group, or removed from it.

    python -m tools.sam31.sharing [MODEL]

MODEL is a file or a folder of SAM 3.1; by default a small model with random weights, which shows how far the effect
reaches, and nothing of its quality. Two trackers follow the same random clip; one of them gets the change. The figure
is the mean IoU of the other objects' masks over the frames after it, over several clips.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from sam3_node.models import TrackerModel, load_tracker
from sam3_node.models.sam31 import random_model
from sam3_node.tracking import ObjectPrompt, Tracker

from ..command import errors_in_one_line, new_parser

CLIPS = 6
BEFORE = 10
"""Frames before the change."""
AFTER = (1, 5, 20)
"""Frames after the change on which masks are compared."""
STEP = 2
"""Pixels by which the picture moves each frame, to the side and twice as far down."""

Change = Callable[[Tracker, Tensor], None]


def make_prompts(ids: range, size: int) -> list[ObjectPrompt]:
    """Return a click for each object."""
    return [
        ObjectPrompt(i, points=[[size * (0.1 + 0.23 * i % 0.8), size * (0.1 + 0.37 * i % 0.8)]]) for i in ids
    ]


def add(first: int, count: int) -> Change:
    """Return the change that adds objects to the group."""

    def change(tracker: Tracker, picture: Tensor) -> None:
        tracker.step(picture, make_prompts(range(first, first + count), tracker.model.image_size))

    return change


def remove(tracker: Tracker, picture: Tensor) -> None:
    """Remove the newest object."""
    tracker.remove(tracker.ids[-1])
    tracker.step(picture)


CHANGES: dict[str, tuple[int, Change]] = {
    "1 is added to 4": (4, add(4, 1)),
    "12 are added to 4": (4, add(4, 12)),
    "1 of 5 is removed": (5, remove),
    "1 of 16 is removed": (16, remove),
}
"""The objects before each change, and the change."""


def find_iou(one: Tensor, other: Tensor) -> float:
    """Return the IoU of two masks' logits; 1 for two empty masks."""
    union = ((one > 0) | (other > 0)).sum()
    return float(((one > 0) & (other > 0)).sum() / union) if union else 1.0


@torch.inference_mode()
def compare(model: TrackerModel, objects: int, change: Change, seed: int) -> dict[int, list[float]]:
    """Return the IoU of each other object by the number of frames after a change."""
    size = model.image_size
    base = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(seed))
    pictures = [torch.roll(base, (STEP * n, 2 * STEP * n), (2, 3)) for n in range(BEFORE + AFTER[-1] + 1)]
    changed = Tracker(model, max_objects=model.slots)
    plain = Tracker(model, max_objects=model.slots)
    for number, picture in enumerate(pictures[:BEFORE]):
        for tracker in (changed, plain):
            tracker.step(picture, make_prompts(range(objects), size) if number == 0 else [])
    change(changed, pictures[BEFORE])
    plain.step(pictures[BEFORE])
    others = [i for i in plain.ids if i in changed.ids]
    found: dict[int, list[float]] = {}
    for number, picture in enumerate(pictures[BEFORE + 1 :], start=1):
        sides = [tracker.step(picture) for tracker in (changed, plain)]
        if number in AFTER:
            logits = [dict(zip(tracks.ids, tracks.logits, strict=True)) for tracks in sides]
            found[number] = [find_iou(logits[0][i], logits[1][i]) for i in others]
    return found


def main() -> None:
    """Print a table."""
    parser = new_parser(__doc__, prog="python -m tools.sam31.sharing")
    parser.add_argument("model", nargs="?", help="weights; default: small random ones")
    options = parser.parse_args()
    with errors_in_one_line():
        model = load_tracker(options.model) if options.model else random_model()
        print("| mean IoU of the others, frames after |", *(f"{number} |" for number in AFTER))
        print("|---" * (1 + len(AFTER)) + "|")
        for name, (objects, change) in CHANGES.items():
            clips = [compare(model, objects, change, seed) for seed in range(CLIPS)]
            means = [statistics.mean(iou for clip in clips for iou in clip[number]) for number in AFTER]
            print(f"| {name} |", *(f"{mean:.3f} |" for mean in means), flush=True)


if __name__ == "__main__":
    main()
