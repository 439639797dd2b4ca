"""MCAP files read from the front, chunk by chunk, as far as they are whole; nothing they declare is believed."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import zstandard

from ...errors import BagError, require
from ...types import NANOSECONDS
from ..native.container import MAGIC

_MAX_CHUNK = 1 << 30  # bytes, unpacked
_COMPRESSIONS = ("", "lz4", "zstd")


class Channel(NamedTuple):
    """What the messages of a topic are: `schema` is their type's name, the encodings are MCAP's names for them."""

    topic: str
    encoding: str
    schema: str
    schema_encoding: str
    schema_data: bytes


class Row(NamedTuple):
    """One message; `logged_ns` is Unix time."""

    channel: Channel
    logged_ns: int
    data: bytes


class McapStream:
    """One MCAP file. Raises BagError for a file that cannot be opened or does not begin as MCAP does.

    After `rows` has ended, `damage` says what could not be read, None where all was.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damage: str | None = None
        self._start()
        self._reader = require("mcap.reader", "bags")
        self._records = require("mcap.records", "bags")
        self._stream = require("mcap.stream_reader", "bags")
        exceptions = require("mcap.exceptions", "bags")
        self._end_of_file = exceptions.EndOfFile
        self._damages = (
            *(exceptions.McapError, zstandard.ZstdError, struct.error, ValueError, LookupError),
            *(OSError, OverflowError, RuntimeError, MemoryError),  # RuntimeError is lz4's
        )

    def channels(self) -> tuple[Channel, ...]:
        """Those that have a message: by the file's summary, or where it has none by its whole content."""
        with _File(self.path):
            return _channels_of(self.path, self.path.stat().st_mtime_ns)

    def rows(self) -> Iterator[Row]:
        """The messages in the file's order, up to the first damage."""
        self._start()
        with _File(self.path) as content:
            try:
                yield from self._rows(content)
            except self._damages as error:
                self.damage = self._describe(content, error)

    def _start(self) -> None:
        self.damage = None
        self._reached, self._logged_ns, self._is_over = 0, 0, False

    def summarised(self) -> tuple[Channel, ...]:
        """The channels that the file's summary says have a message; none where it has no summary."""
        try:
            with _File(self.path) as content:
                summary = self._reader.SeekingReader(content).get_summary()
        except self._damages:
            return ()
        if summary is None or summary.statistics is None:
            return ()
        counts = summary.statistics.channel_message_counts
        return tuple(
            _channel(record, summary.schemas)
            for record in summary.channels.values()
            if counts.get(record.id) and (not record.schema_id or record.schema_id in summary.schemas)
        )

    def _rows(self, content: _File) -> Iterator[Row]:
        schemas: dict[int, Any] = {}
        channels: dict[int, Channel] = {}
        reader = self._stream.StreamReader(content, emit_chunks=True)
        for record in reader.records:
            for inner in self._unpack(record):
                if isinstance(inner, self._records.Schema):
                    schemas[inner.id] = inner
                elif isinstance(inner, self._records.Channel):
                    channels[inner.id] = _channel(inner, schemas)
                elif isinstance(inner, self._records.Message):
                    self._logged_ns = inner.log_time
                    yield Row(channels[inner.channel_id], inner.log_time, inner.data)
            self._is_over |= isinstance(record, self._records.DataEnd)
            self._reached = content.tell()

    def _unpack(self, record: Any) -> list[Any]:
        if not isinstance(record, self._records.Chunk):
            return [record]
        if record.compression not in _COMPRESSIONS:
            raise ValueError(f"a chunk compressed by {record.compression!r}, expected lz4, zstd or nothing")
        size = record.uncompressed_size
        if record.compression == "zstd":
            size = max(size, zstandard.frame_content_size(record.data))
        if size > _MAX_CHUNK:
            raise ValueError(f"a chunk of {size} bytes, expected at most {_MAX_CHUNK}")
        return self._stream.breakup_chunk(record, validate_crc=True)

    def _describe(self, content: _File, error: Exception) -> str | None:
        size = content.size
        after = f" after {_utc(self._logged_ns)}" if self._logged_ns else ""
        if self._is_over:  # only the index behind the messages is broken
            return None
        if isinstance(error, self._end_of_file) and self._reached == size:
            return f"{self.path} ends unfinished{after}: its recorder was killed, what it still held is lost"
        why = str(error) or type(error).__name__
        cut = "is cut off" if isinstance(error, self._end_of_file) else f"is damaged ({why})"
        return f"{self.path} {cut}: what follows byte {self._reached} of {size}{after} cannot be read"


@lru_cache(maxsize=64)
def _channels_of(path: Path, changed_ns: int) -> tuple[Channel, ...]:
    """The channels of a file that was last changed at this time: a cut one is read whole for them, and only once."""
    stream = McapStream(path)
    return stream.summarised() or tuple(dict.fromkeys(row.channel for row in stream.rows()))


class _File:
    """A file that gives the bytes that are asked for or raises EndOfFile, and never some of them: no length that a
    broken one declares is allocated. BagError for what cannot be opened or is no MCAP file."""

    def __init__(self, path: Path) -> None:
        self._end_of_file = require("mcap.exceptions", "bags").EndOfFile
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise BagError(f"cannot read {path}: {error.strerror}") from error
        self.size = os.fstat(self._file.fileno()).st_size
        found = self._file.read(len(MAGIC))
        if found != MAGIC:
            self._file.close()
            what = "one that begins otherwise" if found else "an empty one"
            raise BagError(f"expected an MCAP file at {path}, found {what}")
        self.seek, self.tell = self._file.seek, self._file.tell
        self.seek(0)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, length: int) -> bytes:
        data = self._file.read(length) if 0 <= length <= self.size - self.tell() else None
        if data is None or len(data) < length:
            raise self._end_of_file
        return data


def _channel(record: Any, schemas: dict[int, Any]) -> Channel:
    if not record.schema_id:
        return Channel(record.topic, record.message_encoding, "", "", b"")
    schema = schemas[record.schema_id]
    return Channel(record.topic, record.message_encoding, schema.name, schema.encoding, schema.data)


def _utc(time_ns: int) -> str:
    try:
        return datetime.fromtimestamp(time_ns / NANOSECONDS, UTC).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        return f"{time_ns} ns"
