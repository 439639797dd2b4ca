"""A short recording with ground truth, held in memory, to score masks against."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from ...errors import BagError
from ...types import NANOSECONDS, Frame, MaskFrame
from ...wire import decode_image
from .reader import RecordingReader

MIN_FRAMES = 2
TABLETOP = Path(__file__).parents[2] / "assets" / "tabletop.mcap"
"""The bundled clip."""


class LabelledClip:
    """One camera's frames and their truth, by index; the clip loops, so an index past the end starts again."""

    def __init__(self, frames: list[Frame], truth: dict[int, MaskFrame]) -> None:
        self.frames = frames
        self._truth = truth

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the first camera's clip; BagError if the file is damaged or one of its frames has no truth."""
        reader = RecordingReader([path])
        frames = list(reader.frames())
        if not frames:
            raise BagError(
                f"{path}: expected recorded frames, found none ({reader.lost or 'nothing is damaged'})"
            )
        camera = frames[0].camera
        frames = [frame for frame in frames if frame.camera == camera]
        truth = {masks.seq: masks for masks in reader.truth() if masks.camera == camera}
        if reader.lost is not None:
            raise BagError(reader.lost)
        labelled = sum(frame.seq in truth for frame in frames)
        if labelled < len(frames) or labelled < MIN_FRAMES:
            raise BagError(
                f"{path}: expected {MIN_FRAMES} or more frames of {camera}, each with its truth, "
                f"found {len(frames)} and truth of {labelled}"
            )
        return cls(frames, truth)

    def __len__(self) -> int:
        return len(self.frames)

    @property
    def fps(self) -> float:
        """Frames per second, on average."""
        span_ns = self.frames[-1].capture_ns - self.frames[0].capture_ns
        return (len(self) - 1) * NANOSECONDS / max(span_ns, 1)

    @property
    def labels(self) -> dict[int, str]:
        """Names of the objects by their ids in the truth."""
        return {instance.id: instance.label for masks in self._truth.values() for instance in masks.instances}

    def image(self, index: int) -> npt.NDArray[np.uint8]:
        """Return the image, BGR uint8 [h, w, 3]; WireError if it cannot be decoded."""
        return decode_image(self.frames[index % len(self)])

    def truth(self, index: int) -> dict[int, npt.NDArray[np.bool_]]:
        """Return the mask of each object that is in view, bool [h, w], by its id."""
        masks = self._truth[self.frames[index % len(self)].seq]
        return {instance.id: instance.mask.full() for instance in masks.instances if instance.area}

    def areas(self, object_id: int) -> npt.NDArray[np.int64]:
        """Return the pixels of an object that are in view, by index: [frames]."""
        areas = [
            sum(item.area for item in self._truth[frame.seq].instances if item.id == object_id)
            for frame in self.frames
        ]
        return np.array(areas)
