"""Writer of recordings in this package's layout, into one file or a series of them.

`RecordingWriter` writes one file, which can be read at any moment: after a kill, and on a full disk.
`SplitRecordingWriter` writes NAME.mcap, NAME_0001.mcap and so on; each opens alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import wire
from ...errors import OutputError, WireError, require
from ...files import explain_os_error, is_full, make_folder, remove_inside
from ...resources import Closeable
from ...types import Buffer, ColourEncoding, Frame, Intrinsics, MaskFrame
from .. import native
from ..formats.mcap import MAGIC

if TYPE_CHECKING:
    from ..messages.foxglove_out import Encoded

CHUNK_BYTES = 1 << 20
"""Size of a chunk at which it is written. A kill loses the open chunk."""
JPEG_QUALITY = 95
"""Quality of raw colour that is compressed for a recording, of 100."""

Metadata = Mapping[str, Any]
"""The values of a metadata record, by their keys. Each becomes JSON."""


class RecordingWriter(Closeable):
    """Writes a recording to a new file, or over an existing one with `overwrite`. A context manager.

    A complete chunk is on the disk at once. A kill loses the open chunk, which is at most CHUNK_BYTES long or one
    message. If a write fails, the file is cut back to its last complete chunk and closed, and can be read. Raises
    MissingExtraError without the extra `bags`, and OutputError if the file exists already or cannot be written.
    """

    def __init__(self, path: Path, overwrite: bool = False) -> None:
        mcap = require("mcap.writer", "bags")
        # look for all libraries before the file is made
        for module in ("mcap_protobuf.schema", "foxglove_schemas_protobuf.RawImage_pb2"):
            require(module, "bags")
        from ..messages import foxglove_out  # needs OpenCV, which reading does not

        self._foxglove = foxglove_out
        self.path = path
        self.bytes = 0
        """Length of the messages so far."""
        self.depths_left_out = 0
        """Number of depth images that could not be decompressed. Their frames were recorded without depth."""
        self._channels: dict[str, int] = {}
        self._schemas: dict[str, int] = {}
        self._calibrations: dict[str, tuple[Intrinsics, int, int]] = {}
        self._pending = 0
        # True once a chunk of messages is on the disk
        self._has_messages = False
        self._file = _create(path, overwrite)
        # only `flush` ends a chunk, so that the file knows where it is complete
        self._writer = mcap.Writer(self._file, chunk_size=1 << 62, compression=mcap.CompressionType.NONE)
        self._try(lambda: self._writer.start(library="sam3-node"))
        self.write_metadata(native.LAYOUT, {"version": native.LAYOUT_VERSION})

    @property
    def closed(self) -> bool:
        """True if nothing more can be written."""
        return self._file.closed

    def write_frame(self, frame: Frame, logged_ns: int) -> None:
        """Append a frame that arrived at `logged_ns`. Depth of z16+zstd becomes z16.

        Raises WireError, and writes nothing, for a frame that contradicts itself.
        """
        # pack before the first message is written: it checks the frame
        frame = self._with_z16_depth(frame)
        _, header, *_ = wire.pack_frame(frame)
        # the header comes last, so that a reader of it has the frame's images
        times = frame.seq, logged_ns, frame.sent_ns or logged_ns
        self._calibrate(frame, times)
        self._add_protobuf(f"/{frame.camera}/image", self._foxglove.encode_image(frame), *times)
        if frame.depth is not None:
            message = self._foxglove.encode_depth(frame, frame.depth)
            self._add_protobuf(f"/{frame.camera}/depth", message, *times)
        self._add(f"/{frame.camera}/header", bytes(header), *times)

    def write_masks(self, body: Buffer, masks: MaskFrame, logged_ns: int) -> None:
        """Append masks that arrived at `logged_ns`: the body of their message, and its content for viewers."""
        times = masks.seq, logged_ns, masks.published_ns or logged_ns
        self._add(wire.masks_topic(masks.camera).decode(), bytes(body), *times)
        message = self._foxglove.encode_annotations(masks)
        self._add_protobuf(f"/{masks.camera}/annotations", message, *times)

    def write_event(self, body: Buffer, n: int, logged_ns: int) -> None:
        """Append the node's n-th event, which arrived at `logged_ns`: the body of its message."""
        self._add(native.EVENTS, bytes(body), n, logged_ns, logged_ns)

    def write_robot(self, body: Buffer, topic: str, logged_ns: int) -> None:
        """Append a pose or joints of a robot that arrived at `logged_ns`: the body of their message.

        `topic` is the topic of their message on the wire.
        """
        recorded = topic.replace("pose/", native.ROBOT_POSES_ROOT, 1)
        self._add(recorded, bytes(body), 0, logged_ns, logged_ns)

    def write_truth(self, truth: MaskFrame) -> None:
        """Append the true masks of the frame with the same camera, seq and capture_ns."""
        _, body = wire.pack_masks(truth, "rle")
        self._add(native.TRUTH_ROOT + truth.camera, body, truth.seq, truth.capture_ns, truth.capture_ns)

    def write_pose(self, pose: native.Pose, capture_ns: int) -> None:
        """Append the camera's pose at the time when the frame of the same seq was captured."""
        self._add(native.POSE_ROOT + pose.camera, native.pack_pose(pose), pose.seq, capture_ns, capture_ns)

    def write_metadata(self, name: str, values: Metadata) -> None:
        """Append a metadata record. Each value becomes JSON."""
        # metadata stands between chunks
        texts = {key: json.dumps(value, default=repr) for key, value in values.items()}
        self.flush()
        self._try(lambda: self._writer.add_metadata(name, texts))
        self._file.keep()

    def flush(self) -> None:
        """Finish the open chunk, so that everything is on the disk."""
        if self._pending:
            self._try(self._writer.flush)
            self._file.keep()
            self._has_messages = True
            self._pending = 0

    def close(self) -> None:
        """Write the index and close the file. Idempotent."""
        if not self._file.closed:
            self.flush()
            self._try(self._writer.finish)
            self._file.close()
            self._writer = None  # it holds the index of the file

    def _with_z16_depth(self, frame: Frame) -> Frame:
        # viewers cannot show a depth of z16+zstd
        if frame.depth is None:
            return frame
        try:
            return replace(frame, depth=self._foxglove.decompress_depth(frame.depth))
        except WireError:
            self.depths_left_out += 1
            return replace(frame, depth=None)

    def _calibrate(self, frame: Frame, times: tuple[int, int, int]) -> None:
        if frame.intrinsics is None:
            return
        # once for each camera, and again when it changes
        calibration = (frame.intrinsics, frame.width, frame.height)
        if self._calibrations.get(frame.camera) != calibration:
            message = self._foxglove.encode_calibration(frame, frame.intrinsics)
            self._add_protobuf(f"/{frame.camera}/calibration", message, *times)
            self._calibrations[frame.camera] = calibration

    def _add_protobuf(self, topic: str, message: Encoded, seq: int, logged_ns: int, sent_ns: int) -> None:
        # a camera that changes its encoding sends two message types on one topic: each gets a channel
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
            self._channels[topic] = self._writer.register_channel(topic, "msgpack", native.NO_SCHEMA)
        self._append(self._channels[topic], data, seq, logged_ns, sent_ns)

    def _append(self, channel: int, data: bytes, seq: int, logged_ns: int, sent_ns: int) -> None:
        # a message larger than a chunk gets one of its own
        if self._pending + len(data) > CHUNK_BYTES:
            self.flush()
        self._try(lambda: self._writer.add_message(channel, logged_ns, data, sent_ns, seq & 0xFFFFFFFF))
        self._pending += len(data)
        self.bytes += len(data)
        if self._pending >= CHUNK_BYTES:
            self.flush()

    def _try(self, write: Callable[[], Any]) -> None:
        """Write to the file. If that fails, end the recording where it was last complete."""
        try:
            write()
        except OSError as error:
            # the disk is full, or gone: nothing more can be written
            self._pending = 0
            self._file.end_here(_build_ending())
            what = "the recording ends here, its content can be read"
            # a file without a message would be left by each restart of a recorder on a full disk
            if not self._has_messages:
                what = "nothing was recorded, and no file is left"
                remove_inside(self.path.parent, self.path)
            ended = OutputError(f"cannot write {self.path}: {error.strerror}; {what}")
            ended.may_pass = is_full(error)
            raise ended from error


