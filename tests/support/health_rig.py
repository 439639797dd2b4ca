"""A node in this process with a health endpoint, a camera whose frames the test sends, and requests to the endpoint."""

from __future__ import annotations

import itertools
import socket
import threading
import urllib.error
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

from sam3_node.node.node import Node
from sam3_node.settings import (
    DetectorSettings,
    HealthSettings,
    ModelSettings,
    Settings,
    TransportSettings,
)
from sam3_node.transport import ControlClient, FramePublisher
from tests.support.node_frames import picture
from tests.support.tiny import random_source

PATIENCE_S = 300.0


class HealthyNode:
    """A node with tiny weights on a free port, whose main loop runs in a thread until `opened` closes."""

    def __init__(self, folder: Path, opened: ExitStack, deadline_s: float) -> None:
        frames, masks, control = (f"ipc://{folder}/{name}" for name in "fmc")
        random_source("sam3", presence=60.0).save_pretrained(folder / "tiny")
        settings = Settings(
            transport=TransportSettings(frames=(frames,), masks=masks, control=control),
            model=ModelSettings(name=str(folder / "tiny"), device="cpu", threads=1),
            detector=DetectorSettings(kind="none"),
            health=HealthSettings(bind="127.0.0.1:0", deadline_s=deadline_s),
        )
        self.node = opened.enter_context(Node(settings))
        self.url = self.node.health_url
        self._stop = threading.Event()
        self._loop = threading.Thread(target=self.node.main_loop, args=(self._stop,))
        self._loop.start()
        opened.callback(self._end)
        self.client = opened.enter_context(ControlClient(control, timeout_ms=60_000))
        self._camera = opened.enter_context(FramePublisher(frames))
        self._seqs = itertools.count()

    def send(self, camera: str = "cam1") -> bool:
        """Send the next frame."""
        return self._camera.send(picture(next(self._seqs), camera))

    def _end(self) -> None:
        self._stop.set()
        self._loop.join(PATIENCE_S)
        assert not self._loop.is_alive()


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
