"""Train on pictures that a teacher has labelled: single frames, and clips of a camera that moves over one.

The pictures lie in shards of some dozens, which are written one after the other and read as they come. A shard is an
.npz file: `names` [n], `jpegs` and `masks` (zlib of packed bits), each as bytes one after the other with their ends,
and the masks' `scores` with theirs. A run that is killed leaves whole shards.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import numpy.typing as npt

from sam3_node.errors import CameraError
from sam3_node.types import Image

from .augment import SMALLEST, Augmentation, Sample, Sprite, coverage, cut_out

Labels = npt.NDArray[np.uint8]  # [h, w]
Bools = npt.NDArray[np.bool_]
Shift = npt.NDArray[np.float32]  # px [h, w, 2]

COARSE = 4  # px by which masks are thinned out to compare them
# a part: so much of it in another, that is so much larger, and no scene
WITHIN = 0.9
LARGER = 1.3
SCENE = 0.4
PART = 0.05  # how often a part is drawn, against a whole
MOST_IDS = 6  # objects of a clip
JOINED = 0.5  # share of these that are seen as one with a neighbour, as an animal's body with its head
LARGEST = 0.4  # share of the picture that both may cover
REACH = 5  # px between neighbours
OVERLAP = 0.1  # of an object's area that another of the clip may cover
WINDOW = (0.45, 0.95)  # of a picture's sides: what the moving camera sees of it
TURN = 0.2  # radians
BENT = 0.5  # share of clips in which all that is seen deforms
BEND = 0.03  # standard deviation of the shift, in longer sides of the picture
KNOTS = 5  # along each side, between which the shift is smooth
SIDE = 256  # of masks
QUALITY = 92


class TaughtPictures:
    """The pictures of a folder of shards, kept compressed; raises CameraError where there are none.

    A collection is drawn from by the square root of its size, so that a large one does not drown the others.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known = 0
        self._collections: dict[str, list[Taught]] = {}
        self.look_again()
        if not self._collections:
            raise CameraError(
                f"expected taught pictures in {folder}, found none: python -m training.nano teach"
            )

    def __len__(self) -> int:
        return sum(map(len, self._collections.values()))

    def look_again(self) -> None:
        """Read the shards that were written since."""
        paths = list_shards(self._folder)
        for picture in read_all(paths[self._known :]):
            self._collections.setdefault(picture.collection, []).append(picture)
        self._known = len(paths)

    def frame(self, rng: np.random.Generator, most: int) -> Sample | None:
        """Up to `most` objects of one picture, which may cover one another; None where too little is left of them."""
        picture = self._draw(rng)
        image = picture.image()
        masks = picture.masks()
        fitted = np.stack([fit(masks[i], image) for i in choose(rng, masks, 2 * most)])
        augment = Augmentation.draw(rng, image.shape, fitted[:most] > 0)
        seen = [augment.labels(mask) > 0 for mask in fitted]
        seen = [mask for mask in seen if np.count_nonzero(mask) >= SMALLEST][:most]
        if not seen:
            return None
        first = np.stack(seen)
        return augment.image(image)[None], first, np.stack([coverage(mask)[None] for mask in first])

    def clip(self, rng: np.random.Generator, frames: int) -> tuple[list[Image], list[Labels]]:
        """A camera that moves over one picture."""
        picture = self._draw(rng)
        image = picture.image()
        masks = picture.masks()
        labels = join(rng, draw_labels(rng, image, masks, MOST_IDS))
        path = camera_path(rng, image.shape[:2], frames)
        bend = bending(rng, image.shape[:2], frames) if rng.random() < BENT else [None] * frames
        views = [see(*moved, image, labels) for moved in zip(path, bend, strict=True)]
        return [view[0] for view in views], [view[1] for view in views]

    def sprites(self, rng: np.random.Generator, count: int) -> list[Sprite]:
        """Cut-outs of wholes of other pictures; sometimes fewer."""
        found = []
        for _ in range(count):
            picture = self._draw(rng)
            image = picture.image()
            masks = picture.masks()
            index = choose(rng, masks, 1)[0]
            if 0.005 < masks[index].mean() < 0.2:
                found.append(cut_out(image, fit(masks[index], image) > 0))
        return [sprite for sprite in found if sprite is not None]

    def _draw(self, rng: np.random.Generator) -> Taught:
        collections = list(self._collections.values())
        weight = np.sqrt([len(pictures) for pictures in collections])
        pictures = collections[int(rng.choice(len(collections), p=weight / weight.sum()))]
        return pictures[int(rng.integers(len(pictures)))]


