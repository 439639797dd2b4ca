"""One recording: messages unpacked, their raw colour compressed if asked, written in order, and counted."""

from __future__ import annotations

import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ..bags.native.layout import COLOUR, RECORDER
from ..bags.native.writer import SplitRecordingWriter, compress_colour, describe_compression
from ..errors import OutputError
from ..settings import RecordSettings
from ..transport import ReceivedMessage
from ..types import Closeable, Frame
from ..wire import EVENTS_TOPIC, POSES_ROOT, Event, unpack_event, unpack_frame, unpack_masks, unpack_pose
from ..wire.images import CHANNELS
from .loss_counter import LossCounter

JPEG_QUALITY = 95
MAX_COMPRESSING = 16
"""Maximum number of messages that wait for a frame that is still compressed."""
QUOTA_PARTS = 10
"""Number of files that a quota holds if the size or length of files is not set."""


class _Waiting(NamedTuple):
    """A message to write, and the compression of its frame that it waits for."""

    write: Callable[[], None]
    compression: Future[Frame] | None = None

    def is_ready(self) -> bool:
        return self.compression is None or self.compression.done()


class RecordedSeries(Closeable):
    """Writes messages to one recording, in one or several files. A context manager.

    `dropped` returns the number of messages that were never received; it goes into the recording's summary.
    `on_restart` is called for an event of a node that was restarted. Raises OutputError as SplitRecordingWriter does.
    """

    def __init__(
        self, path: Path, record: RecordSettings, dropped: Callable[[], int], on_restart: Callable[[], None]
    ) -> None:
        self.counter = LossCounter()
        self._began_ns = time.time_ns()
        self._record, self._dropped, self._on_restart = record, dropped, on_restart
        self._waiting: deque[_Waiting] = deque()
        self._is_colour_described = False
        self._first_s: float | None = None
        split_mb = record.split_mb or record.max_total_gb * 1000 / QUOTA_PARTS
        split_s = record.split_s or record.max_age_h * 3600 / QUOTA_PARTS
        self.files = SplitRecordingWriter(path, split_mb * 1e6, split_s, self._summary)
        self._pool = ThreadPoolExecutor(min(4, os.cpu_count() or 1), "compress")
        self.files.add_metadata(RECORDER, {"began_ns": self._began_ns, "colour": record.colour})

    def add(self, message: ReceivedMessage) -> None:
        """Write a message, or reject a malformed one. OutputError if nothing more can be written."""
        if self._first_s is None:
            self._first_s = time.monotonic()
        self._try(partial(self._accept, *message))
        self._write_ready(MAX_COMPRESSING)

    def flush(self) -> None:
        """Put everything on the disk that is not still compressed."""
        self._write_ready(MAX_COMPRESSING)
        self.files.flush()

    def close(self) -> None:
        """Write what waits, and finish the last file. Idempotent."""
        try:
            if not self.files.closed:
                self._write_ready(0)
        finally:
            self._pool.shutdown(cancel_futures=True)
            self.files.close()

    @property
    def seconds(self) -> float:
        """Time since the first message."""
        return 0.0 if self._first_s is None else time.monotonic() - self._first_s

    def format_rate(self) -> str:
        """Describe the mean rate so far, and the hours until the disk is full."""
        seconds = max(self.seconds, 1e-3)
        bytes_per_s = self.files.bytes / seconds
        rates = [
            f"{camera} {counts.frames / seconds:.1f} frames/s"
            for camera, counts in self.counter.cameras.items()
            if counts.frames
        ]
        text = ", ".join([f"rate: {bytes_per_s / 1e6:.1f} MB/s", *rates])
        if self._record.max_total_gb:
            return f"{text}; at most {self._record.max_total_gb:g} GB are kept"
        try:
            free = shutil.disk_usage(self.files.paths[-1].parent).free
        except OSError:
            return text
        return f"{text}; the disk is full in {free / bytes_per_s / 3600:.1f} hours" if bytes_per_s else text

    def _accept(self, parts: list[memoryview], received_ns: int) -> None:
        if parts[0] == EVENTS_TOPIC:
            event = unpack_event(parts)
            self._waiting.append(_Waiting(partial(self._write_event, event, parts[1], received_ns)))
        elif bytes(parts[0][:6]) == b"masks/":
            masks = unpack_masks(parts)
            self.counter.admit(masks.camera)
            self._waiting.append(_Waiting(partial(self._write_masks, masks, parts[1], received_ns)))
        elif parts[0][: len(POSES_ROOT)] == POSES_ROOT:
            pose = unpack_pose(parts)
            self.counter.admit_pose(pose.frame)
            self._waiting.append(_Waiting(partial(self._write_pose, pose.frame, parts[1], received_ns)))
        else:
            frame = unpack_frame(parts)
            self.counter.admit(frame.camera)
            if self._record.colour == "raw" or frame.encoding not in CHANNELS:
                self._waiting.append(_Waiting(partial(self._write_frame, frame, received_ns)))
                return
            future = self._pool.submit(compress_colour, frame, self._record.colour, JPEG_QUALITY)
            self._waiting.append(_Waiting(partial(self._write_compressed, future, received_ns), future))

    def _write_ready(self, max_waiting: int) -> None:
        while self._waiting and (self._waiting[0].is_ready() or len(self._waiting) > max_waiting):
            self._try(self._waiting.popleft().write)

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except OutputError:
            raise
        except Exception as error:  # no malformed message may end the recording
            self.counter.reject(error)

    def _write_event(self, event: Event, body: memoryview, received_ns: int) -> None:
        self.files.current().write_event(body, event.n, received_ns)
        if self.counter.add_event(event):
            self._on_restart()

    def _write_masks(self, masks: Any, body: memoryview, received_ns: int) -> None:
        self.files.current().write_masks(body, masks, received_ns)
        self.counter.add_masks(masks)

    def _write_pose(self, frame: str, body: memoryview, received_ns: int) -> None:
        self.files.current().write_robot_pose(body, frame, received_ns)
        self.counter.poses += 1

    def _write_frame(self, frame: Frame, received_ns: int) -> None:
        self.files.current().write_frame(frame, received_ns)
        self.counter.add_frame(frame)

    def _write_compressed(self, future: Future[Frame], received_ns: int) -> None:
        frame = future.result()
        if not self._is_colour_described:
            self._is_colour_described = True
            self.files.add_metadata(COLOUR, describe_compression(frame.encoding, JPEG_QUALITY))
        self._write_frame(frame, received_ns)

    def _summary(self) -> Mapping[str, Any]:
        return {
            **self.counter.describe(),
            "began_ns": self._began_ns,
            "ended_ns": time.time_ns(),
            "dropped": self._dropped(),
            "depths_left_out": self.files.depths_left_out,
        }
