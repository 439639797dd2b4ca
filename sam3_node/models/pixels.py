"""Convert frames to the input of networks, and boxes on this input back to the frame."""

from __future__ import annotations

import warnings
from typing import Literal, NamedTuple

import cv2
import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

Resize = Literal["bilinear", "antialias"]

GREY = 114 / 255  # padding colour that the public weights were trained with


def resize_frame(
    image: npt.NDArray[np.uint8],
    size: tuple[int, int],
    device: str | torch.device,
    *,
    rgb: bool = False,
    resize: Resize = "antialias",
) -> Tensor:
    """Resize a BGR (or RGB) uint8 frame [h, w, 3] to RGB pixels [1, 3, H, W], float32 in 0..1, on the device.

    size: (H, W). resize: "bilinear" takes the four nearest pixels of each point, as OpenCV's INTER_LINEAR does.
    """
    is_resized = resize == "bilinear" and torch.device(device).type == "cpu"
    if is_resized:
        image = np.asarray(cv2.resize(image, size[::-1], interpolation=cv2.INTER_LINEAR), np.uint8)
    pixels = _upload(_as_tensor(image), torch.device(device)).permute(2, 0, 1)[None]
    if pixels.device.type != "cpu":
        pixels = pixels.float()
    if not is_resized:  # also where the size is right, so that the tensor's layout is always the same
        pixels = F.interpolate(
            pixels, size, mode="bilinear", align_corners=False, antialias=resize == "antialias"
        )
    return (pixels if rgb else pixels.flip(1)).float() / 255


def normalise_frame(
    image: npt.NDArray[np.uint8], size: tuple[int, int], mean: Tensor, std: Tensor, dtype: torch.dtype
) -> Tensor:
    """Resize a BGR frame as `resize_frame` does, subtract `mean`, and divide by `std`, both [1, 3, 1, 1]."""
    return ((resize_frame(image, size, mean.device) - mean) / std).to(dtype)


class Letterbox(NamedTuple):
    """The position of a frame in the network's input."""

    width: int
    """of the frame, pixels"""
    height: int
    """of the frame, pixels"""
    ratio: tuple[float, float]
    """(x, y) scale from the frame to the input"""
    offset: tuple[int, int]
    """(x, y) pixels by which the scaled frame is moved"""

    def to_frame(self, boxes: Tensor) -> Tensor:
        """Convert boxes [..., 4] from pixels of the network's input to pixels of the frame, clipped to the frame."""
        ratio, offset = boxes.new_tensor(self.ratio * 2), boxes.new_tensor(self.offset * 2)
        edge = boxes.new_tensor((self.width, self.height) * 2)
        return torch.minimum(((boxes - offset) / ratio).clamp(min=0), edge)


def letterbox(
    image: npt.NDArray[np.uint8],
    size: int | tuple[int, int],
    *,
    device: str | torch.device = "cpu",
    rgb: bool = False,
    resize: Resize = "antialias",
    stride: int | None = None,
) -> tuple[Tensor, Letterbox]:
    """Fit a BGR (or RGB) uint8 frame [h, w, 3] into (H, W), or a square, with its proportions and grey padding.

    Return RGB pixels [1, 3, H, W], float32 in 0..1 on the device, and the frame's position in them. With `stride`, H
    and W are as small as multiples of it can be, as in the public implementation of YOLO-World.
    """
    high, wide = (size, size) if isinstance(size, int) else size
    height, width = image.shape[:2]
    scale = min(high / height, wide / width)
    rows, columns = max(1, round(height * scale)), max(1, round(width * scale))
    ratio = (columns / width, rows / height)
    if stride is not None:
        high, wide = -(-rows // stride) * stride, -(-columns // stride) * stride
        ratio = (scale, scale)  # the public implementation leaves the rounding out of the boxes
    top, left = (high - rows) // 2, (wide - columns) // 2
    pixels = resize_frame(image, (rows, columns), device, rgb=rgb, resize=resize)
    pixels = F.pad(pixels, (left, wide - columns - left, top, high - rows - top), value=GREY)
    return pixels, Letterbox(width, height, ratio, (left, top))


def unit_letterbox(image: npt.NDArray[np.uint8]) -> Letterbox:
    """Return the position of a frame for a network whose boxes are fractions of its width and height."""
    height, width = image.shape[:2]
    return Letterbox(width, height, (1 / width, 1 / height), (0, 0))


def _upload(image: Tensor, device: torch.device) -> Tensor:
    """Copy an image to the device through pinned memory, so that the host does not wait for the device."""
    return image if device.type == "cpu" else image.pin_memory().to(device, non_blocking=True)


def _as_tensor(image: npt.NDArray[np.uint8]) -> Tensor:
    """Share the array's memory. Torch would warn that it is read-only, but nothing here writes to it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.from_numpy(np.ascontiguousarray(image))
