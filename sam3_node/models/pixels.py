"""From a frame to the pixels that networks read."""

from __future__ import annotations

import warnings

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor


def resized(
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


def normalised(
    image: npt.NDArray[np.uint8], size: tuple[int, int], mean: Tensor, std: Tensor, dtype: torch.dtype
) -> Tensor:
    """As `resized` of a BGR frame, less `mean`, divided by `std`, both [1, 3, 1, 1] on the device, in `dtype`."""
    return ((resized(image, size, mean.device) - mean) / std).to(dtype)


def _as_tensor(image: npt.NDArray[np.uint8]) -> Tensor:
    """Share the array's memory; torch would warn that it is read-only, but nothing here writes to it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable.*")
        return torch.from_numpy(np.ascontiguousarray(image))
