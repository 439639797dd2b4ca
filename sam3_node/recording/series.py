"""Writes one recording: unpacks messages, compresses their raw colour on request, and writes them in order.

`RecordReport` counts recorded and lost messages by the numbers that messages carry.
"""

import os
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from .. import wire
from ..bags.native import COLOUR, RECORDER
from ..bags.native.writer import SplitRecordingWriter, compress_colour, describe_compression
from ..errors import OutputError, WireError
from ..resources import Closeable
from ..schema.fields import Plain
from ..settings import RecordSettings
from ..transport.tap import ReceivedMessage
from ..types import Frame, MaskFrame, count_missing_frames
from ..wire.images import CHANNELS

MAX_CAMERAS = 64
"""Number of cameras, and of topics of the robot, that a recording may have. Names come from outside."""
MAX_COMPRESSING = 16
"""Number of messages that wait for a frame that is still being compressed. With more, writing waits."""
MAX_THREADS = 4
"""Number of threads that compress frames."""
QUOTA_PARTS = 10
"""Number of files that a quota holds if the size or length of files is not set."""


class _QueuedMessage(NamedTuple):
    """A message to write, and the compression of its frame that it waits for."""

    write: Callable[[], None]
    compression: Future[Frame] | None = None

    def is_ready(self) -> bool:
        return self.compression is None or self.compression.done()


