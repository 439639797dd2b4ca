"""Limit a bound socket: a guard cuts off greedy peers, keys have rights, and an authenticator admits new peers.

libzmq bounds a message part, but not the parts of a message, the subscriptions of a peer, or what peers send before the
owner of the socket looks at it. The kernel counts the bytes of each TCP connection, so a thread reads those counts.
"""

import contextlib
import logging
import mmap
import resource
import socket as posix
import struct
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85

from ..errors import BusyError, ForbiddenError
from .primitives import PeerBudget, RateBudget, WakePipe, read_event
from .security import CLIENT_ROLES, MAX_KEYS, REFUSED, REVOKED, Key, ServerKeys

log = logging.getLogger(__name__)

PERIOD_MS = 20
"""Time between two looks at the bytes of TCP connections. A flood may send for this long before it is noticed."""
CUT_PERIOD_MS = 250
"""The same, while all connections are local sockets: their bytes are not counted, but they may have to be cut off."""
MAX_CONNECTIONS = 256
"""TCP connections that a bound socket keeps open. Each further one is shut down at once."""
LOG_EVERY_S = 10.0
"""Shortest time between two warnings of peers that were cut off, so that a flood does not fill the log."""
LARGE_SHARE = 1 / 8
"""Share of the budget that a connection keeps after others were cut off, which may have been the same peer."""
MAX_UNREAD_BYTES = 1 << 20
"""Unread bytes from which on memory is watched. libzmq may take 32 times as much memory for them."""
COMMANDS_PER_S = 64
"""Bytes per second of a connection that may be commands of the protocol, which the owner does not read."""
BURST_S = 2.0
"""Seconds of its rate that a key may use at once."""
WATCH_MS = 500
"""Time between two looks at the keys that were admitted. A revoked key keeps its connections for about this long."""
REFUSAL_LOG_EVERY_S = 1.0
"""Shortest time between two warnings of refused keys."""
_ENDPOINT = "inproc://zeromq.zap.01"  # the address at which libzmq asks (ZeroMQ RFC 27)
_BYTES_RECEIVED = struct.Struct("=Q")
_BYTES_RECEIVED_OFFSET = 128  # of tcpi_bytes_received in Linux' struct tcp_info
_TCP_INFO_BYTES = 256  # that are asked for; the kernel returns as many as it knows
_OPENED_OR_CLOSED = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
_EVENTS = _OPENED_OR_CLOSED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_MONITOR_STOPPED


@dataclass(slots=True)
class _Connection:
    """A TCP connection, known by descriptor and peer: the kernel gives a closed descriptor to the next connection."""

    peer: object
    opened_s: float
    received: int = 0
    read: float = 0.0

    @property
    def unread(self) -> float:
        """Bytes that the owner of the socket has not read, but for some commands of the protocol."""
        return max(0.0, self.received - self.read)


