"""Where a replay keeps its results: named values, each there as a whole or not at all."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from ..errors import OutputError

UNFINISHED, LOCK = ".unfinished", ".lock"


class HeldError(OutputError):
    """Another process writes to this place."""


class Store(Protocol):
    """Named values. Names are relative paths with `/`. Every method raises OutputError where the place fails."""

    @property
    def folder(self) -> Path:
        """Where on this machine files can be put aside, and files be made that are to be kept."""

    def keep(self, paths: Sequence[Path]) -> None:
        """Keep files and folders that were made in `folder`, as values of their names there."""

    def write(self, name: str, data: bytes) -> None:
        """Keep a value, in place of one of this name; after a crash either is there as a whole."""

    def read(self, name: str) -> bytes:
        """A value that is there."""

    def exists(self, name: str) -> bool:
        """Whether there is a value of this name."""

    def names(self, folder: str = "") -> list[str]:
        """The names that begin with `folder` and a `/` (all, without one), in their order."""

    def delete(self, name: str) -> None:
        """Forget a value; nothing happens where there is none."""

    def held(self) -> AbstractContextManager[None]:
        """Keep other processes from writing meanwhile. Raises HeldError where one does that cannot be kept from it."""


class FolderStore:
    """A folder of files, made where it is missing. Raises OutputError where it cannot be."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with _telling(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def keep(self, paths: Sequence[Path]) -> None:
        """They are where they are to be."""

    def write(self, name: str, data: bytes) -> None:
        path = self.folder / name
        beside = path.with_name(path.name + UNFINISHED)
        with _telling(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with beside.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
            _sync_folder(path.parent)

    def read(self, name: str) -> bytes:
        with _telling(self.folder / name):
            return (self.folder / name).read_bytes()

    def exists(self, name: str) -> bool:
        return (self.folder / name).is_file()

    def names(self, folder: str = "") -> list[str]:
        root = self.folder / folder
        with _telling(root):
            files = sorted(path for path in root.rglob("*") if path.is_file())
        return [
            path.relative_to(self.folder).as_posix()
            for path in files
            if path.suffix != UNFINISHED and path.name != LOCK
        ]

    def delete(self, name: str) -> None:
        with _telling(self.folder / name):
            (self.folder / name).unlink(missing_ok=True)

    @contextmanager
    def held(self) -> Iterator[None]:
        with _telling(self.folder), (self.folder / LOCK).open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise HeldError(
                    f"another replay writes to {self.folder}; wait for it, or choose another folder"
                ) from error
            yield


@contextmanager
def _telling(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(f"{path}: {error.strerror or error}") from error


def _sync_folder(folder: Path) -> None:
    """The new name itself is on disk only then."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
