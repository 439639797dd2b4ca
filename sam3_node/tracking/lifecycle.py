"""The life of objects that the detector found: tentative at first, kept while there is evidence, then removed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

from ..types import NANOSECONDS, State
from .names import NameEvidence, list_features


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


@dataclass(slots=True)
class _TrackLife:
    votes: dict[str, float] = field(default_factory=dict)
    detections: int = 0
    missed: int = 0
    score: float = 0.0
    evidence_ns: int = 0
    hidden: bool = False
    rounds: int = 0
    names: dict[str, NameEvidence] = field(default_factory=dict)


class Lifecycle:
    """State of each detected object besides its mask. Times are capture times, so a replay decides the same way."""

    def __init__(self, rules: LifecycleRules) -> None:
        self._rules = rules
        self._lives: dict[int, _TrackLife] = {}

    def __contains__(self, object_id: int) -> bool:
        return object_id in self._lives

    def __len__(self) -> int:
        return len(self._lives)

    @property
    def ids(self) -> list[int]:
        """Object ids, the oldest first."""
        return list(self._lives)

    def state(self) -> State:
        """Return the state that `restore` takes."""
        return {"lives": [[object_id, asdict(life)] for object_id, life in self._lives.items()]}

    def restore(self, state: State) -> None:
        """Replace everything by what `state` returned."""
        self._lives = {
            object_id: _TrackLife(**{**life, "votes": dict(life["votes"]), "names": _read_names(life)})
            for object_id, life in state["lives"]
        }

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
        life = self._lives.setdefault(object_id, _TrackLife())
        if anew:
            life.rounds, life.names = 0, {}
        life.rounds += 1
        if features:
            life.names.setdefault(label, NameEvidence()).add(features)
        life.votes[label] = life.votes.get(label, 0.0) + score
        life.detections += 1
        life.missed = 0
        life.score = score
        life.evidence_ns = now_ns
        life.hidden = False

    def mark_missed(self, object_id: int) -> None:
        """Record a round in which the detector did not find the object.

        What comes back after a round out of view may be another thing: its name is unknown until it is detected again.
        """
        life = self._lives[object_id]
        life.missed += 1
        life.rounds += 1
        if life.hidden:
            life.rounds, life.names = 0, {}

    def observe(self, object_id: int, score: float, visible: bool, now_ns: int) -> None:
        """Record the object's mask on a frame. A mask with a high score is evidence, unless the object is tentative."""
        life = self._lives[object_id]
        life.hidden = not visible
        life.evidence_ns = min(life.evidence_ns, now_ns)  # a camera's own clock may start again
        if visible and score >= self._rules.min_evidence_score and not self.is_tentative(object_id):
            life.evidence_ns = max(life.evidence_ns, now_ns)

    def forget(self, object_id: int) -> None:
        """Remove the object's state, if there is any."""
        self._lives.pop(object_id, None)

    def is_tentative(self, object_id: int) -> bool:
        """Return True if the object has too few detections to be confirmed."""
        return self._lives[object_id].detections < self._rules.min_detections

    def is_lost(self, object_id: int) -> bool:
        """Return True if the object is out of view, or if the detector has missed it for some rounds."""
        life = self._lives[object_id]
        return life.hidden or life.missed >= self._rules.max_missed_rounds

    def label(self, object_id: int) -> str:
        """Return the label with the most votes. Each detection votes with its score."""
        votes = self._lives[object_id].votes
        return max(votes, key=votes.__getitem__)

    def name_features(self, object_id: int, label: str) -> list[float] | None:
        """Return the features of a label of the object, see `names.FEATURES`; None if no detection has measured it."""
        life = self._lives[object_id]
        return list_features(life.names[label], life.rounds) if label in life.names else None

    def keep_labels(self, labels: Iterable[str]) -> list[int]:
        """Drop the votes for all other labels; return the ids of objects that have no vote left."""
        kept = set(labels)
        for life in self._lives.values():
            life.votes = {label: vote for label, vote in life.votes.items() if label in kept}
            life.names = {label: found for label, found in life.names.items() if label in kept}
        return [object_id for object_id, life in self._lives.items() if not life.votes]

    def expired(self, now_ns: int) -> list[int]:
        """Return the ids to remove: tentative objects missed too often, and those too long without evidence."""
        max_lost_ns = self._rules.max_lost_s * NANOSECONDS
        return [
            object_id
            for object_id, life in self._lives.items()
            if now_ns - life.evidence_ns > max_lost_ns
            or (self.is_tentative(object_id) and life.missed >= self._rules.max_missed_rounds)
        ]

    def is_duplicate(self, object_id: int) -> bool:
        """Return True if an object may be removed because another has its mask and has received its detections."""
        missed = self._lives[object_id].missed
        return missed >= self._rules.duplicate_missed_rounds or (self.is_tentative(object_id) and missed > 0)

    def eviction_candidate(self, score: float) -> int | None:
        """Return the object to remove for a new detection of `score` when all slots are taken; None if there is none.

        It is the object that has been out of view longest. If all are in view, it is the tentative object with the
        lowest score, if that is below `score`. A confirmed object in view is never removed.
        """
        hidden = [i for i, life in self._lives.items() if life.hidden]
        if hidden:
            return min(hidden, key=lambda i: self._lives[i].evidence_ns)
        weaker = [i for i, life in self._lives.items() if self.is_tentative(i) and life.score < score]
        return min(weaker, key=lambda i: self._lives[i].score) if weaker else None


def _read_names(life: State) -> dict[str, NameEvidence]:
    """Return the evidence in a state; none in those of earlier versions."""
    return {
        label: NameEvidence(list(found["means"]), found["count"])
        for label, found in life.get("names", {}).items()
    }
