"""The clip on which the gate compares: frames of a recording, with prompts of its objects where these are known."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..bags.image_sampling import sample_images
from ..bags.native.labelled_clip import TABLETOP, LabelledClip
from ..tracking import ObjectPrompt
from ..types import Image

CLIP_FRAMES, CLIP_STEP = 16, 2


class GateClip(NamedTuple):
    """Frames, BGR uint8 [h, w, 3] each, and the boxes of the objects in view on the first.

    boxes: by the object's id (x0, y0, x1, y1) as fractions of the image's width and height; empty where nobody knows
    the objects.
    """

    frames: list[Image]
    boxes: dict[int, tuple[float, float, float, float]]

    def prompts(self, side: int) -> list[ObjectPrompt] | None:
        """Return a box prompt for each object, in pixels of a model's square image of `side`; None without boxes.

        Without boxes the reference looks for objects itself.
        """
        boxes = self.boxes.items()
        return [ObjectPrompt(key, box=[edge * side for edge in box]) for key, box in boxes] or None


def read_gate_clip(source: str | Path = TABLETOP) -> GateClip:
    """Read the first frames of a recording, a video or a folder of images; objects are known of the bundled recording.

    Raises CameraError or BagError for the source.
    """
    if Path(source) != TABLETOP:
        return GateClip(list(sample_images(source, CLIP_FRAMES, CLIP_STEP)), {})
    clip = LabelledClip.load(TABLETOP)
    frames = [clip.image(index * CLIP_STEP) for index in range(CLIP_FRAMES)]
    return GateClip(frames, {key: _bound(mask) for key, mask in clip.truth(0).items()})


def _bound(mask: np.ndarray) -> tuple[float, float, float, float]:
    """Return the tight box of a mask [h, w] as fractions of its width and height."""
    (height, width), (rows, columns) = mask.shape, mask.nonzero()
    x0, x1 = columns.min() / width, (columns.max() + 1) / width
    y0, y1 = rows.min() / height, (rows.max() + 1) / height
    return float(x0), float(y0), float(x1), float(y1)
