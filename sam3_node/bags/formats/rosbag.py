"""Reads ROS recordings: ROS 1 `.bag`, ROS 2 folders with `.db3` or `.mcap` files, and single files, also packed ones.

rosbags refuses bags without an index or metadata: bags whose recorder was killed, or whose end is missing. Therefore
`Rosbag1` reads a bag record after record, and `Rosbag2Sqlite` takes the rows that are there. rosbags only deserialises
single messages. Files that ROS 2 packed as a whole are unpacked into a temporary folder.
"""

from __future__ import annotations

import io
import re
import sqlite3
import struct
import tempfile
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ...errors import BagError, require
from ...files import ANY_SIZE, describe_stand_in, open_regular, read_regular
from ...resources import Closeable, closed_on_error
from ...types import NANOSECONDS, Buffer
from ..decompression import DecompressionError, Expansion, decompress, decompress_file
from ..messages.ros import RawMessage, deserialise, first_bytes, list_topics, read_sample
from ..messages.ros_images import MessageError
from ..samples import ReadReport, Sample, SampleReader, natural_order, reading
from .mcap import McapBag

ROSBAG1_MAGIC = b"#ROSBAG V2.0\n"
"""First bytes of a ROS 1 bag."""

SQLITE_MAGIC = b"SQLite format 3\x00"
"""First bytes of an SQLite database."""

METADATA = "metadata.yaml"
"""Name of the file in a ROS 2 bag that lists its parts."""

MAX_METADATA_BYTES = 64 << 20
"""Size of the largest METADATA that is read. A larger one counts as unreadable."""

# ROS 1: numbers of the kinds of records
_MESSAGE = 2
_BAG = 3
_INDEX = 4
_CHUNK = 5
_CHUNK_INFO = 6
_CONNECTION = 7
_LENGTH = struct.Struct("<I")
# seconds and nanoseconds
_TIME = struct.Struct("<II")
# bytes of a header, or of the data of a record, above which it is no record
_MAX_PART = 1 << 30

# ROS 2: tables and columns that a bag has
_TABLES = {
    "topics": ("id", "name", "type", "serialization_format"),
    "messages": ("id", "topic_id", "timestamp", "data"),
}
_TOPICS = "SELECT id, name, type, serialization_format FROM topics ORDER BY rowid"
# bytes of the largest message that SQLite reads
_MAX_BLOB = 256 << 20
# topics that are read; later ones are ignored
_MAX_TOPICS = 4096
# steps of SQLite's virtual machine between two checks
_STEPS = 10_000
# steps that a query of any file may take
_MAX_STEPS = 2_000_000
# further steps for each byte of the file: a row takes some 12 steps, and 40 bytes at least
_STEPS_PER_BYTE = 4

# endings of the parts of a ROS 2 bag, and of packed ones behind these
_SUFFIXES = (".db3", ".mcap")
_PACKED = (".zstd", ".zst", ".lz4")
# the paths in the metadata, which is read without a YAML library
_LISTED = re.compile(r"""[^\s"',\[\]][^"',\[\]\n]*\.(?:db3|mcap)(?:\.\w+)?(?=["'\s,\]]|$)""", re.M)
_KEY = re.compile(r"^(-\s+)?(\w+:\s+)?")


