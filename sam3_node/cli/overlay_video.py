"""Videos of masks drawn on the frames they were found on, made by threads beside whoever reads the masks."""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import SettingsError, WireError
from ..settings import Settings
from ..transport.channels import FrameSubscriber
from ..types import Frame, MaskFrame
from ..visualization import Film, Image, overlay
from ..wire import decode_image

FRAMES_KEPT = 48
BYTES_KEPT = 256 << 20
MESSAGES_KEPT = 16
MAX_FILMS = 16
LATE_S = 0.2


class OverlayRecorder:
    """Pairs masks with the frames they were found on, by camera and seq, and writes one video per camera.

    The first camera's file has the name given, the others' have their camera's name added to it. `draw` never
    waits: drawing has a short queue and a thread of its own. Raises SettingsError for lossless delivery.
    """

    def __init__(self, settings: Settings, path: Path) -> None:
        if settings.transport.delivery == "every":
            raise SettingsError(
                "an overlay needs transport.delivery = 'newest': with 'every' a frame goes to one receiver, "
                "and the watcher would take frames away from the node"
            )
        self._path = path
        self._unpaired = self._dropped = 0
        self._failure: Exception | None = None
        self._films: dict[str, Film] = {}
        self._waiting: queue.Queue[tuple[MaskFrame, Frame | None] | None] = queue.Queue(MESSAGES_KEPT)
        self._frames = _RecentFrames(settings.transport.frames)
        self._thread = threading.Thread(target=self._run, name="overlay", daemon=True)
        self._thread.start()

    def draw(self, masks: MaskFrame) -> None:
        """Have one message drawn; raises what has kept an earlier one from being written."""
        self.check()
        try:
            self._waiting.put_nowait((masks, self._frames.pop(masks.camera, masks.seq)))
        except queue.Full:
            self._dropped += 1

    def check(self) -> None:
        """Raise what has kept a message from being written, such as OutputError."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> list[str]:
        """Draw what waits and finish the files; a line about each, and about what was not drawn."""
        self._frames.close()
        self._waiting.put(None)
        self._thread.join()
        lines = [f"wrote {film.path}: {film.frames} frames" for film in self._films.values()]
        if self._unpaired:
            lines.append(f"{self._unpaired} messages had no frame to be drawn on")
        if self._dropped:
            lines.append(
                f"{self._dropped} messages were not drawn: too fast, or of more than {MAX_FILMS} cameras"
            )
        return lines

    def _run(self) -> None:
        for masks, frame in iter(self._waiting.get, None):
            if self._failure is None:
                self._try(self._draw, masks, frame)
        for film in self._films.values():
            self._try(film.close)

    def _try(self, work: Callable[..., None], *args: object) -> None:
        try:
            work(*args)
        except Exception as error:  # whatever it is, `draw` and `check` tell it
            self._failure = self._failure or error

    def _draw(self, masks: MaskFrame, frame: Frame | None) -> None:
        if frame is None:
            # a frame may come a little later than its masks, but nobody shall queue up behind it
            late_s = LATE_S if self._waiting.empty() else 0.0
            frame = self._frames.pop(masks.camera, masks.seq, late_s)
        image = _decode(frame)
        if image is None:
            self._unpaired += 1
        elif masks.camera not in self._films and len(self._films) == MAX_FILMS:
            self._dropped += 1
        else:
            self._film(masks.camera).add(overlay(image, masks), masks.capture_ns)

    def _film(self, camera: str) -> Film:
        if camera not in self._films:
            path = self._path.with_stem(f"{self._path.stem}-{camera}") if self._films else self._path
            self._films[camera] = Film(path)
        return self._films[camera]


def _decode(frame: Frame | None) -> Image | None:
    try:
        return decode_image(frame) if frame is not None else None
    except WireError:
        return None


class _RecentFrames:
    """The last FRAMES_KEPT frames, or fewer of BYTES_KEPT in all, taken in by a thread as they come."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        self._frames: OrderedDict[tuple[str, int], Frame] = OrderedDict()
        self._bytes = 0
        self._changed = threading.Condition()
        self._closed = False
        self._subscriber = FrameSubscriber(endpoints)
        self._thread = threading.Thread(target=self._collect, name="overlay frames", daemon=True)
        self._thread.start()

    def pop(self, camera: str, seq: int, timeout_s: float = 0.0) -> Frame | None:
        """Take a frame out, waiting for it for a while; None where it does not come or is gone."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or (camera, seq) in self._frames, timeout_s)
            return self._remove((camera, seq))

    def close(self) -> None:
        """Take in no more; what is there can still be taken out."""
        self._subscriber.close()
        self._thread.join()
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _collect(self) -> None:
        while (received := self._subscriber.take()) is not None:
            with self._changed:
                self._keep(received.frame)
                self._changed.notify_all()

    def _keep(self, frame: Frame) -> None:
        key = frame.camera, frame.seq
        self._remove(key)  # of before its camera started again
        self._frames[key] = frame
        self._bytes += memoryview(frame.colour).nbytes
        while len(self._frames) > 1 and (len(self._frames) > FRAMES_KEPT or self._bytes > BYTES_KEPT):
            self._remove(next(iter(self._frames)))

    def _remove(self, key: tuple[str, int]) -> Frame | None:
        frame = self._frames.pop(key, None)
        if frame is not None:
            self._bytes -= memoryview(frame.colour).nbytes
        return frame
