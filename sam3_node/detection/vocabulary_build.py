"""Build vocabularies from vocabulary files, from vectors computed elsewhere, and with a text encoder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import VocabularyError
from .phrase_encoder import PhraseEncoder, check_phrase_encoder
from .phrases import unique_phrases
from .vocabulary import Vocabulary, VocabularyWithFallback


def build_vocabulary(
    phrases: Sequence[str], sources: Sequence[Vocabulary] = (), encoder: PhraseEncoder | None = None
) -> Vocabulary:
    """Build a vocabulary of the unique phrases, with vectors of the first source that has them, else of the encoder.

    Without phrases, the vocabulary has all phrases of the sources. Raises VocabularyError if there is neither a source
    nor an encoder, or if they come from different models. Raises UnknownPhraseError for a phrase without a vector.
    """
    joined = reduce(Vocabulary.extended, sources) if sources else None
    if joined is not None and not phrases:
        return joined
    both = VocabularyWithFallback(joined, encoder) if joined is not None and encoder is not None else None
    origin = both or joined or encoder
    if origin is None or not phrases:
        raise VocabularyError(
            "expected phrases and a text encoder (--encoder FOLDER), or vocabularies to take vectors from "
            f"(--from FILE), found {'no phrases' if origin else 'neither'}"
        )
    unique = unique_phrases(phrases)
    return Vocabulary(unique, origin.encode(unique), origin.model)


def read_source(path: Path, model: str | None = None) -> Vocabulary:
    """Read a vocabulary file or, if the name ends in .json, a map from phrases to vectors that `model` computed.

    Raises VocabularyError, which names the file.
    """
    if path.suffix.lower() != ".json":
        vocabulary = Vocabulary.load(path)
        if model is not None:
            check_phrase_encoder(vocabulary, vocabulary.dimension, model)
        return vocabulary
    if model is None:
        raise VocabularyError(
            f"{path} does not name the model that computed its vectors; give it: --model openai/clip-vit-base-patch32"
        )
    phrases, vectors = _read_map(path)
    try:
        return Vocabulary(phrases, vectors, model)
    except VocabularyError as error:
        raise VocabularyError(f"{path}: {error}") from error


def read_phrases(path: Path) -> list[str]:
    """Read the phrases of a UTF-8 text file, one per line, without empty lines. Raises VocabularyError."""
    return [line for line in _read_text(path, "phrases, one per line").splitlines() if line.strip()]


def _read_map(path: Path) -> tuple[tuple[Any, ...], Any]:
    what = "a JSON map from phrases to lists of equally many numbers"
    try:
        # pairs, not a dict, so that duplicate phrases are found
        pairs = json.loads(_read_text(path, what), object_pairs_hook=_Pairs)
        if not isinstance(pairs, _Pairs):
            raise ValueError(f"a {type(pairs).__name__}")
        vectors = np.array([row for _, row in pairs])
        if vectors.ndim != 2 or vectors.dtype.kind not in "fi":
            raise ValueError(f"values of dtype {vectors.dtype}, shape {list(vectors.shape)}")
    except (ValueError, RecursionError) as error:
        raise VocabularyError(f"{path}: expected {what}, found {error}") from error
    return tuple(phrase for phrase, _ in pairs), vectors


class _Pairs(list[tuple[str, Any]]):
    """The pairs of a JSON map, in order."""


def _read_text(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise VocabularyError(f"cannot read {path}: expected {what}; found {error}") from error
