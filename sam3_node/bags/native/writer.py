"""Writing a recording: one MCAP file of what cameras and node have sent.

/<camera>/image        foxglove.CompressedImage or RawImage, protobuf
/<camera>/depth        foxglove.RawImage (16UC1) or CompressedImage (16-bit png)
/<camera>/calibration  foxglove.CameraCalibration, with the first frame of the file and when it changes
/<camera>/header       the header of the frame message, msgpack; it comes after the frame's pixels
masks/<camera>         the body of a masks message, msgpack, as it arrived
/<camera>/annotations  foxglove.ImageAnnotations of the same masks
events                 the body of an event, msgpack, as it arrived

Messages are logged at their arrival; publish times are those of sending. Metadata records have JSON for values.

A recording as a row of files: NAME.mcap, NAME_0001.mcap and so on, each of which opens alone."""

from __future__ import annotations

import contextlib
import glob
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import OutputError, WireError, require
from ...types import Buffer, Closeable, Depth, Frame, Intrinsics, MaskFrame
from ...wire import decode_depth, encode_depth, masks_topic, pack_frame
from ..messages import foxglove_out
from ..messages.foxglove_out import Encoded
from .container import MAGIC, NO_SCHEMA

CHUNK_BYTES = 1 << 20
MAX_DEPTH_PIXELS = 1 << 25
LAYOUT, LAYOUT_VERSION = "sam3_node.layout", 1
"""The metadata record that a recording begins with, and its version."""
NODE, RECORDING = "sam3_node.node", "sam3_node.recording"
"""Metadata: what the node has told of itself; what was recorded and what was lost, written at the end."""
EVENTS = "events"


