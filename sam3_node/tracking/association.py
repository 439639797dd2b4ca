"""Match the detections of a frame to the tracked objects, and decide how long a detected object is kept.

Overlap of masks and boxes and appearance score each pair. All pairs are assigned at once, so that the sum over all
pairs is the greatest possible. A detected object is tentative at first, kept while there is evidence, then removed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from msgspec import field
from torch import Tensor

from ..models.pixels import box_iou, mask_boxes
from ..schema.state import Count, Id, Label, Number, SavedPart, SavedState, Time
from ..types import NANOSECONDS
from .names import NameEvidence, list_features
from .track_history import Bools, Floats


class PairwiseScores(NamedTuple):
    """Scores of all pairs of T objects and D detections on one frame, on the host. The best detection comes first."""

    mask_iou: Floats
    """[T, D]: IoU of the tracked mask and the detection's mask; 0 where the object is hidden."""
    box_iou: Floats
    """[T, D]: IoU of the boxes of these masks; 0 where the object is hidden."""
    appearance_similarity: Floats
    """[T, D]: cosine of the detection's object pointer and the most similar pointer of the object's prompted frames."""
    duplicate_tracks: Floats
    """[T, T]: mask IoU among objects."""
    duplicate_detections: Floats
    """[D, D]: mask IoU among detections."""


@dataclass(frozen=True, slots=True)
class AssociationRules:
    """Thresholds of the association. Each applies from its value upward."""

    min_overlap: float = 0.3
    """Overlap (mask IoU, or the mean of mask and box IoU) at which a detection matches an object."""
    label_bonus: float = 0.1
    """Bonus where object and detection have the same label; it decides between two detections that both match."""
    covered_iou: float = 0.5
    """IoU with any object at which a detection starts no new object, even if it is matched to none."""
    min_similarity: float = 0.5
    """Appearance similarity at which a detection recovers a lost object."""
    duplicate_iou: float = 0.8
    """Mask IoU at which two objects, or two detections, are the same thing."""


class Association(NamedTuple):
    """The result of `associate`, as rows of objects and indices of detections."""

    matched: dict[int, int]
    """Object row -> detection that overlaps it."""
    recovered: dict[int, int]
    """Row of a lost object -> detection that resembles it."""
    new: list[int]
    """Detections that belong to no object, the best first."""
    duplicate_tracks: list[tuple[int, int]]
    """Pairs (row, later row) of objects with the same mask."""


def compute_pairwise_scores(
    masks: Tensor, detections: Tensor, boxes: Tensor, appearance: tuple[Tensor, Tensor], pointers: Tensor
) -> PairwiseScores:
    """Compare objects with detections on the device, and copy the result to the host once.

    masks [T, h, w] and detections [D, h, w] are logits. boxes [D, 4] are in pixels of these masks. appearance
    ([T, P, C], bool [T, P]) is the result of `Tracker.appearance`. pointers [D, C] belong to the detections.
    """
    tracked = masks > 0
    new = detections > 0
    parts = (
        mask_iou(tracked, new),
        # the box of an empty mask is the whole frame, which must count as no overlap
        box_iou(mask_boxes(tracked), boxes.to(masks.device)) * tracked.flatten(1).any(dim=1)[:, None],
        appearance_similarity(*appearance, pointers),
        mask_iou(tracked, tracked),
        mask_iou(new, new),
    )
    # one copy, because each would wait for the device
    flat = torch.cat([part.float().flatten() for part in parts]).cpu().numpy().astype(np.float64)
    ends = np.cumsum([part.numel() for part in parts])[:-1]
    return PairwiseScores(
        *(values.reshape(part.shape) for values, part in zip(np.split(flat, ends), parts, strict=True))
    )


def associate(
    scores: PairwiseScores,
    track_labels: Sequence[str],
    is_lost: Sequence[bool],
    detection_labels: Sequence[str],
    rules: AssociationRules,
) -> Association:
    """Assign D detections to T objects, the older objects first.

    is_lost [T]: True for objects that are out of view or were missed for some time. A detection anywhere in the
    frame may recover such an object.
    """
    unique = _find_unique(scores.duplicate_detections, rules.duplicate_iou)
    # one stray pixel far from the object makes its box large, so a small box IoU alone says little
    overlap = np.maximum(scores.mask_iou, (scores.mask_iou + scores.box_iou) / 2)
    same_label = np.array([[a == b for b in detection_labels] for a in track_labels], bool).reshape(
        overlap.shape
    )
    # the label decides among detections that match, and makes no match by itself
    affinity = np.where((overlap >= rules.min_overlap) & unique, overlap + rules.label_bonus * same_label, 0)
    matched = assign(affinity)
    free = unique & _find_uncovered(scores, set(matched.values()), rules.covered_iou)
    searching = np.array([lost and row not in matched for row, lost in enumerate(is_lost)], bool)
    similar = scores.appearance_similarity >= rules.min_similarity
    allowed = searching[:, None] & free & same_label & similar
    recovered = assign(np.where(allowed, scores.appearance_similarity, 0))
    new = [int(d) for d in np.flatnonzero(free) if d not in recovered.values()]
    # each pair once, and no object with itself
    pairs = np.argwhere(np.triu(scores.duplicate_tracks, 1) >= rules.duplicate_iou)
    return Association(matched, recovered, new, [(int(i), int(j)) for i, j in pairs])


