"""Receive messages: a thread drains the sockets, unpacks and admits each message, and stores it until it is taken.

`CameraReceiver` holds frames and masks: bounded, fair to cameras and endpoints, and never stale.
"""

import itertools
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import zmq

from ..errors import TransportError, WireError
from ..schema.replies import RefusedCamera
from ..types import Delivery, Frame, MaskFrame
from ..wire import BEAT_TOPIC, find_camera
from .primitives import WakePipe
from .security import ClientKeys, Socket
from .sockets import (
    UPDATE_MS,
    ReconnectingSocket,
    SocketThread,
    connect_all,
    open_socket,
    open_subscriber,
    receive_parts,
)

CAMERA_IDLE_S = 10.0
"""Seconds of silence after which a camera counts as idle, and may lose its place."""
REFUSAL_S = 0.05
"""Seconds for which further new names of an endpoint are refused unseen, once all places are taken."""
EVERY_CAPACITY = 4
"""Messages that a lossless receiver stores. It stops reading while so many wait."""
EVERY_QUEUE = 2
"""Messages that libzmq queues for a lossless socket, on either side. Each adds to the delay of the newest."""
MAX_PER_TURN = 64
"""Messages that are read from one socket before the next socket has its turn."""
MAX_REASON_CHARACTERS = 200
"""Characters of the reason for a refusal that are kept."""
MAX_TOPIC_BYTES = 256
"""Bytes of a topic that are compared; no valid one is longer."""
MAX_REFUSED = 64
"""Cameras whose refused messages are counted. A peer that invents names must not fill the memory."""
LOG_REFUSED_S = 10.0
"""Seconds between two log lines about refused messages. Their counts go on."""
MAX_TOPICS = 64
"""Topics of unwanted messages that are counted. A peer that invents topics must not fill the memory."""

M = TypeVar("M")
log = logging.getLogger(__name__)


class Message(NamedTuple):
    """Parts of a message, and its arrival (`time.time_ns`)."""

    parts: list[memoryview]
    received_ns: int


class Receiver(SocketThread, Generic[M]):
    """Drains connected sockets in a thread. A subclass says how to `_unpack` and `_store` a message.

    With `topics`, messages of other topics are ignored. A message for which `_unpack` or `_admit` raises is rejected
    and counted. The sockets take turns of at most `per_turn` messages, so that a flood from one peer cannot starve the
    others. A subclass makes what its methods use before it calls `__init__`, which starts the thread.
    """

    _problem = "the receiver stopped"

    def __init__(
        self,
        sockets: Sequence[ReconnectingSocket],
        topics: Iterable[bytes] = (),
        per_turn: int = MAX_PER_TURN,
    ) -> None:
        self.rejected = 0
        """Number of messages that were malformed, or not admitted."""
        self.last_error: str | None = None
        """Reason for which the last message was rejected."""
        self._unwanted: Counter[bytes] = Counter()
        """Messages that were ignored or rejected, by topic."""
        self._sockets = sockets
        self._topics = frozenset(topics)
        self._per_turn = per_turn
        self._updated_s = time.monotonic()
        self._start(f"receive {sockets[0].endpoint}")

    @property
    def connected(self) -> tuple[str, ...]:
        """Endpoints that have a connected peer now."""
        is_open = not (self._closing or self._is_forked)
        return tuple(socket.endpoint for socket in self._sockets if socket.alive and is_open)

    @property
    def refusals(self) -> tuple[str, ...]:
        """Reasons for which endpoints cannot be used: a key is refused, missing or revoked."""
        return tuple(socket.refusal for socket in self._sockets if socket.refusal is not None)

    def _unpack(self, parts: list[memoryview]) -> M:
        """Read a message."""
        raise NotImplementedError

    def _admit(self, message: M, source: ReconnectingSocket) -> M | None:
        """Return the message to store; None if there is nothing to store. Raises WireError to reject a message."""
        return message

    def _select(self, messages: Iterator[Message]) -> Iterable[Message]:
        """Return those messages of one turn that are to be unpacked."""
        return messages

    def _store(self, message: M, received_ns: int, source: ReconnectingSocket) -> bool:
        """Keep a message. Return False if there is no space: the caller stops reading, and tries again."""
        raise NotImplementedError

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._waker.fileno(), zmq.POLLIN)
        for source in self._sockets:
            poller.register(source.socket, zmq.POLLIN)
            poller.register(source.monitor, zmq.POLLIN)
        try:
            # one round: a turn for each socket, then a look at the connections, at the latest after UPDATE_MS
            while not self._closing:
                poller.poll(UPDATE_MS)
                for source in self._sockets:
                    for parts, received_ns in self._select(self._read(source)):
                        self._accept(parts, received_ns, source)
                self._update_sockets()
        finally:
            # the thread owns the sockets: no other thread may close them
            for source in self._sockets:
                source.close()

    def _read(self, source: ReconnectingSocket) -> Iterator[Message]:
        """Yield the waiting messages, at most `per_turn`, without beats."""
        for _ in range(self._per_turn):
            parts = receive_parts(source.socket)
            if parts is None or self._closing:
                return
            # any message shows that the peer lives; a beat shows that it will go on to show it
            is_beat = len(parts) == 1 and parts[0] == BEAT_TOPIC
            source.hear(is_beat)
            if not is_beat:
                yield Message(parts, time.time_ns())

    def _accept(self, parts: list[memoryview], received_ns: int, source: ReconnectingSocket) -> None:
        if self._topics and parts[0] not in self._topics:
            # a subscription also matches longer topics, and PULL sockets do not filter
            self._count_unwanted(parts)
            return
        try:
            message = self._admit(self._unpack(parts), source)
        except Exception as error:  # no message may end this thread, however unpacking fails
            self.last_error = str(error) or repr(error)
            self.rejected += 1
            self._count_unwanted(parts)
            self._note_refusal(parts, source, self.last_error)
            return
        if message is None:
            return
        # a lossless store is full until its owner takes a message; the connections need attention meanwhile
        while not self._store(message, received_ns, source) and not self._closing:
            self._update_sockets()

    def _note_refusal(self, parts: list[memoryview], source: ReconnectingSocket, reason: str) -> None:
        """Note why a message was rejected."""

    def _count_unwanted(self, parts: list[memoryview]) -> None:
        self._unwanted[bytes(parts[0][:MAX_TOPIC_BYTES])] += 1
        if len(self._unwanted) > MAX_TOPICS:
            self._unwanted.clear()

    def _update_sockets(self) -> None:
        now_s = time.monotonic()
        turn_s = now_s - self._updated_s
        self._updated_s = now_s
        for source in self._sockets:
            source.update(turn_s)


