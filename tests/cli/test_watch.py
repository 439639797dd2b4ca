"""Tests of the watcher on real sockets: plain lines, the live table, the summary, and videos paired by seq."""

import io
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest

from sam3_node.cli.watch import Screen, Statistics, format_lines, run_watch
from sam3_node.errors import SettingsError
from sam3_node.settings import Settings, load_settings
from sam3_node.transport.channels import FramePublisher, MaskPublisher
from sam3_node.types import Frame, Instance, Mask, MaskFrame
from tests.cli.test_progress import Terminal
from tests.support.patience import PATIENCE_S
from tests.support.refuses import mentions, refuses
from tests.support.threads import Running, in_thread

SIZE = (48, 64)


def masks_at(seq: int, camera: str = "cam0", label: str = "red mug") -> MaskFrame:
    full = np.zeros(SIZE, dtype=np.bool_)
    full[10:20, 10:30] = True
    instance = Instance(7, label, 0.75, "tracked", 4, 0, Mask.from_full(full))
    more = {"stages_us": {"track": 8000}, "instances": (instance,)}
    return MaskFrame(camera, seq, time.time_ns() - 5_000_000, *SIZE[::-1], **more)


def frame_at(seq: int, camera: str = "cam0") -> Frame:
    pixels = np.full((*SIZE, 3), 100, dtype=np.uint8)
    return Frame(camera, seq, time.time_ns(), SIZE[1], SIZE[0], "bgr8", pixels.tobytes())


def watching(
    settings: Settings, out: io.StringIO, overlay: Path | None = None, frames: int = 0
) -> AbstractContextManager[Running]:
    return in_thread(lambda stop: run_watch(settings, overlay, frames, stop, out))


def send_until(send: Callable[[int], object], done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    seq = 0
    while not done():
        assert time.monotonic() < deadline
        send(seq)
        seq += 1
        time.sleep(0.02)


def settings_for(masks: str, frames: str = "tcp://127.0.0.1:9") -> Settings:
    return load_settings(None, {"transport.masks": masks, "transport.frames": frames})


def test_messages_are_printed_as_lines_and_then_a_summary() -> None:
    out = io.StringIO()
    with (
        MaskPublisher("tcp://127.0.0.1:*") as publisher,
        watching(settings_for(publisher.endpoint), out, frames=5) as (thread, _),
    ):
        send_until(lambda seq: publisher.send(masks_at(seq)), lambda: not thread.is_alive())
    lines = out.getvalue().splitlines()
    assert lines[0] == f"watch masks from {publisher.endpoint}"
    assert lines[1].startswith("cam0 #")
    assert "[track 8.0]" in lines[1]
    assert lines[2].split() == ["7", "red", "mug", "tracked", "0.75", "200", "px", "box", "10,10,30,20"]
    assert lines[-1].startswith("summary: 5 frames, age p50 ")


def test_without_masks_it_stops_and_prints_so() -> None:
    out = io.StringIO()
    with watching(settings_for("tcp://127.0.0.1:8"), out) as (_, stop):
        time.sleep(0.2)
        stop.set()
    assert out.getvalue().splitlines()[-1] == "summary: no masks received"


def test_a_terminal_is_redrawn_in_place() -> None:
    out = Terminal()
    screen = Screen(out)
    for seq in range(2):
        screen.show(masks_at(seq), 5.0, 30.0)
        time.sleep(0.12)
    assert out.getvalue().count("\x1b[2F\x1b[J") == 1


def test_control_characters_of_a_label_do_not_reach_the_terminal() -> None:
    lines = format_lines(masks_at(1, label="\x1b[2Jmug\n"), 5.0, 30.0)
    assert "?[2Jmug?" in lines[1]


def test_statistics_count_rate_age_and_skips() -> None:
    statistics = Statistics()
    assert statistics.fps("cam0") == 0.0
    for number in range(11):
        masks = replace(masks_at(number), capture_ns=number * 100_000_000, skipped=2)
        age_ms = statistics.add(masks, number * 100_000_000 + 7_000_000)
    assert age_ms == pytest.approx(7.0)
    assert statistics.fps("cam0") == pytest.approx(10.0)
    assert statistics.summary() == "summary: 11 frames, age p50 7.0 ms p99 7.0 ms, 22 skipped"


def test_with_another_clock_ages_are_measured_from_the_arrival_at_the_node() -> None:
    masks = replace(masks_at(1), capture_ns=17, clock="device", received_ns=10_000_000)
    assert Statistics().add(masks, 14_000_000) == pytest.approx(4.0)


def test_an_overlay_is_drawn_on_the_frame_of_the_same_seq(tmp_path: Path) -> None:
    out = io.StringIO()
    path = tmp_path / "overlay.mp4"
    with (
        FramePublisher("tcp://127.0.0.1:*") as frames,
        MaskPublisher("tcp://127.0.0.1:*") as publisher,
        watching(settings_for(publisher.endpoint, frames.endpoint), out, path, frames=20) as (thread, _),
    ):

        def send(seq: int) -> None:
            sent = [frame_at(seq, camera) for camera in ("cam0", "left")]
            for frame in sent:
                frames.send(frame)
            time.sleep(0.01)
            for frame in sent:
                publisher.send(replace(masks_at(seq, frame.camera), capture_ns=frame.capture_ns))

        send_until(send, lambda: not thread.is_alive())
    written = sorted(path.name for path in tmp_path.iterdir())
    assert len(written) == 2
    assert "overlay.mp4" in written
    assert "wrote" in out.getvalue()
    read, image = cv2.VideoCapture(str(path)).read()
    assert read
    assert image.shape == (*SIZE, 3)


def test_masks_without_a_frame_are_counted(tmp_path: Path) -> None:
    out = io.StringIO()
    path = tmp_path / "overlay.mp4"
    with (
        MaskPublisher("tcp://127.0.0.1:*") as publisher,
        watching(settings_for(publisher.endpoint), out, path, frames=3) as (thread, _),
    ):
        send_until(lambda seq: publisher.send(masks_at(seq)), lambda: not thread.is_alive())
    assert mentions(out.getvalue(), "3 messages")
    assert not path.exists()


def test_an_overlay_of_lossless_delivery_is_refused(tmp_path: Path) -> None:
    settings = load_settings(None, {"transport.delivery": "every"})
    with refuses(SettingsError, field="overlay"):
        run_watch(settings, tmp_path / "o.mp4", 1, threading.Event(), io.StringIO())
