"""ZeroMQ sockets with the options of this package: heartbeats, fast reconnects, bounded queues and messages."""

from __future__ import annotations

import re
import socket as posix
from collections.abc import Sequence
from typing import Any, TypeAlias

import zmq

from ..errors import TransportError
from ..types import Buffer
from .peers import PeerCounter

Socket: TypeAlias = zmq.Socket[Any]

MAX_FRAME_BYTES = 1 << 28
"""Maximum size of a part of a frame message. ZeroMQ closes a connection that sends more."""
MAX_MESSAGE_BYTES = 1 << 26
"""Maximum size of a part of a masks or control message."""
MAX_PARTS = 8
"""Maximum number of parts of a message."""

_ENDPOINT = re.compile(r"tcp://[^/]+:(?P<port>\*|[0-9]{1,5})|ipc://[^\0]+")
_ENDPOINT_HINT = "expected tcp://host:port or ipc://path"
_BIND_HINT = "expected an address of this machine, such as 127.0.0.1 or *, or a path in a writable folder"
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
    kind: int, queue: int, max_bytes: int, heartbeats: bool = True, context: zmq.Context[Socket] | None = None
) -> Socket:
    """Open a socket that queues at most `queue` messages per peer and accepts parts of at most `max_bytes`.

    Heartbeats detect a peer that hangs. They must be off if a peer may stop reading on purpose: libzmq does not read
    pongs behind a full queue, so it takes the peer for dead and loses the messages in transit.
    """
    socket: Socket = (context or zmq.Context.instance()).socket(kind)
    options = _COMMON_OPTIONS | (_HEARTBEATS if heartbeats else {})
    for option, value in (options | {zmq.MAXMSGSIZE: max_bytes}).items():
        socket.setsockopt(option, value)
    socket.set_hwm(queue)
    return socket


class BoundSocket:
    """A socket bound to `endpoint`, in a context of its own. `.endpoint` has port 0 and * resolved.

    Terminating the context is the only way to wait until libzmq has sent the queue and released the address.
    Raises TransportError that names the endpoint and the remedy: in use, no such address, malformed.
    """

    def __init__(self, kind: int, endpoint: str, queue: int, max_bytes: int, heartbeats: bool = True) -> None:
        _check_endpoint(endpoint)
        _check_ipc_free(endpoint)
        self._context = zmq.Context()
        self.socket = open_socket(kind, queue, max_bytes, heartbeats, self._context)
        self.peers = PeerCounter(self.socket)
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close(0)
            raise _explain("bind", endpoint, error) from error
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def close(self, linger_ms: int) -> None:
        """Close, and wait at most `linger_ms` until the queue is sent. Idempotent."""
        self.peers.close()
        self.socket.close(linger_ms)
        self._context.term()


def connect(socket: Socket, endpoint: str) -> None:
    """Connect `socket`. The peer may bind later. Raises TransportError for a malformed endpoint."""
    _check_endpoint(endpoint)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise _explain("connect", endpoint, error) from error


def receive_parts(socket: Socket) -> list[memoryview] | None:
    """Return the parts of the next message, read-only and not copied, or None when no message waits.

    A message of more than MAX_PARTS parts is read to its end, and returned with MAX_PARTS + 1 parts.
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


def send_parts(socket: Socket, parts: Sequence[Buffer], max_bytes: int) -> bool:
    """Send one message without waiting. Large parts are not copied. Return False when the queue is full.

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
    # libzmq would truncate port 70000 to 4464
    if not match or (port and port.isdigit() and int(port) > 65535):
        raise TransportError(f"endpoint {endpoint!r}: {_ENDPOINT_HINT}")


def _check_ipc_free(endpoint: str) -> None:
    # libzmq unlinks the path before it binds: it would silently take the address from a running process
    scheme, _, path = endpoint.partition("://")
    if scheme != "ipc" or path.startswith(("*", "@")):
        return
    with posix.socket(posix.AF_UNIX, posix.SOCK_STREAM) as probe:
        probe.settimeout(0.5)
        try:
            probe.connect(path)
        except OSError:
            return
    raise _in_use_error(endpoint)


def _in_use_error(endpoint: str) -> TransportError:
    return TransportError(
        f"cannot bind {endpoint}: another process uses it; stop that process, or choose another endpoint"
    )


def _explain(verb: str, endpoint: str, error: zmq.ZMQError) -> TransportError:
    if error.errno == zmq.EADDRINUSE:
        return _in_use_error(endpoint)
    reason = zmq.strerror(error.errno or 0).lower()
    hint = _BIND_HINT if verb == "bind" else _ENDPOINT_HINT
    return TransportError(f"cannot {verb} {endpoint}: {reason}; {hint}")
