"""Masks in an MCAP file: topic /masks/<camera>, message encoding msgpack, each the body of a wire message."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

from ..closing import Closing
from ..errors import CameraError, OutputError, require
from ..types import MaskEncoding, MaskFrame
from ..wire import masks_topic, pack_masks, unpack_masks

TOPIC_ROOT = "/masks/"
NO_SCHEMA = 0  # MCAP's way to say that messages describe themselves


class MaskBagWriter(Closing):
    """Writes masks to `path`; log time is the time of capture (where that is not
    Unix time, of arrival), publish time that of publishing, in ns.

    A truncated file loses at most one chunk of 1 MiB. Masks are kept as COCO RLE unless told otherwise.
    Raises MissingExtraError without the extra `bags`, OutputError when the file cannot be written.
    """

    def __init__(self, path: Path, encoding: MaskEncoding = "rle") -> None:
        mcap = require("mcap.writer", "bags")
        self.path = path
        self._encoding = encoding
        self._channels: dict[str, int] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("wb")
        except OSError as error:
            raise OutputError(f"cannot write {path}: {error.strerror}") from error
        self._writer = mcap.Writer(self._file, compression=mcap.CompressionType.NONE)
        self._writer.start(library="sam3-node")

    def write(self, masks: MaskFrame) -> None:
        """Append one message."""
        body = pack_masks(masks, self._encoding)[1]
        self._writer.add_message(
            channel_id=self._channel(masks.camera),
            log_time=masks.age_origin_ns,
            publish_time=masks.published_ns or masks.age_origin_ns,
            sequence=masks.seq & 0xFFFFFFFF,
            data=body,
        )

    def _channel(self, camera: str) -> int:
        if camera not in self._channels:
            self._channels[camera] = self._writer.register_channel(TOPIC_ROOT + camera, "msgpack", NO_SCHEMA)
        return self._channels[camera]

    def close(self) -> None:
        """Write the index and close the file. Idempotent."""
        if not self._file.closed:
            self._writer.finish()
            self._file.close()


def read_masks(path: Path) -> Iterator[MaskFrame]:
    """The masks of a file that MaskBagWriter wrote, in that order; of a truncated one, what is whole.

    Raises CameraError when it cannot be read or is no MCAP file, WireError for a message that is not masks.
    """
    for topic, body in _messages(path):
        if topic.startswith(TOPIC_ROOT):
            yield unpack_masks([masks_topic(topic.removeprefix(TOPIC_ROOT)), body])


def _messages(path: Path) -> Iterator[tuple[str, bytes]]:
    mcap = require("mcap.stream_reader", "bags")
    records, known = require("mcap.records", "bags"), require("mcap.exceptions", "bags")
    topics: dict[int, str] = {}
    try:
        # mapped, so that no length which a broken file declares is allocated
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            for record in mcap.StreamReader(content).records:
                if isinstance(record, records.Channel):
                    topics[record.id] = record.topic
                elif isinstance(record, records.Message):
                    yield topics[record.channel_id], record.data
    except OSError as error:
        raise CameraError(f"cannot read {path}: {error.strerror}") from error
    except known.EndOfFile:
        return  # truncated: a recorder was killed
    except (known.McapError, struct.error, ValueError, KeyError, OverflowError) as error:
        raise CameraError(f"{path} is not a readable MCAP file: {error}") from error
