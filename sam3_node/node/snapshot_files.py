"""The files of a node's snapshots: packed and written by a thread, read at the start, and counted."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Self

from ..errors import RequestError, SettingsError, SnapshotError
from ..files import atomic_file
from ..perception.snapshot import MAX_BYTES, Snapshot

log = logging.getLogger(__name__)

SUFFIX = ".snapshot"
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
MAX_NAMED = 32
PIECE_BYTES = 1 << 20
FAILURES = {
    errno.ENOSPC: "no_space",
    errno.EDQUOT: "no_space",
    errno.EFBIG: "no_space",
    errno.EACCES: "not_permitted",
    errno.EPERM: "not_permitted",
    errno.EROFS: "not_permitted",
}
"""Reasons of snapshots that could not be written, by the system's error number."""
OTHER_IO, OTHER = "io", "other"
REASONS = (*dict.fromkeys(FAILURES.values()), OTHER_IO, OTHER)


class SnapshotCounts(NamedTuple):
    """Counts of a node's snapshots and hand-overs since its start, for its metrics."""

    written: int
    failed: Mapping[str, int]
    """number of automatic snapshots that could not be written, by each of REASONS"""
    age_s: float | None
    """since the last one was taken that is on disk, or since the start; None if none are due"""
    refused: bool
    """whether the node has started without its snapshot, because it could not be used"""
    hand_overs: Mapping[str, int]
    """number of hand-overs by outcome"""
    handed_over: bool


class Packed(NamedTuple):
    """A snapshot that was packed, and written if it has a path."""

    size: int
    sha256: str
    write_ms: float
    data: bytearray | None
    """None if it was written"""


class Saved(NamedTuple):
    """A snapshot with its bytes. `source` names where it comes from."""

    source: str
    snapshot: Snapshot
    data: bytes

    @classmethod
    def unpack(cls, data: bytes, source: str) -> Self:
        """Read the bytes of a snapshot. Raises SnapshotError for other ones."""
        return cls(source, Snapshot.unpack(data, source), data)

    @property
    def sha256(self) -> str:
        """Digest of the bytes, as 64 hex digits."""
        return hashlib.sha256(self.data).hexdigest()

    def check_age(self, max_age_s: float) -> None:
        """Raise SnapshotError if it is older than `max_age_s`, or that much ahead of the clock; 0 is no limit."""
        age_s = self.snapshot.age_s
        if 0 < max_age_s < abs(age_s):
            when = f"{age_s:.0f} s ago" if age_s > 0 else f"{-age_s:.0f} s ahead of this clock, which was set"
            raise SnapshotError(
                f"{self.source}: expected a snapshot of the last {max_age_s:g} s (snapshot.max_age_s), found one from"
                f" {when}"
            )

    def describe(self) -> dict[str, Any]:
        """Return the arguments of the event after a node has continued from it."""
        return {
            "sha256": self.sha256,
            "saved_ns": self.snapshot.saved_ns,
            "ids_continue": self.snapshot.kind != "named",
            "cameras": list(self.snapshot.state["cameras"]),
        }


class SnapshotFolder:
    """The folder of the automatic snapshot at `path`, and of those with names beside it.

    Raises SettingsError if `path` is a folder.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        if path is not None and os.path.isdir(path):
            raise SettingsError(
                f"snapshot.path: expected a file, found the folder {path}; name a file in it, such as"
                f" {path / ('node' + SUFFIX)}"
            )

    def find_path(self, name: str) -> Path:
        """Return the path of the snapshot with a name. Raises RequestError for a name that cannot be used."""
        if self._path is None:
            raise RequestError(
                "snapshot: expected a folder for snapshots with names, found none; set snapshot.path in the node"
            )
        path = self._path.parent / f"{name}{SUFFIX}"
        if not NAME.fullmatch(name) or path == self._path:
            raise RequestError(f"name: expected 1 to 64 of letters, digits, _ and -, found {name!r:.80}")
        return path

    def make_path(self, name: str) -> Path:
        """Return the same for a snapshot that will be written. Raises RequestError, also if there are too many."""
        path = self.find_path(name)
        if not os.path.exists(path) and len(self.list_names()) >= MAX_NAMED:
            raise RequestError(f"expected at most {MAX_NAMED} named snapshots, found as many; delete some")
        return path

    def list_names(self) -> list[str]:
        """Return the names that there are."""
        assert self._path is not None
        found = self._path.parent.glob(f"*{SUFFIX}")
        return sorted(path.stem for path in found if path != self._path)

    def read_saved(self) -> Saved | None:
        """Return the automatic snapshot, None if there is none. Raises SnapshotError if it cannot be used."""
        path = self._path
        return Saved.unpack(read_file(path), str(path)) if path is not None and os.path.exists(path) else None

    def put_aside(self) -> None:
        """Rename the automatic snapshot, so that the next one does not replace it."""
        assert self._path is not None
        try:
            self._path.replace(self._path.with_name(f"{self._path.name}.refused"))
        except OSError as reason:
            log.error(
                "%s cannot be put aside: %s; the next snapshot replaces it", self._path, reason.strerror
            )


def read_file(path: Path) -> bytes:
    """Read the file of a snapshot. Raises SnapshotError if it cannot be read or is too large."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise SnapshotError(f"cannot read the snapshot {path}: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise SnapshotError(f"{path}: expected a snapshot of at most {MAX_BYTES} bytes, found more")
    return data


def pack(snapshot: Snapshot, path: Path | None) -> Packed:
    """Write a snapshot, or keep its bytes, in pieces: the interpreter's lock is held for none of them for long."""
    begin_s, digest = time.perf_counter(), hashlib.sha256()
    parts = [memoryview(part) for part in snapshot.parts()]
    pieces = [part[at : at + PIECE_BYTES] for part in parts for at in range(0, part.nbytes, PIECE_BYTES)]
    data = bytearray() if path is None else None
    with atomic_file(path) if path is not None else nullcontext() as file:
        for piece in pieces:
            digest.update(piece)
            if file is not None:
                file.write(piece)
            elif data is not None:
                data += piece
    size = sum(piece.nbytes for piece in pieces)
    return Packed(size, digest.hexdigest(), milliseconds_since(begin_s), data)


def explain_failure(error: BaseException) -> SnapshotError:
    """Return the error that says why a snapshot could not be written."""
    reason = (error.strerror or error) if isinstance(error, OSError) else error
    return SnapshotError(
        f"the snapshot could not be written: {reason}; check the folder of snapshot.path and its free space"
    )


def find_reason(error: BaseException) -> str:
    """Return which of REASONS has kept a snapshot from being written."""
    return FAILURES.get(error.errno or 0, OTHER_IO) if isinstance(error, OSError) else OTHER


def milliseconds_since(begin_s: float) -> float:
    """Return the time since a value of time.perf_counter, to the microsecond."""
    return round((time.perf_counter() - begin_s) * 1000, 3)
