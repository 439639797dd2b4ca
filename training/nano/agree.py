"""Measure the IoU of single frames without memory: each object prompted by its tight box, and by its innermost point.

    python -m training.nano agree WEIGHTS... --taught out/taught/held     against the teacher's own masks
    python -m training.nano agree WEIGHTS... --clips FOLDER --every 12    against the labels of a folder of clips

WEIGHTS are names as `load_tracker` takes them: nano, or a folder.
"""

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from sam3_node.models import TrackerModel, load_tracker
from sam3_node.perception.output_masks import rasterize
from sam3_node.perception.prompts import to_model
from sam3_node.tracking import Tracker
from sam3_node.types import Image, Mask
from tools.command import errors_in_one_line, new_parser, set_up_cpu
from tools.scenes.clips import list_clips, read_clip
from tools.vos.followers import EncodedFrame, encode_frame, make_prompt
from tools.vos.metrics import region_similarity

from .taught import fit, list_shards, read_all

Bools = npt.NDArray[np.bool_]
Labelled = tuple[str, Image, list[Bools]]
"""A group of figures, a picture, and the masks of its objects at its size."""

KINDS = ("box", "point")
ALL = "all"


@dataclass
class Agreement:
    """IoU of each object by kind of prompt, for one group of pictures."""

    ious: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})

    def line(self) -> str:
        """Return counts and means as text."""
        means = " · ".join(f"{kind} {np.mean(ious):.3f}" for kind, ious in self.ious.items())
        return f"{means} · {len(self.ious[KINDS[0]])} objects"


def main(words: list[str]) -> None:
    """Run the command line `agree`."""
    args = _arguments(words)
    set_up_cpu(args.threads)
    with errors_in_one_line():
        for weights in args.weights:
            pictures = (
                from_shards(args.taught, args.most) if args.taught else from_clips(args.clips, args.every)
            )
            groups = agreement(load_tracker(weights, image_size=args.size), pictures)
            for name in groups if args.groups else (ALL,):
                print(f"{weights} {name}: {groups[name].line()}", flush=True)


def agreement(model: TrackerModel, pictures: Iterable[Labelled]) -> dict[str, Agreement]:
    """Return the IoU of each object's mask with the masks that its box and its point give, by group and for all."""
    tracker = Tracker(model, max_objects=1, bank_size=2)
    groups = {ALL: Agreement()}
    for group, image, masks in pictures:
        view = encode_frame(model, image)
        for mask in masks:
            for kind in KINDS:
                iou = region_similarity(segment(tracker, view, kind, mask), mask)
                for name in (ALL, group):
                    groups.setdefault(name, Agreement()).ious[kind].append(iou)
    return groups


@torch.inference_mode()
def segment(tracker: Tracker, view: EncodedFrame, kind: str, truth: Bools) -> Bools:
    """Return the mask bool [h, w] for a prompt of this kind, made from the true mask."""
    prompt = to_model(make_prompt(kind, Mask.from_full(truth)), 0, view.scaling)
    logits, _ = tracker.segment(view.features, prompt)
    return rasterize(logits.float().cpu().numpy(), view.scaling.frame_size).full()


def from_shards(folder: Path, most: int = 0) -> Iterator[Labelled]:
    """Yield the first `most` pictures of a folder of shards, 0 for all; the group is the source folder."""
    for number, picture in enumerate(read_all(list_shards(folder))):
        if most and number == most:
            return
        image = picture.image()
        masks = [fit(mask, image) > 0 for mask in picture.masks()]
        yield picture.name.split("/")[0], image, masks


def from_clips(folder: Path, every: int) -> Iterator[Labelled]:
    """Yield each `every`-th frame of the clips of a folder in DAVIS' layout; the group is the clip."""
    for name in list_clips(folder):
        clip = read_clip(folder, name)
        for index in range(0, len(clip), every):
            labels = clip.labels(index)
            yield name, clip.image(index), [labels == number for number in np.unique(labels) if number]


def _arguments(words: list[str]) -> argparse.Namespace:
    parser = new_parser(__doc__, "python -m training.nano agree")
    parser.add_argument("weights", nargs="+", help="nano, or folders")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--taught", type=Path, help="folder of shards")
    source.add_argument("--clips", type=Path, help="folder in DAVIS' layout")
    parser.add_argument("--most", type=int, default=0, help="pictures of the shards; 0 for all")
    parser.add_argument("--every", type=int, default=12, help="frames of the clips")
    parser.add_argument("--size", type=int, default=0, help="px of the model's image; 0 for its own")
    parser.add_argument("--groups", action="store_true", help="figures of each group, too")
    parser.add_argument("--threads", type=int, help="CPU threads; default: as torch chooses")
    return parser.parse_args(words)
