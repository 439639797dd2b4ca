"""Talk to an OpenTelemetry collector without trusting it.

The exporter of OpenTelemetry reads whatever the collector sends. A collector that is taken over, or another program at
its address, could fill the node's memory with an endless or compressed answer, or hold the exporter for ever. The
session here reads an answer up to a bound and within a time, unpacks nothing, follows no redirect and keeps no cookie.
"""

from __future__ import annotations

import http.client
import io
import time
from dataclasses import dataclass
from http.cookiejar import DefaultCookiePolicy
from typing import Any

import requests
import urllib3
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection

MAX_ANSWER_BYTES = 64 << 10
"""Bytes of a collector's answer, head and body, as they come. A longer answer counts as failed and is not read."""
MAX_TEXT_CHARACTERS = 200
"""Characters of a collector's own words that reach the log. The rest is cut off."""


class CollectorSession(requests.Session):
    """A session for the exporter, which sends one request at a time. Each ends after `limit_s` seconds.

    After `close`, which any thread may call, the request in progress ends with the next bytes of its answer.
    """

    def __init__(self, limit_s: float) -> None:
        super().__init__()
        # a cookie would stay for as long as the node runs, and each answer may bring others
        self.cookies.set_policy(DefaultCookiePolicy(allowed_domains=()))
        self.headers["Accept-Encoding"] = "identity"
        adapter = _BoundedAdapter(limit_s)
        self.mount("http://", adapter)
        self.mount("https://", adapter)


@dataclass
class _AnswerLimits:
    """What may still be read of one answer."""

    end_s: float
    """of the monotonic clock"""
    left_bytes: int = MAX_ANSWER_BYTES
    is_closed: bool = False
    """Whether the session has been closed."""

    def find_problem(self) -> str | None:
        """Return what keeps the answer from being read on, if anything."""
        if self.left_bytes <= 0:
            return f"expected an answer of at most {MAX_ANSWER_BYTES} bytes, found a longer one"
        if time.monotonic() >= self.end_s:
            return "expected a whole answer in time, found it unfinished"
        if self.is_closed:
            return "the node ended before the answer"
        return None


class _BoundedReader(io.RawIOBase):
    """Reads a socket as far as its _AnswerLimits allow. Raises OSError beyond that."""

    def __init__(self, connected: Any, reading: _AnswerLimits) -> None:
        self._socket = connected
        self._raw = connected.makefile("rb", buffering=0)
        self._reading = reading

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Read some bytes, for the time that is left at most."""
        reading = self._reading
        if problem := reading.find_problem():
            raise OSError(problem)
        # a time-out of the socket alone would start again with each byte
        self._socket.settimeout(max(0.001, reading.end_s - time.monotonic()))
        count: int | None = self._raw.readinto(memoryview(buffer)[: reading.left_bytes])
        reading.left_bytes -= count or 0
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _BoundedAdapter(HTTPAdapter):
    """Sends requests one at a time, and reads their answers within the limits."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._reading = _AnswerLimits(0.0)
        self._is_closed = False
        super().__init__()

    def init_poolmanager(self, *args: Any, **options: Any) -> None:
        """Create the pools of connections."""
        super().init_poolmanager(*args, **options)
        self._bound_answers(self.poolmanager)

    def proxy_manager_for(self, *args: Any, **options: Any) -> Any:
        """Return the pools of connections to a proxy."""
        manager = super().proxy_manager_for(*args, **options)
        self._bound_answers(manager)
        return manager

    def send(self, request: requests.PreparedRequest, *args: Any, **options: Any) -> requests.Response:
        """Send a request and read its answer. Raises requests.RequestException beyond a limit."""
        if self._is_closed:
            raise requests.RequestException(
                "expected no spans after the exporter's end, found some; they are lost"
            )
        self._reading = _AnswerLimits(time.monotonic() + self._limit_s)
        # the answer is read here, so the caller need not stream it
        options["stream"] = True
        try:
            return self._read(super().send(request, *args, **options))
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
            problem = self._reading.find_problem()
            if problem is None:
                raise
            # no time-out: the exporter would try those again, and log another reason
            raise requests.RequestException(f"{problem}; check monitoring.otlp_endpoint") from error

    def close(self) -> None:
        """End the request in progress, and refuse later ones. Idempotent."""
        self._is_closed = True
        self._reading.is_closed = True
        super().close()

    def _read(self, response: requests.Response) -> requests.Response:
        """Return the response with its body read."""
        try:
            place = response.headers.get("Location")
            if response.is_redirect and place is not None:
                # the exporter would take a redirect for success
                raise requests.RequestException(
                    f"expected a collector's answer, found a redirect to {_shorten(place)}, which is not followed; "
                    "set monitoring.otlp_endpoint to the collector itself"
                )
            body = response.raw.read(decode_content=False)
        finally:
            response.close()
        # as if requests had read it; a compressed body stays as it is
        response._content = body
        response._content_consumed = True
        response.reason = _shorten(response.reason or "")
        return response

    def _bound_answers(self, manager: urllib3.PoolManager) -> None:
        """Let a manager's connections read answers through a _BoundedReader."""
        adapter = self

        class Answer(http.client.HTTPResponse):
            def __init__(self, connected: Any, *args: Any, **options: Any) -> None:
                super().__init__(connected, *args, **options)
                self.fp.close()
                self.fp = io.BufferedReader(_BoundedReader(connected, adapter._reading))

        class Connection(HTTPConnection):
            response_class = Answer

        class SecureConnection(HTTPSConnection):
            response_class = Answer

        class Pool(urllib3.HTTPConnectionPool):
            ConnectionCls = Connection

        class SecurePool(urllib3.HTTPSConnectionPool):
            ConnectionCls = SecureConnection

        manager.pool_classes_by_scheme = {"http": Pool, "https": SecurePool}


def _shorten(text: str) -> str:
    """Return the beginning of a text from the network, without characters that a terminal would obey."""
    return ascii(text[:MAX_TEXT_CHARACTERS])[1:-1]
