"""The requests that wait for the node: bounded for each peer and in all, and taken from the peers in turn."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict, deque
from typing import Any, NamedTuple

from ..types import Buffer, Turns

MAX_REQUESTS_PER_PEER = 32
MAX_WAITING_BYTES = 24 << 20
OVERHEAD_BYTES = 1024  # approximate memory of a waiting request beside its body

Peer = tuple[bytes, ...]
"""The envelope of a request, which routes the reply. Its first part is the identity of the connection."""


class WaitingRequest(NamedTuple):
    """A request. It waits packed: unpacked it may take many times the memory."""

    peer: Peer
    id: int
    """0 if it has not been unpacked yet"""
    body: Buffer
    arrived_s: float
    """of the monotonic clock"""
    topic: str | None = None
    """A newer request of the same connection with the same topic supersedes this one. None: nothing does."""
    connection: tuple[int, int] | None = None
    """descriptor and inode of the connection that it came over; None if they are unknown"""
    work: Turns[Any] | None = None
    """the work that was begun on it, None if there is none yet"""

    @property
    def cost(self) -> int:
        """Approximate memory in bytes."""
        return memoryview(self.body).nbytes + OVERHEAD_BYTES

    def supersedes(self, older: WaitingRequest) -> bool:
        """Return True if this request makes an older one useless."""
        same = self.topic is not None and self.topic == older.topic
        return same and self.peer[0] == older.peer[0] and self is not older

    @property
    def has_departed(self) -> bool:
        """True if the connection that it came over has been closed. libzmq itself tells nobody."""
        return self.connection is not None and find_connection(self.connection[0]) != self.connection

    def drop(self) -> None:
        """End the work that was begun on it."""
        if self.work is not None:
            self.work.close()


def find_connection(descriptor: int) -> tuple[int, int] | None:
    """Return what tells the open connection of a descriptor from later ones of the same descriptor; None for none."""
    try:
        return (descriptor, os.fstat(descriptor).st_ino) if descriptor >= 0 else None
    except OSError:
        return None


class _PeerQueue:
    """The waiting requests of one peer, the oldest first."""

    def __init__(self) -> None:
        self.requests: deque[WaitingRequest] = deque()
        self.cost = 0

    def find_superseded(self, newer: WaitingRequest) -> WaitingRequest | None:
        """Return the waiting request that `newer` supersedes. There is one at most."""
        return next((request for request in self.requests if newer.supersedes(request)), None)


class RequestQueue:
    """A queue of requests with one line for each peer; the peers take turns, whatever the length of their lines.

    When MAX_WAITING_BYTES wait, a request displaces the newest requests of the peer whose requests take most, unless
    that is its own peer. A superseded request leaves the line and the newer one goes to its end; the peer keeps its
    turn. The request that was taken last counts until the next is taken: it is carried out. Or it is put back, to be
    taken again after other requests: long work is done in turns.
    A file descriptor is readable exactly while a request waits. All methods may be called from any thread.
    """

    def __init__(self) -> None:
        self._peers: OrderedDict[bytes, _PeerQueue] = OrderedDict()
        self._cost = self._taken_cost = 0
        self._changed = threading.Condition()
        self._reader, self._writer = os.pipe()

    def put(self, request: WaitingRequest) -> list[WaitingRequest]:
        """Add a request. Return those that will not be taken: this one, or others that it displaced or superseded."""
        with self._changed:
            own = self._peers.get(request.peer[0])
            superseded = own.find_superseded(request) if own is not None else None
            if own is not None and superseded is None and len(own.requests) >= MAX_REQUESTS_PER_PEER:
                return [request]
            displaced: list[WaitingRequest] = []
            freed = superseded.cost if superseded is not None else 0
            while self._cost + self._taken_cost + request.cost - freed > MAX_WAITING_BYTES:
                if not self._peers:
                    return [request]
                name, largest = max(self._peers.items(), key=lambda item: item[1].cost)
                if largest.cost <= (own.cost if own else 0) + request.cost:
                    return [*displaced, request]
                displaced.append(self._remove(name, largest, newest=True))
            self._add(request)
            if own is not None and superseded is not None:
                own.requests.remove(superseded)
                own.cost -= freed
                self._cost -= freed
                displaced.append(superseded)
            return displaced

    def take(self, timeout_ms: int) -> WaitingRequest | None:
        """Return the oldest request of the peer whose turn it is, or None when none arrives in time."""
        with self._changed:
            self._taken_cost = 0
            if not self._changed.wait_for(lambda: bool(self._peers), timeout_ms / 1000):
                return None
            name, queue = next(iter(self._peers.items()))
            taken = self._remove(name, queue)
            self._taken_cost = taken.cost
            if queue.requests:
                self._peers.move_to_end(name)
            return taken

    def put_back(self, request: WaitingRequest) -> bool:
        """Add the request that was taken last to the end of its line. Return False if a newer one supersedes it."""
        with self._changed:
            self._taken_cost = 0
            own = self._peers.get(request.peer[0])
            if own is not None and any(newer.supersedes(request) for newer in own.requests):
                return False
            self._add(request)
            return True

    def clear(self) -> list[WaitingRequest]:
        """Remove all requests, and return them."""
        with self._changed:
            return [
                self._remove(name, queue)
                for name, queue in list(self._peers.items())
                for _ in list(queue.requests)
            ]

    def fileno(self) -> int:
        """Return a descriptor that is readable exactly while a request waits."""
        return self._reader

    def close(self) -> None:
        """Close the descriptor. Call it when no thread uses the queue any more."""
        os.close(self._writer)
        os.close(self._reader)

    def _add(self, request: WaitingRequest) -> None:
        if not self._peers:
            os.write(self._writer, b"\0")
        queue = self._peers.setdefault(request.peer[0], _PeerQueue())
        queue.requests.append(request)
        queue.cost += request.cost
        self._cost += request.cost
        self._changed.notify()

    def _remove(self, name: bytes, queue: _PeerQueue, newest: bool = False) -> WaitingRequest:
        removed = queue.requests.pop() if newest else queue.requests.popleft()
        queue.cost -= removed.cost
        self._cost -= removed.cost
        if not queue.requests:
            del self._peers[name]
            if not self._peers:
                os.read(self._reader, 1)
        return removed
