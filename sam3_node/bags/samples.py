"""What recordings of every format are read into before cameras are made of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from ..types import Buffer, ColourEncoding, Depth, Intrinsics

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
