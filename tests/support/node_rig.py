"""Real processes of the command line, for the tests of the node."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from sam3_node.client import PerceptionClient
from sam3_node.types import MaskFrame
from tests.support.processes import CommandProcess
from tests.support.tiny import random_source

T = TypeVar("T")
READY_S = PATIENCE_S = 300.0


class Process:
    """One verb as a process; its lines are read as they come, its log goes to a file."""

    def __init__(self, rig: Rig, arguments: tuple[str, ...], settings: dict[str, str]) -> None:
        self.log = rig.folder / f"log{len(rig.processes)}.txt"
        self.lines: queue.Queue[str] = queue.Queue()
        environment = (
            os.environ | rig.environment | {f"SAM3_{name}": value for name, value in settings.items()}
        )
        self.process = CommandProcess(arguments, environment, self.log)
        threading.Thread(target=self._read, daemon=True).start()
        rig.processes.append(self)

    def next_line(self) -> str:
        try:
            return self.lines.get(timeout=READY_S)
        except queue.Empty:
            raise AssertionError(f"silent process; its log: {self.log.read_text()}") from None

    def terminate(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=PATIENCE_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=PATIENCE_S)

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.put(line.rstrip("\n"))


class Rig:
    """A folder with ipc endpoints and tiny random weights, and the processes that use them. Exit stops all of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[Process] = []
        self.frames = (f"ipc://{folder}/frames0", f"ipc://{folder}/frames1")
        self.masks, self.control = f"ipc://{folder}/masks", f"ipc://{folder}/control"
        random_source("sam3", presence=60.0).save_pretrained(folder / "tiny")
        self.environment = {
            "SAM3_TRANSPORT__FRAMES": ",".join(self.frames),
            "SAM3_TRANSPORT__MASKS": self.masks,
            "SAM3_TRANSPORT__CONTROL": self.control,
            "SAM3_MODEL__NAME": str(folder / "tiny"),
            "SAM3_MODEL__DEVICE": "cpu",
            "SAM3_MODEL__THREADS": "1",
            "SAM3_DETECTOR__KIND": "none",
            "SAM3_CAMERA__FPS": "15",
        }

    def start(self, *arguments: str, **settings: str) -> Process:
        """Start a verb and wait until it says that it is ready."""
        process = Process(self, arguments, settings)
        process.next_line()
        return process

    def node(self, **settings: str) -> Process:
        return self.start("run", **settings)

    def camera(self) -> Process:
        return self.start("camera", "scene:shapes?width=320&height=240")

    def client(self) -> PerceptionClient:
        return PerceptionClient(self.masks, self.control, timeout_ms=10000)

    def close(self) -> None:
        for process in self.processes:
            process.kill()


def until(find: Callable[[], T | None], what: str, timeout_s: float = PATIENCE_S) -> T:
    """Return the first result that is true; fail if it does not come in time."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        result = find()
        if result:
            return result
    raise AssertionError(f"did not come in time: {what}")


def masks_where(client: PerceptionClient, accept: Callable[[MaskFrame], object], what: str) -> MaskFrame:
    """Return the next masks that satisfy the condition."""

    def find() -> MaskFrame | None:
        masks = client.latest(timeout_ms=200)
        return masks if masks is not None and accept(masks) else None

    return until(find, what)


def ids(masks: MaskFrame) -> list[int]:
    return [instance.id for instance in masks.instances]
