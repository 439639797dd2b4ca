"""Results on disk while a replay runs: numbered shards, each complete or absent, and the state to continue from.

A shard is the file `<folder>/<number>.masks`, in a folder for each pass. It has MAGIC, the SHA-256 of the rest, and a
msgpack map: the position in the schedule at its end, the counts until then, and camera and body of its masks messages
in order. `<folder>/<number>.state` is written before it, and deleted when the next shard is complete.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgpack

from ..errors import ReplayError
from ..types import MaskFrame
from ..wire import masks_topic, pack_masks, unpack_masks
from .player import PlayedAction
from .store import Store
from .summary import ReplayCounts

FIRST_PASS, SECOND_PASS = "parts", "second"
"""The folders of the forward and the backward pass."""
MAGIC = b"SAM3PRT1"
BODY_START = len(MAGIC) + hashlib.sha256().digest_size


class Cursor(NamedTuple):
    """Position of a replay: the number of completed actions, and `ReplayCounts` until then as a dict."""

    actions: int = 0
    totals: Mapping[str, Any] = {}


@dataclass(slots=True)
class OpenShard:
    """Masks in memory that are not in a shard yet."""

    masks: list[tuple[str, bytes]] = field(default_factory=list)
    """Camera and message body of each frame."""
    size: int = 0

    def add(self, masks: MaskFrame) -> None:
        """Append the masks of the next frame."""
        _, body = pack_masks(masks)
        self.masks.append((masks.camera, body))
        self.size += len(body)


class Shards:
    """The shards of one pass in a store: those that existed when this was created, and those added since."""

    def __init__(self, store: Store, folder: str = FIRST_PASS) -> None:
        self._store, self._folder = store, folder
        existing = set(store.names(folder))
        self._count = 0
        while self._masks_name(self._count) in existing:
            self._count += 1

    def __len__(self) -> int:
        return self._count

    def cursor(self) -> Cursor:
        """Read the position at the end of the last complete shard. Raises ReplayError if the shard is damaged."""
        if not self._count:
            return Cursor()
        shard = self._read(self._count - 1)
        return Cursor(shard["actions"], shard["tally"])

    def checkpoint(self) -> bytes:
        """Read the state at the end of the last complete shard. Raises ReplayError if it is missing."""
        name = self._state_name(self._count - 1)
        if not self._store.exists(name):
            raise ReplayError(f"expected {name} to continue from, found none; start over with --again")
        return self._store.read(name)

    def add(self, shard: OpenShard, cursor: Cursor, checkpoint: bytes) -> None:
        """Write a shard, with the position and the player's state at its end."""
        number = self._count
        # the key `tally` is part of the file format
        body = msgpack.packb({"actions": cursor.actions, "tally": cursor.totals, "masks": shard.masks})
        self._store.write(self._state_name(number), checkpoint)
        self._store.write(self._masks_name(number), MAGIC + hashlib.sha256(body).digest() + body)
        self._count += 1
        if number:
            self._store.delete(self._state_name(number - 1))

    def masks(self) -> Iterator[MaskFrame]:
        """Yield the masks of all shards in order, one shard in memory at a time.

        Raises ReplayError if a shard is damaged.
        """
        for read in self.readers():
            yield from read()

    def readers(self) -> list[Callable[[], Iterator[MaskFrame]]]:
        """Return a function for each shard, in order, that reads its masks."""
        return [partial(self._read_masks, number) for number in range(self._count)]

    def clear(self) -> None:
        """Delete all shards, the last first, so that at any moment the rest is a valid unfinished replay."""
        for name in reversed(self._store.names(self._folder)):
            self._store.delete(name)
        self._count = 0

    def finish(self) -> None:
        """Delete the last state: a finished replay is not continued."""
        if self._count:
            self._store.delete(self._state_name(self._count - 1))

    def _read_masks(self, number: int) -> Iterator[MaskFrame]:
        for camera, body in self._read(number)["masks"]:
            yield unpack_masks([masks_topic(camera), body])

    def _read(self, number: int) -> dict[str, Any]:
        data = self._store.read(self._masks_name(number))
        digest = data[len(MAGIC) : BODY_START]
        if data[: len(MAGIC)] != MAGIC or hashlib.sha256(data[BODY_START:]).digest() != digest:
            raise ReplayError(
                f"{self._masks_name(number)}: expected a whole shard of a replay, found {len(data)} bytes that are "
                "damaged; start over with --again"
            )
        content: dict[str, Any] = msgpack.unpackb(data[BODY_START:], strict_map_key=False)
        return content

    def _masks_name(self, number: int) -> str:
        return f"{self._folder}/{number:06}.masks"

    def _state_name(self, number: int) -> str:
        return f"{self._folder}/{number:06}.state"


class Resumable(Protocol):
    """A player whose state can be kept: a Player, or the player of a live node."""

    counts: Counter[str]
    notes: list[str]

    def checkpoint(self) -> bytes:
        """Return the state for `resume`."""

    def resume(self, checkpoint: bytes, counts: Mapping[str, int]) -> None:
        """Continue from a checkpoint. Raises ReplayError if that is not possible."""


class ShardLimits(NamedTuple):
    """Size at which a shard ends: frames, seconds of work or bytes of masks. A kill loses at most one shard."""

    frames: int = 1000
    seconds: float = 15.0
    bytes: int = 32 << 20


class ShardWriter:
    """Resumes a player at the end of the last complete shard, and writes its further outcomes to shards.

    Raises ReplayError if a shard is damaged, or if the player has another model or other settings.
    """

    def __init__(self, shards: Shards, player: Resumable, limits: ShardLimits) -> None:
        self.cursor = shards.cursor()
        """Position at the end of the last complete shard."""
        self.totals = ReplayCounts.from_dict(self.cursor.totals)
        if len(shards):
            player.resume(shards.checkpoint(), self.totals.counts)
            player.notes.extend(self.totals.notes)
        self._shards, self._player, self._limits = shards, player, limits
        self._actions = self.cursor.actions
        self._open()

    @property
    def frames(self) -> int:
        """Number of frames stepped so far."""
        return self._player.counts["frames"]

    def add(self, outcome: PlayedAction) -> None:
        """Add an outcome. Writes the shard if it is full."""
        self._actions += 1
        if outcome.masks is not None:
            self._shard.add(outcome.masks)
            self.totals.add(outcome.masks)
        if self._is_full():
            self.flush()

    def flush(self) -> None:
        """Write the open shard if it has any actions."""
        if self._actions > self.cursor.actions:
            self.totals.work_s += time.monotonic() - self._begin_s
            self.totals.counts, self.totals.notes = self._player.counts, self._player.notes
            self.cursor = Cursor(self._actions, self.totals.to_dict())
            self._shards.add(self._shard, self.cursor, self._player.checkpoint())
            self._open()

    def _open(self) -> None:
        self._shard = OpenShard()
        self._begin_s, self._frames_before = time.monotonic(), self.frames

    def _is_full(self) -> bool:
        limits, seconds = self._limits, time.monotonic() - self._begin_s
        frames = self.frames - self._frames_before
        return frames >= limits.frames or seconds >= limits.seconds or self._shard.size >= limits.bytes
