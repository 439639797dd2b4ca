"""Records everything that cameras and node publish into MCAP files, without slowing them down.

`Quota` limits the recordings in a folder by total size and by age. `MessageRing` keeps the last seconds in memory until
a `Trigger` has them written.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import re
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from ..bags.formats.mcap import McapStream
from ..bags.native import NODE, RECORDER, RING
from ..bags.native.reader import MAX_RECORDS_TO_LAYOUT
from ..errors import BagError, OutputError, Sam3NodeError, SettingsError, TransportError, WireError
from ..files import make_folder, remove_inside
from ..processes.notify import Watchdog
from ..resources import Closeable
from ..schema.fields import Plain
from ..settings import RecordSettings, Settings
from ..transport import ControlClient, Security
from ..transport.sockets import SocketOwner
from ..transport.tap import ReceivedMessage, StreamTap
from ..types import NANOSECONDS
from ..wire import EVENTS_TOPIC, unpack_event
from .lerobot.live import EpisodeRecorder
from .series import RecordedSeries, RecordReport

TIME_FORMAT = "%Y%m%dT%H%M%SZ"
"""Time in the names of files."""
POLL_MS = 100
"""Time of one wait for a message."""
FLUSH_S = 0.5
"""Time between two writes to the disk. A power failure loses as much."""
PROGRESS_S = 5.0
"""Time between two reports of the progress, and between two looks at the quota."""
RATE_S = 5.0
"""Time after a recording's first message at which its rate is reported."""
ABSENT_S = 3.0
"""Time after which a node that has not answered is reported."""
DESCRIBE_TIMEOUT_MS = 10_000
"""Time that the node may take to describe itself. One that loads its model, or has a large one on a CPU, is slow."""
CONVERT_S = 600.0
"""Longest time that the end of a recording waits for the conversion of its last episodes."""
LAST_MARKS_S = 1.0
"""Longest time that the end of a recording waits for marks of episodes that a busy machine has not delivered yet."""
LEAST_FREE_BYTES = 64 << 20
"""Free bytes of a disk below which no recording is begun: each restart would leave a file with next to nothing."""
RETRY_S = 0.5
"""Time between two requests of the description."""

# the time in a name, with a number for recordings of one second; and the number of a further file
_TIME = r"\d{8}T\d{6}Z(-\d+)?"
_PART = r"(_\d{4,})?"


def run_record(
    settings: Settings,
    stop: threading.Event,
    out: TextIO | None = None,
    *,
    trigger: Trigger | None = None,
    watchdog: Watchdog | None = None,
) -> None:
    """Record until `stop` is set, then finish the file. With a ring, each firing of `trigger` makes a file.

    Raises SettingsError for lossless delivery, TransportError for a malformed endpoint, MissingExtraError without the
    extra `bags`, and OutputError if the file exists already, or as soon as nothing more can be written.
    """
    with Recorder(settings, out or sys.stdout, trigger or Trigger()) as recorder:
        recorder.run(stop, watchdog or Watchdog())


