"""From what a network found to detections, and from how it failed to an error of ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import ModelError
from ..models.boxes import Letterbox, Selection
from ..types import Detection


def to_detections(chosen: Selection, frame: Letterbox, phrases: Sequence[str]) -> list[Detection]:
    """The boxes on the frame that they were found on, in one copy from the device; those of no area are left out."""
    columns = [frame.to_frame(chosen.boxes), chosen.scores[:, None], chosen.classes[:, None]]
    rows = torch.cat(columns, dim=1).tolist()
    return [
        Detection(phrases[int(index)], score, (x0, y0, x1, y1))
        for x0, y0, x1, y1, score, index in rows
        if x0 < x1 and y0 < y1
    ]


def corners(boxes: Tensor) -> Tensor:
    """Boxes [..., 4] as centre x, centre y, width and height -> x0 y0 x1 y1."""
    centre, half = boxes[..., :2], boxes[..., 2:] / 2
    return torch.cat([centre - half, centre + half], dim=-1)


def unit_square(image: npt.NDArray[np.uint8]) -> Letterbox:
    """Where a frame lies for a network whose boxes are parts of its width and height."""
    height, width = image.shape[:2]
    return Letterbox(width, height, (1 / width, 1 / height), (0, 0))


@contextmanager
def telling_failures(name: str) -> Iterator[None]:
    """Raise ModelError where torch fails, such as for want of memory."""
    try:
        yield
    except RuntimeError as error:
        first_line = str(error).strip().split("\n")[0][:300]
        raise ModelError(f"{name} failed: {type(error).__name__}: {first_line}") from error
