"""Encrypt and authenticate a process's sockets: the keys that each socket has and expects, and the key folder.

Sockets that bind are CURVE servers, sockets that connect are CURVE clients. A client expects the key of the node,
camera or robot at the other end, so no other process can take its place.

    KEYS/                   mode 0700
        NAME.secret         mode 0600: a key pair; it stays on the machine whose process uses it
        authorised/NAME.pub the public part: name, role, cameras; the same files on every machine
        revoked/NAME.pub    what was authorised before, so that a refused key can be named

Keys are Curve25519 pairs of CURVE (ZeroMQ RFC 26), written as Z85. The files are TOML. A running process reads the
folder again when it changes.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

import zmq

from ..addresses import is_loopback, split_host
from ..errors import AuthenticationError, TransportError
from ..files import (
    describe_exposure,
    make_private_dir,
    parse_toml,
    read_private,
    write_private,
    write_private_atomically,
)
from ..types import KEY_ROLES

if TYPE_CHECKING:
    from ..settings import TransportSettings  # a client has no pydantic

log = logging.getLogger(__name__)

Socket: TypeAlias = zmq.Socket[Any]

DOMAIN = b"sam3-node"
"""Domain of our sockets in questions of ZAP. libzmq asks nothing for a socket without one."""
CURVE_BYTES = 33
"""Bytes by which CURVE makes a message part longer on the wire."""
PREFIX = "SAM3_TRANSPORT__"
"""Beginning of the environment variables of the section `transport`."""
REFUSED = 400
"""Status code by which a handshake is refused (ZeroMQ RFC 27). libzmq passes on no text to the peer."""
REVOKED = 500
"""The same for a revoked key, whose owner learns so that it was revoked. libzmq passes on no third code."""
_MISMATCH = zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH

CLIENT_ROLES = frozenset({"node", "reader", "operator"})
"""Roles that may connect to a bound socket."""
ANY_CAMERA = "*"
"""Name in a key's `cameras` that stands for all names."""
MAX_KEYS = 1000
"""Keys that are read from a folder, and warnings of them that are logged."""
MAX_FILE_BYTES = 4096
"""Longest key file. A longer one is no key file."""
RESCAN_S = 1.0
"""Longest time between two scans of a folder. An edit in place does not change the folder's time."""
CLOCK_NS = 50_000_000
"""A folder's time is as coarse as the kernel's tick: two changes within this time may have the same."""
_NAME = r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}"  # a file name, which must not begin with a point
_Z85 = r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}"  # 32 bytes in the text form of ZeroMQ RFC 32

_MAKE_NEW = "make a new one: sam3-node keys new"


def find_endpoint(name: str, default: str) -> str:
    """Return the endpoint that the environment variable SAM3_TRANSPORT__`name` sets; `default` without one."""
    return os.environ.get(f"{PREFIX}{name}", "").strip() or default


class ServerKeys(NamedTuple):
    """Keys of a socket that binds."""

    folder: KeyFolder
    own: KeyPair

    def apply(self, socket: Socket) -> None:
        """Make the socket a CURVE server. It then accepts no peer without a handler of ZAP in its context."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.own.secret)
        # without a domain that is enforced, libzmq would admit every peer
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
        # the folder is read again when it changes, so a connection ends soon after its key was revoked
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
    def from_settings(cls, settings: TransportSettings) -> Self:
        """Return what the section `transport` says."""
        return cls(settings.keys, settings.key, settings.camera_keys, insecure=settings.insecure)

    @classmethod
    def from_environment(cls) -> Self:
        """Return what the environment variables of the section `transport` say."""
        # a client has no settings: the environment is its only configuration
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
        # with a folder of keys, every address is safe; a key must be there
        folder = self._folder
        if folder is not None:
            return ServerKeys(folder, folder.find_own((role,), self.key, self.camera))
        # without keys, everybody who reaches the address may use the socket
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
        # an operator may do most, so its key is chosen where several are here
        own = folder.find_own(("operator", "reader", "node"), self.key)
        return ClientKeys(folder, own, folder.find_server(role, name))

    def frame_keys(self, endpoints: Sequence[str]) -> list[ClientKeys | None]:
        """Return the keys for each endpoint of frames. Raises AuthenticationError."""
        # without names, each endpoint may have the key of the only authorised camera
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
        if self.keys is None:
            return None
        return open_folder(self.keys.expanduser().absolute())


def is_local(endpoint: str) -> bool:
    """Return True if only this machine reaches a socket that binds `endpoint`."""
    # ipc:// is a file of this machine, whose mode says who may use it
    host = split_host(endpoint)
    return not endpoint.startswith("tcp://") or host == "lo" or is_loopback(host)


def explain_refusal(event: int, value: int, endpoint: str, keys: ClientKeys | None) -> str | None:
    """Return why a handshake failed, from an event of a connecting socket's monitor; None for other events."""
    # the other end has refused our key, and says whether it was revoked
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH and keys is not None:
        refuses = f"{endpoint} refuses the key {keys.own.key}"
        if value == REVOKED:
            return f"{refuses}: it was revoked there. Make a new one (sam3-node keys new) if it is still to connect"
        return (
            f"{refuses}: it is not in the folder `authorised` of {keys.server.name}, its role may not connect there, or"
            " has no connection left there"
        )
    no_key = f"{endpoint} expects a key, and this process has none: set transport.keys ({PREFIX}KEYS)"
    # the other end has ended the handshake without a word: our key is expected, or theirs is another
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
    # one end has keys and the other has none
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == _MISMATCH:
        if keys is None:
            return no_key
        return f"{endpoint} speaks plain text, and this process expects the key {keys.server}: set transport.keys there"
    return None


