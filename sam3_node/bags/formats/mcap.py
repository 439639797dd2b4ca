"""Reads MCAP files, damaged ones too: `McapStream` reads any file, `McapBag` files of ROS and Foxglove.

The mcap library reads a file by the index at its end, which a killed recorder never wrote, or record by record while it
trusts every declared length. rosbags refuses bags without an index. `McapStream` therefore walks the records itself,
never reads more bytes than the file holds, decompresses chunks within limits, and keeps everything before the first
damage. The mcap library only parses single records and reads the index.
"""

from __future__ import annotations

import io
import json
import os
import struct
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from itertools import islice, repeat
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import zstandard

from ...errors import BagError, require
from ...files import ANY_SIZE, open_regular
from ...resources import Closeable
from ...schema.fields import Plain
from ...types import NANOSECONDS
from ..decompression import DecompressionError, Expansion, decompress
from ..messages.ros import deserialise, first_bytes, read_sample
from ..messages.ros_images import MessageError, find_kind
from ..pairing import TimeSpan
from ..samples import Sample, SampleReader, Topic, UnreadableTopicError, reading

MAGIC = b"\x89MCAP0\r\n"
"""First bytes of an MCAP file."""

WHOLE = TimeSpan()
"""The span of a whole recording."""

T = TypeVar("T")
Decode = Callable[[bytes], Any]

# head of a record: its opcode, and the length of its content in bytes
_RECORD = struct.Struct("<BQ")
# opcodes
_FOOTER = 0x02
_SCHEMA = 0x03
_CHANNEL = 0x04
_MESSAGE = 0x05
_CHUNK = 0x06
_METADATA = 0x0C
_DATA_END = 0x0F
# lengths of the records behind which no message comes
_END_LENGTHS = {_FOOTER: 20, _DATA_END: 4}
# bytes of the largest record that is read
_MAX_RECORD = 1 << 32
_COMPRESSIONS = ("", "lz4", "zstd")
# encodings of ROS; True for CDR
_ROS = {"cdr": True, "ros1": False}
_ENCODINGS = "cdr (ROS 2), ros1, protobuf or json (both of Foxglove)"

# bytes that begin an item of JSON
_JSON_MARKS = (b",", b"[", b"{")
# items of a JSON message above which it is refused; an image is one text in base64
_MAX_JSON_ITEMS = 1 << 16
# first stamp that does not fit into 63 bits, in the year 2262
_MAX_STAMP_NS = 1 << 63


class Channel(NamedTuple):
    """Describes the messages of a topic. `schema` is the name of their type. MCAP defines the names of encodings."""

    topic: str
    encoding: str
    schema: str
    schema_encoding: str
    schema_data: bytes


class Row(NamedTuple):
    """One message. `logged_ns` is Unix time, `sequence` is the sender's number modulo 2^32."""

    channel: Channel
    logged_ns: int
    data: bytes
    sequence: int