class RecordingWriter(Closeable):
    """Writes a recording to a new file. A context manager.

    An open chunk is at most CHUNK_BYTES long, or one message: what a kill loses. Complete ones are on the disk at once.
    Raises MissingExtraError without the extra `bags`, OutputError where the file is there already or cannot be
    written. When that happens later, the file is closed as it was when it last could, and can be read.
    """

    def __init__(self, path: Path) -> None:
        mcap = require("mcap.writer", "bags")
        for module in ("mcap_protobuf.schema", "foxglove_schemas_protobuf.RawImage_pb2"):
            require(module, "bags")
        self.path = path
        self.bytes = 0
        """Length of the messages so far."""
        self.depths_left_out = 0
        """Depth images that could not be decompressed; their frames were recorded without them."""
        self._channels: dict[str, int] = {}
        self._schemas: dict[str, int] = {}
        self._calibrations: dict[str, tuple[Intrinsics, int, int]] = {}
        self._pending = 0
        self._file = _create(path)
        # no size ends a chunk but `flush` alone
        self._writer = mcap.Writer(self._file, chunk_size=1 << 62, compression=mcap.CompressionType.NONE)
        self._try(lambda: self._writer.start(library="sam3-node"))
        self.write_metadata(LAYOUT, {"version": LAYOUT_VERSION})

    @property
    def closed(self) -> bool:
        """Nothing more can be written."""
        return self._file.closed

    def write_frame(self, frame: Frame, logged_ns: int) -> None:
        """Append a frame that arrived at `logged_ns`; a depth of z16+zstd becomes z16.

        Raises WireError for a frame that contradicts itself; nothing is written then.
        """
        frame = self._plain_depth(frame)
        _, header, *_ = pack_frame(frame)
        times = frame.seq, logged_ns, frame.sent_ns or logged_ns
        self._calibrate(frame, times)
        self._add_protobuf(f"/{frame.camera}/image", foxglove_out.encode_image(frame), *times)
        if frame.depth is not None:
            message = foxglove_out.encode_depth(frame, frame.depth)
            self._add_protobuf(f"/{frame.camera}/depth", message, *times)
        self._add(f"/{frame.camera}/header", bytes(header), *times)

    def write_masks(self, body: Buffer, masks: MaskFrame, logged_ns: int) -> None:
        """Append masks that arrived at `logged_ns`: the body of their message, and what it holds."""
        times = masks.seq, logged_ns, masks.published_ns or logged_ns
        self._add(masks_topic(masks.camera).decode(), bytes(body), *times)
        message = foxglove_out.encode_annotations(masks)
        self._add_protobuf(f"/{masks.camera}/annotations", message, *times)

    def write_event(self, body: Buffer, n: int, logged_ns: int) -> None:
        """Append the node's n-th event, which arrived at `logged_ns`: the body of its message."""
        self._add(EVENTS, bytes(body), n, logged_ns, logged_ns)

    def write_metadata(self, name: str, values: Mapping[str, Any]) -> None:
        """Append a metadata record; each value becomes JSON."""
        texts = {key: json.dumps(value, default=repr) for key, value in values.items()}
        self.flush()
        self._try(lambda: self._writer.add_metadata(name, texts))
        self._file.keep()

    def flush(self) -> None:
        """Finish the open chunk, so that all is on the disk."""
        if self._pending:
            self._try(self._writer.flush)
            self._file.keep()
            self._pending = 0

    def close(self) -> None:
        """Write the index and close the file. Idempotent."""
        if not self._file.closed:
            self.flush()
            self._try(self._writer.finish)
            self._file.close()

    def _plain_depth(self, frame: Frame) -> Frame:
        depth = frame.depth
        if depth is None or depth.encoding != "z16+zstd":
            return frame
        try:
            return replace(frame, depth=_decompressed(depth))
        except WireError:
            self.depths_left_out += 1
            return replace(frame, depth=None)

    def _calibrate(self, frame: Frame, times: tuple[int, int, int]) -> None:
        known = (frame.intrinsics, frame.width, frame.height)
        if frame.intrinsics is None or self._calibrations.get(frame.camera) == known:
            return
        message = foxglove_out.encode_calibration(frame, frame.intrinsics)
        self._add_protobuf(f"/{frame.camera}/calibration", message, *times)
        self._calibrations[frame.camera] = (frame.intrinsics, frame.width, frame.height)

    def _add_protobuf(self, topic: str, message: Encoded, seq: int, logged_ns: int, sent_ns: int) -> None:
        # a topic may carry two kinds, where a camera changes its encoding: a channel for each
        name = message.kind.DESCRIPTOR.full_name
        if name not in self._schemas:
            register = require("mcap_protobuf.schema", "bags").register_schema
            self._schemas[name] = register(self._writer, message.kind)
        channel = f"{topic} {name}"
        if channel not in self._channels:
            self._channels[channel] = self._writer.register_channel(topic, "protobuf", self._schemas[name])
        self._append(self._channels[channel], message.data, seq, logged_ns, sent_ns)

    def _add(self, topic: str, data: bytes, seq: int, logged_ns: int, sent_ns: int) -> None:
        if topic not in self._channels:
            self._channels[topic] = self._writer.register_channel(topic, "msgpack", NO_SCHEMA)
        self._append(self._channels[topic], data, seq, logged_ns, sent_ns)

    def _append(self, channel: int, data: bytes, seq: int, logged_ns: int, sent_ns: int) -> None:
        if self._pending + len(data) > CHUNK_BYTES:
            self.flush()
        self._try(lambda: self._writer.add_message(channel, logged_ns, data, sent_ns, seq & 0xFFFFFFFF))
        self._pending += len(data)
        self.bytes += len(data)
        if self._pending >= CHUNK_BYTES:
            self.flush()

    def _try(self, write: Callable[[], Any]) -> None:
        try:
            write()
        except OSError as error:
            self._pending = 0
            self._file.end_here(_bare_ending())
            raise OutputError(
                f"cannot write {self.path}: {error.strerror}; the recording ends here, what it holds can be read"
            ) from error


