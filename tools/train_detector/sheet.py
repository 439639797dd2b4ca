"""A contact sheet: frames with a detector's detections."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import cv2

from sam3_node.types import Detection
from sam3_node.visualization import contact_sheet, write_image

from .augmentation import Image

WIDTH, COLUMNS = 480, 4  # of a frame, pixels; frames in a row
INK, PAPER = (0, 255, 255), (0, 0, 0)


def draw_sheet(path: Path, frames: Sequence[tuple[Image, Iterable[Detection]]]) -> None:
    """Draw BGR frames, all of one shape, with boxes, labels and scores; raise OutputError if writing fails."""
    tiles = [_tile(image, detections) for image, detections in frames]
    write_image(path, contact_sheet(tiles, [""] * len(tiles), COLUMNS))


def _tile(image: Image, detections: Iterable[Detection]) -> Image:
    scale = WIDTH / image.shape[1]
    tile: Image = cv2.resize(image, (WIDTH, round(image.shape[0] * scale)), interpolation=cv2.INTER_AREA)
    for detection in detections:
        x0, y0, x1, y1 = (round(side * scale) for side in detection.box)
        cv2.rectangle(tile, (x0, y0), (x1, y1), INK, 1)
        text = f"{detection.label} {detection.score:.2f}"
        for colour, thickness in ((PAPER, 3), (INK, 1)):
            at = (min(x0, WIDTH - 8 * len(text)), max(10, y0 - 3))
            cv2.putText(tile, text, at, cv2.FONT_HERSHEY_SIMPLEX, 0.4, colour, thickness, cv2.LINE_AA)
    return tile
