"""Encryption and authentication of the sockets of a process: which keys each socket has and expects.

Sockets that bind are CURVE servers, sockets that connect are CURVE clients. A client expects the key of the node,
camera or robot at the other end, so nobody else can take its place.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, TypeAlias

import zmq

from ..errors import AuthenticationError, TransportError
from .keys import Key, KeyFolder, KeyPair, open_folder

Socket: TypeAlias = zmq.Socket[Any]

DOMAIN = b"sam3-node"
CURVE_BYTES = 33
"""Bytes by which CURVE makes a message part longer on the wire."""
PREFIX = "SAM3_TRANSPORT__"
REFUSED, REVOKED = 400, 500
"""Status codes by which a handshake is refused (ZeroMQ RFC 27). The owner of a revoked key learns that it was revoked.
libzmq passes on no other code, and no text."""
_MISMATCH = zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH


class SecuritySettings(Protocol):
    """The fields of the section `transport` that this module reads."""

    @property
    def keys(self) -> Path | None: ...
    @property
    def key(self) -> str: ...
    @property
    def camera_keys(self) -> tuple[str, ...]: ...
    @property
    def insecure(self) -> bool: ...


class ServerKeys(NamedTuple):
    """Keys of a socket that binds."""

    folder: KeyFolder
    own: KeyPair

    def apply(self, socket: Socket) -> None:
        """Make the socket a CURVE server. Without a handler of ZAP in its context it then accepts nobody."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.own.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        _allow_longer_parts(socket)


class ClientKeys(NamedTuple):
    """Keys of a socket that connects: its own, and the one that the other end must have."""

    folder: KeyFolder
    own: KeyPair
    server: Key

    def apply(self, socket: Socket) -> None:
        """Make the socket a CURVE client."""
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.own.key.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.own.secret)
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server.public.encode())
        _allow_longer_parts(socket)

    @property
    def is_trusted(self) -> bool:
        """True while the other end's key is authorised here, with the same role."""
        key = self.folder.authorised().get(self.server.public)
        return key is not None and key.role == self.server.role

    def may_send(self, camera: str) -> bool:
        """Return True if messages of this camera may come from the other end."""
        key = self.folder.authorised().get(self.server.public)
        return key is not None and key.may_send(camera)

    def distrust(self, endpoint: str) -> AuthenticationError:
        """Return the error of a connection to a key that is no longer authorised."""
        reason = ": it was revoked" if self.server.public in self.folder.revoked() else ""
        return AuthenticationError(
            f"{endpoint} is not used: its key {self.server} is not authorised in {self.folder.path} any more{reason}"
        )


@dataclass(frozen=True, slots=True)
class Security:
    """The keys that a process uses for its sockets. Without `keys` they are plain, and bind to this machine only.

    `keys` is the folder of keys, and `key` the name of this process's own (empty: chosen by its role). `camera_keys`
    are the names of the cameras' keys, in the order of the frame endpoints. `camera` is the camera that the process
    publishes, * if it publishes several. `insecure` permits plain sockets on other addresses than loopback.
    """

    keys: Path | None = None
    key: str = ""
    camera_keys: tuple[str, ...] = ()
    camera: str = ""
    insecure: bool = False

    @classmethod
    def from_settings(cls, settings: SecuritySettings) -> Self:
        """Return what the section `transport` says."""
        return cls(settings.keys, settings.key, settings.camera_keys, insecure=settings.insecure)

    @classmethod
    def from_environment(cls) -> Self:
        """Return what the environment variables of the section `transport` say."""
        keys, key, camera_keys, insecure = (
            os.environ.get(f"{PREFIX}{name}", "") for name in ("KEYS", "KEY", "CAMERA_KEYS", "INSECURE")
        )
        return cls(
            Path(keys) if keys else None,
            key,
            tuple(filter(None, camera_keys.split(","))),
            insecure=insecure.lower() in ("true", "1"),
        )

    def for_camera(self, name: str) -> Self:
        """Return the same for a process that publishes one camera."""
        return replace(self, camera=name)

    def server_keys(self, role: str, endpoint: str) -> ServerKeys | None:
        """Return the keys of a socket of `role` that binds `endpoint`; None for a plain one.

        Raises AuthenticationError if the key is missing, TransportError for a plain socket that strangers could reach.
        """
        folder = self._folder
        if folder is not None:
            return ServerKeys(folder, folder.find_own((role,), self.key, self.camera))
        if not self.insecure and not is_local(endpoint):
            raise TransportError(
                f"{endpoint} is not bound without keys: everybody on the network could use it. Make keys"
                " (sam3-node keys new) and set transport.keys to their folder; or bind 127.0.0.1; or, on a network"
                " without strangers, set transport.insecure = true"
            )
        return None

    def client_keys(self, role: str, name: str = "") -> ClientKeys | None:
        """Return the keys of a socket that connects to `role`; None for a plain one. Raises AuthenticationError."""
        folder = self._folder
        if folder is None:
            return None
        own = folder.find_own(("operator", "reader", "node"), self.key)
        return ClientKeys(folder, own, folder.find_server(role, name))

    def frame_keys(self, endpoints: Sequence[str]) -> list[ClientKeys | None]:
        """Return the keys for each endpoint of frames. Raises AuthenticationError."""
        if self._folder is None or not self.camera_keys:
            return [self.client_keys("camera") for _ in endpoints]
        if len(self.camera_keys) != len(endpoints):
            raise AuthenticationError(
                f"expected a name in transport.camera_keys for each of {len(endpoints)} frame endpoints, found"
                f" {', '.join(self.camera_keys)}"
            )
        return [self.client_keys("camera", name) for name in self.camera_keys]

    @property
    def _folder(self) -> KeyFolder | None:
        return None if self.keys is None else open_folder(self.keys.expanduser().absolute())


def is_local(endpoint: str) -> bool:
    """Return True if only this machine reaches a socket that binds `endpoint`."""
    scheme, _, rest = endpoint.partition("://")
    if scheme != "tcp":
        return True
    import ipaddress  # here, because it slows the start of a client

    host = rest.rpartition(":")[0]
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host in ("localhost", "lo")
    # an IPv4 address in IPv6 form is that of IPv4
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def explain_refusal(event: int, value: int, endpoint: str, keys: ClientKeys | None) -> str | None:
    """Return why a handshake failed, from an event of a connecting socket's monitor; None for other events."""
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and keys is not None:
        refuses = f"{endpoint} refuses the key {keys.own.key}"
        if value == REVOKED:
            return f"{refuses}: it was revoked there. Make a new one (sam3-node keys new) if it is still to connect"
        return (
            f"{refuses}: it is not in the folder `authorised` of {keys.server.name}, its role may not connect there, or"
            " has no connection left there"
        )
    no_key = f"{endpoint} expects a key, and this process has none: set transport.keys ({PREFIX}KEYS)"
    if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        if keys is None:
            return (
                f"{no_key}; or it takes no more connections, or another program than a node listens there, for it ended"
                " each of the last before its handshake"
            )
        return (
            f"{endpoint} does not have the key {keys.server}, which {keys.folder.path} names for it, or has no keys;"
            " correct the endpoint, copy the .pub file of the process that binds it, or set transport.keys there"
        )
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == _MISMATCH:
        if keys is None:
            return no_key
        return f"{endpoint} speaks plain text, and this process expects the key {keys.server}: set transport.keys there"
    return None


def _allow_longer_parts(socket: Socket) -> None:
    limit = socket.getsockopt(zmq.MAXMSGSIZE)
    assert isinstance(limit, int)
    socket.setsockopt(zmq.MAXMSGSIZE, limit + CURVE_BYTES)
