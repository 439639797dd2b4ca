"""The interface of detectors, and the set of prompts that a detector searches for.

A detector prepares phrases once, and then returns boxes for each frame.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import ModelError, RequestError
from ..types import Detection, Priority, State
from .phrases import phrase_key

if TYPE_CHECKING:
    from torch import Tensor


class Query(Protocol):
    """Phrases prepared for one detector. All cameras and frames share it."""

    @property
    def phrases(self) -> tuple[str, ...]:
        """The labels of detections."""


class Detector(Protocol):
    """Finds objects by name. It keeps no state between calls, so one detector serves all cameras."""

    @property
    def name(self) -> str:
        """Name of the model, for status and messages."""

    def prepare(self, phrases: Sequence[str]) -> Any:
        """Return the Query for at least one phrase; the phrases are cleaned and unique.

        Raises RequestError, or UnknownPhraseError for a phrase without a vector; nothing is changed then.
        """

    def detect(
        self, image: npt.NDArray[np.uint8], query: Any, threshold: float, trunk: Tensor | None = None
    ) -> list[Detection]:
        """Return the detections on a BGR frame [h, w, 3] with a score above `threshold`, the best first.

        Of overlapping boxes with the same phrase, only the best is returned. trunk: the features that the tracker's
        encoder computed for the frame, for a detector that shares the encoder; others ignore it. Raises ModelError if
        the model fails.
        """


@dataclass(frozen=True, eq=False)
class PromptSet:
    """Prompts with their limits, the same for all cameras."""

    query: Any
    """prepared by the detector"""
    thresholds: Mapping[str, float]
    """minimum score of a new object, for each phrase"""
    max_counts: Mapping[str, int] = field(default_factory=dict)
    """maximum number of objects, for some phrases"""
    priorities: Mapping[str, Priority] = field(default_factory=dict)
    """priority of the objects of some phrases; that of the others is normal"""

    @property
    def phrases(self) -> tuple[str, ...]:
        """The phrases, in their order."""
        return tuple(self.thresholds)

    def state(self) -> State:
        """Return the state that `restore_prompts` takes."""
        return {
            "thresholds": dict(self.thresholds),
            "max_counts": dict(self.max_counts),
            "priorities": dict(self.priorities),
        }


def restore_prompts(detector: Detector | None, state: State | None) -> PromptSet | None:
    """Return the prompts that `PromptSet.state` described, None for None.

    Raises RequestError if the detector cannot search for them, or if there is none.
    """
    if state is None:
        return None
    if detector is None:
        raise RequestError(
            f"expected a detector for the prompts {', '.join(state['thresholds'])}, found none"
        )
    return PromptSet(detector.prepare(tuple(state["thresholds"])), **state)


def prepare_prompts(
    detector: Detector,
    phrases: Sequence[str],
    score: float,
    scores: Mapping[str, float] | None = None,
    max_counts: Mapping[str, int] | None = None,
    priorities: Mapping[str, Priority] | None = None,
) -> PromptSet:
    """Prepare cleaned, unique phrases for a detector.

    scores: thresholds of some phrases; `score` is the threshold of the others. max_counts: maximum numbers of objects
    of some phrases. priorities: those of some phrases. Raises RequestError for a phrase that the detector cannot search
    for, and for a limit whose phrase is not among `phrases`.
    """
    scores, max_counts, priorities = (
        _by_phrase(limits or {}, phrases) for limits in (scores, max_counts, priorities)
    )
    thresholds = {phrase: scores.get(phrase, score) for phrase in phrases}
    return PromptSet(detector.prepare(phrases), thresholds, max_counts, priorities)


def _by_phrase(limits: Mapping[str, Any], phrases: Sequence[str]) -> dict[str, Any]:
    """Return the limits with the spelling of their keys in `phrases`."""
    spelling = {phrase_key(phrase): phrase for phrase in phrases}
    if unknown := [name for name in limits if phrase_key(name) not in spelling]:
        raise RequestError(
            f"expected limits for the prompts {', '.join(phrases)}, found one for {unknown[0]!r:.60}"
        )
    return {spelling[phrase_key(name)]: limit for name, limit in limits.items()}


@contextmanager
def raise_model_error(name: str) -> Iterator[None]:
    """Raise ModelError if torch fails in the block, for example because memory runs out."""
    try:
        yield
    except RuntimeError as error:
        first_line = str(error).strip().split("\n")[0][:300]
        raise ModelError(f"{name} failed: {type(error).__name__}: {first_line}") from error
