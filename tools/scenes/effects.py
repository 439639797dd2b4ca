"""Effects of a camera on a picture: exposure, white balance, gamma, blur, noise."""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np
import numpy.typing as npt

Rng = np.random.Generator
Image = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Effects:
    """Settings of the effects. brightness: target mean grey level.

    gains: of blue, green and red. blur: standard deviation in pixels. noise: in grey levels of 255.

    supersample: pixels rendered per pixel along each axis. shutter: part of the frame interval in which `samples`
    pictures are averaged. jpeg: quality of the files.
    """

    brightness: float = 115.0
    gains: tuple[float, float, float] = (1.0, 1.0, 1.0)
    gamma: float = 1.0
    contrast: float = 1.0
    blur: float = 0.0
    noise: float = 0.0
    supersample: int = 2
    samples: int = 1
    shutter: float = 0.0
    jpeg: int = 92


def draw_effects(rng: Rng) -> Effects:
    """Draw a camera of random quality."""
    balance = np.exp(rng.normal(0, 0.07, 3))
    blurred = rng.random() < 0.15
    return Effects(
        brightness=rng.triangular(60, 115, 165),
        gains=(float(balance[0]), float(balance[1]), float(balance[2])),
        gamma=float(np.exp(rng.normal(0, 0.15))),
        contrast=rng.uniform(0.8, 1.15),
        blur=rng.uniform(0.3, 1.1) if rng.random() < 0.5 else 0.0,
        noise=rng.uniform(1, 8) if rng.random() < 0.6 else 0.0,
        supersample=2 if rng.random() < 0.5 and not blurred else 1,
        samples=3 if blurred else 1,
        shutter=rng.uniform(0.2, 0.5) if blurred else 0.0,
        jpeg=int(rng.integers(70, 96)),
    )


def develop(rng: Rng, image: Image, effects: Effects, exposure: float = 1.0) -> Image:
    """Return a rendered picture, BGR uint8 [h, w, 3], with this camera's effects."""
    if effects.blur:
        image = cv2.GaussianBlur(image, (0, 0), effects.blur)
    curve = np.arange(256)[:, None] / 255 * exposure * np.array(effects.gains)
    curve = np.clip(curve, 0, 1) ** effects.gamma
    curve = (curve - 0.5) * effects.contrast + 0.5
    table = np.clip(255 * curve, 0, 255).astype(np.uint8)[:, None]
    image = cv2.LUT(image, table.transpose(1, 0, 2))
    if effects.noise:
        grain = rng.normal(0, effects.noise, image.shape).astype(np.float32)
        image = np.clip(image + grain, 0, 255).astype(np.uint8)
    return image