class SplitRecordingWriter(Closeable):
    """Writes a recording into file after file. A context manager.

    A file is full after `split_bytes` bytes or `split_s` seconds; 0 is no limit. Each file repeats the metadata that
    was added before. It ends with the values that `summary` returns at that time. Raises OutputError as RecordingWriter
    does, and if files of an earlier series with this name exist.
    """

    def __init__(
        self, path: Path, split_bytes: float, split_s: float, summary: Callable[[], Metadata]
    ) -> None:
        # later files of an earlier series would look like parts of this one
        earlier = sorted(path.parent.glob(f"{glob.escape(path.stem)}_[0-9][0-9][0-9][0-9]*.mcap"))
        if earlier:
            raise OutputError(
                f"expected a new name for the recording, found {earlier[0]} of an earlier one; choose another name"
            )
        self._path = path
        self._split_bytes = split_bytes
        self._split_s = split_s
        self._summary = summary
        self._metadata: dict[str, Metadata] = {}
        self._writers: list[RecordingWriter] = []
        self._open()

    @property
    def paths(self) -> list[Path]:
        """Files so far."""
        return [writer.path for writer in self._writers]

    @property
    def bytes(self) -> int:
        """Length of all messages so far."""
        return sum(writer.bytes for writer in self._writers)

    @property
    def depths_left_out(self) -> int:
        """Number of depth images that could not be decompressed. Their frames were recorded without depth."""
        return sum(writer.depths_left_out for writer in self._writers)

    @property
    def closed(self) -> bool:
        """True if nothing more can be written."""
        return self._writers[-1].closed

    def current(self) -> RecordingWriter:
        """Return the writer for the next message. If the last file is full, open a new one."""
        # an empty file is never full, however old
        last = self._writers[-1]
        too_long = self._split_bytes and last.bytes >= self._split_bytes
        too_old = self._split_s and time.monotonic() - self._started_s >= self._split_s
        if too_long or too_old:
            self.split()
        return self._writers[-1]

    def split(self) -> None:
        """End this file, and begin the next one. An empty file goes on."""
        if self._writers[-1].bytes:
            self.close()
            self._open()

    def add_metadata(self, name: str, values: Metadata) -> None:
        """Write metadata into this file and into all later ones."""
        self._metadata[name] = values
        self._writers[-1].write_metadata(name, values)

    def flush(self) -> None:
        """Put everything on the disk."""
        self._writers[-1].flush()

    def close(self) -> None:
        """Finish the last file. Idempotent."""
        if not self.closed:
            self._writers[-1].write_metadata(native.RECORDING, self._summary())
            self._writers[-1].close()

    def _open(self) -> None:
        number = len(self._writers)
        path = self._path
        if number:
            path = path.with_name(f"{path.stem}_{number:04d}.mcap")
        self._writers.append(RecordingWriter(path))
        self._started_s = time.monotonic()
        for name, values in self._metadata.items():
            self._writers[-1].write_metadata(name, values)


