"""What a reader could not read, as one sentence for its user.

File names in the order that people count in.

What recordings of every format are read into before cameras are made of it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from ..types import Buffer, ColourEncoding, Depth, Intrinsics


class Losses:
    """Collects reasons; those about single messages or files are counted, and the first of each place is told."""

    def __init__(self) -> None:
        self._reasons: list[str] = []
        self._counts: dict[str, int] = {}
        self._first: dict[str, str] = {}

    def add(self, reason: str | None) -> None:
        """Take note of a loss; of the same one only once, and of None not at all."""
        if reason is not None and reason not in self._reasons:
            self._reasons.append(reason)

    def skip(self, place: str, reason: object) -> None:
        """Take note that one thing at `place` (a topic, a folder) was passed over."""
        self._counts[place] = self._counts.get(place, 0) + 1
        self._first.setdefault(place, str(reason))

    def text(self) -> str | None:
        """All of them, None where nothing was lost."""
        skipped = [
            f"{count} of {place} passed over, the first because: {self._first[place]}"
            for place, count in self._counts.items()
        ]
        return "; ".join([*self._reasons, *skipped]) or None


def natural_order(path: Path) -> tuple[tuple[int, str], ...]:
    """A key to sort by: `bag_2` comes before `bag_10`."""
    return tuple(
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path.name)
    )


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


class Sample(NamedTuple):
    """One message of a camera. Stamps are Unix ns: when it was taken, and when it was recorded."""

    topic: str
    stamp_ns: int
    logged_ns: int
    payload: Colour | Depth | Intrinsics


class SampleReader(Protocol):
    """A recording of some format, opened: it has at least one topic, and its format is known.

    Making one raises BagError for what is no such recording, MissingExtraError for a format whose library is absent.
    """

    path: Path
    topics: tuple[Topic, ...]

    @property
    def lost(self) -> str | None:
        """After `samples` has ended: what could not be read and why, None where all was."""

    def samples(self, topics: Collection[str]) -> Iterator[Sample]:
        """The messages on these topics in the order of the recording; from the beginning each time.

        Damage ends it, and `lost` tells; nothing is raised for it. Raises BagError for an encoding that is not known.
        """

    def close(self) -> None:
        """Let go of the file; more than once does no harm."""
