"""CLEAR MOT and IDF1 of published masks, computed by py-motmetrics, with what an operator counts: events a minute."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from sam3_node.errors import require
from sam3_node.types import Instance

from .truth import Bools, TrueFrame

MATCH = 0.5  # IoU of masks
METRICS = ("idf1", "mota", "num_switches", "num_false_positives", "num_misses", "num_objects")


@dataclass
class Score:
    """Of one setting on one clip or on several.

    idf1 and mota as those who defined them have them (arXiv 1609.01775; CLEAR MOT). The others are counts: changes of
    identity, masks that are of nothing or lack, ids that were published and were mostly no object, true masks.
    """

    idf1: float
    mota: float
    switches: int
    false_masks: int
    misses: int
    false_starts: int
    objects: int
    minutes: float


@dataclass
class Judge:
    """Compares what was published with the truth, frame by frame. named: what each true object may be called."""

    named: Mapping[int, str]
    accumulator: Any = field(default_factory=lambda: _motmetrics().MOTAccumulator(auto_id=True))
    published: Counter[int] = field(default_factory=Counter)
    right: Counter[int] = field(default_factory=Counter)

    def add(self, frame: TrueFrame, instances: Sequence[Instance]) -> None:
        """One frame; tentative and hidden objects are not published as found."""
        shown = [i for i in instances if i.state == "tracked" and i.area and not self._is_sliver(frame, i)]
        true_ids = list(frame.counted)
        distance = self._distances(frame, shown)
        self.accumulator.update(true_ids, [i.id for i in shown], distance)
        self.published.update(instance.id for instance in shown)
        self.right.update(
            instance.id for instance, near in zip(shown, distance.T, strict=True) if np.isfinite(near).any()
        )

    def false_starts(self) -> int:
        """Ids that were no object on most of the frames that they were published on."""
        return sum(self.right[i] * 2 < count for i, count in self.published.items())

    def _distances(self, frame: TrueFrame, shown: Sequence[Instance]) -> npt.NDArray[np.float64]:
        """1 - IoU [objects, instances]; NaN where they do not match, or the name is another's."""
        distance = np.full((len(frame.counted), len(shown)), np.nan)
        for row, (object_id, truth) in enumerate(frame.counted.items()):
            for column, instance in enumerate(shown):
                if instance.label == self.named[object_id]:
                    iou = mask_iou(instance, truth)
                    distance[row, column] = 1 - iou if iou >= MATCH else math.nan
        return distance

    def _is_sliver(self, frame: TrueFrame, instance: Instance) -> bool:
        """Whether it is on an object of which too little is seen to count either way."""
        return any(
            instance.label == self.named[i] and np.any(instance.mask.full() & mask)
            for i, mask in frame.slivers.items()
        )


def mask_iou(instance: Instance, truth: Bools) -> float:
    """IoU of an instance's mask with bool [h, w]."""
    x0, y0, x1, y1 = instance.box
    shared = int(np.count_nonzero(instance.mask.crop & truth[y0:y1, x0:x1]))
    return float(shared / max(1, instance.area + int(np.count_nonzero(truth)) - shared))


def total(judges: Sequence[Judge], frames: int, fps: float) -> Score:
    """All clips together."""
    library = _motmetrics()
    names = [str(index) for index in range(len(judges))]
    table = library.metrics.create().compute_many(
        [judge.accumulator for judge in judges], metrics=METRICS, names=names, generate_overall=True
    )
    overall = table.loc["OVERALL"]
    return Score(
        idf1=float(overall["idf1"]),
        mota=float(overall["mota"]),
        switches=int(overall["num_switches"]),
        false_masks=int(overall["num_false_positives"]),
        misses=int(overall["num_misses"]),
        false_starts=sum(judge.false_starts() for judge in judges),
        objects=int(overall["num_objects"]),
        minutes=frames / fps / 60,
    )


def _motmetrics() -> Any:
    return require("motmetrics", "dev")