class _RecordingFile:
    """A new unbuffered file for the mcap writer, which can be cut back to where it was last complete.

    It is no io.RawIOBase: the mcap writer would buffer that.
    """

    def __init__(self, path: Path, overwrite: bool) -> None:
        self._file = path.open("wb" if overwrite else "xb", buffering=0)
        # the lock tells others that the file is being written; not every disk has locks
        with contextlib.suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._complete_bytes = 0

    @property
    def closed(self) -> bool:
        return self._file.closed

    def write(self, data: bytes) -> None:
        """Write all of `data`."""
        # an unbuffered file may take a part only
        left = memoryview(data)
        while left.nbytes:
            left = left[self._file.write(left) :]

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        """Do nothing: every write has gone to the operating system already."""

    def keep(self) -> None:
        """Mark the file as complete up to here."""
        self._complete_bytes = self._file.tell()

    def end_here(self, ending: bytes) -> None:
        """Cut the file back to the last mark, append `ending` if the disk has space for it, and close the file."""
        # a reader needs the ending to tell the recording from one that was killed; without space it goes without
        with self._file, contextlib.suppress(OSError):
            self._file.truncate(self._complete_bytes)
            self._file.seek(self._complete_bytes)
            if self._file.write(ending) < len(ending):
                self._file.truncate(self._complete_bytes)

    def close(self) -> None:
        self._file.close()


def _create(path: Path, overwrite: bool) -> _RecordingFile:
    if path.exists() and not overwrite:
        raise OutputError(
            f"expected a new file for the recording, found {path}, which is never overwritten; choose another name"
        )
    make_folder(path.parent)
    with explain_os_error(OutputError, f"cannot write {path}"):
        return _RecordingFile(path, overwrite)


def compress_colour(frame: Frame, encoding: ColourEncoding) -> Frame:
    """Return a frame with its raw colour as JPEG or PNG; WireError for a frame that contradicts itself."""
    colour = wire.encode_image(wire.decode_image(frame), encoding, quality=JPEG_QUALITY)
    return replace(frame, encoding=encoding, colour=colour)


def describe_compression(encoding: ColourEncoding) -> Metadata:
    """Return the content of the COLOUR record for frames of `compress_colour`."""
    if encoding == "png":
        return {"compression": encoding, "quality": None, "exact": True}
    return {"compression": encoding, "quality": JPEG_QUALITY, "exact": False}


def _build_ending() -> bytes:
    """Return the end of an MCAP file without an index."""
    records = require("mcap.records", "bags")
    builder = require("mcap.data_stream", "bags").RecordBuilder()
    records.DataEnd(0).write(builder)
    records.Footer(summary_start=0, summary_offset_start=0, summary_crc=0).write(builder)
    return bytes(builder.end()) + MAGIC
