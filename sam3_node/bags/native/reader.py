"""Reading a recording as `record_writer` lays it out: the frames as the cameras sent them, and what the node did."""

from __future__ import annotations

import io
import json
import os
import re
import struct
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ...errors import BagError, WireError, require
from ...types import Buffer, Frame, MaskFrame
from ...wire import EVENTS_TOPIC, Event, frame_topic, masks_topic, unpack_event, unpack_frame, unpack_masks
from ..samples import Losses
from .container import MAGIC
from .writer import EVENTS, LAYOUT, LAYOUT_VERSION

FIRST_RECORDS = 16  # the layout is told in one of them

_RECORD = struct.Struct("<BQ")
_CHUNK, _METADATA, _FOOTER = 0x06, 0x0C, 0x02  # MCAP's opcodes
_OF_FRAMES = re.compile(r"/([A-Za-z0-9_.-]{1,64})/(image|depth|header)")


@dataclass(frozen=True, slots=True)
class RecordedMasks:
    """Masks that the node published, and the body of their message as it arrived."""

    masks: MaskFrame
    body: bytes


Action = Event | RecordedMasks
"""What the node did. Events and masks come in the order in which that was."""


class Message(NamedTuple):
    """One message of a file; `type` is the name of its schema, empty where it has none."""

    topic: str
    type: str
    sequence: int
    logged_ns: int
    data: bytes


def is_recorded(path: Path) -> bool:
    """Whether this is a file of such a recording; False, too, where it cannot be read."""
    try:
        with path.open("rb") as file:
            return _layout_of(file) is not None
    except OSError:
        return False


def read_frames(path: Path) -> Iterator[Frame]:
    """The frames of one file; as `RecordingReader.frames`."""
    return RecordingReader([path]).frames()


