"""Augmentation that is the same for all frames of a clip, and the way to the model's square."""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np
import numpy.typing as npt

from .config import SIZE

Image = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.uint8]
Bools = npt.NDArray[np.bool_]
Sample = tuple[npt.NDArray[np.uint8], Bools, npt.NDArray[np.uint8]]
"""What is trained on: images [T, 256, 256, 3] RGB, first masks [K, 256, 256], covered shares [K, T, 64, 64]."""

LOW = SIZE // 4  # side of mask logits
SMALLEST = 24  # px of SIZE x SIZE that an object shows on the prompted frame
CROPPED = 0.35  # share of other views that show a part of a picture: more, and objects are larger than in use
CLOSE = 0.3  # share of views from close by: few objects of a table are large, all that a gripper's camera sees are
NEAR, FAR = 1.1, 3.0  # sides of such a view, in those of the object's box
LEAST = 80  # px of the picture on a side of a view


@dataclass(frozen=True)
class Augmentation:
    """A crop (x, y, w, h), a flip, and a table of 256 values for each of B, G and R."""

    crop: tuple[int, int, int, int]
    flip: bool
    table: npt.NDArray[np.uint8]
    blur: float
    noise: float
    seed: int

    @staticmethod
    def draw(rng: np.random.Generator, shape: tuple[int, ...], objects: Bools | None = None) -> Augmentation:
        """For pictures of shape (height, width). objects: masks [N, height, width], one of which may be seen close."""
        if objects is not None and len(objects) > 0 and rng.random() < CLOSE:
            crop = _close(rng, objects[int(rng.integers(len(objects)))])
        else:
            crop = _crop(rng, shape)
        return Augmentation(
            crop,
            bool(rng.random() < 0.5),
            _tone(rng),
            float(rng.uniform(0.3, 1.2)) if rng.random() < 0.2 else 0.0,
            float(rng.uniform(1, 8)) if rng.random() < 0.3 else 0.0,
            int(rng.integers(2**31)),
        )

    def image(self, image: Image) -> Image:
        """BGR uint8 [h, w, 3] -> RGB uint8 [256, 256, 3]."""
        square = self._square(image, cv2.INTER_AREA)
        square = cv2.LUT(square, self.table)
        if self.blur:
            square = cv2.GaussianBlur(square, (5, 5), self.blur)
        if self.noise:
            grain = np.empty(square.shape, np.int16)
            cv2.setRNGSeed(self.seed)
            square = cv2.add(square, cv2.randn(grain, 0, self.noise), dtype=cv2.CV_8U)
        return square[..., ::-1]

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
    first, last = max(0, low), min(whole - view, high)
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
