"""A world simple enough to detect by its colours: flat blocks on grey, and a detector that finds them by name."""

from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np

from sam3_node.errors import ModelError, UnknownPhraseError
from sam3_node.types import Detection, Frame
from sam3_node.wire import encode_image

WIDTH = 320
HEIGHT = 240
COLOURS = {"red": (40, 40, 210), "green": (60, 170, 60), "blue": (200, 80, 40), "yellow": (40, 210, 230)}
PERIOD_NS = 40_000_000


@dataclass(frozen=True)
class Query:
    phrases: tuple[str, ...]


class ColourDetector:
    """Finds blocks of the colours that are asked for; counts its calls, and fails or sees nothing when told to.

    mistakes: colours that it takes for others.
    """

    name = "colours"

    def __init__(self, score: float = 0.9) -> None:
        self.score = score
        self.calls = 0
        self.blind = self.broken = False
        self.mistakes: dict[str, str] = {}

    def prepare(self, phrases: Sequence[str]) -> Query:
        if unknown := [phrase for phrase in phrases if phrase not in COLOURS]:
            raise UnknownPhraseError(f"expected one of {', '.join(COLOURS)}, found {unknown[0]!r}")
        return Query(tuple(phrases))

    def detect(
        self, image: np.ndarray, query: Query, threshold: float, trunk: object = None
    ) -> list[Detection]:
        self.calls += 1
        if self.broken:
            raise ModelError("expected a detector that works, found one that is told not to")
        if self.blind or self.score < threshold:
            return []
        return [
            Detection(self.mistakes.get(phrase, phrase), self.score, box)
            for phrase in query.phrases
            for box in blocks(image, phrase)
        ]


def blocks(image: np.ndarray, colour: str) -> list[tuple[float, float, float, float]]:
    """Boxes of the connected blocks of a colour, larger ones than specks."""
    close = np.abs(image.astype(int) - COLOURS[colour]).max(axis=2) < 30
    _, _, stats, _ = cv2.connectedComponentsWithStats(close.astype(np.uint8))
    return [(float(x), float(y), float(x + w), float(y + h)) for x, y, w, h, area in stats[1:] if area > 50]


def frame(seq: int, placed: dict[tuple[int, int], str], side: int = 50) -> Frame:
    """Return a frame with a coloured block at each top-left corner (x, y)."""
    image = np.full((HEIGHT, WIDTH, 3), 120, np.uint8)
    for (x, y), colour in placed.items():
        image[max(0, y) : y + side, max(0, x) : x + side] = COLOURS[colour]
    return Frame("cam0", seq, seq * PERIOD_NS, WIDTH, HEIGHT, "bgr8", encode_image(image, "bgr8"))
