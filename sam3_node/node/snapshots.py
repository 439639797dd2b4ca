"""The snapshots of a running node: when they are taken, where they are written, and how another node fetches one.

The state is copied between two frames, in the thread of the main loop. A thread packs and writes the copy.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import BusyError, RequestError, SettingsError, SnapshotError
from ..files import atomic_file
from ..perception.perception import Perception
from ..perception.snapshot import MAX_BYTES, IdGiver, IdReserve, Kind, Snapshot, restore_snapshot
from ..settings import SnapshotSettings
from ..wire import RESTORED
from .stats import CameraStats

log = logging.getLogger(__name__)

SUFFIX = ".snapshot"
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
MAX_NAMED = 32
CHUNK_BYTES = 4 << 20
PIECE_BYTES = 1 << 20
KEEP_S = 120.0
"""Time for which a packed snapshot waits in memory for the next request to read it."""
RETRY_S = 5.0
"""Pause after a snapshot that could not be written."""


class Packed(NamedTuple):
    """A snapshot that was packed, and written if it has a path."""

    size: int
    sha256: str
    write_ms: float
    data: bytearray | None
    """None if it was written"""


class Restored(NamedTuple):
    """The snapshot that a node continued from."""

    source: str
    snapshot: Snapshot
    sha256: str

    def describe(self) -> dict[str, Any]:
        """Return the arguments of its event."""
        return {
            "sha256": self.sha256,
            "saved_ns": self.snapshot.saved_ns,
            "ids_continue": self.snapshot.kind != "named",
            "cameras": list(self.snapshot.state["cameras"]),
        }


@dataclass(slots=True)
class _Job:
    """A snapshot that a thread packs."""

    number: int
    kind: Kind
    future: Future[Packed]
    limits: list[tuple[IdGiver, int]]
    """of `IdReserve.plan`"""
    used_s: float
    """monotonic time of the last request for it"""


class Snapshots:
    """Takes and restores the snapshots of one node.

    `publish` publishes an event, with the state after it. `stats` returns the counts of each camera.

    All methods but `describe` are for the thread of the main loop. `close` ends the writing thread.
    Raises SettingsError if snapshot.path is a folder.
    """

    def __init__(
        self,
        settings: SnapshotSettings,
        perception: Perception,
        publish: Callable[[str, dict[str, Any]], None],
        stats: Callable[[], Mapping[str, CameraStats]],
    ) -> None:
        if settings.path is not None and settings.path.is_dir():
            raise SettingsError(
                f"snapshot.path: expected a file, found the folder {settings.path}; name a file in it, such as"
                f" {settings.path / ('node' + SUFFIX)}"
            )
        self._settings, self._perception, self._publish, self._stats = settings, perception, publish, stats
        self._ids = IdReserve(perception)
        self._writer = ThreadPoolExecutor(1, "snapshot")
        self._numbers = 0
        self._automatic: _Job | None = None
        self._requested: _Job | None = None
        self._next_s = time.monotonic()
        self._handed_over = False
        self._status: dict[str, Any] = {
            "path": None if settings.path is None else str(settings.path),
            "restored": None,
            "refused": None,
            "handed_over": False,
            "saved": 0,
            "saved_ns": None,
            "bytes": None,
            "copy_ms": None,
            "write_ms": None,
            "error": None,
        }

    def describe(self) -> dict[str, Any]:
        """Return the fields of the node's status. Any thread may call it."""
        return dict(self._status)

    @property
    def restored(self) -> dict[str, Any] | None:
        """The source, digest and cameras of the snapshot that the node continued from. Any thread may read it."""
        found: dict[str, Any] | None = self._status["restored"]
        return found

    def turn(self) -> None:
        """Take the automatic snapshot if it is due, and note what the thread has finished. Call it between frames."""
        self._collect()
        now_s = time.monotonic()
        if self._requested is not None and now_s > self._requested.used_s + KEEP_S:
            self._requested = None
        if self._settings.path is None or self._handed_over or self._automatic is not None:
            return
        if now_s >= self._next_s or (self._ids.run_low and self._status["error"] is None):
            self._next_s = now_s + self._settings.every_s
            self._automatic = self._take("automatic", self._settings.path)
            self._ids.allow(self._automatic.limits, durable=False)

    def withdraw(self) -> None:
        """Delete the automatic snapshot, because ids of its epochs are about to become void. A new one is due."""
        self.finish()
        self._next_s = time.monotonic()
        if self._settings.path is not None:
            try:
                self._settings.path.unlink(missing_ok=True)
            except OSError as error:
                raise SnapshotError(
                    f"cannot delete {self._settings.path}, from which void ids would be restored: "
                    f"{error.strerror}; correct the rights of its folder"
                ) from error
        self._ids.free()

    def begin(self, kind: Kind, name: str | None = None) -> int:
        """Begin to make a snapshot for a request, and return its number. With `name` it becomes a file.

        Raises RequestError for a name that cannot be used, and BusyError while another one is made.
        """
        if self._requested is not None and not self._requested.future.done():
            raise BusyError("expected no other snapshot under way, found one; try again in a second")
        path = None if name is None else self._path_of(name)
        if path is not None and not path.exists() and len(self._names()) >= MAX_NAMED:
            raise RequestError(f"expected at most {MAX_NAMED} named snapshots, found as many; delete some")
        self._requested = self._take(kind, path)
        return self._requested.number

    def hand_over(self) -> int:
        """Stop the node's work for another node, which continues it; return the number of the snapshot for it.

        The ids are the other node's from now on: if this node is resumed, its ids begin again. Raises RequestError if
        that has happened already.
        """
        if self._handed_over:
            raise RequestError(
                "expected a node that works, found one that has been handed over already; resume it to let it work on"
            )
        if self._requested is not None and not self._requested.future.done():
            raise BusyError("expected no other snapshot under way, found one; try again in a second")
        self.withdraw()
        number = self.begin("hand_over")
        self._perception.paused = self._handed_over = self._status["handed_over"] = True
        self._publish("pause", {})
        return number

    def take_back(self) -> None:
        """Let the ids begin again if the node has been handed over."""
        if self._handed_over:
            self._handed_over = self._status["handed_over"] = False
            self._perception.begin_epochs()

    def read(self, number: int, offset: int) -> dict[str, Any]:
        """Return a part of a snapshot that `begin` has begun: `ready` is False until it can be read.

        A snapshot with a name has size and digest only. Raises RequestError if it is not kept, and SnapshotError if it
        could not be made.
        """
        job = self._requested
        if job is None or job.number != number:
            raise RequestError(
                f"expected the newest snapshot, found {number}, which is not kept; ask for a new one"
            )
        job.used_s = time.monotonic()
        if not job.future.done():
            return {"ready": False}
        packed = _result(job)
        data = bytes((packed.data or b"")[offset : offset + CHUNK_BYTES])
        return {"ready": True, "size": packed.size, "sha256": packed.sha256, "data": data}

    def restore_named(self, name: str) -> Restored:
        """Restore a snapshot that `begin` has written, with ids that begin again. Raises SnapshotError as `restore`."""
        path = self._path_of(name)
        if not path.is_file():
            raise RequestError(
                f"expected the name of a snapshot ({', '.join(self._names()) or 'there are none'}), found {name!r}"
            )
        data = read_file(path)
        snapshot = replace(Snapshot.unpack(data, str(path)), kind="named")
        self.take_back()
        self.withdraw()
        return self._restore(snapshot, data, str(path))

    def restore(self, data: bytes, source: str) -> Restored:
        """Restore the bytes of a snapshot. Raises SnapshotError if they cannot be used; nothing is changed then."""
        return self._restore(Snapshot.unpack(data, source), data, source)

    def check(self, data: bytes, source: str) -> None:
        """Restore the bytes of a snapshot and forget them again. Raises SnapshotError if they cannot be used."""
        before = self._perception.state()
        restore_snapshot(self._perception, Snapshot.unpack(data, source), source)
        self._perception.restore(before)

    def restore_saved(self) -> Restored | None:
        """Continue from the automatic snapshot of an earlier run. None if there is none, or none that can be used.

        One that cannot be used is put aside, so that the next one does not replace it; the status says why.
        """
        path = self._settings.path
        if path is None or not path.exists():
            return None
        try:
            data = read_file(path)
            snapshot = Snapshot.unpack(data, str(path))
            if 0 < self._settings.max_age_s < snapshot.age_s:
                raise SnapshotError(
                    f"{path}: expected a snapshot of the last {self._settings.max_age_s:g} s (snapshot.max_age_s), "
                    f"found one from {snapshot.age_s:.0f} s ago"
                )
            return self._restore(snapshot, data, str(path))
        except SnapshotError as error:
            log.error("the node starts without its snapshot, and ids begin again: %s", error)
            self._status["refused"] = str(error)
            try:
                path.replace(path.with_name(f"{path.name}.refused"))
            except OSError as reason:
                log.error("%s cannot be put aside: %s; the next snapshot replaces it", path, reason.strerror)
            return None

    def close(self) -> None:
        """Write the last automatic snapshot, so that a new start continues here, and end the thread."""
        try:
            self.finish()
            if self._settings.path is not None and not self._handed_over:
                self._automatic = self._take("automatic", self._settings.path)
                self.finish()
        except Exception as error:  # such as of a GPU that has failed; the last snapshot stays
            log.error("no snapshot was taken at the end: %s", error)
        self._writer.shutdown()

    def _restore(self, snapshot: Snapshot, data: bytes, source: str) -> Restored:
        restore_snapshot(self._perception, snapshot, source)
        restored = Restored(source, snapshot, hashlib.sha256(data).hexdigest())
        self._status["restored"] = {"source": source, **restored.describe()}
        self._publish(RESTORED, restored.describe())
        if snapshot.kind != "named":
            for camera, stats in self._stats().items():
                stats.restore(snapshot.counts.get(camera, {}))
        cameras = len(self._perception.pipelines)
        log.info("continued from %s of %.1f s ago, with %d cameras", source, snapshot.age_s, cameras)
        return restored

    def _take(self, kind: Kind, path: Path | None) -> _Job:
        begin_s = time.perf_counter()
        counts = {camera: stats.counts() for camera, stats in self._stats().items()}
        snapshot = Snapshot.take(self._perception, kind, counts)
        self._numbers += 1
        self._status["copy_ms"] = _ms_since(begin_s)
        return _Job(
            self._numbers,
            kind,
            self._writer.submit(_pack, snapshot, path),
            self._ids.plan(),
            time.monotonic(),
        )

    def _collect(self) -> None:
        """Note how the automatic snapshot has ended, if it has."""
        job = self._automatic
        if job is None or not job.future.done():
            return
        self._automatic = None
        try:
            packed = _result(job)
        except SnapshotError as error:
            if self._status["error"] is None:
                log.error("%s", error)
            self._status["error"] = str(error)
            if self._ids.run_low:
                self._withdraw_old()
            self._next_s = time.monotonic() + max(RETRY_S, self._settings.every_s)
        else:
            written = {"bytes": packed.size, "write_ms": packed.write_ms}
            saved = {"saved": self._status["saved"] + 1, "saved_ns": time.time_ns()}
            self._status |= {**written, **saved, "error": None}
            self._ids.allow(job.limits, durable=True)

    def _withdraw_old(self) -> None:
        """Delete a snapshot that cannot be replaced. Without it, a restart begins new ids, so any id may be given."""
        try:
            self.withdraw()
        except SnapshotError as error:
            log.error("%s; until then no object is added", error)

    def finish(self) -> None:
        """Wait for the automatic snapshot that is being written, if there is one."""
        if self._automatic is not None:
            self._automatic.future.exception()  # waits
            self._collect()

    def _path_of(self, name: str) -> Path:
        if self._settings.path is None:
            raise RequestError(
                "snapshot: expected a folder for snapshots with names, found none; set snapshot.path in the node"
            )
        path = self._settings.path.parent / f"{name}{SUFFIX}"
        if not NAME.fullmatch(name) or path == self._settings.path:
            raise RequestError(f"name: expected 1 to 64 of letters, digits, _ and -, found {name!r:.80}")
        return path

    def _names(self) -> list[str]:
        assert self._settings.path is not None
        found = self._settings.path.parent.glob(f"*{SUFFIX}")
        return sorted(path.stem for path in found if path != self._settings.path)


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


def _pack(snapshot: Snapshot, path: Path | None) -> Packed:
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
    return Packed(size, digest.hexdigest(), _ms_since(begin_s), data)


def _result(job: _Job) -> Packed:
    try:
        return job.future.result()
    except Exception as error:
        reason = (error.strerror or error) if isinstance(error, OSError) else error
        raise SnapshotError(
            f"the snapshot could not be written: {reason}; check the folder of snapshot.path and its free space"
        ) from error


def _ms_since(begin_s: float) -> float:
    return round((time.perf_counter() - begin_s) * 1000, 3)
