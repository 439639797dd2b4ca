"""A subscriber for recorders: it receives all messages of cameras, node and robot, in the order of arrival."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import zmq

from ..errors import TransportError
from ..wire import EVENTS_TOPIC, POSES_ROOT, frame_topic, masks_topic
from .connection import Listener, ReconnectingSocket, connect_all, open_subscriber
from .sockets import MAX_FRAME_BYTES, MAX_MESSAGE_BYTES, Socket

MAX_PER_TURN = 64
# short, so that the tap is connected to a new camera before the node processes its first frame
MIN_RECONNECT_MS, MAX_RECONNECT_MS = 20, 50
OVERHEAD_BYTES = 1024  # approximate memory of a waiting message beside its parts


class ReceivedMessage(NamedTuple):
    """The parts of a message, of which the first is the topic, and its arrival (`time.time_ns`)."""

    parts: list[memoryview]
    received_ns: int


class StreamTap(Listener):
    """A receiver of all frames, masks and events of live (`newest`) delivery, in the order of arrival.

    With `poses`, it also receives all poses of that endpoint. It is a context manager. At most `max_bytes` wait to be
    taken; further messages are dropped and counted. Publishers never wait for a tap. With `cameras`, frames and masks
    of other cameras are ignored. Messages are neither unpacked nor checked. Raises TransportError for a malformed
    endpoint; the peers may start later.
    """

    def __init__(
        self, frames: Sequence[str], masks: str, cameras: Sequence[str], max_bytes: int, poses: str = ""
    ) -> None:
        if not frames:
            raise TransportError("expected at least one frame endpoint to connect to, found none")
        self.dropped = 0
        """Number of messages dropped because `max_bytes` were waiting."""
        self._max_bytes = max_bytes
        self._bytes = 0
        self._closed = False
        self._waiting: deque[ReceivedMessage] = deque()
        self._changed = threading.Condition()
        frame_topics = [frame_topic(camera) for camera in cameras] or [b"frame/"]
        mask_topics = [*([masks_topic(camera) for camera in cameras] or [b"masks/"]), EVENTS_TOPIC]
        self._topics = frozenset(frame_topics + mask_topics) if cameras else frozenset()
        peers = [(endpoint, frame_topics) for endpoint in frames] + [(masks, mask_topics)]
        if poses:
            peers.append((poses, [POSES_ROOT]))
        super().__init__(connect_all((_open(topics), endpoint) for endpoint, topics in peers), MAX_PER_TURN)
        self._listen()

    def take(self, timeout_ms: int) -> ReceivedMessage | None:
        """Return the next message, or None when none arrives in time.

        After `close` it returns the waiting messages, then None without waiting.
        Raises TransportError when the receiving thread has failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or bool(self._waiting), timeout_ms / 1000)
            if self._waiting:
                message = self._waiting.popleft()
                self._bytes -= _count_bytes(message)
                return message
        self._raise_failure()
        return None

    def _accept(self, parts: list[memoryview], received_ns: int, source: ReconnectingSocket) -> None:
        is_pose = parts[0][: len(POSES_ROOT)] == POSES_ROOT
        if self._topics and parts[0] not in self._topics and not is_pose:
            return  # a subscription also matches longer topics
        message = ReceivedMessage(parts, received_ns)
        with self._changed:
            if self._waiting and self._bytes + _count_bytes(message) > self._max_bytes:
                self.dropped += 1
                return
            self._waiting.append(message)
            self._bytes += _count_bytes(message)
            self._changed.notify()

    def _wake(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def _open(topics: Sequence[bytes]) -> Socket:
    is_small = EVENTS_TOPIC in topics or POSES_ROOT in topics
    socket = open_subscriber(topics, MAX_MESSAGE_BYTES if is_small else MAX_FRAME_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, MIN_RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, MAX_RECONNECT_MS)
    return socket


def _count_bytes(message: ReceivedMessage) -> int:
    return OVERHEAD_BYTES + sum(part.nbytes for part in message.parts)
