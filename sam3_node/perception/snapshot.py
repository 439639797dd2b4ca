"""Snapshots of a live node, from which a node continues with the same objects, ids and epochs, and the same masks.

Format: MAGIC, the version as uint32 (little-endian), SHA-256 of the rest [32], safetensors as in `checkpoint`. There is
no pickle, and a damaged file is refused before anything in it is read.

An automatic snapshot reserves ids: the node that wrote it gives at most ID_BLOCK more before a newer one is on disk,
and a node that restores it skips these ids. So no id names two objects, whenever the node is killed.
"""

import hashlib
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from msgspec import Struct, field
from msgspec.structs import asdict

from ..engines.oom import find_device_error
from ..errors import ReplayError, Sam3NodeError, SnapshotError
from ..schema.state import Count, Label, State, from_plain, to_plain
from ..types import Buffer
from ..wire.codec import pack
from .checkpoint import MALFORMED, list_parts, unpack_tensors
from .linking import WorldLinker
from .objects import Objects
from .perception import Perception

MAGIC = b"SAM3SNAP"
VERSION = 3
"""Version of the layout. A snapshot of another version is refused."""
MAX_BYTES = 4 << 30
"""Size of the largest snapshot that is read."""
ID_BLOCK = 1000
"""Ids that a node may give before a newer snapshot must be on disk. A node that restores the older one skips them."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""File of the random id that Linux gives to each boot."""
_HEADER = struct.Struct(f"<{len(MAGIC)}sI{hashlib.sha256().digest_size}s")

Kind = Literal["automatic", "hand_over", "named"]
"""automatic: of a node that was killed. hand_over: of a node that has stopped for good. named: of any time before."""


class Uptime(Struct, frozen=True):
    """The time since the boot of a host."""

    boot: Label
    """id of the boot"""
    ns: Count


class Snapshot(Struct, frozen=True, forbid_unknown_fields=True):
    """The state of a node between two frames, with the model and the settings that it belongs to."""

    kind: Kind
    saved_ns: Count
    """Unix time"""
    identity: dict[Label, Any]
    """See `describe_identity`."""
    state: State
    """of `Perception.state`"""
    counts: dict[Label, dict[Label, Count]]
    """frame counts of each camera"""
    hand_over: dict[Label, Label | bool] = field(default_factory=dict)
    """The hand-over that it was made for, or that its node had continued from: `node`, the name of the node that gave
    its state away, `token`, and `to`, the taker. With the taker also `source`, the endpoint that it was fetched from,
    and `confirmed`: True if no other node can be working with its epochs. Empty: none."""
    uptime: Uptime | None = None
    """of its host; None where the system tells none"""

    @classmethod
    def take(
        cls,
        perception: Perception,
        kind: Kind,
        counts: Mapping[str, Mapping[str, int]] | None = None,
        hand_over: Mapping[str, Any] | None = None,
    ) -> Self:
        """Copy the state. Later steps do not change the copy."""
        # most cached frames are left out: they would make each snapshot much larger
        state = perception.state(whole=False)
        return cls(
            kind,
            time.time_ns(),
            describe_identity(perception),
            state,
            {camera: dict(counted) for camera, counted in (counts or {}).items()},
            dict(hand_over or {}),
            read_uptime(),
        )

    @property
    def age_s(self) -> float:
        """Seconds since it was taken: on the same host by the time since its boot, which cannot be set."""
        now = read_uptime()
        if now is not None and self.uptime is not None and now.boot == self.uptime.boot:
            return (now.ns - self.uptime.ns) / 1e9
        return (time.time_ns() - self.saved_ns) / 1e9

    def pack(self) -> bytes:
        """Return the bytes of the file."""
        return b"".join(self.parts())

    def parts(self) -> list[Buffer]:
        """Return the bytes of the file in parts. A thread that makes and writes them does not stop others."""
        # the state is plain already
        parts = list_parts({**asdict(self), "uptime": to_plain(self.uptime)})
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part)
        return [_HEADER.pack(MAGIC, VERSION, digest.digest()), *parts]

    @classmethod
    def unpack(cls, data: bytes, what: str) -> Self:
        """Read the bytes of a file; SnapshotError for other, damaged or newer bytes. `what` names them."""
        if len(data) < _HEADER.size or not data.startswith(MAGIC):
            raise SnapshotError(
                f"{what}: expected a snapshot, which begins with {MAGIC!r}, found {len(data)} bytes that begin with "
                f"{data[: len(MAGIC)]!r}; name a file that sam3-node snapshot or snapshot.path wrote"
            )
        _, version, digest = _HEADER.unpack_from(data)
        # before the digest, so that the message names the version and not damage
        if version != VERSION:
            raise SnapshotError(
                f"{what}: expected a snapshot of version {VERSION}, found version {version}; restore it with the "
                "release of sam3-node that wrote it"
            )
        body = data[_HEADER.size :]
        if hashlib.sha256(body).digest() != digest:
            raise SnapshotError(
                f"{what}: expected a complete snapshot, found {len(data)} bytes that are damaged or truncated; restore "
                "another one"
            )
        try:
            # a file that was made up may have any types; the state is checked when it is restored
            return from_plain(cls, unpack_tensors(body), "snapshot")
        except (*MALFORMED, ReplayError) as error:
            raise SnapshotError(
                f"{what}: expected the content of a snapshot, found: {error!s:.400}; restore another one"
            ) from error


