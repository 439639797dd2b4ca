"""The command `watch`: shows masks as a live table in a terminal, or as plain lines, and writes overlay videos.

Background threads draw masks on their frames and write one video for each camera. `NodeProbe` asks the node what keeps
a command waiting.
"""

from __future__ import annotations

import contextlib
import queue
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO, cast

import numpy as np

from ..client.diagnosis import Wanted, diagnose, find_sending_camera
from ..errors import AuthenticationError, OutputError, Sam3NodeError, WireError
from ..files import child_path, prepare_output
from ..processes.logs import format_line
from ..processes.signals import WaitingNotice, print_notice
from ..resources import Closeable
from ..settings import Settings
from ..transport import ControlClient, FrameSubscriber, MaskSubscriber, Security
from ..transport.mask_pairing import MaskPair, MaskPairing
from ..types import NANOSECONDS, Frame, Instance, MaskFrame, keep_newest
from ..visualization import VideoWriter, overlay
from ..wire import decode_image
from .progress import list_more, printable

INSTANCE_SHOWN = frozenset(
    [
        "id",
        "label",
        "score",
        "state",
        "age",
        "frames_since_seen",
        "mask",
        "position_m",
        "frame",
        "extent_m",
        "confidence",
        "doubtful",
        "depth_share",
        "camera_position_m",
        "covariance_m2",
        "extent_centre_m",
        "extent_quaternion_xyzw",
        "nearest_m",
        "velocity_mps",
        "velocity_age_s",
        "points_m",
        "name_confidence",
        "heights_m",
        "upright_centre_m",
        "upright_quaternion_xyzw",
        "upright_size_m",
    ]
)
"""Fields of an instance that have a place in its line, or none. Others follow by their names."""
REDRAW_S = 0.1
"""Shortest time between two pictures of the table: a terminal is slow."""
RATE_WINDOW = 30
"""Messages of a camera over which its rate is measured."""
MAX_AGES = 100_000
"""Newest ages from which the percentiles are computed."""
MAX_CAMERAS = 64
"""Cameras that are shown. Beyond them, the one that is silent for longest is forgotten."""
SUFFIXES = (".mp4", ".mov", ".mkv", ".avi")
MAX_MESSAGES = 16
"""Pairs of frame and masks that wait to be drawn. Others are dropped and counted."""
MAX_VIDEOS = 16
"""Cameras that have a video: each has an encoder."""
PROBE_TIMEOUT_MS = 1000
"""Longest time to wait for the node's description of itself."""


def run_watch(
    settings: Settings, overlay: Path | None, frames: int, stop: threading.Event, out: TextIO | None = None
) -> int:
    """Show masks until `stop` is set or `frames` messages are received (0: no limit). Return their number.

    With `overlay` it also subscribes to frames, and writes a video to that path.
    Raises SettingsError for an overlay with lossless delivery, TransportError for a malformed endpoint, and OutputError
    when the video cannot be written.
    """
    screen = Screen(out or sys.stdout)
    statistics = Statistics()
    transport = settings.transport
    if overlay is not None:
        check_video_path(overlay)
    with (
        MaskSubscriber(
            transport.masks, transport.delivery, security=Security.from_settings(transport)
        ) as subscriber,
        NodeProbe(settings) as probe,
        _open_overlay(settings, overlay, screen) as video,
        WaitingNotice(
            lambda: probe.explain_masks(lambda: bool(subscriber.connected)), screen.notify
        ) as notice,
    ):
        screen.print_line(f"watch masks from {transport.masks}")
        # masks are taken in short turns, so that a signal ends the command at once
        while not stop.is_set() and (not frames or statistics.frames < frames):
            masks = subscriber.take(100)
            if masks is None:
                continue
            notice.progress()
            age_ms = statistics.add(masks, time.time_ns())
            screen.show(masks, age_ms, statistics.fps(masks.camera))
            if video is not None:
                video.draw(masks)
        screen.print_line(statistics.summary())
        if subscriber.rejected:
            screen.print_line(
                f"{subscriber.rejected} messages were malformed, the last: {printable(str(subscriber.last_error))}"
            )
    return statistics.frames


@contextlib.contextmanager
def _open_overlay(settings: Settings, path: Path | None, screen: Screen) -> Iterator[OverlayVideo | None]:
    if path is None:
        yield None
        return
    video = OverlayVideo(settings, path)
    try:
        yield video
    finally:
        for line in video.close():
            screen.print_line(line)
    # an error of the last messages; one of earlier messages was raised by `draw`
    video.check()