class RosBag(SampleReader):
    """A recording of ROS 1 or 2.

    A recording that was never closed, or is cut off, gives every complete message before the damage. A part that exists
    packed and unpacked is read once, from the copy that is whole. Raises BagError for another file or folder, or one
    without topics, and MissingExtraError without the extra `bags`.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        # made with the first packed file
        self._unpacked: tempfile.TemporaryDirectory[str] | None = None
        self._files: list[SampleReader] = []
        with closed_on_error(self):
            self._files = self._open()
        self.topics = tuple({topic.name: topic for file in self._files for topic in file.topics}.values())

    @staticmethod
    def recognises(path: Path) -> bool:
        """Return True for a ROS 1 bag, a `.db3`, a packed file, or a folder with files of a ROS 2 bag."""
        if path.is_dir():
            return (path / METADATA).is_file() or bool(_list_parts(path))
        if path.suffix in _PACKED and _ending(path) in (*_SUFFIXES, ".bag"):
            return True
        return is_rosbag1(path) or is_sqlite(path)

    @property
    def lost(self) -> str | None:
        reasons = (self.opening.text(), *(file.lost for file in self._files))
        return ReadReport(*(self._name(reason) for reason in reasons if reason is not None)).text()

    def _read(self, topics: Collection[str], begin_ns: int) -> Iterator[Sample]:
        for file in self._files:
            yield from file.samples(topics)

    def close(self) -> None:
        """Close the files, and delete what was unpacked. Idempotent."""
        for file in self._files:
            file.close()
        if self._unpacked is not None:
            self._unpacked.cleanup()

    def _open(self) -> list[SampleReader]:
        if not self.path.is_dir():
            return [self._open_best([self.path])]
        parts = _list_parts(self.path)
        if not parts:
            raise BagError(f"expected a ROS 2 bag in {self.path}, found no file of {' or '.join(_SUFFIXES)}")
        self._note_missing_files(parts)

        # a part that cannot be read is a loss; the others still hold their messages
        files: list[SampleReader] = []
        for copies in parts.values():
            try:
                files.append(self._open_best(copies))
            except BagError as error:
                self.opening.add(str(error))
        if not files:
            raise BagError(f"expected a ROS 2 bag in {self.path}, found {self.opening.text()}")
        return files

    def _open_best(self, copies: Sequence[Path]) -> SampleReader:
        """Open the first copy of a part that is whole, else the copy with the most messages, and note its damage."""
        opened: list[_OpenCopy] = []
        errors: list[str] = []
        for path in copies:
            try:
                file, damage = self._open_copy(path)
            except BagError as error:
                errors.append(str(error))
                continue
            # the messages are counted only to compare copies, because that reads the whole file
            count = 0
            is_whole = True
            if len(copies) > 1:
                count, is_whole = file.count_messages()
            opened.append(_OpenCopy(is_whole and damage is None, count, file, damage))
            if opened[-1].is_whole:
                break
        if not opened:
            raise BagError("; ".join(errors))

        best = max(opened, key=lambda copy: (copy.is_whole, copy.messages))
        for other in opened:
            if other is not best:
                other.file.close()
        self.opening.add(best.damage)
        return best.file

    def _open_copy(self, path: Path) -> tuple[_RosFile | McapBag, str | None]:
        """Open a file, or an unpacked copy of it. Return also why the end of the packed one is lost."""
        try:
            if stand_in := describe_stand_in(path):
                raise BagError(f"expected a ROS bag at {path}, found {stand_in}")
            if path.suffix not in _PACKED:
                return _open_file(path), None

            # a damaged packed file is opened as far as it could be unpacked
            if self._unpacked is None:
                self._unpacked = tempfile.TemporaryDirectory(prefix="sam3-node-")
            target = Path(self._unpacked.name) / path.name
            damage = decompress_file(path, target)
            try:
                return _open_file(target), damage
            except BagError as error:
                raise BagError(damage or self._name(str(error))) from error
        except (OSError, DecompressionError) as error:
            raise BagError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error

    def _name(self, text: str) -> str:
        """Return a text in which unpacked files have the paths of the packed ones."""
        if self._unpacked is None:
            return text
        folder = self.path if self.path.is_dir() else self.path.parent
        return text.replace(self._unpacked.name, str(folder))

    def _note_missing_files(self, parts: Collection[str]) -> None:
        """Note the files that the metadata lists and the folder lacks, packed and unpacked."""
        # the metadata is written when the recording ends, so its absence means that the end may be lost
        metadata = self.path / METADATA
        try:
            text = read_regular(metadata, MAX_METADATA_BYTES).decode(errors="replace")
        except OSError as error:
            state = f"has an unreadable ({error.strerror})" if metadata.exists() else "has no"
            told = "it was never closed, its end may be lost"
            # what several files are to each other, only the metadata tells
            if len(parts) > 1 and not metadata.exists():
                told = (
                    f"its {len(parts)} files are taken for parts of one recording, whose end may be lost; if they are "
                    f"{len(parts)} recordings, name one of them"
                )
            self.opening.add(f"{self.path.name} {state} {METADATA}: {told}")
            return
        listed = [Path(_KEY.sub("", entry)) for entry in _LISTED.findall(text)]
        if not listed:
            self.opening.add(
                f"the {METADATA} of {self.path.name} lists no files: it was never closed, its end may be lost"
            )
        for name in dict.fromkeys(path.name for path in listed if _part_name(path) not in parts):
            self.opening.add(f"{self.path.name} lacks {name}")


class _OpenCopy(NamedTuple):
    """An opened copy of a part: the number of its messages if it was counted, and why its end is lost."""

    is_whole: bool
    messages: int
    file: SampleReader
    damage: str | None


class StorageReader(SampleReader):
    """A reader of one file of serialised messages, which `storage` holds."""

    def __init__(self, path: Path, storage: Storage) -> None:
        require("rosbags.typesys", "bags")
        super().__init__(path)
        self._storage = storage
        self._good_topics: set[str] = set()

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._storage.close()

    def _guard(self, samples: Iterator[Sample], topic: str) -> Iterator[Sample]:
        """Yield the samples of one message, or report that it is damaged."""
        try:
            for sample in samples:
                self._good_topics.add(topic)
                yield sample
        except BagError as error:
            # an unknown encoding after messages that were read is damage
            if not isinstance(error, MessageError) and topic not in self._good_topics:
                raise
            self.report.skip(topic, error)


class _RosFile(StorageReader):
    """One file of messages of ROS."""

    def __init__(self, path: Path, storage: Storage) -> None:
        super().__init__(path, storage)
        self.topics = list_topics(storage.types)

    def _read(self, topics: Collection[str], begin_ns: int) -> Iterator[Sample]:
        # topics are told apart from damage anew in each iteration
        self._good_topics = set()
        chosen = {topic.name for topic in self.topics if topic.name in topics and topic.kind != "other"}
        for raw in self._storage.messages(chosen):
            yield from self._guard(self._deserialise(raw), raw.topic)
        self.report.add(self._storage.lost)

    def _deserialise(self, raw: RawMessage) -> Iterator[Sample]:
        type_name = self._storage.types[raw.topic]
        message = deserialise(raw.data, type_name, self._storage.is_cdr)
        sample = read_sample(message, type_name, raw.topic, raw.logged_ns)
        self._good_topics.add(raw.topic)  # also an empty calibration
        if sample is not None:
            yield sample

    def count_messages(self) -> tuple[int, bool]:
        """Read the file to its end. Return the number of its messages, and whether it is whole."""
        count = sum(1 for _ in self._storage.messages(self._storage.types))
        return count, self._storage.lost is None


def _open_file(path: Path) -> _RosFile | McapBag:
    if is_rosbag1(path):
        return _RosFile(path, Rosbag1(path))
    if _ending(path) == ".mcap":
        return McapBag(path)
    return _RosFile(path, Rosbag2Sqlite(path))


def _list_parts(folder: Path) -> dict[str, list[Path]]:
    """Return the parts of a ROS 2 bag by their unpacked names, in the order of writing.

    Each has the files in which it is, the unpacked one first.
    """
    with reading(folder):
        files = [path for path in folder.iterdir() if _ending(path) in _SUFFIXES]
    # the unpacked copy of a part first: it needs no unpacking
    parts: dict[str, list[Path]] = {}
    for path in sorted(files, key=lambda path: path.suffix in _PACKED):
        parts.setdefault(_part_name(path), []).append(path)
    return dict(sorted(parts.items(), key=lambda part: natural_order(Path(part[0]))))


def _part_name(path: Path) -> str:
    return path.stem if path.suffix in _PACKED else path.name


def _ending(path: Path) -> str:
    return Path(_part_name(path)).suffix


class _DamageError(Exception):
    """The records end here. The text says what was found instead of the next one."""


class _Record(NamedTuple):
    """One record of a ROS 1 bag. `op` is its kind."""

    op: int
    fields: dict[bytes, bytes]
    data: bytes


class Rosbag1(Closeable):
    """A `.bag`, also one that was never closed or is cut off. A cut chunk gives its whole messages.

    Raises BagError for a file that cannot be opened, or has no topic.
    """

    is_cdr = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_regular(path, ANY_SIZE)
        self._size = path.stat().st_size
        self._report = ReadReport()
        self._expansion = Expansion(self._size)
        self._connections: dict[int, tuple[str, str]] = {}
        # without an index, the connections are found by one pass over all records
        self._is_indexed = self._read_index()
        if not self._is_indexed:
            for _ in self._records():
                pass
        self.types = dict(self._connections.values())
        if not self.types:
            self.close()
            raise BagError(
                f"expected a recording with topics at {path}, found none: {self._report.text() or 'it is empty'}"
            )

    @property
    def lost(self) -> str | None:
        """Description of what could not be read, once `messages` has ended; None if nothing was lost."""
        if self._is_indexed or self._report.text() is not None:
            return self._report.text()
        return f"{self.path.name} has no index: it was never closed, or its end is cut off"

    def messages(self, topics: Collection[str]) -> Iterator[RawMessage]:
        """Yield the whole messages on these topics in the file's order."""
        for record in self._records():
            if record.op != _MESSAGE:
                continue
            topic, _ = self._connections.get(_number(record.fields.get(b"conn", b"")), ("", ""))
            if topic in topics:
                yield RawMessage(topic, _nanoseconds(record.fields.get(b"time", b"")), record.data)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def _records(self) -> Iterator[_Record]:
        """Yield the messages, also those in chunks. Remember connections. Note what was lost."""
        self._report = ReadReport()
        position = len(ROSBAG1_MAGIC)
        self._expansion = Expansion(self._size)
        try:
            while position < self._size:
                record, end = self._read(position)
                # damage inside a chunk costs the chunk; damage of the record itself ends the reading
                try:
                    yield from self._flatten(record)
                except _DamageError as error:
                    self._report.skip(f"the chunks of {self.path.name}", f"at byte {position} {error}")
                position = end
        except (_DamageError, OSError, ValueError) as error:
            self._report.add(
                f"{self.path.name} can be read up to byte {position} of {self._size}, where {error}"
            )

    def _read(self, position: int) -> tuple[_Record, int]:
        """Return the record at `position`, and the position of its end."""
        self._file.seek(position)
        return _take_record(self._file, self._size), self._file.tell()

    def _flatten(self, record: _Record) -> Iterator[_Record]:
        """Yield the messages of a record, and remember its connections. Raises _DamageError for a damaged chunk."""
        if record.op == _CONNECTION:
            self._connect(record)
        elif record.op == _MESSAGE:
            yield record
        elif record.op == _CHUNK:
            content = _decompress(record, self._expansion)
            chunk = io.BytesIO(content)
            while chunk.tell() < len(content):
                inner = _take_record(chunk, len(content))
                self._expansion.add_record()
                # chunks within chunks would expand without limit
                if inner.op == _CHUNK:
                    raise _DamageError("there is a chunk within a chunk")
                yield from self._flatten(inner)

    def _connect(self, record: _Record) -> None:
        number = _number(record.fields.get(b"conn", b""))
        topic = record.fields.get(b"topic", b"")
        type_name = _fields(record.data).get(b"type", b"")
        self._connections[number] = (_text(topic), _text(type_name))

    def _read_index(self) -> bool:
        """Read the connections that the end of the file lists. Return False if it lists none."""
        try:
            # the first record says where the index is; a bag that was never closed has 0 there
            header, _ = self._read(len(ROSBAG1_MAGIC))
            position = int.from_bytes(header.fields.get(b"index_pos", b""), "little")
            if header.op != _BAG or not len(ROSBAG1_MAGIC) < position <= self._size:
                return False
            for _ in range(_number(header.fields.get(b"conn_count", b""))):
                record, position = self._read(position)
                if record.op == _CONNECTION:
                    self._connect(record)
        except _DamageError:
            self._connections.clear()
        return bool(self._connections)


