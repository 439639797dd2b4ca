"""A peer that speaks ZMTP 3.1 over a plain TCP socket, so that it can send what libzmq would not."""

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.patience import PATIENCE_S

_GREETING = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00NULL" + b"\0" * 48
_MORE = 1
_LONG = 2
_COMMAND = 4


def frame(body: bytes, *, more: bool = False, command: bool = False) -> bytes:
    """Return a part of a message, or a command."""
    flags = _MORE * more | _COMMAND * command
    if len(body) > 255:
        return struct.pack(">BQ", flags | _LONG, len(body)) + body
    return struct.pack(">BB", flags, len(body)) + body


def ping(ttl_ds: int = 20) -> bytes:
    """Return a PING that wants another of our messages within `ttl_ds` tenths of a second."""
    return frame(b"\x04PING" + struct.pack(">H", ttl_ds) + b"context", command=True)


def connect(endpoint: str) -> socket.socket:
    """Open a TCP connection to an endpoint."""
    host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


@contextmanager
def raw_peer(endpoint: str, kind: str) -> Iterator[socket.socket]:
    """Connect a peer of socket type `kind` to a bound socket; yield it after the handshake."""
    with connect(endpoint) as connection:
        connection.sendall(_GREETING)
        _read(connection, len(_GREETING))
        name = b"Socket-Type"
        value = kind.encode()
        ready = b"\x05READY" + bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
        connection.sendall(frame(ready, command=True))
        _, size = _read(connection, 2)
        _read(connection, size)
        yield connection


def reset(connection: socket.socket) -> None:
    """Close the connection so that the other end finds an error, not an end."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        assert piece, "the connection was closed in the handshake"
        data += piece
    return data
