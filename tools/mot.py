"""Score published masks against rendered clips: IDF1 and CLEAR MOT, computed by py-motmetrics, and events a minute."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sam3_node.errors import CameraError, require
from sam3_node.types import Instance
from tools.scenes.clips import Clip, list_clips, read_clip

MATCH = 0.5  # IoU of masks
METRICS = ("idf1", "mota", "num_switches", "num_false_positives", "num_misses", "num_objects")
MIN_AREA = 0.001  # of the image, for an object to count
Bools = npt.NDArray[np.bool_]


class MotFrame(NamedTuple):
    """One frame and its true masks, bool [h, w] by object id."""

    image: npt.NDArray[np.uint8]
    """BGR [h, w, 3]"""
    counted: Mapping[int, Bools]
    """objects large enough to be counted"""
    slivers: Mapping[int, Bools]
    """objects of which too little is visible to be counted"""


@dataclass(frozen=True)
class TrueClip:
    """A clip and the names under which its objects are looked for."""

    clip: Clip
    named: Mapping[int, str]
    """by object id: the kind ("mug") or the full name ("red mug")"""

    @property
    def prompts(self) -> tuple[str, ...]:
        """All names, each once."""
        return tuple(sorted(set(self.named.values())))

    @property
    def fps(self) -> float:
        """Frames per second of the clip."""
        return float(self.clip.meta.get("fps", 12.0))

    def frames(self, max_frames: int = 0) -> Iterator[MotFrame]:
        """Read the first `max_frames` frames; 0 for all."""
        for index in range(min(len(self.clip), max_frames or len(self.clip))):
            labels = self.clip.labels(index)
            masks = {object_id: labels == object_id for object_id in self.named}
            large = {i: mask for i, mask in masks.items() if mask.mean() >= MIN_AREA}
            small = {i: mask for i, mask in masks.items() if mask.any() and i not in large}
            yield MotFrame(self.clip.image(index), large, small)


def open_clips(root: Path, can_detect: Callable[[str], bool], field: str) -> list[TrueClip]:
    """Open the rendered clips of a folder; `field` of their metadata, kind or name, names the objects.

    Objects whose names `can_detect` rejects are left out. Raises CameraError for clips without names.
    """
    clips = []
    is_detectable = cache(can_detect)
    for name in list_clips(root):
        clip = read_clip(root, name)
        if "objects" not in clip.meta:
            what = f"the names of its objects (Clips/{name}.json)"
            raise CameraError(f"clip {name}: expected {what}, found none")
        named = {int(entry["id"]): str(entry[field]) for entry in clip.meta["objects"]}
        clips.append(TrueClip(clip, {i: name for i, name in named.items() if is_detectable(name)}))
    return clips


@dataclass
class MotScore:
    """Scores of one setting on one clip or on several."""

    idf1: float
    """identification F1 (arXiv 1609.01775)"""
    mota: float
    """accuracy of CLEAR MOT"""
    switches: int
    """changes of an object's id"""
    false_masks: int
    """published masks that match no object"""
    misses: int
    """true masks that no published mask matches"""
    false_starts: int
    """ids that matched no object on most of the frames on which they were published"""
    objects: int
    """true masks of all frames"""
    minutes: float
    """length of the clips"""


@dataclass
class MotScorer:
    """Compares published instances with the truth, frame by frame."""

    named: Mapping[int, str]
    """the name under which each true object is looked for"""
    accumulator: Any = field(default_factory=lambda: _motmetrics().MOTAccumulator(auto_id=True))
    published: Counter[int] = field(default_factory=Counter)
    right: Counter[int] = field(default_factory=Counter)

    def add(self, frame: MotFrame, instances: Sequence[Instance]) -> None:
        """Add one frame; only tracked instances count, since tentative and hidden ones are not published as present."""
        shown = [i for i in instances if i.state == "tracked" and i.area and not self._is_sliver(frame, i)]
        true_ids = list(frame.counted)
        distance = self._distances(frame, shown)
        self.accumulator.update(true_ids, [i.id for i in shown], distance)
        self.published.update(instance.id for instance in shown)
        near = (bool(np.isfinite(each).any()) for each in distance.T)
        self.right.update(instance.id for instance, hit in zip(shown, near, strict=True) if hit)

    def false_starts(self) -> int:
        """Count the ids that matched no object on most of the frames on which they were published."""
        return sum(self.right[i] * 2 < count for i, count in self.published.items())

    def _distances(self, frame: MotFrame, shown: Sequence[Instance]) -> npt.NDArray[np.float64]:
        """Return 1 - IoU [objects, instances]; NaN where they do not match or the names differ."""
        distance = np.full((len(frame.counted), len(shown)), np.nan)
        for row, (object_id, truth) in enumerate(frame.counted.items()):
            for column, instance in enumerate(shown):
                if instance.label == self.named[object_id]:
                    iou = mask_iou(instance, truth)
                    distance[row, column] = 1 - iou if iou >= MATCH else math.nan
        return distance

    def _is_sliver(self, frame: MotFrame, instance: Instance) -> bool:
        """Return True if the instance lies on an object of which too little is visible to be counted."""
        same = (mask for i, mask in frame.slivers.items() if instance.label == self.named[i])
        return any(np.any(instance.mask.full() & mask) for mask in same)


def mask_iou(instance: Instance, truth: Bools) -> float:
    """Return the IoU of an instance's mask with bool [h, w]."""
    x0, y0, x1, y1 = instance.box
    shared = int(np.count_nonzero(instance.mask.crop & truth[y0:y1, x0:x1]))
    return float(shared / max(1, instance.area + int(np.count_nonzero(truth)) - shared))


def total(scorers: Sequence[MotScorer], frames: int, fps: float) -> MotScore:
    """Return the score of all clips together, `frames` frames in all."""
    names = map(str, range(len(scorers)))
    accumulators = [scorer.accumulator for scorer in scorers]
    compute = _motmetrics().metrics.create().compute_many
    table = compute(accumulators, metrics=METRICS, names=list(names), generate_overall=True)
    idf1, mota, *counts = (float(table.loc["OVERALL"][name]) for name in METRICS)
    switches, false_masks, misses, objects = map(int, counts)
    false_starts = sum(scorer.false_starts() for scorer in scorers)
    return MotScore(idf1, mota, switches, false_masks, misses, false_starts, objects, frames / fps / 60)


def _motmetrics() -> Any:
    return require("motmetrics", "dev")