class McapStream:
    """One MCAP file. Its methods raise BagError if the file cannot be opened or does not begin as MCAP does.

    After an iteration of `rows` or `metadata`, `damage` says what could not be read; it is None if nothing was lost.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damage: str | None = None
        # where the damage begins, for its description: the byte, and the time of the last message before it
        self._reached = 0
        self._logged_ns = 0
        self._expansion = Expansion(0)
        self._reader = require("mcap.reader", "bags")
        self._records = require("mcap.records", "bags")
        self._data_stream = require("mcap.data_stream", "bags").ReadDataStream
        exceptions = require("mcap.exceptions", "bags")
        self._end_of_file = exceptions.EndOfFile
        # what damaged records raise in the libraries that parse them
        self._damages = (
            exceptions.McapError,
            zstandard.ZstdError,
            struct.error,
            ValueError,
            LookupError,
            OSError,
            OverflowError,
            RuntimeError,  # of lz4
            MemoryError,
        )

    def channels(self) -> tuple[Channel, ...]:
        """Return the channels that have messages: from the file's summary, or by reading the whole file."""
        with _McapFile(self.path):
            return _read_channels(self.path, self.path.stat().st_mtime_ns)

    def rows(self, span: TimeSpan = WHOLE, sort_chunks: bool = False) -> Iterator[Row]:
        """Yield the messages of a resolved span in the file's order, up to the first damage.

        Chunks without such messages are skipped unread, unless the file lacks a summary that lists channels and chunks.
        With `sort_chunks`, the chunks of a file with such a summary come in the order of their first log times, as
        writers with several threads may not have stored them.
        """
        return self._until_damage(lambda file: self._read_rows(file, span, sort_chunks))

    def metadata(self, max_records: int | None = None) -> Iterator[tuple[str, dict[str, str]]]:
        """Yield name and values of the metadata records, of the first `max_records` records if that is given.

        Messages are skipped unread.
        """

        def read(file: _McapFile) -> Iterator[tuple[str, dict[str, str]]]:
            for _, content in self._walk(file, (_METADATA,), max_records):
                record = self._records.Metadata.read(self._data_stream(io.BytesIO(content)))
                yield record.name, record.metadata

        return self._until_damage(read)

    def read_summary(self) -> Any:
        """Return the mcap library's summary with statistics; None if there is none or it is damaged."""
        try:
            with _McapFile(self.path) as file:
                summary = self._reader.SeekingReader(file).get_summary()
        except self._damages:
            return None
        if summary is None or summary.statistics is None:
            return None
        return summary

    def _until_damage(self, read: Callable[[_McapFile], Iterator[T]]) -> Iterator[T]:
        """Yield what `read` yields of the file. Turn the error that ends it into `damage`."""
        self.damage = None
        self._reached = 0
        self._logged_ns = 0
        with _McapFile(self.path) as file:
            self._expansion = Expansion(file.size)
            try:
                yield from read(file)
            except self._damages as error:
                self.damage = self._describe(file.size, error)

    def _read_rows(self, file: _McapFile, span: TimeSpan, sort_chunks: bool) -> Iterator[Row]:
        schemas: dict[int, Any] = {}
        channels: dict[int, Channel] = {}
        places: list[int] | None = None

        # a summary names channels and chunks, so that chunks can be sorted, and skipped unread
        summary = self.read_summary() if sort_chunks or not span.is_whole else None
        if summary is not None and summary.channels and _lists_chunks(summary):
            schemas |= summary.schemas
            channels |= {number: _make_channel(item, schemas) for number, item in summary.channels.items()}
            chunks = []
            for chunk in summary.chunk_indexes:
                if span.overlaps(chunk.message_start_time, chunk.message_end_time):
                    first_ns = chunk.message_start_time if sort_chunks else 0
                    chunks.append((first_ns, chunk.chunk_start_offset))
            places = [place for _, place in sorted(chunks)]

        opcodes = (_SCHEMA, _CHANNEL, _MESSAGE, _CHUNK)
        for opcode, content in self._walk(file, opcodes, places=places):
            # schemas and channels come before their messages, or are known from the summary
            for record in self._parse(opcode, content):
                if isinstance(record, self._records.Schema):
                    schemas[record.id] = record
                elif isinstance(record, self._records.Channel):
                    channels[record.id] = _make_channel(record, schemas)
                else:
                    self._logged_ns = record.log_time
                    if not span.contains(record.log_time):
                        continue
                    yield Row(channels[record.channel_id], record.log_time, record.data, record.sequence)

    def _walk(
        self,
        file: _McapFile,
        opcodes: Collection[int],
        max_records: int | None = None,
        places: Sequence[int] | None = None,
    ) -> Iterator[tuple[int, bytes]]:
        """Yield opcode and content of the records of these opcodes: up to the end of the data, or at `places`."""
        file.seek(len(MAGIC))
        # without places, each record begins where the previous one ended
        starts: Iterable[int | None] = places if places is not None else repeat(None)
        for place in islice(starts, max_records):
            if place is not None:
                file.seek(place)
            self._reached = file.tell()
            opcode, length = _RECORD.unpack(file.read(_RECORD.size))
            # the length tells a real end from a damaged opcode
            if length == _END_LENGTHS.get(opcode):
                return
            if opcode not in opcodes:
                file.skip(length)
            elif length > _MAX_RECORD:
                raise ValueError(f"a record of {length} bytes, expected at most {_MAX_RECORD}")
            else:
                yield opcode, file.read(length)

    def _parse(self, opcode: int, content: bytes) -> Iterator[Any]:
        """Yield the schemas, channels and messages of one record."""
        stream = self._data_stream(io.BytesIO(content))
        if opcode == _MESSAGE:
            yield self._records.Message.read(stream, len(content))
        elif opcode == _SCHEMA:
            yield self._records.Schema.read(stream)
        elif opcode == _CHANNEL:
            yield self._records.Channel.read(stream)
        elif opcode == _CHUNK:
            for inner, part in self._walk_chunk(self._records.Chunk.read(stream)):
                if inner in (_MESSAGE, _SCHEMA, _CHANNEL):
                    yield from self._parse(inner, part)

    def _walk_chunk(self, chunk: Any) -> Iterator[tuple[int, bytes]]:
        """Yield opcode and content of the records in a chunk whose checksum is right."""
        if chunk.compression not in _COMPRESSIONS:
            raise ValueError(f"a chunk compressed by {chunk.compression!r}, expected lz4, zstd or nothing")
        size = chunk.uncompressed_size
        data = chunk.data
        if chunk.compression:
            try:
                data = decompress(data, chunk.compression, size)
            except DecompressionError as error:
                raise ValueError(f"a chunk of {size} bytes: {error}") from error
        if len(data) != size:
            raise ValueError(f"a chunk of {len(data)} bytes, expected {size}")
        if chunk.uncompressed_crc not in (0, zlib.crc32(data)):
            raise ValueError("crc validation failed in Chunk")

        # count each reading: an index may name one chunk many times
        self._expansion.add_bytes(size)
        view = memoryview(data)
        position = 0
        while position < size:
            opcode, length = _RECORD.unpack_from(view, position)
            begin = position + _RECORD.size
            position = begin + length
            if position > size:
                raise ValueError("a record that ends outside its chunk")
            self._expansion.add_record()
            yield opcode, bytes(view[begin:position])

    def _describe(self, size: int, error: Exception) -> str:
        """Describe the damage of a file of `size` bytes."""
        after = ""
        logged = datetime.fromtimestamp(self._logged_ns / NANOSECONDS, UTC)
        if self._logged_ns:
            after = f" after {logged.isoformat(timespec='milliseconds')}"
        is_cut_off = isinstance(error, self._end_of_file)
        if is_cut_off and self._reached == size:
            return f"{self.path} ends unfinished{after}: its recorder was killed, what it still held is lost"
        state = "is cut off" if is_cut_off else f"is damaged ({str(error) or type(error).__name__})"
        return f"{self.path} {state}: what follows byte {self._reached} of {size}{after} cannot be read"


