"""Open ZeroMQ sockets with fast reconnects, bounded messages, and input that never stops.

libzmq 4.3.5 aborts the process (`Assertion failed: !_io_error`) when three things meet. A receive queue is full, so the
input of its connection is stopped. The peer goes away. Then a heartbeat is due, or a PING of the peer is among the
bytes that were read before. Therefore no socket sends ZMTP heartbeats, and no socket that strangers reach, or that
receives live messages, limits its receive queue: a thread empties it. Only lossless sockets stop their input, because
that is how a publisher learns to wait.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import re
import stat
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Never, Self

import zmq

from ..addresses import split_host
from ..errors import TransportError
from ..resources import Closeable, closed_on_error
from ..types import Buffer
from ..wire import BEAT_TOPIC
from .primitives import PeerBudget, WakePipe, read_event
from .security import CURVE_BYTES, ClientKeys, Security, Socket, explain_refusal

if TYPE_CHECKING:
    from .limits import Authenticator

MAX_FRAME_BYTES = 1 << 28
"""Maximum size of a part of a frame message. ZeroMQ closes a connection that sends more."""
MAX_MESSAGE_BYTES = 1 << 26
"""Maximum size of a part of a masks message."""
MAX_REQUEST_BYTES = 1 << 24
"""Maximum size of a part of a request."""
MAX_SUBSCRIPTION_BYTES = 512
"""Maximum size of a part that a publisher receives: a subscription, or a command of the handshake."""
MAX_PARTS = 8
"""Maximum number of parts of a message."""

_ENDPOINT = re.compile(r"tcp://[^/]+:(?P<port>\*|[0-9]{1,5})|ipc://[^\0]+")
_ENDPOINT_HINT = "expected tcp://host:port or ipc://path"
_IPV6_HINT = "this is an IPv6 address: expected a machine with IPv6, and an address as in tcp://[::1]:5550"
_BIND_HINT = "expected an address of this machine, such as 127.0.0.1 or *, or a path in a writable folder"
_RESOLVE_S = 1.0
"""Longest time to wait for the addresses of a host name. IPv4 is used where it is not known in time."""
# milliseconds, but seconds for keep-alive: TCP ends a connection 11 s after the machine at the other end has gone
_COMMON_OPTIONS = {
    zmq.LINGER: 200,
    # as often as `JOIN_S` needs: who waits for a publisher has its first message
    zmq.RECONNECT_IVL: 20,
    zmq.RECONNECT_IVL_MAX: 100,
    zmq.CONNECT_TIMEOUT: 1000,
    zmq.HANDSHAKE_IVL: 2000,
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 5,
    zmq.TCP_KEEPALIVE_INTVL: 2,
    zmq.TCP_KEEPALIVE_CNT: 3,
}
_MAX_UNACKNOWLEDGED_MS = 10_000
"""Time for which a peer may acknowledge nothing before TCP ends the connection."""
_ZERO_COPY_RECV = 10
"""ZMQ_ZERO_COPY_RECV, a context option that pyzmq does not name. It is on by default: a waiting message of 34 bytes
then holds the buffer of 8 KiB into which libzmq has read it."""
_REQUESTS_RECEIVE_BUFFER = 1 << 17
"""Bytes of the kernel's buffer for each connection of requests. libzmq still reads them after a peer was cut off."""
JOIN_S = 0.2
"""Seconds after which those who were waiting for a new publisher have connected and subscribed."""
BEAT_S = 0.5
"""Seconds between two beats of a live publisher."""
SILENCE_LIMIT_S = 1.5
"""Seconds of silence after which a publisher with beats is taken to hang: three beats are missing."""
UPDATE_MS = 250
"""Longest time between two looks at the connections of a receiver."""
MAX_TURN_S = 2 * UPDATE_MS / 1000
"""Longest time that counts as silence in one turn: a process that was stopped has not listened in the rest."""
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


