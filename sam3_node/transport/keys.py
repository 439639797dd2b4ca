"""The folder of keys: who may connect to a deployment, and the secret keys of this machine.

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import zmq

from ..errors import AuthenticationError
from ..files import describe_exposure, make_private_dir, read_private, write_private, write_private_atomically
from ..types import KEY_ROLES

CLIENT_ROLES = frozenset({"node", "reader", "operator"})
"""Roles that may connect to a bound socket."""
ANY_CAMERA = "*"
MAX_KEYS = 1000
MAX_FILE_BYTES = 4096
RESCAN_S = 1.0
"""An edit in place does not change the folder's time, so its files are read again after this time in any case."""
CLOCK_NS = 50_000_000  # a folder's time is as coarse as the kernel's tick
_NAME = r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}"
_Z85 = r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}"

_MAKE_NEW = "make a new one: sam3-node keys new"

log = logging.getLogger(__name__)


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
        self._lock = threading.Lock()
        self._scans: dict[str, _Scan] = {}
        self._warned: set[str] = set()

    def authorised(self) -> Mapping[str, Key]:
        """Return the authorised keys by their public key, as they are now.

        Nobody is authorised by a folder that is absent or that other users may change, or by a damaged file.
        """
        return self._read("authorised")

    def revoked(self) -> Mapping[str, Key]:
        """Return the revoked keys by their public key."""
        return self._read("revoked")

    def find_own(self, roles: Sequence[str], name: str = "", camera: str = "") -> KeyPair:
        """Return the key pair `name` of this machine, or the only one of the first of `roles` that has one.

        Of the role camera, those that may send `camera` count, and keys for all cameras only if there is no other.
        Raises AuthenticationError if there is none, or several, or the file may be read by others.
        """
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
        pairs = [self._read_pair(path) for path in sorted(self.path.glob("*.secret"))]
        for role in roles:
            found = [pair for pair in pairs if pair.key.role == role]
            if role == "camera" and camera:
                found = [pair for pair in found if camera in pair.key.cameras] or [
                    pair for pair in found if pair.key.may_send(camera)
                ]
            if len(found) == 1:
                return found[0]
            if found:
                names = ", ".join(pair.key.name for pair in found)
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
        found = [
            key for key in self.authorised().values() if key.role == role and (not name or key.name == name)
        ]
        if len(found) == 1:
            return found[0]
        wanted = f"the key {name}" if name else "one key"
        raise AuthenticationError(
            f"expected {wanted} of role {role} in {self.path / 'authorised'}, found"
            f" {', '.join(sorted(key.name for key in found)) or 'none'}"
            f"{'' if found else self._describe_revoked((role,), name)}; "
            + (
                "name the camera of each endpoint in transport.camera_keys"
                if len(found) > 1 and role == "camera"
                else "keep one of them"
                if found
                else "copy its .pub file here"
            )
        )

    def create(self, name: str, role: str, cameras: Sequence[str] = ()) -> Key:
        """Make a key pair and authorise it. Raises AuthenticationError if the name is taken, OSError."""
        _check_name(name)
        for folder in (self.path, self.path / "authorised", self.path / "revoked"):
            make_private_dir(folder)
        secret_file, public_file = self.path / f"{name}.secret", self.path / "authorised" / f"{name}.pub"
        for path in (secret_file, public_file):
            if path.exists():
                raise AuthenticationError(
                    f"the key {name} exists already ({path}); choose another name, or remove the old one: sam3-node"
                    f" keys revoke {name}"
                )
        public, secret = zmq.curve_keypair()
        key = Key(name, role, public.decode(), tuple(cameras) or ((name,) if role == "camera" else ()))
        head = "# Secret key: keep it on the machine that uses it, mode 0600.\n"
        write_private(secret_file, f"{head}{_format(key)}secret = '{secret.decode()}'\n".encode())
        write_private_atomically(public_file, _format(key).encode())
        return key

    def revoke(self, name: str) -> Key:
        """Move a key from the authorised to the revoked ones, and remove its secret here.

        Raises AuthenticationError for a key that is not authorised, OSError.
        """
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
        names = {
            key.name.partition("~")[0] for key in self.revoked().values() if not roles or key.role in roles
        }
        found = sorted(names & {name} if name else names)
        return f" ({', '.join(found)} {'was' if len(found) == 1 else 'were'} revoked)" if found else ""

    def _read(self, name: str) -> Mapping[str, Key]:
        """Return the keys in a folder, which is scanned if its time is new or of just now, or the last scan is old."""
        folder = self.path / name
        with self._lock:
            try:
                stamp_ns = folder.stat().st_mtime_ns
            except OSError:
                stamp_ns = 0
            scan = self._scans.get(name)
            is_new = scan is None or stamp_ns != scan.stamp_ns or abs(time.time_ns() - stamp_ns) < CLOCK_NS
            if scan is None or is_new or time.monotonic() >= scan.until_s:
                scan = _Scan(stamp_ns, time.monotonic() + RESCAN_S, self._scan(folder))
                self._scans[name] = scan
            return scan.keys

    def _scan(self, folder: Path) -> Mapping[str, Key]:
        keys: dict[str, Key] = {}
        try:
            for place in (self.path, folder):
                if reason := describe_exposure(place):
                    self._warn(f"no key in {folder} counts: {reason}")
                    return {}
            files = sorted(folder.glob("*.pub"))
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
        key, fields = _read_key(path)
        mode = path.stat().st_mode & 0o777
        if mode & 0o077:
            raise AuthenticationError(
                f"{path} may be read by others (mode {mode:04o}); they may have the key: revoke it and make a new one,"
                f" or chmod 600 {path}"
            )
        secret = fields.get("secret")
        if not isinstance(secret, str) or not re.fullmatch(_Z85, secret):
            raise AuthenticationError(f"{path}: expected a secret of 40 characters of Z85")
        if zmq.curve_public(secret.encode()).decode() != key.public:
            raise AuthenticationError(f"{path}: secret and public key are not of one pair")
        return KeyPair(key, secret.encode())

    def _warn(self, message: str) -> None:
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
        content = read_private(path, MAX_FILE_BYTES + 1)
        import tomllib  # here, because it slows the start of a client

        fields = tomllib.loads(content.decode()) if len(content) <= MAX_FILE_BYTES else {}
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a key file"
        raise AuthenticationError(f"cannot read {path}: {reason}") from None
    role, public, cameras = fields.get("role"), fields.get("public"), fields.get("cameras", [])
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
    numbers = (f"{name}.pub" if not number else f"{name}~{number}.pub" for number in range(MAX_KEYS))
    return next(folder / file for file in numbers if not os.path.lexists(folder / file))


def _check_name(name: str) -> str:
    if not re.fullmatch(_NAME, name):
        raise AuthenticationError(
            f"expected a name of at most 64 letters, digits, _, - and ., found {name!r:.80}"
        )
    return name


def _for_camera(camera: str) -> str:
    return f" for the camera {camera}" if camera else ""
