"""Read, write and build vocabularies: phrases with their vectors, for detectors on machines without a text encoder."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ..errors import RequestError, UnknownPhraseError, VocabularyError, did_you_mean
from ..files import ANY_SIZE, check_regular, describe_stand_in, parse_json, read_regular, write_output
from .detectors import KnownNames
from .phrases import (
    PhraseEncoder,
    Vectors,
    check_phrase_encoder,
    clean_phrase,
    describe_unknown,
    normalise_rows,
    phrase_key,
    quote_phrase,
    unique_phrases,
)

VERSION = "1"
"""Version of the layout of the file."""
MAX_TEXT_BYTES = 1 << 30
"""Size of the largest text file with phrases or vectors that a vocabulary is built of. A larger one is refused."""
BUILD_HINT = "build one with `sam3-node vocabulary build`"
MAX_CONTRASTS = 48
"""Phrases of each kind that a phrase is compared with. Each costs a product for each box."""
ANYTHING = {"object", "thing", "item"}
"""Words that name everything, and so contrast with nothing."""
SAME = 0.99
"""Cosine from which on two phrases mean the same."""


class Vocabulary:
    """A PhraseEncoder backed by a fixed table of N phrases.

    phrases: for display; lookup ignores case and extra white space. vectors: float32 [N, D], scaled to unit length and
    made read-only. model: the name of the model that computed the vectors. Raises VocabularyError for an empty table,
    for a phrase that `clean_phrase` refuses or that occurs twice, and for a vector that is zero or not finite.
    """

    def __init__(self, phrases: Sequence[object], vectors: Any, model: str) -> None:
        self.phrases = _clean(phrases)
        self.vectors = _unit(vectors, phrases)
        self.model = model
        # shared by all who encode: nobody may change them
        self.vectors.flags.writeable = False
        if not isinstance(model, str) or not model.strip():
            raise VocabularyError(
                "vocabulary: expected the name of the model that computed the vectors, found none"
            )
        self._words = [phrase_key(phrase).split() for phrase in self.phrases]
        self._rows = {phrase_key(phrase): row for row, phrase in enumerate(self.phrases)}

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Vocabulary:
        """Read a file that `save` wrote. Raises VocabularyError, which names the file."""
        try:
            check_regular(Path(path), ANY_SIZE)
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                vectors = _read_vectors(file)
            # an older layout would be read wrong, not with an error
            if metadata.get("version") != VERSION:
                raise VocabularyError(
                    f"expected a vocabulary of version {VERSION}, found {metadata.get('version', 'no version')}"
                )
            return cls(_read_phrases(metadata), vectors, metadata.get("model", ""))
        except FileNotFoundError as error:
            siblings = map(str, Path(path).parent.glob("*.safetensors"))
            raise VocabularyError(
                f"cannot read {os.fspath(path)}: no such file{did_you_mean(os.fspath(path), siblings)}; {BUILD_HINT}"
            ) from error
        except (OSError, SafetensorError) as error:
            raise VocabularyError(
                f"cannot read {os.fspath(path)}: expected a vocabulary in safetensors, found "
                f"{describe_stand_in(Path(path)) or error}; {BUILD_HINT}"
            ) from error
        except VocabularyError as error:
            raise VocabularyError(f"{os.fspath(path)}: {error}; {BUILD_HINT}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file. An existing file is replaced once the new one is complete. Raises OutputError."""
        metadata = {"version": VERSION, "model": self.model, "phrases": json.dumps(self.phrases)}
        write_output(Path(path), save({"vectors": self.vectors}, metadata=metadata))

    @property
    def dimension(self) -> int:
        """Length D of a vector."""
        return int(self.vectors.shape[1])

    def __len__(self) -> int:
        return len(self.phrases)

    def __contains__(self, phrase: object) -> bool:
        try:
            return phrase_key(clean_phrase(phrase)) in self._rows
        except RequestError:
            return False

    def encode(self, phrases: Sequence[str]) -> Vectors:
        """Return vectors float32 [K, D] of unit length, one for each of K phrases, in order.

        Raises RequestError for a phrase that `clean_phrase` refuses. Raises UnknownPhraseError, which suggests similar
        phrases, for phrases that are not in the vocabulary.
        """
        # all phrases that are missing are named at once
        cleaned = [clean_phrase(phrase) for phrase in phrases]
        unknown = [phrase for phrase in cleaned if phrase_key(phrase) not in self._rows]
        if unknown:
            raise UnknownPhraseError(self._describe_unknown(unknown))
        return self.vectors[[self._rows[phrase_key(phrase)] for phrase in cleaned]]

    def extended(self, other: Vocabulary) -> Vocabulary:
        """Append the phrases that only `other` has. Raises VocabularyError unless both come from the same model."""
        check_phrase_encoder(other, self.dimension, self.model)
        new = [row for row, phrase in enumerate(other.phrases) if phrase not in self]
        phrases = (*self.phrases, *(other.phrases[row] for row in new))
        return Vocabulary(phrases, np.concatenate([self.vectors, other.vectors[new]]), self.model)

    def contrasts(self, phrase: str) -> tuple[list[int], list[int]]:
        """Return the rows of phrases close to `phrase`: the same thing with another look, and other things with its
        look.

        The look is the first word of several, "red" of "red mug"; another thing than "mug" is every single word. No
        phrase counts that may be true of the same object: its words are among the other's words, one of both is
        anything, or it has the same vector. Each list has the at most MAX_CONTRASTS rows with the nearest vectors, the
        nearest first.
        """
        words = phrase_key(phrase).split()
        vector = self.encode([phrase])[0]
        looks: list[int] = []
        things: list[int] = []
        for row, other in enumerate(self._words):
            # "red mug" may be true of a "mug"
            if set(other) <= set(words) or set(words) <= set(other):
                continue
            # "red mug" and "blue mug"; "red mug" and "red bowl", or "mug" and "bowl"
            if len(words) > 1 and other[1:] == words[1:]:
                looks.append(row)
            elif not {words[-1], other[-1]} & ANYTHING and (
                other[:1] == words[:1] or len(words) == len(other) == 1
            ):
                things.append(row)
        return self._nearest(looks, vector), self._nearest(things, vector)

    def _nearest(self, rows: list[int], vector: Vectors) -> list[int]:
        cosines = (self.vectors[rows] @ vector).tolist()
        ordered = sorted((-cosine, row) for cosine, row in zip(cosines, rows, strict=True) if cosine < SAME)
        return [row for _, row in ordered[:MAX_CONTRASTS]]

    def _describe_unknown(self, unknown: list[str]) -> str:
        return (
            f"not among the {len(self)} phrases of the vocabulary: {describe_unknown(unknown, self.phrases)}; choose "
            "one of them, or build a vocabulary with it: `sam3-node vocabulary build PHRASE … --encoder FOLDER -o FILE`"
        )


