"""Draws scene:shapes: a table top with moving, shaded objects and exact masks.

`Scene.render` is a pure function of the frame's index, so that any process can compute the truth of the frame with that
`seq`. The first object passes behind the second. The third leaves the image and comes back.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from urllib.parse import parse_qsl

import cv2
import numpy as np
import numpy.typing as npt

from ..errors import CameraError, did_you_mean
from ..types import Image
from .camera_source import CapturedImage
from .live_source import Pacer

Plane = npt.NDArray[np.float32]

_OVERSAMPLING = 3
_RADIUS = 0.13  # of an object, in image heights
_MARGIN = 1.5  # half a sprite's side in radii: space for rotation and the soft shadow
_SHADOW_STRENGTH = 0.5

COLOURS = {  # BGR
    "red": (52, 48, 196),
    "orange": (40, 128, 232),
    "yellow": (66, 196, 236),
    "green": (84, 158, 66),
    "blue": (186, 112, 44),
    "purple": (150, 70, 120),
    "white": (228, 232, 234),
    "pink": (160, 130, 236),
}
_SHADOW_OFFSET = 0.012  # of the height, away from the light at the upper left
_PERIOD_S = 8.0


@dataclass(frozen=True, slots=True)
class Sprite:
    """A drawn object: `pixels` BGRA uint8 [s, s, 4] with colour times alpha, `shadow` uint8 [s, s]."""

    name: str
    pixels: Image
    shadow: Image


def draw_sprite(kind: str, colour: str, rng: np.random.Generator, height: int) -> Sprite:
    """Draw a sprite of one of KINDS in one of COLOURS, for an image of `height` pixels."""
    side = 2 * round(_MARGIN * _RADIUS * height)
    canvas = _Canvas(side * _OVERSAMPLING)
    _DRAWERS[kind](canvas, np.array(COLOURS[colour], np.float32))
    return Sprite(f"{colour} {kind}", *canvas.finish(rng, side))


def draw_table(rng: np.random.Generator, width: int, height: int) -> Image:
    """Draw a wooden table seen from above, BGR uint8 [height, width, 3]."""
    y, x = np.mgrid[0:height, 0:width].astype(np.float32) / height
    grain = _noise(rng, width, height, (width / 6, height / 160)) + 0.6 * _noise(
        rng, width, height, (width / 3, height / 30)
    )
    rings = np.sin(2 * math.pi * (9 * y + 0.8 * _noise(rng, width, height, (width / 2, height / 5))))
    plank = np.floor(y * 4).astype(int)
    tone = rng.uniform(0.9, 1.08, 8).astype(np.float32)[plank]
    light = 1.1 - 0.28 * np.hypot(x - 0.35, y - 0.25)
    brightness = (1 + 0.09 * grain + 0.05 * rings) * tone * light
    brightness *= 1 - 0.45 * np.exp(-(((y * 4 - np.round(y * 4)) * height / 6) ** 2)) * (y > 0.02)
    speckle = rng.normal(0, 2.0, (height, width, 1)).astype(np.float32)
    return _to_bytes(brightness[:, :, None] * np.array((96, 134, 172), np.float32) + speckle)


class _Canvas:
    """A large drawing in progress. Coordinates are in radii from the middle, y down."""

    def __init__(self, side: int) -> None:
        self.side = side
        self.colour = np.zeros((side, side, 3), np.float32)
        self.alpha = np.zeros((side, side), np.uint8)
        self.y, self.x = (np.mgrid[0:side, 0:side].astype(np.float32) / side - 0.5) * (2 * _MARGIN)

    def polygon(self, *corners: tuple[float, float], round_by: float = 0.0) -> Image:
        """Return a filled polygon with rounded corners as a mask."""
        mask = np.zeros((self.side, self.side), np.uint8)
        points = (np.array(corners) / (2 * _MARGIN) + 0.5) * self.side
        cv2.fillPoly(mask, [points.round().astype(np.int32)], 255)
        if round_by:
            grown = round(round_by / (2 * _MARGIN) * self.side)
            cv2.polylines(mask, [points.round().astype(np.int32)], True, 255, 2 * grown, cv2.LINE_8)
        return mask

    def disc(self, radius: float, x: float = 0.0, y: float = 0.0) -> Image:
        return np.where(np.hypot(self.x - x, self.y - y) <= radius, 255, 0).astype(np.uint8)

    def fill(self, mask: Image, colour: npt.NDArray[np.float32], shade: Plane | float = 1.0) -> None:
        """Paint over the earlier drawing, brightness times `shade`."""
        painted = np.broadcast_to(np.asarray(shade, np.float32)[..., None] * colour, self.colour.shape)
        inside = mask > 0
        self.colour[inside] = painted[inside]
        self.alpha[inside] = 255

    def cut(self, mask: Image) -> None:
        self.alpha[mask > 0] = 0

    def bevel(self, width: float, strength: float) -> Plane:
        """Return brightness factors that light a rim of this width, on the shape so far, from the upper left."""
        sigma = width / (2 * _MARGIN) * self.side
        height = cv2.GaussianBlur(self.alpha.astype(np.float32) / 255, (0, 0), sigma)
        slope = np.gradient(height, axis=0) + np.gradient(height, axis=1)
        return np.asarray(1 + strength * sigma * slope, np.float32)

    def finish(self, rng: np.random.Generator, side: int) -> tuple[Image, Image]:
        """Return pixels and shadow at the final size, with a fine texture and a rim light."""
        mottle = 1 + 0.035 * _noise(rng, self.side, self.side, (self.side / 60, self.side / 60))
        colour = self.colour * (mottle * self.bevel(0.06, 0.55))[:, :, None]
        solid = self.alpha.astype(np.float32) / 255
        premultiplied = np.dstack([np.clip(colour, 0, 255) * solid[:, :, None], self.alpha])
        pixels = _to_bytes(cv2.resize(premultiplied, (side, side), interpolation=cv2.INTER_AREA))
        alpha = pixels[:, :, 3]
        pixels[:, :, :3] = np.minimum(pixels[:, :, :3], alpha[:, :, None])
        shadow = cv2.GaussianBlur(alpha.astype(np.float32), (0, 0), side / 36)
        return pixels, _to_bytes(shadow * _SHADOW_STRENGTH)


def _draw_ball(canvas: _Canvas, colour: npt.NDArray[np.float32]) -> None:
    """Draw a ball: Lambertian shading and a highlight."""
    r = 0.92
    z = np.sqrt(np.clip(r * r - canvas.x**2 - canvas.y**2, 0, None)) / r
    lit = np.clip((-0.45 * canvas.x - 0.5 * canvas.y) / r + 0.74 * z, 0, 1)
    canvas.fill(canvas.disc(r), colour, 0.45 + 0.7 * lit)
    highlight = np.exp(-((canvas.x + 0.32) ** 2 + (canvas.y + 0.36) ** 2) / 0.02)
    canvas.colour += 130 * highlight[:, :, None]


def _draw_box(canvas: _Canvas, colour: npt.NDArray[np.float32]) -> None:
    """Draw a parcel: two visible faces, a band of tape and a label."""
    canvas.fill(canvas.polygon((-0.9, -0.62), (0.9, -0.62), (0.9, 0.4), (-0.9, 0.4)), colour)
    canvas.fill(canvas.polygon((-0.9, 0.4), (0.9, 0.4), (0.86, 0.72), (-0.86, 0.72)), colour, 0.62)
    tape = np.array((170, 205, 222), np.float32)
    canvas.fill(canvas.polygon((-0.14, -0.62), (0.14, -0.62), (0.14, 0.4), (-0.14, 0.4)), tape)
    canvas.fill(canvas.polygon((-0.14, 0.4), (0.14, 0.4), (0.13, 0.58), (-0.13, 0.58)), tape, 0.7)
    label = np.array((236, 240, 242), np.float32)
    canvas.fill(canvas.polygon((0.3, -0.1), (0.76, -0.1), (0.76, 0.22), (0.3, 0.22)), label)
    for y in (-0.02, 0.06, 0.14):
        canvas.fill(canvas.polygon((0.36, y), (0.7, y), (0.7, y + 0.03), (0.36, y + 0.03)), label, 0.35)


def _draw_pyramid(canvas: _Canvas, colour: npt.NDArray[np.float32]) -> None:
    """Draw a pyramid: three faces that meet above the middle."""
    corners = [(0.0, -0.92), (0.86, 0.62), (-0.86, 0.62)]
    top = (0.0, 0.12)
    for first, second, shade in ((0, 1, 0.78), (1, 2, 0.6), (2, 0, 1.1)):
        canvas.fill(canvas.polygon(corners[first], corners[second], top, round_by=0.02), colour, shade)


def _draw_ring(canvas: _Canvas, colour: npt.NDArray[np.float32]) -> None:
    """Draw a torus with sprinkles that make its rotation visible."""
    radius = np.hypot(canvas.x, canvas.y)
    across = np.clip((radius - 0.66) / 0.28, -1, 1)
    outward = (-0.6 * canvas.x - 0.7 * canvas.y) / np.maximum(radius, 1e-3)
    canvas.fill(canvas.disc(0.94), colour, 0.62 + 0.4 * np.sqrt(1 - across**2) + 0.22 * across * outward)
    for k in range(11):
        angle, reach = 2.4 * k, 0.58 + 0.16 * (k % 3) / 2
        spot = canvas.disc(0.05, reach * math.cos(angle), reach * math.sin(angle))
        canvas.fill(spot, np.array((235, 240, 245), np.float32) if k % 2 else 0.35 * colour)
    canvas.cut(canvas.disc(0.38))


def _draw_mug(canvas: _Canvas, colour: npt.NDArray[np.float32]) -> None:
    """Draw a mug from the side: handle, round body and dark mouth."""
    canvas.fill(canvas.disc(0.46, 0.58, 0.0), colour, 0.8)
    canvas.cut(canvas.disc(0.27, 0.6, 0.0))
    body = canvas.polygon((-0.72, -0.66), (0.5, -0.66), (0.42, 0.74), (-0.64, 0.74), round_by=0.1)
    canvas.fill(body, colour, 0.5 + 0.62 * np.exp(-(((canvas.x + 0.34) / 0.5) ** 2)))
    stripe = (np.abs(canvas.y - 0.12) < 0.1) & (body > 0)
    canvas.colour[stripe] = 0.35 * canvas.colour[stripe] + 150 * (
        0.5 + 0.6 * np.exp(-(((canvas.x[stripe, None] + 0.34) / 0.5) ** 2))
    )
    mouth = np.hypot((canvas.x + 0.11) / 0.62, (canvas.y + 0.66) / 0.14) <= 1
    canvas.fill(mouth.astype(np.uint8), 0.28 * colour)


def _draw_screwdriver(canvas: _Canvas, colour: npt.NDArray[np.float32]) -> None:
    """Draw a screwdriver: grooved handle and steel shaft."""
    steel = np.array((196, 192, 188), np.float32)
    shaft = canvas.polygon((0.0, -0.09), (1.1, -0.09), (1.28, -0.14), (1.28, 0.14), (1.1, 0.09), (0.0, 0.09))
    canvas.fill(shaft, steel, 0.75 + 0.6 * np.exp(-(((canvas.y + 0.03) / 0.04) ** 2)))
    outline = ((-1.1, -0.2), (-0.1, -0.2), (0.06, -0.1), (0.06, 0.1), (-0.1, 0.2), (-1.1, 0.2))
    handle = canvas.polygon(*outline, round_by=0.09)
    grooves = 1 - 0.16 * (np.sin(canvas.y * 40) > 0.4) * (np.abs(canvas.x + 0.55) < 0.4)
    canvas.fill(handle, colour, (0.55 + 0.6 * np.exp(-(((canvas.y + 0.1) / 0.17) ** 2))) * grooves)


_DRAWERS: dict[str, Callable[[_Canvas, npt.NDArray[np.float32]], None]] = {
    "ball": _draw_ball,
    "box": _draw_box,
    "pyramid": _draw_pyramid,
    "ring": _draw_ring,
    "mug": _draw_mug,
    "screwdriver": _draw_screwdriver,
}
KINDS = tuple(_DRAWERS)


def _noise(rng: np.random.Generator, width: int, height: int, scale: tuple[float, float]) -> Plane:
    """Return smooth noise, about -1 to 1, with features of `scale` (x, y) pixels."""
    cells = (max(2, round(height / scale[1]) + 1), max(2, round(width / scale[0]) + 1))
    coarse = rng.uniform(-1, 1, cells).astype(np.float32)
    return np.asarray(cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC), np.float32)


def _to_bytes(values: npt.NDArray[np.float32]) -> Image:
    return np.clip(np.rint(values), 0, 255).astype(np.uint8)


_LIMITS = {
    "seed": (0, 2**31 - 1),
    "objects": (1, len(KINDS)),
    "frames": (0, 2**31 - 1),
    "width": (64, 4096),
    "height": (64, 4096),
    "fps": (1, 1000),
}


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
        if shadow := _warp(sprite.shadow, (centre[0] + shift, centre[1] + shift), angle_deg, ids.shape):
            place, alpha = shadow
            _darken(image[place], alpha)
        if body := _warp(sprite.pixels, centre, angle_deg, ids.shape):
            place, pixels = body
            window, alpha = image[place], pixels[:, :, 3]
            _darken(window, alpha)
            cv2.add(window, cv2.cvtColor(pixels, cv2.COLOR_BGRA2BGR), dst=window)
            np.copyto(ids[place], i + 1, where=alpha > 127)


class SceneSource:
    """A scene as a camera: its frames starting at index 0, at `fps`, or at the scene's own rate if that is 0.

    A scene with an end that loops starts again at index 0: the truth of `seq` is the truth of seq % frames.
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
        while not self._closed and (not self.is_finite or index < self.scene.frames):
            image, _ = self.scene.render(index)
            if not self._pacer.wait():
                return
            yield CapturedImage(image, time.time_ns())
            index += 1
            if self.scene.frames and self._loop:
                index %= self.scene.frames

    def close(self) -> None:
        self._closed = True


