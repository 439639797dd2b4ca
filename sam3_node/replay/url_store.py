"""Folders for what is needed only while a process lives. What a killed one left is removed by the next.

Stores and recordings at URLs (s3://, gs:// and whatever fsspec knows): what any machine can go on with.

An object store keeps each value as a whole or not at all, which is what a Store has to. It has no locks: the process
that comes last writes, and the one before it is told at its next write."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import IO, Any
from urllib.parse import unquote

from ..errors import BagError, MissingExtraError, OutputError, ReplayError, require
from .store import LOCK, FolderStore, Store

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


LOCAL = ("file", "local")


def open_store(place: str) -> Store:
    """That of a folder or URL. Raises OutputError, or MissingExtraError where what reads the URL is not installed."""
    path = local_path(place)
    return UrlStore(place) if path is None else FolderStore(path)


@contextmanager
def local_bag(bag: str) -> Iterator[Path]:
    """Where a recording can be read: its path, or of a URL a copy that is removed at the end of the block.

    Raises BagError where there is nothing, or it cannot be fetched.
    """
    path = local_path(bag)
    if path is not None:
        yield path
        return
    system, remote = _opened(bag)
    with scratch() as folder:
        copy = folder / PurePosixPath(remote).name
        try:
            system.get(remote, str(copy), recursive=system.isdir(remote))
        except FileNotFoundError as error:
            raise BagError(f"expected a recording, found nothing at {bag}") from error
        except Exception as error:  # each protocol has its own
            raise BagError(f"cannot fetch {bag}: {error}") from error
        yield copy


def local_path(place: str) -> Path | None:
    """The path of a file or folder of this machine, also of a file:// URL; None for other URLs."""
    protocol, mark, rest = place.partition("://")
    if not mark:
        return Path(place)
    return Path(unquote(rest)) if protocol in LOCAL else None


class UrlStore:
    """Values below a URL. Raises MissingExtraError where what reads it is not installed."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._system, self._root = _opened(url)
        self._token: bytes | None = None
        self._folder: Path | None = None

    @property
    def folder(self) -> Path:
        """A folder of this machine, while this is held."""
        if self._folder is None:
            raise OutputError(f"{self.url}: expected it to be held while files are made for it")
        return self._folder

    def write(self, name: str, data: bytes) -> None:
        self._check_token()
        with self._telling(name):
            self._system.pipe_file(self._path(name), data)

    def read(self, name: str) -> bytes:
        with self._telling(name):
            data: bytes = self._system.cat_file(self._path(name))
            return data

    def exists(self, name: str) -> bool:
        with self._telling(name):
            self._system.invalidate_cache()
            return bool(self._system.isfile(self._path(name)))

    def names(self, folder: str = "") -> list[str]:
        with self._telling(folder):
            self._system.invalidate_cache()
            found = sorted(self._system.find(self._path(folder)))
        names = [path.removeprefix(self._root).lstrip("/") for path in found]
        return [name for name in names if name != LOCK]

    def delete(self, name: str) -> None:
        self._check_token()
        with self._telling(name), suppress(FileNotFoundError):
            self._system.rm_file(self._path(name))

    def keep(self, paths: Sequence[Path]) -> None:
        for path in paths:
            self._check_token()
            name = path.relative_to(self.folder).as_posix()
            with self._telling(name):
                self._put(path, self._path(name))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Write from here on; whoever held it gets an OutputError when it writes the next time."""
        token = uuid.uuid4().bytes
        with self._telling(LOCK):
            self._system.pipe_file(self._path(LOCK), token)
        self._token = token
        try:
            with scratch() as self._folder:
                yield
            if self._kept_token() == token:
                self.delete(LOCK)
        finally:
            self._token = self._folder = None

    def _put(self, path: Path, remote: str) -> None:
        """In place of what is there: a folder may have fewer files than before."""
        if path.is_file():
            self._system.put_file(str(path), remote)
            return
        with suppress(FileNotFoundError):
            self._system.rm(remote, recursive=True)
        files = sorted(file for file in path.rglob("*") if file.is_file())
        remotes = [f"{remote}/{file.relative_to(path).as_posix()}" for file in files]
        self._system.put([str(file) for file in files], remotes)

    def _check_token(self) -> None:
        if self._token is not None and self._kept_token() != self._token:
            raise OutputError(f"{self.url}: another replay has gone on with it; this one ends here")

    def _kept_token(self) -> bytes | None:
        """That of whoever holds this now."""
        with self._telling(LOCK), suppress(FileNotFoundError):
            token: bytes = self._system.cat_file(self._path(LOCK))
            return token
        return None

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    @contextmanager
    def _telling(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise OutputError(f"{self.url}: expected {name}, found nothing") from error
        except Exception as error:  # each protocol has its own
            raise OutputError(f"{self.url}/{name}: {error}") from error


def _opened(url: str) -> tuple[Any, str]:
    """The file system of a URL and the path there."""
    fsspec = require("fsspec", "cloud")
    try:
        system, path = fsspec.url_to_fs(url)
    except ImportError as error:  # names the package that the protocol is in
        raise MissingExtraError(f"{url}: {error}, beside this package's extra 'cloud'") from error
    except ValueError as error:
        raise ReplayError(f"{url}: expected a path or a URL that fsspec knows: {error}") from error
    return system, path.rstrip("/")
