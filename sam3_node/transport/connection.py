"""One connection that never gives up: a connecting socket, watched through its monitor.

The thread that empties connecting sockets."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Sequence

import zmq
from zmq.utils.monitor import recv_monitor_message

from ..errors import TransportError
from ..types import Closeable
from .sockets import connect, receive_parts

DEAD_AFTER_S = 1.5
_ATTEMPTS = zmq.EVENT_CONNECT_DELAYED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_CONNECTED
_EVENTS = _ATTEMPTS | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class ReconnectingSocket:
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


WATCH_MS = 250


class Listener(Closeable):
    """Owns links and the thread that takes each message off them as it comes; what becomes of it says `_accept`.

    A subclass calls `_listen` once it is ready for messages. `per_turn` messages are taken from one link before it is
    the next one's turn, so that a flood from one peer cannot starve the others.
    """

    def __init__(self, links: Sequence[ReconnectingSocket], per_turn: int) -> None:
        self._links = links
        self._per_turn = per_turn
        self._failure: Exception | None = None
        self._closing = False
        self._stop_reader, self._stop_writer = os.pipe()
        self._thread = threading.Thread(target=self._run, name=f"receive {links[0].endpoint}", daemon=True)

    @property
    def connected(self) -> tuple[str, ...]:
        """The endpoints that have a living peer now."""
        return tuple(link.endpoint for link in self._links if link.alive)

    def close(self) -> None:
        """Stop the thread and close its sockets; whoever waits for a message gets None. Idempotent."""
        if self._closing:
            return
        self._closing = True
        os.write(self._stop_writer, b"\0")
        self._wake()
        self._thread.join()
        os.close(self._stop_writer)
        os.close(self._stop_reader)

    def _listen(self) -> None:
        self._thread.start()

    def _accept(self, parts: list[memoryview], received_ns: int) -> None:
        """Deal with one message."""
        raise NotImplementedError

    def _wake(self) -> None:
        """Let everybody go who waits for a message: none will come."""
        raise NotImplementedError

    def _check(self) -> None:
        """Raise TransportError when the thread has failed."""
        if self._failure is not None:
            raise TransportError(f"the receiver stopped: {self._failure}") from self._failure

    def _update_links(self) -> None:
        for link in self._links:
            link.update()

    def _run(self) -> None:
        try:
            self._receive_until_closed()
        except Exception as error:
            self._failure = error
            self._wake()
        finally:
            for link in self._links:
                link.close()

    def _receive_until_closed(self) -> None:
        poller = zmq.Poller()
        poller.register(self._stop_reader, zmq.POLLIN)
        for link in self._links:
            poller.register(link.socket, zmq.POLLIN)
            poller.register(link.monitor, zmq.POLLIN)
        while not self._closing:
            poller.poll(WATCH_MS)
            for link in self._links:
                self._drain(link.socket)
            self._update_links()

    def _drain(self, socket: zmq.Socket) -> None:
        for _ in range(self._per_turn):
            parts = receive_parts(socket)
            if parts is None or self._closing:
                return
            self._accept(parts, time.time_ns())


def connect_all(sockets: Iterable[tuple[zmq.Socket, str]]) -> list[ReconnectingSocket]:
    """A link for each socket and its endpoint. Raises TransportError for a malformed one; all are closed then."""
    links: list[ReconnectingSocket] = []
    try:
        links.extend(ReconnectingSocket(socket, endpoint) for socket, endpoint in sockets)
    except TransportError:
        for link in links:
            link.close()
        raise
    return links
