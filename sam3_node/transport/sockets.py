"""ZeroMQ sockets with this project's options: heartbeats, quick reconnects, bounded queues and messages."""

from __future__ import annotations

import re
import socket as posix
from collections.abc import Sequence

import zmq

from ..errors import TransportError
from ..types import Buffer

MAX_FRAME_BYTES = 1 << 28
"""Largest part of a frame message; more makes ZeroMQ drop the connection that it comes over."""
MAX_MESSAGE_BYTES = 1 << 26
"""Largest part of a masks or control message."""
MAX_PARTS = 8

_ENDPOINT = re.compile(r"tcp://[^/]+:(?P<port>\*|[0-9]{1,5})|ipc://[^\0]+")
_EXPECTED = "expected tcp://host:port or ipc://path"
_BINDABLE = "expected an address of this machine, such as 127.0.0.1 or *, or a path in a writable folder"
_COMMON_OPTIONS = {
    zmq.LINGER: 200,
    zmq.RECONNECT_IVL: 100,
    zmq.RECONNECT_IVL_MAX: 500,
    zmq.CONNECT_TIMEOUT: 1000,
    zmq.HANDSHAKE_IVL: 2000,
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 5,
    zmq.TCP_KEEPALIVE_INTVL: 2,
    zmq.TCP_KEEPALIVE_CNT: 3,
}
_HEARTBEATS = {zmq.HEARTBEAT_IVL: 500, zmq.HEARTBEAT_TIMEOUT: 1500, zmq.HEARTBEAT_TTL: 2000}


def open_socket(
    kind: int, queue: int, max_bytes: int, heartbeats: bool = True, context: zmq.Context | None = None
) -> zmq.Socket:
    """A socket that queues at most `queue` messages per peer and takes parts of at most `max_bytes`.

    Heartbeats notice a peer that hangs. They must be off where a peer may stop reading on purpose: libzmq
    does not read pongs behind a full queue, takes the peer for dead and loses what was under way.
    """
    socket = (context or zmq.Context.instance()).socket(kind)
    options = _COMMON_OPTIONS | (_HEARTBEATS if heartbeats else {})
    for option, value in (options | {zmq.MAXMSGSIZE: max_bytes}).items():
        socket.setsockopt(option, value)
    socket.set_hwm(queue)
    return socket


class BoundSocket:
    """A socket bound to `endpoint` (port 0 and * resolved), in a context of its own.

    Ending that is the only way to wait until libzmq has sent what is queued and given the address back.
    Raises TransportError naming the endpoint and what to do: in use, no such address, malformed.
    """

    def __init__(self, kind: int, endpoint: str, queue: int, max_bytes: int, heartbeats: bool = True) -> None:
        _check_endpoint(endpoint)
        _check_ipc_free(endpoint)
        self._context = zmq.Context()
        self.socket = open_socket(kind, queue, max_bytes, heartbeats, self._context)
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close(0)
            raise _explain("bind", endpoint, error) from error
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def close(self, linger_ms: int) -> None:
        """Close, waiting at most `linger_ms` for what is queued to leave. Idempotent."""
        self.socket.close(linger_ms)
        self._context.term()


def connect(socket: zmq.Socket, endpoint: str) -> None:
    """Connect, whether or not anybody is there yet. Raises TransportError for a malformed endpoint."""
    _check_endpoint(endpoint)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise _explain("connect", endpoint, error) from error


def receive_parts(socket: zmq.Socket) -> list[memoryview] | None:
    """The parts of the next message, read-only and without a copy, or None when none waits.

    A message of more than MAX_PARTS parts is read to its end, and comes back with one part too many.
    """
    parts: list[memoryview] = []
    try:
        more = True
        while more:
            part = socket.recv(zmq.NOBLOCK, copy=False)
            more = part.more
            if len(parts) <= MAX_PARTS:
                parts.append(part.buffer.toreadonly())
    except zmq.Again:
        return None
    return parts


def send_parts(socket: zmq.Socket, parts: Sequence[Buffer], max_bytes: int) -> bool:
    """Send one message without waiting and without copying large parts; False when the queue is full.

    Raises TransportError when a part is larger than subscribers accept.
    """
    largest = max(memoryview(part).nbytes for part in parts)
    if largest > max_bytes:
        raise TransportError(
            f"a message part may hold {max_bytes} bytes, found {largest}; send a smaller or compressed image"
        )
    try:
        socket.send_multipart(parts, zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return False
    return True


def _check_endpoint(endpoint: str) -> None:
    match = _ENDPOINT.fullmatch(endpoint)
    port = match["port"] if match else None
    # libzmq would take port 70000 for 4464
    if not match or (port and port.isdigit() and int(port) > 65535):
        raise TransportError(f"endpoint {endpoint!r}: {_EXPECTED}")


def _check_ipc_free(endpoint: str) -> None:
    # libzmq unlinks the path before it binds: it would take the address from a living process without a word
    scheme, _, path = endpoint.partition("://")
    if scheme != "ipc" or path.startswith(("*", "@")):
        return
    with posix.socket(posix.AF_UNIX, posix.SOCK_STREAM) as probe:
        probe.settimeout(0.5)
        try:
            probe.connect(path)
        except OSError:
            return
    raise TransportError(_in_use(endpoint))


def _in_use(endpoint: str) -> str:
    return f"cannot bind {endpoint}: another process has it; stop that one, or choose another endpoint"


def _explain(verb: str, endpoint: str, error: zmq.ZMQError) -> TransportError:
    if error.errno == zmq.EADDRINUSE:
        return TransportError(_in_use(endpoint))
    reason = zmq.strerror(error.errno or 0).lower()
    hint = _BINDABLE if verb == "bind" else _EXPECTED
    return TransportError(f"cannot {verb} {endpoint}: {reason}; {hint}")