_SUBSCRIPTIONS_BUDGET = PeerBudget(max_bytes=1 << 19, bytes_per_s=1 << 10)
_BUDGETS: dict[int, PeerBudget] = {
    zmq.PUB: _SUBSCRIPTIONS_BUDGET,
    zmq.XPUB: _SUBSCRIPTIONS_BUDGET,
    zmq.PUSH: _SUBSCRIPTIONS_BUDGET,
    zmq.ROUTER: PeerBudget(max_bytes=3 << 23, bytes_per_s=1 << 20),
}
"""Budgets by socket type: subscriptions are short, requests may be images."""


class SocketOwner(Closeable):
    """Base of types that own sockets. They serve the process that made them, and no process forked from it. libzmq's
    threads do not survive a fork, so a call would wait forever. Closing the owner in a fork must not touch the shared
    pipes, which would wake the threads of the first process.
    """

    def __new__(cls, *_: Any, **__: Any) -> Self:
        owner = super().__new__(cls)
        owner._process = os.getpid()
        return owner

    _process: int

    @property
    def _is_forked(self) -> bool:
        """True in a process that was forked after this was made."""
        return self._process != os.getpid()

    def __getstate__(self) -> Never:
        """Refuse pickle, copy and deepcopy: a copy would have the sockets of another."""
        raise TypeError(
            f"cannot pickle or copy a {type(self).__name__}: its sockets belong to this object and this process; make"
            " another client where one is needed, such as in each worker, and pass on its endpoints"
        )

    def _require_process(self) -> None:
        """Raise TransportError in a process that was forked after this was made."""
        if self._process != os.getpid():
            raise TransportError(
                f"this {type(self).__name__} was made by process {self._process}, from which this process was forked:"
                " expected one that this process has made, because sockets do not work after a fork. Make it in the"
                " worker, such as in worker_init_fn of a DataLoader, or start workers by the method 'spawn'"
            )


class SocketThread(SocketOwner):
    """Base of types whose sockets are used by one thread until `close`.

    A subclass makes what the thread uses and calls `_start`. `_serve` runs in the thread until `_closing`, and polls
    `_waker`. Others may wait for it on `_changed`, until it `is_over`.
    """

    _problem = "the thread stopped"
    """Beginning of the error of `check` after a failure."""

    def _start(self, name: str) -> None:
        self._failure: Exception | None = None
        self._closing = False
        self._waker = WakePipe()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        """True when the thread was stopped, or has failed: no message will come any more."""
        return self._closing or self._failure is not None

    def check(self) -> None:
        """Raise TransportError if the thread has failed, or belongs to another process."""
        self._require_process()
        if self._failure is not None:
            raise TransportError(f"{self._problem}: {self._failure}") from self._failure

    def close(self) -> None:
        """Stop the thread and close its sockets. Calls that wait for it return None. Idempotent."""
        if self._closing:
            return
        self._closing = True
        # the thread lives in the first process only, which uses the pipe
        if self._is_forked:
            return
        # wake the thread and all that wait for it, and close what it used only after it has ended
        self._waker.wake()
        self._end()
        self._thread.join()
        self._release()
        self._waker.close()

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            # the thread ends here: `check` raises the failure in the threads that wait
            self._failure = error
            self._end()

    def _serve(self) -> None:
        raise NotImplementedError

    def _end(self) -> None:
        """Wake all waiting threads: this thread ends, or has failed."""
        with self._changed:
            self._changed.notify_all()

    def _release(self) -> None:
        """Close what the thread has used. It has ended."""


def open_socket(kind: int, queue: int, max_bytes: int, context: zmq.Context[Socket] | None = None) -> Socket:
    """Open a socket that queues at most `queue` messages to each peer, and accepts parts of at most `max_bytes`.

    The owner must read received messages as they come: their queue has no limit unless the socket is lossless, PUSH or
    PULL. A lossless socket receives at most `queue` messages ahead, which makes the peer wait. TCP ends a connection
    whose peer acknowledges nothing for 10 s, unless the socket is lossless: a peer that waits on purpose is not dead.
    """
    socket: Socket = (context or zmq.Context.instance()).socket(kind)
    for option, value in (_COMMON_OPTIONS | {zmq.MAXMSGSIZE: max_bytes, zmq.SNDHWM: queue}).items():
        socket.setsockopt(option, value)
    # lossless sockets stop reading when their queue is full, the others never (see the head of this file)
    if kind in (zmq.PUSH, zmq.PULL):
        socket.setsockopt(zmq.RCVHWM, queue)
    else:
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.TCP_MAXRT, _MAX_UNACKNOWLEDGED_MS)
    return socket


