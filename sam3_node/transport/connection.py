"""Connecting sockets that reconnect for as long as they are open, and the thread that reads messages from them."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence

import zmq

from ..errors import TransportError
from ..wire import BEAT_TOPIC
from .monitor import read_event
from .security import ClientKeys, Socket, explain_refusal
from .sockets import SocketOwner, connect, open_socket, receive_parts

BEAT_S = 0.5
SILENCE_LIMIT_S = 1.5
UPDATE_MS = 250
MAX_TURN_S = 2 * UPDATE_MS / 1000
_ATTEMPTS = zmq.EVENT_CONNECT_DELAYED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_CONNECTED
_REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)
_EVENTS = _ATTEMPTS | _REFUSED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
MAX_UNEXPLAINED = 3
"""Handshakes in a row that fail without detail before the key is named as the reason: the peer may just have ended."""
MAX_UNEXPLAINED_PLAIN = 10
"""The same without a key. A node that expects one may end the connection before it has said so."""

_numbers = itertools.count()

log = logging.getLogger(__name__)


class HandshakeWatch:
    """Reads the monitor of a connecting socket, and says why its handshakes fail.

    Its owner reads all events as they come, or closes it: libzmq's thread waits for space once about 1000 events wait,
    and with it all sockets of the context do.
    """

    def __init__(self, socket: Socket, endpoint: str, keys: ClientKeys | None, events: int = 0) -> None:
        self._socket = socket
        # the address of a monitor that was closed stays taken for a moment
        address = f"inproc://monitor-{next(_numbers)}"
        self.monitor = socket.get_monitor_socket(_REFUSED | zmq.EVENT_HANDSHAKE_SUCCEEDED | events, address)
        self.refusal: str | None = None
        """Why the other end cannot be used; None if it can, or was not reached yet."""
        self._endpoint, self._keys = endpoint, keys
        self._failures = 0

    def read(self) -> int | None:
        """Return the next event; None if none waits."""
        read = read_event(self.monitor)
        if read is None:
            return None
        event, value = read
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.refusal, self._failures = None, 0
        elif event & _REFUSED:
            self._failures += 1
            most = MAX_UNEXPLAINED_PLAIN if self._keys is None else MAX_UNEXPLAINED
            if event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL or self._failures >= most:
                self.refusal = explain_refusal(event, value, self._endpoint, self._keys)
        return event

    def close(self) -> None:
        """Stop the monitor. Idempotent; the socket itself stays open."""
        if not self.monitor.closed:
            if not self._socket.closed:
                self._socket.disable_monitor()
            self.monitor.close(0)


class ReconnectingSocket:
    """A socket that is connected to one endpoint. `alive` is true from the handshake with a peer to its loss.

    libzmq stops reconnecting when a peer violates the protocol or sends a part that is too large; `update` then
    connects again. It does so, too, when a peer falls silent that has sent a beat on this connection or on the last:
    that peer hangs. Peers without beats are not watched. Each socket has one endpoint, because monitor events may name
    the host by its address. With `keys`, it is connected only while the key of the other end is authorised.
    """

    def __init__(self, socket: Socket, endpoint: str, keys: ClientKeys | None = None) -> None:
        self.socket = socket
        self.endpoint = endpoint
        self.keys = keys
        if keys is not None:
            keys.apply(socket)
        self._watch = HandshakeWatch(socket, endpoint, keys, _EVENTS)
        self.monitor = self._watch.monitor
        self.alive = False
        self._told: str | None = None
        self._trusted = True
        self.handshakes = 0
        """Number of handshakes so far, which tells one connection from the next."""
        self._watched = False
        self._beats = False  # on this connection
        self._silent_s = 0.0
        try:
            connect(socket, endpoint)
        except BaseException:
            self.close()
            raise

    @property
    def refusal(self) -> str | None:
        """Why the other end cannot be used: its key or our own; None if it can, or was not reached yet."""
        if self.keys is not None and not self._trusted:
            return str(self.keys.distrust(self.endpoint))
        return self._watch.refusal

    def hear(self, is_beat: bool) -> None:
        """Record that a message came. Its peer is `alive` then, whichever of the two was seen first."""
        if not self.alive:
            self._read_events()
        self._silent_s = 0.0
        self._beats |= is_beat
        self._watched |= is_beat

    def update(self, turn_s: float) -> None:
        """Read the events of the monitor, after messages were read for `turn_s`. Connect again if the peer hangs.

        Silence counts in time during which this process listened. One that was stopped, or whose threads waited for
        the interpreter, finds messages in its queue and does not take the peer for silent.
        """
        self._silent_s += min(turn_s, MAX_TURN_S)
        self._read_events()
        self._tell_refusal()
        if not self._update_trust():
            return
        if self._silent_s > SILENCE_LIMIT_S and (self._watched or not self.alive):
            if self.alive:
                self._watched, self._beats = self._beats, False
            self.alive = False
            self._silent_s = 0.0
            self.socket.disconnect(self.endpoint)
            self.socket.connect(self.endpoint)

    def _read_events(self) -> None:
        while (event := self._watch.read()) is not None:
            # a socket that still tries to connect has several events per second
            self._silent_s = 0.0
            if event in (zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED):
                self.alive = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
                self.handshakes += self.alive

    def _update_trust(self) -> bool:
        """Disconnect when the other end's key is revoked, and connect when it is authorised again."""
        if self.keys is None or self.keys.is_trusted == self._trusted:
            return self._trusted
        self._trusted = not self._trusted
        self.alive = False
        self._silent_s = 0.0
        if self._trusted:
            self.socket.connect(self.endpoint)
        else:
            self.socket.disconnect(self.endpoint)
        return self._trusted

    def _tell_refusal(self) -> None:
        reason = self.refusal
        if reason is not None and reason != self._told:
            log.warning("%s", reason)
        self._told = reason or (None if self.alive else self._told)

    def close(self) -> None:
        """Close the socket and its monitor."""
        self._watch.close()
        self.socket.close(0)


