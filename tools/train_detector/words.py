"""Words that name objects, and their vectors; a phrase's vector is the direction of the sum of its words' vectors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sam3_node.detection.vocabulary import Vocabulary
from tools.scenes.nameless import MAKERS as NAMELESS

ANYTHING = "object"  # the kind of every object
CLEAR = "clear"  # goes with a colour, as in "clear blue glass"
MAX_WORDS = 3  # words of a phrase: two colours and a kind
MODEL = "sam3_node/nano"
ROUNDS = 100  # of the recovery of words
SYNONYMS = {
    "flashlight": "torch",
    "tin": "can",
    "remote control": "remote",
    "smartphone": "phone",
    "roll of tape": "tape roll",
    "cube": "block",
    "felt pen": "marker",
    "frying pan": "pan",
    "dish": "plate",
}


@dataclass(frozen=True)
class Phrase:
    """Colours, if any, and a kind, which may be two words ("tape roll"). An object's name is a phrase too."""

    kind: str
    colours: tuple[str, ...] = ()

    @staticmethod
    def from_metadata(entry: Mapping[str, Any]) -> Phrase:
        """Read {kind, color} of an object in a clip's metadata."""
        return Phrase(entry["kind"], tuple(entry["color"].split()))

    def __str__(self) -> str:
        return " ".join((*self.colours, self.kind))

    @property
    def nameless(self) -> bool:
        """True for the name of a solid that only "object" and its colours describe."""
        return self.kind in NAMELESS

    def describes(self, name: Phrase) -> bool:
        """Return True if all words of this phrase are true of the object with that name."""
        return self.kind in (ANYTHING, name.kind) and set(self.colours) <= set(name.colours)


class Words:
    """Kinds and colours that have a number, from 1; 0 stands for no word. `kinds` ends with "object".

    The kinds of solids without a name have none.
    """

    def __init__(self, kinds: Iterable[str], colours: Iterable[str]) -> None:
        self.kinds = (*sorted(set(kinds) - {ANYTHING} - NAMELESS.keys()), ANYTHING)
        self.colours = tuple(sorted(set(colours)))
        self._numbers = {word: i for i, word in enumerate((*self.kinds, *self.colours), start=1)}

    @staticmethod
    def from_names(names: Iterable[Phrase]) -> Words:
        """Collect all kinds and colours in the names of objects."""
        names = list(names)
        return Words((name.kind for name in names), (colour for name in names for colour in name.colours))

    def __len__(self) -> int:
        return len(self._numbers)

    def numbers(self, phrases: Sequence[Phrase]) -> npt.NDArray[np.int64]:
        """Return the words of K phrases, int64 [K, 3]; raise KeyError for a word without a number."""
        rows = np.zeros((len(phrases), MAX_WORDS), np.int64)
        for row, phrase in zip(rows, phrases, strict=True):
            numbers = [self._numbers[word] for word in (phrase.kind, *phrase.colours)]
            row[: len(numbers)] = numbers
        return rows

    def phrases(self) -> list[Phrase]:
        """Return each kind alone and with each colour, and with clear and each colour."""
        looks: list[tuple[str, ...]] = [(), *((colour,) for colour in self.colours)]
        if CLEAR in self.colours:
            looks += [(CLEAR, colour) for colour in self.colours if colour != CLEAR]
        return [Phrase(kind, look) for kind in self.kinds for look in looks]


class WordVectors(nn.Module):
    """A learnt vector for each word. New combinations of these words have vectors too."""

    def __init__(self, words: int, channels: int) -> None:
        super().__init__()
        self.table = nn.Embedding(words + 1, channels, padding_idx=0)
        with torch.no_grad():
            self.table.weight[1:].normal_(0, channels**-0.5)

    def forward(self, numbers: Tensor) -> Tensor:
        """Convert words int64 [..., n], 0 for no word, to vectors [..., channels] of length 1."""
        return F.normalize(self.table(numbers).sum(dim=-2), dim=-1)


@torch.no_grad()
def recover_words(words: Words, vocabulary: Vocabulary, vectors: WordVectors) -> None:
    """Set the vectors of words to those that `vocabulary` was made of, up to a common length.

    Words that the vocabulary lacks keep theirs. A phrase's vector is the direction of the sum of its words' vectors:
    its length and the words' vectors are found in turns, by least squares.
    """
    known = [phrase for phrase in words.phrases() if str(phrase) in vocabulary]
    numbers = words.numbers(known)
    counts = np.stack([np.bincount(row, minlength=len(words) + 1) for row in numbers])[:, 1:].astype(
        np.float64
    )
    found = np.flatnonzero(counts.any(axis=0))
    solve = np.linalg.pinv(counts[:, found])
    directions = vocabulary.encode([str(phrase) for phrase in known]).astype(np.float64)
    lengths = np.ones((len(known), 1))
    for _ in range(ROUNDS):
        table = solve @ (lengths * directions)
        lengths = np.linalg.norm(counts[:, found] @ table, axis=1, keepdims=True)
        lengths /= lengths.mean()
    vectors.table.weight[1 + torch.from_numpy(found)] = torch.from_numpy(table).float()


@torch.no_grad()
def vocabulary(words: Words, vectors: WordVectors) -> Vocabulary:
    """Return the vectors of all phrases and of their synonyms."""
    phrases = words.phrases()
    named = {str(phrase): phrase for phrase in phrases}
    for synonym, kind in SYNONYMS.items():
        same = [phrase for phrase in phrases if phrase.kind == kind]
        named |= {str(Phrase(synonym, phrase.colours)): phrase for phrase in same}
    numbers = torch.from_numpy(words.numbers(list(named.values())))
    return Vocabulary(tuple(named), vectors(numbers).numpy(), MODEL)
