"""Save and restore the state of a node: it continues from its snapshot after a crash, and another node can take over.

The state is copied between two frames, in the thread of the main loop. A thread packs and writes the copy. `take_over`
decides what a node continues from when it starts, and `hand_over` describes the two phases between two nodes.
"""

import errno
import hashlib
import logging
import os
import re
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple, Self

from msgspec.structs import replace

from ..errors import BusyError, RequestError, SettingsError, SnapshotError
from ..files import atomic_file, explain_os_error, move_inside, read_regular, remove_inside
from ..perception.perception import Perception
from ..perception.snapshot import MAX_BYTES, IdGiver, IdReserve, Kind, Snapshot, restore_snapshot
from ..schema.replies import RestoredReply, SnapshotPart
from ..settings import SnapshotSettings
from ..wire import RESTORED
from .hand_over import HandOverStage, HandOverState
from .output import Output

log = logging.getLogger(__name__)

SUFFIX = ".snapshot"
"""End of the name of each snapshot's file."""
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""What a request may name a snapshot. The name becomes a part of a path."""
MAX_NAMED = 32
"""Snapshots with names in one folder. A request for a further name is refused, so that clients cannot fill the disk."""
PIECE_BYTES = 1 << 20
"""Bytes that are hashed and written at once. Larger pieces would hold the interpreter's lock during a frame."""
FAILURES = {
    errno.ENOSPC: "no_space",
    errno.EDQUOT: "no_space",
    errno.EFBIG: "no_space",
    errno.EACCES: "not_permitted",
    errno.EPERM: "not_permitted",
    errno.EROFS: "not_permitted",
}
"""Reasons of snapshots that could not be written, by the system's error number."""
OTHER_IO = "io"
"""Reason of a snapshot that could not be written because of another error of the system."""
OTHER = "other"
"""Reason of a snapshot that could not be made because of any other error."""
REASONS = (*dict.fromkeys(FAILURES.values()), OTHER_IO, OTHER)
"""All of these reasons. Each is a label of the metric that counts them."""
CHUNK_BYTES = 4 << 20
"""Bytes of a snapshot in one reply."""
KEEP_S = 120.0
"""Seconds for which a packed snapshot waits in memory for the next request to read it."""
RETRY_S = 5.0
"""Seconds to wait after a snapshot that could not be written, before the next is tried."""
ANOTHER_NODE = "another node"
"""What messages call a successor that has not named itself."""


class Packed(NamedTuple):
    """A snapshot that was packed, and written if it has a path."""

    size: int
    sha256: str
    write_ms: float
    data: bytes | None
    """None if it was written"""


class Saved(NamedTuple):
    """A snapshot with its bytes. `source` names where it comes from."""

    source: str
    snapshot: Snapshot
    data: bytes

    @classmethod
    def unpack(cls, data: bytes, source: str) -> Self:
        """Read the bytes of a snapshot. Raises SnapshotError for damaged ones."""
        return cls(source, Snapshot.unpack(data, source), data)

    @classmethod
    def read(cls, path: Path, source: str = "") -> Self:
        """Read the file of a snapshot. Raises SnapshotError if it cannot be read, is damaged or too large."""
        with explain_os_error(SnapshotError, f"cannot read the snapshot {path}"):
            data = read_regular(path, MAX_BYTES)
        return cls.unpack(data, source or str(path))

    @property
    def sha256(self) -> str:
        """Digest of the bytes, as 64 hex digits."""
        return hashlib.sha256(self.data).hexdigest()

    def check_age(self, max_age_s: float) -> None:
        """Raise SnapshotError if it is older than `max_age_s`, or that much ahead of the clock; 0 is no limit."""
        age_s = self.snapshot.age_s
        if 0 < max_age_s < abs(age_s):
            when = f"{age_s:.0f} s ago"
            if age_s < 0:
                when = f"{-age_s:.0f} s ahead of this clock, which was set"
            raise SnapshotError(
                f"{self.source}: expected a snapshot of the last {max_age_s:g} s (snapshot.max_age_s), found one from"
                f" {when}"
            )

    def describe(self) -> RestoredReply:
        """Return what the event says after a node has continued from it."""
        return RestoredReply(
            sha256=self.sha256,
            saved_ns=self.snapshot.saved_ns,
            ids_continue=self.snapshot.kind != "named",
            cameras=tuple(self.snapshot.state["cameras"]),
        )


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
        # the name of the automatic snapshot would let a client replace it
        if not NAME.fullmatch(name) or path == self._path:
            raise RequestError(f"name: expected 1 to 64 of letters, digits, _ and -, found {name!r:.80}")
        return path

    def make_path(self, name: str) -> Path:
        """Return the same for a snapshot that will be written. Raises RequestError, also if there are too many."""
        path = self.find_path(name)
        # one that replaces another of its name adds no file
        if not os.path.exists(path) and len(self.list_names()) >= MAX_NAMED:
            raise RequestError(f"expected at most {MAX_NAMED} named snapshots, found as many; delete some")
        return path

    def list_names(self) -> list[str]:
        """Return the names of the named snapshots."""
        assert self._path is not None
        paths = self._path.parent.glob(f"*{SUFFIX}")
        return sorted(path.stem for path in paths if path != self._path)

    def read_saved(self) -> Saved | None:
        """Return the automatic snapshot, None if there is none. Raises SnapshotError if it cannot be used."""
        path = self._path
        if path is None or not os.path.exists(path):
            return None
        return Saved.read(path)

    def put_aside(self) -> None:
        """Rename the automatic snapshot, so that the next one does not replace it."""
        assert self._path is not None
        try:
            move_inside(self._path.parent, self._path, self._path.with_name(f"{self._path.name}.refused"))
        except OSError as reason:
            log.error(
                "%s cannot be put aside: %s; the next snapshot replaces it", self._path, reason.strerror
            )


