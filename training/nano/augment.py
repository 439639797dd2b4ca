"""Varied pictures: augmentation that is the same for all frames of a clip, and cut-outs that move over other pictures.

Cut-outs are public-domain clip-art, or any folder of RGBA PNG files. Composites have exact labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt

from sam3_node.types import Image

from .network import SIZE

Labels = npt.NDArray[np.uint8]
Bools = npt.NDArray[np.bool_]
Sample = tuple[npt.NDArray[np.uint8], Bools, npt.NDArray[np.uint8]]
"""What is trained on: images [T, 256, 256, 3] RGB, first masks [K, 256, 256], covered shares [K, T, 64, 64]."""

LOW = SIZE // 4  # side of mask logits
SMALLEST = 24  # px of SIZE x SIZE that an object shows on the prompted frame
CROPPED = 0.35  # share of other views that show a part of a picture: more, and objects are larger than in use
CLOSE = 0.3  # share of views from close by: few objects of a table are large, all that a gripper's camera sees are
# sides of such a view, in sides of the object's box
NEAR = 1.1
FAR = 3.0
LEAST = 80  # px of the picture on a side of a view
Sprite = npt.NDArray[np.uint8]  # BGRA [h, w, 4]
LONGEST = 160  # px
OPENCLIPART = Path("/usr/share/openclipart/png")  # Debian's openclipart-png: public domain
MAX_SPRITES = 5
COVERED = 0.6  # share of clips in which a sprite passes over an object
COVER = (1.3, 2.8)  # size of that sprite, in longer sides of the object
ALIKE = 0.5  # share of those sprites that have the colour of the object
HASTE = (1.0, 2.5)  # its speed; at 1 it comes from where it just does not touch the object
SOLID = 128
LIVELY = 0.3
"""Share of the sprites of a clip that come near or go away, turn, are blurred by their motion, and may leave."""
MOST_GROWN = 4.0
"""Times by which such a sprite grows at most, or shrinks."""
SMALL = (0.08, 0.2)
"""Its size when it is far away, in widths of the picture."""
LIVELY_SPEED = (0.0, 1.0)
"""Way of its centre over the clip, in sides of the picture; it begins near the middle, so that the fast ones leave."""
LIVELY_SPIN = 1.5
"""Standard deviation of its turn over the clip, in radians."""
SHUTTER = 0.8
"""Longest exposure, as a share of the time between frames. Longer, and a sprite has no outline left."""
EXPOSURES = 5
"""Places of a sprite that are averaged within an exposure."""


@dataclass(frozen=True)
class Lens:
    """A table [1, 256, 3] of values for B, G and R, blur and noise."""

    table: npt.NDArray[np.uint8]
    blur: float
    noise: float
    seed: int

    @classmethod
    def draw(cls, rng: np.random.Generator, table: npt.NDArray[np.uint8]) -> Lens:
        """Draw blur and noise."""
        blur = float(rng.uniform(0.3, 1.2)) if rng.random() < 0.2 else 0.0
        noise = float(rng.uniform(1, 8)) if rng.random() < 0.3 else 0.0
        return cls(table, blur, noise, int(rng.integers(2**31)))

    def blur_and_noise(self, image: Image) -> Image:
        """Return a BGR image with blur and noise, in RGB."""
        if self.blur:
            image = cv2.GaussianBlur(image, (5, 5), self.blur)
        if self.noise:
            grain = np.empty(image.shape, np.int16)
            cv2.setRNGSeed(self.seed)
            image = cv2.add(image, cv2.randn(grain, 0, self.noise), dtype=cv2.CV_8U)
        return image[..., ::-1]


@dataclass(frozen=True)
class Augmentation:
    """A crop (x, y, w, h), a flip, and a lens."""

    crop: tuple[int, int, int, int]
    flip: bool
    lens: Lens

    @staticmethod
    def draw(rng: np.random.Generator, shape: tuple[int, ...], objects: Bools | None = None) -> Augmentation:
        """For pictures of shape (height, width). objects: masks [N, height, width], one of which may be seen close."""
        if objects is not None and len(objects) > 0 and rng.random() < CLOSE:
            crop = _close(rng, objects[int(rng.integers(len(objects)))])
        else:
            crop = _crop(rng, shape)
        return Augmentation(crop, bool(rng.random() < 0.5), Lens.draw(rng, _tone(rng)))

    def image(self, image: Image) -> Image:
        """BGR uint8 [h, w, 3] -> RGB uint8 [256, 256, 3]."""
        return self.lens.blur_and_noise(cv2.LUT(self._square(image, cv2.INTER_AREA), self.lens.table))

    def labels(self, labels: Labels) -> Labels:
        """uint8 [h, w] -> [256, 256]."""
        return self._square(labels, cv2.INTER_NEAREST)

    def _square(self, picture: npt.NDArray[np.uint8], how: int) -> npt.NDArray[np.uint8]:
        x, y, w, h = self.crop
        square = cv2.resize(picture[y : y + h, x : x + w], (SIZE, SIZE), interpolation=how)
        return np.ascontiguousarray(square[:, ::-1]) if self.flip else square


def _crop(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Most of a picture of shape (height, width)."""
    height, width = shape[:2]
    share = rng.uniform(0.55, 1.0) if rng.random() < CROPPED else 1.0
    w = round(width * share)
    h = round(min(height, height * share * rng.uniform(0.85, 1.15)))
    return int(rng.integers(0, width - w + 1)), int(rng.integers(0, height - h + 1)), w, h


