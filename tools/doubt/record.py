"""Record what the tracker knows on each frame of labelled clips, so that the confidence can be fitted and measured.

    python -m tools.doubt.record out/scenes/train -o out/doubt/train

Each object is prompted once, on the first frame where it is large enough; see `tools.vos.sequences`. One file is
written for each clip; a file that exists is kept. The frame of the prompt is the object's first record.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sam3_node.models import TrackerModel, load_tracker
from sam3_node.perception.output_masks import rasterize
from sam3_node.perception.prompts import to_model
from sam3_node.tracking import Tracker
from sam3_node.types import Mask
from tools.command import errors_in_one_line, new_parser
from tools.vos.followers import encode_frame, make_prompt
from tools.vos.metrics import region_similarity
from tools.vos.sequences import LabelledSequence, TrueFrame, open_sequences

Array = npt.NDArray[Any]


@dataclass
class Records:
    """The tracks of a clip, one row for each object on each frame, in the order of the frames."""

    frame: list[int] = field(default_factory=list)
    object_id: list[int] = field(default_factory=list)
    logits: list[Array] = field(default_factory=list)
    """[h, w]"""
    score: list[float] = field(default_factory=list)
    presence: list[float] = field(default_factory=list)
    pointer: list[Array] = field(default_factory=list)
    """[C]"""
    prompted: list[bool] = field(default_factory=list)
    iou: list[float] = field(default_factory=list)
    """of the mask at the frame's size with the truth; NaN where the truth is unknown or no mask is published"""

    def save(self, path: Path) -> None:
        """Write the rows to a file; logits and pointers at half precision."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part.npz")
        np.savez_compressed(
            part,
            frame=np.array(self.frame, np.int32),
            object_id=np.array(self.object_id, np.int32),
            logits=np.array(self.logits, np.float16),
            score=np.array(self.score, np.float32),
            presence=np.array(self.presence, np.float32),
            pointer=np.array(self.pointer, np.float16),
            prompted=np.array(self.prompted, np.bool_),
            iou=np.array(self.iou, np.float32),
        )
        part.rename(path)


def record(sequence: LabelledSequence, model: TrackerModel, kind: str) -> Records:
    """Track all objects of a clip from one prompt each; kind: mask, box or point."""
    tracker = Tracker(model, max(1, len(sequence.ids)))
    rows = Records()
    for number, frame in enumerate(sequence.frames()):
        view = encode_frame(model, frame.image)
        known = set(tracker.ids)
        entering = [
            to_model(make_prompt(kind, Mask.from_full(truth)), object_id, view.scaling)
            for object_id, truth in frame.masks.items()
            if object_id not in known and truth.any() and truth.mean() >= sequence.min_area
        ]
        tracks = tracker.step_features(view.features, entering)
        logits = tracks.logits.float().cpu().numpy()
        for index, object_id in enumerate(tracks.ids):
            visible = bool(tracks.visible[index])
            iou = _iou(logits[index], visible, frame, object_id)
            rows.frame.append(number)
            rows.object_id.append(object_id)
            rows.logits.append(logits[index])
            rows.score.append(float(tracks.scores[index]))
            rows.presence.append(float(tracks.presence[index]))
            rows.pointer.append(tracks.pointers[index].float().cpu().numpy())
            rows.prompted.append(object_id not in known)
            rows.iou.append(np.nan if object_id in frame.unknown else iou)
    return rows


def _iou(logits: Array, visible: bool, frame: TrueFrame, object_id: int) -> float:
    mask = rasterize(logits, frame.size)
    if not visible or not mask.area:
        return float("nan")
    return float(region_similarity(mask.full(), frame.truth(object_id), frame.void))


def record_folder(
    folder: Path, model: TrackerModel, out: Path, kinds: list[str], clips: int = 0, names: str = ""
) -> Iterator[Path]:
    """Record the clips of a folder; the kinds of prompts take turns. Yield the files."""
    sequences = open_sequences(folder, [name for name in names.split(",") if name])
    for index, sequence in enumerate(sequences[: clips or None]):
        path = out / f"{sequence.name}.npz"
        if not path.is_file():
            kind = kinds[index % len(kinds)]
            record(sequence, model, kind).save(path)
        yield path


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("folder", type=Path, help="labelled clips in DAVIS' layout")
    parser.add_argument("--model", default="nano", help="as model.name of the node")
    parser.add_argument("--prompts", default="mask", help="kinds of prompts that take turns, comma-separated")
    parser.add_argument("--clips", type=int, default=0, help="number of first clips; 0: all")
    parser.add_argument("-o", "--out", type=Path, required=True, help="folder of the records")
    args = parser.parse_args()
    with errors_in_one_line():
        model = load_tracker(args.model)
        for path in record_folder(args.folder, model, args.out, args.prompts.split(","), args.clips):
            print(path, flush=True)


if __name__ == "__main__":
    main()
