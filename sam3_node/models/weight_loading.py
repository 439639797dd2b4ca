"""Common steps of loading weights: choose the device and the dtype, and check the file against its SHA-256 digest.

The digest of FILE is in FILE.sha256 beside it, in the format of sha256sum, so `sha256sum -c` can check it too.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import torch

from ..errors import ModelError

_LINE = re.compile(r"([0-9a-f]{64}) [ *](\S.*)")


def pick_device(device: str | torch.device) -> torch.device:
    """Return the device with this name; "auto" is CUDA if available, else CPU. Raises ModelError if it is missing."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = torch.device(device)
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ModelError("device cuda was requested, but torch finds no CUDA device; use --model.device cpu")
    return chosen


def pick_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """Return the dtype with this name; None or "auto" is bfloat16 on CUDA, else float32. Raises ModelError."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype in (None, "auto"):
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    named = getattr(torch, str(dtype), None)
    if not isinstance(named, torch.dtype):
        raise ModelError(f"unknown dtype {dtype}; expected float32, bfloat16 or float16")
    return named


def digest_path(path: Path) -> Path:
    """Return the path of a file's digest."""
    return path.with_name(f"{path.name}.sha256")


def write_digest(path: Path) -> Path:
    """Write the digest of a file beside it, and return its path. Raises OSError if it cannot be written."""
    target = digest_path(path)
    target.write_text(f"{_compute_sha256(path)}  {path.name}\n")
    return target


def check_digest(path: Path, hint: str | None = None) -> None:
    """Raise ModelError unless the file has its stored digest.

    hint: how to get the file again; by default, how to get the bundled weights again.
    """
    digest_file, hint = digest_path(path), hint or _reinstall_hint(path)
    try:
        line = _LINE.fullmatch(digest_file.read_text(errors="replace").strip())
        digest = _compute_sha256(path)
    except OSError as error:
        raise ModelError(f"cannot check {path} against its digest: {error}; {hint}") from error
    if line is None or line[2] != path.name:
        raise ModelError(
            f"expected the sha256 of {path.name} in {digest_file}, as sha256sum writes it, found another text; "
            f"{hint}"
        )
    if line[1] != digest:
        raise ModelError(
            f"{path} is damaged or not the file of {digest_file.name}: expected sha256 {line[1]}, "
            f"found {digest}; {hint}"
        )


def _compute_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _reinstall_hint(path: Path) -> str:
    return (
        f"install the package again (in a checkout: git checkout -- {path.parent}) "
        "or name other weights with --model.name"
    )
