"""What is looked for: phrases made ready for a detector, with their limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import RequestError
from .base import Detector
from .phrases import phrase_key


@dataclass(frozen=True, eq=False)
class PromptSet:
    """A detector's query, the score from which on each phrase is believed, and how many of some there may be.

    The same for all cameras.
    """

    query: Any
    thresholds: Mapping[str, float]
    most: Mapping[str, int] = field(default_factory=dict)

    @property
    def phrases(self) -> tuple[str, ...]:
        return tuple(self.thresholds)


def want(
    detector: Detector,
    phrases: Sequence[str],
    score: float,
    scores: Mapping[str, float] | None = None,
    most: Mapping[str, int] | None = None,
) -> PromptSet:
    """Make cleaned, unique phrases ready. `scores` and `most` are for the phrases they name, `score` for the others.

    Raises RequestError for a phrase that the detector does not know, and for a limit of none of them.
    """
    scores, most = _by_phrase(scores or {}, phrases), _by_phrase(most or {}, phrases)
    thresholds = {phrase: scores.get(phrase, score) for phrase in phrases}
    return PromptSet(detector.prepare(phrases), thresholds, most)


def _by_phrase(limits: Mapping[str, Any], phrases: Sequence[str]) -> dict[str, Any]:
    """Limits by the phrases as they are spelt there."""
    spelt = {phrase_key(phrase): phrase for phrase in phrases}
    if strange := [name for name in limits if phrase_key(name) not in spelt]:
        raise RequestError(
            f"expected limits of the prompts {', '.join(phrases)}, found one of {strange[0]!r:.60}"
        )
    return {spelt[phrase_key(name)]: limit for name, limit in limits.items()}
