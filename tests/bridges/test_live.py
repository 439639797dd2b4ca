"""Tests of what all bridges share, with real sockets and a viewer that only remembers."""

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import zmq

from sam3_node.bridges import viewer as loop
from sam3_node.bridges.viewer import BridgeCounts, run_bridge
from sam3_node.cli import services as command
from sam3_node.errors import OutputError, SettingsError
from sam3_node.processes.notify import Watchdog
from sam3_node.resources import Closeable
from sam3_node.settings import Settings
from sam3_node.transport import FramePublisher, MaskPublisher
from sam3_node.transport.mask_pairing import MaskPair
from sam3_node.types import Frame, MaskFrame
from tests.support.node_rig import until
from tests.support.patience import PATIENCE_S
from tests.support.refuses import mentions, refuses

SIZE = (24, 32)


def frame(seq: int, camera: str = "cam0") -> Frame:
    pixels = np.full((*SIZE, 3), seq % 256, np.uint8).tobytes()
    return Frame(camera, seq, 1000 + seq, SIZE[1], SIZE[0], "bgr8", pixels, clock="device")


def masks(seq: int, camera: str = "cam0") -> MaskFrame:
    return MaskFrame(camera, seq, 1000 + seq, SIZE[1], SIZE[0], model="nano")


class Viewer:
    """A viewer that remembers what it was shown; it waits where `open` is not set, and fails at `failing`."""

    def __init__(self) -> None:
        self.shown: list[tuple[Frame | None, MaskFrame]] = []
        self.open = threading.Event()
        self.blocked = threading.Event()
        self.closed = threading.Event()
        self.open.set()
        self.failing = -1

    def show(self, frame: Frame | None, masks: MaskFrame) -> bool:
        self.shown.append((frame, masks))
        if not self.open.is_set():
            self.blocked.set()
            self.open.wait(PATIENCE_S)
        if masks.seq == self.failing:
            raise OutputError("the disk is full")
        return True

    def close(self) -> None:
        self.closed.set()

    def seqs(self, camera: str = "cam0") -> list[int]:
        """Return the numbers of the masks of the node, in the order of their arrival."""
        return [masks.seq for _, masks in self.shown if masks.camera == camera and masks.model]


class Bridge:
    """A bridge in a thread, and the camera and the node that it hears."""

    def __init__(self, folder: Path) -> None:
        self.names = {name: f"ipc://{folder}/{name}" for name in ("frames", "masks", "control")}
        self.camera = FramePublisher(self.names["frames"])
        self.node = MaskPublisher(self.names["masks"])
        self.viewer = Viewer()
        self.stop = threading.Event()
        arguments = self.settings(), self.viewer, self.stop, Watchdog()
        self._result = ThreadPoolExecutor(1).submit(run_bridge, *arguments)

    def settings(self) -> Settings:
        transport = {**self.names, "frames": (self.names["frames"],)}
        return Settings(transport=transport)  # type: ignore[arg-type]

    def join_streams(self) -> None:
        """Wait until the bridge receives frames and masks: a publisher drops what nobody has subscribed to."""
        until(lambda: self.camera.send(frame(0, "first")) and self.viewer.shown, "a first frame")
        until(lambda: self.node.send(masks(0, "second")) and self.viewer.seqs("second"), "first masks")

    def send(self, seq: int) -> bool:
        """Send a frame and its masks, once: either may arrive first."""
        return self.camera.send(frame(seq)) and self.node.send(masks(seq))

    def show(self, seq: int) -> None:
        """Send a frame and its masks, again until they are shown."""
        until(lambda: self.send(seq) and seq in self.viewer.seqs(), f"masks {seq}")

    def end(self) -> BridgeCounts | BaseException:
        self.stop.set()
        return self._result.exception(PATIENCE_S) or self._result.result()

    def close(self) -> None:
        self.viewer.open.set()
        self.end()
        self.camera.close()
        self.node.close()


@pytest.fixture
def bridge(tmp_path: Path) -> Iterator[Bridge]:
    found = Bridge(tmp_path)
    try:
        found.join_streams()
        yield found
    finally:
        found.close()


def test_a_picture_is_shown_with_its_own_masks(bridge: Bridge) -> None:
    def paired() -> MaskPair | None:
        bridge.send(7)
        whole = (MaskPair(*pair) for pair in bridge.viewer.shown if pair[0] is not None and pair[1].model)
        return next((pair for pair in whole if pair.camera == "cam0"), None)

    pair = until(paired, "a picture and its masks")
    assert pair.frame.key == pair.masks.key


