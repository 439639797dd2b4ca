"""Run the detector now and then, and add, correct or recover the tracker's objects with what it finds.

On a GPU the detector runs on a CUDA stream of its own (`SideStream`), beside the work of the frame step.
"""

import logging
import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from ...detection.detectors import Detector, PromptSet
from ...errors import Sam3NodeError
from ...models.sam.stages import Decoded
from ...schema.fields import Share
from ...schema.state import Count, Id, Label, SavedState, Time
from ...settings import DetectorSettings
from ...tracking import Track, Tracker, Tracks
from ...tracking.association import (
    Association,
    AssociationRules,
    Lifecycle,
    LifecycleRules,
    LifecycleState,
    PairwiseScores,
    associate,
    compute_pairwise_scores,
)
from ...tracking.confidence import ConfidenceEstimator
from ...tracking.names import BUNDLED, NameCalibration, measure_names
from ...types import Detection, Priority
from ..object_memory import NEW, IdentityVerdict, ObjectMemory
from ..objects import Objects
from ..reidentification import AppearanceFrame, report
from ..shedding import stretch_detection
from ..stage import Clock, Stage
from ..step import Seen, StepFrame

log = logging.getLogger(__name__)

WEAK_SCORE_FACTOR = 0.5
"""Part of its prompt's threshold from which a detection counts for an object that is already tracked
(arXiv 2110.06864). A new object needs the whole threshold."""
CORRECTION_IOU = 0.8
"""IoU of a detection and the tracked mask below which the detection corrects the mask."""
SAME_PLACE_IOU = 0.5
"""IoU of a detection and the tracked mask below which what was known of the object's name is void."""
MIN_DETECTION_GAP = 2
"""Frames between two detections, if only an uncertain mask asks for the second."""
MAX_DETECTIONS = 32
"""Best detections of a frame that are used. Each costs the decoding of a mask."""


class _Candidates(NamedTuple):
    """The detections of one frame, the best first, and the masks that their boxes give."""

    step: StepFrame
    detections: list[Detection]
    boxes: Tensor
    """[D, 4] in model pixels"""
    proposals: Decoded
    names: list[list[float]]
    """features of the names, see `tracking.names`"""


class DetectionState(SavedState):
    """What `DetectObjects` keeps."""

    frames_since_detection: Time
    requested: bool
    uncertain: bool
    confident_ids: set[Id]
    turned_away: Count
    best_scores: dict[Label, Share]
    lifecycle: LifecycleState