class BoundSocket(SocketOwner):
    """A socket bound to `endpoint`, in a context of its own. `.endpoint` has port 0 and * resolved.

    Terminating the context is the only way to wait until libzmq has sent the queue and released the address. A guard
    cuts off peers that send more than the socket's use needs, or than `budget` says. With keys, `security` names those
    of `role`, and only authorised peers are connected.
    Raises TransportError that names the endpoint and the remedy: in use, no such address, malformed, not without keys.
    """

    def __init__(
        self,
        kind: int,
        endpoint: str,
        queue: int,
        max_bytes: int,
        role: str = "node",
        security: Security | None = None,
        budget: PeerBudget | None = None,
    ) -> None:
        from .limits import (
            Authenticator,  # a client needs neither
            ConnectionGuard,
        )

        check_endpoint(endpoint)
        # keys and path are checked before anything is opened: an error then leaves nothing behind
        keys = (security or Security.from_environment()).server_keys(role, endpoint)
        check_ipc_free(endpoint)
        self._context = zmq.Context()
        self._context.set(_ZERO_COPY_RECV, 0)
        self.socket = open_socket(kind, queue, max_bytes, self._context)
        if kind == zmq.ROUTER:  # libzmq still reads what the kernel holds of a peer that is cut off
            self.socket.setsockopt(zmq.RCVBUF, _REQUESTS_RECEIVE_BUFFER)
        # the guard needs the socket's monitor before the socket is bound, else it would miss the first connections
        self.guard = ConnectionGuard(self.socket, budget or _BUDGETS[kind], watches_memory=kind == zmq.ROUTER)
        self.authenticator: Authenticator | None = None
        """None without keys: peers then have no roles."""
        if keys is not None:
            keys.apply(self.socket)
            self.authenticator = Authenticator(self._context, keys, self.guard)
        # everything else is ready: a peer may connect from here on
        try:
            _choose_family(self.socket, endpoint)
            self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close(0)
            raise _explain("bind", endpoint, error) from error
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def close(self, linger_ms: int) -> None:
        """Close, and wait at most `linger_ms` until the queue is sent. Idempotent."""
        if self._is_forked:
            return
        # the guard's thread ends with the monitor that it reads
        if not self.socket.closed:
            self.socket.disable_monitor()
            self.guard.join()
        self.socket.close(linger_ms)
        if not self._context.closed:
            if self.authenticator is not None:  # answers until the queue is sent
                self.authenticator.close()
            self.guard.release()
        # waits for libzmq's thread, which sends the queue and releases the address
        self._context.term()


class BoundOwner(SocketOwner):
    """Base of types that own one bound socket."""

    _bound: BoundSocket

    @property
    def peers_refused(self) -> int:
        """Number of peers that were refused because of their key."""
        authenticator = self._bound.authenticator
        return 0 if authenticator is None else authenticator.refused

    @property
    def last_refusal(self) -> str | None:
        """Reason for which the last peer was refused."""
        authenticator = self._bound.authenticator
        return None if authenticator is None else authenticator.last_refusal


def connect(socket: Socket, endpoint: str) -> None:
    """Connect `socket`. The peer may bind later. Raises TransportError for a malformed endpoint."""
    check_endpoint(endpoint)
    try:
        _choose_family(socket, endpoint)
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


def describe_source(parts: Sequence[memoryview], is_plain: bool = True) -> tuple[int, int]:
    """Return the descriptor of the connection that a message to a ROUTER socket came over, and its bytes there.

    The descriptor is -1 if libzmq does not know it: a peer of ZMTP 1 or 2 has no properties.
    """
    overhead = 0 if is_plain else CURVE_BYTES
    size = 0
    # the first part is the name that the socket has given to the peer
    for part in parts[1:]:
        content = part.nbytes + overhead
        # ZMTP 3: a frame has a head of 2 bytes, or of 9 if its length needs more than one byte
        size += content + (2 if content < 256 else 9)
    message: Any = parts[-1].obj
    try:
        descriptor = message.get(zmq.SRCFD)
    except zmq.ZMQError:
        descriptor = -1
    return descriptor, size


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