def assign(affinity: Floats) -> dict[int, int]:
    """Assign rows to columns with the greatest sum of affinity [T, D]. A pair with affinity 0 is not assigned."""
    if not affinity.size:
        return {}
    from scipy.optimize import (
        linear_sum_assignment,
    )  # here, because it slows the start of a node without a detector

    rows, columns = linear_sum_assignment(affinity, maximize=True)
    return {int(r): int(c) for r, c in zip(rows, columns, strict=True) if affinity[r, c] > 0}


def _find_unique(duplicate_detections: Floats, duplicate_iou: float) -> Bools:
    """Return bool [D]: True for detections with a mask that no better detection has."""
    # the best come first, so the columns before a row's own are better detections
    duplicate = np.tril(duplicate_detections, -1).max(axis=1, initial=0) >= duplicate_iou
    # an empty mask has an IoU of 0 with itself
    return np.asarray((np.diag(duplicate_detections) > 0) & ~duplicate, np.bool_)


def _find_uncovered(scores: PairwiseScores, matched: set[int], max_overlap: float) -> Bools:
    """Return bool [D]: True for detections that are not matched and do not cover any object."""
    overlap = np.maximum(scores.mask_iou, scores.box_iou).max(axis=0, initial=0)
    return (overlap < max_overlap) & np.array([d not in matched for d in range(len(overlap))], bool)


def mask_iou(first: Tensor, second: Tensor) -> Tensor:
    """Return the IoU [N, M] of bool masks [N, h, w] and [M, h, w]; 0 where both are empty."""
    a = first.flatten(1).float()
    b = second.flatten(1).float()
    shared = a @ b.T
    return shared / (a.sum(dim=1)[:, None] + b.sum(dim=1) - shared).clamp(min=1)


def appearance_similarity(stored: Tensor, valid: Tensor, pointers: Tensor) -> Tensor:
    """Return [T, D]: the greatest cosine of each pointer [D, C] and the stored ones [T, P, C] where valid [T, P]."""
    cosine = F.normalize(stored.float(), dim=2) @ F.normalize(pointers.float(), dim=1).T
    # no cosine is lower, so a pointer that is not valid never counts
    return cosine.masked_fill(~valid[..., None], -1.0).amax(dim=1)


@dataclass(frozen=True, slots=True)
class LifecycleRules:
    """Thresholds of the lifecycle. A round is one run of the detector."""

    min_detections: int = 2
    """Detections that confirm an object; with fewer it is tentative."""
    max_missed_rounds: int = 2
    """Missed rounds in a row after which a tentative object is removed, and any object counts as lost."""
    duplicate_missed_rounds: int = 4
    """Missed rounds in a row after which an object is removed if another object has its mask."""
    max_lost_s: float = 5.0
    """Seconds that an object is kept without evidence."""
    min_evidence_score: float = 0.5
    """Mask score that counts as evidence."""


class DetectedTrack(SavedState):
    """State of a detected object, besides its mask."""

    votes: dict[Label, Number] = field(default_factory=dict)
    detections: Count = 0
    missed: Count = 0
    score: Number = 0.0
    evidence_ns: Time = 0
    hidden: bool = False
    rounds: Count = 0
    names: dict[Label, NameEvidence] = field(default_factory=dict)


class LifecycleState(SavedState):
    """What `Lifecycle` keeps."""

    track_states: dict[Id, DetectedTrack]