class Recorder(SocketOwner):
    """Receives all frames, masks and events, and writes them as they arrive. A context manager.

    It starts without a node, records frames, and waits for the node meanwhile. With `record.ring_s`, messages stay in a
    ring in memory, and `trigger` has the ring and the following `record.after_s` written to a file of its own. Raises
    as `run_record` does.
    """

    def __init__(self, settings: Settings, out: TextIO, trigger: Trigger) -> None:
        # a recorder must never slow the node down, which lossless delivery would let it
        settings.transport.require_newest("record")
        record = settings.record
        transport = settings.transport
        self._out = out
        self._record = record
        self._transport = transport
        self._trigger = trigger
        self._ring: MessageRing | None = None
        self._episodes: EpisodeRecorder | None = None
        if settings.lerobot.folder is not None:
            if record.ring_s:
                raise SettingsError(
                    "lerobot.folder: expected a recording without a ring (record.ring_s 0), found a ring; convert its "
                    "files with sam3-node convert"
                )
            self._episodes = EpisodeRecorder(settings, settings.lerobot.folder, self._print)
        if record.ring_s:
            self._ring = MessageRing(record.ring_s, int(record.ring_mb * 1e6))
        self._quota = Quota(record)
        self._description: Plain | None = None
        # the recording that is being written; with a ring, there is one after a trigger only
        self._series: RecordedSeries | None = None

        # what cannot be opened closes what was opened before
        security = Security.from_settings(transport)
        with contextlib.ExitStack() as opened:
            self._node = opened.enter_context(_NodeDescriber(transport.control, security))
            queue_bytes = int(record.queue_mb * 1e6)
            poses = settings.spatial.poses
            tap = StreamTap(transport.frames, transport.masks, record.cameras, queue_bytes, poses, security)
            self._tap = opened.enter_context(tap)
            if self._ring is None:
                self._begin_series(_choose_path(record.out))
            else:
                _check_folder(record.out)
            opened.pop_all()

        self._is_absence_reported = False
        self._is_rate_reported = False
        self._reported_lost = 0
        # when the recording of a trigger ends
        self._until_s = 0.0
        self._began_s = time.monotonic()
        self._next_flush_s = self._began_s
        self._next_progress_s = self._began_s + PROGRESS_S

    def run(self, stop: threading.Event, watchdog: Watchdog) -> None:
        """Record until `stop` is set. Raises OutputError if nothing more can be written."""
        # the node may start later: the recorder says at once what it records
        self._require_process()
        sources = f"{', '.join(self._transport.frames)}, masks from {self._transport.masks}"
        self._print(f"record frames from {sources}, {self._describe_target()}")
        self._enforce_quota()
        self._node.request()
        try:
            while not stop.is_set():
                watchdog.tick()
                self._take(POLL_MS)
                self._take_description()
                if self._ring is not None:
                    self._follow_trigger(self._ring)
                self._flush_and_report(watchdog)

            self._take_last_marks(watchdog)
            # receive nothing more, and write what has arrived
            watchdog.begin_close()
            self._tap.close()
            while self._take(0):
                watchdog.begin_close()
        finally:
            watchdog.begin_close()
            self.close()
            self._report_end()
            if self._episodes is not None:
                self._convert_rest(self._episodes, watchdog)

    def close(self) -> None:
        """Finish the file without the messages that still wait in the queue. Idempotent."""
        # sockets and files belong to the process that opened them
        if self._is_forked:
            return
        self._node.close()
        self._tap.close()
        if self._series is not None:
            self._series.close()

    def _begin_series(self, path: Path) -> RecordedSeries:
        """Begin a recording with the node's description, if that is known. Raises OutputError for a full disk."""
        self._enforce_quota()
        # a ring that was triggered goes to the disk as far as it does
        if self._ring is None:
            _require_free(path)
        self._series = RecordedSeries(path, self._record, lambda: self._tap.dropped, self._node.request)
        # a recording of the ring begins long after the node has described itself
        if self._description is not None:
            self._series.files.add_metadata(NODE, self._description)
        self._is_rate_reported = False
        self._reported_lost = 0
        return self._series

    def _take(self, timeout_ms: int) -> bool:
        """Take the next message, into the recording or the ring. Return False if none came."""
        arrived = self._tap.take(timeout_ms)
        if arrived is None:
            return False
        if self._series is not None:
            self._add(self._series, arrived)
        elif self._ring is not None:
            self._ring.add(arrived)
            # the first event is of a node that has just started: its description is another
            with contextlib.suppress(Sam3NodeError):
                if arrived.parts[0] == EVENTS_TOPIC and unpack_event(arrived.parts).n == 0:
                    self._node.request()
        return True

    def _add(self, series: RecordedSeries, arrived: ReceivedMessage) -> None:
        """Write a message. A mark of an episode begins another file."""
        if self._episodes is None or arrived.parts[0] != EVENTS_TOPIC:
            series.add(arrived)
            return
        try:
            event = unpack_event(arrived.parts)
        except WireError:
            # the series counts it as malformed
            series.add(arrived)
            return
        self._episodes.before(event, series)
        series.add(arrived)
        self._episodes.after(event, series)

    def _take_last_marks(self, watchdog: Watchdog) -> None:
        """Receive until the node's last event has come, for LAST_MARKS_S at most, so that no episode is unknown."""
        if self._episodes is None or self._series is None or self._description is None:
            return
        self._node.request()
        events: object = None
        end_s = time.monotonic() + LAST_MARKS_S
        while time.monotonic() < end_s:
            watchdog.begin_close()
            self._take(POLL_MS)
            description = self._node.take()
            if description is not None:
                events = description.get("events")
            if isinstance(events, int) and self._series.report.has_event(events - 1):
                return
        if isinstance(events, int):
            self._print(f"lerobot: the last of {events} events have not arrived: an episode may be missing")

    def _convert_rest(self, episodes: EpisodeRecorder, watchdog: Watchdog) -> None:
        """Wait until the last episodes are converted, after the end of the recording."""
        if self._series is not None:
            episodes.end_recording(self._series)
        if episodes.is_busy:
            self._print("lerobot: converting the last episodes")
        end_s = time.monotonic() + CONVERT_S
        while episodes.is_busy and time.monotonic() < end_s:
            watchdog.begin_close()
            episodes.tick()
            time.sleep(POLL_MS / 1000)
        episodes.close()

    def _follow_trigger(self, ring: MessageRing) -> None:
        """Begin or prolong a recording if the trigger fired, and end one whose time is over."""
        # another firing during a recording prolongs it
        if self._trigger.take():
            self._until_s = time.monotonic() + self._record.after_s
            if self._series is None:
                self._write_ring(ring, time.time_ns())
        elif self._series is not None and time.monotonic() >= self._until_s:
            self._series.close()
            self._report_result(self._series)
            self._series = None
            self._enforce_quota()

    def _write_ring(self, ring: MessageRing, now_ns: int) -> None:
        """Begin a recording with the messages of the ring."""
        series = self._begin_series(_choose_path(self._record.out, is_event=True))
        self._print(f"triggered: the ring goes to {series.files.paths[0]}")
        messages = list(ring.take_all(now_ns))
        values = {"trigger_ns": now_ns, "ring_s": self._record.ring_s, "dropped": ring.dropped}
        series.files.add_metadata(RING, values)
        for message in messages:
            series.add(message)

    def _take_description(self) -> None:
        description = self._node.take()
        if description is None:
            return
        self._description = description
        # the number of earlier events tells how many of them the recording lacks
        events = description.get("events")
        if self._series is not None:
            self._series.files.add_metadata(NODE, description)
            if isinstance(events, int):
                self._series.report.add_description(events)
        self._print(f"node described itself: model {description.get('model')}, {events} events so far")

    def _flush_and_report(self, watchdog: Watchdog) -> None:
        """Flush to the disk twice a second, and report an absent node, the rate and the progress."""
        now_s = time.monotonic()
        if self._episodes is not None:
            self._episodes.tick()
        if now_s >= self._next_flush_s:
            self._next_flush_s = now_s + FLUSH_S
            if self._series is not None:
                self._series.flush()

        # an absent node and the rate are reported once
        is_absent = self._description is None and now_s > self._began_s + ABSENT_S
        if is_absent and not self._is_absence_reported:
            self._is_absence_reported = True
            self._print(f"no node answers at {self._transport.control} yet: frames are recorded meanwhile")
        if self._series is not None and not self._is_rate_reported and self._series.seconds >= RATE_S:
            self._is_rate_reported = True
            self._print(self._series.format_rate())

        if now_s >= self._next_progress_s:
            self._next_progress_s = now_s + PROGRESS_S
            self._enforce_quota()
            if self._series is not None:
                self._report_progress(self._series)
                # a ring writes nothing most of the time
                if self._ring is None:
                    watchdog.count_bytes(self._series.files.bytes)

    def _enforce_quota(self) -> None:
        current = self._series.files.paths[-1] if self._series is not None else None
        for path in self._quota.enforce(current):
            self._print(f"deleted {path}: beyond record.max_total_gb or record.max_age_h")

    def _report_progress(self, series: RecordedSeries) -> None:
        lost = series.report.lost + series.report.rejected
        # in a log, only new losses are worth a line
        if self._out.isatty() or lost > self._reported_lost:
            self._print(f"{_format_counts(series)}{self._format_losses(series.report)}")
        self._reported_lost = lost

    def _report_result(self, series: RecordedSeries) -> None:
        files = " ".join(map(str, series.files.paths))
        self._print(f"recorded {_format_counts(series)} in {files}{self._format_losses(series.report)}")
        if series.files.bytes:
            self._print(series.format_rate())

    def _report_end(self) -> None:
        if self._series is not None:
            self._report_result(self._series)
        if self._description is None:
            self._print(
                f"no node answered at {self._transport.control}: its settings are not in the recording"
            )

    def _format_losses(self, report: RecordReport) -> str:
        # what the numbers of messages show, then what is known of the reasons
        lost = []
        for camera, counts in report.cameras.items():
            if counts.frames_lost or counts.masks_lost:
                lost.append(f"{camera} {counts.frames_lost} frames, {counts.masks_lost} masks")
        if report.events_lost:
            lost.append(f"{report.events_lost} events")

        text = ""
        if lost:
            text += f"; lost: {', '.join(lost)}"
        if self._tap.dropped:
            text += f" ({self._tap.dropped} messages were dropped: they came faster than the disk writes)"
        if report.rejected:
            cameras = ", ".join(f"{count} of camera {camera}" for camera, count in report.refused.items())
            whose = f" ({cameras})" if cameras else ""
            text += f"; {report.rejected} messages{whose} were malformed, the last: {report.last_error}"
        return text

    def _describe_target(self) -> str:
        if self._series is not None:
            return f"to {self._series.files.paths[0]}"
        record = self._record
        return (
            f"into a ring of {record.ring_s:g} s and at most {record.ring_mb:g} MB; kill -USR1 {os.getpid()}, or "
            f"Enter, writes it and {record.after_s:g} s more to {record.out}"
        )

    def _print(self, line: str) -> None:
        with contextlib.suppress(OSError):  # a closed output must not end the recording
            print(line, file=self._out, flush=True)