def check_endpoint(endpoint: str) -> None:
    """Raise TransportError for a malformed endpoint."""
    match = _ENDPOINT.fullmatch(endpoint)
    port = match["port"] if match else None
    # libzmq would truncate port 70000 to 4464
    if not match or (port and port.isdigit() and int(port) > 65535):
        raise TransportError(f"endpoint {endpoint!r}: {_ENDPOINT_HINT}")


def _choose_family(socket: Socket, endpoint: str) -> None:
    """Let the socket use IPv6 for an address of IPv6, and for a host name that has no other.

    An IPv6 socket would take the IPv6 address of a host that has both, and `*` would stand for addresses of both.
    """
    host = split_host(endpoint)
    if host and (":" in host or _has_ipv6_only(host)):
        socket.setsockopt(zmq.IPV6, 1)


def _has_ipv6_only(host: str) -> bool:
    """Return True if a host name has addresses of IPv6 and none of IPv4, as far as is known in _RESOLVE_S."""
    # an address, or a name whose addresses are known
    if host in ("*", "localhost") or not re.search("[A-Za-z]", host):
        return False
    import socket as posix

    families: set[int] = set()

    def look_up() -> None:  # it may take long, and cannot be ended
        with suppress(OSError, UnicodeError):
            families.update(address[0] for address in posix.getaddrinfo(host, None))

    thread = threading.Thread(target=look_up, name=f"look up {host}", daemon=True)
    thread.start()
    thread.join(_RESOLVE_S)
    return families == {posix.AF_INET6}


def check_ipc_free(endpoint: str) -> None:
    """Raise TransportError if a process uses the path, or if anything but a socket is there.

    libzmq unlinks the path before it binds: it would take the address from a process, or delete a file.
    """
    # only a path in the file system can be in use in this way: * is a temporary one, @ an abstract one
    scheme, _, path = endpoint.partition("://")
    if scheme != "ipc" or path.startswith(("*", "@")):
        return
    import socket as posix  # here, because it slows the start of a client

    # a process that listens takes the connection, or is too busy for it
    with posix.socket(posix.AF_UNIX, posix.SOCK_STREAM) as probe:
        probe.settimeout(0.5)
        try:
            probe.connect(path)
        except OSError as error:
            # its queue is full, or it is a socket of datagrams: a process is there
            is_used = error.errno in (errno.EAGAIN, errno.EPROTOTYPE) or isinstance(error, TimeoutError)
        else:
            is_used = True
    if is_used:
        raise _in_use_error(endpoint)
    # nobody listens: an abandoned socket may be replaced, and nothing else
    try:
        mode = os.lstat(path).st_mode
    except (OSError, ValueError):
        return
    if not stat.S_ISSOCK(mode):
        kinds = {"-": "file", "d": "folder", "l": "symbolic link", "p": "FIFO"}
        kind = kinds.get(stat.filemode(mode)[0], "device")
        raise TransportError(
            f"cannot bind {endpoint}: {path} is a {kind}, and only an abandoned socket is replaced; choose another"
            " path, or move it away"
        )


def check_free(endpoint: str) -> None:
    """Raise TransportError if another process uses an endpoint now. Nothing is bound, and no peer can connect.

    What cannot be told without binding is left to the socket that binds later.
    """
    check_endpoint(endpoint)
    check_ipc_free(endpoint)
    host = split_host(endpoint)
    port = endpoint.rpartition(":")[2]
    if not host or not port.isdecimal() or not int(port):
        return
    import socket as posix  # here, because it slows the start of a client

    family = posix.AF_INET6 if ":" in host else posix.AF_INET
    with suppress(OSError), posix.socket(family, posix.SOCK_STREAM) as probe:
        # as libzmq does: an address whose last connections are ending is free
        probe.setsockopt(posix.SOL_SOCKET, posix.SO_REUSEADDR, 1)
        try:
            probe.bind(("" if host == "*" else host, int(port)))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise _in_use_error(endpoint) from error