def _allow_longer_parts(socket: Socket) -> None:
    limit = socket.getsockopt(zmq.MAXMSGSIZE)
    # a part is longer by the encryption, and a part of the full size must still pass
    assert isinstance(limit, int)
    socket.setsockopt(zmq.MAXMSGSIZE, limit + CURVE_BYTES)


class Key(NamedTuple):
    """A public key, and what it may do. `cameras` are the names that a camera may send; `*` stands for all."""

    name: str
    role: str
    public: str
    cameras: tuple[str, ...] = ()

    def may_send(self, camera: str) -> bool:
        """Return True if messages of `camera` may come from the owner of this key. Only cameras are bound to names."""
        return self.role != "camera" or ANY_CAMERA in self.cameras or camera in self.cameras

    def __str__(self) -> str:
        return f"{self.name} ({self.role})"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A key of this machine with its secret, which no text form contains."""

    key: Key
    secret: bytes = field(repr=False)


class _Scan(NamedTuple):
    stamp_ns: int
    until_s: float
    keys: Mapping[str, Key]


class KeyFolder:
    """The keys at `path`. All methods may be called from any thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # each folder is scanned by one thread at a time, and by none while the last scan is fresh
        self._lock = threading.Lock()
        self._scans: dict[str, _Scan] = {}
        self._warned: set[str] = set()

    def authorised(self) -> Mapping[str, Key]:
        """Return the authorised keys by their public key, as they are now.

        A folder that is absent or that other users may change authorises no key, and neither does a damaged file.
        """
        return self._read("authorised")

    def revoked(self) -> Mapping[str, Key]:
        """Return the revoked keys by their public key."""
        return self._read("revoked")

    def find_own(self, roles: Sequence[str], name: str = "", camera: str = "") -> KeyPair:
        """Return the key pair `name` of this machine; without a name, the only one of the first role that has one.

        For the role camera, a key must be allowed to send `camera`. A key for all cameras counts only if there is no
        other. Raises AuthenticationError if there is none, or several, or the file may be read by others.
        """
        # a name was given: this key or none
        if name:
            path = self.path / f"{_check_name(name)}.secret"
            if not path.exists() and (revoked := self._describe_revoked((), name)):
                raise AuthenticationError(f"expected the secret key {path}, found none{revoked}; {_MAKE_NEW}")
            pair = self._read_pair(path)
            if pair.key.role not in roles or not pair.key.may_send(camera or pair.key.name):
                raise AuthenticationError(
                    f"expected a key of role {' or '.join(roles)}{_for_camera(camera)}, found {pair.key}; correct"
                    " transport.key"
                )
            return pair
        # no name was given: the only key of the first role that has one
        pairs = [self._read_pair(path) for path in sorted(self.path.glob("*.secret"))]
        for role in roles:
            fitting = [pair for pair in pairs if pair.key.role == role]
            # the camera's own key counts before one for all cameras
            if role == "camera" and camera:
                fitting = [pair for pair in fitting if camera in pair.key.cameras] or [
                    pair for pair in fitting if pair.key.may_send(camera)
                ]
            if len(fitting) == 1:
                return fitting[0]
            if fitting:
                names = ", ".join(pair.key.name for pair in fitting)
                raise AuthenticationError(
                    f"expected one secret key of role {role} in {self.path}, found {names}; choose one with"
                    " transport.key"
                )
        raise AuthenticationError(
            f"expected a secret key of role {' or '.join(roles)}{_for_camera(camera)} in {self.path}, found"
            f" {', '.join(str(pair.key) for pair in pairs) or 'none'}{self._describe_revoked(roles)}; make one where"
            f" the command is installed: sam3-node keys new NAME --role {roles[0]}, and copy its .secret file here"
        )

    def find_server(self, role: str, name: str = "") -> Key:
        """Return the authorised key `name` of `role`, or the only one. Raises AuthenticationError if there is none."""
        authorised = self.authorised().values()
        keys = [key for key in authorised if key.role == role and name in ("", key.name)]
        if len(keys) == 1:
            return keys[0]
        # none or several: the advice differs
        wanted = f"the key {name}" if name else "one key"
        found = ", ".join(sorted(key.name for key in keys))
        if not keys:
            found = f"none{self._describe_revoked((role,), name)}"
            advice = "copy its .pub file here"
        elif role == "camera":
            advice = "name the camera of each endpoint in transport.camera_keys"
        else:
            advice = "keep one of them"
        raise AuthenticationError(
            f"expected {wanted} of role {role} in {self.path / 'authorised'}, found {found}; {advice}"
        )

    def create(self, name: str, role: str, cameras: Sequence[str] = ()) -> Key:
        """Make a key pair and authorise it. Raises AuthenticationError if the name is taken, OSError."""
        _check_name(name)
        # the folders are private before anything secret is in them
        for folder in (self.path, self.path / "authorised", self.path / "revoked"):
            make_private_dir(folder)
        secret_file = self.path / f"{name}.secret"
        public_file = self.path / "authorised" / f"{name}.pub"
        for path in (secret_file, public_file):
            if path.exists():
                raise AuthenticationError(
                    f"the key {name} exists already ({path}); choose another name, or remove the old one: sam3-node"
                    f" keys revoke {name}"
                )
        public, secret = zmq.curve_keypair()
        # a camera's key is for the camera of its own name, unless others are given
        if not cameras and role == "camera":
            cameras = (name,)
        key = Key(name, role, public.decode(), tuple(cameras))
        head = "# Secret key: keep it on the machine that uses it, mode 0600.\n"
        write_private(secret_file, f"{head}{_format(key)}secret = '{secret.decode()}'\n".encode())
        # the public part comes last: a key counts once it is there, and its secret is complete by then
        write_private_atomically(public_file, _format(key).encode())
        return key

    def revoke(self, name: str) -> Key:
        """Move a key from the authorised to the revoked ones, and remove its secret here.

        Raises AuthenticationError for a key that is not authorised, OSError.
        """
        # a damaged file has no key in `keys`, but may be revoked all the same
        public_file = self.path / "authorised" / f"{_check_name(name)}.pub"
        keys = {key.name: key for key in self.authorised().values()}
        if name not in keys and not public_file.exists():
            raise AuthenticationError(
                f"expected one of the authorised keys {', '.join(sorted(keys)) or '(none)'}, found {name!r}"
            )
        make_private_dir(self.path / "revoked")
        public_file.replace(_free_path(self.path / "revoked", name))
        (self.path / f"{name}.secret").unlink(missing_ok=True)
        return keys.get(name) or Key(name, "unknown", "")

    def own_names(self) -> frozenset[str]:
        """Return the names of the keys whose secret is here."""
        return frozenset(path.stem for path in self.path.glob("*.secret"))

    def _describe_revoked(self, roles: Sequence[str], name: str = "") -> str:
        """Return " (NAME was revoked)" for revoked keys of these roles (empty: of any), or of this name; else ""."""
        # a name that was revoked twice has a file NAME~1.pub
        names = {
            key.name.partition("~")[0] for key in self.revoked().values() if not roles or key.role in roles
        }
        if name:
            names &= {name}
        if not names:
            return ""
        verb = "was" if len(names) == 1 else "were"
        return f" ({', '.join(sorted(names))} {verb} revoked)"

    def _read(self, name: str) -> Mapping[str, Key]:
        """Return the keys of a folder. Scan it if its time is new or very recent, or if the last scan is old."""
        folder = self.path / name
        with self._lock:
            try:
                stamp_ns = folder.stat().st_mtime_ns
            except OSError:
                stamp_ns = 0
            # a scan counts while the folder has the same time, and that time is old enough to tell a later change
            scan = self._scans.get(name)
            is_new = scan is None or stamp_ns != scan.stamp_ns or abs(time.time_ns() - stamp_ns) < CLOCK_NS
            if scan is None or is_new or time.monotonic() >= scan.until_s:
                scan = _Scan(stamp_ns, time.monotonic() + RESCAN_S, self._scan(folder))
                self._scans[name] = scan
            return scan.keys

    def _scan(self, folder: Path) -> Mapping[str, Key]:
        """Read the keys of a folder, by their public key. Log what does not count, and raise nothing."""
        keys: dict[str, Key] = {}
        # who may write into the folder could authorise a key of their own
        try:
            for place in (self.path, folder):
                if reason := describe_exposure(place):
                    self._warn(f"no key in {folder} counts: {reason}")
                    return {}
            files = sorted(folder.glob("*.pub"))
        # no folder of authorised keys: nobody may connect. No folder of revoked keys is usual
        except OSError as error:
            if folder.name == "authorised":
                self._warn(f"no key is authorised: {folder}: {error.strerror}")
            return {}
        for path in files[:MAX_KEYS]:
            try:
                key = _read_key(path)[0]
            except AuthenticationError as error:
                self._warn(f"this key does not count: {error}")
            else:
                keys[key.public] = key
        return keys

    def _read_pair(self, path: Path) -> KeyPair:
        # a secret that others could read is no secret any more, whatever its mode is now
        key, fields = _read_key(path)
        mode = path.stat().st_mode & 0o777
        if mode & 0o077:
            raise AuthenticationError(
                f"{path} may be read by others (mode {mode:04o}); they may have the key: revoke it and make a new one,"
                f" or chmod 600 {path}"
            )
        secret = fields.get("secret")
        if not isinstance(secret, str) or not re.fullmatch(_Z85, secret):
            # neither message has any of the file's content
            raise AuthenticationError(f"{path}: expected a secret of 40 characters of Z85")
        if zmq.curve_public(secret.encode()).decode() != key.public:
            raise AuthenticationError(f"{path}: secret and public key are not of one pair")
        return KeyPair(key, secret.encode())

    def _warn(self, message: str) -> None:
        # each message once, and a bounded number of them: a damaged file is read again every second
        if message not in self._warned and len(self._warned) < MAX_KEYS:
            self._warned.add(message)
            log.warning("%s", message)


