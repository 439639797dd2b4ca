"""Reader of the SQLite files of ROS 2 bags (`.db3`), also of files that were never closed or are cut off.

rosbags needs a whole database and metadata.yaml. This reader takes the rows that are there.

A database is a program, too: views, virtual tables and generated columns compute, and pages that refer to each other in
circles have rows without end. Only plain tables are read, and no more rows and bytes than a file of its size can hold.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator
from pathlib import Path

from ...errors import BagError
from ...types import Closeable
from ..messages.ros import RawMessage, first_bytes

MAGIC = b"SQLite format 3\x00"

_TABLES = {
    "topics": ("id", "name", "type", "serialization_format"),
    "messages": ("id", "topic_id", "timestamp", "data"),
}
_TOPICS = "SELECT id, name, type, serialization_format FROM topics ORDER BY rowid"
_MAX_BLOB = 256 << 20  # bytes of one message
_MAX_TOPICS = 4096
_STEPS = 10_000  # of SQLite's virtual machine between two checks
_MAX_STEPS = 2_000_000
_STEPS_PER_BYTE = 4  # a row takes some 12 steps, and 40 bytes at least


class Rosbag2Sqlite(Closeable):
    """A `.db3`. Raises BagError for another file, or one without a topic in CDR."""

    is_cdr = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lost: str | None = None
        self._database = _open(path)
        self._bytes = sum(file.stat().st_size for file in (path, _log_path(path)) if file.is_file())
        self._steps_left = 0
        self._database.set_progress_handler(self._count_steps, _STEPS)
        try:
            self._allow_steps()
            _require_tables(self._database)
            rows = self._database.execute(_TOPICS).fetchmany(_MAX_TOPICS)
        except (sqlite3.Error, BagError) as error:
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
        count, bytes_left = 0, self._bytes
        numbers = [number for number, name in self._names.items() if name in topics]
        try:
            self._allow_steps()
            rows: Iterator[tuple[int, int, object]] = self._rows(numbers)
            for number, logged_ns, data in _all_but_last(rows) if self._is_torn else rows:
                if not (isinstance(data, bytes) and isinstance(logged_ns, int)):
                    raise BagError("a row is no message")
                bytes_left -= len(data)
                if bytes_left < 0:
                    raise BagError("its rows have more bytes than the file")
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
            f"SELECT topic_id, timestamp, data FROM messages NOT INDEXED WHERE topic_id IN ({marks}) "
            "ORDER BY rowid",
            numbers,
        )

    def _allow_steps(self) -> None:
        self._steps_left = _MAX_STEPS + _STEPS_PER_BYTE * self._bytes

    def _count_steps(self) -> bool:
        """Return True, which interrupts SQLite, if a file of this size cannot need so many steps."""
        self._steps_left -= _STEPS
        return self._steps_left < 0

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
            database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_BLOB)
            database.execute("PRAGMA trusted_schema=OFF")
            # without it SQLite refuses a file that is shorter than it declares
            database.execute("PRAGMA writable_schema=ON")
            database.execute("SELECT count(*) FROM sqlite_master").fetchall()
            break
        except sqlite3.Error:
            if options == "mode=ro":
                database.close()
    return database


def _log_path(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def _require_tables(database: sqlite3.Connection) -> None:
    """Raise BagError unless topics and messages are tables whose columns are stored.

    SQLite takes the kind of an entry from its statement alone, so the statement is read as well as the kind.
    """
    for table, columns in _TABLES.items():
        entries = database.execute(
            "SELECT type, rootpage, sql FROM sqlite_master WHERE lower(name) = ? AND type != 'index'",
            (table,),
        ).fetchmany(2)
        if [entry[:1] for entry in entries] != [("table",)] or not _is_table(*entries[0][1:]):
            raise BagError(f"{table} is no plain table")
        stored = {row[1] for row in database.execute(f"PRAGMA table_xinfo({table})") if row[6] == 0}
        if not stored >= set(columns):
            raise BagError(f"{table} lacks the stored columns {', '.join(sorted(set(columns) - stored))}")


def _is_table(rootpage: object, sql: object) -> bool:
    return bool(rootpage) and isinstance(sql, str) and sql.upper().startswith("CREATE TABLE ")


def _all_but_last(rows: Iterator[tuple[int, int, object]]) -> Iterator[tuple[int, int, object]]:
    """Yield all rows but the last: SQLite fills the missing part of a cut page with zeros, in the last row it reads."""
    held = next(rows, None)
    for row in rows:
        assert held is not None
        yield held
        held = row