class Lifecycle(SavedPart[LifecycleState]):
    """State of each detected object besides its mask. Times are capture times, so a replay decides the same way."""

    STATE = LifecycleState

    def __init__(self, rules: LifecycleRules) -> None:
        self._rules = rules
        self._track_states: dict[int, DetectedTrack] = {}

    def __contains__(self, object_id: int) -> bool:
        return object_id in self._track_states

    @property
    def ids(self) -> list[int]:
        """Object ids, the oldest first."""
        return list(self._track_states)

    def mark_detected(
        self,
        object_id: int,
        label: str,
        score: float,
        now_ns: int,
        features: Sequence[float] = (),
        anew: bool = False,
    ) -> None:
        """Record a detection of the object. The first detection creates it.

        `features` say how well the label fits. `anew`: the object was lost, or tracked elsewhere, so that what earlier
        detections said of its name is void.
        """
        track = self._track_states.setdefault(object_id, DetectedTrack())
        if anew:
            track.rounds = 0
            track.names = {}
        track.rounds += 1
        if features:
            track.names.setdefault(label, NameEvidence()).add(features)
        track.votes[label] = track.votes.get(label, 0.0) + score
        track.detections += 1
        track.missed = 0
        track.score = score
        track.evidence_ns = now_ns
        track.hidden = False

    def confirm(self, object_id: int) -> None:
        """Take an object for confirmed that was so before it was lost."""
        track = self._track_states[object_id]
        track.detections = max(track.detections, self._rules.min_detections)

    def mark_missed(self, object_id: int) -> None:
        """Record a round in which the detector did not find the object.

        What comes back after a round out of view may be another thing: its name is unknown until it is detected again.
        """
        track = self._track_states[object_id]
        track.missed += 1
        track.rounds += 1
        if track.hidden:
            track.rounds = 0
            track.names = {}

    def wait(self, object_id: int, now_ns: int) -> None:
        """Record a frame on which the object cannot be seen, where it is known to be: no time passes for it."""
        track = self._track_states[object_id]
        track.hidden = True
        track.evidence_ns = now_ns

    def observe(self, object_id: int, score: float, visible: bool, now_ns: int) -> None:
        """Record the object's mask on a frame. A mask with a high score is evidence, unless the object is tentative."""
        track = self._track_states[object_id]
        track.hidden = not visible
        track.evidence_ns = min(track.evidence_ns, now_ns)  # a camera's own clock may start again
        if visible and score >= self._rules.min_evidence_score and not self.is_tentative(object_id):
            track.evidence_ns = max(track.evidence_ns, now_ns)

    def forget(self, object_id: int) -> None:
        """Remove the object's state, if there is any."""
        self._track_states.pop(object_id, None)

    def is_tentative(self, object_id: int) -> bool:
        """Return True if the object has too few detections to be confirmed."""
        return self._track_states[object_id].detections < self._rules.min_detections

    def is_lost(self, object_id: int) -> bool:
        """Return True if the object is out of view, or if the detector has missed it for some rounds."""
        track = self._track_states[object_id]
        return track.hidden or track.missed >= self._rules.max_missed_rounds

    def label(self, object_id: int) -> str:
        """Return the label with the most votes. Each detection votes with its score."""
        votes = self._track_states[object_id].votes
        return max(votes, key=votes.__getitem__)

    def name_features(self, object_id: int, label: str) -> list[float] | None:
        """Return the features of a label of the object, see `names.FEATURES`; None if no detection has measured it."""
        track = self._track_states[object_id]
        return list_features(track.names[label], track.rounds) if label in track.names else None

    def keep_labels(self, labels: Iterable[str]) -> list[int]:
        """Drop the votes for all other labels; return the ids of objects that have no vote left."""
        kept = set(labels)
        for track in self._track_states.values():
            track.votes = {label: vote for label, vote in track.votes.items() if label in kept}
            track.names = {label: found for label, found in track.names.items() if label in kept}
        return [object_id for object_id, track in self._track_states.items() if not track.votes]

    def expired(self, now_ns: int) -> list[int]:
        """Return the ids to remove: tentative objects missed too often, and those too long without evidence."""
        max_lost_ns = self._rules.max_lost_s * NANOSECONDS
        return [
            object_id
            for object_id, track in self._track_states.items()
            if now_ns - track.evidence_ns > max_lost_ns
            or (self.is_tentative(object_id) and track.missed >= self._rules.max_missed_rounds)
        ]

    def is_duplicate(self, object_id: int) -> bool:
        """Return True if an object may be removed because another has its mask and has received its detections."""
        missed = self._track_states[object_id].missed
        return missed >= self._rules.duplicate_missed_rounds or (self.is_tentative(object_id) and missed > 0)

    def eviction_candidate(self, score: float) -> int | None:
        """Return the object to remove for a new detection of `score` when all slots are taken; None if there is none.

        It is the object that has been out of view longest. If all are in view, it is the tentative object with the
        lowest score, if that is below `score`. A confirmed object in view is never removed.
        """
        hidden = [i for i, track in self._track_states.items() if track.hidden]
        if hidden:
            return min(hidden, key=lambda i: self._track_states[i].evidence_ns)
        weaker = [
            i for i, track in self._track_states.items() if self.is_tentative(i) and track.score < score
        ]
        return min(weaker, key=lambda i: self._track_states[i].score) if weaker else None
