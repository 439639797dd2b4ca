"""Folders for what is needed only while a process lives. What a killed one left is removed by the next."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from ..errors import OutputError

GUARD = "guard"
"""Who holds this file's lock may make folders, and remove those of others."""


@contextmanager
def scratch() -> Iterator[Path]:
    """A new folder below the system's one for temporary files (`TMPDIR`), removed at the end of the block.

    Raises OutputError where there is no room for it.
    """
    root = Path(tempfile.gettempdir()) / f"sam3-node-{os.getuid()}"
    try:
        root.mkdir(mode=0o700, exist_ok=True)
        lock = _new(root)
    except OSError as error:
        raise OutputError(
            f"cannot put files aside in {root}: {error.strerror or error}; set TMPDIR"
        ) from error
    with lock:
        try:
            yield _folder_of(Path(lock.name))
        finally:
            _remove(Path(lock.name))


def _new(root: Path) -> IO[bytes]:
    """A lock that is held, and its folder; folders that nobody holds any more are gone."""
    with (root / GUARD).open("wb") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        for path in root.glob("*.lock"):
            with path.open("rb") as left:
                if _take(left):
                    _remove(path)
        lock = tempfile.NamedTemporaryFile(dir=root, suffix=".lock", delete=False)  # noqa: SIM115 - the caller closes
        _take(lock)
        _folder_of(Path(lock.name)).mkdir()
    return lock


def _take(lock: IO[bytes]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove(lock: Path) -> None:
    shutil.rmtree(_folder_of(lock), ignore_errors=True)
    lock.unlink(missing_ok=True)


def _folder_of(lock: Path) -> Path:
    return lock.with_suffix("")
