"""Results on disk as they come: numbered parts, each complete or absent, with the state that the next begins from.

A part is `<folder>/<number>.masks`, a folder for each pass: MAGIC, SHA-256 of the rest, and in msgpack where the
schedule stood at its end, what was counted until then, and camera and body of its masks messages in order.
`<folder>/<number>.state` is written before it and deleted once the next part is there.

Outcomes into parts, from where the last complete part ended."""

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
from .player import Outcome
from .store import Store
from .summary import Tally

FIRST, SECOND = "parts", "second"
"""The folders of a first pass, and of one backward."""
MAGIC = b"SAM3PRT1"
START = len(MAGIC) + hashlib.sha256().digest_size


class Cursor(NamedTuple):
    """How far a replay is: actions of the schedule that are behind it, and what was counted until then."""

    actions: int = 0
    tally: Mapping[str, Any] = {}


@dataclass(slots=True)
class OpenShard:
    """What was found since the last part, in memory."""

    masks: list[tuple[str, bytes]] = field(default_factory=list)
    """Camera and body of the message of each frame."""
    size: int = 0

    def add(self, masks: MaskFrame) -> None:
        """The masks of the next frame."""
        _, body = pack_masks(masks)
        self.masks.append((masks.camera, body))
        self.size += len(body)


class Shards:
    """The parts of one pass in a store, as they were when this was made, and those added since."""

    def __init__(self, store: Store, folder: str = FIRST) -> None:
        self._store, self._folder = store, folder
        there = set(store.names(folder))
        self._count = 0
        while self._masks_name(self._count) in there:
            self._count += 1

    def __len__(self) -> int:
        return self._count

    def standing(self) -> Cursor:
        """Where the last complete part ended. Raises ReplayError where it is damaged."""
        if not self._count:
            return Cursor()
        part = self._read(self._count - 1)
        return Cursor(part["actions"], part["tally"])

    def checkpoint(self) -> bytes:
        """The state at the end of the last complete part. Raises ReplayError where it is gone."""
        name = self._state_name(self._count - 1)
        if not self._store.exists(name):
            raise ReplayError(
                f"expected {name} to go on from, found none; begin the replay anew with --again"
            )
        return self._store.read(name)

    def add(self, part: OpenShard, standing: Cursor, checkpoint: bytes) -> None:
        """Keep a part, how far the replay is at its end, and the state that it can be continued from there."""
        number = self._count
        body = msgpack.packb({**standing._asdict(), "masks": part.masks})
        self._store.write(self._state_name(number), checkpoint)
        self._store.write(self._masks_name(number), MAGIC + hashlib.sha256(body).digest() + body)
        self._count += 1
        if number:
            self._store.delete(self._state_name(number - 1))

    def masks(self) -> Iterator[MaskFrame]:
        """The masks of all complete parts, in order, a part in memory at a time. ReplayError where one is damaged."""
        for part in self.each():
            yield from part()

    def each(self) -> list[Callable[[], Iterator[MaskFrame]]]:
        """What reads the masks of each complete part, in order."""
        return [partial(self._part_masks, number) for number in range(self._count)]

    def clear(self) -> None:
        """Delete all parts, the last first: what is left of it at any moment is a replay that was not finished."""
        for name in reversed(self._store.names(self._folder)):
            self._store.delete(name)
        self._count = 0

    def finish(self) -> None:
        """Delete the last state: nothing will be continued."""
        if self._count:
            self._store.delete(self._state_name(self._count - 1))

    def _part_masks(self, number: int) -> Iterator[MaskFrame]:
        for camera, body in self._read(number)["masks"]:
            yield unpack_masks([masks_topic(camera), body])

    def _read(self, number: int) -> dict[str, Any]:
        data = self._store.read(self._masks_name(number))
        if data[: len(MAGIC)] != MAGIC or hashlib.sha256(data[START:]).digest() != data[len(MAGIC) : START]:
            raise ReplayError(
                f"{self._masks_name(number)}: expected a whole part of a replay, found one of {len(data)} bytes "
                "that is damaged; begin the replay anew with --again"
            )
        return msgpack.unpackb(data[START:], strict_map_key=False)

    def _masks_name(self, number: int) -> str:
        return f"{self._folder}/{number:06}.masks"

    def _state_name(self, number: int) -> str:
        return f"{self._folder}/{number:06}.state"


class Playing(Protocol):
    """What carries out actions: a Player, or what does the same elsewhere."""

    counts: Counter[str]

    def checkpoint(self) -> bytes:
        """What `resume` takes."""

    def resume(self, checkpoint: bytes, counts: Mapping[str, int]) -> None:
        """Go on from there. Raises ReplayError where that is not possible."""


class ShardLimits(NamedTuple):
    """When a part ends: after so many frames, seconds of work or bytes of masks. What a kill loses is one part."""

    frames: int = 1000
    seconds: float = 15.0
    bytes: int = 32 << 20


class ShardWriter:
    """Brings a player to where the last complete part ended, and collects what comes of it from there on.

    Raises ReplayError where that is not possible: a part is damaged, or the player's model or settings are others.
    """

    def __init__(self, parts: Shards, player: Playing, limits: ShardLimits) -> None:
        self.standing = parts.standing()
        """At the end of the last complete part."""
        self.tally = Tally.of(self.standing.tally)
        if len(parts):
            player.resume(parts.checkpoint(), self.tally.counts)
        self._parts, self._player, self._limits = parts, player, limits
        self._actions = self.standing.actions
        self._open()

    @property
    def frames(self) -> int:
        """Stepped so far."""
        return self._player.counts["frames"]

    def take(self, outcome: Outcome) -> None:
        """Note one more. The part ends where it is full."""
        self._actions += 1
        if outcome.masks is not None:
            self._part.add(outcome.masks)
            self.tally.add(outcome.masks)
        if self._is_full():
            self.end_part()

    def end_part(self) -> None:
        """Put on disk what has come since the last part, if anything has."""
        if self._actions > self.standing.actions:
            self.tally.work_s += time.monotonic() - self._begin_s
            self.tally.counts = self._player.counts
            self.standing = Cursor(self._actions, self.tally.plain())
            self._parts.add(self._part, self.standing, self._player.checkpoint())
            self._open()

    def _open(self) -> None:
        self._part = OpenShard()
        self._begin_s, self._frames_before = time.monotonic(), self.frames

    def _is_full(self) -> bool:
        limits, seconds = self._limits, time.monotonic() - self._begin_s
        frames = self.frames - self._frames_before
        return frames >= limits.frames or seconds >= limits.seconds or self._part.size >= limits.bytes
