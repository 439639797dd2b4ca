"""The words that name objects, and their vectors: a phrase's vector is the direction of the sum of its words'."""

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

ANYTHING = "object"  # the kind that every object is of
CLEAR = "clear"  # goes with a colour, as in "clear blue glass"
LONGEST = 3  # words of a phrase: two colours and a kind
MODEL = "sam3_node/nano"
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
    """Colours, if any, and a kind, which may be two words ("tape roll"). An object's name is one, too."""

    kind: str
    colours: tuple[str, ...] = ()

    @staticmethod
    def of(found: Mapping[str, Any]) -> Phrase:
        """From {kind, color} of a clip's metadata."""
        return Phrase(found["kind"], tuple(found["color"].split()))

    def __str__(self) -> str:
        return " ".join((*self.colours, self.kind))

    def describes(self, name: Phrase) -> bool:
        """Whether all that this phrase says is true of the object of that name."""
        return self.kind in (ANYTHING, name.kind) and set(self.colours) <= set(name.colours)


class Words:
    """Kinds and colours that have a number, from 1; 0 stands for no word. `kinds` ends with "object"."""

    def __init__(self, kinds: Iterable[str], colours: Iterable[str]) -> None:
        self.kinds = (*sorted(set(kinds) - {ANYTHING}), ANYTHING)
        self.colours = tuple(sorted(set(colours)))
        self._numbers = {word: i for i, word in enumerate((*self.kinds, *self.colours), start=1)}

    @staticmethod
    def of(names: Iterable[Phrase]) -> Words:
        """All that occur in the names of objects."""
        names = list(names)
        return Words((name.kind for name in names), (colour for name in names for colour in name.colours))

    def __len__(self) -> int:
        return len(self._numbers)

    def numbers(self, phrases: Sequence[Phrase]) -> npt.NDArray[np.int64]:
        """int64 [K, 3], the words of each of K phrases; raises KeyError for a word that has none."""
        rows = np.zeros((len(phrases), LONGEST), np.int64)
        for row, phrase in zip(rows, phrases, strict=True):
            found = [self._numbers[word] for word in (phrase.kind, *phrase.colours)]
            row[: len(found)] = found
        return rows

    def phrases(self) -> list[Phrase]:
        """Each kind alone, with each colour, and clear with each colour."""
        looks: list[tuple[str, ...]] = [(), *((colour,) for colour in self.colours)]
        if CLEAR in self.colours:
            looks += [(CLEAR, colour) for colour in self.colours if colour != CLEAR]
        return [Phrase(kind, look) for kind in self.kinds for look in looks]


class WordVectors(nn.Module):
    """A learnt vector for each word. Unseen combinations of known words have vectors, too."""

    def __init__(self, words: int, channels: int) -> None:
        super().__init__()
        self.table = nn.Embedding(words + 1, channels, padding_idx=0)
        with torch.no_grad():
            self.table.weight[1:].normal_(0, channels**-0.5)

    def forward(self, numbers: Tensor) -> Tensor:
        """Words int64 [..., n], 0 for none -> vectors [..., channels] of length 1."""
        return F.normalize(self.table(numbers).sum(dim=-2), dim=-1)


@torch.no_grad()
def vocabulary(words: Words, vectors: WordVectors) -> Vocabulary:
    """Vectors of all phrases, and of their synonyms."""
    known = words.phrases()
    named = {str(phrase): phrase for phrase in known}
    for synonym, kind in SYNONYMS.items():
        same = [phrase for phrase in known if phrase.kind == kind]
        named |= {str(Phrase(synonym, phrase.colours)): phrase for phrase in same}
    numbers = torch.from_numpy(words.numbers(list(named.values())))
    return Vocabulary(tuple(named), vectors(numbers).numpy(), MODEL)
