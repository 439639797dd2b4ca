"""Counts of the peers of a bound socket."""

from __future__ import annotations

import threading
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _FAILED


class PeerCounter:
    """Counter of a socket's connected peers, from the events of its monitor. Create it before the socket is bound.

    Any thread may call it.
    """

    def __init__(self, socket: zmq.Socket[Any]) -> None:
        self._socket = socket
        self._monitor = socket.get_monitor_socket(_EVENTS)
        self._lock = threading.Lock()
        self._connected = self._failed = 0

    def wait(self, timeout_ms: int) -> bool:
        """Wait at most `timeout_ms` for an event. Return True if a peer is connected."""
        with self._lock:
            while not self._monitor.closed and self._monitor.poll(timeout_ms):
                self._count(recv_monitor_message(self._monitor)["event"])
                timeout_ms = 0
            return self._connected > 0

    def close(self) -> None:
        """Stop counting. Call it before the socket is closed. Idempotent."""
        with self._lock:
            if not self._monitor.closed:
                self._socket.disable_monitor()
                self._monitor.close(0)

    def _count(self, event: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._connected += 1
        elif event & _FAILED:  # DISCONNECTED follows
            self._failed += 1
        elif self._failed:
            self._failed -= 1
        else:
            self._connected = max(0, self._connected - 1)
