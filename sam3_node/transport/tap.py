"""Everything that cameras and node publish, as it arrives: for whoever writes it down."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import zmq

from ..errors import TransportError
from ..wire import EVENTS_TOPIC, frame_topic, masks_topic
from .connection import Listener, connect_all
from .sockets import MAX_FRAME_BYTES, MAX_MESSAGE_BYTES, open_socket

FRAMES_QUEUE, MASKS_QUEUE = 64, 1000  # before the thread; it takes them out at once
DRAIN = 64
RECONNECT_MS, SLOWEST_RECONNECT_MS = (
    20,
    50,
)  # a camera that comes is heard before the node steps its first frame
OVERHEAD_BYTES = 1024  # of a message that waits, about


class Arrived(NamedTuple):
    """The parts of a message, the first of them its topic, and its arrival (`time.time_ns`)."""

    parts: list[memoryview]
    received_ns: int


class StreamTap(Listener):
    """Every message of live (`newest`) delivery in the order of arrival: frames, masks and events. A context manager.

    At most `max_bytes` wait to be taken; what comes beyond is dropped and counted. Publishers never wait for it.
    Only frames and masks of `cameras` are taken (none named: of all), unpacked and checked they are not.
    Raises TransportError for a malformed endpoint; nobody has to be there yet.
    """

    def __init__(self, frames: Sequence[str], masks: str, cameras: Sequence[str], max_bytes: int) -> None:
        if not frames:
            raise TransportError("expected at least one endpoint of frames to connect to, found none")
        self.dropped = 0
        """Messages for which there was no room."""
        self._max_bytes = max_bytes
        self._bytes = 0
        self._ended = False
        self._waiting: deque[Arrived] = deque()
        self._changed = threading.Condition()
        of_frames = [frame_topic(camera) for camera in cameras] or [b"frame/"]
        of_masks = [*([masks_topic(camera) for camera in cameras] or [b"masks/"]), EVENTS_TOPIC]
        self._topics = frozenset(of_frames + of_masks) if cameras else frozenset()
        peers = [(endpoint, of_frames) for endpoint in frames] + [(masks, of_masks)]
        super().__init__(connect_all((_open(topics), endpoint) for endpoint, topics in peers), DRAIN)
        self._listen()

    def take(self, timeout_ms: int) -> Arrived | None:
        """The next message, or None when none came in time; after `close` what still waits, then None at once.

        Raises TransportError when receiving has failed for good.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ended or bool(self._waiting), timeout_ms / 1000)
            if self._waiting:
                arrived = self._waiting.popleft()
                self._bytes -= _bytes_of(arrived)
                return arrived
        self._check()
        return None

    def _accept(self, parts: list[memoryview], received_ns: int) -> None:
        if self._topics and parts[0] not in self._topics:
            return  # a subscription also matches longer topics
        arrived = Arrived(parts, received_ns)
        with self._changed:
            if self._waiting and self._bytes + _bytes_of(arrived) > self._max_bytes:
                self.dropped += 1
                return
            self._waiting.append(arrived)
            self._bytes += _bytes_of(arrived)
            self._changed.notify()

    def _wake(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()


def _open(topics: Sequence[bytes]) -> zmq.Socket:
    of_node = EVENTS_TOPIC in topics
    socket = open_socket(
        zmq.SUB, *((MASKS_QUEUE, MAX_MESSAGE_BYTES) if of_node else (FRAMES_QUEUE, MAX_FRAME_BYTES))
    )
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, SLOWEST_RECONNECT_MS)
    for topic in topics:
        socket.setsockopt(zmq.SUBSCRIBE, topic)
    return socket


def _bytes_of(arrived: Arrived) -> int:
    return OVERHEAD_BYTES + sum(part.nbytes for part in arrived.parts)