@functools.cache
def open_folder(path: Path) -> KeyFolder:
    """Return the folder at `path`; the same object for all sockets of this process."""
    return KeyFolder(path)


# a thread that does not exist after a fork may have held the lock of a folder
os.register_at_fork(after_in_child=open_folder.cache_clear)


def _read_key(path: Path) -> tuple[Key, dict[str, object]]:
    """Read a key file. Raises AuthenticationError, whose message has none of the file's content."""
    try:
        # read no more than a key file can have, whatever is there in its place
        content = read_private(path, MAX_FILE_BYTES + 1)
        fields: dict[str, object] = {}
        if len(content) <= MAX_FILE_BYTES:
            fields = parse_toml(content)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a key file"
        raise AuthenticationError(f"cannot read {path}: {reason}") from None
    role = fields.get("role")
    public = fields.get("public")
    cameras = fields.get("cameras", [])
    if (
        role not in KEY_ROLES
        or not (isinstance(public, str) and re.fullmatch(_Z85, public))
        or not (isinstance(cameras, list) and all(isinstance(camera, str) for camera in cameras))
    ):
        raise AuthenticationError(
            f"{path}: expected role (one of {', '.join(KEY_ROLES)}), public (40 characters of Z85) and cameras (names)"
        )
    return Key(path.stem, str(role), public, tuple(cameras)), fields


def _format(key: Key) -> str:
    cameras = ", ".join(f'"{camera}"' for camera in key.cameras)
    return f"role = \"{key.role}\"\npublic = '{key.public}'\ncameras = [{cameras}]\n"


def _free_path(folder: Path, name: str) -> Path:
    """Return a path for a revoked key: the name may have been used before."""
    first = folder / f"{name}.pub"
    later = (folder / f"{name}~{number}.pub" for number in range(1, MAX_KEYS))
    return next(path for path in (first, *later) if not os.path.lexists(path))


def _check_name(name: str) -> str:
    if not re.fullmatch(_NAME, name):
        raise AuthenticationError(
            f"expected a name of at most 64 letters, digits, _, - and ., found {name!r:.80}"
        )
    return name


def _for_camera(camera: str) -> str:
    return f" for the camera {camera}" if camera else ""
