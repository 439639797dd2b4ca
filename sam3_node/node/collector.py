"""Talk to an OpenTelemetry collector without trusting it.

The exporter of OpenTelemetry reads whatever the collector sends. A collector that is taken over, or another program at
its address, could fill the node's memory with an endless or compressed answer, or hold the exporter for ever. The
session here reads an answer up to a bound and within a time, unpacks nothing, follows no redirect and keeps no cookie.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from http.cookiejar import DefaultCookiePolicy
from typing import Any

import requests
import urllib3
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection

MAX_ANSWER_BYTES = 64 << 10
"""Bytes of the body of a collector's answer. A longer answer counts as failed, and its connection is closed."""
MAX_TEXT_CHARACTERS = 200
"""Characters of a collector's own words that reach the log. The rest is cut off."""


class CollectorSession(requests.Session):
    """A session for the exporter. Each request uses a connection of its own and ends after `limit_s` seconds.

    `close` ends the request in progress, in whichever thread it runs, and refuses later ones.
    """

    def __init__(self, limit_s: float) -> None:
        super().__init__()
        # a cookie would stay for as long as the node runs, and each answer may bring others
        self.cookies.set_policy(DefaultCookiePolicy(allowed_domains=()))
        self.headers["Accept-Encoding"] = "identity"
        adapter = _BoundedAdapter(limit_s)
        self.mount("http://", adapter)
        self.mount("https://", adapter)


class _BoundedAdapter(HTTPAdapter):
    """Sends requests one at a time, and reads their answers within the limits."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._links = _Links()
        super().__init__()

    def init_poolmanager(self, *args: Any, **options: Any) -> None:
        """Create the pools of connections, whose sockets are noted."""
        super().init_poolmanager(*args, **options)
        self._links.note_sockets_of(self.poolmanager)

    def proxy_manager_for(self, *args: Any, **options: Any) -> Any:
        """Return the pools of connections to a proxy, whose sockets are noted."""
        manager = super().proxy_manager_for(*args, **options)
        self._links.note_sockets_of(manager)
        return manager

    def send(
        self,
        request: requests.PreparedRequest,
        stream: bool = False,
        timeout: Any = None,
        verify: Any = True,
        cert: Any = None,
        proxies: Any = None,
    ) -> requests.Response:
        """Send a request and read its answer. Raises requests.RequestException beyond a limit."""
        # what is left of the exporter's own limit after its first try
        limit_s = self._limit_s
        if isinstance(timeout, int | float):
            limit_s = min(limit_s, timeout)
        # a time-out of the socket starts again with each byte, so a timer ends the request as a whole
        deadline = threading.Timer(limit_s, self._links.cut)
        deadline.daemon = True
        deadline.start()
        try:
            return self._read(super().send(request, True, timeout, verify, cert, proxies))
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
            if not self._links.is_cut:
                raise
            # no time-out: the exporter would try those again, and log another reason
            raise requests.RequestException(
                f"expected a collector's whole answer within {self._limit_s:g} s and before the exporter's end, found "
                "it unfinished; check monitoring.otlp_endpoint"
            ) from error
        finally:
            deadline.cancel()
            deadline.join()
            # a connection that waits for the next request would not be noted again
            super().close()
            self._links.clear()

    def close(self) -> None:
        """End the request in progress, and refuse later ones. Idempotent."""
        self._links.close()
        super().close()

    def _read(self, response: requests.Response) -> requests.Response:
        """Return the response with its body read. Its connection is closed."""
        try:
            # the exporter takes a redirect for success
            place = response.headers.get("Location")
            if response.is_redirect and place is not None:
                raise requests.RequestException(
                    f"expected a collector's answer, found a redirect to {_shorten(place)}, which is not followed; "
                    "set monitoring.otlp_endpoint to the collector itself"
                )
            # one byte more than allowed shows a longer answer
            body = response.raw.read(MAX_ANSWER_BYTES + 1, decode_content=False)
        finally:
            response.close()
        if len(body) > MAX_ANSWER_BYTES:
            raise requests.RequestException(
                f"expected a collector's answer of at most {MAX_ANSWER_BYTES} bytes, found a longer one; check "
                "monitoring.otlp_endpoint"
            )
        # the end of an answer without a length looks like a cut
        if self._links.is_cut:
            raise requests.ConnectionError("the connection was cut")
        # as if requests had read it; a compressed body stays as it is
        response._content = body
        response._content_consumed = True
        response.reason = _shorten(response.reason or "")
        return response


class _Links:
    """The connections of the request in progress. Another thread may cut them.

    Shutting a socket down wakes the thread that reads from it. The duplicate that is kept for this stays valid when TLS
    takes the socket over.
    """

    def __init__(self) -> None:
        self.is_cut = False
        """Whether the request in progress has been cut."""
        self._is_closed = False
        self._duplicates: list[socket.socket] = []
        self._changing = threading.Lock()

    def note_sockets_of(self, manager: urllib3.PoolManager) -> None:
        """Let a manager's connections note their sockets here."""
        note = self._note

        class NotedConnection(HTTPConnection):
            def _new_conn(self) -> socket.socket:
                return note(super()._new_conn())

        class NotedSecureConnection(HTTPSConnection):
            def _new_conn(self) -> socket.socket:
                return note(super()._new_conn())

        class Pool(urllib3.HTTPConnectionPool):
            ConnectionCls = NotedConnection

        class SecurePool(urllib3.HTTPSConnectionPool):
            ConnectionCls = NotedSecureConnection

        manager.pool_classes_by_scheme = {"http": Pool, "https": SecurePool}

    def cut(self) -> None:
        """End the request in progress."""
        with self._changing:
            self.is_cut = True
            for duplicate in self._duplicates:
                with contextlib.suppress(OSError):  # the peer has closed it
                    duplicate.shutdown(socket.SHUT_RDWR)

    def clear(self) -> None:
        """Forget the connections of a request that has ended."""
        with self._changing:
            self.is_cut = self._is_closed
            for duplicate in self._duplicates:
                duplicate.close()
            self._duplicates.clear()

    def close(self) -> None:
        """End the request in progress, and refuse later connections."""
        self._is_closed = True
        self.cut()

    def _note(self, connected: socket.socket) -> socket.socket:
        """Keep a duplicate of a socket that has just connected. Raises OSError if the request has been cut."""
        with self._changing:
            if self.is_cut:
                connected.close()
                raise OSError("the time of this request has passed, or the exporter has been closed")
            self._duplicates.append(connected.dup())
        return connected


def _shorten(text: str) -> str:
    """Return the beginning of a text from the network, without characters that a terminal would obey."""
    return ascii(text[:MAX_TEXT_CHARACTERS])[1:-1]
