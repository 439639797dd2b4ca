"""What the pipeline asks of a detector: phrases once, then boxes on a frame."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import ModelError, RequestError
from ..types import Detection
from .phrases import phrase_key

if TYPE_CHECKING:
    from torch import Tensor


class Query(Protocol):
    """Phrases, made ready for one detector; shared by cameras and kept from frame to frame."""

    @property
    def phrases(self) -> tuple[str, ...]:
        """As they label what is found."""


class Detector(Protocol):
    """Finds things by name. It remembers nothing between calls, so one serves all cameras."""

    @property
    def name(self) -> str:
        """Of the model, for status and messages."""

    def prepare(self, phrases: Sequence[str]) -> Any:
        """The Query for cleaned, unique phrases, one at least.

        Raises RequestError (UnknownPhraseError for a phrase without a vector); nothing has changed then.
        """

    def detect(
        self, image: npt.NDArray[np.uint8], query: Any, threshold: float, trunk: Tensor | None = None
    ) -> list[Detection]:
        """Detections on a BGR frame [h, w, 3] that score more than `threshold`, the best first.

        Of one phrase's overlapping boxes only the best is there. trunk: what the tracker's encoder made of the frame,
        for a detector that shares it; others pass over it. Raises ModelError where the model fails.
        """


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


@contextmanager
def telling_failures(name: str) -> Iterator[None]:
    """Raise ModelError where torch fails, such as for want of memory."""
    try:
        yield
    except RuntimeError as error:
        first_line = str(error).strip().split("\n")[0][:300]
        raise ModelError(f"{name} failed: {type(error).__name__}: {first_line}") from error
