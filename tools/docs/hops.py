"""Counts the calls of the package on the way of a frame and of a prompt: `python -m tools.docs.hops`.

Camera, node and client run as threads of one process, on the drawn scene with one object. A profile function counts
each call of a function of the package in the node's thread, with its depth. The call of `add_object` also counts the
thread that receives requests. Needs the extra `node`.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from sam3_node.cameras.publish import run_camera
from sam3_node.client import PerceptionClient
from sam3_node.node.node import Node
from sam3_node.settings import Settings, load_settings

_BOX = (100, 100, 200, 200)
_FRAMES = 6
_TIMEOUT_MS = 60_000
_NODE, _CONTROL = "node", "control "  # beginnings of the names of the node's threads
_STEP = "node.node:Node._step"
"""A function that runs once a frame."""
_SETTLE_S = 0.6  # a paused node finishes its frame meanwhile
_PACKAGE = "sam3_node."


@dataclass
class Calls:
    """Calls of functions of the package."""

    functions: Counter[str] = field(default_factory=Counter)
    """module.function -> number of calls"""
    depth: int = 0
    """greatest number of functions of the package that were active at once in one thread"""

    def describe(self, frames: int = 1) -> str:
        """Return the figures in one line; `frames` divides the number of calls."""
        modules = {name.rpartition(":")[0] for name in self.functions}
        return (
            f"{self.functions.total() / frames:.0f} calls of {len(self.functions)} functions in "
            f"{len(modules)} modules, depth {self.depth}"
        )


class Profile:
    """Counts calls while `is_on`; a profile function of `sys.setprofile`."""

    def __init__(self) -> None:
        self.is_on = False
        self.calls = Calls()
        self._threads: tuple[str, ...] = ()
        self._local = threading.local()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Count one call or return of a function of the package; ignore comprehensions and other packages."""
        if event not in ("call", "return"):
            return
        name = frame.f_globals.get("__name__", "")
        function = frame.f_code.co_qualname
        if not name.startswith(_PACKAGE) or frame.f_code.co_name.startswith("<"):
            return
        depth = getattr(self._local, "depth", 0) + (1 if event == "call" else -1)
        self._local.depth = max(depth, 0)
        if event == "call" and self.is_on and threading.current_thread().name.startswith(self._threads):
            self.calls.functions[f"{name.removeprefix(_PACKAGE)}:{function}"] += 1
            self.calls.depth = max(self.calls.depth, depth)

    @contextmanager
    def counting(self, *threads: str) -> Iterator[Calls]:
        """Count within the block, in the threads whose names begin with one of `threads`."""
        self.calls, self._threads = Calls(), threads
        self.is_on = True
        try:
            yield self.calls
        finally:
            self.is_on = False


def count(profile: Profile, names: str, folder: Path) -> Iterator[tuple[str, Calls, int]]:
    """Yield (what, its calls, number of frames) for frames and for a prompt; look for `names` on every frame."""
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
        threading.Thread(target=run_camera, args=(settings, stop), name="camera"),
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


def _measure(client: PerceptionClient, profile: Profile) -> Iterator[tuple[str, Calls, int]]:
    client.latest(_TIMEOUT_MS)
    client.add_object(box=_BOX)
    for _ in range(_FRAMES):
        client.latest(_TIMEOUT_MS)
    with profile.counting(_NODE) as calls:
        for _ in range(_FRAMES):
            masks = client.latest(_TIMEOUT_MS)
    assert masks is not None
    yield "frame", calls, calls.functions[_STEP]
    client.pause()
    time.sleep(_SETTLE_S)
    with profile.counting(_NODE, _CONTROL) as calls:  # frames still arrive meanwhile
        client.add_object(box=_BOX, seq=masks.seq)
    yield "add_object", calls, 1


def main() -> None:
    """Print the counts, without and with detection by name; with --all, each function and its calls."""
    profile = Profile()
    threading.setprofile(profile)
    sys.setprofile(profile)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for names in ("", "red mug"):
        with tempfile.TemporaryDirectory() as folder:
            for what, calls, frames in count(profile, names, Path(folder)):
                print(f"{what}{', with detection' if names else ''}: {calls.describe(frames)}")
                if "--all" in sys.argv:
                    for function, number in calls.functions.most_common():
                        print(f"  {number / frames:6.1f}  {function}")


if __name__ == "__main__":
    main()
