"""Score the strategies of a replay on the bundled recording: mean IoU with its ground truth.

    python -m tools.bench.accuracy.strategies               prompts on the first frame, then on frame 112
    python -m tools.bench.accuracy.strategies --frame 60    prompts on frame 60

Objects are prompted by their true boxes. The mean is over all frames on which an object is in view; a missing mask
counts as 0. The second figure counts the masks of objects that are not in view.
"""

import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sam3_node.bags import read_masks
from sam3_node.bags.native.reader import TABLETOP, LabelledClip
from sam3_node.replay.job import STRATEGIES, Job, ObjectOnFrame, Strategy
from sam3_node.replay.run import PerceptionCache, run_job
from sam3_node.types import Mask
from tools.bench.common import Figures, make_parser
from tools.vos.metrics import region_similarity

SETTINGS = {"detector": {"kind": "none"}}


class StrategyScore(NamedTuple):
    """Mean IoU, and the number of masks of objects that are not in view."""

    mean_iou: float
    false_masks: int


def make_prompts(recording: LabelledClip, index: int) -> tuple[ObjectOnFrame, ...]:
    """Return a prompt for each object in view on a frame: the box around its true mask."""
    prompts = []
    for object_id, mask in recording.truth(index).items():
        x0, y0, x1, y1 = map(float, Mask.from_full(mask).box)
        prompts.append(ObjectOnFrame(index=index, box=(x0, y0, x1, y1), label=recording.labels[object_id]))
    return tuple(prompts)


def score(masks: Path, recording: LabelledClip, labels: set[str]) -> StrategyScore:
    """Score the published masks of the objects with these labels."""
    index_by_seq = {frame.seq: index for index, frame in enumerate(recording.frames)}
    ious = []
    false_masks = 0
    for masks_frame in read_masks(masks):
        published = {
            instance.label: instance.mask.full() for instance in masks_frame.instances if instance.area
        }
        true_masks = recording.truth(index_by_seq[masks_frame.seq])
        truth = {recording.labels[object_id]: mask for object_id, mask in true_masks.items()}
        for label in labels & truth.keys():
            mask = published.get(label, np.zeros_like(truth[label]))
            ious.append(region_similarity(mask, truth[label]))
        false_masks += len(labels & published.keys() - truth.keys())
    return StrategyScore(float(np.mean(ious)), false_masks)


def measure(recording: LabelledClip, index: int, strategy: Strategy, load: PerceptionCache) -> StrategyScore:
    """Replay the recording with a prompt for each object on frame `index`."""
    objects = make_prompts(recording, index)
    with tempfile.TemporaryDirectory() as folder:
        job = Job((str(TABLETOP),), folder, strategy=strategy, objects=objects, settings=SETTINGS)
        run_job(job, load)
        return score(Path(folder) / "masks.mcap", recording, {prompt.label for prompt in objects})


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--frame", type=int, nargs="+", default=[0, 112], help="frames of the prompts")
    args = parser.parse_args()
    figures = Figures("accuracy.strategies")
    recording = LabelledClip.load(TABLETOP)
    load = PerceptionCache()
    for index in args.frame:
        for strategy in STRATEGIES:
            result = measure(recording, index, strategy, load)
            what = f"replay, strategy {strategy}, prompts on frame {index} of the bundled recording"
            figures.add(f"mean IoU, {what}", result.mean_iou, "IoU")
            figures.add(f"masks of hidden objects, {what}", result.false_masks, "masks")
    figures.write(args.json)


if __name__ == "__main__":
    main()
