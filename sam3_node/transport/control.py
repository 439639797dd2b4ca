"""Control requests and replies: a ROUTER socket in the node, and a DEALER socket in each client."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import zmq

from ..errors import NoAnswerError, RequestError, Sam3NodeError, TransportError, WireError
from ..types import Buffer, Closeable
from ..wire import Failure, Reply, Request, pack_reply, pack_request, unpack_reply, unpack_request
from .channels import FrameSubscriber
from .sockets import (
    MAX_MESSAGE_BYTES,
    BoundSocket,
    Socket,
    connect,
    open_socket,
    receive_parts,
    send_parts,
)

QUEUE = 64
LINGER_MS = 100
MAX_MALFORMED_PER_CALL = 64

Peer = tuple[bytes, ...]
"""The envelope of a request, which routes the reply."""


class ControlServer(Closeable):
    """A server of control requests on `endpoint`. `.endpoint` is the bound endpoint, with port 0 and * resolved.

    It is a context manager, and serves DEALER and REQ peers. Raises TransportError when the endpoint is malformed or
    in use.
    """

    def __init__(self, endpoint: str) -> None:
        self.rejected = 0
        self.last_error: str | None = None
        self._bound = BoundSocket(zmq.ROUTER, endpoint, QUEUE, MAX_MESSAGE_BYTES)
        self._socket = self._bound.socket
        self.endpoint = self._bound.endpoint

    def receive(self, timeout_ms: int = 0) -> tuple[Peer, Request] | None:
        """Return the next request and the peer to reply to, or None when no request arrives in time.

        A malformed request is answered with the error `bad_message` and counted in `rejected`. After
        MAX_MALFORMED_PER_CALL of them the call returns None, so that a flood cannot block the caller.
        """
        for _ in range(MAX_MALFORMED_PER_CALL):
            if not self._socket.poll(timeout_ms):
                return None
            parts = receive_parts(self._socket)
            if parts is None:
                return None
            request = self._unpack(parts)
            if request is not None:
                return _envelope(parts), request
        return None

    def reply(self, peer: Peer, reply: Reply) -> None:
        """Answer a request without waiting. A peer that has gone, or does not read, loses its reply."""
        send_parts(self._socket, [*peer, pack_reply(reply)], MAX_MESSAGE_BYTES)

    @property
    def wakeup(self) -> Socket:
        """Socket to poll for requests."""
        return self._socket

    def close(self) -> None:
        """Stop answering. Queued replies are still sent. Idempotent."""
        self._bound.close(LINGER_MS)

    def _unpack(self, parts: list[memoryview]) -> Request | None:
        try:
            if len(_envelope(parts)) + 1 != len(parts):
                raise WireError(f"request: expected 1 part after the envelope, found {len(parts) - 1}")
            return unpack_request(parts[-1])
        except WireError as error:
            self.rejected += 1
            self.last_error = str(error)
            self.reply(_envelope(parts), Reply.failed(0, error))
            return None


class ControlClient(Closeable):
    """A client of the node at `endpoint`. It waits at most `timeout_ms` for each reply. A context manager.

    Threads that share a client take turns: there is one call at a time. Raises TransportError for a malformed
    endpoint; the node may start later.
    """

    def __init__(self, endpoint: str, timeout_ms: int = 2000) -> None:
        self._endpoint = endpoint
        self._timeout_ms = timeout_ms
        self._ids = itertools.count(1)
        self._turn = threading.Lock()
        self._socket = self._open()

    def call(self, op: str, **args: Any) -> Any:
        """Request an operation and return its result.

        Raises the error class of the code in the reply (RequestError if the code is unknown). Raises NoAnswerError
        when no node is connected or no reply arrives in time; in the latter case the node may still execute the
        operation.
        """
        with self._turn:
            if self._socket.closed:
                raise TransportError(f"cannot send a request to {self._endpoint}: this client is closed")
            deadline_s = time.monotonic() + self._timeout_ms / 1000
            request = Request(next(self._ids), op, args)
            self._send(pack_request(request), op)
            return _read_result(self._wait_for_reply(request, deadline_s))

    def close(self) -> None:
        """Close the connection. Idempotent."""
        with self._turn:
            self._socket.close(0)

    def _open(self) -> Socket:
        socket = open_socket(zmq.DEALER, QUEUE, MAX_MESSAGE_BYTES)
        # never queue for a node that is not connected: it would execute the request long after the call has failed
        socket.setsockopt(zmq.IMMEDIATE, 1)
        try:
            connect(socket, self._endpoint)
        except TransportError:
            socket.close(0)
            raise
        return socket

    def _send(self, body: Buffer, op: str) -> None:
        if self._socket.poll(self._timeout_ms, zmq.POLLOUT) and send_parts(
            self._socket, [body], MAX_MESSAGE_BYTES
        ):
            return
        self._reopen()
        raise NoAnswerError(
            f"no node is connected at {self._endpoint}: '{op}' could not be sent within {self._timeout_ms} ms;"
            " start the node, or correct the endpoint"
        )

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
        self._socket.close(0)
        self._socket = self._open()


def poll(frames: FrameSubscriber, control: ControlServer, timeout_ms: int | None = None) -> bool:
    """Wait for a frame or a request. Return False when neither arrives within `timeout_ms` (None: no limit)."""
    sources: list[tuple[Any, int]] = [(frames.wakeup, zmq.POLLIN), (control.wakeup, zmq.POLLIN)]
    return bool(zmq.zmq_poll(sources, -1 if timeout_ms is None else timeout_ms))


def _envelope(parts: list[memoryview]) -> Peer:
    return tuple(bytes(part) for part in parts[: 2 if len(parts) > 2 and not parts[1].nbytes else 1])


def _read_result(reply: Reply) -> Any:
    if reply.error is None:
        return reply.result
    raise _to_error(reply.error)


def _to_error(failure: Failure) -> Sam3NodeError:
    classes = {error.code: error for error in _list_error_classes(Sam3NodeError)}
    error_class = classes.get(failure.code)
    return error_class(failure.message) if error_class else RequestError(f"{failure.code}: {failure.message}")


def _list_error_classes(root: type[Sam3NodeError]) -> Iterator[type[Sam3NodeError]]:
    yield root
    for child in root.__subclasses__():
        yield from _list_error_classes(child)