def pack(snapshot: Snapshot, path: Path | None) -> Packed:
    """Write a snapshot, or keep its bytes, in pieces, so that no piece holds the interpreter's lock for long."""
    begin_s = time.perf_counter()
    digest = hashlib.sha256()
    parts = [memoryview(part) for part in snapshot.parts()]
    pieces = [part[at : at + PIECE_BYTES] for part in parts for at in range(0, part.nbytes, PIECE_BYTES)]
    # a node that is killed while it writes leaves the earlier snapshot as it was
    with BytesIO() if path is None else atomic_file(path) as file:
        for piece in pieces:
            digest.update(piece)
            file.write(piece)
        data = file.getvalue() if isinstance(file, BytesIO) else None
    size = sum(piece.nbytes for piece in pieces)
    return Packed(size, digest.hexdigest(), milliseconds_since(begin_s), data)


def explain_failure(error: BaseException) -> SnapshotError:
    """Return the error that says why a snapshot could not be written."""
    reason: object = (error.strerror or error) if isinstance(error, OSError) else error
    return SnapshotError(
        f"the snapshot could not be written: {reason}; check the folder of snapshot.path and its free space"
    )


def find_reason(error: BaseException) -> str:
    """Return which of REASONS has kept a snapshot from being written."""
    if isinstance(error, OSError):
        return FAILURES.get(error.errno or 0, OTHER_IO)
    return OTHER


def milliseconds_since(begin_s: float) -> float:
    """Return the time since a value of time.perf_counter, to the microsecond."""
    return round((time.perf_counter() - begin_s) * 1000, 3)


class SnapshotFigures(NamedTuple):
    """What the metrics say about a node's snapshots and hand-overs."""

    written: int
    """automatic snapshots on disk since the start"""
    failed: Mapping[str, int]
    """automatic snapshots that could not be written, by reason"""
    age_s: float | None
    """of the last good one; None if none are due"""
    is_refused: bool
    """True if the snapshot could not be used at the start, so that ids have begun again"""
    hand_overs: Mapping[str, int]
    """hand-overs to other nodes, by outcome"""
    is_handed_over: bool
    """True while another node has this one's work and ids"""


@dataclass(slots=True)
class _Pending:
    """A snapshot that a thread packs."""

    number: int
    taken_s: float
    """monotonic time of its state"""
    future: Future[Packed]
    limits: list[tuple[IdGiver, int]]
    """of `IdReserve.plan`"""
    used_s: float
    """monotonic time of the last request for it"""


