"""What is asked of a training picture: phrases that are true of its objects, and others that nearly are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .words import ANYTHING, CLEAR, Phrase, Words

LENGTHS = (2, 6, 12, 20, 32)  # phrases of a query
NONE_TRUE = 0.08  # share of queries that may not fit anything


def query(
    rng: np.random.Generator, words: Words, names: Sequence[Phrase], length: int, anything: bool = True
) -> list[Phrase]:
    """`length` phrases in random order, some of them given twice perhaps.

    names: of the objects in the picture. anything: whether "object" may be asked for.
    """
    phrases = [] if rng.random() < NONE_TRUE else _true(rng, names, anything)[: (length + 1) // 2]
    while len(phrases) < length:
        near = names[int(rng.integers(len(names)))] if names and rng.random() < 0.7 else None
        phrase = _random(rng, words) if near is None else _nearly(rng, words, near)
        if anything or phrase.kind != ANYTHING:
            phrases.append(phrase)
    return [phrases[i] for i in rng.permutation(length)]


def _true(rng: np.random.Generator, names: Sequence[Phrase], anything: bool) -> list[Phrase]:
    """Full names, bare kinds, and colours of anything."""
    found = {name for name in names if rng.random() < 0.7}
    found |= {Phrase(name.kind) for name in names if rng.random() < 0.5}
    if anything:
        found |= {Phrase(ANYTHING, name.colours) for name in names if rng.random() < 0.12}
        found |= {Phrase(ANYTHING)} if rng.random() < 0.15 else set()
    ordered = sorted(found, key=str)
    return [ordered[i] for i in rng.permutation(len(ordered))]


def _nearly(rng: np.random.Generator, words: Words, name: Phrase) -> Phrase:
    """The same kind in another colour, or another kind in the same colour."""
    if rng.random() < 0.5:
        return Phrase(name.kind, _look(rng, words))
    return Phrase(words.kinds[rng.integers(len(words.kinds))], name.colours)


def _random(rng: np.random.Generator, words: Words) -> Phrase:
    kind = words.kinds[rng.integers(len(words.kinds))]
    return Phrase(kind) if rng.random() < 0.5 else Phrase(kind, _look(rng, words))


def _look(rng: np.random.Generator, words: Words) -> tuple[str, ...]:
    """A colour, clear with it now and then."""
    colour = words.colours[rng.integers(len(words.colours))]
    mixed = CLEAR in words.colours and colour != CLEAR and rng.random() < 0.07
    return (CLEAR, colour) if mixed else (colour,)
