"""Phrases that name objects: cleaned, bounded, compared."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence

from ..errors import RequestError

MAX_PROMPTS = 256
MAX_CHARACTERS = 200
SHOWN = 40  # characters of a bad phrase in an error
SIMILAR = 0.3  # of trigrams in common, from where on a phrase is suggested: the default of pg_trgm


def clean_phrase(phrase: object) -> str:
    """The phrase in Unicode's form NFC, stripped, with single spaces inside.

    Raises RequestError unless it is text of 1 to MAX_CHARACTERS characters, none of them a control character.
    """
    if not isinstance(phrase, str):
        raise RequestError(f"phrase: expected text, found {type(phrase).__name__}")
    found = " ".join(unicodedata.normalize("NFC", phrase).split())
    if not found:
        raise RequestError('phrase: expected the name of an object such as "red mug", found an empty one')
    if len(found) > MAX_CHARACTERS:
        raise RequestError(
            f"phrase: expected at most {MAX_CHARACTERS} characters, found {len(found)}: {shown(found)}; "
            "name the object in a few words"
        )
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in found):
        raise RequestError(f"phrase: expected no control characters, found {shown(found)}")
    return found


def clean_prompts(prompts: Sequence[object]) -> tuple[str, ...]:
    """The prompts of a detector as `unique_phrases` gives them.

    Raises RequestError for more than MAX_PROMPTS, or for one that `clean_phrase` refuses.
    """
    if isinstance(prompts, str | bytes):
        raise RequestError(f"prompts: expected a list of phrases, found {type(prompts).__name__}")
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(f"prompts: expected at most {MAX_PROMPTS} phrases at once, found {len(prompts)}")
    return unique_phrases(prompts)


def unique_phrases(phrases: Iterable[object]) -> tuple[str, ...]:
    """The phrases cleaned; of those that differ by case or white space alone, the first."""
    first: dict[str, str] = {}
    for phrase in map(clean_phrase, phrases):
        first.setdefault(phrase_key(phrase), phrase)
    return tuple(first.values())


def phrase_key(phrase: str) -> str:
    """What is equal for cleaned phrases that mean the same."""
    return phrase.casefold()


def nearest_phrases(phrase: str, known: Iterable[str], count: int = 5) -> list[str]:
    """Up to `count` of the known phrases that are spelt most alike, the most similar first.

    Similarity is the share of common trigrams of words, as in PostgreSQL's pg_trgm.
    """
    wanted = _trigrams(phrase)
    scored = []
    for candidate in known:
        other = _trigrams(candidate)
        scored.append((len(wanted & other) / len(wanted | other), candidate))
    scored.sort(key=lambda pair: -pair[0])
    return [candidate for score, candidate in scored[:count] if score >= SIMILAR]


def shown(phrase: str) -> str:
    """A phrase for an error: quoted, escaped, shortened."""
    return repr(phrase) if len(phrase) <= SHOWN else f"{phrase[:SHOWN]!r}…"


def _trigrams(phrase: str) -> set[str]:
    padded = [f"  {word} " for word in phrase_key(phrase).split()]
    return {word[start : start + 3] for word in padded for start in range(len(word) - 2)}