C = TypeVar("C", Frame, MaskFrame)


@dataclass(frozen=True, slots=True)
class RefusedFrames:
    """The messages of one camera that were rejected: a camera that sends, and is not received."""

    frames: int
    last_error: str
    endpoint: str
    last_s: float
    """time of the last one (`time.monotonic`)"""

    def describe(self) -> RefusedCamera:
        """Return them as the node's status has them."""
        return RefusedCamera(
            frames=self.frames,
            last_error=self.last_error,
            endpoint=self.endpoint,
            silent_s=round(time.monotonic() - self.last_s, 3),
        )


class StoredMessage(NamedTuple, Generic[C]):
    """A message that waits to be taken, its arrival (`time.time_ns`) and its endpoint."""

    message: C
    received_ns: int
    endpoint: str


class CameraReceiver(Receiver[C]):
    """Receives messages of cameras, and holds them until they are taken.

    `newest` keeps the newest message of each of at most `max_cameras` cameras. It unpacks only the newest message of
    each topic in a turn, so that a flooding camera costs no more than the reading of its older messages; of
    `_whole` topics it unpacks all. `every` keeps all messages in order, and stops reading while EVERY_CAPACITY of them
    wait, which finally blocks the publisher.
    `peers` are the endpoints, with the keys of each. Without `topics`, all that begin with `root` are received.
    Live sockets subscribe to `also` as well, whose messages a subclass turns into others.
    Raises TransportError for a malformed endpoint.
    """

    def __init__(
        self,
        peers: Sequence[tuple[str, ClientKeys | None]],
        delivery: Delivery,
        max_cameras: int,
        max_bytes: int,
        topics: Sequence[bytes],
        root: bytes,
        also: Sequence[bytes] = (),
    ) -> None:
        if not peers:
            raise TransportError("expected at least one endpoint to connect to, found none")
        self._is_live = delivery == "newest"
        capacity = EVERY_CAPACITY
        per_turn = 1
        if self._is_live:
            capacity = max_cameras
            per_turn = MAX_PER_TURN

        def open_one() -> Socket:
            if self._is_live:
                return open_subscriber([*(topics or [root]), *also], max_bytes)
            return open_socket(zmq.PULL, EVERY_QUEUE, max_bytes)

        sockets = connect_all((open_one(), endpoint, keys) for endpoint, keys in peers)
        self.names = CameraNames(max_cameras, len(peers))
        """The cameras that are received, and the endpoint of each."""
        self._whole: dict[bytes, None] = {}
        """Topics of which each message is needed."""
        self._refused: dict[str, RefusedFrames] = {}
        self._next_log_s = 0.0
        self._numbers = itertools.count()
        self._queue: Inbox[StoredMessage[C]] = Inbox(capacity)
        self.wakeup = self._queue.fileno()
        """File descriptor that is readable exactly while a message waits."""
        super().__init__(sockets, topics, per_turn)

    @property
    def refused(self) -> dict[str, RefusedFrames]:
        """Rejected frames by camera. Those of a topic that names no camera have the name "". Any thread may ask."""
        return dict(self._refused)

    def _note_refusal(self, parts: list[memoryview], source: ReconnectingSocket, reason: str) -> None:
        camera = find_camera(parts[0]) or ""
        before = self._refused.get(camera)
        if before is None and len(self._refused) >= MAX_REFUSED:
            return
        now_s = time.monotonic()
        count = before.frames + 1 if before is not None else 1
        text = reason[:MAX_REASON_CHARACTERS].encode("utf-8", "backslashreplace").decode()
        self._refused[camera] = RefusedFrames(count, text, source.endpoint, now_s)
        # one line now and then: a camera sends 30 a second, and a flood of names would fill the log
        if now_s >= self._next_log_s and not self.names.has_told(camera, source.endpoint):
            self._next_log_s = now_s + LOG_REFUSED_S
            name = camera or "(no camera's topic)"
            log.warning(
                "camera %s at %s: %d messages refused, the last: %s", name, source.endpoint, count, text
            )

    def _take(self, timeout_ms: int | None) -> StoredMessage[C] | None:
        taken = self._queue.take(timeout_ms)
        if taken is None:
            # no message: because none came, or because the thread has failed
            self.check()
        return taken

    def _admit(self, message: C, source: ReconnectingSocket) -> C | None:
        """Give the message's camera a place. Raises WireError if it gets none."""
        replaced = self.names.admit(message.camera, source)
        if replaced is not None:
            self._queue.discard(replaced)
        return message

    def _store(self, message: C, received_ns: int, source: ReconnectingSocket) -> bool:
        """Keep a message. Return False if no slot becomes free in UPDATE_MS."""
        item = StoredMessage(message, received_ns, source.endpoint)
        if self._is_live:
            # live: one slot for each camera; lossless: a key of its own for each message, so that none is replaced
            return self._queue.put(message.camera, item, UPDATE_MS, source.endpoint)
        return self._queue.put(next(self._numbers), item, UPDATE_MS)

    def _end(self) -> None:
        self._queue.close()

    def _release(self) -> None:
        self._queue.release()

    def _select(self, messages: Iterator[Message]) -> Iterable[Message]:
        """Return the newest message of each topic, the topic that came last at the end; of `_whole` topics, all."""
        newest: dict[Hashable, Message] = {}
        for number, message in enumerate(messages):
            topic = bytes(message.parts[0][:MAX_TOPIC_BYTES])
            key: Hashable = (topic, number) if topic in self._whole else topic
            # removed first, so that it goes to the end of the dict
            newest.pop(key, None)
            newest[key] = message
        return newest.values()


