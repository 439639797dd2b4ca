"""Training clips: rendered scenes, optional video frames without labels, and composites of cut-outs over both."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sam3_node.errors import CameraError
from sam3_node.types import Image
from tools.scenes.clips import list_clips, read_clip

from .augment import (
    MAX_SPRITES,
    SMALLEST,
    Augmentation,
    Labels,
    Sample,
    Sprite,
    compose,
    coverage,
    cut_out,
    load_cutouts,
)
from .loop import Batches
from .taught import TaughtPictures
from .tracks import PseudoTracks

COMPOSITES = 0.4  # share of clips that carry cut-outs
ANYWHERE = 0.4  # share of clips whose frames are anywhere in a rendering
LAID = 0.5  # share of clips of taught pictures that carry cut-outs of others
HIDDEN_FIRST = 0.5  # share of clips whose objects are first of all those that are hidden for a while
STILLS = 0.3  # share of taught single frames that are made as clips are, of wholes that cover one another
RELIST = 200  # clips after which new renderings are looked for


class Batch(NamedTuple):
    """B clips of T frames with N objects in all.

    images uint8 [B, T, 256, 256, 3] RGB · clip int64 [N], which clip an object is of · first bool [N, 256, 256], its
    mask on the first frame · masks uint8 [N, T, 64, 64], the share of each cell that it covers, 0..255.
    """

    images: Tensor
    clip: Tensor
    first: Tensor
    masks: Tensor


@dataclass(frozen=True)
class Recipe:
    """Training data of a stage: clips per batch, frames per clip, maximum number of objects per clip.

    pictures: the share of clips that are made of pictures that a teacher has labelled; tracks: the share of clips of
    real video with pseudo-tracks, where the sources have them. With `encoder` False the image
    encoder stays as it is, which makes a step on a CPU half as long.
    """

    clips: int
    frames: int
    objects: int
    pictures: float = 0.0
    encoder: bool = True
    tracks: float = 0.0


class Sources:
    """Pictures to train on. Renderings that are added to `scenes` later are found.

    cache: a folder for what was made of `cutouts` and `videos`, either of which may be None. taught: a folder of shards
    of taught pictures, or None. tracks: a folder of clips with pseudo-tracks, or None.
    Raises CameraError where there are no clips.
    """

    def __init__(
        self,
        scenes: Path,
        cache: Path,
        *,
        cutouts: Path | None = None,
        videos: Path | None = None,
        taught: Path | None = None,
        tracks: Path | None = None,
    ) -> None:
        self._scenes = scenes
        self._drawn = 0
        self._names = list_clips(scenes)
        if not self._names:
            raise CameraError(f"expected clips in {scenes}, found none: render some, python -m tools.scenes")
        self._sprites = load_cutouts(cutouts, 3000, cache / "cutouts.npz") if cutouts else []
        self._videos = load_videos(videos, cache / "videos.npz") if videos else []
        self._taught = TaughtPictures(taught) if taught else None
        self._tracks = PseudoTracks(tracks) if tracks else None

    def sample(self, rng: np.random.Generator, recipe: Recipe) -> Sample | None:
        """One clip as it is trained on; None where no object is large enough."""
        if self._tracks is not None and rng.random() < recipe.tracks:
            return self._tracked(rng, self._tracks, recipe)
        if self._taught is None or rng.random() >= recipe.pictures:
            return prepare(rng, *self.draw(rng, recipe.frames), recipe.objects)
        self._look_again()
        if recipe.frames == 1 and rng.random() >= STILLS:
            return self._taught.frame(rng, recipe.objects)
        images, labels = self._taught.clip(rng, recipe.frames)
        sprites: list[Sprite] = []
        if recipe.frames == 1 or rng.random() < LAID:
            sprites = [*self._taught.sprites(rng, MAX_SPRITES), *self._collected(rng)]
        if sprites:
            images, labels = compose(rng, images, labels, sprites)
        return prepare(rng, images, labels, recipe.objects)

    def _tracked(self, rng: np.random.Generator, tracks: PseudoTracks, recipe: Recipe) -> Sample | None:
        """A clip with pseudo-tracks, some with cut-outs."""
        found = tracks.clip(rng, recipe.frames)
        if found is None:
            return None
        images, labels = found
        if recipe.frames > 1 and rng.random() < COMPOSITES:
            images, labels = compose(rng, images, labels, self._some_sprites(rng, images[0], labels[0]))
        return prepare(rng, images, labels, recipe.objects)

    def draw(self, rng: np.random.Generator, frames: int) -> tuple[list[Image], list[Labels]]:
        """A clip of `frames` frames as rendered, or a composite."""
        self._look_again()
        composite = rng.random() < COMPOSITES
        if composite and self._videos and rng.random() < 0.4:
            images, labels = self._video(rng, frames)
        else:
            images, labels = self._rendered(rng, frames)
        if not composite:
            return images, labels
        return compose(rng, images, labels, self._some_sprites(rng, images[0], labels[0]))

    def _look_again(self) -> None:
        """Find what was added to the folders, now and then."""
        self._drawn += 1
        if self._drawn % RELIST == 0:
            self._names = list_clips(self._scenes)
            if self._taught is not None:
                self._taught.look_again()

    def _rendered(self, rng: np.random.Generator, frames: int) -> tuple[list[Image], list[Labels]]:
        clip = read_clip(self._scenes, self._names[rng.integers(len(self._names))])
        indices = choose_frames(rng, len(clip), frames)
        return [clip.image(i) for i in indices], [clip.labels(i) for i in indices]

    def _video(self, rng: np.random.Generator, frames: int) -> tuple[list[Image], list[Labels]]:
        video = self._videos[rng.integers(len(self._videos))]
        indices = choose_frames(rng, len(video), frames)
        images: list[Any] = [cv2.imdecode(video[i], cv2.IMREAD_COLOR) for i in indices]
        return images, [np.zeros(image.shape[:2], np.uint8) for image in images]

    def _some_sprites(self, rng: np.random.Generator, image: Image, labels: Labels) -> list[Sprite]:
        """Cut-outs of objects in this picture, and of the collection."""
        own = (cut_out(image, labels == number) for number in np.unique(labels)[1:])
        found = [sprite for sprite in own if sprite is not None]
        return [*found, *self._collected(rng)] or [np.full((16, 16, 4), 255, np.uint8)]

    def _collected(self, rng: np.random.Generator) -> list[Sprite]:
        """Some cut-outs of the collection, if there is one."""
        if not self._sprites:
            return []
        return [self._sprites[i] for i in rng.integers(len(self._sprites), size=6)]


def choose_frames(rng: np.random.Generator, length: int, frames: int) -> list[int]:
    """Increasing frame numbers, close together or anywhere; sometimes backwards in time, which is as good a clip.

    Frames close together are what a camera sends; those anywhere span whole occlusions, and frames that were lost.
    """
    if length >= frames and rng.random() < ANYWHERE:
        indices = sorted(int(i) for i in rng.choice(length, frames, replace=False))
    else:
        stride = int(rng.integers(1, max(1, min(3, (length - 1) // max(1, frames - 1))) + 1))
        start = int(rng.integers(0, max(1, length - stride * (frames - 1))))
        indices = [min(start + stride * i, length - 1) for i in range(frames)]
    return indices[::-1] if rng.random() < 0.5 else indices


def load_videos(folder: Path, cache: Path) -> list[list[npt.NDArray[np.uint8]]]:
    """JPEG frames of the videos in a folder, for backgrounds; kept in `cache`.

    A video is an mp4 file, of which every fourth frame is taken, or a folder of JPEG files.
    """
    if not cache.is_file():
        cache.parent.mkdir(parents=True, exist_ok=True)
        held: dict[str, Any] = {}
        for path in sorted(item for item in folder.glob("*") if item.is_dir() or item.suffix == ".mp4"):
            for i, jpeg in enumerate(video_frames(path)):
                held[f"{path.stem}/{i:05d}"] = jpeg
        np.savez(cache, **held)
    videos: dict[str, list[npt.NDArray[np.uint8]]] = {}
    with np.load(cache) as stored:
        for name in sorted(stored.files):
            videos.setdefault(name.split("/")[0], []).append(stored[name])
    return list(videos.values())


def video_frames(path: Path, every: int = 4, width: int = 320) -> Iterator[npt.NDArray[np.uint8]]:
    """JPEG files as uint8 [n]: a folder's as they are, or every fourth frame of a video, 320 px wide."""
    if path.is_dir():
        yield from (np.fromfile(jpeg, np.uint8) for jpeg in sorted(path.glob("*.jpg")))
        return
    capture = cv2.VideoCapture(str(path))
    number = 0
    while capture.grab():
        if number % every == 0:
            _, image = capture.retrieve()
            size = (width, round(image.shape[0] * width / image.shape[1]))
            small = cv2.resize(image, size, interpolation=cv2.INTER_AREA)
            yield cv2.imencode(".jpg", small, [cv2.IMWRITE_JPEG_QUALITY, 85])[1]
        number += 1


