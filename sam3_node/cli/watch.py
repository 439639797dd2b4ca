"""Masks as they come: a live table in the terminal, plain lines where there is none, and a video."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO, TypeVar

import numpy as np

from ..settings import Settings
from ..transport.channels import MaskSubscriber
from ..types import NANOSECONDS, Instance, MaskFrame
from .overlay_video import OverlayRecorder

T = TypeVar("T")

REDRAW_S = 0.1
RATE_WINDOW = 30
AGES_KEPT = 100_000
MAX_CAMERAS = 64


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
        arrivals = self._arrivals.get(masks.camera, deque(maxlen=RATE_WINDOW))
        arrivals.append(now_ns / NANOSECONDS)
        _renew(self._arrivals, masks.camera, arrivals)
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


def _renew(kept: dict[str, T], camera: str, value: T) -> None:
    """Keep something of a camera; of too many, the one not renewed for longest is forgotten."""
    kept.pop(camera, None)
    kept[camera] = value
    if len(kept) > MAX_CAMERAS:
        del kept[next(iter(kept))]


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
        _renew(self._latest, masks.camera, lines)
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


def run_watch(
    settings: Settings, overlay: Path | None, frames: int, stop: threading.Event, out: TextIO | None = None
) -> int:
    """Show masks until `stop` is set or `frames` messages have come (0: no end); returns how many came.

    With `overlay` the frames are subscribed to as well, and a video is written there.
    Raises SettingsError for an overlay of lossless delivery, TransportError for a malformed endpoint, OutputError
    when the video cannot be written.
    """
    screen, statistics = Screen(out or sys.stdout), Statistics()
    transport = settings.transport
    with (
        MaskSubscriber(transport.masks, transport.delivery) as subscriber,
        _recording(settings, overlay, screen) as recorder,
    ):
        screen.say(f"watch masks from {transport.masks}")
        while not stop.is_set() and (not frames or statistics.frames < frames):
            masks = subscriber.take(100)
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
    recorder.check()
