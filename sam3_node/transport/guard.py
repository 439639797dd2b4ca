"""Cuts off peers that send more to a bound socket than its use needs.

libzmq bounds a message part, but not the parts of a message, the subscriptions of a peer, or what peers send before the
owner of the socket looks at it. The kernel counts the bytes of each TCP connection, so a thread reads those counts.
Bytes alone do not tell the memory: libzmq takes 64 bytes for an empty part, which has 2 on the wire. So where the owner
reports what it has read, the thread also watches the resident memory of the process while much has not been read.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket as posix
import struct
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from .monitor import read_event

log = logging.getLogger(__name__)

PERIOD_MS = 20
CUT_PERIOD_MS = 250
"""The same, while all connections are local sockets: their bytes are not counted."""
MAX_CONNECTIONS = 256
LOG_EVERY_S = 10.0
LARGE_SHARE = 1 / 8
"""Share of the budget that a connection keeps after others were cut off, which may have been the same peer."""
MAX_UNREAD_BYTES = 1 << 20
"""What peers have sent and the owner has not read may take 32 times this memory before memory is watched."""
COMMANDS_PER_S = 64
"""Bytes per second of a connection that may be commands of the protocol, which nobody reads."""
_BYTES_RECEIVED = struct.Struct("=Q")
_BYTES_RECEIVED_OFFSET = 128  # of tcpi_bytes_received in Linux' struct tcp_info
_OPENED_OR_CLOSED = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
_EVENTS = _OPENED_OR_CLOSED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_MONITOR_STOPPED


@dataclass(slots=True)
class _Connection:
    peer: object
    opened_s: float
    received: int = 0
    read: float = 0.0

    @property
    def unread(self) -> float:
        """Bytes that the owner of the socket has not read, a whole number of commands apart."""
        return max(0.0, self.received - self.read)


class ConnectionGuard:
    """Watches the TCP connections of a socket that is not bound yet, in a thread, until the socket's monitor stops.

    Each connection may send `bytes_per_s`. What all of them have sent beyond that must not exceed `max_bytes`: when it
    does, the connection that has sent most beyond its rate is shut down. What it sent counts on for a while, so a peer
    that connects again and again gets LARGE_SHARE of the budget. Each connection beyond MAX_CONNECTIONS is shut down.
    With `watches_memory` the owner calls `count_read`, and the connection with most unread bytes is shut down when the
    process grows by `max_growth_bytes` while more than MAX_UNREAD_BYTES are unread.
    Needs Linux; elsewhere nothing is cut off.
    """

    def __init__(
        self,
        socket: zmq.Socket[Any],
        max_bytes: int,
        bytes_per_s: int,
        max_growth_bytes: int,
        watches_memory: bool = False,
    ) -> None:
        self._max_bytes, self._bytes_per_s = max_bytes, bytes_per_s
        self._max_growth_bytes = max_growth_bytes
        self._watches_memory = watches_memory
        self._counting = threading.Lock()  # of what was read
        self._unread_of_closed = 0.0
        self._base_rss = _read_rss()
        self._connections: dict[int, _Connection] = {}  # by file descriptor
        self._local: set[int] = set()  # descriptors of connections of ipc://
        self._cuts_all = threading.Event()
        self._excess_cut_off = 0.0  # of connections that were cut off: they may come again
        self._inspected_s = time.monotonic()
        self._next_log_s = 0.0
        self.cut_off = 0
        """Number of connections that were shut down."""
        self._peers = 0  # at most: connections whose handshake has succeeded
        # by descriptor: whether a handshake has succeeded since it was opened
        self._maybe_peers: dict[int, bool] = {}
        self._peers_changed = threading.Condition()
        self._counted, self._ended = threading.Event(), False
        self._wake_reader, self._wake_writer = os.pipe()
        self._monitor = socket.get_monitor_socket(_EVENTS)
        self._thread = threading.Thread(target=self._run, name="connection guard", daemon=True)
        self._thread.start()

    def count_connections(self) -> int:
        """Return the number of open connections, also of peers that are not authenticated yet.

        All that were accepted before the call count: the thread reads the events that wait. One thread may call it.
        """
        self._counted.clear()
        os.write(self._wake_writer, b"\0")
        if not self._ended:
            self._counted.wait()
        return len(self._connections) + len(self._local)

    def wait_for_peer(self, timeout_ms: int) -> bool:
        """Wait at most `timeout_ms`. Return True if a peer is connected. Any thread may call it."""
        with self._peers_changed:
            return self._peers_changed.wait_for(lambda: self._peers > 0, timeout_ms / 1000)

    def count_read(self, sizes: Mapping[int, int], is_all: bool) -> None:
        """Record the bytes that were read from connections, by descriptor, and whether no whole message waits now."""
        with self._counting:
            for descriptor, size in sizes.items():
                if descriptor in self._connections:
                    self._connections[descriptor].read += size
                else:
                    self._unread_of_closed = max(0.0, self._unread_of_closed - size)
            if is_all:
                self._unread_of_closed = 0.0

    def cut_off_all(self) -> None:
        """Shut down all connections soon. Any thread may call it."""
        self._cuts_all.set()

    def join(self) -> None:
        """Wait until the thread has ended, after the socket's monitor was stopped."""
        self._thread.join()
        self._monitor.close(0)

    def release(self) -> None:
        """Close the descriptors. Call it after `join`, when nobody counts connections any more."""
        os.close(self._wake_writer)
        os.close(self._wake_reader)

    def _run(self) -> None:
        try:
            while self._read_events(self._choose_period()):
                if self._cuts_all.is_set():
                    self._cuts_all.clear()
                    self._shut_down_all()
                self._inspect()
        finally:
            self._ended = True
            self._counted.set()

    def _choose_period(self) -> int | None:
        if self._connections:
            return PERIOD_MS
        return CUT_PERIOD_MS if self._local else None

    def _read_events(self, timeout_ms: int | None) -> bool:
        """Update the connections. Return False once the monitor has stopped."""
        sources: list[tuple[Any, int]] = [(self._monitor, zmq.POLLIN), (self._wake_reader, zmq.POLLIN)]
        ready = dict(zmq.zmq_poll(sources, -1 if timeout_ms is None else timeout_ms))
        is_asked = self._wake_reader in ready and bool(os.read(self._wake_reader, 1))
        while (read := read_event(self._monitor)) is not None:
            event, descriptor = read
            if event == zmq.EVENT_MONITOR_STOPPED:
                return False
            self._count_peers(event, descriptor)
            if event == zmq.EVENT_ACCEPTED and sys.platform == "linux":
                self._add(descriptor)
            elif event & _OPENED_OR_CLOSED:
                self._forget(descriptor)
        if is_asked:
            self._counted.set()
        return True

    def _count_peers(self, event: int, descriptor: int) -> None:
        """Follow the number of peers. libzmq does not tell which connection a handshake belongs to.

        A connection may end without any handshake event, such as one of ZMTP 1. So an end lowers the number only as far
        as connections are missing: strangers never make a peer uncounted. One that is still connected may be counted.
        """
        with self._peers_changed:
            if event == zmq.EVENT_ACCEPTED:
                self._maybe_peers[descriptor] = False
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._peers += 1
                self._maybe_peers = dict.fromkeys(self._maybe_peers, True)
                self._peers_changed.notify_all()
            elif event == zmq.EVENT_DISCONNECTED:
                self._maybe_peers.pop(descriptor, None)
                self._peers = min(self._peers, sum(self._maybe_peers.values()))

    def _add(self, descriptor: int) -> None:
        state = _inspect_tcp(descriptor)
        if state is None:
            if _is_local(descriptor):
                self._local.add(descriptor)
            return
        if len(self._connections) >= MAX_CONNECTIONS:
            self._cut_off(descriptor, state[0], f"expected at most {MAX_CONNECTIONS} connections")
            return
        self._forget(descriptor)
        self._connections[descriptor] = _Connection(state[0], time.monotonic())

    def _forget(self, descriptor: int) -> None:
        """Remove a connection. Its whole messages still wait to be read."""
        self._local.discard(descriptor)
        with self._counting:
            connection = self._connections.pop(descriptor, None)
            if connection is not None:
                self._unread_of_closed += connection.unread

    def _shut_down_all(self) -> None:
        for descriptor, connection in list(self._connections.items()):
            self.cut_off += _inspect_tcp(descriptor, shut_down_peer=connection.peer) is not None
        for descriptor in self._local:
            self.cut_off += _is_local(descriptor, shut_down=True)

    def _inspect(self) -> None:
        now_s = time.monotonic()
        excess: dict[int, float] = {}
        for descriptor, connection in list(self._connections.items()):
            state = _inspect_tcp(descriptor)
            if state is None or state[0] != connection.peer:  # closed, and perhaps opened for another peer
                self._forget(descriptor)
                continue
            connection.received = state[1]
            allowed = self._bytes_per_s * (now_s - connection.opened_s)
            excess[descriptor] = max(0.0, connection.received - allowed)
        self._excess_cut_off = max(
            0.0, self._excess_cut_off - self._bytes_per_s * (now_s - self._inspected_s)
        )
        self._inspected_s = now_s
        while excess:
            descriptor = max(excess, key=excess.__getitem__)
            limit = self._max_bytes
            if excess[descriptor] > self._max_bytes * LARGE_SHARE:
                limit -= int(self._excess_cut_off)
            if sum(excess.values()) <= limit:
                break
            self._excess_cut_off = min(self._max_bytes, self._excess_cut_off + excess.pop(descriptor))
            connection = self._connections[descriptor]
            self._forget(descriptor)
            expected = f"expected at most {self._max_bytes} and {self._bytes_per_s} a second"
            self._cut_off(descriptor, connection.peer, f"it sent {connection.received} bytes, {expected}")
        if self._watches_memory:
            self._watch_memory()

    def _watch_memory(self) -> None:
        """Cut off the peer with most unread bytes if the process has grown while much is unread."""
        rss = _read_rss()
        with self._counting:
            for connection in self._connections.values():
                connection.read = min(
                    connection.read + COMMANDS_PER_S * PERIOD_MS / 1000, float(connection.received)
                )
            unread = {descriptor: connection.unread for descriptor, connection in self._connections.items()}
        if sum(unread.values()) + self._unread_of_closed <= MAX_UNREAD_BYTES:
            self._base_rss = rss
            return
        grown = rss - self._base_rss
        descriptor = max(unread, key=unread.__getitem__, default=-1)
        if grown <= self._max_growth_bytes or unread.get(descriptor, 0) * len(unread) <= MAX_UNREAD_BYTES:
            return
        connection = self._connections[descriptor]
        self._forget(descriptor)
        self._cut_off(
            descriptor,
            connection.peer,
            f"{connection.unread:.0f} bytes of it wait and the process has grown by {grown} bytes,"
            f" expected at most {self._max_growth_bytes}",
        )

    def _cut_off(self, descriptor: int, peer: object, reason: str) -> None:
        self.cut_off += _inspect_tcp(descriptor, shut_down_peer=peer) is not None
        if time.monotonic() >= self._next_log_s:
            self._next_log_s = time.monotonic() + LOG_EVERY_S
            log.warning("a peer at %s was cut off: %s", peer, reason)


def _read_rss() -> int:
    """Return the resident memory of this process in bytes; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0


def _is_local(descriptor: int, shut_down: bool = False) -> bool:
    """Return True if this is a connection that libzmq accepted over `ipc://`. The descriptor is not closed."""
    try:
        connection = posix.socket(fileno=descriptor)
    except OSError:
        return False
    try:
        is_local = connection.family == posix.AF_UNIX and bool(connection.getsockname())
        if is_local and shut_down:
            connection.shutdown(posix.SHUT_RDWR)
        return is_local
    except OSError:
        return False
    finally:
        connection.detach()


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
