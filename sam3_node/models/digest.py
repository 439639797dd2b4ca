"""SHA-256 digests beside files: FILE.sha256 in sha256sum's format, so that `sha256sum -c` checks it, too."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from ..errors import ModelError

_LINE = re.compile(r"([0-9a-f]{64}) [ *](\S.*)")


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