def is_rosbag1(path: Path) -> bool:
    """Return True if a file begins as a ROS 1 bag does; BagError if it cannot be read."""
    return first_bytes(path, len(ROSBAG1_MAGIC)) == ROSBAG1_MAGIC


def _take_record(source: BinaryIO, size: int) -> _Record:
    """Take the next record of a file or chunk of `size` bytes. A cut chunk still holds whole messages."""
    fields = _fields(_take(source, size))
    # the kind of a record is the only sign that there is one
    op = fields.get(b"op", b"")
    if len(op) != 1 or not _MESSAGE <= op[0] <= _CONNECTION:
        raise _DamageError("there is no record")
    return _Record(op[0], fields, _take(source, size, may_be_cut=op[0] == _CHUNK))


def _take(source: BinaryIO, size: int, may_be_cut: bool = False) -> bytes:
    """Take a length and as many bytes."""
    # never allocate what a damaged length says
    length = _number(source.read(_LENGTH.size))
    left = size - source.tell()
    if not 0 <= length <= _MAX_PART:
        raise _DamageError("there is no record")
    if length > left and not may_be_cut:
        raise _DamageError("a record is cut off")
    return source.read(min(length, left))


def _fields(header: bytes) -> dict[bytes, bytes]:
    fields = {}
    source = io.BytesIO(header)
    while source.tell() < len(header):
        name, _, value = _take(source, len(header)).partition(b"=")
        fields[name] = value
    return fields


