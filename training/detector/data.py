"""Training pictures: frames of rendered clips with boxes from their labels, and phrases to look for.

A frame is placed on the detector's canvas; its hues stay, because colours are names. Some phrases of a query are true
of its objects, others nearly true.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sam3_node.errors import CameraError
from sam3_node.types import Image
from tools.scenes.clips import Clip, list_clips, read_clip
from training.nano.augment import Lens, Sprite, compose
from training.nano.loop import Batches

from .network import ANYTHING, CLEAR, Phrase, Words

BESIDE = 0.3  # share of pictures from the clips beside
DISTRACTED = 0.2  # share of pictures with cut-outs that have no name
# of an object on the canvas; what shows less is a sliver
MIN_PIXELS = 40
MIN_SIDE = 6
SIZE = (256, 320)  # height and width of the canvas, pixels
GREY = 114  # around the picture, as the package pads frames
SCALE = (0.7, 1.7)  # of the picture that fits the canvas
TURN = 5.0  # degrees, standard deviation
Labels = npt.NDArray[np.uint8]
LENGTHS = (2, 6, 12, 20, 32)  # phrases of a query
NONE_TRUE = 0.08  # share of queries that may not fit anything


class Batch(NamedTuple):
    """B pictures with at most G objects, K phrases for each.

    images uint8 [B, 256, 320, 3] RGB · boxes float32 [B, G, 4], x0 y0 x1 y1 in pixels, zeros where there are fewer
    · words int64 [B, K, 3] · fits bool [B, G, K], whether a phrase describes an object.
    """

    images: Tensor
    boxes: Tensor
    words: Tensor
    fits: Tensor


class Picture(NamedTuple):
    """An RGB canvas, the objects on it and their boxes float32 [G, 4]; `plain` without cut-outs."""

    image: Image
    names: list[Phrase]
    boxes: npt.NDArray[np.float32]
    plain: bool


class Scenes:
    """Clips of a folder, and the words that name their objects. Raises CameraError if there are no such clips.

    beside: a folder of further clips, such as solids without a name, for BESIDE of the pictures.
    """

    def __init__(self, folder: Path, sprites: Sequence[Sprite] = (), beside: Path | None = None) -> None:
        self._sprites = list(sprites)
        self._clips = [list_folder(each) for each in (folder, beside) if each is not None]
        every = (read_names(read_clip(*clip)) for clips in self._clips for clip in clips)
        self.words = Words.from_names(name for names in every for name in names.values())

    def draw(self, rng: np.random.Generator) -> Picture:
        """Return any frame, augmented, sometimes with cut-outs over it."""
        clips = self._clips[-1] if rng.random() < BESIDE else self._clips[0]
        clip = read_clip(*clips[int(rng.integers(len(clips)))])
        frame = int(rng.integers(len(clip)))
        image = clip.image(frame)
        labels = clip.labels(frame)
        shown = set(np.unique(labels).tolist())
        names = {number: name for number, name in read_names(clip).items() if number in shown}
        distracted = bool(self._sprites) and rng.random() < DISTRACTED
        if distracted:  # a cut-out's number may belong to an object out of view
            some = [self._sprites[i] for i in rng.integers(len(self._sprites), size=6)]
            (image,), (labels,) = compose(rng, [image], [labels], some)
        augmentation = Augmentation.draw(rng, labels.shape)
        box_by_number = compute_boxes(augmentation.labels(labels), names)
        boxes = np.array(list(box_by_number.values()), np.float32).reshape(-1, 4)
        shown_names = [names[number] for number in box_by_number]
        return Picture(augmentation.image(image), shown_names, boxes, not distracted)


def list_folder(folder: Path) -> list[tuple[Path, str]]:
    """List the clips of a folder; raise CameraError where there are none."""
    names = list_clips(folder)
    if not names:
        raise CameraError(f"expected clips in {folder}, found none: render some, python -m tools.scenes")
    return [(folder, name) for name in names]


def read_names(clip: Clip) -> dict[int, Phrase]:
    """Read the names of a clip's objects by their number in the labels; raise CameraError if they are missing."""
    try:
        return {int(entry["id"]): Phrase.from_metadata(entry) for entry in clip.meta["objects"]}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CameraError(
            f"clip {clip.name}: expected objects with id, kind and color, found none: {error}; "
            "render the clips again, python -m tools.scenes"
        ) from error