class Statistics:
    """Statistics of a stream of masks: frames, ages, rate and skipped frames."""

    def __init__(self) -> None:
        self.frames = 0
        self.skipped = 0
        self._ages_ms: deque[float] = deque(maxlen=MAX_AGES)
        self._arrivals: dict[str, deque[float]] = {}

    def add(self, masks: MaskFrame, now_ns: int) -> float:
        """Count one message. Return its age in ms."""
        age_ms = (now_ns - masks.age_origin_ns) / 1e6
        self.frames += 1
        self.skipped += masks.skipped
        self._ages_ms.append(age_ms)
        arrivals = self._arrivals.get(masks.camera, deque(maxlen=RATE_WINDOW))
        arrivals.append(now_ns / NANOSECONDS)
        keep_newest(self._arrivals, masks.camera, arrivals, MAX_CAMERAS)
        return age_ms

    def fps(self, camera: str) -> float:
        """Return messages per second over the last RATE_WINDOW messages of a camera; 0 with fewer than two messages."""
        arrivals = self._arrivals.get(camera, deque())
        if len(arrivals) < 2 or arrivals[-1] <= arrivals[0]:
            return 0.0
        return (len(arrivals) - 1) / (arrivals[-1] - arrivals[0])

    def summary(self) -> str:
        """Return one line of totals."""
        if not self.frames:
            return "summary: no masks received"
        p50, p99 = np.percentile(self._ages_ms, [50, 99])
        return f"summary: {self.frames} frames, age p50 {p50:.1f} ms p99 {p99:.1f} ms, {self.skipped} skipped"


def format_lines(masks: MaskFrame, age_ms: float, fps: float) -> list[str]:
    """Return one line for a message, and one line for each of its objects."""
    stages = " ".join(f"{printable(stage)} {us / 1000:.1f}" for stage, us in masks.stages_us.items())
    head = f"{masks.camera} #{masks.seq}  age {age_ms:.1f} ms  {fps:.1f} fps  skipped {masks.skipped}"
    if masks.shed:
        head += f"  shed {masks.shed.level}"
    return [f"{head}  [{stages}]", *map(_format_object, masks.instances)]


def _format_object(instance: Instance) -> str:
    label = printable(instance.label)
    state: str = instance.state
    if instance.frames_since_seen:
        state += f" (unseen for {instance.frames_since_seen})"
    if instance.doubtful:
        state += f" doubtful {instance.confidence or 0:.2f}"
        if instance.name_confidence is not None:
            state += f", name {instance.name_confidence:.2f}"
    box = ",".join(map(str, instance.box))
    line = (
        f"  {instance.id:>3} {label:<20} {state:<24} {instance.score:4.2f} {instance.area:>8} px  box {box}"
    )
    return "  ".join([line, *list_more(instance, INSTANCE_SHOWN)])


