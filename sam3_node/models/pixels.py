"""From a frame to the pixels that networks read."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

GREY = 114 / 255  # what the public weights were trained with around the picture


def resize_frame(
    image: npt.NDArray[np.uint8],
    size: tuple[int, int],
    device: str | torch.device,
    *,
    rgb: bool = False,
) -> Tensor:
    """BGR (or RGB) uint8 frame [h, w, 3] -> RGB pixels [1, 3, H, W] of `size` (H, W), float32 in 0..1 on the device."""
    pixels = _as_tensor(image).to(device, non_blocking=True).permute(2, 0, 1)[None]
    if pixels.device.type != "cpu":
        pixels = pixels.float()
    pixels = F.interpolate(pixels, size, mode="bilinear", align_corners=False, antialias=True)
    return (pixels if rgb else pixels.flip(1)).float() / 255


def normalise_frame(
    image: npt.NDArray[np.uint8], size: tuple[int, int], mean: Tensor, std: Tensor, dtype: torch.dtype
) -> Tensor:
    """As `resize_frame` of a BGR frame, less `mean`, divided by `std`, both [1, 3, 1, 1] on the device, in `dtype`."""
    return ((resize_frame(image, size, mean.device) - mean) / std).to(dtype)


class Letterbox(NamedTuple):
    """Where a frame lies in the network's input: resize_frame by `ratio` (x, y), then moved by `offset` (x, y) pixels."""

    width: int
    height: int
    ratio: tuple[float, float]
    offset: tuple[int, int]

    def to_frame(self, boxes: Tensor) -> Tensor:
        """Boxes [..., 4] in pixels of the network's input -> in pixels of the frame, clipped to it."""
        ratio, offset = boxes.new_tensor(self.ratio * 2), boxes.new_tensor(self.offset * 2)
        edge = boxes.new_tensor((self.width, self.height) * 2)
        return torch.minimum(((boxes - offset) / ratio).clamp(min=0), edge)


def letterbox(
    image: npt.NDArray[np.uint8],
    size: int | tuple[int, int],
    *,
    device: str | torch.device = "cpu",
    rgb: bool = False,
) -> tuple[Tensor, Letterbox]:
    """Fit a BGR (or RGB) uint8 frame [h, w, 3] into (H, W), or a square, its proportions kept, grey around it.

    Returns RGB pixels [1, 3, H, W], float32 in 0..1 on the device, and the way back.
    """
    high, wide = (size, size) if isinstance(size, int) else size
    height, width = image.shape[:2]
    scale = min(high / height, wide / width)
    rows, columns = max(1, round(height * scale)), max(1, round(width * scale))
    top, left = (high - rows) // 2, (wide - columns) // 2
    pixels = resize_frame(image, (rows, columns), device, rgb=rgb)
    pixels = F.pad(pixels, (left, wide - columns - left, top, high - rows - top), value=GREY)
    return pixels, Letterbox(width, height, (columns / width, rows / height), (left, top))


def unit_letterbox(image: npt.NDArray[np.uint8]) -> Letterbox:
    """Where a frame lies for a network whose boxes are parts of its width and height."""
    height, width = image.shape[:2]
    return Letterbox(width, height, (1 / width, 1 / height), (0, 0))


def _as_tensor(image: npt.NDArray[np.uint8]) -> Tensor:
    """Share the array's memory; torch would warn that it is read-only, but nothing here writes to it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.from_numpy(np.ascontiguousarray(image))