class RecordingReader:
    """A recording of one file, or of several that follow one another.

    Of a damaged file, or one whose recorder was killed, all that is before the damage comes, then each iteration ends
    and `lost` tells. Raises BagError for a file that is no recording, or cannot be opened.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        if not paths:
            raise BagError("expected the files of a recording, found none")
        self.paths = tuple(paths)
        self._losses = Losses()
        for path in self.paths:
            _check(path)

    @property
    def lost(self) -> str | None:
        """What could not be read so far and why, None where all was."""
        return self._losses.text()

    def frames(self) -> Iterator[Frame]:
        """The frames in the order of their arrival, pixels still encoded; from the beginning each time.

        Each is the one that the camera sent, but that a depth of z16+zstd is z16 now, with the same values.
        """
        for path in self.paths:
            pixels: dict[tuple[str, str], Message] = {}
            for message in self._messages(path):
                match = _OF_FRAMES.fullmatch(message.topic)
                if match is None:
                    continue
                camera, part = match.groups()
                if part != "header":
                    pixels[camera, part] = message
                elif (frame := self._frame(path, camera, message, pixels)) is not None:
                    yield frame

    def actions(self) -> Iterator[Action]:
        """Masks and events in the order of their arrival; from the beginning each time."""
        for path in self.paths:
            for message in self._messages(path):
                if message.topic == EVENTS or message.topic.startswith("masks/"):
                    try:
                        action = _action(message)
                    except WireError:
                        self._pass_over(path, message)
                    else:
                        yield action

    def metadata(self) -> dict[str, list[dict[str, Any]]]:
        """The metadata records by their names, those of one name in the order of their writing."""
        found: dict[str, list[dict[str, Any]]] = {}
        records = require("mcap.records", "bags")
        for path in self.paths:
            for _, content in self._records(path, (_METADATA,)):
                record = _parse(content, records.Metadata)
                values = {key: _json(text) for key, text in record.metadata.items()}
                found.setdefault(record.name, []).append(values)
        return found

    def _frame(
        self, path: Path, camera: str, header: Message, pixels: dict[tuple[str, str], Message]
    ) -> Frame | None:
        try:
            return unpack_frame([frame_topic(camera), header.data, *_pixels_of(camera, header, pixels)])
        except WireError:
            self._pass_over(path, header)
            return None

    def _pass_over(self, path: Path, message: Message) -> None:
        self._losses.add(f"{path}, {message.topic}: messages that are not of the wire were passed over")

    def _messages(self, path: Path) -> Iterator[Message]:
        channels: dict[int, tuple[str, str]] = {}
        schemas: dict[int, str] = {}
        for position, content in self._records(path, (_CHUNK,)):
            try:
                found = _messages_of(content, channels, schemas)
            except Exception as error:  # whatever a damaged chunk does to its decoding
                self._losses.add(
                    f"{path} is damaged at byte {position}: {str(error) or type(error).__name__}"
                )
                return
            yield from found

    def _records(self, path: Path, kinds: Collection[int]) -> Iterator[tuple[int, bytes]]:
        with path.open("rb") as file:
            file.seek(len(MAGIC))
            try:
                yield from _records_of(file, kinds)
            except EOFError:
                self._losses.add(
                    f"{path} has no end: its recorder was killed, or a part is missing; all that is complete was read"
                )


def _check(path: Path) -> None:
    try:
        with path.open("rb") as file:
            layout = _layout_of(file)
    except OSError as error:
        raise BagError(f"cannot read {path}: {error.strerror}") from error
    if layout is None:
        raise BagError(f"expected a recording of sam3-node record, found another file at {path}")
    if layout != LAYOUT_VERSION:
        raise BagError(
            f"{path}: expected layout {LAYOUT_VERSION} of recordings, found {layout}; read it with a newer sam3-node"
        )


def _layout_of(file: BinaryIO) -> Any:
    """The version that a recording tells near its beginning, None where there is none."""
    if file.read(len(MAGIC)) != MAGIC:
        return None
    records = require("mcap.records", "bags")
    try:
        for _, content in _records_of(file, (_METADATA,), FIRST_RECORDS):
            record = _parse(content, records.Metadata)
            if record.name == LAYOUT:
                return _json(record.metadata.get("version", ""))
    except (EOFError, ValueError, struct.error, require("mcap.exceptions", "bags").McapError):
        pass
    return None


def _records_of(
    file: BinaryIO, kinds: Collection[int], most: int | None = None
) -> Iterator[tuple[int, bytes]]:
    """Position and content of the complete records of these kinds, up to the footer or of the first `most`.

    EOFError where the file ends before its footer. No more is read than the file holds, whatever it declares.
    """
    size, count = os.fstat(file.fileno()).st_size, 0
    while most is None or count < most:
        position = file.tell()
        head = file.read(_RECORD.size)
        if len(head) < _RECORD.size:
            raise EOFError
        opcode, length = _RECORD.unpack(head)
        if length > size - file.tell():
            raise EOFError
        if opcode == _FOOTER:
            return
        count += 1
        if opcode in kinds:
            yield position, file.read(length)
        else:
            file.seek(length, os.SEEK_CUR)


def _parse(content: bytes, kind: Any) -> Any:
    return kind.read(require("mcap.data_stream", "bags").ReadDataStream(io.BytesIO(content)))


def _messages_of(
    content: bytes, channels: dict[int, tuple[str, str]], schemas: dict[int, str]
) -> list[Message]:
    """The messages of a chunk; channels (topic, type) and types of schemas are kept for those after it."""
    records, reader = require("mcap.records", "bags"), require("mcap.stream_reader", "bags")
    found = []
    for record in reader.breakup_chunk(_parse(content, records.Chunk), validate_crc=True):
        if isinstance(record, records.Schema):
            schemas[record.id] = record.name
        elif isinstance(record, records.Channel):
            channels[record.id] = record.topic, schemas.get(record.schema_id, "")
        else:
            topic, kind = channels[record.channel_id]
            found.append(Message(topic, kind, record.sequence, record.log_time, record.data))
    return found


def _pixels_of(camera: str, header: Message, pixels: dict[tuple[str, str], Message]) -> list[Buffer]:
    """Colour, and depth where there is one, of the frame that a header is of; WireError where one does not decode."""
    found = [pixels.pop((camera, part), None) for part in ("image", "depth")]
    same = [message for message in found if message is not None and message[2:4] == header[2:4]]
    return [_data_of(message) for message in same]


def _data_of(message: Message) -> bytes:
    name = message.type.removeprefix("foxglove.")
    error = require("google.protobuf.message", "bags").DecodeError
    if name not in ("RawImage", "CompressedImage"):
        raise WireError(
            f"{message.topic}: expected an image of Foxglove's, found {message.type or 'no schema'}"
        )
    try:
        kind = getattr(require(f"foxglove_schemas_protobuf.{name}_pb2", "bags"), name)
        return bytes(kind.FromString(message.data).data)
    except error as wrong:
        raise WireError(f"{message.topic}: expected {message.type}, found other bytes") from wrong


def _action(message: Message) -> Action:
    if message.topic == EVENTS:
        return unpack_event([EVENTS_TOPIC, message.data])
    topic = masks_topic(message.topic.removeprefix("masks/"))
    return RecordedMasks(unpack_masks([topic, message.data]), message.data)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
