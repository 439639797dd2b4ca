"""Manage the objects that the detector finds on one camera: when to detect, and what to do with each detection.

On a GPU the detector runs on a CUDA stream of its own (`SideStream`), beside the work of the frame step.
"""

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..detection.detectors import Detector, PromptSet, restore_prompts
from ..geometry import Scaling
from ..models import Features
from ..models.sam.stages import Decoded
from ..settings import DetectorSettings
from ..tracking import Track, Tracker, Tracks
from ..tracking.association import (
    Association,
    AssociationRules,
    Lifecycle,
    LifecycleRules,
    PairwiseScores,
    associate,
    compute_pairwise_scores,
)
from ..tracking.names import estimate_name, is_calibrated, measure_names
from ..tracking.tracks import Cover
from ..types import Detection, Priority, SavedFields, State
from .registry import ObjectRegistry
from .robot import RobotPixels

# A detection with this part of its prompt's threshold still counts for an object that is already tracked
# (arXiv 2110.06864); a new object needs the whole threshold.
WEAK_SCORE_FACTOR = 0.5
CORRECTION_IOU = 0.8  # a detection corrects the tracked mask if their IoU is below this
SAME_PLACE_IOU = 0.5  # below it, what was known of the name of an object is void
MIN_DETECTION_GAP = 2  # frames between two detections, if only an uncertain mask asks for the second
MAX_DETECTIONS = 32  # best detections of a frame that are used; each costs the decoding of a mask


class FrameContext(NamedTuple):
    """One tracked frame, as the detection step needs it."""

    image: npt.NDArray[np.uint8]
    """BGR [h, w, 3]"""
    features: Features
    frame_number: int
    """the tracker's step"""
    scaling: Scaling
    now_ns: int
    """capture time"""
    robot: RobotPixels | None = None
    """the robot, if it is excluded"""
    cover: Cover | None = None
    """the same for the tracker"""


class _Candidates(NamedTuple):
    """The detections of one frame, the best first, and the masks that their boxes give."""

    frame: FrameContext
    detections: list[Detection]
    boxes: Tensor
    """[D, 4] in model pixels"""
    proposals: Decoded
    names: list[list[float]]
    """features of the names, see `tracking.names`"""


