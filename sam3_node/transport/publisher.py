"""What the publishers of frames and of masks share: one bound socket, live or lossless."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import zmq

from ..closing import Closing
from ..types import Buffer, Delivery
from .sockets import BoundSocket, send_parts

EVERY_QUEUE = 2


class Publisher(Closing):
    """Binds a PUB socket (`newest`) or a PUSH socket (`every`).

    `newest` never waits: for a peer that does not keep up, messages beyond a short queue are dropped.
    `every` waits for room, and for a peer; with several peers each message goes to one of them.
    For one thread at a time.
    """

    def __init__(self, endpoint: str, delivery: Delivery, queue: int, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._newest = delivery == "newest"
        if self._newest:
            self._bound = BoundSocket(zmq.PUB, endpoint, queue, max_bytes)
        else:
            self._bound = BoundSocket(zmq.PUSH, endpoint, EVERY_QUEUE, max_bytes, heartbeats=False)
        self.endpoint = self._bound.endpoint

    def close(self, linger_ms: int | None = None) -> None:
        """Close, waiting at most `linger_ms` for what is queued to leave. Idempotent.

        The default is 100 for `newest` and 5000 for `every`.
        """
        default_ms = 100 if self._newest else 5000
        self._bound.close(default_ms if linger_ms is None else linger_ms)

    def _send(self, pack: Callable[[], Sequence[Buffer]], timeout_ms: int | None) -> bool:
        # asking also makes libzmq see what peers have read by now: a send within 3 ms of the last would not
        # look, take the short queue for full and drop the message
        writable = self._bound.socket.poll(0 if self._newest else timeout_ms, zmq.POLLOUT)
        if not writable and not self._newest:
            return False
        return send_parts(self._bound.socket, pack(), self._max_bytes)
