"""scene:shapes - a drawn table top with moving objects and exact masks.

`Scene.render` is a pure function of the frame's index, so that any process can compute the truth of the frame with that
`seq`. The first object passes behind the second. The third leaves the image and comes back.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import parse_qsl

import cv2
import numpy as np

from ..errors import CameraError, did_you_mean
from ..types import Image
from .base import CapturedImage
from .pacing import Pacer
from .sprites import COLOURS, KINDS, draw_sprite, draw_table

_LIMITS = {
    "seed": (0, 2**31 - 1),
    "objects": (1, len(KINDS)),
    "frames": (0, 2**31 - 1),
    "width": (64, 4096),
    "height": (64, 4096),
    "fps": (1, 1000),
}
_SHADOW_OFFSET = 0.012  # of the height, away from the light at the upper left
_PERIOD_S = 8.0


@dataclass(frozen=True, slots=True)
class _Path:
    """A closed curve in units of the image height, origin at the image centre, with an oscillating rotation."""

    x: float
    y: float
    reach_x: float
    reach_y: float
    phase: float
    turns: int  # runs of the curve in one period
    angle_deg: float
    swing_deg: float

    def at(self, cycle: float) -> tuple[float, float, float]:
        """Return x, y and angle in degrees after `cycle` periods."""
        t = 2 * math.pi * self.turns * cycle + self.phase
        x, y = self.x + self.reach_x * math.sin(t), self.y + self.reach_y * math.cos(t)
        return x, y, self.angle_deg + self.swing_deg * math.sin(t + 1.0)


class Scene:
    """A seeded scene of 1 to 6 objects; id k of the truth is `names[k - 1]`, id 0 the table.

    Every object is in view at index 0. The source ends after `frames` frames; with 0 it never ends.
    """

    def __init__(
        self,
        seed: int = 0,
        objects: int = 5,
        frames: int = 0,
        width: int = 640,
        height: int = 480,
        fps: int = 30,
    ) -> None:
        self.width, self.height, self.frames, self.fps = width, height, frames, fps
        rng = np.random.default_rng(seed)
        self._table = draw_table(rng, width, height)
        kinds, colours = rng.permutation(KINDS).tolist(), rng.permutation(list(COLOURS)).tolist()
        if kinds[1] == "screwdriver":  # too slim to hide anything
            kinds[1], kinds[0] = kinds[0], kinds[1]
        appearances = zip(kinds[:objects], colours, strict=False)
        self._sprites = [draw_sprite(kind, colour, rng, height) for kind, colour in appearances]
        self._paths = _choose_paths(rng, width / height)[:objects]
        self.names = tuple(sprite.name for sprite in self._sprites)

    @classmethod
    def from_uri(cls, uri: str) -> Scene:
        """Return the scene of scene:shapes?seed=3&objects=4&frames=300&width=640&height=480&fps=30.

        Raises CameraError for another drawing, an unknown parameter or one out of range.
        """
        drawing, _, query = uri.removeprefix("scene:").partition("?")
        if drawing != "shapes":
            nearest = did_you_mean(f"scene:{drawing}", ("scene:shapes", "scene:tabletop"))
            raise CameraError(f"expected scene:shapes or scene:tabletop, found {uri!r}{nearest}")
        return cls(**dict(_parameter(key, text) for key, text in parse_qsl(query, keep_blank_values=True)))

    def render(self, index: int) -> tuple[Image, Image]:
        """Return frame `index`: the image, BGR uint8 [h, w, 3], and the id at each pixel, uint8 [h, w]."""
        image, ids = self._table.copy(), np.zeros((self.height, self.width), np.uint8)
        cycle = index / (self.fps * _PERIOD_S)
        # painter's order: the second object last, so that the first passes behind it
        order = sorted(range(len(self._sprites)), key=lambda i: i == 1)
        for i in order:
            x, y, angle_deg = self._paths[i].at(cycle)
            self._paste(image, ids, i, (x * self.height, y * self.height), angle_deg)
        return image, ids

    def _paste(self, image: Image, ids: Image, i: int, offset: tuple[float, float], angle_deg: float) -> None:
        sprite = self._sprites[i]
        centre = (self.width / 2 + offset[0], self.height / 2 + offset[1])
        shift = _SHADOW_OFFSET * self.height
        shadow = _warp(sprite.shadow, (centre[0] + shift, centre[1] + shift), angle_deg, ids.shape)
        if shadow is not None:
            _darken(image[shadow.window], shadow.pixels)
        body = _warp(sprite.pixels, centre, angle_deg, ids.shape)
        if body is not None:
            window, alpha = image[body.window], body.pixels[:, :, 3]
            _darken(window, alpha)
            cv2.add(window, cv2.cvtColor(body.pixels, cv2.COLOR_BGRA2BGR), dst=window)
            np.copyto(ids[body.window], i + 1, where=alpha > 127)


class SceneSource:
    """A scene as a camera: its frames starting at index 0, at `fps`, or at the scene's own rate if that is 0.

    A scene with an end that loops starts again at index 0: the truth of `seq` is that of seq % frames.
    """

    lost = 0

    def __init__(self, uri: str, fps: float, loop: bool, stop: threading.Event) -> None:
        self.name = uri
        self.scene = Scene.from_uri(uri)
        self._loop = loop
        self.is_finite = self.scene.frames > 0 and not loop
        self._pacer = Pacer(fps or self.scene.fps, stop)
        self._closed = False

    def __iter__(self) -> Iterator[CapturedImage]:
        index = 0
        while not self._closed:
            if self.scene.frames and index == self.scene.frames:
                if not self._loop:
                    return
                index = 0
            image, _ = self.scene.render(index)
            if not self._pacer.wait():
                return
            yield CapturedImage(image, time.time_ns())
            index += 1

    def close(self) -> None:
        self._closed = True


@dataclass(frozen=True, slots=True)
class _Warped:
    window: tuple[slice, slice]
    pixels: Image


def _warp(
    sprite: Image, centre: tuple[float, float], angle_deg: float, size: tuple[int, ...]
) -> _Warped | None:
    """Rotate the sprite about its middle, move it to `centre` and crop it to an image of `size`; None outside."""
    side = sprite.shape[0]
    reach = side / 2
    x0, y0 = (max(0, math.floor(c - reach)) for c in centre)
    x1, y1 = min(size[1], math.ceil(centre[0] + reach)), min(size[0], math.ceil(centre[1] + reach))
    if x0 >= x1 or y0 >= y1:
        return None
    matrix = cv2.getRotationMatrix2D((reach - 0.5, reach - 0.5), angle_deg, 1.0)
    matrix[:, 2] += (centre[0] - reach - x0, centre[1] - reach - y0)
    pixels = cv2.warpAffine(sprite, matrix, (x1 - x0, y1 - y0), flags=cv2.INTER_LINEAR)
    return _Warped((slice(y0, y1), slice(x0, x1)), pixels)


def _darken(window: Image, alpha: Image) -> None:
    """Multiply the window by 1 - alpha / 255, in place."""
    through = cv2.cvtColor(cv2.bitwise_not(alpha), cv2.COLOR_GRAY2BGR)
    cv2.multiply(window, through, dst=window, scale=1 / 255)


def _parameter(key: str, text: str) -> tuple[str, int]:
    if key not in _LIMITS:
        raise CameraError(f"scene:shapes has the parameters {', '.join(_LIMITS)}; found {key!r}")
    low, high = _LIMITS[key]
    if not (text.isascii() and text.isdigit() and len(text) < 12 and low <= int(text) <= high):
        raise CameraError(
            f"scene:shapes: expected {key} to be a whole number in {low}..{high}, found {text!r}"
        )
    return key, int(text)


def _choose_paths(rng: np.random.Generator, aspect: float) -> list[_Path]:
    """Choose a path for each of the six objects, in image heights: the image spans -aspect/2..aspect/2 by -0.5..0.5."""
    half = aspect / 2
    jitter = rng.uniform(-0.02, 0.02, (6, 2))
    angles, swings = rng.uniform(-25, 25, 6), rng.uniform(8, 22, 6)
    # x, y, reach_x, reach_y, phase, turns
    plans = [
        (0.0, 0.0, half - 0.16, 0.03, -1.3, 1),  # to and fro through the middle, behind the next
        (0.02, 0.02, 0.05, 0.04, 0.0, 1),
        (half + 0.04, -0.28, 0.30, 0.04, -1.2, 1),  # out at the right and back
        (-half + 0.28, 0.29, 0.10, 0.04, 0.6, 1),
        (0.16, 0.31, 0.08, 0.03, 2.2, 2),
        (-0.22, -0.32, 0.12, 0.03, 3.5, 1),
    ]
    return [
        _Path(x + dx, y + dy, reach_x, reach_y, phase, turns, float(angle), float(swing))
        for (x, y, reach_x, reach_y, phase, turns), (dx, dy), angle, swing in zip(
            plans, jitter.tolist(), angles, swings, strict=True
        )
    ]
