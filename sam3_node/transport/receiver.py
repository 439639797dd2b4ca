"""The camera names of a receiver: each is bound to the endpoint that it was first heard from.

The base of subscribers: a thread drains the sockets into a bounded inbox, so that messages are never stale.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import zmq

from ..errors import TransportError, WireError
from ..types import Delivery
from .security import ClientKeys, Socket
from .sockets import UPDATE_MS, Listener, ReconnectingSocket, connect_all, open_socket, open_subscriber

CAMERA_IDLE_S = 10.0
REFUSAL_S = 0.05
"""Time for which an endpoint's other new names are refused, too, when all places are taken: a look costs time."""

log = logging.getLogger(__name__)


def choose_replaced(cameras: Mapping[str, tuple[str, bool]], endpoint: str, share: int) -> str | None:
    """Return the camera that loses its place to a new one of `endpoint`, or None if the new one has to wait.

    `cameras` maps each camera to its endpoint and whether it is idle, the longest silent first. An idle camera gives
    way to its own endpoint, and to any endpoint if its own holds more than `share` places. An endpoint that holds less
    than `share` also takes the place of an active camera of one that holds more, and of any idle camera.
    """
    counts = Counter(owner for owner, _ in cameras.values())
    below = counts[endpoint] < share
    idle_own, active, idle_any = [], [], []
    for camera, (owner, idle) in cameras.items():
        above = counts[owner] > share
        if idle and (owner == endpoint or above):
            idle_own.append(camera)
        elif below and above:
            active.append(camera)
        elif below and idle:
            idle_any.append(camera)
    return next(iter(idle_own + active + idle_any), None)


@dataclass(slots=True)
class _Binding:
    source: ReconnectingSocket
    handshakes: int
    heard_s: float

    @property
    def idle(self) -> bool:
        """True if the camera has been silent for CAMERA_IDLE_S."""
        return time.monotonic() - self.heard_s >= CAMERA_IDLE_S

    @property
    def free(self) -> bool:
        """True if another endpoint may have the name: idle, and the connection that it came over has ended."""
        return self.idle and not (self.source.alive and self.source.handshakes == self.handshakes)


class CameraNames:
    """At most `capacity` names of cameras, bound to their endpoints.

    While the connection lasts that a name came over, no other endpoint gets the name. When all places are taken,
    `choose_replaced` finds a place, with an equal share for each endpoint. So an endpoint that sends many names takes
    nothing from the others.
    """

    def __init__(self, capacity: int, endpoints: int) -> None:
        self.capacity = max(capacity, endpoints)
        self._share = self.capacity // endpoints
        self._bindings: OrderedDict[str, _Binding] = OrderedDict()  # the longest silent first
        self._warned: set[tuple[str, str]] = set()
        self._refused_until_s: dict[str, float] = {}  # by endpoint

    def admit(self, camera: str, source: ReconnectingSocket) -> str | None:
        """Record that `camera` was heard from `source`. Return the name that lost its place to it, or None.

        Raises WireError for a name of another endpoint, one that the endpoint's key may not send, and one beyond
        `capacity`.
        """
        if source.keys is not None and not source.keys.may_send(camera):
            raise self._refuse(camera, source, f"expected a camera of its key {_describe_key(source.keys)}")
        bound = self._bindings.get(camera)
        if bound is not None and bound.source is not source and not bound.free:
            expected = (
                f"expected each camera name at one endpoint, and {bound.source.endpoint} has sent it first; give each"
                " camera a name of its own"
            )
            raise self._refuse(camera, source, expected)
        replaced = None
        if bound is None and len(self._bindings) >= self.capacity:
            replaced = self._choose_replaced(source)
            if replaced is None:
                raise WireError(f"expected at most {self.capacity} cameras, found another: {camera}")
            del self._bindings[replaced]
        self._bindings[camera] = _Binding(source, source.handshakes, time.monotonic())
        self._bindings.move_to_end(camera)  # never absent for a moment: `silent_s` is called by other threads
        return replaced

    def silent_s(self, camera: str) -> float | None:
        """Return the seconds since the camera was last heard; None for a name that has no place."""
        binding = self._bindings.get(camera)
        return None if binding is None else time.monotonic() - binding.heard_s

    def _choose_replaced(self, source: ReconnectingSocket) -> str | None:
        if time.monotonic() < self._refused_until_s.get(source.endpoint, 0.0):
            return None
        bindings = {
            camera: (binding.source.endpoint, binding.idle) for camera, binding in self._bindings.items()
        }
        replaced = choose_replaced(bindings, source.endpoint, self._share)
        if replaced is None:
            self._refused_until_s[source.endpoint] = time.monotonic() + REFUSAL_S
        return replaced

    def _refuse(self, camera: str, source: ReconnectingSocket, expected: str) -> WireError:
        message = f"camera {camera} of {source.endpoint} is refused: {expected}"
        if (camera, source.endpoint) not in self._warned and len(self._warned) < self.capacity:
            self._warned.add((camera, source.endpoint))
            log.warning("%s", message)
        return WireError(message)


