"""What turns phrases into vectors for a detector: a protocol, and a vocabulary with an encoder behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import VocabularyError

Vectors = npt.NDArray[np.float32]
UNIT = 1e-6  # a norm this near 1 is left as it is, so that vectors stay bit for bit the same through files


class PhraseEncoder(Protocol):
    """Turns phrases into the vectors with which a detector looks for objects."""

    @property
    def model(self) -> str:
        """Name of the model that made the vectors, such as "openai/clip-vit-base-patch32"."""

    @property
    def dimension(self) -> int:
        """Length D of a vector."""

    def encode(self, phrases: Sequence[str]) -> Vectors:
        """Vectors float32 [K, D] of unit length, one for each of K phrases, in their order.

        Raises RequestError for a phrase that `clean_phrase` refuses or that has no vector.
        """


def check_encoder(encoder: PhraseEncoder, dimension: int, model: str | None = None) -> None:
    """Raise VocabularyError unless vectors have the detector's dimension and, where it is given, come from its model.

    Of models' names what follows the last slash counts: a folder clip-vit-base-patch32 is the model of that name.
    """
    if encoder.dimension != dimension:
        raise VocabularyError(
            f"expected phrase vectors of {dimension} numbers{f' from {model}' if model else ''}, found "
            f"{encoder.dimension} from {encoder.model}; use a vocabulary or text encoder of the detector's model"
        )
    if model is not None and _last_part(model) != _last_part(encoder.model):
        raise VocabularyError(
            f"expected phrase vectors from {model}, found those from {encoder.model}; use a vocabulary or text "
            "encoder of that model, or name the model with --model when building, if it is the same"
        )


def unit_rows(vectors: Any) -> Vectors:
    """The rows of finite numbers [N, D], none of them zero, at unit length; raises ValueError for others."""
    vectors = np.asarray(vectors)
    with np.errstate(over="ignore", invalid="ignore"):
        norms = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    if not np.isfinite(norms).all():
        raise ValueError(f"row {np.flatnonzero(~np.isfinite(norms))[0]} is not finite")
    if not norms.all():
        raise ValueError(f"row {np.flatnonzero(norms == 0)[0]} is zero")
    return np.where(abs(norms - 1) <= UNIT, vectors, vectors / norms).astype(np.float32)


def _last_part(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2].casefold()
