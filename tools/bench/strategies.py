"""What the strategies of a replay do for the masks of the bundled recording: mean IoU with its ground truth.

    python tools/bench/strategies.py            objects shown by their true boxes on the first frame, and on frame 112
    python tools/bench/strategies.py --frame 60

The mean is over all frames on which an object is in view; one without a mask counts as 0. Beside it: frames on which
an object that is not in view has a mask.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sam3_node.bags import read_masks
from sam3_node.bags.native.labelled_clip import TABLETOP, LabelledClip
from sam3_node.replay.job import STRATEGIES, Job, ObjectOnFrame, Strategy
from sam3_node.replay.run import PerceptionCache, run_job

SETTINGS = {"detector": {"kind": "none"}}


class Score(NamedTuple):
    """mean: of IoU; false: masks of what is not in view."""

    mean: float
    false: int


def shown_on(recording: LabelledClip, index: int) -> tuple[ObjectOnFrame, ...]:
    """Each object that is in view on a frame, by the box around its true mask."""
    found = []
    for known, mask in recording.truth(index).items():
        rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
        box = (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)
        numbers = tuple(float(side) for side in box)
        found.append(ObjectOnFrame(index=index, box=numbers, label=recording.labels[known]))  # type: ignore[arg-type]
    return tuple(found)


def score(masks: Path, recording: LabelledClip, labels: set[str]) -> Score:
    """Of the objects with these labels."""
    places = {frame.seq: index for index, frame in enumerate(recording.frames)}
    ious, false = [], 0
    for found in read_masks(masks):
        there = {one.label: one.mask.full() for one in found.instances if one.area}
        truth = {recording.labels[known]: mask for known, mask in recording.truth(places[found.seq]).items()}
        for label in labels & truth.keys():
            mask = there.get(label, np.zeros_like(truth[label]))
            ious.append((mask & truth[label]).sum() / (mask | truth[label]).sum())
        false += len(labels & there.keys() - truth.keys())
    return Score(float(np.mean(ious)), false)


def measure(recording: LabelledClip, index: int, strategy: Strategy, load: PerceptionCache) -> Score:
    """Replay the recording with all objects shown on frame `index`."""
    objects = shown_on(recording, index)
    with tempfile.TemporaryDirectory() as folder:
        job = Job((str(TABLETOP),), folder, strategy=strategy, objects=objects, settings=SETTINGS)
        run_job(job, load)
        return score(Path(folder) / "masks.mcap", recording, {one.label for one in objects})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--frame", type=int, action="append", default=[], help="where objects are shown")
    args = parser.parse_args()
    recording, load = LabelledClip.load(TABLETOP), PerceptionCache()
    print(f"{'shown on frame':<16}{'strategy':<16}{'mean IoU':>9}{'masks of what is hidden':>26}")
    for index in args.frame or (0, 112):
        for strategy in STRATEGIES:
            found = measure(recording, index, strategy, load)
            print(f"{index:<16}{strategy:<16}{found.mean:>9.3f}{found.false:>26}", flush=True)


if __name__ == "__main__":
    main()
