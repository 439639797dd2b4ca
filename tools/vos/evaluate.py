"""Settings side by side over a sequence, scored against its labels; each frame is read and encoded once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from sam3_node.models import TrackerModel
from sam3_node.types import Mask

from .followers import Masks, View, make_follower, see
from .metrics import Bools, Score, score
from .occlusion import OcclusionCount, count
from .sequences import Sequence, TrueFrame
from .settings import ModelKey, Setting

Watch = Callable[[int, TrueFrame, Masks], None]
"""Is shown each frame's number, the frame, and the masks that the first setting gave."""


@dataclass
class ObjectRecord:
    """One object under one setting; lists count from the frame after the one it was prompted on.

    `covered` and `found` are the shares of the image that it and its mask take up.
    """

    scores: list[Score] = field(default_factory=list)
    covered: list[float] = field(default_factory=list)
    found: list[float] = field(default_factory=list)

    def add(self, mask: Mask, truth: Bools, void: Bools | None) -> None:
        """Take note of one frame."""
        self.scores.append(score(mask.full(), truth, void))
        self.covered.append(np.count_nonzero(truth) / truth.size)
        self.found.append(mask.area / truth.size)

    def mean(self) -> Score | None:
        """Without the clip's last frame, as the benchmark has it; None where no frame is left."""
        counted = self.scores[:-1]
        return Score(*np.mean(counted, axis=0).tolist()) if counted else None

    def occlusions(self) -> OcclusionCount:
        ious = np.array([each.j for each in self.scores])
        return count(np.array(self.covered), np.array(self.found), ious)


@dataclass
class SequenceResult:
    """One setting on one sequence: J and F of each object, its occlusions, and milliseconds of a frame (median)."""

    scores: dict[int, Score]
    occlusions: OcclusionCount
    frame_ms: float


class _Run:
    """One setting on one sequence."""

    def __init__(self, setting: Setting, model: TrackerModel, sequence: Sequence) -> None:
        self.setting = setting
        self.follower = make_follower(setting, model, max(1, len(sequence.ids)))
        self.objects: dict[int, ObjectRecord] = {}
        self.spent_ms: list[float] = []

    def step(self, view: View, encode_ms: float) -> Masks:
        begin = time.perf_counter()
        masks = self.follower.step(view)
        self.spent_ms.append(encode_ms * self.setting.uses_model + 1e3 * (time.perf_counter() - begin))
        return masks

    def judge(self, frame: TrueFrame, masks: Masks) -> None:
        for object_id, record in self.objects.items():
            record.add(masks[object_id], frame.truth(object_id), frame.void)

    def enter(self, view: View, object_id: int, truth: Mask) -> None:
        self.follower.prompt(view, object_id, truth)
        self.objects[object_id] = ObjectRecord()

    def result(self) -> SequenceResult:
        means = {object_id: record.mean() for object_id, record in self.objects.items()}
        occlusions = [record.occlusions() for record in self.objects.values()]
        return SequenceResult(
            {object_id: mean for object_id, mean in means.items() if mean is not None},
            sum(occlusions, OcclusionCount()),
            statistics.median(self.spent_ms),
        )


def evaluate(
    sequence: Sequence, settings: list[Setting], models: Mapping[ModelKey, TrackerModel], watch: Watch
) -> list[SequenceResult]:
    """Follow the objects of a sequence under all settings; `models` has one for each key of theirs.

    Raises CameraError for a frame that cannot be read, ModelError for weights that cannot do what a setting asks.
    """
    runs = [_Run(setting, models[setting.model], sequence) for setting in settings]
    for index, frame in enumerate(sequence.frames()):
        views = {key: _timed_view(model, frame) for key, model in models.items()}
        masks = [run.step(*views[run.setting.model]) for run in runs]
        watch(index, frame, masks[0])
        for run, found in zip(runs, masks, strict=True):
            run.judge(frame, found)
        for object_id in _entering(sequence, frame, runs[0].objects):
            truth = Mask.from_full(frame.masks[object_id])
            for run in runs:
                run.enter(views[run.setting.model][0], object_id, truth)
    return [run.result() for run in runs]


def _timed_view(model: TrackerModel, frame: TrueFrame) -> tuple[View, float]:
    begin = time.perf_counter()
    view = see(model, frame.image)
    return view, 1e3 * (time.perf_counter() - begin)


def _entering(sequence: Sequence, frame: TrueFrame, known: Mapping[int, ObjectRecord]) -> list[int]:
    """Objects that are large enough to be prompted for the first time."""
    return [
        object_id
        for object_id, mask in frame.masks.items()
        if object_id not in known and mask.mean() >= sequence.least_area
    ]
