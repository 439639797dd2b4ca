"""The handler of ZAP (ZeroMQ RFC 27) of one bound socket: it admits authorised keys, and cuts off revoked ones.

pyzmq's ThreadAuthenticator does not tell which key was refused, and does not look at keys after the handshake.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from typing import Any

import zmq
from zmq.utils import z85

from .guard import ConnectionGuard
from .keys import CLIENT_ROLES, Key
from .rights import CAPS
from .security import REFUSED, REVOKED, ServerKeys

WATCH_MS = 500
LOG_EVERY_S = 1.0
_ENDPOINT = "inproc://zeromq.zap.01"

log = logging.getLogger(__name__)


class Authenticator:
    """Answers the questions of libzmq about connecting peers, in a thread, from the folder of keys as it is now.

    libzmq does not tell which connection belongs to a key. When a key that was admitted is no longer authorised, or has
    another role, the guard therefore ends all connections, and the others connect again. For the same reason a role has
    no connections of its own: its keys are admitted while the socket has few enough.
    """

    def __init__(self, context: zmq.Context[Any], keys: ServerKeys, guard: ConnectionGuard) -> None:
        self.refused = 0
        """Number of handshakes that were refused."""
        self.last_refusal: str | None = None
        self._folder, self._own, self._guard = keys.folder, keys.own.key, guard
        self._admitted: dict[str, Key] = {}
        self._next_log_s = 0.0
        self._wake_reader, self._wake_writer = os.pipe()
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ENDPOINT)
        self._thread = threading.Thread(target=self._run, name=f"keys {self._own.name}", daemon=True)
        self._thread.start()

    def find_key(self, public: str | None) -> Key | None:
        """Return the key of a peer if it is authorised now."""
        return self._folder.authorised().get(public or "")

    def close(self) -> None:
        """Stop answering: libzmq then accepts nobody."""
        os.write(self._wake_writer, b"\0")
        self._thread.join()
        os.close(self._wake_writer)
        os.close(self._wake_reader)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_reader, zmq.POLLIN)
        next_watch_s = 0.0
        with self._socket:
            while self._wake_reader not in (ready := dict(poller.poll(WATCH_MS))):
                if self._socket in ready:
                    self._answer(self._socket.recv_multipart())
                if time.monotonic() >= next_watch_s:
                    next_watch_s = time.monotonic() + WATCH_MS / 1000
                    self._watch()

    def _answer(self, parts: list[bytes]) -> None:
        """Answer a question: version, id, domain, address, routing id, mechanism, credentials."""
        request_id = parts[1] if len(parts) > 1 else b""
        public = ""
        with contextlib.suppress(Exception):  # no question may end this thread
            if parts[5:6] == [b"CURVE"] and len(parts) == 7:
                public = z85.encode(parts[6]).decode()
        key = self._folder.authorised().get(public)
        refusal = self._find_refusal(public, key)
        if key is not None and refusal is None:
            self._admitted[public] = key
            self._socket.send_multipart([b"1.0", request_id, b"200", b"OK", public.encode(), b""])
            return
        address = parts[3].decode("ascii", "replace") if len(parts) > 3 else "?"
        self._count(str(refusal), address)  # before the answer: a refused peer finds the reason
        is_revoked = key is None and public in self._folder.revoked()
        self._socket.send_multipart(
            [b"1.0", request_id, b"%d" % (REVOKED if is_revoked else REFUSED), b"refused", b"", b""]
        )

    def _find_refusal(self, public: str, key: Key | None) -> str | None:
        """Return why a peer is refused; None if it is admitted. Its own connection is among those that are counted."""
        if key is not None and key.role not in CLIENT_ROLES:
            return f"the key {key} was refused: its role may not connect here"
        if key is not None:
            limit, found = CAPS[key.role].connections, self._guard.count_connections()
            if found <= limit:
                return None
            return (
                f"the key {key} was refused: its role may connect up to connection {limit}, this was {found}"
            )
        revoked = self._folder.revoked().get(public)
        if revoked is not None:
            return f"the key {revoked} was refused: it is revoked"
        return f"a key was refused: {public or 'none'} is not in {self._folder.path / 'authorised'}"

    def _count(self, reason: str, address: str) -> None:
        self.refused += 1
        self.last_refusal = reason
        if time.monotonic() >= self._next_log_s:
            self._next_log_s = time.monotonic() + LOG_EVERY_S
            log.warning("a peer at %s: %s (%d refused so far)", address, reason, self.refused)

    def _watch(self) -> None:
        """End all connections if a key that was admitted has lost its role."""
        authorised = self._folder.authorised()
        lost = [
            key
            for public, key in self._admitted.items()
            if public not in authorised or authorised[public].role != key.role
        ]
        if lost:
            log.warning("no longer authorised: %s; all connections begin again", ", ".join(map(str, lost)))
            for key in lost:
                del self._admitted[key.public]
            self._guard.cut_off_all()