def _decompress(chunk: _Record, expansion: Expansion) -> Buffer:
    """Decompress a chunk's content as far as its bytes reach. Count it in `expansion`."""
    compression = _text(chunk.fields.get(b"compression", b""))
    if compression == "none":
        return chunk.data
    if compression not in ("bz2", "lz4"):
        raise _DamageError(f"expected a chunk compressed by none, bz2 or lz4, found {compression!r}")
    # the chunk's own size is the limit, and counts against what the whole file may expand to
    try:
        content = decompress(chunk.data, compression, _number(chunk.fields.get(b"size", b"")))
    except DecompressionError as error:
        raise _DamageError(f"the chunk cannot be read: {error}") from error
    expansion.add_bytes(len(content))
    return content


def _number(value: bytes) -> int:
    """Return a number of 32 bits; -1 for a field of another size."""
    if len(value) != _LENGTH.size:
        return -1
    (number,) = _LENGTH.unpack(value)
    return int(number)


def _nanoseconds(value: bytes) -> int:
    """Return a time in ns; 0 for a field of another size."""
    if len(value) != _TIME.size:
        return 0
    seconds, rest = _TIME.unpack(value)
    return int(seconds) * NANOSECONDS + int(rest)


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")


class Rosbag2Sqlite(Closeable):
    """A `.db3`. Raises BagError for another file, or one without a topic in CDR."""

    is_cdr = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost: str | None = None
        """Description of what could not be read, once `messages` has ended; None if nothing was lost."""
        self._database = _open_sqlite(path)

        # the journal of a killed recorder also holds rows
        files = (path, path.with_name(f"{path.name}-wal"))
        self._bytes = sum(file.stat().st_size for file in files if file.is_file())

        # a crafted file can make a query run for ever: count SQLite's steps
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

        # a file that was cut off rarely ends with a whole page
        (page,) = self._database.execute("PRAGMA page_size").fetchone()
        self._is_torn = path.stat().st_size % page != 0

        named = [row for row in rows if row[3] == "cdr" and all(isinstance(text, str) for text in row[1:3])]
        self._names = {number: name for number, name, _, _ in named}
        self.types = {name: type_name for _, name, type_name, _ in named}
        if not self.types:
            self.close()
            forms = ", ".join(sorted({str(form) for *_, form in rows})) or "no topics"
            raise BagError(f"expected topics in cdr in {path}, found {forms}")

    def messages(self, topics: Collection[str]) -> Iterator[RawMessage]:
        """Yield the whole messages on these topics in the order of recording."""
        self.lost = None
        count = 0
        bytes_left = self._bytes
        numbers = [number for number, name in self._names.items() if name in topics]
        try:
            self._allow_steps()
            # in the order of the rows, not by the index on stamps: a cut file has its first rows, but no whole index
            rows: Iterator[tuple[int, int, object]] = self._database.execute(
                "SELECT topic_id, timestamp, data FROM messages NOT INDEXED "
                f"WHERE topic_id IN ({','.join('?' * len(numbers))}) ORDER BY rowid",
                numbers,
            )
            # SQLite fills the missing part of a cut page with zeros: do not trust the last row that it reads
            if self._is_torn:
                rows = (row for row, _ in pairwise(rows))
            for number, logged_ns, data in rows:
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
            name = self.path.name
            self.lost = f"{name} is damaged or cut off: what follows {count} messages is lost ({reason})"

    def _allow_steps(self) -> None:
        self._steps_left = _MAX_STEPS + _STEPS_PER_BYTE * self._bytes

    def _count_steps(self) -> bool:
        """Return True, which interrupts SQLite, if a file of this size cannot need so many steps."""
        self._steps_left -= _STEPS
        return self._steps_left < 0

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._database.close()


