"""The base of subscribers: a thread drains the sockets into a bounded inbox, so that messages are never stale."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, Protocol, TypeVar

import zmq

from ..errors import TransportError, WireError
from ..types import Delivery
from .connection import UPDATE_MS, Listener, ReconnectingSocket, connect_all
from .sockets import Socket, open_socket

EVERY_CAPACITY = 4
EVERY_QUEUE = 2
NEWEST_QUEUE = 4
MAX_PER_TURN = 64
CAMERA_IDLE_S = 10.0

T = TypeVar("T")


class Inbox(Generic[T]):
    """A queue of at most `capacity` items with keys, in the order in which the keys arrived.

    An item replaces the waiting item of the same key and keeps its position: with one key per camera, each camera has
    one slot, and all cameras take turns. An item of a new key waits for a free slot. A file descriptor for polling is
    readable while items wait.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: dict[Hashable, T] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._reader, self._writer = os.pipe()

    def put(self, key: Hashable, item: T, timeout_ms: int) -> bool:
        """Store an item. Return False when no slot becomes free in time, or when the inbox is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._has_slot(key), timeout_ms / 1000)
            if self._closed or not self._has_slot(key):
                return False
            if not self._items:
                os.write(self._writer, b"\0")
            self._items[key] = item
            self._changed.notify_all()
            return True

    def take(self, timeout_ms: int | None) -> T | None:
        """Return the next item. Return None when none arrives in time (None: no limit), or when the inbox is closed."""
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
        """Remove the item of a key, if there is one."""
        with self._changed:
            if self._items.pop(key, None) is not None:
                if not self._items and not self._closed:
                    os.read(self._reader, 1)
                self._changed.notify_all()

    def fileno(self) -> int:
        """Return a descriptor that is readable exactly while an item waits, and after `close`."""
        return self._reader

    def close(self) -> None:
        """Remove all items, and wake all waiting threads. Idempotent."""
        with self._changed:
            self._closed = True
            if not self._items:
                os.write(self._writer, b"\0")
            self._items.clear()
            self._changed.notify_all()

    def release(self) -> None:
        """Close the descriptor. Call it after `close`."""
        os.close(self._writer)
        os.close(self._reader)

    def _has_slot(self, key: Hashable) -> bool:
        return key in self._items or len(self._items) < self._capacity


class FromCamera(Protocol):
    """A message that names its camera."""

    @property
    def camera(self) -> str: ...


M = TypeVar("M", bound=FromCamera)
Unpack = Callable[[Sequence[memoryview]], M]


class Receiver(Listener, Generic[M]):
    """Base of subscribers: a thread drains SUB (`newest`) or PULL (`every`) sockets into an inbox.

    `newest` keeps the newest message of each of at most `max_cameras` cameras. `every` keeps all messages in order,
    and stops reading while EVERY_CAPACITY of them wait, which finally blocks the publisher. A camera that was silent
    for CAMERA_IDLE_S frees its slot for another. Without `topics`, all topics that start with `root` are accepted.
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
        self._last_heard_s: OrderedDict[str, float] = OrderedDict()  # by camera, the longest silent first
        self._numbers = itertools.count()
        self._rejected = 0
        self._last_error: str | None = None
        super().__init__(self._connect(endpoints, max_bytes), MAX_PER_TURN if self._newest else 1)
        self._inbox: Inbox[tuple[M, int]] = Inbox(max_cameras if self._newest else EVERY_CAPACITY)
        self._listen()

    @property
    def rejected(self) -> int:
        """Number of messages dropped because they were malformed, or of a camera beyond `max_cameras`."""
        return self._rejected

    @property
    def last_error(self) -> str | None:
        """Reason for which the last message was dropped."""
        return self._last_error

    @property
    def wakeup(self) -> int:
        """File descriptor that is readable exactly while a message waits."""
        return self._inbox.fileno()

    def silent_s(self, camera: str) -> float | None:
        """Return the seconds since the last message of a camera arrived; None if none has."""
        heard_s = self._last_heard_s.get(camera)
        return None if heard_s is None else time.monotonic() - heard_s

    def close(self) -> None:
        """Stop the thread and close its sockets. Calls that wait in `take` return None. Idempotent."""
        if not self._closing:
            super().close()
            self._inbox.release()

    def _take(self, timeout_ms: int | None) -> tuple[M, int] | None:
        """Return the next message and its arrival (`time.time_ns`), or None when none arrives in time.

        Raises TransportError when the thread has failed.
        """
        taken = self._inbox.take(timeout_ms)
        if taken is None:
            self._raise_failure()
        return taken

    def _connect(self, endpoints: Sequence[str], max_bytes: int) -> list[ReconnectingSocket]:
        if not endpoints:
            raise TransportError("expected at least one endpoint to connect to, found none")
        return connect_all((self._open(max_bytes), endpoint) for endpoint in endpoints)

    def _open(self, max_bytes: int) -> Socket:
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
            return  # a subscription also matches longer topics, and PULL sockets do not filter
        try:
            message = self._unpack(parts)
            self._admit(message.camera)
        except Exception as error:  # no message may end this thread, however unpacking fails
            self._last_error = str(error) or repr(error)
            self._rejected += 1
            return
        key: Hashable = message.camera if self._newest else next(self._numbers)
        while not self._inbox.put(key, (message, received_ns), UPDATE_MS) and not self._closing:
            self._update_sockets()

    def _admit(self, camera: str) -> None:
        now_s = time.monotonic()
        if camera not in self._last_heard_s and len(self._last_heard_s) >= self._max_cameras:
            silent, heard_s = next(iter(self._last_heard_s.items()))
            if now_s - heard_s < CAMERA_IDLE_S:
                raise WireError(f"expected at most {self._max_cameras} cameras, found another: {camera}")
            del self._last_heard_s[silent]
            self._inbox.discard(silent)
        self._last_heard_s[camera] = now_s
        self._last_heard_s.move_to_end(camera)