class ConnectionGuard:
    """Watches the TCP connections of a socket that is not bound yet, in a thread, until the socket's monitor stops.

    Each connection may send `budget.bytes_per_s`. What all of them have sent beyond that must not exceed `max_bytes`:
    when it does, the connection that has sent most beyond its rate is shut down. What it sent counts on for a while, so
    a peer that connects again and again gets LARGE_SHARE of the budget. Each connection beyond MAX_CONNECTIONS is shut
    down. Bytes alone do not tell the memory: libzmq takes 64 bytes for an empty part, which has 2 on the wire. With
    `watches_memory` the owner therefore calls `count_read`, and the connection with most unread bytes is shut down when
    the process grows by `max_growth_bytes` while more than MAX_UNREAD_BYTES are unread.
    Needs Linux; elsewhere nothing is cut off.
    """

    def __init__(
        self,
        socket: zmq.Socket[Any],
        budget: PeerBudget,
        watches_memory: bool = False,
    ) -> None:
        self._max_bytes = budget.max_bytes
        self._bytes_per_s = budget.bytes_per_s
        self._max_growth_bytes = budget.max_growth_bytes
        self._watches_memory = watches_memory
        self._counting = threading.Lock()  # of what was read
        self._unread_of_closed = 0.0  # whole messages of connections that have ended still wait to be read
        self._base_rss = rss_bytes()  # memory of the process when little was unread
        self._connections: dict[int, _Connection] = {}  # by file descriptor
        self._local: set[int] = set()  # descriptors of connections of ipc://
        self._cuts_all = threading.Event()
        self._excess_cut_off = 0.0  # of connections that were cut off: they may come again
        # state of the thread's own rounds
        self._inspected_s = time.monotonic()
        self._next_log_s = 0.0
        self.cut_off = 0
        """Number of connections that were shut down."""
        # peers for `wait_for_peer`
        self._peers = 0  # at most: connections whose handshake has succeeded
        # by descriptor: whether a handshake has succeeded since it was opened
        self._maybe_peers: dict[int, bool] = {}
        self._peers_changed = threading.Condition()
        # a caller of `count_connections` waits for the thread, which may have ended meanwhile
        self._counted = threading.Event()
        self._ended = False
        self._wake = WakePipe()
        self._monitor = socket.get_monitor_socket(_EVENTS)
        self._thread = threading.Thread(target=self._run, name="connection guard", daemon=True)
        self._thread.start()

    def count_connections(self) -> int:
        """Return the number of open connections, also of peers that are not authenticated yet.

        All that were accepted before the call count: the thread reads the events that wait. One thread may call it.
        """
        self._counted.clear()
        self._wake.wake()
        if not self._ended:
            self._counted.wait()
        return len(self._connections) + len(self._local)

    def wait_for_peer(self, timeout_ms: int) -> bool:
        """Wait at most `timeout_ms`. Return True if a peer is connected. Any thread may call it."""
        with self._peers_changed:
            return self._peers_changed.wait_for(lambda: self._peers > 0, timeout_ms / 1000)

    def count_read(self, sizes: Mapping[int, int], is_all: bool) -> None:
        """Record the bytes read from each connection, by descriptor. `is_all`: no complete message waits now."""
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
        """Close the pipe. Call it after `join`, and after the last `count_connections`."""
        self._wake.close()

    def _run(self) -> None:
        try:
            # each round: learn who came and went, obey `cut_off_all`, then look at the bytes of the others
            while self._read_events(self._choose_period()):
                if self._cuts_all.is_set():
                    self._cuts_all.clear()
                    self._shut_down_all()
                self._inspect()
        finally:
            # nobody may wait for a thread that has ended
            self._ended = True
            self._counted.set()

    def _choose_period(self) -> int | None:
        if self._connections:
            return PERIOD_MS
        if self._local:
            return CUT_PERIOD_MS
        return None  # nothing to inspect: only an event wakes the thread

    def _read_events(self, timeout_ms: int | None) -> bool:
        """Update the connections. Return False once the monitor has stopped."""
        sources: list[tuple[Any, int]] = [(self._monitor, zmq.POLLIN), (self._wake.fileno(), zmq.POLLIN)]
        zmq.zmq_poll(sources, -1 if timeout_ms is None else timeout_ms)  # -1: without end
        is_asked = self._wake.clear()  # before the events are read, all of which then count
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
                # the descriptor may be that of a connection that ended without an event
                self._maybe_peers[descriptor] = False
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._peers += 1
                # any of the open connections may be the one that succeeded
                self._maybe_peers = dict.fromkeys(self._maybe_peers, True)
                self._peers_changed.notify_all()
            elif event == zmq.EVENT_DISCONNECTED:
                self._maybe_peers.pop(descriptor, None)
                self._peers = min(self._peers, sum(self._maybe_peers.values()))

    def _add(self, descriptor: int) -> None:
        # libzmq tells the descriptor of what it accepted: a TCP connection, a local one, or one that has gone already
        state = _inspect_tcp(descriptor)
        if state is None:
            if _is_local(descriptor):
                self._local.add(descriptor)
            return
        if len(self._connections) >= MAX_CONNECTIONS:
            self._cut_off(descriptor, state.peer, f"expected at most {MAX_CONNECTIONS} connections")
            return
        # the kernel may give the descriptor of an old connection whose end was not reported yet
        self._forget(descriptor)
        self._connections[descriptor] = _Connection(state.peer, time.monotonic())

    def _forget(self, descriptor: int) -> None:
        """Remove a connection. The owner still reads its complete messages."""
        self._local.discard(descriptor)
        with self._counting:
            connection = self._connections.pop(descriptor, None)
            if connection is not None:
                self._unread_of_closed += connection.unread

    def _shut_down_all(self) -> None:
        # only where the peer is still the one that was counted: another connection may have the descriptor now
        for descriptor, connection in list(self._connections.items()):
            self.cut_off += _inspect_tcp(descriptor, shut_down_peer=connection.peer) is not None
        for descriptor in self._local:
            self.cut_off += _is_local(descriptor, shut_down=True)

    def _inspect(self) -> None:
        """Cut off the peers that sent most beyond their rate until the rest fits the budget; then look at memory."""
        now_s = time.monotonic()
        # what each open connection has sent beyond its rate since it was opened
        excess: dict[int, float] = {}
        for descriptor, connection in list(self._connections.items()):
            state = _inspect_tcp(descriptor)
            if state is None or state.peer != connection.peer:  # closed, and perhaps opened for another peer
                self._forget(descriptor)
                continue
            connection.received = state.received
            allowed = self._bytes_per_s * (now_s - connection.opened_s)
            excess[descriptor] = max(0.0, connection.received - allowed)
        # what was cut off counts on, and is forgiven at the rate of one connection
        forgiven = self._bytes_per_s * (now_s - self._inspected_s)
        self._excess_cut_off = max(0.0, self._excess_cut_off - forgiven)
        self._inspected_s = now_s
        # the greediest goes first, until the sum is within the budget
        while excess:
            descriptor = max(excess, key=excess.__getitem__)
            limit = self._max_bytes
            # a large one may be the peer that was cut off: it gets what that one has left of the budget
            if excess[descriptor] > self._max_bytes * LARGE_SHARE:
                limit -= int(self._excess_cut_off)
            if sum(excess.values()) <= limit:
                break
            self._excess_cut_off = min(self._max_bytes, self._excess_cut_off + excess.pop(descriptor))
            connection = self._connections[descriptor]
            # forgotten before it is shut down: its unread bytes count among those of closed connections
            self._forget(descriptor)
            expected = f"expected at most {self._max_bytes} and {self._bytes_per_s} a second"
            self._cut_off(descriptor, connection.peer, f"it sent {connection.received} bytes, {expected}")
        if self._watches_memory:
            self._watch_memory()

    def _watch_memory(self) -> None:
        """Cut off the peer with most unread bytes if the process has grown while much is unread."""
        # the owner never reads commands of the protocol, so that many bytes count as read
        rss = rss_bytes()
        with self._counting:
            for connection in self._connections.values():
                connection.read = min(
                    connection.read + COMMANDS_PER_S * PERIOD_MS / 1000, float(connection.received)
                )
            unread = {descriptor: connection.unread for descriptor, connection in self._connections.items()}
        # little is unread: whatever the process needs now is not due to peers
        if sum(unread.values()) + self._unread_of_closed <= MAX_UNREAD_BYTES:
            self._base_rss = rss
            return
        grown = rss - self._base_rss
        # cut off only a peer that has an ample share of what is unread: the others may be innocent
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
        # a shutdown makes libzmq close the connection; its descriptor stays libzmq's own
        self.cut_off += _inspect_tcp(descriptor, shut_down_peer=peer) is not None
        if time.monotonic() >= self._next_log_s:
            self._next_log_s = time.monotonic() + LOG_EVERY_S
            log.warning("a peer at %s was cut off: %s", peer, reason)


