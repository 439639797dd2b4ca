"""Open sockets for cameras of other protocols: a subscriber of a server, and a hub that senders connect to.

The sockets hand messages over unchanged, at most MAX_KEPT at a time. A reader that is slower than a flood gets
the newest messages, and the flood of one sender leaves the messages of the others. CONFLATE would keep one part only.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import zmq

from ..errors import TransportError
from . import sockets
from .primitives import PeerBudget
from .receiver import MAX_PER_TURN, Message, Receiver
from .security import Security, is_local

MAX_FOREIGN_BYTES = 1 << 25
"""Maximum size of a part of a message. A raw image of 3840x2160 pixels has 24.9 MB."""
MAX_KEPT = 16
"""Maximum number of waiting messages that are handed over; older ones are dropped and counted."""
MAX_KEPT_BYTES = 2 * MAX_FOREIGN_BYTES
"""Maximum size of these messages, in bytes."""
HUB_QUEUE = 16
"""Answers that libzmq queues for each sender, which waits for each of them."""
HUB_BUDGET = PeerBudget(1 << 28, 1 << 28, 1 << 28)
"""Budget of the hub's peers. A sender waits for the answer to an image before it sends the next."""
HUB_ANSWER = b"OK"
"""What senders expect after each message. They send the next one only then."""

Deliver = Callable[[list[memoryview], int, bytes], None]
"""Takes the parts of a message, its arrival (`time.time_ns`) and its sender. Runs in a thread of the socket, and raises
nothing."""


class SentMessage(NamedTuple):
    """Parts of a message, its arrival (`time.time_ns`) and its sender."""

    parts: list[memoryview]
    received_ns: int
    sender: bytes


class ForeignSubscriber(Receiver[list[memoryview]]):
    """A subscriber of everything that a server publishes on `endpoint`. A context manager.

    The server may start later and be restarted. Raises TransportError for a malformed endpoint.
    """

    def __init__(self, endpoint: str, deliver: Deliver) -> None:
        self.dropped = 0
        """Number of messages that were dropped because newer ones waited."""
        self._deliver = deliver
        self.endpoint = endpoint
        super().__init__(
            sockets.connect_all([(sockets.open_subscriber([b""], MAX_FOREIGN_BYTES), endpoint, None)])
        )

    def _unpack(self, parts: list[memoryview]) -> list[memoryview]:
        return parts

    def _select(self, messages: Iterator[Message]) -> Iterator[Message]:
        # messages of a server have no sender: one server is one sender
        kept, dropped = _keep_newest(SentMessage(parts, arrived_ns, b"") for parts, arrived_ns in messages)
        self.dropped += dropped
        return (Message(message.parts, message.received_ns) for message in kept)

    def _store(self, parts: list[memoryview], received_ns: int, source: sockets.ReconnectingSocket) -> bool:
        self._deliver(parts, received_ns, b"")
        return True


class ForeignHub(sockets.SocketThread):
    """A hub that senders connect to. It answers each message at once, because its sender waits for that.

    `.endpoint` is the bound endpoint, with port 0 and * resolved. Senders have no keys, so other addresses than those
    of this machine are bound only if `insecure`. Raises TransportError when the endpoint is malformed or in use.
    """

    _problem = "the hub stopped"

    def __init__(self, endpoint: str, deliver: Deliver, insecure: bool = False) -> None:
        sockets.check_endpoint(endpoint)
        if not insecure and not is_local(endpoint):
            raise TransportError(
                f"{endpoint} is not bound: its senders have no keys, so everybody on the network could send images; "
                "bind 127.0.0.1, or, on a network without strangers, set transport.insecure = true"
            )
        self.dropped = 0
        """Number of messages that were dropped because newer ones waited."""
        self._deliver = deliver
        self._bound = sockets.BoundSocket(
            zmq.ROUTER,
            endpoint,
            HUB_QUEUE,
            MAX_FOREIGN_BYTES,
            "camera",
            Security(insecure=True),
            budget=HUB_BUDGET,
        )
        self.endpoint = self._bound.endpoint
        self._start(f"hub {self.endpoint}")

    @property
    def connected(self) -> tuple[str, ...]:
        """The endpoint if a sender is connected now, else nothing."""
        if self._bound.guard.wait_for_peer(0):
            return (self.endpoint,)
        return ()

    def _release(self) -> None:
        self._bound.close(0)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._waker.fileno(), zmq.POLLIN)
        poller.register(self._bound.socket, zmq.POLLIN)
        while not self._closing:
            # all that waits is read and answered, but only the newest messages are decoded
            poller.poll()
            kept, dropped = _keep_newest(self._receive())
            self.dropped += dropped
            for message in kept:
                self._deliver(*message)

    def _receive(self) -> Iterator[SentMessage]:
        """Receive and answer at most MAX_PER_TURN waiting messages."""
        read: Counter[int] = Counter()
        # what was read is reported to the guard, which cuts off a peer that sends more than is read
        parts: list[memoryview] | None = []
        for _ in range(MAX_PER_TURN):
            parts = sockets.receive_parts(self._bound.socket)
            if parts is None:
                break
            received_ns = time.time_ns()
            descriptor, size = sockets.describe_source(parts)
            read[descriptor] += size
            # a REQ peer puts an empty part between its identity and the message, and expects it in the answer
            length = 2 if len(parts) > 1 and not parts[1].nbytes else 1
            envelope = [bytes(part) for part in parts[:length]]
            sockets.send_parts(self._bound.socket, [*envelope, HUB_ANSWER], MAX_FOREIGN_BYTES)
            yield SentMessage(parts[len(envelope) :], received_ns, envelope[0])
        self._bound.guard.count_read(read, is_all=parts is None)


def _keep_newest(messages: Iterable[SentMessage]) -> tuple[list[SentMessage], int]:
    """Return the newest messages of each sender, and the number of the others. The sender with most messages loses its
    oldest."""
    kept: dict[bytes, deque[SentMessage]] = {}  # by sender, oldest first
    count = 0
    size = 0
    dropped = 0
    for message in messages:
        kept.setdefault(message.sender, deque()).append(message)
        count += 1
        size += _count_bytes(message)
        # too many: the sender with most messages loses its oldest. Too large: the sender with most bytes does
        while count > MAX_KEPT or (size > MAX_KEPT_BYTES and count > 1):
            if count > MAX_KEPT:
                most = max(kept.values(), key=len)
            else:
                most = max(kept.values(), key=_count_queue_bytes)
            count -= 1
            size -= _count_bytes(most.popleft())
            dropped += 1
    newest: list[SentMessage] = []
    for queue in kept.values():
        newest.extend(queue)
    return newest, dropped


def _count_queue_bytes(queue: deque[SentMessage]) -> int:
    return sum(_count_bytes(message) for message in queue)


def _count_bytes(message: SentMessage) -> int:
    return sum(part.nbytes for part in message.parts)
