"""Files that are written completely or not at all, and temporary folders that no killed process leaves behind."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from .errors import OutputError

UNFINISHED = ".unfinished"
"""Suffix of a file that is still being written."""

UNSAFE = re.compile(r"[^A-Za-z0-9_.-]|^\.+$")
"""What has no place in the name of a file that comes from outside: other characters, and names of dots alone."""

GUARD = "guard"
"""Whoever holds the lock of this file may create temporary folders and remove abandoned ones."""


def safe_file_name(name: str) -> str:
    """Return a name that stays inside its folder: `_` replaces other characters than letters, digits, _ . and -."""
    return UNSAFE.sub("_", name) or "_"


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that after a crash either the old or the new content is there. Raises OSError."""
    with atomic_file(path) as file:
        file.write(data)


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a binary file that replaces `path` at the end of the block, once it is on disk.

    An exception in the block leaves `path` as it was. Missing parent folders are created. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.parent / f"{path.name}{UNFINISHED}"
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Put the folder's entries on disk. Without this, a crash may lose a new file name."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def temp_dir() -> Iterator[Path]:
    """Create a folder below the system's temporary folder (`TMPDIR`), and remove it at the end of the block.

    The next call removes the folders of processes that were killed. Raises OutputError if the folder cannot be created.
    """
    root = Path(tempfile.gettempdir()) / f"sam3-node-{os.getuid()}"
    try:
        root.mkdir(mode=0o700, exist_ok=True)
        lock = _create_locked(root)
    except OSError as error:
        raise OutputError(
            f"cannot create temporary files in {root}: {error.strerror or error}; set TMPDIR"
        ) from error
    with lock:
        try:
            yield _folder_beside(Path(lock.name))
        finally:
            _remove(Path(lock.name))


def _create_locked(root: Path) -> IO[bytes]:
    """Remove abandoned folders, then create a new folder and return its locked lock file."""
    with (root / GUARD).open("wb") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        for path in root.glob("*.lock"):
            with path.open("rb") as abandoned:
                if _try_lock(abandoned):
                    _remove(path)
        lock = tempfile.NamedTemporaryFile(dir=root, suffix=".lock", delete=False)  # noqa: SIM115 - the caller closes
        _try_lock(lock)
        _folder_beside(Path(lock.name)).mkdir()
    return lock


def _try_lock(lock: IO[bytes]) -> bool:
    """Take the lock. Return False if another process holds it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove(lock: Path) -> None:
    shutil.rmtree(_folder_beside(lock), ignore_errors=True)
    lock.unlink(missing_ok=True)


def _folder_beside(lock: Path) -> Path:
    return lock.with_suffix("")
