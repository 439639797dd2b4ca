"""Reader of MCAP files of other programs: ROS 2 (CDR), ROS 1, and Foxglove messages as protobuf or JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from ...errors import BagError, require
from ...types import Closeable
from ..messages.ros import content_of, deserialise
from ..messages.ros_images import MessageError
from ..samples import Losses, Sample, Topic, UnreadableTopicError
from .mcap_stream import MAGIC, Channel, McapStream, Row

_ROS = {"cdr": True, "ros1": False}
_ENCODINGS = "cdr (ROS 2), ros1, protobuf or json (both of Foxglove)"

_JSON_MARKS, _MAX_JSON_ITEMS = (b",", b"[", b"{"), 1 << 16  # images are one text in base64
_MAX_STAMP_NS = 1 << 63

Decode = Callable[[bytes], Any]


class McapBag(Closeable):
    """One MCAP file: a SampleReader. A damaged message is passed over, and `lost` says so."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stream = McapStream(path)
        channels = self._stream.channels()
        if not channels:
            raise BagError(f"{path}: expected recorded messages, found no message at all")
        self.topics = tuple({channel.topic: _topic(channel) for channel in channels}.values())
        self._losses = Losses()

    @staticmethod
    def recognises(path: Path) -> bool:
        """Return True if this is an MCAP file."""
        try:
            with path.open("rb") as file:
                return file.read(len(MAGIC)) == MAGIC
        except OSError:
            return False

    @property
    def lost(self) -> str | None:
        """Description of what could not be read, once `samples` has ended; None if nothing was lost."""
        return self._losses.text()

    def samples(self, topics: Collection[str]) -> Iterator[Sample]:
        """Yield the messages on these topics, as SampleReader.samples does."""
        stream, self._losses = McapStream(self.path), Losses()
        decoders: dict[Channel, Decode] = {}
        for row in stream.rows(sort_chunks=True):
            channel = row.channel
            if channel.topic not in topics:
                continue
            try:
                if channel not in decoders:
                    decoders[channel] = _decoder(channel)
                sample = _sample(row, decoders[channel])
            except MessageError as error:
                self._losses.skip(channel.topic, error)
                continue
            if sample is not None:
                yield sample
        self._losses.add(stream.damage)

    def close(self) -> None:
        """Do nothing: the file is open only while it is read."""


def _topic(channel: Channel) -> Topic:
    return Topic(
        channel.topic, channel.schema, content_of(channel.schema).find_kind(channel.schema, channel.topic)
    )


def _sample(row: Row, decode: Decode) -> Sample | None:
    channel, module = row.channel, content_of(row.channel.schema)
    message = decode(row.data)
    try:
        payload = module.read_payload(message, channel.schema, channel.topic)
        stamp_ns = module.read_stamp(message) or row.logged_ns
    except (TypeError, ValueError, AttributeError, OverflowError) as error:  # fields of JSON are of any type
        raise MessageError(f"{channel.topic}: expected a {channel.schema}, found one with {error}") from error
    if stamp_ns >= _MAX_STAMP_NS:
        raise MessageError(f"{channel.topic}: expected a stamp before the year 2262, found a later one")
    return None if payload is None else Sample(channel.topic, stamp_ns, row.logged_ns, payload)


def _decoder(channel: Channel) -> Decode:
    """Return the function that decodes a message or raises MessageError; BagError for an unknown encoding."""
    if _topic(channel).kind == "other":
        raise MessageError(f"expected images or their calibration, found {channel.schema!r}")
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
    damaged = require("google.protobuf.message", "bags").DecodeError
    try:
        decode = factory.decoder_for(channel.encoding, schema)
    except Exception as error:  # protobuf raises TypeError, DecodeError and others for a damaged schema
        raise UnreadableTopicError(
            channel.topic, f"the schema of {channel.schema} in the file is damaged"
        ) from error

    def decode_or_raise(data: bytes) -> Any:
        try:
            return decode(data)
        except damaged as error:
            raise MessageError(f"expected a {channel.schema}, found {len(data)} other bytes") from error

    return decode_or_raise


def _from_json(data: bytes, name: str) -> dict[str, Any]:
    if sum(map(data.count, _JSON_MARKS)) > _MAX_JSON_ITEMS:
        raise MessageError(f"expected a {name} as JSON, found more than {_MAX_JSON_ITEMS} items")
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"expected a {name} as JSON, found {len(data)} other bytes") from error
    if not isinstance(message, dict):
        raise MessageError(f"expected a {name} as a JSON object, found {type(message).__name__}")
    return message