class VocabularyWithFallback:
    """A PhraseEncoder that uses a vocabulary first, and an encoder of the same model for all other phrases."""

    def __init__(self, vocabulary: Vocabulary, encoder: PhraseEncoder) -> None:
        """Raise VocabularyError unless both come from the same model."""
        check_phrase_encoder(encoder, vocabulary.dimension, vocabulary.model)
        self.vocabulary = vocabulary
        self._encoder = encoder
        self.model = vocabulary.model
        self.dimension = vocabulary.dimension

    def encode(self, phrases: Sequence[str]) -> Vectors:
        """Return vectors float32 [K, D] of unit length; see PhraseEncoder."""
        # both parts are encoded at once, and put back in the order of the phrases
        unknown = [index for index, phrase in enumerate(phrases) if phrase not in self.vocabulary]
        vectors = np.empty((len(phrases), self.dimension), np.float32)
        vectors[unknown] = self._encoder.encode([phrases[index] for index in unknown])
        listed = np.setdiff1d(np.arange(len(phrases)), unknown)
        vectors[listed] = self.vocabulary.encode([phrases[index] for index in listed])
        return vectors


def list_known(encoder: PhraseEncoder) -> KnownNames:
    """Return the phrases that an encoder lists, and whether it takes others."""
    if isinstance(encoder, Vocabulary):
        return KnownNames(encoder.phrases, False)
    if isinstance(encoder, VocabularyWithFallback):
        return KnownNames(encoder.vocabulary.phrases, True)
    return KnownNames((), True)


