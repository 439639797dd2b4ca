"""Vocabularies put together from files, from vectors made elsewhere, and from a text encoder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import VocabularyError
from .phrase_encoder import PhraseEncoder, check_encoder
from .phrases import unique_phrases
from .vocabulary import Vocabulary, VocabularyFirst


def build_vocabulary(
    phrases: Sequence[str], sources: Sequence[Vocabulary] = (), encoder: PhraseEncoder | None = None
) -> Vocabulary:
    """The phrases, each once, with vectors from the first source that has them, else from the encoder.

    Without phrases it is all of the sources'. Raises VocabularyError where there is nothing to take from or the sources
    are not of one model, UnknownPhraseError for a phrase without a vector.
    """
    known = reduce(Vocabulary.extended, sources) if sources else None
    if known is not None and not phrases:
        return known
    both = VocabularyFirst(known, encoder) if known is not None and encoder is not None else None
    origin = both or known or encoder
    if origin is None or not phrases:
        raise VocabularyError(
            "expected phrases and a text encoder (--encoder FOLDER), or vocabularies to take vectors from "
            f"(--from FILE), found {'no phrases' if origin else 'neither'}"
        )
    unique = unique_phrases(phrases)
    return Vocabulary(unique, origin.encode(unique), origin.model)


def read_source(path: Path, model: str | None = None) -> Vocabulary:
    """A vocabulary file or, where the name ends in .json, a map of phrases to vectors that `model` has made.

    Raises VocabularyError that names the file.
    """
    if path.suffix.lower() != ".json":
        vocabulary = Vocabulary.load(path)
        if model is not None:
            check_encoder(vocabulary, vocabulary.dimension, model)
        return vocabulary
    if model is None:
        raise VocabularyError(
            f"{path} does not tell which model made its vectors; name it: --model openai/clip-vit-base-patch32"
        )
    phrases, vectors = _read_map(path)
    try:
        return Vocabulary(phrases, vectors, model)
    except VocabularyError as error:
        raise VocabularyError(f"{path}: {error}") from error


def read_phrases(path: Path) -> list[str]:
    """One phrase a line of a text file in UTF-8, empty lines left out; raises VocabularyError."""
    return [line for line in _read_text(path, "phrases, one a line").splitlines() if line.strip()]


def _read_map(path: Path) -> tuple[tuple[Any, ...], Any]:
    what = "a JSON map from phrases to lists of as many numbers each"
    try:
        # pairs, not a dict, so that a phrase that is there twice is not lost
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
    """A JSON map, in order."""


def _read_text(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise VocabularyError(f"cannot read {path}: expected {what}; found {error}") from error