class DetectObjects(Stage):
    """Runs the detector at intervals, and adds, corrects or recovers objects of the tracker with its detections.

    Objects that users added are never changed. A detection that matches such an object is ignored. `PlanDetection`
    decides before the tracker runs whether this stage does anything on a frame.
    """

    name = "detect"
    timed = "device"
    STATE = DetectionState

    def __init__(
        self,
        camera: str,
        detector: Detector,
        tracker: Tracker,
        objects: Objects,
        confidence: ConfidenceEstimator,
        settings: DetectorSettings,
        memory: ObjectMemory | None = None,
        names: NameCalibration = BUNDLED,
    ) -> None:
        self.turned_away = 0
        """Number of detections that were dropped because all object slots were taken."""
        self.best_scores: dict[str, float] = {}
        """Highest score of a detection of each prompt, of at least half of its threshold, since it was set."""
        self.prompts = PromptSet()
        """What the detector searches for; `set_prompts` changes it."""
        self._camera = camera
        self._detector = detector
        self._tracker = tracker
        self._objects = objects
        self._confidence = confidence
        self._settings = settings
        self._names = names
        self._memory = memory
        self._rules = AssociationRules()
        self._side_stream = SideStream(tracker.model.device)
        self._lifecycle = Lifecycle(LifecycleRules(max_lost_s=settings.max_lost_s))
        self._frames_since_detection = 0
        self._requested = False
        self._uncertain = False
        self._confident_ids: set[int] = set()
        objects.on_remove(self.forget)

    def clock(self, step: StepFrame) -> Clock | None:
        """Return the clock of frames on which the detector runs."""
        return self.timed if step.detects else None

    def run(self, step: StepFrame) -> None:
        """Update `tracks` if the detector is due. If it fails, log it and leave them as they are."""
        if not step.detects:
            return
        try:
            changed = self.detect(step)
        except Sam3NodeError as error:
            # the tracker needs no detections, so the frame goes on without
            log.error("camera %s: detection failed: %s", self._camera, error)
            return
        for object_id in changed:  # the history begins again with the mask that the detector gave
            self._confidence.remove(object_id)
        step.tracks = self._tracker.updated(step.tracks, changed)

    @property
    def phrases(self) -> tuple[str, ...]:
        """The phrases that the detector searches for now."""
        return self.prompts.phrases

    def set_prompts(self, prompts: PromptSet) -> None:
        """Search for these prompts, starting with the next frame. Remove objects that have no label among them."""
        # a user who has named something waits for it: the next frame is searched whatever the interval
        self.prompts = prompts
        self._requested = bool(prompts.phrases)
        self.best_scores = {name: score for name, score in self.best_scores.items() if name in self.phrases}
        for object_id in self._lifecycle.keep_labels(self.phrases):
            self._objects.remove(object_id)
        for object_id in self._lifecycle.ids:
            self._objects.set_priority(object_id, self._priority(self._objects.label(object_id)))

    def forget(self, object_id: int) -> None:
        """Drop the state of a removed object."""
        self._lifecycle.forget(object_id)
        self._confident_ids.discard(object_id)

    def name_features(self, object_id: int) -> list[float] | None:
        """Return the features of an object's label, see `tracking.names`; None if it has none, or a user gave it."""
        if object_id not in self._lifecycle:
            return None
        return self._lifecycle.name_features(object_id, self._objects.label(object_id))

    def follow(self, seen: Seen, now_ns: int) -> None:
        """Record what is seen of an object on a frame, and fill what detections say of it.

        When the score of a sure mask falls below the limit, request one detection. If the robot covers the object, the
        frame says nothing of it. Objects that users added have no record here.
        """
        if seen.id not in self._lifecycle:
            return
        if seen.covered:
            self._lifecycle.wait(seen.id, now_ns)
        else:
            self._lifecycle.observe(seen.id, seen.score, seen.in_view, now_ns)
            if seen.in_view and seen.score >= self._settings.min_track_score:
                self._confident_ids.add(seen.id)
            # one request for each fall below the limit, not one on each frame below it
            elif seen.id in self._confident_ids:
                self._confident_ids.remove(seen.id)
                self._uncertain = True
        seen.tentative = self._lifecycle.is_tentative(seen.id)
        features = self.name_features(seen.id)
        # the probability that the label is right is 0 until detections tell
        seen.name_confidence = self._names.estimate(features) if features else 0.0

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

    def detect(self, step: StepFrame) -> dict[int, Track]:
        """Detect on a tracked frame; return the tracks that are new, corrected or recovered on it, by object id.

        Raises ModelError if the detector fails; no object is changed then.
        """
        # also if the detector fails below: a detector that always fails must not run on each frame
        self._frames_since_detection = 0
        self._requested = False
        self._uncertain = False
        detections = self._run_detector(step)
        results: dict[int, Track] = {}
        if detections:
            candidates = self._propose(detections, step)
            scores = self._score_pairs(step.tracks, candidates)
            self._apply_association(step.tracks.ids, candidates, scores, results)
        else:
            self._mark_missed(set(), step)
        for object_id in self._lifecycle.expired(step.frame.capture_ns):
            self._give_up(object_id, step.frame.capture_ns, results)
        return results

    def _run_detector(self, step: StepFrame) -> list[Detection]:
        """Return the best detections on a frame that no excluded robot fills, down to half of their thresholds."""
        thresholds = self.prompts.thresholds
        # the detector takes one limit for all prompts; the limit of each is applied below
        min_score = WEAK_SCORE_FACTOR * min(thresholds.values())
        # weak detections, too: they show that a tracked object is still there
        with self._side_stream.run():
            detections = self._detector.detect(step.image, self.prompts.query, min_score, step.features.trunk)
        # where the settings do not exclude the robot, there is no cover
        robot = None if step.cover is None else step.robot
        if robot is not None:
            detections = [found for found in detections if not robot.covers(found.box)]
        for found in detections:
            self.best_scores[found.label] = max(found.score, self.best_scores.get(found.label, 0.0))
        near = [found for found in detections if found.score >= WEAK_SCORE_FACTOR * thresholds[found.label]]
        return near[:MAX_DETECTIONS]

    def _propose(self, detections: list[Detection], step: StepFrame) -> _Candidates:
        """Decode a mask for each detection."""
        boxes = torch.from_numpy(step.scaling.to_model([found.box for found in detections]))
        names = measure_names(detections, self._names.suits(self._detector.name))
        proposals = self._tracker.propose(step.features, boxes)
        if step.cover is not None:
            proposals = step.cover.cut(proposals)
        return _Candidates(step, detections, boxes, proposals, names)

    def _score_pairs(self, tracks: Tracks, candidates: _Candidates) -> PairwiseScores:
        proposals = candidates.proposals
        model = self._tracker.model
        # an object out of view shows no mask, so no detection may match one
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
        known: dict[int, int] = {}
        if self._memory is not None and self._settings.association:
            association, known = self._recognise(self._memory, ids, association, candidates)
        pairs = association.matched | association.recovered
        for row, index in pairs.items():
            # a user added the object, so the detection changes nothing
            if ids[row] not in self._lifecycle:
                continue
            # what comes back elsewhere may be another thing: its name is open again
            elsewhere = bool(scores.mask_iou[row, index] < SAME_PLACE_IOU)
            anew = elsewhere or self._lifecycle.is_lost(ids[row])
            self._mark_detected(ids[row], index, candidates, anew)
            # the tracker has lost the object, or has drifted: it begins again with the detection's mask
            if row in association.recovered or self._disagrees(scores, row, index, candidates):
                is_back = row in association.recovered
                results[ids[row]] = self._adopt(ids[row], index, candidates, is_back)
        self._mark_missed({ids[row] for row in pairs}, candidates.step)
        # duplicates before new objects, which may take the slots that they leave
        for first, second in association.duplicate_tracks:
            self._drop_duplicate(ids[first], ids[second], results)
        for object_id, index in known.items():
            self._bring_back(object_id, index, candidates, results)
        for index in association.new:
            self._start_track(index, candidates, results)

    def _recognise(
        self, memory: ObjectMemory, ids: list[int], association: Association, candidates: _Candidates
    ) -> tuple[Association, dict[int, int]]:
        """Compare what belongs to no object in view with the appearance of those that are out of view.

        Return the association without what is known again or waits, and the detections that are known, by object.
        """
        step = candidates.step
        # where there are embeddings, they decide, and not the pointers
        recovered: dict[int, int] = {}
        found = list(association.new)
        for row, index in association.recovered.items():
            remembered = memory.get(ids[row])
            if remembered is not None and len(remembered.gallery):
                found.append(index)
            else:
                recovered[row] = index
        # the best detection first, as in the association
        found.sort()
        taken = {ids[row] for row in association.matched} | {ids[row] for row in recovered}
        hidden = [i for i in self._list_hidden(ids) if i not in taken]
        if not found or not (hidden or memory.lost):
            return association._replace(recovered=recovered, new=found), {}
        described = AppearanceFrame.from_step(step).describe(candidates.proposals.pick_all(found))
        compared = dict(zip(found, described, strict=True))

        def judge(index: int) -> IdentityVerdict:
            candidate = compared[index]
            if candidate is None:
                return NEW
            label = candidates.detections[index].label
            out_of_view = memory.list_out_of_view(label, hidden, self._lifecycle.ids)
            return memory.judge(candidate, [i for i in out_of_view if i not in known])

        known: dict[int, int] = {}
        new = []
        # the most similar first, because each object can be found once
        first = {index: judge(index).similarity for index in found}
        for index in sorted(found, key=lambda each: first[each], reverse=True):
            verdict = judge(index)
            if verdict.kind == "known" and self._passes_threshold(candidates.detections[index]):
                known[verdict.ids[0]] = index
                continue
            # its next embedding may tell
            if verdict.kind == "unsure" and memory.may_wait(verdict.ids[0]):
                continue
            if verdict.kind == "ambiguous":
                report(step, verdict, memory)
            new.append(index)
        return association._replace(recovered=recovered, new=sorted(new)), known

    def _list_hidden(self, ids: list[int]) -> list[int]:
        """Return the tracked objects that are out of view, or that the detector has missed."""
        hidden = []
        for object_id in ids:
            if object_id in self._lifecycle:
                is_hidden = self._lifecycle.is_lost(object_id)
            else:
                # an object that a user added has no record of detections
                is_hidden = self._objects.get(object_id).frames_since_seen > 1
            if is_hidden:
                hidden.append(object_id)
        return hidden

    def _bring_back(
        self, object_id: int, index: int, candidates: _Candidates, results: dict[int, Track]
    ) -> None:
        """Track an object again that a detection shows. One that was lost needs a slot."""
        assert self._memory is not None  # it has found the object
        if object_id in self._memory.lost:
            if not self._make_room(candidates.detections[index].score, candidates.step, results):
                return
            report(candidates.step, IdentityVerdict("known", (object_id,)), self._memory)
            self._memory.reactivate(object_id)
            self._mark_detected(object_id, index, candidates, anew=True)
            self._lifecycle.confirm(object_id)
        elif object_id not in self._objects:
            # a duplicate was dropped, or another object needed its slot
            return
        else:
            report(candidates.step, IdentityVerdict("known", (object_id,)), self._memory)
            if object_id in self._lifecycle:
                self._mark_detected(object_id, index, candidates, anew=True)
        self._memory.confirm(object_id)
        results[object_id] = self._adopt(object_id, index, candidates, is_back=True)

    def _make_room(self, score: float, step: StepFrame, results: dict[int, Track]) -> bool:
        """Free a slot if none is. An object out of view, or one that is weaker and not confirmed, makes room."""
        if len(self._objects) < self._objects.capacity:
            return True
        evicted = self._lifecycle.eviction_candidate(score)
        if evicted is None:
            self.turned_away += 1
            return False
        self._give_up(evicted, step.frame.capture_ns, results)
        return True

    def _mark_missed(self, detected: Collection[int], step: StepFrame) -> None:
        """Record a round without a detection of the other objects, but for those that the robot covers."""
        covered = step.cover.ids if step.cover is not None else ()
        for object_id in self._lifecycle.ids:
            if object_id not in detected and object_id not in covered:
                self._lifecycle.mark_missed(object_id)

    def _associate(self, ids: list[int], candidates: _Candidates, scores: PairwiseScores) -> Association:
        # objects that users added have no label here, and never count as lost
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
        return detection.score >= self.prompts.thresholds[detection.label]

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
        if not self._objects.has_free_id:
            self.turned_away += 1
            return
        if not self._make_room(detection.score, candidates.step, results):
            return
        object_id = self._objects.reserve()
        self._objects.add(object_id, detection.label, self._priority(detection.label))
        self._mark_detected(object_id, index, candidates)
        results[object_id] = self._adopt(object_id, index, candidates)

    def _mark_detected(self, object_id: int, index: int, candidates: _Candidates, anew: bool = False) -> None:
        """Record a detection of an object. It may change the object's label."""
        detection = candidates.detections[index]
        features = candidates.names[index]
        now_ns = candidates.step.frame.capture_ns
        self._lifecycle.mark_detected(object_id, detection.label, detection.score, now_ns, features, anew)
        label = self._lifecycle.label(object_id)
        # beyond the limit of the new label, the object keeps its old one
        if not self._is_label_full(label):
            self._objects.rename(object_id, label)
            self._objects.set_priority(object_id, self._priority(label))

    def _priority(self, label: str) -> Priority:
        return self.prompts.priorities.get(label, "normal")

    def _is_label_full(self, label: str) -> bool:
        """Return True if the number of objects with this label has reached its limit."""
        count = sum(self._objects.label(object_id) == label for object_id in self._lifecycle.ids)
        return count >= self.prompts.max_counts.get(label, math.inf)

    def _adopt(self, object_id: int, index: int, candidates: _Candidates, is_back: bool = False) -> Track:
        step = candidates.step
        return self._tracker.adopt(
            step.features, step.frame_number, object_id, candidates.proposals, index, is_back
        )

    def _give_up(self, object_id: int, now_ns: int, results: dict[int, Track]) -> None:
        """Remove an object that is out of view. One that was confirmed is remembered."""
        results.pop(object_id, None)
        if self._lifecycle.is_tentative(object_id):
            self._objects.remove(object_id)
        else:
            self._objects.leave(object_id, now_ns)

    def _drop(self, object_id: int, results: dict[int, Track]) -> None:
        # it may have been added or corrected on this frame
        results.pop(object_id, None)
        self._objects.remove(object_id)


class PlanDetection(Stage):
    """Decides whether the detector runs on a frame, and marks the work that it has to wait for.

    Stands before the tracker, which holds no object on a frame with detection.
    """

    name = "plan"

    def __init__(self, detection: DetectObjects) -> None:
        self._detection = detection

    def run(self, step: StepFrame) -> None:
        """Fill `detects`."""
        self._detection.mark_encoded()
        step.detects = self._detection.is_due(stretch_detection(step.decisions.shed_level))


class FollowDetected(Stage):
    """Records what is seen of the detected objects, and fills what detections say of each."""

    name = "follow"
    timed = "host"
    counts_as = "masks"

    def __init__(self, detection: DetectObjects) -> None:
        self._detection = detection

    def run(self, step: StepFrame) -> None:
        """Fill `tentative` and `name_confidence` of what is seen."""
        for seen in step.seen:
            self._detection.follow(seen, step.frame.capture_ns)


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
