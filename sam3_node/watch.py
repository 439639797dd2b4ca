"""Masks as they come: a live table in the terminal, plain lines where there is none, and a video."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import statistics
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import numpy as np

from .errors import SettingsError, WireError
from .settings import Settings
from .transport.frames import FrameSubscriber
from .transport.masks import MaskSubscriber
from .types import NANOSECONDS, Frame, Instance, MaskFrame
from .visual import Image, VideoWriter, overlay
from .wire import decode_image

REDRAW_S = 0.1
RATE_WINDOW = 30
AGES_KEPT = 100_000
FRAMES_KEPT = 48
HELD_FOR_RATE = 10


class Statistics:
    """What a stream of masks was like: frames, ages, rate and skips."""

    def __init__(self) -> None:
        self.frames = 0
        self.skipped = 0
        self._ages_ms: deque[float] = deque(maxlen=AGES_KEPT)
        self._arrivals: dict[str, deque[float]] = {}

    def add(self, masks: MaskFrame, now_ns: int) -> float:
        """Count one message; returns its age in ms."""
        age_ms = (now_ns - masks.age_origin_ns) / 1e6
        self.frames += 1
        self.skipped += masks.skipped
        self._ages_ms.append(age_ms)
        self._arrivals.setdefault(masks.camera, deque(maxlen=RATE_WINDOW)).append(now_ns / NANOSECONDS)
        return age_ms

    def fps(self, camera: str) -> float:
        """Messages per second of a camera over its last ones; 0 before the second."""
        arrivals = self._arrivals.get(camera, deque())
        span_s = arrivals[-1] - arrivals[0] if len(arrivals) > 1 else 0.0
        return (len(arrivals) - 1) / span_s if span_s > 0 else 0.0

    def summary(self) -> str:
        """One line for the end."""
        if not self.frames:
            return "summary: no masks came"
        p50, p99 = np.percentile(self._ages_ms, [50, 99])
        return f"summary: {self.frames} frames, age p50 {p50:.1f} ms p99 {p99:.1f} ms, {self.skipped} skipped"


def plain_lines(masks: MaskFrame, age_ms: float, fps: float) -> list[str]:
    """One message as one line of its own and one for each object."""
    stages = " ".join(f"{stage} {us / 1000:.1f}" for stage, us in masks.stages_us.items())
    head = f"{masks.camera} #{masks.seq}  age {age_ms:.1f} ms  {fps:.1f} fps  skipped {masks.skipped}"
    return [f"{head}  [{stages}]", *map(_object_line, masks.instances)]


def _object_line(instance: Instance) -> str:
    label = "".join(letter if letter.isprintable() else "?" for letter in instance.label)
    unseen = f" (unseen for {instance.frames_since_seen})" if instance.frames_since_seen else ""
    state, box = f"{instance.state}{unseen}", ",".join(map(str, instance.box))
    return (
        f"  {instance.id:>3} {label:<20} {state:<24} {instance.score:4.2f} {instance.area:>8} px  box {box}"
    )


class Screen:
    """Prints each message: in place on a terminal, a few times a second, else line after line."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._live = out.isatty()
        self._latest: dict[str, list[str]] = {}
        self._drawn = 0
        self._due = 0.0

    def show(self, masks: MaskFrame, age_ms: float, fps: float) -> None:
        """Print one message."""
        lines = plain_lines(masks, age_ms, fps)
        if not self._live:
            self._write("\n".join(lines) + "\n")
            return
        self._latest[masks.camera] = lines
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + REDRAW_S
            self._redraw()

    def say(self, line: str) -> None:
        """Print a line that stays."""
        self._drawn = 0
        self._write(line + "\n")

    def _redraw(self) -> None:
        columns, rows = shutil.get_terminal_size()
        lines = [line for camera in sorted(self._latest) for line in self._latest[camera]]
        lines = [line[: columns - 1] for line in lines[: rows - 1]]
        back = f"\x1b[{self._drawn}F\x1b[J" if self._drawn else ""
        self._drawn = len(lines)
        self._write(back + "\n".join(lines) + "\n")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


