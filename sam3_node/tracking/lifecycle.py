"""The life of objects that were found by name: tentative, kept while there is evidence, then let go."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from ..types import NANOSECONDS, State


@dataclass(frozen=True, slots=True)
class LifeRules:
    """confirm: detections that make an object more than tentative. patience: rounds of detection that a tentative one
    may be missed. merge: rounds after which an object goes, if another one has its mask and its detections. max_lost_s:
    how long an object is kept without evidence of it. sure: score of a mask that is evidence.
    """

    confirm: int = 2
    patience: int = 2
    merge: int = 4
    max_lost_s: float = 5.0
    sure: float = 0.5


@dataclass(slots=True)
class _Life:
    votes: dict[str, float] = field(default_factory=dict)
    sightings: int = 0
    missed: int = 0
    score: float = 0.0
    evidence_ns: int = 0
    hidden: bool = False


class Lifecycle:
    """What is known of each named object besides its mask. Times are capture times, so that a replay decides alike."""

    def __init__(self, rules: LifeRules) -> None:
        self._rules = rules
        self._lives: dict[int, _Life] = {}

    def __contains__(self, object_id: int) -> bool:
        return object_id in self._lives

    def __len__(self) -> int:
        return len(self._lives)

    @property
    def ids(self) -> list[int]:
        """The older first."""
        return list(self._lives)

    def state(self) -> State:
        """What `restore` takes."""
        return {"lives": [[object_id, asdict(life)] for object_id, life in self._lives.items()]}

    def restore(self, state: State) -> None:
        """Go on from what was known when `state` was asked for."""
        self._lives = {
            object_id: _Life(**{**life, "votes": dict(life["votes"])}) for object_id, life in state["lives"]
        }

    def sight(self, object_id: int, label: str, score: float, now_ns: int) -> None:
        """A detection called `label` that scores `score` is this object; the first one is its birth."""
        life = self._lives.setdefault(object_id, _Life())
        life.votes[label] = life.votes.get(label, 0.0) + score
        life.sightings += 1
        life.missed = 0
        life.score = score
        life.evidence_ns = now_ns
        life.hidden = False

    def miss(self, object_id: int) -> None:
        """A round of detection did not find it."""
        self._lives[object_id].missed += 1

    def observe(self, object_id: int, score: float, visible: bool, now_ns: int) -> None:
        """Take note of its mask on a frame: one that is sure is evidence too, unless the object is tentative."""
        life = self._lives[object_id]
        life.hidden = not visible
        life.evidence_ns = min(life.evidence_ns, now_ns)  # a camera's own clock may begin again
        if visible and score >= self._rules.sure and not self.is_tentative(object_id):
            life.evidence_ns = max(life.evidence_ns, now_ns)

    def forget(self, object_id: int) -> None:
        """Nothing more will be told of it."""
        self._lives.pop(object_id, None)

    def is_tentative(self, object_id: int) -> bool:
        """Whether it was not seen often enough to be believed."""
        return self._lives[object_id].sightings < self._rules.confirm

    def is_away(self, object_id: int) -> bool:
        """Whether it is out of sight, or what is tracked has for some time not been what was looked for."""
        life = self._lives[object_id]
        return life.hidden or life.missed >= self._rules.patience

    def label(self, object_id: int) -> str:
        """The name with the most votes."""
        votes = self._lives[object_id].votes
        return max(votes, key=votes.__getitem__)

    def keep_labels(self, wanted: Iterable[str]) -> list[int]:
        """Drop the votes for other names; the ids of those that no name is left for."""
        names = set(wanted)
        for life in self._lives.values():
            life.votes = {label: vote for label, vote in life.votes.items() if label in names}
        return [object_id for object_id, life in self._lives.items() if not life.votes]

    def expired(self, now_ns: int) -> list[int]:
        """Those to let go: tentative and missed too often, or without evidence for too long."""
        longest_ns = self._rules.max_lost_s * NANOSECONDS
        return [
            object_id
            for object_id, life in self._lives.items()
            if now_ns - life.evidence_ns > longest_ns
            or (self.is_tentative(object_id) and life.missed >= self._rules.patience)
        ]

    def is_repeat(self, object_id: int) -> bool:
        """Whether it may go, where another object has the same mask: detections have long been given to the other."""
        missed = self._lives[object_id].missed
        return missed >= self._rules.merge or (self.is_tentative(object_id) and missed > 0)

    def gives_way(self, score: float) -> int | None:
        """Who makes room for a detection of `score` when all places are taken; None if nobody does.

        The one that is out of sight for longest; else the tentative one of the lowest score, if that is lower. An
        object that is in view and confirmed stays.
        """
        hidden = [i for i, life in self._lives.items() if life.hidden]
        if hidden:
            return min(hidden, key=lambda i: self._lives[i].evidence_ns)
        weak = [i for i, life in self._lives.items() if self.is_tentative(i) and life.score < score]
        return min(weak, key=lambda i: self._lives[i].score) if weak else None