def _in_use_error(endpoint: str) -> TransportError:
    error = TransportError(
        f"cannot bind {endpoint}: another process uses it; stop that process, or choose another endpoint"
    )
    error.may_pass = True
    return error


def _explain(verb: str, endpoint: str, error: zmq.ZMQError) -> TransportError:
    if error.errno == zmq.EADDRINUSE:
        return _in_use_error(endpoint)
    # libzmq's own words, and what to do about them
    reason = zmq.strerror(error.errno or 0).lower()
    hint = _BIND_HINT if verb == "bind" else _ENDPOINT_HINT
    if ":" in split_host(endpoint):
        hint = f"{hint}; {_IPV6_HINT}"
    explained = TransportError(f"cannot {verb} {endpoint}: {reason}; {hint}")
    explained.may_pass = error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV)  # the network may not be up yet
    return explained


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
        self._endpoint = endpoint
        self._keys = keys
        self._failures = 0

    def read(self) -> int | None:
        """Return the next event; None if none waits."""
        read = read_event(self.monitor)
        if read is None:
            return None
        event, value = read
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.refusal = None
            self._failures = 0
        elif event & _REFUSED:
            self._failures += 1
            # an end without detail may have other reasons, so a few in a row are needed before it is explained
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


class ReconnectingSocket(Closeable):
    """A socket that is connected to one endpoint. `alive` is true from the handshake with a peer to its loss.

    libzmq stops reconnecting when a peer violates the protocol or sends a part that is too large; `update` then
    connects again. It also connects again when a peer that has sent a beat on this connection or the last falls silent:
    that peer hangs. Peers without beats are not watched. Each socket has one endpoint, because monitor events may name
    the host by its address. With `keys`, it is connected only while the key of the other end is authorised.
    """

    def __init__(self, socket: Socket, endpoint: str, keys: ClientKeys | None = None) -> None:
        self.socket = socket
        self.endpoint = endpoint
        self.keys = keys
        # the watch is there before the socket connects, and so sees its first handshake
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
        self._rest_end_s: float | None = None
        """Time (`time.monotonic`) at which it connects again after a rest; None while it does not rest."""
        with closed_on_error(self):
            connect(socket, endpoint)

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
        if self._rests() or not self._update_trust():
            return
        if self._silent_s > SILENCE_LIMIT_S and (self._watched or not self.alive):
            if self.alive:
                # the next connection is watched only if this one had beats: the next peer may send none
                self._watched = self._beats
                self._beats = False
            self.alive = False
            self._silent_s = 0.0
            self.socket.disconnect(self.endpoint)
            self.socket.connect(self.endpoint)

    def rest(self, seconds: float) -> None:
        """Disconnect, and discard what waits. `update` connects again when the time is over."""
        # while the key is revoked, it is not connected
        if self._trusted and self._rest_end_s is None:
            self._rest_end_s = time.monotonic() + seconds
            self.alive = False
            self.socket.disconnect(self.endpoint)

    def _rests(self) -> bool:
        """Return True during a rest. Connect again when it is over."""
        if self._rest_end_s is None:
            return False
        if time.monotonic() < self._rest_end_s:
            return True
        self._rest_end_s = None
        self._silent_s = 0.0
        self.socket.connect(self.endpoint)
        return False

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
        # while the key is revoked, the socket is not connected: it cannot take messages of the other end
        self._trusted = not self._trusted
        self.alive = False
        self._silent_s = 0.0
        if self._trusted:
            self.socket.connect(self.endpoint)
        else:
            self.socket.disconnect(self.endpoint)
        return self._trusted

    def _tell_refusal(self) -> None:
        # each reason is logged once; one that comes again after a good connection is logged again
        reason = self.refusal
        if reason is not None and reason != self._told:
            log.warning("%s", reason)
        if reason is not None:
            self._told = reason
        elif self.alive:
            self._told = None

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
    # all or none: the stack closes connected ones if a later one fails
    with ExitStack() as stack:
        connected = [stack.enter_context(ReconnectingSocket(*socket)) for socket in sockets]
        stack.pop_all()
    return connected