def _warp(
    sprite: Image, centre: tuple[float, float], angle_deg: float, size: tuple[int, ...]
) -> tuple[tuple[slice, slice], Image] | None:
    """Rotate the sprite about its middle, move it to `centre` and crop it to an image of `size`.

    Return its place in the image, and its pixels; None outside.
    """
    side = sprite.shape[0]
    reach = side / 2
    x0, y0 = (max(0, math.floor(c - reach)) for c in centre)
    x1, y1 = min(size[1], math.ceil(centre[0] + reach)), min(size[0], math.ceil(centre[1] + reach))
    if x0 >= x1 or y0 >= y1:
        return None
    matrix = cv2.getRotationMatrix2D((reach - 0.5, reach - 0.5), angle_deg, 1.0)
    matrix[:, 2] += (centre[0] - reach - x0, centre[1] - reach - y0)
    pixels = cv2.warpAffine(sprite, matrix, (x1 - x0, y1 - y0), flags=cv2.INTER_LINEAR)
    return (slice(y0, y1), slice(x0, x1)), pixels


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
    angles, swings = rng.uniform(-25, 25, 6).tolist(), rng.uniform(8, 22, 6).tolist()
    plans = [  # x, y, reach_x, reach_y, phase, turns
        (0.0, 0.0, half - 0.16, 0.03, -1.3, 1),  # to and fro through the middle, behind the next
        (0.02, 0.02, 0.05, 0.04, 0.0, 1),
        (half + 0.04, -0.28, 0.30, 0.04, -1.2, 1),  # out at the right and back
        (-half + 0.28, 0.29, 0.10, 0.04, 0.6, 1),
        (0.16, 0.31, 0.08, 0.03, 2.2, 2),
        (-0.22, -0.32, 0.12, 0.03, 3.5, 1),
    ]
    return [
        _Path(x + dx, y + dy, reach_x, reach_y, phase, turns, angle, swing)
        for (x, y, reach_x, reach_y, phase, turns), (dx, dy), angle, swing in zip(
            plans, jitter.tolist(), angles, swings, strict=True
        )
    ]