class _WholeFile:
    """A new file, not buffered, that can be cut back to where it was last whole; as mcap's writer takes it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb", buffering=0)
        self._kept = 0

    @property
    def closed(self) -> bool:
        return self._file.closed

    def write(self, data: bytes) -> None:
        left = memoryview(data)
        while left.nbytes:
            left = left[self._file.write(left) :]

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        """Nothing waits: what was written has gone to the operating system."""

    def keep(self) -> None:
        """What is written by now is whole."""
        self._kept = self._file.tell()

    def end_here(self, ending: bytes) -> None:
        """Cut off what has come since, end the file with `ending` if there is room for that, and close it."""
        with self._file, contextlib.suppress(OSError):
            self._file.truncate(self._kept)
            self._file.seek(self._kept)
            if self._file.write(ending) < len(ending):
                self._file.truncate(self._kept)

    def close(self) -> None:
        self._file.close()


def _create(path: Path) -> _WholeFile:
    if path.exists():
        raise OutputError(
            f"expected a new file for the recording, found {path}, which is never overwritten; choose another name"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return _WholeFile(path)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error


def _bare_ending() -> bytes:
    """The end of an MCAP file without an index."""
    records = require("mcap.records", "bags")
    builder = require("mcap.data_stream", "bags").RecordBuilder()
    records.DataEnd(0).write(builder)
    records.Footer(summary_start=0, summary_offset_start=0, summary_crc=0).write(builder)
    return bytes(builder.end()) + MAGIC


def _decompressed(depth: Depth) -> Depth:
    if depth.width * depth.height > MAX_DEPTH_PIXELS:
        raise WireError(
            f"depth: expected at most {MAX_DEPTH_PIXELS} pixels, found {depth.width} x {depth.height}"
        )
    return encode_depth(decode_depth(depth), "z16", depth.scale_m, depth.aligned)


Metadata = Mapping[str, Any]


class Splits(Closeable):
    """Opens file after file; a context manager.

    A file is full from `split_bytes` or `split_s` seconds on; 0 is no limit. What was told is in each file after that,
    and at its end what `summary` says then. Raises OutputError as RecordingWriter, and where the name has later files.
    """

    def __init__(
        self, path: Path, split_bytes: float, split_s: float, summary: Callable[[], Metadata]
    ) -> None:
        later = sorted(path.parent.glob(f"{glob.escape(path.stem)}_[0-9][0-9][0-9][0-9]*.mcap"))
        if later:
            raise OutputError(
                f"expected a new name for the recording, found {later[0]} of an earlier one; choose another name"
            )
        self.paths: list[Path] = []
        self._path, self._split_bytes, self._split_s = path, split_bytes, split_s
        self._summary = summary
        self._told: dict[str, Metadata] = {}
        self._closed_bytes = self._closed_depths = 0
        self._writer = self._open()

    @property
    def bytes(self) -> int:
        """Length of all messages so far."""
        return self._closed_bytes + self._writer.bytes

    @property
    def depths_left_out(self) -> int:
        """Depth images that could not be decompressed; their frames were recorded without them."""
        return self._closed_depths + self._writer.depths_left_out

    def current(self) -> RecordingWriter:
        """The file that the next message belongs in: a new one where the last is full."""
        too_long = self._split_bytes and self._writer.bytes >= self._split_bytes
        too_old = self._split_s and time.monotonic() - self._begun_s >= self._split_s
        if self._writer.bytes and (too_long or too_old):
            self._finish()
            self._closed_bytes += self._writer.bytes
            self._closed_depths += self._writer.depths_left_out
            self._writer = self._open()
        return self._writer

    def tell(self, name: str, values: Metadata) -> None:
        """Write metadata, in this file and in all that follow."""
        self._told[name] = values
        self._writer.write_metadata(name, values)

    def flush(self) -> None:
        """Have all on the disk."""
        self._writer.flush()

    def close(self) -> None:
        """Finish the last file. Idempotent."""
        if not self._writer.closed:
            self._finish()

    def _open(self) -> RecordingWriter:
        number = len(self.paths)
        path = self._path.with_name(f"{self._path.stem}_{number:04d}.mcap") if number else self._path
        writer = RecordingWriter(path)
        self.paths.append(path)
        self._begun_s = time.monotonic()
        for name, values in self._told.items():
            writer.write_metadata(name, values)
        return writer

    def _finish(self) -> None:
        self._writer.write_metadata(RECORDING, self._summary())
        self._writer.close()
