"""The command `watch`: it shows masks as a live table in a terminal or as plain lines, and writes a video."""

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

from ..processes.waiting import WaitingNotice, print_notice
from ..settings import Settings
from ..transport import MaskSubscriber, Security
from ..types import NANOSECONDS, Instance, MaskFrame
from .overlay_video import OverlayVideo, check_video_path
from .probe import NodeProbe
from .terminal import printable

T = TypeVar("T")

REDRAW_S = 0.1
RATE_WINDOW = 30
MAX_AGES = 100_000
MAX_CAMERAS = 64


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
        _keep_recent(self._arrivals, masks.camera, arrivals)
        return age_ms

    def fps(self, camera: str) -> float:
        """Return messages per second over the last RATE_WINDOW messages of a camera; 0 with fewer than two messages."""
        arrivals = self._arrivals.get(camera, deque())
        span_s = arrivals[-1] - arrivals[0] if len(arrivals) > 1 else 0.0
        return (len(arrivals) - 1) / span_s if span_s > 0 else 0.0

    def summary(self) -> str:
        """Return one line of totals."""
        if not self.frames:
            return "summary: no masks received"
        p50, p99 = np.percentile(self._ages_ms, [50, 99])
        return f"summary: {self.frames} frames, age p50 {p50:.1f} ms p99 {p99:.1f} ms, {self.skipped} skipped"


def _keep_recent(values: dict[str, T], camera: str, value: T) -> None:
    """Set the value of a camera. Beyond MAX_CAMERAS, delete that of the least recently updated camera."""
    values.pop(camera, None)
    values[camera] = value
    if len(values) > MAX_CAMERAS:
        del values[next(iter(values))]


def format_lines(masks: MaskFrame, age_ms: float, fps: float) -> list[str]:
    """Return one line for a message, and one line for each of its objects."""
    stages = " ".join(f"{printable(stage)} {us / 1000:.1f}" for stage, us in masks.stages_us.items())
    shed = f"  shed {masks.shed.level}" if masks.shed else ""
    head = f"{masks.camera} #{masks.seq}  age {age_ms:.1f} ms  {fps:.1f} fps  skipped {masks.skipped}{shed}"
    return [f"{head}  [{stages}]", *map(_format_object, masks.instances)]


def _format_object(instance: Instance) -> str:
    label = printable(instance.label)
    unseen = f" (unseen for {instance.frames_since_seen})" if instance.frames_since_seen else ""
    doubt = f" doubtful {instance.confidence or 0:.2f}" if instance.doubtful else ""
    if instance.doubtful and instance.name_confidence is not None:
        doubt += f", name {instance.name_confidence:.2f}"
    state, box = f"{instance.state}{unseen}{doubt}", ",".join(map(str, instance.box))
    return (
        f"  {instance.id:>3} {label:<20} {state:<24} {instance.score:4.2f} {instance.area:>8} px  box {box}"
    )


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
            self._write("\n".join(lines) + "\n")
            return
        _keep_recent(self._latest, masks.camera, lines)
        if time.monotonic() >= self._next_draw_s:
            self._next_draw_s = time.monotonic() + REDRAW_S
            self._redraw()

    def print_line(self, line: str) -> None:
        """Print a line that is not overwritten."""
        self._drawn_lines = 0
        self._write(line + "\n")

    def notify(self, line: str) -> None:
        """Print a line on stderr that is not overwritten."""
        self._drawn_lines = 0
        print_notice(f"watch: {line}")

    def _redraw(self) -> None:
        columns, rows = shutil.get_terminal_size()
        lines = [line for camera in sorted(self._latest) for line in self._latest[camera]]
        lines = [line[: columns - 1] for line in lines[: rows - 1]]
        cursor_up = f"\x1b[{self._drawn_lines}F\x1b[J" if self._drawn_lines else ""
        self._drawn_lines = len(lines)
        self._write(cursor_up + "\n".join(lines) + "\n")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def run_watch(
    settings: Settings, overlay: Path | None, frames: int, stop: threading.Event, out: TextIO | None = None
) -> int:
    """Show masks until `stop` is set or `frames` messages are received (0: no limit). Return their number.

    With `overlay` it also subscribes to frames, and writes a video to that path.
    Raises SettingsError for an overlay with lossless delivery, TransportError for a malformed endpoint, and OutputError
    when the video cannot be written.
    """
    screen, statistics = Screen(out or sys.stdout), Statistics()
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
    video.check()