def open_subscriber(topics: Iterable[bytes], max_bytes: int) -> Socket:
    """Open a SUB socket that receives `topics` and beats."""
    socket = open_socket(zmq.SUB, 0, max_bytes)  # a limited queue to the peer would drop subscriptions
    for topic in (*topics, BEAT_TOPIC):
        socket.setsockopt(zmq.SUBSCRIBE, topic)
    return socket


def connect_all(sockets: Iterable[tuple[Socket, str, ClientKeys | None]]) -> list[ReconnectingSocket]:
    """Connect each socket to its endpoint, with its keys.

    Raises TransportError for a malformed endpoint, and closes all then.
    """
    connected: list[ReconnectingSocket] = []
    try:
        connected.extend(ReconnectingSocket(*socket) for socket in sockets)
    except TransportError:
        for socket in connected:
            socket.close()
        raise
    return connected


class Listener(SocketOwner):
    """Base of receivers: it owns sockets and the thread that passes each of their messages to `_accept`.

    A subclass calls `_listen` when it is ready for messages. The sockets take turns of at most `per_turn` messages,
    so that a flood from one peer cannot starve the others.
    """

    def __init__(self, sockets: Sequence[ReconnectingSocket], per_turn: int) -> None:
        self._sockets = sockets
        self._per_turn = per_turn
        self._failure: Exception | None = None
        self._closing = False
        self._updated_s = time.monotonic()
        self._stop_reader, self._stop_writer = os.pipe()
        self._thread = threading.Thread(target=self._run, name=f"receive {sockets[0].endpoint}", daemon=True)

    @property
    def connected(self) -> tuple[str, ...]:
        """Endpoints that have a connected peer now."""
        is_open = not (self._closing or self._is_forked)
        return tuple(socket.endpoint for socket in self._sockets if socket.alive and is_open)

    @property
    def refusals(self) -> tuple[str, ...]:
        """Reasons for which endpoints cannot be used: a key is refused, missing or revoked."""
        return tuple(socket.refusal for socket in self._sockets if socket.refusal is not None)

    @property
    def is_over(self) -> bool:
        """True when no message will come any more: the thread was stopped, or has failed."""
        return self._closing or self._failure is not None

    def close(self) -> None:
        """Stop the thread and close its sockets. Calls that wait for a message return None. Idempotent."""
        if self._closing:
            return
        self._closing = True
        if self._is_forked:
            return
        os.write(self._stop_writer, b"\0")
        self._wake()
        self._thread.join()
        os.close(self._stop_writer)
        os.close(self._stop_reader)

    def _listen(self) -> None:
        self._thread.start()

    def _accept(self, parts: list[memoryview], received_ns: int, source: ReconnectingSocket) -> None:
        """Process one message that came over `source`. Runs in the thread."""
        raise NotImplementedError

    def _wake(self) -> None:
        """Wake all threads that wait for a message; no more messages will arrive."""
        raise NotImplementedError

    def _raise_failure(self) -> None:
        """Raise TransportError if the thread has failed, or is that of another process."""
        self._require_process()
        if self._failure is not None:
            raise TransportError(f"the receiver stopped: {self._failure}") from self._failure

    def _update_sockets(self) -> None:
        now_s = time.monotonic()
        turn_s, self._updated_s = now_s - self._updated_s, now_s
        for socket in self._sockets:
            socket.update(turn_s)

    def _run(self) -> None:
        try:
            self._receive_until_closed()
        except Exception as error:
            self._failure = error
            self._wake()
        finally:
            for socket in self._sockets:
                socket.close()

    def _receive_until_closed(self) -> None:
        poller = zmq.Poller()
        poller.register(self._stop_reader, zmq.POLLIN)
        for connection in self._sockets:
            poller.register(connection.socket, zmq.POLLIN)
            poller.register(connection.monitor, zmq.POLLIN)
        while not self._closing:
            poller.poll(UPDATE_MS)
            for connection in self._sockets:
                self._drain(connection)
            self._update_sockets()

    def _drain(self, source: ReconnectingSocket) -> None:
        """Read the messages of one turn."""
        for parts, received_ns in self._read(source):
            self._accept(parts, received_ns, source)

    def _read(self, source: ReconnectingSocket) -> Iterator[tuple[list[memoryview], int]]:
        """Yield the waiting messages and their arrival (`time.time_ns`), at most those of one turn, without beats."""
        for _ in range(self._per_turn):
            parts = receive_parts(source.socket)
            if parts is None or self._closing:
                return
            is_beat = len(parts) == 1 and parts[0] == BEAT_TOPIC
            source.hear(is_beat)
            if not is_beat:
                yield parts, time.time_ns()
