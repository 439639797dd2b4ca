"""Reader of ROS 1 bags, format 2.0, record after record; it needs neither an index nor a proper end.

rosbags refuses bags without an index, so it cannot read a bag whose recorder was killed.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ...errors import BagError
from ...types import NANOSECONDS, Buffer, Closeable
from ..decompression import DecompressionError, Expansion, decompress
from ..messages.ros import RawMessage, first_bytes
from ..samples import Losses

MAGIC = b"#ROSBAG V2.0\n"

_MESSAGE, _BAG, _INDEX, _CHUNK, _CHUNK_INFO, _CONNECTION = 2, 3, 4, 5, 6, 7
_LENGTH = struct.Struct("<I")
_TIME = struct.Struct("<II")
_MAX_HEADER = 1 << 20
_MAX_CHUNK = 1 << 30


class _DamageError(Exception):
    """The records end here; the text says what was found instead of the next one."""


class _Record(NamedTuple):
    op: int
    fields: dict[bytes, bytes]
    data: memoryview


class Rosbag1(Closeable):
    """A `.bag`, also one that was never closed or is cut off; the whole messages of a cut chunk are kept.

    Raises BagError for a file that cannot be opened, is no ROS 1 bag of format 2.0, or has no topic.
    """

    is_cdr = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _open(path)
        self._size = path.stat().st_size
        self._losses = Losses()
        self._expansion = Expansion(self._size)
        self._connections: dict[int, tuple[str, str]] = {}
        self._is_indexed = self._read_index()
        if not self._is_indexed:
            for _ in self._records():
                pass
        self.types = dict(self._connections.values())
        if not self.types:
            self.close()
            raise BagError(
                f"expected a recording with topics at {path}, found none: {self._losses.text() or 'it is empty'}"
            )

    @property
    def lost(self) -> str | None:
        """Description of what could not be read, once `messages` has ended; None if nothing was lost."""
        if self._is_indexed or self._losses.text() is not None:
            return self._losses.text()
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
        """Yield the messages, also those in chunks; remember connections; note what was lost."""
        self._losses, position = Losses(), len(MAGIC)
        self._expansion = Expansion(self._size)
        try:
            while position < self._size:
                record, end = self._read(position)
                try:
                    yield from self._flatten(record)
                except _DamageError as error:
                    self._losses.skip(f"the chunks of {self.path.name}", f"at byte {position} {error}")
                position = end
        except (_DamageError, OSError, ValueError) as error:
            self._losses.add(
                f"{self.path.name} can be read up to byte {position} of {self._size}, where {error}"
            )

    def _read(self, position: int) -> tuple[_Record, int]:
        """Return the record at `position`, without data that is not needed, and the position of its end."""
        self._file.seek(position)
        fields = _fields(self._take(self._length(_MAX_HEADER)))
        op, length = _op(fields), self._length(_MAX_CHUNK)
        begin = self._file.tell()
        if op == _CHUNK:
            # a cut chunk still holds whole messages
            data = self._file.read(min(length, max(0, self._size - begin)))
        else:
            data = self._take(length) if op in (_MESSAGE, _CONNECTION) else b""
        return _Record(op, fields, memoryview(data)), begin + length

    def _length(self, limit: int) -> int:
        length = int(_LENGTH.unpack(self._take(_LENGTH.size))[0])
        if length > limit:
            raise _DamageError("there is no record")
        return length

    def _take(self, size: int) -> bytes:
        if self._file.tell() + size > self._size:
            raise _DamageError("the file is cut off")
        return self._file.read(size)

    def _flatten(self, record: _Record) -> Iterator[_Record]:
        if record.op == _CONNECTION:
            self._connect(record)
        elif record.op == _MESSAGE:
            yield record
        elif record.op == _CHUNK:
            for inner in _inside(_decompress(record, self._expansion)):
                self._expansion.add_record()
                if inner.op == _CHUNK:
                    raise _DamageError("there is a chunk within a chunk")
                yield from self._flatten(inner)

    def _connect(self, record: _Record) -> None:
        number, topic = _number(record.fields.get(b"conn", b"")), record.fields.get(b"topic", b"")
        type_name = _fields(record.data).get(b"type", b"")
        self._connections[number] = (_text(topic), _text(type_name))

    def _read_index(self) -> bool:
        """Read the connections that the end of the file lists; return False if it lists none."""
        try:
            header, _ = self._read(len(MAGIC))
            position = int.from_bytes(header.fields.get(b"index_pos", b""), "little")
            if header.op != _BAG or not len(MAGIC) < position <= self._size:
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
    return first_bytes(path, len(MAGIC)) == MAGIC


def _open(path: Path) -> BinaryIO:
    if not is_rosbag1(path):
        raise BagError(f"expected a ROS 1 bag of format 2.0, found another file at {path}")
    return path.open("rb")


def _inside(content: Buffer) -> Iterator[_Record]:
    """Yield the records of a chunk; raise _DamageError at a record that is cut off."""
    view, position = memoryview(content), 0
    while position < len(view):
        header, position = _part(view, position)
        data, position = _part(view, position)
        fields = _fields(header)
        yield _Record(_op(fields), fields, data)


def _part(view: memoryview, position: int) -> tuple[memoryview, int]:
    begin = position + _LENGTH.size
    end = begin + _number(view[position:begin])
    if begin > len(view) or end > len(view):
        raise _DamageError("a record is cut off")
    return view[begin:end], end


def _fields(header: Buffer) -> dict[bytes, bytes]:
    fields, view, position = {}, memoryview(header), 0
    while position < len(view):
        field, position = _part(view, position)
        name, _, value = bytes(field).partition(b"=")
        fields[name] = value
    return fields


def _op(fields: dict[bytes, bytes]) -> int:
    op = fields.get(b"op", b"")
    if len(op) != 1 or not _MESSAGE <= op[0] <= _CONNECTION:
        raise _DamageError("there is no record")
    return op[0]


def _decompress(chunk: _Record, expansion: Expansion) -> Buffer:
    """Decompress a chunk's content as far as its bytes reach; count it in `expansion`."""
    compression = _text(chunk.fields.get(b"compression", b""))
    if compression == "none":
        return chunk.data
    if compression not in ("bz2", "lz4"):
        raise _DamageError(f"expected a chunk compressed by none, bz2 or lz4, found {compression!r}")
    try:
        content = decompress(chunk.data, compression, _number(chunk.fields.get(b"size", b"")))
    except DecompressionError as error:
        raise _DamageError(f"the chunk cannot be read: {error}") from error
    expansion.add_bytes(len(content))
    return content


def _number(value: Buffer) -> int:
    return int(_LENGTH.unpack(value)[0]) if len(value) == _LENGTH.size else -1


def _nanoseconds(value: bytes) -> int:
    seconds, rest = _TIME.unpack(value) if len(value) == _TIME.size else (0, 0)
    return int(seconds) * NANOSECONDS + int(rest)


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")