class Inbox(Generic[M]):
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
        self._items: dict[Hashable, M] = {}
        self._turns: OrderedDict[Hashable, None] = OrderedDict()  # keys, the longest not taken first
        self._groups: dict[Hashable, str] = {}  # of the keys that wait
        self._group_turns: OrderedDict[str, None] = OrderedDict()  # in the same order
        self._changed = threading.Condition()
        self._closed = False
        self._pipe = WakePipe()

    def put(self, key: Hashable, item: M, timeout_ms: int, group: str = "") -> bool:
        """Store an item. Return False when no slot becomes free in time, or when the inbox is closed."""
        with self._changed:
            # a waiting item of the same key is replaced at once; only a new key may have to wait
            self._changed.wait_for(lambda: self._closed or self._has_slot(key), timeout_ms / 1000)
            if self._closed or not self._has_slot(key):
                return False
            if not self._items:
                # the pipe is written when the first item comes and read when the last one goes, never for each
                self._pipe.wake()
            self._items[key] = item
            self._turns.setdefault(key)
            self._groups[key] = group
            self._group_turns.setdefault(group)
            self._changed.notify_all()
            return True

    def take(self, timeout_ms: int | None) -> M | None:
        """Return the next item. Return None when none arrives in time (None: no limit), or when the inbox is closed."""
        timeout_s = None if timeout_ms is None else timeout_ms / 1000
        with self._changed:
            if not self._items:
                self._changed.wait_for(lambda: self._closed or bool(self._items), timeout_s)
            if not self._items:  # also once it is closed
                return None
            key = self._find_next()
            item = self._items.pop(key)
            # this key and its group are the last to have had their turn now
            self._turns.move_to_end(key)
            self._group_turns.move_to_end(self._groups.pop(key))
            if len(self._turns) > self._capacity:
                # forget the key that was taken longest ago and does not wait
                del self._turns[next(key for key in self._turns if key not in self._items)]
            if not self._items:
                self._pipe.clear()
            self._changed.notify_all()
            return item

    def peek(self, accepts: Callable[[M], bool], timeout_ms: int, in_turn_only: bool = True) -> M | None:
        """Return the item that `take` would return now, and leave it. Return None while there is none that fits.

        Unless `in_turn_only`, any item that fits will do.
        """

        def find() -> M | None:
            if not self._items:
                return None
            if not in_turn_only:
                return next((item for item in self._items.values() if accepts(item)), None)
            item = self._items[self._find_next()]
            return item if accepts(item) else None

        with self._changed:
            self._changed.wait_for(lambda: self._closed or find() is not None, timeout_ms / 1000)
            return find()

    def discard(self, key: Hashable) -> None:
        """Forget a key, and remove its item if there is one."""
        with self._changed:
            self._turns.pop(key, None)
            self._groups.pop(key, None)
            if self._items.pop(key, None) is not None:
                if not self._items and not self._closed:
                    self._pipe.clear()
                self._changed.notify_all()

    def fileno(self) -> int:
        """Return a descriptor that is readable exactly while an item waits, and after `close`."""
        return self._pipe.fileno()

    @property
    def is_empty(self) -> bool:
        """True while no item waits. Any thread may read it."""
        return not self._items

    def close(self) -> None:
        """Remove all items, and wake all waiting threads. Idempotent."""
        with self._changed:
            # the pipe stays readable: who polls it learns of the end
            self._closed = True
            self._pipe.wake()
            self._items.clear()
            self._groups.clear()
            self._changed.notify_all()

    def release(self) -> None:
        """Close the descriptor. Call it after `close`."""
        self._pipe.close()

    def _find_next(self) -> Hashable:
        # the usual case: one camera, without a look at the turns
        if len(self._items) == 1:
            return next(iter(self._items))
        # the waiting group whose turn was longest ago, then the key of it whose turn was longest ago
        waiting = set(self._groups.values())
        group = next(group for group in self._group_turns if group in waiting)
        return next(key for key in self._turns if self._groups.get(key) == group)

    def _has_slot(self, key: Hashable) -> bool:
        return key in self._items or len(self._items) < self._capacity


