"""Counts the calls of the package on the way of a frame and of a prompt: `python -m tools.docs.hops`.

Camera, node and client run as threads of one process, on the drawn scene with one object. A profile function counts
each call of a function of the package in the node's thread, with its depth, over whole frames. The call of `add_object`
also counts the thread that receives requests. --all lists each function, and the deepest chain of calls. Needs the
extra `node`.
"""

import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
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
_PROMPTS = 5  # the one with the fewest calls counts
_TIMEOUT_MS = 60_000
# beginnings of the names of the node's threads
_NODE = "node"
_CONTROL = "control "
_STEP = "perception.pipeline:Pipeline.step"  # runs once a frame
_ANSWER = "node.node:Node._answer"
"""A function that hands the reply of a request to the control thread; what the node does next is not of the request."""
_SETTLE_S = 0.6  # a paused node finishes its frame meanwhile
_PACKAGE = "sam3_node."


@dataclass
class Calls:
    """Calls of functions of the package."""

    functions: Counter[str] = field(default_factory=Counter)  # by module.function
    deepest: tuple[str, ...] = ()
    """the most functions of the package that were active at once in one thread, the outermost first"""

    def describe(self, frames: int = 1) -> str:
        """Return the figures in one line; `frames` divides the number of calls."""
        modules = {name.rpartition(":")[0] for name in self.functions}
        return (
            f"{self.functions.total() / frames:.0f} calls of {len(self.functions)} functions in "
            f"{len(modules)} modules, depth {len(self.deepest)}"
        )


class Profile:
    """A profile function for `sys.setprofile`, which counts calls within `counting` and `count_frames`."""

    def __init__(self) -> None:
        self._calls: Calls | None = None
        self._threads: tuple[str, ...] = ()
        self._frames = -1  # until frames are counted
        self._counted = Calls()
        self._all_counted = threading.Event()
        self._local = threading.local()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Count one call or return of a function of the package; ignore comprehensions and other packages."""
        if event not in ("call", "return"):
            return
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(_PACKAGE) or frame.f_code.co_name.startswith("<"):
            return
        stack: list[str] = self._local.__dict__.setdefault("stack", [])
        if event == "return":
            if stack[-1:] == [_ANSWER] and self._calls is not None and self._calls.functions[_ANSWER]:
                self._threads = (_CONTROL,)
            del stack[-1:]
            return
        stack.append(f"{module.removeprefix(_PACKAGE)}:{frame.f_code.co_qualname}")
        if not threading.current_thread().name.startswith(self._threads):
            return
        if stack[-1] == _STEP and self._frames >= 0:
            self._count_frame()
        if (calls := self._calls) is not None:
            calls.functions[stack[-1]] += 1
            if len(stack) > len(calls.deepest):
                calls.deepest = tuple(stack)

    @contextmanager
    def counting(self, *threads: str) -> Iterator[Calls]:
        """Count within the block, in the threads whose names begin with one of `threads`."""
        self._threads = threads
        self._calls = Calls()
        try:
            yield self._calls
        finally:
            self._calls = None

    def count_frames(self) -> Calls:
        """Count in the node's thread from the step of a frame to the step of the _FRAMES-th frame after it."""
        self._threads = (_NODE,)
        self._counted = Calls()
        self._frames = 0
        assert self._all_counted.wait(_TIMEOUT_MS / 1000)
        self._all_counted.clear()
        return self._counted

    def _count_frame(self) -> None:
        self._frames += 1
        self._calls = self._counted
        if self._frames > _FRAMES:
            self._calls = None
            self._frames = -1
            self._all_counted.set()


def count(profile: Profile, names: str, folder: Path) -> Iterator[tuple[str, Calls, int]]:
    """Yield (what, its calls, number of frames) for frames and for a prompt; look for `names` on every frame."""
    sockets = {f"transport.{part}": f"ipc://{folder}/{part}" for part in ("frames", "masks", "control")}
    camera = {"camera.source": "scene:shapes", "camera.fps": "30"}
    detector = {"detector.prompts": names, "detector.every": "1"}
    settings = load_settings(overrides=sockets | camera | detector)
    transport = settings.transport
    stop = threading.Event()
    runs: dict[str, Callable[..., object]] = {_NODE: _run_node, "camera": run_camera}
    threads = [threading.Thread(target=run, args=(settings, stop), name=name) for name, run in runs.items()]
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
    yield "frame", profile.count_frames(), _FRAMES
    client.pause()
    time.sleep(_SETTLE_S)
    (camera,) = client.status()["cameras"].values()
    counted = []
    for _ in range(_PROMPTS):
        with profile.counting(_NODE, _CONTROL) as calls:  # frames still arrive meanwhile
            added = client.add_object(box=_BOX, seq=camera["last_seq"])
        counted.append(calls)
        client.remove_object(added.id)
    # a turn of the idle loop may fall into the count
    yield "add_object", min(counted, key=lambda calls: calls.functions.total()), 1


def main() -> None:
    """Print the counts, without and with detection by name; with --all, each function."""
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
                    print("  deepest:", *calls.deepest, sep="\n    ")
    sys.setprofile(None)


if __name__ == "__main__":
    main()
