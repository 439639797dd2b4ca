"""Recorder processes, and a cheap camera for them."""

import dataclasses
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from sam3_node.bags.native.reader import RecordingReader
from sam3_node.transport import FramePublisher
from sam3_node.types import Frame
from tests.support.processes import Process
from tests.support.threads import repeating
from tests.support.wire_examples import plain

FRAME_BYTES = 20_000


def frame(seq: int, size: int = FRAME_BYTES, camera: str = "cam0") -> Frame:
    """Return a frame of random bytes that depend only on `seq`."""
    return Frame(camera, seq, 10**9 + seq, 640, 480, "jpeg", np.random.default_rng(seq).bytes(size))


class Camera(ExitStack):
    """Publishes frames in `folder` from a thread; `sent` is the seq of the last."""

    def __init__(self, folder: Path, rate: float = 50, size: int = FRAME_BYTES) -> None:
        super().__init__()
        self.sent = -1
        publisher = self.enter_context(FramePublisher(f"ipc://{folder}/frames"))

        def send() -> None:
            time.sleep(1 / rate)
            publisher.send(frame(self.sent + 1, size))
            self.sent += 1

        self.enter_context(repeating(send))


def arguments(folder: Path, out: Path, **settings: Any) -> list[str]:
    given = {"transport.frames": f"ipc://{folder}/frames", "transport.masks": f"ipc://{folder}/masks"}
    given |= {"transport.control": f"ipc://{folder}/control"}
    given |= {name.replace("__", "."): value for name, value in settings.items()}
    options = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    return [sys.executable, "-m", "sam3_node", "record", str(out), *options]


RecorderProcess = Process.spawn
"""`sam3-node record` as a process, by the command that `arguments` gives."""


def read_seqs(path: Path) -> list[int]:
    """Check that a file has the frames that `frame` makes; return their seqs."""
    frames = list(RecordingReader([path]).frames())
    for item in frames:
        expected = dataclasses.replace(frame(item.seq, len(item.colour)), sent_ns=item.sent_ns)
        assert plain(item) == plain(expected)
    return [item.seq for item in frames]


def has_grown(path: Path, size: int) -> Callable[[], bool]:
    return lambda: path.exists() and path.stat().st_size > size