def compute_boxes(
    labels: Labels, numbers: Mapping[int, Phrase], scale: float = 1.0
) -> dict[int, tuple[float, float, float, float]]:
    """Compute boxes x0 y0 x1 y1 around the visible part of each object that shows more than a sliver.

    scale: pixels of the labels for one of the canvas.
    """
    boxes = {}
    for number in numbers:
        mask = (labels == number).view(np.uint8)
        x, y, width, height = cv2.boundingRect(mask)
        enough = cv2.countNonZero(mask) >= MIN_PIXELS * scale**2
        if enough and min(width, height) >= MIN_SIDE * scale:
            boxes[number] = (float(x), float(y), float(x + width), float(y + height))
    return boxes


class Pictures(Batches):
    """Batches of pictures."""

    def __init__(self, scenes: Scenes, words: Words, count: int, seed: Sequence[int]) -> None:
        super().__init__(*seed)
        self._scenes = scenes
        self._words = words
        self._count = count

    def batch(self, rng: np.random.Generator) -> Batch:
        """Draw pictures and the same number of phrases for each."""
        pictures = [self._scenes.draw(rng) for _ in range(self._count)]
        length = int(rng.choice(LENGTHS))
        queries = [query(rng, self._words, p.names, length, p.plain) for p in pictures]
        return collate(pictures, queries, self._words)


def collate(pictures: Sequence[Picture], queries: Sequence[Sequence[Phrase]], words: Words) -> Batch:
    """Join pictures with the same number of phrases into one batch."""
    max_objects = max(1, *(len(picture.names) for picture in pictures))
    boxes = np.zeros((len(pictures), max_objects, 4), np.float32)
    fits = np.zeros((len(pictures), max_objects, len(queries[0])), np.bool_)
    for i, (picture, phrases) in enumerate(zip(pictures, queries, strict=True)):
        boxes[i, : len(picture.boxes)] = picture.boxes
        for j, name in enumerate(picture.names):
            fits[i, j] = [phrase.describes(name) for phrase in phrases]
    images = np.stack([picture.image for picture in pictures])
    numbers = np.stack([words.numbers(phrases) for phrases in queries])
    return Batch(*map(torch.from_numpy, (images, boxes, numbers, fits)))


@dataclass(frozen=True)
class Augmentation:
    """An affine map [2, 3] from a frame's pixels to the canvas, and a lens."""

    affine: npt.NDArray[np.float64]
    lens: Lens

    @staticmethod
    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> Augmentation:
        """Draw an augmentation for pictures of shape (height, width)."""
        return Augmentation(_affine(rng, shape[0], shape[1]), Lens.draw(rng, _tone(rng)))

    def image(self, image: Image) -> Image:
        """Convert BGR uint8 [h, w, 3] to RGB uint8 [256, 320, 3]."""
        toned = cv2.LUT(image, self.lens.table)
        around = (GREY,) * 3
        canvas = cv2.warpAffine(toned, self.affine, SIZE[::-1], flags=cv2.INTER_LINEAR, borderValue=around)
        return self.lens.blur_and_noise(canvas)

    def labels(self, labels: Labels) -> Labels:
        """Convert uint8 [h, w] to [256, 320], with 0 around the picture."""
        return cv2.warpAffine(labels, self.affine, SIZE[::-1], flags=cv2.INTER_NEAREST)


def _affine(rng: np.random.Generator, height: int, width: int) -> npt.NDArray[np.float64]:
    scale = min(SIZE[0] / height, SIZE[1] / width)
    if rng.random() < 0.8:
        scale *= np.exp(rng.uniform(*np.log(SCALE)))
    angle = np.radians(rng.normal(0, TURN)) if rng.random() < 0.5 else 0.0
    turn = scale * np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    if rng.random() < 0.5:
        turn[:, 0] *= -1
    slack = np.array(SIZE[::-1]) - scale * np.array([width, height])
    centre = np.array(SIZE[::-1]) / 2 + rng.uniform(-0.5, 0.5, 2) * slack
    return np.hstack([turn, (centre - turn @ [width / 2, height / 2])[:, None]])


def _tone(rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Return gamma, contrast, brightness and slight white balance as one table [1, 256, 3]."""
    value = np.linspace(0, 1, 256)[:, None] ** np.exp(rng.uniform(-0.25, 0.25))
    value = (value - 0.5) * rng.uniform(0.8, 1.2) + 0.5 + rng.uniform(-0.06, 0.06)
    value = value * rng.uniform(0.96, 1.04, 3)
    return np.clip(value * 255, 0, 255).astype(np.uint8)[None]


def query(
    rng: np.random.Generator, words: Words, names: Sequence[Phrase], length: int, anything: bool = True
) -> list[Phrase]:
    """Return `length` phrases in random order; a phrase may occur twice.

    names: of the objects in the picture. anything: True if "object" may occur.
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