def _format_counts(series: RecordedSeries) -> str:
    cameras = series.report.cameras.values()
    frames = sum(counts.frames for counts in cameras)
    masks = sum(counts.masks for counts in cameras)
    counted = [f"{frames} frames", f"{masks} masks", f"{series.report.events} events"]
    if series.report.poses:
        counted.append(f"{series.report.poses} poses")
    counted.append(f"{series.files.bytes / 1e6:.1f} MB")
    return ", ".join(counted)


class _NodeDescriber(Closeable):
    """A thread that requests the node's description until it comes."""

    def __init__(self, endpoint: str, security: Security) -> None:
        self._client = ControlClient(endpoint, DESCRIBE_TIMEOUT_MS, security)
        self._requested = threading.Event()
        self._closed = threading.Event()
        self._descriptions: queue.SimpleQueue[Plain] = queue.SimpleQueue()
        # a thread, because a request may wait for seconds while messages arrive
        threading.Thread(target=self._run, name="describe", daemon=True).start()

    def request(self) -> None:
        """Request the description, or request it again."""
        self._requested.set()

    def take(self) -> Plain | None:
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
                # no node yet: ask again until there is one
                self._requested.set()
                self._closed.wait(RETRY_S)
            except Sam3NodeError:  # an older node has no `describe`
                continue
            else:
                if isinstance(description, dict):
                    self._descriptions.put({str(key): value for key, value in description.items()})
        self._client.close()


