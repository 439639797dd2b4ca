"""Recording: what cameras and node publish, written into MCAP files beside them, without holding anybody up."""

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
from ..settings import Settings
from ..transport import Arrived, ControlClient, StreamTap
from ..types import Closeable
from ..wire import EVENTS_TOPIC, unpack_event, unpack_frame, unpack_masks
from .loss_counter import Tally

TURN_MS = 100
FLUSH_S = 0.5
SAY_S = 5.0
ABSENT_S = 3.0
ANSWER_MS = 10_000  # a node that loads its model, or a large one on a CPU, takes its time
ASK_AGAIN_S = 0.5


def run_record(settings: Settings, stop: threading.Event, out: TextIO | None = None) -> None:
    """Record until `stop` is set, then finish the file.

    Raises SettingsError for lossless delivery, TransportError for a malformed endpoint, MissingExtraError without the
    extra `bags`, OutputError where the file is there already, or as soon as nothing more can be written.
    """
    with Recorder(settings, out or sys.stdout) as recorder:
        recorder.run(stop)


class Recorder(Closeable):
    """Receives all frames, masks and events, and writes them as they come. A context manager.

    A node that is away is waited for, and frames are recorded meanwhile. Raises as `run_record`.
    """

    def __init__(self, settings: Settings, out: TextIO) -> None:
        _check_delivery(settings)
        record, transport = settings.record, settings.transport
        self._out = out
        self._transport = transport
        self._began_ns = time.time_ns()
        self._tally = Tally()
        with contextlib.ExitStack() as opened:
            self._node = opened.enter_context(_NodeAsker(transport.control))
            self._tap = opened.enter_context(
                StreamTap(transport.frames, transport.masks, record.cameras, int(record.queue_mb * 1e6))
            )
            path = _path_of(record.out)
            self._files = SplitRecordingWriter(path, record.split_mb * 1e6, record.split_s, self._summary)
            opened.pop_all()
        self._node_heard = self._absence_told = False
        self._lost_told = 0
        self._began_s = self._next_flush_s = time.monotonic()
        self._next_say_s = self._began_s + SAY_S

    def run(self, stop: threading.Event) -> None:
        """Record until `stop` is set; OutputError when nothing more can be written."""
        frames = ", ".join(self._transport.frames)
        self._say(
            f"record frames from {frames}, masks from {self._transport.masks}, to {self._files.paths[0]}"
        )
        self._node.ask()
        try:
            while not stop.is_set():
                self._take(TURN_MS)
                self._hear_node()
                self._keep_up()
            self._tap.close()
            while self._take(0):
                pass
        finally:
            self.close()
            self._say_result()

    def close(self) -> None:
        """Finish the file; what has not been taken is left out. Idempotent."""
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
        except Exception as error:  # whatever a message does to its unpacking, the recording goes on
            self._tally.reject(error)
        return True

    def _write(self, arrived: Arrived) -> None:
        parts, received_ns = arrived
        if parts[0] == EVENTS_TOPIC:
            event = unpack_event(parts)
            self._files.current().write_event(parts[1], event.n, received_ns)
            if self._tally.add_event(event):
                self._node.ask()
        elif bytes(parts[0][:6]) == b"masks/":
            masks = unpack_masks(parts)
            self._tally.admit(masks.camera)
            self._files.current().write_masks(parts[1], masks, received_ns)
            self._tally.add_masks(masks)
        else:
            frame = unpack_frame(parts)
            self._tally.admit(frame.camera)
            self._files.current().write_frame(frame, received_ns)
            self._tally.add_frame(frame)

    def _hear_node(self) -> None:
        description = self._node.take()
        if description is None:
            return
        self._node_heard = True
        self._files.add_metadata(NODE, description)
        events = description.get("events")
        if isinstance(events, int):
            self._tally.add_description(events)
        self._say(f"the node tells its settings: model {description.get('model')}, {events} events until now")

    def _keep_up(self) -> None:
        """Put what waits on the disk twice a second, and say now and then how it goes."""
        now_s = time.monotonic()
        if now_s >= self._next_flush_s:
            self._next_flush_s = now_s + FLUSH_S
            self._files.flush()
        if not self._node_heard and not self._absence_told and now_s > self._began_s + ABSENT_S:
            self._absence_told = True
            self._say(f"no node answers at {self._transport.control} yet: what comes is recorded meanwhile")
        if now_s >= self._next_say_s:
            self._next_say_s = now_s + SAY_S
            self._say_progress()

    def _say_progress(self) -> None:
        lost = self._tally.lost + self._tally.rejected
        if self._out.isatty() or lost > self._lost_told:
            self._say(f"{self._counts()}{self._losses()}")
        self._lost_told = lost

    def _say_result(self) -> None:
        files = " ".join(map(str, self._files.paths))
        self._say(f"recorded {self._counts()} in {files}{self._losses()}")
        if not self._node_heard:
            self._say(f"no node answered at {self._transport.control}: its settings are not in the recording")

    def _counts(self) -> str:
        cameras = self._tally.cameras.values()
        frames, masks = sum(known.frames for known in cameras), sum(known.masks for known in cameras)
        megabytes = self._files.bytes / 1e6
        return f"{frames} frames, {masks} masks, {self._tally.events} events, {megabytes:.1f} MB"

    def _losses(self) -> str:
        tally = self._tally
        lost = [
            f"{camera} {known.frames_lost} frames, {known.masks_lost} masks"
            for camera, known in tally.cameras.items()
            if known.frames_lost or known.masks_lost
        ]
        if tally.events_lost:
            lost.append(f"{tally.events_lost} events")
        text = f"; lost: {', '.join(lost)}" if lost else ""
        if self._tap.dropped:
            text += f" ({self._tap.dropped} messages came faster than the disk takes them)"
        if tally.rejected:
            text += f"; {tally.rejected} messages were malformed, the last: {tally.last_error}"
        return text

    def _summary(self) -> dict[str, Any]:
        return {
            **self._tally.describe(),
            "began_ns": self._began_ns,
            "ended_ns": time.time_ns(),
            "dropped": self._tap.dropped,
            "depths_left_out": self._files.depths_left_out,
        }

    def _say(self, line: str) -> None:
        with contextlib.suppress(OSError):  # nobody reads our output any more: the recording goes on
            print(line, file=self._out, flush=True)


