"""ZeroMQ sockets with the options of this package: fast reconnects, bounded messages, input that never stops.

libzmq 4.3.5 aborts the process (`Assertion failed: !_io_error`) when three things meet. A receive queue is full, so the
input of its connection is stopped. The peer goes away. Then a heartbeat is due, or a PING of the peer is among the
bytes that were read before. Therefore no socket sends ZMTP heartbeats, and no socket that strangers reach, or that
receives live messages, limits its receive queue: a thread empties it. Only lossless sockets stop their input, because
that is how a publisher learns to wait.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

import zmq

from ..errors import TransportError
from ..types import Buffer, Closeable
from .keys import Key
from .security import CURVE_BYTES, Security, Socket

if TYPE_CHECKING:
    from .authenticator import Authenticator

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
_MAX_UNACKNOWLEDGED_MS = 10_000
_ZERO_COPY_RECV = 10
"""ZMQ_ZERO_COPY_RECV, a context option that pyzmq does not name. Where it is on, as by default, a waiting message of 34
bytes holds the buffer of 8 KiB with which libzmq has read it."""
_REQUESTS_RECEIVE_BUFFER = 1 << 17
_MAX_GROWTH_BYTES = 24 << 20
_SUBSCRIPTIONS_BUDGET = (1 << 19, 1 << 10, _MAX_GROWTH_BYTES)
_BUDGETS: dict[int, tuple[int, int, int]] = {
    zmq.PUB: _SUBSCRIPTIONS_BUDGET,
    zmq.PUSH: _SUBSCRIPTIONS_BUDGET,
    zmq.ROUTER: (3 << 23, 1 << 20, _MAX_GROWTH_BYTES),
}
"""By socket type: bytes that peers may send in advance, all together, bytes per second of each peer, and the growth of
the process for which a peer is cut off while much is unread."""


class SocketOwner(Closeable):
    """Base of types that own sockets. They serve the process that made them, and no other one that is forked from it.

    libzmq's threads are not there after a fork, so a call would wait without end. To close the owner there must not
    touch what it shares with the first process: its pipes, which would wake the threads of that process.
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

    def _require_process(self) -> None:
        """Raise TransportError in a process that was forked after this was made."""
        if self._is_forked:
            raise TransportError(
                f"this {type(self).__name__} was made by process {self._process}, from which this process was forked:"
                " expected one that this process has made, because sockets do not work after a fork. Make it in the"
                " worker, such as in worker_init_fn of a DataLoader, or start workers by the method 'spawn'"
            )


def open_socket(
    kind: int, queue: int, max_bytes: int, lossless: bool = False, context: zmq.Context[Socket] | None = None
) -> Socket:
    """Open a socket that queues at most `queue` messages to each peer, and accepts parts of at most `max_bytes`.

    The owner must read received messages as they come: their queue has no limit unless the socket is `lossless`.
    A lossless socket receives at most `queue` messages ahead, which makes the peer wait. TCP ends a connection whose
    peer acknowledges nothing for 10 s, unless the socket is lossless: a peer that waits on purpose is not dead.
    """
    socket: Socket = (context or zmq.Context.instance()).socket(kind)
    for option, value in (_COMMON_OPTIONS | {zmq.MAXMSGSIZE: max_bytes, zmq.SNDHWM: queue}).items():
        socket.setsockopt(option, value)
    if lossless:
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
        lossless: bool = False,
        budget: tuple[int, int, int] | None = None,
    ) -> None:
        from .authenticator import Authenticator  # a client needs neither
        from .guard import ConnectionGuard

        check_endpoint(endpoint)
        keys = (security or Security.from_environment()).server_keys(role, endpoint)
        check_ipc_free(endpoint)
        self._context = zmq.Context()
        self._context.set(_ZERO_COPY_RECV, 0)
        self.socket = open_socket(kind, queue, max_bytes, lossless, self._context)
        if kind == zmq.ROUTER:  # libzmq still reads what the kernel holds of a peer that is cut off
            self.socket.setsockopt(zmq.RCVBUF, _REQUESTS_RECEIVE_BUFFER)
        self._guard = ConnectionGuard(
            self.socket, *(budget or _BUDGETS[kind]), watches_memory=kind == zmq.ROUTER
        )
        self._authenticator: Authenticator | None = None
        if keys is not None:
            keys.apply(self.socket)
            self._authenticator = Authenticator(self._context, keys, self._guard)
        try:
            _choose_family(self.socket, endpoint)
            self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close(0)
            raise _explain("bind", endpoint, error) from error
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def is_plain(self) -> bool:
        """True if the socket has no keys, so that peers have no roles."""
        return self._authenticator is None

    @property
    def peers_refused(self) -> int:
        """Number of handshakes that were refused because of their key."""
        return self._authenticator.refused if self._authenticator else 0

    @property
    def last_refusal(self) -> str | None:
        """Reason for which the last peer was refused."""
        return self._authenticator.last_refusal if self._authenticator else None

    def find_key(self, parts: Sequence[memoryview]) -> Key | None:
        """Return the key of the peer that sent a message, if it is authorised now."""
        part: Any = parts[-1].obj
        return self._authenticator.find_key(part.get("User-Id")) if self._authenticator else None

    def wait_for_peer(self, timeout_ms: int) -> bool:
        """Wait at most `timeout_ms`. Return True if a peer is connected."""
        return self._guard.wait_for_peer(timeout_ms)

    def count_read(self, sizes: Mapping[int, int], is_all: bool) -> None:
        """Tell the guard of a ROUTER socket the bytes that were read, by descriptor; `is_all` if no message waits."""
        self._guard.count_read(sizes, is_all)

    def close(self, linger_ms: int) -> None:
        """Close, and wait at most `linger_ms` until the queue is sent. Idempotent."""
        if self._is_forked:
            return
        if not self.socket.closed:
            self.socket.disable_monitor()
            self._guard.join()
        self.socket.close(linger_ms)
        if not self._context.closed:
            if self._authenticator is not None:  # answers until the queue is sent
                self._authenticator.close()
            self._guard.release()
        self._context.term()


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
    part: Any = parts[-1].obj
    overhead = 0 if is_plain else CURVE_BYTES
    # the first part is the name that the socket has given to the peer
    sizes = [part.nbytes + overhead for part in parts[1:]]
    try:
        descriptor = part.get(zmq.SRCFD)
    except zmq.ZMQError:
        descriptor = -1
    return descriptor, sum(size + (2 if size < 256 else 9) for size in sizes)


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


