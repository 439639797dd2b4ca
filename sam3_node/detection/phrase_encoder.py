"""The interface of phrase encoders, which turn phrases into vectors for a detector, and checks of these vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import VocabularyError

Vectors = npt.NDArray[np.float32]
UNIT_TOLERANCE = (
    1e-6  # vectors with a norm this close to 1 stay bit for bit equal when they are saved and loaded
)


class PhraseEncoder(Protocol):
    """Turns phrases into the vectors that a detector searches for."""

    @property
    def model(self) -> str:
        """Name of the model that made the vectors, such as "openai/clip-vit-base-patch32"."""

    @property
    def dimension(self) -> int:
        """Length D of a vector."""

    def encode(self, phrases: Sequence[str]) -> Vectors:
        """Return vectors float32 [K, D] of unit length, one for each of K phrases, in order.

        Raises RequestError for a phrase that `clean_phrase` refuses or that has no vector.
        """


def check_phrase_encoder(encoder: PhraseEncoder, dimension: int, model: str | None = None) -> None:
    """Raise VocabularyError unless the encoder's vectors have this dimension and, if given, come from this model.

    Only the part of a model's name after the last slash is compared, so a folder may have the model's name.
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


def normalise_rows(vectors: Any) -> Vectors:
    """Scale the rows of vectors [N, D] to unit length. Raises ValueError for a row that is zero or not finite."""
    vectors = np.asarray(vectors)
    with np.errstate(over="ignore", invalid="ignore"):
        norms = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    if not np.isfinite(norms).all():
        raise ValueError(f"row {np.flatnonzero(~np.isfinite(norms))[0]} is not finite")
    if not norms.all():
        raise ValueError(f"row {np.flatnonzero(norms == 0)[0]} is zero")
    rows: Vectors = np.where(abs(norms - 1) <= UNIT_TOLERANCE, vectors, vectors / norms).astype(np.float32)
    return rows


def _last_part(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2].casefold()