class Snapshots:
    """Takes and restores the snapshots of one node. `output` publishes what they change, and has each camera's counts.

    All methods but `describe`, `figures`, `restored` and `age_s` are for the thread of the main loop. `close` ends the
    writing thread.
    Raises SettingsError if snapshot.path is a folder.
    """

    def __init__(self, settings: SnapshotSettings, perception: Perception, output: Output) -> None:
        self.confirm_s = settings.confirm_s
        """Seconds for which a successor may be silent before this node works on."""
        self._settings = settings
        self._perception = perception
        self._output = output
        self._folder = SnapshotFolder(settings.path)
        self.hand_over_state = HandOverState(settings.confirm_s)
        self._origin: Mapping[str, Any] = {}
        self._ids = IdReserve(perception)
        # one thread, so that snapshots reach the disk in the order in which they were taken
        self._writer = ThreadPoolExecutor(1, "snapshot")
        self._numbers = 0
        self._automatic: _Pending | None = None
        self._requested: _Pending | None = None
        self._good_s = time.monotonic()
        # the first one is due at once, so that a node that is killed early also continues
        self._next_s = self._good_s
        self.failed: Mapping[str, int] = dict.fromkeys(REASONS, 0)
        """Number of automatic snapshots that could not be written, by reason."""
        self._status: dict[str, Any] = {
            "path": None if settings.path is None else str(settings.path),
            "restored": None,
            "refused": None,
            "saved": 0,
            "saved_ns": None,
            "bytes": None,
            "copy_ms": None,
            "write_ms": None,
            "error": None,
        }

    @property
    def node(self) -> str:
        """The name of the node; empty if it has none."""
        session = self._perception.session
        return session.node if session is not None else ""

    @property
    def keeps(self) -> bool:
        """True if automatic snapshots are written."""
        return self._settings.path is not None

    @property
    def restored(self) -> dict[str, Any] | None:
        """The source, digest and cameras of the snapshot that the node continued from. Any thread may read it."""
        restored: dict[str, Any] | None = self._status["restored"]
        return restored

    def describe(self) -> dict[str, Any]:
        """Return the fields of the node's status. Any thread may call it."""
        state = self.hand_over_state
        return {**self._status, "handed_over": state.is_over, "hand_over": state.describe()}

    def figures(self) -> SnapshotFigures:
        """Return what the metrics say. Any thread may call it."""
        state = self.hand_over_state
        return SnapshotFigures(
            written=self._status["saved"],
            failed=self.failed,
            age_s=self.age_s,
            is_refused=self._status["refused"] is not None,
            hand_overs=state.outcomes,
            is_handed_over=state.is_over,
        )

    @property
    def age_s(self) -> float | None:
        """Seconds since the snapshot on disk was taken, or since the start; None if none are due. For any thread."""
        if not self.keeps or self.hand_over_state.waits or self.hand_over_state.is_over:
            return None
        return time.monotonic() - self._good_s

    def tick(self) -> None:
        """Take the automatic snapshot if it is due, and note what the thread has finished. Call it between frames."""
        if self._automatic is not None:
            self._collect(self._automatic)
        now_s = time.monotonic()
        state = self.hand_over_state
        # a successor that stays silent has failed: its node must not stand still for ever
        if state.stage == "waiting" and state.has_expired:
            self._work_on("expired", "the other node did not confirm in time")
        # nobody fetches this one any more
        if self._requested is not None and now_s > self._requested.used_s + KEEP_S:
            self._requested = None
        # the state of the moment of the hand-over is the successor's: a later one must not be restored
        is_handed_over = state.stage in ("waiting", "confirmed")
        if self._settings.path is None or is_handed_over or self._automatic is not None:
            return
        # a busy node may use up its ids before the time; after a failure, only the time counts
        if now_s >= self._next_s or (self._ids.run_low and self._status["error"] is None):
            self._next_s = now_s + self._settings.every_s
            self._automatic = self._take("automatic", self._settings.path, self._origin)
            self._ids.allow(self._automatic.limits, durable=False)

    def save(self) -> None:
        """Write an automatic snapshot and wait until it is on disk. Raises SnapshotError if it cannot be written."""
        if self._settings.path is not None:
            self.finish()
            self._automatic = self._take("automatic", self._settings.path, self._origin)
            self.finish()
            if self._status["error"] is not None:
                raise SnapshotError(self._status["error"])

    def withdraw(self) -> None:
        """Delete the automatic snapshot, because ids of its epochs are about to become void. A new one is due."""
        self.finish()
        self._next_s = time.monotonic()
        if self._settings.path is not None:
            what = f"cannot delete {self._settings.path}, from which void ids would be restored"
            with explain_os_error(SnapshotError, what, "; correct the rights of its folder"):
                remove_inside(self._settings.path.parent, self._settings.path)
        self._ids.free()

    def begin(self, name: str | None = None) -> int:
        """Begin to make a snapshot for a request, and return its number. With `name` it becomes a file.

        Raises RequestError for a name that cannot be used, and BusyError while another one is made, or a successor
        reads.
        """
        if self.hand_over_state.waits:
            self.hand_over_state.check_idle()
        self._check_free()
        path = self._folder.make_path(name) if name is not None else None
        self._requested = self._take("named", path)
        return self._requested.number

    def hand_over(self, successor: str | None, token: str) -> int:
        """Pause, and return the number of the snapshot from which a successor continues this node's work.

        The ids are the successor's once it has confirmed with the same token; without `successor`, at once. A request
        that is repeated is answered as the first. Raises BusyError for another one meanwhile, and RequestError if the
        ids are another node's already.
        """
        state = self.hand_over_state
        repeated = state.find_snapshot(token)
        if repeated is not None:
            return repeated
        state.check_idle()
        self._check_free()
        self.finish()
        origin = {"node": self.node, "token": token, "to": successor or ANOTHER_NODE}
        # without a successor that confirms, these ids are given away now, so no start may restore them
        if successor is None:
            self.withdraw()
        # before the pause: the successor must not restore it as a pause that somebody has asked for
        self._requested = self._take("hand_over", None, origin)
        state.begin(origin["to"], token, self._requested.number, self._perception.paused)
        self._perception.paused = True
        if successor is None:
            state.end("confirmed")
        self._output.publish_event("pause", {})
        return self._requested.number

    def confirm_hand_over(self, token: str, accepted: bool) -> str:
        """Give the ids to the successor, or work on if it has not `accepted`. Return the state of the hand-over.

        Raises SnapshotError if the own snapshot, from which these ids would be restored, cannot be deleted.
        """
        state = self.hand_over_state
        if state.find_snapshot(token) is not None:
            if accepted:
                self.withdraw()
                state.end("confirmed")
                log.warning("%s", state.explain())
            else:
                self._work_on("cancelled", "the other node could not continue")
        return state.find_state(token)

    def take_back(self) -> None:
        """Reclaim the work after a resume: with new epochs if the ids are a successor's, else as before."""
        was_over = self.hand_over_state.is_over
        if was_over or self.hand_over_state.waits:
            self.hand_over_state.end("taken_back")
        # the successor may still give ids of the epochs that it has got
        if was_over:
            self._perception.begin_epochs()

    def read(self, number: int, offset: int) -> SnapshotPart:
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
        # a successor that still reads is alive, however long the transfer takes
        self.hand_over_state.note_request()
        if not job.future.done():
            return SnapshotPart(ready=False)
        try:
            packed = job.future.result()
        except Exception as error:
            raise explain_failure(error) from error
        data = (packed.data or b"")[offset : offset + CHUNK_BYTES]
        return SnapshotPart(ready=True, size=packed.size, sha256=packed.sha256, data=data)

    def restore_named(self, name: str) -> Saved:
        """Restore a snapshot that `begin` has written, with ids that begin again. Raises SnapshotError as `restore`."""
        self.hand_over_state.check_idle()
        path = self._folder.find_path(name)
        if not os.path.isfile(path):
            names = ", ".join(self._folder.list_names()) or "there are none"
            raise RequestError(f"expected the name of a snapshot ({names}), found {name!r}")
        saved = Saved.read(path)
        self.withdraw()
        return self.restore(saved, new_epochs=True)

    def restore(self, saved: Saved, new_epochs: bool = False) -> Saved:
        """Restore a snapshot. Raises SnapshotError if it cannot be used; nothing is changed then."""
        if new_epochs:
            # after a named snapshot, ids begin again
            saved = saved._replace(snapshot=replace(saved.snapshot, kind="named"))
        restore_snapshot(self._perception, saved.snapshot, saved.source)
        described = saved.describe().to_result()
        self._status["restored"] = {"source": saved.source, **described}
        self._output.publish_event(RESTORED, described)
        # a named snapshot may be older than the counts of this run, which must not fall
        if saved.snapshot.kind != "named":
            for camera, stats in self._output.stats.items():
                stats.restore(saved.snapshot.counts.get(camera, {}))
        cameras = len(self._perception.pipelines)
        log.info(
            "continued from %s of %.1f s ago, with %d cameras", saved.source, saved.snapshot.age_s, cameras
        )
        return saved

    def check(self, data: bytes, source: str) -> None:
        """Restore the bytes of a snapshot and forget them again. Raises SnapshotError if they cannot be used."""
        before = self._perception.state()
        restore_snapshot(self._perception, Snapshot.unpack(data, source), source)
        self._perception.put_back(before)

    def begin_epochs(self) -> None:
        """Let all ids that were restored begin again, because another node may go on with them."""
        self._perception.begin_epochs()
        self._status["restored"] = {**(self._status["restored"] or {}), "ids_continue": False}

    def note_origin(self, hand_over: Mapping[str, Any]) -> None:
        """Note where the work was taken over from, for the snapshots from now on. See `Snapshot.hand_over`."""
        # the next start reads the origin from the snapshot, so a new one is due
        self._origin = dict(hand_over)
        self._next_s = time.monotonic()

    def read_saved(self) -> Saved | None:
        """Return the automatic snapshot of an earlier run. None if there is none, or a damaged one."""
        try:
            return self._folder.read_saved()
        except SnapshotError as error:
            self._refuse(error)
            return None

    def restore_saved(self, saved: Saved, new_epochs: bool = False) -> Saved | None:
        """Continue from what `read_saved` returned. None if it cannot be used.

        One that cannot be used is put aside, so that the next one does not replace it; the status says why.
        """
        try:
            saved.check_age(self._settings.max_age_s)
            return self.restore(saved, new_epochs)
        except SnapshotError as error:
            self._refuse(error)
            return None

    def close(self) -> None:
        """Write the last automatic snapshot, so that a new start continues here, and end the thread."""
        try:
            if self.hand_over_state.waits:
                # else the last snapshot would contain the pause of the hand-over
                self._work_on("cancelled", "this one ends")
            if not self.hand_over_state.is_over:
                self.save()
        except Exception as error:  # such as of a GPU that has failed; the last snapshot stays
            log.error("no snapshot was taken at the end: %s", error)
        self._writer.shutdown()

    def finish(self) -> None:
        """Wait for the automatic snapshot that is being written, if there is one."""
        if self._automatic is not None:
            self._automatic.future.exception()  # waits
            self._collect(self._automatic)

    def _check_free(self) -> None:
        if self._requested is not None and not self._requested.future.done():
            raise BusyError("expected no other snapshot under way, found one; try again in a second")

    def _work_on(self, outcome: HandOverStage, why: str) -> None:
        """Keep serving with the same ids: the successor never confirmed."""
        state = self.hand_over_state
        state.end(outcome)
        log.warning("the hand-over has ended without a successor, and this node works on: %s", why)
        self._next_s = time.monotonic()
        self._perception.paused = state.was_paused
        if not state.was_paused:
            self._output.publish_event("resume", {})

    def _refuse(self, error: SnapshotError) -> None:
        """Put the own snapshot aside, and keep the reason."""
        log.error("the node starts without its snapshot, and ids begin again: %s", error)
        self._status["refused"] = str(error)
        self._folder.put_aside()

    def _take(self, kind: Kind, path: Path | None, hand_over: Mapping[str, Any] | None = None) -> _Pending:
        begin_s = time.perf_counter()
        now_s = time.monotonic()
        counts = {camera: stats.counts() for camera, stats in self._output.stats.items()}
        snapshot = Snapshot.take(self._perception, kind, counts, hand_over)
        self._numbers += 1
        self._status["copy_ms"] = milliseconds_since(begin_s)
        packed = self._writer.submit(pack, snapshot, path)
        return _Pending(self._numbers, now_s, packed, self._ids.plan(), now_s)

    def _collect(self, job: _Pending) -> None:
        """Note how the automatic snapshot has ended, if it has."""
        if not job.future.done():
            return
        self._automatic = None
        failure = job.future.exception()
        if failure is None:
            packed = job.future.result()
            written = {"bytes": packed.size, "write_ms": packed.write_ms}
            saved = {"saved": self._status["saved"] + 1, "saved_ns": time.time_ns()}
            self._status |= {**written, **saved, "error": None}
            self._good_s = job.taken_s
            # the file is on disk: ids that were given before it stay unique after a restart
            self._ids.allow(job.limits, durable=True)
            return
        # the first failure of several in a row is logged; all are counted
        reason = find_reason(failure)
        error = explain_failure(failure)
        self.failed = {**self.failed, reason: self.failed[reason] + 1}
        if self._status["error"] is None:
            log.error("%s", error)
        self._status["error"] = str(error)
        if self._ids.run_low:
            self._withdraw_old()
        self._next_s = time.monotonic() + max(RETRY_S, self._settings.every_s)

    def _withdraw_old(self) -> None:
        """Delete a snapshot that cannot be replaced. Without it, a restart begins new ids, so any id may be given."""
        try:
            self.withdraw()
        except SnapshotError as error:
            log.error("%s; until then no object is added", error)