def split_host(endpoint: str) -> str:
    """Return the host of a tcp endpoint, without the brackets of IPv6 and without a source address; else ""."""
    scheme, _, address = endpoint.partition("://")
    return (
        address.rpartition(";")[2].rpartition(":")[0].replace("[", "").replace("]", "")
        if scheme == "tcp"
        else ""
    )


def _has_ipv6_only(host: str) -> bool:
    """Return True if a host name has addresses of IPv6 and none of IPv4, as far as is known in _RESOLVE_S."""
    if host in ("*", "localhost") or not re.search("[A-Za-z]", host):
        return False
    import socket as posix

    families: set[int] = set()

    def look_up() -> None:  # it may take long, and cannot be ended
        with suppress(OSError, UnicodeError):
            families.update(found[0] for found in posix.getaddrinfo(host, None))

    thread = threading.Thread(target=look_up, name=f"look up {host}", daemon=True)
    thread.start()
    thread.join(_RESOLVE_S)
    return families == {posix.AF_INET6}


def check_ipc_free(endpoint: str) -> None:
    """Raise TransportError if a process uses the path, or if anything but a socket is there.

    libzmq unlinks the path before it binds: it would take the address from a process, or delete a file.
    """
    scheme, _, path = endpoint.partition("://")
    if scheme != "ipc" or path.startswith(("*", "@")):
        return
    import socket as posix  # here, because it slows the start of a client

    with posix.socket(posix.AF_UNIX, posix.SOCK_STREAM) as probe:
        probe.settimeout(0.5)
        try:
            probe.connect(path)
        except OSError as error:
            # its queue is full, or it is a socket of datagrams: somebody is there
            is_used = error.errno in (errno.EAGAIN, errno.EPROTOTYPE) or isinstance(error, TimeoutError)
        else:
            is_used = True
    if is_used:
        raise _in_use_error(endpoint)
    try:
        mode = os.lstat(path).st_mode
    except (OSError, ValueError):
        return
    if not stat.S_ISSOCK(mode):
        raise TransportError(
            f"cannot bind {endpoint}: {path} is a {_describe_kind(mode)}, and only an abandoned socket is replaced; "
            "choose another path, or move it away"
        )


def _describe_kind(mode: int) -> str:
    kinds = (
        (stat.S_ISREG, "file"),
        (stat.S_ISDIR, "folder"),
        (stat.S_ISLNK, "symbolic link"),
        (stat.S_ISFIFO, "FIFO"),
    )
    return next((name for is_kind, name in kinds if is_kind(mode)), "device")


def _in_use_error(endpoint: str) -> TransportError:
    error = TransportError(
        f"cannot bind {endpoint}: another process uses it; stop that process, or choose another endpoint"
    )
    error.may_pass = True
    return error


def _explain(verb: str, endpoint: str, error: zmq.ZMQError) -> TransportError:
    if error.errno == zmq.EADDRINUSE:
        return _in_use_error(endpoint)
    reason = zmq.strerror(error.errno or 0).lower()
    hint = _BIND_HINT if verb == "bind" else _ENDPOINT_HINT
    if ":" in split_host(endpoint):
        hint = f"{hint}; {_IPV6_HINT}"
    explained = TransportError(f"cannot {verb} {endpoint}: {reason}; {hint}")
    explained.may_pass = error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV)  # the network may not be up yet
    return explained
