"""Phrases with their vectors, kept in one file: names for a detector on a machine without a text encoder."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ..errors import OutputError, RequestError, UnknownPhraseError, VocabularyError
from .phrase_encoder import PhraseEncoder, Vectors, check_encoder, unit_rows
from .phrases import clean_phrase, nearest_phrases, phrase_key, shown

VERSION = "1"
ADVICE = "build one with `sam3-node vocabulary build`"
LISTED = 3  # unknown phrases named in an error


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """A PhraseEncoder that knows N phrases by heart.

    phrases: as they are shown; found by whatever case and white space. vectors: float32 [N, D], brought to unit
    length and made read-only. model: the name of what made the vectors. Raises VocabularyError for no phrases, a
    phrase that `clean_phrase` refuses or that is there twice, and a vector that is zero or not finite.
    """

    phrases: tuple[str, ...]
    vectors: Vectors
    model: str
    _rows: dict[str, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        phrases, vectors = _clean(self.phrases), _unit(self.vectors, self.phrases)
        vectors.flags.writeable = False
        if not isinstance(self.model, str) or not self.model.strip():
            raise VocabularyError(
                "vocabulary: expected the name of the model that made the vectors, found none"
            )
        object.__setattr__(self, "phrases", phrases)
        object.__setattr__(self, "vectors", vectors)
        object.__setattr__(self, "_rows", {phrase_key(phrase): row for row, phrase in enumerate(phrases)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Vocabulary:
        """Read what `save` wrote; raises VocabularyError that names the file."""
        try:
            with safe_open(path, framework="numpy") as file:
                metadata, vectors = file.metadata() or {}, _read_vectors(file)
            if metadata.get("version") != VERSION:
                raise VocabularyError(
                    f"expected a vocabulary of version {VERSION}, found {metadata.get('version', 'no version')}"
                )
            return cls(_read_phrases(metadata), vectors, metadata.get("model", ""))
        except (OSError, SafetensorError) as error:
            raise VocabularyError(
                f"cannot read {os.fspath(path)}: expected a vocabulary in safetensors, found {error}; {ADVICE}"
            ) from error
        except VocabularyError as error:
            raise VocabularyError(f"{os.fspath(path)}: {error}; {ADVICE}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file, replacing what was there once it is whole; raises OutputError."""
        metadata = {"version": VERSION, "model": self.model, "phrases": json.dumps(self.phrases)}
        target = Path(path)
        aside = target.parent / f".{target.name}.{os.getpid()}"
        try:
            aside.write_bytes(save({"vectors": self.vectors}, metadata=metadata))
            os.replace(aside, target)
        except OSError as error:
            raise OutputError(f"cannot write {target}: {error.strerror or error}") from error
        finally:
            with contextlib.suppress(OSError):
                aside.unlink()

    @property
    def dimension(self) -> int:
        """Length D of a vector."""
        return self.vectors.shape[1]

    def __len__(self) -> int:
        return len(self.phrases)

    def __contains__(self, phrase: object) -> bool:
        try:
            return phrase_key(clean_phrase(phrase)) in self._rows
        except RequestError:
            return False

    def encode(self, phrases: Sequence[str]) -> Vectors:
        """Vectors float32 [K, D] of unit length, one for each of K phrases, in their order.

        Raises RequestError for a phrase that `clean_phrase` refuses, UnknownPhraseError, which tells the nearest known
        ones, for those that are not here.
        """
        cleaned = [clean_phrase(phrase) for phrase in phrases]
        unknown = [phrase for phrase in cleaned if phrase_key(phrase) not in self._rows]
        if unknown:
            raise UnknownPhraseError(self._tell_unknown(unknown))
        return self.vectors[[self._rows[phrase_key(phrase)] for phrase in cleaned]]

    def extended(self, other: Vocabulary) -> Vocabulary:
        """This vocabulary and, after it, what only the other one has; VocabularyError unless both are of one model."""
        check_encoder(other, self.dimension, self.model)
        new = [row for row, phrase in enumerate(other.phrases) if phrase not in self]
        phrases = (*self.phrases, *(other.phrases[row] for row in new))
        return Vocabulary(phrases, np.concatenate([self.vectors, other.vectors[new]]), self.model)

    def _tell_unknown(self, unknown: list[str]) -> str:
        told = []
        for phrase in unknown[:LISTED]:
            nearest = ", ".join(map(shown, nearest_phrases(phrase, self.phrases)))
            told.append(f"{shown(phrase)} (nearest: {nearest or 'none'})")
        more = f" and {len(unknown) - LISTED} more" if len(unknown) > LISTED else ""
        return (
            f"not among the {len(self)} phrases of the vocabulary: {', '.join(told)}{more}; name one that is, or build "
            "a vocabulary with it: `sam3-node vocabulary build PHRASE … --encoder FOLDER -o FILE`"
        )


