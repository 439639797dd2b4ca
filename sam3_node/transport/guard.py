"""Cuts off peers that send more to a bound socket than its use needs.

libzmq bounds a message part, but not the parts of a message, the subscriptions of a peer, or what peers send before the
owner of the socket looks at it. The kernel counts the bytes of each TCP connection, so a thread reads those counts.
"""

from __future__ import annotations

import logging
import socket as posix
import struct
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

log = logging.getLogger(__name__)

PERIOD_MS = 20
MAX_CONNECTIONS = 1000
LOG_EVERY_S = 10.0
_BYTES_RECEIVED = struct.Struct("=Q")
_BYTES_RECEIVED_OFFSET = 128  # of tcpi_bytes_received in Linux' struct tcp_info
_OPENED_OR_CLOSED = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_EVENTS = _OPENED_OR_CLOSED | _FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_MONITOR_STOPPED


@dataclass(slots=True)
class _Connection:
    peer: object
    opened_s: float
    received: int = 0


class ConnectionGuard:
    """Watches the TCP connections of a socket that is not bound yet, in a thread, until the socket's monitor stops.

    Each connection may send `bytes_per_s`. What all of them have sent beyond that must not exceed `max_bytes`: when it
    does, the connection that has sent most beyond its rate is shut down. So is each connection beyond MAX_CONNECTIONS.
    Needs Linux; elsewhere nothing is cut off.
    """

    def __init__(self, socket: zmq.Socket[Any], max_bytes: int, bytes_per_s: int) -> None:
        self._max_bytes, self._bytes_per_s = max_bytes, bytes_per_s
        self._connections: dict[int, _Connection] = {}  # by file descriptor
        self._next_log_s = 0.0
        self.cut_off = 0
        """Number of connections that were shut down."""
        self._peers = self._failed = (
            0  # handshakes that succeeded; those that failed, until the connection ends
        )
        self._peers_changed = threading.Condition()
        self._monitor = socket.get_monitor_socket(_EVENTS)
        self._thread = threading.Thread(target=self._run, name="connection guard", daemon=True)
        self._thread.start()

    def wait_for_peer(self, timeout_ms: int) -> bool:
        """Wait at most `timeout_ms`. Return True if a peer is connected. Any thread may call it."""
        with self._peers_changed:
            return self._peers_changed.wait_for(lambda: self._peers > 0, timeout_ms / 1000)

    def join(self) -> None:
        """Wait until the thread has ended, after the socket's monitor was stopped."""
        self._thread.join()
        self._monitor.close(0)

    def _run(self) -> None:
        while self._read_events(PERIOD_MS if self._connections else None):
            self._inspect()

    def _read_events(self, timeout_ms: int | None) -> bool:
        """Update the connections. Return False once the monitor has stopped."""
        while self._monitor.poll(timeout_ms):
            message = recv_monitor_message(self._monitor)
            event, descriptor = message["event"], message["value"]
            if event == zmq.EVENT_MONITOR_STOPPED:
                return False
            self._count_peers(event)
            if event == zmq.EVENT_ACCEPTED and sys.platform == "linux":
                self._add(descriptor)
            elif event & _OPENED_OR_CLOSED:
                self._connections.pop(descriptor, None)
            timeout_ms = 0
        return True

    def _count_peers(self, event: int) -> None:
        with self._peers_changed:
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._peers += 1
                self._peers_changed.notify_all()
            elif event & _FAILED:  # DISCONNECTED follows
                self._failed += 1
            elif event == zmq.EVENT_DISCONNECTED and self._failed:
                self._failed -= 1
            elif event == zmq.EVENT_DISCONNECTED:
                self._peers = max(0, self._peers - 1)

    def _add(self, descriptor: int) -> None:
        state = _inspect_tcp(descriptor)
        if state is None:
            return
        if len(self._connections) >= MAX_CONNECTIONS:
            self._cut_off(descriptor, state[0], f"expected at most {MAX_CONNECTIONS} connections")
            return
        self._connections[descriptor] = _Connection(state[0], time.monotonic())

    def _inspect(self) -> None:
        now_s = time.monotonic()
        excess: dict[int, float] = {}
        for descriptor, connection in list(self._connections.items()):
            state = _inspect_tcp(descriptor)
            if state is None or state[0] != connection.peer:  # closed, and perhaps opened for another peer
                del self._connections[descriptor]
                continue
            connection.received = state[1]
            allowed = self._bytes_per_s * (now_s - connection.opened_s)
            excess[descriptor] = max(0.0, connection.received - allowed)
        while sum(excess.values()) > self._max_bytes:
            descriptor = max(excess, key=excess.__getitem__)
            del excess[descriptor]
            connection = self._connections.pop(descriptor)
            expected = f"expected at most {self._max_bytes} and {self._bytes_per_s} a second"
            self._cut_off(descriptor, connection.peer, f"it sent {connection.received} bytes, {expected}")

    def _cut_off(self, descriptor: int, peer: object, reason: str) -> None:
        self.cut_off += _inspect_tcp(descriptor, shut_down_peer=peer) is not None
        if time.monotonic() >= self._next_log_s:
            self._next_log_s = time.monotonic() + LOG_EVERY_S
            log.warning("a peer at %s was cut off: %s", peer, reason)


def _inspect_tcp(descriptor: int, shut_down_peer: object = None) -> tuple[object, int] | None:
    """Return peer and received bytes of a TCP connection of libzmq, or None if it is not open.

    Shut it down if its peer is `shut_down_peer`. The descriptor belongs to libzmq and is not closed.
    """
    try:
        connection = posix.socket(fileno=descriptor)
    except OSError:
        return None
    try:
        peer = connection.getpeername()
        info = connection.getsockopt(posix.IPPROTO_TCP, posix.TCP_INFO, 256)
        if len(info) < _BYTES_RECEIVED_OFFSET + _BYTES_RECEIVED.size:
            return None
        if shut_down_peer is not None and peer == shut_down_peer:
            connection.shutdown(posix.SHUT_RDWR)
        return peer, _BYTES_RECEIVED.unpack_from(info, _BYTES_RECEIVED_OFFSET)[0]
    except OSError:
        return None
    finally:
        connection.detach()
