"""The SQLite files of ROS 2 bags (`.db3`), also those that were never closed, or cut off."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator
from pathlib import Path

from ...errors import BagError
from ...types import Closeable
from ..messages.ros import RawMessage, first_bytes

MAGIC = b"SQLite format 3\x00"

_TOPICS = "SELECT id, name, type, serialization_format FROM topics ORDER BY id"


class Rosbag2Sqlite(Closeable):
    """A `.db3`. Raises BagError for a file that is none, or that has no topic in CDR."""

    is_cdr = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lost: str | None = None
        self._database = _open(path)
        try:
            rows = self._database.execute(_TOPICS).fetchall()
        except sqlite3.Error as error:
            self.close()
            raise BagError(
                f"expected a ROS 2 bag at {path}, found one without its topics: {error}"
            ) from error
        (page,) = self._database.execute("PRAGMA page_size").fetchone()
        self._is_torn = path.stat().st_size % page != 0
        self._names = {number: name for number, name, _, form in rows if form == "cdr"}
        self.types = {name: type_name for _, name, type_name, form in rows if form == "cdr"}
        if not self.types:
            self.close()
            forms = ", ".join(sorted({str(form) for *_, form in rows})) or "no topics"
            raise BagError(f"expected topics in cdr in {path}, found {forms}")

    @property
    def lost(self) -> str | None:
        """After `messages` has ended: what could not be read, None where all was."""
        return self._lost

    def messages(self, topics: Collection[str]) -> Iterator[RawMessage]:
        """The whole messages on these topics in the order in which they were recorded."""
        self._lost = None
        count = 0
        numbers = [number for number, name in self._names.items() if name in topics]
        try:
            rows: Iterator[tuple[int, int, object]] = self._rows(numbers)
            for number, logged_ns, data in _all_but_last(rows) if self._is_torn else rows:
                if not (isinstance(data, bytes) and isinstance(logged_ns, int)):
                    raise BagError("a row is no message")
                yield RawMessage(self._names[number], logged_ns, data)
                count += 1
            reason = "it ends within a page" if self._is_torn else None
        except (sqlite3.Error, BagError) as error:
            reason = str(error)
        if reason is not None:
            self._lost = (
                f"{self.path.name} is damaged or cut off: what follows {count} messages is lost ({reason})"
            )

    def _rows(self, numbers: list[int]) -> sqlite3.Cursor:
        # in the order of the rows, not by the index on stamps: a cut file has its first rows, but no whole index
        marks = ",".join("?" * len(numbers))
        return self._database.execute(
            f"SELECT topic_id, timestamp, data FROM messages NOT INDEXED WHERE topic_id IN ({marks}) ORDER BY id",
            numbers,
        )

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        self._database.close()


def is_sqlite(path: Path) -> bool:
    """Whether a file begins as one of SQLite does; BagError where it cannot be read."""
    return first_bytes(path, len(MAGIC)) == MAGIC


def _open(path: Path) -> sqlite3.Connection:
    if not is_sqlite(path):
        raise BagError(f"expected a ROS 2 bag in SQLite, found another file at {path}")
    # immutable for what lies on a read-only disk beside the journal of a recorder that was killed
    for options in ("mode=ro", "immutable=1"):
        database = sqlite3.connect(f"{path.absolute().as_uri()}?{options}", uri=True, check_same_thread=False)
        database.text_factory = lambda text: text.decode("utf-8", "replace")
        try:
            # without it SQLite refuses a file that is shorter than it declares
            database.execute("PRAGMA writable_schema=ON")
            database.execute("SELECT count(*) FROM sqlite_master").fetchall()
            break
        except sqlite3.Error:
            if options == "mode=ro":
                database.close()
    return database


def _all_but_last(rows: Iterator[tuple[int, int, object]]) -> Iterator[tuple[int, int, object]]:
    """Of a file that ends within a page: SQLite takes what is missing there for zeros, in the last row it reads."""
    held = next(rows, None)
    for row in rows:
        assert held is not None
        yield held
        held = row
