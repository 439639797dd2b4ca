"""Shared steps of loading weights: choose the device and the dtype, and check the file against its SHA-256 digest.

The digest of FILE lies beside it in FILE.sha256, in the format of sha256sum, so `sha256sum -c` checks it too.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import torch

from ..errors import ModelError

_LINE = re.compile(r"([0-9a-f]{64}) [ *](\S.*)")


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


def digest_path(path: Path) -> Path:
    """Where the digest of a file is kept."""
    return path.with_name(f"{path.name}.sha256")


def write_digest(path: Path) -> Path:
    """Write the digest of a file beside it; returns where. Raises OSError where that cannot be done."""
    target = digest_path(path)
    target.write_text(f"{_digest(path)}  {path.name}\n")
    return target


def check_digest(path: Path, advice: str | None = None) -> None:
    """Raise ModelError unless the file is the one that its digest was written for.

    advice: how to get the file again; that for the bundled weights if left out.
    """
    beside, advice = digest_path(path), advice or _advice(path)
    try:
        line = _LINE.fullmatch(beside.read_text(errors="replace").strip())
        found = _digest(path)
    except OSError as error:
        raise ModelError(f"cannot check {path} against its digest: {error}; {advice}") from error
    if line is None or line[2] != path.name:
        raise ModelError(
            f"expected the sha256 of {path.name} in {beside}, as sha256sum writes it, found another text; "
            f"{advice}"
        )
    if line[1] != found:
        raise ModelError(
            f"{path} is damaged or not the file that {beside.name} is about: expected sha256 {line[1]}, "
            f"found {found}; {advice}"
        )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _advice(path: Path) -> str:
    return (
        f"install the package again (in a checkout: git checkout -- {path.parent}) "
        "or name other weights with --model.name"
    )
