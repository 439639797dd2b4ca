"""`sam3-node keys`: make, list and revoke the keys of a deployment."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import AuthenticationError, OutputError
from ..settings import Settings
from ..types import KEY_ROLES
from .commands import AddCommand
from .parser import add_command_group
from .progress import printable

DEFAULT_FOLDER = Path("~/.config/sam3_node/keys")


def add_keys_commands(parsers: Any, add: AddCommand) -> None:
    """Add the commands of keys."""
    group = add_command_group(
        parsers, "keys", "make, list and revoke the keys of nodes, cameras, robots, readers and operators"
    )
    new = add(group, "new", keys_new, "make a key pair and authorise it")
    new.add_argument("name", metavar="NAME", help="name of the key, such as cam0 or policy")
    new.add_argument(
        "--role", choices=KEY_ROLES, help="what its owner may do; default: NAME, if it is one of the roles"
    )
    new.add_argument(
        "--camera",
        action="append",
        default=[],
        metavar="CAMERA",
        help="with --role camera: camera.name that it may send, * for all; may be repeated [NAME]",
    )
    add(group, "list", keys_list, "list the keys: name, role, cameras, and whether the secret is here")
    revoke = add(group, "revoke", keys_revoke, "withdraw a key; running processes cut off its owner")
    revoke.add_argument("name", metavar="NAME", help="name of the key")


def keys_new(args: Namespace, settings: Settings) -> None:
    """Make a key pair. Raises AuthenticationError for a name that is taken, OutputError."""
    role = args.role or args.name
    if role not in KEY_ROLES:
        raise AuthenticationError(f"expected --role, one of {', '.join(KEY_ROLES)}, found none")
    if args.camera and role != "camera":
        raise AuthenticationError(f"expected --camera with --role camera only, found role {role}")
    folder = _open(settings)
    with _explain_output(folder.path):
        key = folder.create(args.name, role, args.camera)
    print(f"key {key}: its owner needs {folder.path / key.name}.secret, and nobody else may have it")
    print(f"other machines need {folder.path / 'authorised' / key.name}.pub, in their folder `authorised`")
    if settings.transport.keys is None:
        print(f'use the keys with: [transport] keys = "{folder.path}"')


def keys_list(args: Namespace, settings: Settings) -> None:
    """Print one line for each key."""
    folder = _open(settings)
    own, authorised, revoked = folder.own_names(), folder.authorised(), folder.revoked()
    print(f"{'name':20} {'role':9} {'cameras':20} {'public key':41} state")
    for keys, state in ((authorised, "authorised"), (revoked, "revoked")):
        for key in sorted(keys.values(), key=lambda key: key.name):
            has_secret = ", secret here" if key.name in own and state == "authorised" else ""
            cameras = ",".join(key.cameras)
            print(printable(f"{key.name:20} {key.role:9} {cameras:20} {key.public:41} {state}{has_secret}"))


def keys_revoke(args: Namespace, settings: Settings) -> None:
    """Withdraw a key. Raises AuthenticationError for a key that is not authorised, OutputError."""
    folder = _open(settings)
    with _explain_output(folder.path):
        key = folder.revoke(args.name)
    print(f"key {key.name} is revoked on this machine; remove authorised/{key.name}.pub on the others, too")


def _open(settings: Settings) -> Any:
    from ..transport.security import KeyFolder

    return KeyFolder((settings.transport.keys or DEFAULT_FOLDER).expanduser().absolute())


@contextmanager
def _explain_output(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot change the keys in {path}: {error.strerror or error}") from error
