"""What people say about the frames of a recording: a mark for each click, box, removal or opinion.

Marks are kept in the order in which they were made, so that the last one can be taken back. A file of marks, the page
of the console and a redo of a replay read these fields.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from ..errors import RequestError
from .fields import Natural, Text
from .operations import Prompt

MarkState = Literal["open", "checked", "rejected"]
"""What a person thinks of the masks on a frame.

open      nothing yet: it takes back an earlier opinion
checked   they are right: a redo ends before them
rejected  they, or the marks on them, are wrong: a redo leaves these marks out
"""
UNNAMED = "object"
"""Label of an object that nobody has named."""
MarkPlace = tuple[str, int, int | None]
"""Camera, seq, and the id of an object; None for all objects of the frame."""


class Mark(Prompt, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A correction of one object on one frame, or an opinion on it. Points and box are in pixels of the frame."""

    camera: Text
    seq: Natural
    """number of the frame"""
    id: Natural | None = None
    """of the object; a number that the results do not have adds one; without it, a prompt adds an object, and a state
    is that of the whole frame"""
    label: Text = UNNAMED
    """name of an object that is added"""
    hidden: bool = False
    """true: the object is not in view on this frame, and is looked for again from here on"""
    removed: bool = False
    """true: the object is not there, from this frame on"""
    state: MarkState | None = None
    """open, checked or rejected"""

    @property
    def has_prompt(self) -> bool:
        """True if points or a box say where the object is."""
        return self.points is not None or self.box is not None

    @property
    def is_edit(self) -> bool:
        """True if it changes masks."""
        return self.has_prompt or self.hidden or self.removed

    @property
    def place(self) -> MarkPlace:
        """Frame that it is about, with the object."""
        return self.camera, self.seq, self.id

    def check(self) -> None:
        """Raise RequestError unless it says exactly one thing."""
        said = [self.has_prompt, self.hidden, self.removed, self.state is not None]
        if sum(said) != 1:
            raise RequestError(
                "mark: expected one of a prompt, hidden, removed or a state, found none or several"
            )
        if (self.hidden or self.removed) and self.id is None:
            raise RequestError("mark: expected the id of the object that is hidden or removed, found none")


def find_states(marks: Iterable[Mark]) -> dict[MarkPlace, MarkState]:
    """Return the last state of each place; those that are open are left out."""
    states = {mark.place: mark.state for mark in marks if mark.state is not None}
    return {place: state for place, state in states.items() if state != "open"}


def list_edits(marks: Iterable[Mark]) -> list[Mark]:
    """Return the marks that change masks, in their order, without those that were rejected with object or frame."""
    kept = list(marks)
    states = find_states(kept)

    def is_rejected(mark: Mark) -> bool:
        places = (mark.place, (mark.camera, mark.seq, None))
        return any(states.get(place) == "rejected" for place in places)

    return [mark for mark in kept if mark.is_edit and not is_rejected(mark)]
