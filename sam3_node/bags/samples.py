"""The interface between readers of recordings and cameras: topics, samples, and the report of losses.

A reader of any format gives `Topic`s and `Sample`s. `discovery` finds cameras among the topics, and `pairing` makes
Frames of the samples.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, Self, runtime_checkable

from ..errors import BagError, WireError
from ..types import Buffer, ColourEncoding, Depth, Intrinsics
from ..wire.images import identify_compressed

MAX_REASONS = 20

Kind = Literal["colour", "depth", "intrinsics", "other"]


class Topic(NamedTuple):
    """One topic of a recording: `type` is its message type's full name, as the format spells it."""

    name: str
    type: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class Colour:
    """A colour image as it was recorded, not yet decoded."""

    width: int
    height: int
    encoding: ColourEncoding
    data: Buffer

    @classmethod
    def from_compressed(cls, data: Buffer) -> Self:
        """Create one of the bytes of a JPEG or PNG. Raises BagError for other bytes."""
        try:
            encoding, width, height = identify_compressed(data)
        except WireError as error:
            raise BagError(str(error)) from error
        return cls(width, height, encoding, data)


@dataclass(frozen=True, slots=True)
class VideoPacket:
    """One packet of a video stream; `codec` is ffmpeg's name of it."""

    codec: str
    data: Buffer


Payload = Colour | Depth | Intrinsics | VideoPacket


class Sample(NamedTuple):
    """One message of a camera. Stamps are Unix ns: `stamp_ns` of its capture, `logged_ns` of its recording.

    `number` is the place of a colour image among those of its topic, from 0; None: one after the previous sample's.
    """

    topic: str
    stamp_ns: int
    logged_ns: int
    payload: Payload
    number: int | None = None


class UnreadableTopicError(BagError):
    """A topic whose messages have an unknown encoding; its neighbours may be read."""

    def __init__(self, topic: str, reason: str) -> None:
        super().__init__(f"{topic}: {reason}")
        self.topic = topic


class SampleReader(Protocol):
    """An open recording of a known format, with at least one topic.

    The constructor raises BagError for another file or folder, MissingExtraError if the format's library is absent.
    """

    path: Path
    topics: tuple[Topic, ...]

    @property
    def lost(self) -> str | None:
        """Description of what could not be read, once `samples` has ended; None if nothing was lost."""

    def samples(self, topics: Collection[str]) -> Iterator[Sample]:
        """Yield the messages on these topics in the order of the recording; from the beginning each time.

        Damage ends the iteration without an error, and `lost` describes it. Raises BagError for an unknown encoding, an
        UnreadableTopicError where it has a topic of its own.
        """

    def close(self) -> None:
        """Close the file. Idempotent."""


@runtime_checkable
class SeekableReader(SampleReader, Protocol):
    """A SampleReader that can begin in the middle of a recording, without decoding what comes before."""

    def samples_from(self, topics: Collection[str], begin_ns: int) -> Iterator[Sample]:
        """Yield as `samples` does, from `begin_ns` (recording time) or a little before; colour with its number."""


class Losses:
    """Collects the reasons why parts of a recording were lost. Repeated reasons are counted, not listed.

    Of different reasons the first MAX_REASONS are listed, and the others counted.
    """

    def __init__(self) -> None:
        self._reasons: dict[str, None] = {}
        self._counts: dict[str, int] = {}
        self._first: dict[str, str] = {}

    def add(self, reason: str | None) -> None:
        """Note the reason of a loss once; ignore None and repetitions."""
        if reason is not None:
            self._reasons[reason] = None

    def skip(self, place: str, reason: object) -> None:
        """Count an item at `place` (a topic, a folder) that was passed over; keep the first reason of each place."""
        self._counts[place] = self._counts.get(place, 0) + 1
        self._first.setdefault(place, str(reason))

    def text(self) -> str | None:
        """Return all losses in one sentence; None if nothing was lost."""
        skipped = [
            f"{count} of {place} passed over, the first because: {self._first[place]}"
            for place, count in self._counts.items()
        ]
        reasons = [*self._reasons]
        more = [f"{len(reasons) - MAX_REASONS} more losses"] if len(reasons) > MAX_REASONS else []
        return "; ".join([*reasons[:MAX_REASONS], *more, *skipped]) or None


class LossLimit:
    """Ends the reading of a dataset after many losses one after the other: a small file can declare endless rows."""

    def __init__(self, limit: int = 2000) -> None:
        self._limit, self._count = limit, 0

    def reset(self) -> None:
        """Note that something could be read."""
        self._count = 0

    def is_reached(self, count: int = 1) -> bool:
        """Note `count` losses; return True if there were too many since the last success."""
        self._count += count
        return self._count > self._limit


def natural_order(path: Path) -> tuple[tuple[int, str], ...]:
    """Return a sort key that orders the files of a recording by their numbers: `bag_2` comes before `bag_10`."""
    return tuple(
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path.name)
    )
