"""A folder of keys of a whole deployment, what each machine of it has, and a server that expects them."""

import shutil
from contextlib import ExitStack
from pathlib import Path

from sam3_node.transport import Security
from sam3_node.transport.control_server import ControlServer
from sam3_node.transport.security import KeyFolder
from sam3_node.wire import Reply, Request
from tests.support.transport_peer import TCP


class Keys:
    """The administrator's folder, and a folder for each machine, which holds all public keys and some secrets."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        self.all = KeyFolder(folder / "all")
        for name, role in (
            ("node", "node"),
            ("robot", "robot"),
            ("watcher", "reader"),
            ("policy", "operator"),
        ):
            self.all.create(name, role)
        for camera in ("cam0", "cam1"):
            self.all.create(camera, "camera")

    def machine(self, machine: str, *secrets: str, **security: object) -> Security:
        """Create the folder of a machine with these secrets."""
        path = self.root / machine
        shutil.copytree(self.all.path / "authorised", path / "authorised")
        path.chmod(0o700)
        for name in secrets:
            shutil.copy2(self.all.path / f"{name}.secret", path)
        return Security(path, **security)  # type: ignore[arg-type]

    def stranger(self, machine: str, role: str) -> Security:
        """Create the folder of a machine with a secret key that no other machine knows, and all public keys."""
        security = self.machine(machine)
        KeyFolder(security.keys).create("stranger", role)
        return security


def revoke(security: Security, name: str) -> None:
    """Revoke a key on one machine."""
    KeyFolder(security.keys).revoke(name)


def echo(request: Request) -> Reply:
    """Answer a request with its operation."""
    return Reply(request.id, request.op)


def serve(stack: ExitStack, security: Security, endpoint: str = TCP) -> ControlServer:
    """Serve requests, of which readers may send two kinds, until the stack ends."""
    return stack.enter_context(ControlServer(endpoint, echo, security=security))