def draw_labels(rng: np.random.Generator, image: Image, masks: Bools, most: int) -> Labels:
    """Return labels [h, w] of up to `most` of an image's masks [N, 256, 256] that lie apart."""
    labels = np.zeros(image.shape[:2], np.uint8)
    for number, index in enumerate(apart(masks, choose(rng, masks, 3 * most))[:most]):
        labels[(fit(masks[index], image) > 0) & (labels == 0)] = number + 1
    return labels


def choose(rng: np.random.Generator, masks: Bools, most: int) -> npt.NDArray[np.int64]:
    """Up to `most` of masks [N, h, w] by their index, in random order, wholes more often than parts."""
    weight = np.where(parts(masks), PART, 1.0)
    count = min(most, len(masks))
    return rng.choice(len(masks), size=count, replace=False, p=weight / weight.sum())


def parts(masks: Bools) -> Bools:
    """Return which masks of [N, h, w] lie within another mask that is not the whole scene, bool [N]."""
    shared, area = _shared(masks)
    within = shared >= WITHIN * area[:, None]
    larger = area[None] >= LARGER * area[:, None]
    no_scene = area[None] <= SCENE * (masks.shape[1] // COARSE) * (masks.shape[2] // COARSE)
    return np.asarray((within & larger & no_scene).any(axis=1))


def apart(masks: Bools, order: npt.NDArray[np.int64]) -> list[int]:
    """Those of masks [N, h, w], in an order of indices, that hardly overlap with one before."""
    shared, area = _shared(masks)
    kept: list[int] = []
    for index in order.tolist():
        least = np.minimum(area[index], area[kept])
        if (shared[index, kept] <= OVERLAP * least).all():
            kept.append(index)
    return kept


def join(rng: np.random.Generator, labels: Labels, often: float = JOINED) -> Labels:
    """Return labels [h, w] in which some objects, a share `often` of those that have one, have a neighbour's id.

    Masks of a teacher are of one colour or one texture more often than things are.
    """
    reach = np.ones((2 * REACH + 1, 2 * REACH + 1), np.uint8)
    for number in np.unique(labels)[1:]:
        mask = labels == number
        if rng.random() >= often or not mask.any():
            continue
        near = np.unique(labels[cv2.dilate(mask.astype(np.uint8), reach) > 0])
        others = [other for other in near if other not in (0, number)]
        if others:
            other = rng.choice(others)
            if (mask | (labels == other)).mean() <= LARGEST:
                labels = np.where(mask, other, labels).astype(np.uint8)
    return labels


def _shared(masks: Bools) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Cells that masks [N, h, w] share with one another [N, N], and their areas [N], both thinned out."""
    flat = masks[:, ::COARSE, ::COARSE].reshape(len(masks), -1).astype(np.float32)
    return flat @ flat.T, flat.sum(axis=1)


def camera_path(
    rng: np.random.Generator, shape: tuple[int, ...], frames: int, ways: int = 1
) -> list[npt.NDArray[np.float64]]:
    """A 2x3 map of picture to view for each frame: a window that wanders, grows and turns over (height, width).

    ways: windows that it goes to, one after the other, each as long.
    """
    size = np.array(shape[1::-1], np.float64)
    knots = np.linspace(0, 1, ways + 1)
    shares = rng.uniform(*WINDOW, ways + 1)
    angles = rng.normal(0, TURN, ways + 1)
    places = rng.uniform(0, 1, (2, ways + 1))
    path = []
    for time in np.linspace(0, 1, frames):
        share = np.interp(time, knots, shares)
        angle = np.interp(time, knots, angles)
        place = np.array([np.interp(time, knots, along) for along in places])
        centre = size * (share / 2 + (1 - share) * place)
        turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]) / share
        path.append(np.hstack([turn, (size / 2 - turn @ centre)[:, None]]))
    return path


def bending(rng: np.random.Generator, shape: tuple[int, ...], frames: int) -> list[Shift | None]:
    """Return a smooth shift in px [h, w, 2] for each frame (height, width), which changes from frame to frame."""
    knots = rng.normal(0, BEND * max(shape), (2, KNOTS, KNOTS, 2))
    phase = rng.uniform(-np.pi, np.pi) + np.linspace(0, rng.uniform(0.3, np.pi), frames)
    shifts = (np.cos(angle) * knots[0] + np.sin(angle) * knots[1] for angle in phase)
    return [cv2.resize(s.astype(np.float32), shape[1::-1], interpolation=cv2.INTER_CUBIC) for s in shifts]


def see(
    affine: npt.NDArray[np.float64], shift: Shift | None, image: Image, labels: Labels
) -> tuple[Image, Labels]:
    """Return an image and its labels as a moved camera sees them, then shifted. Beyond its edges both are mirrored."""
    height, width = labels.shape
    places = np.moveaxis(np.mgrid[:height, :width][::-1], 0, -1).astype(np.float32)
    if shift is not None:
        places += shift
    turn = np.linalg.inv(affine[:, :2])
    places = ((places - affine[:, 2]) @ turn.T).astype(np.float32)
    seen = cv2.remap(image, places, None, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REFLECT_101)
    return seen, cv2.remap(labels, places, None, cv2.INTER_NEAREST, borderMode=cv2.BORDER_REFLECT_101)


def fit(mask: Bools, image: Image) -> Labels:
    """A mask that was stretched to a square, at the size of its picture, 0 or 255."""
    size = (image.shape[1], image.shape[0])
    smooth = cv2.resize(mask.astype(np.uint8) * 255, size, interpolation=cv2.INTER_LINEAR)
    return np.where(smooth > 127, 255, 0).astype(np.uint8)


class Taught(NamedTuple):
    """A picture as JPEG bytes, its N masks packed and compressed, and their scores float16 [N]."""

    name: str
    jpeg: bytes
    packed: bytes
    scores: npt.NDArray[np.float16]

    @property
    def collection(self) -> str:
        """The folder that it came from, "" for a picture beside the folders."""
        return self.name.rpartition("/")[0].partition("/")[0]

    def image(self) -> Image:
        """BGR uint8 [h, w, 3]."""
        image = cv2.imdecode(np.frombuffer(self.jpeg, np.uint8), cv2.IMREAD_COLOR)
        if image is None:
            raise CameraError(f"expected a JPEG file in the shard, found damage: {self.name}")
        return np.asarray(image, np.uint8)

    def masks(self) -> Bools:
        """Bool [N, 256, 256], stretched to a square."""
        bits = np.frombuffer(zlib.decompress(self.packed), np.uint8)
        return np.unpackbits(bits).reshape(len(self.scores), SIDE, SIDE).astype(np.bool_)


def pack_taught(name: str, image: Image, masks: Bools, scores: npt.NDArray[np.float32]) -> Taught:
    """Compress a BGR picture and its masks bool [N, 256, 256]."""
    jpeg = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, QUALITY])[1].tobytes()
    return Taught(name, jpeg, zlib.compress(np.packbits(masks).tobytes(), 6), scores.astype(np.float16))


def write_shard(path: Path, pictures: list[Taught]) -> Path:
    """Write a shard, whole or not at all; return its path."""
    aside = path.with_suffix(".part")
    parts: dict[str, Any] = {"names": np.array([picture.name for picture in pictures])}
    parts |= _joined("jpegs", [picture.jpeg for picture in pictures])
    parts |= _joined("masks", [picture.packed for picture in pictures])
    parts |= _joined("scores", [picture.scores.tobytes() for picture in pictures])
    with aside.open("wb") as file:
        np.savez(file, **parts)
    os.replace(aside, path)
    return path


def read_shard(path: Path) -> list[Taught]:
    """The pictures of a shard; raises CameraError where it is none."""
    try:
        with np.load(path) as held:
            names = held["names"].tolist()
            parts = [_parts(held, key) for key in ("jpegs", "masks", "scores")]
    except (OSError, ValueError, KeyError, zlib.error) as error:
        raise CameraError(f"expected a shard of taught pictures in {path}, found {error}") from error
    rows = zip(names, *parts, strict=True)
    return [
        Taught(name, jpeg, masks, np.frombuffer(scores, np.float16)) for name, jpeg, masks, scores in rows
    ]


def list_shards(folder: Path) -> list[Path]:
    """Return the shards of a folder in the order of writing."""
    return sorted(folder.glob("shard-*.npz"))


def shard_path(folder: Path, number: int) -> Path:
    """Return the path of a shard by its number."""
    return folder / f"shard-{number:05d}.npz"


def read_all(paths: Iterable[Path]) -> Iterator[Taught]:
    """The pictures of some shards, those without masks left out."""
    for path in paths:
        yield from (picture for picture in read_shard(path) if len(picture.scores))


def known_names(folder: Path) -> set[str]:
    """The names of all pictures in the shards of a folder, with masks or without."""
    names: set[str] = set()
    for path in list_shards(folder):
        names.update(picture.name for picture in read_shard(path))
    return names


def _joined(key: str, parts: list[bytes]) -> dict[str, Any]:
    ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
    return {key: np.frombuffer(b"".join(parts), np.uint8), f"{key}_ends": ends}


def _parts(held: np.lib.npyio.NpzFile, key: str) -> list[bytes]:
    joined = held[key].tobytes()
    ends = [0, *held[f"{key}_ends"].tolist()]
    return [joined[begin:end] for begin, end in pairwise(ends)]
