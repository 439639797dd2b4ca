"""A ring of the last seconds in memory, and the trigger that has it written."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Iterator
from typing import TextIO

from ..transport import ReceivedMessage
from ..types import NANOSECONDS

OVERHEAD_BYTES = 1024  # approximate memory of a message beside its parts


class MessageRing:
    """The messages of the last `seconds`, of at most `max_bytes`; older ones are dropped."""

    def __init__(self, seconds: float, max_bytes: int) -> None:
        self.dropped = 0
        """Number of messages that were dropped because they were old, or too many."""
        self.bytes = 0
        """Memory of all messages."""
        self._length_ns, self._max_bytes = round(seconds * NANOSECONDS), max_bytes
        self._messages: deque[ReceivedMessage] = deque()

    def add(self, message: ReceivedMessage) -> None:
        """Append the newest message."""
        self._messages.append(message)
        self.bytes += _count_bytes(message)
        self._drop_before(message.received_ns - self._length_ns)

    def take_all(self, now_ns: int) -> Iterator[ReceivedMessage]:
        """Remove and yield the messages of the last seconds before `now_ns`, the oldest first."""
        self._drop_before(now_ns - self._length_ns)
        while self._messages:
            yield self._take()

    def _drop_before(self, oldest_ns: int) -> None:
        while self._messages and (self._messages[0].received_ns < oldest_ns or self.bytes > self._max_bytes):
            self._take()
            self.dropped += 1

    def _take(self) -> ReceivedMessage:
        message = self._messages.popleft()
        self.bytes -= _count_bytes(message)
        return message


def _count_bytes(message: ReceivedMessage) -> int:
    return OVERHEAD_BYTES + sum(part.nbytes for part in message.parts)


class Trigger:
    """Counts requests to write the ring. It has no lock, because a signal handler may interrupt its user."""

    def __init__(self) -> None:
        self._count = self._taken = 0

    def fire(self) -> None:
        """Request that the ring be written."""
        self._count += 1

    def take(self) -> bool:
        """Return True if there was a request since the last call."""
        count = self._count
        is_new, self._taken = count > self._taken, count
        return is_new

    def listen(self, keys: TextIO) -> None:
        """Fire at each SIGUSR1, and at each Enter if `keys` is a terminal. Call it in the main thread."""
        signal.signal(signal.SIGUSR1, lambda *_: self.fire())
        if keys.isatty():
            threading.Thread(target=self._read_keys, args=(keys,), name="keys", daemon=True).start()

    def _read_keys(self, keys: TextIO) -> None:
        for _ in keys:
            self.fire()
