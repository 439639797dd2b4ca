"""Augmentation: placing a rendered frame on the detector's canvas. Hues stay, because colours are names."""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np
import numpy.typing as npt

SIZE = (256, 320)  # height and width of the canvas, pixels
GREY = 114  # around the picture, as the package pads frames
SCALE = (0.7, 1.7)  # of the picture that fits the canvas
TURN = 5.0  # degrees, standard deviation

Image = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Augmentation:
    """An affine map [2, 3] from a frame's pixels to the canvas, tables of 256 values for B, G and R, blur and noise."""

    affine: npt.NDArray[np.float64]
    table: npt.NDArray[np.uint8]
    blur: float
    noise: float
    seed: int

    @staticmethod
    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> Augmentation:
        """Draw an augmentation for pictures of shape (height, width)."""
        return Augmentation(
            _affine(rng, shape[0], shape[1]),
            _tone(rng),
            float(rng.uniform(0.3, 1.2)) if rng.random() < 0.2 else 0.0,
            float(rng.uniform(1, 8)) if rng.random() < 0.3 else 0.0,
            int(rng.integers(2**31)),
        )

    def image(self, image: Image) -> Image:
        """Convert BGR uint8 [h, w, 3] to RGB uint8 [256, 320, 3]."""
        canvas = cv2.warpAffine(
            cv2.LUT(image, self.table),
            self.affine,
            SIZE[::-1],
            flags=cv2.INTER_LINEAR,
            borderValue=(GREY,) * 3,
        )
        if self.blur:
            canvas = cv2.GaussianBlur(canvas, (5, 5), self.blur)
        if self.noise:
            grain = np.empty(canvas.shape, np.int16)
            cv2.setRNGSeed(self.seed)
            canvas = cv2.add(canvas, cv2.randn(grain, 0, self.noise), dtype=cv2.CV_8U)
        rgb: Image = canvas[..., ::-1]
        return rgb

    def labels(self, labels: Labels) -> Labels:
        """Convert uint8 [h, w] to [256, 320], with 0 around the picture."""
        moved: Labels = cv2.warpAffine(labels, self.affine, SIZE[::-1], flags=cv2.INTER_NEAREST)
        return moved


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
    table: Image = np.clip(value * 255, 0, 255).astype(np.uint8)[None]
    return table