def count_messages(paths: Sequence[Path], topics: Collection[str]) -> int | None:
    """Return the number of messages on `topics` in all files; None if one is no MCAP file or has no summary."""
    try:
        summaries = [McapStream(path).read_summary() for path in paths]
    except BagError:
        return None
    if not summaries or None in summaries:
        return None

    # several channels may have one topic
    count = 0
    for summary in summaries:
        counts = summary.statistics.channel_message_counts
        for number, channel in summary.channels.items():
            if channel.topic in topics:
                count += counts.get(number, 0)
    return count


@lru_cache(maxsize=64)
def _read_channels(path: Path, changed_ns: int) -> tuple[Channel, ...]:
    """Return the channels of a file that was last changed at `changed_ns`.

    A file without a summary is read whole for them; the cache makes that happen only once.
    """
    stream = McapStream(path)
    channels = []
    summary = stream.read_summary()
    if summary is not None:
        counts = summary.statistics.channel_message_counts
        for record in summary.channels.values():
            has_schema = not record.schema_id or record.schema_id in summary.schemas
            if counts.get(record.id) and has_schema:
                channels.append(_make_channel(record, summary.schemas))
    if channels:
        return tuple(channels)
    return tuple(dict.fromkeys(row.channel for row in stream.rows()))


class _McapFile(Closeable):
    """An MCAP file whose `read` returns all requested bytes or raises EndOfFile.

    No length that a damaged file declares is ever allocated. Raises BagError if the file cannot be opened or does not
    begin as MCAP does.
    """

    def __init__(self, path: Path) -> None:
        self._end_of_file: type[Exception] = require("mcap.exceptions", "bags").EndOfFile
        with reading(path):
            self._file = open_regular(path, ANY_SIZE)
        self.size = os.fstat(self._file.fileno()).st_size
        begin = self._file.read(len(MAGIC))
        if begin != MAGIC:
            self._file.close()
            found = "one that begins otherwise" if begin else "an empty one"
            raise BagError(f"expected an MCAP file at {path}, found {found}")
        self.seek = self._file.seek
        self.tell = self._file.tell
        self.seek(0)

    def close(self) -> None:
        self._file.close()

    def read(self, length: int) -> bytes:
        """Read `length` bytes; EndOfFile if the file does not have them."""
        # the library's `read` would allocate the length first
        if not 0 <= length <= self.size - self.tell():
            raise self._end_of_file
        data = self._file.read(length)
        if len(data) < length:  # the file has shrunk
            raise self._end_of_file
        return data

    def skip(self, length: int) -> None:
        """Skip `length` bytes; EndOfFile if the file does not have them."""
        if length > self.size - self.tell():
            raise self._end_of_file
        self.seek(length, os.SEEK_CUR)


def _lists_chunks(summary: Any) -> bool:
    """Return True if the file has chunks, and the summary lists them all."""
    return bool(0 < summary.statistics.chunk_count == len(summary.chunk_indexes))


