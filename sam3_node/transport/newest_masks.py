"""The newest masks of each camera, which any number of threads may look at without taking them from another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from ..types import MaskFrame

T = TypeVar("T")


class NewestMasks:
    """The newest masks of each of at most `capacity` cameras. The camera that is silent for longest is forgotten first.

    One thread puts masks in; any thread may read them, and wait for more.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._masks: dict[str, MaskFrame] = {}  # the camera whose masks came last is the last
        self._arrived = threading.Condition()
        self._listeners: list[Callable[[], None]] = []
        self._closed = False

    def put(self, masks: MaskFrame) -> None:
        """Replace the masks of a camera. Those who wait learn of it by `notify`."""
        with self._arrived:
            self._masks.pop(masks.camera, None)
            self._masks[masks.camera] = masks
            if len(self._masks) > self._capacity:
                del self._masks[next(iter(self._masks))]

    def notify(self) -> None:
        """Wake all that wait, and call the listeners."""
        with self._arrived:
            self._arrived.notify_all()
            listeners = tuple(self._listeners)
        for listener in listeners:
            listener()

    def get(self, camera: str | None = None) -> MaskFrame | None:
        """Return the newest masks of a camera, or those that came last of all; None if there are none yet."""
        with self._arrived:
            if camera is None:
                return next(reversed(self._masks.values()), None)
            return self._masks.get(camera)

    def get_all(self) -> tuple[MaskFrame, ...]:
        """Return the newest masks of every camera, those that came last at the end."""
        with self._arrived:
            return tuple(self._masks.values())

    def wait(self, find: Callable[[], T | None], timeout_s: float | None) -> T | None:
        """Return the first result of `find` that is not None. It is called now, and after each arrival.

        Returns None when the time is over (None: no limit), and after `close`. `find` may raise, and must be quick.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._arrived:
            while (found := find()) is None and not self._closed:
                left_s = None if deadline_s is None else deadline_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    break
                self._arrived.wait(left_s)
        return found

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each arrival and at the end, in the thread that receives. It must not raise."""
        with self._arrived:
            self._listeners.append(listener)

    def close(self) -> None:
        """Wake all that wait; nothing more will arrive. The newest masks stay readable. Idempotent."""
        with self._arrived:
            self._closed = True
        self.notify()
