"""Clean, limit and compare phrases that name objects, and define phrase encoders, which turn them into vectors."""

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import RequestError, VocabularyError

MAX_PROMPTS = 256
"""Phrases that a detector looks for at once."""
MAX_CHARACTERS = 200
"""Characters of a phrase."""
MAX_LABEL_CHARACTERS = 256
"""Characters of a label, which may be more than a phrase: it is not encoded."""
MAX_QUOTED_CHARACTERS = 40
"""Characters of a phrase in an error message."""
JOINERS = "\u200c\u200d"
"""Invisible characters that some scripts need within a word."""
MAX_LISTED = 3
"""Unknown phrases that an error lists."""
MIN_SIMILARITY = 0.3
"""Share of common trigrams from which on a phrase is suggested: the default of pg_trgm."""
UNIT_TOLERANCE = 1e-6
"""Vectors with a norm this close to 1 stay as they are, bit for bit, when they are saved and loaded."""

Vectors = npt.NDArray[np.float32]


def clean_phrase(phrase: object, what: str = "phrase", max_characters: int = MAX_CHARACTERS) -> str:
    """Return the phrase in Unicode's form NFC, stripped, with single spaces inside.

    Raises RequestError, which names `what`, unless it is text of 1 to `max_characters` characters without control
    characters and invisible characters, such as marks that change the direction of writing.
    """
    if not isinstance(phrase, str):
        raise RequestError(f"{what}: expected text, found {type(phrase).__name__}")
    # composed letters and single spaces: one phrase has one spelling
    cleaned = " ".join(unicodedata.normalize("NFC", phrase).split())
    if not cleaned:
        raise RequestError(f'{what}: expected the name of an object such as "red mug", found an empty one')
    if len(cleaned) > max_characters:
        raise RequestError(
            f"{what}: expected at most {max_characters} characters, found {len(cleaned)}: {quote_phrase(cleaned)}; "
            "name the object in a few words"
        )
    # a label is printed in terminals and pages, where such characters would hide or reorder text
    if any(_is_control(character) for character in cleaned):
        raise RequestError(f"{what}: expected no control characters, found {quote_phrase(cleaned)}")
    return cleaned


def clean_label(label: str) -> str:
    """Return the label of an object as `clean_phrase` does; "object" for a blank one.

    Raises RequestError for more than MAX_LABEL_CHARACTERS characters, and for control characters.
    """
    if not label.strip():
        return "object"
    return clean_phrase(label, "label", MAX_LABEL_CHARACTERS)


def clean_prompts(prompts: Sequence[object]) -> tuple[str, ...]:
    """Clean the prompts of a detector and drop duplicates, as `unique_phrases` does.

    Raises RequestError for more than MAX_PROMPTS prompts, or for one that `clean_phrase` refuses.
    """
    # a text is also a sequence: its letters would be looked for
    if isinstance(prompts, str | bytes | Mapping):
        raise RequestError(f"prompts: expected a list of phrases, found {type(prompts).__name__}")
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(f"prompts: expected at most {MAX_PROMPTS} phrases at once, found {len(prompts)}")
    return unique_phrases(prompts)


def unique_phrases(phrases: Iterable[object]) -> tuple[str, ...]:
    """Clean the phrases. Of phrases that differ only by case or white space, keep the first."""
    first: dict[str, str] = {}
    for phrase in map(clean_phrase, phrases):
        first.setdefault(phrase_key(phrase), phrase)
    return tuple(first.values())


def phrase_key(phrase: str) -> str:
    """Return a key that is equal for cleaned phrases that differ only by case."""
    return phrase.casefold()


def nearest_phrases(phrase: str, known_phrases: Iterable[str], count: int = 5) -> list[str]:
    """Return up to `count` of `known_phrases` with the most similar spelling, the most similar first.

    Similarity is the share of common trigrams of words, as in PostgreSQL's pg_trgm.
    """
    trigrams = _trigrams(phrase)
    scored = []
    for candidate in known_phrases:
        other = _trigrams(candidate)
        scored.append((len(trigrams & other) / len(trigrams | other), candidate))
    # only the score is compared, so that phrases of equal score keep their order
    scored.sort(key=lambda pair: -pair[0])
    return [candidate for score, candidate in scored[:count] if score >= MIN_SIMILARITY]


def describe_unknown(unknown: Sequence[str], known: Iterable[str]) -> str:
    """Name phrases that are not known, a few of them, each with the known ones that are spelt like it."""
    known = tuple(known)
    descriptions = []
    for phrase in unknown[:MAX_LISTED]:
        nearest = ", ".join(map(quote_phrase, nearest_phrases(phrase, known)))
        descriptions.append(f"{quote_phrase(phrase)} (nearest: {nearest or 'none'})")
    more = f" and {len(unknown) - MAX_LISTED} more" if len(unknown) > MAX_LISTED else ""
    return f"{', '.join(descriptions)}{more}"


def quote_phrase(phrase: str) -> str:
    """Return a phrase for an error message: quoted, escaped and shortened."""
    if len(phrase) > MAX_QUOTED_CHARACTERS:
        return f"{phrase[:MAX_QUOTED_CHARACTERS]!r}…"
    return repr(phrase)


def check_token_counts(phrases: Sequence[str], counts: Sequence[int], limit: int) -> None:
    """Raise RequestError for a phrase of more than `limit` tokens."""
    if max(counts) > limit:
        longest = quote_phrase(phrases[counts.index(max(counts))])
        raise RequestError(
            f"phrase: expected at most {limit} tokens, found {max(counts)} in {longest}; name the object in a few words"
        )


def _is_control(character: str) -> bool:
    """Return True for control, surrogate and format characters; False for the joiners that some scripts need."""
    return unicodedata.category(character) in ("Cc", "Cf", "Cs") and character not in JOINERS


def _trigrams(phrase: str) -> set[str]:
    trigrams: set[str] = set()
    for word in phrase_key(phrase).split():
        # the beginning of a word counts more than its end
        padded = f"  {word} "
        trigrams.update(padded[start : start + 3] for start in range(len(padded) - 2))
    return trigrams


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
    # the dimension first: vectors of another length cannot even be compared
    if encoder.dimension != dimension:
        wanted = f" from {model}" if model else ""
        raise VocabularyError(
            f"expected phrase vectors of {dimension} numbers{wanted}, found "
            f"{encoder.dimension} from {encoder.model}; use a vocabulary or text encoder of the detector's model"
        )
    # vectors of the same length from another model mean something else
    if model is not None and _last_part(model) != _last_part(encoder.model):
        raise VocabularyError(
            f"expected phrase vectors from {model}, found vectors from {encoder.model}; use a vocabulary or text "
            "encoder of that model, or name the model with --model when building, if it is the same"
        )


def normalise_rows(vectors: Any) -> Vectors:
    """Scale the rows of vectors [N, D] to unit length. Raises ValueError for a row that is zero or not finite."""
    vectors = np.asarray(vectors)
    # in float64: the squares of large float32 numbers would overflow
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
