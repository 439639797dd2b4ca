"""Nodes in this process with a camera whose frames the test sends, and requests to their health endpoint."""

import itertools
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from sam3_node import settings
from sam3_node.errors import DeviceError
from sam3_node.node.node import Node
from sam3_node.perception.pipeline import Pipeline
from sam3_node.processes.notify import Watchdog
from sam3_node.transport import ControlClient, FramePublisher, MaskSubscriber
from sam3_node.types import Delivery, MaskFrame
from tests.support.node_rig import picture, until
from tests.support.patience import PATIENCE_MS, PATIENCE_S
from tests.support.threads import in_thread
from tests.support.tiny import write_tiny


class NearNode(ExitStack):
    """A node with tiny weights whose main loop runs in a thread until the end; its camera, reader and client.

    `error` is the DeviceError that has ended it, if any. `weights` are made unless they are given. `more_frames` are
    endpoints of further cameras.
    """

    def __init__(
        self,
        folder: Path,
        weights: Path | None = None,
        delivery: Delivery = "newest",
        watchdog: Watchdog | None = None,
        more_frames: tuple[str, ...] = (),
        **sections: Any,
    ) -> None:
        super().__init__()
        self.frames, self.masks_at, self.control = (f"ipc://{folder}/{name}" for name in "fmc")
        if weights is None:
            weights = folder / "tiny"
            write_tiny(weights)
        self.settings = settings.Settings(
            transport=settings.TransportSettings(
                frames=(self.frames, *more_frames),
                masks=self.masks_at,
                control=self.control,
                delivery=delivery,
            ),
            model=settings.ModelSettings(name=str(weights), device="cpu", threads=1),
            **{"detector": settings.DetectorSettings(kind="none"), **sections},
        )
        self.error: DeviceError | None = None
        self.node = self.enter_context(Node(self.settings, watchdog=watchdog))
        self.loop, _ = self.enter_context(in_thread(self._run))
        self.client = self.enter_context(ControlClient(self.control, timeout_ms=PATIENCE_MS))
        self.camera = self.enter_context(FramePublisher(self.frames, delivery))
        self.masks = self.enter_context(MaskSubscriber(self.masks_at, delivery))
        self._seqs = itertools.count()

    def send(self, seq: int | None = None) -> MaskFrame:
        """Send a frame until its masks come."""

        def find() -> MaskFrame | None:
            masks = self.next_masks(seq)
            return masks if masks is not None and seq in (None, masks.seq) else None

        return until(find, "masks")

    def next_masks(self, seq: int | None = None) -> MaskFrame | None:
        """Send a frame. Return masks that come soon, if any do."""
        self.camera.send(picture(next(self._seqs) if seq is None else seq))
        return self.masks.take(100)

    def status(self) -> dict[str, Any]:
        """Return the node's reply to `status`."""
        return self.client.call("status")

    def _run(self, stop: threading.Event) -> None:
        try:
            self.node.main_loop(stop)
        except DeviceError as error:
            self.error = error


class HealthyNode(NearNode):
    """A node with a health endpoint on a free port, which keeps a snapshot."""

    def __init__(self, folder: Path, deadline_s: float, **sections: Any) -> None:
        health = settings.HealthSettings(bind="127.0.0.1:0", deadline_s=deadline_s)
        keep = settings.SnapshotSettings(path=folder / "node.snapshot")
        super().__init__(folder, health=health, snapshot=keep, **sections)
        self.url = self.node.health_url

    def send_as(self, camera: str = "cam1") -> bool:
        """Send the next frame of a camera."""
        return self.camera.send(picture(next(self._seqs), camera))


@contextmanager
def held_step(send: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Send frames until a step begins, which ends with the block."""
    began = threading.Event()
    ends = threading.Event()
    step = Pipeline.step

    def wait(*args: Any) -> MaskFrame:
        began.set()
        assert ends.wait(PATIENCE_S)
        return step(*args)

    with monkeypatch.context() as patch:
        patch.setattr(Pipeline, "step", wait)
        until(lambda: send() and began.wait(0.05), "the step begins")
    try:
        yield
    finally:
        ends.set()


def ask(url: str, path: str) -> tuple[int, str]:
    """Return the status and the text of a page."""
    try:
        with urllib.request.urlopen(url + path, timeout=PATIENCE_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def connect(url: str) -> socket.socket:
    """Open a connection to the server at `url`."""
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port or 0), timeout=PATIENCE_S)


def send_raw(url: str, request: bytes) -> bytes:
    """Send bytes and return all that comes until the server ends the connection."""
    answer = b""
    with connect(url) as peer:
        peer.sendall(request)
        with suppress(ConnectionResetError):  # it closed before it had read everything
            while data := peer.recv(1 << 16):
                answer += data
    return answer