def _make_channel(record: Any, schemas: dict[int, Any]) -> Channel:
    if not record.schema_id:
        return Channel(record.topic, record.message_encoding, "", "", b"")
    schema = schemas[record.schema_id]
    return Channel(record.topic, record.message_encoding, schema.name, schema.encoding, schema.data)


class McapBag(SampleReader):
    """One MCAP file. A damaged message is skipped, and `lost` says so."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        channels = McapStream(path).channels()
        if not channels:
            raise BagError(f"{path}: expected recorded messages, found no message at all")
        self.topics = tuple({channel.topic: _topic(channel) for channel in channels}.values())

    @staticmethod
    def recognises(path: Path) -> bool:
        """Return True if this is an MCAP file."""
        return path.is_file() and first_bytes(path, len(MAGIC)) == MAGIC

    def _read(self, topics: Collection[str], begin_ns: int) -> Iterator[Sample]:
        # one decoder for each channel: making one parses a schema
        stream = McapStream(self.path)
        decoders: dict[Channel, Decode] = {}
        for row in stream.rows(sort_chunks=True):
            channel = row.channel
            if channel.topic not in topics:
                continue
            # a damaged message costs itself alone
            try:
                if channel not in decoders:
                    decoders[channel] = _decoder(channel)
                sample = _sample(row, decoders[channel])
            except MessageError as error:
                self.report.skip(channel.topic, error)
                continue
            if sample is not None:
                yield sample
        self.report.add(stream.damage)

    def count_messages(self) -> tuple[int, bool]:
        """Read the file to its end. Return the number of its messages, and whether it is whole."""
        stream = McapStream(self.path)
        return sum(1 for _ in stream.rows()), stream.damage is None


def _topic(channel: Channel) -> Topic:
    return Topic(channel.topic, channel.schema, find_kind(channel.schema, channel.topic))


def _sample(row: Row, decode: Decode) -> Sample | None:
    """Decode a message; None for one that holds nothing to read. Raises MessageError for a damaged one."""
    channel = row.channel
    damaged = require("google.protobuf.message", "bags").DecodeError
    try:
        sample = read_sample(decode(row.data), channel.schema, channel.topic, row.logged_ns)
    # fields of JSON are of any type
    except (damaged, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise MessageError(f"{channel.topic}: expected a {channel.schema}, found one with {error}") from error
    if sample is not None and sample.stamp_ns >= _MAX_STAMP_NS:
        raise MessageError(f"{channel.topic}: expected a stamp before the year 2262, found a later one")
    return sample


def _decoder(channel: Channel) -> Decode:
    """Return the function that decodes a message or raises MessageError; BagError for an unknown encoding."""
    if _topic(channel).kind == "other":
        raise MessageError(f"expected images or their calibration, found {channel.schema!r}")
    # ROS has the types of messages, protobuf the schema in the file; JSON needs neither
    if channel.encoding in _ROS and "/" in channel.schema:
        return lambda data: deserialise(data, channel.schema, _ROS[channel.encoding])
    if channel.encoding == "protobuf" and channel.schema_encoding == "protobuf":
        return _protobuf_decoder(channel)
    if channel.encoding == "json":
        return lambda data: _from_json(data, channel.schema)
    raise UnreadableTopicError(
        channel.topic,
        f"expected {_ENCODINGS} as the encoding of its messages, found {channel.encoding!r:.80} with a schema in "
        f"{channel.schema_encoding!r:.80}",
    )


def _protobuf_decoder(channel: Channel) -> Decode:
    """Return a decoder that uses the schema in the file."""
    factory = require("mcap_protobuf.decoder", "bags").DecoderFactory()
    schema = require("mcap.records", "bags").Schema(
        id=1, name=channel.schema, encoding=channel.schema_encoding, data=channel.schema_data
    )
    try:
        decode: Decode = factory.decoder_for(channel.encoding, schema)
    except Exception as error:  # protobuf raises TypeError, DecodeError and others for a damaged schema
        raise UnreadableTopicError(
            channel.topic, f"the schema of {channel.schema} in the file is damaged"
        ) from error
    return decode


def _from_json(data: bytes, name: str) -> Plain:
    # small text can make very many objects: count before they are made
    if sum(map(data.count, _JSON_MARKS)) > _MAX_JSON_ITEMS:
        raise MessageError(f"expected a {name} as JSON, found more than {_MAX_JSON_ITEMS} items")
    message = json.loads(data)
    if not isinstance(message, dict):
        raise MessageError(f"expected a {name} as a JSON object, found {type(message).__name__}")
    return message