def find_contrasts(encoder: PhraseEncoder, phrases: Sequence[str]) -> Vectors:
    """Return vectors [K, 2, M, D] of the contrasts of K phrases, see `Vocabulary.contrasts`; NaN where there are fewer.

    Only phrases of a vocabulary have any.
    """
    vocabulary = encoder.vocabulary if isinstance(encoder, VocabularyWithFallback) else encoder
    if not isinstance(vocabulary, Vocabulary):
        return np.full((len(phrases), 2, 1, encoder.dimension), np.nan, np.float32)
    # rows of the vocabulary for each phrase: of another look, and of another thing
    found: list[tuple[list[int], list[int]]] = []
    most = 0
    for phrase in phrases:
        pair: tuple[list[int], list[int]] = ([], [])
        if phrase in vocabulary:
            pair = vocabulary.contrasts(phrase)
        found.append(pair)
        most = max(most, *map(len, pair))
    # one array for all, so that the comparison is one product
    vectors = np.full((len(phrases), 2, max(1, most), encoder.dimension), np.nan, np.float32)
    for index, pair in enumerate(found):
        for group, rows in enumerate(pair):
            vectors[index, group, : len(rows)] = vocabulary.vectors[rows]
    return vectors


def _clean(phrases: Sequence[object]) -> tuple[str, ...]:
    try:
        cleaned = tuple(map(clean_phrase, phrases))
    except RequestError as error:
        raise VocabularyError(f"vocabulary: {error}") from error
    # two spellings of one phrase would be two rows, of which a look-up finds one
    first: dict[str, str] = {}
    for phrase in cleaned:
        earlier = first.get(phrase_key(phrase))
        if earlier is not None:
            raise VocabularyError(
                f"vocabulary: expected each phrase once, found {quote_phrase(earlier)} and {quote_phrase(phrase)}"
            )
        first[phrase_key(phrase)] = phrase
    return cleaned


def _unit(vectors: Any, phrases: Sequence[object]) -> Vectors:
    # numbers that float32 does not hold become infinite, and are named below
    with np.errstate(over="ignore"):
        vectors = np.array(vectors, np.float32, order="C")
    if vectors.ndim != 2 or not vectors.size or len(vectors) != len(phrases):
        raise VocabularyError(
            f"vocabulary: expected a vector for each of {len(phrases)} phrases, at least one, found shape "
            f"{list(vectors.shape)}"
        )
    try:
        return normalise_rows(vectors)
    except ValueError as error:
        raise VocabularyError(
            f"vocabulary: expected finite vectors that are not zero, found that {error}"
        ) from error


def _read_vectors(file: Any) -> Vectors:
    if "vectors" not in file.keys():  # noqa: SIM118, not a mapping
        raise VocabularyError(
            f"expected a tensor 'vectors', found {', '.join(sorted(file.keys())[:5]) or 'none'}"
        )
    # read before the tensor: a file with another type may be of any size
    dtype = file.get_slice("vectors").get_dtype()
    if dtype != "F32":
        raise VocabularyError(f"expected vectors of dtype F32, found {dtype}")
    vectors: Vectors = file.get_tensor("vectors")
    return vectors


def _read_phrases(metadata: dict[str, str]) -> tuple[str, ...]:
    try:
        phrases = parse_json(metadata.get("phrases", ""))
    except ValueError:
        phrases = None
    if not isinstance(phrases, list):
        raise VocabularyError("expected a JSON list 'phrases' in the metadata, found none")
    return tuple(phrases)


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
    # the first source that has a phrase counts; the encoder is for the others
    origin: PhraseEncoder | None = joined or encoder
    if joined is not None and encoder is not None:
        origin = VocabularyWithFallback(joined, encoder)
    if origin is None or not phrases:
        missing = "no phrases" if origin else "neither"
        raise VocabularyError(
            "expected phrases and a text encoder (--encoder FOLDER), or vocabularies to take vectors from "
            f"(--from FILE), found {missing}"
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
    # vectors can be compared only with vectors of the same model
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
        # a map becomes a tuple of pairs, so that duplicate phrases are found; a list stays one
        pairs = json.loads(_read_text(path, what), object_pairs_hook=tuple)
        if not isinstance(pairs, tuple):
            raise ValueError(f"a {type(pairs).__name__}")
        vectors = np.array([row for _, row in pairs])
        if vectors.ndim != 2 or vectors.dtype.kind not in "fi":
            raise ValueError(f"values of dtype {vectors.dtype}, shape {list(vectors.shape)}")
    except (ValueError, RecursionError) as error:
        raise VocabularyError(f"{path}: expected {what}, found {error}") from error
    return tuple(phrase for phrase, _ in pairs), vectors


def _read_text(path: Path, what: str) -> str:
    try:
        return read_regular(path, MAX_TEXT_BYTES).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise VocabularyError(f"cannot read {path}: expected {what}; found {error}") from error
