"""Pictures of a table from which things are taken, and on which they are put back."""

from collections.abc import Mapping

import cv2
import numpy as np

from sam3_node.types import NANOSECONDS, Frame, Image
from sam3_node.wire import encode_image

SIZE = (240, 320)
"""Height and width in pixels."""
FPS = 10
SIDE = 44
"""Half the diagonal of a thing, in pixels."""
COLOURS = {"red": (40, 40, 200), "blue": (190, 90, 40), "yellow": (50, 200, 220)}
"""Of the things, BGR."""


def draw(places: Mapping[str, tuple[int, int]]) -> Image:
    """Return a picture, BGR, with things by colour at the places (x, y) of their middles."""
    noise = np.random.default_rng(3).normal(0, 3, (*SIZE, 3))
    image = np.clip(np.array([150, 165, 170]) + noise, 0, 255).astype(np.uint8)
    for colour, place in places.items():
        base = colour.split()[0]
        if base == "red":
            cv2.circle(image, place, SIDE // 2, COLOURS[base], -1, cv2.LINE_AA)
            cv2.circle(image, place, SIDE // 5, (230, 230, 230), -1, cv2.LINE_AA)
        elif base == "blue":
            x, y = place
            cv2.rectangle(image, (x - 18, y - 26), (x + 18, y + 26), COLOURS[base], -1)
            cv2.rectangle(image, (x - 18, y - 6), (x + 18, y + 6), (240, 240, 240), -1)
        else:
            corners = [(place[0] + dx, place[1] + dy) for dx, dy in ((-28, 22), (28, 22), (0, -26))]
            cv2.fillPoly(image, [np.array(corners)], COLOURS[base], cv2.LINE_AA)
    return image


def make_frame(seq: int, places: Mapping[str, tuple[int, int]]) -> Frame:
    """Return the frame of a picture."""
    height, width = SIZE
    colour = encode_image(draw(places), "bgr8")
    return Frame("cam0", seq, 1 + seq * NANOSECONDS // FPS, width, height, "bgr8", colour)
