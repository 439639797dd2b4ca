"""What the pipeline asks of a detector: phrases once, then boxes on a frame."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from ..types import Detection

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
