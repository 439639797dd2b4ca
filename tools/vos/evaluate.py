"""Evaluate settings side by side on a sequence against its labels; each frame is read and encoded once."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from sam3_node.models import TrackerModel
from sam3_node.types import Mask

from .followers import EncodedFrame, Masks, ModelKey, Setting, encode_frame, make_follower
from .metrics import Bools, MaskScore, OcclusionCount, count, score
from .sequences import LabelledSequence, TrueFrame

Watch = Callable[[int, TrueFrame, Masks], None]
"""Called with each frame's number, the frame, and the masks of the first setting."""


@dataclass
class ObjectRecord:
    """One object under one setting; lists begin with the frame after its prompt.

    Frames on which its truth is unknown are not in them.
    `object_shares` and `mask_shares` are the shares of the image that the object and its mask cover.
    """

    scores: list[MaskScore] = field(default_factory=list)
    object_shares: list[float] = field(default_factory=list)
    mask_shares: list[float] = field(default_factory=list)

    def add(self, mask: Mask, truth: Bools, void: Bools | None) -> None:
        """Add the scores of one frame."""
        self.scores.append(score(mask.full(), truth, void))
        self.object_shares.append(np.count_nonzero(truth) / truth.size)
        self.mask_shares.append(mask.area / truth.size)

    def mean(self) -> MaskScore | None:
        """Return the mean without the clip's last frame, as in the benchmark; None if no frame is left."""
        counted = self.scores[:-1]
        return MaskScore(*np.mean(counted, axis=0).tolist()) if counted else None

    def occlusions(self) -> OcclusionCount:
        ious = np.array([score_of_frame.j for score_of_frame in self.scores])
        return count(np.array(self.object_shares), np.array(self.mask_shares), ious)


@dataclass
class SequenceResult:
    """One setting on one sequence: J and F of each object, its occlusions, and milliseconds of a frame (median)."""

    scores: dict[int, MaskScore]
    occlusions: OcclusionCount
    frame_ms: float


class _Run:
    """One setting on one sequence."""

    def __init__(self, setting: Setting, model: TrackerModel, sequence: LabelledSequence) -> None:
        self.setting = setting
        self.follower = make_follower(setting, model, max(1, len(sequence.ids)))
        self.objects: dict[int, ObjectRecord] = {}
        self.spent_ms: list[float] = []

    def step(self, view: EncodedFrame, encode_ms: float) -> Masks:
        begin = time.perf_counter()
        masks = self.follower.step(view)
        self.spent_ms.append(encode_ms * self.setting.uses_model + 1e3 * (time.perf_counter() - begin))
        return masks

    def score_frame(self, frame: TrueFrame, masks: Masks) -> None:
        for object_id, record in self.objects.items():
            if object_id not in frame.unknown:
                record.add(masks[object_id], frame.truth(object_id), frame.void)

    def enter(self, view: EncodedFrame, object_id: int, truth: Mask) -> None:
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
    sequence: LabelledSequence, settings: list[Setting], models: Mapping[ModelKey, TrackerModel], watch: Watch
) -> list[SequenceResult]:
    """Track the objects of a sequence under all settings; `models` has one for each of their keys.

    Raises CameraError for a frame that cannot be read, ModelError for weights that cannot do what a setting asks.
    """
    runs = [_Run(setting, models[setting.model], sequence) for setting in settings]
    for index, frame in enumerate(sequence.frames()):
        views = {key: _timed_view(model, frame) for key, model in models.items()}
        masks = [run.step(*views[run.setting.model]) for run in runs]
        watch(index, frame, masks[0])
        for run, run_masks in zip(runs, masks, strict=True):
            run.score_frame(frame, run_masks)
        for object_id in _entering(sequence, frame, runs[0].objects):
            truth = Mask.from_full(frame.masks[object_id])
            for run in runs:
                run.enter(views[run.setting.model][0], object_id, truth)
    return [run.result() for run in runs]


def _timed_view(model: TrackerModel, frame: TrueFrame) -> tuple[EncodedFrame, float]:
    begin = time.perf_counter()
    view = encode_frame(model, frame.image)
    return view, 1e3 * (time.perf_counter() - begin)


def _entering(
    sequence: LabelledSequence, frame: TrueFrame, prompted: Mapping[int, ObjectRecord]
) -> list[int]:
    """Return the objects that are large enough to be prompted for the first time."""
    waiting = frame.masks.keys() - prompted.keys() - frame.unknown
    return [i for i, mask in frame.masks.items() if i in waiting and mask.mean() >= sequence.min_area]
