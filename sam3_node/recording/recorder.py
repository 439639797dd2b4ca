"""Recorder: writes everything that cameras and node publish into MCAP files, without slowing them down."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from ..bags.native.layout import NODE
from ..bags.native.writer import SplitRecordingWriter
from ..errors import OutputError, Sam3NodeError, SettingsError, TransportError
from ..processes.notify import Watchdog
from ..settings import Settings
from ..transport import ControlClient, ReceivedMessage, StreamTap
from ..types import Closeable
from ..wire import EVENTS_TOPIC, unpack_event, unpack_frame, unpack_masks
from .loss_counter import LossCounter

POLL_MS = 100
FLUSH_S = 0.5
PROGRESS_S = 5.0
ABSENT_S = 3.0
DESCRIBE_TIMEOUT_MS = 10_000  # a node that loads its model, or a large model on a CPU, answers slowly
RETRY_S = 0.5


def run_record(
    settings: Settings, stop: threading.Event, out: TextIO | None = None, watchdog: Watchdog | None = None
) -> None:
    """Record until `stop` is set, then finish the file.

    Raises SettingsError for lossless delivery, TransportError for a malformed endpoint, MissingExtraError without the
    extra `bags`, and OutputError if the file exists already, or as soon as nothing more can be written.
    """
    with Recorder(settings, out or sys.stdout) as recorder:
        recorder.run(stop, watchdog or Watchdog())


class Recorder(Closeable):
    """Receives all frames, masks and events, and writes them as they arrive. A context manager.

    It starts without a node, records frames, and waits for the node meanwhile. Raises as `run_record` does.
    """

    def __init__(self, settings: Settings, out: TextIO) -> None:
        _check_delivery(settings)
        record, transport = settings.record, settings.transport
        self._out = out
        self._transport = transport
        self._began_ns = time.time_ns()
        self._counter = LossCounter()
        with contextlib.ExitStack() as opened:
            self._node = opened.enter_context(_NodeDescriber(transport.control))
            self._tap = opened.enter_context(
                StreamTap(transport.frames, transport.masks, record.cameras, int(record.queue_mb * 1e6))
            )
            path = _choose_path(record.out)
            self._files = SplitRecordingWriter(path, record.split_mb * 1e6, record.split_s, self._summary)
            opened.pop_all()
        self._is_described = self._is_absence_reported = False
        self._reported_lost = 0
        self._began_s = self._next_flush_s = time.monotonic()
        self._next_progress_s = self._began_s + PROGRESS_S

    def run(self, stop: threading.Event, watchdog: Watchdog) -> None:
        """Record until `stop` is set; OutputError if nothing more can be written."""
        frames = ", ".join(self._transport.frames)
        self._print(
            f"record frames from {frames}, masks from {self._transport.masks}, to {self._files.paths[0]}"
        )
        self._node.request()
        try:
            while not stop.is_set():
                watchdog.turn()
                self._take(POLL_MS)
                self._take_description()
                self._flush_and_report()
            self._tap.close()
            while self._take(0):
                pass
        finally:
            self.close()
            self._report_result()

    def close(self) -> None:
        """Finish the file without the messages that still wait in the queue. Idempotent."""
        self._node.close()
        self._tap.close()
        self._files.close()

    def _take(self, timeout_ms: int) -> bool:
        arrived = self._tap.take(timeout_ms)
        if arrived is None:
            return False
        try:
            self._write(arrived)
        except OutputError:
            raise
        except Exception as error:  # no malformed message may end the recording
            self._counter.reject(error)
        return True

    def _write(self, arrived: ReceivedMessage) -> None:
        parts, received_ns = arrived
        if parts[0] == EVENTS_TOPIC:
            event = unpack_event(parts)
            self._files.current().write_event(parts[1], event.n, received_ns)
            if self._counter.add_event(event):
                self._node.request()
        elif bytes(parts[0][:6]) == b"masks/":
            masks = unpack_masks(parts)
            self._counter.admit(masks.camera)
            self._files.current().write_masks(parts[1], masks, received_ns)
            self._counter.add_masks(masks)
        else:
            frame = unpack_frame(parts)
            self._counter.admit(frame.camera)
            self._files.current().write_frame(frame, received_ns)
            self._counter.add_frame(frame)

    def _take_description(self) -> None:
        description = self._node.take()
        if description is None:
            return
        self._is_described = True
        self._files.add_metadata(NODE, description)
        events = description.get("events")
        if isinstance(events, int):
            self._counter.add_description(events)
        self._print(f"node described itself: model {description.get('model')}, {events} events so far")

    def _flush_and_report(self) -> None:
        """Flush to the disk twice a second, and report an absent node and the progress."""
        now_s = time.monotonic()
        if now_s >= self._next_flush_s:
            self._next_flush_s = now_s + FLUSH_S
            self._files.flush()
        if not self._is_described and not self._is_absence_reported and now_s > self._began_s + ABSENT_S:
            self._is_absence_reported = True
            self._print(f"no node answers at {self._transport.control} yet: frames are recorded meanwhile")
        if now_s >= self._next_progress_s:
            self._next_progress_s = now_s + PROGRESS_S
            self._report_progress()

    def _report_progress(self) -> None:
        lost = self._counter.lost + self._counter.rejected
        if self._out.isatty() or lost > self._reported_lost:
            self._print(f"{self._format_counts()}{self._format_losses()}")
        self._reported_lost = lost

    def _report_result(self) -> None:
        files = " ".join(map(str, self._files.paths))
        self._print(f"recorded {self._format_counts()} in {files}{self._format_losses()}")
        if not self._is_described:
            self._print(
                f"no node answered at {self._transport.control}: its settings are not in the recording"
            )

    def _format_counts(self) -> str:
        cameras = self._counter.cameras.values()
        frames, masks = sum(counts.frames for counts in cameras), sum(counts.masks for counts in cameras)
        megabytes = self._files.bytes / 1e6
        return f"{frames} frames, {masks} masks, {self._counter.events} events, {megabytes:.1f} MB"

    def _format_losses(self) -> str:
        counter = self._counter
        lost = [
            f"{camera} {counts.frames_lost} frames, {counts.masks_lost} masks"
            for camera, counts in counter.cameras.items()
            if counts.frames_lost or counts.masks_lost
        ]
        if counter.events_lost:
            lost.append(f"{counter.events_lost} events")
        text = f"; lost: {', '.join(lost)}" if lost else ""
        if self._tap.dropped:
            text += f" ({self._tap.dropped} messages were dropped: they came faster than the disk writes)"
        if counter.rejected:
            text += f"; {counter.rejected} messages were malformed, the last: {counter.last_error}"
        return text

    def _summary(self) -> dict[str, Any]:
        return {
            **self._counter.describe(),
            "began_ns": self._began_ns,
            "ended_ns": time.time_ns(),
            "dropped": self._tap.dropped,
            "depths_left_out": self._files.depths_left_out,
        }

    def _print(self, line: str) -> None:
        with contextlib.suppress(OSError):  # a closed output must not end the recording
            print(line, file=self._out, flush=True)


class _NodeDescriber(Closeable):
    """A thread that requests the node's description until it comes."""

    def __init__(self, endpoint: str) -> None:
        self._client = ControlClient(endpoint, DESCRIBE_TIMEOUT_MS)
        self._requested, self._closed = threading.Event(), threading.Event()
        self._descriptions: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="describe", daemon=True).start()

    def request(self) -> None:
        """Request the description, or request it again."""
        self._requested.set()

    def take(self) -> dict[str, Any] | None:
        """Return the node's next description; None if there is none yet."""
        with contextlib.suppress(queue.Empty):
            return self._descriptions.get_nowait()
        return None

    def close(self) -> None:
        """End the requests without waiting for a pending one. Idempotent."""
        self._closed.set()
        self._requested.set()

    def _run(self) -> None:
        while self._requested.wait() and not self._closed.is_set():
            self._requested.clear()
            try:
                description = self._client.call("describe")
            except TransportError:
                self._requested.set()
                self._closed.wait(RETRY_S)
            except Sam3NodeError:  # an older node has no `describe`
                continue
            else:
                if isinstance(description, dict):
                    self._descriptions.put({str(key): value for key, value in description.items()})
        self._client.close()


def _check_delivery(settings: Settings) -> None:
    if settings.transport.delivery == "every":
        raise SettingsError(
            "record needs transport.delivery = 'newest': with 'every' each message goes to one receiver, "
            "and the recorder would take frames away from the node and masks from the policy"
        )


def _choose_path(out: Path) -> Path:
    """Return the path of the recording's first file."""
    if out.suffix == ".mcap":
        return out
    return out / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}.mcap"
