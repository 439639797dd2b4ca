"""Real processes of the command line, frames and conditions, for the tests of the node."""

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from sam3_node.client import PerceptionClient
from sam3_node.types import Frame, MaskFrame
from tests.support.processes import Process, fork_command, until

__all__ = ["Process", "Rig", "ids", "masks_where", "until"]

ANSWER_MS = 60_000
"""Time in which a node answers on a busy machine. A test whose node is gone waits as long for its error."""


def tiny_environment(folder: Path, frames: str, masks: str, control: str) -> dict[str, str]:
    """Write tiny random weights to `folder`. Return the settings of a node that uses them at these endpoints."""
    from tests.support.tiny import write_tiny  # not for forked processes, which never make weights

    write_tiny(folder / "tiny")
    settings = {"TRANSPORT__FRAMES": frames, "TRANSPORT__MASKS": masks, "TRANSPORT__CONTROL": control}
    settings |= {"MODEL__NAME": str(folder / "tiny"), "MODEL__DEVICE": "cpu", "MODEL__THREADS": "1"}
    return {f"SAM3_{name}": value for name, value in (settings | {"DETECTOR__KIND": "none"}).items()}


class Rig(ExitStack):
    """A folder with ipc endpoints and tiny random weights, and the processes that use them. Exit stops all of them."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.processes: list[Process] = []
        self.frames = (f"ipc://{folder}/frames0", f"ipc://{folder}/frames1")
        self.masks = f"ipc://{folder}/masks"
        self.control = f"ipc://{folder}/control"
        endpoints = ",".join(self.frames), self.masks, self.control
        self.environment = tiny_environment(folder, *endpoints) | {"SAM3_CAMERA__FPS": "15"}

    def start(self, *arguments: str, **settings: str) -> Process:
        """Start a verb and wait until it says that it is ready."""
        process = self.launch(*arguments, **settings)
        process.next_line()
        return process

    def launch(self, *arguments: str, **settings: str) -> Process:
        """Start a verb."""
        log = self.folder / f"log{len(self.processes)}.txt"
        changes = {f"SAM3_{name}": value for name, value in settings.items()}
        process = Process(fork_command(arguments, os.environ | self.environment | changes, log), log)
        self.processes.append(self.enter_context(process))
        return process

    def node(self, **settings: str) -> Process:
        return self.start("run", **settings)

    def camera(self) -> Process:
        return self.start("camera", "scene:shapes?width=320&height=240")

    def client(self) -> PerceptionClient:
        return PerceptionClient(self.masks, self.control, timeout_ms=ANSWER_MS)


def unworried_client(masks: str, control: str) -> PerceptionClient:
    """Open a client that goes on when the node begins anew."""
    return PerceptionClient(masks, control, timeout_ms=ANSWER_MS, on_restart=lambda restart: None)


def masks_where(client: PerceptionClient, accept: Callable[[MaskFrame], object], what: str) -> MaskFrame:
    """Return the next masks that satisfy the condition."""

    def find() -> MaskFrame | None:
        masks = client.latest(timeout_ms=200)
        return masks if masks is not None and accept(masks) else None

    return until(find, what)


def ids(masks: MaskFrame) -> list[int]:
    return [instance.id for instance in masks.instances]


def has_ids(camera: str, *wanted: int) -> Callable[[MaskFrame], bool]:
    return lambda masks: masks.camera == camera and ids(masks) == list(wanted)


def picture(seq: int, camera: str = "cam1", width: int = 64, height: int = 48) -> Frame:
    colour = np.full((height, width, 3), seq % 256, np.uint8)
    return Frame(camera, seq, time.time_ns(), width, height, "bgr8", colour.data)