class RecordedSeries(Closeable):
    """Writes messages to one recording, in one or several files. A context manager.

    `dropped` returns the number of messages that were never received, which goes into the recording's summary.
    `on_restart` is called for an event of a node that was restarted. Raises OutputError as SplitRecordingWriter does.
    """

    def __init__(
        self, path: Path, record: RecordSettings, dropped: Callable[[], int], on_restart: Callable[[], None]
    ) -> None:
        self.report = RecordReport()
        self._began_ns = time.time_ns()
        self._record = record
        self._dropped = dropped
        self._on_restart = on_restart
        self._waiting: deque[_QueuedMessage] = deque()
        self._is_colour_described = False
        self._first_s: float | None = None

        # a quota deletes whole files: one file of its size would leave none
        split_mb = record.split_mb or record.max_total_gb * 1000 / QUOTA_PARTS
        split_s = record.split_s or record.max_age_h * 3600 / QUOTA_PARTS
        self.files = SplitRecordingWriter(path, split_mb * 1e6, split_s, self._summary)
        self._pool = ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1), "compress")
        self.files.add_metadata(RECORDER, {"began_ns": self._began_ns, "colour": record.colour})

    def add(self, message: ReceivedMessage) -> None:
        """Write a message, or reject a malformed one. Raises OutputError if nothing more can be written."""
        # the rate counts from the first message, because cameras may start later
        if self._first_s is None:
            self._first_s = time.monotonic()
        refused = self.report.rejected
        self._try(partial(self._accept, *message))
        if self.report.rejected > refused:
            self.report.note_camera(wire.find_camera(message.parts[0]))
        self._write_ready(MAX_COMPRESSING)

    def split(self) -> None:
        """Write what waits, and begin another file with the next message."""
        self._write_ready(0)
        self.files.split()

    def flush(self) -> None:
        """Put everything on the disk that is not still compressed."""
        self._write_ready(MAX_COMPRESSING)
        self.files.flush()

    def close(self) -> None:
        """Write what waits, and finish the last file. Idempotent."""
        # after a failed write nothing more can be written, but threads and files still end
        try:
            if not self.files.closed:
                self._write_ready(0)
        finally:
            self._pool.shutdown(cancel_futures=True)
            self.files.close()

    @property
    def seconds(self) -> float:
        """Time since the first message."""
        if self._first_s is None:
            return 0.0
        return time.monotonic() - self._first_s

    def format_rate(self) -> str:
        """Describe the mean rate so far, and the hours until the disk is full."""
        seconds = max(self.seconds, 1e-3)
        bytes_per_s = self.files.bytes / seconds
        text = f"rate: {bytes_per_s / 1e6:.1f} MB/s"
        for camera, counts in self.report.cameras.items():
            if counts.frames:
                text += f", {camera} {counts.frames / seconds:.1f} frames/s"

        # a quota keeps the disk from filling
        if self._record.max_total_gb:
            return f"{text}; at most {self._record.max_total_gb:g} GB are kept"
        try:
            free = shutil.disk_usage(self.files.paths[-1].parent).free
        except OSError:
            return text
        if not bytes_per_s:
            return text
        return f"{text}; the disk is full in {free / bytes_per_s / 3600:.1f} hours"

    def _accept(self, parts: list[memoryview], received_ns: int) -> None:
        """Unpack a message, and queue how to write it. Raises WireError for a malformed one."""
        future: Future[Frame] | None = None
        if parts[0] == wire.EVENTS_TOPIC:
            write = partial(self._write_event, wire.unpack_event(parts), parts[1], received_ns)
        elif bytes(parts[0][:6]) == b"masks/":
            masks = wire.unpack_masks(parts)
            self.report.admit(masks.camera)
            write = partial(self._write_masks, masks, parts[1], received_ns)
        elif bytes(parts[0]).startswith(wire.ROBOT_ROOTS):
            wire.unpack_pose(parts)
            topic = bytes(parts[0]).decode()
            self.report.admit_pose(topic)
            write = partial(self._write_robot, topic, parts[1], received_ns)
        elif bytes(parts[0]).startswith(wire.ACTIONS_ROOT):
            wire.unpack_action(parts)
            topic = bytes(parts[0]).decode()
            self.report.admit_pose(topic)
            write = partial(self._write_robot, topic, parts[1], received_ns)
        else:
            frame = wire.unpack_frame(parts)
            self.report.admit(frame.camera)
            write = partial(self._write_frame, frame, received_ns)
            # compression takes longer than a frame: it runs in threads
            if self._record.colour != "raw" and frame.encoding in CHANNELS:
                future = self._pool.submit(compress_colour, frame, self._record.colour)
                write = partial(self._write_compressed, future, received_ns)
        self._waiting.append(_QueuedMessage(write, future))

    def _write_ready(self, max_waiting: int) -> None:
        """Write the messages up to the first frame that is still compressed, and more while too many wait."""
        while self._waiting and (self._waiting[0].is_ready() or len(self._waiting) > max_waiting):
            self._try(self._waiting.popleft().write)

    def _try(self, work: Callable[[], None]) -> None:
        """Do some work, and count the message as rejected if that fails. Raises OutputError alone."""
        # no malformed message may end the recording
        try:
            work()
        except OutputError:
            raise
        except Exception as error:
            self.report.reject(error)

    def _write_event(self, event: wire.Event, body: memoryview, received_ns: int) -> None:
        # a restarted node has another description
        self.files.current().write_event(body, event.n, received_ns)
        if self.report.add_event(event):
            self._on_restart()

    def _write_masks(self, masks: Any, body: memoryview, received_ns: int) -> None:
        self.files.current().write_masks(body, masks, received_ns)
        self.report.add_masks(masks)

    def _write_robot(self, topic: str, body: memoryview, received_ns: int) -> None:
        self.files.current().write_robot(body, topic, received_ns)
        self.report.poses += 1

    def _write_frame(self, frame: Frame, received_ns: int) -> None:
        self.files.current().write_frame(frame, received_ns)
        self.report.add_frame(frame)

    def _write_compressed(self, future: Future[Frame], received_ns: int) -> None:
        frame = future.result()
        # say once, before the first such frame, what its pixels are
        if not self._is_colour_described:
            self._is_colour_described = True
            self.files.add_metadata(COLOUR, describe_compression(frame.encoding))
        self._write_frame(frame, received_ns)

    def _summary(self) -> Plain:
        return {
            **self.report.describe(),
            "began_ns": self._began_ns,
            "ended_ns": time.time_ns(),
            "dropped": self._dropped(),
            "depths_left_out": self.files.depths_left_out,
        }


@dataclass
class CameraCounts:
    """Counts of one camera. `skipped` are the frames that the node skipped, as its masks report."""

    frames: int = 0
    frames_lost: int = 0
    masks: int = 0
    masks_lost: int = 0
    skipped: int = 0