def _choose_path(out: Path, is_event: bool = False) -> Path:
    """Return the path of the recording's first file. Recordings of triggers have their time in the name."""
    is_file = out.suffix == ".mcap"
    if is_file and not is_event:
        return out
    folder = out
    stem = f"{datetime.now(UTC):{TIME_FORMAT}}"
    if is_file:
        folder = out.parent
        stem = f"{out.stem}-{stem}"
    path = folder / f"{stem}.mcap"
    if not is_event:
        return path

    # triggers may follow each other within a second
    number = 0
    while path.exists():
        number += 1
        path = folder / f"{stem}-{number}.mcap"
    return path


def _require_free(path: Path) -> None:
    """Raise OutputError if the disk of a file has next to no space."""
    make_folder(path.parent)
    try:
        free = shutil.disk_usage(path.parent).free
    except OSError:  # not every disk tells
        return
    if free < LEAST_FREE_BYTES:
        error = OutputError(
            f"cannot write {path}: expected at least {LEAST_FREE_BYTES >> 20} MiB of free space, found {free >> 20}; "
            "free the disk, or set record.max_total_gb"
        )
        error.may_pass = True
        raise error


def _check_folder(out: Path) -> None:
    """Create the folder of later files. Raises OutputError if nothing can be written there."""
    folder = out.parent if out.suffix == ".mcap" else out
    make_folder(folder)
    if not os.access(folder, os.W_OK):
        raise OutputError(f"cannot write into {folder}: expected a folder that may be written")


