"""2-D composites: cut-outs that move, turn, grow and cover one another over other pictures, with exact labels."""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np
import numpy.typing as npt

from .cutouts import Sprite

Image = npt.NDArray[np.uint8]  # BGR [h, w, 3]
Labels = npt.NDArray[np.uint8]  # [h, w]
MAX_SPRITES = 5
COVERED = 0.6  # share of clips in which a sprite passes over an object
COVER = (1.3, 2.8)  # size of that sprite, in longer sides of the object
ALIKE = 0.5  # share of those sprites that have the colour of the object
HASTE = (1.0, 2.5)  # its speed; at 1 it comes from where it just does not touch the object
SOLID = 128


@dataclass(frozen=True)
class Path2D:
    """Path of a sprite over time 0..1: centre, size (longer side) in shares of the picture, angle in radians.

    From the time `halt` on it stands still, for the time `stay`.
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
    time, side = later / (len(labels) - 1), max(w, h) / width
    size, heading = side * rng.uniform(*COVER), rng.uniform(-np.pi, np.pi)
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
    paths = [random_path(rng, len(images) > 1) for _ in chosen]
    covering = covering_path(rng, labels) if len(images) > 1 and rng.random() < COVERED else None
    if covering:
        paths[-1], hidden = covering
        if rng.random() < ALIKE:
            chosen[-1] = colour_like(chosen[-1], images[0][labels[0] == hidden], rng.uniform())
    first = int(max(label.max() for label in labels)) + 1
    images, labels = [image.copy() for image in images], [label.copy() for label in labels]
    for index, (image, label) in enumerate(zip(images, labels, strict=True)):
        time = index / max(1, len(images) - 1)
        for number, (sprite, path) in enumerate(zip(chosen, paths, strict=True)):
            _lay(image, label, sprite, path.affine(time, sprite, label.shape), first + number)
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


def _lay(image: Image, label: Labels, sprite: Sprite, affine: npt.NDArray[np.float64], number: int) -> None:
    height, width = label.shape
    corners = np.array(
        [[0, 0, 1], [sprite.shape[1], 0, 1], [0, sprite.shape[0], 1], [*sprite.shape[1::-1], 1]]
    )
    placed = corners @ affine.T
    x0, y0 = np.clip(np.floor(placed.min(axis=0)).astype(int), 0, [width, height])
    x1, y1 = np.clip(np.ceil(placed.max(axis=0)).astype(int), 0, [width, height])
    if x1 <= x0 or y1 <= y0:
        return
    shifted = affine - [[0, 0, x0], [0, 0, y0]]
    patch = cv2.warpAffine(sprite, shifted, (int(x1 - x0), int(y1 - y0)), flags=cv2.INTER_LINEAR)
    alpha = patch[..., 3:].astype(np.float32) / 255
    region = image[y0:y1, x0:x1]
    region[:] = (patch[..., :3] * alpha + region * (1 - alpha)).astype(np.uint8)
    label[y0:y1, x0:x1][patch[..., 3] >= SOLID] = number