class TrackManager(SavedFields):
    """Runs the detector at intervals, and adds, corrects or recovers objects of the tracker with its detections.

    remove: a function that removes an object everywhere. Objects that users added are never changed. A detection that
    matches such an object is ignored.
    """

    SAVED = (
        "_frames_since_detection",
        "_requested",
        "_uncertain",
        "_confident_ids",
        "turned_away",
        "best_scores",
        "_lifecycle",
    )

    def __init__(
        self,
        detector: Detector,
        tracker: Tracker,
        objects: ObjectRegistry,
        remove: Callable[[int], None],
        settings: DetectorSettings,
    ) -> None:
        self.turned_away = 0
        """Number of detections that were dropped because all object slots were taken."""
        self.best_scores: dict[str, float] = {}
        """Highest score of a detection of each prompt, of at least half of its threshold, since it was set."""
        self._detector, self._tracker, self._objects, self._remove = detector, tracker, objects, remove
        self._settings, self._rules = settings, AssociationRules()
        self._side_stream = SideStream(tracker.model.device)
        self._lifecycle = Lifecycle(LifecycleRules(max_lost_s=settings.max_lost_s))
        self._prompts = PromptSet()
        self._frames_since_detection = 0
        self._requested = self._uncertain = False
        self._confident_ids: set[int] = set()

    @property
    def detector_name(self) -> str:
        """Name of the detector's model."""
        return self._detector.name

    @property
    def phrases(self) -> tuple[str, ...]:
        """The phrases that the detector searches for now."""
        return self._prompts.phrases

    def set_prompts(self, prompts: PromptSet) -> None:
        """Search for these prompts, starting with the next frame. Remove objects that have no label among them."""
        self._prompts, self._requested = prompts, bool(prompts.phrases)
        self.best_scores = {name: score for name, score in self.best_scores.items() if name in self.phrases}
        for object_id in self._lifecycle.keep_labels(self.phrases):
            self._remove(object_id)
        for object_id in self._lifecycle.ids:
            self._objects.set_priority(object_id, self._priority(self._objects.label(object_id)))

    def state(self) -> State:
        """Return the state that `restore` takes. It includes the prompts and their limits."""
        return {"prompts": self._prompts.state(), **super().state()}

    def restore(self, state: State) -> None:
        """Continue from the moment at which `state` was called, with the same prompts.

        Raises RequestError if the detector cannot search for these prompts; nothing is changed then.
        """
        self._prompts = restore_prompts(self._detector, state["prompts"])
        super().restore(state)

    def forget(self, object_id: int) -> None:
        """Drop the state of a removed object."""
        self._lifecycle.forget(object_id)
        self._confident_ids.discard(object_id)

    def is_tentative(self, object_id: int) -> bool:
        """Return True if the detector found the object, but not often enough to confirm it."""
        return object_id in self._lifecycle and self._lifecycle.is_tentative(object_id)

    def name_features(self, object_id: int) -> list[float] | None:
        """Return the features of an object's label, see `tracking.names`; None if it has none, or a user gave it."""
        if object_id not in self._lifecycle:
            return None
        return self._lifecycle.name_features(object_id, self._objects.label(object_id))

    def name_confidence(self, object_id: int) -> float | None:
        """Return the probability that an object's label is right; 0 until detections tell, None if a user gave it."""
        if object_id not in self._lifecycle:
            return None
        features = self.name_features(object_id)
        return estimate_name(features) if features else 0.0

    def observe(self, object_id: int, score: float, visible: bool, now_ns: int) -> None:
        """Record an object's mask on a frame. When its score falls below the limit, request one detection."""
        if object_id not in self._lifecycle:
            return
        self._lifecycle.observe(object_id, score, visible, now_ns)
        if visible and score >= self._settings.min_track_score:
            self._confident_ids.add(object_id)
        elif object_id in self._confident_ids:
            self._confident_ids.remove(object_id)
            self._uncertain = True

    def wait(self, object_id: int, now_ns: int) -> None:
        """Record that the robot covers an object on a frame, which says nothing of it."""
        if object_id in self._lifecycle:
            self._lifecycle.wait(object_id, now_ns)

    def mark_encoded(self) -> None:
        """Mark the point at which the frame's features are queued. Detection waits for work up to this point only."""
        self._side_stream.mark()

    def is_due(self, stretch: int = 1) -> bool:
        """Return True if the detector must run on this frame. Call it exactly once for each frame.

        `stretch` is the factor by which detections are less frequent. New prompts are searched for at once in any case.
        """
        self._frames_since_detection += 1
        if not self.phrases:
            return False
        uncertain = self._uncertain and self._frames_since_detection >= MIN_DETECTION_GAP * stretch
        return self._requested or uncertain or self._frames_since_detection >= self._settings.every * stretch

    def detect(self, frame: FrameContext, tracks: Tracks) -> dict[int, Track]:
        """Detect on a tracked frame; return the tracks that are new, corrected or recovered on it, by object id.

        Raises ModelError if the detector fails; no object is changed then.
        """
        self._frames_since_detection, self._requested, self._uncertain = 0, False, False
        detections = self._run_detector(frame)
        results: dict[int, Track] = {}
        if detections:
            candidates = self._propose(detections, frame)
            scores = self._score_pairs(tracks, candidates)
            self._apply_association(tracks.ids, candidates, scores, results)
        else:
            self._mark_missed(set(), frame)
        for object_id in self._lifecycle.expired(frame.now_ns):
            self._drop(object_id, results)
        return results

    def _run_detector(self, frame: FrameContext) -> list[Detection]:
        query, thresholds = self._prompts.query, self._prompts.thresholds
        min_score = WEAK_SCORE_FACTOR * min(thresholds.values())
        with self._side_stream.run():
            detections = self._detector.detect(frame.image, query, min_score, frame.features.trunk)
        if (robot := frame.robot) is not None:
            detections = [found for found in detections if not robot.covers(found.box)]
        for found in detections:
            self.best_scores[found.label] = max(found.score, self.best_scores.get(found.label, 0.0))
        return [d for d in detections if d.score >= WEAK_SCORE_FACTOR * thresholds[d.label]][:MAX_DETECTIONS]

    def _propose(self, detections: list[Detection], frame: FrameContext) -> _Candidates:
        """Decode a mask for each detection."""
        boxes = torch.from_numpy(frame.scaling.to_model([d.box for d in detections]))
        names = measure_names(detections, is_calibrated(self._detector.name))
        proposals = self._tracker.propose(frame.features, boxes)
        if frame.cover is not None:
            proposals = frame.cover.cut(proposals)
        return _Candidates(frame, detections, boxes, proposals, names)

    def _score_pairs(self, tracks: Tracks, candidates: _Candidates) -> PairwiseScores:
        proposals, model = candidates.proposals, self._tracker.model
        logits = torch.where(tracks.visible[:, None, None], tracks.logits, -1)
        scale = model.mask_size[0] / model.image_size
        boxes = candidates.boxes.float() * scale
        appearance = self._tracker.appearance(tracks.ids)
        return compute_pairwise_scores(logits, proposals.logits, boxes, appearance, proposals.pointer)

    def _apply_association(
        self,
        ids: list[int],
        candidates: _Candidates,
        scores: PairwiseScores,
        results: dict[int, Track],
    ) -> None:
        """Associate, then update the objects. `ids` are the objects of the rows of `scores`."""
        association = self._associate(ids, candidates, scores)
        pairs = association.matched | association.recovered
        for row, index in pairs.items():
            if ids[row] not in self._lifecycle:
                continue
            elsewhere = bool(scores.mask_iou[row, index] < SAME_PLACE_IOU)
            anew = elsewhere or self._lifecycle.is_lost(ids[row])
            self._mark_detected(ids[row], index, candidates, anew)
            if row in association.recovered or self._disagrees(scores, row, index, candidates):
                results[ids[row]] = self._adopt(ids[row], index, candidates)
        self._mark_missed({ids[row] for row in pairs}, candidates.frame)
        for first, second in association.duplicate_tracks:
            self._drop_duplicate(ids[first], ids[second], results)
        for index in association.new:
            self._start_track(index, candidates, results)

    def _mark_missed(self, detected: Collection[int], frame: FrameContext) -> None:
        """Record a round without a detection of the other objects, but for those that the robot covers."""
        covered = frame.cover.ids if frame.cover else ()
        for object_id in self._lifecycle.ids:
            if object_id not in detected and object_id not in covered:
                self._lifecycle.mark_missed(object_id)

    def _associate(self, ids: list[int], candidates: _Candidates, scores: PairwiseScores) -> Association:
        labels = [self._lifecycle.label(i) if i in self._lifecycle else "" for i in ids]
        is_lost = [i in self._lifecycle and self._lifecycle.is_lost(i) for i in ids]
        detection_labels = [detection.label for detection in candidates.detections]
        association = associate(scores, labels, is_lost, detection_labels, self._rules)
        if self._settings.association:
            return association
        return Association(association.matched, {}, association.new, [])

    def _disagrees(self, scores: PairwiseScores, row: int, index: int, candidates: _Candidates) -> bool:
        """Return True if a detection above its threshold has another mask than the object that it matches."""
        agrees = bool(scores.mask_iou[row, index] >= CORRECTION_IOU)
        passes = self._passes_threshold(candidates.detections[index])
        return self._settings.association and not agrees and passes

    def _passes_threshold(self, detection: Detection) -> bool:
        return detection.score >= self._prompts.thresholds[detection.label]

    def _drop_duplicate(self, first: int, second: int, results: dict[int, Track]) -> None:
        """Drop one of two objects with the same mask: one that is no longer detected, preferably the younger."""
        for object_id in (second, first):
            if object_id in self._lifecycle and self._lifecycle.is_duplicate(object_id):
                return self._drop(object_id, results)

    def _start_track(self, index: int, candidates: _Candidates, results: dict[int, Track]) -> None:
        """Add a new object, unless its label has reached its limit or no slot can be freed."""
        detection = candidates.detections[index]
        if not self._passes_threshold(detection) or self._is_label_full(detection.label):
            return
        is_full = len(self._objects) >= self._objects.capacity
        evicted = self._lifecycle.eviction_candidate(detection.score) if is_full else None
        if not self._objects.has_free_id or (is_full and evicted is None):
            self.turned_away += 1
            return
        if evicted is not None:
            self._drop(evicted, results)
        object_id = self._objects.reserve()
        self._objects.add(object_id, detection.label, self._priority(detection.label))
        self._mark_detected(object_id, index, candidates)
        results[object_id] = self._adopt(object_id, index, candidates)

    def _mark_detected(self, object_id: int, index: int, candidates: _Candidates, anew: bool = False) -> None:
        """Record a detection of an object. It may change the object's label."""
        detection, features = candidates.detections[index], candidates.names[index]
        now_ns = candidates.frame.now_ns
        self._lifecycle.mark_detected(object_id, detection.label, detection.score, now_ns, features, anew)
        label = self._lifecycle.label(object_id)
        if not self._is_label_full(label):
            self._objects.rename(object_id, label)
            self._objects.set_priority(object_id, self._priority(label))

    def _priority(self, label: str) -> Priority:
        return self._prompts.priorities.get(label, "normal")

    def _is_label_full(self, label: str) -> bool:
        """Return True if the number of objects with this label has reached its limit."""
        count = sum(self._objects.label(object_id) == label for object_id in self._lifecycle.ids)
        return count >= self._prompts.max_counts.get(label, math.inf)

    def _adopt(self, object_id: int, index: int, candidates: _Candidates) -> Track:
        frame = candidates.frame
        return self._tracker.adopt(frame.features, frame.frame_number, object_id, candidates.proposals, index)

    def _drop(self, object_id: int, results: dict[int, Track]) -> None:
        results.pop(object_id, None)
        self._remove(object_id)


class SideStream:
    """A CUDA stream whose work runs concurrently with the main stream's. On a CPU it does nothing.

    Code in `run` must copy its results to the host there. Afterwards they are plain numbers, and no other stream has
    to wait for them.
    """

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None
        self._ready = torch.cuda.Event() if is_cuda else None

    def mark(self) -> None:
        """Mark the main stream's current end. Work in `run` waits for the work before it only."""
        if self._ready is not None:
            self._ready.record()

    @contextmanager
    def run(self) -> Iterator[None]:
        """Queue the work of the block on the side stream."""
        if self._stream is None or self._ready is None:
            yield
            return
        self._stream.wait_event(self._ready)
        with torch.cuda.stream(self._stream):
            yield
