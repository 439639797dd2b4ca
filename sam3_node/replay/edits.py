"""What a replay changes between steps: a change of the schema, or an edit that is no request."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from ..schema.fields import MAX_THREADS, Natural, Text
from ..schema.operations import AddObject, Change, SegmentEverything


class Restarted(msgspec.Struct, frozen=True):
    """The node started again, and with it all state."""

    op: ClassVar[str] = "restarted"


class Served(msgspec.Struct, frozen=True):
    """The node began to serve a camera."""

    op: ClassVar[str] = "served"
    camera: Text


class Dropped(msgspec.Struct, frozen=True):
    """The node stopped serving a camera."""

    op: ClassVar[str] = "dropped"
    camera: Text


class SetThreads(msgspec.Struct, frozen=True):
    """The node used another number of CPU threads from here on, which decides how sums are rounded."""

    op: ClassVar[str] = "threads"
    count: Annotated[int, Meta(ge=1, le=MAX_THREADS)]


class CatchUpEnded(msgspec.Struct, frozen=True):
    """An object that was prompted on a past frame joined the others, or was given up with an error."""

    op: ClassVar[str] = "caught_up"
    camera: Text
    id: Natural
    error: Text | None = None


class RemoveLabelled(msgspec.Struct, frozen=True):
    """Remove the objects of a camera that have this label."""

    op: ClassVar[str] = "removed"
    camera: str
    label: str


class MarkLabelled(msgspec.Struct, frozen=True):
    """Correct the object of a camera that has this label, by a prompt on a frame; add it if there is none."""

    op: ClassVar[str] = "marked"
    label: str
    prompt: AddObject
    """with camera and seq"""


class AddEverything(msgspec.Struct, frozen=True):
    """Segment everything on a frame, and add an object for each mask while slots are free."""

    op: ClassVar[str] = "add_everything"
    search: SegmentEverything


class Unreadable(msgspec.Struct, frozen=True):
    """An event that this version cannot read. It is refused in its turn, and the replay goes on."""

    op: str
    reason: str
    camera: str | None = None
    """The camera of a change"""


ReplayEdit = (
    Restarted
    | Served
    | Dropped
    | SetThreads
    | CatchUpEnded
    | RemoveLabelled
    | MarkLabelled
    | AddEverything
    | Unreadable
)
"""An edit that is no request"""
Edit = Change | ReplayEdit
"""What changes between steps"""