@dataclass
class RecordReport:
    """Counts recorded messages, and lost ones by the gaps in their numbers.

    A frame is lost if its seq is missing. At least one masks message is lost if `skipped` does not reach back to the
    frame that was stepped before. Numbers that start again mean that a camera or a node was restarted.
    """

    cameras: dict[str, CameraCounts] = field(default_factory=dict)
    events: int = 0
    poses: int = 0
    """Number of recorded poses and joints of robots, of at most MAX_CAMERAS topics."""
    node_starts: int = 0
    """Number of restarts of the node during the recording."""
    rejected: int = 0
    last_error: str | None = None
    refused: Counter[str] = field(default_factory=Counter)
    """Rejected messages by camera."""
    _posed: set[str] = field(default_factory=set)
    _last_frame: dict[str, int] = field(default_factory=dict)
    """Last seq of each camera's frames."""
    _last_stepped: dict[str, int] = field(default_factory=dict)
    """Last seq of each camera that the node stepped."""
    _event_gaps: int = 0
    _first_event: int | None = None
    _last_event: int | None = None
    _described_events: int | None = None

    def admit(self, camera: str) -> None:
        """Add a camera if it is new. Raises WireError if there are too many."""
        # names come from outside: without a limit they would fill memory
        if camera in self.cameras:
            return
        if len(self.cameras) >= MAX_CAMERAS:
            raise WireError(f"expected at most {MAX_CAMERAS} cameras, found another: {camera}")
        self.cameras[camera] = CameraCounts()

    def admit_pose(self, topic: str) -> None:
        """Add a topic of poses or joints if it is new. Raises WireError if there are too many."""
        if topic not in self._posed and len(self._posed) >= MAX_CAMERAS:
            raise WireError(
                f"expected at most {MAX_CAMERAS} topics of poses and joints, found another: {topic}"
            )
        self._posed.add(topic)

    def add_frame(self, frame: Frame) -> None:
        """Count a recorded frame of an admitted camera."""
        counts = self.cameras[frame.camera]
        last = self._last_frame.get(frame.camera)
        counts.frames += 1
        if last is not None:
            counts.frames_lost += count_missing_frames(last, frame.seq)
        self._last_frame[frame.camera] = frame.seq

    def add_masks(self, masks: MaskFrame) -> None:
        """Count recorded masks of an admitted camera."""
        counts = self.cameras[masks.camera]
        last = self._last_stepped.get(masks.camera)
        counts.masks += 1
        counts.skipped += masks.skipped
        # frames that the node skipped have no masks
        if last is not None and count_missing_frames(last, masks.seq) > masks.skipped:
            counts.masks_lost += 1
        self._last_stepped[masks.camera] = masks.seq

    def add_event(self, event: wire.Event) -> bool:
        """Count a recorded event. Return True if it comes from a node that was restarted."""
        # a node numbers its events from 0
        self.events += 1
        is_restart = self._last_event is not None and event.n <= self._last_event
        if is_restart:
            self.node_starts += 1
            self._last_stepped.clear()
        elif self._last_event is not None:
            self._event_gaps += event.n - self._last_event - 1
        if self._first_event is None:
            self._first_event = event.n
        self._last_event = event.n
        self._follow(event)
        return is_restart

    def has_event(self, number: int) -> bool:
        """Return True if the node's event of this number has come, or a later one."""
        return number < 0 or (self._last_event is not None and self._last_event >= number)

    def add_description(self, events: int) -> None:
        """Note the number of events that the node had published when it first described itself."""
        if self._described_events is None:
            self._described_events = events

    def reject(self, error: Exception) -> None:
        """Count a message that could not be recorded."""
        self.rejected += 1
        self.last_error = (str(error) or repr(error))[:200]

    def note_camera(self, camera: str | None) -> None:
        """Count a rejected message for its camera, of which so many are counted as are recorded."""
        if camera is not None and (camera in self.refused or len(self.refused) < MAX_CAMERAS):
            self.refused[camera] += 1

    @property
    def events_lost(self) -> int:
        """Number of missing events, between the recorded ones and between the node's description and the first one."""
        # the description may be newer than the first recorded event: nothing is missing then
        missed = 0
        if self._first_event is not None and self._described_events is not None:
            missed = self._first_event - self._described_events
        return self._event_gaps + max(0, missed)

    @property
    def lost(self) -> int:
        """Number of all missing messages."""
        lost = self.events_lost
        for counts in self.cameras.values():
            lost += counts.frames_lost + counts.masks_lost
        return lost

    def describe(self) -> Plain:
        """Return the counts as they are stored in the metadata of a recording."""
        return {
            "cameras": {camera: asdict(counts) for camera, counts in self.cameras.items()},
            "events": self.events,
            "poses": self.poses,
            "events_lost": self.events_lost,
            "node_starts": self.node_starts,
            "rejected": self.rejected,
            "last_error": self.last_error,
        }

    def _follow(self, event: wire.Event) -> None:
        """Update the last stepped seq of the camera that an event is about."""
        # a failed frame also was a step; a camera that is served again starts anew
        camera = str(event.args.get("camera"))
        seq = event.args.get("seq")
        if event.op in (wire.SERVED, wire.DROPPED):
            self._last_stepped.pop(camera, None)
        elif event.op == wire.FAILED and isinstance(seq, int) and camera in self.cameras:
            self._last_stepped[camera] = seq
