"""The client of control requests: a DEALER socket that connects to the node."""

import itertools
import math
import os
import threading
import time
from contextlib import closing
from typing import Any

import zmq

from ..errors import (
    AuthenticationError,
    NoAnswerError,
    TransportError,
    WireError,
    current_request_id,
    make_error,
    request_id,
)
from ..schema.operations import REPEATABLE, Operation
from ..schema.replies import ReplyT
from ..types import Buffer
from ..wire import Reply, Request, pack_request, unpack_reply
from . import sockets
from .security import Security, Socket

QUEUE = 64
"""Requests that libzmq queues for the node. There is one at a time, unless calls time out and are repeated."""
REFUSAL_S = 1.0
"""Longest time to wait for the next handshake, which tells whether the key is refused."""


class ControlClient(sockets.SocketOwner):
    """A client of the node at `endpoint`. It waits at most `timeout_ms` for each reply. A context manager.

    Threads that share a client take turns: there is one call at a time. Raises TransportError for a malformed
    endpoint, AuthenticationError for a missing key; the node may start later.
    """

    def __init__(self, endpoint: str, timeout_ms: int = 2000, security: Security | None = None) -> None:
        self._keys = (security or Security.from_environment()).client_keys("node")
        self._endpoint = endpoint
        self._timeout_ms = timeout_ms
        self._ids = itertools.count(1)
        self._name = os.urandom(4).hex()  # part of the ids of its requests, before their numbers
        self._turn = threading.Lock()
        self._watch: sockets.HandshakeWatch | None = None
        self._socket = self._make_socket()
        self._connect()

    def call(self, op: str, **args: Any) -> Any:
        """Request an operation and return its result.

        Raises the error class of the code in the reply (RequestError if the code is unknown). Raises NoAnswerError when
        no node is connected, and when no reply arrives in time: the node may then still execute the operation. Raises
        AuthenticationError as soon as the node refuses the key.

        The connection may end before the reply, as every connection does when a key is revoked. The client then
        requests a REPEATABLE operation again, and raises NoAnswerError at once for any other. libzmq drops unread
        messages of an ended connection, so a reply that has just arrived may be lost.

        The request has the id of the surrounding block `request_id`, or one of its own. Its error has the same id.
        """
        return self.call_within(self._timeout_ms, op, **args)

    def ask(self, operation: Operation[ReplyT]) -> ReplyT:
        """Request an operation as `call` does, and return its reply. Raises WireError for a reply of another shape."""
        return operation.read_reply(self.call(operation.op, **operation.to_args()))

    def call_within(self, timeout_ms: int, op: str, **args: Any) -> Any:
        """Request an operation as `call` does, and wait at most `timeout_ms`. Turns of other threads count."""
        return self.call_long(timeout_ms, timeout_ms, op, **args)

    def call_long(self, send_ms: int, timeout_ms: int, op: str, **args: Any) -> Any:
        """Request an operation that takes long: wait `send_ms` at most for a node, `timeout_ms` for its answer."""
        # the number tells the reply to this call from a late reply to an earlier one
        self._require_process()
        number = next(self._ids)
        with request_id(current_request_id() or f"{self._name}-{number}"):
            return self._call(
                Request(number, op, args, current_request_id()), min(send_ms, timeout_ms), timeout_ms
            )

    def _call(self, request: Request, send_ms: int, timeout_ms: int) -> Any:
        # waiting for other threads counts: the caller has given a time for the whole call
        deadline_s = time.monotonic() + timeout_ms / 1000
        if not self._turn.acquire(timeout=timeout_ms / 1000):
            raise NoAnswerError(
                f"'{request.op}' was not sent to {self._endpoint} within {timeout_ms} ms: requests of other threads "
                "took that time; open a client for each thread, or wait longer"
            )
        # from here on, as nobody looks for the node while other threads have their turns
        send_deadline_s = min(deadline_s, time.monotonic() + send_ms / 1000)
        try:
            self._send_ms = send_ms
            self._budget_ms = timeout_ms
            # nothing is sent by a closed client, nor to a node whose key was revoked here
            if self._socket.closed:
                raise TransportError(f"cannot send a request to {self._endpoint}: this client is closed")
            if self._keys is not None and not self._keys.is_trusted:
                self._reopen()
                raise self._keys.distrust(self._endpoint)
            # packed before the connection is touched: a value that cannot be packed leaves it as it was
            body = pack_request(request)
            is_connected = self._socket.poll(0, zmq.POLLOUT)
            if not is_connected:
                # libzmq does not repeat a handshake that was refused, and its event has passed
                self._close()
                self._socket = self._make_socket()
            self._is_lost = False
            # only meanwhile: after the call no thread reads its events
            watch = sockets.HandshakeWatch(self._socket, self._endpoint, self._keys, zmq.EVENT_DISCONNECTED)
            with closing(watch) as self._watch:
                if not is_connected:
                    self._connect()
                reply = self._exchange(request, body, send_deadline_s, deadline_s)
        finally:
            self._turn.release()
        # an error of the node is raised here, with the class of its code
        if reply.error is not None:
            raise make_error(reply.error.code, reply.error.message)
        return reply.result

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if not self._is_forked:
            with self._turn:
                self._close()

    def _make_socket(self) -> Socket:
        """Return a socket that is not connected."""
        socket = sockets.open_socket(zmq.DEALER, QUEUE, sockets.MAX_MESSAGE_BYTES)
        # never queue for a node that is not connected: it would execute the request long after the call has failed
        socket.setsockopt(zmq.IMMEDIATE, 1)
        if self._keys is not None:
            self._keys.apply(socket)
        return socket

    def _connect(self) -> None:
        try:
            # a malformed endpoint: the socket must not stay open without an owner
            sockets.connect(self._socket, self._endpoint)
        except TransportError:
            self._close()
            raise

    def _close(self) -> None:
        if self._watch is not None:
            self._watch.close()  # first: libzmq's thread waits without end to send an event to a monitor that is gone
        self._socket.close(0)

    @property
    def _handshakes(self) -> sockets.HandshakeWatch:
        """The watch of this call."""
        assert self._watch is not None
        return self._watch

    def _exchange(self, request: Request, body: Buffer, send_deadline_s: float, deadline_s: float) -> Reply:
        """Send a request and return the reply. Send it again if the connection ends and it is repeatable."""
        while True:
            # one turn for each connection, until there is a reply or the deadline raises
            self._send(body, request.op, send_deadline_s)
            reply = self._wait_for_reply(request, deadline_s)
            if reply is not None:
                return reply
            # another connection has the time that the first one had
            send_deadline_s = min(deadline_s, time.monotonic() + self._send_ms / 1000)
            # the connection ended before the reply: whether the node has carried out the request is not known
            if request.op not in REPEATABLE:
                if self._keys is not None:  # the next handshake tells why the node refuses the key
                    self._wait_for_node(min(deadline_s, time.monotonic() + REFUSAL_S))
                if refusal := self._handshakes.refusal:
                    raise AuthenticationError(
                        f"{refusal}; the connection ended before '{request.op}' was answered, so it may have been"
                        " carried out"
                    )
                raise NoAnswerError(
                    f"the connection to {self._endpoint} ended before '{request.op}' was answered: a key was revoked, "
                    "or the node ended; it may have carried out the request: look, then repeat it"
                )

    def _send(self, body: Buffer, op: str, deadline_s: float) -> None:
        if self._wait_for_node(deadline_s):
            is_sent = sockets.send_parts(self._socket, [body], sockets.MAX_MESSAGE_BYTES)
            if is_sent:
                return
        refusal = self._handshakes.refusal
        # a new socket, so that the next call begins with a connection that libzmq still tries to make
        self._reopen()
        if refusal is not None:
            raise AuthenticationError(f"{refusal}; '{op}' was not sent")
        raise NoAnswerError(
            f"no node is connected at {self._endpoint}: '{op}' could not be sent within {self._send_ms} ms;"
            " start the node, or correct the endpoint"
        )

    def _wait_for_node(self, deadline_s: float) -> bool:
        """Return True when a node is connected, False at the deadline or when a key is refused.

        A connection that has ended takes messages for a moment longer, so only a new handshake counts after it.
        """
        while True:
            # a lost connection still takes messages: only the monitor tells when the next one is there
            events = 0 if self._is_lost else zmq.POLLOUT
            ready = self._poll(events, deadline_s)
            self._read_events()
            if self._socket in ready and not self._is_lost:
                return True
            if not ready or self._handshakes.refusal is not None:
                return False

    def _wait_for_reply(self, request: Request, deadline_s: float) -> Reply | None:
        """Return the reply, or None if the connection ended. Raises NoAnswerError at the deadline."""
        while self._poll(zmq.POLLIN, deadline_s) and time.monotonic() < deadline_s:
            # before the replies, so that one that came before the connection ended is read
            has_ended = self._read_events()
            while (
                time.monotonic() < deadline_s and (parts := sockets.receive_parts(self._socket)) is not None
            ):
                # what cannot be read is no reply of ours; the deadline ends the wait if no other comes
                try:
                    reply = unpack_reply(parts[-1])
                except WireError:
                    continue
                # a reply to a malformed request has id 0; other ids belong to calls that timed out
                if reply.id == request.id or (reply.id == 0 and not reply.ok):
                    return reply
            if has_ended:
                return None
        self._reopen()
        raise NoAnswerError(
            f"no answer to '{request.op}' from {self._endpoint} within {self._budget_ms} ms:"
            " the node is busy or hangs, or another program uses that endpoint"
        )

    def _poll(self, events: int, deadline_s: float) -> dict[Any, int]:
        """Wait until the socket has `events` or its monitor has some. Return the ready ones; an empty map at the
        deadline."""
        # polling the monitor as well lets a refused key or a lost connection end the wait at once
        poller = zmq.Poller()
        if events:
            poller.register(self._socket, events)
        poller.register(self._handshakes.monitor, zmq.POLLIN)
        left_ms = (deadline_s - time.monotonic()) * 1000
        return dict(poller.poll(max(0, math.ceil(left_ms))))

    def _read_events(self) -> bool:
        """Read the events of the monitor. Return True if a connection has ended, even if there is another now."""
        has_ended = False
        while (event := self._handshakes.read()) is not None:
            if event in (zmq.EVENT_DISCONNECTED, zmq.EVENT_HANDSHAKE_SUCCEEDED):
                self._is_lost = event == zmq.EVENT_DISCONNECTED
                has_ended |= self._is_lost
        return has_ended

    def _reopen(self) -> None:
        # the old socket may have a dead connection, or one that libzmq no longer tries to restore
        self._close()
        self._socket = self._make_socket()
        self._connect()


def ask_server(endpoint: str, message: bytes, timeout_ms: int) -> bytes:
    """Send one message to the REP socket of another program, such as a planner, and return its reply of one part.

    The connection has no keys. Raises TransportError for a malformed endpoint, NoAnswerError without a reply in time.
    """
    with sockets.open_socket(zmq.REQ, 1, sockets.MAX_MESSAGE_BYTES) as socket:
        sockets.connect(socket, endpoint)
        socket.send(message)
        if socket.poll(timeout_ms) and (parts := sockets.receive_parts(socket)) is not None:
            return bytes(parts[0])
    raise NoAnswerError(
        f"no answer from {endpoint} within {timeout_ms} ms: start that server, correct the endpoint, or wait longer"
    )
