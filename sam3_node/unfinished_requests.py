"""Connections over HTTP with a bound on requests that are not sent to their end, for servers that run on uvicorn."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_UNFINISHED = 64
"""Connections of one server that have not sent a whole request. A further one ends the oldest."""
MAX_REQUEST_S = 10.0
"""Seconds that a request may take to arrive."""
_UNFINISHED = (h11.IDLE, h11.SEND_BODY)
"""States of a peer that has not sent its request to the end."""


class BoundedProtocol(H11Protocol):  # type: ignore[misc]  # uvicorn is not checked here
    """A connection that ends if its request is not complete in time. A class for `http` of uvicorn's Config."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._end: asyncio.TimerHandle | None = None
        """ends the connection; None while the peer owes nothing"""

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Expect a request. If too many connections do, the one that has done so longest ends."""
        super().connection_made(transport)
        self._expect_request()

    def data_received(self, data: bytes) -> None:
        """Take a part of a request, and stop the clock once it is whole."""
        super().data_received(data)
        has_switched = self.transport.get_protocol() is not self  # to WebSocket
        if has_switched or self.conn.their_state not in _UNFINISHED:
            self._stop_clock()
        elif self._end is None:
            self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_clock()
        super().connection_lost(exc)

    def _expect_request(self) -> None:
        waiting = [
            (each._end.when(), each)
            for each in self.connections
            if isinstance(each, BoundedProtocol) and each is not self and each._end is not None
        ]
        if len(waiting) >= MAX_UNFINISHED:
            oldest = min(waiting, key=lambda item: item[0])[1]
            oldest._stop_clock()
            oldest.transport.abort()
        self._end = self.loop.call_later(MAX_REQUEST_S, self.transport.abort)

    def _stop_clock(self) -> None:
        if self._end is not None:
            self._end.cancel()
            self._end = None