Storage = Rosbag1 | Rosbag2Sqlite
"""A file of serialised messages. `types` are the full names of its topics' types. `is_cdr` is False for ROS 1."""


def is_sqlite(path: Path) -> bool:
    """Return True if a file begins as an SQLite database does; BagError if it cannot be read."""
    return first_bytes(path, len(SQLITE_MAGIC)) == SQLITE_MAGIC


def _open_sqlite(path: Path) -> sqlite3.Connection:
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


def _require_tables(database: sqlite3.Connection) -> None:
    """Raise BagError unless topics and messages are tables whose columns are stored.

    SQLite takes the kind of an entry from its statement alone, so the statement is read as well as the kind.
    """
    # a view or a generated column would run the file's own code
    for table, columns in _TABLES.items():
        entries = database.execute(
            "SELECT type, rootpage, sql FROM sqlite_master WHERE lower(name) = ? AND type != 'index'",
            (table,),
        ).fetchmany(2)
        is_plain = len(entries) == 1 and entries[0][0] == "table" and entries[0][1]
        if not is_plain or not str(entries[0][2]).upper().startswith("CREATE TABLE "):
            raise BagError(f"{table} is no plain table")
        stored = {row[1] for row in database.execute(f"PRAGMA table_xinfo({table})") if row[6] == 0}
        if not stored >= set(columns):
            raise BagError(f"{table} lacks the stored columns {', '.join(sorted(set(columns) - stored))}")
