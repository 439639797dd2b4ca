"""The client of control requests: a DEALER socket that connects to the node."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Iterator
from typing import Any

import zmq

from ..errors import (
    AuthenticationError,
    NoAnswerError,
    TransportError,
    WireError,
    make_error,
)
from ..types import Buffer, Closeable
from ..wire import Reply, Request, pack_request, unpack_reply
from .connection import HandshakeWatch
from .security import Security
from .sockets import MAX_MESSAGE_BYTES, connect, open_socket, receive_parts, send_parts

QUEUE = 64


class ControlClient(Closeable):
    """A client of the node at `endpoint`. It waits at most `timeout_ms` for each reply. A context manager.

    Threads that share a client take turns: there is one call at a time. Raises TransportError for a malformed
    endpoint, AuthenticationError for a missing key; the node may start later.
    """

    def __init__(self, endpoint: str, timeout_ms: int = 2000, security: Security | None = None) -> None:
        self._keys = (security or Security.from_environment()).client_keys("node")
        self._endpoint = endpoint
        self._timeout_ms = timeout_ms
        self._ids = itertools.count(1)
        self._turn = threading.Lock()
        self._open()

    def call(self, op: str, **args: Any) -> Any:
        """Request an operation and return its result.

        Raises the error class of the code in the reply (RequestError if the code is unknown). Raises NoAnswerError
        when no node is connected or no reply arrives in time; in the latter case the node may still execute the
        operation. Raises AuthenticationError as soon as a key is refused.
        """
        with self._turn:
            if self._socket.closed:
                raise TransportError(f"cannot send a request to {self._endpoint}: this client is closed")
            if self._keys is not None and not self._keys.is_trusted:
                self._reopen()
                raise self._keys.distrust(self._endpoint)
            deadline_s = time.monotonic() + self._timeout_ms / 1000
            request = Request(next(self._ids), op, args)
            self._send(pack_request(request), op, deadline_s)
            return _read_result(self._wait_for_reply(request, deadline_s))

    def close(self) -> None:
        """Close the connection. Idempotent."""
        with self._turn:
            self._close()

    def _open(self) -> None:
        self._socket = open_socket(zmq.DEALER, QUEUE, MAX_MESSAGE_BYTES)
        # never queue for a node that is not connected: it would execute the request long after the call has failed
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        if self._keys is not None:
            self._keys.apply(self._socket)
        self._handshakes = HandshakeWatch(self._socket, self._endpoint, self._keys)
        try:
            connect(self._socket, self._endpoint)
        except TransportError:
            self._close()
            raise

    def _close(self) -> None:
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._handshakes.monitor.close(0)
        self._socket.close(0)

    def _send(self, body: Buffer, op: str, deadline_s: float) -> None:
        if self._wait_for_node(deadline_s) and send_parts(self._socket, [body], MAX_MESSAGE_BYTES):
            return
        refusal = self._handshakes.refusal
        self._reopen()
        if refusal is not None:
            raise AuthenticationError(f"{refusal}; '{op}' was not sent")
        raise NoAnswerError(
            f"no node is connected at {self._endpoint}: '{op}' could not be sent within {self._timeout_ms} ms;"
            " start the node, or correct the endpoint"
        )

    def _wait_for_node(self, deadline_s: float) -> bool:
        """Return True when a node is connected, False at the deadline or when a key is refused."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLOUT)
        poller.register(self._handshakes.monitor, zmq.POLLIN)
        while True:
            left_ms = max(0, math.ceil((deadline_s - time.monotonic()) * 1000))
            if self._socket in (ready := dict(poller.poll(left_ms))):
                return True
            while self._handshakes.read() is not None:
                pass
            if not ready or self._handshakes.refusal is not None:
                return False

    def _wait_for_reply(self, request: Request, deadline_s: float) -> Reply:
        for parts in self._messages(deadline_s):
            try:
                reply = unpack_reply(parts[-1])
            except WireError:
                continue
            # a reply to a malformed request has id 0; other ids belong to calls that timed out
            if reply.id == request.id or (reply.id == 0 and not reply.ok):
                return reply
        self._reopen()
        raise NoAnswerError(
            f"no answer to '{request.op}' from {self._endpoint} within {self._timeout_ms} ms:"
            " the node is busy or hangs, or another program uses that endpoint"
        )

    def _messages(self, deadline_s: float) -> Iterator[list[memoryview]]:
        while (left_ms := int((deadline_s - time.monotonic()) * 1000)) > 0:
            if self._socket.poll(left_ms):
                parts = receive_parts(self._socket)
                if parts is not None:
                    yield parts

    def _reopen(self) -> None:
        # the old socket may have a dead connection, or one that libzmq no longer tries to restore
        self._close()
        self._open()


def _read_result(reply: Reply) -> Any:
    if reply.error is None:
        return reply.result
    raise make_error(reply.error.code, reply.error.message)