def test_a_picture_without_masks_has_empty_ones_of_its_own_clock(bridge: Bridge) -> None:
    shown = next(pair for pair in bridge.viewer.shown if pair[1].camera == "first")
    assert shown[1] == MaskFrame(*shown[0].key, SIZE[1], SIZE[0], clock="device")


def test_a_slow_viewer_gets_the_newest_of_each_camera() -> None:
    viewer = Viewer()
    viewer.open.clear()
    sender = loop._Sender(viewer)
    sender.put(MaskPair(frame(0, "blocks"), None))
    until(viewer.blocked.is_set, "the picture that the viewer waits with")
    for seq in range(50):
        sender.put(MaskPair(frame(seq), masks(seq)))
        sender.put(MaskPair(None, masks(seq, "other")))
    viewer.open.set()
    until(lambda: len(viewer.shown) == 3, "the newest of both")
    assert [(masks.camera, masks.seq) for _, masks in viewer.shown[1:]] == [("cam0", 49), ("other", 49)]
    assert sender.close() == BridgeCounts(3, 98, True)


def test_another_node_and_camera_are_shown_without_a_restart(bridge: Bridge) -> None:
    bridge.show(5)
    bridge.camera.close()
    bridge.node.close()
    bridge.camera = FramePublisher(bridge.names["frames"])
    bridge.node = MaskPublisher(bridge.names["masks"])
    bridge.show(3)


def test_malformed_messages_are_left_out(bridge: Bridge, caplog: pytest.LogCaptureFixture) -> None:
    bridge.node.close()
    with zmq.Context() as context, context.socket(zmq.PUB) as node:
        node.bind(bridge.names["masks"])

        def send() -> bool:
            node.send_multipart([b"masks/cam0", b"no masks"])
            return mentions(caplog.text, "malformed")

        until(send, "a warning")
    bridge.node = MaskPublisher(bridge.names["masks"])
    bridge.show(1)


def test_a_viewer_that_fails_ends_the_bridge_with_its_error(bridge: Bridge) -> None:
    bridge.viewer.failing = 4
    until(lambda: bridge.send(4) and bridge.viewer.closed.is_set(), "the end")
    assert str(bridge.end()) == "the disk is full"


def test_a_viewer_that_hangs_does_not_keep_the_bridge_from_ending(
    bridge: Bridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "VIEWER_CLOSE_S", 0.1)
    bridge.viewer.open.clear()
    until(lambda: bridge.camera.send(frame(1)) and bridge.viewer.blocked.is_set(), "a picture that waits")
    assert not bridge.end().closed
    assert not bridge.viewer.closed.is_set()


def test_closing_is_told_to_the_watchdog_and_dropped_messages_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []
    stop = threading.Event()

    class FullTap(Closeable):
        dropped = 3

        def __init__(self, *args: object, **options: object) -> None:
            events.append("open")

        def take(self, timeout_ms: int) -> None:
            stop.set()

        def close(self) -> None:
            events.append("close")

    watchdog = Watchdog()
    monkeypatch.setattr(loop, "StreamTap", FullTap)
    monkeypatch.setattr(watchdog, "begin_close", lambda: events.append("begin close"))
    assert run_bridge(Settings(), Viewer(), stop, watchdog) == BridgeCounts(0, 0, True, dropped=3)
    assert events[:3] == ["open", "begin close", "close"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_stdout_does_not_end_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Viewer] = []

    def run(settings: Settings, viewer: Viewer, stop: threading.Event, watchdog: Watchdog) -> BridgeCounts:
        runs.append(viewer)
        return BridgeCounts(0, 0, True)

    monkeypatch.setattr(loop, "run_bridge", run)
    monkeypatch.setattr(command, "stop_on_signals", threading.Event)
    settings = Settings(transport={"control": "tcp://127.0.0.1:*"})  # type: ignore[arg-type]
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        command._run_bridge(settings, Viewer(), "nowhere")
    assert len(runs) == 1


def test_lossless_delivery_is_refused_and_the_viewer_closed() -> None:
    viewer = Viewer()
    settings = Settings(transport={"delivery": "every"})  # type: ignore[arg-type]
    with refuses(SettingsError, field=("transport.delivery", "newest")):
        run_bridge(settings, viewer, threading.Event(), Watchdog())
    assert viewer.closed.is_set()
