"""Requests of the page that plays a recording: marks of people, kept in the file beside it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ..errors import RequestError, WireError
from ..resources import Closeable
from ..schema.fields import T, convert
from ..schema.marks import Mark
from .recorded import RecordedViews

MARK = "mark"
"""Request that adds a mark. Its arguments are the fields of a Mark."""
UNDO = "undo_mark"
"""Request that takes back the last mark."""


class MarkControls(Closeable):
    """Adds and takes back marks of a recording."""

    def __init__(self, views: RecordedViews) -> None:
        self._views = views

    def call(self, op: str, args: Mapping[str, object]) -> Mapping[str, object]:
        """Carry out a request and return the mark as JSON values; none if there was nothing to take back.

        Raises RequestError for another request and for a mark that says nothing, BagError and OutputError of its file.
        """
        done: Mark | None
        if op == MARK:
            done = self._views.add_mark(read_arguments(args, Mark, MARK))
        elif op == UNDO:
            done = self._views.undo_mark()
        else:
            raise RequestError(f"expected one of {MARK}, {UNDO}, found {op!r:.40}")
        plain: Mapping[str, object] = {} if done is None else msgspec.to_builtins(done)
        return plain

    def suggest(self, typed: str) -> list[str]:
        """Return no names: a recording has no detector."""
        return []

    def close(self) -> None:
        """Nothing is open between two requests."""


def read_arguments(args: Mapping[str, object], kind: type[T], what: str) -> T:
    """Return the arguments of a request of the page as `kind`. Raises RequestError that names what is wrong."""
    try:
        return convert(args, kind, what)
    except WireError as error:
        raise RequestError(str(error)) from error