def choose_replaced(cameras: Mapping[str, tuple[str, bool]], endpoint: str, share: int) -> str | None:
    """Return the camera that loses its place to a new one of `endpoint`, or None if the new one has to wait.

    `cameras` maps each camera to its endpoint and whether it is idle, the longest silent first. An idle camera gives
    way to its own endpoint, and to any endpoint if its own holds more than `share` places. An endpoint that holds less
    than `share` also takes the place of an active camera of one that holds more, and of any idle camera.
    """
    # candidates in three classes, each with the longest silent first; the first class that has one gives the place
    counts = Counter(owner for owner, _ in cameras.values())
    below = counts[endpoint] < share
    idle_own: list[str] = []
    active: list[str] = []
    idle_any: list[str] = []
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
    source: ReconnectingSocket | None
    """None for a camera that is expected, and was not heard yet"""
    handshakes: int
    heard_s: float

    @property
    def endpoint(self) -> str:
        """The endpoint that has the name; empty if none has it yet."""
        return self.source.endpoint if self.source else ""

    @property
    def idle(self) -> bool:
        """True if the camera has been silent for CAMERA_IDLE_S."""
        return time.monotonic() - self.heard_s >= CAMERA_IDLE_S

    @property
    def free(self) -> bool:
        """True if another endpoint may have the name: idle, and the connection that it came over has ended."""
        source = self.source
        return source is None or (self.idle and not (source.alive and source.handshakes == self.handshakes))


