"""One connection that never gives up: a connecting socket, watched through its monitor."""

from __future__ import annotations

import time

import zmq
from zmq.utils.monitor import recv_monitor_message

from .sockets import connect

DEAD_AFTER_S = 1.5
_ATTEMPTS = zmq.EVENT_CONNECT_DELAYED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_CONNECTED
_EVENTS = _ATTEMPTS | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class Link:
    """Connects `socket` to one endpoint and owns it. `alive` while a peer there has shaken hands.

    libzmq gives an endpoint up for good when the peer there broke the protocol or sent a part that is too
    large; `update` connects anew then. One endpoint per socket, since a monitor may name a host by number.
    """

    def __init__(self, socket: zmq.Socket, endpoint: str) -> None:
        self.socket = socket
        self.endpoint = endpoint
        self.monitor = socket.get_monitor_socket(_EVENTS)
        self.alive = False
        self._heard_s = time.monotonic()
        try:
            connect(socket, endpoint)
        except BaseException:
            self.close()
            raise

    def update(self) -> None:
        """Read the monitor's news; where the socket has stopped trying, connect anew."""
        while self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)["event"]
            self._heard_s = time.monotonic()
            if event in (zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED):
                self.alive = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        # a socket that still tries is heard of several times a second
        if not self.alive and time.monotonic() - self._heard_s > DEAD_AFTER_S:
            self._heard_s = time.monotonic()
            self.socket.disconnect(self.endpoint)
            self.socket.connect(self.endpoint)

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)