class _NodeAsker(Closeable):
    """A thread that asks the node to describe itself, until it does."""

    def __init__(self, endpoint: str) -> None:
        self._client = ControlClient(endpoint, ANSWER_MS)
        self._asked, self._closed = threading.Event(), threading.Event()
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="describe", daemon=True).start()

    def ask(self) -> None:
        """Ask, or ask again."""
        self._asked.set()

    def take(self) -> dict[str, Any] | None:
        """The node's next answer, None while there is none."""
        with contextlib.suppress(queue.Empty):
            return self._answers.get_nowait()
        return None

    def close(self) -> None:
        """Ask no more. Idempotent; a question that is out is not waited for."""
        self._closed.set()
        self._asked.set()

    def _run(self) -> None:
        while self._asked.wait() and not self._closed.is_set():
            self._asked.clear()
            try:
                answer = self._client.call("describe")
            except TransportError:
                self._asked.set()
                self._closed.wait(ASK_AGAIN_S)
            except Sam3NodeError:  # a node that knows no `describe`
                continue
            else:
                if isinstance(answer, dict):
                    self._answers.put({str(key): value for key, value in answer.items()})
        self._client.close()


def _check_delivery(settings: Settings) -> None:
    if settings.transport.delivery == "every":
        raise SettingsError(
            "record needs transport.delivery = 'newest': with 'every' each message goes to one receiver, "
            "and the recorder would take frames away from the node and masks from the policy"
        )


def _path_of(out: Path) -> Path:
    """The recording's first file."""
    if out.suffix == ".mcap":
        return out
    return out / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}.mcap"
