"""A short recording with ground truth, held whole, to judge masks by."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from ...errors import BagError
from ...types import NANOSECONDS, Frame, MaskFrame
from ...wire import decode_image
from .frames import read_frames, read_truth

MIN_FRAMES = 2
TABLETOP = Path(__file__).parents[2] / "assets" / "tabletop.mcap"  # the one that is bundled


class LabelledClip:
    """One camera's frames and their truth, by index; an index past the end is that of a player that loops."""

    def __init__(self, frames: list[Frame], truth: dict[int, MaskFrame]) -> None:
        self.frames = frames
        self._truth = truth

    @classmethod
    def load(cls, path: Path) -> Self:
        """The first camera's; BagError where the file is damaged or a frame of it has no truth."""
        frames = list(read_frames(path))
        camera = frames[0].camera
        frames = [frame for frame in frames if frame.camera == camera]
        truth = {masks.seq: masks for masks in read_truth(path) if masks.camera == camera}
        known = sum(frame.seq in truth for frame in frames)
        if known < len(frames) or known < MIN_FRAMES:
            raise BagError(
                f"{path}: expected {MIN_FRAMES} or more frames of {camera}, each with its truth, "
                f"found {len(frames)} and truth of {known}"
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
        """The objects' names by their ids in the truth."""
        return {found.id: found.label for masks in self._truth.values() for found in masks.instances}

    def image(self, index: int) -> npt.NDArray[np.uint8]:
        """The picture, BGR uint8 [h, w, 3]; WireError where it cannot be decoded."""
        return decode_image(self.frames[index % len(self)])

    def truth(self, index: int) -> dict[int, npt.NDArray[np.bool_]]:
        """The mask of each object that is in view, bool [h, w], by its id."""
        masks = self._truth[self.frames[index % len(self)].seq]
        return {found.id: found.mask.full() for found in masks.instances if found.area}

    def areas(self, object_id: int) -> npt.NDArray[np.int64]:
        """Pixels of an object in view, by index: [frames]."""
        masks = (self._truth[frame.seq].instances for frame in self.frames)
        return np.array([sum(found.area for found in one if found.id == object_id) for one in masks])
