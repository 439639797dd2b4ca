"""Training pictures: frames of rendered clips with boxes from their labels, and phrases to look for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from sam3_node.errors import CameraError
from tools.scenes.clips import Clip, list_clips, read_clip
from tools.train_nano.compose import compose
from tools.train_nano.cutouts import Sprite

from .augmentation import Augmentation, Image, Labels
from .queries import LENGTHS, query
from .words import Phrase, Words

BESIDE = 0.3  # share of pictures from the clips beside
DISTRACTED = 0.2  # share of pictures with cut-outs that have no name
MIN_PIXELS, MIN_SIDE = 40, 6  # of an object on the canvas; what shows less is a sliver


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

    beside: a folder of further clips, such as those of solids without a name, for BESIDE of the pictures.
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
        image, labels = clip.image(frame), clip.labels(frame)
        shown = set(np.unique(labels).tolist())
        names = {number: name for number, name in read_names(clip).items() if number in shown}
        distracted = bool(self._sprites) and rng.random() < DISTRACTED
        if distracted:  # a cut-out's number may be that of an object out of view
            some = [self._sprites[i] for i in rng.integers(len(self._sprites), size=6)]
            (image,), (labels,) = compose(rng, [image], [labels], some)
        augmentation = Augmentation.draw(rng, labels.shape)
        box_by_number = compute_boxes(augmentation.labels(labels), names)
        boxes = np.array(list(box_by_number.values()), np.float32).reshape(-1, 4)
        return Picture(
            augmentation.image(image), [names[number] for number in box_by_number], boxes, not distracted
        )


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


class Pictures(IterableDataset[Batch]):
    """An endless stream of batches; each worker draws its own."""

    def __init__(self, scenes: Scenes, words: Words, count: int, seed: Sequence[int]) -> None:
        self._scenes, self._words, self._count, self._seed = scenes, words, count, seed

    def __iter__(self) -> Iterator[Batch]:
        cv2.setNumThreads(0)
        info = torch.utils.data.get_worker_info()
        rng = np.random.default_rng([*self._seed, info.id if info else 0])
        while True:
            yield self.batch(rng)

    def batch(self, rng: np.random.Generator) -> Batch:
        """Draw pictures and the same number of phrases for each."""
        pictures = [self._scenes.draw(rng) for _ in range(self._count)]
        length = int(rng.choice(LENGTHS))
        return collate(
            pictures, [query(rng, self._words, p.names, length, p.plain) for p in pictures], self._words
        )


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
