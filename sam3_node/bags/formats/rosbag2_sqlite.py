"""Reader of the SQLite files of ROS 2 bags (`.db3`), also of files that were never closed or are cut off.

rosbags needs a whole database and metadata.yaml. This reader takes the rows that are there.
"""

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
    """A `.db3`. Raises BagError for another file, or one without a topic in CDR."""

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
        named = [row for row in rows if row[3] == "cdr" and all(isinstance(text, str) for text in row[1:3])]
        self._names = {number: name for number, name, _, _ in named}
        self.types = {name: type_name for _, name, type_name, _ in named}
        if not self.types:
            self.close()
            forms = ", ".join(sorted({str(form) for *_, form in rows})) or "no topics"
            raise BagError(f"expected topics in cdr in {path}, found {forms}")

    @property
    def lost(self) -> str | None:
        """Description of what could not be read, once `messages` has ended; None if nothing was lost."""
        return self._lost

    def messages(self, topics: Collection[str]) -> Iterator[RawMessage]:
        """Yield the whole messages on these topics in the order of recording."""
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
        """Close the file. Idempotent."""
        self._database.close()


def is_sqlite(path: Path) -> bool:
    """Return True if a file begins as an SQLite database does; BagError if it cannot be read."""
    return first_bytes(path, len(MAGIC)) == MAGIC


def _open(path: Path) -> sqlite3.Connection:
    if not is_sqlite(path):
        raise BagError(f"expected a ROS 2 bag in SQLite, found another file at {path}")
    # immutable opens files on a read-only disk that lie beside the journal of a killed recorder
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
    """Yield all rows but the last: SQLite fills the missing part of a cut page with zeros, in the last row it reads."""
    held = next(rows, None)
    for row in rows:
        assert held is not None
        yield held
        held = row
