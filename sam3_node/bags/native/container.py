"""MCAP files as rows of (topic, bytes): what every bag of this package is written into and read from."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

from ...errors import BagError, OutputError, require
from ...types import Closeable

NO_SCHEMA = 0  # MCAP's way to say that messages describe themselves
MAGIC = b"\x89MCAP0\r\n"


class MessageWriter(Closeable):
    """Writes msgpack messages to `path`, in chunks of 1 MiB that are not compressed; a cut loses at most one.

    Raises MissingExtraError without the extra `bags`, OutputError when the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        mcap = require("mcap.writer", "bags")
        self.path = path
        self._channels: dict[str, int] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("wb")
        except OSError as error:
            raise self._cannot_write(error) from error
        self._writer = mcap.Writer(self._file, compression=mcap.CompressionType.NONE)
        self._writer.start(library="sam3-node")

    def add(self, topic: str, data: bytes, seq: int, log_ns: int, publish_ns: int) -> None:
        """Append one message. Both times are in ns; `seq` is kept modulo 2^32."""
        if topic not in self._channels:
            self._channels[topic] = self._writer.register_channel(topic, "msgpack", NO_SCHEMA)
        try:
            self._writer.add_message(
                channel_id=self._channels[topic],
                log_time=log_ns,
                publish_time=publish_ns,
                sequence=seq & 0xFFFFFFFF,
                data=data,
            )
        except OSError as error:
            raise self._cannot_write(error) from error

    def close(self) -> None:
        """Write the index and close the file. Idempotent."""
        if self._file.closed:
            return
        try:
            with self._file:
                self._writer.finish()
        except OSError as error:
            raise self._cannot_write(error) from error

    def _cannot_write(self, error: OSError) -> OutputError:
        return OutputError(f"cannot write {self.path}: {error.strerror}")


def read_messages(path: Path) -> Iterator[tuple[str, bytes]]:
    """Topic and data of each message, in the file's order.

    Of a damaged or truncated file every chunk before the damage comes, then BagError. Raises BagError, too,
    for a file that cannot be opened or is no MCAP file, MissingExtraError without the extra `bags`.
    """
    mcap, exceptions = require("mcap.reader", "bags"), require("mcap.exceptions", "bags")
    count = 0
    try:
        with path.open("rb") as file:
            _check_magic(path, file.read(len(MAGIC)))
            # mapped, so that no length which a broken file declares is allocated
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                reader = mcap.NonSeekingReader(content, validate_crcs=True)
                for _, channel, message in reader.iter_messages(log_time_order=False):
                    yield channel.topic, message.data
                    count += 1
    except OSError as error:
        raise BagError(f"cannot read {path}: {error.strerror}") from error
    except (exceptions.McapError, struct.error, ValueError, KeyError, OverflowError) as error:
        raise BagError(
            f"{path} is damaged, or its recorder was killed: what follows its first {count} messages cannot be "
            f"read ({type(error).__name__})"
        ) from error


def _check_magic(path: Path, found: bytes) -> None:
    if found != MAGIC:
        what = "one that begins otherwise" if found else "an empty one"
        raise BagError(f"expected an MCAP file at {path}, found {what}")
