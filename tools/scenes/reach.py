"""A planar task for policies: a gripper must come to rest over the named one of four objects that drift on a table.

It is drawn with the shapes of scene:shapes. Positions and moves are in image sides, x to the right and y down, from the
upper left corner. A world is a pure function of its seed and of the moves.
"""

from typing import Literal

import numpy as np
import numpy.typing as npt

from sam3_node.cameras.scene import draw_table, fill_polygons, place_shape
from sam3_node.types import Image
from tools.scenes.textures import SURFACES, surface

Vector = npt.NDArray[np.float64]
Outcome = Literal["reached", "wrong", "late"]
"""The gripper rested over the target; over another object; or over none within `LIMIT` steps."""

SIDE = 256
"""Width and height of an image, in pixels."""
KINDS = ("ball", "box", "pyramid", "mug")
COLOURS = ("red", "yellow", "green", "blue")
SPEED = 0.1
"""Farthest move of a step."""
REACH = 0.05
"""Distance from an object's middle within which the gripper is over it."""
REST = 3
"""Steps in a row that the gripper must be over an object."""
LIMIT = 16
TARGET_ID = 1
GRIPPER_ID = 255
"""Ids of the truth. The other objects are 2, 3 and 4, the table is 0."""

_RADIUS = 0.1
_DRIFT = 0.008
_SPACING = 0.25
_SHADOW_PX = 3
_SHADOW_SHARE = 0.6
_STEEL = (120, 116, 110)
_DARK = (60, 58, 54)
_OTHER_SURFACES = tuple(kind for kind in SURFACES if kind != "wood")


class ReachWorld:
    """A table, four objects and a gripper. The first object is the target.

    No two objects have the same kind or colour, unless they are `alike`: then two others have the target's kind and
    one has its colour, so that the name still tells them apart. The table is wooden, unless it is `covered` by another
    surface.
    """

    def __init__(self, seed: int, covered: bool = False, alike: bool = False) -> None:
        rng = np.random.default_rng(seed)
        kinds = rng.permutation(KINDS).tolist()
        colours = rng.permutation(COLOURS).tolist()
        if alike:
            kinds = [kinds[0], kinds[0], kinds[0], kinds[1]]
            colours = [colours[0], colours[1], colours[2], colours[0]]
        self.kinds: list[str] = kinds
        self.colours: list[str] = colours
        self.outcome: Outcome | None = None
        """None while the episode goes on"""
        angle_rad = rng.uniform(0, 2 * np.pi)
        drift = rng.uniform(0, _DRIFT)
        self._drift = drift * np.array([np.cos(angle_rad), np.sin(angle_rad)])
        # halfway through the longest episode, the objects are about the middle
        self._places = _choose_places(rng, len(kinds)) - self._drift * LIMIT / 2
        self._angles_rad = rng.uniform(-0.44, 0.44, len(kinds)).tolist()
        self.gripper = rng.uniform(0.08, 0.92, 2)
        while _distance(self.gripper, self._places[0]) < 4 * REACH:
            self.gripper = rng.uniform(0.08, 0.92, 2)
        self._table = draw_table(rng, SIDE, SIDE)
        if covered:
            self._table = surface(rng, str(rng.choice(_OTHER_SURFACES)), SIDE)
        self._shaded_table = (self._table * _SHADOW_SHARE).astype(np.uint8)
        self._steps = 0
        self._rests = np.zeros(len(kinds), np.int64)

    def render(self) -> tuple[Image, Image]:
        """Return the image, BGR uint8 [SIDE, SIDE, 3], and the id at each pixel, uint8 [SIDE, SIDE]."""
        ids = np.zeros((SIDE, SIDE), np.uint8)
        image = self._table.copy()
        drawings = []
        things = zip(self.kinds, self.colours, self._places.tolist(), self._angles_rad, strict=True)
        for number, (kind, colour, place, angle_rad) in enumerate(things):
            for outlines, tone in place_shape(kind, colour, tuple(place), angle_rad, _RADIUS):
                drawings.append(([outline * SIDE for outline in outlines], tone))
                fill_polygons(ids, drawings[-1][0], TARGET_ID + number)
        # shadows lie on the table, to the right of objects and below them
        shadow = ids[:-_SHADOW_PX, :-_SHADOW_PX] > 0
        image[_SHADOW_PX:, _SHADOW_PX:][shadow] = self._shaded_table[_SHADOW_PX:, _SHADOW_PX:][shadow]
        for outlines, tone in drawings:
            fill_polygons(image, outlines, tone)
        self._draw_gripper(image, ids)
        return image, ids

    def find_move(self) -> Vector:
        """Return the expert's move: straight to where the target will be."""
        return shorten(self._places[0] + self._drift - self.gripper)

    def move(self, move: Vector) -> None:
        """Move the gripper by at most `SPEED`, let the objects drift, and judge the episode."""
        self.gripper = np.clip(self.gripper + shorten(move), 0, 1)
        self._places += self._drift
        self._steps += 1
        distances = np.linalg.norm(self._places - self.gripper, axis=1)
        self._rests = np.where(distances < REACH, self._rests + 1, 0)
        rested = np.flatnonzero(self._rests == REST)
        if len(rested):
            self.outcome = "wrong" if rested[0] else "reached"
        elif self._steps == LIMIT:
            self.outcome = "late"

    def _draw_gripper(self, image: Image, ids: Image) -> None:
        """Draw an arm from the upper edge, a palm and two fingers about the gripper's place."""
        x, y = self.gripper.tolist()
        for (left, top, right, bottom), tone in (
            ((-0.016, -1.0, 0.016, -0.05), _DARK),
            ((-0.06, -0.065, 0.06, -0.045), _STEEL),
            ((-0.06, -0.045, -0.044, 0.03), _STEEL),
            ((0.044, -0.045, 0.06, 0.03), _STEEL),
        ):
            offsets = np.array([(left, top), (right, top), (right, bottom), (left, bottom)])
            corners = offsets + np.array([x, y])
            fill_polygons(image, [corners * SIDE], np.array(tone, np.float64))
            fill_polygons(ids, [corners * SIDE], GRIPPER_ID)


def shorten(move: Vector) -> Vector:
    """Return a move of the same direction that is no longer than `SPEED`."""
    return move * min(1.0, SPEED / max(float(np.linalg.norm(move)), 1e-9))


def _choose_places(rng: np.random.Generator, count: int) -> Vector:
    """Return places [count, 2] that are not too near to each other, nor to an edge."""
    places: list[Vector] = []
    while len(places) < count:
        place = rng.uniform(0.18, 0.82, 2)
        if all(_distance(place, other) >= _SPACING for other in places):
            places.append(place)
    return np.array(places)


def _distance(one: Vector, other: Vector) -> float:
    return float(np.linalg.norm(one - other))