class Clips(Batches):
    """Batches of clips."""

    def __init__(self, sources: Sources, recipe: Recipe, seed: int) -> None:
        super().__init__(seed)
        self._sources = sources
        self._recipe = recipe

    def batch(self, rng: np.random.Generator) -> Batch:
        """One batch; clips without an object that is large enough are drawn again."""
        clips: list[Any] = []
        while len(clips) < self._recipe.clips:
            objects = self._sources.sample(rng, self._recipe)
            if objects is not None:
                clips.append(objects)
        index = np.concatenate([np.full(len(first), i) for i, (_, first, _) in enumerate(clips)])
        images, firsts, masks = zip(*clips, strict=True)
        return Batch(
            torch.from_numpy(np.stack(images)),
            torch.from_numpy(index),
            torch.from_numpy(np.concatenate(firsts)),
            torch.from_numpy(np.concatenate(masks)),
        )


def prepare(rng: np.random.Generator, images: list[Image], labels: list[Labels], most: int) -> Sample | None:
    """Augment and bring to the model's size: images [T, S, S, 3], first [K, S, S], masks [K, T, S/4, S/4]."""
    ids = np.unique(labels[0])[1:]
    augment = Augmentation.draw(rng, labels[0].shape, labels[0] == ids[:, None, None])
    images = [augment.image(image) for image in images]
    labels = [augment.labels(label) for label in labels]
    counts = np.bincount(labels[0].ravel(), minlength=2)
    found = [int(i) for i in np.flatnonzero(counts >= SMALLEST) if i > 0]
    if not found:
        return None
    chosen = choose_objects(rng, found, labels)[:most]
    first = np.stack([labels[0] == number for number in chosen])
    masks = np.stack([[coverage(label == number) for label in labels] for number in chosen])
    return np.stack(images), first, masks


def choose_objects(rng: np.random.Generator, found: list[int], labels: list[Labels]) -> list[int]:
    """The ids `found` in random order; in some clips those come first that are hidden on a later frame."""
    order = [int(number) for number in rng.permutation(found)]
    if len(labels) == 1 or rng.random() >= HIDDEN_FIRST:
        return order
    always = set(found).intersection(*(np.unique(label).tolist() for label in labels))
    return sorted(order, key=always.__contains__)