def read_uptime() -> Uptime | None:
    """Return the id of this boot and the time since it, also while the host slept; None where there is none."""
    try:
        return Uptime(BOOT_ID.read_text().strip(), time.clock_gettime_ns(time.CLOCK_BOOTTIME))
    # such as a system without /proc, or a Python without this clock
    except (OSError, AttributeError):
        return None


def describe_identity(perception: Perception) -> dict[str, Any]:
    """Return what must be equal for a snapshot to mean the same in another node: weights, sizes, tracker settings."""
    tracker = perception.settings.tracker
    model = perception.model
    return {
        "model": model.name,
        "model_digest": perception.digests["model_digest"],
        "model.image_size": model.image_size,
        "model.dtype": str(model.dtype).removeprefix("torch."),
        "tracker.max_objects": tracker.max_objects,
        "tracker.bank_size": tracker.bank_size,
        "tracker.selection": tracker.selection,
        "tracker.read": tracker.read,
        "detector": perception.detector.name if perception.detector else None,
        "detector_digest": perception.digests["detector_digest"],
    }


def restore_snapshot(perception: Perception, snapshot: Snapshot, what: str) -> None:
    """Replace everything that is tracked by what the snapshot holds.

    Automatic snapshots, and those that were handed over, continue the ids and epochs; after the others, ids begin again
    in new epochs. Raises SnapshotError if the snapshot does not fit model and settings; nothing is changed then.
    """
    # before anything changes: memories of other weights would track nothing
    _check_identity(perception, snapshot, what)
    # some cameras may be restored already when another one is refused
    before = perception.state()
    try:
        perception.restore(snapshot.state)
        if snapshot.kind == "automatic":
            # the node may have given more ids after this snapshot; after a hand-over it gives none
            IdReserve(perception).skip()
        # what a node does beside its steps: a state that fails here would fail for as long as the node runs
        pack([perception.status(), perception.describe()])
        perception.state(whole=False)
    except Exception as error:  # a state that was made up may fail in any way
        # without its GPU the process can restore neither state
        if lost := find_device_error(error):
            raise lost from error
        perception.put_back(before)
        reason = str(error) if isinstance(error, Sam3NodeError) else f"{type(error).__name__}: {error}"
        raise SnapshotError(
            f"{what}: expected the state of this node, found one that cannot be restored: {reason:.400}"
        ) from error
    if snapshot.kind == "named":
        perception.begin_epochs()


def _check_identity(perception: Perception, snapshot: Snapshot, what: str) -> None:
    expected = describe_identity(perception)
    found = snapshot.identity
    names = [name for name, value in expected.items() if found.get(name) != value]
    if names:
        here = ", ".join(f"{name} {expected[name]!r:.70}" for name in names)
        there = ", ".join(f"{name} {found.get(name)!r:.70}" for name in names)
        raise SnapshotError(
            f"{what}: expected a snapshot of a node with {here}; found one with {there}. Start the node with the "
            "settings and weights of the snapshot, or without the snapshot"
        )


IdGiver = Objects | WorldLinker
"""What counts ids up, up to its `id_limit`."""


class IdReserve:
    """The ids that a node may give until its next automatic snapshot is on disk."""

    def __init__(self, perception: Perception) -> None:
        self._perception = perception

    def plan(self) -> list[tuple[IdGiver, int]]:
        """Return the last ids that may be given once a snapshot of this moment is on disk."""
        return [(giver, giver.last_id + ID_BLOCK) for giver in self._givers()]

    @staticmethod
    def allow(limits: Sequence[tuple[IdGiver, int]], durable: bool) -> None:
        """Set the limits. Until the snapshot is on disk, a restart is from the one before, so that its limits hold."""
        for giver, limit in limits:
            # without an older limit this one holds at once: ids beyond its block would be given again after a restart
            if durable or giver.id_limit is None:
                giver.id_limit = limit

    def free(self) -> None:
        """Allow any id, as no snapshot is left from which the ids would go on."""
        for giver in self._givers():
            giver.id_limit = None

    def skip(self) -> None:
        """Never give the ids that the node that wrote a snapshot may have given after it."""
        for giver in self._givers():
            giver.last_id += ID_BLOCK

    @property
    def run_low(self) -> bool:
        """True if half of the ids that may be given are given."""
        return any(
            giver.id_limit is not None and giver.id_limit - giver.last_id < ID_BLOCK // 2
            for giver in self._givers()
        )

    def _givers(self) -> list[IdGiver]:
        # asked each time, because cameras come and go, and a restored state has a new linker
        linker = self._perception.linker
        registries = [pipeline.registry for pipeline in self._perception.pipelines.values()]
        return [*registries, *([linker] if linker is not None else [])]
