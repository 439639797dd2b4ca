"""Measure what marks on doubtful frames gain: mean IoU with the truth after each mark and its redo.

    python -m tools.bench.accuracy.redo                        the bundled recording, 10 marks
    python -m tools.bench.accuracy.redo FILE.mcap --marks 5 --by point --json FILE
    python -m tools.bench.accuracy.redo --image-size 512       what is redone has more pixels than the replay

The recording has ground truth. Each object is shown once, by its true box on the first frame where it covers 0.1 % of
the image. Then, until there are `--marks` marks, the frame at the head of the queue is looked at, as a person would: a
mask whose IoU with the truth is at least 0.8, or none where the object covers less than 0.1 %, is stated as checked;
any other is marked, by the true box or a point in the middle of the object, and the results are redone. An object that
cannot be seen is stated as hidden where it has a mask, which is a mark, too. The mean IoU is over the frames where an
object is in view, then over objects.
"""

import argparse
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np

from sam3_node.bags import RecordingReader
from sam3_node.bags.review import QueueEntry, Reviewer
from sam3_node.errors import BagError
from sam3_node.geometry import mask_iou
from sam3_node.replay.job import Job, ObjectOnFrame
from sam3_node.replay.redone import read_results
from sam3_node.replay.run import PerceptionCache, redo_job, run_job
from sam3_node.replay.store import open_store
from sam3_node.schema.marks import Mark
from sam3_node.types import Instance, Mask, MaskFrame
from tools.bench.common import ROOT, Figures, make_parser
from tools.command import errors_in_one_line

RIGHT_IOU = 0.8
"""IoU with the truth from which on a person takes a mask for right."""
MIN_SHARE = 0.001
"""Share of the image that an object covers where it can be seen."""
MAX_LOOKS = 200
"""Frames that are looked at, at most."""


class Truth(NamedTuple):
    """The truth of a recording of one camera: the instances of each frame by label."""

    frames: Mapping[int, Mapping[str, Instance]]

    def is_seen(self, seq: int, label: str) -> bool:
        """Return True if an object can be seen on a frame."""
        found = self.frames[seq].get(label)
        return found is not None and found.area >= MIN_SHARE * found.mask.size[0] * found.mask.size[1]

    def score(self, results: Mapping[int, MaskFrame]) -> dict[str, float]:
        """Return the mean IoU of each object over the frames where it is in view."""
        ious: dict[str, list[float]] = {}
        for seq, objects in self.frames.items():
            masks = {one.label: one.mask for one in results[seq].instances}
            for label, true in objects.items():
                if true.area:
                    iou = mask_iou(masks[label], true.mask) if label in masks else 0.0
                    ious.setdefault(label, []).append(iou)
        return {label: float(np.mean(found)) for label, found in ious.items()}


def read_truth(path: Path) -> Truth:
    """Return the truth of a recording. Raises BagError without one, or with two objects of one label."""
    frames = {
        masks.seq: {one.label: one for one in masks.instances} for masks in RecordingReader([path]).truth()
    }
    if not frames:
        raise BagError(f"{path}: expected ground truth, found none")
    return Truth(frames)


def list_first_boxes(truth: Truth) -> tuple[ObjectOnFrame, ...]:
    """Return the one prompt of each object."""
    objects: dict[str, ObjectOnFrame] = {}
    for seq in sorted(truth.frames):
        for label, true in truth.frames[seq].items():
            if label not in objects and truth.is_seen(seq, label):
                objects[label] = ObjectOnFrame(seq=seq, box=_box(true.mask), label=label)
    return tuple(objects.values())


def look(entry: QueueEntry, label: str, truth: Truth, results: Mapping[int, MaskFrame], by: str) -> Mark:
    """Return what a person who sees the truth says of a frame of the queue."""
    given = {one.id: one.mask for one in results[entry.seq].instances}.get(entry.id)
    mark = partial(Mark, camera=entry.camera, seq=entry.seq, id=entry.id)
    has_mask = given is not None and given.area > 0
    if not truth.is_seen(entry.seq, label):
        return mark(hidden=True) if has_mask else mark(state="checked")
    true = truth.frames[entry.seq][label].mask
    if given is not None and mask_iou(given, true) >= RIGHT_IOU:
        return mark(state="checked")
    if by == "box":
        return mark(label=label, box=_box(true))
    return mark(label=label, points=(_find_middle(true),), labels=(1,))