def _describe_key(keys: ClientKeys) -> str:
    return f"{keys.server}, which may send {', '.join(keys.server.cameras) or 'none'}"


EVERY_CAPACITY = 4
EVERY_QUEUE = 2
MAX_PER_TURN = 64
MAX_TOPIC_BYTES = 256  # of a topic are compared; no valid one is longer
MAX_TOPICS = 64

T = TypeVar("T")


class Inbox(Generic[T]):
    """A queue of at most `capacity` items with keys. The key that was taken longest ago is next.

    An item replaces the waiting item of the same key: with one key per camera, each camera has one slot. A new key
    counts as taken when it arrives, so keys that are taken once only keep their order. An item of a new key waits for
    a free slot. A file descriptor for polling is readable while items wait.

    This is earliest deadline first: with an equal share for each camera, the deadline of a waiting frame is the start
    of its camera's last step plus the time of one turn of all cameras. The latter is the same for all, so the order of
    the last starts is the order of the deadlines.

    Keys may belong to groups. Groups take turns in the same way, and the keys of a group share its turns: with one
    group per endpoint, a camera process that sends many names takes one turn in each round.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._items: dict[Hashable, T] = {}
        self._turns: OrderedDict[Hashable, None] = (
            OrderedDict()
        )  # keys, the one that was taken longest ago first
        self._groups: dict[Hashable, str] = {}  # of the keys that wait
        self._group_turns: OrderedDict[str, None] = OrderedDict()  # in the same order
        self._changed = threading.Condition()
        self._closed = False
        self._reader, self._writer = os.pipe()

    def put(self, key: Hashable, item: T, timeout_ms: int, group: str = "") -> bool:
        """Store an item. Return False when no slot becomes free in time, or when the inbox is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._has_slot(key), timeout_ms / 1000)
            if self._closed or not self._has_slot(key):
                return False
            if not self._items:
                os.write(self._writer, b"\0")
            self._items[key] = item
            self._turns.setdefault(key)
            self._groups[key] = group
            self._group_turns.setdefault(group)
            self._changed.notify_all()
            return True

    def take(self, timeout_ms: int | None) -> T | None:
        """Return the next item. Return None when none arrives in time (None: no limit), or when the inbox is closed."""
        timeout_s = None if timeout_ms is None else timeout_ms / 1000
        with self._changed:
            self._changed.wait_for(lambda: self._closed or bool(self._items), timeout_s)
            if self._closed or not self._items:
                return None
            item = self._pop_next()
            if not self._items:
                os.read(self._reader, 1)
            self._changed.notify_all()
            return item

    def peek(self, accepts: Callable[[T], bool], timeout_ms: int) -> T | None:
        """Return the item that `take` would return now, and leave it. Return None while there is none that fits."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._has_next(accepts), timeout_ms / 1000)
            return self._items[self._find_next()] if self._has_next(accepts) else None

    def discard(self, key: Hashable) -> None:
        """Forget a key, and remove its item if there is one."""
        with self._changed:
            self._turns.pop(key, None)
            self._groups.pop(key, None)
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
            self._groups.clear()
            self._changed.notify_all()

    def release(self) -> None:
        """Close the descriptor. Call it after `close`."""
        os.close(self._writer)
        os.close(self._reader)

    def _has_next(self, accepts: Callable[[T], bool]) -> bool:
        return bool(self._items) and accepts(self._items[self._find_next()])

    def _find_next(self) -> Hashable:
        waiting = set(self._groups.values())
        group = next(group for group in self._group_turns if group in waiting)
        return next(key for key in self._turns if self._groups.get(key) == group)

    def _pop_next(self) -> T:
        key = self._find_next()
        self._turns.move_to_end(key)
        item = self._items.pop(key)
        self._group_turns.move_to_end(self._groups.pop(key))
        if len(self._turns) > self._capacity:  # forget the key that was taken longest ago and does not wait
            del self._turns[next(key for key in self._turns if key not in self._items)]
        return item

    def _has_slot(self, key: Hashable) -> bool:
        return key in self._items or len(self._items) < self._capacity


M = TypeVar("M")
Unpack = Callable[[Sequence[memoryview]], M]


class UnpackingListener(Listener, Generic[M]):
    """Base of receivers that unpack messages in their thread. Malformed ones are dropped and counted.

    Messages of other topics than `topics` are ignored; all are accepted without it.
    """

    def __init__(
        self,
        sockets: Sequence[ReconnectingSocket],
        per_turn: int,
        topics: Sequence[bytes],
        unpack: Unpack[M],
    ) -> None:
        self._topics = frozenset(topics)
        self._unpack = unpack
        self._rejected = 0
        self._last_error: str | None = None
        self._unwanted: Counter[bytes] = Counter()
        """Messages that were dropped, by topic."""
        super().__init__(sockets, per_turn)

    @property
    def rejected(self) -> int:
        """Number of messages that were dropped: malformed, or not admitted."""
        return self._rejected

    @property
    def last_error(self) -> str | None:
        """Reason for which the last message was dropped."""
        return self._last_error

    def _accept(self, parts: list[memoryview], received_ns: int, source: ReconnectingSocket) -> None:
        if self._topics and parts[0] not in self._topics:
            self._unwanted[bytes(parts[0][:MAX_TOPIC_BYTES])] += 1
            return  # a subscription also matches longer topics, and PULL sockets do not filter
        try:
            message = self._unpack(parts)
            self._admit(message, source)
        except Exception as error:  # no message may end this thread, however unpacking fails
            self._last_error = str(error) or repr(error)
            self._rejected += 1
            self._unwanted[bytes(parts[0][:MAX_TOPIC_BYTES])] += 1
            return
        finally:
            if len(self._unwanted) > MAX_TOPICS:
                self._unwanted.clear()
        self._store(message, received_ns, source)

    def _admit(self, message: M, source: ReconnectingSocket) -> None:
        """Raise WireError for a message that is not admitted."""

    def _store(self, message: M, received_ns: int, source: ReconnectingSocket) -> None:
        """Keep a message for its taker."""
        raise NotImplementedError


class FromCamera(Protocol):
    """A message that names its camera."""

    @property
    def camera(self) -> str: ...


C = TypeVar("C", bound=FromCamera)


class Receiver(UnpackingListener[C]):
    """Base of subscribers: a thread drains SUB (`newest`) or PULL (`every`) sockets into an inbox.

    `newest` keeps the newest message of each of at most `max_cameras` cameras. Of the messages of a turn it unpacks the
    newest of each topic only, so that older ones of a flooding camera cost no more than their reading. `every` keeps
    all messages in order, and stops reading while EVERY_CAPACITY of them wait, which finally blocks the publisher.
    CameraNames says which names are received, and from which endpoint. `endpoints` come with their keys. Without
    `topics`, all topics that start with `root` are accepted. Raises TransportError for a malformed endpoint.
    """

    root = b""

    def __init__(
        self,
        endpoints: Sequence[tuple[str, ClientKeys | None]],
        delivery: Delivery,
        topics: Sequence[bytes],
        unpack: Unpack[C],
        max_bytes: int,
        max_cameras: int,
    ) -> None:
        self._newest = delivery == "newest"
        self._max_cameras = max_cameras
        self._names = CameraNames(max_cameras, max(1, len(endpoints)))
        self._numbers = itertools.count()
        sockets = self._connect(endpoints, topics, max_bytes)
        super().__init__(sockets, MAX_PER_TURN if self._newest else 1, topics, unpack)
        self._inbox: Inbox[tuple[C, int, str]] = Inbox(
            self._names.capacity if self._newest else EVERY_CAPACITY
        )
        self._listen()

    @property
    def wakeup(self) -> int:
        """File descriptor that is readable exactly while a message waits."""
        self._require_process()
        return self._inbox.fileno()

    def silent_s(self, camera: str) -> float | None:
        """Return the seconds since the last message of a camera arrived; None if none has."""
        return self._names.silent_s(camera)

    def close(self) -> None:
        """Stop the thread and close its sockets. Calls that wait in `take` return None. Idempotent."""
        if not self._closing:
            super().close()
            if not self._is_forked:
                self._inbox.release()

    def _take(self, timeout_ms: int | None) -> tuple[C, int, str] | None:
        """Return the next message, its arrival (`time.time_ns`) and endpoint, or None when none arrives in time.

        Raises TransportError when the thread has failed.
        """
        self._require_process()
        taken = self._inbox.take(timeout_ms)
        if taken is None:
            self._raise_failure()
        return taken

    def _connect(
        self, endpoints: Sequence[tuple[str, ClientKeys | None]], topics: Sequence[bytes], max_bytes: int
    ) -> list[ReconnectingSocket]:
        if not endpoints:
            raise TransportError("expected at least one endpoint to connect to, found none")
        return connect_all((self._open(topics, max_bytes), *endpoint) for endpoint in endpoints)

    def _open(self, topics: Sequence[bytes], max_bytes: int) -> Socket:
        if not self._newest:
            return open_socket(zmq.PULL, EVERY_QUEUE, max_bytes, lossless=True)
        return open_subscriber(topics or (self.root,), max_bytes)

    def _wake(self) -> None:
        self._inbox.close()

    def _drain(self, source: ReconnectingSocket) -> None:
        newest: dict[bytes, tuple[list[memoryview], int]] = {}  # the topic that came last is the last
        for parts, received_ns in self._read(source):
            topic = bytes(parts[0][:MAX_TOPIC_BYTES])
            newest.pop(topic, None)
            newest[topic] = parts, received_ns
        for parts, received_ns in newest.values():
            self._accept(parts, received_ns, source)

    def _admit(self, message: C, source: ReconnectingSocket) -> None:
        replaced = self._names.admit(message.camera, source)
        if replaced is not None:
            self._inbox.discard(replaced)

    def _store(self, message: C, received_ns: int, source: ReconnectingSocket) -> None:
        key: Hashable = message.camera if self._newest else next(self._numbers)
        group = source.endpoint if self._newest else ""
        item = (message, received_ns, source.endpoint)
        while not self._inbox.put(key, item, UPDATE_MS, group) and not self._closing:
            self._update_sockets()
