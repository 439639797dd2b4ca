"""What a receiver thread hands to its consumer: bounded, fair among keys, pollable by a file descriptor.

The thread that drains connecting sockets, so that what a consumer takes is never stale."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, Protocol, TypeVar

import zmq

from ..errors import TransportError, WireError
from ..types import Delivery
from .connection import WATCH_MS, Listener, ReconnectingSocket, connect_all
from .sockets import open_socket

T = TypeVar("T")


class Inbox(Generic[T]):
    """At most `capacity` items, taken in the order in which their keys arrived.

    An item whose key already waits replaces the one there and keeps its place in the order: with one key per
    camera each camera has one slot, and all have their turn. Any other item waits for room.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: dict[Hashable, T] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._reader, self._writer = os.pipe()

    def put(self, key: Hashable, item: T, timeout_ms: int) -> bool:
        """Store an item; False when there was no room for its key in time, or the inbox is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._has_room(key), timeout_ms / 1000)
            if self._closed or not self._has_room(key):
                return False
            if not self._items:
                os.write(self._writer, b"\0")
            self._items[key] = item
            self._changed.notify_all()
            return True

    def take(self, timeout_ms: int | None) -> T | None:
        """The item whose turn it is; None when none came in time (None: no limit) or the inbox is closed."""
        timeout_s = None if timeout_ms is None else timeout_ms / 1000
        with self._changed:
            self._changed.wait_for(lambda: self._closed or bool(self._items), timeout_s)
            if self._closed or not self._items:
                return None
            item = self._items.pop(next(iter(self._items)))
            if not self._items:
                os.read(self._reader, 1)
            self._changed.notify_all()
            return item

    def discard(self, key: Hashable) -> None:
        """Drop what waits under a key, if anything does."""
        with self._changed:
            if self._items.pop(key, None) is not None:
                if not self._items and not self._closed:
                    os.read(self._reader, 1)
                self._changed.notify_all()

    def fileno(self) -> int:
        """A descriptor that is readable exactly while an item waits, and once the inbox is closed."""
        return self._reader

    def close(self) -> None:
        """Discard what waits, and wake everybody who waits. Idempotent."""
        with self._changed:
            self._closed = True
            if not self._items:
                os.write(self._writer, b"\0")
            self._items.clear()
            self._changed.notify_all()

    def release(self) -> None:
        """Give the descriptor back, after `close`."""
        os.close(self._writer)
        os.close(self._reader)

    def _has_room(self, key: Hashable) -> bool:
        return key in self._items or len(self._items) < self._capacity


EVERY_CAPACITY = 4
EVERY_QUEUE = 2
NEWEST_QUEUE = 4
DRAIN = 64
CAMERA_IDLE_S = 10.0


class FromCamera(Protocol):
    """Anything that names the camera it comes from."""

    @property
    def camera(self) -> str: ...


M = TypeVar("M", bound=FromCamera)
Unpack = Callable[[Sequence[memoryview]], M]


class Receiver(Listener, Generic[M]):
    """Owns SUB (`newest`) or PULL (`every`) sockets and the thread that empties them into an inbox.

    `newest` keeps the newest message of each of at most `max_cameras` cameras; `every` keeps all in order and
    stops reading while EVERY_CAPACITY wait, which in the end blocks the publisher. A camera that was silent for
    CAMERA_IDLE_S gives its place up to another. Without `topics` all that begin with `root` are taken.
    Raises TransportError for a malformed endpoint.
    """

    root = b""

    def __init__(
        self,
        endpoints: Sequence[str],
        delivery: Delivery,
        topics: Sequence[bytes],
        unpack: Unpack[M],
        max_bytes: int,
        max_cameras: int,
    ) -> None:
        self._newest = delivery == "newest"
        self._topics = frozenset(topics)
        self._unpack = unpack
        self._max_cameras = max_cameras
        self._heard_s: dict[str, float] = {}  # by camera, the one not heard of for longest first
        self._numbers = itertools.count()
        self._rejected = 0
        self._last_error: str | None = None
        super().__init__(self._connect(endpoints, max_bytes), DRAIN if self._newest else 1)
        self._inbox: Inbox[tuple[M, int]] = Inbox(max_cameras if self._newest else EVERY_CAPACITY)
        self._listen()

    @property
    def rejected(self) -> int:
        """Messages dropped so far: malformed, or of a camera beyond `max_cameras`."""
        return self._rejected

    @property
    def last_error(self) -> str | None:
        """Why the last of them was dropped."""
        return self._last_error

    @property
    def wakeup(self) -> int:
        """A file descriptor that is readable exactly while a message waits."""
        return self._inbox.fileno()

    def close(self) -> None:
        """Stop the thread and close its sockets; whoever waits in `take` gets None. Idempotent."""
        if not self._closing:
            super().close()
            self._inbox.release()

    def _take(self, timeout_ms: int | None) -> tuple[M, int] | None:
        """The next message and its arrival (`time.time_ns`), or None when none came in time.

        Raises TransportError when the thread has failed.
        """
        taken = self._inbox.take(timeout_ms)
        if taken is None:
            self._check()
        return taken

    def _connect(self, endpoints: Sequence[str], max_bytes: int) -> list[ReconnectingSocket]:
        if not endpoints:
            raise TransportError("expected at least one endpoint to connect to, found none")
        return connect_all((self._open(max_bytes), endpoint) for endpoint in endpoints)

    def _open(self, max_bytes: int) -> zmq.Socket:
        if not self._newest:
            return open_socket(zmq.PULL, EVERY_QUEUE, max_bytes, heartbeats=False)
        socket = open_socket(zmq.SUB, NEWEST_QUEUE, max_bytes)
        for topic in self._topics or (self.root,):
            socket.setsockopt(zmq.SUBSCRIBE, topic)
        return socket

    def _wake(self) -> None:
        self._inbox.close()

    def _accept(self, parts: list[memoryview], received_ns: int) -> None:
        if self._topics and parts[0] not in self._topics:
            return  # a subscription also matches longer topics, and PULL has none
        try:
            message = self._unpack(parts)
            self._admit(message.camera)
        except Exception as error:  # whatever a message does to its unpacking, this thread outlives it
            self._last_error = str(error) or repr(error)
            self._rejected += 1
            return
        key: Hashable = message.camera if self._newest else next(self._numbers)
        while not self._inbox.put(key, (message, received_ns), WATCH_MS) and not self._closing:
            self._update_links()

    def _admit(self, camera: str) -> None:
        now_s = time.monotonic()
        if self._heard_s.pop(camera, None) is None and len(self._heard_s) >= self._max_cameras:
            silent, heard_s = next(iter(self._heard_s.items()))
            if now_s - heard_s < CAMERA_IDLE_S:
                raise WireError(f"expected at most {self._max_cameras} cameras, found another: {camera}")
            del self._heard_s[silent]
            self._inbox.discard(silent)
        self._heard_s[camera] = now_s
