"""Requests and replies: the node's ROUTER, and the DEALER of whoever asks.

Waiting for frames and requests at once."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import zmq

from ..errors import RequestError, Sam3NodeError, TransportError, WireError
from ..types import Buffer, Closeable
from ..wire import Failure, Reply, Request, pack_reply, pack_request, unpack_reply, unpack_request
from .channels import FrameSubscriber
from .sockets import MAX_MESSAGE_BYTES, BoundSocket, connect, open_socket, receive_parts, send_parts

QUEUE = 64
LINGER_MS = 100
MALFORMED_PER_CALL = 64

Peer = tuple[bytes, ...]
"""The envelope of a request, which leads its reply back."""


class ControlServer(Closeable):
    """Binds `endpoint` and answers requests; `.endpoint` is the one really bound. A context manager.

    Serves DEALER peers, and REQ peers too. Raises TransportError when the endpoint is malformed or in use.
    """

    def __init__(self, endpoint: str) -> None:
        self.rejected = 0
        self.last_error: str | None = None
        self._bound = BoundSocket(zmq.ROUTER, endpoint, QUEUE, MAX_MESSAGE_BYTES)
        self._socket = self._bound.socket
        self.endpoint = self._bound.endpoint

    def receive(self, timeout_ms: int = 0) -> tuple[Peer, Request] | None:
        """The next request and whom to reply to, or None when none came in time.

        A malformed one is answered with the error `bad_message` and counted in `rejected`; after
        MALFORMED_PER_CALL of them the call returns None, so that a flood cannot hold the caller.
        """
        for _ in range(MALFORMED_PER_CALL):
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
        """Answer a request. A peer that has gone, or does not read, loses its reply; nobody waits for it."""
        send_parts(self._socket, [*peer, pack_reply(reply)], MAX_MESSAGE_BYTES)

    @property
    def wakeup(self) -> zmq.Socket:
        """The socket to poll for requests."""
        return self._socket

    def close(self) -> None:
        """Stop answering; replies on their way still leave. Idempotent."""
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
    """Asks the node at `endpoint`, and waits at most `timeout_ms` for each answer. A context manager.

    One call at a time; threads that share a client take turns. Raises TransportError for a malformed
    endpoint; nobody has to be there yet.
    """

    def __init__(self, endpoint: str, timeout_ms: int = 2000) -> None:
        self._endpoint = endpoint
        self._timeout_ms = timeout_ms
        self._ids = itertools.count(1)
        self._turn = threading.Lock()
        self._socket = self._open()

    def call(self, op: str, **args: Any) -> Any:
        """Ask for an operation and return its result.

        Raises the error that the answer's code names (RequestError where the code is unknown), TransportError
        when nobody was there or no answer came in time. After the latter the node may still carry it out.
        """
        with self._turn:
            if self._socket.closed:
                raise TransportError(f"cannot ask {self._endpoint}: this client is closed")
            deadline_s = time.monotonic() + self._timeout_ms / 1000
            request = Request(next(self._ids), op, args)
            self._send(pack_request(request), op)
            return _result(self._answer(request, deadline_s))

    def close(self) -> None:
        """Close the connection. Idempotent."""
        with self._turn:
            self._socket.close(0)

    def _open(self) -> zmq.Socket:
        socket = open_socket(zmq.DEALER, QUEUE, MAX_MESSAGE_BYTES)
        # never queue for a node that is away: it would carry the request out long after the call has failed
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
        raise TransportError(
            f"nobody is at {self._endpoint}: '{op}' could not be sent within {self._timeout_ms} ms;"
            " start the node, or correct the endpoint"
        )

    def _answer(self, request: Request, deadline_s: float) -> Reply:
        for parts in self._messages(deadline_s):
            try:
                reply = unpack_reply(parts[-1])
            except WireError:
                continue
            # what could not be read as a request is answered with id 0; other ids answer calls that timed out
            if reply.id == request.id or (reply.id == 0 and not reply.ok):
                return reply
        self._reopen()
        raise TransportError(
            f"no answer to '{request.op}' from {self._endpoint} within {self._timeout_ms} ms:"
            " the node is busy or hangs, or something else has that endpoint"
        )

    def _messages(self, deadline_s: float) -> Iterator[list[memoryview]]:
        while (left_ms := int((deadline_s - time.monotonic()) * 1000)) > 0:
            if self._socket.poll(left_ms):
                parts = receive_parts(self._socket)
                if parts is not None:
                    yield parts

    def _reopen(self) -> None:
        # the old socket may hold a dead connection, or one that libzmq has given up
        self._socket.close(0)
        self._socket = self._open()


def _envelope(parts: list[memoryview]) -> Peer:
    return tuple(bytes(part) for part in parts[: 2 if len(parts) > 2 and not parts[1].nbytes else 1])


def _result(reply: Reply) -> Any:
    if reply.error is None:
        return reply.result
    raise _error(reply.error)


def _error(failure: Failure) -> Sam3NodeError:
    kinds = {kind.code: kind for kind in _family(Sam3NodeError)}
    kind = kinds.get(failure.code)
    return kind(failure.message) if kind else RequestError(f"{failure.code}: {failure.message}")


def _family(kind: type[Sam3NodeError]) -> Iterator[type[Sam3NodeError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _family(child)


def poll(frames: FrameSubscriber, control: ControlServer, timeout_ms: int | None = None) -> bool:
    """Wait for a frame or a request; False when neither came within `timeout_ms` (None: no limit)."""
    waited_for: list[tuple[Any, int]] = [(frames.wakeup, zmq.POLLIN), (control.wakeup, zmq.POLLIN)]
    return bool(zmq.zmq_poll(waited_for, -1 if timeout_ms is None else timeout_ms))