class OverlayRecorder:
    """Pairs masks with the frames they were found on, by camera and seq, and writes one video per camera.

    The first camera's file has the name given, the others' have their camera's name added to it.
    """

    def __init__(self, settings: Settings, path: Path) -> None:
        if settings.transport.delivery == "every":
            raise SettingsError(
                "an overlay needs transport.delivery = 'newest': with 'every' a frame goes to one receiver, "
                "and the watcher would take frames away from the node"
            )
        self._path = path
        self._subscriber = FrameSubscriber(settings.transport.frames)
        self._frames: OrderedDict[tuple[str, int], Frame] = OrderedDict()
        self._films: dict[str, _Film] = {}
        self.unpaired = 0

    def collect(self) -> None:
        """Take in the frames that have come; the oldest go when there are too many."""
        while (received := self._subscriber.take(0)) is not None:
            self._frames[received.frame.camera, received.frame.seq] = received.frame
            if len(self._frames) > FRAMES_KEPT:
                self._frames.popitem(last=False)

    def draw(self, masks: MaskFrame) -> None:
        """Add the overlay of one message to its camera's video, when its frame is there."""
        frame = self._frames.pop((masks.camera, masks.seq), None)
        try:
            image = decode_image(frame) if frame is not None else None
        except WireError:
            image = None
        if image is None:
            self.unpaired += 1
            return
        self._film(masks.camera).add(overlay(image, masks), masks.capture_ns)

    def _film(self, camera: str) -> _Film:
        if camera not in self._films:
            path = self._path.with_stem(f"{self._path.stem}-{camera}") if self._films else self._path
            self._films[camera] = _Film(path)
        return self._films[camera]

    def close(self) -> list[str]:
        """Finish the files; one line about each."""
        self._subscriber.close()
        for film in self._films.values():
            film.close()
        return [f"wrote {film.path}: {film.frames} frames" for film in self._films.values()]


class _Film:
    """A video whose rate is that of its first frames, which are held back until it is known."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.frames = 0
        self._held: list[tuple[Image, int]] = []
        self._writer: VideoWriter | None = None

    def add(self, image: Image, capture_ns: int) -> None:
        self.frames += 1
        if self._writer is not None:
            self._writer.write(image)
            return
        self._held.append((image, capture_ns))
        if len(self._held) == HELD_FOR_RATE:
            self._open()

    def _open(self) -> None:
        times = [capture_ns for _, capture_ns in self._held]
        gaps = [later - earlier for earlier, later in itertools.pairwise(times) if later > earlier]
        fps = NANOSECONDS / statistics.median(gaps) if gaps else 30.0
        self._writer = VideoWriter(self.path, min(max(fps, 1.0), 240.0))
        for image, _ in self._held:
            self._writer.write(image)
        self._held.clear()

    def close(self) -> None:
        if self._writer is None and self._held:
            self._open()
        if self._writer is not None:
            self._writer.close()


def run_watch(
    settings: Settings, overlay: Path | None, frames: int, stop: threading.Event, out: TextIO | None = None
) -> int:
    """Show masks until `stop` is set or `frames` messages have come (0: no end); returns how many came.

    With `overlay` the frames are subscribed to as well, and a video is written there.
    Raises SettingsError for an overlay of lossless delivery, TransportError for a malformed endpoint.
    """
    screen, statistics = Screen(out or sys.stdout), Statistics()
    transport = settings.transport
    with (
        MaskSubscriber(transport.masks, transport.delivery) as subscriber,
        _recording(settings, overlay, screen) as recorder,
    ):
        screen.say(f"watch masks from {transport.masks}")
        while not stop.is_set() and (not frames or statistics.frames < frames):
            if recorder is not None:
                recorder.collect()
            masks = subscriber.take(5 if recorder is not None else 100)
            if masks is None:
                continue
            age_ms = statistics.add(masks, time.time_ns())
            screen.show(masks, age_ms, statistics.fps(masks.camera))
            if recorder is not None:
                recorder.draw(masks)
        screen.say(statistics.summary())
        if subscriber.rejected:
            screen.say(f"{subscriber.rejected} messages were malformed, the last: {subscriber.last_error}")
    return statistics.frames


@contextlib.contextmanager
def _recording(settings: Settings, path: Path | None, screen: Screen) -> Iterator[OverlayRecorder | None]:
    if path is None:
        yield None
        return
    recorder = OverlayRecorder(settings, path)
    try:
        yield recorder
    finally:
        for line in recorder.close():
            screen.say(line)
        if recorder.unpaired:
            screen.say(f"{recorder.unpaired} messages had no frame to be drawn on")
