"""Outcomes into parts, from where the last complete part ended."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from .parts import OpenPart, Parts, Standing
from .player import Outcome
from .tally import Tally


class Playing(Protocol):
    """What carries out actions: a Player, or what does the same elsewhere."""

    counts: Counter[str]

    def checkpoint(self) -> bytes:
        """What `resume` takes."""

    def resume(self, checkpoint: bytes, counts: Mapping[str, int]) -> None:
        """Go on from there. Raises ReplayError where that is not possible."""


class PartLimits(NamedTuple):
    """When a part ends: after so many frames, seconds of work or bytes of masks. What a kill loses is one part."""

    frames: int = 1000
    seconds: float = 15.0
    bytes: int = 32 << 20


class Work:
    """Brings a player to where the last complete part ended, and collects what comes of it from there on.

    Raises ReplayError where that is not possible: a part is damaged, or the player's model or settings are others.
    """

    def __init__(self, parts: Parts, player: Playing, limits: PartLimits) -> None:
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
            self.standing = Standing(self._actions, self.tally.plain())
            self._parts.add(self._part, self.standing, self._player.checkpoint())
            self._open()

    def _open(self) -> None:
        self._part = OpenPart()
        self._begin_s, self._frames_before = time.monotonic(), self.frames

    def _is_full(self) -> bool:
        limits, seconds = self._limits, time.monotonic() - self._begin_s
        frames = self.frames - self._frames_before
        return frames >= limits.frames or seconds >= limits.seconds or self._part.size >= limits.bytes