class VocabularyFirst:
    """A PhraseEncoder that takes from a vocabulary what is in it, and the rest from an encoder of the same model."""

    def __init__(self, vocabulary: Vocabulary, encoder: PhraseEncoder) -> None:
        """Raises VocabularyError where the two are not of one model."""
        check_encoder(encoder, vocabulary.dimension, vocabulary.model)
        self._vocabulary, self._encoder = vocabulary, encoder
        self.model, self.dimension = vocabulary.model, vocabulary.dimension

    def encode(self, phrases: Sequence[str]) -> Vectors:
        """Vectors float32 [K, D] of unit length; see PhraseEncoder."""
        unknown = [index for index, phrase in enumerate(phrases) if phrase not in self._vocabulary]
        vectors = np.empty((len(phrases), self.dimension), np.float32)
        vectors[unknown] = self._encoder.encode([phrases[index] for index in unknown])
        known = np.setdiff1d(np.arange(len(phrases)), unknown)
        vectors[known] = self._vocabulary.encode([phrases[index] for index in known])
        return vectors


def _clean(phrases: Sequence[object]) -> tuple[str, ...]:
    try:
        cleaned = tuple(map(clean_phrase, phrases))
    except RequestError as error:
        raise VocabularyError(f"vocabulary: {error}") from error
    first: dict[str, str] = {}
    for phrase in cleaned:
        known = first.get(phrase_key(phrase))
        if known is not None:
            raise VocabularyError(
                f"vocabulary: expected each phrase once, found {shown(known)} and {shown(phrase)}"
            )
        first[phrase_key(phrase)] = phrase
    return cleaned


def _unit(vectors: Any, phrases: Sequence[object]) -> Vectors:
    with np.errstate(over="ignore"):
        vectors = np.array(vectors, np.float32, order="C")
    if vectors.ndim != 2 or not vectors.size or len(vectors) != len(phrases):
        raise VocabularyError(
            f"vocabulary: expected a vector for each of {len(phrases)} phrases, at least one, found shape "
            f"{list(vectors.shape)}"
        )
    try:
        return unit_rows(vectors)
    except ValueError as error:
        raise VocabularyError(
            f"vocabulary: expected finite vectors that are not zero, found that {error}"
        ) from error


def _read_vectors(file: Any) -> Vectors:
    if "vectors" not in file.keys():  # noqa: SIM118, not a mapping
        raise VocabularyError(
            f"expected a tensor 'vectors', found {', '.join(sorted(file.keys())[:5]) or 'none'}"
        )
    found = file.get_slice("vectors")
    if found.get_dtype() != "F32":
        raise VocabularyError(f"expected vectors of dtype F32, found {found.get_dtype()}")
    return file.get_tensor("vectors")


def _read_phrases(metadata: dict[str, str]) -> tuple[str, ...]:
    try:
        found = json.loads(metadata.get("phrases", ""))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list):
        raise VocabularyError("expected a JSON list 'phrases' in the metadata, found none")
    return tuple(found)
