"""Counts the modules on the way of a frame and of a prompt: `python -m tools.docs.hops`.

Camera, node and client run as threads of one process, on the drawn scene with one object. A profile function notes each
module of the package that runs a function meanwhile. Needs the extra `node`.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from sam3_node.cameras.publish import run_camera
from sam3_node.client import PerceptionClient
from sam3_node.node.node import Node
from sam3_node.settings import Settings, load_settings

_BOX = (100, 100, 200, 200)
_FRAMES = 3
_TIMEOUT_MS = 60_000
_NODE = "node"
_SETTLE_S = 0.6  # a paused node finishes its frame meanwhile


class Profile:
    """Modules of the package in the order in which they first ran, while `is_on`."""

    def __init__(self) -> None:
        self.is_on = False
        self.only: tuple[str, ...] = ()
        self.modules: dict[str, None] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Note the module of a call; a profile function of `sys.setprofile`."""
        name = frame.f_globals.get("__name__", "")
        is_function = not frame.f_code.co_name.startswith("<")
        if not self.is_on or event != "call" or not is_function:
            return
        if name.startswith("sam3_node.") and (not self.only or threading.current_thread().name in self.only):
            self.modules.setdefault(name.removeprefix("sam3_node."))

    @contextmanager
    def noting(self, only: tuple[str, ...] = ()) -> Iterator[dict[str, None]]:
        """Note modules within the block, of all threads or of those named `only`."""
        self.modules, self.only = {}, only
        self.is_on = True
        try:
            yield self.modules
        finally:
            self.is_on = False


def count(profile: Profile, names: str, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield (what, its modules) for a frame and for a prompt; `names` are looked for on every frame."""
    settings = load_settings(
        overrides={
            **{f"transport.{part}": f"ipc://{folder}/{part}" for part in ("frames", "masks", "control")},
            "camera.source": "scene:shapes",
            "camera.fps": "3",
            "detector.prompts": names,
            "detector.every": "1",
        }
    )
    transport, stop = settings.transport, threading.Event()
    threads = [
        threading.Thread(target=_run_node, args=(settings, stop), name=_NODE),
        threading.Thread(target=run_camera, args=(settings, stop)),
    ]
    for thread in threads:
        thread.start()
    try:
        with PerceptionClient(transport.masks, transport.control, timeout_ms=_TIMEOUT_MS) as client:
            yield from _measure(client, profile)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _run_node(settings: Settings, stop: threading.Event) -> None:
    with Node(settings) as node:
        node.main_loop(stop)


def _measure(client: PerceptionClient, profile: Profile) -> Iterator[tuple[str, list[str]]]:
    client.latest(_TIMEOUT_MS)
    client.add_object(box=_BOX)
    for _ in range(_FRAMES):
        client.latest(_TIMEOUT_MS)
    with profile.noting() as modules:
        for _ in range(_FRAMES):
            masks = client.latest(_TIMEOUT_MS)
    yield "frame", list(modules)
    assert masks is not None
    client.pause()
    time.sleep(_SETTLE_S)
    with profile.noting(only=("MainThread", _NODE)) as modules:  # frames still arrive meanwhile
        client.add_object(box=_BOX, seq=masks.seq)
    yield "prompt", list(modules)


def main() -> None:
    """Print the counts, without and with detection by name."""
    profile = Profile()
    threading.setprofile(profile)
    sys.setprofile(profile)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for names in ("", "red mug"):
        with tempfile.TemporaryDirectory() as folder:
            for what, modules in count(profile, names, Path(folder)):
                print(
                    f"{what}{', with detection' if names else ''}: {len(modules)} modules: {' '.join(modules)}"
                )


if __name__ == "__main__":
    main()
