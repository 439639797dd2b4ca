"""Queries for a training picture: phrases that are true of its objects, and others that are nearly true."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .words import ANYTHING, CLEAR, Phrase, Words

LENGTHS = (2, 6, 12, 20, 32)  # phrases of a query
NONE_TRUE = 0.08  # share of queries that may not fit anything


def query(
    rng: np.random.Generator, words: Words, names: Sequence[Phrase], length: int, anything: bool = True
) -> list[Phrase]:
    """Return `length` phrases in random order; a phrase may occur twice.

    names: those of the objects in the picture. anything: True if "object" may occur.
    """
    phrases = [] if rng.random() < NONE_TRUE else _true(rng, names, anything)[: (length + 1) // 2]
    while len(phrases) < length:
        near = names[int(rng.integers(len(names)))] if names and rng.random() < 0.7 else None
        phrase = _random(rng, words) if near is None else _nearly(rng, words, near)
        if anything or phrase.kind != ANYTHING:
            phrases.append(phrase)
    return [phrases[i] for i in rng.permutation(length)]


def _true(rng: np.random.Generator, names: Sequence[Phrase], anything: bool) -> list[Phrase]:
    """Return full names, bare kinds, and colours of anything."""
    named = [name for name in names if not name.nameless]
    phrases = {name for name in named if rng.random() < 0.7}
    phrases |= {Phrase(name.kind) for name in named if rng.random() < 0.5}
    if anything:
        phrases |= {Phrase(ANYTHING, name.colours) for name in names if rng.random() < 0.12}
        phrases |= {Phrase(ANYTHING)} if rng.random() < 0.15 else set()
    ordered = sorted(phrases, key=str)
    return [ordered[i] for i in rng.permutation(len(ordered))]


def _nearly(rng: np.random.Generator, words: Words, name: Phrase) -> Phrase:
    """Return the same kind in another colour, or another kind in the same colour; of a nameless solid any kind."""
    if name.nameless and rng.random() < 0.5:
        return Phrase(words.kinds[rng.integers(len(words.kinds))])
    if not name.nameless and rng.random() < 0.5:
        return Phrase(name.kind, _look(rng, words))
    return Phrase(words.kinds[rng.integers(len(words.kinds))], name.colours)


def _random(rng: np.random.Generator, words: Words) -> Phrase:
    kind = words.kinds[rng.integers(len(words.kinds))]
    return Phrase(kind) if rng.random() < 0.5 else Phrase(kind, _look(rng, words))


def _look(rng: np.random.Generator, words: Words) -> tuple[str, ...]:
    """Return a colour, sometimes with "clear"."""
    colour = words.colours[rng.integers(len(words.colours))]
    mixed = CLEAR in words.colours and colour != CLEAR and rng.random() < 0.07
    return (CLEAR, colour) if mixed else (colour,)
