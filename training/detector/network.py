"""The nano detector: its words and their vectors, its shape, its initial weights, and its export.

A phrase is a kind with colours. Its vector is the direction of the sum of its words' vectors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sam3_node.detection.detectors import VOCABULARY
from sam3_node.detection.vocabulary import Vocabulary
from sam3_node.errors import ModelError
from sam3_node.models.yolo import network
from tools.scenes.nameless import MAKERS as NAMELESS
from training.nano.export import read_checkpoint

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
# of similarities at the start: the logarithm of their scale, and the logit of an unlikely one
SCALE = 0.5
RARE = -6.0
MAX_BYTES = 10_000_000


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
    rows = [np.bincount(row, minlength=len(words) + 1)[1:] for row in numbers]
    counts = np.stack(rows).astype(np.float64)
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


class LearntDetector(nn.Module):
    """A YoloWorld and the vectors of its words."""

    def __init__(self, words: Words, config: network.YoloWorldConfig = network.SCALES["nano"]) -> None:
        super().__init__()
        self.net = network.YoloWorld(config).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.vectors = WordVectors(len(words), config.text_channels)
        with torch.no_grad():
            for head in self.net.heads:
                head.contrast.logit_scale.fill_(SCALE)
                head.contrast.bias.fill_(RARE)

    def forward(self, images: Tensor, numbers: Tensor) -> network.Predictions:
        """Predict from RGB uint8 [B, H, W, 3] and words int64 [B, K, 3]."""
        pixels = images.permute(0, 3, 1, 2).float() / 255  # channels last as it comes
        return self.net.predict(pixels, self.vectors(numbers))


def begin_from(detector: LearntDetector, words: Words, folder: Path) -> None:
    """Take the weights that were exported to a folder, and the words that its vocabulary was made of."""
    detector.net.load_state_dict(network.load_yolo_world(folder, dtype="float32").state_dict())
    recover_words(words, Vocabulary.load(folder / VOCABULARY), detector.vectors)


def export(checkpoints: Sequence[Path], folder: Path, start: Path | None = None) -> Path:
    """Export the mean of training checkpoints for `load_detector("yolo-world", folder)`; return the weights' path.

    start: a folder of weights that the training began from; then the weights halfway between it and the mean are
    exported. Raises ModelError where a checkpoint is missing, damaged, or of other words than the first.
    """
    words, detector = _read(checkpoints[0])
    for i, checkpoint in enumerate(checkpoints[1:], start=1):
        other_words, other = _read(checkpoint)
        if (other_words.kinds, other_words.colours) != (words.kinds, words.colours):
            raise ModelError(f"{checkpoint}: expected the words of {checkpoints[0]}, found others")
        _go_towards(detector, other, 1 / (i + 1))
    if start is not None:
        begun = LearntDetector(words)
        begin_from(begun, words, start)
        _go_towards(detector, begun, 0.5)
    network.save_yolo_world(detector.net.half(), folder)
    vocabulary(words, detector.vectors).save(folder / VOCABULARY)
    path = folder / network.WEIGHTS
    if path.stat().st_size > MAX_BYTES:
        raise ModelError(f"{path} holds {path.stat().st_size} bytes, expected at most {MAX_BYTES}")
    return path


def _read(checkpoint: Path) -> tuple[Words, LearntDetector]:
    """Return the words of a checkpoint, and the running average of its weights."""
    held = read_checkpoint(checkpoint, by="training.detector")
    words = Words(held["kinds"], held["colours"])
    detector = LearntDetector(words)
    detector.load_state_dict(held["average"])
    return words, detector


@torch.no_grad()
def _go_towards(detector: LearntDetector, other: LearntDetector, share: float) -> None:
    """Move weights and words by a share of the way to another detector's."""
    for own, theirs in zip(detector.state_dict().values(), other.state_dict().values(), strict=True):
        if own.is_floating_point():
            own.lerp_(theirs, share)