def _close(rng: np.random.Generator, mask: Bools) -> tuple[int, int, int, int]:
    """A view of about the picture's proportions that holds an object's mask [h, w], or as much as fits."""
    if not mask.any():
        return _crop(rng, mask.shape)
    x, y, w, h = cv2.boundingRect(mask.astype(np.uint8))
    height, width = mask.shape
    share = max(w / width, h / height) * np.exp(rng.uniform(np.log(NEAR), np.log(FAR)))
    share = min(1.0, max(share, LEAST / min(height, width)))
    size = round(width * share), round(min(height, height * share * rng.uniform(0.85, 1.15)))
    corner = [
        _start(rng, at, extent, view, whole)
        for at, extent, view, whole in zip((x, y), (w, h), size, (width, height), strict=True)
    ]
    return corner[0], corner[1], *size


def _start(rng: np.random.Generator, at: int, extent: int, view: int, whole: int) -> int:
    """Return where a view of `view` px begins on a side of `whole` px. It holds [at, at + extent) where it can."""
    low, high = sorted((at + extent - view, at))
    first = max(0, low)
    last = min(whole - view, high)
    return int(rng.integers(first, max(first, last) + 1)) if first <= whole - view else whole - view


def _tone(rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Gamma, contrast, brightness and white balance as one table [1, 256, 3]."""
    value = np.linspace(0, 1, 256)[:, None] ** rng.uniform(0.7, 1.4)
    value = (value - 0.5) * rng.uniform(0.7, 1.3) + 0.5 + rng.uniform(-0.1, 0.1)
    value = value * rng.uniform(0.85, 1.15, 3)
    return np.clip(value * 255, 0, 255).astype(np.uint8)[None]


def coverage(mask: Bools) -> npt.NDArray[np.uint8]:
    """The share of each 4x4 cell that a mask covers, 0..255."""
    return cv2.resize(mask.astype(np.uint8) * 255, (LOW, LOW), interpolation=cv2.INTER_AREA)


def load_cutouts(folder: Path, most: int, cache: Path, seed: int = 0) -> list[Sprite]:
    """Up to `most` sprites, their longer side at most 160 px, from the RGBA PNG files below `folder`.

    Kept in `cache` (.npz) for the next start. An absent folder gives none; files that are no such image are left out.
    """
    if cache.is_file():
        with np.load(cache) as held:
            return [held[name] for name in held.files]
    sprites = read_cutouts(folder, most, seed)
    if sprites:
        cache.parent.mkdir(parents=True, exist_ok=True)
        np.savez(cache, *sprites)
    return sprites


def read_cutouts(folder: Path, most: int, seed: int = 0) -> list[Sprite]:
    """The same without a cache."""
    paths = sorted(folder.rglob("*.png")) if folder.is_dir() else []
    np.random.default_rng(seed).shuffle(paths)
    sprites: list[Sprite] = []
    for path in paths:
        if len(sprites) == most:
            break
        sprite = _read(path)
        if sprite is not None:
            sprites.append(sprite)
    return sprites


def cut_out(image: npt.NDArray[np.uint8], mask: npt.NDArray[np.bool_]) -> Sprite | None:
    """The masked part of BGR image [h, w, 3] as a sprite; None where it is too small."""
    x, y, w, h = cv2.boundingRect(mask.astype(np.uint8))
    if min(w, h) < 12:
        return None
    sprite = np.dstack([image[y : y + h, x : x + w], mask[y : y + h, x : x + w].astype(np.uint8) * 255])
    return _shrink(sprite)


def _read(path: Path) -> Sprite | None:
    image = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
    if image is None or image.ndim != 3 or image.shape[2] != 4 or image.dtype != np.uint8:
        return None
    x, y, w, h = cv2.boundingRect((image[..., 3] > 127).astype(np.uint8))
    filled = (image[..., 3] > 127).sum() / max(1, w * h)
    if min(w, h) < 24 or max(w, h) > 6 * min(w, h) or filled < 0.2:
        return None
    return _shrink(image[y : y + h, x : x + w])


def _shrink(sprite: Sprite) -> Sprite:
    scale = LONGEST / max(sprite.shape[:2])
    if scale >= 1:
        return np.ascontiguousarray(sprite)
    size = (max(4, round(sprite.shape[1] * scale)), max(4, round(sprite.shape[0] * scale)))
    return cv2.resize(sprite, size, interpolation=cv2.INTER_AREA)


@dataclass(frozen=True)
class Path2D:
    """Path of a sprite over time 0..1: centre, size (longer side) in shares of the picture, angle in radians.

    From the time `halt` on it stands still, for the time `stay`.
    shutter: exposure as a share of the time between frames.
    """

    start: npt.NDArray[np.float64]
    velocity: npt.NDArray[np.float64]
    sway: npt.NDArray[np.float64]
    phase: float
    size: float
    growth: float
    angle: float
    spin: float
    halt: float = 1.0
    stay: float = 0.0
    shutter: float = 0.0

    def places(
        self, time: float, step: float, sprite: Sprite, picture: tuple[int, int]
    ) -> list[npt.NDArray[np.float64]]:
        """The maps of `affine` during an exposure that begins at `time`; `step` is the time between frames."""
        count = EXPOSURES if self.shutter else 1
        within = np.arange(count) / count * self.shutter * step
        return [self.affine(time + each, sprite, picture) for each in within]

    def affine(self, time: float, sprite: Sprite, picture: tuple[int, int]) -> npt.NDArray[np.float64]:
        """The 2x3 map of sprite pixels to picture pixels (height, width)."""
        height, width = picture
        time = time if time <= self.halt else max(self.halt, time - self.stay)
        centre = self.start + self.velocity * time + self.sway * np.sin(2 * np.pi * (time + self.phase))
        scale = self.size * (1 + self.growth * time) * width / max(sprite.shape[:2])
        angle = self.angle + self.spin * time
        turn = scale * np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        middle = np.array([sprite.shape[1], sprite.shape[0]]) / 2
        return np.hstack([turn, (centre * [width, height] - turn @ middle)[:, None]])


def random_path(rng: np.random.Generator, moving: bool) -> Path2D:
    """A path that mostly stays in view; the fast ones leave it."""
    speed = rng.choice([0.05, 0.2, 0.6]) if moving else 0.0
    return Path2D(
        start=rng.uniform(0.1, 0.9, 2),
        velocity=rng.normal(0, 1, 2) * speed,
        sway=rng.normal(0, 0.3, 2) * speed,
        phase=rng.uniform(),
        size=float(np.exp(rng.uniform(np.log(0.1), np.log(0.5)))),
        growth=rng.uniform(-0.4, 0.6) * moving,
        angle=rng.uniform(-np.pi, np.pi) if rng.random() < 0.4 else rng.normal(0, 0.2),
        spin=rng.normal(0, 0.5) * moving,
    )


def lively_path(rng: np.random.Generator) -> Path2D:
    """A path towards the camera or away from it, that turns, is blurred and may lead out of the picture."""
    grown = float(np.exp(rng.uniform(-1, 1) * np.log(MOST_GROWN)))
    far = float(np.exp(rng.uniform(*np.log(SMALL))))
    heading = rng.uniform(-np.pi, np.pi)
    return Path2D(
        start=rng.uniform(0.25, 0.75, 2),
        velocity=rng.uniform(*LIVELY_SPEED) * np.array([np.cos(heading), np.sin(heading)]),
        sway=rng.normal(0, 0.03, 2),
        phase=rng.uniform(),
        size=far / min(1.0, grown),
        growth=grown - 1,
        angle=rng.uniform(-np.pi, np.pi),
        spin=rng.normal(0, LIVELY_SPIN),
        shutter=rng.uniform(0, SHUTTER),
    )


def covering_path(rng: np.random.Generator, labels: list[Labels]) -> tuple[Path2D, int] | None:
    """A path that hides one of the objects, in view on the first frame, on a later one, and that object's id.

    It may stay there, so that the object is hidden for several frames. None where there is no such object.
    """
    later = int(rng.integers(1, len(labels)))
    stay = int(rng.integers(len(labels) - later))
    found = np.intersect1d(labels[0], labels[later])
    if not found.any():
        return None
    height, width = labels[0].shape
    hidden = int(rng.choice(found[found > 0]))
    x, y, w, h = cv2.boundingRect((labels[later] == hidden).astype(np.uint8))
    time = later / (len(labels) - 1)
    side = max(w, h) / width
    size = side * rng.uniform(*COVER)
    heading = rng.uniform(-np.pi, np.pi)
    speed = (size + side) / 2 / time * rng.uniform(*HASTE)
    velocity = speed * np.array([np.cos(heading), np.sin(heading) * width / height])
    path = Path2D(
        start=np.array([(x + w / 2) / width, (y + h / 2) / height]) - velocity * time,
        velocity=velocity,
        sway=np.zeros(2),
        phase=0.0,
        size=size,
        growth=0.0,
        angle=rng.uniform(-np.pi, np.pi),
        spin=0.0,
        halt=time,
        stay=stay / (len(labels) - 1),
    )
    return path, hidden


def compose(
    rng: np.random.Generator, images: list[Image], labels: list[Labels], sprites: list[Sprite]
) -> tuple[list[Image], list[Labels]]:
    """Lay sprites over the frames of a clip; their ids follow those that are in the labels."""
    chosen = [
        tint(rng, sprites[i]) for i in rng.integers(len(sprites), size=rng.integers(2, MAX_SPRITES + 1))
    ]
    moving = len(images) > 1
    paths = [
        lively_path(rng) if moving and rng.random() < LIVELY else random_path(rng, moving) for _ in chosen
    ]
    covering = covering_path(rng, labels) if moving and rng.random() < COVERED else None
    if covering:
        paths[-1], hidden = covering
        if rng.random() < ALIKE:
            chosen[-1] = colour_like(chosen[-1], images[0][labels[0] == hidden], rng.uniform())
    first = int(max(label.max() for label in labels)) + 1
    images = [image.copy() for image in images]
    labels = [label.copy() for label in labels]
    step = 1 / max(1, len(images) - 1)
    for index, (image, label) in enumerate(zip(images, labels, strict=True)):
        time = index * step
        for number, (sprite, path) in enumerate(zip(chosen, paths, strict=True)):
            _lay(image, label, sprite, path.places(time, step, sprite, label.shape), first + number)
    return images, labels


def tint(rng: np.random.Generator, sprite: Sprite) -> Sprite:
    """Another hue and brightness."""
    hsv = cv2.cvtColor(sprite[..., :3], cv2.COLOR_BGR2HSV)
    hsv[..., 0] = (hsv[..., 0].astype(int) + rng.integers(180)) % 180
    hsv[..., 2] = np.clip(hsv[..., 2] * rng.uniform(0.5, 1.2), 0, 255)
    return np.dstack([cv2.cvtColor(hsv, cv2.COLOR_HSV2BGR), sprite[..., 3]])


def colour_like(sprite: Sprite, pixels: npt.NDArray[np.uint8], pattern: float = 1.0) -> Sprite:
    """The sprite with the mean colour of pixels BGR [n, 3], as an arm that passes over an object of its colour.

    pattern: share of its own contrasts that it keeps; with 0 it is of one colour.
    """
    inside = sprite[..., 3] >= SOLID
    if not inside.any():
        return sprite
    own = sprite[..., :3] - sprite[inside, :3].mean(axis=0)
    colour = np.clip(pixels.mean(axis=0) + pattern * own, 0, 255).astype(np.uint8)
    return np.dstack([colour, sprite[..., 3]])


def _lay(
    image: Image, label: Labels, sprite: Sprite, places: list[npt.NDArray[np.float64]], number: int
) -> None:
    """Lay a sprite over an image, as it is seen while it goes through `places`, 2x3 maps."""
    height, width = label.shape
    corners = np.array(
        [[0, 0, 1], [sprite.shape[1], 0, 1], [0, sprite.shape[0], 1], [*sprite.shape[1::-1], 1]]
    )
    placed = np.concatenate([corners @ affine.T for affine in places])
    x0, y0 = np.clip(np.floor(placed.min(axis=0)).astype(int), 0, [width, height])
    x1, y1 = np.clip(np.ceil(placed.max(axis=0)).astype(int), 0, [width, height])
    if x1 <= x0 or y1 <= y0:
        return
    size = (int(x1 - x0), int(y1 - y0))
    corner = np.array([[0, 0, x0], [0, 0, y0]])
    colour = np.zeros((size[1], size[0], 3), np.float32)
    alpha = np.zeros((size[1], size[0], 1), np.float32)
    for affine in places:
        patch = cv2.warpAffine(sprite, affine - corner, size, flags=cv2.INTER_LINEAR).astype(np.float32)
        solid = patch[..., 3:] / (255 * len(places))
        colour += patch[..., :3] * solid
        alpha += solid
    region = image[y0:y1, x0:x1]
    region[:] = (colour + region * (1 - alpha)).astype(np.uint8)
    label[y0:y1, x0:x1][alpha[..., 0] * 255 >= SOLID] = number
