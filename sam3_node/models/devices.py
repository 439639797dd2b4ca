"""Where a model lives and in which numbers it computes."""

from __future__ import annotations

import torch

from ..errors import ModelError


def pick_device(device: str | torch.device) -> torch.device:
    """The device of this name; "auto" is CUDA where there is one. Raises ModelError where it is absent."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    place = torch.device(device)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ModelError("device cuda was asked for, but torch finds no CUDA device; use --model.device cpu")
    return place


def pick_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """The dtype of this name; None or "auto" is bfloat16 on CUDA, float32 elsewhere. Raises ModelError."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype in (None, "auto"):
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    found = getattr(torch, str(dtype), None)
    if not isinstance(found, torch.dtype):
        raise ModelError(f"unknown dtype {dtype}; expected float32, bfloat16 or float16")
    return found
