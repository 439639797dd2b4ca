"""A session of HTTP for the exporter of OpenTelemetry, which bounds the answers of a collector.

The exporter needs the status alone, but reads whatever a collector sends, for as long as it sends. The session here
reads the head of an answer up to a bound and within a time, and no body. It follows no redirect and keeps no cookie.
"""

from __future__ import annotations

import http.client
import io
import time
from http.cookiejar import DefaultCookiePolicy
from typing import Any

import requests
from requests.adapters import HTTPAdapter

MAX_ANSWER_BYTES = 64 << 10
"""Bytes that are read of a collector's answer. An answer whose head is longer counts as failed."""


class CollectorSession(requests.Session):
    """A session for the exporter, which sends one request at a time. Each ends after `limit_s` seconds.

    After `close`, which any thread may call, the request in progress ends with the next bytes of its answer.
    """

    def __init__(self, limit_s: float) -> None:
        super().__init__()
        # a cookie would stay for as long as the node runs, and each answer may bring others
        self.cookies.set_policy(DefaultCookiePolicy(allowed_domains=()))
        adapter = _BoundedAdapter(limit_s)
        self.mount("http://", adapter)
        self.mount("https://", adapter)


class _AnswerError(Exception):
    """Raised where an answer breaks a bound. An OSError would be tried again, and another reason be logged."""


class _BoundedAdapter(HTTPAdapter):
    """Sends requests one at a time, and reads the heads of their answers within the bounds."""

    def __init__(self, limit_s: float) -> None:
        self.end_s = 0.0  # of the monotonic clock
        self.left_bytes = 0
        self._limit_s = limit_s
        self._is_closed = False
        super().__init__()

    def get_connection_with_tls_context(self, *args: Any, **options: Any) -> Any:
        """Return the pool for a request, whose connections read answers through a _BoundedReader."""
        pool = super().get_connection_with_tls_context(*args, **options)
        adapter = self

        class Answer(http.client.HTTPResponse):
            def __init__(self, connected: Any, *args: Any, **options: Any) -> None:
                super().__init__(connected, *args, **options)
                self.fp.close()
                self.fp = io.BufferedReader(_BoundedReader(connected, adapter))

        pool.ConnectionCls = type("Connection", (type(pool).ConnectionCls,), {"response_class": Answer})
        return pool

    def send(self, request: requests.PreparedRequest, *args: Any, **options: Any) -> requests.Response:
        """Send a request and read the head of its answer. Raises requests.RequestException beyond a bound."""
        if self._is_closed:
            raise requests.RequestException(
                "expected no spans after the exporter's end, found some; they are lost"
            )
        self.left_bytes = MAX_ANSWER_BYTES
        self.end_s = time.monotonic() + self._limit_s
        try:
            response = super().send(request, *args, **options)
        except _AnswerError as error:
            raise requests.RequestException(f"{error}; check monitoring.otlp_endpoint") from error
        # the body of an answer that is closed is empty
        response.close()
        if response.is_redirect:
            # the exporter would take a redirect for success
            raise requests.RequestException(
                f"expected a collector's answer, found a redirect to {response.headers['Location']}, which is not "
                "followed; set monitoring.otlp_endpoint to the collector itself"
            )
        return response

    def close(self) -> None:
        """End the request in progress, and refuse later ones. Idempotent."""
        self._is_closed = True
        self.end_s = 0.0
        super().close()


class _BoundedReader(io.RawIOBase):
    """Reads a socket as far as the bounds of an adapter allow. Raises _AnswerError beyond them."""

    def __init__(self, connected: Any, bounds: _BoundedAdapter) -> None:
        self._socket = connected
        self._raw = connected.makefile("rb", buffering=0)
        self._bounds = bounds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Read some bytes, for the time that is left at most."""
        if self._bounds.left_bytes <= 0:
            raise _AnswerError(f"expected an answer of at most {MAX_ANSWER_BYTES} bytes, found a longer one")
        # a time-out of the socket alone would start again with each byte
        left_s = self._bounds.end_s - time.monotonic()
        try:
            self._socket.settimeout(max(0.001, left_s))
            count: int | None = self._raw.readinto(memoryview(buffer)[: self._bounds.left_bytes])
        except TimeoutError:
            left_s = 0.0
        if left_s <= 0:
            raise _AnswerError("expected a whole answer in time, found it unfinished")
        self._bounds.left_bytes -= count or 0
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()
