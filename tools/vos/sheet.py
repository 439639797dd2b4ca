"""A contact sheet: a row of frames for each sequence, masks in colour, the truth as a white line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import cv2
import numpy as np

from sam3_node.types import Image, Instance, MaskFrame
from sam3_node.visualization import contact_sheet, overlay, write_image

from .followers import Masks
from .metrics import region_similarity
from .sequences import LabelledSequence, TrueFrame

COLUMNS = 6
WIDTH = 480
WHITE = (255, 255, 255)


class Sheet:
    """Collects reduced pictures of a few frames of each sequence, and writes them as one picture."""

    def __init__(self) -> None:
        self._pictures: list[Image] = []
        self._captions: list[str] = []

    def show(self, sequence: LabelledSequence, index: int, frame: TrueFrame, masks: Masks) -> None:
        """Draw the frame if the sheet includes it."""
        shown = np.linspace(0, sequence.length - 1, COLUMNS).round().astype(int)
        for _ in range(int((shown == index).sum())):  # a short sequence repeats frames
            ious = {
                object_id: region_similarity(mask.full(), frame.truth(object_id))
                for object_id, mask in masks.items()
            }
            self._pictures.append(draw(sequence.name, index, frame, masks, ious))
            self._captions.append(f"J {np.mean(list(ious.values())):.2f}" if ious else "prompted here")

    def write(self, path: Path) -> None:
        """Write the PNG; raise OutputError if that is not possible."""
        write_image(path, contact_sheet(self._pictures, self._captions, COLUMNS))


def draw(name: str, index: int, frame: TrueFrame, masks: Masks, ious: Mapping[int, float]) -> Image:
    """Draw a frame, reduced to WIDTH, with masks, ids and `ious`, and the truth as a white line."""
    height, width = frame.size
    size = (WIDTH, round(height * WIDTH / width))
    instances = tuple(
        Instance(object_id, "", ious[object_id], "tracked", 1, 0, mask) for object_id, mask in masks.items()
    )
    small = np.asarray(cv2.resize(frame.image, size, interpolation=cv2.INTER_AREA), np.uint8)
    canvas = overlay(small, MaskFrame(name, index, 0, width, height, instances=instances))
    for mask in frame.masks.values():
        truth = cv2.resize(mask.view(np.uint8), size, interpolation=cv2.INTER_NEAREST)
        outlines, _ = cv2.findContours(truth, cv2.RETR_LIST, cv2.CHAIN_APPROX_NONE)
        cv2.drawContours(canvas, outlines, -1, WHITE, 1, cv2.LINE_AA)
    return canvas
