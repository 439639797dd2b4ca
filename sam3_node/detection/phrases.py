"""Phrases that name objects: clean them, limit them and compare them."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence

from ..errors import RequestError

MAX_PROMPTS = 256
MAX_CHARACTERS = 200
MAX_LABEL_CHARACTERS = 256
MAX_QUOTED_CHARACTERS = 40  # of a phrase in an error message
JOINERS = "\u200c\u200d"
MIN_SIMILARITY = 0.3  # share of common trigrams at which a phrase is suggested: the default of pg_trgm


def clean_phrase(phrase: object, what: str = "phrase", max_characters: int = MAX_CHARACTERS) -> str:
    """Return the phrase in Unicode's form NFC, stripped, with single spaces inside.

    Raises RequestError, which names `what`, unless it is text of 1 to `max_characters` characters without control
    characters and invisible characters, such as those that change the direction of writing.
    """
    if not isinstance(phrase, str):
        raise RequestError(f"{what}: expected text, found {type(phrase).__name__}")
    cleaned = " ".join(unicodedata.normalize("NFC", phrase).split())
    if not cleaned:
        raise RequestError(f'{what}: expected the name of an object such as "red mug", found an empty one')
    if len(cleaned) > max_characters:
        raise RequestError(
            f"{what}: expected at most {max_characters} characters, found {len(cleaned)}: {quote_phrase(cleaned)}; "
            "name the object in a few words"
        )
    if any(_is_control(character) for character in cleaned):
        raise RequestError(f"{what}: expected no control characters, found {quote_phrase(cleaned)}")
    return cleaned


def clean_label(label: str) -> str:
    """Return the label of an object as `clean_phrase` does; "object" for a blank one.

    Raises RequestError for more than MAX_LABEL_CHARACTERS characters, and for control characters.
    """
    return clean_phrase(label, "label", MAX_LABEL_CHARACTERS) if label.strip() else "object"


def clean_prompts(prompts: Sequence[object]) -> tuple[str, ...]:
    """Clean the prompts of a detector and drop duplicates, as `unique_phrases` does.

    Raises RequestError for more than MAX_PROMPTS prompts, or for one that `clean_phrase` refuses.
    """
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
    scored.sort(key=lambda pair: -pair[0])
    return [candidate for score, candidate in scored[:count] if score >= MIN_SIMILARITY]


def quote_phrase(phrase: str) -> str:
    """Return a phrase for an error message: quoted, escaped and shortened."""
    return repr(phrase) if len(phrase) <= MAX_QUOTED_CHARACTERS else f"{phrase[:MAX_QUOTED_CHARACTERS]!r}…"


def _is_control(character: str) -> bool:
    """Return True for control, surrogate and format characters; the joiners that some scripts need are none."""
    return unicodedata.category(character) in ("Cc", "Cf", "Cs") and character not in JOINERS


def _trigrams(phrase: str) -> set[str]:
    padded = [f"  {word} " for word in phrase_key(phrase).split()]
    return {word[start : start + 3] for word in padded for start in range(len(word) - 2)}
