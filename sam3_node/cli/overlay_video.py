"""Overlay videos: background threads draw masks on their frames and write one video for each camera."""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from ..errors import OutputError, SettingsError, WireError
from ..files import child_path, prepare_output
from ..settings import Settings, TransportSettings
from ..transport import FrameSubscriber, Security
from ..types import Frame, Image, MaskFrame
from ..visualization import TimedVideoWriter, overlay
from ..wire import decode_image

SUFFIXES = (".mp4", ".mov", ".mkv", ".avi")
MAX_FRAMES = 48
MAX_BYTES = 256 << 20
MAX_MESSAGES = 16
MAX_VIDEOS = 16
LATE_FRAME_S = 0.2


def check_video_path(path: Path) -> None:
    """Create the folder of a new video. Raises OutputError if it cannot be written, or exists already."""
    if path.suffix.lower() not in SUFFIXES:
        raise OutputError(
            f"cannot write a video to {path}: expected a name that ends in {' or '.join(SUFFIXES)}"
        )
    prepare_output(path, overwrite=False)


class OverlayVideo:
    """A writer that pairs masks with their frames, by the whole key of a frame, and writes one video for each camera.

    The file of the first camera is `path`; those of other cameras have the camera's name added. `draw` never waits: a
    thread draws the messages of a short queue. Raises SettingsError for lossless delivery.
    """

    def __init__(self, settings: Settings, path: Path) -> None:
        if settings.transport.delivery == "every":
            raise SettingsError(
                "an overlay needs transport.delivery = 'newest': with 'every' each frame goes to one receiver, "
                "and the watcher would take frames from the node"
            )
        self._path = path
        self._unpaired = self._dropped = 0
        self._failure: Exception | None = None
        self._videos: dict[str, TimedVideoWriter] = {}
        self._waiting: queue.Queue[tuple[MaskFrame, Frame | None] | None] = queue.Queue(MAX_MESSAGES)
        self._frames = _RecentFrames(settings.transport)
        self._thread = threading.Thread(target=self._run, name="overlay", daemon=True)
        self._thread.start()

    def draw(self, masks: MaskFrame) -> None:
        """Queue one message for drawing. Raises the error that stopped the writing of an earlier message."""
        self.check()
        try:
            self._waiting.put_nowait((masks, self._frames.pop(masks)))
        except queue.Full:
            self._dropped += 1

    def check(self) -> None:
        """Raise the error that stopped the writing of a message, such as OutputError."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> list[str]:
        """Draw the queued messages and finish the files. Return lines about the files and the missed messages."""
        self._frames.close()
        self._waiting.put(None)
        self._thread.join()
        lines = [f"wrote {video.path}: {video.frames} frames" for video in self._videos.values()]
        if self._unpaired:
            lines.append(f"{self._unpaired} messages had no frame to draw on")
        if self._dropped:
            lines.append(
                f"{self._dropped} messages were not drawn: too many, or of more than {MAX_VIDEOS} cameras"
            )
        return lines

    def _run(self) -> None:
        for masks, frame in iter(self._waiting.get, None):
            if self._failure is None:
                self._try(self._draw, masks, frame)
        for video in self._videos.values():
            self._try(video.close)

    def _try(self, work: Callable[..., None], *args: object) -> None:
        try:
            work(*args)
        except Exception as error:  # `draw` and `check` raise it
            self._failure = self._failure or error

    def _draw(self, masks: MaskFrame, frame: Frame | None) -> None:
        if frame is None:
            # a frame may arrive shortly after its masks; wait for it only if no message waits behind this one
            late_s = LATE_FRAME_S if self._waiting.empty() else 0.0
            frame = self._frames.pop(masks, late_s)
        image = _decode(frame)
        if image is None:
            self._unpaired += 1
        elif masks.camera not in self._videos and len(self._videos) == MAX_VIDEOS:
            self._dropped += 1
        else:
            self._get_video(masks.camera).write(overlay(image, masks), masks.capture_ns)

    def _get_video(self, camera: str) -> TimedVideoWriter:
        if camera not in self._videos:
            name = f"{self._path.stem}-{camera}{self._path.suffix}" if self._videos else self._path.name
            path = child_path(self._path.parent, name)
            self._videos[camera] = TimedVideoWriter(path)
        return self._videos[camera]


def _decode(frame: Frame | None) -> Image | None:
    try:
        return decode_image(frame) if frame is not None else None
    except WireError:
        return None


class _RecentFrames:
    """A buffer of at most MAX_FRAMES recent frames and MAX_BYTES, which a thread fills."""

    def __init__(self, transport: TransportSettings) -> None:
        self._frames: OrderedDict[tuple[str, int], Frame] = OrderedDict()
        self._bytes = 0
        self._changed = threading.Condition()
        self._closed = False
        self._subscriber = FrameSubscriber(transport.frames, security=Security.from_settings(transport))
        self._thread = threading.Thread(target=self._collect, name="overlay frames", daemon=True)
        self._thread.start()

    def pop(self, masks: MaskFrame, timeout_s: float = 0.0) -> Frame | None:
        """Remove and return the frame of `masks`; wait for it up to `timeout_s`. Return None if it is not here then."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._holds(masks), timeout_s)
            return self._remove(masks.key[:2]) if self._holds(masks) else None

    def close(self) -> None:
        """Stop receiving. The buffered frames remain available."""
        self._subscriber.close()
        self._thread.join()
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _collect(self) -> None:
        while (received := self._subscriber.take()) is not None:
            with self._changed:
                self._add(received.frame)
                self._changed.notify_all()

    def _add(self, frame: Frame) -> None:
        key = frame.camera, frame.seq
        self._remove(key)  # an older frame with this key is from before a restart of the camera
        self._frames[key] = frame
        self._bytes += memoryview(frame.colour).nbytes
        while len(self._frames) > 1 and (len(self._frames) > MAX_FRAMES or self._bytes > MAX_BYTES):
            self._remove(next(iter(self._frames)))

    def _holds(self, masks: MaskFrame) -> bool:
        frame = self._frames.get(masks.key[:2])
        return frame is not None and frame.key == masks.key

    def _remove(self, key: tuple[str, int]) -> Frame | None:
        frame = self._frames.pop(key, None)
        if frame is not None:
            self._bytes -= memoryview(frame.colour).nbytes
        return frame