class CameraNames:
    """At most `capacity` names of cameras, bound to their endpoints.

    While the connection lasts that a name came over, no other endpoint gets the name. When all places are taken,
    `choose_replaced` finds a place, with an equal share for each endpoint. So an endpoint that sends many names takes
    nothing from the others.
    """

    def __init__(self, capacity: int, endpoints: int) -> None:
        self.capacity = capacity
        self.crowded_out = 0
        """Number of messages of names that found no place."""
        self._share = max(1, capacity // max(1, endpoints))
        self._bindings: OrderedDict[str, _Binding] = OrderedDict()  # the longest silent first
        self._changing = threading.Lock()
        self._warned: set[tuple[str, str]] = set()
        self._refused_until_s: dict[str, float] = {}  # by endpoint

    def admit(self, camera: str, source: ReconnectingSocket) -> str | None:
        """Record that `camera` was heard from `source`. Return the name that lost its place to it, or None.

        Raises WireError for a name of another endpoint, one that the endpoint's key may not send, and one beyond
        `capacity`.
        """
        # the key comes first: a name that it does not permit must not even look for a place
        if source.keys is not None and not source.keys.may_send(camera):
            raise self._refuse(camera, source, f"expected a camera of its key {_describe_key(source.keys)}")
        # the name belongs to one endpoint as long as its connection lasts
        with self._changing:
            binding = self._bindings.get(camera)
            if binding is not None and binding.source is not source and not binding.free:
                expected = (
                    f"expected each camera name at one endpoint, and {binding.endpoint} has sent it first; give each"
                    " camera a name of its own"
                )
                raise self._refuse(camera, source, expected)
            # a new name needs a place, perhaps that of another camera
            replaced = None
            if binding is None and len(self._bindings) >= self.capacity:
                replaced = self._choose_replaced(source)
                if replaced is None:
                    raise self._crowd_out(camera)
                del self._bindings[replaced]
            self._bindings[camera] = _Binding(source, source.handshakes, time.monotonic())
            self._bindings.move_to_end(camera)  # never absent for a moment: other threads call `silent_s`
            return replaced

    def expect(self, cameras: Collection[str]) -> None:
        """Give places to cameras that have not sent yet, as if they had just sent. Others may lose theirs.

        Any thread may call it.
        """
        with self._changing:
            for camera in cameras:
                others = (name for name in self._bindings if name not in cameras)
                # a place may be taken from any camera that is not among the expected ones, the longest silent first
                if camera not in self._bindings and len(self._bindings) >= self.capacity:
                    self._bindings.pop(next(others, ""), None)
                if len(self._bindings) < self.capacity:
                    self._bindings.setdefault(camera, _Binding(None, 0, time.monotonic()))

    def has_place(self, camera: str) -> bool:
        """Return True if the camera has a place. Any thread may call it."""
        return camera in self._bindings

    def silent_s(self, camera: str) -> float | None:
        """Return the seconds since the camera was last heard; None if it was not, or has no place.

        Any thread may call it.
        """
        binding = self._bindings.get(camera)
        if binding is None or binding.source is None:
            return None
        return time.monotonic() - binding.heard_s

    def has_told(self, camera: str, endpoint: str) -> bool:
        """Return True if the log has a line that the camera of an endpoint is refused because of its name."""
        return (camera, endpoint) in self._warned

    def _crowd_out(self, camera: str) -> WireError:
        # logged once: a flood of names would fill the log
        self.crowded_out += 1
        if self.crowded_out == 1:
            log.warning("camera %s has no place: there are %d cameras already", camera, self.capacity)
        return WireError(f"expected at most {self.capacity} cameras, found another: {camera}")

    def _choose_replaced(self, source: ReconnectingSocket) -> str | None:
        # a flood of new names would look through all bindings for each of them
        if time.monotonic() < self._refused_until_s.get(source.endpoint, 0.0):
            return None
        bindings = {camera: (binding.endpoint, binding.idle) for camera, binding in self._bindings.items()}
        replaced = choose_replaced(bindings, source.endpoint, self._share)
        if replaced is None:
            self._refused_until_s[source.endpoint] = time.monotonic() + REFUSAL_S
        return replaced

    def _refuse(self, camera: str, source: ReconnectingSocket, expected: str) -> WireError:
        message = f"camera {camera} of {source.endpoint} is refused: {expected}"
        # each name of each endpoint is logged once, and not without limit
        if (camera, source.endpoint) not in self._warned and len(self._warned) < self.capacity:
            self._warned.add((camera, source.endpoint))
            log.warning("%s", message)
        return WireError(message)


def _describe_key(keys: ClientKeys) -> str:
    return f"{keys.server}, which may send {', '.join(keys.server.cameras) or 'none'}"
