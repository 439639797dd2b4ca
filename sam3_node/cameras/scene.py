"""Draws scene:shapes: a table top with moving, shaded objects and exact masks.

`Scene.render` is a pure function of the frame's index, so that any process can compute the truth of the frame with that
`seq`. The first object passes behind the second. The third leaves the image and comes back.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple
from urllib.parse import parse_qsl

import cv2
import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import CameraError, did_you_mean
from ..settings import describe_faults
from ..types import Image
from .camera_source import CapturedImage
from .live_source import PlayedSource

Points = npt.NDArray[np.float64]

# radius of an object, in image heights
_RADIUS = 0.13
# polygons are drawn to a 16th of a pixel
_SHIFT = 4
# share of the light that reaches the table in a shadow
_SHADOW_SHARE = 0.6
# distance of a shadow from its object, in image heights, away from the light at the upper left
_SHADOW_OFFSET = 0.012
# time after which all objects are where they began
_PERIOD_S = 8.0

COLOURS = {
    "red": (52, 48, 196),
    "orange": (40, 128, 232),
    "yellow": (66, 196, 236),
    "green": (84, 158, 66),
    "blue": (186, 112, 44),
    "purple": (150, 70, 120),
    "white": (228, 232, 234),
    "pink": (160, 130, 236),
}
"""Colours of objects, BGR."""

# colours of the parts of objects, BGR
_PAPER = (236, 240, 242)
_TAPE = (170, 205, 222)
_STEEL = (196, 192, 188)


class ShapePart(NamedTuple):
    """A filled polygon [n, 2], in radii from the object's middle, y down. A second polygon is cut out of it.

    It has the object's colour, or its own (BGR), times `shade`.
    """

    outlines: tuple[Points, ...]
    shade: float = 1.0
    colour: tuple[int, int, int] | None = None


def _polygon(*corners: tuple[float, float]) -> tuple[Points]:
    return (np.array(corners, np.float64),)


def _rectangle(left: float, top: float, right: float, bottom: float) -> tuple[Points]:
    return _polygon((left, top), (right, top), (right, bottom), (left, bottom))


def _ellipse(x: float, y: float, width: float, height: float | None = None) -> tuple[Points]:
    """Return an ellipse with these half axes; a disc without `height`."""
    angles = np.linspace(0, 2 * np.pi, 48, endpoint=False)
    if height is None:
        height = width
    return (np.stack([x + width * np.cos(angles), y + height * np.sin(angles)], axis=1),)


# levels of rounded shapes, from their shaded rim to their lit middle
_LEVELS = np.linspace(0, 1, 9)
# angle and distance from the middle of the ring's sprinkles
_SPRINKLES = [(2.4 * k, 0.58 + 0.08 * (k % 3)) for k in range(11)]

SHAPES: dict[str, tuple[ShapePart, ...]] = {
    "ball": (
        *(ShapePart(_ellipse(-0.3 * t, -0.34 * t, 0.92 - 0.8 * t), 0.5 + 0.6 * t) for t in _LEVELS),
        ShapePart(_ellipse(-0.32, -0.36, 0.07), colour=_PAPER),
    ),
    "box": (  # a parcel: two visible faces, a band of tape and a label
        ShapePart(_rectangle(-0.9, -0.62, 0.9, 0.4)),
        ShapePart(_polygon((-0.9, 0.4), (0.9, 0.4), (0.86, 0.72), (-0.86, 0.72)), 0.62),
        ShapePart(_rectangle(-0.14, -0.62, 0.14, 0.4), colour=_TAPE),
        ShapePart(_rectangle(-0.14, 0.4, 0.14, 0.58), 0.7, _TAPE),
        ShapePart(_rectangle(0.3, -0.1, 0.76, 0.22), colour=_PAPER),
        *(ShapePart(_rectangle(0.36, y, 0.7, y + 0.03), 0.35, _PAPER) for y in (-0.02, 0.06, 0.14)),
    ),
    "pyramid": (  # three faces that meet above the middle
        ShapePart(_polygon((0.0, -0.92), (0.86, 0.62), (0.0, 0.12)), 0.78),
        ShapePart(_polygon((0.86, 0.62), (-0.86, 0.62), (0.0, 0.12)), 0.6),
        ShapePart(_polygon((-0.86, 0.62), (0.0, -0.92), (0.0, 0.12)), 1.1),
    ),
    "ring": (  # with sprinkles that make its rotation visible
        *(
            ShapePart(_ellipse(0, 0, 0.94 - 0.2 * t) + _ellipse(0, 0, 0.38 + 0.2 * t), 0.6 + 0.4 * t)
            for t in _LEVELS
        ),
        *(
            ShapePart(_ellipse(reach * math.cos(turn), reach * math.sin(turn), 0.05), colour=_PAPER)
            for turn, reach in _SPRINKLES
        ),
    ),
    "mug": (  # from the side: handle, round body, stripe and dark mouth
        ShapePart(_ellipse(0.58, 0.0, 0.46) + _ellipse(0.6, 0.0, 0.27), 0.8),
        *(ShapePart(_rectangle(-0.78 + 0.34 * t, -0.7, 0.54 - 0.7 * t, 0.8), 0.6 + 0.5 * t) for t in _LEVELS),
        ShapePart(_rectangle(-0.78, 0.02, 0.54, 0.22), 0.9, _PAPER),
        ShapePart(_ellipse(-0.12, -0.7, 0.66, 0.14), 0.28),
    ),
    "screwdriver": (  # grooved handle and steel shaft
        ShapePart(_rectangle(0.0, -0.09, 1.25, 0.09), 0.8, _STEEL),
        ShapePart(_rectangle(0.0, -0.06, 1.25, 0.0), 1.2, _STEEL),
        ShapePart(_rectangle(-1.18, -0.28, -0.05, 0.28), 0.7),
        ShapePart(_polygon((-0.05, -0.28), (0.14, -0.14), (0.14, 0.14), (-0.05, 0.28)), 0.6),
        *(ShapePart(_rectangle(-1.1, y, -0.1, y + 0.1), 1.1) for y in (-0.2, -0.05, 0.1)),
    ),
}


class SceneParameters(BaseModel):
    """Parameters of a scene: the size in pixels, and frames a second. With 0 frames it never ends."""

    model_config = ConfigDict(extra="forbid")

    seed: int = Field(0, ge=0, le=2**31 - 1)
    objects: int = Field(5, ge=1, le=len(SHAPES))
    frames: int = Field(0, ge=0, le=2**31 - 1)
    width: int = Field(640, ge=64, le=4096)
    height: int = Field(480, ge=64, le=4096)
    fps: int = Field(30, ge=1, le=1000)


class Scene:
    """A seeded scene of 1 to 6 objects. Id k of the truth is `names[k - 1]`, id 0 the table.

    Every object is in view at index 0. The source ends after `frames` frames. With 0 it never ends.
    """

    def __init__(self, **parameters: int | str) -> None:
        chosen = SceneParameters.model_validate(parameters)
        self.width = chosen.width
        self.height = chosen.height
        self.frames = chosen.frames
        self.fps = chosen.fps
        rng = np.random.default_rng(chosen.seed)
        self._table = draw_table(rng, self.width, self.height)
        self._shaded_table = (self._table * _SHADOW_SHARE).astype(np.uint8)
        kinds = rng.permutation(list(SHAPES)).tolist()
        colours = rng.permutation(list(COLOURS)).tolist()
        # the second object hides the first; a screwdriver is too slim for that
        if kinds[1] == "screwdriver":
            kinds[1], kinds[0] = kinds[0], kinds[1]
        self._kinds = kinds[: chosen.objects]
        self._colours = colours[: chosen.objects]
        self._paths = _choose_paths(rng, self.width / self.height)[: chosen.objects]
        self.names = tuple(map(" ".join, zip(self._colours, self._kinds, strict=True)))

    @classmethod
    def from_uri(cls, uri: str) -> Scene:
        """Return the scene of scene:shapes?seed=3&objects=4&frames=300&width=640&height=480&fps=30.

        Raises CameraError for another drawing, an unknown parameter or one out of range.
        """
        drawing, _, query = uri.removeprefix("scene:").partition("?")
        if drawing != "shapes":
            nearest = did_you_mean(f"scene:{drawing}", ("scene:shapes", "scene:tabletop"))
            raise CameraError(f"expected scene:shapes or scene:tabletop, found {uri!r}{nearest}")
        try:
            return cls(**dict(parse_qsl(query, keep_blank_values=True)))
        except ValidationError as error:
            names = ", ".join(SceneParameters.model_fields)
            raise CameraError(f"{uri}: {describe_faults(error)}; the parameters are {names}") from error

    def render(self, index: int) -> tuple[Image, Image]:
        """Return frame `index`: the image, BGR uint8 [h, w, 3], and the id at each pixel, uint8 [h, w]."""
        # the shadows of all objects first, because they lie on the table
        ids, shadow = np.zeros((2, self.height, self.width), np.uint8)
        drawings = [self._draw(number, index / (self.fps * _PERIOD_S)) for number in range(len(self._paths))]
        for polygons, _ in itertools.chain(*drawings):
            fill_polygons(shadow, polygons, 255, _SHADOW_OFFSET * self.height)
        image = np.asarray(cv2.copyTo(self._shaded_table, shadow, self._table.copy()), np.uint8)
        # painter's order: the second object last, so that the first passes behind it
        for number in sorted(range(len(drawings)), key=lambda number: number == 1):
            for polygons, colour in drawings[number]:
                fill_polygons(image, polygons, colour)
                fill_polygons(ids, polygons, number + 1)
        return image, ids

    def _draw(self, number: int, cycle: float) -> list[tuple[list[Points], Points]]:
        """Return the polygons in pixels and the colour (BGR) of each part of an object, after `cycle` periods."""
        # where the object is, and how it is turned
        path = self._paths[number]
        t = 2 * math.pi * path.turns * cycle + path.phase
        angle_rad = path.angle_rad + path.swing_rad * math.sin(t + 1.0)
        centre = path.x + path.reach_x * math.sin(t), path.y + path.reach_y * math.cos(t)
        middle = self.width / 2, self.height / 2
        parts = place_shape(self._kinds[number], self._colours[number], centre, angle_rad, _RADIUS)
        return [
            ([outline * self.height + middle for outline in outlines], colour) for outlines, colour in parts
        ]


class SceneSource(PlayedSource):
    """A scene as a camera. It plays the frames from index 0 at `fps`, or at the scene's own rate if that is 0.

    A scene with an end that loops starts again at index 0. The truth of `seq` is the truth of seq % frames then.
    """

    def __init__(self, uri: str, fps: float, loop: bool, stop: threading.Event) -> None:
        self.scene = Scene.from_uri(uri)
        super().__init__(uri, fps or self.scene.fps, loop, stop)
        self.is_finite = self.scene.frames > 0 and not loop

    def _play(self) -> Iterator[CapturedImage]:
        indices: Iterable[int] = itertools.count()
        if self.scene.frames:
            indices = range(self.scene.frames)
        for index in indices:
            yield CapturedImage(self.scene.render(index)[0], 0)


def place_shape(
    kind: str, colour: str, centre: tuple[float, float], angle_rad: float, radius: float
) -> list[tuple[list[Points], Points]]:
    """Return the outlines and the colour (BGR) of each part of a shape, in the unit of `centre` and `radius`."""
    cosine = radius * math.cos(angle_rad)
    sine = radius * math.sin(angle_rad)
    rotation = np.array([[cosine, -sine], [sine, cosine]])
    return [
        (
            [outline @ rotation + centre for outline in part.outlines],
            np.multiply(part.colour or COLOURS[colour], part.shade),
        )
        for part in SHAPES[kind]
    ]


def draw_table(rng: np.random.Generator, width: int, height: int) -> Image:
    """Draw a wooden table of four planks seen from above, BGR uint8 [height, width, 3]."""
    grain = rng.normal(1, 0.06, (160, 6)).astype(np.float32)
    tones = rng.uniform(0.85, 1.08, 4)[4 * np.arange(height) // height]
    brightness = cv2.resize(grain, (width, height), interpolation=cv2.INTER_CUBIC) * tones[:, None]
    speckle = rng.normal(0, 2.0, (height, width, 1))
    table = np.clip(brightness[:, :, None] * (96, 134, 172) + speckle, 0, 255)
    return np.asarray(table, np.uint8)


def fill_polygons(
    image: Image, polygons: Sequence[Points], colour: Points | int, offset: float = 0.0
) -> None:
    """Fill a polygon in pixels, but for the parts of it that the others cover, moved right and down by `offset`."""
    points = [np.rint((polygon + offset) * 2**_SHIFT).astype(np.int32) for polygon in polygons]
    cv2.fillPoly(image, points, np.broadcast_to(colour, 3).tolist(), cv2.LINE_8, _SHIFT)


class _Path(NamedTuple):
    """A closed curve and an oscillating rotation of an object.

    `x` and `y` are the curve's middle, `reach_x` and `reach_y` its reach, in image heights. The image spans
    -aspect/2..aspect/2 by -0.5..0.5. The object begins at `phase` (radians), and runs `turns` times in one period. Its
    angle oscillates about `angle_rad` by `swing_rad`.
    """

    x: float
    y: float
    reach_x: float
    reach_y: float
    phase: float
    turns: float
    angle_rad: float = 0.0
    swing_rad: float = 0.0


def _choose_paths(rng: np.random.Generator, aspect: float) -> list[_Path]:
    """Choose the paths of six objects."""
    half = aspect / 2
    paths = [
        _Path(0.0, 0.0, half - 0.16, 0.03, -1.3, 1),  # to and fro through the middle, behind the next
        _Path(0.02, 0.02, 0.05, 0.04, 0.0, 1),
        _Path(half + 0.04, -0.28, 0.30, 0.04, -1.2, 1),  # out at the right and back
        _Path(-half + 0.28, 0.29, 0.10, 0.04, 0.6, 1),
        _Path(0.16, 0.31, 0.08, 0.03, 2.2, 2),
        _Path(-0.22, -0.32, 0.12, 0.03, 3.5, 1),
    ]

    # the order of these draws makes a seed's scene
    moves = rng.uniform(-0.02, 0.02, (6, 2)).tolist()
    angles_rad = rng.uniform(-0.44, 0.44, 6).tolist()
    swings_rad = rng.uniform(0.14, 0.38, 6).tolist()
    chosen = []
    for path, (x, y), angle_rad, swing_rad in zip(paths, moves, angles_rad, swings_rad, strict=True):
        chosen.append(path._replace(x=path.x + x, y=path.y + y, angle_rad=angle_rad, swing_rad=swing_rad))
    return chosen
