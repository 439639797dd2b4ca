"""What sockets and their limits share: a pipe that wakes a thread, the events of a monitor, budgets of peers."""

import os
import struct
import time
from contextlib import suppress
from typing import NamedTuple

import zmq

from .security import Socket

_EVENT_HEAD = struct.Struct("=Hi")
"""Kind of a monitor's event, and its descriptor or error."""


class WakePipe:
    """A pipe that wakes a thread that polls it: readable from `wake` to `clear`, however often each is called."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)

    def wake(self) -> None:
        """Make the pipe readable. Any thread may call it."""
        with suppress(BlockingIOError):  # a full pipe also wakes the thread
            os.write(self._writer, b"\0")

    def clear(self) -> bool:
        """Make the pipe unreadable. Return True if it was readable."""
        with suppress(BlockingIOError):
            return bool(os.read(self._reader, 4096))
        return False

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._reader

    def close(self) -> None:
        """Close the pipe. Call it when no thread uses it any more."""
        os.close(self._writer)
        os.close(self._reader)


def read_event(monitor: Socket) -> tuple[int, int] | None:
    """Return the next event of a monitor (zmq.EVENT_…) and its descriptor or error; None if no event waits.

    The reader in pyzmq would import asyncio, which slows the start of a client.
    """
    try:
        head, _ = monitor.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None
    kind, value = _EVENT_HEAD.unpack(head)
    return kind, value


class PeerBudget(NamedTuple):
    """What peers may send to a bound socket."""

    max_bytes: int
    """bytes that all peers together may send beyond their rate"""
    bytes_per_s: int
    """rate of each peer"""
    max_growth_bytes: int = 24 << 20
    """growth of the process for which a peer is cut off while much is unread"""


class RateBudget:
    """The messages and bytes that may still be taken. They grow with time at two rates, up to `burst_s` of each."""

    def __init__(self, messages_per_s: float, bytes_per_s: float, burst_s: float) -> None:
        self._messages_per_s = messages_per_s
        self._bytes_per_s = bytes_per_s
        self._max_messages = messages_per_s * burst_s
        self._max_bytes = bytes_per_s * burst_s
        # a new budget is full
        self._messages = self._max_messages
        self._bytes = self._max_bytes
        self._updated_s = time.monotonic()

    def spend(self, size: int) -> bool:
        """Take one message of `size` bytes. Return False if there is not enough. A full budget suffices for any
        size."""
        now_s = time.monotonic()
        passed_s = now_s - self._updated_s
        self._updated_s = now_s
        # both grow with time, up to a burst
        self._messages = min(self._max_messages, self._messages + passed_s * self._messages_per_s)
        self._bytes = min(self._max_bytes, self._bytes + passed_s * self._bytes_per_s)
        # a message larger than a whole burst passes once the budget is full: it would else never pass
        if self._messages < 1 or self._bytes < min(size, self._max_bytes):
            return False
        self._messages -= 1
        self._bytes -= size
        return True