def _box(mask: Mask) -> tuple[float, float, float, float]:
    x0, y0, x1, y1 = mask.box
    return float(x0), float(y0), float(x1), float(y1)


def _find_middle(mask: Mask) -> tuple[float, float]:
    """Return the pixel (x, y) that is farthest from the outline."""
    inside = np.pad(mask.crop, 1).astype(np.uint8)
    distance = cv2.distanceTransform(inside, cv2.DIST_L2, 5)
    row, column = np.unravel_index(distance.argmax(), distance.shape)
    return float(mask.box[0] + column - 1) + 0.5, float(mask.box[1] + row - 1) + 0.5


def measure(path: Path, out: Path, args: argparse.Namespace, figures: Figures) -> None:
    """Replay, then mark and redo, and keep the mean IoU after each."""
    truth = read_truth(path)
    settings = {"model": {"name": args.model, "threads": args.threads}, "detector": {"kind": "none"}}
    redone = {"model": {"image_size": args.image_size}} if args.image_size else {}
    objects = list_first_boxes(truth)
    load = PerceptionCache()
    run_job(Job((str(path),), str(out), objects=objects, settings=settings), load)
    marks: list[Mark] = []
    edits = looks = 0
    while True:
        results = {masks.seq: masks for masks in read_results(open_store(str(out)))}
        scores = truth.score(results)
        what = f"{path.stem}, {Path(args.model).name}, marks by {args.by}"
        if args.image_size:
            what += f", redone at {args.image_size} pixels"
        figures.add(f"mean IoU after {edits} marks, {what}", float(np.mean(list(scores.values()))), "IoU")
        print(f"  {', '.join(f'{label} {iou:.3f}' for label, iou in scores.items())}", flush=True)
        mark = None
        while edits < args.marks and looks < MAX_LOOKS and (mark is None or not mark.is_edit):
            reviewer = Reviewer()
            for index, masks in enumerate(results.values()):
                reviewer.add(index, masks)
            queue = reviewer.queue(marks)
            if not queue:
                break
            entry = queue[0]
            label = next(one.label for one in results[entry.seq].instances if one.id == entry.id)
            mark = look(entry, label, truth, results, args.by)
            print(f"  frame {entry.seq}, {label}, {entry.reason} on {entry.frames} frames: {describe(mark)}")
            marks.append(mark)
            looks += 1
        if mark is None or not mark.is_edit:
            break
        edits += 1
        print(f"  {redo_job(str(path), str(out), marks, load, settings=redone).line}")
    figures.add(f"frames looked at, {what}", looks, "frames")


def describe(mark: Mark) -> str:
    """Say what a mark says."""
    if mark.has_prompt:
        return f"marked by {mark.box or mark.points}"
    return "hidden" if mark.hidden else str(mark.state)


def main() -> None:
    parser = make_parser(__doc__, model="nano", threads=0)
    parser.add_argument(
        "path",
        type=Path,
        nargs="?",
        default=ROOT / "sam3_node/assets/tabletop.mcap",
        metavar="FILE.mcap",
        help="a recording with ground truth (default: the bundled one)",
    )
    parser.add_argument("--marks", type=int, default=10, help="marks that are made, at most (default 10)")
    parser.add_argument(
        "--by", choices=("box", "point"), default="box", help="kind of the marks (default box)"
    )
    parser.add_argument(
        "--image-size", type=int, default=0, help="of the redos, as model.image_size; 0: as the replay"
    )
    args = parser.parse_args()
    figures = Figures("accuracy.redo")
    with errors_in_one_line(), tempfile.TemporaryDirectory() as folder:
        measure(args.path, Path(folder) / "out", args, figures)
        figures.write(args.json)


if __name__ == "__main__":
    main()