class Quota:
    """Deletes the oldest recordings of one output, so that they keep to `record.max_total_gb` and `record.max_age_h`.

    Only files that a recorder made itself are deleted: they have the output's prefix and the recorder's metadata. Files
    that a recorder still writes, links, and files of any other name or content stay.
    """

    def __init__(self, record: RecordSettings) -> None:
        self._folder = record.out
        prefix = _TIME
        if record.out.suffix == ".mcap":
            self._folder = record.out.parent
            prefix = rf"{re.escape(record.out.stem)}(-{_TIME})?"
        self._name = re.compile(rf"{prefix}{_PART}\.mcap")
        self._max_bytes = record.max_total_gb * 1e9
        self._max_age_s = record.max_age_h * 3600

    def enforce(self, current: Path | None) -> list[Path]:
        """Delete the files that are too old or too many, except `current`. Return the deleted files."""
        if not (self._max_bytes or self._max_age_s):
            return []
        # the oldest first, until the others keep to the limits
        files = sorted(self._list_files())
        total = sum(size for _, _, size in files)
        deleted = []
        for changed_s, path, size in files:
            too_old = self._max_age_s and time.time() - changed_s > self._max_age_s
            too_many = self._max_bytes and total > self._max_bytes
            if (too_old or too_many) and path != current and _delete(path):
                total -= size
                deleted.append(path)
        return deleted

    def _list_files(self) -> Iterator[tuple[float, Path, int]]:
        """Yield the time of the last change, the path and the size of each recording that may be deleted."""
        with contextlib.suppress(OSError):
            for path in self._folder.iterdir():
                if self._name.fullmatch(path.name) and path.is_file() and not path.is_symlink():
                    yield path.stat().st_mtime, path, path.stat().st_size


def _delete(path: Path) -> bool:
    """Delete a finished recording of a recorder. Return False if this is none, or if it cannot be deleted."""
    try:
        with path.open("rb") as file:
            # a recorder locks the file that it writes
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # other programs may write files of such a name
            names = [name for name, _ in McapStream(path).metadata(MAX_RECORDS_TO_LAYOUT)]
            if RECORDER not in names:
                return False
            remove_inside(path.parent, path)
    except (OSError, BagError):
        return False
    return True


class MessageRing:
    """The messages of the last `seconds`, of at most `max_bytes`. Older ones are dropped."""

    def __init__(self, seconds: float, max_bytes: int) -> None:
        self.dropped = 0
        """Number of messages that were dropped because they were old, or too many."""
        self.bytes = 0
        """Memory of all messages."""
        self._length_ns = round(seconds * NANOSECONDS)
        self._max_bytes = max_bytes
        self._messages: deque[ReceivedMessage] = deque()

    def add(self, message: ReceivedMessage) -> None:
        """Append the newest message."""
        self._messages.append(message)
        self.bytes += message.nbytes
        self._drop_before(message.received_ns - self._length_ns)

    def take_all(self, now_ns: int) -> Iterator[ReceivedMessage]:
        """Remove and yield the messages of the last seconds before `now_ns`, the oldest first."""
        self._drop_before(now_ns - self._length_ns)
        while self._messages:
            yield self._take()

    def _drop_before(self, oldest_ns: int) -> None:
        # both limits hold at any time, so that memory is bounded however large messages are
        while self._messages and (self._messages[0].received_ns < oldest_ns or self.bytes > self._max_bytes):
            self._take()
            self.dropped += 1

    def _take(self) -> ReceivedMessage:
        message = self._messages.popleft()
        self.bytes -= message.nbytes
        return message


class Trigger:
    """Counts requests to write the ring. It has no lock, because a signal handler may interrupt its user."""

    def __init__(self) -> None:
        self._count = 0
        self._taken = 0

    def fire(self) -> None:
        """Request that the ring be written."""
        self._count += 1

    def take(self) -> bool:
        """Return True if there was a request since the last call."""
        count = self._count
        is_new = count > self._taken
        self._taken = count
        return is_new

    def listen(self, keys: TextIO) -> None:
        """Fire at each SIGUSR1, and at each Enter if `keys` is a terminal. Call it in the main thread."""
        signal.signal(signal.SIGUSR1, lambda *_: self.fire())
        if keys.isatty():
            threading.Thread(target=self._read_keys, args=(keys,), name="keys", daemon=True).start()

    def _read_keys(self, keys: TextIO) -> None:
        for _ in keys:
            self.fire()
