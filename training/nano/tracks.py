"""Train on pseudo-tracks of things that move: clips of `python -m training.doubt.pseudo --moving`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sam3_node.errors import CameraError
from sam3_node.types import Image
from tools.scenes.clips import list_clips, read_clip
from tools.vos.sequences import UNKNOWN

from .taught import camera_path, see

Labels = npt.NDArray[np.uint8]  # [h, w]

WANDERING = 0.3
"""Share of clips over which a camera wanders, too."""
MOST_STRIDE = 3
"""Largest distance of the frames of a clip. Nothing moves far between frames that lie close together."""


class PseudoTracks:
    """The clips of a folder; raises CameraError where there are none."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names = list_clips(folder)
        if not self._names:
            raise CameraError(
                f"expected clips in {folder}, found none: python -m training.doubt.pseudo --moving"
            )
        path = folder / UNKNOWN
        self._unknown: dict[str, list[list[int]]] = json.loads(path.read_text()) if path.is_file() else {}

    def clip(self, rng: np.random.Generator, frames: int) -> tuple[list[Image], list[Labels]] | None:
        """Draw a clip, sometimes backwards; None where the truth of all its objects is unknown on a frame."""
        name = self._names[int(rng.integers(len(self._names)))]
        clip = read_clip(self._folder, name)
        stride = int(rng.integers(1, max(1, min(MOST_STRIDE, (len(clip) - 1) // max(1, frames - 1))) + 1))
        start = int(rng.integers(0, max(1, len(clip) - stride * (frames - 1))))
        indices = [min(start + stride * number, len(clip) - 1) for number in range(frames)]
        if rng.random() < 0.5:
            indices.reverse()
        # an object whose mask is in doubt on one of the frames is taught on none: it becomes background
        doubted = [object_id for at, object_id in self._unknown.get(name, []) if at in indices]
        images = [clip.image(index) for index in indices]
        labels = [np.where(np.isin(clip.labels(index), doubted), 0, clip.labels(index)) for index in indices]
        labels = [each.astype(np.uint8) for each in labels]
        if not labels[0].any():
            return None
        if frames > 1 and rng.random() < WANDERING:
            path = camera_path(rng, labels[0].shape, frames)
            views = [see(affine, None, *view) for affine, *view in zip(path, images, labels, strict=True)]
            images = [view[0] for view in views]
            labels = [view[1] for view in views]
        return images, labels