def rss_bytes() -> int:
    """Return the resident memory of this process in bytes; its peak if the current value is not available."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextlib.contextmanager
def _borrow(descriptor: int) -> Iterator[posix.socket]:
    """Yield a connection of libzmq, which stays open. Raises OSError if the descriptor is not a socket."""
    # `detach` below keeps the socket object from closing the descriptor, which belongs to libzmq
    connection = posix.socket(fileno=descriptor)
    try:
        yield connection
    finally:
        connection.detach()


def _is_local(descriptor: int, shut_down: bool = False) -> bool:
    """Return True if this is a connection that libzmq accepted over `ipc://`."""
    with contextlib.suppress(OSError), _borrow(descriptor) as connection:
        # an accepted connection has the name of the address that was bound
        is_local = connection.family == posix.AF_UNIX and bool(connection.getsockname())
        if is_local and shut_down:
            connection.shutdown(posix.SHUT_RDWR)
        return is_local
    return False


class _TcpState(NamedTuple):
    """State of a TCP connection in the kernel."""

    peer: object
    received: int
    """bytes"""


def _inspect_tcp(descriptor: int, shut_down_peer: object = None) -> _TcpState | None:
    """Return peer and received bytes of a TCP connection of libzmq; None if it is not open.

    Shut it down if its peer is `shut_down_peer`.
    """
    with contextlib.suppress(OSError), _borrow(descriptor) as connection:
        peer = connection.getpeername()
        info = connection.getsockopt(posix.IPPROTO_TCP, posix.TCP_INFO, _TCP_INFO_BYTES)
        # an older kernel does not count the bytes
        if len(info) < _BYTES_RECEIVED_OFFSET + _BYTES_RECEIVED.size:
            return None
        if shut_down_peer is not None and peer == shut_down_peer:
            connection.shutdown(posix.SHUT_RDWR)
        return _TcpState(peer, _BYTES_RECEIVED.unpack_from(info, _BYTES_RECEIVED_OFFSET)[0])
    return None


class Cap(NamedTuple):
    """Limits of each key of a role at one server."""

    requests_per_s: float
    bytes_per_s: float
    """of one key, over all its connections"""
    connections: int
    """Keys of this role are admitted up to this number of open connections of any role. The rest stays free for the
    other roles."""


CAPS = {
    "reader": Cap(50, 1e6, MAX_CONNECTIONS // 2),
    "operator": Cap(500, 32e6, MAX_CONNECTIONS * 3 // 4),
    "node": Cap(500, 32e6, MAX_CONNECTIONS),
}


class Rights:
    """The rights of keys at one server. Readers may request `reader_ops` only."""

    def __init__(self, reader_ops: Collection[str]) -> None:
        self._reader_ops = frozenset(reader_ops)
        self._budgets: dict[str, RateBudget] = {}  # by public key

    def spend(self, key: Key | None, size: int) -> None:
        """Take a request of `size` bytes from the budget of a key.

        Raises ForbiddenError for a key that is no longer authorised, and BusyError for one that sends too much.
        """
        cap = CAPS.get(key.role) if key is not None else None
        if key is None or cap is None:
            raise ForbiddenError("expected an authorised key, found one that was revoked")
        # more budgets than keys can exist are those of revoked keys; all begin again
        if len(self._budgets) > MAX_KEYS:
            self._budgets.clear()
        if key.public not in self._budgets:
            self._budgets[key.public] = RateBudget(cap.requests_per_s, cap.bytes_per_s, BURST_S)
        if not self._budgets[key.public].spend(size):
            raise BusyError(
                f"the key {key} sends too much: expected at most {cap.requests_per_s:.0f} requests and"
                f" {cap.bytes_per_s:.0f} bytes a second; wait for replies before sending more"
            )

    def check(self, key: Key, op: str) -> None:
        """Raise ForbiddenError if the role of a key does not permit an operation."""
        if key.role == "reader" and op not in self._reader_ops:
            wanted = op or "a large request"
            allowed = ", ".join(sorted(self._reader_ops)) or "nothing"
            raise ForbiddenError(
                f"expected a key of role operator for {wanted!r}, found {key}, which may request {allowed}"
            )


class Authenticator:
    """Answers libzmq's questions about new peers (ZAP, ZeroMQ RFC 27), in a thread, from the key folder as it is now.

    libzmq does not tell which connection belongs to a key. When a key that was admitted is no longer authorised, or has
    another role, the guard therefore ends all connections, and the others connect again. For the same reason a role has
    no connections of its own: its keys are admitted while the socket has few enough. pyzmq's ThreadAuthenticator does
    not tell which key was refused, and does not look at keys after the handshake.
    """

    def __init__(self, context: zmq.Context[Any], keys: ServerKeys, guard: ConnectionGuard) -> None:
        self.refused = 0
        """Number of handshakes that were refused."""
        self.last_refusal: str | None = None
        self._folder = keys.folder
        self._own = keys.own.key
        self._guard = guard
        self._admitted: dict[str, Key] = {}
        self._next_log_s = 0.0
        self._stop = WakePipe()
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ENDPOINT)
        self._thread = threading.Thread(target=self._run, name=f"keys {self._own.name}", daemon=True)
        self._thread.start()

    def find_key(self, parts: Sequence[memoryview]) -> Key | None:
        """Return the key of the peer that sent a message, if it is authorised now."""
        # libzmq attaches the public key to each message of a peer that the handshake has admitted
        part: Any = parts[-1].obj
        return self._folder.authorised().get(part.get("User-Id") or "")

    def close(self) -> None:
        """Stop answering: libzmq then accepts no peer."""
        self._stop.wake()
        self._thread.join()
        self._stop.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._stop.fileno(), zmq.POLLIN)
        next_watch_s = 0.0
        with self._socket:
            while self._stop.fileno() not in (ready := dict(poller.poll(WATCH_MS))):
                # each question is answered at once: libzmq lets the peer wait for it
                if self._socket in ready:
                    self._answer(self._socket.recv_multipart())
                if time.monotonic() >= next_watch_s:
                    next_watch_s = time.monotonic() + WATCH_MS / 1000
                    self._watch()

    def _answer(self, parts: list[bytes]) -> None:
        """Answer a question: version, id, domain, address, routing id, mechanism, credentials."""
        # a malformed question is answered like one without a key
        request_id = parts[1] if len(parts) > 1 else b""
        address = parts[3].decode("ascii", "replace") if len(parts) > 3 else "?"
        public = ""
        with contextlib.suppress(Exception):  # no question may end this thread
            if parts[5:6] == [b"CURVE"] and len(parts) == 7:
                public = z85.encode(parts[6]).decode()
        # from the folder as it is now: a key counts from the moment at which its file is there
        key = self._folder.authorised().get(public)
        refusal = self._find_refusal(public, key)
        if key is not None and refusal is None:
            # remembered for `_watch`, which ends the connections when this key loses its role
            self._admitted[public] = key
            self._socket.send_multipart([b"1.0", request_id, b"200", b"OK", public.encode(), b""])
            return
        self._count(str(refusal), address)  # before the answer: a refused peer finds the reason
        # the status is all that libzmq passes on to the peer
        is_revoked = key is None and public in self._folder.revoked()
        status = REVOKED if is_revoked else REFUSED
        self._socket.send_multipart([b"1.0", request_id, b"%d" % status, b"refused", b"", b""])

    def _find_refusal(self, public: str, key: Key | None) -> str | None:
        """Return why a peer is refused; None if it is admitted. Its own connection is counted."""
        if key is not None and key.role not in CLIENT_ROLES:
            return f"the key {key} was refused: its role may not connect here"
        if key is not None:
            limit = CAPS[key.role].connections
            count = self._guard.count_connections()
            if count <= limit:
                return None
            return (
                f"the key {key} was refused: its role may connect up to connection {limit}, this was {count}"
            )
        # the three reasons of a key that is not authorised: it was revoked, it is unknown, or there is none
        revoked = self._folder.revoked().get(public)
        if revoked is not None:
            return f"the key {revoked} was refused: it is revoked"
        return f"a key was refused: {public or 'none'} is not in {self._folder.path / 'authorised'}"

    def _count(self, reason: str, address: str) -> None:
        self.refused += 1
        self.last_refusal = reason
        if time.monotonic() >= self._next_log_s:
            self._next_log_s = time.monotonic() + REFUSAL_LOG_EVERY_S
            log.warning("a peer at %s: %s (%d refused so far)", address, reason, self.refused)

    def _watch(self) -> None:
        """End all connections if a key that was admitted has lost its role."""
        # a key with another role has other rights, which its open connections must not keep
        authorised = self._folder.authorised()
        lost = [
            key
            for public, key in self._admitted.items()
            if public not in authorised or authorised[public].role != key.role
        ]
        if lost:
            log.warning("no longer authorised: %s; all connections begin again", ", ".join(map(str, lost)))
            # libzmq does not tell which connections are theirs, so all end; those with a key connect again
            for key in lost:
                del self._admitted[key.public]
            self._guard.cut_off_all()