class Screen:
    """A display of messages: a terminal is redrawn a few times a second, another output gets line after line."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._live = out.isatty()
        self._latest: dict[str, list[str]] = {}
        self._drawn_lines = 0
        self._next_draw_s = 0.0

    def show(self, masks: MaskFrame, age_ms: float, fps: float) -> None:
        """Show one message."""
        lines = format_lines(masks, age_ms, fps)
        if not self._live:
            for line in lines:
                self._write(format_line(line) + "\n")
            return
        keep_newest(self._latest, masks.camera, lines, MAX_CAMERAS)
        if time.monotonic() >= self._next_draw_s:
            self._next_draw_s = time.monotonic() + REDRAW_S
            self._redraw()

    def print_line(self, line: str) -> None:
        """Print a line that is not overwritten."""
        self._drawn_lines = 0
        self._write(format_line(line) + "\n")

    def notify(self, line: str) -> None:
        """Print a line on stderr that is not overwritten."""
        self._drawn_lines = 0
        print_notice(f"watch: {line}")

    def _redraw(self) -> None:
        # no more than fits: a line that wraps would move the table at the next redraw
        columns, rows = shutil.get_terminal_size()
        lines: list[str] = []
        for camera in sorted(self._latest):
            lines.extend(self._latest[camera])
        lines = [line[: columns - 1] for line in lines[: rows - 1]]
        # back to the first line of the table that was drawn last, and clear what is below
        cursor_up = ""
        if self._drawn_lines:
            cursor_up = f"\x1b[{self._drawn_lines}F\x1b[J"
        self._drawn_lines = len(lines)
        self._write(cursor_up + "\n".join(lines) + "\n")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def check_video_path(path: Path) -> None:
    """Create the folder of a new video. Raises OutputError if it cannot be written, or exists already."""
    if path.suffix.lower() not in SUFFIXES:
        raise OutputError(
            f"cannot write a video to {path}: expected a name that ends in {' or '.join(SUFFIXES)}"
        )
    prepare_output(path, overwrite=False)


class OverlayVideo:
    """A writer that pairs masks with their frames, and writes one video for each camera.

    The file of the first camera is `path`; the camera's name is added for other cameras. `draw` never waits: one thread
    receives frames, another draws the pairs of a short queue. Raises SettingsError for lossless delivery.
    """

    def __init__(self, settings: Settings, path: Path) -> None:
        settings.transport.require_newest("watch --overlay")
        self._path = path
        self._unpaired = 0  # messages whose frame has not come
        self._dropped = 0  # messages that were not drawn
        self._failure: Exception | None = None
        self._videos: dict[str, VideoWriter] = {}
        self._pairing = MaskPairing(MAX_CAMERAS)
        self._lock = threading.Lock()  # of the pairing and the counts
        self._waiting: queue.Queue[MaskPair | None] = queue.Queue(MAX_MESSAGES)
        self._subscriber = FrameSubscriber(
            settings.transport.frames, security=Security.from_settings(settings.transport)
        )
        self._receiving = threading.Thread(target=self._receive, name="overlay frames", daemon=True)
        self._receiving.start()
        self._drawing = threading.Thread(target=self._run, name="overlay", daemon=True)
        self._drawing.start()

    def draw(self, masks: MaskFrame) -> None:
        """Draw one message once its frame is here. Raises the error that stopped the writing of an earlier one."""
        self.check()
        with self._lock:
            self._unpaired += 1
            self._queue(self._pairing.add_masks(masks))

    def check(self) -> None:
        """Raise the error that stopped the writing of a message, such as OutputError."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> list[str]:
        """Draw the queued messages and finish the files. Return lines about the files and the missed messages."""
        # no more frames, then no more pairs: the drawing thread ends after those that wait
        self._subscriber.close()
        self._receiving.join()
        self._waiting.put(None)
        self._drawing.join()
        lines = [f"wrote {video.path}: {video.frames} frames" for video in self._videos.values()]
        if self._unpaired:
            lines.append(f"{self._unpaired} messages had no frame to draw on")
        if self._dropped:
            lines.append(
                f"{self._dropped} messages were not drawn: too many, or of more than {MAX_VIDEOS} cameras"
            )
        return lines

    def _receive(self) -> None:
        while (received := self._subscriber.take()) is not None:
            with self._lock:
                self._queue(self._pairing.add_frame(received.frame))

    def _queue(self, pair: MaskPair | None) -> None:
        if pair is None or pair.frame is None or pair.masks is None:
            return
        # one that is dropped has had its frame: it counts once
        self._unpaired -= 1
        try:
            self._waiting.put_nowait(pair)
        except queue.Full:
            self._dropped += 1

    def _run(self) -> None:
        for pair in iter(self._waiting.get, None):
            # after a failure, pairs are still taken, so that `draw` never finds a full queue for ever
            if self._failure is None:
                self._try(self._draw, pair.frame, pair.masks)
        for video in self._videos.values():
            self._try(video.close)

    def _try(self, work: Callable[..., None], *args: object) -> None:
        try:
            work(*args)
        except Exception as error:  # `draw` and `check` raise it
            self._failure = self._failure or error

    def _draw(self, frame: Frame, masks: MaskFrame) -> None:
        try:
            image = decode_image(frame)
        except WireError:
            # a damaged frame is none to draw on
            with self._lock:
                self._unpaired += 1
            return
        if masks.camera in self._videos or len(self._videos) < MAX_VIDEOS:
            self._get_video(masks.camera).write(overlay(image, masks), masks.capture_ns)
        else:
            with self._lock:
                self._dropped += 1

    def _get_video(self, camera: str) -> VideoWriter:
        if camera not in self._videos:
            # one camera has the name that was given; further ones get theirs from the camera
            if self._videos:
                name = f"{self._path.stem}-{camera}{self._path.suffix}"
            else:
                name = self._path.name
            path = child_path(self._path.parent, name)
            self._videos[camera] = VideoWriter(path)
        return self._videos[camera]


class NodeProbe(Closeable):
    """A connection to the node's control endpoint, which asks what the node does. A context manager.

    Its methods return one line of text, "" if there is nothing to say, and None if there is nothing to wait for.
    """

    def __init__(self, settings: Settings) -> None:
        transport = settings.transport
        self._wanted = Wanted(transport.masks, transport.control, transport.delivery, ())
        self._client = ControlClient(
            self._wanted.control, PROBE_TIMEOUT_MS, Security.from_settings(transport)
        )
        self._refusal = ""

    def explain_masks(self, connected: Callable[[], bool]) -> str:
        """Say why no masks arrive. `connected` returns True if the masks endpoint has a peer."""
        description = self._describe()
        # a key that is refused explains everything
        if self._refusal:
            return self._refusal
        if connected() and find_sending_camera(description, ()):
            return ""
        return diagnose(description, self._wanted, connected())

    def explain_frames(self) -> str | None:
        """Say why the node gets no frames, or does not process them. "" if no node answers."""
        description = self._describe()
        if description is None:
            return self._refusal
        if find_sending_camera(description, ()) and not description["paused"]:
            return None
        # this command has no delivery of its own: it asks for the frames of a recorder or bridge
        delivery = description["settings"]["transport"]["delivery"]
        return diagnose(description, self._wanted._replace(delivery=delivery), connected=True)

    def explain_answer(self) -> str:
        """Say why the node does not answer another request."""
        if self._describe() is None:
            return self._refusal or (
                f"no node answers at {self._wanted.control}: start it with sam3-node run, correct --transport.control, "
                "or wait if it still loads its model"
            )
        return f"the node at {self._wanted.control} answers, but has not finished this request yet"

    def close(self) -> None:
        """Close the connection. Waits for a pending question. Idempotent."""
        self._client.close()

    def _describe(self) -> dict[str, Any] | None:
        # each call asks anew: the node may have been started meanwhile
        self._refusal = ""
        try:
            return cast(dict[str, Any], self._client.call("describe"))
        except AuthenticationError as error:
            self._refusal = str(error)
            return None
        except Sam3NodeError:
            return None
